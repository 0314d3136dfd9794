//! The native transport between our own server and agent: one HTTP/2 stream per tunnelled
//! connection, with the roles turned round.
//!
//! The agent dials and offers [`ALPN`] before `h2`; a server of ours prefers it, a stock one does
//! not know it, and neither needs a flag. After the handshake the agent introduces itself in one
//! HTTP/1.1 upgrade request ([`hello`]); from then on the *server* is the HTTP/2 client:
//!
//! - `CONNECT host:port` opens a connection. The agent answers 200 once its own dial succeeded, and
//!   502 or 504 with [`ERROR_HEADER`] if it failed. DATA frames are the connection's bytes,
//!   END_STREAM is a half close, RST_STREAM with one of [`reset_code`]'s values is an abort with its
//!   reason.
//! - `GET` [`CONTROL_PATH`] is opened once. The agent's words arrive in the response's body, one on
//!   each line: [`DRAIN`].
//!
//! Every connection has flow control of its own, so one that is not read costs its window and
//! stops nobody. The window of the whole HTTP/2 connection is out of the way
//! ([`CONNECTION_WINDOW_BYTES`]): if streams that stall could use it up, the others would wait.

pub mod halves;
mod heard;
pub mod hello;
pub mod link;
pub mod window;

use h2::Reason;
use http::HeaderValue;
use percent_encoding::{AsciiSet, CONTROLS, percent_decode, utf8_percent_encode};

use culvert_stream::CloseReason;

/// The protocol's name in the TLS handshake.
pub const ALPN: &[u8] = b"culvert/1";

/// The stream by which the agent tells the server what concerns all connections.
pub const CONTROL_PATH: &str = "/control";

/// On the control stream: the agent prefers to get no new dials.
pub const DRAIN: &str = "drain";

/// The agent's text for a dial that failed, percent-encoded.
pub const ERROR_HEADER: &str = "culvert-error";

/// The network to dial by, where it is not `tcp`.
pub const NETWORK_HEADER: &str = "culvert-network";

/// The address to dial, percent-encoded, where it is no valid authority.
pub const ADDRESS_HEADER: &str = "culvert-address";

/// The flow-control window of the whole connection: the largest that HTTP/2 knows (RFC 9113,
/// 6.9.1). What a peer may send ahead is bounded by the streams' windows.
pub const CONNECTION_WINDOW_BYTES: u32 = (1 << 31) - 1;

/// The largest payload of a frame that either end takes. Larger ones save framing, smaller ones
/// let small streams in sooner; beside those the streams' windows are smaller anyway. With its
/// header of 9 bytes a frame fills TLS records of 16 KiB exactly.
pub const FRAME_BYTES: usize = 256 * 1024 - 9;

/// Bytes of one connection that may wait in HTTP/2's send queue.
pub const SEND_BYTES: usize = 512 * 1024;

/// Bound for one connection, in bytes: the window of a crowded peer, the data that HTTP/2 has accepted
/// to send, one frame being forwarded and one frame being read.
pub const CONNECTION_BYTES: usize = window::CROWDED_BYTES as usize + SEND_BYTES + 2 * FRAME_BYTES;

/// Private error codes start here; HTTP/2 gives unknown ones no meaning (RFC 9113, 7).
const CODES: u32 = 0xc0de_0000;

/// The error code that tells the peer why a connection was aborted.
pub fn reset_code(reason: CloseReason) -> Reason {
    let index = CloseReason::ALL.iter().position(|known| *known == reason);
    Reason::from(CODES + index.and_then(|i| u32::try_from(i).ok()).unwrap_or(0))
}

/// What an error code of the peer says; `lost` for those that no peer of ours sends on purpose.
pub fn close_reason(code: Reason, lost: CloseReason) -> CloseReason {
    let index = u32::from(code).checked_sub(CODES);
    let known = index.and_then(|index| CloseReason::ALL.get(index as usize));
    known.copied().unwrap_or(lost)
}

/// What a header value can not hold as it is.
const UNSAFE: &AsciiSet = &CONTROLS.add(b'%');

/// Any text as a header value.
pub fn encode(text: &str) -> HeaderValue {
    let text = utf8_percent_encode(text, UNSAFE).to_string();
    // Nothing is left that could be refused.
    HeaderValue::try_from(text).unwrap_or(HeaderValue::from_static(""))
}

/// The text of a header value that [`encode`] made.
pub fn decode(value: &HeaderValue) -> String {
    percent_decode(value.as_bytes()).decode_utf8_lossy().into()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn every_text_survives_as_a_header_value() {
        for text in ["", "dial tcp 10.0.0.1:1: no", "100 %\r\n\0", "grüße %25"] {
            assert_eq!(decode(&encode(text)), text);
        }
    }

    #[test]
    fn every_reason_survives_the_wire() {
        for reason in CloseReason::ALL {
            let code = reset_code(reason);
            assert_eq!(close_reason(code, CloseReason::AgentLost), reason);
        }
        let foreign = [Reason::CANCEL, Reason::from(u32::MAX)];
        for code in foreign {
            assert_eq!(
                close_reason(code, CloseReason::AgentLost),
                CloseReason::AgentLost
            );
        }
    }
}
