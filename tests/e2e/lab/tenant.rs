//! A user cluster whose control plane runs as pods of the seed, and whose node is behind another link.
//!
//! ```text
//! node of the seed                                                   node of the user cluster
//! Deployment apiserver, the server, front doors --192.168.77.0/24-- the test's own network
//!                                               --192.168.78.0/24-- agents and other pods, 10.245.1.0/24
//! ```
//! The folder of the user cluster has what the operator of a migration has: the cluster file and the kubeconfigs SEED
//! and USER.

mod back;
mod operator;
mod plan;
mod secrets;

use std::net::{Ipv4Addr, SocketAddrV4};
use std::path::{Path, PathBuf};

use base64::Engine as _;
use base64::prelude::BASE64_STANDARD;
use culvert_tests::openvpn::Namespace;
use culvert_tests::{Program, eventually, namespace};
use serde_json::{Value, json};

use self::secrets::Authorities;
use super::cluster::{Cluster, POD_IMAGE, TENANT_NODE, TENANT_PODS, Worker, image, is_true};
use super::kubectl::Kubectl;
use super::{Egress, NODE_LINK, PATIENCE, iptables};

pub(crate) use self::plan::{Plan, Step};

/// Namespace of the control plane in the seed.
pub(crate) const NAMESPACE: &str = "cluster-abc123";
/// Id of the cluster.
pub(crate) const ID: &str = "abc123";
/// Public name of the API server behind the front door of the seed.
const NAME: &str = "abc123.seed.culvert.test";
/// Address of the load balancer of the seed's front door. The cloud, which is this test, gives both addresses.
const DOOR: &str = "192.0.2.10";
/// Public names of the API server and of the servers.
pub(super) const PUBLIC_NAMES: [(&str, &str); 2] = [
    (NAME, DOOR),
    ("konnectivity-server.abc123.seed.culvert.test", DOOR),
];
/// Address of the load balancer of the user cluster's own front door.
const BALANCER: &str = "192.0.2.20";
/// Network of the services.
const SERVICES: &str = "10.241.16.0/20";
/// Network of the nodes.
const NODES: &str = "10.251.0.0/16";
/// Address of the node tunnel, on every node.
const NODE_TUNNEL: Ipv4Addr = Ipv4Addr::new(100, 64, 30, 10);
/// Node port of the API server, and its port except with the strategy Tunneling.
const PORT: u16 = 31000;
/// Image of kube-apiserver.
const APISERVER_IMAGE: &str = "localhost/kube-apiserver:e2e";

/// Address by which nodes and users reach the API server.
#[derive(Debug, Clone, PartialEq, Eq)]
struct Exposed {
    strategy: String,
    name: String,
    address: String,
}

/// The user cluster. Dropping the value ends the programs that are not pods.
pub(crate) struct Tenant {
    /// `kubectl` as an administrator of the seed.
    pub(crate) seed: Kubectl,
    /// `kubectl` as an administrator of the user cluster.
    pub(crate) user: Kubectl,
    folder: PathBuf,
    authorities: Authorities,
    exposed: Exposed,
    worker: Option<Worker>,
    controllers: Vec<Program>,
}

impl Exposed {
    /// Returns what KKP has for a strategy.
    fn by(strategy: &str) -> Self {
        let (name, address) = match strategy {
            "LoadBalancer" => (BALANCER, BALANCER),
            _ => (NAME, DOOR),
        };
        Self {
            strategy: strategy.to_owned(),
            name: name.to_owned(),
            address: address.to_owned(),
        }
    }

    fn port(&self) -> u16 {
        match self.strategy.as_str() {
            "Tunneling" => 6443,
            _ => PORT,
        }
    }

    fn url(&self) -> String {
        format!("https://{}:{}", self.name, self.port())
    }

    /// Returns the cluster file.
    fn file(&self) -> String {
        let Self {
            strategy,
            name,
            address,
        } = self;
        let tunneling = match strategy.as_str() {
            "Tunneling" => format!("tunnelingAgentIP: {NODE_TUNNEL}\n    "),
            _ => String::new(),
        };
        format!(
            "clusterID: {ID}
kubernetesVersion: 1.36.3
externalName: {name}
addressIP: {address}
apiserverReplicas: 1
nodePorts: {{apiserver: {PORT}, konnectivityServer: 31001, openvpnServer: 31002}}
nodeNetworks: [{NODES}]
spec:
  exposeStrategy: {strategy}
  clusterNetwork:
    {tunneling}pods: {{cidrBlocks: [{TENANT_PODS}]}}
    services: {{cidrBlocks: [{SERVICES}]}}
    proxyMode: iptables
"
        )
    }
}

impl Tenant {
    /// Creates the control plane in the seed, with Konnectivity and the strategy NodePort, and a node with agents.
    pub(crate) async fn create(cluster: &mut Cluster) -> Self {
        cluster.tunnel(Egress::GrpcUds).await;
        let network = link();
        cluster.names.set(&PUBLIC_NAMES);
        let folder = cluster.folder("tenant");
        let mut tenant = Self {
            seed: cluster.lab.kubectl.clone(),
            user: Kubectl {
                program: cluster.lab.kubectl.program.clone(),
                kubeconfig: folder.join("USER"),
            },
            authorities: Authorities::create(&folder),
            exposed: Exposed::by("NodePort"),
            folder,
            worker: None,
            controllers: Vec::new(),
        };
        tenant.write_commands();
        for name in [
            "kube-apiserver",
            "culvert",
            "culvert-server",
            "culvert-door",
        ] {
            cluster.worker.import(&image(name));
        }
        let values = json!({
            "image": {"registry": "docker.io/library", "pullPolicy": "Never"},
            "replicas": 1,
            "fullnameOverride": "nodeport-proxy",
            "tests": {"image": POD_IMAGE},
        });
        // The load balancer gets its address later.
        let name = "nodeport-proxy";
        cluster.helm.apply(name, "culvert-door", &values).await;
        tenant.start_apiserver().await;
        tenant.start_node(cluster, &network).await;
        let install = "culvert render cluster.yaml --part=rbac --part=agent | kubectl --kubeconfig=USER apply -f -";
        tenant.shell(install).await.unwrap();
        tenant.create_pods().await;
        tenant.works().await;
        tenant
    }

    /// Creates the Deployment of kube-apiserver, and everything that the rendered objects do not have.
    async fn start_apiserver(&mut self) {
        self.seed
            .apply(include_str!("../objects/tenant-seed.yaml"))
            .await;
        let object = json!({
            "apiVersion": "kubermatic.k8c.io/v1", "kind": "Cluster", "metadata": {"name": ID},
            "spec": {"exposeStrategy": "NodePort"},
        });
        create(&self.seed, &object).await;
        self.write_cluster_file();
        for part in ["services", "egress", "apiserver", "certificates"] {
            let apply = format!(
                "culvert render cluster.yaml --part={part} | kubectl --kubeconfig=SEED apply -f -"
            );
            self.shell(&apply).await.unwrap();
        }
        self.authorities.create_apiserver_files(&self.seed).await;
        self.issue_certificates().await;
        self.write_user();
        let deployment = json!({
            "apiVersion": "apps/v1", "kind": "Deployment",
            "metadata": {"name": "apiserver", "namespace": NAMESPACE},
            "spec": {
                "replicas": 0,
                "selector": {"matchLabels": {"app": "apiserver"}},
                "strategy": {"rollingUpdate": {"maxSurge": 1, "maxUnavailable": 0}},
                "template": {
                    "metadata": {"labels": {"app": "apiserver"}},
                    "spec": {
                        "terminationGracePeriodSeconds": 10,
                        "automountServiceAccountToken": false,
                        "containers": [{
                            "name": "apiserver", "image": APISERVER_IMAGE, "imagePullPolicy": "Never",
                            "command": ["kube-apiserver"],
                            "args": operator::apiserver(),
                            "readinessProbe": {
                                "httpGet": {"path": "/readyz", "port": 1, "scheme": "HTTPS"},
                                "periodSeconds": 1, "failureThreshold": 5,
                            },
                            "volumeMounts": [
                                {"name": "files", "mountPath": "/files"},
                                {"name": "serving", "mountPath": "/serving"},
                            ],
                        }],
                        "volumes": [
                            {"name": "files", "secret": {"secretName": "apiserver-files"}},
                            {"name": "serving", "secret": {"secretName": "apiserver-tls"}},
                        ],
                    },
                },
            },
        });
        self.seed.apply(&deployment.to_string()).await;
        // The rendered patch has the flags of the tunnel, and the port of the probe.
        let save = format!(
            "kubectl --kubeconfig=SEED -n {NAMESPACE} get deployment apiserver -o yaml > apiserver.yaml"
        );
        let render = "culvert render cluster.yaml --part=server --apiserver=apiserver.yaml --output-dir=rendered";
        for command in [save.as_str(), render] {
            self.shell(command).await.unwrap();
        }
        for command in [
            "patch deployment apiserver --patch-file rendered/seed-server-patch.yaml",
            "scale deployment apiserver --replicas=1",
            "rollout status deployment apiserver --timeout=40s",
        ] {
            let command = format!("kubectl --kubeconfig=SEED -n {NAMESPACE} {command}");
            self.shell(&command).await.unwrap();
        }
        self.answers().await;
    }

    /// Starts the controllers and the node.
    async fn start_node(&mut self, cluster: &Cluster, network: &Namespace) {
        // The controllers are in the network of the seed's node, which reaches the Services of the seed.
        let url = format!("https://{}:443", self.service_address().await);
        self.controllers = self.authorities.controllers(cluster, &self.folder, &url);
        let mut worker = Worker::create(
            network,
            &cluster.lab.programs,
            &self.folder,
            &self.authorities.cluster,
            &self.exposed.url(),
            TENANT_NODE,
        );
        // Without dummy interfaces in the kernel, the node tunnel cannot create its own interface.
        network.address(NODE_TUNNEL);
        worker.power_on().await;
        for name in ["pod", "culvert-agent", "culvert-node-tunnel"] {
            worker.import(&image(name));
        }
        self.worker = Some(worker);
        eventually("the node is ready", PATIENCE, async || {
            let node = self.user.get(&["node", TENANT_NODE.name]).await?;
            is_true(&node, "Ready")
        })
        .await;
    }

    async fn create_pods(&self) {
        self.user
            .apply(include_str!("../objects/tenant-user.yaml"))
            .await;
        let object = json!({
            "apiVersion": "cluster.k8s.io/v1alpha1", "kind": "MachineDeployment",
            "metadata": {"name": "workers", "namespace": "kube-system"},
        });
        create(&self.user, &object).await;
        let pair = self
            .authorities
            .cluster
            .server("far-side", &["far-side.default.svc"]);
        let encode = |path: &Path| BASE64_STANDARD.encode(std::fs::read(path).expect("a file"));
        let objects = [
            include_str!("../objects/pods.yaml"),
            include_str!("../objects/extensions.yaml"),
        ];
        let objects = objects
            .join("---\n")
            .replace("$IMAGE", POD_IMAGE)
            .replace("$AUTHORITY", &encode(&self.authorities.cluster.cert))
            .replace("$CERTIFICATE", &encode(&pair.cert))
            .replace("$KEY", &encode(&pair.key));
        eventually("the account exists", PATIENCE, async || {
            self.user.run(&["get", "serviceaccount", "default"]).await
        })
        .await;
        self.user.apply(&objects).await;
    }

    /// Waits until kube-apiserver answers at its public address.
    pub(crate) async fn answers(&self) {
        eventually("the user cluster answers", PATIENCE, async || {
            self.give_addresses().await;
            self.user.run(&["get", "--raw=/readyz"]).await
        })
        .await;
    }

    /// Waits until requests to a kubelet, a pod and an aggregated API work.
    pub(crate) async fn works(&self) {
        for call in super::load::CALLS {
            eventually("calls work", PATIENCE, async || {
                self.user.bytes(call.0, &[]).await
            })
            .await;
        }
    }

    /// Returns true if a command in a pod works now.
    pub(crate) async fn has_a_tunnel(&self) -> bool {
        self.user.run(super::load::CALLS[0].0).await.is_ok()
    }

    /// Returns the URL of the API server after the current change.
    pub(crate) fn url(&self) -> String {
        self.exposed.url()
    }

    /// Returns the host of the servers, for agents.
    pub(crate) fn server_host(&self) -> String {
        match self.exposed.strategy.as_str() {
            "Tunneling" => format!("konnectivity-server.{}", self.exposed.name),
            _ => self.exposed.name.clone(),
        }
    }

    /// Connects to the node tunnel from the node.
    ///
    /// # Errors
    /// If no program listens.
    pub(crate) async fn node_tunnel_listens(&self) -> std::io::Result<()> {
        let network = &self.worker.as_ref().expect("a node").network;
        let to = SocketAddrV4::new(NODE_TUNNEL, self.exposed.port());
        network.connect(to).await.map(|_| ())
    }

    /// Prints the state of the user cluster.
    pub(crate) async fn print_logs(&self) {
        for words in [
            "get pods -A -o wide",
            "get events -A --sort-by=.lastTimestamp",
        ] {
            print(&self.user, words).await;
        }
        let controllers = ["kube-controller-manager", "kube-scheduler"].into_iter();
        let controllers = controllers.zip(&self.controllers);
        for (name, program) in controllers.chain(self.worker.iter().flat_map(Worker::programs)) {
            super::print_log(name, program);
        }
    }

    /// Returns the address of the Service of kube-apiserver in the seed.
    async fn service_address(&self) -> String {
        let service = ["service", "-n", NAMESPACE, "apiserver-external"];
        let service = self.seed.get(&service).await.unwrap();
        service["spec"]["clusterIP"].as_str().unwrap().to_owned()
    }

    /// Gives every load balancer its address, as a cloud does.
    async fn give_addresses(&self) {
        let Ok(list) = self.seed.get(&["services", "-A"]).await else {
            return;
        };
        let services = list["items"].as_array().cloned().unwrap_or_default();
        for service in services {
            let is_balancer = service["spec"]["type"] == "LoadBalancer";
            if !is_balancer || !service["status"]["loadBalancer"]["ingress"].is_null() {
                continue;
            }
            let meta = &service["metadata"];
            let text = |value: &Value| value.as_str().unwrap_or_default().to_owned();
            let (namespace, name) = (text(&meta["namespace"]), text(&meta["name"]));
            let address = match namespace.as_str() {
                NAMESPACE => BALANCER,
                _ => DOOR,
            };
            let status = json!({"status": {"loadBalancer": {"ingress": [{"ip": address}]}}});
            let status = status.to_string();
            let words = ["patch", "service", "-n", &namespace, &name];
            let more = ["--subresource=status", "--type=merge", "-p", &status];
            self.seed.must(&[&words[..], &more].concat()).await;
        }
    }
}

/// Prints the logs of the control plane in the seed.
pub(crate) async fn print_control_plane(seed: &Kubectl) {
    for words in [
        "get pods,services -o wide -n cluster-abc123",
        "logs -n cluster-abc123 -l app=apiserver --all-containers --prefix --tail=30",
        "logs -n cluster-abc123 -l app=apiserver -c apiserver --previous --tail=30",
        "logs -n cluster-abc123 -l app=openvpn-server --tail=60",
        "logs -n kube-system deployment/nodeport-proxy --tail=60",
    ] {
        print(seed, words).await;
    }
}

async fn print(kubectl: &Kubectl, words: &str) {
    let args: Vec<&str> = words.split(' ').collect();
    let shown = kubectl.run(&args).await;
    eprintln!("---- {words} ----\n{}", shown.unwrap_or_else(|why| why));
}

/// Creates an object whose kind is new.
async fn create(kubectl: &Kubectl, object: &Value) {
    let object = object.to_string();
    eventually("the kind exists", PATIENCE, async || {
        let apply = ["apply", "-f", "-"];
        kubectl.bytes(&apply, object.as_bytes()).await
    })
    .await;
}

/// Links the test's own network with the node of the user cluster, and drops packets to its networks.
fn link() -> Namespace {
    let ip = |words: &str| namespace::ip(words).unwrap_or_else(|why| panic!("ip {words}: {why}"));
    let network = Namespace::add("tenant");
    ip("link add tenant type veth peer name seed netns tenant");
    ip(&format!(
        "address add {}/24 dev tenant",
        TENANT_NODE.gateway
    ));
    ip("link set tenant up");
    network.ip("address add 192.168.78.2/24 dev seed");
    network.ip("link set seed up");
    std::fs::write("/proc/sys/net/ipv4/ip_forward", "1").expect("ip_forward");
    // Load balancers are at the node of the seed.
    ip(&format!("route replace 192.0.2.0/24 via {NODE_LINK}"));
    for blocked in [NODES, TENANT_PODS, SERVICES] {
        iptables(&format!("-A OUTPUT -d {blocked} -j DROP"));
        iptables(&format!("-A FORWARD -d {blocked} -j DROP"));
        network.iptables(&format!("-w -A INPUT -i seed -d {blocked} -j DROP"));
        network.iptables(&format!("-w -A FORWARD -i seed -d {blocked} -j DROP"));
    }
    network
}
