//! A node: containerd, a kubelet, kube-proxy and a pod network.

use std::net::Ipv4Addr;
use std::path::{Path, PathBuf};
use std::process::Command;

use culvert_kit::pki::Pair;
use culvert_tests::openvpn::Namespace;
use culvert_tests::process::outcome;
use culvert_tests::{Program, eventually};
use rustix::process::{Pid, Signal, kill_process};

use super::super::control_plane::kubeconfig_for;
use super::super::pki::Authority;
use super::super::{PATIENCE, SEED};
use super::machine;
use super::settings::{self, FIRST, OVERLAY, PODS, PodNetwork, SECOND, TENANT, TENANT_PODS};

/// Name of the node.
pub(crate) const NODE: &str = "node-1";
/// Internal address of the node.
pub(crate) const NODE_ADDRESS: Ipv4Addr = Ipv4Addr::new(10, 250, 0, 10);

/// Name, addresses and networks of a node.
#[derive(Debug, Clone, Copy)]
pub(crate) struct Site {
    /// Name of the node.
    pub(crate) name: &'static str,
    /// Internal address of the node.
    pub(crate) address: Ipv4Addr,
    /// The next hop of the node's default route.
    pub(crate) gateway: Ipv4Addr,
    /// Network of all pods of the cluster.
    pods: &'static str,
    /// Pod network of the node.
    pub(super) network: PodNetwork,
}

/// The node of the seed.
pub(super) const SEED_NODE: Site = Site {
    name: NODE,
    address: NODE_ADDRESS,
    gateway: SEED,
    pods: PODS,
    network: FIRST,
};

/// The second node of the seed.
pub(super) const SECOND_NODE: Site = Site {
    name: "node-2",
    address: Ipv4Addr::new(10, 250, 0, 20),
    gateway: Ipv4Addr::new(192, 168, 79, 1),
    pods: PODS,
    network: OVERLAY,
};

/// The node of the user cluster.
pub(crate) const TENANT_NODE: Site = Site {
    name: "tenant-1",
    address: Ipv4Addr::new(10, 251, 0, 10),
    gateway: Ipv4Addr::new(192, 168, 78, 1),
    pods: TENANT_PODS,
    network: TENANT,
};

/// A node. Its programs run in the node's network.
pub(crate) struct Worker {
    pub(crate) network: Namespace,
    site: Site,
    programs: PathBuf,
    /// Files that stay when the node restarts.
    dir: PathBuf,
    /// Files that end when the node restarts.
    run: PathBuf,
    kubelet: Identity,
    proxy: Identity,
    running: Vec<Program>,
}

/// A user of the cluster's API, and the kubeconfig of that user.
struct Identity {
    pair: Pair,
    kubeconfig: PathBuf,
}

impl Worker {
    /// Writes the node's files and sets up its network. `url` is that of the API server.
    pub(crate) fn create(
        network: &Namespace,
        programs: &Path,
        dir: &Path,
        authority: &Authority,
        url: &str,
        site: Site,
    ) -> Self {
        network.address(site.address);
        network.forward();
        network.within(|| {
            // A Service may forward a pod's packets to a pod on the same bridge.
            let setting = "/proc/sys/net/bridge/bridge-nf-call-iptables";
            if Path::new(setting).exists() {
                std::fs::write(setting, "1").expect("a kernel setting");
            }
        });
        network.iptables(&format!(
            "-w -t nat -A POSTROUTING -s {} -o seed -j MASQUERADE",
            site.pods
        ));
        // Answers to pods have passed the translation when the filter sees them.
        network.iptables("-w -I FORWARD -m conntrack --ctstate RELATED,ESTABLISHED -j ACCEPT");

        // The folder of the authority has the files of all nodes, which running programs read again.
        let file = |file: &str| format!("{}-{file}", site.name);
        let address = site.address.to_string();
        let serving = authority.server(&file("kubelet"), &[&address, site.name]);
        let identity = |name: &str, user: &str, group| Identity {
            pair: authority.user(&file(name), user, group),
            kubeconfig: dir.join(format!("{name}.kubeconfig")),
        };
        let user = format!("system:node:{}", site.name);
        let worker = Self {
            network: network.clone(),
            site,
            programs: programs.to_owned(),
            dir: dir.join("node"),
            run: dir.join("node-run"),
            kubelet: identity("node", &user, Some("system:nodes")),
            proxy: identity("kube-proxy", "system:kube-proxy", None),
            running: Vec::new(),
        };
        worker.write_kubeconfigs(url, authority);
        std::fs::create_dir_all(worker.dir.join("cni")).expect("a folder");
        let write = |name: &str, text: &str| {
            std::fs::write(worker.dir.join(name), text).expect("a file");
        };
        let (dir, run) = (&worker.dir, &worker.run);
        write("containerd.toml", &settings::containerd(dir, run));
        write(
            "cni/pods.conflist",
            &settings::pod_network(run, site.network),
        );
        let kubelet = settings::kubelet(dir, run, &authority.cert, &serving);
        write("kubelet.yaml", &kubelet);
        write("resolv.conf", &format!("nameserver {SEED}\n"));
        worker
    }

    fn write_kubeconfigs(&self, url: &str, authority: &Authority) {
        for Identity { pair, kubeconfig } in [&self.kubelet, &self.proxy] {
            kubeconfig_for(kubeconfig, url, authority, pair);
        }
    }

    /// Gives the kubelet and kube-proxy another address of the API server, as a new node would have it.
    pub(crate) fn connect_to(&mut self, url: &str, authority: &Authority) {
        self.write_kubeconfigs(url, authority);
        for program in self.running.drain(1..) {
            program.kill();
        }
        self.start_kubelet();
        self.start_proxy();
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
        self.start_proxy();
        self.network.ip("link set seed up");
        // The route went with the link.
        let routes = self.network.ip("route");
        if !routes.contains("default") {
            self.network
                .ip(&format!("route add default via {}", self.site.gateway));
        }
    }

    fn start_kubelet(&mut self) {
        let args = [
            format!("--config={}", self.dir.join("kubelet.yaml").display()),
            format!("--kubeconfig={}", self.kubelet.kubeconfig.display()),
            format!("--hostname-override={}", self.site.name),
            format!("--node-ip={}", self.site.address),
            format!("--root-dir={}", self.dir.join("kubelet").display()),
            format!("--cert-dir={}", self.dir.join("pki").display()),
        ];
        self.start(&self.programs.join("kubelet"), &args);
    }

    /// Ends kube-proxy and removes its rules, so that no Service has an address on the node.
    pub(crate) async fn stop_proxy(&mut self) {
        // kube-proxy is the last program.
        self.running.pop().expect("kube-proxy").kill();
        let program = self.programs.join("kube-proxy").display().to_string();
        let cleaned = self.network.run(&program, "--cleanup").await;
        cleaned.unwrap_or_else(|why| panic!("kube-proxy --cleanup: {why}"));
    }

    /// Starts kube-proxy.
    pub(crate) fn start_proxy(&mut self) {
        let args = [
            format!("--kubeconfig={}", self.proxy.kubeconfig.display()),
            format!("--hostname-override={}", self.site.name),
            "--proxy-mode=iptables".to_owned(),
            format!("--cluster-cidr={}", self.site.pods),
            // This setting has no namespace.
            "--conntrack-max-per-core=0".to_owned(),
        ];
        self.start(&self.programs.join("kube-proxy"), &args);
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
        // The kernel removes the networks of the old pods later. Without the bridges, they cannot answer for new pods,
        // which have the same addresses.
        let bridges = self.network.ip("-o link show type bridge");
        for name in bridges.lines().filter_map(|it| it.split(": ").nth(1)) {
            self.network.ip(&format!("link delete {name}"));
        }
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
    pub(crate) fn programs(&self) -> impl Iterator<Item = (&str, &Program)> {
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
