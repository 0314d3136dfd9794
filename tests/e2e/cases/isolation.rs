//! Requests without a tunnel.

use std::io;
use std::time::Duration;

use tokio::net::TcpStream;
use tokio::time::timeout;

use super::traffic::create_config_map;
use crate::lab::{ACCOUNT, AUDIENCE, Egress, FAR_SIDE, Lab, SEED};

/// Time for a connect. A connect on this machine takes less than a millisecond.
const CONNECT: Duration = Duration::from_secs(3);

/// A connect from the seed gets no answer. The node connects to the seed and to itself. Without an egress
/// selector, the webhook's calls time out.
pub(super) async fn seed_cannot_reach_the_node_without_a_tunnel(lab: &mut Lab) {
    lab.no_tunnel().await;
    let from_seed = timeout(CONNECT, TcpStream::connect(FAR_SIDE)).await;
    assert!(from_seed.is_err(), "not a timeout: {from_seed:?}");
    lab.node.connect(FAR_SIDE).await.expect("the far side");
    let api = std::net::SocketAddrV4::new(SEED, 6443);
    lab.node.connect(api).await.expect("kube-apiserver");
    lab.sources.take();
    let error = create_config_map(lab, "allow").await.unwrap_err();
    assert!(error.contains("failed calling webhook"), "{error}");
    assert!(error.contains("context deadline exceeded"), "{error}");
    assert_eq!(lab.sources.take(), [] as [std::net::IpAddr; 0]);
}

/// Requests fail while no agent is connected, and succeed again with the next agent.
pub(super) async fn requests_fail_while_the_agent_is_away(lab: &mut Lab, egress: Egress) {
    lab.tunnel(egress).await;
    lab.agent = None;
    lab.wait_for_agents(0).await;
    let error = create_config_map(lab, "allow").await.unwrap_err();
    assert!(error.contains("failed calling webhook"), "{error}");
    let token = lab.token(ACCOUNT, AUDIENCE).await;
    lab.agent = Some(lab.start_agent(&token, &[]));
    lab.wait_for_agents(1).await;
    create_config_map(lab, "allow").await.unwrap();
    let connect: io::Result<_> = lab.node.connect(FAR_SIDE).await;
    connect.expect("the far side");
}
