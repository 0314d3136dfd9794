//! One tunnel with its books: the dials and connections that are on it, and their common end.

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
    /// What became of a dial on one tunnel.
    pub enum DialOutcome("outcome") {
        /// It is a connection.
        Opened = "opened",
        /// The peer could not reach the target.
        Refused = "refused",
        /// No peer was connected.
        NoPeer = "no_peer",
        /// The peer left, or gave the dial up.
        Lost = "lost",
        /// No answer came in time.
        TimedOut = "timed_out",
        /// The tunnel was switched away from; the dial went on by the other.
        Moved = "moved",
        /// The client left first.
        GivenUp = "given_up",
    }
}

/// One tunnel of the router.
pub(super) struct Lane {
    pub(super) kind: Kind,
    pub(super) tunnel: Arc<dyn Tunnel>,
    /// Dials and connections.
    in_use: AtomicUsize,
    /// Connections.
    open: AtomicUsize,
    /// Ends what is in use now; a new one for what comes later. `None` where no switch can happen.
    end: Option<Mutex<CancellationToken>>,
    connections: Gauge,
    dials: Vec<Counter>,
}

/// A dial's or a connection's place on its tunnel.
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

/// Why a dial has no connection by one tunnel.
pub(super) enum Missed {
    Failed(DialError),
    /// The tunnel was switched away from.
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

    /// A place for a new dial.
    pub(super) fn hold(self: &Arc<Self>) -> Held {
        self.in_use.fetch_add(1, Ordering::SeqCst);
        Held {
            lane: self.clone(),
            end: self.end.as_ref().map(|end| end.lock().clone()),
            dial: State::Pending,
        }
    }

    /// A dial by the only tunnel there is.
    pub(super) async fn dial_alone(
        self: &Arc<Self>,
        dial: &Dial,
        deadline: Instant,
    ) -> Result<Connection, DialError> {
        let held = self.hold();
        let outcome = self.tunnel.dial(dial, deadline).await;
        held.settle(outcome)
    }

    /// A dial that ends early if the tunnel is switched away from.
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

    /// Ends what is in use now.
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
    /// Fires when the connection has to end; `None` where that never happens.
    pub fn end(&self) -> Option<&CancellationToken> {
        self.end.as_ref()
    }

    /// The dial goes on by another tunnel.
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
