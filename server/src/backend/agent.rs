//! A packet stream of an agent, with its dials and connections.
//!
//! The stream's reader task owns the inbound half; other tasks write through a queue bounded in bytes. A guard
//! owns each dial and each connection, so that cleanup happens even if a future is dropped at an await point.

mod connection;
mod outgoing;

use std::net::SocketAddr;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};
use std::time::Duration;

use culvert_konnectivity::excess::OverflowBudget;
use culvert_konnectivity::identifiers::Identifiers;
use culvert_konnectivity::message::{ConnectId, Message};
use culvert_konnectivity::queue::{self, SendWithinError};
use culvert_konnectivity::server_mux::{Effect, Mux};
use culvert_native::window::Inbound;
use culvert_stream::suspicion::Suspicion;
use culvert_stream::{CloseReason, Dial, PEER_STALL};
use parking_lot::Mutex;
use tokio::time::{Instant, timeout_at};
use tokio_util::sync::CancellationToken;
use tracing::{debug, info, warn};

use self::connection::{Guard, Pending, Slot};
use crate::backend::dial::{StreamDialError, cut, next_serial};
use crate::metrics::{DialFailureReason, ServerMetrics};

pub(crate) use self::connection::{Cut, FromAgent, ToAgent};
pub(crate) use self::outgoing::Outgoing;

/// Maximum number of bytes waiting to be sent to an agent, over all connections of the stream. A smaller value
/// costs throughput on long paths; a larger value delays everything queued behind.
pub(crate) const OUTGOING_BYTES: usize = 512 * 1024;

/// Connection id that no agent assigns: ids of agents are positive.
const NO_CONNECTION: ConnectId = ConnectId(-1);

/// Number of identifiers of an agent in a log line and in the status output. An agent may have 256.
const SHOWN_IDENTIFIERS: usize = 8;

/// Introduction that an agent sends when it connects.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Hello {
    /// Agent id. Agents reuse ids across streams, and several agents may share an id, so an id is never a
    /// key for connections.
    pub agent_id: String,
    /// True if the agent understands half closes: a Culvert agent.
    pub half_close: bool,
    /// Addresses and networks that the agent serves.
    pub identifiers: Identifiers,
}

/// Limits of an agent stream.
#[derive(Clone)]
pub struct Limits {
    /// Bytes waiting for a connection's client before the connection borrows from `excess`.
    pub connection_bytes: usize,
    /// Longest time for which a connection may continuously exceed `connection_bytes`.
    pub stall: Duration,
    /// Budget shared by all connections of the server.
    pub excess: Arc<OverflowBudget>,
}

/// The HTTP/2 connection that carries a packet stream, and nothing else.
#[derive(Clone, Debug, Default)]
pub struct Carrier {
    /// Token that closes the connection.
    pub cut: CancellationToken,
    /// Counters of the traffic from the agent, which determine the agent's window.
    pub inbound: Arc<Inbound>,
    /// Address of the agent, or of a load balancer. `None` if the stream has no socket.
    pub address: Option<SocketAddr>,
}

/// A live packet stream of an agent.
pub struct AgentStream {
    /// Number of the stream, unique in this process.
    pub serial: u64,
    /// The agent's introduction.
    pub hello: Hello,
    mux: Mutex<Mux<Arc<Slot>>>,
    outgoing: queue::Sender<Message>,
    draining: AtomicBool,
    /// Number of packets from the agent.
    heard: AtomicU64,
    suspicion: Suspicion,
    retired: CancellationToken,
    carrier: Carrier,
    metrics: Arc<ServerMetrics>,
    limits: Limits,
}

// === impl Hello ===

impl Hello {
    /// Returns the identifiers for a log line and for the status output, and the number of the others.
    pub(super) fn first_identifiers(&self) -> (Vec<String>, usize) {
        self.identifiers.first(SHOWN_IDENTIFIERS)
    }

    /// Logs that the agent sends nothing, not even an answer to a probe.
    pub(super) fn warn_of_silence(&self) {
        warn!(
            agent = self.agent_id,
            "the agent does not answer; other agents get the dials until it sends something"
        );
    }
}

// === impl AgentStream ===

impl AgentStream {
    /// Creates a stream. The receiver yields the messages to the agent.
    pub fn new(
        hello: Hello,
        limits: Limits,
        carrier: Carrier,
        metrics: Arc<ServerMetrics>,
    ) -> (Arc<Self>, queue::Receiver<Message>) {
        let (outgoing, receiver) = queue::bounded(OUTGOING_BYTES);
        let stream = Arc::new(Self {
            serial: next_serial(),
            hello,
            mux: Mutex::default(),
            outgoing,
            draining: AtomicBool::new(false),
            heard: AtomicU64::new(0),
            suspicion: Suspicion::none(),
            retired: CancellationToken::new(),
            carrier,
            metrics,
            limits,
        });
        (stream, receiver)
    }

    /// Returns the address of the agent, or of a load balancer.
    pub fn address(&self) -> Option<SocketAddr> {
        self.carrier.address
    }

    /// Returns true if the agent requested to get no new dials.
    pub fn is_draining(&self) -> bool {
        self.draining.load(Ordering::Relaxed)
    }

    /// Returns true if the agent has not answered a probe, and has sent nothing since.
    pub fn is_suspect(&self) -> bool {
        self.suspicion.is_raised(self.heard.load(Ordering::Relaxed))
    }

    /// Resolves once the agent is suspect: it sends no packet, not even an answer to a probe. The probe is a
    /// close of a connection that does not exist. Every agent answers it with an error
    /// (`pkg/agent/client.go`, "Unknown connectID").
    pub async fn silent(&self) {
        let probe = || {
            let connection = NO_CONNECTION;
            let probe = Message::CloseRequest { connection };
            let weight = probe.weight();
            // A full queue already has packets that the agent answers.
            let _ = self.outgoing.try_send(probe, weight);
            true
        };
        let heard = || self.heard.load(Ordering::Relaxed);
        if self.suspicion.wait(heard, probe).await {
            self.hello.warn_of_silence();
        }
    }

    /// Resolves once the stream is retired.
    pub async fn retired(&self) {
        self.retired.cancelled().await;
    }

    /// Retires a stream whose agent accepts no packets, and closes its connection, because no message could
    /// reach the agent. The agent connects again.
    pub fn abandon(&self) {
        if !self.retired.is_cancelled() {
            warn!(
                agent = self.hello.agent_id,
                "the agent accepts no packets: closing its connection"
            );
        }
        self.retire();
        self.carrier.cut.cancel();
    }

    /// Ends the stream; the agent sees the end of the call.
    fn retire(&self) {
        self.draining.store(true, Ordering::Relaxed);
        self.retired.cancel();
    }

    /// Opens a connection. Dropping the future cancels the dial.
    pub async fn dial(
        self: &Arc<Self>,
        dial: &Dial,
        deadline: Instant,
    ) -> Result<(FromAgent, ToAgent), StreamDialError> {
        let (slot, outcome, source) = Slot::new(&self.limits, &self.carrier.inbound.held);
        let mut pending = Pending::register(self, slot.clone())?;
        let request = Message::DialRequest {
            protocol: dial.protocol.clone(),
            address: dial.address.clone(),
            dial: pending.dial,
        };
        let weight = request.weight();
        let sent = self.outgoing.send_within(request, weight, PEER_STALL);
        let sent = timeout_at(deadline, sent).await;
        sent.map_err(|_| StreamDialError::NotSent)?
            .map_err(|error| {
                if error == SendWithinError::Stalled {
                    self.abandon();
                }
                StreamDialError::AgentLost
            })?;
        pending.sent = true;
        let guard = timeout_at(deadline, outcome)
            .await
            .map_err(|_| StreamDialError::TimedOut)?
            .map_err(|_| StreamDialError::AgentLost)??;
        Ok((source, ToAgent::new(guard, &slot)))
    }

    /// Processes a packet from the agent. May wait briefly for a client that accepts bytes too slowly, but
    /// not longer, because packets of other connections follow.
    pub async fn on_message(self: &Arc<Self>, message: Message) {
        if let Some(slow) = self.take(message) {
            slow.pace().await;
        }
    }

    /// Processes a packet. Returns the connection whose client the reader has to wait for.
    fn take(self: &Arc<Self>, message: Message) -> Option<Arc<Slot>> {
        self.heard.fetch_add(1, Ordering::Relaxed);
        let effect = self.mux.lock().on_message(message);
        match effect {
            Effect::Opened(slot, connection) => {
                let guard = Guard::new(self.clone(), connection);
                // If the dial was cancelled, `resolve` drops the guard, and the drop closes the connection.
                slot.resolve(Ok(guard));
            }
            Effect::Refused(slot, error) => {
                self.dial_failure(DialFailureReason::ErrorResponse);
                slot.resolve(Err(StreamDialError::refused(error)));
            }
            Effect::Abandoned(slot) => {
                self.dial_failure(DialFailureReason::BackendClose);
                slot.resolve(Err(StreamDialError::Abandoned));
            }
            Effect::Data(slot, _, bytes) => {
                let is_small = slot.is_small_traffic(bytes.len());
                self.carrier.inbound.count_message(bytes.len(), is_small);
                return slot.deliver(bytes).then_some(slot);
            }
            Effect::HalfClosed(slot) => slot.half_close(),
            Effect::Closed(slot, error) => {
                if !error.is_empty() {
                    debug!(error = cut(error), "the agent closed a connection");
                }
                slot.close(CloseReason::EndpointClosed);
            }
            Effect::Unrecognized(reply) => {
                self.dial_failure(DialFailureReason::UnrecognizedResponse);
                if let Some(reply) = reply {
                    // The agent keeps an opened connection until it receives a close.
                    let weight = reply.weight();
                    let _ = self.outgoing.try_answer(reply, weight);
                }
            }
            Effect::Stray(reply) => {
                // Without room in the queue the reply is dropped: the next stray packet gets a reply.
                let weight = reply.weight();
                let _ = self.outgoing.try_send(reply, weight);
            }
            Effect::Drain => {
                if !self.draining.swap(true, Ordering::Relaxed) {
                    info!("the agent drains");
                }
            }
            Effect::Ignored => {}
        }
        None
    }

    /// Ends the stream: fails every pending dial and closes every open connection.
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

    /// Returns the number of pending dials and the number of open connections.
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
