//! The backends of both tunnels, and the registry that chooses an agent connection for each dial.
//!
//! The registry has an entry for each live agent connection, owned by a [`Registration`]. Dropping the
//! registration removes the entry. An agent id may have several agent connections at the same time.

pub(crate) mod agent;
mod connection;
pub(crate) mod dial;
pub(crate) mod flow;
pub mod identity;
pub(crate) mod konnectivity;
pub(crate) mod native;
pub mod openvpn;
pub(crate) mod service;
mod tunnel;
mod usage;

use std::collections::{HashMap, HashSet};
use std::sync::Arc;

use culvert_host::runtime::shards::{ShardId, Shards};
use culvert_stream::Dial;
use parking_lot::Mutex;
use tokio::time::Instant;
use tracing::info;

use self::agent::{AgentStream, Hello};
pub use self::connection::{Connection, ToEndpoint};
pub use self::dial::DialError;
use self::native::NativeAgent;
pub use self::tunnel::{Dialing, Tunnel};
pub use self::usage::{DialGuard, Usage};
use crate::backend::dial::StreamDialError;
use crate::metrics::{ServerMetrics, Strategy};
use crate::tunnel::{Health, Peer};

/// Largest number of streams of one identity. More than agents in the largest cluster, because agents may share a
/// certificate. The choice of an agent for a dial takes about a millisecond with so many streams.
const MAX_STREAMS: usize = 8192;

/// An agent connection, by transport.
#[derive(Clone)]
pub enum Backend {
    /// A packet stream shared by all connections: a stock agent.
    Packet(Arc<AgentStream>),
    /// A native connection with a stream for each dial: a Culvert agent.
    Native(Arc<NativeAgent>),
}

/// The connected agents of a server.
pub struct Registry {
    streams: Mutex<Vec<Entry>>,
    /// Number of places by identity. Identities without a place are left out.
    places: Mutex<HashMap<Arc<str>, usize>>,
    metrics: Arc<ServerMetrics>,
}

struct Entry {
    stream: Backend,
    /// Shard that serves the agent connection.
    shard: Option<ShardId>,
}

/// An agent connection's entry in the registry; dropping the registration removes the entry.
pub struct Registration {
    registry: Arc<Registry>,
    stream: Backend,
    _place: Place,
}

/// Place of an agent's stream among the streams of its identity. Dropping the value frees the place.
pub struct Place {
    registry: Arc<Registry>,
    identity: Arc<str>,
}

/// Preference for new dials; smaller is better.
#[derive(Clone, Copy, PartialEq, Eq, PartialOrd, Ord)]
struct Rank {
    draining: bool,
    suspect: bool,
}

// === impl Backend ===

impl Backend {
    /// Returns the serial number of the agent connection, unique in this process.
    pub fn serial(&self) -> u64 {
        match self {
            Self::Packet(stream) => stream.serial,
            Self::Native(agent) => agent.serial,
        }
    }

    /// Returns the agent's introduction.
    pub fn hello(&self) -> &Hello {
        match self {
            Self::Packet(stream) => &stream.hello,
            Self::Native(agent) => &agent.hello,
        }
    }

    /// Opens a connection. Dropping the future cancels the dial.
    pub async fn dial(
        &self,
        dial: &Dial,
        deadline: Instant,
    ) -> Result<Connection, StreamDialError> {
        match self {
            Self::Packet(stream) => stream.dial(dial, deadline).await.map(Connection::from),
            Self::Native(agent) => agent.dial(dial, deadline).await.map(Connection::from),
        }
    }

    /// Closes the connection to an agent that accepts no data. No message could reach the agent.
    pub fn abandon(&self) {
        match self {
            Self::Packet(stream) => stream.abandon(),
            Self::Native(agent) => agent.abandon(),
        }
    }

    /// Returns true if the agent has not answered a probe, and has sent nothing since.
    fn is_suspect(&self) -> bool {
        match self {
            Self::Packet(stream) => stream.is_suspect(),
            Self::Native(agent) => agent.is_suspect(),
        }
    }

    /// Resolves once the agent is suspect: it sends nothing, not even an answer to a probe.
    pub async fn silent(&self) {
        match self {
            Self::Packet(stream) => stream.silent().await,
            Self::Native(agent) => agent.silent().await,
        }
    }

    fn peer(&self) -> Peer {
        let (kind, connections) = match self {
            Self::Packet(stream) => ("agent, packet stream", stream.counts().1),
            Self::Native(agent) => ("agent, native", agent.connections()),
        };
        Peer {
            name: self.hello().agent_id.clone(),
            kind: kind.to_owned(),
            health: self.rank().health(),
            connections,
        }
    }

    fn rank(&self) -> Rank {
        Rank {
            draining: match self {
                Self::Packet(stream) => stream.is_draining(),
                Self::Native(agent) => agent.is_draining(),
            },
            suspect: self.is_suspect(),
        }
    }
}

// === impl Rank ===

impl Rank {
    fn health(self) -> Health {
        match self {
            Self {
                draining: false,
                suspect: false,
            } => Health::Healthy,
            _ => Health::Doubtful,
        }
    }
}

// === impl Registry ===

impl Registry {
    /// Creates an empty registry.
    pub fn new(metrics: Arc<ServerMetrics>) -> Arc<Self> {
        Arc::new(Self {
            streams: Mutex::default(),
            places: Mutex::default(),
            metrics,
        })
    }

    /// Takes a place for a stream. Returns `None` if the identity has too many streams.
    pub fn place(self: &Arc<Self>, identity: Arc<str>) -> Option<Place> {
        let mut places = self.places.lock();
        let count = places.entry(identity.clone()).or_default();
        if *count >= MAX_STREAMS {
            return None;
        }
        *count += 1;
        Some(Place {
            registry: self.clone(),
            identity,
        })
    }

    /// Adds an agent connection; dropping the registration removes the agent connection.
    pub fn register(self: &Arc<Self>, stream: Backend, place: Place) -> Registration {
        {
            let mut streams = self.streams.lock();
            streams.push(Entry {
                stream: stream.clone(),
                shard: Shards::current(),
            });
            self.report(&streams);
        }
        info!(
            agent = stream.hello().agent_id,
            stream = stream.serial(),
            native = matches!(stream, Backend::Native(_)),
            "agent connected"
        );
        Registration {
            registry: self.clone(),
            stream,
            _place: place,
        }
    }

    /// Returns the health of the best agent connection. Draining agents count as connected, as in the stock
    /// server.
    pub fn health(&self) -> Health {
        let streams = self.streams.lock();
        let mut best = Health::Absent;
        for entry in streams.iter() {
            best = best.max(entry.stream.rank().health());
            if best == Health::Healthy {
                break;
            }
        }
        best
    }

    /// Returns the agent connections for the status output.
    pub fn peers(&self) -> Vec<Peer> {
        let streams = self.streams.lock();
        streams.iter().map(|entry| entry.stream.peer()).collect()
    }

    /// Returns the shard of a random agent, where a new client is best served. Returns `None` without
    /// agents.
    pub fn shard(&self) -> Option<ShardId> {
        let streams = self.streams.lock();
        if streams.is_empty() {
            return None;
        }
        let index = rand::random_range(0..streams.len());
        streams.get(index).and_then(|entry| entry.shard)
    }

    /// Chooses an agent connection for a dial, leaving out the serials in `tried`. Agent connections that
    /// neither drain nor are suspect come first, then agent connections served by the calling thread; the
    /// choice among equals is random. If an agent has several equal connections, the oldest is used: a newer
    /// connection may be a probe, about to be closed by the agent.
    pub fn choose(&self, tried: &[u64]) -> Option<Backend> {
        let streams = self.streams.lock();
        let here = Shards::current();
        let mut best: Option<Rank> = None;
        let mut candidates: Vec<&Entry> = Vec::new();
        let mut ids = HashSet::new();
        for entry in streams.iter() {
            let stream = &entry.stream;
            if tried.contains(&stream.serial()) {
                continue;
            }
            let rank = stream.rank();
            if best.is_none_or(|best| rank < best) {
                best = Some(rank);
                candidates.clear();
                ids.clear();
            }
            if best == Some(rank) && ids.insert(stream.hello().agent_id.as_str()) {
                candidates.push(entry);
            }
        }
        if candidates.iter().any(|entry| entry.shard == here) {
            candidates.retain(|entry| entry.shard == here);
        }
        if candidates.is_empty() {
            return None;
        }
        let index = rand::random_range(0..candidates.len());
        candidates.get(index).map(|entry| entry.stream.clone())
    }

    /// Returns true if a dial that fails on one agent connection could be retried on another.
    pub fn has_other(&self, tried: &[u64]) -> bool {
        let streams = self.streams.lock();
        let mut others = streams.iter().map(|entry| &entry.stream);
        others.any(|s| !tried.contains(&s.serial()) && !s.is_suspect())
    }

    fn report(&self, streams: &[Entry]) {
        let ids: HashSet<&str> = streams
            .iter()
            .map(|entry| entry.stream.hello().agent_id.as_str())
            .collect();
        let count = ids.len() as f64;
        self.metrics
            .ready_backends
            .get(Strategy::Default)
            .set(count);
        self.metrics.ready_backend_connections.set(count);
    }
}

impl Drop for Registration {
    fn drop(&mut self) {
        let mut streams = self.registry.streams.lock();
        streams.retain(|entry| entry.stream.serial() != self.stream.serial());
        self.registry.report(&streams);
    }
}

impl Drop for Place {
    fn drop(&mut self) {
        let mut places = self.registry.places.lock();
        if let Some(count) = places.get_mut(&self.identity) {
            *count -= 1;
            if *count == 0 {
                places.remove(&self.identity);
            }
        }
    }
}
