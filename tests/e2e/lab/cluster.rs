//! A cluster whose node runs pods, with agents as pods from our image and our chart.
//!
//! ```text
//! seed (the test's own network)                     node
//! etcd, kube-apiserver, KCM, scheduler              containerd, kubelet, kube-proxy
//! servers ------------------------192.168.77.0/24-- agents and other pods, 10.244.1.0/24
//! ```

mod helm;
mod machine;
mod names;
mod overlay;
mod policies;
mod settings;
mod worker;

use std::net::Ipv4Addr;
use std::path::{Path, PathBuf};
use std::time::Duration;

use base64::Engine as _;
use base64::prelude::BASE64_STANDARD;
use culvert_tests::{Program, eventually};
use serde_json::{Value, json};
use tokio::time::Instant;

use self::helm::Helm;
use self::names::Names;
use self::worker::SEED_NODE;

use super::control_plane;
use super::tenant::Tenant;
use super::tunnel::AGENT_PORT;
use super::{Egress, Lab, PATIENCE, SECOND_SEED, SEED, SERVERS, ServerOptions, ready_agents};

pub(crate) use self::overlay::{Overlay, POD as OVERLAY_POD};
pub(crate) use self::policies::Policies;
pub(crate) use self::settings::{POD_IMAGE, TENANT_PODS};
pub(crate) use self::worker::{NODE, NODE_ADDRESS, TENANT_NODE, Worker};

/// Environment variable with the folder of the images' archives. The script sets the variable.
const IMAGES: &str = "CULVERT_E2E_IMAGES";
/// Environment variable with the path of helm. The script sets the variable.
const HELM: &str = "CULVERT_E2E_HELM";

/// Name of the release of the agents' chart, and of its Deployment.
pub(crate) const AGENTS: &str = "konnectivity-agent";
/// Number of agents.
const REPLICAS: usize = 2;

/// Egress at the start.
const FIRST: Egress = Egress::GrpcUds;

/// Environment variable with the seconds of silence of a followed log. The script sets the variable.
const SILENCE: &str = "CULVERT_E2E_SILENCE";

/// The cluster. Dropping the value ends all programs.
pub(crate) struct Cluster {
    /// The control plane and the servers.
    pub(crate) lab: Lab,
    /// The node.
    pub(crate) worker: Worker,
    /// helm as a cluster administrator.
    pub(crate) helm: Helm,
    /// The second server, of cases that need two.
    pub(crate) second: Option<Program>,
    /// True if the first server has no arguments of a single case.
    is_plain: bool,
    /// True if the agents connect to the servers without a door.
    is_direct: bool,
    controllers: [Program; 2],
    /// The DNS server of all pods and nodes.
    pub(crate) names: Names,
    /// The user cluster, after the first use.
    tenant: Option<Tenant>,
}

impl Cluster {
    /// Starts the control plane and the node, and installs the agents.
    pub(crate) async fn start(programs: &Path) -> Self {
        let started = Instant::now();
        let mut lab = Lab::start_seed(programs).await;
        lab.server = Some(start_server(&lab, FIRST, SEED, &[]));
        lab.start_apiserver(Some(FIRST)).await;
        let dir = lab.dir.path().to_owned();
        let names = Names::serve(programs, &dir, &lab.credentials);
        let controllers = controllers(programs, &lab, &lab.credentials.authority.cert);
        machine::isolate(&dir);
        let authority = &lab.credentials.authority;
        let url = control_plane::url();
        let mut worker = Worker::create(&lab.node, programs, &dir, authority, &url, SEED_NODE);
        worker.power_on().await;
        for name in ["pod", "agent", "metrics-server"] {
            worker.import(&image(name));
        }
        let helm = Helm {
            program: std::env::var_os(HELM).expect(HELM).into(),
            kubeconfig: lab.kubectl.kubeconfig.clone(),
            home: dir.join("helm"),
            namespace: "kube-system",
        };
        let mut cluster = Self {
            lab,
            worker,
            helm,
            second: None,
            is_plain: true,
            is_direct: false,
            controllers,
            names,
            tenant: None,
        };
        cluster.has_a_ready_node().await;
        println!("the node is ready after {:?}", started.elapsed());
        cluster.create_objects().await;
        let installed = Instant::now();
        cluster.install_agents(&json!({})).await;
        cluster.has_agents(SEED, REPLICAS).await;
        println!(
            "{REPLICAS} agents are ready {:?} after helm started",
            installed.elapsed()
        );
        cluster.pod_is_ready("far-side").await;
        println!("the cluster is ready after {:?}", started.elapsed());
        cluster
    }

    /// Waits until the node is ready.
    pub(crate) async fn has_a_ready_node(&self) {
        eventually("the node is ready", PATIENCE, async || {
            let node = self.lab.kubectl.get(&["node", NODE]).await?;
            is_true(&node, "Ready")
        })
        .await;
    }

    /// Waits until a pod of the namespace `default` is ready.
    pub(crate) async fn pod_is_ready(&self, name: &str) {
        let what = format!("pod {name} is ready");
        eventually(&what, PATIENCE, async || {
            let pod = self.lab.kubectl.get(&["pod", name]).await?;
            is_true(&pod, "Ready")
        })
        .await;
    }

    async fn create_objects(&self) {
        let restricted = "pod-security.kubernetes.io/enforce=restricted";
        let warn = "pod-security.kubernetes.io/warn=restricted";
        let namespace = ["label", "namespace", "kube-system", restricted, warn];
        self.lab.kubectl.must(&namespace).await;
        // The first pods need the account of their namespace, which a controller creates.
        eventually("the account exists", PATIENCE, async || {
            self.lab
                .kubectl
                .run(&["get", "serviceaccount", "default"])
                .await
        })
        .await;
        self.create_pods().await;
    }

    /// Creates the test pods, and everything that they serve.
    pub(crate) async fn create_pods(&self) {
        let files = &self.lab.credentials;
        let encode = |path: &Path| BASE64_STANDARD.encode(std::fs::read(path).expect("a file"));
        let objects = [
            include_str!("../objects/pods.yaml"),
            include_str!("../objects/extensions.yaml"),
        ];
        let objects = objects
            .join("---\n")
            .replace("$IMAGE", POD_IMAGE)
            .replace("$AUTHORITY", &encode(&files.authority.cert))
            .replace("$CERTIFICATE", &encode(&files.far_side.cert))
            .replace("$KEY", &encode(&files.far_side.key));
        self.lab.kubectl.apply(&objects).await;
    }

    /// Installs the agents, or changes them to other values.
    pub(crate) async fn install_agents(&mut self, more: &Value) {
        let mut values = json!({
            "image": {"registry": "localhost", "tag": "e2e", "pullPolicy": "Never"},
            "server": {"host": SERVERS, "port": AGENT_PORT},
            "hostAliases": [
                {"ip": SEED, "hostnames": [SERVERS]},
                {"ip": SECOND_SEED, "hostnames": [SERVERS]},
            ],
            "keepaliveTime": keepalive(),
            "sync": {"interval": "500ms", "intervalCap": "1s"},
            "probes": {"readiness": {"periodSeconds": 1}},
            "token": {"expirationSeconds": 600},
            // The agents of a rolling update end soon, although connections without use are open.
            "terminationGracePeriodSeconds": 10,
            "tests": {"image": POD_IMAGE},
        });
        if let (Some(values), Some(more)) = (values.as_object_mut(), more.as_object()) {
            values.extend(more.clone());
        }
        self.helm.install(AGENTS, "culvert-agent", &values).await;
        self.is_direct = more.get("server").is_none();
    }

    /// Runs kube-apiserver and one server with this egress, and waits for the agents.
    pub(crate) async fn tunnel(&mut self, egress: Egress) {
        self.plain_server(egress).await;
        if !self.is_direct {
            self.install_agents(&json!({})).await;
        }
        self.has_agents(SEED, REPLICAS).await;
    }

    /// Runs kube-apiserver and one server with this egress.
    async fn plain_server(&mut self, egress: Egress) {
        let is_running = self.lab.egress == Some(egress) && self.lab.server.is_some();
        if !is_running || !self.is_plain || self.second.is_some() {
            self.second = None;
            self.serve(egress, &[]).await;
        }
    }

    /// Runs kube-apiserver and one server with this egress and additional arguments.
    pub(crate) async fn serve(&mut self, egress: Egress, args: &[&str]) {
        drop(self.lab.server.take());
        self.is_plain = args.is_empty();
        self.lab.server = Some(start_server(&self.lab, egress, SEED, args));
        if self.lab.egress != Some(egress) {
            self.lab.start_apiserver(Some(egress)).await;
        }
    }

    /// Waits until a server has this number of agents.
    pub(crate) async fn has_agents(&self, server: Ipv4Addr, count: usize) {
        let what = format!("the server at {server} has {count} agents");
        eventually(&what, PATIENCE, async || {
            let ready = ready_agents(server).await?;
            (ready == count as f64)
                .then_some(())
                .ok_or(format!("{ready} agents"))
        })
        .await;
    }

    /// Returns the user cluster, and creates the cluster at the first call.
    pub(crate) async fn tenant(&mut self) -> &mut Tenant {
        let tenant = match self.tenant.take() {
            Some(tenant) => tenant,
            None => Tenant::create(self).await,
        };
        self.tenant.insert(tenant)
    }

    /// Replaces the certificates of authorities that pods get, and restarts kube-controller-manager, which spreads them.
    pub(crate) fn replace_root_certificates(&mut self, file: &Path) {
        self.controllers = controllers(&self.lab.programs, &self.lab, file);
    }

    /// Creates a folder that ends with the test.
    pub(crate) fn folder(&self, name: &str) -> PathBuf {
        let folder = self.lab.dir.path().join(name);
        std::fs::create_dir_all(&folder).expect("a folder");
        folder
    }

    /// Prints the last lines of every program, and the state of the pods.
    pub(crate) async fn print_logs(&self) {
        self.lab.print_logs();
        super::tenant::print_control_plane(&self.lab.kubectl).await;
        if let Some(tenant) = &self.tenant {
            tenant.print_logs().await;
        }
        let controllers = ["kube-controller-manager", "kube-scheduler"].into_iter();
        for (name, program) in controllers
            .zip(&self.controllers)
            .chain(self.worker.programs())
        {
            super::print_log(name, program);
        }
        super::print_log("CoreDNS", self.names.program());
        for words in [
            &["get", "pods", "-A", "-o", "wide"][..],
            &["get", "events", "-A", "--sort-by=.lastTimestamp"],
        ] {
            let shown = self.lab.kubectl.run(words).await;
            eprintln!("---- {words:?} ----\n{}", shown.unwrap_or_else(|why| why));
        }
    }
}

/// Returns the time without a line of a followed log.
pub(crate) fn silence() -> Duration {
    let seconds = std::env::var(SILENCE).ok();
    let seconds = seconds.map(|text| text.parse().expect(SILENCE));
    Duration::from_secs(seconds.unwrap_or(10))
}

/// Returns the interval of the keepalives of servers and agents. A short silence needs a shorter interval than KKP's, so
/// that a test sees several.
fn keepalive() -> &'static str {
    match silence() > Duration::from_secs(300) {
        true => "1m",
        false => "3s",
    }
}

/// Returns the archive of an image.
pub(crate) fn image(name: &str) -> PathBuf {
    let images = PathBuf::from(std::env::var_os(IMAGES).expect(IMAGES));
    images.join(format!("{name}.tar"))
}

/// Starts a server with the arguments of these tests.
pub(crate) fn start_server(lab: &Lab, egress: Egress, address: Ipv4Addr, args: &[&str]) -> Program {
    let keepalive = format!("--keepalive-time={}", keepalive());
    let fixed = [keepalive.as_str(), "--graceful-shutdown-timeout=20s"];
    let args: Vec<&str> = fixed.iter().chain(args).copied().collect();
    let options = ServerOptions {
        address,
        args: &args,
    };
    lab.start_server(egress, &options)
}

/// Returns an error with the conditions, unless the condition of the object is true.
pub(crate) fn is_true(object: &Value, condition: &str) -> Result<(), String> {
    let conditions = object["status"]["conditions"].as_array().cloned();
    let conditions = conditions.unwrap_or_default();
    let found = conditions.iter().find(|it| it["type"] == condition);
    found
        .is_some_and(|it| it["status"] == "True")
        .then_some(())
        .ok_or(format!("{conditions:?}"))
}

/// Starts kube-controller-manager and kube-scheduler.
fn controllers(programs: &Path, lab: &Lab, root: &Path) -> [Program; 2] {
    let files = &lab.credentials;
    let kubeconfig = format!("--kubeconfig={}", files.admin.display());
    let common = [
        kubeconfig,
        // Without an election, they survive restarts of kube-apiserver.
        "--leader-elect=false".to_owned(),
        "--secure-port=0".to_owned(),
    ];
    let tokens = format!(
        "--service-account-private-key-file={}",
        files.tokens.private.display()
    );
    let root = format!("--root-ca-file={}", root.display());
    let grace = "--node-monitor-grace-period=10s".to_owned();
    let manager = common.iter().chain([&tokens, &root, &grace]);
    [
        Program::spawn(programs.join("kube-controller-manager"), manager, &[]),
        Program::spawn(programs.join("kube-scheduler"), &common, &[]),
    ]
}
