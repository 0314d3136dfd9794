//! The election of one leader among several replicas, by a Lease (`coordination.k8s.io/v1`). No I/O: the
//! caller reads and writes the lease and reports the results.
//!
//! The rules are client-go's, and only the local clock counts. A holder is dead once its lease has not
//! changed for the duration in the lease, counted from when this replica saw the last change; the times in
//! the lease are for people. The holder leads for [`Times::renew_deadline`], counted from when it sent its
//! last successful renewal. Other replicas never see a renewal before it was sent, and the deadline is
//! shorter than the duration. So two replicas never lead at once, as long as their clocks run at the same
//! speed; the clocks may show different times.

mod candidate;
#[cfg(test)]
mod tests;

use std::time::Duration;

use k8s_openapi::api::coordination::v1::Lease;
use k8s_openapi::apimachinery::pkg::apis::meta::v1::MicroTime;
use tokio::time::Instant;

pub use self::candidate::Candidate;

/// The times of an election. Each is longer than the next.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Times {
    /// Time other replicas wait for a silent holder. The lease stores whole seconds, rounded up.
    pub lease_duration: Duration,
    /// Time a holder leads without a renewal.
    pub renew_deadline: Duration,
    /// Pause between renewals, and between reads of another replica's lease.
    pub retry_period: Duration,
}

impl Default for Times {
    /// Returns client-go's defaults.
    fn default() -> Self {
        Self {
            lease_duration: Duration::from_secs(15),
            renew_deadline: Duration::from_secs(10),
            retry_period: Duration::from_secs(2),
        }
    }
}

/// The next step of a candidate.
#[derive(Clone, Debug, PartialEq)]
pub enum Action {
    /// Wait until this time.
    Wait(Instant),
    /// Read the lease, then call [`Election::read`] or [`Election::failed`].
    Read,
    /// Replace the lease, or create it if it has no resource version yet, then call [`Election::written`] or
    /// [`Election::failed`].
    Write(Box<Lease>),
}

/// One candidate's view of an election.
#[derive(Debug)]
pub struct Election {
    name: String,
    identity: String,
    times: Times,
    /// Lease after the last read or write, and the time since when it is unchanged.
    seen: Option<(Lease, Instant)>,
    /// Set after a successful read or write, until the next step uses the result. Otherwise the lease must be
    /// read before a write.
    current: bool,
    /// Set if this candidate wrote `seen`; false if it was read.
    own: bool,
    /// Set if the lease may name this candidate, even if no answer has confirmed it.
    may_hold: bool,
    /// Time at which the last successful renewal was sent.
    renewed: Option<Instant>,
    /// Earliest time of the next step.
    due: Instant,
}

impl Election {
    /// Creates a candidate for the lease `name`. The identity must be unique: not even an earlier run of the
    /// same candidate may have used it.
    pub fn new(name: &str, identity: &str, times: Times, now: Instant) -> Self {
        Self {
            name: name.to_owned(),
            identity: identity.to_owned(),
            times,
            seen: None,
            current: false,
            own: false,
            may_hold: false,
            renewed: None,
            due: now,
        }
    }

    /// Returns the next step; `wall` is the time to write into the lease.
    pub fn next(&mut self, now: Instant, wall: &MicroTime) -> Action {
        if now < self.due {
            return Action::Wait(self.due);
        }
        if !self.current {
            return Action::Read;
        }
        self.current = false;
        if self.is_taken(now) {
            self.due = now + self.times.retry_period;
            return Action::Wait(self.due);
        }
        self.may_hold = true;
        Action::Write(Box::new(self.claim(wall)))
    }

    /// Reports the result of a read; `None` if there is no lease.
    pub fn read(&mut self, now: Instant, lease: Option<Lease>) {
        self.current = true;
        self.own = false;
        let known = self.seen.take();
        self.seen = lease.map(|lease| {
            // Other changes of the lease, such as a label, are no proof of a live holder.
            let same = known.filter(|(known, _)| known.spec == lease.spec);
            let since = same.map_or(now, |(_, since)| since);
            (lease, since)
        });
        if self.holder() != self.identity {
            self.renewed = None;
            self.may_hold = false;
        }
    }

    /// Reports the success of the write sent at `sent`; `lease` is the answer.
    pub fn written(&mut self, sent: Instant, now: Instant, lease: Lease) {
        self.current = true;
        self.own = true;
        self.seen = Some((lease, now));
        self.renewed = Some(sent);
        self.due = now + self.times.retry_period;
    }

    /// Reports a failed read or write, or a write with unknown outcome. `conflict` means a change of the
    /// lease by another writer: if this candidate wrote the lease last, it reads the lease again at once.
    pub fn failed(&mut self, now: Instant, conflict: bool) {
        let at_once = conflict && self.own;
        self.current = false;
        self.own = false;
        if !at_once {
            self.due = now + self.times.retry_period;
        }
    }

    /// Returns the end of this candidate's leadership unless it renews in time; this time may be in the past.
    /// `None` if the candidate does not hold the lease.
    pub fn leads_until(&self) -> Option<Instant> {
        self.renewed.map(|sent| sent + self.times.renew_deadline)
    }

    /// Returns the last known holder of the lease; empty if there is no holder.
    pub fn holder(&self) -> &str {
        let spec = self
            .seen
            .as_ref()
            .and_then(|(lease, _)| lease.spec.as_ref());
        let holder = spec.and_then(|spec| spec.holder_identity.as_deref());
        holder.unwrap_or_default()
    }

    /// Returns true if there may be a lease to [`release`](Self::release).
    pub fn may_hold(&self) -> bool {
        self.may_hold
    }

    /// Returns a lease without holder for the caller to write, so that the next candidate need not wait for
    /// the expiry. `None` if this candidate is not the holder. Must be called right after a read of the
    /// lease. The leadership ends with this call.
    pub fn release(&mut self, wall: &MicroTime) -> Option<Lease> {
        self.renewed = None;
        // The caller's write changes the lease, and its outcome is not reported.
        self.current = false;
        if self.holder() != self.identity {
            return None;
        }
        let (mut lease, _) = self.seen.take()?;
        let spec = lease.spec.get_or_insert_default();
        spec.holder_identity = Some(String::new());
        // 1 as in client-go; 0 is not allowed.
        spec.lease_duration_seconds = Some(1);
        spec.acquire_time = Some(wall.clone());
        spec.renew_time = Some(wall.clone());
        Some(lease)
    }

    /// Returns true if another candidate holds the lease and may be alive.
    fn is_taken(&self, now: Instant) -> bool {
        let Some((lease, since)) = &self.seen else {
            return false;
        };
        let holder = self.holder();
        let spec = lease.spec.as_ref();
        let seconds = spec.and_then(|spec| spec.lease_duration_seconds);
        // A lease without a duration counts for as long as our own.
        let duration = seconds.and_then(|seconds| u64::try_from(seconds).ok());
        let duration = duration.map_or(self.times.lease_duration, Duration::from_secs);
        !holder.is_empty() && holder != self.identity && now < *since + duration
    }

    /// Returns the lease, renewed, with this candidate as its holder.
    fn claim(&self, wall: &MicroTime) -> Lease {
        let known = self.seen.as_ref().map(|(lease, _)| lease.clone());
        let created = known.is_none();
        let mut lease = known.unwrap_or_default();
        lease.metadata.name = Some(self.name.clone());
        let spec = lease.spec.get_or_insert_default();
        if spec.holder_identity.as_ref() != Some(&self.identity) {
            let transitions = spec.lease_transitions.unwrap_or(0);
            spec.lease_transitions = Some(transitions.saturating_add(i32::from(!created)));
            spec.acquire_time = Some(wall.clone());
            spec.holder_identity = Some(self.identity.clone());
        }
        let duration = self.times.lease_duration;
        let seconds = duration.as_secs() + u64::from(duration.subsec_nanos() > 0);
        spec.lease_duration_seconds = Some(i32::try_from(seconds).unwrap_or(i32::MAX));
        spec.renew_time = Some(wall.clone());
        lease
    }
}
