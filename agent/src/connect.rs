//! One try to reach a server: TCP or an outbound proxy, TLS, HTTP/2, the `Connect` call. Every
//! step is bounded, so that a silent server never stops the search for others.

use std::pin::Pin;
use std::sync::Arc;
use std::task::{Context, Poll, ready};
use std::time::Duration;

use anyhow::Context as _;
use culvert_host::net::listen::tune;
use culvert_host::net::readahead::ReadAhead;
use culvert_host::net::{dial, proxy};
use culvert_host::runtime::TrackedExecutor;
use culvert_host::tls;
use culvert_konnectivity::grpc::{self, CallError, PacketBody, Reader};
use culvert_konnectivity::message::{HALF_CLOSE_HEADER, Message};
use culvert_konnectivity::metrics::Segment;
use culvert_konnectivity::queue;
use culvert_native as native;
use culvert_native::hello::{self, HelloError};
use culvert_native::link::{Taker, TakerLimits};
use culvert_native::window::Inbound;
use futures_util::Stream;
use hyper::client::conn::http2::{self, SendRequest};
use hyper_util::rt::{TokioIo, TokioTimer};
use rustls_pki_types::ServerName;
use tokio::net::TcpStream;
use tokio::time::{Instant, timeout_at};
use tokio_rustls::TlsConnector;
use tokio_rustls::client::TlsStream;
use tokio_util::sync::CancellationToken;
use tonic::Status;
use tonic::metadata::{MetadataMap, MetadataValue};
use tracing::debug;

use crate::agent::Agent;
use crate::config::Config;
use crate::metrics::AgentMetrics;
use crate::native::HELD_BYTES;
use crate::stream::OUTGOING_BYTES;

/// The longest that one try may take, as grpc-go's minimum connect timeout.
const CONNECT_TIMEOUT: Duration = Duration::from_secs(20);

/// How long the peer may take to answer a ping, as upstream's.
const PING_TIMEOUT: Duration = Duration::from_secs(20);

/// Bytes that the server may send ahead of our reading. One stream carries all connections, so
/// the stream's window is as large as the connection's. Bounds throughput to two thirds of
/// window / RTT, because `h2` gives a window back once that is half of what is left of it: 16 MiB
/// allow 106 MiB/s at 100 ms. As large as grpc-go's grows.
pub const WINDOW_BYTES: u32 = 16 * 1024 * 1024;

/// The largest frame that we take; a stock server sends 16 KiB at most.
const FRAME_BYTES: u32 = 64 * 1024;

/// Where servers take agents.
const PATH: &str = "/AgentService/Connect";

/// Reaches servers at the configured address.
pub struct Connector {
    agent: Arc<Agent>,
    tls: TlsConnector,
    name: ServerName<'static>,
    origin: http::Uri,
    config: Config,
}

/// An accepted `Connect` call.
pub struct Connected {
    /// What tells servers apart.
    pub server_id: String,
    /// How many servers there are, by this one's word; 0 reads as 1.
    pub server_count: i64,
    /// What carries the connections.
    pub transport: Transport,
    /// Closes the connection.
    pub ended: CancellationToken,
}

/// What the server chose in the TLS handshake.
pub enum Transport {
    /// A stream of packets for all connections.
    Packet {
        /// The server understands half closes: one of ours.
        half_close: bool,
        /// The server's packets.
        inbound: Box<Reader>,
        /// The way to the server.
        outgoing: queue::Sender<Message>,
    },
    /// A stream for each connection: the server is one of ours.
    Native {
        /// The server's streams.
        taker: Box<Taker<Tls>>,
        /// What they receive.
        inbound: Arc<Inbound>,
    },
}

/// The connection below HTTP/2.
type Tls = TlsStream<ReadAhead<TcpStream>>;

/// Why a try failed.
#[derive(Debug, thiserror::Error)]
pub enum ConnectError {
    /// The server can not be reached.
    #[error("cannot reach the server: {0}")]
    Unreachable(String),
    /// The outbound proxy from the environment is of no use.
    #[error("cannot reach the server through the proxy of HTTPS_PROXY: {0}")]
    Proxy(String),
    /// The TLS handshake failed.
    #[error("TLS handshake with the server failed: {0}")]
    Tls(String),
    /// The server speaks no HTTP/2.
    #[error("the server speaks no HTTP/2: {0}")]
    Http(String),
    /// The token file can not be used.
    #[error("cannot use the token of --service-account-token-path {0}: {1}")]
    Token(String, String),
    /// The server refused the call.
    #[error("the server refused this agent: {0}")]
    Refused(#[from] CallError),
    /// The server did not take the introduction.
    #[error("the server refused this agent: {0}")]
    Introduction(#[from] HelloError),
    /// The server's answer lacks what every server says.
    #[error("{0}")]
    Answer(String),
    /// A step took too long.
    #[error("timed out after {s} s while {0}", s = CONNECT_TIMEOUT.as_secs())]
    TimedOut(&'static str),
}

// === impl Connector ===

impl Connector {
    /// Reads certificates and checks the address.
    ///
    /// # Errors
    /// When a file can not be used or the host is neither a name nor an address.
    pub fn new(agent: Arc<Agent>, config: Config) -> anyhow::Result<Self> {
        let ca_cert = config.ca_cert.as_deref();
        let trust = tls::TrustBundle::load(ca_cert.context("--ca-cert is not set")?)?;
        let identity = match &config.client_cert {
            Some(files) => Some(tls::Identity::load(&files.cert, &files.key)?),
            None => None,
        };
        let names = config.alpn.iter().map(|name| name.as_bytes());
        let alpn: Vec<&[u8]> = std::iter::once(native::ALPN)
            .chain(names)
            .chain([b"h2".as_slice()])
            .collect();
        let options = tls::TlsOptions::default();
        let client = tls::client_config(&trust, identity.as_ref(), &alpn, &options)?;
        let host = config.server_host.trim_matches(['[', ']']).to_owned();
        let name = ServerName::try_from(host.clone()).map_err(|_| {
            anyhow::anyhow!("--proxy-server-host={host} is neither a host name nor an address")
        })?;
        let authority = if host.contains(':') {
            format!("[{host}]:{}", config.server_port)
        } else {
            format!("{host}:{}", config.server_port)
        };
        let origin = http::Uri::builder()
            .scheme("https")
            .authority(authority)
            .path_and_query("/")
            .build()?;
        Ok(Self {
            agent,
            tls: TlsConnector::from(client),
            name,
            origin,
            config,
        })
    }

    /// One try.
    ///
    /// # Errors
    /// See [`ConnectError`].
    pub async fn connect(&self) -> Result<Connected, ConnectError> {
        let deadline = Instant::now() + CONNECT_TIMEOUT;
        let within = |step| move |_| ConnectError::TimedOut(step);
        let metadata = self.metadata().await?;
        let tcp = timeout_at(deadline, self.tcp(deadline))
            .await
            .map_err(within("connecting"))??;
        let handshake = self.tls.connect(self.name.clone(), ReadAhead::new(tcp));
        let mut tls = timeout_at(deadline, handshake)
            .await
            .map_err(within("waiting for the TLS handshake"))?
            .map_err(|error| ConnectError::Tls(tls::explain(&error)))?;
        tls.get_mut().1.set_buffer_limit(Some(tls::BUFFER_BYTES));
        let ended = self.agent.shutdown.child_token();
        if tls.get_ref().1.alpn_protocol() == Some(native::ALPN) {
            let introduced = timeout_at(deadline, self.introduce(tls, metadata, ended));
            return introduced
                .await
                .map_err(within("waiting for the server's answer"))?;
        }
        let sender = timeout_at(deadline, self.http(tls, ended.clone()))
            .await
            .map_err(within("waiting for the HTTP/2 preface"))??;
        timeout_at(deadline, self.call(sender, metadata, ended))
            .await
            .map_err(within("waiting for the server's answer"))?
    }

    async fn tcp(&self, deadline: Instant) -> Result<TcpStream, ConnectError> {
        let stream = match self.config.server_address {
            Some(address) => dial_direct(&address.to_string()).await?,
            None => self.tcp_by_name(deadline).await?,
        };
        // A connection that is gone already fails here and again at the handshake.
        let _ = tune(&stream);
        Ok(stream)
    }

    async fn tcp_by_name(&self, deadline: Instant) -> Result<TcpStream, ConnectError> {
        let host = self.config.server_host.trim_matches(['[', ']']);
        let port = self.config.server_port;
        let through =
            proxy::from_env(host, port).map_err(|error| ConnectError::Proxy(error.to_string()))?;
        match through {
            Some(target) => proxy::connect(&target, host, port, deadline)
                .await
                .map_err(|error| ConnectError::Proxy(error.to_string())),
            None => dial_direct(self.origin.authority().map_or("", |a| a.as_str())).await,
        }
    }

    async fn introduce(
        &self,
        mut tls: Tls,
        metadata: MetadataMap,
        ended: CancellationToken,
    ) -> Result<Connected, ConnectError> {
        let answer = hello::introduce(&mut tls, &metadata.into_headers()).await?;
        let (server_id, server_count) =
            server_of(&MetadataMap::from_headers(answer)).map_err(ConnectError::Answer)?;
        let inbound = Arc::new(Inbound::default());
        let taker = Taker::new(tls, inbound.clone(), TakerLimits::trusting(HELD_BYTES)).await;
        let taker = taker.map_err(|error| ConnectError::Http(error.to_string()))?;
        Ok(Connected {
            server_id,
            server_count,
            transport: Transport::Native {
                taker: Box::new(taker),
                inbound,
            },
            ended,
        })
    }

    async fn http(
        &self,
        tls: Tls,
        ended: CancellationToken,
    ) -> Result<SendRequest<PacketBody<ToServer>>, ConnectError> {
        if tls.get_ref().1.alpn_protocol().is_none() {
            return Err(ConnectError::Http(
                "it negotiated no ALPN protocol; does the port belong to a Konnectivity server?"
                    .into(),
            ));
        }
        let executor = TrackedExecutor(self.agent.tasks.clone());
        let (sender, connection) = http2::Builder::new(executor)
            .timer(TokioTimer::new())
            .initial_stream_window_size(WINDOW_BYTES)
            .initial_connection_window_size(2 * WINDOW_BYTES)
            .max_frame_size(FRAME_BYTES)
            .keep_alive_interval(self.config.keepalive_time)
            .keep_alive_timeout(PING_TIMEOUT)
            .keep_alive_while_idle(true)
            .handshake(TokioIo::new(tls))
            .await
            .map_err(|error| ConnectError::Http(error.to_string()))?;
        self.agent.tasks.spawn(async move {
            tokio::select! {
                ended = connection => if let Err(error) = ended {
                    debug!(%error, "the connection to a server broke");
                },
                () = ended.cancelled() => {}
            }
        });
        Ok(sender)
    }

    async fn call(
        &self,
        sender: SendRequest<PacketBody<ToServer>>,
        metadata: MetadataMap,
        ended: CancellationToken,
    ) -> Result<Connected, ConnectError> {
        let (outgoing, messages) = queue::bounded(OUTGOING_BYTES);
        let packets = ToServer {
            messages,
            metrics: self.agent.metrics.clone(),
        };
        let (answer, inbound) = grpc::call(sender, &self.origin, PATH, metadata, packets).await?;
        let (server_id, server_count) = server_of(&answer).map_err(ConnectError::Answer)?;
        Ok(Connected {
            server_id,
            server_count,
            transport: Transport::Packet {
                half_close: answer.contains_key(HALF_CLOSE_HEADER),
                inbound: Box::new(inbound),
                outgoing,
            },
            ended,
        })
    }

    /// What the agent says of itself. The token is read anew each time: it is rotated.
    async fn metadata(&self) -> Result<MetadataMap, ConnectError> {
        let mut metadata = MetadataMap::new();
        let header = |value: &str| {
            MetadataValue::try_from(value)
                .map_err(|_| ConnectError::Answer(format!("not a valid header value: {value:?}")))
        };
        metadata.insert("agentid", header(&self.config.agent_id)?);
        metadata.insert("agentidentifiers", header(&self.config.agent_identifiers)?);
        metadata.insert(HALF_CLOSE_HEADER, MetadataValue::from_static("1"));
        if let Some(path) = &self.config.token_path {
            let unusable = |why: String| ConnectError::Token(path.display().to_string(), why);
            let token = tokio::fs::read_to_string(path)
                .await
                .map_err(|error| unusable(error.to_string()))?;
            let value = MetadataValue::try_from(format!("Bearer {}", token.trim()))
                .map_err(|_| unusable("it holds bytes that no token has".into()))?;
            metadata.insert("authorization", value);
        }
        Ok(metadata)
    }
}

async fn dial_direct(address: &str) -> Result<TcpStream, ConnectError> {
    dial::dial("tcp", address, CONNECT_TIMEOUT)
        .await
        .map_err(|error| ConnectError::Unreachable(error.text))
}

/// Reads what a server says of itself; the texts are upstream's.
fn server_of(metadata: &MetadataMap) -> Result<(String, i64), String> {
    let values = |key: &'static str| -> Vec<&str> {
        let all = metadata.get_all(key).iter();
        all.filter_map(|value| value.to_str().ok()).collect()
    };
    let ids = values("serverid");
    let [id] = ids.as_slice() else {
        return Err(format!(
            "expected one server ID in the context, got [{}]",
            ids.join(" ")
        ));
    };
    let counts = values("servercount");
    let [count] = counts.as_slice() else {
        return Err(format!("expected one server count, got {}", counts.len()));
    };
    let count = count
        .parse()
        .map_err(|_| format!("the server count {count:?} is not a number"))?;
    Ok(((*id).to_owned(), count))
}

/// What goes to the server, counted.
struct ToServer {
    messages: queue::Receiver<Message>,
    metrics: Arc<AgentMetrics>,
}

impl Stream for ToServer {
    type Item = Result<Message, Status>;

    fn poll_next(mut self: Pin<&mut Self>, cx: &mut Context<'_>) -> Poll<Option<Self::Item>> {
        let Some(message) = ready!(self.messages.poll_recv(cx)) else {
            return Poll::Ready(None);
        };
        self.metrics.streams.count(Segment::FromAgent, &message);
        Poll::Ready(Some(Ok(message)))
    }
}

#[cfg(test)]
mod tests {
    #![allow(clippy::unwrap_used)]

    use super::*;

    fn server(pairs: &[(&'static str, &str)]) -> Result<(String, i64), String> {
        let mut metadata = MetadataMap::new();
        for (key, value) in pairs {
            metadata.append(*key, value.parse().unwrap());
        }
        server_of(&metadata)
    }

    #[test]
    fn a_server_says_its_id_and_count_once() {
        let both = [("serverid", "a"), ("servercount", "3")];
        assert_eq!(server(&both), Ok(("a".into(), 3)));
        assert_eq!(
            server(&[("servercount", "3")]).unwrap_err(),
            "expected one server ID in the context, got []"
        );
        assert_eq!(
            server(&[("serverid", "a")]).unwrap_err(),
            "expected one server count, got 0"
        );
    }
}
