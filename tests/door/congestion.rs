//! Congestion control of the connections of clients and of node tunnels.

use culvert_kit::services::Services;
use culvert_tests::congestion::{is_used, other_control};
use culvert_tests::eventually;
use tokio::net::TcpStream;

use crate::node::Node;
use crate::support::{Door, LIMIT, Upstream};

const RAW: &str = "raw.demo.svc.cluster.local:443";

#[tokio::test]
async fn link_congestion_of_the_front_door_sets_the_congestion_control_of_its_clients() {
    let Some(control) = other_control() else {
        return;
    };
    let flag = format!("--link-congestion={control}");
    let services = Services::start().await.unwrap();
    let mut door = Door::start_with(&[], &[&flag]).await;
    let port = door.ports.next_port();
    door.route(&[Upstream::new("demo/raw", services.raw).node_port(port)])
        .await;
    let _node_port = eventually("the node port is open", LIMIT, async || {
        TcpStream::connect(("127.0.0.1", port)).await
    })
    .await;
    let _sni = TcpStream::connect(door.sni).await.unwrap();
    let _tunneling = TcpStream::connect(door.tunneling).await.unwrap();
    for port in [port, door.sni.port(), door.tunneling.port()] {
        is_used(control, &format!("sport = :{port}")).await;
    }
}

#[tokio::test]
async fn link_congestion_of_the_node_tunnel_sets_the_congestion_control_to_the_front_door() {
    let Some(control) = other_control() else {
        return;
    };
    let flag = format!("--link-congestion={control}");
    let services = Services::start().await.unwrap();
    let door = Door::start(&[Upstream::new("demo/raw", services.raw).authority(RAW)]).await;
    let node = Node::start(door.tunneling, &[RAW], &[&flag]).await;
    node.is_ready().await;
    let port = door.tunneling.port();
    is_used(control, &format!("dport = :{port}")).await;
}
