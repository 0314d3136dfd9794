//! The clients that are connected: who may come in, what they are told, and who has an address.
//!
//! Owns routes, rules and addresses of the whole tunnel. An entry is owned by an [`Admission`] whose
//! drop removes it.

use std::collections::BTreeMap;
use std::net::{Ipv4Addr, SocketAddr};
use std::path::PathBuf;
use std::sync::Arc;
use std::time::Duration;

use culvert_host::runtime::shards::Shards;
use culvert_openvpn::firewall::Firewall;
use culvert_openvpn::forward::{Forward, Stats, Verdict};
use culvert_openvpn::options::Transport;
use culvert_openvpn::peer_info::Protocol;
use culvert_openvpn::routes::PeerId;
use culvert_openvpn::session::Authenticated;
use culvert_openvpn_io::stream::Peer;
use culvert_openvpn_io::{Moment, now};
use ipnet::Ipv4Net;
use parking_lot::Mutex;
use tokio_util::sync::CancellationToken;
use tracing::warn;

use super::ccd::ClientConfig;
use super::metrics::{Drop as Dropped, OpenvpnMetrics};
use super::pool::{Lease, Pool};
use super::push::{self, PushAll};
use crate::backend::tunnel::{self, Health};

/// Connections between clients that are remembered, about 300 bytes each.
const MAX_TRACKED: usize = 65_536;

/// Pings that may be missed before a client counts as silent.
const MISSED_PINGS: u32 = 3;

/// Who may come in, and how.
#[derive(Clone, Debug)]
pub struct Admittance {
    /// Files about single clients.
    pub directory: Option<PathBuf>,
    /// Clients without a file are refused.
    pub exclusive: bool,
    /// Several clients may have one name.
    pub duplicates: bool,
    /// Clients at once.
    pub max_clients: usize,
    /// What all are told.
    pub push: PushAll,
}

/// See the module.
pub struct Clients {
    admittance: Admittance,
    pool: Arc<Pool>,
    pub(super) metrics: Arc<OpenvpnMetrics>,
    state: Mutex<State>,
}

struct State {
    last: u64,
    clients: BTreeMap<PeerId, Client>,
    forward: Forward,
    reported: Stats,
}

struct Client {
    name: String,
    remote: SocketAddr,
    transport: Transport,
    program: String,
    iroutes: Vec<Ipv4Net>,
    address: Ipv4Addr,
    /// How often it was told to send something at least.
    ping: Option<Duration>,
    kick: CancellationToken,
    /// Once it is connected.
    peer: Option<Peer>,
    shard: usize,
}

/// A client that was let in. Its drop forgets the client.
pub struct Admission {
    /// Newer ones are larger.
    pub id: PeerId,
    /// What it is told.
    pub push: Vec<String>,
    /// Its own address.
    pub address: Ipv4Addr,
    /// What is behind it.
    pub iroutes: Vec<Ipv4Net>,
    /// What it is called.
    pub name: String,
    clients: Arc<Clients>,
    _lease: Lease,
}

/// Why a client was not let in: for the log, and for the client.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Refused {
    /// What the operator should know.
    pub reason: String,
    /// What the client is told.
    pub told: String,
}

/// A client that a dial can go to.
#[derive(Clone)]
pub struct Way {
    /// The way to its task.
    pub peer: Peer,
    /// Its name, for logs.
    pub name: Arc<str>,
    /// Which one it is.
    pub id: PeerId,
    ping: Option<Duration>,
}

impl Clients {
    /// Nobody yet.
    pub fn new(
        admittance: Admittance,
        pool: Arc<Pool>,
        firewall: Firewall,
        metrics: Arc<OpenvpnMetrics>,
    ) -> Arc<Self> {
        let forward = Forward::new(pool.server(), firewall, MAX_TRACKED, now());
        Arc::new(Self {
            admittance,
            pool,
            metrics,
            state: Mutex::new(State {
                last: 0,
                clients: BTreeMap::new(),
                forward,
                reported: Stats::default(),
            }),
        })
    }

    /// The server's own address in the VPN.
    pub fn server(&self) -> Ipv4Addr {
        self.pool.server()
    }

    /// Decides about a client whose certificate is good. `kick` ends it later, if need be.
    ///
    /// # Errors
    /// When it may not come in.
    pub fn admit(
        self: &Arc<Self>,
        client: &Authenticated,
        remote: SocketAddr,
        transport: Transport,
        kick: CancellationToken,
    ) -> Result<Admission, Refused> {
        let rules = &self.admittance;
        // Plain AUTH_FAILED makes a client give up for long, or for good.
        let later = |reason: String, told: &str| {
            let protocol = client.peer_info.protocol;
            let told = match protocol.has(Protocol::AUTH_FAIL_TEMP) {
                true => format!("TEMP:{told}"),
                false => told.to_owned(),
            };
            Refused { reason, told }
        };
        let name = client.identity.common_name.clone();
        let file = match &rules.directory {
            Some(directory) => ClientConfig::find(directory, &name).map_err(|error| {
                let why = format!("its file in the client-config-dir cannot be read: {error}");
                later(why, "the server cannot read its files")
            })?,
            None => None,
        };
        if rules.exclusive && file.is_none() {
            let reason = "it has no file in the client-config-dir, and ccd-exclusive is set";
            return Err(Refused::because(reason));
        }
        let file = file.unwrap_or_default();
        for problem in &file.problems {
            warn!(client = name, "{problem}; the line has no effect");
        }
        if file.disabled {
            let reason = "its file in the client-config-dir says disable";
            return Err(Refused::because(reason));
        }
        let mut state = self.state.lock();
        let state = &mut *state;
        let others = |client: &&Client| !rules.duplicates && client.name == name;
        let replaced = state.clients.values().filter(others).count();
        if state.clients.len() - replaced >= rules.max_clients {
            let reason = format!("{} clients are connected already", rules.max_clients);
            return Err(later(reason, "too many clients"));
        }
        for other in state.clients.values().filter(others) {
            warn!(
                client = name,
                remote = %other.remote,
                "replaced by a newer client of the same name; give each its own certificate, or set --openvpn-duplicate-cn"
            );
            other.kick.cancel();
            if let Some(peer) = &other.peer {
                peer.close();
            }
        }
        let lease = match file.address {
            // The one that it replaces still has it for a moment.
            Some((own, second))
                if state
                    .clients
                    .values()
                    .filter(others)
                    .any(|c| c.address == own) =>
            {
                Ok(self.pool.take_over(own, second))
            }
            Some((own, second)) => self.pool.lease_static(own, second).or_else(|error| {
                warn!(
                    client = name,
                    "ifconfig-push: {error}; it gets another address"
                );
                self.pool.lease()
            }),
            None => self.pool.lease(),
        };
        let lease = lease.map_err(|error| later(error.to_string(), "no address is free"))?;
        state.last += 1;
        let id = PeerId(state.last);
        let address = lease.address;
        let push = rules.push.for_client(&file, &lease, transport);
        let info = &client.peer_info;
        let program = match (&info.version, &info.program) {
            (Some(version), _) => format!("OpenVPN {version}"),
            (None, Some(program)) => program.clone(),
            (None, None) => "OpenVPN".to_owned(),
        };
        let entry = Client {
            name: name.clone(),
            remote,
            transport,
            program,
            iroutes: file.iroutes.clone(),
            address,
            ping: push::ping(&push),
            kick,
            peer: None,
            shard: Shards::current(),
        };
        state.clients.insert(id, entry);
        Ok(Admission {
            id,
            push,
            address,
            iroutes: file.iroutes,
            name,
            clients: self.clone(),
            _lease: lease,
        })
    }

    /// Looks at a packet that is not for the flows of the client it came from, and sends it on.
    /// True if it is for the server itself.
    pub fn forward(&self, from: PeerId, packet: &[u8], now: Moment) -> bool {
        let mut packet = packet.to_vec();
        let mut state = self.state.lock();
        let verdict = state.forward.input(from, &mut packet, now);
        if let Verdict::To(to) = verdict {
            self.send(&state, to, &packet);
        }
        while let Some((to, reply)) = state.forward.poll_reply() {
            self.send(&state, to, &reply);
        }
        verdict == Verdict::Local
    }

    fn send(&self, state: &State, to: PeerId, packet: &[u8]) {
        let peer = state.clients.get(&to).and_then(|to| to.peer.as_ref());
        if !peer.is_some_and(|peer| peer.forward(packet)) {
            self.metrics.dropped(Dropped::Full, 1);
        }
    }

    /// Counts what was forwarded and dropped since the last time.
    pub fn report(&self) {
        let mut state = self.state.lock();
        let stats = state.forward.stats();
        let before = std::mem::replace(&mut state.reported, stats);
        drop(state);
        self.metrics.add_forward(&before, &stats);
    }

    /// Who an address is dialed through: the longest prefix, then who was heard lately, then the
    /// newest. Leaves out what was tried.
    pub fn way(&self, destination: Ipv4Addr, tried: &[PeerId]) -> Option<Way> {
        let state = self.state.lock();
        let best = state
            .clients
            .iter()
            .filter(|(id, _)| !tried.contains(id))
            .filter_map(|(id, client)| {
                let peer = client.peer.as_ref().filter(|peer| !peer.is_gone())?;
                let length = client.longest(destination)?;
                Some(((length, !is_silent(peer, client.ping), *id), client, peer))
            })
            .max_by_key(|(rank, ..)| *rank);
        let ((_, _, id), client, peer) = best?;
        Some(Way {
            peer: peer.clone(),
            name: client.name.as_str().into(),
            id,
            ping: client.ping,
        })
    }

    /// The health of the best client that something is behind.
    pub fn health(&self) -> Health {
        let state = self.state.lock();
        let ways = state.clients.values().filter(|c| !c.iroutes.is_empty());
        let health = ways.map(Client::health).max();
        health.unwrap_or(Health::Absent)
    }

    /// The clients for people.
    pub fn peers(&self) -> Vec<tunnel::Peer> {
        let state = self.state.lock();
        let connected = state.clients.values().filter(|c| c.peer.is_some());
        connected
            .map(|client| {
                let transport = match client.transport {
                    Transport::Tcp => "TCP",
                    Transport::Udp => "UDP",
                };
                let program = &client.program;
                tunnel::Peer {
                    name: format!("{} {}", client.name, client.address),
                    kind: format!("{program}, {transport}"),
                    health: client.health(),
                    connections: client.peer.as_ref().map_or(0, Peer::flows),
                }
            })
            .collect()
    }

    /// Where the newest client that something is behind is served.
    pub fn shard(&self) -> Option<usize> {
        let state = self.state.lock();
        let mut newest = state.clients.values().rev();
        newest
            .find(|client| client.peer.is_some() && !client.iroutes.is_empty())
            .map(|client| client.shard)
    }
}

/// Peers send pings when they have nothing to say, so silence means that something is wrong.
fn is_silent(peer: &Peer, ping: Option<Duration>) -> bool {
    let bound = ping.map(|ping| ping.saturating_mul(MISSED_PINGS));
    bound.is_some_and(|bound| peer.silence() > bound)
}

impl Way {
    /// Whether the client was not heard for longer than it should be.
    pub fn is_silent(&self) -> bool {
        is_silent(&self.peer, self.ping)
    }
}

impl Client {
    fn health(&self) -> Health {
        match &self.peer {
            Some(peer) if peer.is_gone() => Health::Absent,
            Some(peer) if is_silent(peer, self.ping) => Health::Doubtful,
            Some(_) => Health::Healthy,
            None => Health::Absent,
        }
    }

    /// The longest prefix of its own that an address is in.
    fn longest(&self, address: Ipv4Addr) -> Option<u8> {
        if address == self.address {
            return Some(32);
        }
        let nets = self.iroutes.iter().filter(|net| net.contains(&address));
        nets.map(Ipv4Net::prefix_len).max()
    }
}

impl Refused {
    fn because(reason: &str) -> Self {
        Self {
            reason: reason.to_owned(),
            told: String::new(),
        }
    }
}

impl Admission {
    /// The client is connected: it can be dialed and sent to.
    pub fn connected(&self, peer: Peer) {
        let mut state = self.clients.state.lock();
        state
            .forward
            .routes
            .add(self.id, self.address, &self.iroutes);
        if let Some(client) = state.clients.get_mut(&self.id) {
            client.peer = Some(peer);
            self.clients.metrics.clients.increment(1);
        }
    }

    /// Whether the client may send from an address.
    pub fn permits(&self, source: Ipv4Addr) -> bool {
        source == self.address || self.iroutes.iter().any(|net| net.contains(&source))
    }
}

impl Drop for Admission {
    fn drop(&mut self) {
        let mut state = self.clients.state.lock();
        state.forward.routes.remove(self.id);
        let client = state.clients.remove(&self.id);
        if client.is_some_and(|client| client.peer.is_some()) {
            self.clients.metrics.clients.decrement(1);
        }
    }
}

#[cfg(test)]
mod tests;
