//! Panics: one line in the log for each panic, and their number.

use std::backtrace::{Backtrace, BacktraceStatus};
use std::panic::{self, PanicHookInfo};
use std::sync::atomic::{AtomicU64, Ordering};
use std::sync::mpsc;
use std::thread;
use std::time::Duration;

use tracing::{Span, error};

use super::logging::{self, WRITER_THREAD};

/// Message of the log line of a panic.
pub const MESSAGE: &str = "panic; please report the bug";

/// Name of the thread that logs a panic.
const THREAD: &str = "panic";

/// Time for the log to write the line of a panic.
const LOG_FLUSH: Duration = Duration::from_secs(1);

/// Longest wait for the line of a panic. A thread that takes longer than [`LOG_FLUSH`] waits for a lock of the panicking thread.
const DEADLOCK: Duration = Duration::from_secs(2);

static COUNT: AtomicU64 = AtomicU64::new(0);

/// Returns the number of panics of this process since [`install`].
pub(crate) fn count() -> u64 {
    COUNT.load(Ordering::Relaxed)
}

/// Logs each later panic of the process as an error, and waits up to 1 s until the log has written the line. A panic
/// that cannot be logged, such as a panic of the logging code, goes to stderr. With `RUST_BACKTRACE=1`, the line has a
/// backtrace.
pub fn install() {
    let to_stderr = panic::take_hook();
    panic::set_hook(Box::new(move |info| {
        if !log(info) {
            to_stderr(info);
        }
        // Log first, then count: an alert on the counter finds the log line.
        COUNT.fetch_add(1, Ordering::Relaxed);
    }));
}

/// Logs a panic of this thread. Returns false if that is impossible.
fn log(info: &PanicHookInfo<'_>) -> bool {
    let thread = thread::current();
    let thread = thread.name().unwrap_or("unnamed").to_owned();
    if thread == THREAD || thread == WRITER_THREAD {
        return false;
    }
    let reason = info.payload_as_str().unwrap_or("no text").to_owned();
    let location = info.location().map(ToString::to_string);
    let backtrace = Backtrace::capture();
    let span = Span::current();
    ends_within(DEADLOCK, move || {
        let backtrace = match backtrace.status() {
            BacktraceStatus::Captured => Some(backtrace.to_string()),
            _ => None,
        };
        let _span = span.entered();
        error!(reason, location, thread, backtrace, "{MESSAGE}");
        logging::flush(LOG_FLUSH);
    })
}

/// Runs `work` on another thread, because this thread may have locks of the logging code. Returns false if `work` does
/// not start, panics, or does not end within `limit`.
fn ends_within(limit: Duration, work: impl FnOnce() + Send + 'static) -> bool {
    let (end, ended) = mpsc::channel();
    let started = thread::Builder::new()
        .name(THREAD.to_owned())
        .spawn(move || {
            work();
            let _ = end.send(());
        });
    started.is_ok() && ended.recv_timeout(limit).is_ok()
}

#[cfg(test)]
mod tests;
