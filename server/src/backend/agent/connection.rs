//! The connections of an agent stream, and their owners: a [`Pending`] owns a pending dial, a [`Guard`]
//! owns an open connection. Dropping the owner removes the entry from the stream's table and notifies the
//! agent.

use std::sync::Arc;
use std::sync::atomic::{AtomicBool, AtomicUsize, Ordering};
use std::time::Duration;

use bytes::Bytes;
use culvert_host::telemetry::metrics::GaugeGuard;
use culvert_konnectivity::inbox::{Receiver, Sender, Watch, inbox};
use culvert_konnectivity::message::{AGENT_DATA_BYTES, ConnectId, DialId, Message};
use culvert_konnectivity::queue::SendWithinError;
use culvert_konnectivity::small_traffic::TrafficMeter;
use culvert_stream::progress::Progress;
use culvert_stream::{CLOSE_STALL, CloseReason, PEER_STALL, Sink, Source};
use parking_lot::Mutex;
use tokio::sync::oneshot;
use tokio_util::sync::CancellationToken;
use tokio_util::task::TaskTracker;

use super::{AgentStream, Limits};
use crate::backend::dial::StreamDialError;
use crate::metrics::{OpenConnection, ServiceMethod};

/// Entry of a connection in the stream's table.
pub(super) struct Slot {
    outcome: Mutex<Option<oneshot::Sender<Outcome>>>,
    incoming: Sender<Incoming>,
    traffic: TrafficMeter,
    half_closed: AtomicBool,
    cut: Cut,
}

pub(super) type Outcome = Result<Guard, StreamDialError>;

pub(super) enum Incoming {
    Data(Bytes),
    HalfClosed,
    Closed(CloseReason),
}

/// Ends a connection whose client accepts bytes too slowly, or whose agent does not answer a close. The pump ends a
/// connection whose client accepts no bytes after a close.
#[derive(Clone)]
pub struct Cut {
    /// Fires when the endpoint or the agent is gone, or the client has ended. The client may still receive the queued bytes.
    closing: CancellationToken,
    /// True if the client has ended, and the agent was asked to close the connection.
    client_ended: Arc<AtomicBool>,
    watch: Watch<Incoming>,
    stall: Duration,
}

impl Cut {
    /// Resolves when the connection must end.
    pub async fn due(&self) -> CloseReason {
        let unanswered = async {
            self.closing.cancelled().await;
            loop {
                self.watch.stalled(CLOSE_STALL).await;
                if self.client_ended.load(Ordering::Relaxed) && self.watch.is_empty() {
                    return;
                }
            }
        };
        tokio::select! {
            reason = self.watch.overdue(self.stall) => reason,
            // The client waits for nothing. The agent does not answer.
            () = unanswered => CloseReason::ClientClosed,
        }
    }
}

/// Source of the endpoint's bytes.
pub struct FromAgent {
    incoming: Receiver<Incoming>,
    /// Fires when the endpoint or the agent is gone, or the client has ended.
    closing: CancellationToken,
}

/// Sink for bytes to the endpoint.
pub struct ToAgent {
    guard: Guard,
    cut: Cut,
    finished: bool,
}

/// Owns an open connection: dropping the guard closes the connection at the agent.
pub(super) struct Guard {
    stream: Arc<AgentStream>,
    connection: ConnectId,
    _counted: OpenConnection,
    /// Set when a close request was already sent to the agent.
    asked: bool,
}

/// Owns a pending dial: dropping the owner cancels the dial.
pub(super) struct Pending<'a> {
    stream: &'a Arc<AgentStream>,
    pub(super) dial: DialId,
    /// Set when the dial request was sent; the agent must then learn of a cancellation.
    pub(super) sent: bool,
}

// === impl Slot ===

impl Slot {
    /// Creates the entry of a dial. Also returns the receiver of the dial's outcome, and the source of the
    /// endpoint's bytes. `held` counts the bytes that wait for the clients of the stream.
    pub(super) fn new(
        limits: &Limits,
        held: &Arc<AtomicUsize>,
    ) -> (Arc<Self>, oneshot::Receiver<Outcome>, FromAgent) {
        let (outcome_tx, outcome) = oneshot::channel();
        let (incoming_tx, incoming) = inbox(limits.connection_bytes, &limits.excess, held);
        let closing = CancellationToken::new();
        let slot = Self {
            outcome: Mutex::new(Some(outcome_tx)),
            incoming: incoming_tx,
            traffic: TrafficMeter::default(),
            half_closed: AtomicBool::new(false),
            cut: Cut {
                closing: closing.clone(),
                client_ended: Arc::default(),
                watch: incoming.watch(),
                stall: limits.stall,
            },
        };
        (Arc::new(slot), outcome, FromAgent { incoming, closing })
    }

    /// Completes the dial.
    pub(super) fn resolve(&self, outcome: Outcome) {
        let sender = self.outcome.lock().take();
        if let Some(sender) = sender {
            // If the receiver is gone, the guard is dropped here.
            let _ = sender.send(outcome);
        }
    }

    /// Queues the end of the endpoint's bytes, once: the marker has no weight, and a peer could repeat it.
    pub(super) fn half_close(&self) {
        if !self.half_closed.swap(true, Ordering::Relaxed) {
            self.incoming.end(Incoming::HalfClosed);
        }
    }

    /// Queues the end of the connection.
    pub(super) fn close(&self, reason: CloseReason) {
        self.incoming.end(Incoming::Closed(reason));
        self.cut.closing.cancel();
    }

    /// Queues bytes, or ends the connection for lack of room. Returns true if the stream's reader must call
    /// [`Slot::pace`].
    pub(super) fn deliver(&self, bytes: Bytes) -> bool {
        let (bytes, weight) = self.incoming.weighed(bytes);
        self.incoming.push(Incoming::Data(bytes), weight)
    }

    /// Counts received bytes. Returns true if the bytes are small traffic, see [`TrafficMeter::is_small`].
    pub(super) fn is_small_traffic(&self, bytes: usize) -> bool {
        self.traffic.is_small(bytes)
    }

    /// Slows the stream's reader down, see [`Sender::pace`].
    pub(super) async fn pace(&self) {
        self.incoming.pace().await;
    }
}

// === impl Pending ===

impl<'a> Pending<'a> {
    /// Registers the dial under a fresh id.
    pub(super) fn register(
        stream: &'a Arc<AgentStream>,
        mut slot: Arc<Slot>,
    ) -> Result<Self, StreamDialError> {
        loop {
            if stream.retired.is_cancelled() {
                return Err(StreamDialError::AgentLost);
            }
            // The server chooses the id, because two front ends may choose the same id.
            let dial = DialId(rand::random_range(1..i64::MAX));
            match stream.mux.lock().dial(dial, slot) {
                Ok(()) => {
                    stream.metrics.pending_backend_dials.increment(1.0);
                    return Ok(Self {
                        stream,
                        dial,
                        sent: false,
                    });
                }
                Err(back) => slot = back,
            }
        }
    }
}

impl Drop for Pending<'_> {
    fn drop(&mut self) {
        self.stream.metrics.pending_backend_dials.decrement(1.0);
        let message = self.stream.mux.lock().cancel(self.dial);
        if let Some(message) = message.filter(|_| self.sent) {
            self.stream.send_now(message);
        }
    }
}

// === impl Guard ===

impl Guard {
    /// Creates the owner of a connection that is already in the stream's table.
    pub(super) fn new(stream: Arc<AgentStream>, connection: ConnectId) -> Self {
        Self {
            _counted: OpenConnection::new(&stream.metrics),
            stream,
            connection,
            asked: false,
        }
    }
}

impl Drop for Guard {
    fn drop(&mut self) {
        let message = self.stream.mux.lock().close(self.connection);
        if let Some(message) = message.filter(|_| !self.asked) {
            self.stream.send_now(message);
        }
    }
}

// === impl FromAgent ===

impl Source for FromAgent {
    async fn recv(&mut self) -> Result<Option<Bytes>, CloseReason> {
        match self.incoming.recv().await {
            Some(Incoming::Data(bytes)) => Ok(Some(bytes)),
            Some(Incoming::HalfClosed) => Ok(None),
            Some(Incoming::Closed(reason)) => Err(reason),
            None => Err(CloseReason::AgentLost),
        }
    }

    async fn aborted(&mut self) -> CloseReason {
        loop {
            match self.incoming.recv().await {
                Some(Incoming::Closed(reason)) => return reason,
                Some(_) => {}
                None => return CloseReason::AgentLost,
            }
        }
    }

    async fn fill(&mut self) {
        self.closing.cancelled().await;
    }
}

// === impl ToAgent ===

impl ToAgent {
    /// Creates the sink of a successful dial.
    pub(super) fn new(guard: Guard, slot: &Slot) -> Self {
        Self {
            guard,
            cut: slot.cut.clone(),
            finished: false,
        }
    }

    /// Returns the signal that the connection must end although bytes are still queued for its client.
    pub fn cut(&self) -> Cut {
        self.cut.clone()
    }

    /// Returns true if the client has ended, and the agent was asked to close the connection: a stock agent does not
    /// support half closes.
    pub fn client_ended(&self) -> bool {
        self.guard.asked
    }

    /// Returns the id that the agent chose for the connection, for logs.
    pub fn connection(&self) -> ConnectId {
        self.guard.connection
    }

    /// Returns the id of the agent that carries the connection, for logs.
    pub fn agent_id(&self) -> &str {
        &self.guard.stream.hello.agent_id
    }

    /// Closes the connection at the agent. A task on `tasks` waits until HTTP/2 has written the close, and all bytes before
    /// it. Gives up if the agent accepts nothing for [`PEER_STALL`].
    pub fn end(self, tasks: &TaskTracker) {
        let stream = self.guard.stream.clone();
        drop(self);
        tasks.spawn(stream.outgoing.written(PEER_STALL));
    }
}

impl Sink for ToAgent {
    async fn send_counted(
        &mut self,
        mut chunk: Bytes,
        progress: &Progress,
    ) -> Result<(), CloseReason> {
        while !chunk.is_empty() {
            let bytes = chunk.split_to(chunk.len().min(AGENT_DATA_BYTES));
            let count = bytes.len();
            let message = Message::Data {
                connection: self.guard.connection,
                bytes,
            };
            let weight = message.weight();
            let stream = &self.guard.stream;
            if let Err(message) = stream.outgoing.try_send(message, weight) {
                let full = &stream.metrics.full_receive_channels;
                let _blocked = GaugeGuard::new(full.get(ServiceMethod::Proxy));
                let sent = stream.outgoing.send_within(message, weight, PEER_STALL);
                sent.await.map_err(|error| match error {
                    SendWithinError::Closed => CloseReason::AgentLost,
                    SendWithinError::Stalled => {
                        stream.abandon();
                        CloseReason::Stalled
                    }
                })?;
            }
            progress.add(count);
        }
        Ok(())
    }

    /// Ends the direction to the endpoint. A stock agent does not support half closes and receives a close
    /// request instead, as from a stock server. The agent first sends the bytes that it has already read from
    /// the endpoint, then answers with its own close. The wait for the answer is limited to [`CLOSE_STALL`].
    async fn finish(&mut self) -> Result<(), CloseReason> {
        if self.finished {
            return Ok(());
        }
        self.finished = true;
        let connection = self.guard.connection;
        let stream = &self.guard.stream;
        if stream.hello.half_close {
            stream.send_now(Message::HalfClose { connection });
        } else {
            stream.send_now(Message::CloseRequest { connection });
            self.guard.asked = true;
            self.cut.client_ended.store(true, Ordering::Relaxed);
            self.cut.closing.cancel();
        }
        Ok(())
    }
}
