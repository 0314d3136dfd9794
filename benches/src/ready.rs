//! Waits for a tunnel to carry connections.

use std::net::SocketAddr;
use std::time::Duration;

use anyhow::{Context as _, ensure};
use culvert_tests::Topology;
use tokio::time::{Instant, sleep, timeout};

use crate::entry::Entry;
use crate::harness::harness;
use crate::load::Echo;

/// Time limit for the tunnel to carry the first byte.
const LIMIT: Duration = Duration::from_secs(60);
/// Time limit for the first connection over QUIC. On a busy machine, only the agent's second attempt succeeds, after a
/// minute.
const QUIC_LIMIT: Duration = Duration::from_secs(150);
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

/// Check that the dials of a pair of ours use QUIC: an agent may prefer TCP again at any time.
#[derive(Debug)]
pub(crate) struct OverQuic {
    /// Counters at the last check.
    seen: Dials,
}

impl OverQuic {
    /// Waits until new connections use QUIC.
    pub(crate) async fn begin(
        topology: &Topology,
        entry: &Entry,
        target: SocketAddr,
    ) -> anyhow::Result<Self> {
        let begin = Instant::now();
        loop {
            carries(entry, target).await?;
            let seen = Dials::read(topology).await?;
            if seen.over_quic > 0.0 {
                return Ok(Self { seen });
            }
            ensure!(begin.elapsed() < QUIC_LIMIT, "no connection uses QUIC");
            sleep(PAUSE).await;
        }
    }

    /// Fails if dials since the last check used TCP.
    pub(crate) async fn check(&mut self, topology: &Topology) -> anyhow::Result<()> {
        let now = Dials::read(topology).await?;
        std::mem::replace(&mut self.seen, now).compare(now)
    }
}

/// Numbers of opened dials that a server of ours has counted.
#[derive(Debug, Clone, Copy)]
struct Dials {
    all: f64,
    over_quic: f64,
}

impl Dials {
    async fn read(topology: &Topology) -> anyhow::Result<Self> {
        let metrics = harness(topology.server_metrics(0)).await?;
        let opened = |name| {
            let value = metrics.value(name, &[("outcome", "opened")]);
            value.with_context(|| format!("the server has no metric {name}"))
        };
        Ok(Self {
            all: opened("culvert_tunnel_dials_total")?,
            over_quic: opened("culvert_quic_dials_total")?,
        })
    }

    /// Fails if a dial between these counters and `now` used TCP.
    fn compare(self, now: Self) -> anyhow::Result<()> {
        let all = now.all - self.all;
        let over_tcp = all - (now.over_quic - self.over_quic);
        ensure!(
            over_tcp <= 0.0,
            "{over_tcp} of {all} dials used TCP instead of QUIC"
        );
        Ok(())
    }
}

#[cfg(test)]
mod tests {
    #![allow(clippy::unwrap_used)]
    use super::*;

    #[test]
    fn dials_over_tcp_are_an_error() {
        let dials = |all, over_quic| Dials { all, over_quic };
        // The first dials of an agent use TCP.
        let before = dials(7.0, 2.0);
        before.compare(dials(17.0, 12.0)).unwrap();
        let error = before.compare(dials(17.0, 9.0)).unwrap_err().to_string();
        assert_eq!(error, "3 of 10 dials used TCP instead of QUIC");
    }
}
