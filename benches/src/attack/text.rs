//! The report of `attack` as text: one line per listener, attack and contender.

use std::fmt::Write as _;

use crate::attack::rows::{
    CLIENT_P99, CONNECTION_RATE, CONNECTIONS, DESCRIPTORS, DIAL_P99, FAILED, GROWTH, HEALTH_P99,
    RECOVERY, SENT,
};
use crate::figures::Metric;
use crate::names::OURS;
use crate::report::{Line, Report, number};

/// Headings and figures of the columns, with the number of digits after the decimal point.
const COLUMNS: [(&str, Metric, usize); 10] = [
    ("conns", CONNECTIONS, 0),
    ("conns/s", CONNECTION_RATE, 0),
    ("MiB sent", SENT, 1),
    ("+MiB", GROWTH, 1),
    ("+fds", DESCRIPTORS, 0),
    ("client", CLIENT_P99, 1),
    ("dial", DIAL_P99, 1),
    ("healthz", HEALTH_P99, 1),
    ("failed %", FAILED, 1),
    ("recovery", RECOVERY, 1),
];

/// Returns the table, the number of targets met, and the failures.
pub(super) fn table(report: &Report) -> String {
    let lines = report.lines();
    let mut text = String::new();
    // Writing to a string cannot fail.
    write(&lines, report, &mut text).ok();
    text
}

fn write(lines: &[Line], report: &Report, text: &mut String) -> std::fmt::Result {
    let (rounds, seconds) = (report.rounds, report.seconds);
    writeln!(
        text,
        "{}; medians of {rounds} rounds of {seconds} s; client, dial and healthz: p99 in ms; recovery in s",
        report.machine
    )?;
    write!(text, "{:9}{:31}{:7}", "listener", "attack", "")?;
    for (heading, ..) in COLUMNS {
        write!(text, "{heading:>9}")?;
    }
    writeln!(text, "  targets")?;
    let mut done: Vec<(&str, &str)> = Vec::new();
    for line in lines {
        if done.contains(&(line.front, line.row)) {
            continue;
        }
        done.push((line.front, line.row));
        let all = lines
            .iter()
            .filter(|other| (other.front, other.row) == (line.front, line.row));
        for contender in report.comparison.contenders {
            let figure = |metric| {
                let found = all.clone().find(|line| line.metric == metric);
                found.and_then(|line| line.median(contender))
            };
            if figure(GROWTH).is_none() {
                continue;
            }
            write!(text, "{:9}{:31}{contender:7}", line.front, line.row)?;
            for (_, metric, digits) in COLUMNS {
                write!(text, "{:>9}", number(figure(metric), digits))?;
            }
            let is_ours = *contender == OURS;
            let judgement = if is_ours {
                judgement(all.clone())
            } else {
                String::new()
            };
            writeln!(text, "  {judgement}")?;
        }
    }
    let verdicts: Vec<_> = lines.iter().flat_map(Line::verdicts).collect();
    let met = verdicts.iter().filter(|verdict| verdict.met()).count();
    writeln!(text, "{met} of {} targets met", verdicts.len())?;
    for (sample, error) in report.failures() {
        let (front, row, contender) = (sample.front, sample.row, sample.contender);
        writeln!(text, "FAILED {front} {row}, {contender}: {error}")?;
    }
    Ok(())
}

/// Returns the missed targets of an attack, or that all are met.
fn judgement<'a>(lines: impl Iterator<Item = &'a Line>) -> String {
    let missed: Vec<String> = lines
        .flat_map(|line| {
            let verdicts = line.verdicts().into_iter();
            let missed = verdicts.filter(|verdict| !verdict.met());
            missed.map(|verdict| format!("{} {}", line.metric.name, verdict.target))
        })
        .collect();
    if missed.is_empty() {
        "met".to_owned()
    } else {
        format!("MISSED {}", missed.join(", "))
    }
}

#[cfg(test)]
mod tests {
    #![allow(clippy::unwrap_used, clippy::expect_used, clippy::indexing_slicing)]
    use super::*;
    use crate::attack::rows::{NOISE, SILENT};
    use crate::attack::targets::COMPARISON;
    use crate::figures::HUNG;
    use crate::names::STOCK;
    use crate::report::Machine;

    #[test]
    fn table_has_one_line_per_attack_and_contender() {
        let mut report = Report::new(&COMPARISON, Machine::this(), 1, 1.0);
        for (contender, growth, client) in [(OURS, 40.0, 3.0), (STOCK, 100.0, HUNG)] {
            let figures = vec![(GROWTH, growth), (CLIENT_P99, client)];
            report.add("agents", SILENT, contender, Ok(figures));
        }
        report.add("agents", NOISE, OURS, Err(anyhow::anyhow!("it broke")));
        let text = table(&report);
        let lines: Vec<&str> = text.lines().collect();
        assert!(lines[2].contains(" 40.0") && lines[2].ends_with("MISSED MiB growth <= 32"));
        assert!(
            lines[3].contains("stock") && lines[3].contains("hung"),
            "{text}"
        );
        assert_eq!(lines[4], "3 of 4 targets met");
        assert_eq!(lines[5], "FAILED agents noise, ours: it broke");
    }
}
