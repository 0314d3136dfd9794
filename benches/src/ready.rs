//! Waits for a tunnel to carry connections.

use std::net::SocketAddr;
use std::time::Duration;

use anyhow::{Context as _, ensure};
use culvert_tests::Topology;
use tokio::time::{Instant, sleep, timeout};

use crate::entry::Entry;
use crate::load::Echo;

/// Time limit for the tunnel to carry the first byte, and for the first connection over QUIC.
const LIMIT: Duration = Duration::from_secs(60);
const TRY_LIMIT: Duration = Duration::from_secs(10);
const PAUSE: Duration = Duration::from_millis(100);

/// Flag of our agent: new connections use QUIC if possible.
pub(crate) const PREFER_QUIC: &str = "--transport=quic";

/// Waits until a tunnel carries data.
pub(crate) async fn carries(entry: &Entry, target: SocketAddr) -> anyhow::Result<()> {
    let begin = Instant::now();
    loop {
        let echo = timeout(TRY_LIMIT, Echo::proven(entry, target)).await;
        match echo.context("no answer").flatten() {
            Ok(_) => return Ok(()),
            Err(error) if begin.elapsed() > LIMIT => return Err(error),
            Err(_) => sleep(PAUSE).await,
        }
    }
}

/// Waits until new connections use QUIC.
pub(crate) async fn uses_quic(
    topology: &Topology,
    entry: &Entry,
    target: SocketAddr,
) -> anyhow::Result<()> {
    let begin = Instant::now();
    loop {
        carries(entry, target).await?;
        let metrics = topology.server_metrics(0).await;
        match metrics.value("culvert_quic_dials_total", &[("outcome", "opened")]) {
            Some(count) if count > 0.0 => return Ok(()),
            _ => ensure!(begin.elapsed() < LIMIT, "no connection uses QUIC"),
        }
        sleep(PAUSE).await;
    }
}
