//! The requests of an HTTP/2 client that our end has not decided yet.
//!
//! `h2` keeps up to 1.4 KiB for a stream whose answer the client has not read, and for a request that `h2` refuses.
//! Clients that open as many streams as permitted, on many connections, could use up the memory of the program. So the
//! reader of a connection stops before a request while too many are undecided. Requests that `h2` refuses, such as those
//! with too many header fields, stay undecided, and end the connection if no others are left. Well-behaved clients send
//! none of them.

use std::sync::Arc;
use std::sync::atomic::{AtomicBool, AtomicUsize, Ordering};
use std::task::{Context, Poll};

use futures_util::task::AtomicWaker;

/// Length of the preface of an HTTP/2 client, in bytes (RFC 9113, section 3.4).
const PREFACE_BYTES: usize = 24;

/// Length of the header of a frame, in bytes.
const HEADER_BYTES: usize = 9;

/// Type of a HEADERS frame.
const HEADERS: u8 = 1;

/// The number of undecided requests of one connection, and its limit. A connection and its streams run on one thread, so
/// no counter changes while another one is read.
#[derive(Debug)]
pub(crate) struct Undecided {
    count: AtomicUsize,
    /// Number of guards. The other undecided requests are refused by `h2`, or not accepted yet.
    guards: AtomicUsize,
    most: AtomicUsize,
    /// True while the reader waits for a decision.
    is_waiting: AtomicBool,
    /// Waker of the reader.
    reader: AtomicWaker,
}

/// A request that is undecided until this value is dropped.
#[derive(Debug)]
pub struct UndecidedRequest(Option<Arc<Undecided>>);

/// Finds the requests in the bytes of a client.
#[derive(Debug)]
pub(crate) struct RequestScanner {
    /// Bytes of the next frame header so far.
    header: [u8; HEADER_BYTES],
    length: usize,
    /// Number of bytes before the next frame header.
    rest: usize,
    /// Largest stream number so far.
    last: u32,
}

// === impl Undecided ===

impl Undecided {
    pub(crate) fn new(most: usize) -> Self {
        Self {
            count: AtomicUsize::new(0),
            guards: AtomicUsize::new(0),
            most: AtomicUsize::new(most),
            is_waiting: AtomicBool::new(false),
            reader: AtomicWaker::new(),
        }
    }

    /// Counts a request; returns false if too many are undecided.
    fn take(&self) -> bool {
        let most = self.most.load(Ordering::Relaxed);
        let more = |count| (count < most).then_some(count + 1);
        let taken = (self.count).fetch_update(Ordering::Relaxed, Ordering::Relaxed, more);
        taken.is_ok()
    }

    /// Waits until the limit permits a request.
    pub(crate) fn poll_room(&self, cx: &mut Context<'_>) -> Poll<()> {
        self.reader.register(cx.waker());
        let is_waiting = self.is_used_up();
        self.is_waiting.store(is_waiting, Ordering::SeqCst);
        match is_waiting {
            false => Poll::Ready(()),
            true => Poll::Pending,
        }
    }

    fn is_used_up(&self) -> bool {
        self.count.load(Ordering::SeqCst) >= self.most.load(Ordering::SeqCst)
    }

    /// Returns true if the reader waits, but nothing will be decided any more. All requests before have to be accepted.
    pub(crate) fn is_stuck(&self) -> bool {
        let waits = self.is_waiting.load(Ordering::SeqCst) && self.is_used_up();
        waits && self.guards.load(Ordering::SeqCst) == 0
    }

    pub(crate) fn lift(&self) {
        self.most.store(usize::MAX, Ordering::SeqCst);
        self.reader.wake();
    }
}

// === impl UndecidedRequest ===

impl UndecidedRequest {
    /// Returns the guard of a request that the reader has counted; `None` stands for no limit.
    pub(crate) fn received(undecided: Option<Arc<Undecided>>) -> Self {
        if let Some(undecided) = &undecided {
            undecided.guards.fetch_add(1, Ordering::SeqCst);
        }
        Self(undecided)
    }

    /// Counts a decided request again.
    pub(crate) fn again(undecided: Option<Arc<Undecided>>) -> Self {
        let request = Self::received(undecided);
        if let Some(undecided) = &request.0 {
            undecided.count.fetch_add(1, Ordering::SeqCst);
        }
        request
    }
}

impl Drop for UndecidedRequest {
    fn drop(&mut self) {
        if let Some(undecided) = &self.0 {
            undecided.count.fetch_sub(1, Ordering::SeqCst);
            undecided.guards.fetch_sub(1, Ordering::SeqCst);
            undecided.reader.wake();
        }
    }
}

// === impl RequestScanner ===

impl RequestScanner {
    pub(crate) fn new() -> Self {
        Self {
            header: [0; HEADER_BYTES],
            length: 0,
            rest: PREFACE_BYTES,
            last: 0,
        }
    }

    /// Returns how many of the next bytes may pass: those before the first request that the limit does not permit. The
    /// other bytes have to be scanned again later.
    pub(crate) fn passing(&mut self, bytes: &[u8], undecided: &Undecided) -> usize {
        let mut at = 0;
        while at < bytes.len() {
            let skipped = self.rest.min(bytes.len() - at);
            self.rest -= skipped;
            at += skipped;
            let (begin, before) = (at, self.length);
            let next = bytes.get(at..).unwrap_or_default();
            for (to, byte) in self.header.iter_mut().skip(before).zip(next) {
                *to = *byte;
                self.length += 1;
                at += 1;
            }
            if self.length == HEADER_BYTES {
                let [l0, l1, l2, kind, _, id @ ..] = self.header;
                let id = u32::from_be_bytes(id) & (u32::MAX >> 1);
                if kind == HEADERS && id > self.last {
                    if !undecided.take() {
                        self.length = before;
                        return begin;
                    }
                    self.last = id;
                }
                self.rest = u32::from_be_bytes([0, l0, l1, l2]) as usize;
                self.length = 0;
            }
        }
        at
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    /// Encodes a frame with `length` bytes.
    fn frame(kind: u8, id: u32, length: u8) -> Vec<u8> {
        let mut bytes = vec![0, 0, length, kind, 0];
        bytes.extend(id.to_be_bytes());
        bytes.extend(vec![HEADERS; usize::from(length)]);
        bytes
    }

    #[test]
    fn reading_stops_before_a_request_wherever_the_bytes_are_split() {
        let mut bytes = vec![0; PREFACE_BYTES];
        // The second HEADERS frame of the first stream has trailers.
        for (kind, id) in [(4, 0), (HEADERS, 1), (0, 1), (HEADERS, 1), (HEADERS, 3)] {
            bytes.extend(frame(kind, id, 20));
        }
        let before = bytes.len();
        bytes.extend(frame(HEADERS, 5, 20));
        bytes.extend(frame(0, 5, 20));
        for part in 1..bytes.len() {
            let undecided = Undecided::new(2);
            let mut scanner = RequestScanner::new();
            let (mut passed, mut is_stopped) = (0, false);
            while let Some(next) = bytes.get(passed..).filter(|rest| !rest.is_empty()) {
                let next = next.get(..part).unwrap_or(next);
                let count = scanner.passing(next, &undecided);
                passed += count;
                if count < next.len() {
                    // A part of the frame header may have passed.
                    assert!((before..before + HEADER_BYTES).contains(&passed), "{part}");
                    assert!(!is_stopped, "{part}");
                    is_stopped = true;
                    undecided.count.fetch_sub(1, Ordering::Relaxed);
                }
            }
            assert!(is_stopped && passed == bytes.len(), "{part}");
        }
    }
}
