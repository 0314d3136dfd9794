//! The events of a session, and the reasons for its end.

use std::fmt;
use std::time::Duration;

use crate::cipher::Cipher;
use crate::control::push::PushOptions;
use crate::peer_info::PeerInfo;
use crate::tls::{PeerIdentity, TlsError};

/// Event for the owner of a session. Call [`Session::poll_event`](super::Session::poll_event) after every
/// call with `now`.
#[derive(Debug)]
pub enum Event {
    /// Server role, once per session: the client's certificate is verified, and the client has sent its
    /// key-method message. The session waits until the owner calls
    /// [`Session::accept`](super::Session::accept) or [`Session::reject`](super::Session::reject), at most
    /// for the rest of the hand-window.
    Authenticated(Box<Authenticated>),
    /// Data can flow. Client role: the server's options have arrived. Server role: the PUSH_REPLY is queued.
    Established(Box<Established>),
    /// A renegotiation has succeeded. The new keys are in use alongside the old keys.
    Rekeyed {
        /// Id of the new keys, 1 to 7.
        key_id: u8,
    },
    /// Text for the log: INFO or AUTH_PENDING from the peer, or a failed renegotiation that left the old keys
    /// in use. No action is needed.
    Notice(String),
    /// The session has ended, and no longer carries data. The remaining packets of
    /// [`Session::poll_output`](super::Session::poll_output) notify the peer. The owner may drop the session
    /// at once, or poll until [`Session::is_finished`](super::Session::is_finished).
    Ended(Ended),
}

/// Client that waits to be accepted or rejected.
#[derive(Clone)]
pub struct Authenticated {
    /// Names in the verified certificate.
    pub identity: PeerIdentity,
    /// Peer info sent by the client.
    pub peer_info: PeerInfo,
    /// User name of `auth-user-pass`; empty if missing.
    pub username: String,
    /// Password of `auth-user-pass`; empty if missing.
    pub password: String,
}

impl fmt::Debug for Authenticated {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Authenticated")
            .field("identity", &self.identity)
            .field("peer_info", &self.peer_info)
            .field("username", &self.username)
            .finish_non_exhaustive()
    }
}

/// Parameters of an established session.
#[derive(Debug, Clone)]
pub struct Established {
    /// Names in the peer's certificate. `None` only for a server without a common name.
    pub identity: Option<PeerIdentity>,
    /// Pushed options, one string each: received (client role) or sent (server role).
    pub options: Vec<String>,
    /// Client role: parsed options.
    pub push: Option<PushOptions>,
    /// Cipher of the data channel.
    pub cipher: Cipher,
    /// True if keys come from the TLS exporter, false if keys come from the TLS 1.0 PRF.
    pub exporter: bool,
    /// Peer id in the data packets of this session (P_DATA_V2); `None` for packets without an id.
    pub peer_id: Option<u32>,
    /// Largest inner packet in either direction, in bytes.
    pub tun_mtu: u16,
    /// True if the peer also runs this crate. A client learns this only over UDP, where the value matters.
    pub ours: bool,
    /// TLS version and cipher suite of the control channel, for the log.
    pub tls: String,
}

/// Reason for the end of a session.
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
#[non_exhaustive]
pub enum Ended {
    /// The owner closed the session.
    #[error("closed")]
    Closed,
    /// Server role: the owner rejected the client, or the client failed a check of the session. The client
    /// receives the text.
    #[error("client rejected: {0}")]
    Rejected(String),
    /// Server role: the client shares no cipher with the server. The client receives a text without the lists.
    #[error(
        "client rejected: no shared cipher: the client offers {offered}, and we allow {allowed}"
    )]
    NoSharedCipher {
        /// Ciphers that the client offers, in the client's spelling.
        offered: String,
        /// Ciphers that the server allows.
        allowed: String,
    },
    /// Client role: the server refused the client.
    #[error("the server refused us{}: {}", if *temporary { " for now" } else { "" }, match reason.as_str() {
        "" => "AUTH_FAILED without a reason; check user, password and certificate, and the server's log",
        reason => reason,
    })]
    AuthFailed {
        /// Text of the server; may be empty.
        reason: String,
        /// True for AUTH_FAILED,TEMP, and if the session used a token of the server: a later attempt may succeed.
        temporary: bool,
    },
    /// The peer announced its exit (EXIT, or OCC's EXIT).
    #[error("the peer left")]
    PeerExit,
    /// Client role: the server requests a new connection.
    #[error("the server asks to connect again{}", after_colon(reason))]
    Restart {
        /// True to connect to the next server of the list, false for the same server.
        next_server: bool,
        /// Text of the server; may be empty.
        reason: String,
    },
    /// Client role: the server requests a permanent stop.
    #[error("the server asks to stop{}", after_colon(.0))]
    Halt(String),
    /// The peer closed the TCP connection without an exit message.
    #[error("the peer closed the connection{}", during(*stage))]
    Disconnected {
        /// Progress of an unfinished handshake, with the usual cause; `None` after the handshake.
        stage: Option<&'static str>,
    },
    /// No packet was received for this time (`ping-restart`).
    #[error("nothing received for {} s", .0.as_secs())]
    PingTimeout(Duration),
    /// The negotiation did not finish within the hand-window, or the server did not answer within `connect-timeout`.
    #[error("the handshake did not finish in time: {stage}")]
    HandshakeTimeout {
        /// Progress of the negotiation, with the usual cause.
        stage: &'static str,
    },
    /// The TLS handshake or channel failed.
    #[error("TLS: {0}")]
    Tls(TlsError),
    /// The peers share no parameters, or the peer requires an unsupported feature.
    #[error("negotiation failed: {0}")]
    Negotiation(String),
    /// Server role over UDP: the client connected again from the same address.
    #[error("the client connected again")]
    Replaced,
    /// Server role over UDP: evicted before establishment, because too many sessions were starting.
    #[error("too many sessions were starting")]
    Evicted,
    /// The peer violated the protocol. Over TCP any damaged control packet is a violation.
    #[error("protocol error: {0}")]
    Protocol(String),
}

impl Ended {
    /// Returns true if TLS, a check of the client or the hand-window failed, or if the peer violated the protocol. False
    /// for [`Ended::Negotiation`], which ends only sessions that were never established.
    pub fn is_failure(&self) -> bool {
        matches!(
            self,
            Self::Tls(_) | Self::Protocol(_) | Self::HandshakeTimeout { .. } | Self::Rejected(_)
        )
    }
}

/// Returns a peer's text after a colon; nothing for an empty text.
fn after_colon(text: &str) -> String {
    match text {
        "" => String::new(),
        text => format!(": {text}"),
    }
}

fn during(stage: Option<&str>) -> String {
    stage.map_or_else(String::new, |stage| {
        format!(" during the handshake: {stage}")
    })
}
