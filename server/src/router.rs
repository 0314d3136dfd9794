//! The router: turns a front end's [`Dial`] into an open connection. Chooses the tunnel, limits the wait,
//! and fails over to the other tunnel where the route allows failover. Failover is safe because no byte of
//! the client has been sent yet.

pub(crate) mod route;
mod slot;

use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};
use std::time::Duration;

use culvert_host::net::destinations::Destinations;
use culvert_host::net::literal::check_literal;
use culvert_stream::Dial;
use parking_lot::Mutex;
use tokio::sync::Semaphore;
use tokio::time::{Instant, sleep};
use tracing::debug;

use self::slot::TunnelSlot;
use crate::backend::dial::{ANSWER_TIMEOUT, MAX_ADDRESS_BYTES, StreamDialError};
use crate::backend::{ClientSeat, Connection, DialError, Tunnel, Usage};
use crate::metrics::{DialFailureReason, ServerMetrics};
use crate::tunnel::{Health, Kind, TunnelStatus};

pub(crate) use self::route::{Route, Side, View};

/// Longest time for a dial if no flag sets a limit. Agents end a dial after 5 s, and kube-apiserver's
/// client library after 30 s, so both ends have forgotten a longer dial.
pub(crate) const MAX_DIAL: Duration = Duration::from_secs(35);

/// Interval of checks of the health of a tunnel with a pending dial.
const HEALTH_CHECK: Duration = Duration::from_millis(500);

/// Chooses tunnels for the dials of all front ends.
pub(crate) struct Router {
    konnectivity: TunnelSlot,
    openvpn: Option<TunnelSlot>,
    /// The route in force.
    route: Mutex<Route>,
    /// Value of `--backend-dial-timeout`.
    dial_timeout: Option<Duration>,
    destinations: Arc<Destinations>,
    /// One permit for each further dial.
    permits: Semaphore,
    /// Value of `--max-pending-dials`.
    max_dials: usize,
    draining: AtomicBool,
    metrics: Arc<ServerMetrics>,
}

/// Limits for the dials of a router.
#[derive(Clone, Debug, Default)]
pub(crate) struct DialLimits {
    /// Value of `--backend-dial-timeout`; `None` means [`MAX_DIAL`].
    pub timeout: Option<Duration>,
    /// Value of `--max-pending-dials`; `None` means no limit.
    pub pending: Option<usize>,
    /// Destinations that clients may dial.
    pub destinations: Arc<Destinations>,
}

/// Counts a dial whose future is dropped before the outcome: its client has left.
struct Unfinished<'a> {
    metrics: &'a ServerMetrics,
    finished: bool,
}

impl Router {
    /// Creates a router over the tunnel of agents and, if present, the OpenVPN tunnel. The first route is
    /// the tunnel of agents alone. Dials of addresses are checked with the permitted destinations before a tunnel
    /// is chosen.
    pub(crate) fn new(
        konnectivity: Arc<dyn Tunnel>,
        openvpn: Option<Arc<dyn Tunnel>>,
        limits: DialLimits,
        metrics: Arc<ServerMetrics>,
    ) -> Arc<Self> {
        let switchable = openvpn.is_some();
        let max_dials = limits.pending.unwrap_or(usize::MAX);
        let max_dials = max_dials.min(Semaphore::MAX_PERMITS);
        let slot = |kind, tunnel| TunnelSlot {
            kind,
            tunnel,
            usage: Usage::new(kind, switchable, metrics.clone()),
        };
        Arc::new(Self {
            konnectivity: slot(Kind::Konnectivity, konnectivity),
            openvpn: openvpn.map(|tunnel| slot(Kind::Openvpn, tunnel)),
            route: Mutex::new(Route::only(Kind::Konnectivity)),
            dial_timeout: limits.timeout,
            destinations: limits.destinations,
            permits: Semaphore::new(max_dials),
            max_dials,
            draining: AtomicBool::new(false),
            metrics,
        })
    }

    /// Opens a connection. Dropping the future cancels the dial.
    ///
    /// Returns a box, because each future that passes the connection on would reserve memory for a whole connection.
    ///
    /// # Errors
    /// Returns [`DialError`]; its text is sent to the client.
    pub(crate) async fn dial(&self, dial: &Dial) -> Result<Box<Connection>, DialError> {
        let started = Instant::now();
        let mut unfinished = Unfinished {
            metrics: &self.metrics,
            finished: false,
        };
        let deadline = started + self.dial_timeout.unwrap_or(MAX_DIAL);
        let outcome = self.dial_before(dial, deadline).await.map(Box::new);
        unfinished.finished = true;
        match &outcome {
            Ok(_) => {
                let elapsed = started.elapsed().as_secs_f64();
                self.metrics.dial_duration.record(elapsed);
            }
            Err(error) => {
                if let Some(reason) = error.failure_reason() {
                    self.metrics.dial_failures(reason).increment(1);
                }
            }
        }
        outcome
    }

    async fn dial_before(&self, dial: &Dial, deadline: Instant) -> Result<Connection, DialError> {
        let bytes = dial.address.len().max(dial.protocol.len());
        if bytes > MAX_ADDRESS_BYTES {
            return Err(DialError::TooLong(bytes));
        }
        if let Err(denial) = check_literal(&self.destinations, &dial.address) {
            return Err(DialError::denied(dial, denial));
        }
        let Ok(_permit) = self.permits.try_acquire() else {
            return Err(DialError::TooManyDials(self.max_dials));
        };
        if self.openvpn.is_some() {
            return self.dial_either(dial, deadline).await;
        }
        let TunnelSlot { tunnel, usage, .. } = &self.konnectivity;
        let guard = usage.begin();
        guard.settle(tunnel.dial(dial, deadline).await)
    }

    async fn dial_either(&self, dial: &Dial, deadline: Instant) -> Result<Connection, DialError> {
        let mut failed = Vec::new();
        let mut last = None;
        loop {
            let Some((slot, has_other)) = self.choose(&failed, last.is_some()) else {
                return Err(last.unwrap_or(DialError::NoAgent));
            };
            let guard = slot.usage.begin();
            // The dial is counted from here on, so a switch that ends later sees the dial. A switch that
            // ended earlier has already changed the route.
            if !self.route().includes(slot.kind) {
                guard.moved();
                continue;
            }
            let limit = match has_other {
                true => deadline.min(Instant::now() + ANSWER_TIMEOUT),
                false => deadline,
            };
            let worse = self.worse(slot, has_other);
            let error = match slot.dial(guard, dial, limit, worse).await {
                None => continue,
                Some(Ok(connection)) => return Ok(connection),
                Some(Err(error)) => error,
            };
            if error.is_final() || Instant::now() >= deadline {
                return Err(error);
            }
            debug!(tunnel = slot.kind.as_str(), %error, "looking for another tunnel");
            failed.push(slot.kind);
            last = Some(error);
        }
    }

    /// Resolves once the health of a tunnel gets worse than at the start of a dial and worse than the other
    /// tunnel's health, so that the pending dial can move. Never resolves without `has_other`.
    async fn worse(&self, slot: &TunnelSlot, has_other: bool) {
        let before = slot.tunnel.health();
        loop {
            sleep(HEALTH_CHECK).await;
            let best = self.choose(&[], false);
            let is_best = best.is_none_or(|(best, _)| best.kind == slot.kind);
            if has_other && !is_best && slot.tunnel.health() < before {
                return;
            }
        }
    }

    /// Chooses the tunnel for a dial: the healthiest tunnel of the route, or the first tunnel of the route if
    /// both are equally healthy. Tunnels in `failed` are excluded. A later try also excludes tunnels without
    /// a peer. The boolean is true if the other tunnel is not excluded and both tunnels have a peer.
    fn choose(&self, failed: &[Kind], is_later: bool) -> Option<(&TunnelSlot, bool)> {
        let route = self.route();
        let kinds = [Some(route.first), route.second()];
        let mut best: Option<(&TunnelSlot, Health)> = None;
        let mut choices = 0;
        for slot in kinds
            .into_iter()
            .flatten()
            .filter_map(|kind| self.slot(kind))
        {
            let health = slot.tunnel.health();
            let has_peer = health > Health::Absent;
            if failed.contains(&slot.kind) || (is_later && !has_peer) {
                continue;
            }
            choices += usize::from(has_peer);
            if best.is_none_or(|(_, best)| health > best) {
                best = Some((slot, health));
            }
        }
        best.map(|(slot, _)| (slot, choices > 1))
    }

    fn slot(&self, kind: Kind) -> Option<&TunnelSlot> {
        match kind {
            Kind::Konnectivity => Some(&self.konnectivity),
            Kind::Openvpn => self.openvpn.as_ref(),
        }
    }

    /// Returns the route in force.
    pub(crate) fn route(&self) -> Route {
        *self.route.lock()
    }

    /// Sets the route for all dials from now on.
    pub(crate) fn set_route(&self, route: Route) {
        *self.route.lock() = route;
    }

    /// Ends the connections of a tunnel, and moves its pending dials to the route in force.
    pub(crate) fn cut(&self, kind: Kind) {
        if let Some(slot) = self.slot(kind) {
            slot.usage.cut();
        }
    }

    /// Returns the state of the tunnels, as input for the switch.
    pub(crate) fn view(&self) -> View {
        let side = |slot: &TunnelSlot| Side {
            health: slot.tunnel.health(),
            in_use: slot.usage.in_use(),
        };
        View {
            konnectivity: side(&self.konnectivity),
            openvpn: self.openvpn.as_ref().map(side),
        }
    }

    /// Returns the status of the tunnels, for people.
    pub(crate) fn tunnels(&self) -> Vec<TunnelStatus> {
        let slots = [Some(&self.konnectivity), self.openvpn.as_ref()];
        slots
            .into_iter()
            .flatten()
            .map(|slot| slot.status())
            .collect()
    }

    /// Returns the number of dials and connections of all tunnels.
    pub(crate) fn in_use(&self) -> usize {
        let slots = [Some(&self.konnectivity), self.openvpn.as_ref()];
        slots
            .into_iter()
            .flatten()
            .map(|slot| slot.usage.in_use())
            .sum()
    }

    /// Marks the server as draining, for the status. Dials are still served.
    pub(crate) fn drain(&self) {
        self.draining.store(true, Ordering::Relaxed);
    }

    /// Returns true if the server drains.
    pub(crate) fn is_draining(&self) -> bool {
        self.draining.load(Ordering::Relaxed)
    }

    /// Returns true if a tunnel of the route has a peer for new dials. The stock server asks only the first strategy, and is
    /// not ready while agents of another strategy serve all dials.
    pub(crate) fn is_ready(&self) -> bool {
        let route = self.route();
        [Some(route.first), route.second()]
            .into_iter()
            .flatten()
            .filter_map(|kind| self.slot(kind))
            .any(|slot| slot.tunnel.health() > Health::Absent)
    }

    /// Returns a seat for a new client on the thread where the client is best served.
    pub(crate) fn seat(&self) -> Option<ClientSeat> {
        self.slot(self.route().first)
            .and_then(|slot| slot.tunnel.seat())
    }
}

impl DialError {
    /// Returns the reason to count for the failure; `None` if the tunnel has already counted it.
    fn failure_reason(&self) -> Option<DialFailureReason> {
        match self {
            Self::NoAgent | Self::NoClient => Some(DialFailureReason::NoAgent),
            Self::Uncarried(_) | Self::TooLong(_) => Some(DialFailureReason::ErrorResponse),
            Self::Denied(_) => Some(DialFailureReason::Denied),
            Self::TooManyDials(_) => Some(DialFailureReason::TooManyDials),
            Self::Stream(StreamDialError::AgentLost | StreamDialError::ClientLost, _) => {
                Some(DialFailureReason::BackendClose)
            }
            Self::Stream(StreamDialError::NotSent | StreamDialError::TimedOut, _) => {
                Some(DialFailureReason::BackendDialTimeout)
            }
            Self::Stream(StreamDialError::Refused(_) | StreamDialError::Abandoned, _) => None,
        }
    }
}

impl Drop for Unfinished<'_> {
    fn drop(&mut self) {
        if !self.finished {
            let reason = DialFailureReason::FrontendClose;
            self.metrics.dial_failures(reason).increment(1);
        }
    }
}

#[cfg(test)]
pub(crate) mod tests;
