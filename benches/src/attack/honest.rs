//! Honest clients: they connect again and again from an address of their own, before, during and after an attack.

use std::net::{Ipv4Addr, SocketAddr};
use std::sync::Arc;
use std::time::Duration;

use anyhow::{Context as _, bail, ensure};
use bytes::Bytes;
use culvert_openvpn::session::ClientConfig as OpenvpnConfig;
use culvert_tests::openvpn::{Endpoint, Link, Namespace};
use http::Request;
use parking_lot::Mutex;
use rustls::ClientConfig;
use tokio::io::{AsyncRead, AsyncReadExt as _, AsyncWrite, AsyncWriteExt as _};
use tokio::net::{TcpSocket, TcpStream, UdpSocket};
use tokio::task::JoinSet;
use tokio::time::{Instant, interval, sleep, timeout};
use tokio_rustls::TlsConnector;

use crate::attack::party::Party;
use crate::entry::Entry;
use crate::openvpn::Proto;

/// Interval between the starts of two requests of one kind.
const INTERVAL: Duration = Duration::from_millis(100);

/// Time limit of a request. A longer request counts as failed.
pub(super) const LIMIT: Duration = Duration::from_secs(5);

/// Longest accepted head of an HTTP answer, in bytes.
const MAX_HEAD: usize = 4096;

/// Interval at which an OpenVPN handshake is observed.
const OBSERVE: Duration = Duration::from_millis(5);

/// Purpose of a request.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) enum Purpose {
    /// A new client of the attacked listener.
    Client,
    /// A dial through the tunnel of the attacked program.
    Dial,
    /// A health check.
    Health,
}

/// A request of an honest client. Each request opens a new connection.
#[derive(Debug, Clone)]
pub(super) enum Probe {
    /// An agent's call, up to the headers of the answer.
    Agent {
        to: SocketAddr,
        tls: Arc<ClientConfig>,
        token: Option<&'static str>,
    },
    /// A CONNECT to an endpoint over mutual TLS, and an echo.
    FrontEnd {
        to: SocketAddr,
        tls: Arc<ClientConfig>,
        target: SocketAddr,
    },
    /// A GET with status 200.
    Get { to: SocketAddr, path: &'static str },
    /// A first message, and an echo.
    Echo { to: SocketAddr, first: Bytes },
    /// A CONNECT in plain text, and an echo.
    Connect { to: SocketAddr, authority: String },
    /// A dial through the entry of a tunnel, and an echo.
    Tunnel { entry: Entry, target: SocketAddr },
    /// An OpenVPN handshake.
    Openvpn {
        to: SocketAddr,
        proto: Proto,
        config: OpenvpnConfig,
    },
}

/// State of a request.
#[derive(Debug, Clone, Copy, PartialEq)]
pub(super) enum Outcome {
    Pending,
    Done(Duration),
    Failed,
}

/// A request that was started.
#[derive(Debug, Clone, Copy)]
pub(super) struct Sample {
    pub purpose: Purpose,
    pub begin: Instant,
    pub outcome: Outcome,
}

/// The running honest clients. Dropping the value ends them.
#[derive(Debug)]
pub(super) struct Honest {
    samples: Arc<Mutex<Vec<Sample>>>,
    /// First error since the start.
    error: Arc<Mutex<Option<String>>>,
    _party: Party<()>,
}

impl Honest {
    /// Starts a request of each kind every [`INTERVAL`], regardless of earlier requests.
    pub(super) fn start(
        at: Option<Namespace>,
        source: Ipv4Addr,
        probes: Vec<(Purpose, Probe)>,
    ) -> Self {
        let samples: Arc<Mutex<Vec<Sample>>> = Arc::default();
        let error: Arc<Mutex<Option<String>>> = Arc::default();
        let (kept, first_error) = (Arc::clone(&samples), Arc::clone(&error));
        let party = Party::start(at, move || async move {
            let mut requests = JoinSet::new();
            let mut ticks = interval(INTERVAL);
            loop {
                ticks.tick().await;
                for (purpose, probe) in &probes {
                    let sample = Sample {
                        purpose: *purpose,
                        begin: Instant::now(),
                        outcome: Outcome::Pending,
                    };
                    let at = {
                        let mut samples = samples.lock();
                        samples.push(sample);
                        samples.len() - 1
                    };
                    let (samples, error) = (Arc::clone(&samples), Arc::clone(&error));
                    let probe = probe.clone();
                    requests.spawn(async move {
                        let once = timeout(LIMIT, probe.once(source)).await;
                        let outcome = match once.context("timed out").flatten() {
                            Ok(()) => Outcome::Done(sample.begin.elapsed()),
                            Err(why) => {
                                let text = || format!("{:?}: {why:#}", sample.purpose);
                                error.lock().get_or_insert_with(text);
                                Outcome::Failed
                            }
                        };
                        if let Some(sample) = samples.lock().get_mut(at) {
                            sample.outcome = outcome;
                        }
                    });
                }
                while requests.try_join_next().is_some() {}
            }
        });
        Self {
            samples: kept,
            error: first_error,
            _party: party,
        }
    }

    /// Returns all requests so far.
    pub(super) fn samples(&self) -> Vec<Sample> {
        self.samples.lock().clone()
    }

    /// Returns the first error so far, and forgets the error.
    pub(super) fn take_error(&self) -> Option<String> {
        self.error.lock().take()
    }
}

impl Probe {
    /// Sends the request. The connection comes from `source`, except for dials through a tunnel.
    async fn once(self, source: Ipv4Addr) -> anyhow::Result<()> {
        match self {
            Self::Agent { to, tls, token } => agent(connect(source, to).await?, tls, token).await,
            Self::FrontEnd { to, tls, target } => {
                let stream = connect(source, to).await?;
                let name = "localhost".try_into()?;
                let mut stream = TlsConnector::from(tls).connect(name, stream).await?;
                ask_connect(&mut stream, &target.to_string()).await?;
                echo(&mut stream).await
            }
            Self::Get { to, path } => {
                let mut stream = connect(source, to).await?;
                let request = format!("GET {path} HTTP/1.1\r\nHost: {to}\r\n\r\n");
                stream.write_all(request.as_bytes()).await?;
                accepted(&mut stream).await
            }
            Self::Echo { to, first } => {
                let mut stream = connect(source, to).await?;
                stream.write_all(&first).await?;
                echo(&mut stream).await
            }
            Self::Connect { to, authority } => {
                let mut stream = connect(source, to).await?;
                ask_connect(&mut stream, &authority).await?;
                echo(&mut stream).await
            }
            Self::Tunnel { entry, target } => {
                let mut stream = entry.open(target).await?;
                echo(&mut stream).await
            }
            Self::Openvpn { to, proto, config } => {
                let link = match proto {
                    Proto::Tcp => Link::tcp(connect(source, to).await?),
                    Proto::Udp => Link::udp(UdpSocket::bind((source, 0)).await?, Some(to)),
                };
                let client = Endpoint::client(link, config, None);
                loop {
                    let seen = client.seen();
                    if let Some(why) = seen.ended {
                        bail!("the session ended: {why}");
                    }
                    if seen.established.is_some() {
                        return Ok(());
                    }
                    sleep(OBSERVE).await;
                }
            }
        }
    }
}

async fn connect(source: Ipv4Addr, to: SocketAddr) -> anyhow::Result<TcpStream> {
    let socket = TcpSocket::new_v4()?;
    socket.bind((source, 0).into())?;
    let stream = socket.connect(to).await.context("connect")?;
    stream.set_nodelay(true)?;
    Ok(stream)
}

/// Makes an agent's call.
async fn agent(
    stream: TcpStream,
    tls: Arc<ClientConfig>,
    token: Option<&str>,
) -> anyhow::Result<()> {
    let name = "localhost".try_into()?;
    let stream = TlsConnector::from(tls).connect(name, stream).await;
    let stream = stream.context("TLS")?;
    let (requests, connection) = h2::client::handshake(stream).await?;
    let mut driver = JoinSet::new();
    driver.spawn(async move {
        // The call reports the end of the connection.
        connection.await.ok();
    });
    let request = Request::post("https://localhost/AgentService/Connect")
        .header("content-type", "application/grpc")
        .header("te", "trailers")
        .header("agentid", "honest")
        .header("agentidentifiers", "");
    let request = match token {
        Some(token) => request.header("authorization", format!("Bearer {token}")),
        None => request,
    };
    let mut requests = requests.ready().await?;
    let (answer, _body) = requests.send_request(request.body(())?, false)?;
    let answer = answer.await.context("call")?;
    let status = answer.headers().get("grpc-status");
    ensure!(
        answer.status().is_success() && status.is_none(),
        "refused: {answer:?}"
    );
    Ok(())
}

async fn ask_connect<S>(stream: &mut S, authority: &str) -> anyhow::Result<()>
where
    S: AsyncRead + AsyncWrite + Unpin,
{
    let request = format!("CONNECT {authority} HTTP/1.1\r\nHost: {authority}\r\n\r\n");
    stream.write_all(request.as_bytes()).await?;
    stream.flush().await?;
    accepted(stream).await
}

/// Reads the head of an HTTP answer, which must have status 200.
async fn accepted(stream: &mut (impl AsyncRead + Unpin)) -> anyhow::Result<()> {
    let mut head = Vec::with_capacity(MAX_HEAD);
    while !head.windows(4).any(|end| end == b"\r\n\r\n") {
        let read = stream.read_buf(&mut head).await?;
        ensure!(read > 0 && head.len() <= MAX_HEAD, "no complete answer");
    }
    let text = String::from_utf8_lossy(&head);
    ensure!(
        text.starts_with("HTTP/1.1 200 "),
        "refused: {:?}",
        text.lines().next()
    );
    Ok(())
}

async fn echo<S>(stream: &mut S) -> anyhow::Result<()>
where
    S: AsyncRead + AsyncWrite + Unpin,
{
    stream.write_all(b"echo\nx").await?;
    stream.flush().await?;
    let byte = stream.read_u8().await.context("echo")?;
    ensure!(byte == b'x', "echo returned another byte");
    Ok(())
}
