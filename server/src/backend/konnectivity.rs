//! The konnectivity tunnel: chooses an agent for each dial, and retries with another agent if the first is
//! gone or silent. A retry is safe because no byte of the client has been sent yet.

use std::sync::Arc;
use std::time::Duration;

use culvert_stream::Dial;
use tokio::time::Instant;
use tracing::debug;

use super::{Connection, Registry};
use crate::backend::dial::{SILENT_AFTER, StreamDialError};
use crate::backend::{DialError, Dialing, Tunnel};
use crate::tunnel::{Health, Peer};

/// Most streams that one dial tries.
const MAX_ATTEMPTS: usize = 3;

/// The tunnel of a server's agents.
pub struct Konnectivity {
    registry: Arc<Registry>,
    /// Value of `--backend-dial-timeout`.
    dial_timeout: Option<Duration>,
}

impl Konnectivity {
    /// Creates the tunnel of the registry's agents. With a `dial_timeout`, the tunnel abandons an agent
    /// stream that accepts no packet before the deadline.
    pub fn new(registry: Arc<Registry>, dial_timeout: Option<Duration>) -> Arc<Self> {
        Arc::new(Self {
            registry,
            dial_timeout,
        })
    }

    async fn try_streams(&self, dial: &Dial, deadline: Instant) -> Result<Connection, DialError> {
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

impl Tunnel for Konnectivity {
    fn health(&self) -> Health {
        self.registry.health()
    }

    fn dial<'a>(&'a self, dial: &'a Dial, deadline: Instant) -> Dialing<'a> {
        Box::pin(self.try_streams(dial, deadline))
    }

    fn peers(&self) -> Vec<Peer> {
        self.registry.peers()
    }

    fn shard(&self) -> Option<usize> {
        self.registry.shard()
    }
}
