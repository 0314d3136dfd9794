//! The rate limit for lines of level INFO and above: a peer that causes many of them cannot flood the log.

use std::collections::HashMap;
use std::fmt;
use std::hash::{DefaultHasher, Hash as _, Hasher as _};
use std::sync::Arc;
use std::time::Duration;

use parking_lot::Mutex;
use tokio::time::Instant;
use tracing::callsite::Identifier;
use tracing::field::{Field, Visit};
use tracing::{Event, Level, Metadata, Subscriber, info, warn};
use tracing_subscriber::layer::{Context, Filter};

use super::{LostLine, lose_line};

/// Period of the limit.
const PERIOD: Duration = Duration::from_secs(10);

/// Number of lines for one reason in one period. Enough to see what happens, too few to fill a disk.
const MAX_LINES: u64 = 20;

/// Number of INFO lines of one place in the code in one period. More than 200 peers rarely connect within 10 s.
const MAX_INFO_LINES: u64 = 200;

/// Number of reasons that are counted separately. More exist only if a peer chooses the reason.
const MAX_REASONS: usize = 1024;

/// Limits the lines of level WARN and ERROR by reason: the place in the code, and the field `reason`. Limits the lines of
/// level INFO by place alone.
#[derive(Default)]
pub(super) struct RateLimit {
    reasons: Mutex<HashMap<Key, Lines>>,
}

type Key = (Identifier, u64);

/// Lines for one reason in the current period.
struct Lines {
    since: Instant,
    seen: u64,
    is_info: bool,
    message: String,
}

/// Fields of an event that identify its reason.
#[derive(Default)]
struct Reason {
    hasher: DefaultHasher,
    message: String,
}

impl RateLimit {
    fn allows(&self, event: &Event<'_>, now: Instant) -> bool {
        let mut reason = Reason::default();
        event.record(&mut reason);
        let is_info = *event.metadata().level() == Level::INFO;
        let mut reasons = self.reasons.lock();
        let mut key = (event.metadata().callsite(), reason.hasher.finish());
        if is_info || reasons.len() >= MAX_REASONS && !reasons.contains_key(&key) {
            key.1 = 0;
        }
        let lines = reasons.entry(key).or_insert_with(|| Lines {
            since: now,
            seen: 0,
            is_info,
            message: reason.message,
        });
        lines.seen += 1;
        let is_allowed = lines.seen <= lines.limit();
        if !is_allowed {
            lose_line(LostLine::RateLimit);
        }
        is_allowed
    }

    /// Ends the periods that are over, and logs the number of lines left out.
    pub(super) fn report(&self, now: Instant) {
        let mut left_out = Vec::new();
        self.reasons.lock().retain(|_, lines| {
            let is_over = now.saturating_duration_since(lines.since) >= PERIOD;
            let more = lines.seen.saturating_sub(lines.limit());
            if is_over && more > 0 {
                let message = std::mem::take(&mut lines.message);
                left_out.push((more, lines.is_info, message));
            }
            !is_over
        });
        for (more, is_info, line) in left_out {
            match is_info {
                true => info!(line, "{more} more in the last {} s", PERIOD.as_secs()),
                false => warn!(line, "{more} more in the last {} s", PERIOD.as_secs()),
            }
        }
    }
}

impl Lines {
    fn limit(&self) -> u64 {
        match self.is_info {
            true => MAX_INFO_LINES,
            false => MAX_LINES,
        }
    }
}

/// The filter of a layer, which shares the limit with the thread that reports.
pub(super) struct Limited(pub(super) Arc<RateLimit>);

impl<S: Subscriber> Filter<S> for Limited {
    fn enabled(&self, _: &Metadata<'_>, _: &Context<'_, S>) -> bool {
        true
    }

    fn event_enabled(&self, event: &Event<'_>, _: &Context<'_, S>) -> bool {
        *event.metadata().level() > Level::INFO || self.0.allows(event, Instant::now())
    }
}

impl Visit for Reason {
    fn record_str(&mut self, field: &Field, value: &str) {
        if field.name() == "reason" {
            value.hash(&mut self.hasher);
        }
    }

    fn record_debug(&mut self, field: &Field, value: &dyn fmt::Debug) {
        match field.name() {
            "reason" => format!("{value:?}").hash(&mut self.hasher),
            "message" => self.message = format!("{value:?}"),
            _ => {}
        }
    }
}
