//! OpenVPN as the second tunnel of a server, and switches in both directions while `kubectl` is in use.

use std::path::PathBuf;

use culvert_tests::metrics::scrape;
use culvert_tests::openvpn::{OpenVpn, Pki, kkp};
use culvert_tests::skip::skip;
use culvert_tests::{Program, eventually};
use serde_json::json;

use crate::lab::cluster::{Cluster, NODE_ADDRESS};
use crate::lab::load::Load;
use crate::lab::{Egress, PATIENCE, SEED};

/// Networks behind the client: pods, services and the addresses of nodes inside the tunnel.
const NETWORKS: [(&str, &str, &str); 3] = [
    ("10.244.0.0", "16", "255.255.0.0"),
    ("10.240.16.0", "20", "255.255.240.0"),
    ("10.254.0.0", "16", "255.255.0.0"),
];

/// Name of the release with the OpenVPN client.
const RELEASE: &str = "openvpn-client";

/// Number of calls after a switch.
const CALLS: usize = 12;

/// An agent of the chart is the OpenVPN client.
pub(super) async fn chart_installs_an_openvpn_client(cluster: &mut Cluster) {
    let both = Both::start(cluster).await;
    let file = |key: &str, path: &PathBuf| format!("--from-file={key}={}", path.display());
    let pair = &both.pki.user_cluster;
    let secret = [
        "create",
        "secret",
        "generic",
        "openvpn-client-certificates",
        "--namespace=kube-system",
        &file("ca.crt", &both.pki.ca),
        &file("client.crt", &pair.cert),
        &file("client.key", &pair.key),
    ];
    cluster.lab.kubectl.must(&secret).await;
    let values = json!({
        "image": {"registry": "localhost", "tag": "e2e", "pullPolicy": "Never"},
        "openvpn": {"remotes": [format!("{SEED}:1194")], "nodes": ["10.250.0.0/16"]},
        "replicas": 1,
        "pdb": {"enabled": false},
        "serviceAccount": {"create": false},
        "rbac": {"create": false},
        "probes": {"readiness": {"periodSeconds": 1}},
        "tests": {"enabled": false},
    });
    cluster
        .helm
        .install(RELEASE, "culvert-agent", &values)
        .await;
    both.switches(cluster).await;
    cluster.helm.uninstall(RELEASE).await;
}

/// A stock client on the node, with KKP's configuration and its translation of node addresses.
pub(super) async fn stock_client_works(cluster: &mut Cluster) {
    let Some(openvpn) = OpenVpn::get() else {
        return skip("no stock client");
    };
    let both = Both::start(cluster).await;
    let node = &cluster.lab.node;
    let access = format!(
        "10.254.{}.{}",
        NODE_ADDRESS.octets()[2],
        NODE_ADDRESS.octets()[3]
    );
    node.iptables(&format!(
        "-w -t nat -I PREROUTING -d {access} -j DNAT --to-destination {NODE_ADDRESS}"
    ));
    let folder = tempfile::tempdir_in("/run").unwrap();
    let options = kkp::user_cluster_client(&both.pki, folder.path(), &SEED.to_string());
    let mut client = openvpn.start(node, &options);
    client.is_up().await;
    both.switches(cluster).await;
    client.stop().await;
}

/// The certificates of OpenVPN, and the socket of a server with both tunnels.
struct Both {
    pki: Pki,
    admin: String,
    _folder: tempfile::TempDir,
}

impl Both {
    /// Replaces the server by one with both tunnels. New dials go to Konnectivity.
    async fn start(cluster: &mut Cluster) -> Self {
        cluster.tunnel(Egress::GrpcUds).await;
        let pki = Pki::create();
        let folder = tempfile::tempdir_in("/run").unwrap();
        let clients = folder.path().join("clients");
        std::fs::create_dir(&clients).unwrap();
        let routes = NETWORKS.map(|(network, _, mask)| format!("iroute {network} {mask}\n"));
        std::fs::write(clients.join("user-cluster-client"), routes.concat()).unwrap();
        let networks = NETWORKS.map(|(network, bits, _)| format!("{network}/{bits}"));
        let networks = networks.join(",");
        let admin = format!("--admin-uds={}", folder.path().join("admin.sock").display());
        let args = [
            "--tunnel-mode=konnectivity".to_owned(),
            "--openvpn-listen=tcp::1194".to_owned(),
            "--openvpn-duplicate-cn".to_owned(),
            format!("--openvpn-ca={}", pki.ca.display()),
            format!("--openvpn-cert={}", pki.server.cert.display()),
            format!("--openvpn-key={}", pki.server.key.display()),
            format!("--openvpn-client-config-dir={}", clients.display()),
            format!("--openvpn-route={networks}"),
            format!("--openvpn-push-route={networks}"),
            admin.clone(),
        ];
        let args: Vec<&str> = args.iter().map(String::as_str).collect();
        cluster.serve(Egress::GrpcUds, &args).await;
        cluster.has_agents(SEED, 2).await;
        Self {
            pki,
            admin,
            _folder: folder,
        }
    }

    /// Switches to OpenVPN and back. No call fails, and each tunnel carries the calls while it is selected.
    async fn switches(&self, cluster: &Cluster) {
        eventually("the OpenVPN client is connected", PATIENCE, async || {
            let status = self.culvert(&["status"]).await;
            let clients = scrape((SEED, 8134).into()).await.unwrap();
            let clients = clients.value("culvert_openvpn_clients", &[]);
            (clients == Some(1.0)).then_some(()).ok_or(status)
        })
        .await;
        let load = Load::start(&cluster.lab.kubectl);
        load.more(CALLS).await;
        for tunnel in ["openvpn", "konnectivity"] {
            // kube-apiserver sends many requests over one connection to an aggregated API. The end of a drain closes the
            // connection, and a request in progress would fail. So no drain ends during this test.
            self.culvert(&["switch", "--to", tunnel, "--drain=10m"])
                .await;
            let before = dials(tunnel).await;
            load.more(CALLS).await;
            let after = dials(tunnel).await;
            assert!(after > before, "{tunnel}: {after} dials");
        }
        load.has_not_failed().await;
    }

    /// Runs the operator's command, which must succeed.
    async fn culvert(&self, words: &[&str]) -> String {
        let words = words.iter().copied().chain([self.admin.as_str()]);
        let mut program = Program::spawn("culvert", words, &[]);
        let status = program.wait_exit(PATIENCE).await;
        assert!(status.success(), "{}", program.log());
        program.log()
    }
}

/// Returns the number of opened dials of a tunnel.
async fn dials(tunnel: &str) -> f64 {
    let metrics = scrape((SEED, 8134).into()).await.unwrap();
    let labels = [("tunnel", tunnel), ("outcome", "opened")];
    let dials = metrics.value("culvert_tunnel_dials_total", &labels);
    dials.unwrap_or_default()
}
