//! The driver of a server's switch: processes requests and changes of the mode file, checks the tunnels
//! while a switch is in progress, sets routes, saves the state, and logs.

use std::sync::Arc;
use std::time::Duration;

use culvert_host::file_follower::{FileFollower, Outcome, SLOW_READ, read_in_background, too_slow};
use futures_util::future::{BoxFuture, OptionFuture};
use parking_lot::Mutex;
use tokio::sync::{mpsc, oneshot};
use tokio::task::JoinHandle;
use tokio::time::{Instant, interval, sleep_until, timeout};
use tokio_util::sync::CancellationToken;
use tracing::{error, info, warn};

use super::machine::{Event, Phase, Switch};
use super::start::{Start, StartError};
use super::state_file::{Clocks, Saved, StateFile};
use super::status::{Progress, Status};
use super::{SetBy, Unavailable, mode_file};
use crate::metrics::ServerMetrics;
use crate::router::Router;
use crate::tunnel::Mode;

/// Interval between checks of the tunnels while a switch is in progress.
const TICK: Duration = Duration::from_millis(100);

/// Interval between checks of the mode file. Two checks must see a change before the change takes effect.
const POLL: Duration = Duration::from_millis(200);

/// Pause after a state that could not be saved, before the same state is saved again.
const SAVE_PAUSE: Duration = Duration::from_secs(5);

/// Time for the volume of the state file to accept a state, while the task of the switch waits. A longer write goes on in the
/// background.
const SAVE_LIMIT: Duration = Duration::from_secs(5);

/// Maximum number of waiting requests. A request takes as long as writing the state file.
const WAITING_REQUESTS: usize = 16;

/// Handle of a server's switch.
#[derive(Clone)]
pub(crate) struct Switcher {
    requests: mpsc::Sender<Command>,
    shown: Arc<Mutex<Shown>>,
    router: Arc<Router>,
    /// Congestion control of agents' connections, for the status.
    pub(crate) link_congestion: Option<Arc<str>>,
    /// Value of `--server-id`, for the status.
    pub(crate) server_id: Option<Arc<str>>,
}

/// Reason for refusing a request.
#[derive(Clone, Copy, Debug, PartialEq, Eq, thiserror::Error)]
pub(crate) enum Refusal {
    /// The server does not have the tunnel.
    #[error(transparent)]
    Unavailable(#[from] Unavailable),
    /// The server is stopping.
    #[error("this server is stopping")]
    Stopping,
}

struct Command {
    mode: Mode,
    drain: Option<Duration>,
    answer: oneshot::Sender<Result<(), Unavailable>>,
}

/// State of the switch for the status.
struct Shown {
    mode: Mode,
    set_by: SetBy,
    phase: Phase,
    last: Option<Duration>,
    /// Set while the state cannot be saved.
    state_problem: Option<String>,
    /// Set after a start without the saved state, until the next request.
    lost: Option<String>,
    /// Set while the mode file cannot be read.
    unreadable: Option<String>,
    /// Set while the mode file has no usable mode.
    wrong: Option<String>,
}

/// The task that runs the switch.
pub(crate) struct Driver {
    machine: Switch,
    set_by: SetBy,
    flag: Mode,
    file: Option<Mode>,
    /// `None` during a check.
    mode_file: Option<FileFollower>,
    /// The check of the mode file in progress.
    checking: Option<BoxFuture<'static, Checked>>,
    state: Option<StateFile>,
    /// State saved last, without its times.
    saved: Option<Essence>,
    /// State that could not be saved, and the time of the attempt.
    unsaved: Option<(Essence, Instant)>,
    /// An attempt to save that has passed its limit, and its state.
    saving: Option<(JoinHandle<Result<(), String>>, Essence)>,
    requests: mpsc::Receiver<Command>,
    /// Keeps `requests` open without any [`Switcher`]; the task still follows the file.
    _sender: mpsc::Sender<Command>,
    shown: Arc<Mutex<Shown>>,
    router: Arc<Router>,
    metrics: Arc<ServerMetrics>,
}

/// Result of a check of the mode file, and true if the check was slow.
type Checked = ((Outcome, FileFollower), bool);

/// State without its times.
type Essence = (Mode, SetBy, Option<Mode>, Phase);

/// Sets the mode and the route to start with.
///
/// # Errors
/// Fails if this server does not have the tunnel of the mode.
pub(crate) fn start(
    mut start: Start,
    router: Arc<Router>,
    metrics: Arc<ServerMetrics>,
) -> Result<(Switcher, Driver), StartError> {
    let (machine, set_by) = start.machine(&router.view(), Clocks::read())?;
    router.set_route(machine.route());
    metrics.set_tunnel_mode(machine.mode());
    let shown = Arc::new(Mutex::new(Shown {
        mode: machine.mode(),
        set_by,
        phase: machine.phase(),
        last: None,
        state_problem: None,
        lost: start.lost,
        unreadable: start.unreadable,
        wrong: start.wrong.map(|wrong| wrong.to_string()),
    }));
    let (sender, requests) = mpsc::channel(WAITING_REQUESTS);
    let switcher = Switcher {
        requests: sender.clone(),
        shown: shown.clone(),
        router: router.clone(),
        link_congestion: None,
        server_id: None,
    };
    let driver = Driver {
        machine,
        set_by,
        flag: start.settings.mode,
        file: start.file,
        mode_file: start.mode_file,
        checking: None,
        state: start.state,
        saved: None,
        unsaved: None,
        saving: None,
        requests,
        _sender: sender,
        shown,
        router,
        metrics,
    };
    Ok((switcher, driver))
}

// === impl Switcher ===

impl Switcher {
    /// Requests a mode. Once the request is accepted, the mode is saved, and new dials use the mode's
    /// tunnel if the tunnel has a healthy peer.
    ///
    /// # Errors
    /// Returns [`Refusal`]; nothing has changed then.
    pub(crate) async fn request(&self, mode: Mode, drain: Option<Duration>) -> Result<(), Refusal> {
        let (answer, answered) = oneshot::channel();
        let command = Command {
            mode,
            drain,
            answer,
        };
        let sent = self.requests.send(command).await;
        sent.map_err(|_| Refusal::Stopping)?;
        let taken = answered.await.map_err(|_| Refusal::Stopping)?;
        Ok(taken?)
    }

    /// Returns the status of the tunnels and of the switch.
    pub(crate) fn status(&self) -> Status {
        let tunnels = self.router.tunnels();
        let shown = self.shown.lock();
        let route = self.router.route();
        let target = shown.mode.tunnel();
        let since = |since: Instant| since.elapsed().as_secs_f64();
        let switch = match shown.phase {
            Phase::Settled => Progress::Settled,
            Phase::Waiting { since: began, .. } => Progress::Waiting {
                tunnel: target,
                seconds: since(began),
            },
            Phase::Draining {
                deadline,
                since: began,
                ..
            } => {
                let old = tunnels.iter().find(|status| status.tunnel != target);
                Progress::Draining {
                    tunnel: target.other(),
                    seconds: since(began),
                    left: old.map_or(0, |old| old.connections + old.dials),
                    seconds_left: deadline
                        .saturating_duration_since(Instant::now())
                        .as_secs_f64(),
                }
            }
        };
        let second = route.second();
        let second = second.filter(|kind| tunnels.iter().any(|status| status.tunnel == *kind));
        Status {
            link_congestion: self.link_congestion.as_deref().map(str::to_owned),
            draining: self.router.is_draining(),
            server_id: self.server_id.as_deref().map(str::to_owned),
            version: Some(env!("CARGO_PKG_VERSION").to_owned()),
            mode: shown.mode,
            set_by: shown.set_by,
            new_dials: [Some(route.first), second].into_iter().flatten().collect(),
            switch,
            tunnels,
            last_switch_seconds: shown.last.map(|took| took.as_secs_f64()),
            problems: shown.problems().cloned().collect(),
            unsaved: shown.state_problem.is_some(),
        }
    }
}

// === impl Shown ===

impl Shown {
    fn problems(&self) -> impl Iterator<Item = &String> {
        // Content that was read earlier does not count while the file cannot be read.
        let wrong = self.wrong.as_ref().filter(|_| self.unreadable.is_none());
        let others = [&self.state_problem, &self.lost, &self.unreadable];
        others.into_iter().flatten().chain(wrong)
    }

    fn set_unreadable(&mut self, why: String) {
        if self.unreadable.as_ref() != Some(&why) {
            log_problem(&why);
            self.unreadable = Some(why);
        }
    }
}

// === impl Driver ===

impl Driver {
    /// Runs until `shutdown`.
    pub(crate) async fn run(mut self, shutdown: CancellationToken) {
        let mut poll = interval(POLL);
        let has_file = self.mode_file.is_some();
        loop {
            self.advance().await;
            let look_again = self.look_again();
            tokio::select! {
                Some(command) = self.requests.recv() => self.take(command).await,
                // During a slow check, a tick updates the metric of problems.
                _ = poll.tick(), if has_file => self.check_mode_file(),
                Some(checked) = OptionFuture::from(self.checking.as_mut()) => self.take_mode_file(checked),
                () = sleep_until(look_again.unwrap_or_else(Instant::now)), if look_again.is_some() => {}
                () = shutdown.cancelled() => return,
            }
        }
    }

    fn look_again(&self) -> Option<Instant> {
        if self.machine.phase() == Phase::Settled {
            return self.unsaved.map(|(_, at)| at + SAVE_PAUSE);
        }
        let tick = Instant::now() + TICK;
        let timeout = self.machine.poll_timeout();
        Some(timeout.map_or(tick, |timeout| timeout.min(tick)))
    }

    async fn take(&mut self, command: Command) {
        let outcome = self.request(command.mode, command.drain, SetBy::Switch);
        if outcome.is_ok() {
            self.advance().await;
        }
        // A requester that no longer waits finds the outcome in the status.
        let _ = command.answer.send(outcome);
    }

    fn request(
        &mut self,
        mode: Mode,
        drain: Option<Duration>,
        set_by: SetBy,
    ) -> Result<(), Unavailable> {
        let view = self.router.view();
        let outcome = self.machine.request(mode, drain, Instant::now(), &view);
        match &outcome {
            Ok(()) => {
                self.set_by = set_by;
                self.shown.lock().lost = None;
            }
            Err(why) => warn!(set_by = set_by.name(), "not switched: {why}"),
        }
        outcome
    }

    /// Begins a check of the mode file, unless a check is in progress.
    fn check_mode_file(&mut self) {
        let Some(mut follower) = self.mode_file.take() else {
            return;
        };
        let why = too_slow(follower.path().display(), SLOW_READ);
        let shown = self.shown.clone();
        let is_slow = move || shown.lock().set_unreadable(why);
        let check = move || (follower.check(), follower);
        self.checking = Some(Box::pin(read_in_background(check, is_slow)));
    }

    /// Ends a check of the mode file. An invalid file does not change the mode.
    fn take_mode_file(&mut self, ((outcome, follower), was_slow): Checked) {
        match outcome {
            // The next check decides if the file can be read again.
            Outcome::Same if was_slow => {}
            Outcome::Same => self.shown.lock().unreadable = None,
            Outcome::Unreadable { why, .. } => self.shown.lock().set_unreadable(why),
            Outcome::Changed => {
                let path = follower.path().display().to_string();
                let parsed = mode_file::parse(follower.text());
                let wrong = parsed.and_then(|mode| self.follow(mode)).err();
                let wrong = wrong.map(|why| format!("{path}: {why}"));
                let mut shown = self.shown.lock();
                shown.unreadable = None;
                if let Some(why) = &wrong {
                    log_problem(why);
                }
                shown.wrong = wrong;
            }
        }
        self.checking = None;
        self.mode_file = Some(follower);
    }

    /// Requests the mode of the file. A rewritten file with the same mode does not undo a switch.
    fn follow(&mut self, mode: Mode) -> Result<(), String> {
        if self.file == Some(mode) {
            return Ok(());
        }
        self.request(mode, None, SetBy::File)
            .map_err(|why| why.to_string())?;
        self.file = Some(mode);
        Ok(())
    }

    /// Advances the machine until its phase is stable and its route is in force.
    async fn advance(&mut self) {
        loop {
            let before = self.machine.phase();
            self.router.set_route(self.machine.route());
            self.machine.tick(Instant::now(), &self.router.view());
            self.router.set_route(self.machine.route());
            while let Some(event) = self.machine.poll_event() {
                self.handle(event);
            }
            if self.machine.phase() == before {
                break;
            }
        }
        let phase = self.machine.phase();
        self.metrics.set_tunnel_mode(self.machine.mode());
        let switching = f64::from(u8::from(phase != Phase::Settled));
        self.metrics.switching.set(switching);
        {
            let mut shown = self.shown.lock();
            shown.mode = self.machine.mode();
            shown.set_by = self.set_by;
            shown.phase = phase;
        }
        self.save(phase).await;
        let problems = self.shown.lock().problems().count();
        self.metrics.switch_problems.set(problems as f64);
    }

    fn handle(&self, event: Event) {
        match event {
            Event::Requested { from, to, turned } => info!(
                from = from.as_str(),
                to = to.as_str(),
                set_by = self.set_by.name(),
                in_the_middle_of_a_switch = turned,
                "tunnel mode changes"
            ),
            Event::Waits(kind) => info!(
                tunnel = kind.as_str(),
                "waiting for a healthy peer; until then, dials are routed as before"
            ),
            Event::Diverted(kind) => info!(tunnel = kind.as_str(), "new dials use this tunnel"),
            Event::Drains(kind, time) => info!(
                tunnel = kind.as_str(),
                seconds = time.as_secs_f64(),
                "connections of this tunnel may stay open for this time"
            ),
            Event::Overdue(kind) => warn!(
                tunnel = kind.as_str(),
                "the drain time of this tunnel has passed, but the other tunnel has no healthy peer: \
                 keeping the connections until a peer is healthy"
            ),
            Event::Cut(kind) => {
                info!(
                    tunnel = kind.as_str(),
                    "closing the connections of this tunnel"
                );
                self.router.cut(kind);
            }
            Event::Finished(took) => {
                self.metrics.switch_duration.record(took.as_secs_f64());
                self.shown.lock().last = Some(took);
                info!(
                    mode = self.machine.mode().as_str(),
                    seconds = took.as_secs_f64(),
                    "the switch is complete"
                );
            }
        }
    }

    async fn save(&mut self, phase: Phase) {
        let Some(state) = &self.state else {
            return;
        };
        let mode = self.machine.mode();
        let now = (mode, self.set_by, self.file, phase.essence());
        let has_just_failed =
            |(state, at): (Essence, Instant)| state == now && at.elapsed() < SAVE_PAUSE;
        if self.saved == Some(now) || self.unsaved.is_some_and(has_just_failed) {
            return;
        }
        let late = self.saving.take_if(|(saving, _)| saving.is_finished());
        if self.saving.is_some() {
            self.unsaved = Some((now, Instant::now()));
            return;
        }
        let saving = match late {
            Some((saving, state)) if state == now => saving,
            _ => {
                let saved = Saved::new(mode, self.set_by, self.flag, self.file);
                state.save(&saved.with_phase(phase, Clocks::read()))
            }
        };
        let problem = self.saved_in_time(saving, now).await.err();
        let mut shown = self.shown.lock();
        if let Some(why) = &problem
            && shown.state_problem != problem
        {
            error!("{why}; a restart would lose the last switch");
        }
        (self.saved, self.unsaved) = match problem {
            None => (Some(now), None),
            // A failed save may have changed the file.
            Some(_) => (None, Some((now, Instant::now()))),
        };
        shown.state_problem = problem;
    }

    /// Waits until a state is saved, and keeps a write that takes too long.
    async fn saved_in_time(
        &mut self,
        mut saving: JoinHandle<Result<(), String>>,
        state: Essence,
    ) -> Result<(), String> {
        match timeout(SAVE_LIMIT, &mut saving).await {
            Ok(saved) => saved.map_err(|error| error.to_string()).flatten(),
            Err(_) => {
                self.saving = Some((saving, state));
                Err(format!(
                    "--tunnel-state-file: the volume has not accepted the state within {SAVE_LIMIT:?}"
                ))
            }
        }
    }
}

fn log_problem(why: &str) {
    error!("--tunnel-mode-file: {why}; the mode stays as it is");
}

impl Phase {
    /// Returns the phase without the fields that may change at every check.
    fn essence(self) -> Self {
        match self {
            Self::Draining {
                deadline, since, ..
            } => Self::Draining {
                deadline,
                since,
                closing: false,
                overdue: false,
            },
            other => other,
        }
    }
}

#[cfg(test)]
mod tests;
