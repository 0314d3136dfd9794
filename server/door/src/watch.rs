//! The watch over a connection: detects an idle connection and a dead peer.

use std::sync::atomic::{AtomicU64, Ordering};
use std::time::Duration;

use culvert_host::net::listen::{Keepalive, tune_with};
use culvert_host::net::silence::is_gone;
use culvert_stream::CloseReason;
use socket2::SockRef;
use tokio::net::TcpStream;
use tokio::time::{Instant, sleep};

use super::config::Limits;

/// Number of checks within the longest silence permitted to a peer.
const LOOKS: u32 = 3;

/// One side of a connection.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Side<'a> {
    pub socket: &'a TcpStream,
    /// Keepalive for the peer. A socket without inherited keepalive options receives the options at the first
    /// check, long before the first probe is due. Most connections end before the first check.
    pub keepalive: &'a Keepalive,
    /// Close reason if the peer is gone.
    pub lost: CloseReason,
}

impl Limits {
    /// Returns the client's side of a connection.
    pub(crate) fn client<'a>(&'a self, socket: &'a TcpStream) -> Side<'a> {
        Side {
            socket,
            keepalive: &self.downstream_keepalive,
            lost: CloseReason::ClientLost,
        }
    }

    /// Returns the endpoint's side of a connection.
    pub(crate) fn endpoint<'a>(&'a self, socket: &'a TcpStream) -> Side<'a> {
        Side {
            socket,
            keepalive: &self.upstream_keepalive,
            lost: CloseReason::EndpointLost,
        }
    }
}

/// Returns once none of the `counters` has changed for at least `idle`, or once the peer on either of the
/// `sides` is gone. An idle connection is detected at most twice `idle` after its last byte. A single timer serves
/// all checks, because most connections are idle.
pub(crate) fn watch<const N: usize>(
    counters: [&AtomicU64; N],
    idle: Duration,
    sides: [Option<&Side<'_>>; 2],
) -> impl Future<Output = CloseReason> {
    let moved = move || -> u64 {
        let each = counters.iter().map(|count| count.load(Ordering::Relaxed));
        each.sum()
    };
    // Not an async function, which would keep its arguments twice.
    async move {
        let sides = || sides.iter().flatten();
        let look = sides().map(|side| side.keepalive.patience() / LOOKS).min();
        let first = sides().map(|side| side.keepalive.idle / 2).min();
        let mut first = first.min(look);
        let (mut before, mut since) = (moved(), Instant::now());
        loop {
            let pause = {
                let left = idle.saturating_sub(since.elapsed());
                first.or(look).map_or(left, |look| look.min(left))
            };
            sleep(pause).await;
            let now = moved();
            if now != before {
                (before, since) = (now, Instant::now());
            } else if since.elapsed() >= idle {
                return CloseReason::IdleTimeout;
            }
            if first.take().is_some() {
                // The options are set only once: setting them again would reschedule a pending probe.
                let is_unset =
                    |side: &&&Side<'_>| SockRef::from(side.socket).keepalive().is_ok_and(|on| !on);
                for side in sides().filter(is_unset) {
                    // Fails if the connection has broken; the next read reports the error.
                    let _ = tune_with(side.socket, side.keepalive);
                }
            }
            let is_lost = |side: &&&Side<'_>| is_gone(side.socket, side.keepalive.patience());
            if let Some(side) = sides().find(is_lost) {
                return side.lost;
            }
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
    async fn long_lived_connection_gets_keepalive_options_at_the_first_check() {
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
        let mut watched = std::pin::pin!(watch([&none], Duration::MAX, [Some(&side), None]));
        let options = SockRef::from(&socket);
        // The first probe is due after 6 s; half of 6 s is early enough.
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
