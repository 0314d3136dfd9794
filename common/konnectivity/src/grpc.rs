//! The part of gRPC that packet streams need: messages framed in the bodies of HTTP/2 calls, and the heads
//! and trailers around the bodies.
//!
//! A general gRPC library copies each received frame into its own buffer, and each payload into another
//! buffer. Here a received payload stays a slice of its frame, and a sent payload is written from the memory
//! that it was read into. Statuses and metadata are types of tonic, so that codes, texts and escapes match
//! every other gRPC program.
//!
//! [`Reader`] turns a body into messages, and [`PacketBody`] turns messages into a body. [`answer`] and
//! [`call`] handle the heads on the server and on the client. [`serve`] answers a call over `h2`. `pacer` limits
//! what a client sends ahead. `packet` encodes and decodes one packet.

mod body;
mod head;
mod http2;
mod pacer;
mod packet;
mod reader;
mod room;
#[cfg(test)]
mod tests;

pub use self::body::{PacketBody, Piece};
pub use self::head::{CallError, Service, answer, call, serve};
pub use self::http2::Received;
pub use self::pacer::SendLimits;
pub use self::packet::{decode, encode, encode_data_head};
pub use self::reader::Reader;

/// Length of the prefix of a message, in bytes: a compression flag and the length of the message.
const PREFIX_BYTES: usize = 5;
