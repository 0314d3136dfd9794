//! Tests of the router over tunnels in memory.
#![allow(clippy::unwrap_used, clippy::expect_used)]

use std::future::poll_fn;
use std::net::{Ipv4Addr, SocketAddrV4};
use std::pin::pin;
use std::sync::OnceLock;
use std::sync::atomic::{AtomicUsize, Ordering};
use std::task::Poll;

use bytes::Bytes;
use culvert_openvpn::flows::Config;
use culvert_openvpn_io::stream::{Incoming, Peer as FlowPeer};
use culvert_openvpn_io::streams::Streams;
use culvert_openvpn_io::{Moment, now};
use culvert_stream::io::{ReadSource, WriteSink};
use culvert_stream::{CloseReason, Sink as _, Source as _};
use parking_lot::Mutex;
use tokio::io::{AsyncReadExt as _, AsyncWriteExt as _, duplex, split};
use tokio::task::yield_now;
use tokio::time::{sleep, timeout_at};
use tokio_util::sync::CancellationToken;
use tokio_util::task::TaskTracker;

use super::*;
use crate::backend::Dialing;
use crate::backend::flow;
use crate::frontend::Frontend;
use crate::tunnel::Peer;

/// Address of the endpoints in memory.
const TARGET: SocketAddrV4 = SocketAddrV4::new(Ipv4Addr::new(10, 0, 0, 1), 443);

/// Buffer size of a flow in each direction, in bytes.
const FLOW_BYTES: usize = 16 << 10;

/// Ends of connections, as seen by their endpoints.
type Ends = Arc<Mutex<Vec<Result<(), CloseReason>>>>;

/// A tunnel in memory whose endpoints echo.
pub(crate) struct Memory {
    kind: Kind,
    state: Mutex<State>,
    /// Runs at the next health check: after a dial has read the route, and before the dial counts as in
    /// use.
    aside: Mutex<Option<Box<dyn FnOnce() + Send>>>,
    /// Dials that have ended, with any outcome.
    pub(crate) dials: AtomicUsize,
    /// Handle for dials; set by the first dial.
    peer: OnceLock<FlowPeer>,
    ends: Ends,
    metrics: Arc<ServerMetrics>,
}

#[derive(Clone, Copy)]
struct State {
    health: Health,
    answer: Answer,
    delay: Duration,
}

/// Outcome of dials.
#[derive(Clone, Copy)]
pub(crate) enum Answer {
    Open,
    Refuse,
    NotCarry,
    Deny,
    Lose,
    Silence,
}

impl Memory {
    pub(crate) fn new(kind: Kind) -> Arc<Self> {
        let state = State {
            health: Health::Healthy,
            answer: Answer::Open,
            delay: Duration::from_millis(5),
        };
        Arc::new(Self {
            kind,
            state: Mutex::new(state),
            aside: Mutex::default(),
            dials: AtomicUsize::new(0),
            peer: OnceLock::new(),
            ends: Ends::default(),
            metrics: Arc::new(ServerMetrics::new(&[]).unwrap()),
        })
    }

    pub(crate) fn set_health(&self, health: Health) {
        self.state.lock().health = health;
    }

    pub(crate) fn set_answer(&self, answer: Answer) {
        self.state.lock().answer = answer;
    }

    pub(crate) fn set_delay(&self, delay: Duration) {
        self.state.lock().delay = delay;
    }

    async fn dial(&self) -> Result<Connection, DialError> {
        let State {
            health,
            answer,
            delay,
        } = *self.state.lock();
        if health == Health::Absent {
            return Err(match self.kind {
                Kind::Konnectivity => DialError::NoAgent,
                Kind::Openvpn => DialError::NoClient,
            });
        }
        sleep(delay).await;
        self.dials.fetch_add(1, Ordering::Relaxed);
        match answer {
            Answer::Open => {
                let peer = self.peer.get_or_init(|| flows(self.ends.clone()));
                let stream = peer.dial(TARGET).await.unwrap();
                let metrics = self.metrics.clone();
                Ok(flow::open(stream, "memory".into(), &metrics).into())
            }
            Answer::Refuse => Err(StreamDialError::Refused("connection refused".into()).into()),
            Answer::NotCarry => Err(DialError::Uncarried("IPv4 only".into())),
            Answer::Deny => Err(DialError::Denied("denied".into())),
            Answer::Lose => Err(StreamDialError::AgentLost.into()),
            Answer::Silence => std::future::pending().await,
        }
    }
}

impl Tunnel for Memory {
    fn health(&self) -> Health {
        let aside = self.aside.lock().take();
        if let Some(aside) = aside {
            aside();
        }
        self.state.lock().health
    }

    fn dial<'a>(&'a self, _dial: &'a Dial, deadline: Instant) -> Dialing<'a> {
        Box::pin(async move {
            let outcome = tokio::time::timeout_at(deadline, self.dial()).await;
            outcome.unwrap_or(Err(StreamDialError::TimedOut.into()))
        })
    }

    fn peers(&self) -> Vec<Peer> {
        vec![Peer {
            name: format!("{}-peer", self.kind.as_str()),
            kind: "memory".to_owned(),
            health: self.health(),
            connections: 0,
            address: None,
            identifiers: Vec::new(),
            more_identifiers: 0,
        }]
    }
}

/// Starts both ends of a tunnel, and returns the handle for dials.
fn flows(ends: Ends) -> FlowPeer {
    let mut config = Config {
        receive_buffer: FLOW_BYTES,
        send_buffer: FLOW_BYTES,
        ..Config::default()
    };
    let near = Streams::new(config.clone(), now());
    config.accept = true;
    config.address = Ipv4Addr::new(10, 20, 0, 6);
    let far = Streams::new(config, now());
    let peer = near.peer();
    tokio::spawn(join(near, far, ends));
    peer
}

/// Passes packets between both ends of a tunnel. The far end echoes every flow.
async fn join(mut near: Streams, mut far: Streams, ends: Ends) {
    loop {
        let now = now();
        near.work(now, &mut drop);
        far.work(now, &mut |incoming| {
            tokio::spawn(echo(incoming, ends.clone()));
        });
        if pass(&mut near, &mut far, now) | pass(&mut far, &mut near, now) {
            yield_now().await;
            continue;
        }
        let timeouts = [near.poll_timeout(), far.poll_timeout()];
        let (near, far) = (&mut near, &mut far);
        let mail =
            poll_fn(
                move |cx| match near.poll_mail(cx).is_ready() | far.poll_mail(cx).is_ready() {
                    true => Poll::Ready(()),
                    false => Poll::Pending,
                },
            );
        match timeouts.into_iter().flatten().min() {
            Some(at) => drop(timeout_at(Instant::from_std(at), mail).await),
            None => mail.await,
        }
    }
}

/// Passes the packets of one end to the other end. Returns false if there were no packets.
fn pass(from: &mut Streams, to: &mut Streams, now: Moment) -> bool {
    let mut packets = Vec::new();
    from.poll_output(now, &mut |packet| {
        packets.push(packet.to_vec());
        true
    });
    for packet in &packets {
        to.input(packet, now);
    }
    !packets.is_empty()
}

async fn echo(incoming: Incoming, ends: Ends) {
    let stream = incoming.accept().unwrap();
    let (mut source, mut sink) = stream.halves(|_| CloseReason::ClientLost);
    let ended = async {
        while let Some(chunk) = source.recv().await? {
            sink.send(chunk).await?;
        }
        sink.finish().await
    };
    let ended = ended.await;
    ends.lock().push(ended);
}

/// A router over two tunnels in memory.
pub(crate) struct World {
    pub(crate) konnectivity: Arc<Memory>,
    pub(crate) openvpn: Arc<Memory>,
    pub(crate) router: Arc<Router>,
    pub(crate) metrics: Arc<ServerMetrics>,
}

impl World {
    pub(crate) fn new() -> Self {
        let konnectivity = Memory::new(Kind::Konnectivity);
        let openvpn = Memory::new(Kind::Openvpn);
        let metrics = Arc::new(ServerMetrics::new(&[]).unwrap());
        Self {
            router: Router::new(
                konnectivity.clone(),
                Some(openvpn.clone()),
                DialLimits::default(),
                metrics.clone(),
            ),
            konnectivity,
            openvpn,
            metrics,
        }
    }

    pub(crate) async fn dial(&self) -> Result<Connection, DialError> {
        self.router
            .dial(&dial())
            .await
            .map(|connection| *connection)
    }

    /// Opens a connection and returns the tunnel that carries it.
    pub(crate) async fn opened_by(&self) -> Kind {
        let dials = || self.openvpn.dials.load(Ordering::Relaxed);
        let before = dials();
        self.dial().await.unwrap();
        match dials() - before {
            0 => Kind::Konnectivity,
            _ => Kind::Openvpn,
        }
    }

    pub(crate) fn shows(&self, line: &str) -> bool {
        let page = self.metrics.registry().render();
        page.lines().any(|shown| shown == line)
    }

    fn dials(&self, kind: Kind, outcome: &str, count: usize) -> bool {
        self.shows(&format!(
            "culvert_tunnel_dials_total{{tunnel=\"{}\",outcome=\"{outcome}\"}} {count}",
            kind.as_str()
        ))
    }
}

pub(crate) fn dial() -> Dial {
    Dial {
        protocol: "tcp".into(),
        address: "10.0.0.1:443".into(),
    }
}

const PREFER_KONNECTIVITY: Route = Route {
    first: Kind::Konnectivity,
    both: true,
};

#[tokio::test(start_paused = true)]
async fn only_tunnel_is_dialed_whatever_its_health() {
    let konnectivity = Memory::new(Kind::Konnectivity);
    let metrics = Arc::new(ServerMetrics::new(&[]).unwrap());
    let limits = DialLimits::default();
    let router = Router::new(konnectivity.clone(), None, limits, metrics);
    konnectivity.set_health(Health::Doubtful);
    let connection = router.dial(&dial()).await.unwrap();
    assert_eq!(router.view().konnectivity.in_use, 1);
    drop(connection);
    assert_eq!(router.view().konnectivity.in_use, 0);
    assert!(router.is_ready());
    konnectivity.set_health(Health::Absent);
    assert_eq!(router.dial(&dial()).await.err(), Some(DialError::NoAgent));
    assert!(!router.is_ready());
}

#[tokio::test(start_paused = true)]
async fn a_preferred_tunnel_is_replaced_dial_by_dial() {
    let world = World::new();
    world.router.set_route(PREFER_KONNECTIVITY);
    assert_eq!(world.opened_by().await, Kind::Konnectivity);
    for health in [Health::Absent, Health::Doubtful] {
        world.konnectivity.set_health(health);
        assert_eq!(world.opened_by().await, Kind::Openvpn, "{health:?}");
    }
    world.openvpn.set_health(Health::Doubtful);
    assert_eq!(world.opened_by().await, Kind::Konnectivity);

    world.konnectivity.set_health(Health::Healthy);
    world.konnectivity.set_answer(Answer::Lose);
    assert_eq!(world.opened_by().await, Kind::Openvpn);
    world.konnectivity.set_answer(Answer::Silence);
    let started = Instant::now();
    assert_eq!(world.opened_by().await, Kind::Openvpn);
    assert_eq!(started.elapsed().as_secs(), ANSWER_TIMEOUT.as_secs());
    assert!(world.dials(Kind::Konnectivity, "lost", 1));
    assert!(world.dials(Kind::Konnectivity, "timed_out", 1));
    assert!(world.dials(Kind::Openvpn, "opened", 4));
}

#[tokio::test(start_paused = true)]
async fn refusal_by_the_endpoint_is_final() {
    let world = World::new();
    world.router.set_route(PREFER_KONNECTIVITY);
    world.konnectivity.set_answer(Answer::Refuse);
    let error = world.dial().await.err().unwrap();
    assert_eq!(error.to_string(), "connection refused");
    assert_eq!(world.openvpn.dials.load(Ordering::Relaxed), 0);
    assert!(world.dials(Kind::Konnectivity, "refused", 1));
}

#[tokio::test(start_paused = true)]
async fn denied_dial_is_final_and_counted() {
    let world = World::new();
    world.router.set_route(PREFER_KONNECTIVITY);
    world.konnectivity.set_answer(Answer::Deny);
    let error = world.dial().await.err().unwrap();
    assert_eq!(error.to_string(), "denied");
    assert_eq!(world.openvpn.dials.load(Ordering::Relaxed), 0);
    assert!(world.dials(Kind::Konnectivity, "refused", 1));
    let name = "konnectivity_network_proxy_server_dial_failure_count";
    assert!(world.shows(&format!("{name}{{reason=\"denied\"}} 1")));
}

#[tokio::test(start_paused = true)]
async fn dial_of_a_longer_address_than_any_reaches_no_peer() {
    let world = World::new();
    world.router.set_route(PREFER_KONNECTIVITY);
    let address = format!("{}:443", "a".repeat(MAX_ADDRESS_BYTES));
    let dial = Dial { address, ..dial() };
    let error = world.router.dial(&dial).await.err().unwrap();
    assert_eq!(error, DialError::TooLong(MAX_ADDRESS_BYTES + 4));
    for tunnel in [&world.konnectivity, &world.openvpn] {
        assert_eq!(tunnel.dials.load(Ordering::Relaxed), 0);
    }
}

#[tokio::test(start_paused = true)]
async fn dial_that_openvpn_cannot_carry_goes_to_an_agent() {
    let world = World::new();
    world.router.set_route(Route {
        first: Kind::Openvpn,
        both: true,
    });
    world.openvpn.set_answer(Answer::NotCarry);
    drop(world.dial().await.unwrap());
    assert!(world.dials(Kind::Konnectivity, "opened", 1));
    // Without an agent the client receives OpenVPN's text.
    world.konnectivity.set_health(Health::Absent);
    let error = world.dial().await.err().unwrap();
    assert_eq!(error.to_string(), "IPv4 only");
    assert!(world.dials(Kind::Openvpn, "refused", 2));
}

#[tokio::test(start_paused = true)]
async fn mode_without_fallback_fails_if_its_tunnel_has_no_peer() {
    let world = World::new();
    world.router.set_route(Route::only(Kind::Openvpn));
    world.openvpn.set_health(Health::Absent);
    assert_eq!(world.dial().await.err(), Some(DialError::NoClient));
    assert!(!world.router.is_ready());
    // Neither tunnel has a peer: the error is the preferred tunnel's.
    world.router.set_route(PREFER_KONNECTIVITY);
    assert!(world.router.is_ready());
    world.konnectivity.set_health(Health::Absent);
    assert_eq!(world.dial().await.err(), Some(DialError::NoAgent));
}

#[tokio::test(start_paused = true)]
async fn a_dial_in_progress_moves_with_the_switch() {
    let world = World::new();
    world.konnectivity.set_answer(Answer::Silence);
    let dialed = async {
        let connection = world.dial().await;
        assert_eq!(world.router.view().openvpn.unwrap().in_use, 1);
        connection.unwrap();
    };
    let switched = async {
        sleep(Duration::from_secs(1)).await;
        assert_eq!(world.router.view().konnectivity.in_use, 1);
        world.router.set_route(Route::only(Kind::Openvpn));
        world.router.cut(Kind::Konnectivity);
    };
    tokio::join!(dialed, switched);
    assert!(world.dials(Kind::Konnectivity, "moved", 1));
    assert_eq!(world.router.view().konnectivity.in_use, 0);
}

#[tokio::test(start_paused = true)]
async fn tunnel_left_by_a_switch_during_a_dial_gets_no_dial() {
    let world = World::new();
    let router = world.router.clone();
    // The end of a switch that found nothing in use.
    let left = move || router.set_route(Route::only(Kind::Openvpn));
    *world.konnectivity.aside.lock() = Some(Box::new(left));
    assert_eq!(world.opened_by().await, Kind::Openvpn);
    assert!(world.dials(Kind::Konnectivity, "moved", 1));
    assert_eq!(world.konnectivity.dials.load(Ordering::Relaxed), 0);
}

#[tokio::test(start_paused = true)]
async fn client_that_leaves_is_counted_and_releases_its_dial() {
    let world = World::new();
    world.konnectivity.set_answer(Answer::Silence);
    let dial = tokio::time::timeout(Duration::from_secs(1), world.dial());
    assert!(dial.await.is_err());
    assert!(world.dials(Kind::Konnectivity, "given_up", 1));
    assert_eq!(world.router.view().konnectivity.in_use, 0);
}

#[tokio::test(start_paused = true)]
async fn a_flow_is_a_connection_like_any_other() {
    let world = World::new();
    let Connection {
        mut source,
        mut sink,
        cut,
    } = world.dial().await.unwrap();
    assert!(sink.connection() > 0);
    assert_eq!(sink.agent_id(), "memory");
    // More than all buffers hold: the sink waits for the source.
    let question = Bytes::from(vec![7; 32 * FLOW_BYTES]);
    let sent = async {
        sink.send(question.clone()).await?;
        sink.finish().await
    };
    let received = async {
        let mut all = Vec::new();
        while let Some(chunk) = source.recv().await? {
            all.extend_from_slice(&chunk);
        }
        Ok::<_, CloseReason>(all)
    };
    let (sent, received) = tokio::join!(sent, received);
    sent.unwrap();
    assert!(received.unwrap() == question);
    assert!(world.shows("culvert_tunnel_connections{tunnel=\"konnectivity\"} 1"));
    sink.end(CloseReason::Finished, &TaskTracker::new());
    drop(cut);
    assert!(world.shows("culvert_tunnel_connections{tunnel=\"konnectivity\"} 0"));
    assert_eq!(*world.konnectivity.ends.lock(), [Ok(())]);
}

#[tokio::test(start_paused = true)]
async fn end_of_a_flow_is_orderly_only_after_the_end_of_the_clients_bytes() {
    let lost = Err(CloseReason::ClientLost);
    for (reason, is_finished, expected) in [
        (CloseReason::HalfOpenIdle, false, lost),
        (CloseReason::HalfOpenIdle, true, Ok(())),
        (CloseReason::ClientLost, false, lost),
        (CloseReason::ClientClosed, false, Ok(())),
    ] {
        let world = World::new();
        let Connection {
            source: _source,
            mut sink,
            cut: _cut,
        } = world.dial().await.unwrap();
        sink.send(Bytes::from_static(b"bytes")).await.unwrap();
        if is_finished {
            sink.finish().await.unwrap();
        }
        let leaving = TaskTracker::new();
        sink.end(reason, &leaving);
        assert_eq!(leaving.len(), 1);
        sleep(Duration::from_secs(1)).await;
        assert!(leaving.is_empty());
        assert_eq!(*world.konnectivity.ends.lock(), [expected], "{reason}");
    }
}

/// A server has one such future for each idle connection.
#[tokio::test(start_paused = true)]
async fn future_of_a_connection_is_small() {
    let world = World::new();
    let frontend = frontend(&world);
    let connection = Box::new(world.dial().await.unwrap());
    let (read, write) = split(duplex(64).0);
    let mut source = ReadSource::new(read, Bytes::new(), CloseReason::ClientLost);
    let mut sink = WriteSink::new(write, CloseReason::ClientLost);
    let (gone, dial) = (pin!(std::future::pending()), dial());
    let carried = frontend.run(1, &dial, (&mut source, &mut sink), gone, connection);
    let bytes = size_of_val(&carried);
    // It has about 1,600 bytes. A second copy of the connection would add 344, an unboxed send at least 500.
    assert!(bytes <= 1792, "{bytes}");
}

fn frontend(world: &World) -> Arc<Frontend> {
    Frontend::new(
        world.router.clone(),
        TaskTracker::new(),
        CancellationToken::new(),
        world.metrics.clone(),
    )
}

#[tokio::test(start_paused = true)]
async fn cut_ends_open_connections_and_no_later_ones() {
    let world = World::new();
    let frontend = frontend(&world);
    let carry = async |connection| {
        let (client, near) = duplex(64);
        let (read, write) = split(near);
        let mut source = ReadSource::new(read, Bytes::new(), CloseReason::ClientLost);
        let mut sink = WriteSink::new(write, CloseReason::ClientLost);
        let gone = pin!(std::future::pending());
        let dial = dial();
        let halves = (&mut source, &mut sink);
        let carried = frontend.run(1, &dial, halves, gone, Box::new(connection));
        let talk = async {
            let (mut read, mut write) = split(client);
            loop {
                write.write_all(b"hello").await.unwrap();
                let mut back = [0; 5];
                read.read_exact(&mut back).await.unwrap();
                assert_eq!(&back, b"hello");
                sleep(Duration::from_millis(100)).await;
            }
        };
        tokio::select! {
            reason = carried => Some(reason),
            () = talk => None,
            () = sleep(Duration::from_secs(10)) => None,
        }
    };
    let (old, later) = (world.dial().await.unwrap(), async {
        sleep(Duration::from_secs(1)).await;
        world.router.cut(Kind::Konnectivity);
        carry(world.dial().await.unwrap()).await
    });
    let (old, later) = tokio::join!(carry(old), later);
    assert_eq!(old, Some(CloseReason::Switched));
    assert_eq!(later, None);
    assert!(world.shows("culvert_connections_closed_total{reason=\"switched\"} 1"));
    assert_eq!(
        *world.konnectivity.ends.lock(),
        [Err(CloseReason::ClientLost)]
    );
}
