//! Rows of all parts, as text and as JSON.

use std::fmt;

use serde_json::{Value, json};

use crate::report::median;

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
    /// Largest good median; 0 requires 0 in every round. `None` if the row has no target.
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

    /// Returns the largest sample.
    fn max(&self) -> Option<f64> {
        self.samples.last().copied()
    }

    /// Returns true if no measurement failed.
    pub(super) fn is_clean(&self) -> bool {
        self.failures.is_empty()
    }

    /// Returns true if no measurement failed and the median, or the largest sample for a target of 0, meets the target.
    /// Returns `None` without a target.
    pub(super) fn is_met(&self) -> Option<bool> {
        let target = self.target?;
        let figure = if target == 0.0 {
            self.max()
        } else {
            median(&self.samples)
        };
        Some(self.is_clean() && figure.is_some_and(|figure| figure <= target))
    }

    /// Returns the row for the file.
    pub(super) fn json(&self) -> Value {
        json!({
            "pair": self.pair,
            "row": self.row,
            "unit": self.unit,
            "median": median(&self.samples),
            "max": self.max(),
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
            number(median(&self.samples)),
            number(self.max()),
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

    fn line(samples: &[f64], target: Option<f64>) -> Line {
        let results = samples.iter().map(|sample| Ok(*sample));
        Line::new("ours", "5 servers", "s", results, target)
    }

    #[test]
    fn row_has_median_maximum_verdict_and_failures() {
        let met = line(&[3.0, 1.0, 2.0, 2.5], Some(2.25));
        assert_eq!(
            met.to_string().split_whitespace().collect::<Vec<_>>()[4..],
            ["2.25", "3.00", "met"]
        );
        let results = || [Ok(1.0), Err(anyhow!("it broke"))];
        let failed = |target| Line::new("ours", "5 servers", "s", results(), target);
        let text = failed(Some(2.0)).to_string();
        let (row, failure) = text.split_once('\n').unwrap_or_default();
        assert!(row.ends_with("1.00       1.00  MISSED"), "{row}");
        assert_eq!(failure, "FAILED ours, 5 servers: it broke");
        assert!(!failed(None).is_clean());
        assert_eq!(failed(None).is_met(), None);
        assert_eq!(failed(None).json()["max"], 1.0);
    }

    #[test]
    fn target_of_zero_is_judged_by_the_maximum_and_other_targets_by_the_median() {
        assert_eq!(line(&[0.0, 0.0, 1.0], Some(0.0)).is_met(), Some(false));
        assert_eq!(line(&[0.0, 0.0, 0.0], Some(0.0)).is_met(), Some(true));
        assert_eq!(line(&[1.0, 2.0, 9.0], Some(2.0)).is_met(), Some(true));
        assert_eq!(line(&[1.0, 3.0], Some(1.9)).is_met(), Some(false));
        assert_eq!(line(&[], Some(1.0)).is_met(), Some(false));
    }
}
