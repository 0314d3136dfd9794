//! The use of one tunnel: counts its dials and connections, and can end them all.

use std::sync::Arc;
use std::sync::atomic::{AtomicUsize, Ordering};

use culvert_host::telemetry::metrics::GaugeGuard;
use parking_lot::Mutex;
use tokio_util::sync::CancellationToken;

use super::dial::{DialError, StreamDialError};
use crate::metrics::{DialOutcome, ServerMetrics};
use crate::tunnel::Kind;

/// Dials and connections of one tunnel.
pub struct Usage {
    /// Number of dials and connections.
    in_use: AtomicUsize,
    /// Number of connections.
    open: AtomicUsize,
    /// Token that ends all current dials and connections. A cut fires the token and replaces it with a new
    /// token. `None` if no switch can happen.
    end: Option<Mutex<CancellationToken>>,
    kind: Kind,
    metrics: Arc<ServerMetrics>,
}

/// Counts a dial or connection in its tunnel until dropped.
pub struct DialGuard {
    usage: Arc<Usage>,
    end: Option<CancellationToken>,
    dial: State,
}

enum State {
    Pending,
    Ended,
    Open(#[allow(dead_code, reason = "counts until it is dropped")] GaugeGuard),
}

// === impl Usage ===

impl Usage {
    /// Creates the counts of a tunnel without dials. A tunnel that is not `switchable` is never cut.
    pub fn new(kind: Kind, switchable: bool, metrics: Arc<ServerMetrics>) -> Arc<Self> {
        Arc::new(Self {
            in_use: AtomicUsize::new(0),
            open: AtomicUsize::new(0),
            end: switchable.then(Mutex::default),
            kind,
            metrics,
        })
    }

    /// Adds a new dial to the counts.
    pub fn begin(self: &Arc<Self>) -> DialGuard {
        self.in_use.fetch_add(1, Ordering::SeqCst);
        DialGuard {
            usage: self.clone(),
            end: self.end.as_ref().map(|end| end.lock().clone()),
            dial: State::Pending,
        }
    }

    /// Ends all current dials and connections.
    pub fn cut(&self) {
        if let Some(end) = &self.end {
            std::mem::take(&mut *end.lock()).cancel();
        }
    }

    /// Returns the number of dials and connections.
    pub fn in_use(&self) -> usize {
        self.in_use.load(Ordering::SeqCst)
    }

    /// Returns the number of connections.
    pub fn open(&self) -> usize {
        self.open.load(Ordering::Relaxed)
    }

    fn count(&self, outcome: DialOutcome) {
        let dials = &self.metrics.tunnel_dials;
        dials.get((self.kind, outcome)).increment(1);
    }
}

// === impl DialGuard ===

impl DialGuard {
    /// Returns the token that fires when the connection must end; `None` if no switch can happen.
    pub fn end(&self) -> Option<&CancellationToken> {
        self.end.as_ref()
    }

    /// Records that the dial continues on another tunnel.
    pub fn moved(mut self) {
        self.finish(DialOutcome::Moved);
    }

    /// Counts the connection of a successful dial.
    pub(super) fn opened(mut self) -> Self {
        self.usage.count(DialOutcome::Opened);
        self.usage.open.fetch_add(1, Ordering::Relaxed);
        let connections = &self.usage.metrics.tunnel_connections;
        self.dial = State::Open(GaugeGuard::new(connections.get(self.usage.kind)));
        self
    }

    /// Records the failure of the dial.
    pub(super) fn failed(mut self, error: &DialError) {
        self.finish(DialOutcome::from(error));
    }

    fn finish(&mut self, outcome: DialOutcome) {
        self.usage.count(outcome);
        self.dial = State::Ended;
    }
}

impl Drop for DialGuard {
    fn drop(&mut self) {
        match self.dial {
            State::Pending => self.usage.count(DialOutcome::GivenUp),
            State::Ended => {}
            State::Open(_) => {
                self.usage.open.fetch_sub(1, Ordering::Relaxed);
            }
        }
        self.usage.in_use.fetch_sub(1, Ordering::SeqCst);
    }
}

impl From<&DialError> for DialOutcome {
    fn from(error: &DialError) -> Self {
        match error {
            DialError::NoAgent | DialError::NoClient | DialError::TooManyDials(_) => Self::NoPeer,
            DialError::Uncarried(_)
            | DialError::Denied(_)
            | DialError::TooLong(_)
            | DialError::Stream(StreamDialError::Refused(_), _) => Self::Refused,
            DialError::Stream(
                StreamDialError::Abandoned
                | StreamDialError::AgentLost
                | StreamDialError::ClientLost,
                _,
            ) => Self::Lost,
            DialError::Stream(StreamDialError::NotSent | StreamDialError::TimedOut, _) => {
                Self::TimedOut
            }
        }
    }
}
