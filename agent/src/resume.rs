//! The link to a native server after a break: dials the server again, and moves the link to the new connection; see
//! [`culvert_native::resume`].

use std::ops::{Range, RangeInclusive};
use std::os::fd::{AsFd as _, OwnedFd};
use std::pin::pin;
use std::time::Duration;

use culvert_host::net::congestion::congestion;
use culvert_host::telemetry::log_once::LogOnce;
use culvert_host::tls;
use culvert_native::hello;
use culvert_native::resume::{self, Attached, Base, EXPORTER_LABEL, ResumeAnswer, State};
use futures_util::stream::{FuturesUnordered, StreamExt as _};
use rand::Rng as _;
use tokio::sync::{Notify, Semaphore, watch};
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

/// First pause between two attempts; doubled after each attempt. Attempts overlap, so that a packet that the network drops
/// delays the next attempt by at most the pause.
const FIRST_PAUSE: Duration = Duration::from_millis(125);

/// Longest pause between two attempts while the server may be reachable through the load balancer.
const LONGEST_PAUSE: Duration = Duration::from_secs(1);

/// Longest pause after [`QUICK_ATTEMPTS`]: the server has probably crashed.
const LONGEST_PAUSE_WITHOUT_SERVER: Duration = Duration::from_secs(5);

/// Largest random addition to a pause, as a fraction of the pause.
const JITTER: f64 = 0.2;

/// Longest wait of an attempt for the answer to the request of an earlier attempt. Each request replaces the connection
/// of the request before, so requests must not overlap without need.
const TURN: Duration = Duration::from_secs(2);

/// Number of answers of other servers, for each known server up to the end of [`SERVERS`], after which the pauses become
/// long. With at most five servers and a load balancer that chooses at random, more than 95 % of the agents reach their
/// server earlier.
const QUICK_ATTEMPTS: usize = 3;

/// Numbers of known servers for [`QUICK_ATTEMPTS`]. The answer of another server proves that there are at least two.
const SERVERS: RangeInclusive<usize> = 2..=5;

/// Range of the pause after the answer of another server, in milliseconds.
const QUICK_PAUSE: Range<u64> = 20..50;

/// Largest delay of the first attempt while another server is connected, in milliseconds. The delay spreads the attempts
/// of a fleet: all of its agents lose a crashed server at once.
const LARGEST_DELAY: u64 = 100;

/// The servers of an agent, for an attempt to resume the link to one of them.
pub(crate) struct Known {
    /// Ids of the connected servers.
    pub ids: Vec<String>,
    /// Number of servers, connected or announced.
    pub count: usize,
    /// True if the agent has a working link to another server.
    pub has_other: bool,
}

/// A connection on which the server continues the session.
struct Resumed {
    attached: Attached<Tls>,
    via: Option<Via>,
    congestion: String,
    /// Another handle of the TCP socket.
    socket: Option<OwnedFd>,
}

/// Result of an attempt.
enum Reached {
    /// The server continues the session.
    Resumed(Box<Resumed>),
    /// The server has ended the session.
    Over,
    /// Another server answered.
    Other,
}

/// Reason why the attempts ended.
enum Ended {
    /// The server continues the session.
    Resumed(Box<Resumed>),
    /// The link works again without another connection.
    Recovered,
    /// The server has ended the session.
    Over,
}

/// Times of the attempts.
struct Pace {
    /// Time of the next attempt.
    next: Instant,
    /// Pause after the next attempt.
    pause: Duration,
    /// Number of answers of other servers until the pauses become long.
    quick: usize,
    /// The same number at the start.
    most_quick: usize,
}

/// Keeps a link until the server has ended its session, and returns the reason. Calls `moved` after each change of the
/// state of the link, with the address of a new connection.
pub(crate) async fn keep(
    connector: &Connector,
    server_id: &str,
    link: &ResumableLink,
    known: impl Fn() -> Known,
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
        let attempts = || attempt(connector, server_id, link, known().ids, &turn);
        let pace = Pace::new(&known());
        match reconnect(&mut state, pace, &link.answered, attempts).await {
            Ended::Resumed(resumed) => {
                let via = attach(&mut state, link, *resumed).await;
                metrics.resumes.get(ResumeOutcome::Resumed).increment(1);
                moved(via);
            }
            Ended::Recovered => {
                info!("the link to the server works again");
                moved(None);
            }
            Ended::Over => {
                metrics.resumes.get(ResumeOutcome::Over).increment(1);
                return "the server has ended the session".into();
            }
        }
    }
}

/// Makes attempts until one of them reaches the server, or the link works again. `answered` signals that the server has
/// answered the search.
async fn reconnect<F>(
    state: &mut watch::Receiver<State>,
    mut pace: Pace,
    answered: &Notify,
    attempt: impl Fn() -> F,
) -> Ended
where
    F: Future<Output = Result<Reached, ConnectError>>,
{
    let mut attempts = FuturesUnordered::new();
    let mut failures = LogOnce::default();
    // Created before the wait, so that no signal is lost while another branch runs.
    let mut search = pin!(answered.notified());
    loop {
        let reached = tokio::select! {
            () = sleep_until(pace.next) => {
                attempts.push(attempt());
                pace.started();
                continue;
            }
            () = &mut search => {
                search.set(answered.notified());
                pace.server_answered();
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
            Ok(Reached::Resumed(resumed)) => return Ended::Resumed(resumed),
            Ok(Reached::Over) => return Ended::Over,
            Ok(Reached::Other) => {
                debug!("another server answered the request to resume");
                pace.other_answered();
            }
            Err(error) => {
                let text = error.to_string();
                match failures.failed(&text) {
                    Some(due) => warn!(
                        error = text,
                        attempts = due.attempts,
                        failing_seconds = due.failing_seconds,
                        "cannot resume the link to the server"
                    ),
                    None => debug!(error = text, "still cannot resume the link to the server"),
                }
            }
        }
    }
}

/// Moves the link to a connection, and returns the address of the connection.
async fn attach(
    state: &mut watch::Receiver<State>,
    link: &ResumableLink,
    resumed: Resumed,
) -> Option<Via> {
    // The old connection may work again. The change to the new one then changes no state.
    let is_attached = *state.borrow_and_update() == State::Attached;
    if link.session.attach(resumed.attached).is_err() {
        return std::future::pending().await;
    }
    if let Some(shared) = &link.socket {
        shared.lock().replace(resumed.socket);
    }
    let congestion = resumed.congestion;
    info!(congestion, "the link to the server resumed");
    // The stream of the link reports its state when it has the connection. A connection that is already broken changes
    // the state twice, and the caller sees only the second change.
    if !is_attached && state.changed().await.is_err() {
        return std::future::pending().await;
    }
    resumed.via
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
        let binding = tls::export(tls.tls(), EXPORTER_LABEL);
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
        ResumeAnswer::Resumed(positions) => Reached::Resumed(Box::new(Resumed {
            attached: Attached {
                transport: tls,
                base: Base::Told(positions),
            },
            via,
            congestion,
            socket,
        })),
        ResumeAnswer::Over => Reached::Over,
        ResumeAnswer::Other => Reached::Other,
        ResumeAnswer::Refused(text) => {
            return Err(ConnectError::refused(&text));
        }
    })
}

// === impl Pace ===

impl Pace {
    fn new(known: &Known) -> Self {
        let most_quick = QUICK_ATTEMPTS * known.count.clamp(*SERVERS.start(), *SERVERS.end());
        let delay = match known.has_other {
            true => rand::rng().random_range(0..LARGEST_DELAY),
            false => 0,
        };
        Self {
            next: Instant::now() + Duration::from_millis(delay),
            pause: FIRST_PAUSE,
            quick: most_quick,
            most_quick,
        }
    }

    /// Accounts for the start of an attempt.
    fn started(&mut self) {
        let jitter = 1.0 + rand::rng().random_range(0.0..JITTER);
        self.next = Instant::now() + self.pause.mul_f64(jitter);
        let longest = match self.quick {
            0 => LONGEST_PAUSE_WITHOUT_SERVER,
            _ => LONGEST_PAUSE,
        };
        self.pause = (self.pause * 2).min(longest);
    }

    /// Accounts for the answer of another server.
    fn other_answered(&mut self) {
        self.quick = self.quick.saturating_sub(1);
        if self.quick > 0 {
            self.hurry();
        }
    }

    /// Accounts for an answer of the server to the search: the load balancer knows the server.
    fn server_answered(&mut self) {
        self.quick = self.most_quick;
        self.pause = self.pause.min(LONGEST_PAUSE);
        self.hurry();
    }

    fn hurry(&mut self) {
        let pause = Duration::from_millis(rand::rng().random_range(QUICK_PAUSE));
        self.next = self.next.min(Instant::now() + pause);
    }
}

#[cfg(test)]
mod tests {
    use std::cell::{Cell, RefCell};

    use tokio::time::{sleep, timeout};

    use super::*;

    const SECOND: Duration = Duration::from_secs(1);

    /// Duration of an attempt that a server answers.
    const ANSWER: Duration = Duration::from_millis(15);

    /// Number of runs for statements about probabilities.
    const RUNS: usize = 500;

    fn servers(count: usize) -> Known {
        Known {
            ids: Vec::new(),
            count,
            has_other: count > 1,
        }
    }

    /// Makes attempts whose results are those of `answer` until the time limit. Returns the starts of the attempts, and the
    /// time at which the server answered.
    async fn run(
        known: &Known,
        limit: Duration,
        answered: &Notify,
        answer: impl Fn() -> Result<Reached, ConnectError>,
    ) -> (Vec<Duration>, Option<Duration>) {
        let (_sender, mut state) = watch::channel(State::Away);
        let (begin, starts) = (Instant::now(), RefCell::default());
        let attempt = || {
            let starts: &RefCell<Vec<_>> = &starts;
            starts.borrow_mut().push(begin.elapsed());
            async {
                sleep(ANSWER).await;
                answer()
            }
        };
        let ended = timeout(
            limit,
            reconnect(&mut state, Pace::new(known), answered, attempt),
        );
        let found = ended.await.ok().map(|_| begin.elapsed());
        (starts.take(), found)
    }

    fn within(starts: &[Duration], limit: Duration) -> usize {
        starts.iter().filter(|start| **start < limit).count()
    }

    #[tokio::test(start_paused = true)]
    async fn crashed_server_costs_few_attempts_at_the_others() {
        for (count, quick) in [(1, 6), (2, 6), (3, 9), (5, 15), (1000, 15)] {
            for _ in 0..RUNS / 10 {
                let never = Notify::new();
                let other = || Ok(Reached::Other);
                let (starts, _) = run(&servers(count), 30 * SECOND, &never, other).await;
                let gaps = starts
                    .windows(2)
                    .map(|pair| pair.iter().max().zip(pair.iter().min()));
                let gaps: Vec<_> = gaps.flatten().map(|(end, start)| *end - *start).collect();
                let shortest = gaps.iter().min().copied().unwrap_or_default();
                assert!(shortest >= ANSWER + Duration::from_millis(20), "{gaps:?}");
                let first = starts.first().copied().unwrap_or_default();
                assert!(first < Duration::from_millis(100) * u32::from(count > 1) + ANSWER);
                let early = within(&starts, SECOND);
                assert!((quick..=quick + 1).contains(&early), "{starts:?}");
                assert!(starts.len() <= quick + 9, "{starts:?}");
                assert!(
                    gaps.iter().all(|gap| *gap <= 6 * SECOND + ANSWER),
                    "{gaps:?}"
                );
            }
        }
    }

    /// Returns the number of runs in which the link to one of `count` servers resumes within a second after the first answer
    /// behind a load balancer that chooses at random. Attempts fail during the outage.
    async fn resumed_in_time(count: usize, outage: Duration) -> usize {
        let mut in_time = 0;
        for _ in 0..RUNS {
            let (begin, first) = (Instant::now(), Cell::new(None));
            let answer = || {
                if begin.elapsed() < outage {
                    return Err(ConnectError::Unreachable("refused".into()));
                }
                first.set(first.get().or(Some(begin.elapsed())));
                Ok(match rand::rng().random_range(0..count) {
                    0 => Reached::Over,
                    _ => Reached::Other,
                })
            };
            let (_, found) = run(&servers(count), 60 * SECOND, &Notify::new(), answer).await;
            let end = first.get().unwrap_or_default() + SECOND;
            in_time += usize::from(found.is_some_and(|found| found <= end));
        }
        in_time
    }

    #[tokio::test(start_paused = true)]
    async fn server_behind_a_random_load_balancer_is_reached_within_a_second() {
        for outage in [Duration::ZERO, 3 * SECOND] {
            for count in [1, 2, 3, 5] {
                let in_time = resumed_in_time(count, outage).await;
                assert!(in_time >= RUNS * 9 / 10, "{count} servers: {in_time}");
            }
        }
    }

    #[tokio::test(start_paused = true)]
    async fn refused_attempts_keep_the_short_pauses() {
        let refused = || Err(ConnectError::Unreachable("refused".into()));
        let (starts, _) = run(&servers(3), 30 * SECOND, &Notify::new(), refused).await;
        assert!(within(&starts, SECOND) <= 4, "{starts:?}");
        assert!((26..=33).contains(&starts.len()), "{starts:?}");
    }

    #[tokio::test(start_paused = true)]
    async fn answer_of_the_server_to_the_search_makes_the_attempts_quick_again() {
        let (known, answered) = (servers(3), Notify::new());
        let resuming = run(&known, 30 * SECOND, &answered, || Ok(Reached::Other));
        let search = async {
            sleep(20 * SECOND).await;
            answered.notify_waiters();
        };
        let ((starts, _), ()) = tokio::join!(resuming, search);
        let quick = within(&starts, 21 * SECOND) - within(&starts, 20 * SECOND);
        assert!((8..=10).contains(&quick), "{starts:?}");
    }
}
