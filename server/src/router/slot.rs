//! A tunnel of the router, with the counts of its dials and connections.

use std::sync::Arc;

use culvert_stream::Dial;
use tokio::time::Instant;

use crate::backend::{Connection, DialError, DialGuard, Tunnel, Usage};
use crate::tunnel::{Kind, TunnelStatus};

/// A tunnel of the router.
pub(super) struct TunnelSlot {
    pub(super) kind: Kind,
    pub(super) tunnel: Arc<dyn Tunnel>,
    pub(super) usage: Arc<Usage>,
}

// === impl TunnelSlot ===

impl TunnelSlot {
    /// Dials. Returns `None` if a switch ended the use of the tunnel during the dial, or `worse` resolved.
    pub(super) async fn dial(
        &self,
        guard: DialGuard,
        dial: &Dial,
        deadline: Instant,
        worse: impl Future<Output = ()>,
    ) -> Option<Result<Connection, DialError>> {
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
            () = worse => None,
        };
        match outcome {
            Some(outcome) => Some(guard.settle(outcome)),
            None => {
                guard.moved();
                None
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
