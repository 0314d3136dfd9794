//! Rows of all parts, as text and as JSON.

use std::fmt;

use serde_json::{Value, json};

/// Heading of the table.
pub(super) const HEADING: &str =
    "pair         row                              unit            median        max  target";

/// The rows of all parts.
#[derive(Debug, Default)]
pub(super) struct Lines(pub Vec<Line>);

impl Lines {
    /// Adds a row, and prints it.
    pub(super) fn add(&mut self, line: Line) {
        println!("{line}");
        self.0.push(line);
    }
}

/// A row of the table: the samples of one figure of one pair.
#[derive(Debug)]
pub(super) struct Line {
    /// Name of the pair.
    pub pair: &'static str,
    /// Name of the row.
    pub row: &'static str,
    /// Name of the figure, with its unit. Smaller values are better.
    pub unit: &'static str,
    /// Successful measurements.
    pub samples: Vec<f64>,
    /// Errors of the other measurements.
    pub failures: Vec<String>,
    /// Largest good median. `None` if the row has no target.
    pub target: Option<f64>,
}

impl Line {
    /// Creates a row from the results of measurements.
    pub(super) fn new(
        pair: &'static str,
        row: &'static str,
        unit: &'static str,
        results: impl IntoIterator<Item = anyhow::Result<f64>>,
        target: Option<f64>,
    ) -> Self {
        let (mut samples, mut failures) = (Vec::new(), Vec::new());
        for result in results {
            match result {
                Ok(sample) => samples.push(sample),
                Err(error) => failures.push(format!("{error:#}")),
            }
        }
        samples.sort_by(f64::total_cmp);
        Self {
            pair,
            row,
            unit,
            samples,
            failures,
            target,
        }
    }

    /// Returns the lower median of the samples.
    pub(super) fn median(&self) -> Option<f64> {
        let middle = self.samples.len().saturating_sub(1) / 2;
        self.samples.get(middle).copied()
    }

    /// Returns true if no measurement failed.
    pub(super) fn is_clean(&self) -> bool {
        self.failures.is_empty()
    }

    /// Returns true if the median meets the target. Returns `None` without a target or a sample.
    pub(super) fn is_met(&self) -> Option<bool> {
        Some(self.median()? <= self.target?)
    }

    /// Returns the row for the file.
    pub(super) fn json(&self) -> Value {
        json!({
            "pair": self.pair,
            "row": self.row,
            "unit": self.unit,
            "median": self.median(),
            "max": self.samples.last(),
            "samples": self.samples,
            "target": self.target,
            "met": self.is_met(),
            "failures": self.failures,
        })
    }
}

impl fmt::Display for Line {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let number = |value: Option<f64>| {
            value.map_or_else(|| "-".to_owned(), |value| format!("{value:.2}"))
        };
        let verdict = match self.is_met() {
            None => "-",
            Some(true) => "met",
            Some(false) => "MISSED",
        };
        write!(
            f,
            "{:12} {:32} {:12} {:>9} {:>10}  {verdict}",
            self.pair,
            self.row,
            self.unit,
            number(self.median()),
            number(self.samples.last().copied()),
        )?;
        for failure in &self.failures {
            write!(f, "\nFAILED {}, {}: {failure}", self.pair, self.row)?;
        }
        Ok(())
    }
}

#[cfg(test)]
mod tests {
    #![allow(clippy::indexing_slicing)]

    use anyhow::anyhow;

    use super::*;

    #[test]
    fn row_has_median_maximum_verdict_and_failures() {
        let results = || [Ok(3.0), Ok(1.0), Err(anyhow!("it broke")), Ok(2.0)];
        let line = |target| Line::new("ours", "5 servers", "s", results(), target);
        let text = line(Some(2.0)).to_string();
        let (row, failure) = text.split_once('\n').unwrap_or_default();
        assert_eq!(
            row.split_whitespace().collect::<Vec<_>>()[4..],
            ["2.00", "3.00", "met"]
        );
        assert_eq!(failure, "FAILED ours, 5 servers: it broke");
        assert!(!line(None).is_clean());
        assert_eq!(line(Some(1.9)).is_met(), Some(false));
        assert_eq!(line(None).is_met(), None);
        assert_eq!(line(None).json()["max"], 3.0);
        let empty = Line::new("ours", "5 servers", "s", [], Some(1.0));
        assert_eq!((empty.median(), empty.is_met()), (None, None));
    }
}
