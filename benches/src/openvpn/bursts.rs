//! One flow that moves much as fast as it can, and then nothing for a while.
//!
//! A burst begins when the one before has arrived as a whole: what is measured is how fast bursts get through a
//! tunnel that was idle, and pauses hide in no buffer.

use std::net::SocketAddr;
use std::time::Duration;

use anyhow::{Context as _, bail, ensure};
use culvert_kit::client::BoxedStream;
use culvert_kit::pattern::{self, MAX_PIECE};
use tokio::io::{AsyncReadExt as _, AsyncWriteExt as _};
use tokio::time::{Instant, sleep};

use crate::entry::Entry;
use crate::load::Work;

/// The bytes of a burst: twenty times what a UDP socket's buffer holds.
const BURST: u64 = 4 << 20;

/// How long nothing moves behind one.
const PAUSE: Duration = Duration::from_millis(50);

/// How many bursts come before those that count.
const UNCOUNTED: usize = 2;

/// A flow.
pub struct Bursts {
    stream: BoxedStream,
    work: Work,
    buffer: Vec<u8>,
}

impl Bursts {
    /// Opens one and sends the first bursts.
    ///
    /// # Errors
    /// When it breaks.
    pub async fn open(entry: &Entry, target: SocketAddr, work: Work) -> anyhow::Result<Self> {
        let line = match work {
            Work::Download => format!("bursts {BURST}\n"),
            Work::Upload => format!("batches {BURST}\n"),
            other => bail!("no bursts of {other:?}"),
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

    /// Sends them for some time. How many bytes per second they move while they are under way.
    ///
    /// # Errors
    /// When the flow breaks.
    pub async fn rate(&mut self, time: Duration) -> anyhow::Result<f64> {
        let begin = Instant::now();
        let (mut moved, mut moving) = (0, Duration::ZERO);
        while moved == 0 || begin.elapsed() < time {
            moving += self.one().await?;
            moved += BURST;
        }
        Ok(moved as f64 / moving.as_secs_f64())
    }

    /// Sends one after a pause. How long it took.
    async fn one(&mut self) -> anyhow::Result<Duration> {
        sleep(PAUSE).await;
        let begin = Instant::now();
        if self.work == Work::Upload {
            for piece in pattern::pieces(BURST) {
                self.stream.write_all(&piece).await.context("sending")?;
            }
            self.stream.read_u8().await.context("the endpoint's word")?;
        } else {
            self.stream.write_all(b".").await.context("sending")?;
            let mut left = BURST;
            while left > 0 {
                let read = self.stream.read(&mut self.buffer).await;
                let read = read.context("receiving")?;
                ensure!(read > 0, "an end in the middle of a burst");
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
    async fn bursts_go_either_way() {
        let endpoints = Endpoints::start().await.unwrap();
        let (entry, target) = (Entry::Plain(endpoints.lean()), endpoints.lean());
        for work in [Work::Download, Work::Upload] {
            let mut bursts = Bursts::open(&entry, target, work).await.unwrap();
            assert!(bursts.rate(Duration::from_millis(1)).await.unwrap() > 0.0);
        }
        assert!(Bursts::open(&entry, target, Work::Dials).await.is_err());
    }
}
