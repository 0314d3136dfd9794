//! The work of the operator who carries out a plan: the commands, and what the plan leaves to people.

use std::os::unix::fs::{PermissionsExt as _, symlink};
use std::process::Stdio;
use std::time::Duration;

use culvert_tests::eventually;
use culvert_tests::process::ours;
use tokio::process::Command;
use tokio::time::timeout;

use super::super::control_plane::kubeconfig_for;
use super::{Exposed, NODE_TUNNEL, Plan, Step, Tenant};
use crate::lab::load::Load;
use crate::lab::{PATIENCE, SEED, control_plane};

/// Longest time for one command.
const LIMIT: Duration = Duration::from_secs(400);

/// Calls of the load before and after the commands of a step.
const CALLS: usize = 4;

impl Tenant {
    /// Carries out the plan of a change. `check` is called after each step.
    pub(crate) async fn migrate(
        &mut self,
        from: &str,
        to: &str,
        mut check: impl AsyncFnMut(&Self, &Step),
    ) {
        let plan = self.plan(from, to).await;
        for step in &plan.steps {
            println!("{from} to {to}: {}", step.title);
            self.take(step).await;
            check(self, step).await;
        }
        self.has_no_saved_objects();
    }

    /// Checks that no saved object is left: a later run of a plan would put an old one back.
    pub(super) fn has_no_saved_objects(&self) {
        for entry in std::fs::read_dir(&self.folder).expect("the folder") {
            let name = entry.expect("an entry").file_name();
            let name = name.to_string_lossy();
            assert!(!name.contains("-before-"), "{name} is left");
        }
    }

    /// Returns the plan of a change, and writes the cluster file of its end.
    pub(super) async fn plan(&mut self, from: &str, to: &str) -> Plan {
        if !["konnectivity", "openvpn"].contains(&to) {
            self.exposed = Exposed {
                // The operator learns the new name and address during the migration.
                strategy: to.to_owned(),
                ..self.exposed.clone()
            };
            if to != "LoadBalancer" {
                self.exposed = Exposed::by(to);
            }
            self.write_cluster_file();
        }
        let print = format!("culvert render cluster.yaml --diff-from={from} --to={to}");
        Plan::parse(&self.shell(&print).await.unwrap())
    }

    /// Carries out a step, under load if the step restarts nothing.
    pub(super) async fn take(&mut self, step: &Step) {
        let load = if step.restarts_nothing() && self.has_a_tunnel().await {
            let load = Load::start(&self.user);
            load.more(CALLS).await;
            Some(load)
        } else {
            None
        };
        self.carry_out(&step.title, &step.commands).await;
        if let Some(load) = load {
            load.more(CALLS).await;
            load.has_not_failed().await;
        }
    }

    /// Runs commands, and does the work by hand between them.
    pub(super) async fn carry_out(&mut self, title: &str, commands: &[String]) {
        let mut last = "";
        for command in commands {
            if let Some(work) = command.strip_prefix("# ") {
                self.by_hand(work, last).await;
                continue;
            }
            last = command;
            self.give_addresses().await;
            let output = self.shell(command).await;
            let output = output.unwrap_or_else(|why| panic!("{title}: {why}"));
            if command.contains("--part=certificates ") {
                self.issue_certificates().await;
            }
            if command.contains("get service front-loadbalancer") {
                assert!(output.contains(super::BALANCER), "{output}");
                self.exposed = Exposed::by("LoadBalancer");
                self.write_cluster_file();
            }
        }
    }

    /// Does what a comment of a plan asks for. `last` is the last command.
    async fn by_hand(&mut self, work: &str, last: &str) {
        if work == "repeat the command until it lists no internal-client" {
            let status = self.shell(last).await.unwrap();
            assert!(!status.contains("internal-client"), "{status}");
        } else if let Some(tunnel) = work.strip_prefix("repeat the command until ") {
            let tunnel = tunnel.trim_end_matches(" is healthy");
            let what = format!("{tunnel} is healthy");
            eventually(&what, PATIENCE, async || {
                let status = self.shell(last).await?;
                let mut lines = status.lines();
                let is_healthy = lines.any(|line| {
                    let mut words = line.split_whitespace();
                    words.next() == Some(tunnel) && words.next() == Some("healthy")
                });
                is_healthy.then_some(()).ok_or(status)
            })
            .await;
        } else if work == "write USER again, with the new address" {
            self.write_user();
            self.answers().await;
        } else if work == "restart each rollout" {
            let url = self.exposed.url();
            let worker = self.worker.as_mut().expect("a node");
            worker.connect_to(&url, &self.authorities.cluster);
        } else {
            // Secrets are created whenever the certificates are issued. The calls after each step include logs and exec. No
            // stock program has a sidecar.
            let known = [
                "create the Secrets of the requests that do not exist; keep the others",
                "issue a certificate for each request, and replace its Secret. Without KKP, also issue the certificate of \
                 kube-apiserver for the new name and address; KKP issues it (Secret apiserver-tls) after the change of its \
                 object",
                "check that kubectl logs and exec work",
                "move metrics-server into the user cluster, and remove openvpn-client and dnat-controller from all other \
                 Deployments",
                "the door needs neither name nor address",
                "a new pod of openvpn-server begins with OpenVPN again: repeat this step then",
                "the registry that KKP uses must have our images under the stock names (docs/install.md); otherwise KKP \
                 returns to the stock programs",
            ];
            assert!(known.contains(&work), "unknown work: {work}");
        }
    }

    /// Runs a command of a shell in the folder of the operator, and returns its output.
    ///
    /// # Errors
    /// Returns the output if the command fails.
    pub(crate) async fn shell(&self, command: &str) -> Result<String, String> {
        let bin = self.folder.join("bin");
        let path = std::env::var("PATH").unwrap_or_default();
        let run = Command::new("bash")
            .args(["-euo", "pipefail", "-c", command])
            .current_dir(&self.folder)
            .env("PATH", format!("{}:{path}", bin.display()))
            .env("HOME", &self.folder)
            .stdin(Stdio::null())
            .kill_on_drop(true)
            .output();
        let Ok(output) = timeout(LIMIT, run).await else {
            return Err(format!("{command}: no end within {LIMIT:?}"));
        };
        let output = output.expect("bash");
        let text = |bytes: &[u8]| String::from_utf8_lossy(bytes).into_owned();
        match output.status.success() {
            true => Ok(text(&output.stdout)),
            false => Err(format!(
                "{command}: {}\n{}{}",
                output.status,
                text(&output.stdout),
                text(&output.stderr)
            )),
        }
    }

    /// Creates the programs and the kubeconfig of the operator.
    pub(super) fn write_commands(&self) {
        let bin = self.folder.join("bin");
        std::fs::create_dir_all(&bin).expect("a folder");
        symlink(&self.seed.program, bin.join("kubectl")).expect("a link");
        symlink(&self.seed.kubeconfig, self.folder.join("SEED")).expect("a link");
        // The node tunnel of the pods cannot create its interface if the kernel has no dummy interfaces. Then the
        // address is on another interface, and the two arguments are left out.
        let culvert = ours("culvert").display().to_string();
        let filter = match has_dummy() {
            true => "",
            false => " | sed -e '/^ *- --if=/d' -e '/^ *- --addr=/d'",
        };
        let script = format!("#!/bin/bash\nset -o pipefail\n{culvert} \"$@\"{filter}\n");
        let path = bin.join("culvert");
        std::fs::write(&path, script).expect("a script");
        let mode = std::fs::Permissions::from_mode(0o755);
        std::fs::set_permissions(path, mode).expect("a script");
    }

    pub(super) fn write_cluster_file(&self) {
        std::fs::write(self.folder.join("cluster.yaml"), self.exposed.file()).expect("a file");
    }

    /// Writes the kubeconfig of the user cluster's administrator.
    pub(super) fn write_user(&self) {
        let path = &self.user.kubeconfig;
        let authority = &self.authorities.cluster;
        kubeconfig_for(
            path,
            &self.exposed.url(),
            authority,
            &self.authorities.admin,
        );
    }
}

/// Returns the arguments of kube-apiserver that do not depend on the tunnel.
pub(super) fn apiserver() -> Vec<String> {
    let etcd = format!("--etcd-servers=http://{SEED}:{}", control_plane::ETCD_PORT);
    let fixed = [
        "--etcd-prefix=/tenant",
        "--bind-address=0.0.0.0",
        "--cert-dir=/tmp",
        "--client-ca-file=/files/ca.crt",
        "--tls-cert-file=/serving/tls.crt",
        "--tls-private-key-file=/serving/tls.key",
        "--kubelet-certificate-authority=/files/ca.crt",
        "--kubelet-client-certificate=/files/kubelet-client.crt",
        "--kubelet-client-key=/files/kubelet-client.key",
        "--service-account-key-file=/files/tokens.pub",
        "--service-account-signing-key-file=/files/tokens.key",
        "--authorization-mode=Node,RBAC",
        "--allow-privileged=true",
        "--requestheader-client-ca-file=/files/front-proxy-ca.crt",
        "--requestheader-allowed-names=front-proxy",
        "--requestheader-username-headers=X-Remote-User",
        "--requestheader-group-headers=X-Remote-Group",
        "--requestheader-extra-headers-prefix=X-Remote-Extra-",
        "--proxy-client-cert-file=/files/front-proxy.crt",
        "--proxy-client-key-file=/files/front-proxy.key",
        "--enable-aggregator-routing=true",
    ];
    std::iter::once(etcd)
        .chain(fixed.map(str::to_owned))
        .collect()
}

/// Returns true if the kernel has dummy interfaces.
fn has_dummy() -> bool {
    let made = culvert_tests::namespace::ip("link add probe type dummy");
    let has = made.is_ok_and(|_| culvert_tests::namespace::ip("link del probe").is_ok());
    if !has {
        println!(
            "no dummy interfaces in this kernel: {NODE_TUNNEL} is on the loopback interface of the node"
        );
    }
    has
}
