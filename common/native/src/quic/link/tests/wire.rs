//! Dials over a path in memory, in virtual time.

use std::fmt::{self, Debug, Formatter};
use std::future::pending;
use std::io::{self, IoSliceMut};
use std::pin::Pin;
use std::sync::atomic::AtomicBool;
use std::task::{Context, Poll, ready};

use quinn::crypto::rustls::QuicServerConfig;
use quinn::udp::{RecvMeta, Transmit};
use quinn::{AsyncUdpSocket, EndpointConfig, TokioRuntime, UdpPoller};

use super::*;
use crate::quic::ALPN;
use crate::quic::endpoint::{IDLE_TIMEOUT, transport};

/// Longest time until a dial leaves a dead link with a round trip of 100 ms. The dial over TCP takes another 100 ms.
const LEFT: Duration = Duration::from_millis(800);

/// One direction of a path.
#[derive(Debug)]
struct Way {
    delay: Duration,
    is_dark: AtomicBool,
    arrived: mpsc::UnboundedSender<Vec<u8>>,
}

/// Socket at one end of a path.
#[derive(Debug)]
struct Wire {
    own: SocketAddr,
    peer: SocketAddr,
    outward: Arc<Way>,
    arrived: Mutex<mpsc::UnboundedReceiver<Vec<u8>>>,
}

/// Poller of a socket that always accepts packets.
struct Writable;

/// Two links over a path.
struct Path {
    server: Arc<Link>,
    agent: Arc<Link>,
    to_agent: Arc<Way>,
    to_server: Arc<Way>,
    _endpoints: [Endpoint; 2],
}

impl Way {
    fn new(delay: Duration) -> (Arc<Self>, mpsc::UnboundedReceiver<Vec<u8>>) {
        let (arrived, receiver) = mpsc::unbounded_channel();
        let is_dark = AtomicBool::new(false);
        let way = Self {
            delay,
            is_dark,
            arrived,
        };
        (Arc::new(way), receiver)
    }

    /// Drops all packets from now on.
    fn darken(&self) {
        self.is_dark.store(true, Ordering::Relaxed);
    }
}

impl Wire {
    fn pair(round_trip: Duration) -> [Arc<Self>; 2] {
        let addresses = [1, 2].map(|port| SocketAddr::from((Ipv4Addr::LOCALHOST, port)));
        let ways = [(); 2].map(|()| Way::new(round_trip / 2));
        let [(there, at_peer), (back, at_own)] = ways;
        let new = |own, peer, outward, arrived| {
            Arc::new(Self {
                own,
                peer,
                outward,
                arrived: Mutex::new(arrived),
            })
        };
        let [own, peer] = addresses;
        [new(own, peer, there, at_own), new(peer, own, back, at_peer)]
    }

    fn endpoint(self: &Arc<Self>, server: Option<quinn::ServerConfig>) -> Endpoint {
        let (config, runtime) = (EndpointConfig::default(), Arc::new(TokioRuntime));
        Endpoint::new_with_abstract_socket(config, server, self.clone(), runtime).unwrap()
    }
}

impl Debug for Writable {
    fn fmt(&self, f: &mut Formatter<'_>) -> fmt::Result {
        f.write_str("Writable")
    }
}

impl UdpPoller for Writable {
    fn poll_writable(self: Pin<&mut Self>, _: &mut Context<'_>) -> Poll<io::Result<()>> {
        Poll::Ready(Ok(()))
    }
}

impl AsyncUdpSocket for Wire {
    fn create_io_poller(self: Arc<Self>) -> Pin<Box<dyn UdpPoller>> {
        Box::pin(Writable)
    }

    fn try_send(&self, transmit: &Transmit<'_>) -> io::Result<()> {
        let (way, packet) = (self.outward.clone(), transmit.contents.to_vec());
        if !way.is_dark.load(Ordering::Relaxed) {
            tokio::spawn(async move {
                sleep(way.delay).await;
                let _ = way.arrived.send(packet);
            });
        }
        Ok(())
    }

    fn poll_recv(
        &self,
        cx: &mut Context<'_>,
        buffers: &mut [IoSliceMut<'_>],
        meta: &mut [RecvMeta],
    ) -> Poll<io::Result<usize>> {
        let Some(packet) = ready!(self.arrived.lock().poll_recv(cx)) else {
            return Poll::Pending;
        };
        buffers[0][..packet.len()].copy_from_slice(&packet);
        meta[0] = RecvMeta {
            addr: self.peer,
            len: packet.len(),
            stride: packet.len(),
            ecn: None,
            dst_ip: None,
        };
        Poll::Ready(Ok(1))
    }

    fn local_addr(&self) -> io::Result<SocketAddr> {
        Ok(self.own)
    }
}

impl Path {
    async fn new(round_trip: Duration) -> Self {
        let [at_agent, at_server] = Wire::pair(round_trip);
        let (mut server_tls, client_tls) = tls();
        server_tls.alpn_protocols = vec![ALPN.to_vec()];
        let crypto = QuicServerConfig::try_from(server_tls).unwrap();
        let mut config = quinn::ServerConfig::with_crypto(Arc::new(crypto));
        config.transport_config(Arc::new(transport()));
        let endpoints = [at_agent.endpoint(None), at_server.endpoint(Some(config))];
        let config = client_config(&client_tls).unwrap();
        let connecting = endpoints[0].connect_with(config, at_server.own, "server");
        let connect = async {
            let connection = connecting.unwrap().await.unwrap();
            let mut control = connection.open_bi().await.unwrap();
            control.0.write_all(&Word::Ping.to_line()).await.unwrap();
            (connection, control)
        };
        let accept = async {
            let incoming = endpoints[1].accept().await.unwrap();
            let connection = incoming.await.unwrap();
            let control = connection.accept_bi().await.unwrap();
            (connection, control)
        };
        let (agent, server) = tokio::join!(connect, accept);
        let start = |(connection, control), lost| {
            let (link, words) = Link::new(connection, 64 * MIB, lost);
            let running = link.clone();
            tokio::spawn(async move { running.run(control, words, |_| {}, |_| {}).await });
            link
        };
        Self {
            server: start(server, CloseReason::AgentLost),
            agent: start(agent, CloseReason::ServerLost),
            to_agent: at_server.outward.clone(),
            to_server: at_agent.outward.clone(),
            _endpoints: endpoints,
        }
    }

    /// Opens a stream, and returns the halves of the server and of the agent.
    async fn open(&self) -> ((QuicSource, QuicSink), (QuicSource, QuicSink)) {
        let target = dial("10.0.0.1:443");
        let (dialed, accepted) =
            tokio::join!(self.server.dial(&target), self.accept(Duration::ZERO));
        (dialed.unwrap(), accepted)
    }

    /// Accepts a dial, and answers it after some time.
    async fn accept(&self, pause: Duration) -> (QuicSource, QuicSink) {
        let (mut source, mut sink) = self.agent.accept().await.unwrap();
        read_dial(&mut source).await.unwrap();
        sleep(pause).await;
        answer(&mut sink, &dial::accepted()).await.unwrap();
        (source, sink)
    }

    /// Dials until the dial leaves the link, and returns the time since `from`.
    async fn left(&self, from: Instant) -> Duration {
        let error = self.server.dial(&dial("10.0.0.1:443")).await.err();
        assert_eq!(error, Some(LinkDialError::Unusable));
        from.elapsed()
    }
}

/// Reads to the end, and returns its reason.
async fn end(source: &mut QuicSource) -> Option<CloseReason> {
    loop {
        match source.recv().await {
            Ok(Some(_)) => {}
            Ok(None) => return None,
            Err(reason) => return Some(reason),
        }
    }
}

#[tokio::test(start_paused = true)]
async fn dial_leaves_a_link_that_is_dead_in_either_direction_within_800_ms() {
    for round_trip in [1, 100].map(Duration::from_millis) {
        for (to_agent, to_server) in [(true, true), (true, false), (false, true)] {
            let path = Path::new(round_trip).await;
            let _open = path.open().await;
            for (is_dark, way) in [(to_agent, &path.to_agent), (to_server, &path.to_server)] {
                if is_dark {
                    way.darken();
                }
            }
            let accept = async {
                let _accepted = path.accept(Duration::ZERO).await;
                pending().await
            };
            let left = tokio::select! {
                left = path.left(Instant::now()) => left,
                () = accept => unreachable!(),
            };
            assert!(left <= LEFT, "{left:?} at {round_trip:?}");
            assert!(!path.server.is_healthy());
        }
    }
}

/// The agent has acknowledged the dial, so nothing of the server is outstanding.
#[tokio::test(start_paused = true)]
async fn dial_that_waits_for_its_endpoint_leaves_a_link_that_dies_meanwhile() {
    for round_trip in [1, 100].map(Duration::from_millis) {
        let path = Path::new(round_trip).await;
        let dying = async {
            let (mut source, _sink) = path.agent.accept().await.unwrap();
            read_dial(&mut source).await.unwrap();
            sleep(Duration::from_millis(1234)).await;
            path.to_server.darken();
            pending().await
        };
        let from = Instant::now() + round_trip / 2 + Duration::from_millis(1234);
        let left = tokio::select! {
            left = path.left(from) => left,
            () = dying => unreachable!(),
        };
        assert!(left <= LEFT, "{left:?} at {round_trip:?}");
    }
}

#[tokio::test(start_paused = true)]
async fn dial_stays_on_a_slow_link_with_a_slow_endpoint() {
    for round_trip in [1, 100, 1000].map(Duration::from_millis) {
        let path = Path::new(round_trip).await;
        for pause in [0, 300, 6000].map(Duration::from_millis) {
            let target = dial("10.0.0.1:443");
            let (dialed, _accepted) = tokio::join!(path.server.dial(&target), path.accept(pause));
            dialed.unwrap();
        }
        assert!(path.server.is_healthy());
    }
}

/// Packets in one direction do not keep a link alive.
#[tokio::test(start_paused = true)]
async fn streams_of_a_link_that_is_dead_in_one_direction_end_after_the_idle_timeout() {
    for is_to_agent in [true, false] {
        let path = Path::new(Duration::from_millis(100)).await;
        let ((mut from_agent, mut to_agent), (mut from_server, mut to_server)) = path.open().await;
        match is_to_agent {
            true => path.to_agent.darken(),
            false => path.to_server.darken(),
        }
        let dark = Instant::now();
        // Both ends wait for answers.
        to_agent.send(pattern(1000)).await.unwrap();
        to_server.send(pattern(1000)).await.unwrap();
        let limit = IDLE_TIMEOUT + Duration::from_secs(1);
        let ends = async { tokio::join!(end(&mut from_agent), end(&mut from_server)) };
        let (at_server, at_agent) = timeout(limit, ends).await.unwrap();
        assert_eq!(at_server, Some(CloseReason::AgentLost));
        assert_eq!(at_agent, Some(CloseReason::ServerLost));
        assert!(dark.elapsed() > IDLE_TIMEOUT);
    }
}

#[tokio::test(start_paused = true)]
async fn link_is_healthy_again_soon_after_an_outage() {
    for outage in [5, 20].map(Duration::from_secs) {
        let path = Path::new(Duration::from_millis(100)).await;
        let _open = path.open().await;
        path.to_agent.darken();
        path.left(Instant::now()).await;
        sleep(outage).await;
        path.to_agent.is_dark.store(false, Ordering::Relaxed);
        let lit = Instant::now();
        while !path.server.is_healthy() {
            sleep(Duration::from_millis(10)).await;
        }
        // Probes are sent at intervals that double.
        assert!(lit.elapsed() <= outage, "{:?}", lit.elapsed());
    }
}
