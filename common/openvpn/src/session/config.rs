//! What a session is told by its owner.

use std::sync::Arc;
use std::time::Duration;

use crate::cipher::{Cipher, Digest};
use crate::compress::Framing;
use crate::options::Transport;
use crate::tls::{ClientTls, ServerTls};
use crate::wrap::{KeyDirection, WrapKey};

/// Times of a session, with OpenVPN's names and defaults.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Timers {
    /// `hand-window`, 60 s: a negotiation that takes longer fails.
    pub hand_window: Duration,
    /// `tls-timeout`, 2 s: first retransmission of a control message. It doubles each time.
    pub tls_timeout: Duration,
    /// `tran-window`, 3600 s: an old key is accepted for so long after a renegotiation.
    pub tran_window: Duration,
    /// `reneg-sec`, 3600 s: age of a key at which a new one is negotiated; zero leaves it to the peer.
    /// A server takes up to 10 % off, so that its clients do not come all at once.
    pub reneg: Duration,
    /// `ping`: a ping is sent after so long without output. None: never, unless the server pushes it.
    pub ping: Option<Duration>,
    /// `ping-restart`: the session ends after so long without input. A server usually wants twice
    /// what it pushes.
    pub ping_restart: Option<Duration>,
}

impl Default for Timers {
    fn default() -> Self {
        Self {
            hand_window: Duration::from_secs(60),
            tls_timeout: Duration::from_secs(2),
            tran_window: Duration::from_secs(3600),
            reneg: Duration::from_secs(3600),
            ping: None,
            ping_restart: None,
        }
    }
}

/// What both roles are told.
#[derive(Clone, Debug)]
pub struct Common {
    /// What carries the packets.
    pub transport: Transport,
    /// `tls-auth` or `tls-crypt`.
    pub wrap: WrapKey,
    /// `data-ciphers`: what may be negotiated, the best first.
    pub ciphers: Vec<Cipher>,
    /// `data-ciphers-fallback`, or `cipher`: for peers that cannot negotiate and do not say what they
    /// use, and what the options string names.
    pub fallback: Option<Cipher>,
    /// `auth`: of data packets where the cipher does not authenticate. Never negotiated.
    pub digest: Digest,
    /// `comp-lzo no` or `compress stub`, where that is configured. A server pushes what fits to clients
    /// that have it, so only clients need this.
    pub framing: Framing,
    /// Direction of `tls-auth`, for the options string.
    pub tls_auth: Option<KeyDirection>,
    /// Whether keys of the data channel may come from the TLS exporter, where the peer can do that. Without
    /// it they come from the TLS 1.0 PRF, as with peers before 2.6.
    pub exporter: bool,
    /// `tun-mtu`: the largest inner packet of a peer that can not be told another.
    pub tun_mtu: u16,
    /// `tun-mtu-max`: the largest that may be agreed. A client says it (`IV_MTU`); a server pushes it to our
    /// clients that can take as much, and `tun-mtu` to all others.
    pub max_tun_mtu: u16,
    /// Times.
    pub timers: Timers,
}

/// OpenVPN's default of `tun-mtu`.
pub const TUN_MTU: u16 = 1500;

/// The `tun-mtu` between two that end their connections in the process: over TCP no path has to have room for it, and a
/// packet costs nearly the same whatever its size.
pub const LARGE_TUN_MTU: u16 = 16 << 10;

impl Common {
    /// OpenVPN's defaults: no wrap, the AEAD ciphers, SHA1, 1500 bytes.
    pub fn new(transport: Transport) -> Self {
        Self {
            transport,
            wrap: WrapKey::none(),
            ciphers: Cipher::DEFAULT.to_vec(),
            fallback: None,
            digest: Digest::Sha1,
            framing: Framing::None,
            tls_auth: None,
            exporter: true,
            tun_mtu: TUN_MTU,
            max_tun_mtu: match transport {
                Transport::Tcp => LARGE_TUN_MTU,
                Transport::Udp => TUN_MTU,
            },
            timers: Timers::default(),
        }
    }
}

/// A server, for all its sessions.
#[derive(Clone, Debug)]
pub struct ServerConfig {
    /// What both roles are told.
    pub common: Common,
    /// Certificate, key, and who may come in.
    pub tls: Arc<ServerTls>,
}

impl ServerConfig {
    /// With OpenVPN's defaults.
    pub fn new(transport: Transport, tls: Arc<ServerTls>) -> Self {
        Self {
            common: Common::new(transport),
            tls,
        }
    }
}

/// A client.
#[derive(Clone)]
pub struct ClientConfig {
    /// What both roles are told.
    pub common: Common,
    /// Certificate, key, and who is trusted as the server.
    pub tls: Arc<ClientTls>,
    /// `auth-user-pass`: user name and password, at most 127 bytes each.
    pub credentials: Option<(String, String)>,
}

impl std::fmt::Debug for ClientConfig {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        let username = self.credentials.as_ref().map(|(username, _)| username);
        f.debug_struct("ClientConfig")
            .field("common", &self.common)
            .field("tls", &self.tls)
            .field("username", &username)
            .finish()
    }
}

impl ClientConfig {
    /// With OpenVPN's defaults.
    pub fn new(transport: Transport, tls: Arc<ClientTls>) -> Self {
        Self {
            common: Common::new(transport),
            tls,
            credentials: None,
        }
    }
}
