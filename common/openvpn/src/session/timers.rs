//! The timers of a session.

use std::time::{Duration, Instant};

use super::event::Ended;
use super::{Session, Side, Timers, Transport};
use crate::negotiation::Negotiation;

/// Number of successive failed renegotiations that ends the session.
pub(super) const MAX_FAILURES: u8 = 3;

/// Shortest time from the start of a renegotiation to another one that the peer starts. Other clients share the thread,
/// and over UDP the task, which would otherwise do any number of TLS handshakes for one client. A refused peer repeats
/// its SOFT_RESET after `tls-timeout`.
const PEER_PAUSE: Duration = Duration::from_secs(1);

impl Timers {
    /// Returns the time for which the old key is used for sending if the peer does not use the new key.
    pub(super) fn patience(&self) -> Duration {
        if self.reneg.is_zero() {
            self.hand_window
        } else {
            self.hand_window.min(self.reneg / 2)
        }
    }

    /// Returns the time for which a server uses a key: until [`MAX_FAILURES`] renegotiations of its own have
    /// failed. `None` if only the client renegotiates.
    fn lifetime(&self) -> Option<Duration> {
        let attempts = u32::from(MAX_FAILURES);
        let trying = self.hand_window * attempts + self.patience() * (attempts - 1);
        (!self.reneg.is_zero()).then(|| self.reneg + trying)
    }
}

/// Deadlines and activity times of a session.
pub(super) struct Clocks {
    /// End of the hand-window, until the session is established.
    pub(super) deadline: Instant,
    last_sent: Instant,
    last_received: Instant,
    ping: Option<Duration>,
    ping_restart: Option<Duration>,
    pub(super) renegotiate_at: Option<Instant>,
    /// Start of the last renegotiation, even if it failed.
    pub(super) renegotiated_at: Option<Instant>,
    /// Server role: end of the session unless a renegotiation succeeds first. `None` disables the limit.
    /// Renegotiations of the client that never finish postpone the server's own, and would otherwise prevent
    /// another check of the certificate forever.
    expires_at: Option<Instant>,
    /// Number of failed renegotiations since the last success. Counts only renegotiations that this side
    /// started.
    pub(super) failures: u8,
}

impl Clocks {
    pub(super) fn new(now: Instant, hand_window: Duration) -> Self {
        Self {
            deadline: now + hand_window,
            last_sent: now,
            last_received: now,
            ping: None,
            ping_restart: None,
            renegotiate_at: None,
            renegotiated_at: None,
            expires_at: None,
            failures: 0,
        }
    }

    pub(super) fn sent(&mut self, now: Instant) {
        self.last_sent = now;
    }

    pub(super) fn received(&mut self, now: Instant) {
        self.last_received = now;
    }

    pub(super) fn established(
        &mut self,
        ping: Option<Duration>,
        restart: Option<Duration>,
        now: Instant,
    ) {
        self.ping = ping;
        self.ping_restart = restart;
        self.sent(now);
        self.received(now);
    }

    pub(super) fn ping_at(&self) -> Option<Instant> {
        self.ping.map(|every| self.last_sent + every)
    }

    fn silent_at(&self) -> Option<(Instant, Duration)> {
        self.ping_restart
            .map(|after| (self.last_received + after, after))
    }

    #[cfg(test)]
    pub(super) fn ping_restart_for_test(&mut self, after: Option<Duration>) {
        self.ping_restart = after;
    }

    /// Schedules a renegotiation now, because the key is nearly used up. After a failed renegotiation the
    /// scheduled time stays.
    pub(super) fn worn(&mut self, now: Instant) {
        if self.failures == 0 {
            self.renegotiate_at = Some(now);
        }
    }
}

impl Session {
    /// Returns true if the peer may start a renegotiation now.
    pub(super) fn permits_renegotiation(&self, now: Instant) -> bool {
        let last = self.clocks.renegotiated_at;
        last.is_none_or(|at| now >= at + PEER_PAUSE)
    }

    /// Schedules the renegotiation and the expiry of a new key.
    pub(super) fn schedule_renegotiation(&mut self, now: Instant) {
        let timers = self.side.common().timers;
        let reneg = timers.reneg;
        let (early, lifetime) = match self.side {
            Side::Server(..) => (Self::jitter(reneg), timers.lifetime()),
            Side::Client(_) => (Duration::ZERO, None),
        };
        self.clocks.renegotiate_at = (!reneg.is_zero()).then(|| now + reneg - early);
        self.clocks.expires_at = lifetime.map(|lifetime| now + lifetime);
    }

    /// Returns the time at which to call [`Session::handle_timeout`] and [`Session::poll_output`]; may be in
    /// the past.
    pub fn poll_timeout(&self) -> Option<Instant> {
        let output = self.active().and_then(Negotiation::timeout);
        if let Some(end) = &self.ended {
            let exit = (end.exits > 0).then_some(end.next_exit);
            let timeouts = [output, exit, Some(end.until)].into_iter().flatten();
            return if end.over { None } else { timeouts.min() };
        }
        let timeouts = if self.agreed.is_none() {
            let deadline = Some(self.deadline());
            [output, deadline, self.server.request_at, None, None, None]
        } else {
            let rekey = match &self.next {
                Some(next) => Some(self.give_up_at(next)),
                None => self.clocks.renegotiate_at,
            };
            let silent = self.clocks.silent_at().map(|(at, _)| at);
            let (ping, old_key) = (self.clocks.ping_at(), self.keys.expiry());
            [output, rekey, ping, silent, old_key, self.clocks.expires_at]
        };
        timeouts.into_iter().flatten().min()
    }

    /// Returns the time at which the first negotiation is given up.
    fn deadline(&self) -> Instant {
        let answer_by = self.server.answer_by.filter(|_| self.ids.is_none());
        answer_by.unwrap_or(self.clocks.deadline)
    }

    /// Returns the time at which a renegotiation is given up. A peer whose acknowledgements are lost sends with the
    /// new key at the end of its hand-window, so a renegotiation with a key lasts half a hand-window longer.
    fn give_up_at(&self, next: &Negotiation) -> Instant {
        let hand_window = self.side.common().timers.hand_window;
        let longer = match self.keys.has_next() {
            true => hand_window / 2,
            false => Duration::ZERO,
        };
        next.began() + hand_window + longer
    }

    /// Runs the timers that have expired at `now`.
    pub fn handle_timeout(&mut self, now: Instant) {
        if let Some(end) = &mut self.ended {
            end.over |= end.until <= now;
            return;
        }
        if self.agreed.is_none() {
            if self.deadline() <= now {
                let stage = self.stage();
                return self.end(Ended::HandshakeTimeout { stage }, now);
            }
            return self.request_push(now);
        }
        if let Some((_, after)) = self.clocks.silent_at().filter(|(at, _)| *at <= now) {
            return self.end(Ended::PingTimeout(after), now);
        }
        self.keys.expire(now);
        match &self.next {
            Some(next) if self.give_up_at(next) <= now => {
                let stage = next.stage();
                match self.side.common().transport {
                    Transport::Tcp => self.end(Ended::HandshakeTimeout { stage }, now),
                    Transport::Udp => self.abandon(stage, now),
                }
            }
            None if self.clocks.renegotiate_at.is_some_and(|at| at <= now) => {
                self.renegotiate(true, now)
            }
            _ => {}
        }
        if self.clocks.expires_at.is_some_and(|at| at <= now) {
            let text = "the client finished no renegotiation before its key expired";
            self.end(Ended::Protocol(text.into()), now);
        }
    }

    /// Describes the progress of the first negotiation.
    pub(super) fn stage(&self) -> &'static str {
        match (&self.current, &self.side) {
            (None, _) => "the client sent nothing",
            (Some(current), _) if !current.is_complete() => current.stage(),
            (_, Side::Server(..)) => self.client.stage(),
            (_, Side::Client(_)) => "the server did not answer PUSH_REQUEST",
        }
    }
}
