//! One Service changes among many: the delay until new connections follow the change, and its effect on
//! connections of other Services.
//!
//! A fifth of the Services have one open connection each. Some other Services get another endpoint, one after
//! the other. A change is effective once a new connection reaches the new endpoint.

use std::net::SocketAddr;
use std::time::Duration;

use anyhow::Context as _;
use futures_util::future::{join_all, try_join_all};
use tokio::io::{AsyncReadExt as _, AsyncWriteExt as _};
use tokio::time::{sleep, timeout};

use crate::door::contenders::Door;
use crate::door::rows::{CHANGE, DROPPED};
use crate::entry::Entry;
use crate::figures::Figures;
use crate::load::Echo;

/// One Service in so many has an open connection: 200 of 1,000.
const HELD_OF: usize = 5;

/// Number of Services that change.
const CHANGES: usize = 5;

/// Time limit for a change to become effective, and for an echo on an open connection.
const LIMIT: Duration = Duration::from_secs(5);

/// Pause between two new connections. A change may become effective up to this long, plus the clock's
/// resolution of a millisecond, before it is noticed.
const PROBE_PAUSE: Duration = Duration::from_millis(1);

/// Changes some of `services` from `old` to `new`. Returns the duration of the slowest change and the number
/// of lost connections of other Services. `services` must be a multiple of 25; then no changed Service has an
/// open connection.
pub(super) async fn measure(
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

/// Returns the port of the endpoint that a new connection reaches.
async fn port(entry: &Entry, target: SocketAddr) -> anyhow::Result<u16> {
    let mut stream = entry.open(target).await?;
    stream.write_all(b"port\n").await?;
    Ok(stream.read_u16().await?)
}

#[cfg(test)]
mod tests {
    #![allow(clippy::unwrap_used, clippy::expect_used, clippy::indexing_slicing)]
    use super::*;
    use crate::door::contenders::tests::{installed, programs};
    use crate::door::rows::Kind;
    use crate::endpoint::Endpoints;

    #[tokio::test]
    async fn changing_one_service_keeps_other_connections() {
        let (programs, old) = (programs(), Endpoints::start().await.unwrap());
        let new = Endpoints::start().await.unwrap();
        for (contender, front) in installed(|kind| kind == Kind::Change) {
            let starting = Door::start(contender, front, &programs, old.lean(), 25);
            let mut door = starting.await.unwrap();
            let figures = measure(&mut door, old.lean(), new.lean(), 25);
            let figures = figures.await.unwrap();
            assert!(figures[0].1 > 0.0, "{contender:?}: {figures:?}");
            assert_eq!(figures[1].1, 0.0, "{contender:?}: {figures:?}");
        }
    }
}
