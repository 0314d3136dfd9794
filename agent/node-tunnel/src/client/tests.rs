//! Tests of clients, with a proxy in memory.
#![allow(clippy::unwrap_used, clippy::indexing_slicing)]

use std::net::{IpAddr, Ipv4Addr};

use culvert_host::flags::HostPort;
use culvert_host::runtime::shards::Shards;
use culvert_stream::{Sink as _, Source as _};
use http::Response;
use http::uri::Authority;
use tokio::io::{
    AsyncReadExt as _, AsyncWriteExt as _, DuplexStream, ReadHalf, WriteHalf, duplex, split,
};
use tokio::net::{TcpListener, TcpStream};
use tokio::sync::mpsc;
use tokio::time::sleep;

use super::super::pool::tests::{Dialer, FarEnd, Proxy};
use super::*;

const PEER: SocketAddr = SocketAddr::new(IpAddr::V4(Ipv4Addr::LOCALHOST), 1);

/// A listener's handler, and the proxy behind the handler.
struct Node {
    proxy: Proxy,
    far: FarEnd,
    handler: Arc<ClientHandler<Dialer>>,
    tasks: TaskTracker,
    cut: CancellationToken,
}

impl Node {
    async fn start() -> Self {
        Self::reaching(Proxy::start(1)).await
    }

    async fn reaching(mut proxy: Proxy) -> Self {
        let far = proxy.next_connection().await;
        let (tasks, cut) = (TaskTracker::new(), CancellationToken::new());
        let route = Route {
            listen: HostPort::new("100.64.30.10", 6443),
            authority: Authority::from_static("a.b.svc.cluster.local:443"),
        };
        let (pool, metrics) = (proxy.pool.clone(), proxy.metrics.clone());
        let handler = ClientHandler::new(&route, pool, metrics, tasks.clone(), cut.clone());
        Self {
            proxy,
            far,
            handler: Arc::new(handler),
            tasks,
            cut,
        }
    }

    fn client(&self) -> DuplexStream {
        self.client_from(PEER)
    }

    fn client_from(&self, peer: SocketAddr) -> DuplexStream {
        let (client, near) = duplex(64 * 1024);
        let serve = self
            .handler
            .clone()
            .serve(|| Ok(halves_of_duplex(near)), peer);
        self.tasks.spawn(serve);
        client
    }

    /// Answers the next request with 200.
    async fn accept(&mut self) -> (NativeSource, NativeSink) {
        let (request, mut respond) = self.far.next_stream().await;
        let send = respond.send_response(Response::new(()), false).unwrap();
        let (body, inbound) = (request.into_body(), self.far.inbound.clone());
        halves(send, body, inbound, CloseReason::AgentLost)
    }

    /// Answers the next request with 200 and waits until the client has received a byte. Without the wait, a
    /// reset could overtake the answer.
    async fn carries(&mut self, client: &mut DuplexStream) -> (NativeSource, NativeSink) {
        let (source, mut sink) = self.accept().await;
        sink.send(chunk("x")).await.unwrap();
        assert_eq!(client.read_u8().await.unwrap(), b'x');
        (source, sink)
    }

    /// Answers the next request with `status` and ends the stream.
    async fn refuse(&mut self, status: StatusCode) {
        let (_request, mut respond) = self.far.next_stream().await;
        let mut response = Response::new(());
        *response.status_mut() = status;
        respond.send_response(response, true).unwrap();
    }

    /// Waits until all clients have ended and checks that the metrics page contains `series`.
    async fn ended(&self, series: &str) {
        self.tasks.close();
        self.tasks.wait().await;
        let page = self.proxy.metrics.registry().render();
        for line in [
            series,
            "culvert_node_tunnel_clients 0",
            "envoy_cluster_upstream_rq_active{envoy_cluster_name=\"proxy_cluster\"} 0",
        ] {
            let found = page.lines().any(|candidate| candidate == line);
            assert!(found, "{line} is missing from\n{page}");
        }
    }
}

/// Reads everything the client receives until the connection ends.
async fn rest(client: &mut DuplexStream) -> String {
    let mut text = String::new();
    client.read_to_string(&mut text).await.unwrap();
    text
}

fn chunk(text: &'static str) -> Bytes {
    Bytes::from_static(text.as_bytes())
}

#[tokio::test(start_paused = true)]
async fn client_gets_the_answer_after_its_half_close() {
    let mut node = Node::start().await;
    let mut client = node.client();
    client.write_all(b"question").await.unwrap();
    client.shutdown().await.unwrap();
    let (mut source, mut sink) = node.accept().await;
    assert_eq!(source.recv().await.unwrap().unwrap(), "question");
    assert_eq!(source.recv().await, Ok(None));
    sink.send(chunk("answer")).await.unwrap();
    sink.finish().await.unwrap();
    assert_eq!(rest(&mut client).await, "answer");
    node.ended("culvert_connections_closed_total{reason=\"finished\"} 1")
        .await;
}

#[tokio::test(start_paused = true)]
async fn half_open_connection_may_be_idle_for_most_of_an_hour() {
    let mut node = Node::start().await;
    let mut client = node.client();
    client.shutdown().await.unwrap();
    let (mut source, mut sink) = node.accept().await;
    assert_eq!(source.recv().await, Ok(None));
    sleep(Duration::from_secs(3500)).await;
    sink.send(chunk("late answer")).await.unwrap();
    sink.finish().await.unwrap();
    assert_eq!(rest(&mut client).await, "late answer");
    node.ended("culvert_connections_closed_total{reason=\"finished\"} 1")
        .await;
}

#[tokio::test(start_paused = true)]
async fn client_can_send_after_the_proxys_half_close() {
    let mut node = Node::start().await;
    let mut client = node.client();
    let (mut source, mut sink) = node.accept().await;
    sink.send(chunk("greeting")).await.unwrap();
    sink.finish().await.unwrap();
    assert_eq!(rest(&mut client).await, "greeting");
    client.write_all(b"late").await.unwrap();
    assert_eq!(source.recv().await.unwrap().unwrap(), "late");
    client.shutdown().await.unwrap();
    assert_eq!(source.recv().await, Ok(None));
    node.ended("culvert_connections_closed_total{reason=\"finished\"} 1")
        .await;
}

#[tokio::test(start_paused = true)]
async fn request_moves_from_a_silent_connection_and_the_next_clients_avoid_it() {
    let mut node = Node::start().await;
    node.far.mute.notify_one();
    let mut client = node.client();
    let started = Instant::now();
    // The far end of the connection opened after the silence.
    node.far = node.proxy.next_connection().await;
    let _first = node.carries(&mut client).await;
    assert!(
        started.elapsed() < Duration::from_secs(2),
        "{:?}",
        started.elapsed()
    );
    let next = Instant::now();
    let mut client = node.client();
    let _second = node.carries(&mut client).await;
    assert!(
        next.elapsed() < Duration::from_millis(100),
        "{:?}",
        next.elapsed()
    );
}

#[tokio::test(start_paused = true)]
async fn client_waits_while_all_connections_are_silent() {
    let mut node = Node::start().await;
    node.far.mute.notify_one();
    let mut client = node.client();
    node.far = node.proxy.next_connection().await;
    node.far.mute.notify_one();
    // Far longer than a connection needs to become silent.
    sleep(Duration::from_secs(4)).await;
    node.far.unmute.notify_one();
    let _stream = node.carries(&mut client).await;
}

#[tokio::test(start_paused = true)]
async fn first_client_bytes_wait_for_the_answer() {
    let mut node = Node::start().await;
    let mut client = node.client();
    client.write_all(b"hello").await.unwrap();
    let (mut request, mut respond) = node.far.next_stream().await;
    let early = timeout(Duration::from_secs(1), request.body_mut().data()).await;
    assert!(early.is_err(), "bytes came before the answer");
    let _send = respond.send_response(Response::new(()), false).unwrap();
    let first = request.body_mut().data().await.unwrap().unwrap();
    assert_eq!(first, "hello");
}

#[tokio::test(start_paused = true)]
async fn a_refusal_closes_the_client_and_is_counted_by_status() {
    for (status, label) in [(404, "404"), (503, "503"), (403, "other_status")] {
        let mut node = Node::start().await;
        let mut client = node.client();
        client.write_all(b"never read").await.unwrap();
        node.refuse(StatusCode::from_u16(status).unwrap()).await;
        assert_eq!(rest(&mut client).await, "");
        drop(client);
        node.ended(&format!(
            "culvert_node_tunnel_refused_total{{reason=\"{label}\"}} 1"
        ))
        .await;
    }
}

#[tokio::test(start_paused = true)]
async fn clients_of_one_address_get_half_of_all_streams() {
    let mut node = Node::start().await;
    let (mut open, mut streams) = (Vec::new(), Vec::new());
    for _ in 0..512 {
        let mut client = node.client();
        streams.push(node.carries(&mut client).await);
        open.push(client);
    }
    assert_eq!(rest(&mut node.client()).await, "");
    let mut other = node.client_from("127.0.0.2:1".parse().unwrap());
    let _other = node.carries(&mut other).await;
    let page = node.proxy.metrics.registry().render();
    let refused = "culvert_node_tunnel_refused_total{reason=\"too_many_connections\"} 1\n";
    assert!(page.contains(refused), "{page}");
    // An end returns the place.
    streams.pop();
    drop(open.pop());
    sleep(Duration::from_secs(1)).await;
    let mut client = node.client();
    let _next = node.carries(&mut client).await;
}

#[tokio::test(start_paused = true)]
async fn client_is_closed_if_the_proxy_does_not_answer() {
    let mut node = Node::start().await;
    let started = Instant::now();
    let mut client = node.client();
    let _unanswered = node.far.next_stream().await;
    assert_eq!(rest(&mut client).await, "");
    assert!(
        started.elapsed() >= ANSWER_TIMEOUT,
        "{:?}",
        started.elapsed()
    );
    drop(client);
    node.ended("culvert_node_tunnel_refused_total{reason=\"no_answer\"} 1")
        .await;
}

#[tokio::test(start_paused = true)]
async fn request_is_repeated_if_its_connection_ends() {
    let mut node = Node::start().await;
    let mut client = node.client();
    let _unanswered = node.far.next_stream().await;
    node.far.driver.abort();
    node.far = node.proxy.next_connection().await;
    let (_source, mut sink) = node.accept().await;
    sink.send(chunk("here")).await.unwrap();
    sink.finish().await.unwrap();
    assert_eq!(rest(&mut client).await, "here");
}

#[tokio::test(start_paused = true)]
async fn stream_reset_closes_only_its_client() {
    let mut node = Node::start().await;
    let mut other = node.client();
    let (_other_source, mut other_sink) = node.accept().await;
    let mut client = node.client();
    let (_source, sink) = node.carries(&mut client).await;
    sink.end(CloseReason::EndpointLost, &node.tasks);
    assert_eq!(rest(&mut client).await, "");
    other_sink.send(chunk("still here")).await.unwrap();
    other_sink.finish().await.unwrap();
    assert_eq!(rest(&mut other).await, "still here");
    drop((client, other));
    node.ended("culvert_connections_closed_total{reason=\"endpoint_lost\"} 1")
        .await;
}

fn halves_of_duplex(
    stream: DuplexStream,
) -> Halves<ReadHalf<DuplexStream>, WriteHalf<DuplexStream>> {
    let (read, write) = split(stream);
    halves_of(read, write)
}

/// Connects a client over TCP.
async fn tcp_client(node: &Node) -> TcpStream {
    let listener = TcpListener::bind("127.0.0.1:0").await.unwrap();
    let client = TcpStream::connect(listener.local_addr().unwrap());
    let (client, accepted) = tokio::join!(client, listener.accept());
    let (near, peer) = accepted.unwrap();
    let near = || Ok(client_halves(near));
    node.tasks.spawn(node.handler.clone().serve(near, peer));
    client.unwrap()
}

/// Closes the connection of a client with a reset.
fn reset(client: TcpStream) {
    let socket = socket2::SockRef::from(&client);
    socket.set_linger(Some(Duration::ZERO)).unwrap();
    drop(client);
}

#[tokio::test]
async fn client_reset_resets_its_stream() {
    let mut node = Node::start().await;
    let client = tcp_client(&node).await;
    let (mut source, _sink) = node.accept().await;
    reset(client);
    assert_eq!(source.recv().await, Err(CloseReason::ClientLost));
    node.ended("culvert_connections_closed_total{reason=\"client_lost\"} 1")
        .await;
}

#[tokio::test]
async fn reset_that_a_write_reports_resets_the_stream_after_its_bytes() {
    let mut node = Node::start().await;
    let client = tcp_client(&node).await;
    let (mut source, mut sink) = node.accept().await;
    // Until the windows and buffers are full: the reset waits behind bytes.
    let filler = [7; 64 * 1024];
    while let Ok(Ok(())) = timeout(Duration::from_millis(300), client.writable()).await {
        let _ = client.try_write(&filler);
    }
    reset(client);
    sink.send(chunk("answer")).await.unwrap();
    let end = loop {
        match source.recv().await {
            Ok(Some(_)) => {}
            end => break end,
        }
    };
    assert_eq!(end, Err(CloseReason::ClientLost));
}

#[tokio::test(start_paused = true)]
async fn a_cut_ends_both_sides_at_once() {
    let mut node = Node::start().await;
    let mut client = node.client();
    let (mut source, _sink) = node.carries(&mut client).await;
    node.cut.cancel();
    assert_eq!(rest(&mut client).await, "");
    assert_eq!(source.recv().await, Err(CloseReason::Shutdown));
    node.ended("culvert_connections_closed_total{reason=\"shutdown\"} 1")
        .await;
}

#[tokio::test(start_paused = true)]
async fn refusal_warnings_are_rate_limited() {
    let node = Node::start().await;
    assert!(node.handler.is_warning_due(Refusal::NotFound));
    assert!(!node.handler.is_warning_due(Refusal::NotFound));
    assert!(node.handler.is_warning_due(Refusal::Unavailable));
    sleep(WARN_INTERVAL).await;
    assert!(node.handler.is_warning_due(Refusal::NotFound));
}

#[tokio::test]
async fn each_client_is_served_by_the_thread_of_its_connection() {
    let mut node = Node::reaching(Proxy::start_on(2, 2)).await;
    let (sender, mut threads) = mpsc::unbounded_channel();
    let (mut clients, mut other) = (Vec::new(), None);
    for expected in [0, 1, 0, 1] {
        if expected == 1 && other.is_none() {
            // The pool opens the second connection once the first connection carries a client.
            other = Some(node.proxy.next_connection().await);
            let both = "envoy_cluster_upstream_cx_active{envoy_cluster_name=\"proxy_cluster\"} 2\n";
            let metrics = node.proxy.metrics.clone();
            let open = timeout(ANSWER_TIMEOUT, async move {
                while !metrics.registry().render().contains(both) {
                    sleep(Duration::from_millis(1)).await;
                }
            });
            open.await.unwrap();
        }
        if let Some(other) = &mut other {
            std::mem::swap(&mut node.far, other);
        }
        let (client, near) = duplex(1024);
        let sender = sender.clone();
        let near = move || {
            sender.send(Shards::current()).unwrap();
            Ok(halves_of_duplex(near))
        };
        node.tasks.spawn(node.handler.clone().serve(near, PEER));
        let far = node.accept().await;
        let expected = node.proxy.pool.shards().ids().nth(expected);
        assert_eq!(threads.recv().await, Some(expected));
        clients.push((client, far));
    }
    node.cut.cancel();
    for (client, _) in &mut clients {
        assert_eq!(rest(client).await, "");
    }
    node.ended("culvert_connections_closed_total{reason=\"shutdown\"} 4")
        .await;
}
