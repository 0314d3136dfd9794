//! The `AgentService/Connect` call: accepts agents' packet streams.

use std::net::SocketAddr;
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
use tokio_util::sync::CancellationToken;
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
            address: Some(self.peer.address),
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
            connection.shutdown,
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
        self.reject(agent, reason, &error);
        Status::unknown(error)
    }

    /// Logs a refused agent as a warning, then counts the agent. `agent` is the id in the agent's introduction, which has
    /// at most [`MAX_NAME_BYTES`]; the log escapes it.
    pub(super) fn reject(&self, agent: &str, reason: RejectReason, error: &str) {
        let (peer, label) = (self.peer.address, reason.as_str());
        warn!(agent, %peer, reason = label, error, "agent refused");
        let rejected = self.metrics.rejected.get((Listener::Agent, reason));
        rejected.increment(1);
    }

    /// Returns the service for one connection. `certificates` is the chain that the TLS handshake has verified.
    pub(crate) fn of_peer(
        mut self,
        address: SocketAddr,
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
            Some(tokens) => Some(tokens.check(metadata, self.peer.address.ip()).await?),
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

/// Serves an agent's stream until the stream ends. `shutdown` fires when the server stops.
async fn read(
    mut inbound: Reader,
    stream: Arc<AgentStream>,
    registration: Registration,
    metrics: Arc<ServerMetrics>,
    shutdown: CancellationToken,
) {
    let _open = GaugeGuard::new(metrics.grpc_connections.get(ServiceMethod::Connect));
    let ended = read_packets(&mut inbound, &stream, &metrics, &shutdown).await;
    drop(registration);
    let (pending, open) = stream.counts();
    stream.end();
    info!(reason = ended, pending, open, "agent disconnected");
}

/// Reads an agent's packets until its stream ends. Returns the reason of the end.
async fn read_packets(
    inbound: &mut Reader,
    stream: &Arc<AgentStream>,
    metrics: &ServerMetrics,
    shutdown: &CancellationToken,
) -> String {
    loop {
        let next = tokio::select! {
            // Polled first: a broken connection also retires the stream.
            biased;
            next = inbound.message() => next,
            () = stream.retired() => return "given up".to_owned(),
        };
        match next {
            Ok(Some(message)) => {
                metrics.streams.count(Segment::FromAgent, &message);
                stream.on_message(message).await;
            }
            Ok(None) => return "closed by the agent".to_owned(),
            // `h2` reports a connection that this server closes as a broken pipe.
            Err(_) if shutdown.is_cancelled() => return "this server is stopping".to_owned(),
            Err(status) => {
                let streams = &metrics.streams;
                streams.stream_error(Segment::FromAgent, status.code(), None);
                return status.message().to_owned();
            }
        }
        // Messages that have arrived are ready without a limit, and other agents have the same thread.
        consume_budget().await;
    }
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
mod tests;
