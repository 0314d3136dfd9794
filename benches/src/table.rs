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
            writeln!(f, "  {}", judgement(line))?;
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
        let error = anyhow::anyhow!("it broke");
        report.add("CONNECT", row, "stock+ours", Err(error));
        let text = report.to_string();
        let lines: Vec<&str> = text.lines().collect();
        assert!(lines[1].contains("ours/st"), "{text}");
        // No sample has a figure for these columns.
        assert!(
            !lines[1].contains("relay") && !lines[1].contains("s+o"),
            "{text}"
        );
        assert!(
            lines[2].contains("5.00") && lines[2].ends_with("met"),
            "{text}"
        );
        assert!(lines[3].ends_with("MISSED ours <= 0.2x stock"), "{text}");
        assert_eq!(lines[4], "1 of 2 targets met");
        let failed = format!("FAILED CONNECT {row}, stock+ours: it broke");
        assert_eq!(lines[5], failed);
    }
}
