//! Pods on another node than the agents, behind an overlay network.

use crate::lab::Egress;
use crate::lab::cluster::{Cluster, OVERLAY_POD, Overlay};

/// Bytes of the transfer.
const COUNT: usize = 20_000_000;

/// An agent on one node carries 20 MB of a pod on another node, over VXLAN with an MTU of 1450.
pub(super) async fn agent_reaches_a_pod_over_vxlan(cluster: &mut Cluster) {
    cluster.tunnel(Egress::GrpcUds).await;
    let overlay = Overlay::create(cluster).await;
    let before = overlay.received();
    let path =
        format!("--raw=/api/v1/namespaces/default/pods/{OVERLAY_POD}:8080/proxy/bytes/{COUNT}");
    let bytes = cluster.lab.kubectl.bytes(&["get", &path], &[]).await;
    let bytes = bytes.unwrap();
    assert_eq!(bytes.len(), COUNT);
    let mut all = bytes.iter().enumerate();
    assert!(all.all(|(at, byte)| usize::from(*byte) == at % 251));
    let carried = overlay.received() - before;
    assert!(carried > COUNT as u64, "{carried} bytes over VXLAN");
    overlay.remove(cluster).await;
}
