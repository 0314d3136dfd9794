//! An attempt to reach a server: TCP or an outbound proxy, TLS, HTTP/2, the `Connect` call. Every step has a
//! time limit, so a silent server cannot block the search for more servers.

mod error;

use std::net::SocketAddr;
use std::os::fd::AsFd as _;
use std::pin::Pin;
use std::sync::Arc;
use std::task::{Context, Poll, ready};
use std::time::Duration;

use anyhow::Context as _;
use culvert_host::net::congestion::{ChosenCongestion, congestion};
use culvert_host::net::listen::tune;
use culvert_host::net::proxy::{self, ProxyScheme};
use culvert_host::net::readahead::ReadAhead;
use culvert_host::net::{dial, long_path};
use culvert_host::tls;
use culvert_host::tls::reload::{ClientFiles, ClientTls};
use culvert_konnectivity::grpc::{self, PacketBody, Piece, Reader, SendLimits};
use culvert_konnectivity::message::{HALF_CLOSE_HEADER, Message};
use culvert_konnectivity::metrics::Segment;
use culvert_konnectivity::queue;
use culvert_native as native;
use culvert_native::COUNT_PUSHED_HEADER;
use culvert_native::hello::{self, Answer};
use culvert_native::link::{AGENT_SEND_BYTES, Opener, Requests, Taker, TakerLimits};
use culvert_native::resume::{self, MaybeResumable, Process, ResumableIo};
use culvert_native::window::{Inbound, Pings, WindowProfile};
use futures_util::Stream;
use rustls_pki_types::ServerName;
use tokio::net::TcpStream;
use tokio::sync::oneshot;
use tokio::time::{Instant, timeout_at};
use tokio_util::sync::{CancellationToken, WaitForCancellationFutureOwned};
use tonic::Status;
use tonic::metadata::MetadataMap;
use tracing::debug;

use crate::addresses::{Addresses, Via};
use crate::agent::Agent;
use crate::config::{Config, LinkTransport};
use crate::files::{Files, Reloader};
use crate::introduction::{metadata, server_of};
use crate::link::{ResumableLink, Tls};
use crate::metrics::AgentMetrics;
use crate::packet::{self, OUTGOING_BYTES};
use crate::process::this_process;
use crate::quic::{Offer, Origin, Second};
use crate::search::Unanswered;

pub(crate) use self::error::ConnectError;

/// Longest duration of one attempt: grpc-go's minimum connect timeout.
const CONNECT_TIMEOUT: Duration = Duration::from_secs(20);

/// Path of the call that connects an agent to a server.
const PATH: &str = "/AgentService/Connect";

/// Connects to servers at the configured name.
pub(crate) struct Connector {
    agent: Arc<Agent>,
    tls: ClientTls,
    name: ServerName<'static>,
    origin: http::Uri,
    addresses: Arc<Addresses>,
    congestion: ChosenCongestion,
    process: Option<Process>,
    config: Arc<Config>,
}

/// The answer of a server.
pub(crate) enum Reached {
    /// A server has accepted the agent.
    New(Box<Connected>),
    /// A connected server has answered that it is connected already.
    AlreadyConnected {
        /// Id of the server.
        server_id: String,
        /// Announced number of servers.
        server_count: i64,
        /// True if the server pushes changes of the number of servers.
        pushes_count: bool,
    },
}

/// An accepted `Connect` call.
pub(crate) struct Connected {
    /// Id of the server, unique among the servers.
    pub server_id: String,
    /// Number of servers, as announced by the server; 0 counts as 1.
    pub server_count: i64,
    /// True if the server pushes changes of the number of servers.
    pub pushes_count: bool,
    /// Transport for the connections.
    pub transport: Transport,
    /// Fires when the agent connection ends; firing the token also closes the agent connection.
    pub ended: CancellationToken,
    /// Address of the server; `None` if an outbound proxy or the configuration chooses the address.
    pub via: Option<Via>,
    /// Congestion control of the connection, as the kernel names it.
    pub congestion: String,
    /// The server's offer of a QUIC link.
    offer: Option<Offer>,
    /// Second link to the server, not connected yet.
    pub second: Option<Second>,
}

/// Transport chosen by the server in the TLS handshake.
pub(crate) enum Transport {
    /// One stream of packets for all connections.
    Packet {
        /// True if the server supports half-closes; only Culvert servers do.
        half_close: bool,
        /// Packets from the server.
        packets: Box<Reader>,
        /// Packets to the server.
        outgoing: queue::Sender<Message>,
        /// Counts the bytes that the stream receives, and sets its window.
        inbound: Arc<Inbound>,
    },
    /// One HTTP/2 stream per connection; only Culvert servers offer this transport.
    Native {
        /// Accepts the server's streams.
        taker: Box<Taker<MaybeResumable<Tls>>>,
        /// Counts the bytes that the streams receive, and sets their windows.
        inbound: Arc<Inbound>,
        /// Right to resume the link; `None` if the server does not resume links.
        link: Option<ResumableLink>,
    },
}

// === impl Connector ===

impl Connector {
    /// Loads the certificates and checks the address. `reloader` follows the certificates; every attempt uses the
    /// latest ones.
    ///
    /// # Errors
    /// Fails if a file cannot be used or the host is neither a name nor an address.
    pub(crate) async fn new(
        agent: Arc<Agent>,
        config: Config,
        reloader: &mut Reloader,
    ) -> anyhow::Result<Self> {
        let ca_cert = config.ca_cert.as_deref();
        let ca_cert = ca_cert.context("--ca-cert is not set")?;
        let pair = config.client_cert.as_ref();
        let pair = pair.map(|files| (files.cert.as_path(), files.key.as_path()));
        let names = config.alpn.iter().map(|name| name.as_bytes());
        let alpn: Vec<&[u8]> = std::iter::once(native::ALPN)
            .chain(names)
            .chain([b"h2".as_slice()])
            .collect();
        let options = tls::TlsOptions::default();
        let set = ClientFiles::new(ca_cert, pair, &alpn, &options)?;
        let tls = reloader.follow(Files::Server, set).await?;
        let host = config.server_host.trim_matches(['[', ']']).to_owned();
        let name = ServerName::try_from(host.clone()).map_err(|_| {
            anyhow::anyhow!("--proxy-server-host={host} is neither a host name nor an address; the port belongs to --proxy-server-port")
        })?;
        let origin = http::Uri::builder()
            .scheme("https")
            .authority(dial::join_host_port(&host, config.server_port))
            .path_and_query("/")
            .build()?;
        Ok(Self {
            agent,
            tls,
            name,
            origin,
            addresses: Arc::default(),
            congestion: config.link_congestion.choose()?,
            process: this_process(&config),
            config: Arc::new(config),
        })
    }

    /// Makes one attempt to connect. `connected` returns the ids of the connected servers. `unanswered` counts the attempt while
    /// it waits for the answer of a server.
    pub(crate) async fn connect(
        &self,
        connected: impl Fn() -> Vec<String>,
        unanswered: &Unanswered,
    ) -> Result<Reached, ConnectError> {
        let deadline = Instant::now() + CONNECT_TIMEOUT;
        let metadata = metadata(&self.config, deadline).await?;
        let (tcp, mut via) = self.tcp(deadline).await?;
        let congestion = congestion(&tcp);
        let origin = self.quic_origin(&tcp, via.as_ref());
        let answer = async {
            let tls = self.handshake(tcp, deadline).await?;
            let _unanswered = unanswered.clone();
            // After an outage, several attempts may have waited for their TCP connections, so the list is read as late as
            // possible.
            self.greet(tls, metadata, &connected(), deadline).await
        };
        let answer = answer.await;
        if let Some(via) = &mut via {
            via.ended(answer.is_ok());
        }
        let mut reached = answer?;
        if let Reached::New(connected) = &mut reached {
            connected.via = via;
            connected.congestion = congestion;
            if let (Some(offer), Some(origin)) = (connected.offer.take(), origin) {
                let server_id = connected.server_id.clone();
                let tls = self.tls.clone();
                let second = Second::new(offer, origin, server_id, tls, &self.config);
                if let Transport::Native {
                    link: Some(link), ..
                } = &mut connected.transport
                {
                    link.socket = Some(second.socket.clone());
                }
                connected.second = Some(second);
            }
        }
        Ok(reached)
    }

    /// Returns the TCP connection as the origin of a QUIC link. `None` if the agent uses no QUIC, or if an outbound proxy
    /// hides the server's address.
    fn quic_origin(&self, tcp: &TcpStream, via: Option<&Via>) -> Option<Origin> {
        let is_direct = via.is_some() || self.config.server_address.is_some();
        if self.config.transport == LinkTransport::Tcp || !is_direct {
            return None;
        }
        Some(Origin {
            server: tcp.peer_addr().ok()?,
            socket: tcp.as_fd().try_clone_to_owned().ok()?,
        })
    }

    async fn greet(
        &self,
        tls: Tls,
        metadata: MetadataMap,
        connected: &[String],
        deadline: Instant,
    ) -> Result<Reached, ConnectError> {
        let within = |step| move |_| ConnectError::TimedOut(step);
        let ended = self.agent.shutdown.child_token();
        if self.is_native(&tls) {
            let introduced = self.introduce(tls, metadata, connected, ended);
            return timeout_at(deadline, introduced)
                .await
                .map_err(within("waiting for the server's answer"))?;
        }
        let inbound = Arc::new(Inbound::new(WindowProfile::Packets));
        // The agent has verified the server's certificate.
        inbound.admit();
        let (requests, broken) =
            timeout_at(deadline, self.http(tls, inbound.clone(), ended.clone()))
                .await
                .map_err(within("waiting for the HTTP/2 preface"))??;
        let called = async {
            match self.call(requests, metadata, inbound, ended).await {
                // The call learns only that the connection is gone.
                Err(ConnectError::Ended(why)) => {
                    let error = broken.await.unwrap_or_default();
                    let refused = ConnectError::refused_certificate(&error);
                    Err(refused.unwrap_or(ConnectError::Ended(why)))
                }
                called => called,
            }
        };
        timeout_at(deadline, called)
            .await
            .map_err(within("waiting for the server's answer"))?
    }

    /// Runs the TLS handshake.
    pub(crate) async fn handshake(
        &self,
        tcp: TcpStream,
        deadline: Instant,
    ) -> Result<Tls, ConnectError> {
        let handshake = Tls::connect(self.tls.get(), self.name.clone(), ReadAhead::new(tcp));
        timeout_at(deadline, handshake)
            .await
            .map_err(|_| ConnectError::TimedOut("waiting for the TLS handshake"))?
            .map_err(|error| ConnectError::Tls(tls::explain(&error)))
    }

    /// Returns true if the TLS handshake chose the native transport.
    pub(crate) fn is_native(&self, tls: &Tls) -> bool {
        tls.tls().alpn_protocol() == Some(native::ALPN)
    }

    /// Returns the configuration.
    pub(crate) fn config(&self) -> &Config {
        &self.config
    }

    /// Returns the identity of this process.
    pub(crate) fn process(&self) -> Option<&Process> {
        self.process.as_ref()
    }

    /// Returns the agent's metrics.
    pub(crate) fn metrics(&self) -> &AgentMetrics {
        &self.agent.metrics
    }

    /// Opens a TCP connection to a server before the deadline. Returns also its address, if the name has several.
    pub(crate) async fn tcp(
        &self,
        deadline: Instant,
    ) -> Result<(TcpStream, Option<Via>), ConnectError> {
        let (stream, via) = match self.config.server_address {
            Some(address) => (dial_direct(vec![address], deadline).await?, None),
            None => self.tcp_by_name(deadline).await?,
        };
        // An error here is ignored: if the connection is already gone, the TLS handshake fails too.
        let _ = tune(&stream);
        self.congestion.apply(&stream);
        long_path::tune_link(&stream);
        Ok((stream, via))
    }

    async fn tcp_by_name(
        &self,
        deadline: Instant,
    ) -> Result<(TcpStream, Option<Via>), ConnectError> {
        let host = self.config.server_host.trim_matches(['[', ']']);
        let port = self.config.server_port;
        let through = proxy::from_env(host, port, ProxyScheme::Ignored)
            .map_err(|error| ConnectError::Proxy(error.to_string()))?;
        if let Some(target) = through {
            let stream = proxy::connect(&target, host, port, deadline).await;
            let stream = stream.map_err(|error| ConnectError::Proxy(error.to_string()))?;
            return Ok((stream, None));
        }
        let found = dial::lookup("tcp", host, port, until(deadline)).await;
        let found = found.map_err(|error| ConnectError::Unreachable(error.text))?;
        let mut via = self.addresses.begin(found);
        let stream = dial_direct(via.order().to_vec(), deadline).await;
        let stream = stream.inspect_err(|_| via.ended(false))?;
        if let Ok(address) = stream.peer_addr() {
            via.reached(address);
        }
        Ok((stream, Some(via)))
    }

    async fn introduce(
        &self,
        mut tls: Tls,
        metadata: MetadataMap,
        connected: &[String],
        ended: CancellationToken,
    ) -> Result<Reached, ConnectError> {
        let mut headers = metadata.into_headers();
        hello::add_connected(&mut headers, connected);
        let grace = self.config.resume_grace;
        let is_offered =
            !grace.is_zero() && tls::export(tls.tls(), resume::EXPORTER_LABEL).is_some();
        if is_offered {
            resume::add_offer(&mut headers);
            if let Some(process) = &self.process {
                process.add_to(&mut headers);
            }
        }
        let answer = hello::introduce(&mut tls, &headers).await?;
        let is_connected = matches!(answer, Answer::AlreadyConnected(_));
        let (Answer::Accepted(answer) | Answer::AlreadyConnected(answer)) = answer;
        let pushes_count = answer.contains_key(COUNT_PUSHED_HEADER);
        let offer = Offer::of(&answer);
        let ticket = resume::ticket(&answer).filter(|_| is_offered);
        let (server_id, server_count) =
            server_of(&MetadataMap::from_headers(answer)).map_err(ConnectError::Answer)?;
        if is_connected {
            return Ok(Reached::AlreadyConnected {
                server_id,
                server_count,
                pushes_count,
            });
        }
        let inbound = Arc::new(Inbound::default());
        let (stream, link) = match ticket {
            Some(ticket) => {
                let stream = ResumableIo::opening(tls, inbound.clone(), grace);
                let session = stream.session();
                let link = ResumableLink {
                    session,
                    ticket,
                    socket: None,
                    answered: Arc::default(),
                };
                let stream = MaybeResumable::Resumable(Box::new(stream));
                (stream, Some(link))
            }
            None => (MaybeResumable::Plain(tls), None),
        };
        let limits = TakerLimits {
            pings: Pings::with_keepalive(self.config.keepalive_time),
            ..TakerLimits::trusting()
        };
        // Nothing is lost with a link that breaks so early, and another attempt may reach another server.
        let broke = async {
            match &link {
                Some(link) => link.session.broke().await,
                None => std::future::pending().await,
            }
        };
        let taken = tokio::select! {
            taken = Taker::new(stream, inbound.clone(), limits) => taken.map_err(|error| error.to_string()),
            () = broke => Err("the connection broke".to_owned()),
        };
        let taker = taken.map_err(ConnectError::Http)?;
        Ok(Reached::New(Box::new(Connected {
            server_id,
            server_count,
            pushes_count,
            transport: Transport::Native {
                taker: Box::new(taker),
                inbound,
                link,
            },
            ended,
            via: None,
            congestion: String::new(),
            offer,
            second: None,
        })))
    }

    /// Starts HTTP/2. Returns also the receiver of the error with which the connection ends, if any.
    async fn http(
        &self,
        tls: Tls,
        inbound: Arc<Inbound>,
        ended: CancellationToken,
    ) -> Result<(Requests<Piece>, oneshot::Receiver<String>), ConnectError> {
        if tls.tls().alpn_protocol().is_none() {
            return Err(ConnectError::Http(
                "no ALPN protocol was negotiated; does the port belong to a Konnectivity server?"
                    .into(),
            ));
        }
        let pings = packet::pings(self.config.keepalive_time);
        let opened = Opener::for_packets(tls, inbound, pings).await;
        let (requests, mut opener) =
            opened.map_err(|error| ConnectError::Http(error.to_string()))?;
        let (broke, broken) = oneshot::channel();
        self.agent.tasks.spawn(async move {
            tokio::select! {
                ended = opener.run() => if let Err(error) = ended {
                    debug!(%error, "the connection to a server broke");
                    // Nothing waits for the error of an accepted agent.
                    let _ = broke.send(error);
                },
                () = ended.cancelled() => {}
            }
        });
        Ok((requests, broken))
    }

    async fn call(
        &self,
        requests: Requests<Piece>,
        metadata: MetadataMap,
        inbound: Arc<Inbound>,
        ended: CancellationToken,
    ) -> Result<Reached, ConnectError> {
        let (outgoing, messages) = queue::bounded(OUTGOING_BYTES);
        let progress = messages.progress();
        let packets = ToServer {
            messages,
            finish: Box::pin(self.agent.finish.clone().cancelled_owned()),
            metrics: self.agent.metrics.clone(),
        };
        let body = PacketBody::request(packets).reporting_to(Some(progress));
        let tasks = &self.agent.tasks;
        let path = inbound.clone();
        let limits = SendLimits {
            queue: AGENT_SEND_BYTES,
            ahead: move || path.ahead(),
        };
        let called = grpc::call(requests, &self.origin, PATH, metadata, body, limits, tasks);
        let (answer, packets) = called.await?;
        let half_close = answer.contains_key(HALF_CLOSE_HEADER);
        if !half_close {
            inbound.limit_ahead();
        }
        let (server_id, server_count) = server_of(&answer).map_err(ConnectError::Answer)?;
        Ok(Reached::New(Box::new(Connected {
            server_id,
            server_count,
            pushes_count: false,
            transport: Transport::Packet {
                half_close,
                packets: Box::new(packets),
                outgoing,
                inbound,
            },
            ended,
            via: None,
            congestion: String::new(),
            offer: None,
            second: None,
        })))
    }
}

/// Returns the time that is left until a deadline.
fn until(deadline: Instant) -> Duration {
    deadline.saturating_duration_since(Instant::now())
}

async fn dial_direct(
    addresses: Vec<SocketAddr>,
    deadline: Instant,
) -> Result<TcpStream, ConnectError> {
    dial::dial_addresses("tcp", addresses, until(deadline))
        .await
        .map_err(|error| ConnectError::Unreachable(error.text))
}

/// Stream of packets to the server; counts each packet.
struct ToServer {
    messages: queue::Receiver<Message>,
    /// Ends the stream once no message is left.
    finish: Pin<Box<WaitForCancellationFutureOwned>>,
    metrics: Arc<AgentMetrics>,
}

impl Stream for ToServer {
    type Item = Result<Message, Status>;

    fn poll_next(mut self: Pin<&mut Self>, cx: &mut Context<'_>) -> Poll<Option<Self::Item>> {
        let next = match self.messages.poll_recv(cx) {
            Poll::Ready(next) => next,
            Poll::Pending => {
                ready!(self.finish.as_mut().poll(cx));
                // tokio may pause a task although messages are queued.
                self.messages.try_recv()
            }
        };
        let Some(message) = next else {
            return Poll::Ready(None);
        };
        self.metrics.streams.count(Segment::FromAgent, &message);
        Poll::Ready(Some(Ok(message)))
    }
}
