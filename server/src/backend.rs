//! Backends: the agents that are connected now, and the choice among them.
//!
//! The registry holds one entry for each live stream; an entry is owned by a [`Registration`]
//! whose drop removes it. One agent id may have several streams side by side.

pub mod agent;
pub mod mux;
pub mod service;

use std::collections::HashSet;
use std::sync::Arc;

use parking_lot::Mutex;
use tracing::info;

use self::agent::AgentStream;
use crate::metrics::{ServerMetrics, Strategy};

/// The streams of all agents.
pub struct Registry {
    streams: Mutex<Vec<Arc<AgentStream>>>,
    metrics: Arc<ServerMetrics>,
}

/// A stream's place in the registry.
pub struct Registration {
    registry: Arc<Registry>,
    stream: Arc<AgentStream>,
}

/// How willingly a stream is chosen; smaller is better.
#[derive(Clone, Copy, PartialEq, Eq, PartialOrd, Ord)]
struct Rank {
    draining: bool,
    silent: bool,
}

// === impl Registry ===

impl Registry {
    /// An empty registry.
    pub fn new(metrics: Arc<ServerMetrics>) -> Arc<Self> {
        Arc::new(Self {
            streams: Mutex::default(),
            metrics,
        })
    }

    /// Adds a stream until the registration is dropped.
    pub fn register(self: &Arc<Self>, stream: Arc<AgentStream>) -> Registration {
        {
            let mut streams = self.streams.lock();
            streams.push(stream.clone());
            self.report(&streams);
        }
        info!(
            agent = stream.hello.agent_id,
            stream = stream.serial,
            "agent connected"
        );
        Registration {
            registry: self.clone(),
            stream,
        }
    }

    /// Whether any agent is connected. Draining ones count, as they do upstream.
    pub fn is_ready(&self) -> bool {
        !self.streams.lock().is_empty()
    }

    /// Chooses a stream for a dial, leaving out the serials in `tried`: any agent with equal
    /// chance, but one that neither drains nor is silent before all others. Of one agent's
    /// streams the oldest wins: a newer one may be a probe that the agent is about to close.
    pub fn choose(&self, tried: &[u64]) -> Option<Arc<AgentStream>> {
        let streams = self.streams.lock();
        let mut best: Option<Rank> = None;
        let mut candidates: Vec<&Arc<AgentStream>> = Vec::new();
        for stream in streams.iter().filter(|s| !tried.contains(&s.serial)) {
            let rank = Rank {
                draining: stream.is_draining(),
                silent: stream.is_silent(),
            };
            if best.is_none_or(|best| rank < best) {
                best = Some(rank);
                candidates.clear();
            }
            let known = |c: &&Arc<AgentStream>| c.hello.agent_id == stream.hello.agent_id;
            if best == Some(rank) && !candidates.iter().any(known) {
                candidates.push(stream);
            }
        }
        if candidates.is_empty() {
            return None;
        }
        let index = rand::random_range(0..candidates.len());
        candidates.get(index).map(|stream| Arc::clone(stream))
    }

    /// Whether a dial that fails on one stream could be tried on another one.
    pub fn has_other(&self, tried: &[u64]) -> bool {
        let streams = self.streams.lock();
        streams
            .iter()
            .any(|s| !tried.contains(&s.serial) && !s.is_silent())
    }

    fn report(&self, streams: &[Arc<AgentStream>]) {
        let ids: HashSet<&str> = streams.iter().map(|s| s.hello.agent_id.as_str()).collect();
        let count = ids.len() as f64;
        self.metrics.ready_backends(Strategy::Default).set(count);
        self.metrics.ready_backend_connections.set(count);
    }
}

impl Drop for Registration {
    fn drop(&mut self) {
        let mut streams = self.registry.streams.lock();
        streams.retain(|stream| stream.serial != self.stream.serial);
        self.registry.report(&streams);
    }
}
