//! Dials over a path in memory, in virtual time.

use std::fmt::{self, Debug, Formatter};
use std::future::pending;
use std::io::{self, IoSliceMut};
use std::pin::Pin;
use std::sync::atomic::AtomicBool;
use std::task::{Context, Poll, ready};

use quinn::congestion::CubicConfig;
use quinn::crypto::rustls::QuicServerConfig;
use quinn::udp::{RecvMeta, Transmit};
use quinn::{AsyncUdpSocket, EndpointConfig, TokioRuntime, TransportConfig, UdpPoller};
use rand::rngs::StdRng;
use rand::{Rng as _, SeedableRng as _};
use tokio::time::sleep_until;

use super::*;
use crate::quic::ALPN;
use crate::quic::endpoint::{AGENT_STREAMS, IDLE_TIMEOUT, transport};

/// Longest time until a dial leaves a dead link with a round trip of 100 ms. The dial over TCP takes another 100 ms.
const LEFT: Duration = Duration::from_millis(800);

/// One direction of a path.
#[derive(Debug)]
struct Way {
    delay: Mutex<Duration>,
    is_dark: AtomicBool,
    line: Arc<Mutex<Line>>,
    /// Packets with their times of arrival, in this order.
    underway: mpsc::UnboundedSender<(Instant, Vec<u8>)>,
}

/// The slowest part of a way. Packets wait in a queue before it.
#[derive(Debug)]
struct Line {
    /// Time to send one byte.
    time_of_byte: Duration,
    /// Lost packets, in percent.
    lost: u32,
    /// Longest wait in the queue. A packet that would wait longer is lost.
    room: Duration,
    random: StdRng,
    /// Time at which the last packet has passed.
    free: Instant,
    /// Longest time that a packet has waited.
    longest_wait: Duration,
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

impl Line {
    fn new() -> Self {
        Self {
            time_of_byte: Duration::ZERO,
            lost: 0,
            room: Duration::MAX,
            random: StdRng::seed_from_u64(1),
            free: Instant::now(),
            longest_wait: Duration::ZERO,
        }
    }

    /// Limits the rate to `rate` bytes per second, and loses `lost` percent of the packets.
    fn limit(&mut self, rate: u32, lost: u32) {
        self.time_of_byte = Duration::from_secs(1) / rate;
        self.lost = lost;
    }

    /// Returns the time at which a packet has passed, or `None` if the packet is lost.
    fn pass(&mut self, bytes: usize) -> Option<Instant> {
        if self.random.random_ratio(self.lost, 100) {
            return None;
        }
        let now = Instant::now();
        let begin = self.free.max(now);
        let wait = begin - now;
        if wait > self.room {
            return None;
        }
        self.longest_wait = self.longest_wait.max(wait);
        self.free = begin + self.time_of_byte * bytes as u32;
        Some(self.free)
    }
}

impl Way {
    fn new(
        delay: Duration,
        line: Arc<Mutex<Line>>,
    ) -> (Arc<Self>, mpsc::UnboundedReceiver<Vec<u8>>) {
        let (arrived, receiver) = mpsc::unbounded_channel();
        let (underway, mut packets) = mpsc::unbounded_channel();
        tokio::spawn(async move {
            while let Some((arrival, packet)) = packets.recv().await {
                sleep_until(arrival).await;
                let _ = arrived.send(packet);
            }
        });
        let way = Self {
            delay: Mutex::new(delay),
            is_dark: AtomicBool::new(false),
            line,
            underway,
        };
        (Arc::new(way), receiver)
    }

    /// Sends a packet.
    fn send(&self, packet: &[u8]) {
        if self.is_dark.load(Ordering::Relaxed) {
            return;
        }
        if let Some(passed) = self.line.lock().pass(packet.len()) {
            let _ = self
                .underway
                .send((passed + *self.delay.lock(), packet.to_vec()));
        }
    }

    /// Changes the time that a packet needs.
    fn set_delay(&self, delay: Duration) {
        *self.delay.lock() = delay;
    }

    /// Drops all packets from now on.
    fn darken(&self) {
        self.is_dark.store(true, Ordering::Relaxed);
    }
}

impl Wire {
    /// Returns the agent's and the server's end of a path. Packets to the server pass `line`.
    fn pair(round_trip: Duration, line: Arc<Mutex<Line>>) -> [Arc<Self>; 2] {
        let addresses = [1, 2].map(|port| SocketAddr::from((Ipv4Addr::LOCALHOST, port)));
        let lines = [line, Arc::new(Mutex::new(Line::new()))];
        let ways = lines.map(|line| Way::new(round_trip / 2, line));
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
        self.outward.send(transmit.contents);
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
        Self::over(round_trip, Arc::new(Mutex::new(Line::new())), None).await
    }

    /// Creates a path whose packets to the server pass `line`. `agent` replaces the settings of the agent.
    async fn over(
        round_trip: Duration,
        line: Arc<Mutex<Line>>,
        agent: Option<TransportConfig>,
    ) -> Self {
        let [at_agent, at_server] = Wire::pair(round_trip, line);
        let (mut server_tls, client_tls) = tls();
        server_tls.alpn_protocols = vec![ALPN.to_vec()];
        let crypto = QuicServerConfig::try_from(server_tls).unwrap();
        let mut config = quinn::ServerConfig::with_crypto(Arc::new(crypto));
        config.transport_config(Arc::new(transport()));
        let endpoints = [at_agent.endpoint(None), at_server.endpoint(Some(config))];
        let mut client = client_config(&client_tls).unwrap();
        if let Some(agent) = agent {
            client.transport_config(Arc::new(agent));
        }
        let connecting = endpoints[0].connect_with(client, at_server.own, "server");
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

/// Sends on a stream without end.
async fn send_all(mut sink: QuicSink) {
    while sink.send(pattern(64 * 1024)).await.is_ok() {}
}

/// Adds the received bytes of a stream to `bytes`.
async fn receive_all(mut source: QuicSource, bytes: Arc<AtomicUsize>) {
    while let Ok(Some(chunk)) = source.recv().await {
        bytes.fetch_add(chunk.len(), Ordering::Relaxed);
    }
}

/// Starts endless transfers from the agent to the server, and returns the counter of their bytes.
async fn transfers(path: &Path) -> Arc<AtomicUsize> {
    let bytes = Arc::new(AtomicUsize::new(0));
    for _ in 0..4 {
        let ((source, _), (_, sink)) = path.open().await;
        tokio::spawn(send_all(sink));
        tokio::spawn(receive_all(source, bytes.clone()));
    }
    bytes
}

#[tokio::test(start_paused = true)]
async fn bulk_continues_soon_after_an_outage() {
    for (round_trip, outage) in [(2, 33), (40, 50)] {
        let path = Path::new(Duration::from_millis(round_trip)).await;
        let ways = [&path.to_agent, &path.to_server];
        for way in ways {
            way.line.lock().limit(RATE, 0);
        }
        let up = transfers(&path).await;
        let down = Arc::new(AtomicUsize::new(0));
        for _ in 0..4 {
            let ((_, sink), (source, _)) = path.open().await;
            tokio::spawn(send_all(sink));
            tokio::spawn(receive_all(source, down.clone()));
        }
        sleep(Duration::from_secs(1)).await;
        for way in ways {
            way.darken();
        }
        sleep(Duration::from_secs(outage)).await;
        for way in ways {
            way.is_dark.store(false, Ordering::Relaxed);
        }
        let before = [&up, &down].map(|bytes| bytes.load(Ordering::Relaxed));
        sleep(Duration::from_secs(3)).await;
        let after = [&up, &down].map(|bytes| bytes.load(Ordering::Relaxed));
        for (before, after) in before.into_iter().zip(after) {
            let moved = after - before;
            assert!(
                moved > 256 * 1024,
                "{round_trip} ms, {outage} s: {moved} bytes"
            );
        }
    }
}

/// Rate of a slow path, in bytes per second.
const RATE: u32 = 2_500_000;

/// Returns the share of [`RATE`] that the transfers use in the next `time`, and the longest time that a packet waits in
/// the queue.
async fn used(path: &Path, bytes: &AtomicUsize, time: Duration) -> (f64, Duration) {
    let before = bytes.load(Ordering::Relaxed);
    path.to_server.line.lock().longest_wait = Duration::ZERO;
    sleep(time).await;
    let moved = bytes.load(Ordering::Relaxed) - before;
    let share = moved as f64 / f64::from(RATE) / time.as_secs_f64();
    (share, path.to_server.line.lock().longest_wait)
}

/// Returns the longest time that a packet may wait on a path, in milliseconds.
fn permitted_wait(round_trip: u64) -> Duration {
    Duration::from_millis(round_trip.div_ceil(4).max(10)) * 2
}

#[tokio::test(start_paused = true)]
async fn bulk_fills_its_path_and_keeps_the_queue_short() {
    for (round_trip, lost) in [
        (1, 0),
        (5, 0),
        (20, 0),
        (20, 1),
        (20, 10),
        (100, 0),
        (100, 1),
    ] {
        let path = Path::new(Duration::from_millis(round_trip)).await;
        path.to_server.line.lock().limit(RATE, lost);
        let bytes = transfers(&path).await;
        sleep(Duration::from_secs(3)).await;
        let (share, wait) = used(&path, &bytes, Duration::from_secs(5)).await;
        let shown = format!("{round_trip} ms, {lost} %: {share:.2}, {wait:?}");
        // Heads and tags of packets need 0.03.
        let arrives = f64::from(100 - lost) / 100.0;
        assert!(share >= 0.9 * arrives, "{shown}");
        assert!(wait <= permitted_wait(round_trip), "{shown}");
    }
}

/// The sender follows a change within three seconds. Only a shorter path takes longer: its round trip can be measured once BBR
/// empties the queue, every 10 s.
#[tokio::test(start_paused = true)]
async fn bulk_follows_a_path_that_changes() {
    let there = 10;
    let path = Path::new(Duration::from_millis(2 * there)).await;
    path.to_server.line.lock().limit(RATE, 0);
    let bytes = transfers(&path).await;
    sleep(Duration::from_secs(3)).await;
    let changes = [
        (4, 10, 3),
        (1, 10, 3),
        (1, 17, 3),
        (1, 25, 3),
        (1, 90, 3),
        (1, 10, 12),
    ];
    for (faster, back, seconds) in changes {
        path.to_server.line.lock().limit(faster * RATE, 0);
        path.to_server.set_delay(Duration::from_millis(back));
        sleep(Duration::from_secs(seconds)).await;
        let (share, wait) = used(&path, &bytes, Duration::from_secs(3)).await;
        let share = share / f64::from(faster);
        let shown = format!("{faster} times the rate, {back} ms back: {share:.2}, {wait:?}");
        assert!(share >= 0.8, "{shown}");
        assert!(wait <= permitted_wait(there + back), "{shown}");
    }
}

/// On a radio link, packets wait for other senders.
#[tokio::test(start_paused = true)]
async fn bulk_fills_a_path_whose_delay_varies() {
    let path = Path::new(Duration::from_millis(20)).await;
    path.to_server.line.lock().limit(RATE, 0);
    let way = path.to_server.clone();
    tokio::spawn(async move {
        let mut random = StdRng::seed_from_u64(2);
        loop {
            way.set_delay(Duration::from_millis(random.random_range(10..60)));
            sleep(Duration::from_millis(random.random_range(1..30))).await;
        }
    });
    let bytes = transfers(&path).await;
    sleep(Duration::from_secs(5)).await;
    let (share, wait) = used(&path, &bytes, Duration::from_secs(5)).await;
    let shown = format!("{share:.2}, {wait:?}");
    assert!(share >= 0.8, "{shown}");
    // The windows of the streams alone would permit 3 s.
    assert!(wait <= Duration::from_millis(300), "{shown}");
}

/// Small messages do not show the rate of the path.
#[tokio::test(start_paused = true)]
async fn bulk_finds_the_rate_of_a_long_path_soon() {
    for begins_small in [false, true] {
        let path = Path::new(Duration::from_millis(100)).await;
        path.to_server.line.lock().limit(4 * RATE, 0);
        let ((source, _), (_, mut sink)) = path.open().await;
        tokio::spawn(receive_all(source, Arc::default()));
        if begins_small {
            for _ in 0..30 {
                sink.send(pattern(20_000)).await.unwrap();
                sleep(Duration::from_millis(70)).await;
            }
        }
        let bytes = transfers(&path).await;
        sleep(Duration::from_secs(1)).await;
        let (share, _) = used(&path, &bytes, Duration::from_secs(2)).await;
        assert!(share / 4.0 >= 0.8, "{begins_small}: {:.2}", share / 4.0);
    }
}

/// quinn's BBR alone leaves CUBIC 3 % of the rate.
#[tokio::test(start_paused = true)]
async fn bulk_leaves_others_a_share_of_the_path() {
    let round_trip = Duration::from_millis(20);
    for is_other_cubic in [false, true] {
        let line = Arc::new(Mutex::new(Line::new()));
        {
            let mut line = line.lock();
            line.limit(RATE, 0);
            line.room = Duration::from_millis(100);
        }
        let cubic = is_other_cubic.then(|| {
            let mut cubic = transport();
            cubic
                .max_concurrent_bidi_streams(AGENT_STREAMS.into())
                .congestion_controller_factory(Arc::new(CubicConfig::default()));
            cubic
        });
        let path = Path::over(round_trip, line.clone(), None).await;
        let bytes = transfers(&path).await;
        sleep(Duration::from_secs(3)).await;
        let other = Path::over(round_trip, line, cubic).await;
        let other_bytes = transfers(&other).await;
        sleep(Duration::from_secs(3)).await;
        let time = Duration::from_secs(10);
        let (own, others) =
            tokio::join!(used(&path, &bytes, time), used(&other, &other_bytes, time));
        let shown = format!("{:.2}, {:.2} (CUBIC: {is_other_cubic})", own.0, others.0);
        assert!(own.0 >= 0.15 && others.0 >= 0.15, "{shown}");
        assert!(own.0 + others.0 >= 0.9, "{shown}");
    }
}
