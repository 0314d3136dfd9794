//! The queue between the program and its log: no task waits for a slow or stalled log.
//!
//! A thread writes the lines. If the queue is full, new lines are dropped and counted, and a line in the log
//! gives their number as soon as there is room again. The last part of the queue is for warnings and errors.

use std::collections::VecDeque;
use std::io::{self, Write};
use std::sync::{Arc, OnceLock};
use std::time::Duration;

use parking_lot::{Condvar, Mutex};
use tokio::time::Instant;
use tracing::{Metadata, warn};
use tracing_subscriber::fmt::MakeWriter;

use super::limit::RateLimit;
use super::sink::Sink;
use super::{LogError, LostLine, Severity, lose_line};

/// Limit of the waiting lines, in bytes. A smaller limit loses lines in bursts; all of it is memory that a
/// stalled log costs.
const MAX_BYTES: usize = 4 << 20;

/// Part of [`MAX_BYTES`] for warnings and errors only: many lines of lower levels must not displace them.
const SEVERE_BYTES: usize = 1 << 20;

/// Interval at which the writer reports lines left out by the rate limit.
const REPORT_INTERVAL: Duration = Duration::from_secs(1);

/// Name of the thread that writes the log.
pub(in crate::telemetry) const WRITER_THREAD: &str = "log";

/// Queue of the process's log, for [`flush`].
static PROCESS: OnceLock<Arc<Queue>> = OnceLock::new();

/// Lines that wait for the writer thread.
#[derive(Default)]
pub(super) struct Queue {
    waiting: Mutex<Waiting>,
    /// Signals new lines to the writer.
    filled: Condvar,
    /// Signals that the writer has written lines.
    written: Condvar,
}

#[derive(Default)]
struct Waiting {
    lines: VecDeque<(Severity, Box<[u8]>)>,
    bytes: usize,
    /// Lines dropped since the last report.
    dropped: u64,
    /// Lines that the queue has ever accepted.
    accepted: u64,
    /// Lines that the writer has ever written.
    written: u64,
}

/// Writer that queues lines.
#[derive(Clone)]
pub(super) struct Queued(Arc<Queue>);

/// Writer for the line of one event.
pub(super) struct QueuedLine<'a> {
    queue: &'a Queue,
    severity: Severity,
}

// === impl Queue ===

impl Queue {
    fn push(&self, severity: Severity, line: &[u8]) {
        let mut waiting = self.waiting.lock();
        let limit = match severity {
            Severity::Info => MAX_BYTES - SEVERE_BYTES,
            _ => MAX_BYTES,
        };
        if waiting.bytes + line.len() > limit {
            waiting.dropped += 1;
            lose_line(LostLine::QueueFull);
            return;
        }
        waiting.accepted += 1;
        waiting.bytes += line.len();
        waiting.lines.push_back((severity, line.into()));
        drop(waiting);
        self.filled.notify_one();
    }

    /// Writes the lines that wait, then waits at most [`REPORT_INTERVAL`] for more. Returns the number of
    /// lines dropped meanwhile.
    fn turn(&self, sink: &Sink) -> u64 {
        let mut waiting = self.waiting.lock();
        if waiting.lines.is_empty() {
            self.filled.wait_for(&mut waiting, REPORT_INTERVAL);
        }
        let lines = std::mem::take(&mut waiting.lines);
        drop(waiting);
        for (severity, line) in &lines {
            sink.line(*severity, line);
        }
        let mut waiting = self.waiting.lock();
        waiting.written += lines.len() as u64;
        waiting.bytes -= lines.iter().map(|(_, line)| line.len()).sum::<usize>();
        self.written.notify_all();
        std::mem::take(&mut waiting.dropped)
    }

    /// Waits until the lines accepted so far are written, but not longer than `limit`.
    fn flush(&self, limit: Duration) {
        let deadline = Instant::now() + limit;
        let mut waiting = self.waiting.lock();
        let accepted = waiting.accepted;
        while waiting.written < accepted {
            let left = deadline.saturating_duration_since(Instant::now());
            if self.written.wait_for(&mut waiting, left).timed_out() {
                return;
            }
        }
    }
}

/// Starts the thread that writes the process's log.
///
/// # Errors
/// Fails if the thread cannot be started.
pub(super) fn start(sink: Sink, limit: Arc<RateLimit>) -> Result<Queued, LogError> {
    let queue = Arc::new(Queue::default());
    let writer = queue.clone();
    std::thread::Builder::new()
        .name(WRITER_THREAD.to_owned())
        .spawn(move || {
            loop {
                let dropped = writer.turn(&sink);
                if dropped > 0 {
                    warn!(
                        lines = dropped,
                        "log lines dropped: the log accepts lines too slowly"
                    );
                }
                limit.report(Instant::now());
            }
        })
        .map_err(LogError::Thread)?;
    let _ = PROCESS.set(queue.clone());
    Ok(Queued(queue))
}

/// Waits until the earlier lines of the process's log are written, but not longer than `limit`.
pub fn flush(limit: Duration) {
    if let Some(queue) = PROCESS.get() {
        queue.flush(limit);
    }
}

// === impl MakeWriter ===

impl<'a> MakeWriter<'a> for Queued {
    type Writer = QueuedLine<'a>;

    fn make_writer(&'a self) -> QueuedLine<'a> {
        QueuedLine {
            queue: &self.0,
            severity: Severity::Info,
        }
    }

    fn make_writer_for(&'a self, meta: &Metadata<'_>) -> QueuedLine<'a> {
        QueuedLine {
            queue: &self.0,
            severity: Severity::from(meta.level()),
        }
    }
}

impl Write for QueuedLine<'_> {
    /// Queues one line. `tracing_subscriber`'s formatting layer passes each line whole, in one call.
    fn write(&mut self, line: &[u8]) -> io::Result<usize> {
        self.queue.push(self.severity, line);
        Ok(line.len())
    }

    fn flush(&mut self) -> io::Result<()> {
        Ok(())
    }
}

#[cfg(test)]
mod tests {
    #![allow(clippy::unwrap_used)]

    use super::super::sink::Stderr;
    use super::super::{LogConfig, lost_lines};
    use super::*;

    #[test]
    fn full_queue_drops_and_counts_new_lines_and_keeps_old_lines() {
        let before = lost_lines(LostLine::QueueFull);
        let queue = Queue::default();
        let line = vec![b'x'; MAX_BYTES / 4];
        for _ in 0..6 {
            queue.push(Severity::Warning, &line);
        }
        let buffer = Arc::<Mutex<Vec<u8>>>::default();
        let stderr = Stderr::Buffer(buffer.clone());
        let sink = Sink::open(&LogConfig::default(), "program", stderr).unwrap();
        assert_eq!(queue.turn(&sink), 2);
        assert!(lost_lines(LostLine::QueueFull) >= before + 2);
        assert_eq!(buffer.lock().len(), MAX_BYTES);
        // The written lines have made room.
        queue.push(Severity::Info, b"more");
        assert_eq!(queue.turn(&sink), 0);
        assert!(buffer.lock().ends_with(b"more"));
        queue.flush(Duration::ZERO);
    }

    #[test]
    fn queue_full_of_low_levels_accepts_warnings_and_errors() {
        let queue = Queue::default();
        while queue.waiting.lock().dropped == 0 {
            queue.push(Severity::Info, &[b'x'; 1024]);
        }
        for severity in [Severity::Warning, Severity::Error] {
            queue.push(severity, &[b'x'; SEVERE_BYTES / 2]);
            assert_eq!(queue.waiting.lock().dropped, 1);
        }
        assert_eq!(queue.waiting.lock().bytes, MAX_BYTES);
    }

    #[test]
    fn flush_of_a_stalled_log_ends_at_its_limit() {
        let queue = Queue::default();
        queue.push(Severity::Info, b"never written");
        let started = Instant::now();
        queue.flush(Duration::from_millis(10));
        assert!(started.elapsed() >= Duration::from_millis(10));
    }
}
