//! A tunnel of the router, with the counts of its dials and connections.

use std::sync::Arc;

use culvert_stream::Dial;
use tokio::time::Instant;

use crate::backend::{Connection, DialError, DialGuard, Tunnel, Usage};
use crate::metrics::ServerMetrics;
use crate::tunnel::{Kind, TunnelStatus};

/// A tunnel of the router.
pub(super) struct TunnelSlot {
    pub(super) kind: Kind,
    pub(super) tunnel: Arc<dyn Tunnel>,
    pub(super) usage: Arc<Usage>,
}

/// Reason why a dial got no connection on a tunnel.
pub(super) enum DialFailure {
    Failed(DialError),
    /// A switch ended the use of the tunnel during the dial.
    Moved,
}

// === impl TunnelSlot ===

impl TunnelSlot {
    pub(super) fn new(
        kind: Kind,
        tunnel: Arc<dyn Tunnel>,
        switchable: bool,
        metrics: Arc<ServerMetrics>,
    ) -> Self {
        Self {
            kind,
            tunnel,
            usage: Usage::new(kind, switchable, metrics),
        }
    }

    /// Dials on the only tunnel of the server.
    pub(super) async fn dial_alone(
        &self,
        dial: &Dial,
        deadline: Instant,
    ) -> Result<Connection, DialError> {
        let guard = self.usage.begin();
        let outcome = self.tunnel.dial(dial, deadline).await;
        guard.settle(outcome)
    }

    /// Dials, but ends early if a switch ends the use of the tunnel.
    pub(super) async fn dial(
        &self,
        guard: DialGuard,
        dial: &Dial,
        deadline: Instant,
    ) -> Result<Connection, DialFailure> {
        let moved = async {
            match guard.end() {
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
            Some(outcome) => guard.settle(outcome).map_err(DialFailure::Failed),
            None => {
                guard.moved();
                Err(DialFailure::Moved)
            }
        }
    }

    pub(super) fn status(&self) -> TunnelStatus {
        let connections = self.usage.open();
        TunnelStatus {
            tunnel: self.kind,
            health: self.tunnel.health(),
            connections,
            dials: self.usage.in_use().saturating_sub(connections),
            peers: self.tunnel.peers(),
        }
    }
}
