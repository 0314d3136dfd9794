//! Families computed for each page. Their series come and go with the objects that they describe, which the
//! exporter cannot express: a registered series stays forever.

use std::fmt::{Display, Write as _};

/// A metrics page that a program adds families to.
pub struct Page(pub(super) String);

/// Type of a family.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Kind {
    /// A count that only grows.
    Counter,
    /// A value that rises and falls.
    Gauge,
    /// Counts of values by size.
    Histogram,
}

/// The series of one family.
pub struct Series<'a> {
    page: &'a mut String,
    name: &'static str,
}

// === impl Page ===

impl Page {
    /// Adds a family; it may stay without series. Each name may be added once, and must not be registered.
    pub fn family(&mut self, name: &'static str, kind: Kind, help: &str) -> Series<'_> {
        let kind = match kind {
            Kind::Counter => "counter",
            Kind::Gauge => "gauge",
            Kind::Histogram => "histogram",
        };
        let page = &mut self.0;
        let _ = writeln!(page, "# HELP {name} {help}\n# TYPE {name} {kind}");
        Series { page, name }
    }

    /// Adds a family of one series without labels.
    pub(super) fn single(
        &mut self,
        name: &'static str,
        kind: Kind,
        help: &str,
        value: impl Display,
    ) {
        let series = self.family(name, kind, help);
        let _ = writeln!(series.page, "{name} {value}");
    }
}

// === impl Series ===

impl Series<'_> {
    /// Adds a counter or a gauge.
    pub fn value(&mut self, label: (&str, &str), value: u64) {
        self.line("", label, None, value);
    }

    /// Adds a histogram. `buckets` are upper bounds with counts, not cumulative, in ascending order; `more` is
    /// the count above the last bound.
    pub fn histogram(
        &mut self,
        label: (&str, &str),
        buckets: impl IntoIterator<Item = (f64, u64)>,
        more: u64,
        sum: u64,
    ) {
        let mut total = 0;
        for (bound, count) in buckets {
            total += count;
            self.line("_bucket", label, Some(&bound.to_string()), total);
        }
        total += more;
        self.line("_bucket", label, Some("+Inf"), total);
        self.line("_sum", label, None, sum);
        self.line("_count", label, None, total);
    }

    fn line(&mut self, suffix: &str, label: (&str, &str), bound: Option<&str>, value: u64) {
        let (name, (key, text)) = (self.name, label);
        let _ = write!(self.page, "{name}{suffix}{{{key}=\"");
        for char in text.chars() {
            match char {
                '\n' => self.page.push_str("\\n"),
                '"' | '\\' => self.page.extend(['\\', char]),
                _ => self.page.push(char),
            }
        }
        self.page.push('"');
        if let Some(bound) = bound {
            let _ = write!(self.page, ",le=\"{bound}\"");
        }
        let _ = writeln!(self.page, "}} {value}");
    }
}
