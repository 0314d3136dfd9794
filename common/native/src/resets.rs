//! The pace of the resets of one HTTP/2 connection.
//!
//! `h2` remembers a limited number of reset streams, each for a limited time. A DATA frame that the peer sent before it
//! learned of the reset is harmless for a remembered stream. For a forgotten stream, the frame is an error of the peer, and
//! too many errors end the connection. So a reset waits while `h2` remembers as many streams as it can. Until then the
//! stream is open, and its DATA frames are discarded.

use std::collections::VecDeque;
use std::future::pending;
use std::time::Duration;

use parking_lot::Mutex;
use tokio::time::{Instant, sleep_until};

/// The most recent resets of one HTTP/2 connection.
#[derive(Debug, Default)]
pub(crate) struct Resets {
    /// `None` for resets that never wait.
    limit: Option<Limit>,
    /// Times of the resets that count, the oldest first.
    recent: Mutex<VecDeque<Instant>>,
}

#[derive(Clone, Copy, Debug)]
struct Limit {
    /// Largest number of resets within `time`.
    count: usize,
    time: Duration,
}

impl Resets {
    /// Permits `count` resets within `time`.
    pub(crate) fn paced(count: usize, time: Duration) -> Self {
        Self {
            limit: Some(Limit { count, time }),
            ..Self::default()
        }
    }

    /// Counts a reset. Returns false if the reset has to wait.
    pub(crate) fn take(&self) -> bool {
        let Some(Limit { count, time }) = self.limit else {
            return true;
        };
        let mut recent = self.recent.lock();
        while recent.front().is_some_and(|first| first.elapsed() >= time) {
            recent.pop_front();
        }
        let has_room = recent.len() < count;
        if has_room {
            recent.push_back(Instant::now());
        }
        has_room
    }

    /// Waits until the oldest reset no longer counts.
    pub(crate) async fn turn(&self) {
        let Some(limit) = self.limit else {
            return pending().await;
        };
        let first = self.recent.lock().front().copied();
        if let Some(first) = first {
            sleep_until(first + limit.time).await;
        }
    }
}
