//! A second node, whose pods reach those of the first over VXLAN with an MTU of 1450, as with flannel.

use culvert_tests::openvpn::Namespace;
use culvert_tests::{eventually, namespace};
use serde_json::json;

use super::super::{NODE_LINK, PATIENCE, control_plane, iptables};
use super::settings::FIRST;
use super::worker::SECOND_NODE;
use super::{Cluster, POD_IMAGE, Worker, image, is_true};

/// Address of the second node on the link to the seed.
const LINK: &str = "192.168.79.2";
/// Addresses of both ends of the overlay.
const ENDS: [&str; 2] = ["169.254.79.1", "169.254.79.2"];
/// Name of the interface at both ends.
const INTERFACE: &str = "overlay";
/// Pod of the second node.
pub(crate) const POD: &str = "overlay";

/// The second node. Dropping the value ends its programs.
pub(crate) struct Overlay {
    _worker: Worker,
    first: Namespace,
}

impl Overlay {
    /// Starts the node, with a pod that serves byte streams.
    pub(crate) async fn create(cluster: &Cluster) -> Self {
        let first = cluster.lab.node.clone();
        let second = link();
        let subnets = [FIRST.subnet, SECOND_NODE.network.subnet];
        let links = [NODE_LINK.to_string(), LINK.to_owned()];
        for (at, node) in [&first, &second].into_iter().enumerate() {
            let (local, remote) = (&links[at], &links[1 - at]);
            node.ip(&format!(
                "link add {INTERFACE} mtu 1450 type vxlan id 7 dstport 4789 local {local} remote {remote} dev seed"
            ));
            node.ip(&format!("address add {}/30 dev {INTERFACE}", ENDS[at]));
            node.ip(&format!("link set {INTERFACE} up"));
            let (subnet, next) = (subnets[1 - at], ENDS[1 - at]);
            node.ip(&format!("route add {subnet} via {next} dev {INTERFACE}"));
        }
        let authority = &cluster.lab.credentials.authority;
        let (dir, url) = (cluster.folder("second"), control_plane::url());
        let programs = &cluster.lab.programs;
        let mut worker = Worker::create(&second, programs, &dir, authority, &url, SECOND_NODE);
        worker.power_on().await;
        worker.import(&image("pod"));
        let kubectl = &cluster.lab.kubectl;
        eventually("the second node is ready", PATIENCE, async || {
            let node = kubectl.get(&["node", SECOND_NODE.name]).await?;
            is_true(&node, "Ready")
        })
        .await;
        let pod = json!({
            "apiVersion": "v1", "kind": "Pod",
            "metadata": {"name": POD, "namespace": "default"},
            "spec": {
                "nodeName": SECOND_NODE.name,
                "automountServiceAccountToken": false,
                "terminationGracePeriodSeconds": 1,
                "containers": [{
                    "name": "server", "image": POD_IMAGE, "imagePullPolicy": "Never",
                    "command": ["pod", "serve", "/tls/tls.crt", "/tls/tls.key"],
                    "volumeMounts": [{"name": "tls", "mountPath": "/tls"}],
                }],
                "volumes": [{"name": "tls", "secret": {"secretName": "far-side"}}],
            },
        });
        kubectl.apply(&pod.to_string()).await;
        cluster.pod_is_ready(POD).await;
        Self {
            _worker: worker,
            first,
        }
    }

    /// Returns the number of bytes that the first node has received over VXLAN.
    pub(crate) fn received(&self) -> u64 {
        let shown = self.first.ip(&format!("-s -j link show {INTERFACE}"));
        let shown: serde_json::Value = serde_json::from_str(&shown).expect("JSON");
        let bytes = shown[0]["stats64"]["rx"]["bytes"].as_u64();
        bytes.expect("a number of bytes")
    }

    /// Removes the node and its end of the overlay.
    pub(crate) async fn remove(self, cluster: &Cluster) {
        let kubectl = &cluster.lab.kubectl;
        let pod = ["delete", "pod", POD, "--force", "--grace-period=0"];
        kubectl.must(&pod).await;
        kubectl.must(&["delete", "node", SECOND_NODE.name]).await;
        self.first.ip(&format!("link del {INTERFACE}"));
    }
}

/// Links the test's own network with the second node. Only packets of the overlay pass between the nodes.
fn link() -> Namespace {
    let ip = |words: &str| namespace::ip(words).unwrap_or_else(|why| panic!("ip {words}: {why}"));
    let network = Namespace::add("second");
    ip("link add second type veth peer name seed netns second");
    ip(&format!(
        "address add {}/24 dev second",
        SECOND_NODE.gateway
    ));
    ip("link set second up");
    network.ip(&format!("address add {LINK}/24 dev seed"));
    network.ip("link set seed up");
    std::fs::write("/proc/sys/net/ipv4/ip_forward", "1").expect("ip_forward");
    for (from, to) in [("node", "second"), ("second", "node")] {
        iptables(&format!(
            "-A FORWARD -i {from} -o {to} -p udp --dport 4789 -j ACCEPT"
        ));
        iptables(&format!("-A FORWARD -i {from} -o {to} -j DROP"));
    }
    network
}
