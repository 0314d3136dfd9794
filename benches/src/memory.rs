//! Memory of idle connections, and memory of the agent beside bulk transfers.
//!
//! Both rows need programs that have carried nothing yet: an allocator keeps the memory of an earlier load,
//! and growth would not show.

use std::net::SocketAddr;
use std::sync::Arc;
use std::time::Duration;

use anyhow::{Context as _, bail, ensure};
use culvert_kit::client::BoxedStream;
use rustix::process::{Resource, Rlimit, getrlimit, setrlimit};
use tokio::io::{AsyncReadExt as _, AsyncWriteExt as _};
use tokio::sync::Semaphore;
use tokio::task::JoinSet;
use tokio::time::{Instant, sleep, timeout_at};

use crate::bulk::Bulk;
use crate::entry::Entry;
use crate::figures::{AGENT_MEMORY, BULK_RATE, Figures, IDLE_MEMORY, MIB};
use crate::measure::Subject;

/// Number of idle connections.
pub(crate) const IDLE: u64 = 10_000;

/// Number of idle connections beside bulk transfers.
const IDLE_BESIDE_BULK: u64 = 1000;

/// Number of bulk connections in each direction.
const BULK: usize = 4;

/// Number of concurrent dials, and the time limit for all of them.
const DIALS: usize = 16;
const DIAL_TIME: Duration = Duration::from_secs(40);

/// Time for programs to come to rest.
pub(crate) const REST: Duration = Duration::from_secs(1);

/// Interval of memory readings during bulk transfers.
const LOOK: Duration = Duration::from_millis(50);

/// File descriptors that a process needs besides connections.
const SPARE: u64 = 300;

/// Raises the limit of file descriptors of this process, and of all processes that it starts, to the hard
/// limit. Returns the limit.
pub(crate) fn raise_limit() -> u64 {
    let limit = getrlimit(Resource::Nofile);
    let raised = Rlimit {
        current: limit.maximum,
        maximum: limit.maximum,
    };
    // A failure shows in the limit read below.
    setrlimit(Resource::Nofile, raised).ok();
    getrlimit(Resource::Nofile).current.unwrap_or(u64::MAX)
}

/// Returns the number of idle connections that fit under a limit of file descriptors, if a process needs
/// `each` per connection. Fails if this process itself cannot open all connections.
pub(crate) fn affordable(limit: u64, each: u64) -> anyhow::Result<u64> {
    ensure!(
        limit >= IDLE + SPARE,
        "needs RLIMIT_NOFILE of {}, the hard limit is {limit}",
        IDLE + SPARE
    );
    let fit = (limit - SPARE) / each.max(1);
    Ok(fit.min(IDLE))
}

/// Returns the memory per idle connection, summed over all programs, with `wanted` connections. Fails if a connection
/// cannot be opened, or if the programs use less memory than before.
pub(crate) async fn idle(
    subject: &mut impl Subject,
    target: SocketAddr,
    wanted: u64,
) -> anyhow::Result<Figures> {
    // The first connection causes one-time allocations.
    let _first = open(subject.entry(), target, 1).await?;
    sleep(REST).await;
    let before = subject.rss()?.context("contender has no program")?;
    let held = open(subject.entry(), target, wanted).await?;
    sleep(REST).await;
    let after = subject.rss()?.context("contender has no program")?;
    drop(held);
    let growth = after.checked_sub(before);
    let growth = growth.with_context(|| format!("memory shrank from {before} to {after} bytes"))?;
    Ok(vec![(IDLE_MEMORY, growth as f64 / 1024.0 / wanted as f64)])
}

/// Returns the peak memory of the agent with idle connections and bulk transfers in both directions.
pub(crate) async fn beside_bulk(
    entry: &Entry,
    target: SocketAddr,
    time: Duration,
    mut agent_rss: impl FnMut() -> anyhow::Result<Option<u64>>,
) -> anyhow::Result<Figures> {
    let _held = open(entry, target, IDLE_BESIDE_BULK).await?;
    let mut bulk = Bulk::default()
        .downloads(entry, target, BULK)
        .uploads(entry, target, BULK);
    let (begin, mark) = (Instant::now(), bulk.mark());
    let mut most = 0;
    while begin.elapsed() < time {
        sleep(LOOK).await;
        most = most.max(agent_rss()?.context("contender has no program")?);
    }
    let rate = bulk.rate_since(mark)?;
    Ok(vec![
        (AGENT_MEMORY, most as f64 / MIB),
        (BULK_RATE, rate / MIB),
    ])
}

/// Opens `wanted` connections. Each connection has carried one byte in both directions. Fails if a dial fails, or if the
/// time is up.
async fn open(entry: &Entry, target: SocketAddr, wanted: u64) -> anyhow::Result<Vec<BoxedStream>> {
    let deadline = Instant::now() + DIAL_TIME;
    let turns = Arc::new(Semaphore::new(DIALS));
    let mut dials = JoinSet::new();
    for _ in 0..wanted {
        let (entry, turns) = (entry.clone(), Arc::clone(&turns));
        dials.spawn(async move {
            let _turn = turns.acquire().await?;
            let mut stream = entry.open(target).await?;
            stream.write_all(b"echo\nx").await?;
            stream.flush().await?;
            if stream.read_u8().await? != b'x' {
                bail!("echo returned another byte");
            }
            Ok(stream)
        });
    }
    let mut held = Vec::new();
    loop {
        let opened = timeout_at(deadline, dials.join_next()).await;
        let count = held.len();
        let opened = opened.with_context(|| {
            format!("only {count} of {wanted} connections within {DIAL_TIME:?}")
        })?;
        match opened {
            Some(opened) => held
                .push(opened?.with_context(|| format!("a dial failed after {count} of {wanted}"))?),
            None => return Ok(held),
        }
    }
}

#[cfg(test)]
mod tests {
    #![allow(clippy::unwrap_used, clippy::expect_used, clippy::indexing_slicing)]
    use tokio::net::TcpListener;

    use super::*;
    use crate::endpoint::Endpoints;

    #[test]
    fn error_names_needed_and_current_limit() {
        assert_eq!(affordable(20_000, 1).unwrap(), IDLE);
        assert_eq!(affordable(20_000, 2).unwrap(), 9850);
        let text = affordable(1024, 1).unwrap_err().to_string();
        assert!(text.contains("10300") && text.contains("1024"), "{text}");
    }

    /// A contender without programs of its own, with these readings of its memory.
    struct Fake {
        entry: Entry,
        readings: Vec<u64>,
    }

    impl Subject for Fake {
        fn entry(&self) -> &Entry {
            &self.entry
        }

        fn cpu_time(&mut self) -> anyhow::Result<Option<Duration>> {
            Ok(None)
        }

        fn rss(&mut self) -> anyhow::Result<Option<u64>> {
            Ok(Some(self.readings.remove(0)))
        }
    }

    #[tokio::test]
    async fn less_memory_than_before_is_an_error() {
        let endpoints = Endpoints::start().await.unwrap();
        let target = endpoints.lean();
        let mut fake = Fake {
            entry: Entry::Plain(target),
            readings: vec![1000, 9192, 1000, 999],
        };
        let figures = idle(&mut fake, target, 4).await.unwrap();
        assert_eq!(figures, [(IDLE_MEMORY, 2.0)]);
        let error = idle(&mut fake, target, 4).await.unwrap_err().to_string();
        assert_eq!(error, "memory shrank from 1000 to 999 bytes");
    }

    #[tokio::test]
    async fn failed_dial_among_successful_ones_is_an_error() {
        let listener = TcpListener::bind("127.0.0.1:0").await.unwrap();
        let target = listener.local_addr().unwrap();
        let serving = async {
            let mut first = listener.accept().await.unwrap().0;
            first.write_all(b"x").await.unwrap();
            // The second connection ends without an echo.
            drop(listener.accept().await.unwrap());
            std::future::pending::<()>().await
        };
        let entry = Entry::Plain(target);
        let opened = tokio::select! {
            opened = open(&entry, target, 2) => opened,
            () = serving => unreachable!(),
        };
        let error = opened.err().unwrap().to_string();
        assert!(error.starts_with("a dial failed after "), "{error}");
    }

    #[test]
    fn limit_is_raised_to_the_hard_limit() {
        let raised = raise_limit();
        assert_eq!(
            getrlimit(Resource::Nofile).maximum.unwrap_or(u64::MAX),
            raised
        );
    }
}
