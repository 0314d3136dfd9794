//! Medians, table, JSON.

use std::fmt;

use serde_json::{Value, json};

use crate::topology::CONTENDERS;

/// What is measured of a row.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Metric {
    /// With its unit.
    pub name: &'static str,
    higher_is_better: bool,
}

impl Metric {
    /// One of which more is better.
    pub const fn higher(name: &'static str) -> Self {
        Self {
            name,
            higher_is_better: true,
        }
    }

    /// One of which less is better.
    pub const fn lower(name: &'static str) -> Self {
        Self {
            name,
            higher_is_better: false,
        }
    }

    /// Whether ours is at least as good as stock, by the ratio of the two.
    fn as_good(self, ratio: f64) -> bool {
        if self.higher_is_better {
            ratio >= 1.0
        } else {
            ratio <= 1.0
        }
    }
}

/// What one measurement gave.
pub type Figures = Vec<(Metric, f64)>;

/// Where the figures come from, as far as it matters to them.
#[derive(Debug)]
pub struct Machine {
    cores: usize,
    cpu: String,
    kernel: String,
}

impl Machine {
    /// This one.
    pub fn this() -> Self {
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

/// One measurement of a row with one contender.
#[derive(Debug)]
struct Sample {
    front: &'static str,
    row: &'static str,
    contender: &'static str,
    outcome: Result<Figures, String>,
}

/// Everything that was measured. Displayed as a table.
#[derive(Debug)]
pub struct Report {
    machine: Machine,
    rounds: u32,
    seconds: f64,
    samples: Vec<Sample>,
}

/// One line of the table.
struct Line {
    front: &'static str,
    row: &'static str,
    metric: Metric,
    /// By contender, in the order of [`CONTENDERS`].
    values: Vec<Vec<f64>>,
}

impl Line {
    fn medians(&self) -> Vec<Option<f64>> {
        self.values.iter().map(|values| median(values)).collect()
    }

    /// Ours by stock, if both were measured.
    fn ratio(&self) -> Option<f64> {
        let of = |name| {
            let mut pairs = CONTENDERS.iter().zip(&self.values);
            let (_, values) = pairs.find(|(contender, _)| contender.name == name)?;
            median(values)
        };
        Some(of("ours")? / of("stock")?).filter(|ratio| ratio.is_finite())
    }

    fn as_good(&self) -> Option<bool> {
        self.ratio().map(|ratio| self.metric.as_good(ratio))
    }
}

impl Report {
    /// An empty one.
    pub fn new(machine: Machine, rounds: u32, seconds: f64) -> Self {
        Self {
            machine,
            rounds,
            seconds,
            samples: Vec::new(),
        }
    }

    /// Adds one measurement.
    pub fn add(
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

    /// Whether no measurement failed.
    pub fn is_clean(&self) -> bool {
        self.failures().next().is_none()
    }

    fn failures(&self) -> impl Iterator<Item = (&Sample, &str)> {
        self.samples
            .iter()
            .filter_map(move |sample| match &sample.outcome {
                Ok(_) => None,
                Err(error) => Some((sample, error.as_str())),
            })
    }

    /// The lines of the table, in the order in which their first figures came.
    fn lines(&self) -> Vec<Line> {
        let mut lines: Vec<Line> = Vec::new();
        for sample in &self.samples {
            for (metric, value) in sample.outcome.iter().flatten() {
                let key = (sample.front, sample.row, *metric);
                let known = lines.iter().position(|l| (l.front, l.row, l.metric) == key);
                let at = known.unwrap_or(lines.len());
                if known.is_none() {
                    lines.push(Line {
                        front: sample.front,
                        row: sample.row,
                        metric: *metric,
                        values: vec![Vec::new(); CONTENDERS.len()],
                    });
                }
                let contender = CONTENDERS.iter().position(|c| c.name == sample.contender);
                let values = lines.get_mut(at).zip(contender);
                if let Some(values) = values.and_then(|(line, c)| line.values.get_mut(c)) {
                    values.push(*value);
                }
            }
        }
        lines
    }

    /// Medians, samples, ratios and failures.
    pub fn json(&self) -> Value {
        let lines: Vec<Value> = self
            .lines()
            .iter()
            .map(|line| {
                let medians = line.medians();
                let by_name = |value: &dyn Fn(usize) -> Value| -> Value {
                    let names = CONTENDERS.iter().enumerate();
                    names.map(|(i, c)| (c.name.to_owned(), value(i))).collect()
                };
                json!({
                    "front": line.front,
                    "row": line.row,
                    "metric": line.metric.name,
                    "higher_is_better": line.metric.higher_is_better,
                    "medians": by_name(&|i| json!(medians.get(i))),
                    "samples": by_name(&|i| json!(line.values.get(i))),
                    "ours_by_stock": line.ratio(),
                    "as_good": line.as_good(),
                })
            })
            .collect();
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

/// The middle one, or the mean of the middle two; none of nothing.
fn median(values: &[f64]) -> Option<f64> {
    let mut sorted = values.to_vec();
    sorted.sort_unstable_by(f64::total_cmp);
    let upper = *sorted.get(sorted.len() / 2)?;
    let lower = *sorted.get((sorted.len() - 1) / 2)?;
    Some((lower + upper) / 2.0)
}

impl fmt::Display for Report {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let Self {
            machine,
            rounds,
            seconds,
            ..
        } = self;
        writeln!(f, "{machine}; medians of {rounds} x {seconds} s")?;
        write!(f, "{:8} {:28} {:12}", "front", "row", "")?;
        for contender in &CONTENDERS {
            write!(f, " {:>10}", contender.name)?;
        }
        writeln!(f, " {:>10}  as good", "ours/stock")?;
        for line in self.lines() {
            let Line {
                front, row, metric, ..
            } = &line;
            write!(f, "{front:8} {row:28} {:12}", metric.name)?;
            for median in line.medians() {
                write!(f, " {:>10}", number(median, 1))?;
            }
            let verdict = match line.as_good() {
                Some(true) => "yes",
                Some(false) => "NO",
                None => "-",
            };
            writeln!(f, " {:>10}  {verdict}", number(line.ratio(), 2))?;
        }
        for (sample, error) in self.failures() {
            let Sample {
                front,
                row,
                contender,
                ..
            } = sample;
            writeln!(f, "FAILED {front} {row}, {contender}: {error}")?;
        }
        Ok(())
    }
}

fn number(value: Option<f64>, digits: usize) -> String {
    value.map_or_else(|| "-".to_owned(), |value| format!("{value:.digits$}"))
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
        let mut report = Report::new(machine, 3, 1.0);
        for (contender, outcome) in samples {
            let figures = outcome.map(|(rate, time)| vec![(RATE, rate), (TIME, time)]);
            let figures = figures.map_err(|error| anyhow::anyhow!("{error}"));
            report.add("CONNECT", "download", contender, figures);
        }
        report
    }

    #[test]
    fn medians_are_compared_in_the_direction_of_the_metric() {
        let report = report(&[
            ("ours", Ok((300.0, 30.0))),
            ("stock", Ok((150.0, 20.0))),
            ("ours", Ok((100.0, 10.0))),
            ("stock", Ok((50.0, 10.0))),
            ("ours", Ok((200.0, 20.0))),
        ]);
        let lines = report.lines();
        assert_eq!(lines.len(), 2);
        assert_eq!(lines[0].medians(), [Some(200.0), Some(100.0), None, None]);
        assert_eq!(
            (lines[0].ratio(), lines[0].as_good()),
            (Some(2.0), Some(true))
        );
        assert_eq!(lines[1].medians()[..2], [Some(20.0), Some(15.0)]);
        assert_eq!(lines[1].as_good(), Some(false));
        assert!(report.is_clean());
        let json = report.json();
        assert_eq!(
            json["lines"][0]["samples"]["ours"],
            json!([300.0, 100.0, 200.0])
        );
        assert_eq!(json["lines"][1]["as_good"], json!(false));
    }

    #[test]
    fn failures_are_shown_and_compared_with_nothing() {
        let report = report(&[("ours", Err("it broke")), ("stock", Ok((1.0, 1.0)))]);
        assert!(!report.is_clean());
        let text = report.to_string();
        assert!(
            text.contains("FAILED CONNECT download, ours: it broke"),
            "{text}"
        );
        assert!(report.lines().iter().all(|line| line.as_good().is_none()));
        assert_eq!(report.json()["failures"][0]["error"], "it broke");
    }
}
