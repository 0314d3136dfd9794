//! Limits of the bytes that an agent sends to a server.

use std::sync::Arc;
use std::time::Duration;

use bytes::Buf;
use h2::SendStream;
use tokio::time::{Instant, sleep};

use super::room::{Charge, Queued, SendError, more_room};

/// More than the largest window of grpc-go, 16 MiB.
const MAX_WINDOW_BYTES: usize = 1 << 25;

/// Longest wait for a server to return bytes to the window. Much longer than a short path needs.
pub(super) const PATIENCE: Duration = Duration::from_millis(100);

/// Time after a wait of [`PATIENCE`] for which the server may return its bytes in larger parts.
const LENIENT: Duration = Duration::from_secs(10);

/// Limits of the bytes of a call.
#[derive(Debug)]
pub struct SendLimits<F> {
    /// Largest number of bytes in the send queue of HTTP/2. A whole piece may exceed the limit. HTTP/2 must have a larger
    /// limit of its own, because that limit hides the part of the window above it.
    pub queue: usize,
    /// Returns the largest number of bytes that the server's program has not read; `None` without a limit.
    pub ahead: F,
}

/// State of the limits of one call.
///
/// A stock server is slower than our agent, and its window grows with the bytes that arrive during a round trip (grpc-go,
/// `internal/transport/bdp_estimator.go`). Without a limit of unread bytes, all bytes of the largest window, 16 MiB, wait in
/// front of a small message. With a limit, the window of the server stays small, too.
#[derive(Debug)]
pub(super) struct Pacer<F> {
    limits: SendLimits<F>,
    queued: Arc<Queued>,
    /// Largest window seen, in bytes. At that size, nearly all sent bytes were read.
    whole: usize,
    /// Time of the last wait of [`PATIENCE`].
    stalled: Option<Instant>,
}

impl<F: Fn() -> Option<usize>> Pacer<F> {
    pub(super) fn new(limits: SendLimits<F>) -> Self {
        Self {
            limits,
            queued: Arc::default(),
            whole: 0,
            stalled: None,
        }
    }

    /// Returns the charge of a piece that enters the send queue.
    pub(super) fn charge(&self, bytes: usize) -> Charge {
        Charge::new(&self.queued, bytes)
    }

    /// Waits until the stream may send something within the limits. A server with a rule of its own for returning bytes is
    /// waited for in vain at most once in [`LENIENT`].
    pub(super) async fn room<B: Buf>(
        &mut self,
        stream: &mut SendStream<B>,
    ) -> Result<(), SendError> {
        loop {
            stream.reserve_capacity(MAX_WINDOW_BYTES);
            let room = stream.capacity();
            self.whole = self.whole.max(room);
            let is_ahead = self.whole - room >= self.ahead();
            let is_full = self.queued.bytes() >= self.limits.queue;
            if room > 0 && !is_ahead && !is_full {
                return Ok(());
            }
            tokio::select! {
                more = more_room(stream) => more?,
                () = self.queued.less(), if is_full => {}
                () = sleep(PATIENCE), if is_ahead => {
                    self.whole = room;
                    self.stalled = Some(Instant::now());
                }
            }
        }
    }

    /// Returns the limit of unread bytes. grpc-go returns read bytes once they amount to a quarter of the window, so the
    /// limit is at least five sixteenths of the window. Up to twice the limit arrives during a round trip if our agent
    /// answers a ping late. grpc-go enlarges the window if two thirds of the window arrive, and never reduces the window
    /// again, so the limit must stay below a third. Other servers return half of the window.
    fn ahead(&self) -> usize {
        let is_lenient = self.stalled.is_some_and(|at| at.elapsed() < LENIENT);
        let sixteenths = if is_lenient { 10 } else { 5 };
        let limit = (self.limits.ahead)();
        limit.map_or(usize::MAX, |limit| limit.max(self.whole / 16 * sixteenths))
    }
}
