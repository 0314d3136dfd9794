//! The `:authority` rewriter for HTTP/2 requests, in front of the HTTP/2 server.
//!
//! kube-apiserver dials its proxy over a Unix socket by path, and grpc-go then sends the percent-encoded path
//! as the request's authority (`:authority: %2Frun%2Fproxy.socket`). The `http` crate accepts no `%` in a
//! host, so `h2` resets the stream before any handler runs. The value has no meaning to a proxy on a Unix
//! socket. Therefore the rewriter replaces every `:authority` value with [`PLACEHOLDER`], a value that
//! parses.
//!
//! This module walks the frames: [`AuthorityRewriter`] does no I/O and receives the bytes from client to
//! server; [`AuthorityStream`] connects the rewriter to a socket. The header compression is in `hpack`, which
//! needs the lengths of strings and integers but no decompression.
//!
//! # Why the compression state stays in step
//!
//! The peer's encoder and the server's decoder each keep a table of header fields, and later requests refer
//! to an entry by its distance from the newest entry. The rewriter neither adds nor removes an insertion, so
//! an index means the same field on both sides as long as the decoder still has the entry. The decoder evicts
//! by size, and a replaced value is one byte long. So the entry is never longer than the encoder assumes, and
//! never evicted earlier. An empty value is the only exception, because it grows by a byte. If this byte ever
//! evicts the last entry of a completely full table, the server's decoder finds nothing at that index and
//! ends the connection; the decoder cannot confuse two fields.
//!
//! # Buffered bytes
//!
//! The rewriter buffers at most one header block ([`MAX_HEADER_BLOCK`] bytes with its frame heads), or the
//! first eight bytes of a frame head. The payload of any other frame, nearly all bytes, is only counted,
//! never kept. Bytes that the rewriter does not understand pass unchanged, so that the peer gets the HTTP/2
//! server's own error.

mod hpack;
mod stream;
#[cfg(test)]
mod tests;

use std::borrow::Cow;

use bytes::{BufMut, BytesMut};

use self::hpack::AuthorityNames;
pub use self::stream::AuthorityStream;

/// Replacement for every `:authority` value. One byte long; the module documentation gives the reason.
pub const PLACEHOLDER: u8 = b'x';

/// Largest header block that is collected, in bytes with its frame heads, so that a flood of empty
/// CONTINUATION frames is bounded too. Our choice; grpc-go's blocks are below 1 KiB.
pub const MAX_HEADER_BLOCK: usize = 64 * 1024;

/// The client's connection preface (RFC 9113, section 3.4).
const PREFACE: &[u8] = b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n";
/// Length of a frame head, in bytes (RFC 9113, section 4.1).
const FRAME_HEAD: usize = 9;
/// Largest frame payload that every HTTP/2 receiver accepts, in bytes (RFC 9113, section 4.2).
const MAX_FRAME: usize = 16_384;

const KIND_HEADERS: u8 = 0x1;
const KIND_CONTINUATION: u8 = 0x9;
const FLAG_END_HEADERS: u8 = 0x04;
const FLAG_PADDED: u8 = 0x08;
const FLAG_PRIORITY: u8 = 0x20;
/// Length of the priority fields at the start of a HEADERS payload, in bytes (RFC 9113, section 6.2).
const PRIORITY_FIELDS: usize = 5;

/// Reason why a connection cannot continue.
#[derive(Debug, Clone, Copy, PartialEq, Eq, thiserror::Error)]
pub enum RewriteError {
    /// A header block is larger than [`MAX_HEADER_BLOCK`].
    #[error("HTTP/2 header block larger than {MAX_HEADER_BLOCK} bytes")]
    HeaderBlockTooLarge,
}

/// Position of the next byte in the byte stream.
#[derive(Debug)]
enum Phase {
    /// In the connection preface; contains the bytes of the preface still to come.
    Preface(&'static [u8]),
    /// Between frames, after `skip` more bytes of an irrelevant payload.
    Frames { skip: usize },
    /// All further bytes pass unchanged.
    Transparent,
}

/// Rewriter of the client-to-server bytes of one connection.
///
/// [`pass`](Self::pass) returns how many bytes may go on in place; pass the other bytes to
/// [`rewrite`](Self::rewrite). Calling only `rewrite` is also correct, but copies everything.
#[derive(Debug)]
pub struct AuthorityRewriter {
    phase: Phase,
    names: AuthorityNames,
    /// An incomplete frame head or header block, as received. Allocates no memory otherwise.
    held: BytesMut,
    /// Start of the frame being collected, as an index into `held`.
    frame_at: usize,
    /// Length of `held`, in bytes, at which the next decision is possible.
    wanted: usize,
}

impl Default for AuthorityRewriter {
    fn default() -> Self {
        Self {
            phase: Phase::Preface(PREFACE),
            names: AuthorityNames::default(),
            held: BytesMut::new(),
            frame_at: 0,
            wanted: FRAME_HEAD,
        }
    }
}

impl AuthorityRewriter {
    /// Consumes the leading bytes of `input` that go on unchanged, and returns their number. The caller must
    /// pass the bytes after them to [`rewrite`](Self::rewrite).
    pub fn pass(&mut self, input: &[u8]) -> usize {
        if !self.held.is_empty() {
            return 0;
        }
        let mut rest = input;
        while !rest.is_empty() {
            match &mut self.phase {
                Phase::Transparent => return input.len(),
                Phase::Preface(to_come) => {
                    let (expected, later) = to_come.split_at(rest.len().min(to_come.len()));
                    let Some(behind) = rest.strip_prefix(expected) else {
                        self.phase = Phase::Transparent;
                        continue;
                    };
                    rest = behind;
                    self.phase = match later {
                        [] => Phase::Frames { skip: 0 },
                        _ => Phase::Preface(later),
                    };
                }
                Phase::Frames { skip: 0 } => match FrameHead::parse(rest) {
                    Some(head) if head.kind != KIND_HEADERS => {
                        self.phase = Phase::Frames {
                            skip: FRAME_HEAD + head.len,
                        };
                    }
                    _ => break,
                },
                Phase::Frames { skip } => {
                    let (payload, behind) = rest.split_at(rest.len().min(*skip));
                    *skip -= payload.len();
                    rest = behind;
                }
            }
        }
        input.len() - rest.len()
    }

    /// Consumes all of `input`, and appends to `output` the bytes that may go on now.
    ///
    /// # Errors
    /// Returns a [`RewriteError`], also on every further call: the connection must be closed.
    pub fn rewrite(&mut self, mut input: &[u8], output: &mut BytesMut) -> Result<(), RewriteError> {
        while !input.is_empty() {
            let (passed, rest) = input.split_at(self.pass(input));
            output.extend_from_slice(passed);
            if rest.is_empty() {
                break;
            }
            let missing = self.wanted.saturating_sub(self.held.len());
            let (taken, rest) = rest.split_at(missing.min(rest.len()));
            self.held.extend_from_slice(taken);
            self.step(output)?;
            input = rest;
        }
        Ok(())
    }

    /// Appends the buffered bytes to `output`, as received. Call when the client sends no more.
    pub fn finish(&mut self, output: &mut BytesMut) {
        self.give_up(output);
    }

    /// Processes `held` as far as possible.
    fn step(&mut self, output: &mut BytesMut) -> Result<(), RewriteError> {
        loop {
            let Some(head) = self.held.get(self.frame_at..).and_then(FrameHead::parse) else {
                self.wanted = self.frame_at + FRAME_HEAD;
                return Ok(());
            };
            if self.frame_at == 0 && head.kind != KIND_HEADERS {
                output.extend_from_slice(&self.take_held());
                self.phase = Phase::Frames { skip: head.len };
                return Ok(());
            }
            if self.frame_at > 0 && !self.continues_block(head) {
                self.give_up(output);
                return Ok(());
            }
            let end = self.frame_at + FRAME_HEAD + head.len;
            if end > MAX_HEADER_BLOCK {
                return Err(RewriteError::HeaderBlockTooLarge);
            }
            if self.held.len() < end {
                self.wanted = end;
                return Ok(());
            }
            if head.flags & FLAG_END_HEADERS != 0 {
                self.finish_block(output);
                return Ok(());
            }
            self.frame_at = end;
        }
    }

    /// Returns true if a frame continues the header block that is being collected.
    fn continues_block(&self, head: FrameHead) -> bool {
        head.kind == KIND_CONTINUATION
            && FrameHead::parse(&self.held).is_some_and(|first| first.stream == head.stream)
    }

    /// Appends the complete header block in `held` to `output`, rewritten if the block has an authority.
    fn finish_block(&mut self, output: &mut BytesMut) {
        let held = self.take_held();
        if self.replace(&held, output).is_none() {
            // The server ends the connection over this block. Until then, rewriting would be guesswork,
            // because the name table no longer matches the peer's table.
            output.extend_from_slice(&held);
            self.phase = Phase::Transparent;
        }
    }

    /// Writes the header block in `frames` to `output`. Returns `None` and writes nothing if the block is
    /// malformed.
    fn replace(&mut self, frames: &[u8], output: &mut BytesMut) -> Option<()> {
        let block = HeaderBlock::parse(frames)?;
        let mut fields = BytesMut::new();
        if self.names.rewrite(&block.fields, &mut fields)? {
            block.write(&fields, output);
        } else {
            output.extend_from_slice(frames);
        }
        Some(())
    }

    fn give_up(&mut self, output: &mut BytesMut) {
        output.extend_from_slice(&self.take_held());
        self.phase = Phase::Transparent;
    }

    fn take_held(&mut self) -> BytesMut {
        self.frame_at = 0;
        self.wanted = FRAME_HEAD;
        std::mem::take(&mut self.held)
    }
}

/// Head of a frame (RFC 9113, section 4.1).
#[derive(Debug, Clone, Copy)]
struct FrameHead {
    /// Length of the payload, in bytes, below 2^24.
    len: usize,
    kind: u8,
    flags: u8,
    stream: u32,
}

impl FrameHead {
    /// Returns the head at the start of `bytes`, or `None` if the head is incomplete.
    fn parse(bytes: &[u8]) -> Option<Self> {
        let [l0, l1, l2, kind, flags, stream @ ..] = *bytes.first_chunk::<FRAME_HEAD>()?;
        Some(Self {
            len: usize::from(l0) << 16 | usize::from(l1) << 8 | usize::from(l2),
            kind,
            flags,
            // Receivers ignore the topmost bit, which is reserved.
            stream: u32::from_be_bytes(stream) & !(1 << 31),
        })
    }

    fn write(self, output: &mut BytesMut) {
        output.put_uint(self.len as u64, 3);
        output.put_u8(self.kind);
        output.put_u8(self.flags);
        output.put_u32(self.stream);
    }
}

/// Parsed HEADERS frame with its CONTINUATION frames.
struct HeaderBlock<'a> {
    head: FrameHead,
    /// The priority fields as received, or empty.
    priority: &'a [u8],
    /// Compressed header fields of all frames.
    fields: Cow<'a, [u8]>,
}

impl<'a> HeaderBlock<'a> {
    /// Returns `None` if the padding or the priority fields do not fit into the HEADERS frame.
    fn parse(frames: &'a [u8]) -> Option<Self> {
        let head = FrameHead::parse(frames)?;
        let (mut payload, mut rest) = frames.get(FRAME_HEAD..)?.split_at_checked(head.len)?;
        let mut padding = 0;
        if head.flags & FLAG_PADDED != 0 {
            let (&length, behind) = payload.split_first()?;
            padding = usize::from(length);
            payload = behind;
        }
        let fields_at = if head.flags & FLAG_PRIORITY != 0 {
            PRIORITY_FIELDS
        } else {
            0
        };
        let (priority, payload) = payload.split_at_checked(fields_at)?;
        let (first, _) = payload.split_at_checked(payload.len().checked_sub(padding)?)?;

        let mut fields = Cow::Borrowed(first);
        while let Some(next) = FrameHead::parse(rest) {
            let (payload, behind) = rest.get(FRAME_HEAD..)?.split_at_checked(next.len)?;
            fields.to_mut().extend_from_slice(payload);
            rest = behind;
        }
        Some(Self {
            head,
            priority,
            fields,
        })
    }

    /// Appends the block with `fields` instead of its own fields, without padding, in frames small enough for
    /// every server.
    fn write(&self, fields: &[u8], output: &mut BytesMut) {
        let room = MAX_FRAME - self.priority.len();
        let (first, mut rest) = fields.split_at(fields.len().min(room));
        let end = |rest: &[u8]| if rest.is_empty() { FLAG_END_HEADERS } else { 0 };

        let flags = self.head.flags & !(FLAG_PADDED | FLAG_END_HEADERS) | end(rest);
        FrameHead {
            len: self.priority.len() + first.len(),
            flags,
            ..self.head
        }
        .write(output);
        output.extend_from_slice(self.priority);
        output.extend_from_slice(first);
        while !rest.is_empty() {
            let (part, behind) = rest.split_at(rest.len().min(MAX_FRAME));
            rest = behind;
            FrameHead {
                len: part.len(),
                kind: KIND_CONTINUATION,
                flags: end(rest),
                ..self.head
            }
            .write(output);
            output.extend_from_slice(part);
        }
    }
}
