//! Number of servers to connect to, from the announcements of the servers and from the servers' leases.

use std::sync::Arc;

use metrics::Gauge;
use parking_lot::Mutex;
use tokio::sync::Notify;
use tracing::info;

use crate::config::{Config, ServerCountSource};

/// Number of servers to connect to. The search is the only waiter.
pub(crate) struct ServerCount {
    source: Source,
    known: Mutex<Known>,
    changes: Notify,
    gauge: Gauge,
}

/// Origin of the number.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Source {
    Announced,
    Leases,
    /// The larger of both numbers.
    Larger,
}

/// The last good numbers, at least 1. Both are 1 at first, as in upstream.
struct Known {
    announced: i64,
    leases: i64,
    /// True if the last count found a live lease, and the watch does not fail for long.
    has_leases: bool,
}

impl ServerCount {
    /// Creates a count of 1; `gauge` shows the current number.
    pub(crate) fn new(config: &Config, gauge: Gauge) -> Arc<Self> {
        let source = match (&config.leases, config.server_count_source) {
            (None, _) => Source::Announced,
            (Some(_), ServerCountSource::Default) => Source::Leases,
            (Some(_), ServerCountSource::Max) => Source::Larger,
        };
        Arc::new(Self::with(source, gauge))
    }

    fn with(source: Source, gauge: Gauge) -> Self {
        gauge.set(1);
        Self {
            source,
            known: Mutex::new(Known {
                announced: 1,
                leases: 1,
                has_leases: false,
            }),
            changes: Notify::new(),
            gauge,
        }
    }

    /// Stores the number that a server announces. A number below 1 counts as 1.
    pub(crate) fn announced(&self, count: i64) {
        self.change(|known| known.announced = count.max(1));
    }

    /// Stores the number of live leases; `None` if the agent cannot watch the leases. 0 means that no server can write
    /// its lease, or that the agent finds no leases. In both cases the last number stays.
    pub(crate) fn leases(&self, count: Option<usize>) {
        let count = i64::try_from(count.unwrap_or(0)).unwrap_or(i64::MAX);
        self.change(|known| {
            known.has_leases = count > 0;
            if count > 0 {
                known.leases = count;
            }
        });
    }

    /// Returns the number of servers to connect to, at least 1.
    pub(crate) fn current(&self) -> i64 {
        self.of(&self.known.lock())
    }

    /// Returns true if every announced and every connected server may have a lease. The number of leases then follows
    /// the servers. Otherwise there are servers without a lease, for example because of an old version or other labels.
    pub(crate) fn leases_cover(&self, connected: usize) -> bool {
        let known = self.known.lock();
        let connected = i64::try_from(connected).unwrap_or(i64::MAX);
        self.leases_cover_announced(&known) && connected <= known.leases
    }

    /// Waits until the number has changed since the last call.
    pub(crate) async fn changed(&self) {
        self.changes.notified().await;
    }

    fn change(&self, change: impl FnOnce(&mut Known)) {
        let mut known = self.known.lock();
        let (from, covered) = (self.of(&known), self.leases_cover_announced(&known));
        change(&mut known);
        let (to, covers) = (self.of(&known), self.leases_cover_announced(&known));
        if from != to {
            info!(from, to, "the number of servers changed");
            self.gauge.set(to as f64);
        }
        if from != to || covered != covers {
            self.changes.notify_one();
        }
    }

    fn leases_cover_announced(&self, known: &Known) -> bool {
        self.source != Source::Announced && known.has_leases && known.announced <= known.leases
    }

    fn of(&self, known: &Known) -> i64 {
        match self.source {
            Source::Announced => known.announced,
            Source::Leases => known.leases,
            Source::Larger => known.announced.max(known.leases),
        }
    }
}

#[cfg(test)]
impl ServerCount {
    /// Creates a count without leases.
    pub(crate) fn of_announcements() -> Self {
        Self::with(Source::Announced, Gauge::noop())
    }

    /// Creates a count of leases.
    pub(crate) fn of_leases() -> Self {
        Self::with(Source::Leases, Gauge::noop())
    }
}

#[cfg(test)]
mod tests {
    use futures_util::FutureExt as _;

    use super::*;

    fn count(source: Source) -> ServerCount {
        ServerCount::with(source, Gauge::noop())
    }

    #[test]
    fn source_decides_which_numbers_count() {
        for (source, expected) in [
            (Source::Announced, [1, 5, 5, 2]),
            (Source::Leases, [1, 1, 3, 3]),
            (Source::Larger, [1, 5, 5, 3]),
        ] {
            let count = count(source);
            let mut seen = vec![count.current()];
            count.announced(5);
            seen.push(count.current());
            count.leases(Some(3));
            seen.push(count.current());
            count.announced(2);
            seen.push(count.current());
            assert_eq!(seen, expected, "{source:?}");
        }
    }

    #[test]
    fn last_number_of_leases_stays_without_live_leases() {
        let count = count(Source::Leases);
        assert!(!count.leases_cover(0));
        let lives = [Some(0), Some(3), Some(0), Some(2), None, Some(2)];
        for (live, current) in lives.into_iter().zip([1, 3, 3, 2, 2, 2]) {
            count.leases(live);
            let has_leases = live.is_some_and(|live| live > 0);
            assert_eq!(
                (count.current(), count.leases_cover(0)),
                (current, has_leases)
            );
        }
    }

    #[test]
    fn announcements_below_1_count_as_1() {
        let count = count(Source::Announced);
        for announced in [0, -3, i64::MIN] {
            count.announced(announced);
            assert_eq!(count.current(), 1);
        }
    }

    #[test]
    fn waiter_learns_of_each_change_once() {
        let count = count(Source::Larger);
        let is_changed = || count.changed().now_or_never().is_some();
        assert!(!is_changed());
        count.announced(1);
        assert!(!is_changed());
        // The leases cover the announced number from now on.
        count.leases(Some(1));
        assert!(is_changed());
        count.announced(4);
        assert!(is_changed() && !is_changed());
        // The larger number stays the same.
        count.leases(Some(3));
        assert!(!is_changed());
        for leases in [4, 3, 4, 0] {
            count.leases(Some(leases));
            assert!(is_changed() && !is_changed(), "{leases}");
        }
    }
}
