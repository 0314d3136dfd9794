//! Listeners on the node ports of Services.

use culvert_kit::check;
use culvert_kit::services::Services;
use culvert_tests::eventually;
use tokio::net::{TcpListener, TcpStream};

use crate::support::{Door, LIMIT, Upstream};

#[tokio::test]
async fn ports_open_and_close_with_their_services() {
    let services = Services::start().await.unwrap();
    let mut door = Door::start(&[]).await;
    let (one, two) = (door.ports.next_port(), door.ports.next_port());
    let upstream = |name: &str, port| Upstream::new(name, services.raw).node_port(port);
    door.route(&[upstream("ns/a", one)]).await;
    let connect = async |port| TcpStream::connect(("127.0.0.1", port)).await;
    eventually("the port is open", LIMIT, async || {
        connect(one).await.map(|_| ())
    })
    .await;
    check::download(connect(one).await.unwrap(), 5_000_000)
        .await
        .unwrap();
    let stays = connect(one).await.unwrap();

    door.route(&[upstream("ns/b", two)]).await;
    eventually("the port is closed", LIMIT, async || {
        connect(one).await.is_err()
    })
    .await;
    eventually("the new port is open", LIMIT, async || {
        connect(two).await.map(|_| ())
    })
    .await;
    check::upload(connect(two).await.unwrap(), 5_000_000)
        .await
        .unwrap();
    // A connection outlives its listener.
    check::echo(stays, 5, 1000).await.unwrap();
}

#[tokio::test]
async fn a_port_in_use_is_reported_and_retried_and_affects_no_other_port() {
    let services = Services::start().await.unwrap();
    let mut door = Door::start(&[]).await;
    let (taken, free) = (door.ports.next_port(), door.ports.next_port());
    let owner = TcpListener::bind(("127.0.0.1", taken)).await.unwrap();
    let upstream = |name: &str, port| Upstream::new(name, services.raw).node_port(port);
    door.route(&[upstream("ns/a", taken), upstream("ns/b", free)])
        .await;
    let connect = async |port| TcpStream::connect(("127.0.0.1", port)).await;
    eventually("the free port is open", LIMIT, async || {
        connect(free).await.map(|_| ())
    })
    .await;
    eventually("one port is reported as closed", LIMIT, async || {
        door.value("culvert_nodeport_proxy_closed_ports", &[]).await == 1.0
    })
    .await;
    let line = door.program.wait_for_log("the port is in use", LIMIT).await;
    assert!(line.contains(&taken.to_string()), "{line}");
    drop(owner);
    eventually("the released port is open", LIMIT, async || {
        connect(taken).await.map(|_| ())
    })
    .await;
    check::echo(connect(taken).await.unwrap(), 2, 100)
        .await
        .unwrap();
    assert_eq!(
        door.value("culvert_nodeport_proxy_closed_ports", &[]).await,
        0.0
    );
}
