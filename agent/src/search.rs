//! Timing of the search for servers, without I/O: the state of the servers and the time in, attempts out.
//!
//! All servers share one address, and a load balancer picks a server for each attempt. An attempt that reaches a
//! connected server is a duplicate. The search has three modes:
//!
//! - *Searching*, while servers are missing. A new server is evidence that the missing servers exist, so duplicates are
//!   retried after [`FAST_GAP`]. After the loss of a server the first gap is a fifth of the interval, because the
//!   successor may take a while. Each duplicate lengthens the gap until it reaches the interval; after
//!   [`PERSISTENCE`] without news, the gap grows on to a limit. A token bucket with one token per interval bounds the
//!   number of attempts.
//! - *Probing*, if no server is missing, with `--sync-forever`. The gap grows from the interval to [`PROBE_CAP`]. If the
//!   announced number follows the servers, the gap grows from [`PROBE_CAP`] to [`SLOW_GAP`]. A change of the number of
//!   servers makes the gap short again.
//! - *Idle*, if no server is missing.
//!
//! A failed attempt delays the next attempt as in upstream (`pkg/agent/clientset.go`): by the interval, and by 1.5 times
//! as much after each further failure, up to the cap.

use std::sync::Arc;
use std::time::Duration;

use rand::rngs::StdRng;
use rand::{Rng, SeedableRng as _};
use tokio::time::Instant;

/// Growth factor of the pause after failures, as in upstream, and of the gap between probes.
const BACKOFF_FACTOR: f64 = 1.5;

/// Growth factor of the gap after a duplicate. With N servers the last server takes N attempts on average, so the gap
/// must stay short for several times as many attempts; a fleet of agents must slow down if the server does not exist.
const GAP_FACTOR: f64 = 1.1;

/// Largest random addition to a pause, as a fraction of the pause; the same as in upstream.
const JITTER: f64 = 0.1;

/// First gap between attempts while missing servers are known to exist. The 20 attempts that find the last of five
/// servers with 99 % probability then take 1.2 s.
const FAST_GAP: Duration = Duration::from_millis(20);

/// Gap between attempts if those in progress could find all missing servers. A slow handshake then delays the search
/// little.
const HEDGE_GAP: Duration = Duration::from_millis(100);

/// Gap between attempts before the first answer, which has the number of servers. A silent server then delays the
/// search little.
const FIRST_HEDGE_GAP: Duration = Duration::from_secs(1);

/// The same while a server that has completed the TLS handshake owes its answer. Such a server waits for a TokenReview, and a
/// second connection to it would wait, too.
const ANSWER_GAP: Duration = Duration::from_secs(5);

/// First gap after the loss of a server, as a fraction of the interval.
const LOST_GAP: f64 = 0.2;

/// Largest delay of the first attempt after a change of a number, or after a number stops following the servers, as a
/// fraction of the interval. The delay spreads the attempts of a fleet: all of its agents lose the same server, or receive
/// the same message, at once.
const LOST_DELAY: f64 = 0.5;

/// Largest number of attempts in progress. More attempts only add load; fewer make a silent server delay the search.
const MOST_IN_PROGRESS: usize = 4;

/// Capacity of the token bucket. All of five servers are found within 40 attempts with 99.9 % probability.
const BURST: f64 = 40.0;

/// Time since the last news for which the gap does not exceed the interval. A restart of a server ends earlier.
const PERSISTENCE: Duration = Duration::from_secs(60);

/// Largest gap between probes if the announced number does not follow the servers, otherwise the smallest.
const PROBE_CAP: Duration = Duration::from_secs(12);

/// Largest gap between probes if the announced number follows the servers. Without `--sync-forever`, also the largest
/// gap while all announced servers are connected, but fewer servers than before a loss.
const SLOW_GAP: Duration = Duration::from_secs(600);

/// Configuration of a search.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Policy {
    /// `--sync-interval`.
    pub interval: Duration,
    /// `--sync-interval-cap`.
    pub cap: Duration,
    /// `--sync-forever`.
    pub forever: bool,
}

/// State of the servers.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub(crate) struct View {
    /// Number of connected servers.
    pub connected: usize,
    /// Number of servers to connect to.
    pub announced: usize,
    /// True if the announced number follows the servers: every connected server pushes changes of a number that the agent
    /// uses, or the agent counts leases, and every server may have one.
    pub follows: bool,
}

/// Result of an attempt.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Outcome {
    /// The attempt found a new server.
    Added,
    /// The attempt reached a connected server.
    Duplicate,
    /// The attempt reached no server.
    Failed,
}

/// Counts the attempts that wait for the answer of a server. Each of them holds a clone.
#[derive(Clone, Debug, Default)]
pub(crate) struct Unanswered(Arc<()>);

/// Next action.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Step {
    /// Start an attempt.
    Attempt,
    /// Wait for the end of an attempt or a change of the view, at most until the given time.
    Wait(Option<Instant>),
}

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Mode {
    Searching,
    Probing,
    Idle,
}

/// State of a search.
pub(crate) struct Search {
    policy: Policy,
    random: StdRng,
    in_progress: usize,
    /// Number of attempts in progress that wait for the answer of a server.
    unanswered: usize,
    bucket: Bucket,
    /// Time of the last start of an attempt.
    started: Option<Instant>,
    /// Random factor for the gap after the last start.
    stretch: f64,
    /// Earliest time of the next attempt: the end of the pause after a failure, or of the delay after a change.
    not_before: Instant,
    /// Gap between two starts while searching.
    gap: Duration,
    /// Gap between two probes.
    probe_gap: Duration,
    /// Pause after the next failure.
    failure_pause: Duration,
    /// Time of the last evidence that the set of servers has changed.
    news: Instant,
    /// View at the last call.
    seen: View,
    /// Largest number of servers that were connected at once, since the announced number followed the servers.
    had: usize,
}

/// Bucket of tokens for attempts; one token is added per interval.
struct Bucket {
    tokens: f64,
    interval: Duration,
    filled: Instant,
}

// === impl Search ===

impl Search {
    /// Creates a search whose first attempt starts at once.
    pub(crate) fn new(policy: Policy, seed: u64, now: Instant) -> Self {
        Self {
            policy,
            random: StdRng::seed_from_u64(seed),
            in_progress: 0,
            unanswered: 0,
            bucket: Bucket::full(policy.interval, now),
            started: None,
            stretch: 1.0,
            not_before: now,
            gap: FAST_GAP.min(policy.interval),
            probe_gap: policy.interval,
            failure_pause: policy.interval,
            news: now,
            seen: View {
                announced: 1,
                ..View::default()
            },
            had: 0,
        }
    }

    /// Sets the number of attempts that wait for the answer of a server.
    pub(crate) fn set_unanswered(&mut self, count: usize) {
        self.unanswered = count;
    }

    /// Returns the next action. The caller starts an attempt for each [`Step::Attempt`].
    pub(crate) fn step(&mut self, now: Instant, view: View) -> Step {
        self.look(now, view);
        let mode = self.mode(view);
        let most = match mode {
            Mode::Searching => MOST_IN_PROGRESS,
            Mode::Probing => 1,
            Mode::Idle => 0,
        };
        if self.in_progress >= most {
            return Step::Wait(None);
        }
        let paced = self.started.map(|started| {
            let gap = self.gap_now(mode, view);
            started + gap.mul_f64(self.stretch)
        });
        let due = self.not_before.max(self.bucket.ready(now));
        let due = paced.map_or(due, |paced| paced.max(due));
        if due > now {
            return Step::Wait(Some(due));
        }
        self.bucket.take();
        self.started = Some(now);
        self.stretch = 1.0 + self.random.random_range(0.0..JITTER);
        self.in_progress += 1;
        if mode == Mode::Probing {
            let [shortest, longest] = self.probe_gaps(view);
            let longer = self.probe_gap.mul_f64(BACKOFF_FACTOR);
            self.probe_gap = longer.clamp(shortest, longest);
        }
        Step::Attempt
    }

    /// Accounts for the end of an attempt. `view` includes its effect.
    pub(crate) fn ended(&mut self, now: Instant, outcome: Outcome, view: View) {
        self.in_progress = self.in_progress.saturating_sub(1);
        match outcome {
            Outcome::Added => {
                self.failure_pause = self.policy.interval;
                self.hurry(now);
                self.had = self.had.max(view.connected);
                self.seen = view;
            }
            Outcome::Duplicate => {
                self.failure_pause = self.policy.interval;
                self.slow_down(now, view);
            }
            // The search already pauses because of another attempt.
            Outcome::Failed if now < self.not_before => {}
            Outcome::Failed => {
                let pause = self.failure_pause;
                let jitter = 1.0 + self.random.random_range(0.0..JITTER);
                self.not_before = now + pause.mul_f64(jitter);
                self.failure_pause = pause.mul_f64(BACKOFF_FACTOR).min(self.policy.cap);
            }
        }
    }

    /// Compares the view with the last one: a lost server or a larger number of servers is news. Any other change of the
    /// numbers makes only the gap between probes short. All changes, and a number that no longer follows the servers, may
    /// reach every agent of a fleet at once.
    fn look(&mut self, now: Instant, view: View) {
        let seen = std::mem::replace(&mut self.seen, view);
        if view.follows {
            // The number of servers before the loss no longer matters.
            self.had = view.connected;
        }
        let is_larger = view.announced > seen.announced;
        let is_news = is_larger || view.connected < seen.connected;
        let is_changed = (view.connected, view.announced) != (seen.connected, seen.announced);
        let is_withdrawn = seen.follows && !view.follows;
        if !is_changed && !is_withdrawn {
            return;
        }
        let interval = self.policy.interval;
        if is_changed {
            self.probe_gap = interval;
        }
        if is_news {
            self.hurry(now);
        }
        if is_news && !is_larger {
            self.gap = interval.mul_f64(LOST_GAP);
        }
        let delay = interval.mul_f64(self.random.random_range(0.0..LOST_DELAY));
        self.not_before = self.not_before.max(now + delay);
    }

    /// Makes the gaps short.
    fn hurry(&mut self, now: Instant) {
        self.news = now;
        self.gap = FAST_GAP.min(self.policy.interval);
        self.probe_gap = self.policy.interval;
    }

    /// Lengthens the gap after a duplicate.
    fn slow_down(&mut self, now: Instant, view: View) {
        let Policy { interval, cap, .. } = self.policy;
        if self.mode(view) != Mode::Searching {
            return;
        }
        if self.gap < interval {
            self.gap = self.gap.mul_f64(GAP_FACTOR).min(interval);
        } else if now.duration_since(self.news) >= PERSISTENCE {
            let longest = match view.connected < view.announced {
                true => cap,
                // Without the loss, the agent would probe.
                false if self.policy.forever => PROBE_CAP,
                false => SLOW_GAP,
            };
            self.gap = self.gap.mul_f64(BACKOFF_FACTOR).min(longest.max(interval));
        }
    }

    fn mode(&self, view: View) -> Mode {
        if view.connected < self.wanted(view) {
            Mode::Searching
        } else if self.policy.forever {
            Mode::Probing
        } else {
            Mode::Idle
        }
    }

    /// Returns the number of servers to connect to. After a loss, this is at least the number before the loss: the
    /// announced number may be stale, and the successor of the lost server may not announce itself.
    fn wanted(&self, view: View) -> usize {
        view.announced.max(self.had).max(1)
    }

    fn gap_now(&self, mode: Mode, view: View) -> Duration {
        match mode {
            Mode::Searching if self.in_progress == 0 => self.gap,
            Mode::Searching if view.connected == 0 => {
                let hedge = match self.unanswered {
                    0 => FIRST_HEDGE_GAP,
                    _ => ANSWER_GAP,
                };
                self.policy.interval.max(hedge)
            }
            Mode::Searching if view.connected + self.in_progress < self.wanted(view) => self.gap,
            Mode::Searching => self.gap.max(HEDGE_GAP),
            Mode::Probing | Mode::Idle => {
                let [shortest, longest] = self.probe_gaps(view);
                self.probe_gap.clamp(shortest, longest)
            }
        }
    }

    /// Returns the smallest and the largest gap between probes.
    fn probe_gaps(&self, view: View) -> [Duration; 2] {
        let Policy { interval, .. } = self.policy;
        let common = PROBE_CAP.max(interval);
        match view.follows {
            true => [common, SLOW_GAP.max(interval)],
            false => [interval, common],
        }
    }
}

// === impl Unanswered ===

impl Unanswered {
    /// Returns the number of attempts.
    pub(crate) fn count(&self) -> usize {
        Arc::strong_count(&self.0) - 1
    }
}

// === impl Bucket ===

impl Bucket {
    fn full(interval: Duration, now: Instant) -> Self {
        Self {
            tokens: BURST,
            interval,
            filled: now,
        }
    }

    /// Adds the tokens since the last call, and returns the time at which a token is available.
    fn ready(&mut self, now: Instant) -> Instant {
        let passed = now.duration_since(self.filled).as_secs_f64();
        let interval = self.interval.as_secs_f64();
        self.filled = now;
        self.tokens = (self.tokens + passed / interval).min(BURST);
        match self.tokens >= 1.0 {
            true => now,
            // Rounded up, so that the token is available at that time.
            false => now + self.interval.mul_f64(1.0 - self.tokens) + Duration::from_millis(1),
        }
    }

    fn take(&mut self) {
        self.tokens -= 1.0;
    }
}

#[cfg(test)]
mod tests;
