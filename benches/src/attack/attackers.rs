//! Attacks on a listener. Each attack runs until its future is dropped.
//!
//! | module | content |
//! |---|---|
//! | this file | connections that stay silent, send slowly, send noise, or stay open after a first message |
//! | [`http2`] | calls of the packet protocol, and tunnels of the CONNECT port |
//! | [`openvpn`] | OpenVPN sessions that never finish their handshake |
//! | [`quic`] | first packets of QUIC clients with forged addresses |

mod http2;
mod openvpn;
mod quic;

use std::collections::VecDeque;
use std::convert::Infallible;
use std::future::Future;
use std::io;
use std::net::{Ipv4Addr, SocketAddr};
use std::sync::atomic::{AtomicU64, AtomicUsize, Ordering};
use std::sync::{Arc, OnceLock};
use std::time::Duration;

use bytes::Bytes;
use rand::RngCore as _;
use tokio::io::{AsyncReadExt as _, AsyncWriteExt as _};
use tokio::net::{TcpSocket, TcpStream};
use tokio::sync::Semaphore;
use tokio::task::{AbortHandle, JoinSet};
use tokio::time::{Instant, interval_at, sleep, timeout};

pub(crate) use self::http2::Calls;
pub(crate) use self::openvpn::first_message;

/// Number of connects in progress at once. More would overflow the queue of a listener, and the kernel repeats
/// a lost SYN only after a second.
const CONNECTS: usize = 64;

/// Time limit of a connect.
const CONNECT_LIMIT: Duration = Duration::from_secs(2);

/// Pause between two bytes of a slow connection.
const BYTE_PAUSE: Duration = Duration::from_millis(100);

/// Size of the noise that a connection sends, in bytes.
const NOISE_BYTES: usize = 4096;

/// Longest wait of a noisy connection for its end.
const NOISE_LIMIT: Duration = Duration::from_secs(5);

/// Number of connections of an attack.
#[derive(Debug, Clone, Copy, PartialEq)]
pub(crate) struct Crowd {
    /// Number of connections that are open at once. The attack opens this number at its start.
    pub held: usize,
    /// New connections per second after the start. The oldest connection gives way to a new connection.
    pub rate: f64,
}

/// The origin of an attack: its source addresses and its counters. Clones share the counters.
#[derive(Debug, Clone)]
pub(crate) struct Attacker {
    sources: Arc<[Ipv4Addr]>,
    connects: Arc<Semaphore>,
    tally: Arc<Tally>,
}

#[derive(Debug, Default)]
struct Tally {
    next_source: AtomicUsize,
    connections: AtomicU64,
    bytes: AtomicU64,
    first_error: OnceLock<String>,
}

impl Attacker {
    /// Creates an attacker whose connections come from these addresses in turn. Without an address, the
    /// kernel selects the addresses.
    pub(crate) fn new(sources: &[Ipv4Addr]) -> Self {
        Self {
            sources: sources.into(),
            connects: Arc::new(Semaphore::new(CONNECTS)),
            tally: Arc::default(),
        }
    }

    /// Returns the number of opened connections. Over UDP, each source counts as a connection.
    pub(crate) fn connections(&self) -> u64 {
        self.tally.connections.load(Ordering::Relaxed)
    }

    /// Returns the number of bytes sent, without headers.
    pub(crate) fn bytes(&self) -> u64 {
        self.tally.bytes.load(Ordering::Relaxed)
    }

    /// Returns the first error of a connection. Errors are usual: they are the effect of the defence.
    pub(crate) fn first_error(&self) -> Option<&str> {
        self.tally.first_error.get().map(String::as_str)
    }

    /// Opens connections and sends nothing.
    pub(crate) async fn silent(&self, to: SocketAddr, crowd: Crowd) -> Infallible {
        self.crowd(crowd, |attacker| async move {
            let mut stream = attacker.connect(to).await?;
            read_to_end(&mut stream).await
        })
        .await
    }

    /// Opens connections and sends the first message of a client, except its last byte, one byte at a time.
    pub(crate) async fn slow(&self, to: SocketAddr, message: Bytes, crowd: Crowd) -> Infallible {
        self.crowd(crowd, move |attacker| {
            let message = message.clone();
            async move {
                let mut stream = attacker.connect(to).await?;
                let (_, begin) = message.split_last().unwrap_or((&0, &[]));
                for byte in begin {
                    attacker.send(&mut stream, &[*byte]).await?;
                    sleep(BYTE_PAUSE).await;
                }
                read_to_end(&mut stream).await
            }
        })
        .await
    }

    /// Opens connections, sends random bytes on each, and waits for the end of the connection.
    pub(crate) async fn noise(&self, to: SocketAddr, crowd: Crowd) -> Infallible {
        self.crowd(crowd, move |attacker| async move {
            let mut stream = attacker.connect(to).await?;
            attacker.send(&mut stream, &noise(NOISE_BYTES)).await?;
            let ended = timeout(NOISE_LIMIT, read_to_end(&mut stream)).await;
            ended.unwrap_or(Ok(()))
        })
        .await
    }

    /// Opens connections, sends `message` on each, and then only reads.
    pub(crate) async fn greet(&self, to: SocketAddr, message: Bytes, crowd: Crowd) -> Infallible {
        self.crowd(crowd, move |attacker| {
            let message = message.clone();
            async move {
                let mut stream = attacker.connect(to).await?;
                attacker.send(&mut stream, &message).await?;
                read_to_end(&mut stream).await
            }
        })
        .await
    }

    /// Runs `life` for each connection of a crowd.
    async fn crowd<F, L>(&self, crowd: Crowd, life: F) -> Infallible
    where
        F: Fn(Self) -> L,
        L: Future<Output = io::Result<()>> + Send + 'static,
    {
        let mut lives = JoinSet::new();
        let mut order: VecDeque<AbortHandle> = VecDeque::new();
        for _ in 0..crowd.held {
            order.push_back(lives.spawn(life(self.clone())));
        }
        let pause = Duration::from_secs_f64(1.0 / crowd.rate);
        let mut ticks = interval_at(Instant::now() + pause, pause);
        loop {
            ticks.tick().await;
            while let Some(ended) = lives.try_join_next() {
                if let Ok(Err(error)) = ended {
                    self.tally.first_error.get_or_init(|| error.to_string());
                }
            }
            while order.front().is_some_and(AbortHandle::is_finished) {
                order.pop_front();
            }
            if lives.len() >= crowd.held
                && let Some(oldest) = order.pop_front()
            {
                oldest.abort();
            }
            order.push_back(lives.spawn(life(self.clone())));
        }
    }

    /// Returns the next source address, with a port that the kernel selects.
    fn source(&self) -> SocketAddr {
        let next = self.tally.next_source.fetch_add(1, Ordering::Relaxed);
        let at = next.checked_rem(self.sources.len());
        let address = at.and_then(|at| self.sources.get(at));
        SocketAddr::from((address.copied().unwrap_or(Ipv4Addr::UNSPECIFIED), 0))
    }

    async fn connect(&self, to: SocketAddr) -> io::Result<TcpStream> {
        self.connect_with(to, |_| Ok(())).await
    }

    /// Opens a connection on a socket that `prepare` sets up.
    async fn connect_with(
        &self,
        to: SocketAddr,
        prepare: impl FnOnce(&TcpSocket) -> io::Result<()>,
    ) -> io::Result<TcpStream> {
        let _turn = self.connects.acquire().await.map_err(io::Error::other)?;
        let socket = TcpSocket::new_v4()?;
        prepare(&socket)?;
        socket.bind(self.source())?;
        let stream = timeout(CONNECT_LIMIT, socket.connect(to)).await??;
        stream.set_nodelay(true)?;
        self.opened();
        Ok(stream)
    }

    async fn send(&self, stream: &mut TcpStream, bytes: &[u8]) -> io::Result<()> {
        stream.write_all(bytes).await?;
        self.sent(bytes.len());
        Ok(())
    }

    fn opened(&self) {
        self.tally.connections.fetch_add(1, Ordering::Relaxed);
    }

    fn sent(&self, bytes: usize) {
        self.tally.bytes.fetch_add(bytes as u64, Ordering::Relaxed);
    }
}

/// Returns random bytes.
fn noise(length: usize) -> Vec<u8> {
    let mut bytes = vec![0; length];
    rand::rng().fill_bytes(&mut bytes);
    bytes
}

/// Reads and discards everything.
async fn read_to_end(stream: &mut TcpStream) -> io::Result<()> {
    let mut bytes = [0; 512];
    while stream.read(&mut bytes).await? > 0 {}
    Ok(())
}

#[cfg(test)]
mod tests {
    #![allow(clippy::unwrap_used, clippy::expect_used, clippy::indexing_slicing)]
    use std::collections::HashSet;

    use tokio::net::TcpListener;

    use super::*;

    const CROWD: Crowd = Crowd {
        held: 3,
        rate: 100.0,
    };

    #[tokio::test]
    async fn oldest_connection_gives_way_and_sources_alternate() {
        let listener = TcpListener::bind("127.0.0.1:0").await.unwrap();
        let to = listener.local_addr().unwrap();
        let sources = [Ipv4Addr::new(127, 81, 0, 1), Ipv4Addr::new(127, 81, 0, 2)];
        let attacker = Attacker::new(&sources);
        let accepting = async {
            let mut seen = HashSet::new();
            let (mut first, from) = listener.accept().await.unwrap();
            seen.insert(from.ip());
            let mut others = Vec::new();
            let ended = read_to_end(&mut first);
            tokio::pin!(ended);
            loop {
                tokio::select! {
                    accepted = listener.accept() => {
                        let (stream, from) = accepted.unwrap();
                        seen.insert(from.ip());
                        others.push(stream);
                    }
                    _ = &mut ended => return (seen.len(), others.len()),
                }
            }
        };
        let (addresses, others) = tokio::select! {
            seen = accepting => seen,
            _ = attacker.silent(to, CROWD) => unreachable!(),
        };
        assert_eq!(addresses, 2);
        assert!(others >= 2, "{others}");
        assert!(attacker.connections() > 2);
        assert_eq!(attacker.bytes(), 0);
    }

    #[tokio::test]
    async fn slow_connection_never_sends_its_last_byte() {
        let listener = TcpListener::bind("127.0.0.1:0").await.unwrap();
        let to = listener.local_addr().unwrap();
        let attacker = Attacker::new(&[]);
        let accepting = async {
            let (mut stream, _) = listener.accept().await.unwrap();
            let mut bytes = [0; 2];
            stream.read_exact(&mut bytes).await.unwrap();
            let more = timeout(3 * BYTE_PAUSE, stream.read_u8()).await;
            (bytes, more.is_err())
        };
        let crowd = Crowd {
            held: 1,
            rate: 0.001,
        };
        let seen = tokio::select! {
            seen = accepting => seen,
            _ = attacker.slow(to, Bytes::from_static(b"abc"), crowd) => unreachable!(),
        };
        assert_eq!(seen, (*b"ab", true));
        assert_eq!(attacker.bytes(), 2);
    }
}
