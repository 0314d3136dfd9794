//! The wait for the end of connections, before a server stops.

use std::sync::Arc;
use std::time::Duration;

use tokio::time::{Instant, sleep};
use tracing::{info, warn};

use crate::frontend::Frontend;

/// Interval between two looks at the number of connections of a draining server.
const DRAIN_CHECK: Duration = Duration::from_millis(100);

/// Waits until no dial or connection has existed for `linger`, and gRPC clients, agents and OpenVPN clients have the last
/// bytes of all connections, at most for `timeout`.
///
/// With a timeout of 0, does not wait, as stock servers up to v0.34. Releases v0.35 and v0.36 wait without a limit for gRPC
/// clients, which kubernetes-sigs/apiserver-network-proxy#866 corrects.
pub(super) async fn drained(frontend: Arc<Frontend>, timeout: Duration, linger: Duration) {
    if timeout.is_zero() {
        return;
    }
    let router = &frontend.router;
    // Each connection of a gRPC client has a call.
    let open = || router.in_use().max(frontend.calls.len()) + frontend.leaving.len();
    router.drain();
    let linger = linger.min(timeout);
    info!(?timeout, ?linger, connections = open(), "draining");
    let idle = async {
        let mut busy = Instant::now();
        loop {
            if open() > 0 {
                busy = Instant::now();
            } else if busy.elapsed() >= linger {
                return;
            }
            sleep(DRAIN_CHECK).await;
        }
    };
    match tokio::time::timeout(timeout, idle).await {
        Err(_) if open() > 0 => warn!(
            connections = open(),
            "--graceful-shutdown-timeout has passed: closing the connections that are still open"
        ),
        _ => info!("drained"),
    }
}
