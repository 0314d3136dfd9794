//! Hundreds of nodes of kwok, which plays their kubelets, behind a server with the OpenVPN tunnel that watches Nodes.

use std::net::{Ipv4Addr, SocketAddrV4};
use std::path::PathBuf;
use std::time::Duration;

use culvert_kit::client::{self, FrontEnd};
use culvert_tests::metrics::scrape;
use culvert_tests::openvpn::Pki;
use culvert_tests::process::ours;
use culvert_tests::{Program, eventually};
use serde_json::{Value, json};
use tokio::io::{AsyncReadExt as _, AsyncWriteExt as _};
use tokio::task::JoinSet;

use super::tunnel::{HEALTH_PORT, socket};
use super::{Egress, Lab, PATIENCE, SEED, ServerOptions};

/// Port of the kubelets.
const KUBELET: u16 = 10250;
/// Port of the nodes that answers with the node's InternalIP.
const ANSWERS: u16 = 9999;
/// Networks behind the OpenVPN client: pods, services and the addresses of nodes inside the tunnel.
const ROUTES: &str = "--openvpn-route=10.244.0.0/16,10.240.16.0/20,10.254.0.0/16";
/// Networks of the OpenVPN client, as in [`ROUTES`].
const CLIENT: &str = "iroute 10.244.0.0 255.255.0.0\n\
                      iroute 10.240.16.0 255.255.240.0\n\
                      iroute 10.254.0.0 255.255.0.0\n";
/// Longest time for one dial.
const DIAL: Duration = Duration::from_secs(10);

/// kwok, and the servers behind the nodes' addresses. Dropping the value ends both.
pub(crate) struct Nodes {
    front_end: FrontEnd,
    _kwok: Program,
    _answers: JoinSet<()>,
    _pki: Pki,
}

/// Returns the name of a node.
pub(crate) fn name(at: usize) -> String {
    format!("node-{at}")
}

/// Returns the InternalIP of a node.
pub(crate) fn internal(at: usize) -> Ipv4Addr {
    let [high, low] = octets(at);
    Ipv4Addr::new(10, 250, 1 + high, low)
}

/// Returns the ExternalIP of a node.
pub(crate) fn external(at: usize) -> Ipv4Addr {
    let [high, low] = octets(at);
    Ipv4Addr::new(198, 18, high, low)
}

fn octets(at: usize) -> [u8; 2] {
    [at / 250, 1 + at % 250].map(|part| u8::try_from(part).expect("a small number"))
}

/// Returns a Node with its addresses, as a kubelet registers one.
pub(crate) fn node(at: usize, external: Ipv4Addr) -> Value {
    let name = name(at);
    json!({
        "apiVersion": "v1", "kind": "Node",
        "metadata": {"name": name, "labels": {"number": at.to_string()}},
        "status": {"addresses": [
            {"type": "InternalIP", "address": internal(at)},
            {"type": "ExternalIP", "address": external},
            {"type": "Hostname", "address": name},
        ]},
    })
}

impl Nodes {
    /// Starts kwok in the network of the node. `served` are the nodes whose addresses answer.
    pub(crate) async fn start(lab: &mut Lab, served: &[usize]) -> Self {
        lab.stop_tunnel();
        let addresses: Vec<String> = served.iter().map(|at| internal(*at).to_string()).collect();
        let names: Vec<&str> = addresses.iter().map(String::as_str).collect();
        let serving = lab.credentials.authority.server("kwok", &names);
        let mut answers = JoinSet::new();
        for at in served {
            let address = internal(*at);
            lab.node.address(address);
            let listener = lab.node.listen(SocketAddrV4::new(address, ANSWERS));
            answers.spawn(async move {
                while let Ok((mut stream, _)) = listener.accept().await {
                    let answer = address.to_string();
                    stream.write_all(answer.as_bytes()).await.ok();
                }
            });
        }
        let args = [
            format!("--kubeconfig={}", lab.kubectl.kubeconfig.display()),
            format!("--config={}", lab.programs.join("kwok.yaml").display()),
            "--manage-all-nodes=true".to_owned(),
            format!("--node-port={KUBELET}"),
            format!("--tls-cert-file={}", serving.cert.display()),
            format!("--tls-private-key-file={}", serving.key.display()),
        ];
        let kwok = lab.node.spawn(&lab.programs.join("kwok"), &args);
        let pki = Pki::create();
        lab.serve_openvpn(&pki).await;
        Self {
            front_end: FrontEnd::ConnectUds(socket(lab.dir.path(), SEED)),
            _kwok: kwok,
            _answers: answers,
            _pki: pki,
        }
    }

    /// Waits until kwok has made this number of nodes ready, and the server knows as many.
    pub(crate) async fn are_known(&self, lab: &Lab, count: usize) {
        eventually(&format!("{count} nodes are ready"), PATIENCE, async || {
            let path = "jsonpath={.items[*].status.conditions[?(@.type=='Ready')].status}";
            let states = lab.kubectl.run(&["get", "nodes", "-o", path]).await?;
            let ready = states.split(' ').filter(|it| *it == "True").count();
            (ready == count).then_some(()).ok_or(ready.to_string())
        })
        .await;
        let what = format!("the server knows {count} nodes");
        eventually(&what, PATIENCE, async || {
            let metrics = scrape((SEED, HEALTH_PORT).into()).await;
            let metrics = metrics.map_err(|error| format!("{error:#}"))?;
            let series = ["culvert_openvpn_node_watch_up", "culvert_openvpn_nodes"];
            let shown = series.map(|name| metrics.value(name, &[]));
            (shown == [Some(1.0), Some(count as f64)])
                .then_some(())
                .ok_or(format!("{shown:?}"))
        })
        .await;
    }

    /// Waits until a dial to `host` reaches a node.
    pub(crate) async fn reaches(&self, host: &str, at: usize) {
        let expected = internal(at).to_string();
        let target = format!("{host}:{ANSWERS}");
        let what = format!("{target} reaches {}", name(at));
        eventually(&what, PATIENCE, async || {
            let stream = client::connect(&self.front_end, &target, DIAL).await;
            let mut stream = stream.map_err(|error| error.to_string())?;
            let mut answer = String::new();
            let read = stream.read_to_string(&mut answer).await;
            read.map_err(|error| error.to_string())?;
            (answer == expected).then_some(()).ok_or(answer)
        })
        .await;
    }
}

impl Lab {
    /// Runs kube-apiserver, a server with the OpenVPN tunnel, and an agent as its client.
    async fn serve_openvpn(&mut self, pki: &Pki) {
        let clients = self.dir.path().join("openvpn-clients");
        std::fs::create_dir_all(&clients).expect("a folder");
        std::fs::write(clients.join("user-cluster-client"), CLIENT).expect("a file");
        let file = |flag: &str, path: &PathBuf| format!("--openvpn-{flag}={}", path.display());
        let args = [
            "--tunnel-mode=openvpn".to_owned(),
            "--openvpn-listen=tcp::1194".to_owned(),
            "--openvpn-watch-nodes".to_owned(),
            ROUTES.to_owned(),
            file("ca", &pki.ca),
            file("cert", &pki.server.cert),
            file("key", &pki.server.key),
            file("client-config-dir", &clients),
        ];
        for words in [
            "create clusterrole nodes --verb=list,watch --resource=nodes",
            "create clusterrolebinding nodes --clusterrole=nodes --user=system:konnectivity-server",
        ] {
            let words: Vec<&str> = words.split(' ').collect();
            self.kubectl.must(&words).await;
        }
        let args: Vec<&str> = args.iter().map(String::as_str).collect();
        let options = ServerOptions {
            args: &args,
            ..ServerOptions::default()
        };
        let egress = Egress::ConnectUds;
        self.server = Some(self.start_server(egress, &options));
        self.start_apiserver(Some(egress)).await;
        let args = [
            format!("--openvpn-remote={SEED}:1194"),
            file("ca", &pki.ca),
            file("cert", &pki.user_cluster.cert),
            file("key", &pki.user_cluster.key),
            "--openvpn-nodes=10.250.0.0/16".to_owned(),
        ];
        self.agent = Some(self.node.spawn(&ours("culvert-agent"), &args));
        eventually("the OpenVPN client is connected", PATIENCE, async || {
            let metrics = scrape((SEED, HEALTH_PORT).into()).await;
            let metrics = metrics.map_err(|error| format!("{error:#}"))?;
            let clients = metrics.value("culvert_openvpn_clients", &[]);
            (clients == Some(1.0))
                .then_some(())
                .ok_or(format!("{clients:?}"))
        })
        .await;
    }
}
