//! OpenVPN's wire protocol in both roles, and what is carried inside it, without I/O: bytes and
//! time in, bytes and events out.
//!
//! The leaf modules are codecs and cryptography of one format each, and know nothing of each other's
//! state: [`packet`], [`framing`], [`wrap`], [`key_method`], [`options`], [`peer_info`], [`control`],
//! [`prf`], [`keys`], [`cipher`], [`ncp`], [`data`], [`replay`], [`compress`], [`payload`].
//!
//! [`session`] is one endpoint, in either role: [`reliable`] messages carry [`tls`], in which the keys of
//! the data channel are negotiated. [`hub`] is a UDP server's many sessions behind one socket.
//!
//! What the tunnel carries: [`flows`] are TCP connections in user space, dialed into the tunnel or accepted
//! out of it; [`forward`] is a server's way from one peer to another, by [`routes`], [`firewall`] and
//! [`masquerade`]; [`nodes`] translates the addresses of Kubernetes nodes. [`ip`] are packets, [`echo`] is
//! what a host says by itself.

// No clock is read in this crate, but the time of day that tls-auth and tls-crypt send: `Instant` is a
// value that callers pass in, and a test or a simulation passes what it likes.
#![allow(clippy::disallowed_types)]

pub mod cipher;
pub mod compress;
pub mod control;
pub mod data;
pub mod echo;
pub mod firewall;
mod flow;
pub mod flows;
pub mod forward;
pub mod framing;
pub mod half_open;
pub mod hub;
pub mod ip;
pub mod key_method;
pub mod keys;
pub mod masquerade;
pub mod ncp;
mod negotiation;
pub mod nodes;
pub mod options;
pub mod packet;
pub mod payload;
pub mod peer_info;
pub mod prf;
pub mod reliable;
pub mod replay;
pub mod routes;
pub mod session;
pub mod tls;
mod tuple;
pub mod wrap;

/// Which end of the VPN an endpoint is. The VPN client is also the TLS client, whoever starts a
/// negotiation.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub enum Role {
    /// Connects, sends the first packet, asks for its configuration.
    Client,
    /// Is connected to, and pushes the configuration.
    Server,
}

impl Role {
    /// The other end's.
    pub fn peer(self) -> Self {
        match self {
            Self::Client => Self::Server,
            Self::Server => Self::Client,
        }
    }
}
