//! The comparison of `tunnel`, and the targets for our programs.

use crate::figures::{
    AGENT_MEMORY, CPU_BY_BEFORE, CPU_PER_DIAL, CPU_PER_GIB, DIAL_BY_BEFORE, ECHO_BY_BEFORE,
    IDLE_MEMORY, MEMORY_START, Metric, P50, P99, RATE, RATIO_STALLED,
};
use crate::names::{self, BULK, DIALS, DIRECT, ECHOES, OURS, OURS_STOCK, QUIC, RESUME, STOCK};
use crate::report::Comparison;
use crate::targets::{Bound, Target};
use crate::tunnel::contenders::{BARE, RATHOLE, RELAY, STOCK_OURS};
use crate::tunnel::rows::LOST;

/// Server and agent, compared with the stock pair and with the cost of TLS alone.
pub(crate) static COMPARISON: Comparison = Comparison {
    contenders: &[
        OURS, STOCK, OURS_STOCK, STOCK_OURS, RELAY, BARE, RATHOLE, QUIC, RESUME, DIRECT,
    ],
    everyone_by: STOCK,
    ours_by: RELAY,
    ratios: &[
        ("ours/st", OURS, STOCK),
        ("o+s/st", OURS_STOCK, STOCK),
        ("s+o/st", STOCK_OURS, STOCK),
        ("ours/relay", OURS, RELAY),
        ("ours/bare", OURS, BARE),
        ("quic/ours", QUIC, OURS),
        ("res/ours", RESUME, OURS),
    ],
    targets: &TARGETS,
    notes: &[],
};

const CONNECT: Option<&str> = Some("CONNECT");
const GRPC: Option<&str> = Some("gRPC");

const BESIDE: &[&str] = &["64-byte echo beside 2 downloads"];
const STALLED: &[&str] = &["50 echoes beside 16 stalled"];
const ABORTED: &[&str] = &["8 aborted by clients", "8 aborted by endpoints", LOST];
const FAR: &[&str] = &["download, 100 ms RTT", "download, 100 ms RTT, 1 Gbit/s"];
const MEMORY: &[&str] = &[
    names::MEMORY,
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

/// A target for ours, relative to the bare relay.
const fn near_bare(rows: &'static [&'static str], metric: Metric) -> Target {
    Target {
        against: Some(BARE),
        ..ours(CONNECT, rows, metric, Bound::AtMost(1.15))
    }
}

/// A target for a pair with one half of ours, relative to stock.
const fn mixed(contender: &'static str, metric: Metric, bound: Bound) -> Target {
    Target {
        contender,
        ..ours(None, BULK, metric, bound)
    }
}

/// A target for another kind of link between our programs, relative to a TCP link that does not resume.
const fn link(contender: &'static str, bound: f64) -> Target {
    Target {
        contender,
        against: Some(OURS),
        ..ours(None, BULK, CPU_PER_GIB, Bound::AtMost(bound))
    }
}

/// An absolute target for ours.
const fn alone(rows: &'static [&'static str], metric: Metric, bound: f64) -> Target {
    Target {
        against: None,
        ..ours(None, rows, metric, Bound::AtMost(bound))
    }
}

/// A target for a load after aborts, relative to the same load before.
const fn aborted(contender: &'static str, metric: Metric) -> Target {
    Target {
        contender,
        ..alone(ABORTED, metric, 1.1)
    }
}

/// An absolute target for the echo of a stock agent beside downloads, in us.
const fn beside(front: Option<&'static str>, metric: Metric, bound: f64) -> Target {
    Target {
        front,
        contender: OURS_STOCK,
        ..alone(BESIDE, metric, bound)
    }
}

/// Targets of `tunnel`.
const TARGETS: [Target; 36] = [
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
    ours(None, ECHOES, P50, Bound::AtMost(0.40)),
    near_bare(ECHOES, P50),
    near_bare(DIALS, CPU_PER_DIAL),
    link(QUIC, 1.7),
    link(RESUME, 1.1),
    ours(None, BESIDE, P50, Bound::AtMost(0.125)),
    ours(None, BESIDE, P99, Bound::AtMost(0.25)),
    Target {
        contender: OURS_STOCK,
        ..ours(None, BESIDE, P50, Bound::AtMost(0.7))
    },
    beside(CONNECT, P50, 2500.0),
    beside(CONNECT, P99, 6000.0),
    beside(GRPC, P50, 3000.0),
    beside(GRPC, P99, 7000.0),
    alone(STALLED, RATIO_STALLED, 1.5),
    aborted(OURS, ECHO_BY_BEFORE),
    aborted(OURS, DIAL_BY_BEFORE),
    aborted(OURS, CPU_BY_BEFORE),
    aborted(OURS_STOCK, ECHO_BY_BEFORE),
    aborted(OURS_STOCK, DIAL_BY_BEFORE),
    aborted(OURS_STOCK, CPU_BY_BEFORE),
    aborted(STOCK_OURS, ECHO_BY_BEFORE),
    aborted(STOCK_OURS, DIAL_BY_BEFORE),
    aborted(STOCK_OURS, CPU_BY_BEFORE),
    alone(MEMORY, MEMORY_START, 20.0),
    alone(MEMORY, IDLE_MEMORY, 12.0),
    alone(MEMORY, AGENT_MEMORY, 30.0),
    Target {
        against: Some(DIRECT),
        ..ours(None, FAR, RATE, Bound::AtLeast(0.8))
    },
];

#[cfg(test)]
mod tests {
    use super::*;
    use crate::figures::HUNG;
    use crate::report::example::{self, expected};
    use crate::tunnel::rows::ROWS;

    fn said(
        front: &'static str,
        row: &'static str,
        metric: Metric,
        medians: &[(&'static str, f64)],
    ) -> Vec<(String, bool)> {
        example::verdicts(&COMPARISON, front, row, metric, medians)
    }

    #[test]
    fn every_row_of_a_target_exists() {
        for target in &TARGETS {
            for row in target.rows {
                let known = ROWS.iter().any(|known| known.name == *row);
                assert!(known || *row == names::MEMORY, "{row}");
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
        let expectation = expected([
            ("ours >= 4x stock", false),
            ("ours+stock >= 1x stock", true),
            ("stock+ours >= 1x stock", false),
        ]);
        assert_eq!(verdicts, expectation);

        let medians = [("ours", 1.5), ("stock", 8.0), ("relay", 1.9)];
        let verdicts = said("CONNECT", "upload, 1 connection", CPU_PER_GIB, &medians);
        let expectation = expected([("ours <= 0.2x stock", true), ("ours <= 0.75x relay", false)]);
        assert_eq!(verdicts, expectation);

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
