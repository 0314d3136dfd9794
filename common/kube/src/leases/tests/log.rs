//! A record of the log lines of this thread.

use std::fmt::{self, Write as _};
use std::sync::Arc;

use parking_lot::Mutex;
use tracing::field::{Field, Visit};
use tracing::span::{Attributes, Id, Record};
use tracing::subscriber::{DefaultGuard, NoSubscriber, set_default};
use tracing::{Dispatch, Event, Metadata, Subscriber};

/// The lines that one module has logged. Each line has the level and the fields.
#[derive(Clone)]
pub(super) struct Log {
    module: &'static str,
    lines: Arc<Mutex<Vec<String>>>,
}

struct Line(String);

impl Log {
    /// Records the lines of a module while the guards live. With the second dispatcher, `tracing` asks every dispatcher when
    /// it registers a line. With one, it asks the dispatcher of the current thread, which may be the thread of another test.
    pub(super) fn of(module: &'static str) -> (Self, (DefaultGuard, Dispatch)) {
        let log = Self {
            module,
            lines: Arc::default(),
        };
        let other = Dispatch::new(NoSubscriber::default());
        let guard = set_default(log.clone());
        (log, (guard, other))
    }

    /// Returns the lines since the last call.
    pub(super) fn take(&self) -> Vec<String> {
        std::mem::take(&mut self.lines.lock())
    }
}

impl Subscriber for Log {
    fn enabled(&self, metadata: &Metadata<'_>) -> bool {
        metadata.target() == self.module
    }

    fn new_span(&self, _: &Attributes<'_>) -> Id {
        Id::from_u64(1)
    }

    fn record(&self, _: &Id, _: &Record<'_>) {}

    fn record_follows_from(&self, _: &Id, _: &Id) {}

    fn event(&self, event: &Event<'_>) {
        let mut line = Line(event.metadata().level().to_string());
        event.record(&mut line);
        self.lines.lock().push(line.0);
    }

    fn enter(&self, _: &Id) {}

    fn exit(&self, _: &Id) {}
}

impl Visit for Line {
    fn record_debug(&mut self, field: &Field, value: &dyn fmt::Debug) {
        write!(self.0, " {field}={value:?}").unwrap();
    }
}
