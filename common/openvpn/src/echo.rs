//! Packets that a host's network stack sends without a request from a program: echo replies, resets for
//! unknown flows, ICMP errors.
//!
//! `Replies` owns the replies that wait to be sent and the rate limit of resets and ICMP errors. A reply
//! without room is dropped, because the remote host repeats the packet that triggered the reply.

use std::collections::VecDeque;
use std::net::Ipv4Addr;
use std::time::{Duration, Instant};

use crate::ip::{self, Icmp, Packet, Segment, Sum, flags, kind, protocol};
use crate::rate::RateLimit;

/// Largest number of replies that wait to be sent.
const MAX_WAITING: usize = 256;
/// Largest number of bytes of waiting replies. The last reply may exceed the limit.
const MAX_BYTES: usize = 128 << 10;
/// Largest number of empty buffers kept for reuse.
const MAX_SPARE: usize = 32;
/// Rate limit of resets and ICMP errors: replies per second, and replies in one burst.
const RATE: u32 = 1000;
const BURST: u32 = 250;
/// Largest quote of the offending packet in an ICMP error, in bytes.
const QUOTED: usize = 128;

/// Replies that wait to be sent.
#[derive(Debug)]
pub(crate) struct Replies {
    waiting: VecDeque<Vec<u8>>,
    spare: Vec<Vec<u8>>,
    bytes: usize,
    limit: RateLimit,
    suppressed: u64,
}

impl Replies {
    pub(crate) fn new(now: Instant) -> Self {
        Self {
            waiting: VecDeque::new(),
            spare: Vec::new(),
            bytes: 0,
            limit: RateLimit::new(Duration::from_secs(1) / RATE, BURST, now),
            suppressed: 0,
        }
    }

    pub(crate) fn buffer(&mut self) -> Vec<u8> {
        let mut buffer = self.spare.pop().unwrap_or_default();
        buffer.clear();
        buffer
    }

    /// Queues a reply. Without room the reply is dropped and counted, and the result is false.
    pub(crate) fn queue(&mut self, reply: Vec<u8>) -> bool {
        let room = self.waiting.len() < MAX_WAITING && self.bytes < MAX_BYTES;
        if room {
            self.bytes += reply.len();
            self.waiting.push_back(reply);
        } else {
            self.suppressed += 1;
            self.keep(reply);
        }
        room
    }

    fn push(&mut self, write: impl FnOnce(&mut Vec<u8>)) -> bool {
        let mut reply = self.buffer();
        write(&mut reply);
        self.queue(reply)
    }

    fn keep(&mut self, reply: Vec<u8>) {
        if self.spare.len() < MAX_SPARE && reply.capacity() <= 2048 {
            self.spare.push(reply);
        }
    }

    pub(crate) fn front(&self) -> Option<&[u8]> {
        self.waiting.front().map(Vec::as_slice)
    }

    /// Removes the oldest reply after it was sent.
    pub(crate) fn pop(&mut self) {
        if let Some(reply) = self.take() {
            self.keep(reply);
        }
    }

    pub(crate) fn take(&mut self) -> Option<Vec<u8>> {
        let reply = self.waiting.pop_front()?;
        self.bytes -= reply.len();
        Some(reply)
    }

    pub(crate) fn is_empty(&self) -> bool {
        self.waiting.is_empty()
    }

    /// Number of replies that were dropped because the queue was full or the rate limit was reached.
    pub(crate) fn suppressed(&self) -> u64 {
        self.suppressed
    }

    pub(crate) fn echo(&mut self, packet: &Packet<'_>, icmp: &Icmp<'_>) -> bool {
        let (from, to) = (packet.destination(), packet.source());
        self.push(|out| {
            icmp_message(
                out,
                from,
                to,
                [kind::ECHO_REPLY, 0],
                icmp.rest(),
                icmp.body(),
            );
        })
    }

    /// Answers `segment` with a reset, unless `segment` itself is a reset.
    pub(crate) fn reset(&mut self, segment: &Segment<'_>, now: Instant) -> bool {
        !segment.has(flags::RST) && self.allowed(now) && self.push(|out| reset(out, segment))
    }

    /// Repeats the last acknowledgement of a flow that has ended.
    pub(crate) fn acknowledge(&mut self, segment: &Segment<'_>, sequence: u32, expected: u32) {
        self.push(|out| bare_segment(out, segment, sequence, expected, flags::ACK));
    }

    /// Queues an ICMP error about `packet`, with source address `from`. ICMP packets other than echo
    /// requests and replies get no error, because an ICMP error must not cause another error (RFC 1122,
    /// 3.2.2).
    pub(crate) fn error(
        &mut self,
        packet: &Packet<'_>,
        from: Ipv4Addr,
        kind_and_code: [u8; 2],
        now: Instant,
    ) -> bool {
        let is_echo = matches!(packet.payload(), [kind::ECHO | kind::ECHO_REPLY, ..]);
        if packet.protocol() == protocol::ICMP && !is_echo {
            return false;
        }
        let bytes = packet.bytes();
        let quoted = bytes.get(..QUOTED).unwrap_or(bytes);
        let to = packet.source();
        self.allowed(now)
            && self.push(|out| icmp_message(out, from, to, kind_and_code, [0; 4], quoted))
    }

    fn allowed(&mut self, now: Instant) -> bool {
        let allowed = self.limit.allows(now);
        self.suppressed += u64::from(!allowed);
        allowed
    }
}

/// Writes the reset that answers `segment` (RFC 9293, 3.10.7.1).
fn reset(out: &mut Vec<u8>, segment: &Segment<'_>) {
    let (sequence, acknowledgement, flags) = if segment.has(flags::ACK) {
        (segment.acknowledgement(), 0, flags::RST)
    } else {
        let next = segment.sequence().wrapping_add(segment.length());
        (0, next, flags::RST | flags::ACK)
    };
    bare_segment(out, segment, sequence, acknowledgement, flags);
}

/// Writes a segment without options and data to the sender of `segment`.
fn bare_segment(
    out: &mut Vec<u8>,
    segment: &Segment<'_>,
    sequence: u32,
    acknowledgement: u32,
    flags: u8,
) {
    let (from, to) = (segment.destination(), segment.source());
    ip::write_header(out, *from.ip(), *to.ip(), protocol::TCP, 20);
    let mut tcp = [0; 20];
    [tcp[0], tcp[1]] = from.port().to_be_bytes();
    [tcp[2], tcp[3]] = to.port().to_be_bytes();
    [tcp[4], tcp[5], tcp[6], tcp[7]] = sequence.to_be_bytes();
    [tcp[8], tcp[9], tcp[10], tcp[11]] = acknowledgement.to_be_bytes();
    tcp[12] = 5 << 4;
    tcp[13] = flags;
    let sum = ip::pseudo(*from.ip(), *to.ip(), protocol::TCP, 20) + Sum::of(&tcp);
    [tcp[16], tcp[17]] = sum.checksum().to_be_bytes();
    out.extend_from_slice(&tcp);
}

fn icmp_message(
    out: &mut Vec<u8>,
    from: Ipv4Addr,
    to: Ipv4Addr,
    [kind, code]: [u8; 2],
    rest: [u8; 4],
    body: &[u8],
) {
    ip::write_header(out, from, to, protocol::ICMP, 8 + body.len());
    let [r0, r1, r2, r3] = rest;
    let mut header = [kind, code, 0, 0, r0, r1, r2, r3];
    let sum = Sum::of(&header) + Sum::of(body);
    [header[2], header[3]] = sum.checksum().to_be_bytes();
    out.extend_from_slice(&header);
    out.extend_from_slice(body);
}
