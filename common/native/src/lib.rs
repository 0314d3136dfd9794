//! The native transport between our server and our agent: one HTTP/2 stream per tunnelled connection, with
//! the HTTP/2 roles reversed.
//!
//! The agent dials and offers [`ALPN`] ahead of `h2` in the TLS handshake. Our server prefers [`ALPN`]; a
//! stock server does not know the name. Neither program needs a flag. After the handshake the agent
//! introduces itself with one HTTP/1.1 upgrade request ([`hello`]). From then on the *server* is the HTTP/2
//! client:
//!
//! - `CONNECT host:port` opens a connection. The agent answers 200 once its own dial has succeeded, or 502 or
//!   504 with [`ERROR_HEADER`] if the dial failed. DATA frames carry the bytes of the connection. END_STREAM
//!   is a half close. RST_STREAM with a code of [`reset_code`] aborts the connection; the code is the close
//!   reason.
//! - `GET` [`CONTROL_PATH`] is opened once, for the messages of [`control`] in both directions. Agents of older
//!   versions send messages and ignore the messages of the server.
//!
//! Every connection has separate flow control, so an unread connection uses up only its own window and blocks
//! no other connection. The window of the whole HTTP/2 connection is as large as HTTP/2 permits
//! ([`CONNECTION_WINDOW_BYTES`]): if stalled streams could use up the shared window, every stream would wait.

mod buffers;
pub mod control;
mod counting_reader;
pub mod dial;
pub mod halves;
pub mod hello;
pub mod link;
pub mod quic;
#[cfg(test)]
mod random_loads;
pub mod requests;
mod resets;
pub mod resume;
pub mod window;

use h2::Reason;
use http::HeaderValue;
use percent_encoding::{AsciiSet, CONTROLS, percent_decode, utf8_percent_encode};

use culvert_stream::CloseReason;

/// Name of the protocol in the TLS handshake.
pub const ALPN: &[u8] = b"culvert/1";

/// Path of the control stream: messages about all connections of an agent connection.
pub const CONTROL_PATH: &str = "/control";

/// Header of the server's answer to an introduction: the server pushes changes of the number of servers.
pub const COUNT_PUSHED_HEADER: &str = "culvert-count-pushed";

/// Response header with the agent's error text for a failed dial, percent-encoded.
pub const ERROR_HEADER: &str = "culvert-error";

/// Request header with the network to dial. Absent for `tcp`.
pub const NETWORK_HEADER: &str = "culvert-network";

/// Request header with the address to dial, percent-encoded. Sent only if the address is not a valid
/// authority.
pub const ADDRESS_HEADER: &str = "culvert-address";

/// Flow-control window of the whole connection, in bytes: the largest that HTTP/2 permits (RFC 9113, 6.9.1).
/// The windows of the streams limit how far a peer may send ahead.
pub const CONNECTION_WINDOW_BYTES: u32 = (1 << 31) - 1;

/// Largest frame payload that either end accepts, in bytes. Larger frames save framing work. Smaller frames
/// let small streams send sooner, but the stream windows of short paths are smaller anyway while small streams are
/// active, and frames are smaller on long paths. With the 9-byte header, a full frame fills TLS records of 16 KiB
/// exactly.
pub const FRAME_BYTES: usize = 256 * 1024 - 9;

/// Largest frame payload on a long path, in bytes: 3 ms at 100 Mbit/s. A small message waits for a frame of each bulk
/// stream. With the 9-byte header, a full frame fills two TLS records exactly.
const LONG_PATH_FRAME_BYTES: usize = 32 * 1024 - 9;

/// Largest number of bytes of one connection in HTTP/2's send queue.
pub const SEND_BYTES: usize = 512 * 1024;

/// Bound for the buffered bytes of one connection: the window [`CROWDED_BYTES`](window::CROWDED_BYTES),
/// HTTP/2's send queue, a frame in transit and a frame being read.
pub const CONNECTION_BYTES: usize = window::CROWDED_BYTES as usize + SEND_BYTES + 2 * FRAME_BYTES;

/// First private error code. HTTP/2 attaches no meaning to unknown codes (RFC 9113, 7).
const CODES: u32 = 0xc0de_0000;

/// Returns the error code that reports `reason` to the peer.
pub fn reset_code(reason: CloseReason) -> Reason {
    Reason::from(CODES + u32::from(reason.code()))
}

/// Returns the close reason in an error code of the peer, or `lost` for a code that our programs never send
/// on purpose.
pub fn close_reason(code: Reason, lost: CloseReason) -> CloseReason {
    let code = u32::from(code).checked_sub(CODES);
    let code = code.and_then(|code| u8::try_from(code).ok());
    code.and_then(CloseReason::from_code).unwrap_or(lost)
}

/// ASCII characters escaped by [`encode`]: control characters and `%`.
const UNSAFE: &AsciiSet = &CONTROLS.add(b'%');

/// Encodes any text as a header value.
pub fn encode(text: &str) -> HeaderValue {
    let text = utf8_percent_encode(text, UNSAFE).to_string();
    // Cannot fail: all characters forbidden in a header value are escaped.
    HeaderValue::try_from(text).unwrap_or(HeaderValue::from_static(""))
}

/// Decodes a header value made by [`encode`].
pub fn decode(value: &HeaderValue) -> String {
    percent_decode(value.as_bytes()).decode_utf8_lossy().into()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn any_text_round_trips_through_a_header_value() {
        for text in ["", "dial tcp 10.0.0.1:1: no", "100 %\r\n\0", "grüße %25"] {
            assert_eq!(decode(&encode(text)), text);
        }
    }

    #[test]
    fn every_close_reason_round_trips_through_its_error_code() {
        for reason in CloseReason::ALL {
            let code = reset_code(reason);
            assert_eq!(close_reason(code, CloseReason::AgentLost), reason);
        }
        let recorded = CODES + 13;
        assert_eq!(reset_code(CloseReason::Switched), Reason::from(recorded));
        let foreign = [
            Reason::from(recorded + 1),
            Reason::CANCEL,
            Reason::from(u32::MAX),
        ];
        for code in foreign {
            assert_eq!(
                close_reason(code, CloseReason::AgentLost),
                CloseReason::AgentLost
            );
        }
    }
}
