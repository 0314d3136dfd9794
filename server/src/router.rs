//! From a front end's [`Dial`] to an open connection: chooses the tunnel, bounds the wait, and
//! fails over to the other tunnel where the route allows it. That is safe: no byte of the client
//! has been sent yet.

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

/// The longest that a dial may take where no flag says so. Agents end a dial after 5 s and
/// kube-apiserver's client library after 30 s, so what takes longer has been forgotten by both.
pub const MAX_DIAL: Duration = Duration::from_secs(35);

/// Chooses tunnels for the dials of all front ends.
pub struct Router {
    konnectivity: Arc<Lane>,
    openvpn: Option<Arc<Lane>>,
    /// The [`Route`] in force.
    route: AtomicU8,
    /// `--backend-dial-timeout`.
    dial_timeout: Option<Duration>,
    metrics: Arc<ServerMetrics>,
}

/// Counts a dial whose future is dropped before it had an outcome: its client left.
struct Unfinished<'a> {
    metrics: &'a ServerMetrics,
    finished: bool,
}

impl Router {
    /// A router over the tunnel of agents, and the OpenVPN tunnel if there is one. It begins with
    /// the former; [`MAX_DIAL`] bounds a dial where `dial_timeout` does not.
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

    /// Opens a connection. Dropping the future gives the dial up.
    ///
    /// # Errors
    /// [`DialError`]; its text is what the client is told.
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
            // From here on a switch that ends sees this dial. One that ended before is seen here.
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

    /// The tunnel for a dial: the healthiest of the route, the route's first of equals. A later
    /// try needs one that has a peer. Also says whether the other one would be a choice.
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

    /// The route in force.
    pub fn route(&self) -> Route {
        Route::from_bits(self.route.load(Ordering::SeqCst))
    }

    /// Puts a route in force for the dials from now on.
    pub fn set_route(&self, route: Route) {
        self.route.store(route.to_bits(), Ordering::SeqCst);
    }

    /// Ends the connections of one tunnel, and moves its pending dials to the route in force.
    pub fn cut(&self, kind: Kind) {
        if let Some(lane) = self.lane(kind) {
            lane.cut();
        }
    }

    /// What a switch has to know of the tunnels.
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

    /// The tunnels for people.
    pub fn tunnels(&self) -> Vec<TunnelStatus> {
        let lanes = [Some(&self.konnectivity), self.openvpn.as_ref()];
        lanes
            .into_iter()
            .flatten()
            .map(|lane| lane.status())
            .collect()
    }

    /// Whether new dials have any peer to go to.
    pub fn is_ready(&self) -> bool {
        let route = self.route();
        [Some(route.first), route.second()]
            .into_iter()
            .flatten()
            .filter_map(|kind| self.lane(kind))
            .any(|lane| lane.tunnel.health() > Health::Absent)
    }

    /// The thread where a new client is best served.
    pub fn shard(&self) -> Option<usize> {
        self.lane(self.route().first)
            .and_then(|lane| lane.tunnel.shard())
    }
}

impl DialError {
    /// What the failure counts as, unless the tunnel has counted it already.
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
