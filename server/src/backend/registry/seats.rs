//! The seats of clients on the shards that serve agents.

use culvert_host::runtime::shards::ShardId;

use crate::backend::load::{ClientSeat, Load};

/// The shards that have served an agent. A program has few shards.
#[derive(Default)]
pub(super) struct Seats(Vec<Shard>);

struct Shard {
    id: ShardId,
    /// Number of agent connections.
    agents: usize,
    /// Number of clients.
    clients: Load,
}

impl Seats {
    pub(super) fn add_agent(&mut self, shard: ShardId) {
        match self.0.iter_mut().find(|known| known.id == shard) {
            Some(known) => known.agents += 1,
            None => self.0.push(Shard {
                id: shard,
                agents: 1,
                clients: Load::default(),
            }),
        }
    }

    pub(super) fn remove_agent(&mut self, shard: ShardId) {
        if let Some(known) = self.0.iter_mut().find(|known| known.id == shard) {
            known.agents -= 1;
        }
    }

    /// Returns a seat on the shard with the fewest clients per agent connection. Chooses at random among equal shards.
    /// Returns `None` without agents. `healthy` has the shard of each agent connection to count; `None` means all.
    pub(super) fn take(&self, healthy: Option<&[ShardId]>) -> Option<ClientSeat> {
        let candidates = self.0.iter().map(|shard| {
            let agents = healthy.map_or(shard.agents, |healthy| {
                healthy.iter().filter(|id| **id == shard.id).count()
            });
            (shard, agents, rand::random::<u32>())
        });
        let with_agents = candidates.filter(|(_, agents, _)| *agents > 0);
        let (best, ..) = with_agents.min_by(|(a, of_a, lot_a), (b, of_b, lot_b)| {
            // Compares the fractions clients / agents without a division.
            let [left, right] = [a.clients.get() * of_b, b.clients.get() * of_a];
            left.cmp(&right).then(lot_a.cmp(lot_b))
        })?;
        Some(ClientSeat::counted(best.id, best.clients.enter()))
    }
}
