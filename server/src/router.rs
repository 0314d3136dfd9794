//! From a front end's [`Dial`] to an open connection: chooses a backend, bounds the wait, and
//! tries another agent where the first one is gone or silent. A retry is safe: no byte of the
//! client has been sent yet.

use std::sync::Arc;
use std::time::Duration;

use culvert_common::tunnel::Dial;
use tokio::time::Instant;
use tracing::debug;

use crate::backend::agent::{SILENT_AFTER, StreamDialError};
use crate::backend::{Connection, Registry};
use crate::metrics::{DialFailureReason, ServerMetrics};

/// The longest that a dial may take where no flag says so. Agents end a dial after 5 s and
/// kube-apiserver's client library after 30 s, so what takes longer has been forgotten by both.
pub const MAX_DIAL: Duration = Duration::from_secs(35);

/// How many streams one dial tries.
const MAX_ATTEMPTS: usize = 3;

/// Chooses backends for the dials of all front ends.
pub struct Router {
    registry: Arc<Registry>,
    /// `--backend-dial-timeout`.
    dial_timeout: Option<Duration>,
    metrics: Arc<ServerMetrics>,
}

/// Why no backend could open a connection.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
pub enum DialError {
    /// No agent is connected.
    #[error("No agent available")]
    NoAgent,
    /// The agents that were asked failed.
    #[error(transparent)]
    Stream(#[from] StreamDialError),
}

/// Counts a dial whose future is dropped before it had an outcome: its client left.
struct Unfinished<'a> {
    metrics: &'a ServerMetrics,
    finished: bool,
}

impl Router {
    /// A router over the registry's agents. A `dial_timeout` bounds each dial and retires an agent
    /// stream that takes no packet for that long; without it [`MAX_DIAL`] bounds the dial alone.
    pub fn new(
        registry: Arc<Registry>,
        dial_timeout: Option<Duration>,
        metrics: Arc<ServerMetrics>,
    ) -> Self {
        Self {
            registry,
            dial_timeout,
            metrics,
        }
    }

    /// Opens a connection. Dropping the future gives the dial up.
    ///
    /// # Errors
    /// [`DialError`]; its text is what the client is told.
    pub async fn dial(&self, dial: &Dial) -> Result<Connection, DialError> {
        let started = Instant::now();
        let mut unfinished = Unfinished {
            metrics: &self.metrics,
            finished: false,
        };
        let outcome = self.try_streams(dial, started).await;
        unfinished.finished = true;
        match &outcome {
            Ok(_) => {
                let elapsed = started.elapsed().as_secs_f64();
                self.metrics.dial_duration.record(elapsed);
            }
            Err(error) => {
                if let Some(reason) = error.failure_reason() {
                    self.metrics.dial_failures(reason).increment(1);
                }
            }
        }
        outcome
    }

    async fn try_streams(&self, dial: &Dial, started: Instant) -> Result<Connection, DialError> {
        let deadline = started + self.dial_timeout.unwrap_or(MAX_DIAL);
        let mut tried = Vec::new();
        let mut last = DialError::NoAgent;
        while tried.len() < MAX_ATTEMPTS {
            let Some(stream) = self.registry.choose(&tried) else {
                return Err(last);
            };
            tried.push(stream.serial());
            let limit = if self.registry.has_other(&tried) {
                deadline.min(Instant::now() + SILENT_AFTER)
            } else {
                deadline
            };
            let error = match stream.dial(dial, limit).await {
                Ok(connection) => return Ok(connection),
                Err(error) => error,
            };
            if error == StreamDialError::NotSent && self.dial_timeout.is_some() {
                stream.abandon();
            }
            let again = match error {
                StreamDialError::AgentLost => true,
                StreamDialError::NotSent | StreamDialError::TimedOut => Instant::now() < deadline,
                StreamDialError::Refused(_) | StreamDialError::Abandoned => false,
            };
            last = error.into();
            if !again {
                return Err(last);
            }
            debug!(agent = stream.hello().agent_id, error = %last, "trying another agent");
        }
        Err(last)
    }
}

impl DialError {
    /// What the failure counts as, unless the agent's stream has counted it already.
    fn failure_reason(&self) -> Option<DialFailureReason> {
        match self {
            Self::NoAgent => Some(DialFailureReason::NoAgent),
            Self::Stream(StreamDialError::AgentLost) => Some(DialFailureReason::BackendClose),
            Self::Stream(StreamDialError::NotSent | StreamDialError::TimedOut) => {
                Some(DialFailureReason::BackendDialTimeout)
            }
            Self::Stream(StreamDialError::Refused(_) | StreamDialError::Abandoned) => None,
        }
    }
}

impl Drop for Unfinished<'_> {
    fn drop(&mut self) {
        if !self.finished {
            let reason = DialFailureReason::FrontendClose;
            self.metrics.dial_failures(reason).increment(1);
        }
    }
}
