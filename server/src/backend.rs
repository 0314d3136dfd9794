//! The backends of both tunnels.

pub(crate) mod agent;
pub(crate) mod announced;
mod connection;
pub(crate) mod dial;
pub(crate) mod flow;
pub mod identity;
pub(crate) mod konnectivity;
mod load;
pub(crate) mod native;
pub mod openvpn;
pub(crate) mod quic;
pub(crate) mod registry;
pub(crate) mod resume;
pub(crate) mod second_link;
pub(crate) mod service;
mod tunnel;
mod usage;

use std::net::SocketAddr;
use std::sync::Arc;

use culvert_stream::Dial;
use tokio::time::Instant;

use self::agent::{AgentStream, Hello};
pub use self::connection::{Connection, ToEndpoint};
pub use self::dial::DialError;
pub use self::load::ClientSeat;
use self::native::NativeAgent;
pub(crate) use self::registry::{Place, Registration, Registry};
pub use self::tunnel::{Dialing, Tunnel};
pub use self::usage::{DialGuard, Usage};
use crate::backend::dial::StreamDialError;
use crate::tunnel::{Health, Peer};

/// An agent connection, by transport.
#[derive(Clone)]
pub enum AgentConnection {
    /// A packet stream shared by all connections: a stock agent.
    Packet(Arc<AgentStream>),
    /// A native connection with a stream for each dial: a Culvert agent.
    Native(Arc<NativeAgent>),
}

/// Preference for new dials; smaller is better.
#[derive(Clone, Copy, PartialEq, Eq, PartialOrd, Ord)]
struct Rank {
    suspect: bool,
    draining: bool,
}

// === impl AgentConnection ===

impl AgentConnection {
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

    /// Returns the address of the agent, or of a load balancer: of the latest TCP connection.
    fn address(&self) -> Option<SocketAddr> {
        match self {
            Self::Packet(stream) => stream.address(),
            Self::Native(agent) => agent.address.get(),
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
            Self::Native(agent) => quic::dial(agent, dial, deadline).await,
        }
    }

    /// Closes the connection to an agent that accepts no data. No message could reach the agent.
    pub fn abandon(&self) {
        match self {
            Self::Packet(stream) => stream.abandon(),
            Self::Native(agent) => agent.abandon(),
        }
    }

    /// Returns true if neither link to the agent works: the TCP link broke and has not resumed yet, and no usable QUIC link
    /// exists.
    fn is_unreachable(&self) -> bool {
        match self {
            Self::Packet(_) => false,
            Self::Native(agent) => agent.is_away() && agent.second_link().is_none(),
        }
    }

    /// Returns true if dials should not wait for the agent: its link broke long ago, and has not resumed yet.
    fn is_gone(&self) -> bool {
        match self {
            Self::Packet(_) => false,
            Self::Native(agent) => agent.is_gone(),
        }
    }

    /// Returns the health for new dials.
    fn health(&self) -> Health {
        match self.is_gone() {
            true => Health::Absent,
            false => self.rank().health(),
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
            Self::Native(agent) => {
                let has_quic = agent
                    .second
                    .as_ref()
                    .is_some_and(|second| second.has_link());
                let kind = match (has_quic, agent.is_away()) {
                    (true, true) => "agent, native and QUIC, away",
                    (true, false) => "agent, native and QUIC",
                    (false, true) => "agent, native, away",
                    (false, false) => "agent, native",
                };
                (kind, agent.connections())
            }
        };
        let (identifiers, more_identifiers) = self.hello().first_identifiers();
        Peer {
            name: self.hello().agent_id.clone(),
            kind: kind.to_owned(),
            // Lists agents that are away, even if dials no longer wait for them.
            health: self.rank().health(),
            connections,
            address: self.address(),
            identifiers,
            more_identifiers,
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
        match (self.suspect, self.draining) {
            (true, _) => Health::Doubtful,
            (false, true) => Health::Draining,
            (false, false) => Health::Healthy,
        }
    }
}
