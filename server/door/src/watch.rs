//! Ends connections on which nothing moves, and those that have lost a side.

use std::sync::atomic::{AtomicU64, Ordering};
use std::time::Duration;

use culvert_host::net::listen::{Keepalive, tune_with};
use culvert_host::net::silence::is_gone;
use culvert_stream::CloseReason;
use socket2::SockRef;
use tokio::net::TcpStream;
use tokio::time::{Instant, sleep};

/// How many looks there are in the time that a peer may be silent.
const LOOKS: u32 = 3;

/// One side of a connection.
#[derive(Clone, Copy, Debug)]
pub struct Side<'a> {
    /// Its socket.
    pub socket: &'a TcpStream,
    /// How its peer is probed. A socket that has not inherited that is told at the first look, long before
    /// the first probe: most connections are over by then.
    pub keepalive: &'a Keepalive,
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
    let sides = || sides.iter().flatten();
    let look = sides().map(|side| side.keepalive.patience() / LOOKS).min();
    let first = sides().map(|side| side.keepalive.idle / 2).min();
    let mut first = first.min(look);
    let (mut before, mut since) = (moved(), Instant::now());
    loop {
        let left = idle.map(|idle| idle.saturating_sub(since.elapsed()));
        match [left, first.or(look)].into_iter().flatten().min() {
            Some(pause) => sleep(pause).await,
            None => std::future::pending().await,
        }
        let now = moved();
        if now != before {
            (before, since) = (now, Instant::now());
        } else if idle.is_some_and(|idle| since.elapsed() >= idle) {
            return CloseReason::IdleTimeout;
        }
        if first.take().is_some() {
            // Not twice: that would bring a probe that is due forward.
            let untold =
                |side: &&Side<'_>| SockRef::from(side.socket).keepalive().is_ok_and(|on| !on);
            for side in sides().filter(untold) {
                // Fails if the connection has broken; whoever reads from it is told.
                let _ = tune_with(side.socket, side.keepalive);
            }
        }
        let is_lost = |side: &&Side<'_>| is_gone(side.socket, side.keepalive.patience());
        if let Some(side) = sides().find(is_lost) {
            return side.lost;
        }
    }
}

#[cfg(test)]
mod tests {
    #![allow(clippy::unwrap_used)]

    use tokio::net::TcpListener;
    use tokio::time::timeout;

    use super::*;

    #[tokio::test(start_paused = true)]
    async fn a_connection_that_lasts_is_probed_as_long_as_it_idles() {
        let listener = TcpListener::bind("127.0.0.1:0").await.unwrap();
        let socket = TcpStream::connect(listener.local_addr().unwrap())
            .await
            .unwrap();
        let keepalive = Keepalive {
            idle: Duration::from_secs(6),
            interval: Duration::from_secs(60),
            probes: 2,
            user_timeout: None,
        };
        let side = Side {
            socket: &socket,
            keepalive: &keepalive,
            lost: CloseReason::EndpointLost,
        };
        let none = AtomicU64::new(0);
        let mut watched = std::pin::pin!(watch([&none], None, [Some(side), None]));
        let options = SockRef::from(&socket);
        // The first probe is due after 6 s, and half of that is early enough.
        let early = timeout(Duration::from_secs(2), &mut watched).await;
        assert!(early.is_err() && !options.keepalive().unwrap());
        let late = timeout(Duration::from_secs(2), &mut watched).await;
        assert!(late.is_err() && options.keepalive().unwrap());
        assert_eq!(options.tcp_keepalive_time().unwrap(), keepalive.idle);
        assert_eq!(
            options.tcp_keepalive_interval().unwrap(),
            keepalive.interval
        );
        assert_eq!(options.tcp_keepalive_retries().unwrap(), keepalive.probes);
    }
}
