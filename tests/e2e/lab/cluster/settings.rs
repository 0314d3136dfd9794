//! The configuration files of a node's programs.

use std::path::Path;

use culvert_kit::pki::Pair;
use serde_json::json;

use super::super::SEED;

/// Network of all pods.
pub(super) const PODS: &str = "10.244.0.0/16";
/// Network of all pods of the user cluster.
pub(crate) const TENANT_PODS: &str = "10.245.0.0/16";

/// A pod network of the node.
#[derive(Debug, Clone, Copy)]
pub(crate) struct PodNetwork {
    /// Name of the bridge.
    bridge: &'static str,
    /// Addresses of the pods.
    pub(super) subnet: &'static str,
    /// First part of the addresses.
    pub(crate) prefix: &'static str,
}

/// The pod network at the start of the node.
pub(super) const FIRST: PodNetwork = PodNetwork {
    bridge: "pods",
    subnet: "10.244.1.0/24",
    prefix: "10.244.1.",
};

/// The pod network that replaces the first.
pub(super) const SECOND: PodNetwork = PodNetwork {
    bridge: "others",
    subnet: "10.244.2.0/24",
    prefix: "10.244.2.",
};

/// The pod network of a second node.
pub(super) const OVERLAY: PodNetwork = PodNetwork {
    bridge: "pods",
    subnet: "10.244.3.0/24",
    prefix: "10.244.3.",
};

/// The pod network of the user cluster's node.
pub(super) const TENANT: PodNetwork = PodNetwork {
    bridge: "tenants",
    subnet: "10.245.1.0/24",
    prefix: "10.245.1.",
};

/// Image of the pause containers and of the test pods.
pub(crate) const POD_IMAGE: &str = "localhost/culvert-e2e-pod:e2e";

/// Returns containerd's configuration. The folder `dir` has its data, and `run` the state that a restart of the
/// machine deletes.
pub(super) fn containerd(dir: &Path, run: &Path) -> String {
    let (dir, run) = (dir.display(), run.display());
    format!(
        r#"version = 2
root = "{dir}/containerd"
state = "{run}/containerd"
[grpc]
  address = "{run}/containerd.sock"
[plugins."io.containerd.internal.v1.opt"]
  path = "{dir}/opt"
[plugins."io.containerd.grpc.v1.cri"]
  sandbox_image = "{POD_IMAGE}"
  disable_apparmor = true
  restrict_oom_score_adj = true
  [plugins."io.containerd.grpc.v1.cri".containerd]
    snapshotter = "overlayfs"
  [plugins."io.containerd.grpc.v1.cri".cni]
    bin_dir = "/usr/lib/cni"
    conf_dir = "{dir}/cni"
"#
    )
}

/// Returns the configuration of a pod network, with an MTU of overlay networks.
pub(super) fn pod_network(run: &Path, network: PodNetwork) -> String {
    let PodNetwork { bridge, subnet, .. } = network;
    let plugin = json!({
        "type": "bridge", "bridge": bridge, "isGateway": true, "hairpinMode": true, "mtu": 1450,
        "ipam": {
            "type": "host-local", "dataDir": run.join("leases"),
            "ranges": [[{"subnet": subnet}]], "routes": [{"dst": "0.0.0.0/0"}],
        },
    });
    let ports = json!({"type": "portmap", "capabilities": {"portMappings": true}});
    json!({"cniVersion": "0.4.0", "name": bridge, "plugins": [plugin, ports]}).to_string()
}

/// Returns the kubelet's configuration. It also runs on a machine with swap, or with the first version of cgroups.
pub(super) fn kubelet(dir: &Path, run: &Path, authority: &Path, serving: &Pair) -> String {
    json!({
        "apiVersion": "kubelet.config.k8s.io/v1beta1",
        "kind": "KubeletConfiguration",
        "authentication": {
            "anonymous": {"enabled": false},
            "webhook": {"enabled": true},
            "x509": {"clientCAFile": authority},
        },
        "authorization": {"mode": "Webhook"},
        "tlsCertFile": serving.cert,
        "tlsPrivateKeyFile": serving.key,
        "containerRuntimeEndpoint": format!("unix://{}/containerd.sock", run.display()),
        "volumePluginDir": dir.join("plugins"),
        "podLogsDir": dir.join("logs"),
        "resolvConf": dir.join("resolv.conf"),
        "clusterDomain": "cluster.local",
        "clusterDNS": [SEED],
        "cgroupDriver": "cgroupfs",
        "cgroupsPerQOS": false,
        "enforceNodeAllocatable": [],
        "failCgroupV1": false,
        "failSwapOn": false,
        "localStorageCapacityIsolation": false,
        "evictionHard": {"memory.available": "1Mi"},
        // An image that was imported cannot be pulled again.
        "imageGCHighThresholdPercent": 100,
        "registerNode": true,
        "nodeStatusUpdateFrequency": "2s",
        "nodeLeaseDurationSeconds": 10,
    })
    .to_string()
}
