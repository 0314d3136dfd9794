//! Long-lived tasks, such as listeners: without one of them, the process looks alive but does not do its work.

use std::panic::AssertUnwindSafe;

use futures_util::FutureExt as _;
use tokio_util::sync::CancellationToken;
use tokio_util::task::TaskTracker;
use tracing::error;

use super::LOG_FLUSH;
use crate::telemetry::logging;

/// Exit code of a process that a long-lived task has left: `EX_SOFTWARE` of sysexits.h.
const EXIT_CODE: i32 = 70;

/// Environment variable with the name of the task that panics at its start. Only debug builds read it.
#[cfg(debug_assertions)]
const PANIC_VARIABLE: &str = "CULVERT_TEST_PANIC";

/// Starts a long-lived task of the process. If the task panics, or ends before `stop` fires, logs an error and
/// ends the process with exit code 70, so that its supervisor restarts it, as Kubernetes does.
pub fn spawn_essential<F>(
    tasks: &TaskTracker,
    name: &'static str,
    stop: &CancellationToken,
    task: F,
) where
    F: Future<Output = ()> + Send + 'static,
{
    tasks.spawn(essential(name, stop.clone(), task));
}

/// Runs a long-lived task, see [`spawn_essential`].
pub async fn essential(
    name: &'static str,
    stop: CancellationToken,
    task: impl Future<Output = ()>,
) {
    let task = async {
        #[cfg(debug_assertions)]
        if std::env::var_os(PANIC_VARIABLE).is_some_and(|wanted| wanted == name) {
            std::panic::panic_any(format!("{PANIC_VARIABLE} names this task"));
        }
        task.await;
    };
    let why = match AssertUnwindSafe(task).catch_unwind().await {
        Ok(()) if stop.is_cancelled() => return,
        Ok(()) => "ended",
        Err(_) => "panicked",
    };
    error!(
        task = name,
        "a long-lived task {why}: ending the process, so that it is restarted; please report the bug, with the \
         lines before this line"
    );
    logging::flush(LOG_FLUSH);
    std::process::exit(EXIT_CODE);
}
