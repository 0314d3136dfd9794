//! A long network path, simulated on one machine: a TCP proxy in this process that forwards every byte after
//! a delay.
//!
//! Each direction has a queue of pieces; each piece carries the time at which it is due. The queue is
//! bounded, because a fast source before a slow sink would otherwise use all memory. The bound is far above
//! what any contender can have in flight: rate times delay is 50 MiB at 1 GiB/s.
//!
//! The simulated path does not show the limits of TCP. The proxy acknowledges data at once, so the kernel
//! sees no delay, and neither its congestion window nor the size of its socket buffers limits the data in
//! flight, as they would between two machines. The measured limits are the contender's own, such as HTTP/2
//! windows. The kernel would adapt the socket buffers of the proxy to each contender, and data in these
//! buffers waits outside the delay; so the buffers have one fixed size for all contenders, with and without a
//! tunnel.

use std::io;
use std::net::{Ipv4Addr, SocketAddr};
use std::sync::Arc;
use std::time::Duration;

use bytes::{Bytes, BytesMut};
use socket2::SockRef;
use tokio::io::{AsyncRead, AsyncReadExt as _, AsyncWrite, AsyncWriteExt as _};
use tokio::net::{TcpListener, TcpStream};
use tokio::sync::{Semaphore, mpsc};
use tokio::task::JoinSet;
use tokio::time::{Instant, sleep_until};

/// Size of a read buffer, and the free space below which a new buffer is allocated, in bytes.
const READ_BYTES: usize = 256 * 1024;
const MIN_ROOM: usize = 32 * 1024;

/// Capacity of the queue of one direction, in bytes.
const QUEUE_BYTES: usize = 256 << 20;

/// Size of each socket buffer of the proxy, in bytes. The kernel doubles the value for its own bookkeeping.
const SOCKET_BUFFER: usize = 256 * 1024;

/// Delay and rate of a simulated path.
#[derive(Debug, Clone, Copy, PartialEq)]
pub(super) struct Path {
    /// Delay of a byte, in either direction.
    pub one_way: Duration,
    /// Bytes per second in either direction. `None` means unlimited.
    pub rate: Option<f64>,
}

/// A running proxy. Dropping it cuts all connections through it.
#[derive(Debug)]
pub(super) struct Delay {
    address: SocketAddr,
    _tasks: JoinSet<()>,
}

impl Delay {
    /// Starts a proxy that leads to `target` along `path`. Does nothing without a path.
    pub(super) async fn to(target: SocketAddr, path: Option<Path>) -> io::Result<Option<Self>> {
        let Some(path) = path else {
            return Ok(None);
        };
        let listener = TcpListener::bind((Ipv4Addr::LOCALHOST, 0)).await?;
        let address = listener.local_addr()?;
        let mut tasks = JoinSet::new();
        tasks.spawn(async move {
            let mut connections = JoinSet::new();
            while let Ok((client, _)) = listener.accept().await {
                connections.spawn(relay(client, target, path));
                // Reap the tasks of connections that ended.
                while connections.try_join_next().is_some() {}
            }
        });
        Ok(Some(Self {
            address,
            _tasks: tasks,
        }))
    }

    /// Address of the listener.
    pub(super) fn address(&self) -> SocketAddr {
        self.address
    }
}

async fn relay(client: TcpStream, target: SocketAddr, path: Path) -> io::Result<()> {
    let server = TcpStream::connect(target).await?;
    for stream in [&client, &server] {
        stream.set_nodelay(true)?;
        let socket = SockRef::from(stream);
        socket.set_recv_buffer_size(SOCKET_BUFFER)?;
        socket.set_send_buffer_size(SOCKET_BUFFER)?;
    }
    let (from_client, to_client) = client.into_split();
    let (from_server, to_server) = server.into_split();
    // An error in either direction closes both.
    tokio::try_join!(
        direction(from_client, to_server, path),
        direction(from_server, to_client, path),
    )?;
    Ok(())
}

/// Forwards one direction until it ends, and then closes the write side.
async fn direction(
    from: impl AsyncRead + Unpin,
    to: impl AsyncWrite + Unpin,
    path: Path,
) -> io::Result<()> {
    let budget = Arc::new(Semaphore::new(QUEUE_BYTES));
    let (sender, receiver) = mpsc::unbounded_channel();
    tokio::try_join!(
        take_in(from, path, &budget, sender),
        hand_on(to, &budget, receiver)
    )?;
    Ok(())
}

/// Reads pieces and stamps each with its due time. An empty piece marks the end.
async fn take_in(
    mut from: impl AsyncRead + Unpin,
    path: Path,
    budget: &Semaphore,
    sender: mpsc::UnboundedSender<(Instant, Bytes)>,
) -> io::Result<()> {
    let mut buffer = BytesMut::new();
    // Time at which the last byte so far has left the sender.
    let mut sent = Instant::now();
    loop {
        if buffer.capacity() < MIN_ROOM {
            buffer.reserve(READ_BYTES);
        }
        let read = from.read_buf(&mut buffer).await?;
        let piece = buffer.split().freeze();
        if let Ok(permit) = budget.acquire_many(piece.len() as u32).await {
            // `hand_on` adds the permits again after it has written the piece.
            permit.forget();
        }
        sent = sent.max(Instant::now());
        if let Some(rate) = path.rate {
            sent += Duration::from_secs_f64(piece.len() as f64 / rate);
        }
        let queued = sender.send((sent + path.one_way, piece));
        if read == 0 || queued.is_err() {
            return Ok(());
        }
    }
}

/// Writes every piece when it is due.
async fn hand_on(
    mut to: impl AsyncWrite + Unpin,
    budget: &Semaphore,
    mut receiver: mpsc::UnboundedReceiver<(Instant, Bytes)>,
) -> io::Result<()> {
    while let Some((due, piece)) = receiver.recv().await {
        sleep_until(due).await;
        if piece.is_empty() {
            return to.shutdown().await;
        }
        to.write_all(&piece).await?;
        budget.add_permits(piece.len());
    }
    Ok(())
}

#[cfg(test)]
mod tests {
    #![allow(clippy::unwrap_used, clippy::expect_used, clippy::indexing_slicing)]
    use culvert_kit::pattern;
    use culvert_kit::pattern::Verifier;
    use tokio::io::{DuplexStream, duplex};
    use tokio::time::sleep;

    use super::*;

    const PATH: Path = Path {
        one_way: Duration::from_millis(50),
        rate: None,
    };

    /// Connects two pipes by one direction of the proxy.
    fn through(path: Path) -> (DuplexStream, DuplexStream) {
        let (near, from) = duplex(1 << 16);
        let (to, far) = duplex(1 << 16);
        tokio::spawn(direction(from, to, path));
        (near, far)
    }

    #[tokio::test(start_paused = true)]
    async fn each_piece_is_delayed_by_the_same_time() {
        let (mut near, mut far) = through(PATH);
        let begin = Instant::now();
        let send = async {
            for byte in 0..10 {
                near.write_u8(byte).await.unwrap();
                sleep(Duration::from_millis(20)).await;
            }
        };
        let receive = async {
            for byte in 0..10 {
                assert_eq!(far.read_u8().await.unwrap(), byte);
                let late = begin.elapsed() - Duration::from_millis(20) * u32::from(byte);
                // The clock has a resolution of 1 ms.
                assert!((50..=52).contains(&late.as_millis()), "{byte}: {late:?}");
            }
        };
        tokio::join!(send, receive);
    }

    #[tokio::test(start_paused = true)]
    async fn bytes_arrive_in_order_before_the_end() {
        const LEN: u64 = 9_000_001;
        let (mut near, mut far) = through(PATH);
        let begin = Instant::now();
        let send = async {
            for piece in pattern::pieces(LEN) {
                near.write_all(&piece).await.unwrap();
            }
            near.shutdown().await.unwrap();
        };
        let receive = async {
            let mut verifier = Verifier::default();
            let mut buffer = vec![0; 70_001];
            loop {
                match far.read(&mut buffer).await.unwrap() {
                    0 => break verifier.verified(),
                    read => verifier.feed(&buffer[..read]).unwrap(),
                }
            }
        };
        let ((), received) = tokio::join!(send, receive);
        assert_eq!(received, LEN);
        // A proxy that waited for each piece would need 50 ms per piece.
        assert!(begin.elapsed() < Duration::from_millis(60));
    }

    #[tokio::test(start_paused = true)]
    async fn rate_limit_applies() {
        let (mut near, mut far) = through(Path {
            rate: Some(1e6),
            ..PATH
        });
        let begin = Instant::now();
        let send = async {
            near.write_all(&pattern::prefix(500_000)).await.unwrap();
            near.shutdown().await.unwrap();
        };
        let mut received = Vec::new();
        let (_, read) = tokio::join!(send, far.read_to_end(&mut received));
        assert_eq!(read.unwrap(), 500_000);
        let took = begin.elapsed().as_millis();
        assert!((550..=560).contains(&took), "{took} ms");
    }

    #[tokio::test]
    async fn socket_carries_both_directions() {
        let endpoints = crate::endpoint::Endpoints::start().await.unwrap();
        let delay = Delay::to(endpoints.lean(), Some(PATH))
            .await
            .unwrap()
            .unwrap();
        let mut stream = TcpStream::connect(delay.address()).await.unwrap();
        stream.write_all(b"download 300000\n").await.unwrap();
        let mut received = Vec::new();
        stream.read_to_end(&mut received).await.unwrap();
        assert!(received == pattern::prefix(300_000));
    }
}
