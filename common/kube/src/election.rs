//! Who of several replicas leads, by a Lease (`coordination.k8s.io/v1`). No I/O: what was read and
//! written comes in, what to read or write goes out.
//!
//! Owns what is known of the lease. The rules are client-go's, and only this program's own clock
//! counts: a holder is gone once its lease has not changed for the duration that it names, counted
//! from when the last change was seen here; times in the lease are for people. The holder leads for
//! [`Times::renew_deadline`], counted from when its last renewal was sent. That is never later than
//! when others saw it, and the deadline is shorter than the duration: no two lead at once, whatever
//! their clocks show, as long as these run equally fast.

mod candidate;
#[cfg(test)]
mod tests;

use std::time::Duration;

use k8s_openapi::api::coordination::v1::Lease;
use k8s_openapi::apimachinery::pkg::apis::meta::v1::MicroTime;
use tokio::time::Instant;

pub use self::candidate::Candidate;

/// How long a lease lasts and how often it is looked at. Each is longer than the next.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Times {
    /// How long others wait for a silent holder. The lease has whole seconds: rounded up.
    pub lease_duration: Duration,
    /// How long a holder leads without a renewal.
    pub renew_deadline: Duration,
    /// The pause between renewals, and between looks at another's lease.
    pub retry_period: Duration,
}

impl Default for Times {
    /// client-go's.
    fn default() -> Self {
        Self {
            lease_duration: Duration::from_secs(15),
            renew_deadline: Duration::from_secs(10),
            retry_period: Duration::from_secs(2),
        }
    }
}

/// What to do next.
#[derive(Clone, Debug, PartialEq)]
pub enum Action {
    /// Nothing, until then.
    Wait(Instant),
    /// Read the lease, and tell [`Election::read`] or [`Election::failed`].
    Read,
    /// Replace the lease, or create it if it has no resource version yet, and tell
    /// [`Election::written`] or [`Election::failed`].
    Write(Box<Lease>),
}

/// One candidate's view of an election.
#[derive(Debug)]
pub struct Election {
    name: String,
    identity: String,
    times: Times,
    /// The lease as it was read or written last, and since when it has been so.
    seen: Option<(Lease, Instant)>,
    /// Nothing was tried since `seen` was learned; otherwise it is read anew before a write.
    current: bool,
    /// `seen` is what this candidate wrote, not what it read.
    own: bool,
    /// The lease may name this candidate, even if no answer said so.
    may_hold: bool,
    /// When the last renewal that succeeded was sent.
    renewed: Option<Instant>,
    /// Nothing is done before.
    due: Instant,
}

impl Election {
    /// A candidate for the lease `name`. No other candidate may have its identity, not even an
    /// earlier run of itself.
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

    /// What to do now; `wall` is the time to write into the lease.
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

    /// The lease as it is now; `None` if there is none.
    pub fn read(&mut self, now: Instant, lease: Option<Lease>) {
        self.current = true;
        self.own = false;
        let known = self.seen.take();
        self.seen = lease.map(|lease| {
            // What else changes of it, such as a label, is no sign of life.
            let same = known.filter(|(known, _)| known.spec == lease.spec);
            let since = same.map_or(now, |(_, since)| since);
            (lease, since)
        });
        if self.holder() != self.identity {
            self.renewed = None;
            self.may_hold = false;
        }
    }

    /// The write that was sent at `sent` has succeeded; `lease` is the answer.
    pub fn written(&mut self, sent: Instant, now: Instant, lease: Lease) {
        self.current = true;
        self.own = true;
        self.seen = Some((lease, now));
        self.renewed = Some(sent);
        self.due = now + self.times.retry_period;
    }

    /// The read or the write has failed, or its outcome is not known. `conflict` says that the
    /// lease was written by somebody else: a holder looks at once who it was.
    pub fn failed(&mut self, now: Instant, conflict: bool) {
        let at_once = conflict && self.own;
        self.current = false;
        self.own = false;
        if !at_once {
            self.due = now + self.times.retry_period;
        }
    }

    /// Until when this candidate leads, unless it renews in time; it may be over. `None` if it does
    /// not hold the lease.
    pub fn leads_until(&self) -> Option<Instant> {
        self.renewed.map(|sent| sent + self.times.renew_deadline)
    }

    /// Who holds the lease, as far as it is known; empty for nobody.
    pub fn holder(&self) -> &str {
        let spec = self
            .seen
            .as_ref()
            .and_then(|(lease, _)| lease.spec.as_ref());
        let holder = spec.and_then(|spec| spec.holder_identity.as_deref());
        holder.unwrap_or_default()
    }

    /// Whether there may be something to [`release`](Self::release).
    pub fn may_hold(&self) -> bool {
        self.may_hold
    }

    /// The lease to write so that the next candidate need not wait for its end; `None` if it is not
    /// held. To be called when the lease was just read; leads no more.
    pub fn release(&mut self, wall: &MicroTime) -> Option<Lease> {
        self.renewed = None;
        if self.holder() != self.identity {
            return None;
        }
        let (mut lease, _) = self.seen.take()?;
        let spec = lease.spec.get_or_insert_default();
        spec.holder_identity = Some(String::new());
        // As client-go; 0 is not allowed.
        spec.lease_duration_seconds = Some(1);
        spec.acquire_time = Some(wall.clone());
        spec.renew_time = Some(wall.clone());
        Some(lease)
    }

    /// Whether another one holds the lease and may be alive.
    fn is_taken(&self, now: Instant) -> bool {
        let Some((lease, since)) = &self.seen else {
            return false;
        };
        let holder = self.holder();
        let spec = lease.spec.as_ref();
        let seconds = spec.and_then(|spec| spec.lease_duration_seconds);
        // A lease that does not say is given as long as one of ours.
        let duration = seconds.and_then(|seconds| u64::try_from(seconds).ok());
        let duration = duration.map_or(self.times.lease_duration, Duration::from_secs);
        !holder.is_empty() && holder != self.identity && now < *since + duration
    }

    /// The lease with this candidate as its holder, fresh.
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
