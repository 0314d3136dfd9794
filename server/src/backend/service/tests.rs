//! Tests of the introductions of agents and of their places.
#![allow(clippy::unwrap_used)]

use culvert_konnectivity::grpc;
use culvert_konnectivity::message::{ConnectId, Message};
use culvert_native::halves::Chunk;
use culvert_native::link::{Opener, Taker, TakerLimits};
use culvert_native::window::{Inbound, Pings};

use super::super::registry::{AgentLimits, CONNECTION_BYTES};
use super::*;

const LIMITS: AgentLimits = AgentLimits {
    agents: MAX_IDENTITY_CONNECTIONS + 2,
    ..AgentLimits::NONE
};

fn agents(id_from: Option<AgentIdFrom>) -> Agents {
    Agents {
        id_from,
        ..Agents::plain(LIMITS)
    }
}

async fn admit(agents: &Agents, id: &str) -> Result<(Place, String), AgentRefusal> {
    let mut hello = hello(&[("agentid", id)]).unwrap();
    let place = agents.admit(&MetadataMap::new(), &mut hello).await?;
    Ok((place, hello.agent_id))
}

#[tokio::test]
async fn streams_of_an_identity_are_limited_until_one_ends() {
    let agents = agents(None);
    let mut places = Vec::new();
    for _ in 0..MAX_IDENTITY_CONNECTIONS {
        places.push(admit(&agents, "a").await.unwrap());
    }
    let refused = admit(&agents, "a").await.err();
    assert_eq!(
        refused,
        Some(NoPlace::Identity(MAX_IDENTITY_CONNECTIONS).into())
    );
    assert!(admit(&agents, "b").await.is_ok());
    places.pop();
    assert!(admit(&agents, "a").await.is_ok());
    drop(places);
    assert!(agents.registry.has_no_places());
}

#[tokio::test]
async fn reader_of_many_messages_lets_other_tasks_run() {
    let agents = agents(None);
    let (place, _) = admit(&agents, "a").await.unwrap();
    let hello = hello(&[("agentid", "a")]).unwrap();
    let (limits, metrics) = (agents.limits.clone(), agents.metrics.clone());
    let (stream, _outgoing) = AgentStream::new(hello, limits, Carrier::default(), metrics.clone());
    let backend = AgentConnection::Packet(stream.clone());
    let registration = agents.registry.register(backend, place);

    let (near, far) = tokio::io::duplex(1 << 20);
    let inbound = Arc::<Inbound>::default();
    let (opened, taken) = tokio::join!(
        Opener::new(near, Arc::default(), Pings::default()),
        Taker::new(far, inbound.clone(), TakerLimits::trusting()),
    );
    let ((mut requests, mut opener), mut taker) = (opened.unwrap(), taken.unwrap());
    tokio::spawn(async move { opener.run().await });
    let (_answer, mut send) = requests
        .send_request(http::Request::new(()), false)
        .unwrap();
    let (request, _respond) = taker.next().await.unwrap().unwrap();
    tokio::spawn(async move { taker.next().await.map(|_| ()) });
    let mut messages = Vec::new();
    for _ in 0..5000 {
        let connection = ConnectId(7);
        grpc::encode(Message::CloseRequest { connection }, &mut messages);
    }
    let bytes = messages.len() as u64;
    send.send_data(Chunk::detached(messages.into()), true)
        .unwrap();
    while inbound.heard() < bytes {
        tokio::task::yield_now().await;
    }
    // Lets the last frame arrive, whose head follows these bytes.
    for _ in 0..1000 {
        tokio::task::yield_now().await;
    }

    let messages = Reader::request(grpc::Received::new(request.into_body()));
    let shutdown = CancellationToken::new();
    let reading = read(messages, stream, registration, metrics, shutdown);
    let mut reading = std::pin::pin!(reading);
    tokio::select! {
        biased;
        () = &mut reading => panic!("all messages were read at once"),
        () = std::future::ready(()) => {}
    }
    reading.await;
}

#[tokio::test]
async fn only_an_agent_that_is_lost_while_the_server_runs_counts_as_an_error() {
    let agents = agents(None);
    let hello = hello(&[("agentid", "a")]).unwrap();
    let (limits, metrics) = (agents.limits.clone(), agents.metrics.clone());
    let (stream, _outgoing) = AgentStream::new(hello, limits, Carrier::default(), metrics.clone());
    for (is_stopping, reason, errors) in [
        (true, "this server is stopping", 0),
        (false, "broken pipe", 1),
    ] {
        let (near, far) = tokio::io::duplex(1 << 16);
        let (opened, taken) = tokio::join!(
            Opener::new(near, Arc::default(), Pings::default()),
            Taker::new(far, Arc::default(), TakerLimits::trusting()),
        );
        let ((mut requests, mut opener), mut taker) = (opened.unwrap(), taken.unwrap());
        tokio::spawn(async move { opener.run().await });
        let (_answer, _send) = requests
            .send_request(http::Request::new(()), false)
            .unwrap();
        let (request, _respond) = taker.next().await.unwrap().unwrap();
        let mut messages = Reader::request(grpc::Received::new(request.into_body()));
        let shutdown = CancellationToken::new();
        if is_stopping {
            shutdown.cancel();
        }
        // Closes the connection on the server's side.
        drop(taker);
        let ended = read_packets(&mut messages, &stream, &metrics, &shutdown).await;
        assert!(ended.contains(reason), "{ended}");
        let page = metrics.registry().render();
        let lines = page.lines().filter(|line| !line.starts_with('#'));
        let counted = lines.filter(|line| line.contains("stream_errors_total"));
        assert_eq!(counted.count(), errors, "{page}");
    }
}

#[tokio::test]
async fn agent_connections_of_a_server_are_limited() {
    let agents = agents(None);
    let mut places = Vec::new();
    for n in 0..LIMITS.agents {
        places.push(admit(&agents, &n.to_string()).await.unwrap());
    }
    let refused = admit(&agents, "a").await.err().unwrap();
    assert_eq!(refused, NoPlace::Server(LIMITS.agents).into());
    assert_eq!(refused.reason(), RejectReason::TooManyConnections);
    assert!(refused.to_string().ends_with("--max-agents"), "{refused}");
    places.pop();
    assert!(admit(&agents, "a").await.is_ok());
}

#[tokio::test]
async fn memory_limit_bounds_agent_connections_and_their_identifiers() {
    let agents = Agents::plain(AgentLimits {
        memory: 10 * CONNECTION_BYTES,
        ..AgentLimits::NONE
    });
    let admit = async |agent: &str, identifiers: &str| {
        let pairs = [("agentid", agent), ("agentidentifiers", identifiers)];
        let mut hello = hello(&pairs).unwrap();
        let place = agents.admit(&MetadataMap::new(), &mut hello).await;
        place.map_err(|refused| refused.to_string())
    };
    // 224 identifiers count as much as 7 agent connections.
    let identifiers: Vec<String> = (0..224).map(|n| format!("host=h{n}")).collect();
    let many = identifiers.join("&");
    let large = admit("a", &many).await.unwrap();
    let small = admit("b", "default-route=true").await.unwrap();
    let text = "the server already has 2 agent connections, and its memory limit has no room for another one with 224 agent identifiers";
    assert_eq!(admit("c", &many).await.err().as_deref(), Some(text));
    let _last = admit("c", "").await.unwrap();
    assert!(admit("d", "").await.is_err());
    drop(large);
    assert!(admit("d", &many).await.is_ok());
    drop(small);
}

#[tokio::test]
async fn identity_without_a_name_is_refused_if_ids_come_from_it() {
    let from = Some(AgentIdFrom::Certificate);
    let malformed = CertificateDer::from(vec![0]);
    let address = ([192, 0, 2, 1], 1).into();
    let agents = agents(from).of_peer(address, Some(std::slice::from_ref(&malformed)));
    let refused = admit(&agents, "a").await.err().unwrap();
    assert_eq!(refused, AgentRefusal::NoName(AgentIdFrom::Certificate));
    let text = refused.to_string();
    assert!(text.contains("common name; issue"), "{text}");
    // Without the flag the agent keeps its id, and shares the limit of its certificate's name.
    let agents = self::agents(None).of_peer(address, Some(&[malformed]));
    let (_place, id) = admit(&agents, "a").await.unwrap();
    assert_eq!(id, "a");
    assert!(!agents.registry.has_no_places());
}

fn hello(pairs: &[(&'static str, &str)]) -> Result<Hello, String> {
    let mut metadata = MetadataMap::new();
    for (key, value) in pairs {
        metadata.append(*key, value.parse().unwrap());
    }
    Hello::from_metadata(&metadata)
}

#[test]
fn an_agent_needs_exactly_one_id() {
    let one = hello(&[("agentid", "a"), ("agentidentifiers", "")]).unwrap();
    assert_eq!((one.agent_id.as_str(), one.half_close), ("a", false));
    assert_eq!(
        hello(&[]).unwrap_err(),
        "expected one agent ID in the context, got []"
    );
    assert_eq!(
        hello(&[("agentid", "a"), ("agentid", "b")]).unwrap_err(),
        "expected one agent ID in the context, got [a b]"
    );
}

#[test]
fn ids_and_identifiers_are_limited() {
    let with =
        |id: &str, identifiers: &str| hello(&[("agentid", id), ("agentidentifiers", identifiers)]);
    let name = |length| "a".repeat(length);
    let hosts = |count| -> String { (0..count).map(|n| format!("host={n}&")).collect() };
    let longest = format!("host={}&cidr={}", name(253), name(253));
    for identifiers in [hosts(256), longest, "host=a&".repeat(1000)] {
        assert!(with(&name(253), &identifiers).is_ok(), "{identifiers}");
    }
    for (id, identifiers, error) in [
        (
            name(254),
            String::new(),
            "expected an agent ID of at most 253 bytes in the context, got 254",
        ),
        (
            name(1),
            hosts(255) + "cidr=10.0.0.0/8&cidr=x",
            "expected at most 256 agent identifiers in the context, got 257",
        ),
        (
            name(1),
            format!("cidr={}", name(254)),
            "expected agent identifiers of at most 253 bytes in the context, got 254",
        ),
    ] {
        assert_eq!(with(&id, &identifiers).unwrap_err(), error);
    }
}

#[test]
fn rejected_ids_and_identifiers_are_cut_in_the_error() {
    let long = "a".repeat(30_000);
    for key in ["agentid", "agentidentifiers"] {
        let long = long.as_str();
        let error = hello(&[("agentid", "a"), (key, long), (key, long)]).unwrap_err();
        assert!(error.len() < 400, "{key}: {} bytes", error.len());
    }
}

#[test]
fn more_than_one_set_of_identifiers_is_refused() {
    let twice = [
        ("agentid", "a"),
        ("agentidentifiers", "x"),
        ("agentidentifiers", "y"),
    ];
    assert!(
        hello(&twice)
            .unwrap_err()
            .starts_with("expected at most one set")
    );
    assert!(
        hello(&[("agentid", "a"), (HALF_CLOSE_HEADER, "1")])
            .unwrap()
            .half_close
    );
}
