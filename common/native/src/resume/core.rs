//! The frames of a resumable link, without I/O: bytes in, bytes out.

use std::io::IoSlice;

use bytes::Bytes;

use super::replay::Replay;
use super::{ACK_BYTES, REPLAY_BYTES};

/// Bytes of the head of a frame.
const HEAD_BYTES: usize = 12;

/// Largest number of bytes in a frame: one HTTP/2 frame of the native transport.
const FRAME_BYTES: usize = 256 * 1024;

/// Length of a frame that ends the session.
const END: u32 = u32::MAX;

/// Largest number of slices of an output: a head, and a frame of bulk.
pub const SLICES: usize = 8;

/// Violation of the protocol by the peer. The session ends.
#[derive(Clone, Copy, Debug, PartialEq, Eq, thiserror::Error)]
pub enum FrameError {
    /// The length of a frame exceeds the limit.
    #[error("a frame of {0} bytes, which is over the limit")]
    TooLong(u32),
    /// The peer acknowledged bytes that were never sent, or withdrew an acknowledgement.
    #[error("the peer reports {reported} received bytes; expected {least} to {most}")]
    Acknowledgement {
        /// Number reported by the peer.
        reported: u64,
        /// Number reported before.
        least: u64,
        /// Number of bytes sent.
        most: u64,
    },
    /// The peer continues behind bytes that this end has not received.
    #[error("the peer continues at byte {from}, and byte {received} is the next")]
    Gap {
        /// Offset of the first byte that the peer sends.
        from: u64,
        /// Number of received bytes.
        received: u64,
    },
}

/// Both directions of one end of a resumable link.
#[derive(Debug)]
pub struct Core {
    outgoing: Outgoing,
    incoming: Incoming,
}

#[derive(Debug)]
struct Outgoing {
    replay: Replay,
    /// Offset of the next byte to send on the current transport.
    sent: u64,
    /// Largest value of `sent` on any transport.
    most_sent: u64,
    /// Largest number that the peer has reported.
    reported: u64,
    /// Head of the current frame, and the number of its bytes that were sent.
    head: ([u8; HEAD_BYTES], usize),
    /// Bytes of the current frame that were not sent.
    left: usize,
    /// True if the peer must get an acknowledgement although nothing else is to be sent.
    acknowledge: bool,
    end: End,
}

/// Progress of the frame that ends the session.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum End {
    No,
    /// The end follows all bytes.
    Requested,
    /// The end follows the current frame.
    Urgent,
    Begun,
}

#[derive(Debug, Default)]
struct Incoming {
    head: [u8; HEAD_BYTES],
    /// Received bytes of the head of the next frame.
    head_bytes: usize,
    /// Bytes of the current frame that were not received.
    left: usize,
    /// Bytes to come that an earlier transport has already delivered.
    repeated: u64,
    received: u64,
    /// Value of `received` in the last frame to the peer.
    acknowledged: u64,
    is_ended: bool,
}

impl Default for Core {
    fn default() -> Self {
        Self::new(REPLAY_BYTES)
    }
}

impl Core {
    /// Creates one end of a link, with a transport, that keeps at most `replay` bytes for the peer.
    pub fn new(replay: usize) -> Self {
        Self {
            outgoing: Outgoing {
                replay: Replay::new(replay),
                sent: 0,
                most_sent: 0,
                reported: 0,
                head: ([0; HEAD_BYTES], HEAD_BYTES),
                left: 0,
                acknowledge: false,
                end: End::No,
            },
            incoming: Incoming::default(),
        }
    }

    /// Returns the number of bytes that [`write`](Self::write) accepts.
    pub fn room(&self) -> usize {
        self.outgoing.replay.room().min(FRAME_BYTES)
    }

    /// Returns the number of bytes kept for the peer.
    pub fn kept(&self) -> u64 {
        self.outgoing.replay.end() - self.outgoing.replay.start()
    }

    /// Returns true if bytes were sent that the peer has not acknowledged.
    pub fn is_unacknowledged(&self) -> bool {
        self.outgoing.most_sent > self.outgoing.replay.start()
    }

    /// Returns true if the transport has not accepted all bytes that an earlier transport carried.
    pub fn is_repeating(&self) -> bool {
        self.outgoing.sent < self.outgoing.most_sent
    }

    /// Copies bytes for the peer, and returns their number.
    pub fn write(&mut self, slices: &[IoSlice<'_>]) -> usize {
        self.write_from(slices, |_| None)
    }

    /// Adds bytes for the peer, and returns their number. `buffer` returns the buffer of a slice, which is then kept instead
    /// of a copy.
    pub fn write_from(
        &mut self,
        slices: &[IoSlice<'_>],
        buffer: impl Fn(&[u8]) -> Option<Bytes>,
    ) -> usize {
        self.outgoing.replay.push(slices, FRAME_BYTES, buffer)
    }

    /// Stores the next bytes for the transport in `slices`, and returns the number of slices; 0 if there is nothing to
    /// send. Call [`sent`](Self::sent) afterwards.
    pub fn output<'a>(&'a mut self, slices: &mut [IoSlice<'a>; SLICES]) -> usize {
        let Self { outgoing, incoming } = self;
        if !outgoing.is_in_frame() {
            outgoing.begin(incoming);
        }
        let outgoing: &'a Outgoing = outgoing;
        let (head, head_sent) = &outgoing.head;
        let head = head.get(*head_sent..).unwrap_or_default();
        let of_head = usize::from(!head.is_empty());
        let (first, rest) = slices.split_at_mut(of_head);
        for slice in first {
            *slice = IoSlice::new(head);
        }
        let of_bytes = match outgoing.left {
            0 => 0,
            left => outgoing.replay.slices(outgoing.sent, left, rest),
        };
        of_head + of_bytes
    }

    /// Records that the transport accepted `count` bytes of the last [`output`](Self::output).
    pub fn sent(&mut self, count: usize) {
        let outgoing = &mut self.outgoing;
        let of_head = count.min(HEAD_BYTES - outgoing.head.1);
        outgoing.head.1 += of_head;
        let bytes = (count - of_head).min(outgoing.left);
        outgoing.left -= bytes;
        outgoing.sent += bytes as u64;
        outgoing.most_sent = outgoing.most_sent.max(outgoing.sent);
        outgoing.release();
    }

    /// Processes bytes from the transport. Moves the bytes of the stream to the start of `bytes`, and returns their
    /// number.
    ///
    /// # Errors
    /// Fails if the peer violates the protocol.
    pub fn input(&mut self, bytes: &mut [u8]) -> Result<usize, FrameError> {
        let Self { outgoing, incoming } = self;
        let (mut from, mut kept) = (0, 0);
        while from < bytes.len() && !incoming.is_ended {
            if incoming.left == 0 {
                let head = bytes.get(from..).unwrap_or_default();
                from += incoming.head(head, outgoing)?;
                continue;
            }
            let count = incoming.left.min(bytes.len() - from);
            let repeated = usize::try_from(incoming.repeated).map_or(count, |all| all.min(count));
            let new = count - repeated;
            if new > 0 && from + repeated != kept {
                bytes.copy_within(from + repeated..from + count, kept);
            }
            from += count;
            kept += new;
            incoming.left -= count;
            incoming.repeated -= repeated as u64;
            incoming.received += new as u64;
        }
        if incoming.received - incoming.acknowledged >= ACK_BYTES {
            outgoing.acknowledge = true;
        }
        Ok(kept)
    }

    /// Returns the number of received bytes of the stream.
    pub fn received(&self) -> u64 {
        self.incoming.received
    }

    /// Returns true if the peer has ended the session.
    pub fn is_ended(&self) -> bool {
        self.incoming.is_ended
    }

    /// Returns true if received bytes are not acknowledged.
    pub fn owes_acknowledgement(&self) -> bool {
        self.incoming.received > self.incoming.acknowledged
    }

    /// Makes the next [`output`](Self::output) acknowledge all received bytes.
    pub fn acknowledge(&mut self) {
        self.outgoing.acknowledge |= self.owes_acknowledgement();
    }

    /// Ends the session: after all bytes, the peer receives the end.
    pub fn end(&mut self) {
        if self.outgoing.end == End::No {
            self.outgoing.end = End::Requested;
        }
    }

    /// Ends the session at once: after the current frame, the peer receives the end. Bytes that were not sent are lost.
    pub fn abort(&mut self) {
        if self.outgoing.end != End::Begun {
            self.outgoing.end = End::Urgent;
        }
    }

    /// Returns everything that is still to be sent, as if the transport had accepted it.
    pub fn rest(&mut self) -> Vec<u8> {
        let mut rest = Vec::new();
        loop {
            let before = rest.len();
            let mut slices = [IoSlice::new(&[]); SLICES];
            let count = self.output(&mut slices);
            for slice in slices.iter().take(count) {
                rest.extend_from_slice(slice);
            }
            if rest.len() == before {
                return rest;
            }
            self.sent(rest.len() - before);
        }
    }

    /// Replaces the transport. `from` is the offset of the first byte that the peer sends on it, and `received` the
    /// number of received bytes that the peer told. Returns the offset of the first byte that this end sends: the peer
    /// may have reported a larger number since.
    ///
    /// # Errors
    /// Fails if the peer violates the protocol.
    pub fn attach(&mut self, from: u64, received: u64) -> Result<u64, FrameError> {
        let Self { outgoing, incoming } = self;
        let repeated = incoming.received.checked_sub(from);
        let repeated = repeated.ok_or(FrameError::Gap {
            from,
            received: incoming.received,
        })?;
        let received = received.max(outgoing.reported);
        outgoing.reported(received)?;
        outgoing.head.1 = HEAD_BYTES;
        outgoing.left = 0;
        outgoing.sent = received;
        outgoing.release();
        if outgoing.end == End::Begun {
            outgoing.end = End::Requested;
        }
        incoming.head_bytes = 0;
        incoming.left = 0;
        incoming.repeated = repeated;
        // The peer may not have received later acknowledgements.
        incoming.acknowledged = from;
        Ok(received)
    }
}

impl Outgoing {
    fn is_in_frame(&self) -> bool {
        self.head.1 < HEAD_BYTES || self.left > 0
    }

    /// Begins the next frame, if there is something to send.
    fn begin(&mut self, incoming: &mut Incoming) {
        let unsent = match self.end {
            End::Begun => return,
            End::Urgent => 0,
            End::No | End::Requested => self.replay.end() - self.sent,
        };
        let length = match usize::try_from(unsent)
            .unwrap_or(usize::MAX)
            .min(FRAME_BYTES)
        {
            0 if self.end != End::No => {
                self.end = End::Begun;
                END
            }
            0 if !self.acknowledge => return,
            bytes => {
                self.left = bytes;
                u32::try_from(bytes).unwrap_or(0)
            }
        };
        let received = incoming.received;
        incoming.acknowledged = received;
        self.acknowledge = false;
        let mut head = [0; HEAD_BYTES];
        let fields = length.to_be_bytes().into_iter();
        let fields = fields.chain(received.to_be_bytes());
        head.iter_mut()
            .zip(fields)
            .for_each(|(to, from)| *to = from);
        self.head = (head, 0);
    }

    /// Processes the number of received bytes that the peer reports.
    fn reported(&mut self, reported: u64) -> Result<(), FrameError> {
        let (least, most) = (self.reported, self.most_sent);
        if reported < least || reported > most {
            return Err(FrameError::Acknowledgement {
                reported,
                least,
                most,
            });
        }
        self.reported = reported;
        self.release();
        Ok(())
    }

    /// Releases the bytes that the peer has received. Bytes that an earlier transport delivered, but that are still to
    /// be sent again on this one, stay.
    fn release(&mut self) {
        let to = self.reported.min(self.sent);
        if to > self.replay.start() {
            self.replay.release(to);
        }
    }
}

impl Incoming {
    /// Reads a part of a head, and returns the number of bytes read.
    fn head(&mut self, bytes: &[u8], outgoing: &mut Outgoing) -> Result<usize, FrameError> {
        let room = self.head.get_mut(self.head_bytes..).unwrap_or_default();
        let count = room.len().min(bytes.len());
        room.iter_mut()
            .zip(bytes)
            .for_each(|(to, from)| *to = *from);
        self.head_bytes += count;
        if self.head_bytes < HEAD_BYTES {
            return Ok(count);
        }
        self.head_bytes = 0;
        let [a, b, c, d, received @ ..] = self.head;
        outgoing.reported(u64::from_be_bytes(received))?;
        match u32::from_be_bytes([a, b, c, d]) {
            END => self.is_ended = true,
            length => {
                let bytes = usize::try_from(length).ok();
                let bytes = bytes.filter(|bytes| *bytes <= FRAME_BYTES);
                self.left = bytes.ok_or(FrameError::TooLong(length))?;
            }
        }
        Ok(count)
    }
}

#[cfg(test)]
mod tests;
