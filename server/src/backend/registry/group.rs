//! A group of agents that can serve the same dials.

use std::collections::{BTreeMap, HashMap};
use std::sync::Arc;

use culvert_host::runtime::shards::ShardId;
use rand::seq::index::sample_array;

use super::Entry;
use crate::backend::Rank;
use crate::tunnel::Health;

/// Number of agents compared for a dial in a larger group. Two random choices already bound the load of the busiest
/// agent (Mitzenmacher, "The power of two choices", 2001); with four, an agent on the calling thread is rarely missed.
const CHOICES: usize = 4;

/// Number of connections of an agent that count for the choice of a shard, the oldest first. An agent has one connection, and
/// some more after its link broke or while it looks for servers.
const OF_ONE_AGENT: usize = 16;

/// Agents, each with its connections.
#[derive(Default)]
pub(super) struct Group {
    members: Vec<Member>,
    /// Positions of the members, by agent id.
    positions: HashMap<String, usize>,
}

/// The connections of one agent id, by serial: the oldest first. Never empty.
struct Member {
    entries: BTreeMap<u64, Arc<Entry>>,
}

/// Conditions for the candidates of a choice.
pub(super) struct Conditions<'a> {
    /// Preferred shard.
    pub here: Option<ShardId>,
    /// Serials to leave out.
    pub tried: &'a [u64],
    /// Load at which an entry is full.
    pub limit: usize,
}

/// Order of agents of the same rank; smaller is better.
#[derive(PartialEq, Eq, PartialOrd, Ord)]
struct Preference {
    is_remote: bool,
    load: usize,
    /// Random number, so that equal candidates get equal shares.
    lot: u32,
}

// === impl Group ===

impl Group {
    /// Returns the number of distinct agent ids.
    pub(super) fn len(&self) -> usize {
        self.members.len()
    }

    pub(super) fn add(&mut self, entry: Arc<Entry>) {
        let id = &entry.agent.hello().agent_id;
        let known = self.positions.get(id).copied();
        let serial = entry.agent.serial();
        match known.and_then(|at| self.members.get_mut(at)) {
            Some(member) => {
                member.entries.insert(serial, entry);
            }
            None => {
                self.positions.insert(id.clone(), self.members.len());
                let entries = BTreeMap::from([(serial, entry)]);
                self.members.push(Member { entries });
            }
        }
    }

    /// Removes an entry, if present.
    pub(super) fn remove(&mut self, entry: &Entry) {
        let id = &entry.agent.hello().agent_id;
        let Some(at) = self.positions.get(id).copied() else {
            return;
        };
        let Some(member) = self.members.get_mut(at) else {
            return;
        };
        member.entries.remove(&entry.agent.serial());
        if !member.entries.is_empty() {
            return;
        }
        self.members.swap_remove(at);
        self.positions.remove(id);
        let moved = self
            .members
            .get(at)
            .and_then(|member| member.entries.values().next());
        if let Some(moved) = moved {
            let id = moved.agent.hello().agent_id.clone();
            self.positions.insert(id, at);
        }
    }

    /// Returns the shards of the healthy agent connections of a small group. Returns `None` for a large group, or without a
    /// healthy agent.
    pub(super) fn healthy_shards(&self) -> Option<Vec<ShardId>> {
        if self.members.len() > CHOICES {
            return None;
        }
        let members = self.members.iter();
        let entries = members.flat_map(|member| member.entries.values().take(OF_ONE_AGENT));
        let healthy = entries.filter(|entry| entry.agent.health() == Health::Healthy);
        let shards: Vec<ShardId> = healthy.filter_map(|entry| entry.shard).collect();
        (!shards.is_empty()).then_some(shards)
    }

    pub(super) fn entries(&self) -> impl Iterator<Item = &Arc<Entry>> {
        let members = self.members.iter();
        members.flat_map(|member| member.entries.values())
    }

    /// Returns true if an agent may take dials: agents that are gone may return, but no dial waits for them.
    pub(super) fn has_agent(&self) -> bool {
        self.entries().any(|entry| !entry.agent.is_gone())
    }

    /// Returns the health of the best agent.
    pub(super) fn health(&self) -> Health {
        let mut best = Health::Absent;
        for entry in self.entries() {
            best = best.max(entry.agent.health());
            if best == Health::Healthy {
                break;
            }
        }
        best
    }

    /// Chooses the best entry. Compares all agents of a small group; in a large group, some agents at random, and
    /// all only if none of those is healthy.
    pub(super) fn choose(&self, conditions: &Conditions<'_>) -> Option<&Arc<Entry>> {
        self.choose_healthy(conditions).or_else(|| {
            let candidates = self.members.iter().filter_map(|member| {
                let (rank, entry) = member.candidate(conditions)?;
                Some(((rank, Preference::of(entry, conditions)), entry))
            });
            let best = candidates.min_by(|(a, _), (b, _)| a.cmp(b));
            best.map(|(_, entry)| entry)
        })
    }

    /// Compares some agents of a large group by shard and load, and returns the first healthy agent in this order. Reads as
    /// few ranks as possible: a rank is spread over an agent's memory, which is rarely in the processor's cache if there are
    /// many agents.
    fn choose_healthy(&self, conditions: &Conditions<'_>) -> Option<&Arc<Entry>> {
        if self.members.len() <= CHOICES {
            return None;
        }
        let picks: [usize; CHOICES] = sample_array(&mut rand::rng(), self.members.len())?;
        let mut picks = picks.map(|at| {
            let entry = self
                .members
                .get(at)
                .and_then(|member| match member.entries.len() {
                    1 => member.entries.values().next(),
                    _ => Some(member.candidate(conditions)?.1),
                });
            (entry.map(|entry| Preference::of(entry, conditions)), at)
        });
        picks.sort_unstable();
        let candidates = picks
            .iter()
            .filter_map(|(_, at)| self.members.get(*at)?.candidate(conditions));
        let mut healthy = candidates.filter(|(rank, _)| rank.health() == Health::Healthy);
        healthy.next().map(|(_, entry)| entry)
    }
}

// === impl Preference ===

impl Preference {
    fn of(entry: &Entry, conditions: &Conditions<'_>) -> Self {
        Self {
            is_remote: entry.shard != conditions.here,
            load: entry.load.get(),
            lot: rand::random(),
        }
    }
}

// === impl Member ===

impl Member {
    /// Returns the agent's best connection, and its rank: of equal connections, the oldest.
    fn candidate(&self, conditions: &Conditions<'_>) -> Option<(Rank, &Arc<Entry>)> {
        let Conditions { tried, limit, .. } = *conditions;
        let entries = self.entries.values();
        let usable = entries.filter(|entry| {
            let is_new = !tried.contains(&entry.agent.serial());
            is_new && entry.load.get() < limit && !entry.agent.is_gone()
        });
        let mut best = None;
        for entry in usable {
            let rank = entry.agent.rank();
            if best.is_none_or(|(known, _)| rank < known) {
                best = Some((rank, entry));
            }
            // No rank is better, and an agent may have thousands of connections.
            if rank.health() == Health::Healthy {
                break;
            }
        }
        best
    }
}
