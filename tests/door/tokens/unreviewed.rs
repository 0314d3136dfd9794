//! Calls of strangers: what the server accepts before the review of a token.

use std::fmt::Display;
use std::sync::Arc;
use std::sync::atomic::{AtomicUsize, Ordering};
use std::time::Duration;

use culvert_proto::agent_service_client::AgentServiceClient;
use culvert_proto::{Packet, packet};
use culvert_tests::eventually;
use culvert_tests::kube_api::Fault;
use tokio::io::{AsyncReadExt as _, AsyncWriteExt as _};
use tokio::net::TcpStream;
use tokio::task::JoinSet;
use tokio::time::{sleep, timeout};
use tokio_rustls::client::TlsStream;
use tonic::Request;
use tower::service_fn;

use super::{Caller, Cluster, some_at_once};
use crate::frames::{END_HEADERS, END_STREAM, HEADERS, SETTINGS, field, frame};
use crate::support::LIMIT;

/// Waits until a value no longer changes, and returns the value.
async fn settled<T: PartialEq + Display>(what: &str, mut value: impl AsyncFnMut() -> T) -> T {
    let mut last = None;
    eventually(&format!("{what} no longer changes"), LIMIT, async || {
        sleep(Duration::from_millis(500)).await;
        let now = value().await;
        match last.replace(now) {
            Some(before) if last.as_ref() == Some(&before) => Ok(before),
            before => Err(before.map_or_else(String::new, |before| before.to_string())),
        }
    })
    .await
}

/// Number of calls with large bodies, and of packets of 64 KiB in each: 250 MiB together.
const BODIES: usize = 8;
const BODY_PACKETS: usize = 500;

#[tokio::test]
async fn body_before_authentication_is_not_read() {
    let cluster = Cluster::ours().await;
    let silent = Fault::delay(LIMIT);
    cluster.api.fault(silent.on("tokenreviews"));
    let before = cluster.server.rss();
    let (sent, mut floods) = (Arc::new(AtomicUsize::new(0)), JoinSet::new());
    // The server gives up a review after 10 s, so all reviews begin at about the same time.
    let callers = some_at_once((0..BODIES).map(|_| cluster.caller())).await;
    for (token, Caller(sender)) in callers.into_iter().enumerate() {
        let service = service_fn(move |request| sender.clone().send_request(request));
        let origin = http::Uri::from_static("https://localhost");
        let mut client = AgentServiceClient::with_origin(service, origin);
        let data = culvert_proto::Data {
            connect_id: 1,
            data: vec![7; 64 << 10].into(),
            ..Default::default()
        };
        let packet = Packet {
            r#type: culvert_proto::PacketType::Data.into(),
            payload: Some(packet::Payload::Data(data)),
        };
        let sent = Arc::clone(&sent);
        let packets = std::iter::repeat_n(packet, BODY_PACKETS).inspect(move |_| {
            sent.fetch_add(1, Ordering::Relaxed);
        });
        let mut request = Request::new(tokio_stream::iter(packets));
        let bearer = format!("Bearer {token}").parse().unwrap();
        request.metadata_mut().insert("authorization", bearer);
        let id = "flood".parse().unwrap();
        request.metadata_mut().insert("agentid", id);
        floods.spawn(async move { client.connect(request).await.map(drop) });
    }
    let is_review = |path: &str| path.contains("tokenreviews");
    let asked = async || {
        let requests = cluster.api.requests();
        requests.iter().filter(|r| is_review(&r.path)).count() == BODIES
    };
    eventually("the server reviews all tokens", LIMIT, asked).await;
    let sent = settled("the bodies", async || sent.load(Ordering::Relaxed)).await;
    // The window of a connection, and packets that the client prepares.
    assert!(sent <= 10 * BODIES, "{sent} packets");
    let ended = floods.try_join_next();
    assert!(ended.is_none(), "a call ended before the review: {ended:?}");
    // The figure is the largest memory so far, so a call may end meanwhile.
    let growth = settled("memory", async || cluster.server.peak_rss()).await - before;
    assert!(growth < 32 << 20, "{growth} bytes");
}

/// Number of connections, each with 16 calls and their trailers, all with 400 fields: 100 MiB together.
const HEADER_FLOODS: usize = 100;
/// Limit of the server's memory growth meanwhile, in bytes. The limit includes the TLS connections, in a build without
/// optimizations.
const HEADER_FLOOD_BYTES: u64 = 48 << 20;

#[tokio::test]
async fn header_fields_before_authentication_occupy_little_memory() {
    let cluster = Cluster::ours().await;
    let silent = Fault::delay(LIMIT);
    cluster.api.fault(silent.on("tokenreviews"));
    let call = [
        field(":method", "POST"),
        field(":scheme", "https"),
        field(":path", "/AgentService/Connect"),
        field("content-type", "application/grpc"),
        field("te", "trailers"),
        field("agentid", "flood"),
        field("authorization", "Bearer unknown"),
        // The field that all others refer to, with one byte each.
        vec![0x40, 1, b'x', 0],
    ];
    let more = vec![0x80 | 62; 400];
    let fields = [call.concat(), more.clone()].concat();
    let mut flood = b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n".to_vec();
    flood.extend(frame(SETTINGS, 0, 0, &[]));
    for id in (1..32).step_by(2) {
        flood.extend(frame(HEADERS, END_HEADERS, id, &fields));
        flood.extend(frame(HEADERS, END_HEADERS | END_STREAM, id, &more));
    }
    let before = cluster.server.rss();
    // The server closes a peer that is not admitted within 30 s, so several connections open at once.
    let opening = (0..HEADER_FLOODS).map(|_| async {
        let mut stream = cluster.tls().await;
        stream.write_all(&flood).await.unwrap();
        stream.flush().await.unwrap();
        stream
    });
    let mut floods = some_at_once(opening).await;
    let is_review = |path: &str| path.contains("tokenreviews");
    eventually("the server reviews the token", LIMIT, async || {
        let requests = cluster.api.requests();
        requests.iter().any(|r| is_review(&r.path))
    })
    .await;
    let growth = settled("memory", async || cluster.server.peak_rss()).await - before;
    assert!(growth < HEADER_FLOOD_BYTES, "{growth} bytes");
    // A closed connection would occupy no memory.
    let mut open = 0;
    for stream in &mut floods {
        open += usize::from(is_open(stream).await);
    }
    assert_eq!(open, HEADER_FLOODS);
}

/// Returns true if the peer has not closed the connection. Discards the bytes that have arrived.
async fn is_open(stream: &mut TlsStream<TcpStream>) -> bool {
    let mut bytes = [0; 4096];
    loop {
        match timeout(Duration::from_millis(1), stream.read(&mut bytes)).await {
            Ok(Ok(1..)) => {}
            ended => return ended.is_err(),
        }
    }
}
