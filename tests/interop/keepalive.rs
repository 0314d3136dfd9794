//! Idle links with a short `--keepalive-time`.

use std::time::Duration;

use culvert_kit::services::Services;
use culvert_tests::interop::Interop;
use culvert_tests::{Executable, Mode, Topology, Transport};
use tokio::io::{AsyncReadExt as _, AsyncWriteExt as _};
use tokio::time::{sleep, timeout};

use crate::case::LIMIT;

/// Silence on the link. A stock server closes a connection at the fourth ping if the pings come every 10 s.
const IDLE: Duration = Duration::from_secs(50);

#[tokio::test]
async fn idle_connection_through_a_stock_server_survives_a_short_keepalive_time() {
    let Some(interop) = Interop::get() else {
        return;
    };
    let services = Services::start().await.expect("the services");
    let topology = Topology::builder(Mode::HttpConnect, Transport::Uds)
        .server(Executable::At(interop.proxy_server.clone()), &[])
        .agent(Executable::Ours, &["--keepalive-time=10s"])
        .start()
        .await;
    let raw = services.raw.to_string();
    let mut stream = topology.connect(&raw).await.expect("a dial");
    stream.write_all(b"echo\n").await.expect("a write");
    for pause in [Duration::ZERO, IDLE] {
        sleep(pause).await;
        let mut back = [0; 5];
        stream.write_all(b"hello").await.expect("a write");
        stream.flush().await.expect("a flush");
        let read = timeout(LIMIT, stream.read_exact(&mut back)).await;
        read.expect("an answer").expect("an open connection");
        assert_eq!(&back, b"hello");
    }
}
