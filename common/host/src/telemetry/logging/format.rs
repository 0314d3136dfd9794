//! klog's text format: the header, the quoted message, then `key=value` fields.
//!
//! Strings are quoted and their control characters escaped, so that a client cannot forge a log line with a
//! host name.

use std::fmt::{self, Write as _};

use time::OffsetDateTime;
use tracing::field::{Field, Visit};
use tracing::{Event, Subscriber};
use tracing_subscriber::field::RecordFields;
use tracing_subscriber::fmt::format::Writer;
use tracing_subscriber::fmt::{FmtContext, FormatEvent, FormatFields, FormattedFields};
use tracing_subscriber::registry::LookupSpan;

use super::Severity;

/// Formatter that writes an event as one klog line.
pub(super) struct KlogEvent {
    /// True to omit the header.
    pub(super) skip_header: bool,
    /// True to show the source file's folder in the header.
    pub(super) with_folder: bool,
}

/// Formatter that writes a span's fields as ` key=value`, ready to append to a line.
pub(super) struct KlogFields;

impl<S> FormatEvent<S, KlogFields> for KlogEvent
where
    S: Subscriber + for<'a> LookupSpan<'a>,
{
    fn format_event(
        &self,
        ctx: &FmtContext<'_, S, KlogFields>,
        mut writer: Writer<'_>,
        event: &Event<'_>,
    ) -> fmt::Result {
        let meta = event.metadata();
        if !self.skip_header {
            let now = OffsetDateTime::now_local().unwrap_or_else(|_| OffsetDateTime::now_utc());
            let file = self.shown_file(meta.file().unwrap_or("???"));
            let header = header(meta.level(), now, std::process::id());
            write!(writer, "{header} {file}:{}] ", meta.line().unwrap_or(1))?;
        }
        let mut fields = Line::default();
        event.record(&mut fields);
        write!(writer, "{:?}{}", fields.message, fields.pairs)?;
        for span in ctx
            .event_scope()
            .into_iter()
            .flat_map(|scope| scope.from_root())
        {
            if let Some(fields) = span.extensions().get::<FormattedFields<KlogFields>>() {
                writer.write_str(&fields.fields)?;
            }
        }
        writeln!(writer)
    }
}

impl KlogEvent {
    fn shown_file<'a>(&self, path: &'a str) -> &'a str {
        let mut parts = path.rsplitn(3, '/');
        let (file, folder) = (parts.next(), parts.next());
        let shown = match (file, folder) {
            (Some(file), Some(folder)) if self.with_folder => file.len() + 1 + folder.len(),
            (Some(file), _) => file.len(),
            (None, _) => path.len(),
        };
        path.get(path.len() - shown..).unwrap_or(path)
    }
}

/// Formats severity, date, time and process id in klog's layout.
pub(super) fn header(level: &tracing::Level, now: OffsetDateTime, pid: u32) -> String {
    let letter = match Severity::from(level) {
        Severity::Info => 'I',
        Severity::Warning => 'W',
        Severity::Error | Severity::Fatal => 'E',
    };
    format!(
        "{letter}{:02}{:02} {:02}:{:02}:{:02}.{:06} {pid:>7}",
        u8::from(now.month()),
        now.day(),
        now.hour(),
        now.minute(),
        now.second(),
        now.microsecond()
    )
}

impl<'writer> FormatFields<'writer> for KlogFields {
    fn format_fields<R: RecordFields>(
        &self,
        mut writer: Writer<'writer>,
        fields: R,
    ) -> fmt::Result {
        let mut line = Line::default();
        fields.record(&mut line);
        writer.write_str(&line.pairs)
    }

    fn add_fields(
        &self,
        current: &'writer mut FormattedFields<Self>,
        fields: &tracing::span::Record<'_>,
    ) -> fmt::Result {
        // The default implementation adds a space between pairs, but each pair already starts with a space.
        self.format_fields(current.as_writer(), fields)
    }
}

/// Text of a set of fields: the message, and the other fields as ` key=value`.
#[derive(Default)]
struct Line {
    message: String,
    pairs: String,
}

impl Line {
    fn quoted(&mut self, field: &Field, value: String) {
        if field.name() == "message" {
            self.message = value;
        } else {
            self.pair(field, format_args!("{value:?}"));
        }
    }

    fn pair(&mut self, field: &Field, value: fmt::Arguments<'_>) {
        // Writing to a String does not fail.
        let _ = write!(self.pairs, " {}={value}", field.name());
    }
}

macro_rules! unquoted {
    ($($method:ident: $type:ty),+) => {
        $(fn $method(&mut self, field: &Field, value: $type) {
            self.pair(field, format_args!("{value}"));
        })+
    };
}

impl Visit for Line {
    fn record_debug(&mut self, field: &Field, value: &dyn fmt::Debug) {
        self.quoted(field, format!("{value:?}"));
    }

    fn record_str(&mut self, field: &Field, value: &str) {
        self.quoted(field, value.to_owned());
    }

    fn record_error(&mut self, field: &Field, value: &(dyn std::error::Error + 'static)) {
        self.quoted(field, value.to_string());
    }

    unquoted!(record_i64: i64, record_u64: u64, record_i128: i128, record_u128: u128);
    unquoted!(record_f64: f64, record_bool: bool);
}
