//! Links that survive the loss of their transport: the bytes between TLS and HTTP/2 continue on another transport.
//!
//! The agent offers resumption in its introduction, and the server answers with a [`Ticket`]. From then on, both ends
//! send frames:
//!
//! ```text
//! u32 length | u64 number of bytes received so far | bytes
//! ```
//!
//! A frame with the length 0 only acknowledges. A frame with the length `u32::MAX` ends the session: the peer does not
//! resume it. If a program stops, this frame overtakes the bytes that were not sent. Each end keeps the bytes that the
//! peer has not acknowledged, at most [`REPLAY_BYTES`]. If the transport breaks, HTTP/2 waits. The agent opens another
//! transport and sends a [`ResumeRequest`], and both ends send again what the other end has not received. If no transport
//! is attached within the grace time, the session ends.
//!
//! [`Core`] is the protocol without I/O, and [`ResumableIo`] the stream that HTTP/2 uses.

mod core;
mod farewell;
mod hello;
mod io;
mod process;
mod replay;
mod session;
mod silence;
mod stream;

use std::time::Duration;

use culvert_stream::CLOSE_STALL;

pub use self::core::{Core, FrameError, SLICES};
pub use self::hello::{
    Binding, EXPORTER_LABEL, Offer, ResumeAnswer, ResumeRequest, Ticket, add_offer, add_request,
    add_ticket, answer_head, misdirected, offer, over, resume, ticket,
};
pub use self::io::ResumableIo;
pub use self::process::Process;
pub use self::session::{AWAY_PATIENCE, Attached, Base, Positions, Session, State};
pub use self::stream::MaybeResumable;

/// Largest number of bytes that an end keeps for the peer until the peer has acknowledged them. A link carries at most
/// this much in a round trip: 160 MiB/s at 100 ms.
pub const REPLAY_BYTES: usize = 16 * 1024 * 1024;

/// Received bytes that an end acknowledges at once.
pub const ACK_BYTES: u64 = 256 * 1024;

/// Returns the bound of the buffers of one link, in bytes: the buffers of the bytes kept for the peer, which take at most
/// twice the size of these bytes, and the bytes read ahead while the kept bytes are at their limit.
pub fn buffer_bytes(grace: Duration) -> usize {
    match grace.is_zero() {
        true => 0,
        false => 3 * REPLAY_BYTES,
    }
}

/// Returns a warning if connections that close do not wait for the whole grace time.
pub fn grace_warning(grace: Duration) -> Option<String> {
    (grace > CLOSE_STALL).then(|| {
        format!(
            "--resume-grace is longer than {CLOSE_STALL:?}: after one side has closed a connection, its last bytes wait \
             at most {CLOSE_STALL:?} for a broken link"
        )
    })
}

/// Longest time until received bytes are acknowledged.
const ACK_DELAY: Duration = Duration::from_secs(1);
