//! A tunnel of the router: counts its dials and connections, and can end them all.

use std::sync::Arc;
use std::sync::atomic::{AtomicUsize, Ordering};

use culvert_host::label_values;
use culvert_host::telemetry::metrics::GaugeGuard;
use culvert_stream::Dial;
use metrics::{Counter, Gauge};
use parking_lot::Mutex;
use tokio::time::Instant;
use tokio_util::sync::CancellationToken;

use crate::backend::Connection;
use crate::backend::agent::StreamDialError;
use crate::backend::tunnel::{DialError, Kind, Tunnel};
use crate::metrics::ServerMetrics;
use crate::switch::status::TunnelStatus;

label_values! {
    /// Outcome of a dial on a tunnel.
    pub enum DialOutcome("outcome") {
        /// A connection is open.
        Opened = "opened",
        /// The peer could not reach the endpoint.
        Refused = "refused",
        /// No peer was connected.
        NoPeer = "no_peer",
        /// The peer left, or abandoned the dial.
        Lost = "lost",
        /// No answer arrived in time.
        TimedOut = "timed_out",
        /// A switch left the tunnel, and the dial continued on the other tunnel.
        Moved = "moved",
        /// The client left before the outcome.
        GivenUp = "given_up",
    }
}

/// A tunnel of the router.
pub(super) struct Lane {
    pub(super) kind: Kind,
    pub(super) tunnel: Arc<dyn Tunnel>,
    /// Number of dials and connections.
    in_use: AtomicUsize,
    /// Number of connections.
    open: AtomicUsize,
    /// Ends everything in use now; a cut replaces the token. `None` if no switch can happen.
    end: Option<Mutex<CancellationToken>>,
    connections: Gauge,
    dials: Vec<Counter>,
}

/// Entry of a dial or connection in the counts of its tunnel, until dropped.
pub struct Held {
    lane: Arc<Lane>,
    end: Option<CancellationToken>,
    dial: State,
}

enum State {
    Pending,
    Ended,
    Open(#[allow(dead_code, reason = "counts until it is dropped")] GaugeGuard),
}

/// Reason why a dial got no connection on a tunnel.
pub(super) enum Missed {
    Failed(DialError),
    /// A switch left the tunnel.
    Moved,
}

// === impl Lane ===

impl Lane {
    pub(super) fn new(
        kind: Kind,
        tunnel: Arc<dyn Tunnel>,
        switchable: bool,
        metrics: &ServerMetrics,
    ) -> Arc<Self> {
        let outcomes = DialOutcome::ALL.iter();
        Arc::new(Self {
            kind,
            tunnel,
            in_use: AtomicUsize::new(0),
            open: AtomicUsize::new(0),
            end: switchable.then(Mutex::default),
            connections: metrics.tunnel_connections(kind).clone(),
            dials: outcomes
                .map(|outcome| metrics.tunnel_dials(kind, *outcome).clone())
                .collect(),
        })
    }

    /// Adds a new dial to the counts.
    pub(super) fn hold(self: &Arc<Self>) -> Held {
        self.in_use.fetch_add(1, Ordering::SeqCst);
        Held {
            lane: self.clone(),
            end: self.end.as_ref().map(|end| end.lock().clone()),
            dial: State::Pending,
        }
    }

    /// Dials on the only tunnel of the server.
    pub(super) async fn dial_alone(
        self: &Arc<Self>,
        dial: &Dial,
        deadline: Instant,
    ) -> Result<Connection, DialError> {
        let held = self.hold();
        let outcome = self.tunnel.dial(dial, deadline).await;
        held.settle(outcome)
    }

    /// Dials, but ends early if a switch leaves the tunnel.
    pub(super) async fn dial(
        &self,
        held: Held,
        dial: &Dial,
        deadline: Instant,
    ) -> Result<Connection, Missed> {
        let moved = async {
            match &held.end {
                Some(end) => end.cancelled().await,
                None => std::future::pending().await,
            }
        };
        let outcome = tokio::select! {
            biased;
            outcome = self.tunnel.dial(dial, deadline) => Some(outcome),
            () = moved => None,
        };
        match outcome {
            Some(outcome) => held.settle(outcome).map_err(Missed::Failed),
            None => {
                held.moved();
                Err(Missed::Moved)
            }
        }
    }

    /// Ends everything in use now.
    pub(super) fn cut(&self) {
        if let Some(end) = &self.end {
            std::mem::take(&mut *end.lock()).cancel();
        }
    }

    pub(super) fn in_use(&self) -> usize {
        self.in_use.load(Ordering::SeqCst)
    }

    pub(super) fn status(&self) -> TunnelStatus {
        let connections = self.open.load(Ordering::Relaxed);
        TunnelStatus {
            tunnel: self.kind,
            health: self.tunnel.health(),
            connections,
            dials: self.in_use().saturating_sub(connections),
            peers: self.tunnel.peers(),
        }
    }

    fn count(&self, outcome: DialOutcome) {
        let index = DialOutcome::ALL.iter().position(|known| *known == outcome);
        if let Some(counter) = index.and_then(|index| self.dials.get(index)) {
            counter.increment(1);
        }
    }
}

// === impl Held ===

impl Held {
    /// Returns the token that fires when the connection must end; `None` if no switch can happen.
    pub fn end(&self) -> Option<&CancellationToken> {
        self.end.as_ref()
    }

    /// Records that the dial continues on another tunnel.
    pub(super) fn moved(mut self) {
        self.finish(DialOutcome::Moved);
    }

    fn settle(mut self, outcome: Result<Connection, DialError>) -> Result<Connection, DialError> {
        match outcome {
            Ok(connection) => {
                self.lane.count(DialOutcome::Opened);
                self.lane.open.fetch_add(1, Ordering::Relaxed);
                self.dial = State::Open(GaugeGuard::new(&self.lane.connections));
                Ok(connection.held_by(self))
            }
            Err(error) => {
                self.finish(DialOutcome::from(&error));
                Err(error)
            }
        }
    }

    fn finish(&mut self, outcome: DialOutcome) {
        self.lane.count(outcome);
        self.dial = State::Ended;
    }
}

impl Drop for Held {
    fn drop(&mut self) {
        match self.dial {
            State::Pending => self.lane.count(DialOutcome::GivenUp),
            State::Ended => {}
            State::Open(_) => {
                self.lane.open.fetch_sub(1, Ordering::Relaxed);
            }
        }
        self.lane.in_use.fetch_sub(1, Ordering::SeqCst);
    }
}

impl From<&DialError> for DialOutcome {
    fn from(error: &DialError) -> Self {
        match error {
            DialError::NoAgent | DialError::NoClient => Self::NoPeer,
            DialError::Uncarried(_) | DialError::Stream(StreamDialError::Refused(_)) => {
                Self::Refused
            }
            DialError::Stream(StreamDialError::Abandoned | StreamDialError::AgentLost) => {
                Self::Lost
            }
            DialError::Stream(StreamDialError::NotSent | StreamDialError::TimedOut) => {
                Self::TimedOut
            }
        }
    }
}
