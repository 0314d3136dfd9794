//! The switch from one tunnel to another as a state machine: what is asked for, the tunnels' state
//! and the time go in, the route and events come out. No I/O, and no clock of its own.
//!
//! ```text
//!            request                target healthy              nothing in use, or deadline
//! Settled ------------> Waiting ---------------------> Draining ---------------------------> Settled
//!                       old route, the other           new route, the old
//!                       stands in                      stands in
//! ```
//!
//! A request may come in any state, also the one that turns round. While a switch is in progress
//! each tunnel stands in for the other, dial by dial, so that none fails because of the switch
//! while one of them is healthy. The end of a drain needs a healthy target for the same reason.

use std::collections::VecDeque;
use std::time::Duration;

use tokio::time::Instant;

use super::{Mode, Unavailable};
use crate::backend::tunnel::{Health, Kind};

/// Where new dials go.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Route {
    /// Of two that are equally healthy, the one.
    pub first: Kind,
    /// Whether the other one stands in.
    pub both: bool,
}

/// The state of one tunnel.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Side {
    /// Whether it can take dials.
    pub health: Health,
    /// Its dials and connections.
    pub in_use: usize,
}

/// The state of the tunnels at one moment.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct View {
    /// The agents.
    pub konnectivity: Side,
    /// The OpenVPN clients, if the server has a tunnel for them.
    pub openvpn: Option<Side>,
}

/// How far a switch is.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Phase {
    /// No switch is in progress.
    Settled,
    /// The target has no healthy peer yet.
    Waiting {
        /// What dials go by until then.
        first: Kind,
        /// How long connections may live on afterwards.
        drain: Duration,
        /// When the switch was asked for.
        since: Instant,
    },
    /// Connections of the other tunnel live on.
    Draining {
        /// When they are closed.
        deadline: Instant,
        /// When the switch was asked for.
        since: Instant,
        /// None were left at the last look. No dial goes there any more; one that was on its way
        /// shows at the next look.
        closing: bool,
        /// The deadline has passed and the target is not healthy.
        overdue: bool,
    },
}

/// What the owner has to do or to tell.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Event {
    /// Another mode was asked for.
    Requested {
        /// The mode before.
        from: Mode,
        /// The mode asked for.
        to: Mode,
        /// Another switch was in progress.
        turned: bool,
    },
    /// The target has no healthy peer.
    Waits(Kind),
    /// New dials go by this tunnel.
    Diverted(Kind),
    /// Connections of this tunnel have so much time to end.
    Drains(Kind, Duration),
    /// The time is over, but the target has no healthy peer any more.
    Overdue(Kind),
    /// The connections of this tunnel are to be closed.
    Cut(Kind),
    /// The mode is in force.
    Finished(Duration),
}

/// The switch of one server.
#[derive(Debug)]
pub struct Switch {
    mode: Mode,
    phase: Phase,
    default_drain: Duration,
    events: VecDeque<Event>,
}

// === impl Switch ===

impl Switch {
    /// A server that starts with this mode, in the middle of a switch if `phase` says so.
    pub fn new(mode: Mode, phase: Phase, default_drain: Duration) -> Self {
        Self {
            mode,
            phase,
            default_drain,
            events: VecDeque::new(),
        }
    }

    /// The mode that was asked for last.
    pub fn mode(&self) -> Mode {
        self.mode
    }

    /// How far the switch to it is.
    pub fn phase(&self) -> Phase {
        self.phase
    }

    /// Where dials have to go now.
    pub fn route(&self) -> Route {
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

    /// The next event.
    pub fn poll_event(&mut self) -> Option<Event> {
        self.events.pop_front()
    }

    /// When something happens by time alone; besides, [`Switch::tick`] wants to be called now and
    /// then while a switch is in progress.
    pub fn poll_timeout(&self) -> Option<Instant> {
        match self.phase {
            Phase::Draining {
                deadline,
                overdue: false,
                ..
            } => Some(deadline),
            _ => None,
        }
    }

    /// Asks for a mode. The mode that was asked for before is asked for again to change its drain.
    ///
    /// # Errors
    /// When the server has not the tunnel of the mode; nothing changes then.
    pub fn request(
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

    /// Looks at the tunnels and the time. A new route has to be in force before the next call.
    pub fn tick(&mut self, now: Instant, view: &View) {
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

    /// The target takes the new dials. The other tunnel drains, unless it stays in use.
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

// === impl Route ===

impl Route {
    /// By one tunnel alone.
    pub fn only(first: Kind) -> Self {
        Self { first, both: false }
    }

    /// The tunnel that stands in.
    pub fn second(self) -> Option<Kind> {
        self.both.then(|| self.first.other())
    }

    /// Whether dials may go by a tunnel.
    pub fn includes(self, kind: Kind) -> bool {
        self.both || self.first == kind
    }

    /// For an atomic.
    pub fn to_bits(self) -> u8 {
        u8::from(self.first == Kind::Openvpn) | u8::from(self.both) << 1
    }

    /// The reverse of [`Route::to_bits`].
    pub fn from_bits(bits: u8) -> Self {
        Self {
            first: match bits & 1 {
                0 => Kind::Konnectivity,
                _ => Kind::Openvpn,
            },
            both: bits & 2 != 0,
        }
    }
}

// === impl View ===

impl View {
    /// One tunnel's state, if the server has it.
    pub fn side(&self, kind: Kind) -> Option<Side> {
        match kind {
            Kind::Konnectivity => Some(self.konnectivity),
            Kind::Openvpn => self.openvpn,
        }
    }

    /// Whether the server has the tunnel of a mode.
    pub fn allows(&self, mode: Mode) -> bool {
        self.side(mode.tunnel()).is_some()
    }

    fn is_healthy(&self, kind: Kind) -> bool {
        let side = self.side(kind);
        side.is_some_and(|side| side.health == Health::Healthy)
    }
}

#[cfg(test)]
mod tests;
