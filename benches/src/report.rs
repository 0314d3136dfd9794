//! All samples: medians, ratios, JSON.

#[cfg(test)]
pub(crate) mod example;

use std::fmt;

use serde_json::{Value, json};

use crate::figures::{Figures, HUNG, Metric};
use crate::names::{OURS, START};
use crate::targets::{Bound, Target, Verdict};

/// The machine of the measurements, as far as it affects the figures.
#[derive(Debug)]
pub(crate) struct Machine {
    cores: usize,
    cpu: String,
    kernel: String,
}

impl Machine {
    /// Returns the description of this machine.
    pub(crate) fn this() -> Self {
        let cpu_info = std::fs::read_to_string("/proc/cpuinfo").unwrap_or_default();
        let model = cpu_info
            .lines()
            .find_map(|line| line.strip_prefix("model name")?.split_once(": "));
        let kernel = std::fs::read_to_string("/proc/sys/kernel/osrelease");
        Self {
            cores: std::thread::available_parallelism().map_or(1, usize::from),
            cpu: model.map_or("unknown", |(_, name)| name).to_owned(),
            kernel: kernel.unwrap_or_default().trim().to_owned(),
        }
    }
}

impl fmt::Display for Machine {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(
            f,
            "{} cores, {}, Linux {}",
            self.cores, self.cpu, self.kernel
        )?;
        if cfg!(debug_assertions) {
            write!(f, "; DEBUG BUILD, ours is slow")?;
        }
        Ok(())
    }
}

/// The contenders, and the targets for their figures.
#[derive(Debug)]
pub(crate) struct Comparison {
    /// Names of all contenders, in the order of the columns.
    pub contenders: &'static [&'static str],
    /// Contender whose figures divide the figures of all contenders in JSON.
    pub everyone_by: &'static str,
    /// Contender whose figures also divide our figures in JSON.
    pub ours_by: &'static str,
    /// Ratios in the table: heading, dividend, divisor.
    pub ratios: &'static [(&'static str, &'static str, &'static str)],
    /// Targets, for the last column.
    pub targets: &'static [Target],
    /// Lines below the table. Each appears only if its metric was measured.
    pub notes: &'static [(Metric, &'static str)],
}

/// One measurement of a row with one contender.
#[derive(Debug)]
pub(crate) struct Sample {
    /// Name of the front end or entry point.
    pub front: &'static str,
    /// Name of the row.
    pub row: &'static str,
    /// Name of the contender.
    pub contender: &'static str,
    outcome: Result<Figures, String>,
}

/// All samples of a run. `Display` prints the table.
#[derive(Debug)]
pub(crate) struct Report {
    /// The contenders.
    pub comparison: &'static Comparison,
    /// The machine of the measurements.
    pub machine: Machine,
    /// Number of rounds.
    pub rounds: u32,
    /// Seconds of load per measurement.
    pub seconds: f64,
    samples: Vec<Sample>,
}

/// One line of the table.
#[derive(Debug)]
pub(crate) struct Line {
    /// The contenders of the columns.
    comparison: &'static Comparison,
    /// Name of the front end or entry point.
    pub front: &'static str,
    /// Name of the row.
    pub row: &'static str,
    /// The figure of this line.
    pub metric: Metric,
    /// Samples by contender, in the order of the columns.
    values: Vec<Vec<f64>>,
    /// Contenders with a failed measurement of the row.
    failed: Vec<&'static str>,
}

impl Line {
    /// Returns the median of a contender's samples, if there are any.
    pub(crate) fn median(&self, contender: &str) -> Option<f64> {
        let mut pairs = self.comparison.contenders.iter().zip(&self.values);
        let (_, values) = pairs.find(|(known, _)| **known == contender)?;
        median(values)
    }

    /// Returns the median of `contender` divided by the median of `against`, if both were measured and the
    /// quotient is defined.
    pub(crate) fn ratio(&self, contender: &str, against: &str) -> Option<f64> {
        let by = self.median(against).filter(|by| *by != 0.0)?;
        let ratio = self.median(contender)? / by;
        Some(ratio).filter(|ratio| !ratio.is_nan())
    }

    /// Returns the ratio of two medians, each raised to `floor`, if both were measured.
    fn ratio_above(&self, floor: f64, contender: &str, against: &str) -> Option<f64> {
        let figure = self.median(contender)?.max(floor);
        let by = self.median(against)?.max(floor);
        // The ratio of two hung figures is not a number.
        Some(if figure == by { 1.0 } else { figure / by })
    }

    /// Returns the verdicts of this line. Targets without a measured figure have none, except those of a contender
    /// whose measurement failed: its other rounds do not show that the target is met.
    pub(crate) fn verdicts(&self) -> Vec<Verdict> {
        let targets = self.comparison.targets.iter();
        let own = targets.filter(|target| {
            target.front.is_none_or(|front| front == self.front)
                && target.rows.contains(&self.row)
                && target.metric == self.metric
        });
        own.filter_map(|target| {
            if self.failed.contains(&target.contender) {
                let is_comparable = target.against.is_none_or(|by| self.median(by).is_some());
                return is_comparable.then_some(Verdict {
                    target: *target,
                    value: None,
                });
            }
            let value = match target.against {
                Some(against) => match target.bound {
                    Bound::NoWorse { floor } => self.ratio_above(floor, target.contender, against),
                    Bound::AtMost(_) | Bound::AtLeast(_) => self.ratio(target.contender, against),
                },
                None => self.median(target.contender),
            };
            value.map(|_| Verdict {
                target: *target,
                value,
            })
        })
        .collect()
    }
}

impl Report {
    /// Creates an empty report.
    pub(crate) fn new(
        comparison: &'static Comparison,
        machine: Machine,
        rounds: u32,
        seconds: f64,
    ) -> Self {
        Self {
            comparison,
            machine,
            rounds,
            seconds,
            samples: Vec::new(),
        }
    }

    /// Adds one measurement.
    pub(crate) fn add(
        &mut self,
        front: &'static str,
        row: &'static str,
        contender: &'static str,
        outcome: anyhow::Result<Figures>,
    ) {
        self.samples.push(Sample {
            front,
            row,
            contender,
            outcome: outcome.map_err(|error| format!("{error:#}")),
        });
    }

    /// Returns true if no target is missed.
    pub(crate) fn meets_targets(&self) -> bool {
        let lines = self.lines();
        let mut verdicts = lines.iter().flat_map(Line::verdicts);
        verdicts.all(|verdict| verdict.met())
    }

    /// Returns true if no measurement failed.
    pub(crate) fn is_clean(&self) -> bool {
        self.failures().next().is_none()
    }

    pub(crate) fn failures(&self) -> impl Iterator<Item = (&Sample, &str)> {
        self.samples
            .iter()
            .filter_map(move |sample| match &sample.outcome {
                Ok(_) => None,
                Err(error) => Some((sample, error.as_str())),
            })
    }

    /// Returns the lines of the table, ordered by their first samples.
    pub(crate) fn lines(&self) -> Vec<Line> {
        let contenders = self.comparison.contenders;
        let mut lines: Vec<Line> = Vec::new();
        for sample in &self.samples {
            for (metric, value) in sample.outcome.iter().flatten() {
                let key = (sample.front, sample.row, *metric);
                let known = lines.iter().position(|l| (l.front, l.row, l.metric) == key);
                let at = known.unwrap_or(lines.len());
                if known.is_none() {
                    lines.push(Line {
                        comparison: self.comparison,
                        front: sample.front,
                        row: sample.row,
                        metric: *metric,
                        values: vec![Vec::new(); contenders.len()],
                        failed: Vec::new(),
                    });
                }
                let contender = contenders.iter().position(|c| *c == sample.contender);
                let values = lines.get_mut(at).zip(contender);
                if let Some(values) = values.and_then(|(line, c)| line.values.get_mut(c)) {
                    values.push(*value);
                }
            }
        }
        for (sample, _) in self.failures() {
            for line in &mut lines {
                if line.front == sample.front && [line.row, START].contains(&sample.row) {
                    line.failed.push(sample.contender);
                }
            }
        }
        lines
    }

    /// Returns medians, samples, ratios and failures.
    pub(crate) fn json(&self) -> Value {
        let lines: Vec<Value> = self.lines().iter().map(line_json).collect();
        let failures: Vec<Value> = self
            .failures()
            .map(|(sample, error)| {
                json!({
                    "front": sample.front,
                    "row": sample.row,
                    "contender": sample.contender,
                    "error": error,
                })
            })
            .collect();
        json!({
            "machine": self.machine.to_string(),
            "rounds": self.rounds,
            "seconds": self.seconds,
            "lines": lines,
            "failures": failures,
        })
    }
}

fn line_json(line: &Line) -> Value {
    let comparison = line.comparison;
    let by_name = |value: &dyn Fn(usize, &str) -> Value| -> Value {
        let names = comparison.contenders.iter().enumerate();
        names
            .map(|(i, name)| ((*name).to_owned(), value(i, name)))
            .collect()
    };
    let samples = |i: usize| {
        let values = line.values.get(i).into_iter().flatten();
        values
            .map(|value| figure_json(Some(*value)))
            .collect::<Vec<_>>()
    };
    let verdicts: Vec<Value> = line
        .verdicts()
        .iter()
        .map(|verdict| {
            json!({
                "contender": verdict.target.contender,
                "target": verdict.target.to_string(),
                "value": figure_json(verdict.value),
                "met": verdict.met(),
            })
        })
        .collect();
    json!({
        "front": line.front,
        "row": line.row,
        "metric": line.metric.name,
        "higher_is_better": line.metric.higher_is_better,
        "medians": by_name(&|_, name| figure_json(line.median(name))),
        "samples": by_name(&|i, _| json!(samples(i))),
        (format!("by_{}", comparison.everyone_by)):
            by_name(&|_, name| figure_json(line.ratio(name, comparison.everyone_by))),
        (format!("ours_by_{}", comparison.ours_by)):
            figure_json(line.ratio(OURS, comparison.ours_by)),
        "targets": verdicts,
    })
}

/// Converts a figure. JSON has no number for [`HUNG`].
fn figure_json(value: Option<f64>) -> Value {
    match value {
        Some(HUNG) => json!("hung"),
        value => json!(value),
    }
}

/// Returns the middle value, or the mean of the middle two. `None` without values.
pub(crate) fn median(values: &[f64]) -> Option<f64> {
    let mut sorted = values.to_vec();
    sorted.sort_unstable_by(f64::total_cmp);
    let upper = *sorted.get(sorted.len() / 2)?;
    let lower = *sorted.get((sorted.len() - 1) / 2)?;
    Some((lower + upper) / 2.0)
}

/// Formats a figure for the table.
pub(crate) fn number(value: Option<f64>, digits: usize) -> String {
    match value {
        None => "-".to_owned(),
        Some(HUNG) => "hung".to_owned(),
        Some(value) => format!("{value:.digits$}"),
    }
}

/// Formats one measurement in a line.
pub(crate) fn describe(figures: &anyhow::Result<Figures>) -> String {
    match figures {
        Ok(figures) => {
            let texts: Vec<String> = figures
                .iter()
                .map(|(metric, value)| format!("{} {}", number(Some(*value), 1), metric.name))
                .collect();
            texts.join(", ")
        }
        Err(error) => format!("failed: {error:#}"),
    }
}

#[cfg(test)]
mod tests {
    #![allow(clippy::unwrap_used, clippy::expect_used, clippy::indexing_slicing)]
    use super::*;

    const RATE: Metric = Metric::higher("MiB/s");
    const TIME: Metric = Metric::lower("us");

    type Outcome = Result<(f64, f64), &'static str>;

    fn report(samples: &[(&'static str, Outcome)]) -> Report {
        let machine = Machine {
            cores: 2,
            cpu: "cpu".to_owned(),
            kernel: "1".to_owned(),
        };
        let mut report = Report::new(&example::COMPARISON, machine, 3, 1.0);
        for (contender, outcome) in samples {
            let figures = outcome.map(|(rate, time)| vec![(RATE, rate), (TIME, time)]);
            let figures = figures.map_err(|error| anyhow::anyhow!("{error}"));
            report.add("CONNECT", "download", contender, figures);
        }
        report
    }

    #[test]
    fn medians_and_ratios() {
        let report = report(&[
            ("ours", Ok((300.0, 30.0))),
            ("stock", Ok((150.0, 20.0))),
            ("ours", Ok((100.0, 10.0))),
            ("stock", Ok((50.0, 10.0))),
            ("ours", Ok((200.0, 20.0))),
        ]);
        let lines = report.lines();
        assert_eq!(lines.len(), 2);
        let medians = ["ours", "stock", "direct"].map(|name| lines[0].median(name));
        assert_eq!(medians, [Some(200.0), Some(100.0), None]);
        assert_eq!(lines[0].ratio("ours", "stock"), Some(2.0));
        assert_eq!(lines[0].ratio("ours", "direct"), None);
        assert_eq!(lines[1].median("stock"), Some(15.0));
        assert!(report.is_clean());
        let json = report.json();
        let line = &json["lines"][0];
        assert_eq!(line["samples"]["ours"], json!([300.0, 100.0, 200.0]));
        assert_eq!(line["by_stock"]["ours"], json!(2.0));
        assert_eq!(line["ours_by_relay"], Value::Null);
    }

    #[test]
    fn hung_figure_is_text_in_json_and_no_failure() {
        let report = report(&[("ours", Ok((1.0, 5.0))), ("stock", Ok((1.0, HUNG)))]);
        assert!(report.is_clean());
        let json = report.json();
        assert_eq!(json["lines"][1]["medians"]["stock"], "hung");
        // A finite time divided by an infinite one is 0.
        assert_eq!(json["lines"][1]["by_stock"]["ours"], json!(0.0));
        assert_eq!(number(Some(HUNG), 2), "hung");
    }

    #[test]
    fn ratio_with_zero_divisor_is_missing() {
        let report = report(&[("ours", Ok((3.0, 3.0))), ("stock", Ok((0.0, 1.0)))]);
        let ratios = report.lines();
        let ratios = ratios.iter().map(|line| line.ratio("ours", "stock"));
        assert_eq!(ratios.collect::<Vec<_>>(), [None, Some(3.0)]);
    }

    #[test]
    fn failures_are_reported_and_have_no_ratios() {
        let report = report(&[("ours", Err("it broke")), ("stock", Ok((1.0, 1.0)))]);
        assert!(!report.is_clean());
        let lines = report.lines();
        assert!(
            lines
                .iter()
                .all(|line| line.ratio("ours", "stock").is_none())
        );
        assert_eq!(report.json()["failures"][0]["error"], "it broke");
    }

    #[test]
    fn contender_with_a_failed_measurement_misses_the_targets_of_the_row() {
        let row = "download, 1 connection";
        let figures = |rate| Ok(vec![(crate::figures::RATE, rate)]);
        let report = |failed: &'static str, successes: u32| {
            let mut report = Report::new(&example::COMPARISON, Machine::this(), 5, 1.0);
            report.add("CONNECT", row, "stock", figures(100.0));
            for _ in 0..successes {
                report.add("CONNECT", row, "ours", figures(500.0));
            }
            report.add("CONNECT", failed, "ours", Err(anyhow::anyhow!("it broke")));
            report
        };
        // The failure of another row has no effect.
        for (failed, successes, is_met) in [
            (row, 4, false),
            (row, 0, false),
            (START, 0, false),
            ("upload", 4, true),
        ] {
            let report = report(failed, successes);
            assert_eq!(report.meets_targets(), is_met, "{failed}, {successes}");
            let verdict = &report.json()["lines"][0]["targets"][0];
            assert_eq!(verdict["met"], json!(is_met));
            assert_eq!(verdict["value"].is_null(), !is_met);
        }
    }
}
