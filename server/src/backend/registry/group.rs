//! A group of agents that can serve the same dials.

use std::collections::HashMap;
use std::sync::Arc;

use culvert_host::runtime::shards::ShardId;
use rand::seq::index::sample;

use super::Entry;
use crate::backend::Rank;
use crate::tunnel::Health;

/// Number of agents compared for a dial in a larger group. Two random choices already bound the load of the busiest
/// agent (Mitzenmacher, "The power of two choices", 2001); with four, an agent on the calling thread is rarely missed.
const CHOICES: usize = 4;

/// Agents, each with its connections.
#[derive(Default)]
pub(super) struct Group {
    members: Vec<Member>,
    /// Positions of the members, by agent id.
    positions: HashMap<String, usize>,
}

/// The connections of one agent id, the oldest first. Never empty.
struct Member {
    entries: Vec<Arc<Entry>>,
}

/// Conditions for the candidates of a choice.
pub(super) struct Conditions<'a> {
    /// Preferred shard.
    pub here: Option<ShardId>,
    /// Serials to leave out.
    pub tried: &'a [u64],
    /// Load at which an entry is full.
    pub limit: usize,
    /// Load of an entry.
    pub load: fn(&Entry) -> usize,
}

/// Order of candidates for a dial; smaller is better.
#[derive(PartialEq, Eq, PartialOrd, Ord)]
struct Preference {
    rank: Rank,
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
        let id = &entry.stream.hello().agent_id;
        let known = self.positions.get(id).copied();
        match known.and_then(|at| self.members.get_mut(at)) {
            Some(member) => member.entries.push(entry),
            None => {
                self.positions.insert(id.clone(), self.members.len());
                let entries = vec![entry];
                self.members.push(Member { entries });
            }
        }
    }

    /// Removes an entry, if present.
    pub(super) fn remove(&mut self, entry: &Entry) {
        let id = &entry.stream.hello().agent_id;
        let Some(at) = self.positions.get(id).copied() else {
            return;
        };
        let Some(member) = self.members.get_mut(at) else {
            return;
        };
        let serial = entry.stream.serial();
        member
            .entries
            .retain(|entry| entry.stream.serial() != serial);
        if !member.entries.is_empty() {
            return;
        }
        self.members.swap_remove(at);
        self.positions.remove(id);
        let moved = self
            .members
            .get(at)
            .and_then(|member| member.entries.first());
        if let Some(moved) = moved {
            let id = moved.stream.hello().agent_id.clone();
            self.positions.insert(id, at);
        }
    }

    pub(super) fn entries(&self) -> impl Iterator<Item = &Arc<Entry>> {
        self.members.iter().flat_map(|member| &member.entries)
    }

    /// Returns the health of the best agent.
    pub(super) fn health(&self) -> Health {
        let mut best = Health::Absent;
        for entry in self.entries() {
            best = best.max(entry.stream.health());
            if best == Health::Healthy {
                break;
            }
        }
        best
    }

    /// Chooses the best entry. Compares all agents of a small group; in a large group, some agents at random, and
    /// all only if none of those is healthy.
    pub(super) fn choose(&self, conditions: &Conditions<'_>) -> Option<&Arc<Entry>> {
        if self.members.len() > CHOICES {
            let picks = sample(&mut rand::rng(), self.members.len(), CHOICES);
            let some = picks.iter().filter_map(|at| self.members.get(at));
            if let Some((preference, entry)) = best(some, conditions)
                && preference.rank.health() == Health::Healthy
            {
                return Some(entry);
            }
        }
        best(self.members.iter(), conditions).map(|(_, entry)| entry)
    }
}

/// Returns the best candidate of some agents.
fn best<'a>(
    members: impl Iterator<Item = &'a Member>,
    conditions: &Conditions<'_>,
) -> Option<(Preference, &'a Arc<Entry>)> {
    let candidates = members.filter_map(|member| member.candidate(conditions));
    candidates.min_by(|(a, _), (b, _)| a.cmp(b))
}

// === impl Member ===

impl Member {
    /// Returns the agent's best connection: of equal connections, the oldest.
    fn candidate(&self, conditions: &Conditions<'_>) -> Option<(Preference, &Arc<Entry>)> {
        let Conditions {
            here,
            tried,
            limit,
            load,
        } = *conditions;
        let entries = self.entries.iter();
        let usable = entries.filter(|entry| {
            let is_new = !tried.contains(&entry.stream.serial());
            is_new && load(entry) < limit && !entry.stream.is_gone()
        });
        let (rank, entry) = usable
            .map(|entry| (entry.stream.rank(), entry))
            .min_by_key(|(rank, _)| *rank)?;
        let preference = Preference {
            rank,
            is_remote: entry.shard != here,
            load: load(entry),
            lot: rand::random(),
        };
        Some((preference, entry))
    }
}
