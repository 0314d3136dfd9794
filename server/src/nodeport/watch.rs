//! Ends connections on which nothing moves, and those that have lost a side.

use std::sync::atomic::{AtomicU64, Ordering};
use std::time::Duration;

use culvert_common::net::silence::is_gone;
use culvert_common::tunnel::CloseReason;
use tokio::net::TcpStream;
use tokio::time::{Instant, sleep};

/// How many looks there are in the time that a peer may be silent.
const LOOKS: u32 = 3;

/// One side of a connection.
#[derive(Clone, Copy, Debug)]
pub struct Side<'a> {
    /// Its socket.
    pub socket: &'a TcpStream,
    /// How long its peer may be silent while something waits for it.
    pub patience: Duration,
    /// What it is then.
    pub lost: CloseReason,
}

/// Resolves once none of the `counters` has changed for `idle`, at the latest after twice that, or
/// once the peer of one of the `sides` is gone. `None` allows a connection to idle for ever. One timer
/// for all of it: most connections idle.
pub async fn watch<const N: usize>(
    counters: [&AtomicU64; N],
    idle: Option<Duration>,
    sides: [Option<Side<'_>>; 2],
) -> CloseReason {
    let moved = || -> u64 {
        let each = counters.iter().map(|count| count.load(Ordering::Relaxed));
        each.sum()
    };
    let look = sides
        .iter()
        .flatten()
        .map(|side| side.patience / LOOKS)
        .min();
    let (mut before, mut since) = (moved(), Instant::now());
    loop {
        let left = idle.map(|idle| idle.saturating_sub(since.elapsed()));
        match [left, look].into_iter().flatten().min() {
            Some(pause) => sleep(pause).await,
            None => std::future::pending().await,
        }
        let now = moved();
        if now != before {
            (before, since) = (now, Instant::now());
        } else if idle.is_some_and(|idle| since.elapsed() >= idle) {
            return CloseReason::IdleTimeout;
        }
        let is_lost = |side: &&Side<'_>| is_gone(side.socket, side.patience);
        if let Some(side) = sides.iter().flatten().find(is_lost) {
            return side.lost;
        }
    }
}
