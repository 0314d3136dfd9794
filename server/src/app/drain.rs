//! The wait for the end of connections, before a server stops.

use std::sync::Arc;
use std::time::Duration;

use tokio::time::{Instant, sleep};
use tracing::{info, warn};

use crate::router::Router;

/// Time without a dial after which a draining server ends. Kubernetes needs some seconds to remove a server that is
/// not ready from its Service.
const DRAIN_LINGER: Duration = Duration::from_secs(5);

/// Interval between two looks at the number of connections of a draining server.
const DRAIN_CHECK: Duration = Duration::from_millis(100);

/// Waits until no dial or connection has existed for [`DRAIN_LINGER`], at most for `timeout`.
pub(super) async fn drained(router: Arc<Router>, timeout: Duration) {
    if timeout.is_zero() {
        return;
    }
    router.drain();
    info!(?timeout, connections = router.in_use(), "draining");
    let linger = DRAIN_LINGER.min(timeout);
    let idle = async {
        let mut busy = Instant::now();
        loop {
            if router.in_use() > 0 {
                busy = Instant::now();
            } else if busy.elapsed() >= linger {
                return;
            }
            sleep(DRAIN_CHECK).await;
        }
    };
    match tokio::time::timeout(timeout, idle).await {
        Ok(()) => info!("drained"),
        Err(_) => warn!(
            connections = router.in_use(),
            "--graceful-shutdown-timeout has passed: closing the connections that are still open"
        ),
    }
}
