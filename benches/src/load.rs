//! A load of a given amount, through any [`Entry`].
//!
//! The load does little besides the transfer, so that the tunnel dominates the figures: it moves 256 KiB at a
//! time and only counts downloads. The load runs in this process, whose processor time is not part of the
//! figures.

use std::net::SocketAddr;
use std::time::Duration;

use anyhow::{Context as _, bail, ensure};
use culvert_kit::client::BoxedStream;
use culvert_kit::pattern::{self, MAX_PIECE};
use tokio::io::{AsyncReadExt as _, AsyncWriteExt as _};
use tokio::task::JoinSet;
use tokio::time::Instant;

use crate::entry::Entry;

/// Payload of an echo, in bytes.
pub(crate) const ECHO_BYTES: usize = 64;

/// The work of each connection.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum Work {
    /// Receive bytes and then the end of the stream.
    Download,
    /// Receive bytes and close first. A tunnelling Envoy loses data in flight when the endpoint closes first.
    Fetch,
    /// Send bytes.
    Upload,
    /// Send [`ECHO_BYTES`] and wait for their return, repeatedly.
    Echo,
    /// Connect, send one byte, wait for its return, and close.
    Dials,
}

/// An amount of work.
#[derive(Debug, Clone, Copy, PartialEq)]
pub(crate) struct Job {
    /// The work of each connection.
    pub work: Work,
    /// Number of concurrent connections.
    pub connections: u64,
    /// Amount per connection: bytes, echoes or dials.
    pub amount: u64,
}

impl Job {
    /// Creates a job.
    pub(crate) const fn new(work: Work, connections: u64, amount: u64) -> Self {
        Self {
            work,
            connections,
            amount,
        }
    }

    /// Returns the amount of all connections together: bytes, echoes or dials.
    pub(crate) fn total(&self) -> u64 {
        self.connections * self.amount
    }
}

/// Result of a job.
#[derive(Debug, Clone, Copy)]
pub(crate) struct Done {
    /// Time from the first dial to the last byte.
    pub elapsed: Duration,
    /// Median of the echoes, in microseconds. 0 for other work.
    pub p50_us: f64,
    /// 99th percentile of the echoes, in microseconds. 0 for other work.
    pub p99_us: f64,
}

/// Runs a job through `entry` to the endpoint at `target`. Fails if a connection fails or carries another
/// number of bytes.
pub(crate) async fn run(entry: &Entry, target: SocketAddr, job: Job) -> anyhow::Result<Done> {
    let client = Client {
        entry: entry.clone(),
        target,
        amount: job.amount,
    };
    let begin = Instant::now();
    let mut connections = JoinSet::new();
    for _ in 0..job.connections {
        connections.spawn(client.clone().run(job.work));
    }
    let mut times = Vec::new();
    while let Some(ended) = connections.join_next().await {
        times.append(&mut ended??);
    }
    let elapsed = begin.elapsed();
    let [p50_us, p99_us] = percentiles(times);
    Ok(Done {
        elapsed,
        p50_us,
        p99_us,
    })
}

/// Returns the median and the 99th percentile of `times`, in microseconds. Both are 0 if `times` is empty.
pub(crate) fn percentiles(mut times: Vec<Duration>) -> [f64; 2] {
    times.sort_unstable();
    [50, 99].map(|percent| percentile(&times, percent))
}

fn percentile(sorted: &[Duration], percent: usize) -> f64 {
    let last = sorted.len().saturating_sub(1);
    let at = (sorted.len() * percent / 100).min(last);
    sorted.get(at).map_or(0.0, |time| time.as_secs_f64() * 1e6)
}

/// State of one connection of a job.
#[derive(Debug, Clone)]
struct Client {
    entry: Entry,
    target: SocketAddr,
    amount: u64,
}

impl Client {
    /// Runs the share of one connection. Returns the time of each echo.
    async fn run(self, work: Work) -> anyhow::Result<Vec<Duration>> {
        match work {
            Work::Download => self.download().await.map(|()| Vec::new()),
            Work::Fetch => self.fetch().await.map(|()| Vec::new()),
            Work::Upload => self.upload().await.map(|()| Vec::new()),
            Work::Echo => self.echo().await,
            Work::Dials => self.dials().await.map(|()| Vec::new()),
        }
    }

    async fn download(&self) -> anyhow::Result<()> {
        let mut stream = self.entry.open(self.target).await?;
        let command = format!("download {}\n", self.amount);
        stream.write_all(command.as_bytes()).await?;
        stream.flush().await?;
        let mut buffer = vec![0; MAX_PIECE];
        let mut received = 0;
        loop {
            match stream.read(&mut buffer).await {
                Ok(0) => break,
                Ok(n) => received += n as u64,
                Err(error) => bail!("failed after {received} of {} bytes: {error}", self.amount),
            }
        }
        ensure!(
            received == self.amount,
            "{received} bytes instead of {}",
            self.amount
        );
        Ok(())
    }

    async fn fetch(&self) -> anyhow::Result<()> {
        let mut stream = self.entry.open(self.target).await?;
        let command = format!("fetch {}\n", self.amount);
        stream.write_all(command.as_bytes()).await?;
        stream.flush().await?;
        let mut buffer = vec![0; MAX_PIECE];
        let mut body = stream.take(self.amount);
        while body.limit() > 0 {
            let read = body.read(&mut buffer).await.context("receiving")?;
            ensure!(read > 0, "closed {} bytes too early", body.limit());
        }
        Ok(())
    }

    async fn upload(&self) -> anyhow::Result<()> {
        let mut stream = self.entry.open(self.target).await?;
        let command = format!("upload {}\n", self.amount);
        stream.write_all(command.as_bytes()).await?;
        for piece in pattern::pieces(self.amount) {
            stream.write_all(&piece).await.context("sending")?;
        }
        // Over gRPC the last bytes may wait for a window.
        stream.flush().await.context("sending")?;
        let counted = stream.read_u64().await.context("count of the endpoint")?;
        ensure!(
            counted == self.amount,
            "{counted} bytes instead of {}",
            self.amount
        );
        Ok(())
    }

    async fn echo(&self) -> anyhow::Result<Vec<Duration>> {
        let mut echo = Echo::open(&self.entry, self.target).await?;
        let mut times = Vec::new();
        for _ in 0..self.amount {
            times.push(echo.once().await?);
        }
        Ok(times)
    }

    async fn dials(&self) -> anyhow::Result<()> {
        for _ in 0..self.amount {
            let mut stream = self.entry.open(self.target).await?;
            stream.write_all(b"echo\nx").await.context("sending")?;
            stream.flush().await.context("sending")?;
            let echoed = stream.read_u8().await.context("echo")?;
            ensure!(echoed == b'x', "echo returned byte {echoed} instead of x");
        }
        Ok(())
    }
}

/// A connection to an endpoint that sends everything back.
pub(crate) struct Echo {
    stream: BoxedStream,
    sent: Vec<u8>,
}

impl Echo {
    /// Opens a connection and sends one echo.
    pub(crate) async fn proven(entry: &Entry, target: SocketAddr) -> anyhow::Result<Self> {
        let mut echo = Self::open(entry, target).await?;
        echo.once().await?;
        Ok(echo)
    }

    /// Opens a connection.
    pub(crate) async fn open(entry: &Entry, target: SocketAddr) -> anyhow::Result<Self> {
        let mut stream = entry.open(target).await?;
        stream.write_all(b"echo\n").await.context("sending")?;
        stream.flush().await.context("sending")?;
        Ok(Self {
            stream,
            sent: pattern::prefix(ECHO_BYTES as u64),
        })
    }

    /// Sends [`ECHO_BYTES`] and waits for their return. Returns the elapsed time.
    pub(crate) async fn once(&mut self) -> anyhow::Result<Duration> {
        let begin = Instant::now();
        self.stream.write_all(&self.sent).await.context("sending")?;
        self.stream.flush().await.context("sending")?;
        let mut received = [0; ECHO_BYTES];
        self.stream
            .read_exact(&mut received)
            .await
            .context("echo")?;
        let took = begin.elapsed();
        ensure!(
            self.sent == received,
            "echo returned other bytes than were sent"
        );
        Ok(took)
    }
}

#[cfg(test)]
mod tests {
    #![allow(clippy::unwrap_used, clippy::expect_used, clippy::indexing_slicing)]
    use std::io;
    use std::path::Path;

    use tokio::io::{AsyncBufReadExt as _, BufReader};
    use tokio::net::{TcpStream, UnixListener, UnixStream};
    use tokio::task::JoinHandle;

    use super::*;
    use crate::endpoint::Endpoints;

    /// A front end without a tunnel: accepts CONNECT and joins the connection to its target, but forwards at
    /// most `cut` bytes to the client.
    fn shortcut(socket: &Path, cut: u64) -> JoinHandle<()> {
        let listener = UnixListener::bind(socket).unwrap();
        tokio::spawn(async move {
            loop {
                let (client, _) = listener.accept().await.unwrap();
                tokio::spawn(join(client, cut));
            }
        })
    }

    async fn join(client: UnixStream, cut: u64) -> io::Result<()> {
        let mut client = BufReader::new(client);
        let mut head = String::new();
        while !head.ends_with("\r\n\r\n") {
            client.read_line(&mut head).await?;
        }
        let target = head.split(' ').nth(1).unwrap();
        let (down, mut up) = TcpStream::connect(target).await?.into_split();
        client.write_all(b"HTTP/1.1 200 OK\r\n\r\n").await?;
        let (mut from_client, mut to_client) = tokio::io::split(client);
        let upward = tokio::spawn(async move { tokio::io::copy(&mut from_client, &mut up).await });
        tokio::io::copy(&mut down.take(cut), &mut to_client).await?;
        upward.abort();
        to_client.shutdown().await
    }

    async fn run_all(cut: u64) -> Vec<anyhow::Result<Done>> {
        let dir = tempfile::tempdir().unwrap();
        let socket = dir.path().join("front.socket");
        let proxy = shortcut(&socket, cut);
        let endpoints = Endpoints::start().await.unwrap();
        let mut results = Vec::new();
        for work in [
            Work::Download,
            Work::Upload,
            Work::Echo,
            Work::Dials,
            Work::Fetch,
        ] {
            let bulk = !matches!(work, Work::Echo | Work::Dials);
            let job = Job::new(work, 3, if bulk { 1_000_003 } else { 10 });
            let entry = Entry::Connect(socket.clone());
            results.push(run(&entry, endpoints.lean(), job).await);
        }
        proxy.abort();
        results
    }

    #[tokio::test]
    async fn every_kind_of_work_completes() {
        let results = run_all(u64::MAX).await;
        let done: Vec<Done> = results.into_iter().map(Result::unwrap).collect();
        assert!(done.iter().all(|d| d.elapsed > Duration::ZERO));
        assert_eq!((done[0].p50_us, done[3].p99_us), (0.0, 0.0));
        assert!(0.0 < done[2].p50_us && done[2].p50_us <= done[2].p99_us);
    }

    #[tokio::test]
    async fn missing_bytes_are_an_error() {
        for result in run_all(0).await {
            result.unwrap_err();
        }
    }
}
