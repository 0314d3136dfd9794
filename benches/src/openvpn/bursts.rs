//! A flow that transfers bursts of data as fast as possible, with pauses in between.
//!
//! A burst starts after the previous burst has arrived completely. So every burst goes through an idle
//! tunnel, and no buffer hides the pauses.

use std::net::SocketAddr;
use std::time::Duration;

use anyhow::{Context as _, bail, ensure};
use culvert_kit::client::BoxedStream;
use culvert_kit::pattern::{self, MAX_PIECE};
use tokio::io::{AsyncReadExt as _, AsyncWriteExt as _};
use tokio::time::{Instant, sleep};

use crate::entry::Entry;
use crate::load::Work;

/// Bytes per burst: twenty times the buffer of a UDP socket.
const BURST: u64 = 4 << 20;

/// Pause before each burst.
const PAUSE: Duration = Duration::from_millis(50);

/// Number of bursts before the first measured burst.
const UNCOUNTED: usize = 2;

/// An open flow.
pub(super) struct Bursts {
    stream: BoxedStream,
    work: Work,
    buffer: Vec<u8>,
}

impl Bursts {
    /// Opens a flow and transfers the first bursts.
    pub(super) async fn open(
        entry: &Entry,
        target: SocketAddr,
        work: Work,
    ) -> anyhow::Result<Self> {
        let line = match work {
            Work::Download => format!("bursts {BURST}\n"),
            Work::Upload => format!("batches {BURST}\n"),
            other => bail!("bursts cannot do {other:?}"),
        };
        let mut stream = entry.open(target).await?;
        stream.write_all(line.as_bytes()).await?;
        let mut bursts = Self {
            stream,
            work,
            buffer: vec![0; MAX_PIECE],
        };
        for _ in 0..UNCOUNTED {
            bursts.one().await?;
        }
        Ok(bursts)
    }

    /// Transfers bursts for `time`. Returns the rate during the bursts, without pauses, in bytes per second.
    pub(super) async fn rate(&mut self, time: Duration) -> anyhow::Result<f64> {
        let begin = Instant::now();
        let (mut moved, mut moving) = (0, Duration::ZERO);
        while moved == 0 || begin.elapsed() < time {
            moving += self.one().await?;
            moved += BURST;
        }
        Ok(moved as f64 / moving.as_secs_f64())
    }

    /// Transfers one burst after a pause. Returns the duration of the burst.
    async fn one(&mut self) -> anyhow::Result<Duration> {
        sleep(PAUSE).await;
        let begin = Instant::now();
        if self.work == Work::Upload {
            for piece in pattern::pieces(BURST) {
                self.stream.write_all(&piece).await.context("sending")?;
            }
            self.stream
                .read_u8()
                .await
                .context("acknowledgement of the endpoint")?;
        } else {
            self.stream.write_all(b".").await.context("sending")?;
            let mut left = BURST;
            while left > 0 {
                let read = self.stream.read(&mut self.buffer).await;
                let read = read.context("receiving")?;
                ensure!(read > 0, "connection closed in the middle of a burst");
                left = left.saturating_sub(read as u64);
            }
        }
        Ok(begin.elapsed())
    }
}

#[cfg(test)]
mod tests {
    #![allow(clippy::unwrap_used, clippy::expect_used, clippy::indexing_slicing)]
    use super::*;
    use crate::endpoint::Endpoints;

    #[tokio::test]
    async fn bursts_work_in_both_directions() {
        let endpoints = Endpoints::start().await.unwrap();
        let (entry, target) = (Entry::Plain(endpoints.lean()), endpoints.lean());
        for work in [Work::Download, Work::Upload] {
            let mut bursts = Bursts::open(&entry, target, work).await.unwrap();
            assert!(bursts.rate(Duration::from_millis(1)).await.unwrap() > 0.0);
        }
        assert!(Bursts::open(&entry, target, Work::Dials).await.is_err());
    }
}
