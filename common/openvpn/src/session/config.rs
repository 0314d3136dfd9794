//! The configuration of a session.

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
    /// `hand-window`, 60 s: time limit of a negotiation.
    pub hand_window: Duration,
    /// `tls-timeout`, 2 s: pause before the first retransmission of a control message. The pause doubles with
    /// each attempt.
    pub tls_timeout: Duration,
    /// `tran-window`, 3600 s: time for which an old key is accepted after a renegotiation.
    pub tran_window: Duration,
    /// `reneg-sec`, 3600 s: age of a key at which this side renegotiates. Zero leaves renegotiations to the
    /// peer. A server subtracts up to 10 %, so that its clients do not all renegotiate at once.
    pub reneg: Duration,
    /// `ping`: time without output after which a ping is sent. `None` disables pings, unless the server
    /// pushes a value.
    pub ping: Option<Duration>,
    /// `ping-restart`: time without input after which the session ends. A server usually uses twice the
    /// pushed value. A server waits at least three times the pushed `ping`, and forever after a pushed `ping 0`.
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

/// Configuration common to both roles.
#[derive(Clone, Debug)]
pub struct Common {
    /// Protocol that carries the packets.
    pub transport: Transport,
    /// `tls-auth` or `tls-crypt`.
    pub wrap: WrapKey,
    /// `data-ciphers`: ciphers that may be negotiated, in order of preference.
    pub ciphers: Vec<Cipher>,
    /// `data-ciphers-fallback`, or `cipher`: cipher for peers that cannot negotiate and do not name their
    /// cipher, and the cipher in the options string.
    pub fallback: Option<Cipher>,
    /// `auth`: digest for data packets with a CBC cipher. Never negotiated.
    pub digest: Digest,
    /// `comp-lzo no` or `compress stub`, if configured. Only clients need this setting, because a server
    /// pushes a matching framing to clients that use framing.
    pub framing: Framing,
    /// Key direction of `tls-auth`, for the options string.
    pub tls_auth: Option<KeyDirection>,
    /// True if keys of the data channel may come from the TLS exporter, provided that the peer supports the
    /// exporter. Otherwise the keys come from the TLS 1.0 PRF, as with peers before 2.6.
    pub exporter: bool,
    /// `tun-mtu`: largest inner packet in bytes, unless both sides agree on another value.
    pub tun_mtu: u16,
    /// `tun-mtu-max`: largest `tun-mtu` that may be agreed, in bytes. A client sends the value as `IV_MTU`. A
    /// server pushes the value to this crate's clients if their `IV_MTU` is large enough, and `tun-mtu` to
    /// other clients.
    pub max_tun_mtu: u16,
    /// Times of a session.
    pub timers: Timers,
}

/// OpenVPN's default of `tun-mtu`, in bytes.
const TUN_MTU: u16 = 1500;

/// `tun-mtu` in bytes between two peers that terminate connections in their own process. Over TCP the network
/// path does not limit the packet size, and the cost of a packet hardly depends on its size.
pub(crate) const LARGE_TUN_MTU: u16 = 16 << 10;

impl Common {
    /// Returns OpenVPN's defaults: no wrap, the AEAD ciphers, SHA1, 1500 bytes.
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

/// Configuration of a server, for all its sessions.
#[derive(Clone, Debug)]
pub struct ServerConfig {
    /// Configuration common to both roles.
    pub common: Common,
    /// Certificate, key, and the check of client certificates.
    pub tls: Arc<ServerTls>,
}

impl ServerConfig {
    /// Creates a configuration with OpenVPN's defaults.
    pub fn new(transport: Transport, tls: Arc<ServerTls>) -> Self {
        Self {
            common: Common::new(transport),
            tls,
        }
    }
}

/// Configuration of a client.
#[derive(Clone)]
pub struct ClientConfig {
    /// Configuration common to both roles.
    pub common: Common,
    /// Certificate, key, and the check of the server's certificate.
    pub tls: Arc<ClientTls>,
    /// `auth-user-pass`: user name and password, at most 127 bytes each.
    pub credentials: Option<(String, String)>,
    /// `connect-timeout`: time limit for the server's first answer, at most `hand-window`. `None` sets no other limit
    /// than `hand-window`.
    pub connect_timeout: Option<Duration>,
}

impl std::fmt::Debug for ClientConfig {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        let username = self.credentials.as_ref().map(|(username, _)| username);
        f.debug_struct("ClientConfig")
            .field("common", &self.common)
            .field("tls", &self.tls)
            .field("username", &username)
            .field("connect_timeout", &self.connect_timeout)
            .finish()
    }
}

impl ClientConfig {
    /// Creates a configuration with OpenVPN's defaults.
    pub fn new(transport: Transport, tls: Arc<ClientTls>) -> Self {
        Self {
            common: Common::new(transport),
            tls,
            credentials: None,
            connect_timeout: None,
        }
    }
}
