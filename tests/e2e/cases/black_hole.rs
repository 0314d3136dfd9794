//! A path that loses large packets without a report.

use std::time::Duration;

use tokio::time::{Instant, timeout};

use super::traffic::{FAR_SIDE_PROXY, create_config_map, service_proxy_carries_20_mb_each_way};
use crate::lab::{ACCOUNT, AUDIENCE, Egress, Lab, ServerOptions};

const EGRESS: Egress = Egress::GrpcUds;

/// Time after which a transfer that stalls counts as failed. With probes, the kernel finds the size within some 3 s.
const STALL: Duration = Duration::from_secs(15);

/// Agents connect, but bulk data stalls, unless the kernels probe for the size of packets or the route has its MTU.
pub(super) async fn bulk_passes_with_probes_or_with_the_mtu_of_the_path(lab: &mut Lab) {
    lab.tunnel(EGRESS).await;
    let path = lab.narrow_path();
    path.probe(false);
    connect_again(lab).await;
    let bulk = format!("--raw={FAR_SIDE_PROXY}/bytes/1000000");
    let answer = timeout(STALL, lab.kubectl.bytes(&["get", &bulk], &[])).await;
    let has_passed = matches!(answer, Ok(Ok(_)));
    assert!(!has_passed, "the path does not lose large packets");

    path.probe(true);
    connect_again(lab).await;
    let started = Instant::now();
    service_proxy_carries_20_mb_each_way(lab, EGRESS).await;
    println!("with probes: 40 MB in {:?}", started.elapsed());
    create_config_map(lab, "allow").await.unwrap();

    path.probe(false);
    path.set_mtu_of_the_route();
    connect_again(lab).await;
    let started = Instant::now();
    service_proxy_carries_20_mb_each_way(lab, EGRESS).await;
    println!("with the MTU of the path: 40 MB in {:?}", started.elapsed());
    create_config_map(lab, "allow").await.unwrap();
    lab.stop_tunnel();
    path.remove();
}

/// Replaces server and agent, so that the connection between them is new.
async fn connect_again(lab: &mut Lab) {
    lab.stop_tunnel();
    lab.server = Some(lab.start_server(EGRESS, &ServerOptions::default()));
    let token = lab.token(ACCOUNT, AUDIENCE).await;
    lab.agent = Some(lab.start_agent(&token, &[]));
    lab.wait_for_agents(1).await;
}
