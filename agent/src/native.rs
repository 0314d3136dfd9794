//! A native connection to one server. Accepts the server's streams; see [`culvert_native`].

use std::future::{pending, poll_fn};
use std::pin::{Pin, pin};
use std::sync::Arc;

use culvert_host::net::listen::reset;
use culvert_konnectivity::message::PacketType;
use culvert_konnectivity::metrics::Segment;
use culvert_native::control::{self, Control};
use culvert_native::halves::{Chunk, NativeSink, halves};
use culvert_native::link::{Incoming, Taker};
use culvert_native::window::Inbound;
use culvert_native::{CONTROL_PATH, dial as message};
use culvert_stream::connection::run_connection;
use culvert_stream::io::linger_close;
use culvert_stream::{CloseReason, Dial, HALF_OPEN_IDLE, Sink, Source, log_closed};
use h2::server::SendResponse;
use http::{Method, Response, StatusCode};
use tokio::io::{AsyncRead, AsyncWrite};
use tokio::net::TcpStream;
use tokio::sync::watch;
use tokio_util::sync::CancellationToken;
use tonic::Code;
use tracing::{Instrument as _, Span, debug, info};

use crate::agent::{Agent, Dialed, endpoint_halves};

/// Shared state of the streams of one native connection.
pub(crate) struct NativeServer {
    agent: Arc<Agent>,
    inbound: Arc<Inbound>,
    drained: CancellationToken,
    ended: CancellationToken,
    notices: watch::Sender<Notices>,
}

/// Latest notices of a server about itself and its replicas.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub(crate) struct Notices {
    /// True if the server stops soon. The agent keeps its connections to this server, and searches for another
    /// server.
    pub draining: bool,
    /// Number of servers, if it has changed since the introduction.
    pub servers: Option<i64>,
    /// True if the number follows the servers, if this has changed since the introduction.
    pub follows: Option<bool>,
}

impl NativeServer {
    /// Creates a native connection that ends when `ended` fires. `inbound` counts the bytes of the streams.
    pub(crate) fn new(
        agent: Arc<Agent>,
        inbound: Arc<Inbound>,
        ended: CancellationToken,
    ) -> Arc<Self> {
        Arc::new(Self {
            agent,
            inbound,
            drained: CancellationToken::new(),
            ended,
            notices: watch::Sender::default(),
        })
    }

    /// Returns the latest notices of the server.
    pub(crate) fn notices(&self) -> Notices {
        *self.notices.borrow()
    }

    /// Calls `notice` after each change of the notices. Never ends.
    pub(crate) async fn on_notices(&self, notice: impl Fn()) {
        let mut notices = self.notices.subscribe();
        // `self` keeps the sender.
        while notices.changed().await.is_ok() {
            notice();
        }
    }

    /// Requests that the server prefer other agents.
    pub(crate) fn drain(&self) {
        self.drained.cancel();
    }

    /// Accepts streams until the connection ends. Returns the reason if this agent ended the connection.
    ///
    /// # Errors
    /// Returns the reason if the connection broke or the server closed the connection.
    pub(crate) async fn run<S>(self: Arc<Self>, mut taker: Taker<S>) -> Result<String, String>
    where
        S: AsyncRead + AsyncWrite + Unpin,
    {
        // A guard, so that the connection's tasks also end if this future is dropped.
        let _ended = self.ended.clone().drop_guard();
        let span = Span::current();
        loop {
            let next = tokio::select! {
                next = taker.next() => next,
                () = self.ended.cancelled() => return Ok("closed by this agent".into()),
            };
            // A server that shuts down closes the connection just like a killed server, so every close is an
            // error.
            let next = next.and_then(|next| {
                next.ok_or_else(|| "closed by the server, or by a load balancer in between".into())
            });
            let incoming = next.inspect_err(|_| {
                let streams = &self.agent.metrics.streams;
                streams.stream_error(Segment::ToAgent, Code::Unavailable, None);
            })?;
            self.agent
                .tasks
                .spawn(self.clone().serve(incoming, span.clone()));
        }
    }

    /// Serves a stream. `span` names the server in the lines about the control stream.
    async fn serve(self: Arc<Self>, incoming: Incoming, span: Span) {
        let (request, mut respond) = incoming;
        match (request.method(), request.uri().path()) {
            (&Method::CONNECT, _) => {
                let dial = message::dial_of(&request);
                self.connect(dial, request.into_body(), respond).await;
            }
            (&Method::GET, CONTROL_PATH) => {
                let control = self.control(request.into_body(), respond);
                control.instrument(span).await;
            }
            // A request type that this version does not know.
            _ => drop(respond.send_response(status(StatusCode::NOT_FOUND), true)),
        }
    }

    /// Serves the control stream, until the connection ends.
    async fn control(&self, inbound: h2::RecvStream, mut respond: SendResponse<Chunk>) {
        let Ok(mut outbound) = respond.send_response(status(StatusCode::OK), false) else {
            return;
        };
        let receive = async {
            if let Err(error) = control::receive(inbound, |message| self.on_control(message)).await
            {
                debug!(%error, "the control stream ended");
            }
        };
        let send = async {
            self.drained.cancelled().await;
            self.count(Segment::FromAgent, PacketType::Drain);
            let _ = outbound.send_data(Chunk::detached(Control::Drain.to_line()), false);
        };
        // The stream stays open, because the end of the control stream means the end of the connection.
        tokio::select! {
            _ = async { tokio::join!(receive, send, pending::<()>()) } => {}
            () = self.ended.cancelled() => {}
        }
    }

    pub(crate) fn on_control(&self, message: Control) {
        match message {
            Control::Drain => info!("the server drains"),
            Control::Servers(count) => {
                debug!(count, "the server announces another number of servers")
            }
            Control::Follows(follows) => {
                debug!(
                    follows,
                    "the server announces if its number follows the servers"
                )
            }
        }
        self.notices.send_if_modified(|notices| {
            let before = *notices;
            match message {
                Control::Drain => notices.draining = true,
                Control::Servers(count) => notices.servers = Some(count),
                Control::Follows(follows) => notices.follows = Some(follows),
            }
            *notices != before
        });
    }

    fn count(&self, segment: Segment, packet: PacketType) {
        self.agent.metrics.streams.count_as(segment, packet);
    }

    async fn connect(&self, dial: Dial, receive: h2::RecvStream, mut respond: SendResponse<Chunk>) {
        // Counted from the start of the dial, so that a drained agent does not exit during a dial.
        let _active = self.agent.activity();
        self.count(Segment::ToAgent, PacketType::DialReq);
        let dialed = tokio::select! {
            dialed = self.agent.dial(&dial.protocol, &dial.address) => dialed,
            // The server cancelled the dial, or the connection to the server ended.
            _ = poll_fn(|cx| respond.poll_reset(cx)) => return,
            () = self.ended.cancelled() => return,
        };
        self.count(Segment::FromAgent, PacketType::DialRsp);
        match dialed {
            Ok(Dialed {
                socket,
                open: _open,
            }) => {
                let Ok(send) = respond.send_response(status(StatusCode::OK), false) else {
                    return;
                };
                let inbound = self.inbound.clone();
                let server = halves(send, receive, inbound, CloseReason::ServerLost);
                let cut = pin!(self.agent.server_lost(&self.ended));
                let leaving = &self.agent.leaving;
                let end = |sink: NativeSink, reason| sink.end(reason, leaving);
                carry(&self.agent, socket, server, &dial, cut, end).await;
            }
            Err(error) => {
                let refusal = message::refusal(error.is_timeout(), &error.text);
                let _ = respond.send_response(refusal, true);
            }
        }
    }
}

/// Carries a connection between a server and the socket of an endpoint, until it ends or `cut` resolves. `end` reports
/// the close reason to the server.
///
/// `cut` is pinned by the caller, as for [`run_connection`].
pub(crate) async fn carry<S: Source, K: Sink>(
    agent: &Agent,
    socket: TcpStream,
    (mut server_source, mut server_sink): (S, K),
    dial: &Dial,
    cut: Pin<&mut impl Future<Output = CloseReason>>,
    end: impl FnOnce(K, CloseReason),
) {
    let (mut source, mut sink) = endpoint_halves(socket);
    let ended = run_connection(
        (&mut server_source, &mut server_sink),
        (&mut source, &mut sink),
        agent.metrics.streams.both_directions(),
        HALF_OPEN_IDLE,
        cut,
    )
    .await;
    let reason = ended.reason;
    agent.closed(reason);
    log_closed!(ended, address = dial.address);
    end(server_sink, reason);
    drop(server_source);
    if !ended.is_complete() {
        reset(source.into_inner(), sink.into_inner());
    } else if reason == CloseReason::ClientClosed {
        linger_close(source.into_inner(), sink.into_inner()).await;
    }
}

fn status(status: StatusCode) -> Response<()> {
    let mut response = Response::new(());
    *response.status_mut() = status;
    response
}
