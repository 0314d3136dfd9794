//! The connected clients: their admission, their pushed options, and their addresses.
//!
//! [`Clients`] owns routes, rules and addresses of the whole tunnel. Dropping an [`Admission`] removes the
//! entry of its client.

use std::collections::BTreeMap;
use std::future::pending;
use std::net::{Ipv4Addr, SocketAddr};
use std::sync::Arc;
use std::time::Duration;

use culvert_host::runtime::shards::{ShardId, Shards};
use culvert_openvpn::control::push::build;
use culvert_openvpn::firewall::Firewall;
use culvert_openvpn::forward::{Forward, Stats, Verdict};
use culvert_openvpn::options::Transport;
use culvert_openvpn::peer_info::{PeerInfo, Protocol};
use culvert_openvpn::routes::PeerId;
use culvert_openvpn::session::Authenticated;
use culvert_openvpn_io::metrics::{DropReason, Growth};
use culvert_openvpn_io::stream::Peer;
use culvert_openvpn_io::{Moment, now};
use ipnet::Ipv4Net;
use parking_lot::Mutex;
use tokio::sync::Semaphore;
use tokio_util::sync::CancellationToken;
use tracing::warn;

use super::ccd::ClientConfig;
use super::metrics::OpenvpnMetrics;
use super::pool::{Lease, Pool};
use super::push;
use super::settings::Settings;
use super::silence::Silence;
use crate::tunnel;
use crate::tunnel::Health;

/// Largest number of tracked connections between clients, about 300 bytes each.
const MAX_TRACKED: usize = 65_536;

/// Number of missed pings after which a client counts as silent.
const MISSED_PINGS: u32 = 3;

/// Registry of the connected clients; see the module.
pub(super) struct Clients {
    settings: Settings,
    pool: Arc<Pool>,
    pub(super) metrics: Arc<OpenvpnMetrics>,
    /// Permit to read a file in client-config-dir.
    turn: Arc<Semaphore>,
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
    /// Lease of the client's address, which ends when the client is removed.
    lease: Lease,
    /// Interval at which the client was told to send pings.
    ping: Option<Duration>,
    silence: Arc<Silence>,
    kick: CancellationToken,
    /// Handle of the client's task; `None` until the client is connected.
    peer: Option<Peer>,
    shard: Option<ShardId>,
}

/// Admission of a client. Dropping the admission removes the client.
pub(super) struct Admission {
    /// Identifier of the client. Newer clients have larger identifiers.
    pub id: PeerId,
    /// Options pushed to the client.
    pub push: Vec<String>,
    /// Address of the client in the VPN.
    pub address: Ipv4Addr,
    /// Networks behind the client.
    pub iroutes: Vec<Ipv4Net>,
    /// Common name of the client's certificate.
    pub name: String,
    /// Detection of a client that no longer answers.
    pub silence: Arc<Silence>,
    clients: Arc<Clients>,
}

/// Refusal of a client.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(super) struct Refused {
    /// Reason for the operator's log.
    pub reason: String,
    /// Reason sent to the client.
    pub told: String,
}

/// Connected client that can carry a dial.
#[derive(Clone)]
pub(super) struct Way {
    /// Handle of the client's task.
    pub peer: Peer,
    /// Name of the client, for logs.
    pub name: Arc<str>,
    /// Identifier of the client.
    pub id: PeerId,
    /// True unless the client was silent or suspect when it was selected.
    pub is_healthy: bool,
    ping: Option<Duration>,
    silence: Arc<Silence>,
}

impl Clients {
    /// Creates an empty registry.
    pub(super) fn new(settings: Settings, metrics: Arc<OpenvpnMetrics>) -> Arc<Self> {
        let (server, network) = (&settings.server, settings.network);
        let mut destinations = server.routes.clone();
        if server.client_to_client {
            destinations.push(network);
        }
        let firewall = Firewall {
            sources: vec![network],
            destinations,
        };
        let pool = Pool::new(network, settings.topology);
        let forward = Forward::new(pool.server(), firewall, MAX_TRACKED, now());
        Arc::new(Self {
            settings,
            pool,
            metrics,
            turn: Arc::new(Semaphore::new(1)),
            state: Mutex::new(State {
                last: 0,
                clients: BTreeMap::new(),
                forward,
                reported: Stats::default(),
            }),
        })
    }

    /// Returns the server's own address in the VPN.
    pub(super) fn server(&self) -> Ipv4Addr {
        self.pool.server()
    }

    /// Reads the file of a client in client-config-dir. Returns `None` if the client has no file.
    ///
    /// # Errors
    /// As [`ClientConfig::read`].
    pub(super) async fn file(
        self: Arc<Self>,
        name: String,
    ) -> Result<Option<ClientConfig>, String> {
        match &self.settings.server.client_config_dir {
            Some(directory) => ClientConfig::read(directory, &name, &self.turn).await,
            None => Ok(None),
        }
    }

    /// Admits or refuses a client with a valid certificate. `file` is the result of [`Self::file`]. The registry fires
    /// `kick` to end the client later.
    ///
    /// # Errors
    /// Fails if the client is refused.
    pub(super) fn admit(
        self: &Arc<Self>,
        client: &Authenticated,
        file: Result<Option<ClientConfig>, String>,
        remote: SocketAddr,
        transport: Transport,
        kick: CancellationToken,
    ) -> Result<Admission, Refused> {
        let name = client.identity.common_name.clone();
        let file = self.permitted(client, file)?;
        let mut push = push::for_client(&self.settings, &file, transport);
        if let Err(error) = build(&push) {
            let reason = format!("{error}; check --openvpn-push and the client's file");
            return Err(Refused::because(&reason));
        }
        let mut state = self.state.lock();
        let state = &mut *state;
        let duplicate_cn = self.settings.server.duplicate_cn;
        let others = |client: &&Client| !duplicate_cn && client.name == name;
        let replaced = state.clients.values().filter(others).count();
        let max_clients = self.settings.max_clients;
        if state.clients.len() - replaced >= max_clients {
            let reason = format!(
                "the limit of {max_clients} clients is reached; raise --openvpn-max-clients"
            );
            return Err(Refused::for_now(client, reason, "too many clients"));
        }
        // Replaced clients still have their addresses for a moment.
        let replaced = || state.clients.values().rev().filter(others);
        let dynamic = || match replaced().find(|other| other.lease.is_dynamic) {
            Some(other) => Ok(self.pool.take_over(other.lease.address)),
            None => self.pool.lease(),
        };
        // An old connection of the client may not have ended yet, also with duplicate-cn.
        let has_own = |own| {
            let mut holders = state
                .clients
                .values()
                .filter(|other| other.lease.address == own);
            holders.next().is_some_and(|other| other.name == name)
        };
        let lease = match file.address {
            Some((own, second)) if has_own(own) => Ok(self.pool.take_over_static(own, second)),
            Some((own, second)) => self.pool.lease_static(own, second).or_else(|error| {
                warn!(
                    client = name,
                    "ifconfig-push: {error}; the client gets another address"
                );
                dynamic()
            }),
            None => dynamic(),
        };
        let lease = lease
            .map_err(|error| Refused::for_now(client, error.to_string(), "no address is free"))?;
        // No refusal follows: a refused client must not end another client.
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
        state.last += 1;
        let id = PeerId(state.last);
        let address = lease.address;
        push.extend(lease.push());
        let silence = Arc::new(Silence::new(self.server(), address));
        let entry = Client {
            name: name.clone(),
            remote,
            transport,
            program: program(&client.peer_info),
            iroutes: file.iroutes.clone(),
            lease,
            ping: push::ping(&push),
            silence: silence.clone(),
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
            silence,
            clients: self.clone(),
        })
    }

    /// Returns what a client's file contains, if the rules of client-config-dir permit the client.
    ///
    /// # Errors
    /// Fails if the client is refused.
    fn permitted(
        &self,
        client: &Authenticated,
        file: Result<Option<ClientConfig>, String>,
    ) -> Result<ClientConfig, Refused> {
        let file = file.map_err(|error| {
            let why = format!("the client's file in client-config-dir cannot be read: {error}");
            Refused::for_now(client, why, "the server cannot read its files")
        })?;
        if self.settings.server.ccd_exclusive && file.is_none() {
            let reason = "the client has no file in client-config-dir, and ccd-exclusive is set";
            return Err(Refused::because(reason));
        }
        let file = file.unwrap_or_default();
        for problem in &file.problems {
            let name = &client.identity.common_name;
            warn!(client = name, "{problem}; the line has no effect");
        }
        if file.disabled {
            let reason = "the client's file in client-config-dir contains `disable`";
            return Err(Refused::because(reason));
        }
        Ok(file)
    }

    /// Forwards a packet to its destination, if the flows of its sender did not accept the packet. Returns
    /// true if the packet is for the server itself.
    pub(super) fn forward(&self, from: PeerId, packet: &[u8], now: Moment) -> bool {
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
            self.metrics.traffic.dropped(DropReason::Full);
        }
    }

    /// Adds the packets that were dropped since the last call to the metrics.
    pub(super) fn report(&self) {
        let mut state = self.state.lock();
        let stats = state.forward.stats();
        let growth = Growth::update(&mut state.reported, stats);
        drop(state);
        self.metrics.add_forward(&growth);
    }

    /// Selects the client for a dial: by longest prefix, as OpenVPN routes, then healthy clients, then the newest. Skips the
    /// clients in `tried`.
    pub(super) fn way(&self, destination: Ipv4Addr, tried: &[PeerId]) -> Option<Way> {
        let state = self.state.lock();
        let best = state
            .clients
            .iter()
            .filter(|(id, _)| !tried.contains(id))
            .filter_map(|(id, client)| {
                let peer = client.peer.as_ref().filter(|peer| !peer.is_gone())?;
                let length = client.longest(destination)?;
                let is_healthy = client.health() == Health::Healthy;
                Some(((length, is_healthy, *id), client, peer))
            })
            .max_by_key(|(rank, ..)| *rank);
        let ((_, is_healthy, id), client, peer) = best?;
        Some(Way {
            peer: peer.clone(),
            name: client.name.as_str().into(),
            id,
            is_healthy,
            ping: client.ping,
            silence: client.silence.clone(),
        })
    }

    /// Returns the health of the best client with networks behind it.
    pub(super) fn health(&self) -> Health {
        let state = self.state.lock();
        let ways = state.clients.values().filter(|c| !c.iroutes.is_empty());
        let health = ways.map(Client::health).max();
        health.unwrap_or(Health::Absent)
    }

    /// Returns descriptions of the connected clients for display.
    pub(super) fn peers(&self) -> Vec<tunnel::Peer> {
        let state = self.state.lock();
        let connected = state.clients.values().filter(|c| c.peer.is_some());
        connected
            .map(|client| {
                let transport = client.transport.to_string().to_uppercase();
                let program = &client.program;
                tunnel::Peer {
                    name: format!("{} {}", client.name, client.lease.address),
                    kind: format!("{program}, {transport}"),
                    health: client.health(),
                    connections: client.peer.as_ref().map_or(0, Peer::flows),
                    address: Some(client.remote),
                    identifiers: Vec::new(),
                    more_identifiers: 0,
                }
            })
            .collect()
    }

    /// Returns the shard of the newest connected client with networks behind it.
    pub(super) fn shard(&self) -> Option<ShardId> {
        let state = self.state.lock();
        let mut newest = state.clients.values().rev();
        newest
            .find(|client| client.peer.is_some() && !client.iroutes.is_empty())
            .and_then(|client| client.shard)
    }
}

/// Idle peers send pings, so silence indicates a problem.
fn is_silent(peer: &Peer, ping: Option<Duration>) -> bool {
    let bound = ping.map(|ping| ping.saturating_mul(MISSED_PINGS));
    bound.is_some_and(|bound| peer.silence() > bound)
}

impl Way {
    /// Returns true if the client has been silent for too long.
    pub(super) fn is_silent(&self) -> bool {
        is_silent(&self.peer, self.ping)
    }

    /// Resolves once the client is suspect: it does not answer a probe. Never resolves for a client that sends no pings,
    /// because nothing would end the suspicion.
    pub(super) async fn suspect(&self) {
        match self.ping {
            Some(_) => {
                if self.silence.suspect(&self.peer).await {
                    warn!(
                        client = %self.name,
                        "the OpenVPN client does not answer; clients with iroutes of the same length get the dials until it does"
                    );
                }
            }
            None => pending().await,
        }
    }
}

impl Client {
    fn health(&self) -> Health {
        match &self.peer {
            Some(peer) if peer.is_gone() => Health::Absent,
            Some(peer) if is_silent(peer, self.ping) || self.silence.is_suspect(peer) => {
                Health::Doubtful
            }
            Some(_) => Health::Healthy,
            None => Health::Absent,
        }
    }

    /// Returns the length of the longest prefix of this client that contains the address.
    fn longest(&self, address: Ipv4Addr) -> Option<u8> {
        if address == self.lease.address {
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

    /// Returns a refusal that may not last. A client stops trying for a long time, or forever, after a plain AUTH_FAILED.
    fn for_now(client: &Authenticated, reason: String, told: &str) -> Self {
        let protocol = client.peer_info.protocol;
        let told = match protocol.has(Protocol::AUTH_FAIL_TEMP) {
            true => format!("TEMP:{told}"),
            false => told.to_owned(),
        };
        Self { reason, told }
    }
}

/// Returns the name of a client's program.
fn program(info: &PeerInfo) -> String {
    match (&info.version, &info.program) {
        (Some(version), _) => format!("OpenVPN {version}"),
        (None, Some(program)) => program.clone(),
        (None, None) => "OpenVPN".to_owned(),
    }
}

impl Admission {
    /// Marks the client as connected: from now on it receives dials and forwarded packets, first of all a probe.
    pub(super) fn connected(&self, peer: Peer) {
        self.silence.probe(&peer);
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

    /// Returns true if the client may send packets from this address.
    pub(super) fn permits(&self, source: Ipv4Addr) -> bool {
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
pub(super) mod tests;
