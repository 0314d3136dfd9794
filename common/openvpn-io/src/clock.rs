//! Times of a task that owns a socket: its timer, its reports, and the limits for its final messages.

use std::future::Future as _;
use std::pin::Pin;
use std::task::{Context, Poll};
use std::time::Duration;

use tokio::time::{Instant, Sleep, sleep_until};

use super::Moment;

/// Time limit for the final messages of a link. Long, because a TCP peer may first have to read everything
/// before them, and a UDP client repeats its exit notification after one second.
pub const LINK_GOODBYE: Duration = Duration::from_secs(5);

/// Time limit for the final messages of a server's UDP socket. Short, because the server sends each message
/// once and does not wait for acknowledgements: only a full socket buffer takes time.
pub const UDP_SERVER_GOODBYE: Duration = Duration::from_millis(500);

/// Longest time from a change of the counters to their report.
const REPORT_EVERY: Duration = Duration::from_secs(1);

/// Timer of a task, with the time of its next report.
pub struct Clock {
    timer: Pin<Box<Sleep>>,
    timer_at: Option<Moment>,
    report_at: Option<Moment>,
}

impl Default for Clock {
    fn default() -> Self {
        Self {
            timer: Box::pin(sleep_until(Instant::now())),
            timer_at: None,
            report_at: None,
        }
    }
}

impl Clock {
    /// Requests a report in a second, unless a report was already requested.
    pub fn report_soon(&mut self, now: Moment) {
        self.report_at.get_or_insert(now + REPORT_EVERY);
    }

    /// Returns true once when the requested report is due.
    pub fn take_report(&mut self, now: Moment) -> bool {
        self.report_at.take_if(|at| *at <= now).is_some()
    }

    /// Ready at the earliest of the times, or when a report is due.
    pub fn poll_until(
        &mut self,
        times: impl IntoIterator<Item = Moment>,
        cx: &mut Context<'_>,
    ) -> Poll<()> {
        let Some(at) = times.into_iter().chain(self.report_at).min() else {
            return Poll::Pending;
        };
        if self.timer_at != Some(at) {
            self.timer_at = Some(at);
            self.timer.as_mut().reset(Instant::from_std(at));
        }
        self.timer.as_mut().poll(cx).map(|()| self.timer_at = None)
    }
}
