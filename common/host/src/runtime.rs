//! The runtime of the programs: startup, tracked tasks, signals and process limits.

mod essential;
mod open_files;
pub mod shards;

use std::fmt;
use std::future::poll_fn;
use std::io::{self, Write as _};
use std::process::ExitCode;
use std::task::{Context, Poll};
use std::time::Duration;

use tokio::signal::unix::{Signal, SignalKind, signal};
use tokio_util::sync::CancellationToken;
use tracing::{error, info, warn};

pub use self::essential::{essential, spawn_essential};
pub use self::open_files::{memory_limit, set_open_file_limit};
use crate::flags::Exit;
use crate::telemetry::logging::{self, LogConfig};
use crate::telemetry::panics;

/// Time for the log to accept the last lines of a program that ends.
const LOG_FLUSH: Duration = Duration::from_secs(1);

/// The signals that stop a program, with their names.
pub struct Signals {
    received: Vec<(&'static str, Signal)>,
    /// SIGHUP, which some operators send after a change of files; `None` below `nohup`, where the kernel ignores it.
    hangup: Option<Signal>,
}

impl Signals {
    /// Replaces the default action of SIGINT and SIGTERM, and of SIGHUP, which has no effect.
    ///
    /// # Errors
    /// Fails if the runtime cannot install a handler.
    pub fn new() -> io::Result<Self> {
        let hangup = match ignores_hangup() {
            true => None,
            false => Some(signal(SignalKind::hangup())?),
        };
        Ok(Self {
            received: vec![
                ("SIGINT", signal(SignalKind::interrupt())?),
                ("SIGTERM", signal(SignalKind::terminate())?),
            ],
            hangup,
        })
    }

    /// As [`Self::new`], for a program that a person runs in a terminal: SIGQUIT (Ctrl-\) and SIGHUP (the terminal is
    /// closed) end the program too. SIGHUP stays ignored below `nohup`.
    ///
    /// # Errors
    /// Fails if the runtime cannot install a handler.
    pub fn of_terminal() -> io::Result<Self> {
        let mut signals = Self::new()?;
        signals
            .received
            .push(("SIGQUIT", signal(SignalKind::quit())?));
        if let Some(hangup) = signals.hangup.take() {
            signals.received.push(("SIGHUP", hangup));
        }
        Ok(signals)
    }

    /// Waits for the next signal and returns its name.
    pub async fn recv(&mut self) -> &'static str {
        poll_fn(|cx| {
            let hangup = self.hangup.as_mut();
            if hangup.is_some_and(|hangup| take_all(hangup, cx)) {
                info!("SIGHUP has no effect: changed files are read without a signal");
            }
            let mut signals = self.received.iter_mut();
            let name =
                signals.find_map(|(name, signal)| signal.poll_recv(cx).is_ready().then_some(*name));
            name.map_or(Poll::Pending, Poll::Ready)
        })
        .await
    }

    /// Waits until a program has started.
    ///
    /// # Errors
    /// Fails if a signal arrives first.
    pub async fn unless_received<T>(
        &mut self,
        start: impl Future<Output = T>,
    ) -> Result<T, CutShort> {
        tokio::select! {
            started = start => Ok(started),
            signal = self.recv() => Err(CutShort { signal, stop: "start" }),
        }
    }

    /// Runs a program until it ends. The first signal cancels `shutdown`. `stop` is the word for the shutdown
    /// in log lines, such as "drain".
    ///
    /// # Errors
    /// Fails if a second signal arrives before the program has ended.
    async fn run(
        mut self,
        stop: &'static str,
        shutdown: CancellationToken,
        program: impl Future<Output = ()>,
    ) -> Result<(), CutShort> {
        tokio::pin!(program);
        tokio::select! {
            () = &mut program => return Ok(()),
            signal = self.recv() => info!(signal, "{stop} begins; a second signal ends the process at once"),
        }
        shutdown.cancel();
        tokio::select! {
            () = program => Ok(()),
            signal = self.recv() => Err(CutShort { signal, stop }),
        }
    }
}

/// Takes all received signals of a kind. Returns true if there was one.
fn take_all(signal: &mut Signal, cx: &mut Context<'_>) -> bool {
    let mut received = false;
    while signal.poll_recv(cx).is_ready() {
        received = true;
    }
    received
}

/// Returns true if this process has inherited that it ignores SIGHUP (proc_pid_status(5), `SigIgn`).
fn ignores_hangup() -> bool {
    let status = std::fs::read_to_string("/proc/self/status").unwrap_or_default();
    let ignored = status.lines().find_map(|line| line.strip_prefix("SigIgn:"));
    let ignored = ignored.and_then(|mask| u64::from_str_radix(mask.trim(), 16).ok());
    ignored.is_some_and(|mask| mask & 1 == 1)
}

/// Error returned when a signal arrives during the start, or a second one during the shutdown.
#[derive(Debug, thiserror::Error)]
#[error("{signal} during the {stop}")]
pub struct CutShort {
    signal: &'static str,
    stop: &'static str,
}

/// Switches core dumps off, because a core dump contains keys and tokens. A limit of 1 byte also suppresses dumps to
/// a program (core(5)); a limit of 0 does not.
fn suppress_core_dumps() {
    use rustix::process::{Resource, getrlimit, setrlimit};
    let mut limit = getrlimit(Resource::Core);
    if limit.maximum != Some(0) {
        limit.current = Some(1);
        if let Err(error) = setrlimit(Resource::Core, limit) {
            warn!(%error, "cannot switch core dumps off");
        }
    }
}

/// Runs a program from the outcome of reading its flags to its exit code. `setup` borrows the parts of the
/// configuration that [`run`] needs; `serve` is the program.
pub fn run_config<C, F, E>(
    program: &str,
    config: Result<C, Exit>,
    setup: impl for<'a> FnOnce(&'a C) -> Setup<'a>,
    serve: impl FnOnce(C) -> F,
) -> ExitCode
where
    C: Clone,
    F: Future<Output = Result<(), E>>,
    E: fmt::Display,
{
    match config {
        Ok(config) => run(program, &setup(&config), serve(config.clone())),
        Err(exit) => exit.report(),
    }
}

/// Binds a program, then runs it until it ends after the first signal. `stop` is the word for the shutdown in
/// log lines, such as "drain".
///
/// # Errors
/// Fails if `bind` fails, a signal arrives before its end, or a second signal before the end of the program.
pub async fn serve<B, F, E>(
    stop: &'static str,
    bind: impl Future<Output = Result<B, E>>,
    run: impl FnOnce(B, CancellationToken) -> F,
) -> Result<(), E>
where
    F: Future<Output = ()>,
    E: From<io::Error> + From<CutShort>,
{
    let mut signals = Signals::new()?;
    let shutdown = CancellationToken::new();
    let bound = signals.unless_received(bind).await??;
    let run = run(bound, shutdown.clone());
    Ok(signals.run(stop, shutdown, run).await?)
}

/// Runs a program from parsed flags to its exit code: sets up logging, also of panics, logs the options in effect and the
/// warnings, sets the limit of open files, switches core dumps off, and runs `serve` on a runtime. Exit code 1 means that the program
/// could not start or did not end cleanly.
pub fn run<F, E>(program: &str, setup: &Setup<'_>, serve: F) -> ExitCode
where
    F: Future<Output = Result<(), E>>,
    E: fmt::Display,
{
    if let Err(error) = logging::init(setup.logging, program) {
        // Logging could not be set up, so the error goes straight to stderr.
        let _ = writeln!(io::stderr(), "error: {error}");
        return ExitCode::FAILURE;
    }
    panics::install();
    for line in &setup.options {
        info!("{line}");
    }
    for warning in setup.warnings {
        // The limit of the log counts by reason.
        warn!(reason = warning, "warning about the configuration");
    }
    set_open_file_limit();
    suppress_core_dumps();
    let runtime = match tokio::runtime::Builder::new_current_thread()
        .enable_all()
        .build()
    {
        Ok(runtime) => runtime,
        Err(error) => {
            error!(%error, "cannot start the runtime");
            return ExitCode::FAILURE;
        }
    };
    let ended = runtime.block_on(serve);
    // A name lookup that hangs in the system's resolver must not delay the exit.
    runtime.shutdown_background();
    let code = match ended {
        Ok(()) => ExitCode::SUCCESS,
        Err(error) => {
            error!("{error:#}");
            ExitCode::FAILURE
        }
    };
    logging::flush(LOG_FLUSH);
    code
}

/// Configuration of a program for [`run`].
pub struct Setup<'a> {
    /// Logging configuration.
    pub logging: &'a LogConfig,
    /// All options in effect, one line each.
    pub options: Vec<String>,
    /// Warnings for the operator, one line each.
    pub warnings: &'a [String],
}
