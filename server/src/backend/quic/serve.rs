//! The way from a QUIC connection to the second link of an agent.

use std::sync::Arc;
use std::time::Duration;

use culvert_host::net::admission::Candidate;
use culvert_host::net::loss::{Loss, LossMeter, Packets};
use culvert_host::telemetry::metrics::GaugeGuard;
use culvert_native::hello::{self, HelloError, NO_SESSION};
use culvert_native::quic::TRIAL_BYTES;
use culvert_native::quic::endpoint::ServerEndpoint;
use culvert_native::quic::link::Link;
use culvert_native::quic::words::{Preferred, Word};
use culvert_native::window::OPENER_HELD_BYTES;
use culvert_stream::CloseReason;
use quinn::{Connection, Incoming, RecvStream, SendStream};
use rustls::pki_types::CertificateDer;
use tokio::time::{Instant, sleep, timeout};
use tonic::metadata::MetadataMap;
use tracing::{Instrument, debug, info, info_span};

use crate::backend::agent::Hello;
use crate::backend::identity::AgentRefusal;
use crate::backend::second_link::{ConnectionPlace, SecondLink};
use crate::backend::service::Agents;
use crate::listener::ListenerContext;
use crate::metrics::RejectReason;

/// Time for a refused agent to read the reason.
const REFUSAL_LINGER: Duration = Duration::from_secs(2);

/// Time for the trial of a new link.
const TRIAL_TIMEOUT: Duration = Duration::from_secs(30);

/// Interval between two looks at the streams of a link whose agent has no TCP connection anymore.
const RETIRED_CHECK: Duration = Duration::from_secs(1);

/// Interval between two looks at the loss of a link.
const LOSS_CHECK: Duration = Duration::from_secs(5);

/// Reason why no link was added.
#[derive(Debug, thiserror::Error)]
enum LinkRefusal {
    /// The peer did not complete an introduction.
    #[error(transparent)]
    Hello(#[from] HelloError),
    /// The QUIC connection ended.
    #[error(transparent)]
    Lost(#[from] quinn::ConnectionError),
    /// The agent was refused.
    #[error("{refusal}")]
    Agent {
        /// Id of the agent, as in [`Hello`].
        agent_id: String,
        /// Reason that the agent has received.
        refusal: AgentRefusal,
    },
    /// The session does not exist here: a load balancer has chosen another server than for TCP.
    #[error("{NO_SESSION}; it connects over TCP first")]
    NoSession,
    /// Another agent began the session, or the agent's token or certificate has changed.
    #[error(
        "the identity of the agent differs from the identity of its TCP connection; after a change of token or certificate, the agent has to connect over TCP again"
    )]
    NotItsSession {
        /// Id of the agent.
        agent_id: String,
    },
    /// The agent has too many QUIC connections.
    #[error("the agent has too many QUIC connections; it waits for the end of earlier ones")]
    TooMany {
        /// Id of the agent.
        agent_id: String,
    },
}

impl LinkRefusal {
    /// Returns the id of the refused agent, and the reason for the metric. Returns `None` if the server refused no agent.
    fn refused(&self) -> Option<(&str, RejectReason)> {
        match self {
            Self::Agent { agent_id, refusal } => Some((agent_id.as_str(), refusal.reason())),
            Self::NotItsSession { agent_id } => {
                Some((agent_id.as_str(), RejectReason::Unauthenticated))
            }
            Self::TooMany { agent_id } => {
                Some((agent_id.as_str(), RejectReason::TooManyConnections))
            }
            Self::Hello(_) | Self::Lost(_) | Self::NoSession => None,
        }
    }
}

impl From<std::io::Error> for LinkRefusal {
    fn from(error: std::io::Error) -> Self {
        Self::Hello(error.into())
    }
}

impl Agents {
    /// Serves a QUIC connection until it ends.
    pub(crate) async fn serve_quic(
        self,
        context: &ListenerContext,
        endpoint: &ServerEndpoint,
        incoming: Incoming,
    ) {
        let remote = incoming.remote_address();
        let peer = remote.to_string();
        // The endpoint ignores all new peers while too many have no decision, so no peer waits for a slot here: the agent
        // repeats its first packet.
        let candidate = match context.admission.try_enter(remote.ip(), Instant::now()) {
            Ok(candidate) => candidate,
            Err(why) => {
                incoming.ignore();
                return context.refuse(why, &peer);
            }
        };
        let connection = handshake(context, endpoint, incoming, &peer, &candidate);
        let Some(connection) = connection.await else {
            return;
        };
        let identity = connection.peer_identity();
        let certificates =
            identity.and_then(|any| any.downcast::<Vec<CertificateDer<'static>>>().ok());
        let certificates = certificates.as_deref().map(Vec::as_slice);
        let agents = self.of_peer(remote, certificates);
        let introduced = tokio::select! {
            introduced = candidate.run(agents.introduce_over_quic(&connection)) => introduced,
            () = context.shutdown.cancelled() => return,
        };
        let (second, _place, agent_id, control) = match introduced {
            Ok(Ok(introduced)) => introduced,
            Ok(Err(why)) => {
                match (&why, why.refused()) {
                    (_, Some((agent, reason))) => agents.reject(agent, reason, &why.to_string()),
                    (LinkRefusal::Hello(HelloError::Io(_)) | LinkRefusal::Lost(_), None) => {
                        debug!(peer, %why, "the agent left before its introduction over QUIC");
                        return;
                    }
                    (LinkRefusal::Hello(_), None) => {
                        context.reject(RejectReason::Garbage, &peer, &why.to_string());
                    }
                    (_, None) => debug!(peer, %why, "no QUIC link"),
                }
                // The agent closes the connection when it has read the reason.
                return linger(&candidate, connection.closed()).await;
            }
            Err(why) => return context.refuse(why, &peer),
        };
        candidate.admit();
        endpoint.admit(&connection);
        let span = info_span!("agent", agent = agent_id, session = "QUIC");
        let carried = agents.carry_quic(context, &second, connection, control);
        carried.instrument(span).await;
    }

    /// Answers the introduction of an agent on the connection's only stream.
    async fn introduce_over_quic(
        &self,
        connection: &Connection,
    ) -> Result<
        (
            Arc<SecondLink>,
            ConnectionPlace,
            String,
            (SendStream, RecvStream),
        ),
        LinkRefusal,
    > {
        let (mut send, mut receive) = connection.accept_bi().await?;
        let headers = hello::read(&mut receive).await?;
        let second = self.second_links.as_ref().and_then(|all| all.of(&headers));
        let metadata = MetadataMap::from_headers(headers);
        let mut hello = match Hello::from_metadata(&metadata) {
            Ok(hello) => hello,
            Err(text) => {
                hello::refuse(&mut send, &text).await?;
                return Err(HelloError::Malformed(text).into());
            }
        };
        let agent_id = |hello: &Hello| hello.agent_id.clone();
        // Before the review of the token, so that agents of lost sessions cost little.
        let checked = match second {
            None => Err(LinkRefusal::NoSession),
            Some(second) => match self.authenticate(&metadata, &mut hello).await {
                Ok(identity)
                    // A process has one place, so the introduction over QUIC does not repeat it.
                    if self.owner(&hello, identity.clone(), second.owner.process)
                        == second.owner =>
                {
                    match second.connection() {
                        Some(place) => Ok((second, place)),
                        None => Err(LinkRefusal::TooMany {
                            agent_id: agent_id(&hello),
                        }),
                    }
                }
                Ok(_) => Err(LinkRefusal::NotItsSession {
                    agent_id: agent_id(&hello),
                }),
                Err(refusal) => Err(LinkRefusal::Agent {
                    agent_id: agent_id(&hello),
                    refusal,
                }),
            },
        };
        match checked {
            Ok((second, place)) => {
                let answer = self.answer(*self.announced.borrow())?;
                hello::accept(&mut send, &answer).await?;
                Ok((second, place, hello.agent_id, (send, receive)))
            }
            Err(refusal) => {
                hello::refuse(&mut send, &refusal.to_string()).await?;
                Err(refusal)
            }
        }
    }

    /// Carries the streams of a link until it ends. A link whose agent has no TCP connection anymore ends with its last
    /// stream.
    async fn carry_quic(
        &self,
        context: &ListenerContext,
        second: &Arc<SecondLink>,
        connection: Connection,
        mut control: (SendStream, RecvStream),
    ) {
        let (link, words) = Link::new(connection, OPENER_HELD_BYTES, CloseReason::AgentLost);
        let trial = async {
            let mut bytes = vec![0; TRIAL_BYTES];
            control.1.read_exact(&mut bytes).await.ok()?;
            control.0.write_all(&bytes).await.ok()
        };
        if timeout(TRIAL_TIMEOUT, trial).await.ok().flatten().is_none() {
            debug!("the agent left during the trial of its QUIC link");
            return link.close("the trial failed");
        }
        let _counted = GaugeGuard::new(&self.metrics.quic_links);
        second.set(link.clone());
        info!("the agent has a QUIC link");
        let on_word = |word| {
            if let Word::Prefer(preferred) = word
                && second.prefer(&link, preferred == Preferred::Quic)
            {
                info!(?preferred, "the agent prefers another link for new dials");
            }
        };
        let retired = async {
            second.retired.cancelled().await;
            let _listed = self.registry.retire_link(&second.owner.agent_id, &link);
            while link.open() > 0 {
                sleep(RETIRED_CHECK).await;
            }
        };
        let cause = tokio::select! {
            cause = link.run(control, words, on_word, |_| {}) => cause,
            cause = report_loss(&link) => cause,
            () = retired => "the agent's TCP connection has ended".to_owned(),
            () = context.shutdown.cancelled() => "this server is stopping".to_owned(),
        };
        second.clear(&link);
        let open = link.open();
        link.close(&cause);
        info!(reason = cause, open, "the QUIC link of the agent has ended");
    }
}

/// Tells the agent if many packets of this server are lost: the agent knows only the loss of its own packets. Never ends.
async fn report_loss(link: &Link) -> String {
    let mut meter = LossMeter::default();
    loop {
        let path = link.path();
        let packets = Packets::of_sender(path.sent_packets, path.lost_packets);
        if meter.sample(Instant::now(), packets) == Loss::Heavy {
            link.send(Word::Slow);
        }
        sleep(LOSS_CHECK).await;
    }
}

/// Waits until a refused agent closes its connection. Ends early if a newer peer gets the agent's slot.
async fn linger<T>(candidate: &Candidate, closed: impl Future<Output = T>) {
    let _ = candidate.run(timeout(REFUSAL_LINGER, closed)).await;
}

/// Runs the handshake. Returns `None` after a failure, which is counted and logged.
async fn handshake(
    context: &ListenerContext,
    endpoint: &ServerEndpoint,
    incoming: Incoming,
    peer: &str,
    candidate: &Candidate,
) -> Option<Connection> {
    let failed = |why: String| {
        context.reject(RejectReason::HandshakeFailed, peer, &why);
        None
    };
    let config = match endpoint.config(&context.tls.as_ref()?.get()) {
        Ok(config) => config,
        Err(error) => return failed(error.to_string()),
    };
    let connecting = match incoming.accept_with(config) {
        Ok(connecting) => connecting,
        Err(error) => return failed(error.to_string()),
    };
    let connected = tokio::select! {
        connected = candidate.run(connecting) => connected,
        () = context.shutdown.cancelled() => return None,
    };
    match connected {
        Ok(Ok(connection)) => Some(connection),
        Ok(Err(error)) => failed(error.to_string()),
        Err(why) => {
            context.refuse(why, peer);
            None
        }
    }
}

#[cfg(test)]
mod tests {
    #![allow(clippy::unwrap_used)]

    use std::future::pending;

    use culvert_host::net::admission::{Admission, AdmissionLimits};

    use super::*;
    use crate::listener::ADMISSION;

    #[tokio::test(start_paused = true)]
    async fn displaced_peer_gets_no_time_to_read_its_refusal() {
        let admission = Admission::new(AdmissionLimits {
            peers: 1,
            ..ADMISSION
        });
        let enter = |host: u8| {
            let address = [192, 0, 2, host].into();
            admission.try_enter(address, Instant::now()).unwrap()
        };
        let refused = enter(1);
        let started = Instant::now();
        linger(&refused, pending::<()>()).await;
        assert_eq!(started.elapsed(), REFUSAL_LINGER);
        let _newer = enter(2);
        let displaced = Instant::now();
        linger(&refused, pending::<()>()).await;
        assert_eq!(displaced.elapsed(), Duration::ZERO);
    }
}
