//! The router: turns a front end's [`Dial`] into an open connection. Chooses the tunnel, limits the wait,
//! and fails over to the other tunnel where the route allows failover. Failover is safe because no byte of
//! the client has been sent yet.

mod lane;

use std::sync::Arc;
use std::sync::atomic::{AtomicU8, Ordering};
use std::time::Duration;

use culvert_stream::Dial;
use tokio::time::Instant;
use tracing::debug;

use self::lane::{Lane, Missed};
use crate::backend::Connection;
use crate::backend::agent::{SILENT_AFTER, StreamDialError};
use crate::backend::tunnel::{DialError, Health, Kind, Tunnel};
use crate::metrics::{DialFailureReason, ServerMetrics};
use crate::switch::machine::{Route, Side, View};
use crate::switch::status::TunnelStatus;

pub use self::lane::{DialOutcome, Held};

/// Longest time for a dial if no flag sets a limit. Agents end a dial after 5 s, and kube-apiserver's
/// client library after 30 s, so both ends have forgotten a longer dial.
pub const MAX_DIAL: Duration = Duration::from_secs(35);

/// Chooses tunnels for the dials of all front ends.
pub struct Router {
    konnectivity: Arc<Lane>,
    openvpn: Option<Arc<Lane>>,
    /// The [`Route`] in force, as bits.
    route: AtomicU8,
    /// Value of `--backend-dial-timeout`.
    dial_timeout: Option<Duration>,
    metrics: Arc<ServerMetrics>,
}

/// Counts a dial whose future is dropped before the outcome: its client has left.
struct Unfinished<'a> {
    metrics: &'a ServerMetrics,
    finished: bool,
}

impl Router {
    /// Creates a router over the tunnel of agents and, if present, the OpenVPN tunnel. The first route is
    /// the tunnel of agents alone. [`MAX_DIAL`] bounds a dial if `dial_timeout` is `None`.
    pub fn new(
        konnectivity: Arc<dyn Tunnel>,
        openvpn: Option<Arc<dyn Tunnel>>,
        dial_timeout: Option<Duration>,
        metrics: Arc<ServerMetrics>,
    ) -> Arc<Self> {
        let switchable = openvpn.is_some();
        let lane = |kind, tunnel| Lane::new(kind, tunnel, switchable, &metrics);
        Arc::new(Self {
            konnectivity: lane(Kind::Konnectivity, konnectivity),
            openvpn: openvpn.map(|tunnel| lane(Kind::Openvpn, tunnel)),
            route: AtomicU8::new(Route::only(Kind::Konnectivity).to_bits()),
            dial_timeout,
            metrics,
        })
    }

    /// Opens a connection. Dropping the future cancels the dial.
    ///
    /// # Errors
    /// [`DialError`]; its text is sent to the client.
    pub async fn dial(&self, dial: &Dial) -> Result<Connection, DialError> {
        let started = Instant::now();
        let mut unfinished = Unfinished {
            metrics: &self.metrics,
            finished: false,
        };
        let deadline = started + self.dial_timeout.unwrap_or(MAX_DIAL);
        let outcome = match &self.openvpn {
            Some(_) => self.dial_either(dial, deadline).await,
            None => self.konnectivity.dial_alone(dial, deadline).await,
        };
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

    async fn dial_either(&self, dial: &Dial, deadline: Instant) -> Result<Connection, DialError> {
        let mut failed = Vec::new();
        let mut last = None;
        loop {
            let Some((lane, has_other)) = self.choose(&failed, last.is_some()) else {
                return Err(last.unwrap_or(DialError::NoAgent));
            };
            let held = lane.hold();
            // A switch that ends from here on sees this dial. The end of an earlier switch shows in the
            // route.
            if !self.route().includes(lane.kind) {
                held.moved();
                continue;
            }
            let limit = match has_other {
                true => deadline.min(Instant::now() + SILENT_AFTER),
                false => deadline,
            };
            let error = match lane.dial(held, dial, limit).await {
                Ok(connection) => return Ok(connection),
                Err(Missed::Moved) => continue,
                Err(Missed::Failed(error)) => error,
            };
            if error.is_final() || Instant::now() >= deadline {
                return Err(error);
            }
            debug!(tunnel = lane.kind.as_str(), %error, "looking for another tunnel");
            failed.push(lane.kind);
            last = Some(error);
        }
    }

    /// Chooses the tunnel for a dial: the healthiest of the route, or the first of the route if both are
    /// equal. A later try requires a tunnel that has a peer. The boolean is true if both tunnels are
    /// possible.
    fn choose(&self, failed: &[Kind], is_later: bool) -> Option<(&Arc<Lane>, bool)> {
        let route = self.route();
        let kinds = [Some(route.first), route.second()];
        let mut best: Option<(&Arc<Lane>, Health)> = None;
        let mut choices = 0;
        for lane in kinds
            .into_iter()
            .flatten()
            .filter_map(|kind| self.lane(kind))
        {
            let health = lane.tunnel.health();
            let has_peer = health > Health::Absent;
            if failed.contains(&lane.kind) || (is_later && !has_peer) {
                continue;
            }
            choices += usize::from(has_peer);
            if best.is_none_or(|(_, best)| health > best) {
                best = Some((lane, health));
            }
        }
        best.map(|(lane, _)| (lane, choices > 1))
    }

    fn lane(&self, kind: Kind) -> Option<&Arc<Lane>> {
        match kind {
            Kind::Konnectivity => Some(&self.konnectivity),
            Kind::Openvpn => self.openvpn.as_ref(),
        }
    }

    /// Returns the route in force.
    pub fn route(&self) -> Route {
        Route::from_bits(self.route.load(Ordering::SeqCst))
    }

    /// Sets the route for all dials from now on.
    pub fn set_route(&self, route: Route) {
        self.route.store(route.to_bits(), Ordering::SeqCst);
    }

    /// Ends the connections of a tunnel, and moves its pending dials to the route in force.
    pub fn cut(&self, kind: Kind) {
        if let Some(lane) = self.lane(kind) {
            lane.cut();
        }
    }

    /// Returns the state of the tunnels, as input for the switch.
    pub fn view(&self) -> View {
        let side = |lane: &Arc<Lane>| Side {
            health: lane.tunnel.health(),
            in_use: lane.in_use(),
        };
        View {
            konnectivity: side(&self.konnectivity),
            openvpn: self.openvpn.as_ref().map(side),
        }
    }

    /// Returns the status of the tunnels, for people.
    pub fn tunnels(&self) -> Vec<TunnelStatus> {
        let lanes = [Some(&self.konnectivity), self.openvpn.as_ref()];
        lanes
            .into_iter()
            .flatten()
            .map(|lane| lane.status())
            .collect()
    }

    /// Returns true if a tunnel of the route has a peer for new dials.
    pub fn is_ready(&self) -> bool {
        let route = self.route();
        [Some(route.first), route.second()]
            .into_iter()
            .flatten()
            .filter_map(|kind| self.lane(kind))
            .any(|lane| lane.tunnel.health() > Health::Absent)
    }

    /// Returns the thread where a new client is best served.
    pub fn shard(&self) -> Option<usize> {
        self.lane(self.route().first)
            .and_then(|lane| lane.tunnel.shard())
    }
}

impl DialError {
    /// Returns the reason to count for the failure; `None` if the tunnel has already counted it.
    fn failure_reason(&self) -> Option<DialFailureReason> {
        match self {
            Self::NoAgent | Self::NoClient => Some(DialFailureReason::NoAgent),
            Self::Uncarried(_) => Some(DialFailureReason::ErrorResponse),
            Self::Stream(StreamDialError::AgentLost) => Some(DialFailureReason::BackendClose),
            Self::Stream(StreamDialError::NotSent | StreamDialError::TimedOut) => {
                Some(DialFailureReason::BackendDialTimeout)
            }
            Self::Stream(StreamDialError::Refused(_) | StreamDialError::Abandoned) => None,
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
