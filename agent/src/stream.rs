//! One stream to one server: reads its packets and hands them to the connections.

use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};

use culvert_konnectivity::agent_mux::{Effect, Mux};
use culvert_konnectivity::grpc::Reader;
use culvert_konnectivity::inbox::{self, inbox, weighed};
use culvert_konnectivity::message::{ConnectId, DialId, Message};
use culvert_konnectivity::metrics::Segment;
use culvert_konnectivity::queue::{self, SendWithinError};
use culvert_stream::{CloseReason, PEER_STALL};
use parking_lot::Mutex;
use tokio_util::sync::CancellationToken;
use tracing::warn;

use crate::agent::Agent;
use crate::endpoint::{Endpoint, Incoming};

/// Bytes that may wait to be sent to one server, all connections together. Smaller costs
/// throughput over long paths, larger costs latency of what queues behind.
pub const OUTGOING_BYTES: usize = 512 * 1024;

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
    incoming: inbox::Sender<Incoming>,
    half_closed: AtomicBool,
    closing: CancellationToken,
    cut: CancellationToken,
}

impl ServerStream {
    /// A new stream; what it sends goes into `outgoing`. `ended` ends with it and ends it.
    pub fn new(
        agent: Arc<Agent>,
        half_close: bool,
        outgoing: queue::Sender<Message>,
        ended: CancellationToken,
    ) -> Arc<Self> {
        Arc::new(Self {
            agent,
            half_close,
            mux: Mutex::default(),
            outgoing,
            ended,
        })
    }

    /// Reads packets until the stream ends, then cuts every connection. Returns why it ended; an
    /// error if it broke.
    pub async fn run(self: Arc<Self>, mut inbound: Reader) -> Result<String, String> {
        // Also when this future is dropped: connections do not outlive their stream.
        let _cut = self.ended.clone().drop_guard();
        let metrics = &self.agent.metrics;
        loop {
            let next = tokio::select! {
                next = inbound.message() => next,
                () = self.ended.cancelled() => return Ok("given up".into()),
            };
            match next {
                Ok(Some(message)) => {
                    metrics.streams.count(Segment::ToAgent, &message);
                    if let Some(slow) = self.on_message(message) {
                        slow.incoming.pace().await;
                    }
                }
                Ok(None) => return Ok("closed by the server".into()),
                Err(status) => {
                    let streams = &metrics.streams;
                    streams.stream_error(Segment::ToAgent, status.code(), None);
                    return Err(format!("{}: {}", status.code(), status.message()));
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
    /// When the stream has ended, or the server has taken nothing for [`PEER_STALL`].
    pub async fn send(&self, message: Message) -> Result<(), CloseReason> {
        let weight = message.weight();
        let sent = self.outgoing.send_within(message, weight, PEER_STALL).await;
        sent.map_err(|error| match error {
            SendWithinError::Closed => CloseReason::ServerLost,
            SendWithinError::Stalled => {
                if !self.ended.is_cancelled() {
                    warn!("the server takes no packets, giving its stream up");
                }
                self.ended.cancel();
                CloseReason::Stalled
            }
        })
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

    /// Why the stream has ended under its connections.
    pub fn cut_reason(&self) -> CloseReason {
        if self.agent.shutdown.is_cancelled() {
            CloseReason::Shutdown
        } else {
            CloseReason::ServerLost
        }
    }

    /// Takes one packet of the server. Waits for nothing: other connections' packets follow. Gives
    /// the connection whose endpoint takes bytes too slowly.
    fn on_message(self: &Arc<Self>, message: Message) -> Option<Arc<Slot>> {
        let effect = self.mux.lock().on_message(message);
        match effect {
            Effect::Dial(dial_id, connection, dial) => {
                let limits = &self.agent.limits;
                let (sender, incoming) = inbox(limits.connection_bytes, &limits.excess);
                let cut = self.ended.child_token();
                let closing = CancellationToken::new();
                let slot = Arc::new(Slot {
                    incoming: sender,
                    half_closed: AtomicBool::new(false),
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
            Effect::Cancelled(slot) => {
                slot.closing.cancel();
                slot.cut.cancel();
            }
            Effect::Data(slot, _, bytes) => {
                let (bytes, weight) = weighed(bytes);
                if slot.incoming.push(Incoming::Data(bytes), weight) {
                    return Some(slot);
                }
            }
            Effect::HalfClosed(slot) => {
                // Once: it has no weight, and a peer could repeat it.
                if !slot.half_closed.swap(true, Ordering::Relaxed) {
                    slot.incoming.end(Incoming::HalfClosed);
                }
            }
            Effect::Closed(slot) => {
                slot.incoming.end(Incoming::Closed);
                slot.closing.cancel();
            }
            Effect::Stray(reply) => {
                // Without room it is dropped: the next stray packet is answered.
                let weight = reply.weight();
                let _ = self.outgoing.try_send(reply, weight);
            }
            Effect::Answer(reply) => {
                let weight = reply.weight();
                let _ = self.outgoing.try_answer(reply, weight);
            }
            Effect::Ignored => {}
        }
        None
    }
}
