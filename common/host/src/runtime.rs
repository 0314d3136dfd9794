//! What both programs run on: start-up, tracked tasks, signals, the process's limits.

pub mod shards;

use std::fmt;
use std::io::{self, Write as _};
use std::process::ExitCode;

use tokio::signal::unix::{Signal, SignalKind, signal};
use tokio_util::sync::CancellationToken;
use tokio_util::task::TaskTracker;
use tracing::{error, info, warn};

use crate::telemetry::logging::{self, LogConfig};

/// glibc's allocator maps, faults in and gives back the buffers of bulk again and again, which
/// costs more than their encryption (docs/tuning.md).
#[global_allocator]
static ALLOCATOR: tikv_jemallocator::Jemalloc = tikv_jemallocator::Jemalloc;

/// Runs hyper's per-stream work on tracked tasks, so that a shutdown can await all of it.
#[derive(Clone, Debug)]
pub struct TrackedExecutor(pub TaskTracker);

impl<F> hyper::rt::Executor<F> for TrackedExecutor
where
    F: Future + Send + 'static,
    F::Output: Send + 'static,
{
    fn execute(&self, future: F) {
        self.0.spawn(future);
    }
}

/// SIGINT and SIGTERM, in the order in which they arrive.
pub struct Signals {
    interrupt: Signal,
    terminate: Signal,
}

impl Signals {
    /// Takes both signals over from their default action.
    ///
    /// # Errors
    /// When the runtime can not install a handler.
    pub fn new() -> io::Result<Self> {
        Ok(Self {
            interrupt: signal(SignalKind::interrupt())?,
            terminate: signal(SignalKind::terminate())?,
        })
    }

    /// The next signal's name.
    pub async fn recv(&mut self) -> &'static str {
        tokio::select! {
            _ = self.interrupt.recv() => "SIGINT",
            _ = self.terminate.recv() => "SIGTERM",
        }
    }

    /// Runs a program until it ends: by itself, or because the first signal cancels `shutdown`. The
    /// logs call that `stop`, such as "drain".
    ///
    /// # Errors
    /// When a second signal cuts the stop short.
    pub async fn run(
        mut self,
        stop: &'static str,
        shutdown: CancellationToken,
        program: impl Future<Output = ()>,
    ) -> Result<(), CutShort> {
        tokio::pin!(program);
        tokio::select! {
            () = &mut program => return Ok(()),
            signal = self.recv() => info!(signal, "{stop} begins; a second signal ends it at once"),
        }
        shutdown.cancel();
        tokio::select! {
            () = program => Ok(()),
            signal = self.recv() => Err(CutShort { signal, stop }),
        }
    }
}

/// A second signal came before the stop was over.
#[derive(Debug, thiserror::Error)]
#[error("{signal} during the {stop}")]
pub struct CutShort {
    signal: &'static str,
    stop: &'static str,
}

/// Raises the soft limit of open files to the hard one, as the Go runtime does at start: every
/// tunnelled connection costs a descriptor.
pub fn raise_open_file_limit() {
    use rustix::process::{Resource, getrlimit, setrlimit};
    let mut limit = getrlimit(Resource::Nofile);
    if limit.current != limit.maximum {
        limit.current = limit.maximum;
        if let Err(error) = setrlimit(Resource::Nofile, limit) {
            warn!(%error, "cannot raise the limit of open files");
        }
    }
}

/// Runs a program from parsed flags to its exit code: sets up logging, tells what is in effect
/// and what to mind, raises the process's limits, and runs `serve` on a runtime. Exit code 1 says
/// that it could not start or did not end in order.
pub fn run<F, E>(program: &str, setup: &Setup<'_>, serve: F) -> ExitCode
where
    F: Future<Output = Result<(), E>>,
    E: fmt::Display,
{
    if let Err(error) = logging::init(setup.logging, program) {
        // There is no log to say it in.
        let _ = writeln!(io::stderr(), "error: {error}");
        return ExitCode::FAILURE;
    }
    for line in &setup.options {
        info!("{line}");
    }
    for warning in setup.warnings {
        warn!("{warning}");
    }
    raise_open_file_limit();
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
    // A name lookup that hangs in the system's resolver must not hold up the exit.
    runtime.shutdown_background();
    match ended {
        Ok(()) => ExitCode::SUCCESS,
        Err(error) => {
            error!("{error:#}");
            ExitCode::FAILURE
        }
    }
}

/// What [`run`] needs of a program's configuration.
pub struct Setup<'a> {
    /// Where log lines go.
    pub logging: &'a LogConfig,
    /// Every option in effect, one line each.
    pub options: Vec<String>,
    /// What the operator should mind, one line each.
    pub warnings: &'a [String],
}
