//! QUIC as a second link of an agent: one QUIC stream for each dial, beside the HTTP/2 connection.
//!
//! The server announces its UDP port and the session of the agent connection in its answer to the introduction
//! ([`PORT_HEADER`], [`SESSION_HEADER`]). The agent connects to this port in the background, and introduces itself
//! on its only stream with the same head as over TCP and the session. Afterwards this stream carries the words of
//! [`words`]. For each dial the server opens a stream with the text of the CONNECT request of HTTP/2
//! ([`dial`](super::dial)). The bytes of the connection follow the heads.

mod congestion;
pub mod connection_id;
pub mod endpoint;
pub mod halves;
pub mod health;
pub mod keys;
pub mod link;
mod socket;
pub mod streams;
pub mod words;

use culvert_stream::CloseReason;
use quinn::VarInt;

/// Name of the protocol in the TLS handshake.
pub const ALPN: &[u8] = b"culvert-quic/1";

/// Header of the server's answer to an introduction: the UDP port for QUIC, or [`SAME_PORT`].
pub const PORT_HEADER: &str = "culvert-quic";

/// Value of [`PORT_HEADER`] for the port that the agent uses for TCP.
pub const SAME_PORT: &str = "same";

/// Header with the session of an agent connection: in the server's answer over TCP, and in the agent's introduction
/// over QUIC.
pub const SESSION_HEADER: &str = "culvert-session";

/// Number of bytes that both ends send over a new link before its first use. A path that carries only small packets
/// fails here and not in a connection.
pub const TRIAL_BYTES: usize = 64 * 1024;

/// Bound for the buffered bytes of one connection: the window of its stream, the bytes that are read ahead, a chunk in
/// transit and a chunk being read.
pub const CONNECTION_BYTES: usize =
    endpoint::STREAM_WINDOW_BYTES as usize + streams::AHEAD_BYTES + 2 * super::FRAME_BYTES;

/// Bound for the other bytes of a link: bytes that the peer has not acknowledged, and words that wait for the peer.
pub const LINK_BYTES: usize =
    endpoint::SEND_WINDOW_BYTES as usize + streams::WAITING_WORDS * size_of::<words::Word>();

/// Error code of a stream or connection that ends without a reason.
const NO_REASON: VarInt = VarInt::from_u32(0);

/// Returns the error code that reports `reason` to the peer.
fn code(reason: CloseReason) -> VarInt {
    VarInt::from_u32(super::reset_code(reason).into())
}

/// Returns the close reason in an error code of the peer, or `lost` for a code that our programs never send on
/// purpose.
fn reason_of(code: VarInt, lost: CloseReason) -> CloseReason {
    let code = u32::try_from(code.into_inner());
    code.map_or(lost, |code| super::close_reason(code.into(), lost))
}
