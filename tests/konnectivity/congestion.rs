//! Congestion control of the connections between servers and agents.

use culvert_tests::congestion::{is_used, other_control};
use culvert_tests::{Mode, Topology, Transport};

#[tokio::test]
async fn link_congestion_sets_the_congestion_control_of_both_ends() {
    let Some(control) = other_control() else {
        return;
    };
    let flag = format!("--link-congestion={control}");
    let topology = Topology::builder(Mode::HttpConnect, Transport::Uds)
        .servers(1)
        .server_args(&[&flag])
        .agents(1)
        .agent_args(&[&flag])
        .start()
        .await;
    let port = topology.agent_address(0).port();
    is_used(control, &format!("sport = :{port}")).await;
    is_used(control, &format!("dport = :{port}")).await;
}
