//! One stream of one agent: the dials and connections that it carries.
//!
//! The stream's reader task owns the inbound half; everybody else writes through a byte-bounded
//! queue. Dials and connections are owned by guards, wherever their futures end.

mod connection;
mod outgoing;

use std::sync::Arc;
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};
use std::time::Duration;

use culvert_konnectivity::excess::Pool;
use culvert_konnectivity::message::Message;
use culvert_konnectivity::queue;
use culvert_konnectivity::server_mux::{Effect, Mux};
use culvert_stream::{CloseReason, Dial};
use parking_lot::Mutex;
use tokio::time::{Instant, timeout_at};
use tokio_util::sync::CancellationToken;
use tracing::{debug, info, warn};

use self::connection::{Guard, Pending, Slot};
use crate::metrics::{DialFailureReason, ServerMetrics};

pub use self::connection::{Connection, Cut, FromAgent, ToAgent};
pub use self::outgoing::Outgoing;

/// Bytes that may wait to be sent to one agent, all its connections together. Smaller costs
/// throughput over long paths, larger costs latency of what queues behind.
pub const OUTGOING_BYTES: usize = 512 * 1024;

/// How long an agent may leave a dial unanswered before its stream counts as silent: agents end
/// a dial after 5 s by themselves, the rest is travel.
pub const SILENT_AFTER: Duration = Duration::from_secs(7);

/// What the agent said of itself when it connected.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Hello {
    /// Reused across streams and even across agents; never a key for connections.
    pub agent_id: String,
    /// Understands half closes: one of ours.
    pub half_close: bool,
}

/// Limits of one agent stream.
#[derive(Clone)]
pub struct Limits {
    /// Bytes that may wait for one connection's client without borrowing.
    pub connection_bytes: usize,
    /// How long a connection may exceed them without a pause.
    pub stall: Duration,
    /// What it borrows from, as all connections of the server.
    pub excess: Arc<Pool>,
}

/// One live stream of an agent.
pub struct AgentStream {
    /// Unique in this process.
    pub serial: u64,
    /// What the agent said of itself.
    pub hello: Hello,
    mux: Mutex<Mux<Arc<Slot>>>,
    outgoing: queue::Sender<Message>,
    draining: AtomicBool,
    /// When the oldest dial was sent that no packet followed.
    unanswered_since: Mutex<Option<Instant>>,
    retired: CancellationToken,
    /// Cuts the connection that carries the stream, and nothing else.
    connection: CancellationToken,
    metrics: Arc<ServerMetrics>,
    limits: Limits,
}

/// Why a dial on one stream failed.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
pub enum StreamDialError {
    /// The agent could not reach the target; its text, verbatim.
    #[error("{0}")]
    Refused(String),
    /// The agent gave the dial up.
    #[error("the agent abandoned the dial")]
    Abandoned,
    /// The stream ended before the answer.
    #[error("the agent's stream ended while the dial was pending")]
    AgentLost,
    /// The agent took no packet until the deadline.
    #[error("timed out waiting for backend dial")]
    NotSent,
    /// The agent gave no answer until the deadline.
    #[error("timed out waiting for backend dial")]
    TimedOut,
}

/// A number for a new stream of any kind, unique in this process.
pub fn next_serial() -> u64 {
    static SERIAL: AtomicU64 = AtomicU64::new(1);
    SERIAL.fetch_add(1, Ordering::Relaxed)
}

// === impl AgentStream ===

impl AgentStream {
    /// A new stream; what it sends comes out of the receiver.
    pub fn new(
        hello: Hello,
        limits: Limits,
        connection: CancellationToken,
        metrics: Arc<ServerMetrics>,
    ) -> (Arc<Self>, queue::Receiver<Message>) {
        let (outgoing, receiver) = queue::bounded(OUTGOING_BYTES);
        let stream = Arc::new(Self {
            serial: next_serial(),
            hello,
            mux: Mutex::default(),
            outgoing,
            draining: AtomicBool::new(false),
            unanswered_since: Mutex::new(None),
            retired: CancellationToken::new(),
            connection,
            metrics,
            limits,
        });
        (stream, receiver)
    }

    /// The agent asked for no new dials.
    pub fn is_draining(&self) -> bool {
        self.draining.load(Ordering::Relaxed)
    }

    /// A dial waits for longer than any agent takes, and nothing came since: the path is
    /// probably dead, although TCP does not know yet.
    pub fn is_silent(&self) -> bool {
        let since = *self.unanswered_since.lock();
        since.is_some_and(|since| since.elapsed() >= SILENT_AFTER)
    }

    /// Resolves once the stream was given up.
    pub async fn retired(&self) {
        self.retired.cancelled().await;
    }

    /// Gives up a stream whose agent takes no packets: it can not be told, so its connection is
    /// cut. The agent connects again.
    pub fn abandon(&self) {
        if !self.retired.is_cancelled() {
            warn!(
                agent = self.hello.agent_id,
                "the agent takes no packets, cutting its connection"
            );
        }
        self.retire();
        self.connection.cancel();
    }

    /// Ends the stream: the agent sees the end of the call.
    fn retire(&self) {
        self.draining.store(true, Ordering::Relaxed);
        self.retired.cancel();
    }

    /// Opens a connection. Dropping the future gives the dial up.
    ///
    /// # Errors
    /// See [`StreamDialError`].
    pub async fn dial(
        self: &Arc<Self>,
        dial: &Dial,
        deadline: Instant,
    ) -> Result<Connection, StreamDialError> {
        let (slot, outcome, source) = Slot::new(&self.limits);
        let mut pending = Pending::register(self, slot.clone())?;
        let request = Message::DialRequest {
            protocol: dial.protocol.clone(),
            address: dial.address.clone(),
            dial: pending.dial,
        };
        let weight = request.weight();
        self.unanswered_since
            .lock()
            .get_or_insert_with(Instant::now);
        timeout_at(deadline, self.outgoing.send(request, weight))
            .await
            .map_err(|_| StreamDialError::NotSent)?
            .map_err(|_| StreamDialError::AgentLost)?;
        pending.sent = true;
        let guard = timeout_at(deadline, outcome)
            .await
            .map_err(|_| StreamDialError::TimedOut)?
            .map_err(|_| StreamDialError::AgentLost)??;
        Ok(Connection::new(source, guard, &slot))
    }

    /// Takes one packet of the agent. Waits for nothing but a moment for a client that takes bytes
    /// too slowly: other connections' packets follow.
    pub async fn on_message(self: &Arc<Self>, message: Message) {
        if let Some(slow) = self.take(message) {
            slow.pace().await;
        }
    }

    /// The connection whose client is to be waited for.
    fn take(self: &Arc<Self>, message: Message) -> Option<Arc<Slot>> {
        *self.unanswered_since.lock() = None;
        let effect = self.mux.lock().on_message(message);
        match effect {
            Effect::Opened(slot, connection) => {
                let guard = Guard::new(self.clone(), connection);
                // If nobody waits any more the guard comes back and its drop closes.
                slot.resolve(Ok(guard));
            }
            Effect::Refused(slot, error) => {
                self.dial_failure(DialFailureReason::ErrorResponse);
                slot.resolve(Err(StreamDialError::Refused(error)));
            }
            Effect::Abandoned(slot) => {
                self.dial_failure(DialFailureReason::BackendClose);
                slot.resolve(Err(StreamDialError::Abandoned));
            }
            Effect::Data(slot, _, bytes) => return slot.deliver(bytes).then_some(slot),
            Effect::HalfClosed(slot) => slot.half_close(),
            Effect::Closed(slot, error) => {
                if !error.is_empty() {
                    debug!(
                        agent = self.hello.agent_id,
                        error, "the agent closed a connection"
                    );
                }
                slot.close(CloseReason::EndpointClosed);
            }
            Effect::Unrecognized(reply) => {
                self.dial_failure(DialFailureReason::UnrecognizedResponse);
                if let Some(reply) = reply {
                    // The agent keeps what it has opened until it is told.
                    let weight = reply.weight();
                    let _ = self.outgoing.try_answer(reply, weight);
                }
            }
            Effect::Stray(reply) => {
                // Without room it is dropped: the next stray packet is answered.
                let weight = reply.weight();
                let _ = self.outgoing.try_send(reply, weight);
            }
            Effect::Drain => {
                if !self.draining.swap(true, Ordering::Relaxed) {
                    info!(agent = self.hello.agent_id, "the agent drains");
                }
            }
            Effect::Ignored => {}
        }
        None
    }

    /// The stream ended: fails every dial and closes every connection that it carried.
    pub fn end(&self) {
        self.retire();
        let (pending, open) = self.mux.lock().end();
        for slot in pending {
            slot.resolve(Err(StreamDialError::AgentLost));
        }
        for slot in open {
            slot.close(CloseReason::AgentLost);
        }
    }

    /// How many dials wait for an answer, and how many connections are open.
    pub fn counts(&self) -> (usize, usize) {
        self.mux.lock().counts()
    }

    fn dial_failure(&self, reason: DialFailureReason) {
        self.metrics.dial_failures(reason).increment(1);
    }

    fn send_now(&self, message: Message) {
        let _ = self.outgoing.send_now(message);
    }
}

#[cfg(test)]
mod tests;
