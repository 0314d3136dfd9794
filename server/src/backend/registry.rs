//! The registry of agents: chooses an agent connection for each dial.
//!
//! The registry has an entry for each live agent connection, owned by a [`Registration`]. Dropping the
//! registration removes the entry. An agent id may have several agent connections at the same time. For the status output,
//! the registry also lists the QUIC links whose TCP connection has ended.
//!
//! The configured strategies are tried in order. The first strategy with an agent for the destination decides,
//! as in upstream (`pkg/server/backend_manager.go`); another strategy would lead into another network.

mod group;
mod places;
mod retired_links;
mod seats;

use std::collections::{BTreeMap, HashMap};
use std::net::IpAddr;
use std::sync::Arc;

use culvert_host::net::dial::split_host_port;
use culvert_host::runtime::shards::{ShardId, Shards};
use culvert_konnectivity::identifiers::host_key;
use ipnet::IpNet;
use parking_lot::Mutex;
use tracing::{info, warn};

use self::group::{Conditions, Group};
use self::places::Places;
pub(crate) use self::places::{
    CONNECTION_BYTES, MAX_IDENTITY_CONNECTIONS, MAX_POD_CONNECTIONS, NoPlace, Place,
};
use self::retired_links::RetiredLink;
use self::seats::Seats;
use super::AgentConnection;
use super::load::{ClientSeat, Load, LoadGuard};
use crate::metrics::{ServerMetrics, Strategy};
use crate::tunnel::{Health, Peer, list_identifiers};

/// The connected agents of a server.
pub(crate) struct Registry {
    strategies: Vec<Strategy>,
    limits: AgentLimits,
    /// Every dial takes this lock. While holding it, take only locks of agent connections.
    agents: Mutex<Agents>,
    /// While holding this lock, take no other lock.
    places: Mutex<Places>,
    /// QUIC links whose TCP connection has ended. While holding this lock, take no other lock.
    retired_links: Mutex<Vec<Arc<RetiredLink>>>,
    metrics: Arc<ServerMetrics>,
}

/// Limits for the agents of a server.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct AgentLimits {
    /// Largest number of agent connections.
    pub agents: usize,
    /// Memory of all agent connections in bytes, as estimated from their number and their identifiers.
    pub memory: u64,
    /// Largest number of dials and connections of one agent connection.
    pub connections: usize,
}

/// The agents, by the keys of the strategies.
#[derive(Default)]
struct Agents {
    all: Group,
    with_default_route: Group,
    with_hosts: Group,
    with_networks: Group,
    by_host: HashMap<String, Group>,
    /// Networks of each prefix length.
    by_network: BTreeMap<u8, HashMap<IpNet, Group>>,
    seats: Seats,
}

/// An agent connection.
struct Entry {
    agent: AgentConnection,
    /// Shard that serves the agent connection.
    shard: Option<ShardId>,
    /// Number of dials and connections.
    load: Load,
    /// Place of the agent connection; `None` once another agent connection has taken the place.
    place: Mutex<Option<Place>>,
}

/// An agent connection's entry in the registry; dropping the registration removes the entry.
pub(crate) struct Registration {
    registry: Arc<Registry>,
    entry: Arc<Entry>,
}

/// The agents that a dial may use.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(crate) enum Scope {
    /// Any agent.
    All,
    /// An agent with a default route.
    DefaultRoute,
    /// An agent with the host as an identifier.
    Host(String),
    /// An agent with the network as an identifier.
    Network(IpNet),
}

/// An agent connection that was chosen for a dial.
pub(crate) struct Chosen {
    /// The agent connection.
    pub agent: AgentConnection,
    /// Counts the dial, and later its connection, as load of the agent connection.
    pub load: LoadGuard,
}

// === impl AgentLimits ===

#[cfg(test)]
impl AgentLimits {
    /// No limits.
    pub(crate) const NONE: Self = Self {
        agents: usize::MAX,
        memory: u64::MAX,
        connections: usize::MAX,
    };
}

// === impl Registry ===

impl Registry {
    /// Creates an empty registry. The strategies are in the order of preference.
    pub(crate) fn new(
        strategies: Vec<Strategy>,
        limits: AgentLimits,
        metrics: Arc<ServerMetrics>,
    ) -> Arc<Self> {
        Arc::new(Self {
            strategies,
            limits,
            agents: Mutex::default(),
            places: Mutex::default(),
            retired_links: Mutex::default(),
            metrics,
        })
    }

    /// Adds an agent connection; dropping the registration removes the agent connection. The caller's span names the agent in
    /// the log.
    pub(crate) fn register(self: &Arc<Self>, agent: AgentConnection, place: Place) -> Registration {
        let hello = agent.hello();
        let (identifiers, more) = hello.first_identifiers();
        let identifiers = list_identifiers(&identifiers, more);
        info!(
            native = matches!(agent, AgentConnection::Native(_)),
            peer = agent.address().map(tracing::field::display),
            identifiers = Some(identifiers.as_str()).filter(|text| !text.is_empty()),
            "agent connected"
        );
        for network in &hello.identifiers.malformed {
            warn!(
                network,
                "the agent has an identifier that is not a network, such as cidr=10.0.0.0/8; no dial uses it"
            );
        }
        let entry = Arc::new(Entry {
            agent,
            shard: Shards::current(),
            load: Load::default(),
            place: Mutex::new(Some(place)),
        });
        let mut agents = self.agents.lock();
        agents.add(&entry);
        self.report(&agents, &entry);
        Registration {
            registry: self.clone(),
            entry,
        }
    }

    /// Returns the health of the best agent of all strategies. Draining agents count.
    pub(crate) fn health(&self) -> Health {
        let agents = self.agents.lock();
        let healths = self
            .strategies
            .iter()
            .map(|strategy| agents.of_strategy(*strategy).health());
        healths.max().unwrap_or(Health::Absent)
    }

    /// Returns the agent connections for the status output, then the QUIC links whose TCP connection has ended.
    pub(crate) fn peers(&self) -> Vec<Peer> {
        let entries = self.entries();
        let retired = self.retired_links.lock().clone();
        let agents = entries.iter().map(|entry| entry.agent.peer());
        let links = retired.iter().map(|retired| retired.peer());
        agents.chain(links).collect()
    }

    /// Returns all agent connections. Every dial takes the lock, so work on each of them happens without it.
    fn entries(&self) -> Vec<Arc<Entry>> {
        self.agents.lock().all.entries().cloned().collect()
    }

    /// Returns a seat for a new client on a shard that serves agents. Few agents count only if they are healthy; of many
    /// agents, each shard has about the same share of those that are not. Returns `None` without agents.
    pub(crate) fn seat(&self) -> Option<ClientSeat> {
        let agents = self.agents.lock();
        agents.seats.take(agents.all.healthy_shards().as_deref())
    }

    /// Returns the agents that may serve a dial of the address. Returns `None` if no strategy has an agent.
    pub(crate) fn scope(&self, address: &str) -> Option<Scope> {
        let agents = self.agents.lock();
        let host = split_host_port(address).map_or(address, |(host, _)| host);
        self.strategies
            .iter()
            .find_map(|strategy| agents.scope(*strategy, host))
    }

    /// Chooses an agent connection for a dial, leaving out the serials in `tried` and agent connections with
    /// too many connections. Agent connections that neither drain nor are suspect come first, then agent
    /// connections served by the calling thread, then those with the fewest connections. If an agent has several
    /// equal connections, the oldest is used: a newer connection may be a probe, about to be closed by the agent.
    pub(crate) fn choose(&self, scope: &Scope, tried: &[u64]) -> Option<Chosen> {
        let agents = self.agents.lock();
        let group = agents.in_scope(scope)?;
        let entry = group.choose(&Conditions {
            here: Shards::current(),
            tried,
            limit: self.limits.connections,
        })?;
        Some(Chosen {
            agent: entry.agent.clone(),
            load: entry.load.enter(),
        })
    }

    /// Returns true if a dial that fails on one agent connection could be retried on another. Agent connections with
    /// too many connections do not count.
    pub(crate) fn has_other(&self, scope: &Scope, tried: &[u64]) -> bool {
        let limit = self.limits.connections;
        let agents = self.agents.lock();
        agents.in_scope(scope).is_some_and(|group| {
            group.entries().any(|entry| {
                let is_new = !tried.contains(&entry.agent.serial());
                is_new && !entry.agent.is_suspect() && entry.load.get() < limit
            })
        })
    }

    /// Reports the numbers of agents. As in upstream, the deprecated metric has the number of the last strategy
    /// in which the agent counts.
    fn report(&self, agents: &Agents, changed: &Entry) {
        for strategy in &self.strategies {
            let count = agents.count(*strategy) as f64;
            self.metrics.ready_backends.get(*strategy).set(count);
            if changed.counts_in(*strategy) {
                self.metrics.ready_backend_connections.set(count);
            }
        }
    }
}

// === impl Agents ===

impl Agents {
    fn add(&mut self, entry: &Arc<Entry>) {
        let identifiers = &entry.agent.hello().identifiers;
        self.all.add(entry.clone());
        if let Some(shard) = entry.shard {
            self.seats.add_agent(shard);
        }
        if identifiers.default_route {
            self.with_default_route.add(entry.clone());
        }
        if !identifiers.hosts.is_empty() {
            self.with_hosts.add(entry.clone());
        }
        if !identifiers.networks.is_empty() {
            self.with_networks.add(entry.clone());
        }
        for host in &identifiers.hosts {
            let group = self.by_host.entry(host.clone()).or_default();
            group.add(entry.clone());
        }
        for network in &identifiers.networks {
            let networks = self.by_network.entry(network.prefix_len()).or_default();
            networks.entry(*network).or_default().add(entry.clone());
        }
    }

    fn remove(&mut self, entry: &Entry) {
        if let Some(shard) = entry.shard {
            self.seats.remove_agent(shard);
        }
        for group in [
            &mut self.all,
            &mut self.with_default_route,
            &mut self.with_hosts,
            &mut self.with_networks,
        ] {
            group.remove(entry);
        }
        let identifiers = &entry.agent.hello().identifiers;
        for host in &identifiers.hosts {
            remove_from(&mut self.by_host, host, entry);
        }
        for network in &identifiers.networks {
            let length = network.prefix_len();
            if let Some(networks) = self.by_network.get_mut(&length) {
                remove_from(networks, network, entry);
                if networks.is_empty() {
                    self.by_network.remove(&length);
                }
            }
        }
    }

    /// Returns all agents that count in a strategy.
    fn of_strategy(&self, strategy: Strategy) -> &Group {
        match strategy {
            Strategy::Default => &self.all,
            Strategy::DestHost => &self.with_hosts,
            Strategy::DefaultRoute => &self.with_default_route,
            Strategy::Cidr => &self.with_networks,
        }
    }

    /// Returns the number of distinct keys of a strategy: agent ids, hosts or networks.
    fn count(&self, strategy: Strategy) -> usize {
        match strategy {
            Strategy::DestHost => self.by_host.len(),
            Strategy::Cidr => self.by_network.values().map(HashMap::len).sum(),
            Strategy::Default | Strategy::DefaultRoute => self.of_strategy(strategy).len(),
        }
    }

    /// Returns the agents that a strategy has for a host.
    fn scope(&self, strategy: Strategy, host: &str) -> Option<Scope> {
        let scope = match strategy {
            Strategy::Default => Scope::All,
            Strategy::DefaultRoute => Scope::DefaultRoute,
            Strategy::DestHost if self.by_host.is_empty() => return None,
            Strategy::DestHost => Scope::Host(host_key(host)),
            Strategy::Cidr => return self.network(host).map(Scope::Network),
        };
        self.in_scope(&scope)?.has_agent().then_some(scope)
    }

    /// Returns the longest network with the address. Names have no network, because only the agent resolves
    /// names.
    fn network(&self, host: &str) -> Option<IpNet> {
        if self.by_network.is_empty() {
            return None;
        }
        let address = host.parse::<IpAddr>().ok()?.to_canonical();
        self.by_network.iter().rev().find_map(|(length, networks)| {
            let network = IpNet::new(address, *length).ok()?.trunc();
            networks.get(&network)?.has_agent().then_some(network)
        })
    }

    fn in_scope(&self, scope: &Scope) -> Option<&Group> {
        match scope {
            Scope::All => Some(&self.all),
            Scope::DefaultRoute => Some(&self.with_default_route),
            Scope::Host(host) => self.by_host.get(host),
            Scope::Network(network) => self.by_network.get(&network.prefix_len())?.get(network),
        }
    }
}

fn remove_from<K: std::hash::Hash + Eq>(groups: &mut HashMap<K, Group>, key: &K, entry: &Entry) {
    if let Some(group) = groups.get_mut(key) {
        group.remove(entry);
        if group.len() == 0 {
            groups.remove(key);
        }
    }
}

// === impl Entry ===

impl Entry {
    fn counts_in(&self, strategy: Strategy) -> bool {
        let identifiers = &self.agent.hello().identifiers;
        match strategy {
            Strategy::Default => true,
            Strategy::DestHost => !identifiers.hosts.is_empty(),
            Strategy::DefaultRoute => identifiers.default_route,
            Strategy::Cidr => !identifiers.networks.is_empty(),
        }
    }
}

impl Drop for Registration {
    fn drop(&mut self) {
        let mut agents = self.registry.agents.lock();
        agents.remove(&self.entry);
        self.registry.report(&agents, &self.entry);
        drop(agents);
        // The place refers to the registry, and the registry to the entry.
        self.entry.place.lock().take();
    }
}

#[cfg(test)]
mod tests;
