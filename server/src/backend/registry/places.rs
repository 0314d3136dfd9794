//! The places of agent connections. Their number and memory are limited.

use std::collections::HashMap;
use std::sync::Arc;

use tracing::warn;

use super::Registry;
use crate::backend::agent::Hello;

/// Largest number of agent connections of one identity. More than agents in the largest cluster, because agents may share a
/// certificate.
pub(crate) const MAX_IDENTITY_CONNECTIONS: usize = 8192;

#[derive(Default)]
pub(super) struct Places {
    /// Number of places by identity. Identities without a place are left out.
    by_identity: HashMap<Arc<str>, usize>,
    total: usize,
    /// Memory of all agent connections in bytes, an estimate.
    bytes: u64,
}

/// Largest number of agent connections of one pod, whose token is its identity. An agent has one, and more for a short time
/// after its link broke or while it looks for servers.
pub(crate) const MAX_POD_CONNECTIONS: usize = 64;

/// Memory of an agent connection without dials and identifiers, in bytes: 42 KiB were measured (docs/performance.md).
pub(crate) const CONNECTION_BYTES: u64 = 48 * 1024;

/// Memory of an identifier of an agent connection, in bytes: at most 1.3 KiB were measured.
const IDENTIFIER_BYTES: u64 = 1536;

/// Place of an agent connection among those with the same identity. Dropping the value frees the place.
pub(crate) struct Place {
    registry: Arc<Registry>,
    identity: Arc<str>,
    bytes: u64,
}

/// Reason why an agent connection gets no place.
#[derive(Clone, Copy, Debug, PartialEq, Eq, thiserror::Error)]
pub(crate) enum NoPlace {
    /// The identity has too many agent connections.
    #[error("the agent already has {0} connections to this server")]
    Identity(usize),
    /// The server has too many agent connections.
    #[error("the server already has {0} agent connections; see its flag --max-agents")]
    Server(usize),
    /// The agent connections of the server use its memory.
    #[error(
        "the server already has {0} agent connections, and its memory limit has no room for another one with {1} agent identifiers"
    )]
    Memory(usize, usize),
}

/// Returns the memory of an agent connection without dials, in bytes.
fn bytes_of(hello: &Hello) -> u64 {
    CONNECTION_BYTES + IDENTIFIER_BYTES * hello.identifiers.count() as u64
}

// === impl Registry ===

impl Registry {
    /// Takes a place for an agent connection of an identity with at most `most` of them. While no place is free, ends those
    /// that are away, and takes their places.
    ///
    /// # Errors
    /// Fails if the identity or the server has too many agent connections, or if the memory limit has no room.
    pub(crate) fn place(
        self: &Arc<Self>,
        identity: &Arc<str>,
        most: usize,
        hello: &Hello,
    ) -> Result<Place, NoPlace> {
        loop {
            let full = match self.free_place(identity, most, hello) {
                Err(full) => full,
                placed => return placed,
            };
            if matches!(full, NoPlace::Memory(..)) && !self.can_make_room(hello) {
                return Err(full);
            }
            let is_candidate = |place: &Place| match full {
                NoPlace::Identity(_) => place.identity == *identity,
                NoPlace::Server(_) | NoPlace::Memory(..) => true,
            };
            if !self.displace(is_candidate) {
                return Err(full);
            }
        }
    }

    /// Returns true if a new agent connection fits the memory limit without those that are away.
    fn can_make_room(&self, hello: &Hello) -> bool {
        let entries = self.entries();
        let away = entries.iter().filter(|entry| entry.agent.is_unreachable());
        let bytes = away.filter_map(|entry| Some(entry.place.lock().as_ref()?.bytes));
        let freed: u64 = bytes.sum();
        let used = self.places.lock().bytes.saturating_sub(freed);
        used.saturating_add(bytes_of(hello)) <= self.limits.memory
    }

    /// Ends the oldest candidate among the agent connections that are away. Returns false without a candidate.
    fn displace(&self, is_candidate: impl Fn(&Place) -> bool) -> bool {
        let entries = self.entries();
        let away = entries.iter().filter(|entry| {
            entry.agent.is_unreachable() && entry.place.lock().as_ref().is_some_and(&is_candidate)
        });
        let Some(entry) = away.min_by_key(|entry| entry.agent.serial()) else {
            return false;
        };
        warn!(
            agent = entry.agent.hello().agent_id,
            stream = entry.agent.serial(),
            "the agent is away, and a new agent needs its place: its link does not resume; see --max-agents, the memory limit and the limit of one identity"
        );
        entry.agent.abandon();
        entry.place.lock().take();
        true
    }

    /// Takes a place if one is free.
    fn free_place(
        self: &Arc<Self>,
        identity: &Arc<str>,
        most: usize,
        hello: &Hello,
    ) -> Result<Place, NoPlace> {
        let bytes = bytes_of(hello);
        let mut places = self.places.lock();
        let count = places.by_identity.get(identity).copied().unwrap_or(0);
        if count >= most {
            return Err(NoPlace::Identity(most));
        }
        if places.total >= self.limits.agents {
            return Err(NoPlace::Server(self.limits.agents));
        }
        if places.bytes.saturating_add(bytes) > self.limits.memory {
            return Err(NoPlace::Memory(places.total, hello.identifiers.count()));
        }
        *places.by_identity.entry(identity.clone()).or_default() += 1;
        places.total += 1;
        places.bytes += bytes;
        Ok(Place {
            registry: self.clone(),
            identity: identity.clone(),
            bytes,
        })
    }

    #[cfg(test)]
    pub(crate) fn has_no_places(&self) -> bool {
        self.places.lock().by_identity.is_empty()
    }
}

// === impl Place ===

impl Drop for Place {
    fn drop(&mut self) {
        let mut places = self.registry.places.lock();
        places.total -= 1;
        places.bytes -= self.bytes;
        if let Some(count) = places.by_identity.get_mut(&self.identity) {
            *count -= 1;
            if *count == 0 {
                places.by_identity.remove(&self.identity);
            }
        }
    }
}
