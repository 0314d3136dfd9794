//! Many endpoints that reset their connections while the client of one HTTP/2 connection still sends.

use std::time::Duration;

use culvert_kit::services::Services;
use socket2::SockRef;
use tokio::io::AsyncWriteExt;
use tokio::net::TcpListener;

use crate::frames::{self, DATA, END_HEADERS, GOAWAY, HEADERS, RST_STREAM, connect_fields, frame};
use crate::support::{Door, Upstream};

const RAW: &str = "raw.demo.svc.cluster.local:443";
const ABRUPT: &str = "abrupt.demo.svc.cluster.local:443";

/// Number of tunnels to the endpoint: more than the front door remembers reset streams, and tolerates errors.
const TUNNELS: usize = 400;

#[tokio::test]
async fn resets_of_many_uploads_do_not_end_the_other_tunnels() {
    let services = Services::start().await.unwrap();
    let abrupt = TcpListener::bind("127.0.0.1:0").await.unwrap();
    let routes = [
        Upstream::new("demo/raw", services.raw).authority(RAW),
        Upstream::new("demo/abrupt", abrupt.local_addr().unwrap()).authority(ABRUPT),
    ];
    let door = Door::start(&routes).await;
    let (mut frames, mut write) = frames::connect(door.tunneling, &[]).await;
    let open = frame(HEADERS, END_HEADERS, 1, &connect_fields(RAW));
    let echo = frame(DATA, 0, 1, b"echo\n");
    write.write_all(&[open, echo].concat()).await.unwrap();
    let mut endpoints = Vec::new();
    for id in (3..).step_by(2).take(TUNNELS) {
        let open = frame(HEADERS, END_HEADERS, id, &connect_fields(ABRUPT));
        write.write_all(&open).await.unwrap();
        endpoints.push(abrupt.accept().await.unwrap().0);
        let answer = frames.next_of(HEADERS).await.unwrap();
        assert_eq!(answer.status(), Some(200));
    }
    for endpoint in &endpoints {
        let socket = SockRef::from(endpoint);
        socket.set_linger(Some(Duration::ZERO)).unwrap();
    }
    drop(endpoints);
    for _ in 0..TUNNELS {
        let reset = frames.next_of(RST_STREAM).await.expect("a reset");
        // As if the bytes had been in flight.
        let late = frame(DATA, 0, reset.stream, b"late");
        write.write_all(&late).await.unwrap();
    }
    write.write_all(&frame(DATA, 0, 1, b"x")).await.unwrap();
    loop {
        let next = frames.next().await.expect("an open connection");
        assert_ne!(next.kind, GOAWAY);
        if next.kind == DATA && !next.payload.is_empty() {
            assert_eq!((next.stream, &next.payload[..]), (1, &b"x"[..]));
            break;
        }
    }
}
