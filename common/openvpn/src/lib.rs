//! OpenVPN's wire protocol in both roles, and the traffic inside the VPN, without I/O: bytes and time in,
//! bytes and events out.
//!
//! Each leaf module is the codec or the cryptography of one format, and shares no state with other modules:
//! [`packet`], [`framing`], [`wrap`], [`key_method`], [`options`], [`peer_info`], [`control`], `prf`,
//! [`keys`], [`cipher`], [`ncp`], [`data`], `replay`, [`compress`], [`payload`].
//!
//! [`session`] implements one session in either role: `reliable` messages carry [`tls`], and TLS negotiates
//! the keys of the data channel. [`hub`] manages the many sessions of a UDP server behind one socket.
//!
//! Traffic inside the VPN: [`flows`] are TCP connections in user space, dialed into the VPN or accepted from
//! the VPN. [`forward`] moves a server's packets from one peer to another, with [`routes`], [`firewall`] and
//! `masquerade`. [`nodes`] translates the addresses of Kubernetes nodes. [`ip`] parses packets, and `echo`
//! creates the unsolicited replies of a host. `rate` limits replies and handshakes.

// The only clock that this crate reads is the time of day, for the packets of tls-auth and tls-crypt. Callers
// pass in every `Instant`, so tests and simulations control the time.
#![allow(clippy::disallowed_types)]

pub mod cipher;
pub mod compress;
pub mod control;
pub mod data;
mod echo;
pub mod firewall;
pub mod flows;
pub mod forward;
pub mod framing;
mod half_open;
pub mod hub;
pub mod ip;
pub mod key_method;
pub mod keys;
mod masquerade;
pub mod ncp;
mod negotiation;
pub mod nodes;
pub mod options;
pub mod packet;
pub mod payload;
pub mod peer_info;
mod prf;
mod rate;
mod reliable;
mod replay;
pub mod routes;
pub mod session;
pub mod tls;
mod tuple;
pub mod wrap;

/// Role of one end of the VPN. The VPN client is always the TLS client, even if the server starts a
/// negotiation.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub enum Role {
    /// Connects, sends the first packet, and requests its configuration.
    Client,
    /// Waits for clients, and pushes the configuration.
    Server,
}

impl Role {
    /// Returns the role of the other end.
    pub fn peer(self) -> Self {
        match self {
            Self::Client => Self::Server,
            Self::Server => Self::Client,
        }
    }
}
