//! The link to a native server after a break: dials the server again, and moves the link to the new connection; see
//! [`culvert_native::resume`].

use std::os::fd::{AsFd as _, OwnedFd};
use std::time::Duration;

use culvert_host::net::congestion::congestion;
use culvert_host::telemetry::log_once::LogOnce;
use culvert_host::tls;
use culvert_native::hello;
use culvert_native::resume::{self, Attached, Base, EXPORTER_LABEL, ResumeAnswer, State};
use futures_util::stream::{FuturesUnordered, StreamExt as _};
use rand::Rng as _;
use tokio::sync::{Semaphore, watch};
use tokio::time::{Instant, sleep_until, timeout_at};
use tracing::{debug, info, warn};

use crate::addresses::Via;
use crate::connect::{ConnectError, Connector};
use crate::introduction::metadata;
use crate::link::{ResumableLink, Tls};
use crate::metrics::ResumeOutcome;

/// Longest duration of one attempt. Shorter than the attempts to find servers, so that the number of attempts in
/// progress has a bound.
const ATTEMPT_TIMEOUT: Duration = Duration::from_secs(8);

/// First pause between two attempts; doubled after each attempt, up to [`LONGEST_PAUSE`]. Attempts overlap, so that a
/// packet that the network drops delays the next attempt by at most the pause.
const FIRST_PAUSE: Duration = Duration::from_millis(125);

/// Longest pause between two attempts.
const LONGEST_PAUSE: Duration = Duration::from_secs(1);

/// Largest random addition to a pause, as a fraction of the pause.
const JITTER: f64 = 0.2;

/// Longest wait of an attempt for the answer to the request of an earlier attempt. Each request replaces the connection
/// of the request before, so requests must not overlap without need.
const TURN: Duration = Duration::from_secs(2);

/// Number of attempts without a pause after answers of other servers: a load balancer chooses the server.
const QUICK_ATTEMPTS: u32 = 8;

/// Result of an attempt.
enum Reached {
    /// The server continues the session.
    Resumed {
        attached: Box<Attached<Tls>>,
        via: Option<Via>,
        congestion: String,
        /// Another handle of the TCP socket.
        socket: Option<OwnedFd>,
    },
    /// The server has ended the session.
    Over,
    /// Another server answered.
    Other,
}

/// Reason why the attempts ended.
enum Ended {
    /// The link has another connection.
    Moved(Option<Via>),
    /// The link works again without another connection.
    Recovered,
    /// The link has ended.
    Over(String),
}

/// Keeps a link until the server has ended its session, and returns the reason. Calls `moved` after each change of the
/// state of the link, with the address of a new connection.
pub(crate) async fn keep(
    connector: &Connector,
    server_id: &str,
    link: &ResumableLink,
    connected: impl Fn() -> Vec<String>,
    moved: impl Fn(Option<Via>),
) -> String {
    let mut state = link.session.state();
    let metrics = connector.metrics();
    loop {
        let broken = state.wait_for(|state| *state != State::Attached).await;
        match broken.map(|state| *state) {
            Ok(State::Away) => info!("the link to the server broke; resuming"),
            Ok(State::Silent) => info!("the server acknowledges nothing; dialing the server again"),
            // The stream of the link reports the reason.
            Ok(State::Attached | State::Ended) | Err(_) => return std::future::pending().await,
        }
        moved(None);
        let turn = Semaphore::new(1);
        let attempts = || attempt(connector, server_id, link, connected(), &turn);
        match reconnect(&mut state, link, attempts).await {
            Ended::Moved(via) => {
                metrics.resumes.get(ResumeOutcome::Resumed).increment(1);
                moved(via);
            }
            Ended::Recovered => {
                info!("the link to the server works again");
                moved(None);
            }
            Ended::Over(reason) => {
                metrics.resumes.get(ResumeOutcome::Over).increment(1);
                return reason;
            }
        }
    }
}

/// Makes attempts until the link has a connection that works.
async fn reconnect<F>(
    state: &mut watch::Receiver<State>,
    link: &ResumableLink,
    attempt: impl Fn() -> F,
) -> Ended
where
    F: Future<Output = Result<Reached, ConnectError>>,
{
    let mut attempts = FuturesUnordered::new();
    let (mut next, mut pause, mut quick) = (Instant::now(), FIRST_PAUSE, QUICK_ATTEMPTS);
    let mut failures = LogOnce::default();
    loop {
        let reached = tokio::select! {
            () = sleep_until(next) => {
                attempts.push(attempt());
                let jitter = 1.0 + rand::rng().random_range(0.0..JITTER);
                next = Instant::now() + pause.mul_f64(jitter);
                pause = (pause * 2).min(LONGEST_PAUSE);
                continue;
            }
            Some(reached) = attempts.next() => reached,
            now = settled(state) => {
                return match now {
                    Some(State::Attached) => Ended::Recovered,
                    _ => std::future::pending().await,
                };
            }
        };
        match reached {
            Ok(Reached::Resumed {
                attached,
                via,
                congestion,
                socket,
            }) => {
                // The old connection may work again. The change to the new one then changes no state.
                let is_attached = *state.borrow_and_update() == State::Attached;
                if link.session.attach(*attached).is_err() {
                    return std::future::pending().await;
                }
                if let Some(shared) = &link.socket {
                    shared.lock().replace(socket);
                }
                info!(congestion, "the link to the server resumed");
                // The stream of the link reports its state when it has the connection. A connection that is already
                // broken changes the state twice, and the caller sees only the second change.
                if !is_attached && state.changed().await.is_err() {
                    return std::future::pending().await;
                }
                return Ended::Moved(via);
            }
            Ok(Reached::Over) => {
                return Ended::Over("the server has ended the session".into());
            }
            Ok(Reached::Other) => {
                debug!("another server answered the request to resume");
                if quick > 0 {
                    quick -= 1;
                    next = Instant::now();
                }
            }
            Err(error) => {
                let text = error.to_string();
                match failures.is_new(&text) {
                    true => warn!(error = text, "cannot resume the link to the server"),
                    false => debug!(error = text, "still cannot resume the link to the server"),
                }
            }
        }
    }
}

/// Waits until the link works or has ended, and returns its state.
async fn settled(state: &mut watch::Receiver<State>) -> Option<State> {
    let is_settled = |state: &State| matches!(state, State::Attached | State::Ended);
    state.wait_for(is_settled).await.ok().map(|state| *state)
}

/// Makes one attempt; each step ends at the deadline of the attempt. `connected` has the ids of the connected servers: a
/// connected server of an older version then does not take the request for a new agent.
async fn attempt(
    connector: &Connector,
    server_id: &str,
    link: &ResumableLink,
    connected: Vec<String>,
    turn: &Semaphore,
) -> Result<Reached, ConnectError> {
    let deadline = Instant::now() + ATTEMPT_TIMEOUT;
    let metadata = metadata(connector.config(), deadline).await?;
    let (tcp, mut via) = connector.tcp(deadline).await?;
    let congestion = congestion(&tcp);
    let socket = link.socket.as_ref();
    let socket = socket.and_then(|_| tcp.as_fd().try_clone_to_owned().ok());
    let answered = async {
        let mut tls = connector.handshake(tcp, deadline).await?;
        let binding = tls::export(tls.get_ref().1, EXPORTER_LABEL);
        let Some(binding) = binding.filter(|_| connector.is_native(&tls)) else {
            // Not a server that could have given the ticket.
            return Ok((tls, ResumeAnswer::Other));
        };
        let _turn = timeout_at(deadline.min(Instant::now() + TURN), turn.acquire()).await;
        // A request replaces the connection of an earlier request, so no request is sent too late for its answer.
        if Instant::now() >= deadline {
            return Err(ConnectError::TimedOut(
                "waiting for an earlier request to resume",
            ));
        }
        let mut headers = metadata.into_headers();
        hello::add_connected(&mut headers, &connected);
        if let Some(process) = connector.process() {
            process.add_to(&mut headers);
        }
        let received = link.session.received();
        resume::add_request(&mut headers, &link.ticket, server_id, &binding, received);
        let answered = timeout_at(deadline, resume::resume(&mut tls, &headers)).await;
        let answer =
            answered.map_err(|_| ConnectError::TimedOut("waiting for the server's answer"))??;
        Ok((tls, answer))
    };
    let answered = answered.await;
    if let Some(via) = &mut via {
        via.ended(answered.is_ok());
    }
    let (tls, answer) = answered?;
    Ok(match answer {
        ResumeAnswer::Resumed(positions) => Reached::Resumed {
            attached: Box::new(Attached {
                transport: tls,
                base: Base::Told(positions),
            }),
            via,
            congestion,
            socket,
        },
        ResumeAnswer::Over => Reached::Over,
        ResumeAnswer::Other => Reached::Other,
        ResumeAnswer::Refused(text) => {
            return Err(ConnectError::refused(&text));
        }
    })
}
