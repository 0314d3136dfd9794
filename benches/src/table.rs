//! The report as text: medians, ratios, verdicts, failures.

use std::fmt;

use crate::report::{Line, Report, Sample, number};

impl fmt::Display for Report {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let lines = self.lines();
        // Only contenders with figures have a column.
        let measured = |name: &&str| lines.iter().any(|line| line.median(name).is_some());
        let contenders = self.comparison.contenders.iter().copied();
        let names: Vec<&str> = contenders.filter(measured).collect();
        let compared = |(_, name, against): &&(&str, &str, &str)| {
            let mut lines = lines.iter();
            lines.any(|line| line.ratio(name, against).is_some())
        };
        let ratios: Vec<_> = self.comparison.ratios.iter().filter(compared).collect();

        let wide = lines.iter().map(|line| line.metric.name.len()).max();
        let wide = wide.unwrap_or_default().max(12);
        let (rounds, seconds) = (self.rounds, self.seconds);
        writeln!(f, "{}; medians of {rounds} x {seconds} s", self.machine)?;
        write!(f, "{:8} {:32} {:wide$}", "front", "row", "")?;
        for name in &names {
            write!(f, " {name:>10}")?;
        }
        for (heading, ..) in &ratios {
            write!(f, " {heading:>10}")?;
        }
        let pairings = pairings(&ratios, self.comparison.everyone_by);
        let summary = format!("by {}", self.comparison.everyone_by);
        if !pairings.is_empty() {
            write!(f, " {summary:>10}")?;
        }
        writeln!(f, "  targets")?;
        for line in &lines {
            write!(
                f,
                "{:8} {:32} {:wide$}",
                line.front, line.row, line.metric.name
            )?;
            for name in &names {
                write!(f, " {:>10}", number(line.median(name), 1))?;
            }
            for (_, name, against) in &ratios {
                write!(f, " {:>10}", number(line.ratio(name, against), 2))?;
            }
            if !pairings.is_empty() {
                write!(f, " {:>10}", number(worst(line, &pairings), 2))?;
            }
            writeln!(f, "  {}", judgement(line))?;
        }
        for line in &lines {
            for (name, against) in &pairings {
                if let Some(ratio) = goodness(line, name, against).filter(|by| *by < EQUAL) {
                    let (front, row, metric) = (line.front, line.row, line.metric.name);
                    writeln!(
                        f,
                        "WORSE {front} {row}, {metric}, {name}: {ratio:.2} {summary}"
                    )?;
                }
            }
        }
        let verdicts: Vec<_> = lines.iter().flat_map(Line::verdicts).collect();
        if !verdicts.is_empty() {
            let met = verdicts.iter().filter(|verdict| verdict.met()).count();
            writeln!(f, "{met} of {} targets met", verdicts.len())?;
        }
        for (metric, note) in self.comparison.notes {
            if lines.iter().any(|line| line.metric == *metric) {
                writeln!(f, "{note}")?;
            }
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

/// Ratio from which a contender counts as no worse than the reference.
const EQUAL: f64 = 0.95;

/// Returns the ratios with the reference of all contenders as the divisor: contender and reference. Empty unless there
/// are several, because one has a column already.
fn pairings<'a>(
    ratios: &[&(&str, &'a str, &'a str)],
    everyone_by: &str,
) -> Vec<(&'a str, &'a str)> {
    let by_reference = ratios
        .iter()
        .filter(|(.., against)| *against == everyone_by);
    let found: Vec<_> = by_reference
        .map(|(_, name, against)| (*name, *against))
        .collect();
    if found.len() > 1 { found } else { Vec::new() }
}

/// Returns how many times better `contender` is than `against`: the ratio of their figures, or the inverse if smaller
/// figures are better.
fn goodness(line: &Line, contender: &str, against: &str) -> Option<f64> {
    match line.metric.higher_is_better {
        true => line.ratio(contender, against),
        false => line.ratio(against, contender),
    }
}

/// Returns the smallest [`goodness`] of all pairings.
fn worst(line: &Line, pairings: &[(&str, &str)]) -> Option<f64> {
    let all = pairings.iter();
    all.filter_map(|(name, against)| goodness(line, name, against))
        .min_by(f64::total_cmp)
}

/// Returns the missed targets of a line, or that all are met.
fn judgement(line: &Line) -> String {
    let verdicts = line.verdicts();
    let missed: Vec<String> = verdicts
        .iter()
        .filter(|verdict| !verdict.met())
        .map(|verdict| format!("{} {}", verdict.target.contender, verdict.target))
        .collect();
    match (verdicts.is_empty(), missed.is_empty()) {
        (true, _) => "-".to_owned(),
        (false, true) => "met".to_owned(),
        (false, false) => format!("MISSED {}", missed.join(", ")),
    }
}

#[cfg(test)]
mod tests {
    #![allow(clippy::unwrap_used, clippy::expect_used, clippy::indexing_slicing)]
    use super::*;
    use crate::figures::{CPU_PER_GIB, RATE};
    use crate::report::Machine;
    use crate::report::example::COMPARISON;

    #[test]
    fn table_shows_medians_ratios_verdicts_and_failures() {
        let mut report = Report::new(&COMPARISON, Machine::this(), 1, 1.0);
        let row = "download, 1 connection";
        for (name, rate, cpu) in [("ours", 500.0, 2.0), ("stock", 100.0, 8.0)] {
            let figures = vec![(RATE, rate), (CPU_PER_GIB, cpu)];
            report.add("CONNECT", row, name, Ok(figures));
        }
        let figures = vec![(RATE, 90.0), (CPU_PER_GIB, 1.0)];
        report.add("CONNECT", row, "stock+ours", Ok(figures));
        let error = anyhow::anyhow!("it broke");
        report.add("CONNECT", row, "direct", Err(error));
        let text = report.to_string();
        let lines: Vec<&str> = text.lines().collect();
        assert!(lines[1].contains("ours/st"), "{text}");
        // No sample has a figure for these columns.
        assert!(!lines[1].contains("relay"), "{text}");
        assert!(lines[1].contains("by stock"), "{text}");
        // The worst pairing by stock: more than 1 is better, for rates and for times.
        let columns = |line: &str| {
            line.split_whitespace()
                .map(str::to_owned)
                .collect::<Vec<_>>()
        };
        assert!(
            columns(lines[2]).ends_with(&columns("5.00 0.90 0.90 met")),
            "{text}"
        );
        let missed = columns("0.25 0.12 4.00 MISSED ours <= 0.2x stock");
        assert!(columns(lines[3]).ends_with(&missed), "{text}");
        let worse = format!("WORSE CONNECT {row}, MiB/s, stock+ours: 0.90 by stock");
        assert_eq!(lines[4], worse);
        assert_eq!(lines[5], "1 of 2 targets met");
        let failed = format!("FAILED CONNECT {row}, direct: it broke");
        assert_eq!(lines[6], failed);
    }
}
