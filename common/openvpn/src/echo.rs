//! What a host says by itself: echo replies, resets for unknown flows, ICMP errors.
//!
//! Owns the answers that wait to be sent and the rate of those that nobody asked for. What does
//! not fit is dropped: each of them is repeated by whoever caused it.

use std::collections::VecDeque;
use std::net::Ipv4Addr;
use std::time::{Duration, Instant};

use crate::ip::{self, Icmp, Packet, Segment, Sum, flags, kind, protocol};

/// Answers that may wait.
const MAX_WAITING: usize = 256;
/// Bytes of answers that may wait.
const MAX_BYTES: usize = 128 << 10;
/// Emptied buffers that are kept.
const MAX_SPARE: usize = 32;
/// Unasked answers a second, and at once.
const RATE: u32 = 1000;
const BURST: u32 = 250;
/// What an ICMP error quotes of a packet, at most.
const QUOTED: usize = 128;

/// Answers that wait to be sent.
#[derive(Debug)]
pub struct Replies {
    waiting: VecDeque<Vec<u8>>,
    spare: Vec<Vec<u8>>,
    bytes: usize,
    limit: RateLimit,
    suppressed: u64,
}

impl Replies {
    /// None yet.
    pub fn new(now: Instant) -> Self {
        Self {
            waiting: VecDeque::new(),
            spare: Vec::new(),
            bytes: 0,
            limit: RateLimit::new(RATE, BURST, now),
            suppressed: 0,
        }
    }

    /// An empty buffer for a reply.
    pub(crate) fn buffer(&mut self) -> Vec<u8> {
        let mut buffer = self.spare.pop().unwrap_or_default();
        buffer.clear();
        buffer
    }

    /// Queues a reply; counts it and forgets it if there is no room.
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

    /// The oldest.
    pub fn front(&self) -> Option<&[u8]> {
        self.waiting.front().map(Vec::as_slice)
    }

    /// Forgets the oldest, which was sent.
    pub fn pop(&mut self) {
        if let Some(reply) = self.waiting.pop_front() {
            self.bytes -= reply.len();
            self.keep(reply);
        }
    }

    /// Takes the oldest.
    pub fn take(&mut self) -> Option<Vec<u8>> {
        let reply = self.waiting.pop_front()?;
        self.bytes -= reply.len();
        Some(reply)
    }

    /// Nothing waits.
    pub fn is_empty(&self) -> bool {
        self.waiting.is_empty()
    }

    /// Answers that were not given, for want of room or because of the rate.
    pub fn suppressed(&self) -> u64 {
        self.suppressed
    }

    /// Answers an echo request.
    pub fn echo(&mut self, packet: &Packet<'_>, icmp: &Icmp<'_>) -> bool {
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

    /// Resets what sent `segment`, unless it is a reset itself.
    pub fn reset(&mut self, segment: &Segment<'_>, now: Instant) -> bool {
        !segment.has(flags::RST) && self.allowed(now) && self.push(|out| reset(out, segment))
    }

    /// Acknowledges again what a flow that is gone had received.
    pub(crate) fn acknowledge(&mut self, segment: &Segment<'_>, sequence: u32, expected: u32) {
        self.push(|out| bare_segment(out, segment, sequence, expected, flags::ACK));
    }

    /// Tells by ICMP that `packet` could not be delivered; `from` is who says so. Never about an
    /// ICMP error (RFC 1122, 3.2.2).
    pub fn error(
        &mut self,
        packet: &Packet<'_>,
        from: Ipv4Addr,
        kind_and_code: [u8; 2],
        now: Instant,
    ) -> bool {
        if packet.protocol() == protocol::ICMP
            && !packet
                .payload()
                .first()
                .is_some_and(|kind| matches!(*kind, kind::ECHO | kind::ECHO_REPLY))
        {
            return false;
        }
        let bytes = packet.bytes();
        let quoted = bytes.get(..QUOTED).unwrap_or(bytes);
        let to = packet.source();
        self.allowed(now)
            && self.push(|out| icmp_message(out, from, to, kind_and_code, [0; 4], quoted))
    }

    fn allowed(&mut self, now: Instant) -> bool {
        let allowed = self.limit.take(now);
        self.suppressed += u64::from(!allowed);
        allowed
    }
}

/// A reset in answer to `segment` (RFC 9293, 3.10.7.1).
fn reset(out: &mut Vec<u8>, segment: &Segment<'_>) {
    let (sequence, acknowledgement, flags) = if segment.has(flags::ACK) {
        (segment.acknowledgement(), 0, flags::RST)
    } else {
        let next = segment.sequence().wrapping_add(segment.length());
        (0, next, flags::RST | flags::ACK)
    };
    bare_segment(out, segment, sequence, acknowledgement, flags);
}

/// A segment without options and data, back to where `segment` came from.
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

/// So many a second, and so many at once.
#[derive(Debug)]
struct RateLimit {
    rate: u32,
    burst: u32,
    left: u32,
    since: Instant,
}

impl RateLimit {
    fn new(rate: u32, burst: u32, now: Instant) -> Self {
        Self {
            rate,
            burst,
            left: burst,
            since: now,
        }
    }

    fn take(&mut self, now: Instant) -> bool {
        let passed = now.saturating_duration_since(self.since);
        let earned = passed.as_micros() * u128::from(self.rate) / 1_000_000;
        if earned > 0 {
            let earned = u32::try_from(earned).unwrap_or(u32::MAX);
            self.left = self.left.saturating_add(earned).min(self.burst);
            self.since = if self.left == self.burst {
                now
            } else {
                self.since + Duration::from_secs(1) * earned / self.rate
            };
        }
        let some = self.left > 0;
        self.left -= u32::from(some);
        some
    }
}
