//! A native agent connection: an HTTP/2 stream for each dial, see [`culvert_native`].

mod claim;
mod halves;
mod introduction;

use std::future::poll_fn;
use std::pin::Pin;
use std::sync::atomic::{AtomicBool, AtomicU32, AtomicUsize, Ordering};
use std::sync::{Arc, OnceLock};
use std::task::Poll;
use std::time::Duration;

use culvert_host::net::admission::Candidate;
use culvert_host::telemetry::metrics::GaugeGuard;
use culvert_konnectivity::message::PacketType;
use culvert_konnectivity::metrics::Segment;
use culvert_native::control::{self, Control};
use culvert_native::halves::{Chunk, NativeSink, NativeSource, halves};
use culvert_native::hello::HelloError;
use culvert_native::link::{Opener, Requests, is_exhausted};
use culvert_native::quic::link::Link;
use culvert_native::resume::{Binding, MaybeResumable};
use culvert_native::window::{Inbound, Pings};
use culvert_native::{CONTROL_PATH, dial as message};
use culvert_stream::suspicion::Suspicion;
use culvert_stream::{CloseReason, Dial};
use futures_util::StreamExt as _;
use futures_util::stream::FuturesUnordered;
use http::{Request, StatusCode, Uri};
use tokio::io::{AsyncRead, AsyncWrite, ReadBuf};
use tokio::task::unconstrained;
use tokio::time::{Instant, sleep, timeout_at};
use tokio_util::sync::CancellationToken;
use tonic::Code;
use tracing::{Instrument, debug, info, info_span};

pub(crate) use self::halves::{FromAgent, ToAgent, Use, opened};
use self::introduction::{Introduced, IntroductionError, NewAgent};
use super::agent::Hello;
use super::announced::Announcements;
use super::identity::AgentPeer;
use super::resume::{AgentSession, AnyTransport, LinkAddress};
use super::second_link::{Offered, SecondLink};
use super::service::Agents;
use super::{AgentConnection, Registration};
use crate::backend::dial::StreamDialError;
use crate::listener::ListenerContext;
use crate::metrics::{
    DialFailureReason, RejectReason, ResumeOutcome, ServerMetrics, ServiceMethod,
};

/// Stream number after which an agent connection is closed as soon as nothing uses it. The agent then connects
/// again, long before HTTP/2's stream numbers end at 2^31; every dial uses two, also a failed one.
const RENEW_AFTER: u32 = 1 << 30;

/// Pause between two looks at an agent that is away.
const AWAY_CHECK: Duration = Duration::from_millis(100);

/// The rest of an agent's connection, after the introduction. Boxed, so that the memory of the introduction is freed.
pub(crate) type Serving = Pin<Box<dyn Future<Output = ()> + Send>>;

/// A native connection of an agent.
pub struct NativeAgent {
    /// Number of the connection, unique in this process. A later connection has a larger number.
    pub serial: u64,
    /// The agent's introduction.
    pub hello: Hello,
    /// Address of the agent, or of a load balancer.
    pub(super) address: LinkAddress,
    requests: Requests,
    inbound: Arc<Inbound>,
    /// Handle of the link; `None` if the link cannot resume.
    session: Option<Arc<AgentSession>>,
    draining: AtomicBool,
    suspicion: Suspicion,
    /// Highest HTTP/2 stream number of a dial.
    last_stream: AtomicU32,
    open: AtomicUsize,
    /// Number of dials and open connections.
    uses: AtomicUsize,
    retired: CancellationToken,
    /// The agent's second link, over QUIC. `None` if the server offers no QUIC.
    pub(super) second: Option<Arc<SecondLink>>,
    pub(super) metrics: Arc<ServerMetrics>,
}

// === impl Agents ===

impl Agents {
    /// Receives the introduction of an agent with the native transport. `serial` is the number of the connection
    /// ([`next_serial`](super::dial::next_serial)). Returns the rest of the connection if the agent is new, or the review of
    /// the agent's token if its link has resumed.
    pub(crate) async fn introduce_native<S>(
        &self,
        context: &Arc<ListenerContext>,
        mut stream: Box<S>,
        peer: &str,
        candidate: &Candidate,
        serial: u64,
        binding: Option<Binding>,
    ) -> Option<Serving>
    where
        S: AsyncRead + AsyncWrite + Unpin + Send + 'static,
    {
        // A peer that stalls must not delay shutdown.
        let introduced = tokio::select! {
            introduced = candidate.run(self.introduce(&mut stream, binding)) => introduced,
            () = context.shutdown.cancelled() => return None,
        };
        let new = match introduced {
            Ok(Ok(Introduced::New(new))) => *new,
            Ok(Ok(Introduced::AlreadyConnected)) => {
                debug!(peer, "the agent is already connected");
                return None;
            }
            Ok(Ok(Introduced::Resumed(resumption, claim))) => {
                candidate.admit();
                // A late answer must not replace the connection of a later request.
                if has_left(&mut stream).await {
                    debug!(peer, "the agent left before it could resume its link");
                    return None;
                }
                let sessions = &self.sessions;
                let AgentPeer { path, address, .. } = &self.peer;
                let resumed = sessions.resume(resumption, stream, path, *address).await?;
                if self.tokens.is_none() {
                    sessions.count(ResumeOutcome::Resumed);
                    return None;
                }
                let (agents, context) = (self.clone(), context.clone());
                return Some(Box::pin(async move {
                    agents.confirm(&context, *claim, &resumed).await;
                }));
            }
            Ok(Ok(Introduced::NotResumed)) => {
                debug!(peer, "no session to resume");
                return None;
            }
            Ok(Err(IntroductionError::Hello(HelloError::Io(error)))) => {
                debug!(peer, %error, "the agent left before its introduction");
                return None;
            }
            Ok(Err(IntroductionError::Agent { agent_id, refusal })) => {
                self.reject(&agent_id, refusal.reason(), &refusal.to_string());
                return None;
            }
            Ok(Err(error)) => {
                context.reject(RejectReason::Garbage, peer, &error.to_string());
                return None;
            }
            Err(why) => {
                context.refuse(why, peer);
                return None;
            }
        };
        candidate.admit();
        self.begin_native(context, stream, peer, new, serial).await
    }

    /// Starts HTTP/2 with a new agent, and registers the agent. Returns the rest of the connection.
    async fn begin_native(
        &self,
        context: &Arc<ListenerContext>,
        stream: AnyTransport,
        peer: &str,
        new: NewAgent,
        serial: u64,
    ) -> Option<Serving> {
        let inbound = Arc::new(Inbound::default());
        self.peer.path.follow(&inbound);
        let NewAgent {
            hello,
            place,
            announcements,
            owner,
            ticket,
            offered,
        } = new;
        let second = offered.as_ref().map(Offered::link);
        let address = LinkAddress::new(self.peer.address);
        let (stream, guard) = match ticket {
            Some(ticket) => {
                let owner = owner.clone();
                let sessions = &self.sessions;
                let (inbound, address) = (inbound.clone(), address.clone());
                let opened = sessions.open(stream, inbound, address, ticket, owner, serial);
                let (stream, guard) = opened;
                (MaybeResumable::Resumable(Box::new(stream)), Some(guard))
            }
            None => (MaybeResumable::Plain(stream), None),
        };
        let session = stream.session();
        let pings = Pings::with_keepalive(context.keepalive);
        let grace = session
            .as_ref()
            .map_or(Duration::ZERO, |_| self.sessions.grace());
        let opener = Opener::resumable(stream, inbound.clone(), pings, grace);
        // Nothing is lost with a link that breaks so early.
        let opened = tokio::select! {
            opened = opener => opened.map_err(|error| error.to_string()),
            () = broke(session.as_deref()) => Err("the link broke".to_owned()),
        };
        let (requests, link) = match opened {
            Ok((requests, link)) => (requests, Box::new(link)),
            Err(error) => {
                debug!(peer, error, "the connection broke before HTTP/2 began");
                return None;
            }
        };
        let agent = Arc::new(NativeAgent {
            serial,
            hello,
            address,
            requests,
            inbound,
            session,
            draining: AtomicBool::new(false),
            suspicion: Suspicion::none(),
            last_stream: AtomicU32::new(0),
            open: AtomicUsize::new(0),
            uses: AtomicUsize::new(0),
            retired: second
                .as_ref()
                .map(|s| s.retired.clone())
                .unwrap_or_default(),
            second,
            metrics: self.metrics.clone(),
        });
        let span = info_span!("agent", agent = agent.hello.agent_id, stream = agent.serial);
        let control = agent.clone().control(announcements);
        self.tasks.spawn(control.instrument(span.clone()));
        let backend = AgentConnection::Native(agent.clone());
        let registration = span.in_scope(|| self.registry.register(backend, place));
        // The dials of the earlier process find the new agent.
        self.sessions.replace(&owner, serial);
        let (agents, context) = (self.clone(), context.clone());
        let serving = async move {
            let _ends_with_the_connection = (guard, offered);
            agents.carry(&context, agent, registration, link).await;
        };
        Some(Box::pin(serving.instrument(span)))
    }

    async fn carry<S>(
        &self,
        context: &ListenerContext,
        agent: Arc<NativeAgent>,
        registration: Registration,
        mut link: Box<Opener<S>>,
    ) where
        S: AsyncRead + AsyncWrite + Unpin,
    {
        let counted = GaugeGuard::new(self.metrics.grpc_connections.get(ServiceMethod::Connect));
        let mut watch = self.sessions.watch();
        let end = async {
            tokio::select! {
                () = agent.retired.cancelled() => "given up",
                () = context.shutdown.cancelled() => "this server is stopping",
                () = watch.run(agent.session.as_deref()) => "the watch ended",
            }
        };
        // A poll of these futures locks each token, so the link's wake-ups must not poll them. A link that uses the whole
        // budget of the task must not hide them.
        let mut end = FuturesUnordered::from_iter([unconstrained(end)]);
        let ended = tokio::select! {
            biased;
            ended = link.run() => match ended {
                Ok(()) => "closed by the agent".to_owned(),
                Err(error) => {
                    let streams = &self.metrics.streams;
                    streams.stream_error(Segment::FromAgent, Code::Unavailable, None);
                    error
                }
            },
            Some(why) = end.next() => why.to_owned(),
        };
        // A dropped link leaves its transport to `farewell`.
        drop((end, link));
        let session = agent.session.as_deref();
        let is_replaced = session.is_some_and(|session| session.condemned().is_some());
        if watch.is_away() && !is_replaced && !context.shutdown.is_cancelled() {
            self.sessions.count(ResumeOutcome::Expired);
        }
        drop(registration);
        agent.retired.cancel();
        let open = agent.open.load(Ordering::Relaxed);
        info!(reason = ended, open, "agent disconnected");
        drop((watch, counted));
        if let Some(session) = session {
            session.farewell().await;
        }
    }
}

// === impl NativeAgent ===

impl NativeAgent {
    /// Returns true if the agent requested to get no new dials.
    pub fn is_draining(&self) -> bool {
        self.draining.load(Ordering::Relaxed)
    }

    /// Returns true if no link for new dials is known to work.
    pub fn is_suspect(&self) -> bool {
        self.is_tcp_suspect() && self.second_link().is_none()
    }

    /// Returns true if the agent has not answered a probe over TCP, and has sent nothing since, or if the agent is away.
    fn is_tcp_suspect(&self) -> bool {
        self.is_away() || self.suspicion.is_raised(self.inbound.heard())
    }

    /// Returns the second link if new dials belong there: the agent prefers the link, or its TCP connection does not
    /// answer.
    pub(super) fn second_link(&self) -> Option<Arc<Link>> {
        let second = self.second.as_ref()?;
        second.usable(self.is_tcp_suspect())
    }

    /// Returns true if the link to the agent broke, and has not resumed yet.
    pub fn is_away(&self) -> bool {
        self.session
            .as_ref()
            .is_some_and(|session| session.is_away())
    }

    /// Returns true if the agent has been away for so long that dials no longer wait for it.
    pub fn is_gone(&self) -> bool {
        let session = self.session.as_ref();
        session.is_some_and(|session| session.is_gone()) && self.second_link().is_none()
    }

    /// Resolves once the agent is suspect: it sends nothing, not even an answer to a PING, or is away.
    pub async fn silent(&self) {
        // If the second link does not answer, its dials move to the TCP connection.
        while let Some(link) = self.second_link() {
            link.unusable().await;
        }
        self.tcp_silent().await;
    }

    /// Resolves with the second link once new dials belong there because the TCP connection does not answer. Never
    /// resolves if the agent has no second link now.
    pub(super) async fn replaced(&self) -> Arc<Link> {
        let has_link = self.second.as_ref().is_some_and(|second| second.has_link());
        if !has_link {
            return std::future::pending().await;
        }
        loop {
            self.tcp_silent().await;
            if let Some(link) = self.second_link() {
                return link;
            }
        }
    }

    /// Resolves once the TCP connection is suspect.
    async fn tcp_silent(&self) {
        if self.is_away() {
            return sleep(AWAY_CHECK).await;
        }
        let probe = || {
            self.inbound.probe();
            true
        };
        let is_new = tokio::select! {
            is_new = self.suspicion.wait(|| self.inbound.heard(), probe) => is_new,
            () = broke(self.session.as_deref()) => false,
        };
        match self.second_link() {
            _ if !is_new => {}
            None => self.hello.warn_of_silence(),
            Some(_) => {
                let agent = self.hello.agent_id.as_str();
                debug!(
                    agent,
                    "the TCP connection of the agent does not answer; dials use QUIC"
                );
            }
        }
    }

    /// Returns the number of open connections.
    pub fn connections(&self) -> usize {
        self.open.load(Ordering::Relaxed)
    }

    /// Closes the connection. The agent connects again.
    pub fn abandon(&self) {
        self.draining.store(true, Ordering::Relaxed);
        self.retired.cancel();
    }

    /// Opens a connection over TCP. Dropping the future cancels the dial. `counted` is set once the request is counted.
    pub(super) async fn dial(
        self: &Arc<Self>,
        dial: &Dial,
        deadline: Instant,
        counted: &OnceLock<()>,
    ) -> Result<(FromAgent<NativeSource>, ToAgent<NativeSink>), StreamDialError> {
        let lost = |error| {
            if is_exhausted(&error) {
                self.abandon();
            }
            StreamDialError::AgentLost
        };
        let request = message::request(dial);
        let _use = Use::begin(self);
        let _pending = GaugeGuard::new(&self.metrics.pending_backend_dials);
        let requests = timeout_at(deadline, self.requests.clone().ready());
        let mut requests = requests
            .await
            .map_err(|_| StreamDialError::NotSent)?
            .map_err(lost)?;
        let (response, send) = requests.send_request(request, false).map_err(lost)?;
        self.count_request(counted);
        let stream_id = send.stream_id().as_u32();
        self.last_stream.fetch_max(stream_id, Ordering::Relaxed);
        let answer = timeout_at(deadline, response).await;
        let answer = answer.map_err(|_| StreamDialError::TimedOut)?;
        let answer = answer.map_err(|error| match error.is_reset() {
            true => {
                self.dial_failure(DialFailureReason::BackendClose);
                StreamDialError::Abandoned
            }
            false => StreamDialError::AgentLost,
        })?;
        self.count(Segment::FromAgent, PacketType::DialRsp);
        if answer.status() != StatusCode::OK {
            self.dial_failure(DialFailureReason::ErrorResponse);
            return Err(StreamDialError::refused(message::error_text(&answer)));
        }
        let inbound = self.inbound.clone();
        let halves = halves(send, answer.into_body(), inbound, CloseReason::AgentLost);
        Ok(opened(self, stream_id.into(), halves))
    }

    /// Counts the request of a dial, once for each `counted`: a dial may move from one link to the other.
    pub(super) fn count_request(&self, counted: &OnceLock<()>) {
        counted.get_or_init(|| self.count(Segment::ToAgent, PacketType::DialReq));
    }

    pub(super) fn count(&self, segment: Segment, packet: PacketType) {
        self.metrics.streams.count_as(segment, packet);
    }

    /// Serves the control stream: reads the agent's messages, and sends the announcements.
    async fn control(self: Arc<Self>, mut announcements: Announcements) {
        let mut request = Request::new(());
        *request.uri_mut() = Uri::from_static("https://agent/control");
        debug_assert_eq!(request.uri().path(), CONTROL_PATH);
        let exchange = async {
            let mut requests = self.requests.clone().ready().await?;
            let (response, mut outbound) = requests.send_request(request, false)?;
            let receive = async {
                let inbound = response.await?.into_body();
                control::receive(inbound, |message| self.on_control(message)).await
            };
            let send = async {
                loop {
                    for message in announcements.next().await {
                        let line = Chunk::detached(message.to_line());
                        outbound.send_data(line, false)?;
                    }
                }
            };
            tokio::select! {
                received = receive => received,
                failed = send => failed,
            }
        };
        tokio::select! {
            ended = exchange => if let Err(error) = ended {
                debug!(%error, "the control stream ended");
            },
            () = self.retired.cancelled() => {}
        }
    }

    fn on_control(&self, message: Control) {
        if message == Control::Drain && !self.draining.swap(true, Ordering::Relaxed) {
            self.count(Segment::FromAgent, PacketType::Drain);
            info!("the agent drains");
        }
    }

    pub(super) fn dial_failure(&self, reason: DialFailureReason) {
        self.metrics.dial_failures(reason).increment(1);
    }
}

/// Resolves once a link that may resume has no transport.
async fn broke(session: Option<&AgentSession>) {
    match session {
        Some(session) => session.broke().await,
        None => std::future::pending().await,
    }
}

/// Returns true if the peer of a connection has closed it, or sends something before it got an answer.
async fn has_left(stream: &mut (impl AsyncRead + Unpin)) -> bool {
    let mut byte = [0];
    poll_fn(|cx| {
        let mut buffer = ReadBuf::new(&mut byte);
        Poll::Ready(Pin::new(&mut *stream).poll_read(cx, &mut buffer).is_ready())
    })
    .await
}

#[cfg(test)]
mod tests;
