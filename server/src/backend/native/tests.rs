//! Agents that do not complete an introduction.
#![allow(clippy::unwrap_used)]

use std::time::Duration;

use culvert_konnectivity::identifiers::Identifiers;
use culvert_native::link::{Taker, TakerLimits};
use culvert_native::quic::SESSION_HEADER;
use culvert_native::resume::Process;
use culvert_stream::Sink as _;
use http::HeaderMap;
use tokio::io::{AsyncReadExt as _, AsyncWriteExt as _, DuplexStream, duplex};

use super::super::connection::ToEndpoint;
use super::super::dial::next_serial;
use super::super::identity::AgentIdFrom;
use super::super::registry::{AgentLimits, CONNECTION_BYTES, NoPlace, Scope};
use super::super::resume::Sessions;
use super::super::second_link::SecondLinks;
use super::*;
use crate::listener::ADMISSION;
use crate::metrics::Listener;
use crate::tunnel::Health;

struct Server {
    agents: Agents,
    context: Arc<ListenerContext>,
}

impl Server {
    fn new() -> Self {
        Self::with_limits(AgentLimits::NONE)
    }

    fn with_limits(limits: AgentLimits) -> Self {
        let agents = Agents::plain(limits);
        let (shutdown, keepalive) = (CancellationToken::new(), Duration::from_secs(60));
        let context = ListenerContext::new(
            Listener::Agent,
            None,
            keepalive,
            agents.tasks.clone(),
            shutdown,
            agents.metrics.clone(),
            Default::default(),
        );
        Self { agents, context }
    }

    async fn serve(&self, stream: DuplexStream) {
        self.serve_as(stream, next_serial(), None).await;
    }

    async fn serve_as(&self, stream: DuplexStream, serial: u64, binding: Option<Binding>) {
        let peer = "192.0.2.1".parse().unwrap();
        let admission = &self.context.admission;
        let candidate = admission.enter(peer, Instant::now()).await.unwrap();
        let stream = admission.gate(stream, &candidate);
        let (context, stream) = (&self.context, Box::new(stream));
        let introduced = self
            .agents
            .introduce_native(context, stream, "peer", &candidate, serial, binding);
        if let Some(serving) = introduced.await {
            serving.await;
        }
    }

    /// Waits for an agent, and returns it.
    async fn agent(&self) -> Arc<NativeAgent> {
        loop {
            let chosen = self.agents.registry.choose(&Scope::All, &[]);
            match chosen.map(|chosen| chosen.agent) {
                Some(AgentConnection::Native(agent)) => return agent,
                _ => tokio::task::yield_now().await,
            }
        }
    }

    fn rejected(&self, reason: &str) -> bool {
        let page = self.agents.metrics.registry().render();
        let of_reason = format!("reason=\"{reason}\"}} 1");
        let mut lines = page.lines();
        lines.any(|line| line.starts_with("culvert_rejected_total{") && line.ends_with(&of_reason))
    }
}

/// Dials an address over an agent.
async fn dial(
    agent: &Arc<NativeAgent>,
) -> Result<(FromAgent<NativeSource>, ToAgent<NativeSink>), StreamDialError> {
    let dial = Dial {
        protocol: "tcp".into(),
        address: "10.0.0.1:443".into(),
    };
    let deadline = Instant::now() + Duration::from_secs(60);
    agent.dial(&dial, deadline, &OnceLock::new()).await
}

#[tokio::test(start_paused = true)]
async fn missing_or_incomplete_introduction_times_out() {
    for beginning in ["", "GET /agent HTTP/1.1\r\nagentid: a\r\n"] {
        let server = Server::new();
        let (near, mut far) = duplex(4096);
        far.write_all(beginning.as_bytes()).await.unwrap();
        let started = Instant::now();
        server.serve(near).await;
        assert_eq!(started.elapsed(), ADMISSION.deadline);
        assert!(server.rejected("timeout"));
        assert_eq!(far.read(&mut [0; 16]).await.unwrap(), 0);
    }
}

#[tokio::test(start_paused = true)]
async fn silent_peer_does_not_delay_shutdown() {
    let server = Server::new();
    let (near, _far) = duplex(4096);
    let started = Instant::now();
    let ends = async {
        tokio::task::yield_now().await;
        server.context.shutdown.cancel();
    };
    tokio::join!(server.serve(near), ends);
    assert_eq!(started.elapsed(), Duration::ZERO);
    assert!(!server.rejected("timeout"));
}

#[tokio::test]
async fn agent_without_an_id_receives_the_reason() {
    let server = Server::new();
    let (near, mut far) = duplex(4096);
    far.write_all(b"GET /agent HTTP/1.1\r\nupgrade: culvert/1\r\n\r\n")
        .await
        .unwrap();
    server.serve(near).await;
    let mut answer = String::new();
    far.read_to_string(&mut answer).await.unwrap();
    assert!(answer.starts_with("HTTP/1.1 403 "), "{answer}");
    let text = "\r\n\r\nexpected one agent ID in the context, got []";
    assert!(answer.ends_with(text), "{answer}");
    assert!(server.rejected("garbage"));
}

#[tokio::test]
async fn connected_agent_is_answered_before_its_authentication() {
    let mut server = Server::new();
    // The agents have no certificate.
    server.agents.id_from = Some(AgentIdFrom::Certificate);
    for (listed, status) in [("s", "409 Conflict"), ("other", "403 Forbidden")] {
        let (near, mut far) = duplex(4096);
        let hello =
            format!("GET /agent HTTP/1.1\r\nagentid: a\r\nculvert-connected: {listed}\r\n\r\n");
        far.write_all(hello.as_bytes()).await.unwrap();
        server.serve(near).await;
        let mut answer = String::new();
        far.read_to_string(&mut answer).await.unwrap();
        let begin = format!("HTTP/1.1 {status}\r\n");
        assert!(answer.starts_with(&begin), "{answer}");
        let has_count = answer.contains("\r\nserverid: s\r\nservercount: 3\r\n");
        assert_eq!(has_count, listed == "s", "{answer}");
    }
    assert!(server.agents.registry.peers().is_empty());
    assert!(server.rejected("unauthenticated"));
}

/// The introduction of an agent of version 0.1.0 without QUIC, as recorded.
const OLD_HELLO: &[u8] =
    b"GET /agent HTTP/1.1\r\nhost: culvert\r\nconnection: upgrade\r\nupgrade: culvert/1\r\n\
    agentid: a\r\nagentidentifiers: \r\nculvert-half-close: 1\r\n\r\n";

#[tokio::test]
async fn agent_that_leaves_before_http2_retires_its_second_link() {
    let mut server = Server::new();
    let links = SecondLinks::new(8443, 8091);
    server.agents.second_links = Some(links.clone());
    // Smaller than the preface of HTTP/2, so the server cannot get ahead of the agent.
    let (near, mut far) = duplex(16);
    let agent = async move {
        far.write_all(OLD_HELLO).await.unwrap();
        let head = culvert_stream::head::read_head(&mut far, 4096)
            .await
            .unwrap();
        let head = String::from_utf8(head.to_vec()).unwrap();
        let mut lines = head.lines();
        let session = lines.find_map(|line| line.strip_prefix("culvert-session: "));
        let mut headers = HeaderMap::new();
        headers.insert(SESSION_HEADER, session.unwrap().parse().unwrap());
        let second = links.of(&headers).unwrap();
        assert!(!second.retired.is_cancelled());
        second
    };
    let (second, ()) = tokio::join!(agent, server.serve(near));
    assert!(second.retired.is_cancelled());
    assert!(server.agents.registry.peers().is_empty());
}

#[tokio::test]
async fn offer_of_quic_does_not_disturb_an_agent_that_does_not_know_quic() {
    let mut server = Server::new();
    server.agents.second_links = Some(SecondLinks::new(8443, 8091));
    let (near, mut far) = duplex(4096);
    far.write_all(OLD_HELLO).await.unwrap();
    let talk = async {
        let head = culvert_stream::head::read_head(&mut far, 4096)
            .await
            .unwrap();
        let head = String::from_utf8(head.to_vec()).unwrap();
        assert!(head.starts_with("HTTP/1.1 101 "), "{head}");
        for line in ["serverid: s", "servercount: 3", "culvert-quic: 8443"] {
            assert!(head.contains(&format!("\r\n{line}\r\n")), "{head}");
        }
        assert!(head.contains("\r\nculvert-session: "), "{head}");
        let mut preface = [0; 24];
        far.read_exact(&mut preface).await.unwrap();
        assert_eq!(&preface, b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n");
        let peer = server.agents.registry.peers().pop().unwrap();
        assert_eq!(peer.kind, "agent, native");
        assert_eq!(peer.address, Some(server.agents.peer.address));
    };
    tokio::select! {
        () = talk => {}
        () = server.serve(near) => panic!("the connection ended"),
    }
}

#[tokio::test]
async fn refused_dials_count_towards_the_end_of_the_stream_numbers() {
    let server = Server::new();
    let (near, mut far) = duplex(1 << 16);
    far.write_all(OLD_HELLO).await.unwrap();
    let agent = async {
        let head = culvert_stream::head::read_head(&mut far, 4096).await;
        head.unwrap();
        let limits = TakerLimits::trusting();
        let mut taker: Taker<_> = Taker::new(far, Arc::default(), limits).await.unwrap();
        // The server closes the connection.
        while let Ok(Some((_, mut answer))) = taker.next().await {
            let refused = http::Response::builder().status(StatusCode::BAD_GATEWAY);
            answer
                .send_response(refused.body(()).unwrap(), true)
                .unwrap();
        }
    };
    let dials = async {
        let agent = server.agent().await;
        let dial = async || {
            let dialed = dial(&agent).await;
            assert!(matches!(dialed.err(), Some(StreamDialError::Refused(_))));
        };
        dial().await;
        let first = agent.last_stream.load(Ordering::Relaxed);
        dial().await;
        assert_eq!(agent.last_stream.load(Ordering::Relaxed), first + 2);
        assert!(first > 0 && !agent.retired.is_cancelled());
        agent.last_stream.store(RENEW_AFTER, Ordering::Relaxed);
        dial().await;
        assert!(agent.retired.is_cancelled());
    };
    tokio::join!(agent, dials, server.serve(near));
}

#[tokio::test]
async fn the_last_connection_before_a_renewal_keeps_its_bytes() {
    const BYTES: usize = 1 << 20;
    let server = Server::new();
    let (near, mut far) = duplex(1 << 16);
    far.write_all(OLD_HELLO).await.unwrap();
    let (end, ended) = tokio::sync::oneshot::channel();
    let agent = async {
        let head = culvert_stream::head::read_head(&mut far, 4096).await;
        head.unwrap();
        let limits = TakerLimits::trusting();
        let mut taker: Taker<_> = Taker::new(far, Arc::default(), limits).await.unwrap();
        let mut control = None;
        let (request, mut answer) = loop {
            let (request, answer) = taker.next().await.unwrap().unwrap();
            match request.uri().path() {
                CONTROL_PATH => control = Some((request, answer)),
                _ => break (request, answer),
            }
        };
        let accepted = http::Response::new(());
        let _send = answer.send_response(accepted, false).unwrap();
        let mut body = request.into_body();
        let run = async { while let Ok(Some(_)) = taker.next().await {} };
        let read = async {
            // The connection ends before its bytes are read.
            ended.await.unwrap();
            let mut bytes = 0;
            while let Some(Ok(chunk)) = body.data().await {
                bytes += chunk.len();
                body.flow_control().release_capacity(chunk.len()).unwrap();
            }
            assert_eq!(bytes, BYTES);
        };
        tokio::join!(run, read);
        drop(control);
    };
    let dials = async {
        let agent = server.agent().await;
        let (source, mut sink) = dial(&agent).await.unwrap();
        agent.last_stream.store(RENEW_AFTER, Ordering::Relaxed);
        sink.send(vec![7; BYTES].into()).await.unwrap();
        let sink = ToEndpoint::Native(sink);
        sink.end(CloseReason::ClientClosed, &server.agents.tasks);
        assert!(!agent.retired.is_cancelled());
        end.send(()).unwrap();
        agent.retired.cancelled().await;
        drop(source);
    };
    tokio::join!(agent, dials, server.serve(near));
}

/// Introduces an agent that may resume, and returns its end of the connection after the preface of HTTP/2.
async fn introduce(mut far: DuplexStream, agent_id: &str, process: &Process) -> DuplexStream {
    let mut headers = HeaderMap::new();
    process.add_to(&mut headers);
    let process = headers.get("culvert-process").unwrap().to_str().unwrap();
    let hello = format!(
        "GET /agent HTTP/1.1\r\nagentid: {agent_id}\r\nagentidentifiers: \r\n\
        culvert-resume: 1\r\nculvert-process: {process}\r\n\r\n"
    );
    far.write_all(hello.as_bytes()).await.unwrap();
    let head = culvert_stream::head::read_head(&mut far, 4096);
    let head = String::from_utf8(head.await.unwrap().to_vec()).unwrap();
    assert!(head.contains("\r\nculvert-resume: "), "{head}");
    far.read_u8().await.unwrap();
    far
}

#[tokio::test(start_paused = true)]
async fn agent_that_left_before_its_answer_is_not_away() {
    let mut server = Server::new();
    let grace = Duration::from_secs(30);
    server.agents.sessions = Sessions::new(grace, server.agents.metrics.clone());
    let (near, mut far) = duplex(4096);
    far.write_all(b"GET /agent HTTP/1.1\r\nagentid: a\r\nculvert-resume: 1\r\n\r\n")
        .await
        .unwrap();
    far.shutdown().await.unwrap();
    let started = Instant::now();
    server.serve_as(near, next_serial(), Some([3; 32])).await;
    assert_eq!(started.elapsed(), Duration::ZERO);
    assert!(server.agents.registry.peers().is_empty());
    assert!(server.agents.registry.has_no_places());
}

/// The review of a token may last longer than a process.
#[tokio::test]
async fn late_introduction_of_an_earlier_process_does_not_end_the_link_of_its_successor() {
    let mut server = Server::new();
    let grace = Duration::from_secs(30);
    server.agents.sessions = Sessions::new(grace, server.agents.metrics.clone());
    let [earlier, later] = [(); 2].map(|()| Process::new(&["place"]).unwrap());
    let ((near, far), (late_near, late_far)) = (duplex(1 << 16), duplex(1 << 16));
    let (earlier_serial, later_serial) = (next_serial(), next_serial());
    let binding = Some([3; 32]);
    let condemned = |serial, other| {
        let chosen = server
            .agents
            .registry
            .choose(&Scope::All, &[other])
            .unwrap();
        let AgentConnection::Native(agent) = chosen.agent else {
            panic!("a packet stream");
        };
        assert_eq!(agent.serial, serial);
        agent.session.as_ref().unwrap().condemned()
    };
    let talk = async {
        let _far = introduce(far, "random-2", &later).await;
        let _late = introduce(late_far, "random-1", &earlier).await;
        assert_eq!(condemned(later_serial, earlier_serial), None);
        assert!(condemned(earlier_serial, later_serial).is_some());
    };
    tokio::select! {
        () = talk => {}
        () = server.serve_as(near, later_serial, binding) => panic!("the connection ended"),
        () = server.serve_as(late_near, earlier_serial, binding) => panic!("the connection ended"),
    }
}

#[tokio::test]
async fn agent_that_is_away_gives_up_its_memory_only_if_the_new_agent_then_fits() {
    let mut server = Server::with_limits(AgentLimits {
        memory: 3 * CONNECTION_BYTES,
        ..AgentLimits::NONE
    });
    let grace = Duration::from_secs(30);
    server.agents.sessions = Sessions::new(grace, server.agents.metrics.clone());
    let [here, away] = ["here", "away"].map(|place| Process::new(&[place]).unwrap());
    let ((near, far), (away_near, away_far)) = (duplex(1 << 16), duplex(1 << 16));
    let registry = &server.agents.registry;
    let place = |identifiers: usize| {
        let names: Vec<String> = (0..identifiers).map(|n| format!("host=h{n}")).collect();
        let hello = Hello {
            agent_id: "c".into(),
            half_close: false,
            identifiers: Identifiers::parse(&names.join("&")).unwrap(),
        };
        registry.place(&"c".into(), 8, &hello)
    };
    let talk = async {
        let far = introduce(far, "a", &here).await;
        drop(introduce(away_far, "b", &away).await);
        while registry
            .peers()
            .iter()
            .all(|it| it.health == Health::Healthy)
        {
            tokio::task::yield_now().await;
        }
        // 224 identifiers need as much memory as 7 agent connections, and 32 as one.
        assert_eq!(place(224).err(), Some(NoPlace::Memory(2, 224)));
        assert_eq!(registry.peers().len(), 2);
        let place = place(32).unwrap();
        (far, place)
    };
    let binding = Some([3; 32]);
    let ends = async {
        let _kept = tokio::join!(talk, server.serve_as(away_near, next_serial(), binding));
        assert_eq!(registry.peers().len(), 1);
    };
    tokio::select! {
        () = ends => {}
        () = server.serve_as(near, next_serial(), binding) => panic!("the connection ended"),
    }
}

#[tokio::test]
async fn peer_that_waits_for_an_answer_has_not_left() {
    let (mut near, mut far) = duplex(64);
    assert!(!has_left(&mut near).await);
    far.write_all(b"x").await.unwrap();
    assert!(has_left(&mut near).await);
    let (mut near, far) = duplex(64);
    drop(far);
    assert!(has_left(&mut near).await);
}
