//! One Service changed among many: how soon new connections notice, and whether those of others do.
//!
//! A part of the Services has a connection each that stays open; some of the rest get another endpoint,
//! one after the other. A change is in force once a new connection reaches the new endpoint.

use std::net::SocketAddr;
use std::time::Duration;

use anyhow::Context as _;
use futures_util::future::{join_all, try_join_all};
use tokio::io::{AsyncReadExt as _, AsyncWriteExt as _};
use tokio::time::{sleep, timeout};

use crate::door::contenders::Door;
use crate::door::rows::{CHANGE, DROPPED};
use crate::entry::Entry;
use crate::load::Echo;
use crate::report::Figures;

/// Of so many Services one has an open connection: 200 of 1,000.
const HELD_OF: usize = 5;

/// How many are changed.
const CHANGES: usize = 5;

/// How long a change may take until it is in force, and an open connection for an echo.
const LIMIT: Duration = Duration::from_secs(5);

/// How long after one new connection the next one is made. A change is in force that much earlier than
/// is noticed at most, and a millisecond of the clock's grain.
const PROBE_PAUSE: Duration = Duration::from_millis(1);

/// Changes some of `services` from `old` to `new`: what the slowest took, and how many of the connections
/// that belong to others were lost. `services` is a multiple of 25, so that these are others.
///
/// # Errors
/// When a connection cannot be opened at first, or a change does not come into force.
pub async fn measure(
    door: &mut Door,
    old: SocketAddr,
    new: SocketAddr,
    services: usize,
) -> anyhow::Result<Figures> {
    let others = (0..services).filter(|service| service % HELD_OF == 1);
    let entries: Vec<Entry> = others.map(|service| door.service(service)).collect();
    let opening = entries.iter().map(|entry| Echo::proven(entry, old));
    let mut held = try_join_all(opening).await?;
    let mut slowest = Duration::ZERO;
    for i in 0..CHANGES {
        let service = i * services / CHANGES;
        let entry = door.service(service);
        let told = door.change(service, new)?;
        let reached = timeout(LIMIT, async {
            while port(&entry, new).await.ok() != Some(new.port()) {
                sleep(PROBE_PAUSE).await;
            }
        });
        let reached = reached.await;
        reached.with_context(|| format!("Service {service} unchanged after {LIMIT:?}"))?;
        slowest = slowest.max(told.elapsed());
    }
    let echoes = held.iter_mut().map(|echo| timeout(LIMIT, echo.once()));
    let echoes = join_all(echoes).await;
    let dropped = echoes.iter().filter(|echo| !matches!(echo, Ok(Ok(_))));
    Ok(vec![
        (CHANGE, slowest.as_secs_f64() * 1e3),
        (DROPPED, dropped.count() as f64),
    ])
}

/// The port of the endpoint that a new connection reaches.
async fn port(entry: &Entry, target: SocketAddr) -> anyhow::Result<u16> {
    let mut stream = entry.open(target).await?;
    stream.write_all(b"port\n").await?;
    Ok(stream.read_u16().await?)
}
