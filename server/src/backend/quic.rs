//! Dials to native agents, over the QUIC link or the TCP connection; see [`culvert_native::quic`].

mod serve;
#[cfg(test)]
mod tests;

use std::sync::{Arc, OnceLock};

use culvert_host::telemetry::metrics::GaugeGuard;
use culvert_konnectivity::message::PacketType;
use culvert_konnectivity::metrics::Segment;
use culvert_native::quic::link::{Link, LinkDialError};
use culvert_stream::Dial;
use tokio::time::{Instant, timeout_at};
use tracing::debug;

use super::Connection;
use super::dial::StreamDialError;
use super::native::{NativeAgent, Use, opened};
use crate::metrics::{DialFailureReason, QuicDial};

/// Opens a connection to an endpoint of an agent. A dial moves from a link that does not answer to the other link: no
/// byte of the client was sent then. Dropping the future cancels the dial.
pub(super) async fn dial(
    agent: &Arc<NativeAgent>,
    dial: &Dial,
    deadline: Instant,
) -> Result<Connection, StreamDialError> {
    let counted = OnceLock::new();
    let mut link = agent.second_link();
    loop {
        if let Some(link) = link {
            let dialed = timeout_at(deadline, over_quic(agent, &link, dial, &counted)).await;
            let outcome = dialed.unwrap_or_else(|_| {
                agent.metrics.quic_dials.get(QuicDial::Failed).increment(1);
                Some(Err(StreamDialError::TimedOut))
            });
            if let Some(outcome) = outcome {
                return outcome;
            }
        }
        tokio::select! {
            biased;
            dialed = agent.dial(dial, deadline, &counted) => return dialed.map(Connection::from),
            other = agent.replaced() => link = Some(other),
        }
        debug!(address = dial.address, "a dial moves from TCP to QUIC");
    }
}

/// Opens a connection over a link. Returns `None` if the link is of no use.
async fn over_quic(
    agent: &Arc<NativeAgent>,
    link: &Link,
    dial: &Dial,
    counted: &OnceLock<()>,
) -> Option<Result<Connection, StreamDialError>> {
    let count = |outcome| agent.metrics.quic_dials.get(outcome).increment(1);
    let _use = Use::begin(agent);
    let _pending = GaugeGuard::new(&agent.metrics.pending_backend_dials);
    agent.count_request(counted);
    let error = match link.dial(dial).await {
        Ok((source, sink)) => {
            agent.count(Segment::FromAgent, PacketType::DialRsp);
            count(QuicDial::Opened);
            // Stream numbers have 62 bits.
            let stream_id = i64::try_from(sink.stream_id()).unwrap_or(i64::MAX);
            return Some(Ok(opened(agent, stream_id, (source, sink)).into()));
        }
        Err(error) => error,
    };
    match error {
        LinkDialError::Unusable => {
            count(QuicDial::Moved);
            debug!(address = dial.address, "a dial moves from QUIC to TCP");
            None
        }
        LinkDialError::Abandoned => {
            count(QuicDial::Failed);
            agent.dial_failure(DialFailureReason::BackendClose);
            Some(Err(StreamDialError::Abandoned))
        }
        LinkDialError::Refused(text) => {
            agent.count(Segment::FromAgent, PacketType::DialRsp);
            count(QuicDial::Failed);
            agent.dial_failure(DialFailureReason::ErrorResponse);
            Some(Err(StreamDialError::refused(text)))
        }
    }
}
