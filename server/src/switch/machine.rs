//! The switch from one tunnel to another as a state machine. Inputs are requests, the state of the tunnels,
//! and the time; outputs are the route and events. The machine has no I/O and no clock.
//!
//! ```text
//!            request                target healthy              nothing in use, or deadline
//! Settled ------------> Waiting ---------------------> Draining ---------------------------> Settled
//!                       old route, the other           new route, the old
//!                       is the fallback                is the fallback
//! ```
//!
//! A request may come in any state, and may also reverse the switch. While a switch is in progress the
//! tunnels are each other's fallback, dial by dial, so no dial fails because of the switch while a tunnel
//! is healthy. For the same reason the end of a drain requires a healthy target.

use std::collections::VecDeque;
use std::time::Duration;

use tokio::time::Instant;

use super::Unavailable;
use crate::router::{Route, View};
use crate::tunnel::{Kind, Mode};

/// Progress of a switch.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Phase {
    /// No switch is in progress.
    Settled,
    /// The target has no healthy peer yet.
    Waiting {
        /// Preferred tunnel of dials until then.
        first: Kind,
        /// Time for which connections may stay open afterwards.
        drain: Duration,
        /// Time of the request.
        since: Instant,
    },
    /// Connections of the other tunnel stay open.
    Draining {
        /// Time when the connections are closed.
        deadline: Instant,
        /// Time of the request.
        since: Instant,
        /// True if the last check found nothing in use. The route then excludes the old tunnel. A dial may
        /// have read the earlier route just before; the next check finds that dial in use.
        closing: bool,
        /// True if the deadline has passed without a healthy target.
        overdue: bool,
    },
}

/// Event for the owner to carry out or to log.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Event {
    /// Another mode was requested.
    Requested {
        /// Previous mode.
        from: Mode,
        /// Requested mode.
        to: Mode,
        /// True if another switch was in progress.
        turned: bool,
    },
    /// The target has no healthy peer.
    Waits(Kind),
    /// New dials use this tunnel.
    Diverted(Kind),
    /// Connections of this tunnel have the given time to end.
    Drains(Kind, Duration),
    /// The deadline of this tunnel's connections has passed, but the target no longer has a healthy peer.
    Overdue(Kind),
    /// The owner must close the connections of this tunnel.
    Cut(Kind),
    /// The mode is in force; contains the duration of the switch.
    Finished(Duration),
}

/// The switch of a server.
#[derive(Debug)]
pub(crate) struct Switch {
    mode: Mode,
    phase: Phase,
    default_drain: Duration,
    events: VecDeque<Event>,
}

// === impl Switch ===

impl Switch {
    /// Creates a switch in this mode, with a switch in progress if `phase` is not settled.
    pub(crate) fn new(mode: Mode, phase: Phase, default_drain: Duration) -> Self {
        Self {
            mode,
            phase,
            default_drain,
            events: VecDeque::new(),
        }
    }

    /// Returns the mode requested last.
    pub(crate) fn mode(&self) -> Mode {
        self.mode
    }

    /// Returns the progress of the switch to the mode.
    pub(crate) fn phase(&self) -> Phase {
        self.phase
    }

    /// Returns the route of new dials.
    pub(crate) fn route(&self) -> Route {
        let first = self.mode.tunnel();
        match self.phase {
            Phase::Settled => Route {
                first,
                both: self.mode.prefers(),
            },
            Phase::Waiting { first, .. } => Route { first, both: true },
            Phase::Draining { closing, .. } => Route {
                first,
                both: !closing,
            },
        }
    }

    /// Returns the next event.
    pub(crate) fn poll_event(&mut self) -> Option<Event> {
        self.events.pop_front()
    }

    /// Returns the next time at which the machine changes without other input. While a switch is in
    /// progress, the owner must also call [`Switch::tick`] regularly.
    pub(crate) fn poll_timeout(&self) -> Option<Instant> {
        match self.phase {
            Phase::Draining {
                deadline,
                overdue: false,
                ..
            } => Some(deadline),
            _ => None,
        }
    }

    /// Requests a mode. A repeated request for the current mode changes the drain time.
    ///
    /// # Errors
    /// Fails if the server does not have the tunnel of the mode; nothing changes then.
    pub(crate) fn request(
        &mut self,
        mode: Mode,
        drain: Option<Duration>,
        now: Instant,
        view: &View,
    ) -> Result<(), Unavailable> {
        if !view.allows(mode) {
            return Err(Unavailable(mode));
        }
        if mode == self.mode {
            if let Some(wanted) = drain {
                self.change_drain(wanted, now);
            }
            return Ok(());
        }
        let (route, target) = (self.route(), mode.tunnel());
        self.events.push_back(Event::Requested {
            from: self.mode,
            to: mode,
            turned: self.phase != Phase::Settled,
        });
        self.mode = mode;
        let drain = drain.unwrap_or(self.default_drain);
        let has_other = view.side(target.other()).is_some();
        let leaves = route.first != target || (route.both && !mode.prefers() && has_other);
        if leaves && !view.is_healthy(target) {
            self.events.push_back(Event::Waits(target));
            self.phase = Phase::Waiting {
                first: route.first,
                drain,
                since: now,
            };
        } else {
            self.divert(route.first, drain, now, now, view);
        }
        Ok(())
    }

    /// Processes the state of the tunnels and the time. A new route must be in force before the next call.
    pub(crate) fn tick(&mut self, now: Instant, view: &View) {
        let target = self.mode.tunnel();
        match self.phase {
            Phase::Settled => {}
            Phase::Waiting {
                first,
                drain,
                since,
            } => {
                if view.is_healthy(target) {
                    self.divert(first, drain, since, now, view);
                }
            }
            Phase::Draining { .. } => self.drain(now, view),
        }
    }

    fn change_drain(&mut self, wanted: Duration, now: Instant) {
        match &mut self.phase {
            Phase::Settled => {}
            Phase::Waiting { drain, .. } => *drain = wanted,
            Phase::Draining {
                deadline, overdue, ..
            } => {
                *deadline = now + wanted;
                *overdue = false;
                let old = self.mode.tunnel().other();
                self.events.push_back(Event::Drains(old, wanted));
            }
        }
    }

    /// Sends new dials to the target. The other tunnel then drains, unless the mode keeps that tunnel as a
    /// fallback.
    fn divert(&mut self, before: Kind, drain: Duration, since: Instant, now: Instant, view: &View) {
        let target = self.mode.tunnel();
        if before != target {
            self.events.push_back(Event::Diverted(target));
        }
        let old = target.other();
        match view.side(old) {
            Some(side) if !self.mode.prefers() => {
                if side.in_use > 0 {
                    self.events.push_back(Event::Drains(old, drain));
                }
                self.phase = Phase::Draining {
                    deadline: now + drain,
                    since,
                    closing: side.in_use == 0,
                    overdue: false,
                };
            }
            _ => self.settle(since, now),
        }
    }

    fn drain(&mut self, now: Instant, view: &View) {
        let target = self.mode.tunnel();
        let old = target.other();
        let idle = view.side(old).is_none_or(|side| side.in_use == 0);
        let Phase::Draining {
            deadline,
            since,
            closing,
            overdue,
        } = &mut self.phase
        else {
            return;
        };
        let since = *since;
        if *closing && idle {
            return self.settle(since, now);
        }
        *closing = false;
        let due = now >= *deadline;
        if !view.is_healthy(target) {
            if due && !*overdue {
                *overdue = true;
                self.events.push_back(Event::Overdue(old));
            }
        } else if idle {
            *closing = true;
        } else if due {
            self.events.push_back(Event::Cut(old));
            self.settle(since, now);
        }
    }

    fn settle(&mut self, since: Instant, now: Instant) {
        self.phase = Phase::Settled;
        self.events
            .push_back(Event::Finished(now.saturating_duration_since(since)));
    }
}

#[cfg(test)]
mod tests;
