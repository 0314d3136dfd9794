//! Rows of the table: samples, medians, verdicts.

use std::fmt;

use serde_json::{Value, json};

use crate::figures::Metric;
use crate::path::CONTENDERS;
use crate::report::{median, number};

/// Smallest rate or speed of our programs by the stock programs.
const TARGET: f64 = 0.95;

/// A figure, or the error of the measurement.
pub(super) type Sample = Result<f64, String>;

/// The samples of a row.
#[derive(Debug)]
pub(super) struct Line {
    metric: Metric,
    /// For each of [`CONTENDERS`], a sample per round, or the text of its error.
    samples: [Vec<Sample>; CONTENDERS.len()],
}

impl Line {
    /// Creates a row without samples.
    pub(super) fn new(metric: Metric) -> Self {
        Self {
            metric,
            samples: Default::default(),
        }
    }

    /// Adds a sample of a contender, which is an index of [`CONTENDERS`].
    pub(super) fn add(&mut self, contender: usize, sample: Sample) {
        if let Some(samples) = self.samples.get_mut(contender) {
            samples.push(sample);
        }
    }

    /// Returns the median of each contender. Failed measurements have no effect.
    fn medians(&self) -> [Option<f64>; CONTENDERS.len()] {
        self.samples.each_ref().map(|samples| {
            let successes: Vec<f64> = samples.iter().flatten().copied().collect();
            median(&successes)
        })
    }

    /// Returns true if no measurement failed.
    pub(super) fn is_clean(&self) -> bool {
        self.samples.iter().flatten().all(Result::is_ok)
    }

    /// Returns the ratio of the medians of our programs with `auto` and the stock programs: more than 1 is better.
    fn by_stock(&self) -> Option<f64> {
        let [_, auto, _, stock] = self.medians();
        Some(match self.metric.higher_is_better {
            true => auto? / stock?,
            false => stock? / auto?,
        })
    }

    /// Returns true if no measurement of our programs with `auto` failed and they meet the target. Returns `None` if
    /// there is nothing to compare.
    pub(super) fn is_met(&self) -> Option<bool> {
        let [_, _, _, stock] = self.medians();
        let [_, auto, _, _] = &self.samples;
        let is_complete = auto.iter().all(Result::is_ok);
        stock.map(|_| is_complete && self.by_stock().is_some_and(|by| by >= TARGET))
    }

    /// Returns the row for the file.
    pub(super) fn json(&self, rtt: u64, loss: f64) -> Value {
        let by_name = |values: [Value; CONTENDERS.len()]| -> Value {
            let names = CONTENDERS.map(|contender| contender.name().to_owned());
            names.into_iter().zip(values).collect()
        };
        let figures = |samples: &Vec<Sample>| -> Value {
            let figures = samples.iter().map(|sample| json!(sample.as_ref().ok()));
            figures.collect()
        };
        let mut failures = Vec::new();
        for (contender, samples) in CONTENDERS.iter().zip(&self.samples) {
            let errors = samples.iter().filter_map(|sample| sample.as_ref().err());
            failures.extend(
                errors.map(|error| json!({ "contender": contender.name(), "error": error })),
            );
        }
        json!({
            "rtt_ms": rtt,
            "loss_percent": loss,
            "row": self.metric.name,
            "medians": by_name(self.medians().map(|median| json!(median))),
            "samples": by_name(self.samples.each_ref().map(figures)),
            "failures": failures,
            "met": self.is_met(),
        })
    }
}

impl fmt::Display for Line {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{:31}", self.metric.name)?;
        for median in self.medians() {
            let median = median.map_or_else(|| "failed".to_owned(), |value| format!("{value:.2}"));
            write!(f, " {median:>13}")?;
        }
        let verdict = match self.is_met() {
            None => return Ok(()),
            Some(true) => "met",
            Some(false) => "MISSED",
        };
        write!(f, " {:>9}  {verdict}", number(self.by_stock(), 2))
    }
}

#[cfg(test)]
mod tests {
    #![allow(clippy::indexing_slicing)]
    use super::*;

    const RATE: Metric = Metric::higher("rate");
    const TIME: Metric = Metric::lower("time");

    /// Creates a row whose contenders have one sample each, except `auto` and the stock programs. `None` is a failed
    /// measurement.
    fn line(metric: Metric, auto: &[Option<f64>], stock: &[Option<f64>]) -> Line {
        let mut line = Line::new(metric);
        let one: &[Option<f64>] = &[Some(1.0)];
        for (contender, samples) in [one, auto, one, stock].into_iter().enumerate() {
            for sample in samples {
                line.add(contender, sample.ok_or_else(|| "it broke".to_owned()));
            }
        }
        line
    }

    #[test]
    fn larger_rates_and_smaller_times_meet_the_target() {
        let values = |metric| line(metric, &[Some(2.0)], &[Some(4.0)]);
        let rate = values(RATE).to_string();
        assert!(rate.ends_with("0.50  MISSED"), "{rate}");
        assert_eq!(values(RATE).is_met(), Some(false));
        let time = values(TIME).to_string();
        assert!(time.ends_with("2.00  met"), "{time}");
        assert_eq!(values(TIME).is_met(), Some(true));
    }

    #[test]
    fn verdict_is_that_of_the_medians() {
        let auto = [Some(9.0), Some(1.0), Some(4.0)];
        let line = line(RATE, &auto, &[Some(2.0), Some(4.0), Some(100.0)]);
        assert_eq!(line.is_met(), Some(true));
        assert!(line.is_clean());
        let json = line.json(30, 0.1);
        assert_eq!(json["medians"]["ours, auto"], json!(4.0));
        assert_eq!(json["samples"]["ours, auto"], json!([9.0, 1.0, 4.0]));
        assert_eq!(json["met"], json!(true));
    }

    #[test]
    fn failed_measurement_of_auto_misses_the_target() {
        for auto in [&[Some(9.0), None][..], &[None, None]] {
            let line = line(RATE, auto, &[Some(1.0), Some(1.0)]);
            assert_eq!(line.is_met(), Some(false));
            assert!(!line.is_clean());
            assert!(line.to_string().ends_with("MISSED"), "{line}");
            let json = line.json(30, 0.1);
            assert_eq!(json["samples"]["ours, auto"][1], Value::Null);
            let failure = json!({ "contender": "ours, auto", "error": "it broke" });
            assert_eq!(json["failures"][0], failure);
        }
    }

    #[test]
    fn row_without_a_figure_of_the_stock_programs_has_no_verdict() {
        let line = line(RATE, &[Some(3.0)], &[None]);
        assert_eq!(line.is_met(), None);
        assert!(line.to_string().ends_with("1.00        failed"), "{line}");
    }
}
