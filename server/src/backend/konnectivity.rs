//! The konnectivity tunnel: chooses an agent for each dial, and retries with another agent if the first is
//! gone or silent. A retry is safe because no byte of the client has been sent yet.

use std::sync::Arc;
use std::time::Duration;

use culvert_stream::Dial;
use tokio::time::Instant;
use tracing::info;

use super::registry::Chosen;
use super::{Connection, Registry};
use crate::backend::dial::{ANSWER_TIMEOUT, Attempts, StreamDialError};
use crate::backend::{ClientSeat, DialError, Dialing, Tunnel};
use crate::tunnel::{Health, Peer};

/// The tunnel of a server's agents.
pub(crate) struct Konnectivity {
    registry: Arc<Registry>,
    /// Value of `--backend-dial-timeout`.
    dial_timeout: Option<Duration>,
}

impl Konnectivity {
    /// Creates the tunnel of the registry's agents. With a `dial_timeout`, the tunnel abandons an agent
    /// stream that accepts no packet before the deadline.
    pub(crate) fn new(registry: Arc<Registry>, dial_timeout: Option<Duration>) -> Arc<Self> {
        Arc::new(Self {
            registry,
            dial_timeout,
        })
    }

    async fn try_agents(&self, dial: &Dial, deadline: Instant) -> Result<Connection, DialError> {
        // A retry stays in the scope of the first attempt: another scope may be another network.
        let scope = self.registry.scope(&dial.address);
        let scope = scope.ok_or(DialError::NoAgent)?;
        let mut attempts = Attempts::new(DialError::NoAgent);
        loop {
            let choose = |tried: &[u64]| self.registry.choose(&scope, tried);
            let Chosen { agent, load } = attempts.next(choose, |chosen| chosen.agent.serial())?;
            if let Some(error) = attempts.moved() {
                let (from, to) = (error.peer(), agent.hello().agent_id.as_str());
                info!(from, to, address = dial.address, %error, "dial moved to another agent");
            }
            let has_other =
                || attempts.may_move() && self.registry.has_other(&scope, attempts.tried());
            let limit = match has_other() {
                true => deadline.min(Instant::now() + ANSWER_TIMEOUT),
                false => deadline,
            };
            let silent = async {
                loop {
                    agent.silent().await;
                    if agent.is_gone() {
                        return StreamDialError::AgentLost;
                    }
                    if has_other() {
                        return StreamDialError::TimedOut;
                    }
                }
            };
            let outcome = tokio::select! {
                biased;
                outcome = agent.dial(dial, limit) => outcome,
                error = silent => Err(error),
            };
            let error = match outcome {
                Ok(connection) => return Ok(connection.with_load(load)),
                Err(error) => error,
            };
            // With another agent, the limit is shorter, and this one may only be slow.
            let is_late = Instant::now() >= deadline;
            if error == StreamDialError::NotSent && self.dial_timeout.is_some() && is_late {
                agent.abandon();
            }
            let again = match error {
                StreamDialError::AgentLost
                | StreamDialError::ClientLost
                | StreamDialError::NotSent
                | StreamDialError::TimedOut => Instant::now() < deadline,
                StreamDialError::Refused(_) | StreamDialError::Abandoned => false,
            };
            let error = DialError::from(error).at(&agent.hello().agent_id);
            if !again {
                return Err(error);
            }
            attempts.failed(error);
        }
    }
}

impl Tunnel for Konnectivity {
    fn health(&self) -> Health {
        self.registry.health()
    }

    fn dial<'a>(&'a self, dial: &'a Dial, deadline: Instant) -> Dialing<'a> {
        Box::pin(self.try_agents(dial, deadline))
    }

    fn peers(&self) -> Vec<Peer> {
        self.registry.peers()
    }

    fn seat(&self) -> Option<ClientSeat> {
        self.registry.seat()
    }
}
