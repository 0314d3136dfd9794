//! The node: containerd, a kubelet, kube-proxy and a pod network.

use std::net::Ipv4Addr;
use std::path::{Path, PathBuf};
use std::process::Command;

use culvert_tests::openvpn::Namespace;
use culvert_tests::process::outcome;
use culvert_tests::{Program, eventually};
use rustix::process::{Pid, Signal, kill_process};

use super::super::control_plane::Credentials;
use super::super::{PATIENCE, control_plane};
use super::machine;
use super::settings::{self, FIRST, PODS, PodNetwork, SECOND};

/// Name of the node.
pub(crate) const NODE: &str = "node-1";
/// Internal address of the node.
pub(crate) const NODE_ADDRESS: Ipv4Addr = Ipv4Addr::new(10, 250, 0, 10);

/// The node. Its programs run in the node's network.
pub(crate) struct Worker {
    network: Namespace,
    programs: PathBuf,
    /// Files that stay when the node restarts.
    dir: PathBuf,
    /// Files that end when the node restarts.
    run: PathBuf,
    kubeconfig: PathBuf,
    proxy_kubeconfig: PathBuf,
    running: Vec<Program>,
}

impl Worker {
    /// Writes the node's files and sets up its network.
    pub(super) fn create(
        network: &Namespace,
        programs: &Path,
        dir: &Path,
        files: &Credentials,
    ) -> Self {
        machine::isolate(dir);
        network.address(NODE_ADDRESS);
        network.forward();
        network.within(|| {
            // A Service may forward a pod's packets to a pod on the same bridge.
            let setting = "/proc/sys/net/bridge/bridge-nf-call-iptables";
            if Path::new(setting).exists() {
                std::fs::write(setting, "1").expect("a kernel setting");
            }
        });
        network.iptables(&format!(
            "-w -t nat -A POSTROUTING -s {PODS} -o seed -j MASQUERADE"
        ));
        // Answers to pods have passed the translation when the filter sees them.
        network.iptables("-w -I FORWARD -m conntrack --ctstate RELATED,ESTABLISHED -j ACCEPT");

        let serving = files
            .authority
            .server("kubelet", &[&NODE_ADDRESS.to_string(), NODE]);
        let kubeconfig = |file: &str, user: &str, group| {
            let pair = files.authority.user(file, user, group);
            control_plane::kubeconfig(dir, file, &files.authority, &pair)
        };
        let user = format!("system:node:{NODE}");
        let worker = Self {
            network: network.clone(),
            programs: programs.to_owned(),
            dir: dir.join("node"),
            run: dir.join("node-run"),
            kubeconfig: kubeconfig("node", &user, Some("system:nodes")),
            proxy_kubeconfig: kubeconfig("kube-proxy", "system:kube-proxy", None),
            running: Vec::new(),
        };
        std::fs::create_dir_all(worker.dir.join("cni")).expect("a folder");
        let write = |name: &str, text: &str| {
            std::fs::write(worker.dir.join(name), text).expect("a file");
        };
        let (dir, run) = (&worker.dir, &worker.run);
        write("containerd.toml", &settings::containerd(dir, run));
        write("cni/pods.conflist", &settings::pod_network(run, FIRST));
        let authority = &files.authority.cert;
        let kubelet = settings::kubelet(dir, run, authority, &serving);
        write("kubelet.yaml", &kubelet);
        write("resolv.conf", "nameserver 127.0.0.1\n");
        worker
    }

    /// Starts the programs of the node, as at the start of a machine.
    pub(crate) async fn power_on(&mut self) {
        std::fs::create_dir_all(&self.run).expect("a folder");
        let config = format!("--config={}", self.dir.join("containerd.toml").display());
        self.start(
            "/usr/bin/containerd".as_ref(),
            &[config, "--log-level=warn".to_owned()],
        );
        eventually("containerd answers", PATIENCE, async || {
            self.ctr(&["version"])
        })
        .await;
        self.start_kubelet();
        self.start(
            &self.programs.join("kube-proxy"),
            &[
                format!("--kubeconfig={}", self.proxy_kubeconfig.display()),
                format!("--hostname-override={NODE}"),
                "--proxy-mode=iptables".to_owned(),
                "--cluster-cidr=10.244.0.0/16".to_owned(),
                // This setting has no namespace.
                "--conntrack-max-per-core=0".to_owned(),
            ],
        );
        self.network.ip("link set seed up");
        // The route went with the link.
        let routes = self.network.ip("route");
        if !routes.contains("default") {
            self.network
                .ip(&format!("route add default via {}", super::super::SEED));
        }
    }

    fn start_kubelet(&mut self) {
        let args = [
            format!("--config={}", self.dir.join("kubelet.yaml").display()),
            format!("--kubeconfig={}", self.kubeconfig.display()),
            format!("--hostname-override={NODE}"),
            format!("--node-ip={NODE_ADDRESS}"),
            format!("--root-dir={}", self.dir.join("kubelet").display()),
            format!("--cert-dir={}", self.dir.join("pki").display()),
        ];
        self.start(&self.programs.join("kubelet"), &args);
    }

    fn start(&mut self, program: &Path, args: &[String]) {
        let program = self.network.spawn(program, args);
        self.running.push(program);
    }

    /// Ends all programs and containers of the node at once. The other side of their connections gets no packet.
    pub(crate) fn power_off(&mut self) {
        self.network.ip("link set seed down");
        self.running.clear();
        for pid in machine::contained().into_iter().chain(shims()) {
            let pid = i32::try_from(pid).ok().and_then(Pid::from_raw);
            // A process may have ended with another.
            pid.map(|pid| kill_process(pid, Signal::KILL).ok());
        }
        let mounts = std::fs::read_to_string("/proc/self/mounts").expect("mounts");
        let networks = mounts.lines().filter_map(|line| line.split(' ').nth(1));
        let run = self.run.display().to_string();
        for mount in networks.filter(|it| it.starts_with("/run/netns/cni-") || it.starts_with(&run))
        {
            let umount = outcome(Command::new("umount").args(["--lazy", mount]));
            umount.unwrap_or_else(|why| panic!("umount {mount}: {why}"));
        }
        std::fs::remove_dir_all(&self.run).expect("removing the state");
    }

    /// Restarts the kubelet. It then requests new tokens for all pods.
    pub(crate) async fn restart_kubelet(&mut self) {
        // The kubelet is the second program.
        self.running.remove(1).kill();
        self.start_kubelet();
        let kubelet = self.running.pop().expect("the kubelet");
        self.running.insert(1, kubelet);
    }

    /// Replaces the pod network, as a change of the CNI plugin does. Running pods keep their addresses.
    pub(crate) fn replace_pod_network(&self) -> PodNetwork {
        let file = self.dir.join("cni/pods.conflist");
        // containerd 1.6 does not notice a renamed file.
        std::fs::write(file, settings::pod_network(&self.run, SECOND)).expect("a file");
        SECOND
    }

    /// Imports an archive of an image.
    pub(crate) fn import(&self, archive: &Path) {
        let archive = archive.display().to_string();
        let imported = self.ctr(&["images", "import", &archive]);
        imported.unwrap_or_else(|why| panic!("ctr images import {archive}: {why}"));
    }

    fn ctr(&self, words: &[&str]) -> Result<String, String> {
        let mut command = Command::new("ctr");
        command
            .arg("--address")
            .arg(self.run.join("containerd.sock"));
        outcome(command.args(["--namespace", "k8s.io"]).args(words))
    }

    /// Returns the programs with their names.
    pub(super) fn programs(&self) -> impl Iterator<Item = (&str, &Program)> {
        ["containerd", "kubelet", "kube-proxy"]
            .into_iter()
            .zip(&self.running)
    }
}

/// Returns the ids of containerd's shims. Only processes of this test are visible.
fn shims() -> Vec<u32> {
    let entries = std::fs::read_dir("/proc").expect("/proc").flatten();
    let pids = entries.filter_map(|entry| entry.file_name().to_str()?.parse::<u32>().ok());
    let is_shim = |pid: &u32| {
        let name = std::fs::read_to_string(format!("/proc/{pid}/comm"));
        name.is_ok_and(|name| name.starts_with("containerd-shim"))
    };
    pids.filter(is_shim).collect()
}
