//! The decision which leases are live, by observed renewals. No I/O.
//!
//! Upstream compares the times in a lease with the local clock, so a clock that is wrong by half a minute removes
//! a live server from every count. Here only the local monotonic clock counts: a lease is live for its duration
//! after its last observed change. A lease that was never observed before is live for one duration, too.
//!
//! An unchanged lease proves nothing while nobody could renew or observe it. After such a gap, all leases that were
//! live get another duration.

use std::collections::HashMap;
use std::time::Duration;

use k8s_openapi::api::coordination::v1::LeaseSpec;
use tokio::time::Instant;

use super::DURATION;

/// Longest gap between two observations, as a fraction of the duration of a lease. The renewals of one server are
/// half a duration apart, so a longer gap means that observations have failed.
const GAP: f64 = 2.0 / 3.0;

/// The observed leases, by name.
#[derive(Debug, Default)]
pub struct Renewals {
    leases: HashMap<String, Observed>,
    /// Time of the last observation; `None` at the start and after [`Renewals::interrupted`].
    last: Option<Instant>,
}

/// One lease at the last observation.
#[derive(Debug)]
struct Observed {
    spec: LeaseSpec,
    /// Start of the current duration: the time of the last change, or of the end of a gap.
    since: Instant,
    /// Set if the duration has passed.
    is_expired: bool,
}

impl Renewals {
    /// Records all leases that exist now, each with its name.
    pub fn observe<'a>(
        &mut self,
        now: Instant,
        leases: impl IntoIterator<Item = (&'a str, &'a LeaseSpec)>,
    ) {
        let gap = self.last.replace(now).map(|last| now - last);
        let mut before = std::mem::take(&mut self.leases);
        for (name, spec) in leases {
            let duration = duration(spec);
            let is_watched = gap.is_some_and(|gap| gap < duration.mul_f64(GAP));
            let unchanged = before
                .remove(name)
                .filter(|lease| lease.spec == *spec && (is_watched || lease.is_expired));
            let since = unchanged.map_or(now, |lease| lease.since);
            let lease = Observed {
                spec: spec.clone(),
                since,
                is_expired: now - since >= duration,
            };
            self.leases.insert(name.to_owned(), lease);
        }
    }

    /// Notes a failed observation: until the next one, changes may have been missed.
    pub fn interrupted(&mut self) {
        self.last = None;
    }

    /// Returns the number of live leases at the last observation. As in upstream, a lease without any time is
    /// not live.
    pub fn live(&self) -> usize {
        self.leases.values().filter(|lease| lease.is_live()).count()
    }

    /// Returns true if the lease was live at the last observation.
    pub fn is_live(&self, name: &str) -> bool {
        self.leases.get(name).is_some_and(Observed::is_live)
    }

    /// Returns true if the lease exists and was expired at the last observation.
    pub fn is_expired(&self, name: &str) -> bool {
        self.leases.get(name).is_some_and(|lease| lease.is_expired)
    }
}

impl Observed {
    fn is_live(&self) -> bool {
        let is_dated = self.spec.renew_time.is_some() || self.spec.acquire_time.is_some();
        is_dated && !self.is_expired
    }
}

/// Returns the duration of a lease. The API refuses durations below 1 s.
fn duration(spec: &LeaseSpec) -> Duration {
    let seconds = spec.lease_duration_seconds;
    let seconds = seconds.and_then(|seconds| u64::try_from(seconds).ok());
    let seconds = seconds.filter(|seconds| *seconds > 0);
    seconds.map_or(DURATION, Duration::from_secs)
}

#[cfg(test)]
mod tests {
    use k8s_openapi::apimachinery::pkg::apis::meta::v1::MicroTime;
    use k8s_openapi::jiff::Timestamp;

    use super::*;

    /// Returns a lease of 30 s that was renewed `time` seconds after 1970, by the clock of its holder.
    fn renewed(time: i64) -> LeaseSpec {
        let time = Timestamp::from_second(time).ok().map(MicroTime);
        LeaseSpec {
            lease_duration_seconds: Some(30),
            renew_time: time,
            ..LeaseSpec::default()
        }
    }

    /// Observes every 10 s of `seconds` what `leases` returns for this second.
    fn watch<const N: usize>(
        renewals: &mut Renewals,
        start: Instant,
        seconds: std::ops::RangeInclusive<u64>,
        leases: impl Fn(i64) -> [(&'static str, LeaseSpec); N],
    ) {
        for second in seconds.step_by(10) {
            let leases = leases(i64::try_from(second).unwrap_or(0));
            let now = start + Duration::from_secs(second);
            renewals.observe(now, leases.iter().map(|(name, spec)| (*name, spec)));
        }
    }

    #[test]
    fn only_unchanged_leases_expire_whatever_their_clocks_show() {
        let (mut renewals, start) = (Renewals::default(), Instant::now());
        // One clock is years behind and one is years ahead.
        let leases = |second| {
            [
                ("behind", renewed(1000 + second)),
                ("ahead", renewed(99_000_000_000 + second)),
                ("dead", renewed(98_000_000_000)),
            ]
        };
        watch(&mut renewals, start, 0..=20, leases);
        assert_eq!(renewals.live(), 3);
        watch(&mut renewals, start, 30..=100, leases);
        assert_eq!(renewals.live(), 2);
        let expired = ["behind", "ahead", "dead", "unknown"].map(|name| renewals.is_expired(name));
        assert_eq!(expired, [false, false, true, false]);
        // The holder returns.
        watch(&mut renewals, start, 110..=110, |_| [("dead", renewed(7))]);
        assert_eq!((renewals.live(), renewals.is_expired("dead")), (1, false));
        // A lease that was deleted and created again starts from the beginning.
        watch(&mut renewals, start, 120..=130, |_| []);
        watch(&mut renewals, start, 140..=160, |_| [("dead", renewed(7))]);
        assert_eq!(renewals.live(), 1);
        watch(&mut renewals, start, 170..=170, |_| [("dead", renewed(7))]);
        assert_eq!(renewals.live(), 0);
    }

    #[test]
    fn leases_get_another_duration_after_a_gap() {
        let lease = |_| [("a", renewed(0))];
        for is_reported in [true, false] {
            let (mut renewals, start) = (Renewals::default(), Instant::now());
            watch(&mut renewals, start, 0..=20, lease);
            let resumed = match is_reported {
                true => {
                    renewals.interrupted();
                    30
                }
                // For example a process that was suspended.
                false => 40,
            };
            watch(&mut renewals, start, resumed..=resumed + 20, lease);
            assert_eq!(renewals.live(), 1);
            watch(&mut renewals, start, resumed + 30..=resumed + 30, lease);
            assert_eq!(renewals.live(), 0);
            // An expired lease stays expired.
            watch(&mut renewals, start, resumed + 90..=resumed + 90, lease);
            assert_eq!(renewals.live(), 0);
        }
    }

    #[test]
    fn missing_and_invalid_durations_are_upstreams_duration() {
        for seconds in [None, Some(0), Some(-1)] {
            let (mut renewals, start) = (Renewals::default(), Instant::now());
            let lease = |_| {
                let spec = LeaseSpec {
                    lease_duration_seconds: seconds,
                    ..renewed(0)
                };
                [("a", spec)]
            };
            watch(&mut renewals, start, 0..=20, lease);
            assert_eq!(renewals.live(), 1, "{seconds:?}");
            watch(&mut renewals, start, 30..=30, lease);
            assert_eq!(renewals.live(), 0, "{seconds:?}");
        }
    }

    #[test]
    fn lease_without_any_time_is_not_live_and_expires() {
        let (mut renewals, start) = (Renewals::default(), Instant::now());
        let lease = |_| [("a", LeaseSpec::default())];
        watch(&mut renewals, start, 0..=20, lease);
        assert_eq!((renewals.live(), renewals.is_expired("a")), (0, false));
        watch(&mut renewals, start, 30..=30, lease);
        assert_eq!((renewals.live(), renewals.is_expired("a")), (0, true));
        let acquired = LeaseSpec {
            acquire_time: renewed(0).renew_time,
            ..LeaseSpec::default()
        };
        renewals.observe(start + Duration::from_secs(40), [("a", &acquired)]);
        assert_eq!(renewals.live(), 1);
    }
}
