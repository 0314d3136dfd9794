//! The `ProxyService/Proxy` call: the packet protocol of kube-apiserver's client library, with a connection
//! on each stream.

pub(crate) mod session;

use std::pin::{Pin, pin};
use std::sync::Arc;
use std::task::{Context, Poll, ready};

use bytes::Bytes;
use culvert_host::telemetry::metrics::GaugeGuard;
use culvert_konnectivity::grpc::{Reader, Service};
use culvert_konnectivity::message::{ConnectId, MAX_DATA_BYTES, Message};
use culvert_konnectivity::metrics::Segment;
use culvert_konnectivity::queue;
use culvert_stream::first_byte_gate::FirstByteGate;
use culvert_stream::progress::Progress;
use culvert_stream::{CloseReason, Dial, Sink, Source};
use futures_util::Stream;
use tokio::time::Instant;
use tonic::{Request, Response, Status};

use self::session::{Session, Step};
use super::Frontend;
use crate::backend::Connection;
use crate::metrics::{ServerMetrics, ServiceMethod};

/// Maximum number of bytes waiting to be sent on a stream, in addition to HTTP/2's own buffer.
pub(crate) const OUTGOING_BYTES: usize = 256 * 1024;

/// Serves front-end streams.
#[derive(Clone)]
pub(crate) struct Proxy {
    frontend: Arc<Frontend>,
}

/// Message to the client, or the status that ends a failed call.
type Reply = Result<Message, Box<Status>>;

/// Stream of messages to the client; counts every message.
pub(crate) struct ToClient {
    replies: queue::Receiver<Reply>,
    metrics: Arc<ServerMetrics>,
}

/// A stream with its inbound packets, its session, and the queue of replies.
struct Client {
    inbound: Reader,
    session: Session,
    /// Set at the end of the client's packets, or when the stream broke.
    ended: bool,
    replies: queue::Sender<Reply>,
    first_byte_gate: FirstByteGate,
    metrics: Arc<ServerMetrics>,
}

/// Sink for the bytes of a connection to the client.
struct ClientSink {
    connection: ConnectId,
    replies: queue::Sender<Reply>,
    first_byte_gate: FirstByteGate,
    metrics: Arc<ServerMetrics>,
}

// === impl Proxy ===

impl Proxy {
    /// Creates the service of a front end.
    pub(crate) fn new(frontend: Arc<Frontend>) -> Self {
        Self { frontend }
    }
}

impl Service for Proxy {
    const PATH: &'static str = "/ProxyService/Proxy";

    type Replies = ToClient;

    async fn take(&self, request: Request<Reader>) -> Result<Response<ToClient>, Status> {
        let metrics = self.frontend.metrics.clone();
        let (replies, outgoing) = queue::bounded(OUTGOING_BYTES);
        let mut client = Client {
            inbound: request.into_inner(),
            session: Session::default(),
            ended: false,
            replies,
            first_byte_gate: FirstByteGate::default(),
            metrics: metrics.clone(),
        };
        let frontend = self.frontend.clone();
        self.frontend
            .tasks
            .spawn(async move { client.serve(&frontend).await });
        Ok(Response::new(ToClient {
            replies: outgoing,
            metrics,
        }))
    }
}

// === impl Client ===

impl Client {
    async fn serve(&mut self, frontend: &Frontend) {
        let metrics = self.metrics.clone();
        let _open = GaugeGuard::new(metrics.grpc_connections.get(ServiceMethod::Proxy));
        let shutdown = &frontend.shutdown;
        let _call = frontend.calls.token();
        let dialed = shutdown.run_until_cancelled(self.dialed(frontend)).await;
        if let Some((dial, connection)) = dialed.flatten() {
            self.carry(frontend, &dial, connection).await;
        }
        // The client ends the call once it has read all bytes; until then its late packets are answered.
        let rest = async {
            while let Some(step) = self.step().await {
                match step {
                    Step::Reply(reply) | Step::Close(Some(reply)) => self.reply(reply),
                    _ => {}
                }
            }
        };
        shutdown.run_until_cancelled(rest).await;
    }

    /// Waits for a dial and its connection. Returns `None` if no connection will follow.
    async fn dialed(&mut self, frontend: &Frontend) -> Option<(Dial, Box<Connection>)> {
        let dial = self.next_dial().await?;
        let outcome = tokio::select! {
            outcome = frontend.router.dial(&dial) => outcome,
            () = self.gave_up() => return None,
        };
        match outcome {
            Ok(connection) => Some((dial, connection)),
            Err(error) => {
                frontend.log_failure(&dial, &error);
                let reply = self.session.refused(error.to_string());
                self.tell(reply);
                None
            }
        }
    }

    /// Waits for the dial. Returns `None` if no dial will follow.
    async fn next_dial(&mut self) -> Option<Dial> {
        loop {
            match self.step().await? {
                Step::Dial(dial) => return Some(dial),
                Step::Reply(reply) => self.reply(reply),
                Step::Fail(replies) => {
                    self.tell(replies);
                    return None;
                }
                Step::Data(_) | Step::Close(_) | Step::Ignore => {}
            }
        }
    }

    /// Resolves once the client no longer waits for its dial.
    async fn gave_up(&mut self) {
        while let Some(step) = self.step().await {
            match step {
                Step::Reply(reply) => self.reply(reply),
                Step::Close(reply) => return self.tell(reply),
                Step::Fail(replies) => return self.tell(replies),
                Step::Dial(_) | Step::Data(_) | Step::Ignore => {}
            }
        }
    }

    async fn carry(&mut self, frontend: &Frontend, dial: &Dial, connection: Box<Connection>) {
        // The id is the server's own, because two agents may use the same id.
        let id = frontend.next_connection();
        let reply = self.session.opened(ConnectId(id));
        self.tell(reply);
        let mut sink = ClientSink {
            connection: ConnectId(id),
            replies: self.replies.clone(),
            first_byte_gate: self.first_byte_gate.clone(),
            metrics: self.metrics.clone(),
        };
        let replies = self.replies.clone();
        let gone = pin!(replies.closed());
        let client = (&mut *self, &mut sink);
        let reason = frontend.run(id, dial, client, gone, connection).await;
        let text = match reason {
            CloseReason::Stalled => "closed: the client took no bytes",
            CloseReason::BufferExceeded => "closed: the client took bytes too slowly",
            CloseReason::Switched => "closed: traffic was switched to another tunnel",
            _ => "",
        };
        let reply = self.session.closed(text);
        if reply.is_some() {
            // Stock clients also ignore a close that arrives before they have registered the connection.
            self.first_byte_gate.wait().await;
        }
        self.tell(reply);
    }

    /// Returns the next packet's meaning; `None` once the client has ended the call.
    async fn step(&mut self) -> Option<Step> {
        if self.ended {
            return None;
        }
        match self.inbound.message().await {
            Ok(Some(message)) => {
                self.metrics.streams.count(Segment::FromClient, &message);
                Some(self.session.on_message(message))
            }
            Ok(None) => {
                self.ended = true;
                None
            }
            Err(status) => {
                self.ended = true;
                let streams = &self.metrics.streams;
                streams.stream_error(Segment::FromClient, status.code(), None);
                // A client that sent too large a message receives the status; a client that is gone does
                // not.
                let _ = self.replies.send_now(Err(Box::new(status)));
                None
            }
        }
    }

    /// Queues messages that occur once for each dial or connection.
    fn tell(&self, messages: impl IntoIterator<Item = Message>) {
        for message in messages {
            let _ = self.replies.send_now(Ok(message));
        }
    }

    /// Queues a reply to a client that may send without reading. Replies beyond the budget are dropped.
    fn reply(&self, message: Message) {
        let weight = message.weight();
        let _ = self.replies.try_send(Ok(message), weight);
    }
}

impl Source for Client {
    async fn recv(&mut self) -> Result<Option<Bytes>, CloseReason> {
        loop {
            match self.step().await {
                None => return Err(CloseReason::ClientLost),
                Some(Step::Data(bytes)) => {
                    self.first_byte_gate.open();
                    return Ok(Some(bytes));
                }
                Some(Step::Close(reply)) => {
                    // All earlier bytes were passed on, so the client need not wait for the agent.
                    self.tell(reply);
                    return Err(CloseReason::ClientClosed);
                }
                Some(Step::Reply(reply)) => self.reply(reply),
                Some(Step::Fail(replies)) => {
                    self.tell(replies);
                    return Err(CloseReason::ProtocolError);
                }
                Some(Step::Dial(_) | Step::Ignore) => {}
            }
        }
    }
}

// === impl ClientSink ===

impl Sink for ClientSink {
    async fn send_counted(
        &mut self,
        mut chunk: Bytes,
        progress: &Progress,
    ) -> Result<(), CloseReason> {
        self.first_byte_gate.wait().await;
        let started = Instant::now();
        while !chunk.is_empty() {
            let bytes = chunk.split_to(chunk.len().min(MAX_DATA_BYTES));
            let count = bytes.len();
            let connection = self.connection;
            let message = Message::Data { connection, bytes };
            let weight = message.weight();
            let sent = self.replies.send(Ok(message), weight).await;
            sent.map_err(|_| CloseReason::ClientLost)?;
            progress.add(count);
        }
        let elapsed = started.elapsed().as_secs_f64();
        self.metrics.frontend_write_duration.record(elapsed);
        Ok(())
    }

    /// The protocol has no half close toward clients: the end of the endpoint's bytes ends the connection, as
    /// in upstream.
    async fn finish(&mut self) -> Result<(), CloseReason> {
        Err(CloseReason::EndpointClosed)
    }
}

// === impl ToClient ===

impl Stream for ToClient {
    type Item = Result<Message, Status>;

    fn poll_next(mut self: Pin<&mut Self>, cx: &mut Context<'_>) -> Poll<Option<Self::Item>> {
        let message = match ready!(self.replies.poll_recv(cx)) {
            Some(Ok(message)) => message,
            Some(Err(status)) => return Poll::Ready(Some(Err(*status))),
            None => return Poll::Ready(None),
        };
        self.metrics.streams.count(Segment::ToClient, &message);
        Poll::Ready(Some(Ok(message)))
    }
}
