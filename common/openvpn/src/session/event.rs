//! What a session tells its owner, and why it ended.

use std::fmt;
use std::time::Duration;

use crate::cipher::Cipher;
use crate::control::push::PushOptions;
use crate::peer_info::PeerInfo;
use crate::tls::{PeerIdentity, TlsError};

/// Something the owner of a session has to know. Events come from
/// [`Session::poll_event`](super::Session::poll_event) after every call that takes `now`.
#[derive(Debug)]
pub enum Event {
    /// Server role, once per session: the client's certificate is verified and it has sent its
    /// key-method message. Nothing goes on until the owner answers with
    /// [`Session::accept`](super::Session::accept) or [`Session::reject`](super::Session::reject);
    /// it has what is left of the hand-window for that.
    Authenticated(Box<Authenticated>),
    /// Data can flow. Client role: these are the server's options. Server role: the PUSH_REPLY is
    /// on its way.
    Established(Box<Established>),
    /// A renegotiation has ended, keys of this id are in use beside the old ones.
    Rekeyed {
        /// 1 to 7.
        key_id: u8,
    },
    /// A text of the peer for the log: INFO, AUTH_PENDING, a failed renegotiation that left the old
    /// keys in use. Nothing to be done.
    Notice(String),
    /// Nothing goes in or out any more. What is left in
    /// [`Session::poll_output`](super::Session::poll_output) tells the peer why; a session may be
    /// dropped at once, or polled until [`Session::is_finished`](super::Session::is_finished).
    Ended(Ended),
}

/// Who asks to be let in.
#[derive(Clone)]
pub struct Authenticated {
    /// From the verified certificate.
    pub identity: PeerIdentity,
    /// What the client says of itself.
    pub peer_info: PeerInfo,
    /// `auth-user-pass`; empty if the client sent none.
    pub username: String,
    /// Empty if the client sent none.
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

/// What both sides agreed on.
#[derive(Debug, Clone)]
pub struct Established {
    /// The peer, from its certificate. None only for a server without a common name.
    pub identity: Option<PeerIdentity>,
    /// The pushed options, one string each: what the server pushed (client role), or what was sent
    /// (server role).
    pub options: Vec<String>,
    /// Client role: the options as values.
    pub push: Option<PushOptions>,
    /// Of the data channel.
    pub cipher: Cipher,
    /// Whether keys come from the TLS exporter; otherwise from the TLS 1.0 PRF.
    pub exporter: bool,
    /// Id in the data packets of this session, if they carry one (P_DATA_V2).
    pub peer_id: Option<u32>,
    /// The largest inner packet that may be sent, and that is received.
    pub tun_mtu: u16,
    /// Whether the other side is this crate, too. A client is told so over UDP only, where it matters.
    pub ours: bool,
    /// TLS version and suite of the control channel, for the log.
    pub tls: String,
}

/// Why a session ended.
#[derive(Debug, Clone, PartialEq, Eq)]
#[non_exhaustive]
pub enum Ended {
    /// The owner closed it.
    Closed,
    /// Server role: the owner rejected the client, or it failed a check of ours; the text was sent.
    Rejected(String),
    /// Client role: the server refused us.
    AuthFailed {
        /// The server's text; may be empty.
        reason: String,
        /// AUTH_FAILED,TEMP: another attempt later may succeed.
        temporary: bool,
    },
    /// The peer said that it leaves (EXIT, or OCC's EXIT).
    PeerExit,
    /// Client role: the server asks to connect again.
    Restart {
        /// To the next server of the list rather than to this one.
        next_server: bool,
        /// The server's text.
        reason: String,
    },
    /// Client role: the server asks us to end for good.
    Halt(String),
    /// The peer closed the connection, by TCP alone.
    Disconnected {
        /// How far a handshake came that had not ended, and what that usually means.
        stage: Option<&'static str>,
    },
    /// Nothing was received for the time of `ping-restart`.
    PingTimeout(Duration),
    /// The negotiation did not end within the hand-window.
    HandshakeTimeout {
        /// How far it came, and what that usually means.
        stage: &'static str,
    },
    /// The TLS handshake or channel failed.
    Tls(TlsError),
    /// The peers have nothing in common, or the peer asks for what is not spoken here.
    Negotiation(String),
    /// Server role over UDP: the client came again from the same address.
    Replaced,
    /// Server role over UDP: displaced before it was established, as too many were beginning.
    Evicted,
    /// The peer broke the protocol. Over TCP any damaged control packet does.
    Protocol(String),
}

impl fmt::Display for Ended {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::Closed => f.write_str("closed"),
            Self::Rejected(reason) => write!(f, "client rejected: {reason}"),
            Self::AuthFailed {
                reason,
                temporary: false,
            } => write!(f, "the server refused us: {reason}"),
            Self::AuthFailed {
                reason,
                temporary: true,
            } => {
                write!(f, "the server refused us for now: {reason}")
            }
            Self::PeerExit => f.write_str("the peer left"),
            Self::Restart { reason, .. } => write!(f, "the server asks to connect again: {reason}"),
            Self::Halt(reason) => write!(f, "the server asks to stop: {reason}"),
            Self::Disconnected { stage: None } => f.write_str("the peer closed the connection"),
            Self::Disconnected { stage: Some(stage) } => {
                write!(
                    f,
                    "the peer closed the connection during the handshake: {stage}"
                )
            }
            Self::PingTimeout(after) => write!(f, "nothing received for {} s", after.as_secs()),
            Self::HandshakeTimeout { stage } => {
                write!(f, "the handshake did not end in time: {stage}")
            }
            Self::Tls(error) => write!(f, "TLS: {error}"),
            Self::Negotiation(text) => write!(f, "no agreement: {text}"),
            Self::Replaced => f.write_str("the client came again"),
            Self::Evicted => f.write_str("too many sessions were beginning"),
            Self::Protocol(text) => write!(f, "protocol error: {text}"),
        }
    }
}
