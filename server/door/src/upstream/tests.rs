#![allow(clippy::unwrap_used, clippy::indexing_slicing)]

use culvert_host::telemetry::metrics::Registry;
use tokio::io::AsyncReadExt as _;
use tokio::net::TcpListener;

use super::*;
use crate::relay::write_all;

async fn listener() -> (TcpListener, SocketAddr) {
    let listener = TcpListener::bind("127.0.0.1:0").await.unwrap();
    let address = listener.local_addr().unwrap();
    (listener, address)
}

fn backend(endpoints: &[SocketAddr]) -> Backend {
    Backend {
        endpoints: endpoints.to_vec(),
        ..Backend::default()
    }
}

const CLIENT: IpAddr = IpAddr::V4(std::net::Ipv4Addr::new(192, 0, 2, 1));

fn upstream(endpoints: &[SocketAddr], limit: u64) -> Arc<Upstream> {
    let key = UpstreamKey::of_service("cluster-a", "apiserver-external", "secure");
    Upstream::new(key, &backend(endpoints), limit)
}

#[tokio::test]
async fn endpoints_rotate_and_a_refusing_endpoint_is_skipped() {
    let (_a, a) = listener().await;
    let (_b, b) = listener().await;
    let (gone, c) = listener().await;
    drop(gone);
    let upstream = upstream(&[a, b, c], 100);
    let mut peers = Vec::new();
    for _ in 0..6 {
        let connected = upstream.connect(CLIENT, b"hello").await.unwrap();
        peers.push(connected.stream.peer_addr().unwrap());
    }
    // Every third connection finds its endpoint gone and uses the next endpoint.
    assert_eq!(peers, [a, b, a, a, b, a]);
    assert_eq!(upstream.stats.failed.load(Ordering::Relaxed), 2);
    upstream.set_backend(&backend(&[c]));
    let refused = upstream.connect(CLIENT, &[]).await;
    assert_eq!(refused.err(), Some(ConnectError::Refused));
    upstream.set_backend(&Backend::default());
    let none = upstream.connect(CLIENT, &[]).await;
    assert_eq!(none.err(), Some(ConnectError::NoEndpoint));
    assert_eq!(upstream.stats.active.load(Ordering::Relaxed), 0);
}

#[tokio::test]
async fn one_address_leaves_places_for_others() {
    let (_a, a) = listener().await;
    let upstream = upstream(&[a], 18);
    let mut open = Vec::new();
    let refused = loop {
        match upstream.connect(CLIENT, &[]).await {
            Ok(connected) => open.push(connected),
            Err(error) => break error,
        }
    };
    assert_eq!((open.len(), refused), (16, ConnectError::Share));
    let other = IpAddr::from([192, 0, 2, 2]);
    open.push(upstream.connect(other, &[]).await.unwrap());
    drop(open);
    assert!(upstream.connect(CLIENT, &[]).await.is_ok());
    assert_eq!(upstream.stats.active.load(Ordering::Relaxed), 0);
}

#[tokio::test]
async fn no_more_connections_are_open_than_the_limit_allows() {
    let (_a, a) = listener().await;
    let upstream = upstream(&[a], 1);
    let first = upstream.connect(CLIENT, &[]).await.unwrap();
    let second = upstream.connect(CLIENT, &[]).await;
    assert_eq!(second.err(), Some(ConnectError::Overflow));
    drop(first);
    assert!(upstream.connect(CLIENT, &[]).await.is_ok());
    let page = Registry::new(&[])
        .unwrap()
        .render_with(|page| add_metrics(&[upstream], page));
    let line = "envoy_cluster_upstream_cx_overflow{envoy_cluster_name=\
                \"cluster-a/apiserver-external-secure\"} 1\n";
    assert!(page.contains(line), "{page}");
}

/// Sends the rest of `first` after the handshake; returns true if the endpoint receives all of `first`.
async fn arrives(listener: &TcpListener, opened: (TcpStream, usize), first: &[u8]) -> bool {
    let (stream, sent) = opened;
    let rest = write_all(&stream, &first[sent..]);
    let receive = async {
        let (mut accepted, _) = listener.accept().await.unwrap();
        let mut received = vec![0; first.len()];
        accepted.read_exact(&mut received).await.unwrap();
        received
    };
    let (written, received) = tokio::join!(rest, receive);
    written.unwrap();
    received == first
}

#[tokio::test]
async fn the_first_bytes_arrive_once_with_the_handshake_or_after_it() {
    let mut at_once = 0;
    for host in ["127.0.0.1:0", "[::1]:0"] {
        let listener = TcpListener::bind(host).await.unwrap();
        let address = listener.local_addr().unwrap();
        for length in [0, 1, 500, 16 * 1024 * 1024] {
            let first: Vec<u8> = (0..length).map(|at| (at % 251) as u8).collect();
            let opened = super::open(address, &first).await.unwrap();
            at_once += usize::from(opened.1 > 0);
            assert!(arrives(&listener, opened, &first).await, "{length} bytes");
        }
    }
    // The kernel may be too busy in one of the cases, but not in all.
    assert!(at_once > 0);
}

/// Returns a listener that answers no SYN until its first connection is accepted: the queue has room for a
/// single connection. Clients repeat a SYN after a second.
async fn full_listener() -> (TcpListener, SocketAddr, TcpStream) {
    let listener = Socket::new(Domain::IPV4, Type::STREAM, None).unwrap();
    let any: SocketAddr = "127.0.0.1:0".parse().unwrap();
    listener.bind(&any.into()).unwrap();
    listener.listen(0).unwrap();
    listener.set_nonblocking(true).unwrap();
    let listener = TcpListener::from_std(listener.into()).unwrap();
    let address = listener.local_addr().unwrap();
    let first = TcpStream::connect(address).await.unwrap();
    (listener, address, first)
}

#[tokio::test]
async fn silent_endpoint_costs_one_timeout_until_it_answers_probes() {
    let (full, a, _first) = full_listener().await;
    let (_b, b) = listener().await;
    let upstream = upstream(&[a, b], 100);
    let connect = async || {
        let connected = upstream.connect(CLIENT, &[]).await.unwrap();
        connected.stream.peer_addr().unwrap()
    };
    for _ in 0..6 {
        assert_eq!(connect().await, b);
    }
    assert_eq!(upstream.stats.timed_out.load(Ordering::Relaxed), 1);
    // Accepting frees the queue, and the next probe has an answer. From now on the queue has room for all
    // connections.
    socket2::SockRef::from(&full).listen(128).unwrap();
    let accept = async { while full.accept().await.is_ok() {} };
    let recovers = async {
        while connect().await != a {
            sleep(Duration::from_millis(20)).await;
        }
    };
    tokio::select! {
        () = accept => unreachable!(),
        () = recovers => {}
    }
    assert_eq!(upstream.stats.timed_out.load(Ordering::Relaxed), 1);
}

#[tokio::test]
async fn slow_endpoint_is_waited_for() {
    let (listener, address, _first) = full_listener().await;
    let mut slow = std::pin::pin!(super::open(address, b"hello"));
    let early = timeout(Duration::from_millis(100), &mut slow).await;
    assert!(early.is_err(), "the queue has room");
    let _first = listener.accept().await.unwrap();
    let opened = slow.await.unwrap();
    assert_eq!(opened.1, 0);
    assert!(arrives(&listener, opened, b"hello").await);
}
