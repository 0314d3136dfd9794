//! The `AgentService/Connect` call: accepts agents' packet streams.

use std::sync::Arc;

use culvert_host::telemetry::metrics::GaugeGuard;
use culvert_konnectivity::grpc::{Reader, Service};
use culvert_konnectivity::message::HALF_CLOSE_HEADER;
use culvert_konnectivity::metrics::Segment;
use culvert_kube::tokens::{AuthError, Tokens};
use tokio_util::task::TaskTracker;
use tonic::metadata::{MetadataMap, MetadataValue};
use tonic::{Request, Response, Status};
use tracing::{Instrument, info, info_span, warn};

use super::agent::{AgentStream, Hello, Limits, Outgoing};
use super::{Backend, Registration, Registry};
use crate::listener::PeerConnection;
use crate::metrics::{Listener, RejectReason, ServerMetrics, ServiceMethod};

/// Serves the agents of a server.
#[derive(Clone)]
pub(crate) struct Agents {
    /// Registry of the streams.
    pub registry: Arc<Registry>,
    /// Id by which agents distinguish servers.
    pub server_id: String,
    /// Number of servers announced to agents.
    pub server_count: i64,
    /// Limits of each stream.
    pub limits: Limits,
    /// Checks agents' tokens; `None` if agents need no token.
    pub tokens: Option<Arc<Tokens>>,
    /// Tracks the reader tasks.
    pub tasks: TaskTracker,
    /// Metrics of the server.
    pub metrics: Arc<ServerMetrics>,
}

impl Service for Agents {
    const PATH: &'static str = "/AgentService/Connect";

    type Replies = Outgoing;

    async fn take(&self, request: Request<Reader>) -> Result<Response<Outgoing>, Status> {
        let hello = Hello::from_metadata(request.metadata()).map_err(Status::unknown)?;
        if let Err(error) = self.authenticate(request.metadata()).await {
            warn!(agent = hello.agent_id, %error, "agent refused");
            let labels = (Listener::Agent, RejectReason::Unauthenticated);
            self.metrics.rejected.get(labels).increment(1);
            return Err(Status::unknown(error.to_string()));
        }
        let connection = request.extensions().get::<PeerConnection>();
        if let Some(connection) = connection {
            connection.admit();
        }
        let connection = connection.map(|connection| connection.cut.clone());
        let connection = connection.unwrap_or_default();
        let (stream, messages) =
            AgentStream::new(hello, self.limits.clone(), connection, self.metrics.clone());
        let half_close = stream.hello.half_close;
        let outgoing = Outgoing::new(messages, stream.clone());
        let mut response = Response::new(outgoing);
        let metadata = response.metadata_mut();
        let server_id = MetadataValue::try_from(&self.server_id)
            .map_err(|_| Status::unknown("the server id is not a valid header value"))?;
        metadata.insert("serverid", server_id);
        metadata.insert("servercount", self.server_count.into());
        if half_close {
            metadata.insert(HALF_CLOSE_HEADER, MetadataValue::from_static("1"));
        }
        let span = info_span!("agent", id = stream.hello.agent_id, stream = stream.serial);
        let registration = self.registry.register(Backend::Packet(stream.clone()));
        let reader = read(
            request.into_inner(),
            stream,
            registration,
            self.metrics.clone(),
        );
        self.tasks.spawn(reader.instrument(span));
        Ok(response)
    }
}

impl Agents {
    pub(super) async fn authenticate(&self, metadata: &MetadataMap) -> Result<(), AuthError> {
        match &self.tokens {
            Some(tokens) => tokens.check(metadata).await,
            None => Ok(()),
        }
    }
}

/// Reads an agent's packets until its stream ends.
async fn read(
    mut inbound: Reader,
    stream: Arc<AgentStream>,
    registration: Registration,
    metrics: Arc<ServerMetrics>,
) {
    let _open = GaugeGuard::new(metrics.grpc_connections.get(ServiceMethod::Connect));
    let ended = loop {
        let next = tokio::select! {
            next = inbound.message() => next,
            () = stream.retired() => break "given up".to_owned(),
        };
        match next {
            Ok(Some(message)) => {
                metrics.streams.count(Segment::FromAgent, &message);
                stream.on_message(message).await;
            }
            Ok(None) => break "closed by the agent".to_owned(),
            Err(status) => {
                let streams = &metrics.streams;
                streams.stream_error(Segment::FromAgent, status.code(), None);
                break status.message().to_owned();
            }
        }
    };
    drop(registration);
    let (pending, open) = stream.counts();
    stream.end();
    info!(reason = ended, pending, open, "agent disconnected");
}

impl Hello {
    /// Reads the introduction of an agent; the error texts are upstream's.
    pub(super) fn from_metadata(metadata: &MetadataMap) -> Result<Self, String> {
        let values = |key: &'static str| -> Vec<&str> {
            let all = metadata.get_all(key).iter();
            all.filter_map(|value| value.to_str().ok()).collect()
        };
        let ids = values("agentid");
        let [agent_id] = ids.as_slice() else {
            return Err(format!(
                "expected one agent ID in the context, got [{}]",
                ids.join(" ")
            ));
        };
        let identifiers = values("agentidentifiers");
        if identifiers.len() > 1 {
            return Err(format!(
                "expected at most one set of agent identifiers in the context, got [{}]",
                identifiers.join(" ")
            ));
        }
        Ok(Self {
            agent_id: (*agent_id).to_owned(),
            half_close: metadata.contains_key(HALF_CLOSE_HEADER),
        })
    }
}

#[cfg(test)]
mod tests {
    #![allow(clippy::unwrap_used)]

    use super::*;

    fn hello(pairs: &[(&'static str, &str)]) -> Result<Hello, String> {
        let mut metadata = MetadataMap::new();
        for (key, value) in pairs {
            metadata.append(*key, value.parse().unwrap());
        }
        Hello::from_metadata(&metadata)
    }

    #[test]
    fn an_agent_needs_exactly_one_id() {
        let one = hello(&[("agentid", "a"), ("agentidentifiers", "")]).unwrap();
        assert_eq!((one.agent_id.as_str(), one.half_close), ("a", false));
        assert_eq!(
            hello(&[]).unwrap_err(),
            "expected one agent ID in the context, got []"
        );
        assert_eq!(
            hello(&[("agentid", "a"), ("agentid", "b")]).unwrap_err(),
            "expected one agent ID in the context, got [a b]"
        );
    }

    #[test]
    fn more_than_one_set_of_identifiers_is_refused() {
        let twice = [
            ("agentid", "a"),
            ("agentidentifiers", "x"),
            ("agentidentifiers", "y"),
        ];
        assert!(
            hello(&twice)
                .unwrap_err()
                .starts_with("expected at most one set")
        );
        assert!(
            hello(&[("agentid", "a"), (HALF_CLOSE_HEADER, "1")])
                .unwrap()
                .half_close
        );
    }
}
