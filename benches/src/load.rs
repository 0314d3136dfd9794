//! The load on a CONNECT front end, and the endpoints behind the agent.
//!
//! Both are lean, so that what is measured is the tunnel: 256 KiB at a time, nothing hashed,
//! downloads and uploads only counted. Both run in this process, whose processor time nobody counts.

use std::io;
use std::net::{Ipv4Addr, SocketAddr};
use std::path::{Path, PathBuf};
use std::time::Duration;

use anyhow::{Context as _, bail, ensure};
use culvert::lab::pattern::{self, MAX_PIECE};
use culvert::lab::services::Services;
use tokio::io::{AsyncReadExt as _, AsyncWriteExt as _};
use tokio::net::{TcpListener, TcpStream, UnixStream};
use tokio::task::JoinSet;
use tokio::time::Instant;

/// The payload of an echo, in bytes.
pub const ECHO_BYTES: usize = 64;

/// The longest answer to a CONNECT that is read, in bytes.
const MAX_HEAD: usize = 4096;

/// What connections do.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Work {
    /// Fetch bytes.
    Download,
    /// Send bytes.
    Upload,
    /// Send [`ECHO_BYTES`] and wait for them, again and again.
    Echo,
    /// Connect, send one byte, wait for it, close.
    Dials,
}

/// An amount of work.
#[derive(Debug, Clone, Copy)]
pub struct Job {
    /// What to do.
    pub work: Work,
    /// How many connections do it at the same time.
    pub connections: u64,
    /// How much each of them does: bytes, echoes or dials.
    pub amount: u64,
}

impl Job {
    /// What all connections do together: bytes, echoes or dials.
    pub fn total(&self) -> u64 {
        self.connections * self.amount
    }
}

/// How a job went.
#[derive(Debug, Clone, Copy)]
pub struct Done {
    /// From the first dial to the last byte.
    pub elapsed: Duration,
    /// Half of all echoes took at most this long, in microseconds; 0 for other work.
    pub p50_us: f64,
    /// 99 of 100 took at most this long, in microseconds; 0 for other work.
    pub p99_us: f64,
}

/// What agents connect to.
#[derive(Debug)]
pub struct Endpoints {
    services: Services,
    sink: SocketAddr,
    /// Ends the sink when dropped.
    _tasks: JoinSet<()>,
}

impl Endpoints {
    /// Starts them on ports of 127.0.0.1.
    ///
    /// # Errors
    /// When a listener cannot be bound.
    pub async fn start() -> io::Result<Self> {
        let listener = TcpListener::bind((Ipv4Addr::LOCALHOST, 0)).await?;
        let sink = listener.local_addr()?;
        let mut tasks = JoinSet::new();
        tasks.spawn(async move {
            while let Ok((stream, _)) = listener.accept().await {
                tokio::spawn(swallow(stream));
            }
        });
        Ok(Self {
            services: Services::start().await?,
            sink,
            _tasks: tasks,
        })
    }

    /// The raw service, which the Go driver knows too.
    pub fn raw(&self) -> SocketAddr {
        self.services.raw
    }

    /// Where a CONNECT client finds its work. The raw service hashes uploads, the sink does not.
    fn address(&self, work: Work) -> SocketAddr {
        match work {
            Work::Upload => self.sink,
            Work::Download | Work::Echo | Work::Dials => self.services.raw,
        }
    }
}

/// Takes eight bytes that say how many follow, takes those, and answers the number.
async fn swallow(mut stream: TcpStream) -> io::Result<()> {
    stream.set_nodelay(true)?;
    let count = stream.read_u64().await?;
    let mut buffer = vec![0; MAX_PIECE];
    let mut body = (&mut stream).take(count);
    while body.limit() > 0 {
        if body.read(&mut buffer).await? == 0 {
            return Err(io::ErrorKind::UnexpectedEof.into());
        }
    }
    stream.write_u64(count).await?;
    stream.shutdown().await
}

/// Does a job through the front end at `socket`.
///
/// # Errors
/// When any connection fails, or carries other than the expected number of bytes.
pub async fn run(socket: &Path, endpoints: &Endpoints, job: Job) -> anyhow::Result<Done> {
    let client = Client {
        socket: socket.to_owned(),
        target: endpoints.address(job.work),
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
    times.sort_unstable();
    Ok(Done {
        elapsed,
        p50_us: percentile(&times, 50),
        p99_us: percentile(&times, 99),
    })
}

/// Of sorted durations, in microseconds; 0 if there are none.
fn percentile(sorted: &[Duration], percent: usize) -> f64 {
    let last = sorted.len().saturating_sub(1);
    let at = (sorted.len() * percent / 100).min(last);
    sorted.get(at).map_or(0.0, |time| time.as_secs_f64() * 1e6)
}

/// What one of the connections of a job needs to know.
#[derive(Debug, Clone)]
struct Client {
    socket: PathBuf,
    target: SocketAddr,
    amount: u64,
}

impl Client {
    /// Does its share; gives the time of each echo.
    async fn run(self, work: Work) -> anyhow::Result<Vec<Duration>> {
        match work {
            Work::Download => self.download().await.map(|()| Vec::new()),
            Work::Upload => self.upload().await.map(|()| Vec::new()),
            Work::Echo => self.echo().await,
            Work::Dials => self.dials().await.map(|()| Vec::new()),
        }
    }

    async fn download(&self) -> anyhow::Result<()> {
        let mut stream = self.connect().await?;
        let command = format!("download {}\n", self.amount);
        stream.write_all(command.as_bytes()).await?;
        let mut buffer = vec![0; MAX_PIECE];
        let mut received = 0;
        loop {
            match stream.read(&mut buffer).await {
                Ok(0) => break,
                Ok(n) => received += n as u64,
                Err(error) => bail!("broke after {received} of {} bytes: {error}", self.amount),
            }
        }
        ensure!(
            received == self.amount,
            "{received} bytes instead of {}",
            self.amount
        );
        Ok(())
    }

    async fn upload(&self) -> anyhow::Result<()> {
        let mut stream = self.connect().await?;
        stream.write_u64(self.amount).await?;
        for piece in pattern::pieces(self.amount) {
            stream.write_all(&piece).await.context("sending")?;
        }
        let counted = stream.read_u64().await.context("the endpoint's count")?;
        ensure!(
            counted == self.amount,
            "{counted} bytes instead of {}",
            self.amount
        );
        Ok(())
    }

    async fn echo(&self) -> anyhow::Result<Vec<Duration>> {
        let mut stream = self.connect().await?;
        stream.write_all(b"echo\n").await?;
        let sent = pattern::prefix(ECHO_BYTES as u64);
        let mut received = [0; ECHO_BYTES];
        let mut times = Vec::new();
        for _ in 0..self.amount {
            let begin = Instant::now();
            stream.write_all(&sent).await.context("sending")?;
            stream.read_exact(&mut received).await.context("echo")?;
            times.push(begin.elapsed());
            ensure!(sent == received, "an echo of other bytes than were sent");
        }
        Ok(times)
    }

    async fn dials(&self) -> anyhow::Result<()> {
        for _ in 0..self.amount {
            let mut stream = self.connect().await?;
            stream.write_all(b"echo\nx").await.context("sending")?;
            let echoed = stream.read_u8().await.context("echo")?;
            ensure!(echoed == b'x', "an echo of {echoed} instead of one x");
        }
        Ok(())
    }

    /// Opens a tunnelled connection. No endpoint here speaks first, so nothing may follow the head
    /// of the answer and it can be read in one go.
    async fn connect(&self) -> anyhow::Result<UnixStream> {
        let target = self.target;
        let mut stream = UnixStream::connect(&self.socket).await.context("dial")?;
        let request = format!("CONNECT {target} HTTP/1.1\r\nHost: {target}\r\n\r\n");
        stream.write_all(request.as_bytes()).await.context("dial")?;
        let mut head = Vec::with_capacity(MAX_HEAD);
        while !head.ends_with(b"\r\n\r\n") {
            let read = stream.read_buf(&mut head).await.context("dial")?;
            if read == 0 || head.len() > MAX_HEAD || !b"HTTP/1.1 200 ".starts_with(first(&head)) {
                bail!("dial answered with {:?}", String::from_utf8_lossy(&head));
            }
        }
        Ok(stream)
    }
}

/// As much of an answer as tells success.
fn first(head: &[u8]) -> &[u8] {
    head.get(..b"HTTP/1.1 200 ".len()).unwrap_or(head)
}

#[cfg(test)]
mod tests {
    #![allow(clippy::unwrap_used, clippy::expect_used, clippy::indexing_slicing)]
    use tokio::io::{AsyncBufReadExt as _, BufReader};
    use tokio::net::UnixListener;
    use tokio::task::JoinHandle;

    use super::*;

    /// A front end without a tunnel: takes CONNECT and joins the connection to its target, from
    /// which it lets `cut` bytes pass.
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
        for work in [Work::Download, Work::Upload, Work::Echo, Work::Dials] {
            let bulk = matches!(work, Work::Download | Work::Upload);
            let job = Job {
                work,
                connections: 3,
                amount: if bulk { 1_000_003 } else { 10 },
            };
            results.push(run(&socket, &endpoints, job).await);
        }
        proxy.abort();
        results
    }

    #[tokio::test]
    async fn all_work_gets_done() {
        let results = run_all(u64::MAX).await;
        let done: Vec<Done> = results.into_iter().map(Result::unwrap).collect();
        assert!(done.iter().all(|d| d.elapsed > Duration::ZERO));
        assert_eq!((done[0].p50_us, done[3].p99_us), (0.0, 0.0));
        assert!(0.0 < done[2].p50_us && done[2].p50_us <= done[2].p99_us);
    }

    #[tokio::test]
    async fn bytes_that_are_missing_fail() {
        for result in run_all(0).await {
            result.unwrap_err();
        }
    }
}
