//! Connections with random loads, for tests of the transports.
#![allow(clippy::unwrap_used, clippy::indexing_slicing)]

use std::time::Duration;

use bytes::Bytes;
use culvert_stream::io::{ReadSource, WriteSink};
use culvert_stream::pump::{Direction, pump};
use culvert_stream::{CloseReason, Sink, Source};
use metrics::Counter;
use rand::rngs::StdRng;
use rand::{Rng as _, SeedableRng as _};
use tokio::io::{AsyncReadExt as _, AsyncWriteExt as _, DuplexStream, duplex, split};
use tokio::task::JoinSet;
use tokio::time::{sleep, timeout};
use tokio_util::task::TaskTracker;

/// Most bytes of one direction of a connection.
const BYTES: usize = 600_000;

/// Connections between clients and endpoints, each over two pumps and the transport under test.
pub(crate) struct Loads {
    random: StdRng,
    /// Longest pause of a client or an endpoint.
    pause: Duration,
    /// Far longer than all pauses of a connection.
    limit: Duration,
    talks: JoinSet<()>,
    /// Tasks that end connections.
    pub(crate) tasks: TaskTracker,
}

impl Loads {
    pub(crate) fn new(seed: u64, pause: Duration, limit: Duration) -> Self {
        Self {
            random: StdRng::seed_from_u64(seed),
            pause,
            limit,
            talks: JoinSet::new(),
            tasks: TaskTracker::new(),
        }
    }

    pub(crate) fn random(&mut self) -> &mut StdRng {
        &mut self.random
    }

    /// Starts a connection over both sides of a stream of the transport. `end` ends a side.
    pub(crate) fn start<S, K>(
        &mut self,
        near: (S, K),
        far: (S, K),
        end: fn(K, CloseReason, &TaskTracker),
    ) where
        S: Source + 'static,
        K: Sink + 'static,
    {
        let random = &mut self.random;
        let [(client, at_server), (endpoint, at_agent)] =
            [(); 2].map(|()| duplex(1 << random.random_range(12..20)));
        for (stream, side, is_server) in [(at_server, near, true), (at_agent, far, false)] {
            let tasks = self.tasks.clone();
            let limit = self.limit;
            self.tasks.spawn(async move {
                let (sink, reason) = carry(stream, side, is_server, limit).await;
                end(sink, reason, &tasks);
            });
        }
        let mut talker = |stream| Talker {
            stream,
            count: random.random_range(0..BYTES),
            leaves_after: random
                .random_bool(0.15)
                .then(|| random.random_range(0..BYTES)),
            pause: self.pause,
            random: StdRng::from_rng(random),
        };
        let (client, endpoint) = (talker(client), talker(endpoint));
        let expected = (endpoint.count, client.count);
        let may_be_cut = client.leaves_after.is_some() || endpoint.leaves_after.is_some();
        self.talks.spawn(async move {
            let received = tokio::join!(client.talk(), endpoint.talk());
            assert!(
                may_be_cut || received == expected,
                "{received:?} of {expected:?} bytes"
            );
        });
    }

    /// Waits until all connections have ended.
    ///
    /// # Panics
    /// If bytes are missing, or if a connection does not end in time.
    pub(crate) async fn end(self) {
        let all = timeout(self.limit, self.talks.join_all()).await;
        assert!(all.is_ok(), "a client or an endpoint waits for bytes");
        self.tasks.close();
        let all = timeout(self.limit, self.tasks.wait()).await;
        assert!(all.is_ok(), "a connection does not end");
    }
}

/// A client or an endpoint.
struct Talker {
    stream: DuplexStream,
    /// Number of bytes to write.
    count: usize,
    /// Number of received bytes after which the talker leaves.
    leaves_after: Option<usize>,
    pause: Duration,
    random: StdRng,
}

impl Talker {
    /// Writes all bytes and the end, and reads to the end. Returns the number of received bytes.
    async fn talk(mut self) -> usize {
        let (read, write) = split(self.stream);
        let writes = StdRng::from_rng(&mut self.random);
        let write = write_all(write, self.count, self.pause, writes);
        let most = self.leaves_after.unwrap_or(usize::MAX);
        let read = read_to_end(read, most, self.pause, self.random);
        if self.leaves_after.is_none() {
            return tokio::join!(read, write).0;
        }
        tokio::select! {
            received = read => received,
            () = write => 0,
        }
    }
}

async fn write_all(
    mut stream: impl tokio::io::AsyncWrite + Unpin,
    count: usize,
    pause: Duration,
    mut random: StdRng,
) {
    let bytes = pattern(count);
    let mut sent = 0;
    while sent < count {
        let size = 1 << random.random_range(0..18);
        let piece = &bytes[sent..count.min(sent + size)];
        if stream.write_all(piece).await.is_err() {
            return;
        }
        sent += piece.len();
        rest(pause, &mut random).await;
    }
    // Fails if the other side has left.
    let _ = stream.shutdown().await;
}

async fn read_to_end(
    mut stream: impl tokio::io::AsyncRead + Unpin,
    most: usize,
    pause: Duration,
    mut random: StdRng,
) -> usize {
    let expected = pattern(BYTES);
    let (mut received, mut buffer) = (0, vec![0; 1 << 17]);
    while received < most {
        let size = 1 << random.random_range(0..18);
        match stream.read(&mut buffer[..size]).await {
            Ok(0) | Err(_) => break,
            Ok(bytes) => {
                assert!(buffer[..bytes] == expected[received..][..bytes]);
                received += bytes;
            }
        }
        rest(pause, &mut random).await;
    }
    received
}

/// Carries a connection between `stream` and one side of the transport.
async fn carry<S: Source, K: Sink>(
    stream: DuplexStream,
    (mut source, mut sink): (S, K),
    is_server: bool,
    half_open: Duration,
) -> (K, CloseReason) {
    let (read, write) = split(stream);
    let lost = CloseReason::EndpointLost;
    let mut from = ReadSource::new(read, Bytes::new(), lost);
    let mut to = WriteSink::new(write, lost);
    let [up, down] = [(); 2].map(|()| Direction::new(Counter::noop()));
    let (outer, inner) = ((&mut from, &mut to), (&mut source, &mut sink));
    let reason = match is_server {
        true => pump(outer, inner, [&up, &down], half_open).await,
        false => pump(inner, outer, [&up, &down], half_open).await,
    };
    (sink, reason)
}

/// In most cases does not pause, sometimes shortly, rarely for up to `pause`.
async fn rest(pause: Duration, random: &mut StdRng) {
    match random.random_range(0..40) {
        0 => sleep(pause.mul_f64(random.random())).await,
        1..10 => sleep(pause.mul_f64(random.random::<f64>() / 500.0)).await,
        _ => tokio::task::yield_now().await,
    }
}

fn pattern(count: usize) -> Bytes {
    (0..count).map(|i| (i * 31 + (i >> 8)) as u8).collect()
}
