//! The places of agent connections, whose number is limited.

use std::collections::HashMap;
use std::sync::Arc;

use tracing::warn;

use super::Registry;

/// Largest number of agent connections of one identity. More than agents in the largest cluster, because agents may share a
/// certificate.
pub(crate) const MAX_IDENTITY_CONNECTIONS: usize = 8192;

#[derive(Default)]
pub(super) struct Places {
    /// Number of places by identity. Identities without a place are left out.
    by_identity: HashMap<Arc<str>, usize>,
    total: usize,
}

/// Largest number of agent connections of one pod, whose token is its identity. An agent has one, and more for a short time
/// after its link broke or while it looks for servers.
pub(crate) const MAX_POD_CONNECTIONS: usize = 64;

/// Memory of an agent connection without dials, in bytes: 42 KiB were measured (docs/performance.md).
const CONNECTION_BYTES: u64 = 48 * 1024;

/// Returns the largest number of agent connections for a value of `--max-agents` and a memory limit in bytes. `None` stands
/// for no limit.
pub(crate) fn most_agents(flag: Option<usize>, memory: Option<u64>) -> usize {
    let fitting = memory.and_then(|bytes| usize::try_from(bytes / CONNECTION_BYTES).ok());
    let [flag, fitting] = [flag, fitting].map(|limit| limit.unwrap_or(usize::MAX));
    flag.min(fitting)
}

/// Place of an agent connection among those with the same identity. Dropping the value frees the place.
pub(crate) struct Place {
    registry: Arc<Registry>,
    identity: Arc<str>,
}

/// Reason why an agent connection gets no place.
#[derive(Clone, Copy, Debug, PartialEq, Eq, thiserror::Error)]
pub(crate) enum NoPlace {
    /// The identity has too many agent connections.
    #[error("the agent already has {0} connections to this server")]
    Identity(usize),
    /// The server has too many agent connections.
    #[error(
        "the server already has {0} agent connections; see its memory limit and its flag --max-agents"
    )]
    Server(usize),
}

// === impl Registry ===

impl Registry {
    /// Takes a place for an agent connection of an identity with at most `most` of them. If no place is free, ends one that
    /// is away, and takes its place.
    ///
    /// # Errors
    /// Fails if the identity or the server has too many agent connections.
    pub(crate) fn place(
        self: &Arc<Self>,
        identity: Arc<str>,
        most: usize,
    ) -> Result<Place, NoPlace> {
        let full = match self.free_place(identity.clone(), most) {
            Err(full) => full,
            placed => return placed,
        };
        let is_candidate = |place: &Place| match full {
            NoPlace::Identity(_) => place.identity == identity,
            NoPlace::Server(_) => true,
        };
        self.displace(is_candidate);
        self.free_place(identity, most)
    }

    /// Ends the oldest candidate among the agent connections that are away, if there is one.
    fn displace(&self, is_candidate: impl Fn(&Place) -> bool) {
        let entries = self.entries();
        let away = entries.iter().filter(|entry| {
            entry.agent.is_unreachable() && entry.place.lock().as_ref().is_some_and(&is_candidate)
        });
        let Some(entry) = away.min_by_key(|entry| entry.agent.serial()) else {
            return;
        };
        warn!(
            agent = entry.agent.hello().agent_id,
            stream = entry.agent.serial(),
            "the agent is away, and a new agent needs its place: its link does not resume; see --max-agents and the memory limit"
        );
        entry.agent.abandon();
        entry.place.lock().take();
    }

    fn free_place(self: &Arc<Self>, identity: Arc<str>, most: usize) -> Result<Place, NoPlace> {
        let mut places = self.places.lock();
        if places.total >= self.limits.agents {
            return Err(NoPlace::Server(self.limits.agents));
        }
        let count = places.by_identity.entry(identity.clone()).or_default();
        if *count >= most {
            return Err(NoPlace::Identity(most));
        }
        *count += 1;
        places.total += 1;
        Ok(Place {
            registry: self.clone(),
            identity,
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
        if let Some(count) = places.by_identity.get_mut(&self.identity) {
            *count -= 1;
            if *count == 0 {
                places.by_identity.remove(&self.identity);
            }
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn memory_limit_lowers_the_number_of_agents() {
        let mebibytes = |count: u64| Some(count * 1024 * 1024);
        assert_eq!(most_agents(None, None), usize::MAX);
        assert_eq!(most_agents(Some(10_000), None), 10_000);
        assert_eq!(most_agents(Some(10_000), mebibytes(200)), 4266);
        assert_eq!(most_agents(Some(50), mebibytes(200)), 50);
        assert_eq!(most_agents(None, mebibytes(512)), 10_922);
    }
}
