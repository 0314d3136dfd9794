//! A comparison and helpers for tests.

use super::{Comparison, Machine, Report};
use crate::figures::{CPU_PER_GIB, Metric, RATE};
use crate::targets::{Bound, Target};

const RATE_TARGET: Target = Target {
    front: Some("CONNECT"),
    rows: &["download, 1 connection"],
    metric: RATE,
    contender: "ours",
    against: Some("stock"),
    bound: Bound::AtLeast(4.0),
};

pub(crate) static COMPARISON: Comparison = Comparison {
    contenders: &["ours", "stock", "relay", "stock+ours", "direct"],
    everyone_by: "stock",
    ours_by: "relay",
    ratios: &[
        ("ours/st", "ours", "stock"),
        ("s+o/st", "stock+ours", "stock"),
        ("ours/relay", "ours", "relay"),
    ],
    targets: &[
        RATE_TARGET,
        Target {
            metric: CPU_PER_GIB,
            bound: Bound::AtMost(0.2),
            ..RATE_TARGET
        },
    ],
    notes: &[],
};

/// Returns a report with one figure per contender.
pub(crate) fn report(
    comparison: &'static Comparison,
    front: &'static str,
    row: &'static str,
    metric: Metric,
    medians: &[(&'static str, f64)],
) -> Report {
    let mut report = Report::new(comparison, Machine::this(), 1, 1.0);
    for (contender, value) in medians {
        report.add(front, row, contender, Ok(vec![(metric, *value)]));
    }
    report
}

/// Returns the verdicts that the table prints for a line with these medians.
pub(crate) fn verdicts(
    comparison: &'static Comparison,
    front: &'static str,
    row: &'static str,
    metric: Metric,
    medians: &[(&'static str, f64)],
) -> Vec<(String, bool)> {
    let lines = report(comparison, front, row, metric, medians).lines();
    let verdicts = lines.iter().flat_map(super::Line::verdicts);
    verdicts
        .map(|v| (format!("{} {}", v.target.contender, v.target), v.met()))
        .collect()
}

/// Returns `verdicts` in the form of [`verdicts`].
pub(crate) fn expected<const N: usize>(verdicts: [(&str, bool); N]) -> Vec<(String, bool)> {
    let verdicts = verdicts.into_iter();
    verdicts.map(|(text, met)| (text.to_owned(), met)).collect()
}
