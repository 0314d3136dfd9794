//! How far a peer may send ahead on each stream of one connection.
//!
//! A window that is too large lets bulk queue up in the sockets between the two ends, where small
//! streams wait behind it; one that is too small starves a long path. So the window follows the
//! path: twice what was received during one round trip, counted at the shortest round trip that
//! was seen. A queue lengthens the round trips under load but not the shortest one, and does not
//! feed on itself. Nothing is sent for this while nothing is received.
//!
//! A window that shrinks has a trap. `h2` gives a window back once the part to give back is half
//! of what the sender has left, and it looks at that only when more is handed to it. If what waits
//! there is more than the smaller window, the sender has none left, nothing more arrives, and the
//! stream stands still for ever. So nothing waits in `h2`: a source keeps what it has to give back
//! until `h2` passes it on at once ([`Inbound::is_due`]), and looks again when the window in force
//! changes.

use std::future::Future as _;
use std::pin::Pin;
use std::sync::Arc;
use std::sync::atomic::{AtomicU32, AtomicU64, AtomicUsize, Ordering};
use std::task::{Context, Poll};
use std::time::Duration;

use h2::{Ping, PingPong};
use tokio::sync::Notify;
use tokio::sync::futures::Notified;
use tokio::time::{Instant, Sleep, sleep};

/// The window of a short path, with which every connection begins. Smaller ones cost processor
/// time: the two ends wait for each other more often (docs/tuning.md).
pub const SHORT_PATH_BYTES: u32 = 1024 * 1024;

/// The window of a short path while small streams are active beside bulk: what they queue behind.
pub const BESIDE_BYTES: u32 = 64 * 1024;

/// The largest window: 210 MiB/s at 100 ms. Up to a third of it is not at the sender's disposal,
/// because `h2` gives a window back once that is half of what is left of it.
pub const LONG_PATH_BYTES: u32 = 32 * 1024 * 1024;

/// The smallest window, when much is held for streams that stall.
pub const CROWDED_BYTES: u32 = 64 * 1024;

/// How much has to come in before the path is measured again.
const SAMPLE_BYTES: u64 = 128 * 1024;

/// The shortest pause between two measurements.
const SAMPLE_PAUSE: Duration = Duration::from_millis(50);

/// How long after its last frame a small stream counts as active.
const SMALL_LINGER: Duration = Duration::from_secs(1);

/// How many measurements in a row have to ask for less before the window shrinks.
const SHRINK_AFTER: u32 = 8;

/// How many measurements the shortest round trip stays valid: routes change.
const FORGET_AFTER: u32 = 4096;

/// How long an idle peer is left alone.
const PING_IDLE: Duration = Duration::from_secs(30);

/// How long a peer may take to answer a ping, unless its kind of connection says otherwise.
pub const PING_TIMEOUT: Duration = Duration::from_secs(20);

/// What the streams of one connection have received, and how far they let the peer send ahead.
#[derive(Debug)]
pub struct Inbound {
    /// Bytes in all.
    pub received: AtomicU64,
    /// Bytes of the connection itself, whatever they are: each is a sign of life.
    pub heard: AtomicU64,
    /// Bytes that nobody has taken yet.
    pub held: AtomicUsize,
    /// Frames of streams that send little.
    pub small: AtomicUsize,
    window: AtomicU32,
    resized: Notify,
}

/// The peer did not answer a ping in time.
#[derive(Debug, thiserror::Error)]
#[error("the peer has been silent for {0:?} although it was asked for a sign of life")]
pub struct Silent(Duration);

/// Measures the path of one connection and says what the window should be.
pub struct Tuner {
    ping: PingPong,
    ping_timeout: Duration,
    inbound: Arc<Inbound>,
    estimate: Estimate,
    /// The window that was announced last.
    announced: u32,
    asked: Option<Asked>,
    /// When and at which count the last measurement ended.
    last: (Instant, u64),
    /// When and at which count the last frame of a small stream was seen.
    small: (Option<Instant>, usize),
    alarm: Pin<Box<Sleep>>,
}

struct Asked {
    at: Instant,
    received: u64,
    /// The count at the last look: the answer may be on its way behind bulk, ours or the peer's.
    heard: u64,
}

/// The arithmetic, without I/O.
#[derive(Debug)]
struct Estimate {
    window: u32,
    /// The window of a short path.
    short: u32,
    budget: usize,
    /// Small streams are active.
    beside: bool,
    /// What the path holds by the last measurement, in bytes.
    bdp: u32,
    shortest: Duration,
    samples: u32,
    smaller: u32,
}

// === impl Inbound ===

impl Default for Inbound {
    fn default() -> Self {
        Self::new(SHORT_PATH_BYTES)
    }
}

impl Inbound {
    /// Of a connection whose streams begin with `window` bytes.
    pub fn new(window: u32) -> Self {
        Self {
            received: AtomicU64::new(0),
            heard: AtomicU64::new(0),
            held: AtomicUsize::new(0),
            small: AtomicUsize::new(0),
            window: AtomicU32::new(window),
            resized: Notify::new(),
        }
    }

    /// Whether a stream is to give `done` bytes back, while as many as `queued` wait in it: these
    /// are enough for `h2` to tell the peer at once.
    pub fn is_due(&self, done: usize, queued: usize) -> bool {
        let left = (self.window() as usize).saturating_sub(done + queued);
        done > 0 && done >= left / 2
    }

    /// Resolves when what is due may have changed. Counts from the moment it is first polled or
    /// enabled.
    pub fn resized(&self) -> Notified<'_> {
        self.resized.notified()
    }

    /// The window of every stream, in bytes; the larger of two while the peer has not confirmed the
    /// second.
    pub fn window(&self) -> u32 {
        self.window.load(Ordering::Relaxed)
    }

    fn resize(&self, window: u32) {
        self.window.store(window, Ordering::Relaxed);
        self.resized.notify_waiters();
    }
}

// === impl Tuner ===

impl Tuner {
    /// Watches a connection whose streams begin with what `inbound` says. All streams together
    /// should hold no more than `budget` bytes; each may have [`CROWDED_BYTES`] in any case. A peer
    /// that sends nothing for `ping_timeout` after it was pinged counts as gone.
    pub fn new(
        ping: PingPong,
        inbound: Arc<Inbound>,
        budget: usize,
        ping_timeout: Duration,
    ) -> Self {
        Self {
            ping,
            ping_timeout,
            estimate: Estimate::new(inbound.window(), budget),
            announced: inbound.window(),
            inbound,
            asked: None,
            last: (Instant::now(), 0),
            small: (None, 0),
            // At once: the first measurement of an idle path is the best one.
            alarm: Box::pin(sleep(Duration::ZERO)),
        }
    }

    /// Announces the window that the path needs, by `announce`, which fails as long as the peer has
    /// not confirmed what was announced before. To be polled after the connection: it looks at the
    /// counters then. Says whether the connection has something to send.
    ///
    /// # Errors
    /// [`Silent`] once the peer is not there any more.
    pub fn poll(
        &mut self,
        cx: &mut Context<'_>,
        announce: impl FnOnce(u32) -> Result<(), h2::Error>,
    ) -> Result<bool, Silent> {
        self.look(cx)?;
        let (before, wanted) = (self.announced, self.estimate.window);
        let in_force = self.inbound.window();
        // The last one is announced twice: that the second may be sent proves that the first is in
        // force.
        if (in_force == wanted && before == wanted) || announce(wanted).is_err() {
            return Ok(false);
        }
        self.announced = wanted;
        self.inbound.resize(before.max(wanted));
        Ok(true)
    }

    fn look(&mut self, cx: &mut Context<'_>) -> Result<(), Silent> {
        let held = self.inbound.held.load(Ordering::Relaxed);
        self.estimate.crowded(held);
        let small = self.inbound.small.load(Ordering::Relaxed);
        if small != self.small.1 {
            let now = Instant::now();
            self.small = (Some(now), small);
            // Beside bulk, that is: alone they need nothing.
            if now - self.last.0 < SMALL_LINGER {
                self.estimate.beside();
            }
        }
        let received = self.inbound.received.load(Ordering::Relaxed);
        if let Some(asked) = &self.asked {
            if let Poll::Ready(answer) = self.ping.poll_pong(cx) {
                let (bytes, took) = (received - asked.received, asked.at.elapsed());
                self.asked = None;
                self.last = (Instant::now(), received);
                self.set_alarm(PING_IDLE);
                let small = self.small.0.filter(|at| at.elapsed() < SMALL_LINGER);
                self.estimate.beside = small.is_some();
                // An error is the connection's, which ends by itself.
                if answer.is_ok() {
                    self.estimate.measured(bytes, took, held);
                }
            }
        } else if received - self.last.1 >= SAMPLE_BYTES && self.last.0.elapsed() >= SAMPLE_PAUSE {
            self.ask(received);
        }
        if self.alarm.as_mut().poll(cx).is_ready() {
            let heard = self.inbound.heard.load(Ordering::Relaxed);
            match &mut self.asked {
                Some(asked) if asked.heard == heard => {
                    return Err(Silent(self.ping_timeout));
                }
                Some(asked) => {
                    asked.heard = heard;
                    self.set_alarm(self.ping_timeout);
                }
                None => self.ask(received),
            }
        }
        // Registers the alarm that `ask` has set, and interest in the answer.
        let _ = self.alarm.as_mut().poll(cx);
        if self.asked.is_some() && self.ping.poll_pong(cx).is_ready() {
            cx.waker().wake_by_ref();
        }
        Ok(())
    }

    fn ask(&mut self, received: u64) {
        if self.ping.send_ping(Ping::opaque()).is_ok() {
            self.asked = Some(Asked {
                at: Instant::now(),
                received,
                heard: self.inbound.heard.load(Ordering::Relaxed),
            });
            self.set_alarm(self.ping_timeout);
        }
    }

    fn set_alarm(&mut self, after: Duration) {
        self.alarm.as_mut().reset(Instant::now() + after);
    }
}

// === impl Estimate ===

impl Estimate {
    fn new(short: u32, budget: usize) -> Self {
        Self {
            window: short,
            short,
            budget,
            beside: false,
            bdp: 0,
            shortest: Duration::MAX,
            samples: 0,
            smaller: 0,
        }
    }

    /// Shrinks at once when too much is held.
    fn crowded(&mut self, held: usize) {
        self.window = self.window.min(self.limit(held));
    }

    /// Shrinks at once when a small stream shows up beside bulk.
    fn beside(&mut self) {
        self.beside = true;
        self.window = self.window.min(self.wanted());
    }

    fn measured(&mut self, bytes: u64, took: Duration, held: usize) {
        self.samples += 1;
        if took < self.shortest || self.samples >= FORGET_AFTER {
            self.shortest = took;
            self.samples = 0;
        }
        let share = self.shortest.as_secs_f64() / took.as_secs_f64().max(f64::EPSILON);
        let bdp = (bytes as f64 * share) as u64;
        self.bdp = u32::try_from(bdp).unwrap_or(LONG_PATH_BYTES);
        let wanted = self.wanted().min(self.limit(held));
        self.smaller = if wanted < self.window {
            self.smaller + 1
        } else {
            0
        };
        if wanted >= self.window || self.smaller >= SHRINK_AFTER {
            self.window = wanted;
            self.smaller = 0;
        }
    }

    /// Twice what the path holds, at least what a short path needs.
    fn wanted(&self) -> u32 {
        let floor = match self.beside {
            // Who asks for more has a reason to.
            true if self.short == SHORT_PATH_BYTES => BESIDE_BYTES,
            _ => self.short,
        };
        let twice = self.bdp.saturating_mul(2);
        twice.clamp(floor, LONG_PATH_BYTES).next_power_of_two()
    }

    /// The largest window while so much is held: half of what is left of the budget, so that more
    /// than one stream can stall before the next look, and a sixteenth more, so that what a stream
    /// holds while it moves does not halve its window.
    fn limit(&self, held: usize) -> u32 {
        let share = self.budget.saturating_sub(held) / 16 * 9;
        let share = u32::try_from(share).unwrap_or(u32::MAX);
        // The largest power of two in it.
        let power = 1u32.checked_shl(share.checked_ilog2().unwrap_or(0));
        power
            .unwrap_or(u32::MAX)
            .clamp(CROWDED_BYTES, LONG_PATH_BYTES)
    }
}

#[cfg(test)]
mod tests {
    #![allow(clippy::unwrap_used)]

    use super::*;

    const BUDGET: usize = 64 << 20;
    const MS: Duration = Duration::from_millis(1);

    /// A path that passes `rate` bytes per ms at a round trip of `rtt` ms, until nothing changes.
    fn settle(estimate: &mut Estimate, rtt: u32, rate: u64) -> u32 {
        for _ in 0..100 {
            let bytes = u64::from(estimate.window).min(rate * u64::from(rtt));
            estimate.measured(bytes, MS * rtt, 0);
        }
        estimate.window
    }

    #[test]
    fn a_long_path_gets_what_it_can_fill_and_a_short_one_no_more_than_it_needs() {
        assert_eq!(
            settle(&mut Estimate::new(SHORT_PATH_BYTES, BUDGET), 100, 100_000),
            LONG_PATH_BYTES
        );
        assert_eq!(
            settle(&mut Estimate::new(SHORT_PATH_BYTES, BUDGET), 100, 10_000),
            2 << 20
        );
        assert_eq!(
            settle(&mut Estimate::new(SHORT_PATH_BYTES, BUDGET), 1, 100_000),
            SHORT_PATH_BYTES
        );
    }

    #[test]
    fn a_queue_does_not_feed_on_itself() {
        let mut estimate = Estimate::new(SHORT_PATH_BYTES, BUDGET);
        estimate.measured(0, MS / 10, 0);
        // 1 GB/s through a queue of 5 ms.
        for _ in 0..100 {
            estimate.measured(5_000_000, MS * 5, 0);
        }
        assert_eq!(estimate.window, SHORT_PATH_BYTES);
    }

    #[test]
    fn what_is_held_shrinks_the_window_at_once_and_it_recovers() {
        let mut estimate = Estimate::new(SHORT_PATH_BYTES, BUDGET);
        settle(&mut estimate, 100, 100_000);
        for (held, window) in [
            (BUDGET / 16, LONG_PATH_BYTES),
            (BUDGET / 2, 16 << 20),
            (BUDGET, CROWDED_BYTES),
            (2 * BUDGET, CROWDED_BYTES),
        ] {
            estimate.crowded(held);
            assert_eq!(estimate.window, window);
        }
        assert_eq!(settle(&mut estimate, 100, 100_000), LONG_PATH_BYTES);
    }

    #[test]
    fn small_streams_shrink_the_window_of_a_short_path_only() {
        let mut near = Estimate::new(SHORT_PATH_BYTES, BUDGET);
        settle(&mut near, 1, 100_000);
        near.beside();
        assert_eq!(near.window, 256 * 1024);
        assert_eq!(settle(&mut near, 1, 10_000), BESIDE_BYTES);
        near.beside = false;
        assert_eq!(settle(&mut near, 1, 10_000), SHORT_PATH_BYTES);
        let mut far = Estimate::new(SHORT_PATH_BYTES, BUDGET);
        settle(&mut far, 100, 100_000);
        far.beside();
        assert_eq!(far.window, LONG_PATH_BYTES);
    }

    #[test]
    fn a_window_shrinks_after_the_path_got_faster() {
        let mut estimate = Estimate::new(SHORT_PATH_BYTES, BUDGET);
        settle(&mut estimate, 100, 100_000);
        assert_eq!(settle(&mut estimate, 1, 100_000), SHORT_PATH_BYTES);
    }
}
