//! The computation of a window from the measurements of a path.

use std::time::Duration;

use super::{
    AHEAD_ROUND_TRIP, AHEAD_ROUND_TRIPS, LONG_PATH_BYTES, PACKETS_AHEAD_BYTES, SAMPLE_BYTES,
    WindowProfile,
};

/// Number of consecutive measurements that must call for a smaller window before the window shrinks.
const SHRINK_AFTER: u32 = 8;

/// Number of measurements for which the shortest round trip stays valid, because routes change.
pub(super) const FORGET_AFTER: u32 = 4096;

/// Largest sum of the windows of all streams, in bytes. A stream keeps up to a third of its window before it returns the
/// bytes. These bytes of all streams leave a third of the connection's window,
/// [`CONNECTION_WINDOW_BYTES`](crate::CONNECTION_WINDOW_BYTES).
const ALL_WINDOWS_BYTES: u64 = 1 << 32;

/// Computation of the window, without I/O.
#[derive(Debug)]
pub(super) struct Estimate {
    pub(super) window: u32,
    profile: WindowProfile,
    pub(super) budget: usize,
    /// Number of open streams.
    streams: usize,
    /// True while small streams are active.
    pub(super) beside: bool,
    /// Bandwidth-delay product of the path by the last measurement, in bytes.
    bdp: u32,
    /// Shortest round trip.
    pub(super) shortest: Duration,
    /// Number of measurements since the shortest round trip.
    pub(super) samples: u32,
    smaller: u32,
}

impl Estimate {
    /// Creates the computation for a window of `profile`. All streams together should keep at most `budget` unread bytes.
    pub(super) fn new(profile: WindowProfile, budget: usize) -> Self {
        Self {
            window: profile.short_path(),
            profile,
            budget,
            streams: 0,
            beside: false,
            bdp: 0,
            shortest: Duration::MAX,
            samples: 0,
            smaller: 0,
        }
    }

    /// Shrinks the window at once if too many bytes are unread, or if too many streams are open.
    pub(super) fn crowded(&mut self, held: usize, streams: usize) {
        self.streams = streams;
        self.window = self.window.min(self.limit(held));
    }

    /// Shrinks the window at once when a small stream appears alongside bulk traffic.
    pub(super) fn beside(&mut self) {
        self.beside = true;
        self.window = self.window.min(self.wanted());
    }

    /// Adjusts the window to the `bytes` that arrived in a round trip of `took`, while `held` bytes are unread.
    pub(super) fn measured(&mut self, bytes: u64, took: Duration, held: usize) {
        self.samples += 1;
        // Beside received bulk, the round trip contains the time in queues.
        let is_quiet = bytes < SAMPLE_BYTES;
        if took < self.shortest || (is_quiet && self.samples >= FORGET_AFTER) {
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

    /// Returns the limit of [`Inbound::ahead`](super::Inbound::ahead), in bytes; 0 without a limit. `is_beside` is true while
    /// small messages arrive. Before the first measurement, the path counts as short, so that the window of the server does
    /// not grow meanwhile.
    pub(super) fn ahead(&self, is_beside: bool) -> u32 {
        let shortest = match self.shortest {
            Duration::MAX => Duration::ZERO,
            shortest => shortest,
        };
        let trips = shortest.div_duration_f64(AHEAD_ROUND_TRIP).max(1.0);
        match trips <= AHEAD_ROUND_TRIPS {
            true => (f64::from(PACKETS_AHEAD_BYTES) * trips) as u32 / if is_beside { 2 } else { 1 },
            false => 0,
        }
    }

    /// Returns twice the bandwidth-delay product, rounded up, and at least the window of a short path.
    fn wanted(&self) -> u32 {
        let floor = match self.beside {
            true => self.profile.beside(),
            false => self.profile.short_path(),
        };
        let twice = self.bdp.saturating_mul(2);
        let (_, ceiling) = self.profile.limits();
        let bytes = twice.clamp(floor, ceiling);
        let power = bytes.next_power_of_two();
        // A stock peer has no limit for unsent bytes: the excess of its window waits in its kernel, before small messages.
        match self.profile.is_of_connection() && bytes > self.profile.short_path() {
            true => bytes.next_multiple_of(power / 8),
            false => power,
        }
    }

    /// Returns the largest window while `held` bytes are unread: half of the remaining budget, so that several
    /// streams can stall before the next check, plus a sixteenth of the remaining budget. Without the
    /// sixteenth, a few unread bytes in a moving stream would halve the window, which is rounded down to a
    /// power of two. Many streams have smaller windows, see [`ALL_WINDOWS_BYTES`].
    pub(super) fn limit(&self, held: usize) -> u32 {
        let share = self.budget.saturating_sub(held) / 16 * 9;
        let each = ALL_WINDOWS_BYTES / (self.streams as u64).max(1);
        let share = u32::try_from(each.min(share as u64)).unwrap_or(u32::MAX);
        // Largest power of two up to `share`.
        let power = 1u32.checked_shl(share.checked_ilog2().unwrap_or(0));
        let (smallest, largest) = self.profile.limits();
        power.unwrap_or(u32::MAX).clamp(smallest, largest)
    }
}
