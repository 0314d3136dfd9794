//! The targets for our programs: bounds for medians, mostly relative to other contenders in the same run. The
//! targets of `tunnel` are defined here.

use std::fmt;

use crate::report::{Line, Metric};
use crate::rows::{
    AGENT_MEMORY, CPU_PER_DIAL, CPU_PER_GIB, IDLE_MEMORY, MEMORY_START, P50, P99, RATE,
    RATIO_STALLED,
};
use crate::topology::{DIRECT, OURS, OURS_STOCK, RELAY, STOCK, STOCK_OURS};

/// Bound of a figure.
#[derive(Debug, Clone, Copy, PartialEq)]
pub enum Bound {
    /// Upper bound.
    AtMost(f64),
    /// Lower bound.
    AtLeast(f64),
}

/// One target.
#[derive(Debug, Clone, Copy)]
pub struct Target {
    /// The front end, or `None` for all.
    pub front: Option<&'static str>,
    /// Names of the rows.
    pub rows: &'static [&'static str],
    /// The figure.
    pub metric: Metric,
    /// The contender that has to reach the target.
    pub contender: &'static str,
    /// The contender whose figure is the divisor, if any.
    pub against: Option<&'static str>,
    /// Bound of the figure or of the ratio.
    pub bound: Bound,
}

/// The result for one target.
#[derive(Debug, Clone, Copy)]
pub struct Verdict {
    /// The target.
    pub target: Target,
    /// The figure, or its ratio.
    pub value: f64,
}

impl Verdict {
    /// Returns true if the target is met.
    pub fn met(&self) -> bool {
        match self.target.bound {
            Bound::AtMost(bound) => self.value <= bound,
            Bound::AtLeast(bound) => self.value >= bound,
        }
    }
}

impl fmt::Display for Target {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self.bound {
            Bound::AtMost(bound) => write!(f, "<= {bound}")?,
            Bound::AtLeast(bound) => write!(f, ">= {bound}")?,
        }
        match self.against {
            Some(against) => write!(f, "x {against}"),
            None => Ok(()),
        }
    }
}

const CONNECT: Option<&str> = Some("CONNECT");
const GRPC: Option<&str> = Some("gRPC");

const BULK: &[&str] = &[
    "download, 1 connection",
    "download, 8 connections",
    "upload, 1 connection",
    "upload, 8 connections",
];
const ALONE: &[&str] = &["64-byte echo, 1 connection", "64-byte echo, 8 connections"];
const BESIDE: &[&str] = &["64-byte echo beside 2 downloads"];
const DIALS: &[&str] = &["dial + 1 byte, 8 at a time"];
const STALLED: &[&str] = &["50 echoes beside 16 stalled"];
const FAR: &[&str] = &["download, 100 ms RTT", "download, 100 ms RTT, 1 Gbit/s"];
const MEMORY: &[&str] = &[
    crate::rows::MEMORY,
    "memory, 10,000 idle",
    "memory beside bulk, 1000 idle",
];

/// A target for ours, relative to stock.
const fn ours(
    front: Option<&'static str>,
    rows: &'static [&'static str],
    metric: Metric,
    bound: Bound,
) -> Target {
    Target {
        front,
        rows,
        metric,
        contender: OURS,
        against: Some(STOCK),
        bound,
    }
}

/// A target for a pair with one half of ours, relative to stock.
const fn mixed(contender: &'static str, metric: Metric, bound: Bound) -> Target {
    Target {
        contender,
        ..ours(None, BULK, metric, bound)
    }
}

/// An absolute target for ours.
const fn alone(rows: &'static [&'static str], metric: Metric, bound: f64) -> Target {
    Target {
        against: None,
        ..ours(None, rows, metric, Bound::AtMost(bound))
    }
}

/// Targets of `tunnel`.
pub const TUNNEL: [Target; 18] = [
    ours(CONNECT, BULK, CPU_PER_GIB, Bound::AtMost(0.20)),
    Target {
        against: Some(RELAY),
        ..ours(CONNECT, BULK, CPU_PER_GIB, Bound::AtMost(0.75))
    },
    ours(CONNECT, BULK, RATE, Bound::AtLeast(4.0)),
    ours(GRPC, BULK, CPU_PER_GIB, Bound::AtMost(0.25)),
    mixed(OURS_STOCK, RATE, Bound::AtLeast(1.0)),
    mixed(OURS_STOCK, CPU_PER_GIB, Bound::AtMost(1.0)),
    mixed(STOCK_OURS, RATE, Bound::AtLeast(1.0)),
    mixed(STOCK_OURS, CPU_PER_GIB, Bound::AtMost(1.0)),
    ours(CONNECT, DIALS, CPU_PER_DIAL, Bound::AtMost(0.20)),
    ours(GRPC, DIALS, CPU_PER_DIAL, Bound::AtMost(0.25)),
    ours(None, ALONE, P50, Bound::AtMost(0.40)),
    ours(None, BESIDE, P50, Bound::AtMost(0.125)),
    ours(None, BESIDE, P99, Bound::AtMost(0.25)),
    alone(STALLED, RATIO_STALLED, 1.5),
    alone(MEMORY, MEMORY_START, 20.0),
    alone(MEMORY, IDLE_MEMORY, 12.0),
    alone(MEMORY, AGENT_MEMORY, 30.0),
    Target {
        against: Some(DIRECT),
        ..ours(None, FAR, RATE, Bound::AtLeast(0.8))
    },
];

/// Returns the verdicts of a line. Targets without a measured figure have none.
pub fn verdicts(line: &Line, targets: &[Target]) -> Vec<Verdict> {
    let expected = targets.iter().filter(|target| {
        target.front.is_none_or(|front| front == line.front)
            && target.rows.contains(&line.row)
            && target.metric == line.metric
    });
    expected
        .filter_map(|target| {
            let value = match target.against {
                Some(against) => line.ratio(target.contender, against),
                None => line.median(target.contender),
            };
            value.map(|value| Verdict {
                target: *target,
                value,
            })
        })
        .collect()
}

#[cfg(test)]
mod tests {
    #![allow(clippy::unwrap_used, clippy::expect_used, clippy::indexing_slicing)]
    use super::*;
    use crate::report::{HUNG, Machine, Report};
    use crate::rows::ROWS;

    /// Returns the verdicts for one line with these medians.
    fn said(
        front: &'static str,
        row: &'static str,
        metric: Metric,
        medians: &[(&'static str, f64)],
    ) -> Vec<(String, bool)> {
        let mut report = Report::new(&crate::tunnel::COMPARISON, Machine::this(), 1, 1.0);
        for (contender, value) in medians {
            report.add(front, row, contender, Ok(vec![(metric, *value)]));
        }
        report.lines()[0]
            .verdicts()
            .iter()
            .map(|v| (format!("{} {}", v.target.contender, v.target), v.met()))
            .collect()
    }

    #[test]
    fn every_row_of_a_target_exists() {
        for target in &TUNNEL {
            for row in target.rows {
                let known = ROWS.iter().any(|known| known.name == *row);
                assert!(known || *row == crate::rows::MEMORY, "{row}");
            }
        }
    }

    #[test]
    fn bounds_apply_to_ratios_in_the_right_direction() {
        let medians = [
            ("ours", 399.0),
            ("stock", 100.0),
            ("ours+stock", 100.0),
            ("stock+ours", 99.0),
        ];
        let verdicts = said("CONNECT", "download, 8 connections", RATE, &medians);
        let expected = [
            ("ours >= 4x stock", false),
            ("ours+stock >= 1x stock", true),
            ("stock+ours >= 1x stock", false),
        ];
        assert_eq!(verdicts, expected.map(|(text, met)| (text.to_owned(), met)));

        let medians = [("ours", 1.5), ("stock", 8.0), ("relay", 1.9)];
        let verdicts = said("CONNECT", "upload, 1 connection", CPU_PER_GIB, &medians);
        let expected = [("ours <= 0.2x stock", true), ("ours <= 0.75x relay", false)];
        assert_eq!(verdicts, expected.map(|(text, met)| (text.to_owned(), met)));

        // gRPC has another bound, and no target for the rate.
        let medians = [("ours", 2.0), ("stock", 8.0)];
        let verdicts = said("gRPC", "upload, 1 connection", CPU_PER_GIB, &medians);
        assert_eq!(verdicts, [("ours <= 0.25x stock".to_owned(), true)]);
        assert!(said("gRPC", "upload, 1 connection", RATE, &medians).is_empty());
    }

    #[test]
    fn hung_figure_misses_target_and_missing_figure_has_no_verdict() {
        let row = "50 echoes beside 16 stalled";
        let hung = said("gRPC", row, RATIO_STALLED, &[("ours", HUNG)]);
        assert_eq!(hung, [("ours <= 1.5".to_owned(), false)]);
        let fine = said(
            "gRPC",
            row,
            RATIO_STALLED,
            &[("ours", 1.4), ("stock", HUNG)],
        );
        assert_eq!(fine, [("ours <= 1.5".to_owned(), true)]);
        assert!(said("gRPC", row, RATIO_STALLED, &[("stock", HUNG)]).is_empty());
        let far = "download, 100 ms RTT";
        assert!(said("CONNECT", far, RATE, &[("ours", 1.0)]).is_empty());
    }
}
