//! A cluster on this machine: the control plane in the test's own network, and a node in a namespace.
//!
//! ```text
//! seed (the test's own network)                     node
//! etcd, kube-apiserver, server --192.168.77.0/24-- agent, far side
//! ```
//! The node reaches the address of the seed. Packets from the seed to the addresses of the node, of pods and of
//! services are dropped, so that only the tunnel connects them.

pub(crate) mod cluster;
pub(crate) mod far_side;
pub(crate) mod kubectl;
pub(crate) mod load;
pub(crate) mod nodes;
pub(crate) mod pki;
pub(crate) mod tenant;

mod control_plane;
mod narrow;
mod rotation;
mod tunnel;

use std::net::{Ipv4Addr, SocketAddrV4};
use std::path::{Path, PathBuf};
use std::process::Command;
use std::time::Duration;

use base64::Engine as _;
use base64::prelude::BASE64_STANDARD;
use culvert_tests::metrics::Metrics;
use culvert_tests::namespace;
use culvert_tests::openvpn::Namespace;
use culvert_tests::{Program, eventually};
use tempfile::TempDir;

use self::control_plane::Credentials;
use self::far_side::Sources;
use self::kubectl::Kubectl;

pub(crate) use self::tunnel::{Egress, FRONT_PORT, ServerOptions, ready_agents};

/// Address of the control plane.
pub(crate) const SEED: Ipv4Addr = Ipv4Addr::new(192, 168, 77, 1);
/// Address of the second server of the tunnel.
pub(crate) const SECOND_SEED: Ipv4Addr = Ipv4Addr::new(192, 168, 77, 3);
/// Address of the node on the link to the seed.
const NODE_LINK: Ipv4Addr = Ipv4Addr::new(192, 168, 77, 2);
/// Address of the far side.
pub(crate) const FAR_SIDE: SocketAddrV4 = SocketAddrV4::new(Ipv4Addr::new(10, 250, 0, 11), 443);
/// Networks that the seed must not reach: nodes, pods and services.
const UNREACHABLE: [&str; 3] = ["10.250.0.0/16", "10.244.0.0/16", SERVICES];
/// Network of the services.
const SERVICES: &str = "10.240.16.0/20";
/// Second network of the services. No packet has its addresses; Services of two IP families need them.
const SERVICES_IPV6: &str = "fd00:240:16::/112";
/// Name of both servers of the tunnel, for agents.
pub(crate) const SERVERS: &str = "konnectivity-server.culvert.test";

/// Longest time for a change to become visible. Generous, because the machine may be busy.
pub(crate) const PATIENCE: Duration = Duration::from_secs(120);

/// Namespace and name of the agents' service account.
pub(crate) const ACCOUNT: &str = "system-konnectivity-agent";
/// Audience of the agents' tokens.
pub(crate) const AUDIENCE: &str = "system:konnectivity-server";

/// The cluster. Dropping the value ends all programs.
pub(crate) struct Lab {
    /// `kubectl` as a cluster administrator.
    pub(crate) kubectl: Kubectl,
    /// Network of the node.
    pub(crate) node: Namespace,
    /// Sources of the connections to the far side.
    pub(crate) sources: Sources,
    /// The running server.
    pub(crate) server: Option<Program>,
    /// The running agent.
    pub(crate) agent: Option<Program>,
    egress: Option<Egress>,
    apiserver: Option<Program>,
    _etcd: Program,
    credentials: Credentials,
    programs: PathBuf,
    dir: TempDir,
}

impl Lab {
    /// Starts etcd and kube-apiserver, and creates the objects of the tests. `programs` is the folder with
    /// Kubernetes' programs.
    pub(crate) async fn start(programs: &Path) -> Self {
        let mut lab = Self::start_seed(programs).await;
        lab.start_apiserver(None).await;
        lab.create_objects().await;
        lab
    }

    /// Starts etcd, the far side and the network.
    async fn start_seed(programs: &Path) -> Self {
        // The first namespace also mounts the private /run.
        let node = Namespace::add("node");
        link(&node);
        let names = [SEED, SECOND_SEED].map(|address| address.to_string());
        let [first, second] = tenant::PUBLIC_NAMES;
        namespace::hosts(&[
            ("localhost", "127.0.0.1"),
            (SERVERS, &names[0]),
            (SERVERS, &names[1]),
            first,
            second,
        ]);
        let dir = tempfile::tempdir_in("/run").expect("a directory");
        let credentials = Credentials::create(dir.path());
        let etcd = control_plane::etcd(dir.path());
        let kubectl = Kubectl {
            program: programs.join("kubectl"),
            kubeconfig: credentials.admin.clone(),
        };
        let sources = far_side::serve(&node, FAR_SIDE, &credentials.far_side);
        Self {
            kubectl,
            node,
            sources,
            server: None,
            agent: None,
            egress: None,
            apiserver: None,
            _etcd: etcd,
            credentials,
            programs: programs.to_owned(),
            dir,
        }
    }

    /// Replaces the running kube-apiserver by one that dials through `egress`.
    async fn start_apiserver(&mut self, egress: Option<Egress>) {
        drop(self.apiserver.take());
        let mut args = control_plane::apiserver(self.dir.path(), &self.credentials);
        if let Some(egress) = egress {
            let file = self.dir.path().join("egress.yaml");
            let text = egress.configuration(self.dir.path(), &self.credentials);
            std::fs::write(&file, text).expect("the egress selector's file");
            args.push(format!("--egress-selector-config-file={}", file.display()));
        }
        let program = Program::spawn(self.programs.join("kube-apiserver"), args, &[]);
        self.egress = egress;
        let apiserver = self.apiserver.insert(program);
        eventually("kube-apiserver is ready", PATIENCE, async || {
            if let Some(status) = apiserver.exited() {
                panic!("kube-apiserver: {status}\n{}", apiserver.log());
            }
            self.kubectl.run(&["get", "--raw=/readyz"]).await
        })
        .await;
    }

    async fn create_objects(&self) {
        let authority = BASE64_STANDARD.encode(self.credentials.authority.pem());
        self.kubectl
            .apply(include_str!("objects/konnectivity.yaml"))
            .await;
        let objects = [
            include_str!("objects/far-side.yaml"),
            include_str!("objects/extensions.yaml"),
        ];
        let objects = objects.join("---\n");
        let address = FAR_SIDE.ip().to_string();
        let objects = objects.replace("$AUTHORITY", &authority);
        self.kubectl
            .apply(&objects.replace("$ADDRESS", &address))
            .await;
        let status =
            format!(r#"{{"status": {{"phase": "Running", "podIPs": [{{"ip": "{address}"}}]}}}}"#);
        let patch = [
            "patch",
            "pod",
            "far-side",
            "--subresource=status",
            "-p",
            &status,
        ];
        self.kubectl.must(&patch).await;
    }

    /// Runs kube-apiserver, a server and an agent with this egress. The result is connected.
    pub(crate) async fn tunnel(&mut self, egress: Egress) {
        let is_running = self.egress == Some(egress);
        if is_running && self.server.is_some() && self.agent.is_some() {
            return;
        }
        self.stop_tunnel();
        self.server = Some(self.start_server(egress, &ServerOptions::default()));
        self.start_apiserver(Some(egress)).await;
        let token = self.token(ACCOUNT, AUDIENCE).await;
        self.agent = Some(self.start_agent(&token, &[]));
        self.wait_for_agents(1).await;
    }

    /// Runs kube-apiserver without an egress selector, and no tunnel.
    pub(crate) async fn no_tunnel(&mut self) {
        self.stop_tunnel();
        if self.egress.is_some() {
            self.start_apiserver(None).await;
        }
    }

    /// Ends the server and the agent.
    pub(crate) fn stop_tunnel(&mut self) {
        self.server = None;
        self.agent = None;
    }

    /// Waits until the first server has this number of agents.
    pub(crate) async fn wait_for_agents(&self, count: usize) {
        let what = format!("the server has {count} agents");
        eventually(&what, PATIENCE, async || {
            let ready = ready_agents(SEED).await?;
            (ready == count as f64)
                .then_some(())
                .ok_or(format!("{ready} agents"))
        })
        .await;
    }

    /// Requests a token of a service account in `kube-system`, and writes the token to a file.
    pub(crate) async fn token(&self, account: &str, audience: &str) -> PathBuf {
        let audience = format!("--audience={audience}");
        let args = ["create", "token", "-n", "kube-system", account, &audience];
        let token = self.kubectl.must(&args).await;
        let file = tempfile::NamedTempFile::new_in(self.dir.path()).expect("a file");
        let (_, path) = file.keep().expect("a file");
        std::fs::write(&path, token.trim()).expect("a token");
        path
    }

    /// Returns the metrics of kube-apiserver, in the format of Prometheus.
    pub(crate) async fn apiserver_metrics(&self) -> Metrics {
        let text = self.kubectl.must(&["get", "--raw=/metrics"]).await;
        Metrics::parse(&text).expect("metrics of kube-apiserver")
    }

    /// Returns the lines about egress in kube-apiserver's metrics.
    pub(crate) fn egress_metrics(metrics: &Metrics) -> String {
        let samples = metrics.samples("apiserver_egress_dialer_dial_start_total");
        samples.map(|it| format!("{it:?}\n")).collect()
    }

    /// Prints the last lines of every running program.
    pub(crate) fn print_logs(&self) {
        let programs = [
            ("kube-apiserver", &self.apiserver),
            ("server", &self.server),
            ("agent", &self.agent),
        ];
        for (name, program) in programs {
            if let Some(program) = program {
                print_log(name, program);
            }
        }
    }
}

/// Prints the last lines of a program.
fn print_log(name: &str, program: &Program) {
    let log = program.log();
    let lines: Vec<&str> = log.lines().collect();
    let last = lines.len().saturating_sub(60);
    eprintln!("---- {name} ----\n{}", lines[last..].join("\n"));
}

/// Links the test's own network, the seed, with the node, and drops packets to the node's networks.
fn link(node: &Namespace) {
    let ip = |words: &str| namespace::ip(words).unwrap_or_else(|why| panic!("ip {words}: {why}"));
    ip("link set lo up");
    ip("link add node type veth peer name seed netns node");
    ip(&format!("address add {SEED}/24 dev node"));
    ip(&format!("address add {SECOND_SEED}/24 dev node"));
    ip("link set node up");
    node.ip(&format!("address add {NODE_LINK}/24 dev seed"));
    node.ip("link set seed up");
    node.address(*FAR_SIDE.ip());
    // With a route and a filter on both sides, packets are lost without an error, as behind a firewall.
    ip(&format!("route add default via {NODE_LINK}"));
    node.ip(&format!("route add default via {SEED}"));
    for network in UNREACHABLE {
        iptables(&format!("-A OUTPUT -d {network} -j DROP"));
        iptables(&format!("-A FORWARD -d {network} -j DROP"));
        node.iptables(&format!("-w -A INPUT -i seed -d {network} -j DROP"));
        node.iptables(&format!("-w -A FORWARD -i seed -d {network} -j DROP"));
    }
}

/// Runs `iptables` in the seed.
pub(crate) fn iptables(words: &str) {
    let mut command = Command::new("iptables");
    let status = command.arg("-w").args(words.split(' ')).status();
    assert!(status.expect("iptables").success(), "iptables {words}");
}
