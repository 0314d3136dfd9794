//! The `AgentService/Connect` call: accepts agents' packet streams.

use std::net::IpAddr;
use std::sync::Arc;

use culvert_host::telemetry::metrics::GaugeGuard;
use culvert_konnectivity::grpc::{Reader, Service};
use culvert_konnectivity::identifiers::Identifiers;
use culvert_konnectivity::message::{
    AGENT_ID_HEADER, AGENT_IDENTIFIERS_HEADER, HALF_CLOSE_HEADER, SERVER_COUNT_HEADER,
    SERVER_ID_HEADER,
};
use culvert_konnectivity::metrics::Segment;
use culvert_kube::tokens::Tokens;
use culvert_native::resume::Process;
use rustls::pki_types::CertificateDer;
use tokio::sync::watch;
use tokio::task::coop::consume_budget;
use tokio_util::task::TaskTracker;
use tonic::metadata::{MetadataMap, MetadataValue};
use tonic::{Request, Response, Status};
use tracing::{Instrument, info, info_span, warn};

use super::agent::{AgentStream, Carrier, Hello, Limits, Outgoing};
use super::announced::Announced;
use super::identity::{AgentIdFrom, AgentPeer, AgentRefusal};
use super::registry::{MAX_IDENTITY_CONNECTIONS, MAX_POD_CONNECTIONS, NoPlace};
use super::resume::{Owner, Sessions};
use super::second_link::SecondLinks;
use super::{AgentConnection, Place, Registration, Registry};
use crate::listener::PeerConnection;
use crate::listener::path_aware::LinkPath;
use crate::metrics::{Listener, RejectReason, ServerMetrics, ServiceMethod};

/// Maximum length of an agent id, and of one identifier, in bytes: the limit for names of nodes and pods in Kubernetes.
const MAX_NAME_BYTES: usize = 253;

/// Maximum number of an agent's identifiers. Stock agents usually have one for each address or network of their node. The
/// registry has a group of agents for each identifier.
const MAX_IDENTIFIERS: usize = 256;

/// Serves the agents of a server.
#[derive(Clone)]
pub(crate) struct Agents {
    /// Registry of the streams.
    pub registry: Arc<Registry>,
    /// Id by which agents distinguish servers.
    pub server_id: String,
    /// Announcements to agents.
    pub announced: watch::Receiver<Announced>,
    /// Limits of each stream.
    pub limits: Limits,
    /// Sessions of native agents.
    pub sessions: Arc<Sessions>,
    /// Checks agents' tokens; `None` if agents need no token.
    pub tokens: Option<Arc<Tokens>>,
    /// Source of agents' ids; `None` if agents choose their ids.
    pub id_from: Option<AgentIdFrom>,
    /// Peer of the connection; see [`Agents::of_peer`].
    pub peer: AgentPeer,
    /// QUIC links of agents; `None` if the server offers no QUIC.
    pub second_links: Option<Arc<SecondLinks>>,
    /// Tracks the reader tasks.
    pub tasks: TaskTracker,
    /// Metrics of the server.
    pub metrics: Arc<ServerMetrics>,
}

impl Service for Agents {
    const PATH: &'static str = "/AgentService/Connect";

    type Replies = Outgoing;

    async fn take(&self, request: Request<Reader>) -> Result<Response<Outgoing>, Status> {
        let hello = Hello::from_metadata(request.metadata());
        let mut hello = hello.map_err(|why| self.refuse("", RejectReason::Garbage, why))?;
        let connection = request.extensions().get::<PeerConnection>().cloned();
        let connection = connection.ok_or_else(|| Status::internal("no connection"))?;
        if !connection.begin_review() {
            let why =
                "the connection has another call that is not accepted; open another connection";
            return Err(self.refuse(&hello.agent_id, RejectReason::Garbage, why.to_owned()));
        }
        let admitted = self.admit(request.metadata(), &mut hello).await;
        let place = admitted
            .map_err(|error| self.refuse(&hello.agent_id, error.reason(), error.to_string()))?;
        connection.admit();
        let carrier = Carrier {
            cut: connection.cut,
            inbound: connection.inbound,
        };
        let (stream, messages) =
            AgentStream::new(hello, self.limits.clone(), carrier, self.metrics.clone());
        let half_close = stream.hello.half_close;
        let progress = messages.progress();
        let outgoing = Outgoing::new(messages, stream.clone());
        let mut response = Response::new(outgoing);
        response.extensions_mut().insert(progress);
        let metadata = response.metadata_mut();
        let server_id = MetadataValue::try_from(&self.server_id)
            .map_err(|_| Status::unknown("the server id is not a valid header value"))?;
        metadata.insert(SERVER_ID_HEADER, server_id);
        metadata.insert(SERVER_COUNT_HEADER, self.announced.borrow().servers.into());
        if half_close {
            metadata.insert(HALF_CLOSE_HEADER, MetadataValue::from_static("1"));
        }
        let span = info_span!(
            "agent",
            agent = stream.hello.agent_id,
            stream = stream.serial
        );
        let backend = AgentConnection::Packet(stream.clone());
        let registration = span.in_scope(|| self.registry.register(backend, place));
        let reader = read(
            request.into_inner(),
            stream,
            registration,
            self.metrics.clone(),
        );
        self.tasks.spawn(reader.instrument(span));
        Ok(response)
    }
}

#[cfg(test)]
#[allow(clippy::unwrap_used)]
impl Agents {
    /// Creates the service of a server without authentication, resumption and QUIC.
    pub(crate) fn plain(limits: super::registry::AgentLimits) -> Self {
        let metrics = Arc::new(ServerMetrics::new(&[]).unwrap());
        let strategies = vec![crate::metrics::Strategy::Default];
        let (unused, borrowed) = (metrics::Gauge::noop(), metrics::Gauge::noop());
        Self {
            registry: Registry::new(strategies, limits, metrics.clone()),
            server_id: "s".into(),
            announced: Announced::fixed(3),
            limits: Limits {
                connection_bytes: 1,
                stall: std::time::Duration::from_secs(1),
                excess: culvert_konnectivity::excess::OverflowBudget::new(1, unused, borrowed),
            },
            sessions: Sessions::new(std::time::Duration::ZERO, metrics.clone()),
            tokens: None,
            id_from: None,
            peer: AgentPeer::default(),
            second_links: None,
            tasks: TaskTracker::new(),
            metrics,
        }
    }
}

impl Agents {
    /// Logs and counts a refused agent, and returns the status for the agent.
    fn refuse(&self, agent: &str, reason: RejectReason, error: String) -> Status {
        let (peer, label) = (self.peer.address, reason.as_str());
        warn!(agent, %peer, reason = label, error, "agent refused");
        let rejected = self.metrics.rejected.get((Listener::Agent, reason));
        rejected.increment(1);
        Status::unknown(error)
    }

    /// Returns the service for one connection. `certificates` is the chain that the TLS handshake has verified.
    pub(crate) fn of_peer(
        mut self,
        address: IpAddr,
        certificates: Option<&[CertificateDer<'_>]>,
    ) -> Self {
        self.peer = AgentPeer::new(address, certificates);
        self
    }

    /// Returns the service for a connection whose socket follows the path of the agent's link.
    pub(crate) fn along(mut self, path: LinkPath) -> Self {
        self.peer.path = path;
        self
    }

    /// Authenticates an agent and takes a place for its stream. Sets the agent's id if ids come from identities.
    pub(super) async fn admit(
        &self,
        metadata: &MetadataMap,
        hello: &mut Hello,
    ) -> Result<Place, AgentRefusal> {
        let identity = self.authenticate(metadata, hello).await?;
        Ok(self.place(&identity, hello)?)
    }

    /// Takes a place for an authenticated agent's stream.
    pub(super) fn place(&self, identity: &Arc<str>, hello: &Hello) -> Result<Place, NoPlace> {
        // An empty identity is that of all tokens without a pod.
        let is_pod = self.tokens.is_some()
            && self.id_from != Some(AgentIdFrom::Certificate)
            && !identity.is_empty();
        let most = if is_pod {
            MAX_POD_CONNECTIONS
        } else {
            MAX_IDENTITY_CONNECTIONS
        };
        self.registry.place(identity, most, hello)
    }

    /// Authenticates an agent, and returns its identity. Sets the agent's id if ids come from identities.
    pub(super) async fn authenticate(
        &self,
        metadata: &MetadataMap,
        hello: &mut Hello,
    ) -> Result<Arc<str>, AgentRefusal> {
        let account = match &self.tokens {
            Some(tokens) => Some(tokens.check(metadata, self.peer.address).await?),
            None => None,
        };
        let identity = self.peer.identity(self.id_from, account);
        if let Some(id_from) = self.id_from {
            let name = identity.as_deref().filter(|name| !name.is_empty());
            let id = name.ok_or(AgentRefusal::NoName(id_from))?;
            let claimed = std::mem::replace(&mut hello.agent_id, id.to_owned());
            info!(
                agent = id,
                claimed, "the agent's id is the name of its identity"
            );
        }
        Ok(identity.unwrap_or_else(|| hello.agent_id.as_str().into()))
    }

    /// Returns the owner of the sessions that an authenticated agent begins on this connection.
    pub(super) fn owner(
        &self,
        hello: &Hello,
        identity: Arc<str>,
        process: Option<Process>,
    ) -> Owner {
        let common_name = self.peer.common_name();
        Owner {
            agent_id: hello.agent_id.clone(),
            identity,
            is_proven: self.tokens.is_some() || common_name.is_some(),
            common_name,
            process,
        }
    }
}

/// Reads an agent's packets until its stream ends.
async fn read(
    mut inbound: Reader,
    stream: Arc<AgentStream>,
    registration: Registration,
    metrics: Arc<ServerMetrics>,
) {
    let _open = GaugeGuard::new(metrics.grpc_connections.get(ServiceMethod::Connect));
    let ended = loop {
        let next = tokio::select! {
            // Polled first: a broken connection also retires the stream.
            biased;
            next = inbound.message() => next,
            () = stream.retired() => break "given up".to_owned(),
        };
        match next {
            Ok(Some(message)) => {
                metrics.streams.count(Segment::FromAgent, &message);
                stream.on_message(message).await;
            }
            Ok(None) => break "closed by the agent".to_owned(),
            Err(status) => {
                let streams = &metrics.streams;
                streams.stream_error(Segment::FromAgent, status.code(), None);
                break status.message().to_owned();
            }
        }
        // Messages that have arrived are ready without a limit, and other agents have the same thread.
        consume_budget().await;
    };
    drop(registration);
    let (pending, open) = stream.counts();
    stream.end();
    info!(reason = ended, pending, open, "agent disconnected");
}

impl Hello {
    /// Reads the introduction of an agent; the error texts are upstream's.
    pub(super) fn from_metadata(metadata: &MetadataMap) -> Result<Self, String> {
        let values = |key: &'static str| -> Vec<&str> {
            let all = metadata.get_all(key).iter();
            all.filter_map(|value| value.to_str().ok()).collect()
        };
        let ids = values(AGENT_ID_HEADER);
        let [agent_id] = ids.as_slice() else {
            return Err(format!(
                "expected one agent ID in the context, got [{}]",
                shorten(ids.join(" "))
            ));
        };
        if agent_id.len() > MAX_NAME_BYTES {
            return Err(format!(
                "expected an agent ID of at most {MAX_NAME_BYTES} bytes in the context, got {}",
                agent_id.len()
            ));
        }
        let sets = values(AGENT_IDENTIFIERS_HEADER);
        if sets.len() > 1 {
            return Err(format!(
                "expected at most one set of agent identifiers in the context, got [{}]",
                shorten(sets.join(" "))
            ));
        }
        let text = sets.first().copied().unwrap_or_default();
        let identifiers = Identifiers::parse(text).map_err(|error| error.to_string())?;
        let count = identifiers.count();
        if count > MAX_IDENTIFIERS {
            return Err(format!(
                "expected at most {MAX_IDENTIFIERS} agent identifiers in the context, got {count}"
            ));
        }
        let names = identifiers.hosts.iter().chain(&identifiers.malformed);
        let longest = names.map(String::len).max().unwrap_or(0);
        if longest > MAX_NAME_BYTES {
            return Err(format!(
                "expected agent identifiers of at most {MAX_NAME_BYTES} bytes in the context, got {longest}"
            ));
        }
        Ok(Self {
            agent_id: (*agent_id).to_owned(),
            half_close: metadata.contains_key(HALF_CLOSE_HEADER),
            identifiers,
        })
    }
}

/// Cuts a text from a peer for errors and logs.
fn shorten(text: String) -> String {
    text.chars().take(MAX_NAME_BYTES).collect()
}

#[cfg(test)]
mod tests {
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
        let (stream, _outgoing) =
            AgentStream::new(hello, limits, Carrier::default(), metrics.clone());
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
        let mut reading = std::pin::pin!(read(messages, stream, registration, metrics));
        tokio::select! {
            biased;
            () = &mut reading => panic!("all messages were read at once"),
            () = std::future::ready(()) => {}
        }
        reading.await;
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
        let address = [192, 0, 2, 1].into();
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
        let with = |id: &str, identifiers: &str| {
            hello(&[("agentid", id), ("agentidentifiers", identifiers)])
        };
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
}
