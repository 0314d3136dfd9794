//! gRPC, as far as the three packet streams need it: messages framed on the bodies of HTTP/2
//! calls, and the heads and trailers around them.
//!
//! A general gRPC library copies each received frame into a buffer of its own and each payload
//! into another one. Here a received payload stays a slice of the frame it came in, and one that
//! is sent goes out of the memory it was read into. Statuses and metadata are tonic's, so that
//! codes, texts and escapes are those of every other gRPC program.
//!
//! [`Reader`] turns a body into messages, [`PacketBody`] messages into a body, [`answer`] and
//! [`call`] do what surrounds them on either side. `packet` has the bytes of one packet.

mod body;
mod head;
mod packet;
mod reader;
#[cfg(test)]
mod tests;

pub use self::body::{PacketBody, Piece};
pub use self::head::{CallError, Service, answer, call};
pub use self::packet::{decode, encode, encode_data_head};
pub use self::reader::Reader;

/// Bytes before a message: a flag for compression and the length.
const PREFIX_BYTES: usize = 5;
