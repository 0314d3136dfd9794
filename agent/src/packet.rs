//! One packet stream to one server: reads packets and delivers the packets to connections.

mod endpoint;

use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};
use std::time::Duration;

use culvert_konnectivity::agent_mux::{Effect, Mux};
use culvert_konnectivity::grpc::Reader;
use culvert_konnectivity::inbox::{self, inbox};
use culvert_konnectivity::message::{ConnectId, DialId, Message};
use culvert_konnectivity::metrics::Segment;
use culvert_konnectivity::queue::{self, SendWithinError};
use culvert_konnectivity::small_traffic::TrafficMeter;
use culvert_native::window::{Inbound, PING_TIMEOUT, Pings};
use culvert_stream::{CloseReason, PEER_STALL};
use parking_lot::Mutex;
use tokio_util::sync::CancellationToken;
use tracing::warn;

use self::endpoint::{Endpoint, Incoming};
use crate::agent::Agent;
use crate::config::PACKET_KEEPALIVE_FLOOR;

/// Bytes that may wait for sending to one server, for all connections together. A smaller value costs
/// throughput over long paths; a larger value adds latency to packets at the end of the queue.
pub(crate) const OUTGOING_BYTES: usize = 512 * 1024;

/// Bound of the connection id after which a stream counts up. A stock server has one table for all streams of an agent id,
/// so the streams of an agent's processes, and of a process after a reconnect, start at random ids. The ids of two streams
/// overlap only by a rare accident, and an id needs at most six bytes on the wire.
const FIRST_IDS: i64 = 1 << 40;

/// Returns the times of the pings for `--keepalive-time`.
pub(crate) fn pings(keepalive_time: Duration) -> Pings {
    Pings {
        idle: keepalive_time.max(PACKET_KEEPALIVE_FLOOR),
        timeout: PING_TIMEOUT,
    }
}

/// Shared state of one packet stream.
pub(crate) struct ServerStream {
    /// The agent of this stream.
    pub agent: Arc<Agent>,
    /// True if the server supports half-closes; only Culvert servers do.
    pub half_close: bool,
    mux: Mutex<Mux<Arc<Slot>>>,
    outgoing: queue::Sender<Message>,
    /// Counters of the traffic from the server, which determine the server's window.
    inbound: Arc<Inbound>,
    ended: CancellationToken,
}

/// Entry of a connection in the stream's table.
struct Slot {
    incoming: inbox::Sender<Incoming>,
    traffic: TrafficMeter,
    half_closed: AtomicBool,
    closing: CancellationToken,
    cut: CancellationToken,
}

impl ServerStream {
    /// Creates a stream that sends through `outgoing`. `ended` fires when the stream ends; firing `ended`
    /// also ends the stream.
    pub(crate) fn new(
        agent: Arc<Agent>,
        half_close: bool,
        outgoing: queue::Sender<Message>,
        inbound: Arc<Inbound>,
        ended: CancellationToken,
    ) -> Arc<Self> {
        Arc::new(Self {
            agent,
            half_close,
            mux: Mutex::new(Mux::after(ConnectId(rand::random_range(0..FIRST_IDS)))),
            outgoing,
            inbound,
            ended,
        })
    }

    /// Reads packets until the stream ends, then closes every connection. Returns the reason for the end, as
    /// an error if the stream broke.
    pub(crate) async fn run(self: Arc<Self>, mut packets: Reader) -> Result<String, String> {
        // The guard fires `ended` even if this future is dropped, because connections must not outlive their
        // stream.
        let _cut = self.ended.clone().drop_guard();
        let metrics = &self.agent.metrics;
        loop {
            let next = tokio::select! {
                next = packets.message() => next,
                () = self.ended.cancelled() => return Ok("closed by this agent".into()),
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

    /// Requests that the server prefer other agents.
    pub(crate) fn drain(&self) {
        self.tell(Message::Drain);
    }

    /// Sends a message without waiting. Only for messages about the start or end of a connection: such
    /// messages are few and must not be lost.
    pub(crate) fn tell(&self, message: Message) {
        let _ = self.outgoing.send_now(message);
    }

    /// Waits for room in the queue, then sends a message.
    ///
    /// # Errors
    /// Fails if the stream has ended, or if the server has accepted nothing for [`PEER_STALL`].
    pub(crate) async fn send(&self, message: Message) -> Result<(), CloseReason> {
        let weight = message.weight();
        let sent = self.outgoing.send_within(message, weight, PEER_STALL).await;
        sent.map_err(|error| match error {
            SendWithinError::Closed => CloseReason::ServerLost,
            SendWithinError::Stalled => {
                if !self.ended.is_cancelled() {
                    warn!("the server accepts no packets: closing the stream");
                }
                self.ended.cancel();
                CloseReason::Stalled
            }
        })
    }

    /// Makes a drain wait until HTTP/2 has written all messages so far. Gives up if the server accepts nothing for
    /// [`PEER_STALL`].
    fn leave(&self) {
        self.agent.leaving.spawn(self.outgoing.written(PEER_STALL));
    }

    /// Resolves once the stream has ended.
    pub(crate) async fn ended(&self) {
        self.ended.cancelled().await;
    }

    /// Marks a dial as finished.
    pub(crate) fn dialed(&self, dial: DialId, connection: ConnectId) {
        self.mux.lock().dialed(dial, connection);
    }

    /// Removes a connection from the table.
    pub(crate) fn forget(&self, dial: DialId, connection: ConnectId) {
        let mut mux = self.mux.lock();
        mux.dialed(dial, connection);
        mux.remove(connection);
    }

    /// Processes one packet from the server. Never waits, because packets of other connections follow.
    /// Returns the connection if its endpoint reads bytes too slowly.
    fn on_message(self: &Arc<Self>, message: Message) -> Option<Arc<Slot>> {
        let effect = self.mux.lock().on_message(message);
        match effect {
            Effect::Dial(dial_id, connection, dial) => {
                let limits = &self.agent.limits;
                let (sender, incoming) =
                    inbox(limits.connection_bytes, &limits.excess, &self.inbound.held);
                let cut = self.ended.child_token();
                let closing = CancellationToken::new();
                let slot = Arc::new(Slot {
                    incoming: sender,
                    traffic: TrafficMeter::default(),
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
                // The dial may have succeeded just now.
                slot.incoming.end(Incoming::Closed);
                slot.closing.cancel();
                slot.cut.cancel();
            }
            Effect::Data(slot, _, bytes) => {
                self.inbound
                    .count_message(bytes.len(), slot.traffic.is_small(bytes.len()));
                let (bytes, weight) = slot.incoming.weighed(bytes);
                if slot.incoming.push(Incoming::Data(bytes), weight) {
                    return Some(slot);
                }
            }
            Effect::HalfClosed(slot) => {
                // Only once: a half-close has no weight in the queue, and a peer could send many.
                if !slot.half_closed.swap(true, Ordering::Relaxed) {
                    slot.incoming.end(Incoming::HalfClosed);
                }
            }
            Effect::Closed(slot) => {
                slot.incoming.end(Incoming::Closed);
                slot.closing.cancel();
            }
            Effect::Stray(reply) => {
                // Dropped if the queue is full; the next stray packet triggers another reply.
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

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn short_keepalive_time_is_raised_to_the_shortest_that_stock_servers_accept() {
        let idle = |seconds| pings(Duration::from_secs(seconds)).idle;
        assert_eq!(idle(10), Duration::from_secs(31));
        assert_eq!(idle(3600), Duration::from_secs(3600));
    }
}
