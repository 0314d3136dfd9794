//! One stream to one server: reads its packets and hands them to the connections.

use std::sync::Arc;
use std::time::Duration;

use bytes::Bytes;
use culvert_common::telemetry::metrics::Segment;
use culvert_common::tunnel::CloseReason;
use culvert_common::tunnel::queue::{self, SendWithinError};
use culvert_common::wire::{ConnectId, DialId, Message};
use culvert_proto::Packet;
use parking_lot::Mutex;
use tokio_util::sync::CancellationToken;
use tonic::Streaming;
use tracing::warn;

use crate::agent::Agent;
use crate::endpoint::{Endpoint, Incoming};
use crate::mux::{Effect, Mux};

/// Bytes that may wait to be sent to one server, all connections together. Smaller costs
/// throughput over long paths, larger costs latency of what queues behind.
pub const OUTGOING_BYTES: usize = 512 * 1024;

/// How long a full connection may hold up the stream while its endpoint takes nothing.
pub const STALL: Duration = Duration::from_secs(10);

/// The shared part of one stream.
pub struct ServerStream {
    /// The agent that it belongs to.
    pub agent: Arc<Agent>,
    /// The server understands half closes: one of ours.
    pub half_close: bool,
    mux: Mutex<Mux<Arc<Slot>>>,
    outgoing: queue::Sender<Message>,
    ended: CancellationToken,
}

/// A connection's entry in the stream's table.
struct Slot {
    incoming: queue::Sender<Incoming>,
    closing: CancellationToken,
    cut: CancellationToken,
}

impl ServerStream {
    /// A new stream; what it sends goes into `outgoing`.
    pub fn new(agent: Arc<Agent>, half_close: bool, outgoing: queue::Sender<Message>) -> Arc<Self> {
        let ended = agent.shutdown.child_token();
        Arc::new(Self {
            agent,
            half_close,
            mux: Mutex::default(),
            outgoing,
            ended,
        })
    }

    /// Reads packets until the stream ends, then cuts every connection. Returns why it ended.
    pub async fn run(self: Arc<Self>, mut inbound: Streaming<Packet>) -> String {
        // Also when this future is dropped: connections do not outlive their stream.
        let _cut = self.ended.clone().drop_guard();
        let metrics = &self.agent.metrics;
        loop {
            let next = tokio::select! {
                next = inbound.message() => next,
                () = self.ended.cancelled() => return "shutting down".into(),
            };
            match next {
                Ok(Some(packet)) => {
                    let message = Message::from(packet);
                    metrics.streams.count(Segment::ToAgent, &message);
                    self.on_message(message).await;
                }
                Ok(None) => return "closed by the server".into(),
                Err(status) => {
                    let streams = &metrics.streams;
                    streams.stream_error(Segment::ToAgent, status.code(), None);
                    return format!("{}: {}", status.code(), status.message());
                }
            }
        }
    }

    /// Asks the server to prefer other agents.
    pub fn drain(&self) {
        self.tell(Message::Drain);
    }

    /// Sends a message that belongs to a connection's life: there are few of them and none may
    /// be lost.
    pub fn tell(&self, message: Message) {
        let _ = self.outgoing.send_now(message);
    }

    /// Sends a message once there is room for it.
    ///
    /// # Errors
    /// When the stream has ended.
    pub async fn send(&self, message: Message) -> Result<(), queue::Closed> {
        let weight = message.weight();
        self.outgoing.send(message, weight).await
    }

    /// A dial has an outcome.
    pub fn dialed(&self, dial: DialId, connection: ConnectId) {
        self.mux.lock().dialed(dial, connection);
    }

    /// Removes a connection from the table.
    pub fn forget(&self, dial: DialId, connection: ConnectId) {
        let mut mux = self.mux.lock();
        mux.dialed(dial, connection);
        mux.remove(connection);
    }

    /// Why a connection's cut token fired.
    pub fn cut_reason(&self) -> CloseReason {
        if self.agent.shutdown.is_cancelled() {
            CloseReason::Shutdown
        } else if self.ended.is_cancelled() {
            CloseReason::ServerLost
        } else {
            CloseReason::Stalled
        }
    }

    async fn on_message(self: &Arc<Self>, message: Message) {
        let effect = self.mux.lock().on_message(message);
        match effect {
            Effect::Dial(dial_id, connection, dial) => {
                let (sender, incoming) = queue::bounded(self.agent.connection_bytes);
                let cut = self.ended.child_token();
                let closing = CancellationToken::new();
                let slot = Arc::new(Slot {
                    incoming: sender,
                    closing: closing.clone(),
                    cut: cut.clone(),
                });
                self.mux.lock().insert(dial_id, connection, slot);
                let endpoint = Endpoint {
                    stream: self.clone(),
                    dial_id,
                    connection,
                    dial,
                    incoming,
                    closing,
                    cut,
                };
                self.agent.tasks.spawn(endpoint.run());
            }
            Effect::Cancelled(slot) => slot.cut.cancel(),
            Effect::Data(slot, connection, bytes) => self.deliver(&slot, connection, bytes).await,
            Effect::HalfClosed(slot) => slot.push(Incoming::HalfClosed),
            Effect::Closed(slot) => {
                slot.push(Incoming::Closed);
                slot.closing.cancel();
            }
            Effect::Reply(message) => {
                // An error means that the stream is ending, which its reader notices by itself.
                let _ = self.send(message).await;
            }
            Effect::Ignored => {}
        }
    }

    async fn deliver(&self, slot: &Slot, connection: ConnectId, bytes: Bytes) {
        let weight = bytes.len();
        let Err(item) = slot.incoming.try_send(Incoming::Data(bytes), weight) else {
            return;
        };
        let sent = slot.incoming.send_within(item, weight, STALL);
        let stalled = tokio::select! {
            sent = sent => sent == Err(SendWithinError::Stalled),
            () = self.ended.cancelled() => false,
        };
        if stalled {
            warn!(
                connection = connection.0,
                stall = ?STALL,
                "the endpoint takes no bytes, closing its connection so that the others go on"
            );
            self.mux.lock().remove(connection);
            slot.cut.cancel();
        }
    }
}

impl Slot {
    fn push(&self, item: Incoming) {
        let _ = self.incoming.send_now(item);
    }
}
