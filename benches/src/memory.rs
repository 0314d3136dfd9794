//! What connections cost in memory: while they do nothing, and what the agent needs beside bulk.
//!
//! Both are measured on programs that carried nothing before: an allocator keeps what a load has
//! needed, and growth would hide in it.

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
use crate::measure::Subject;
use crate::report::Figures;
use crate::rows::{AGENT_MEMORY, BULK_RATE, IDLE_MEMORY, MEMORY_AFTER, MEMORY_START, MIB};
use crate::topology::Tunnel;

/// How many connections are idle, and how few still say what one of them costs.
pub const IDLE: u64 = 10_000;
const FEWEST: u64 = 1000;

/// How many are idle beside bulk.
const IDLE_BESIDE_BULK: u64 = 1000;

/// How many bulk connections there are in each direction.
const BULK: usize = 4;

/// How many are dialled at the same time, and how long that may go on.
const DIALS: usize = 16;
const DIAL_TIME: Duration = Duration::from_secs(40);

/// How long programs get to come to rest.
pub const REST: Duration = Duration::from_secs(1);

/// How often memory is looked at while it may grow.
const LOOK: Duration = Duration::from_millis(50);

/// What a process needs file descriptors for besides connections.
const SPARE: u64 = 300;

/// Allows this process, and those that it will start, as many file descriptors as it may; gives how
/// many those are.
pub fn raise_limit() -> u64 {
    let limit = getrlimit(Resource::Nofile);
    let raised = Rlimit {
        current: limit.maximum,
        maximum: limit.maximum,
    };
    // Not being allowed shows in what the limit is afterwards.
    setrlimit(Resource::Nofile, raised).ok();
    getrlimit(Resource::Nofile).current.unwrap_or(u64::MAX)
}

/// How many idle connections fit under a limit of file descriptors, if a process needs so many for
/// each of them.
///
/// # Errors
/// When they are too few, or this process itself could not hold all.
pub fn affordable(limit: u64, each: u64) -> anyhow::Result<u64> {
    ensure!(
        limit >= IDLE + SPARE,
        "needs RLIMIT_NOFILE of {}, the hard limit is {limit}",
        IDLE + SPARE
    );
    let fit = (limit - SPARE) / each.max(1);
    Ok(fit.min(IDLE))
}

/// What an idle connection costs all programs together. As many of `wanted` count as are open
/// when time is up.
///
/// # Errors
/// When too few can be opened.
pub async fn idle(
    subject: &mut impl Subject,
    target: SocketAddr,
    wanted: u64,
) -> anyhow::Result<Figures> {
    // The first one pays for what is made once.
    let _first = open(subject.entry(), target, 1).await?;
    sleep(REST).await;
    let before = subject.rss()?.context("no program to ask")?;
    let held = open(subject.entry(), target, wanted).await?;
    sleep(REST).await;
    let after = subject.rss()?.context("no program to ask")?;
    let count = held.len() as u64;
    if count < wanted {
        eprintln!("  only {count} of {wanted} idle connections within {DIAL_TIME:?}");
    }
    ensure!(count >= FEWEST.min(wanted), "only {count} connections");
    let growth = after.saturating_sub(before) as f64;
    Ok(vec![(IDLE_MEMORY, growth / 1024.0 / count as f64)])
}

/// What programs that ran all the time take, in bytes: before any load and now. None without a program.
pub fn figures(at_start: Option<u64>, after: Option<u64>) -> Figures {
    let figures = [(MEMORY_START, at_start), (MEMORY_AFTER, after)].into_iter();
    figures
        .filter_map(|(metric, bytes)| Some((metric, bytes? as f64 / MIB)))
        .collect()
}

/// The most that the agent needs with idle connections and bulk in both directions.
///
/// # Errors
/// When any connection fails.
pub async fn beside_bulk(
    tunnel: &mut Tunnel,
    target: SocketAddr,
    time: Duration,
) -> anyhow::Result<Figures> {
    let held = open(&tunnel.entry, target, IDLE_BESIDE_BULK).await?;
    ensure!(
        held.len() as u64 == IDLE_BESIDE_BULK,
        "only {} connections",
        held.len()
    );
    let entry = &tunnel.entry.clone();
    let mut bulk = Bulk::default()
        .downloads(entry, target, BULK)
        .uploads(entry, target, BULK);
    let (begin, mark) = (Instant::now(), bulk.mark());
    let mut most = 0;
    while begin.elapsed() < time {
        sleep(LOOK).await;
        most = most.max(tunnel.agent_rss()?.context("no program to ask")?);
    }
    let rate = bulk.rate_since(mark)?;
    Ok(vec![
        (AGENT_MEMORY, most as f64 / MIB),
        (BULK_RATE, rate / MIB),
    ])
}

/// Opens connections, each of which has carried a byte to and fro, until time is up.
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
                bail!("an echo of another byte");
            }
            Ok(stream)
        });
    }
    let mut held = Vec::new();
    while let Ok(Some(opened)) = timeout_at(deadline, dials.join_next()).await {
        match opened? {
            Ok(stream) => held.push(stream),
            // One that holds some is asked how many, one that holds none is broken.
            Err(error) if held.is_empty() => return Err(error),
            Err(_) => break,
        }
    }
    Ok(held)
}

#[cfg(test)]
mod tests {
    #![allow(clippy::unwrap_used, clippy::expect_used, clippy::indexing_slicing)]
    use super::*;

    #[test]
    fn a_limit_too_low_is_named() {
        assert_eq!(affordable(20_000, 1).unwrap(), IDLE);
        assert_eq!(affordable(20_000, 2).unwrap(), 9850);
        let text = affordable(1024, 1).unwrap_err().to_string();
        assert!(text.contains("10300") && text.contains("1024"), "{text}");
    }

    #[test]
    fn the_limit_is_raised_to_the_hard_one() {
        let raised = raise_limit();
        assert_eq!(
            getrlimit(Resource::Nofile).maximum.unwrap_or(u64::MAX),
            raised
        );
    }
}
