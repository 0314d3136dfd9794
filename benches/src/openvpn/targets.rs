//! The comparison of `openvpn`, and the targets for our programs.

use crate::figures::{CPU_BY_BEFORE, DIAL_BY_BEFORE, ECHO_BY_BEFORE, Metric, RATE, RATIO_STALLED};
use crate::names::{ABORTED, BULK, OURS, OURS_STOCK, STOCK};
use crate::openvpn::contenders::{OURS_STOCK_UDP, OURS_UDP};
use crate::openvpn::rows::{
    BURSTS, CLIENT_GBIT, CROWD, CUT, FAILED, SERVER_GBIT, SERVER_LOAD, SWITCHED,
};
use crate::report::Comparison;
use crate::targets::{Bound, Target};

/// Our pair and our server with the stock client, compared with the stock pair.
pub(crate) static COMPARISON: Comparison = Comparison {
    contenders: &[OURS, OURS_UDP, OURS_STOCK, OURS_STOCK_UDP, STOCK],
    everyone_by: STOCK,
    ours_by: OURS_STOCK,
    ratios: &[
        ("o+s/st", OURS_STOCK, STOCK),
        ("ours u/t", OURS_UDP, OURS),
        ("o+s u/t", OURS_STOCK_UDP, OURS_STOCK),
    ],
    targets: &TARGETS,
    notes: &[(
        SERVER_GBIT,
        "Gbit/CPU-s: the targets are per process, the server by its own processor time and the client by its own; \
         what both reach together stands beside them, without a target",
    )],
};

/// An absolute target.
const fn alone(
    contender: &'static str,
    rows: &'static [&'static str],
    metric: Metric,
    bound: Bound,
) -> Target {
    Target {
        front: None,
        rows,
        metric,
        contender,
        against: None,
        bound,
    }
}

/// A target for a rate relative to another contender.
const fn by(
    against: &'static str,
    contender: &'static str,
    rows: &'static [&'static str],
    bound: f64,
) -> Target {
    Target {
        against: Some(against),
        ..alone(contender, rows, RATE, Bound::AtLeast(bound))
    }
}

/// A target for a load after aborts, relative to the same load before.
const fn aborted(contender: &'static str, metric: Metric) -> Target {
    alone(contender, ABORTED, metric, Bound::AtMost(1.1))
}

/// Targets of `openvpn`.
const TARGETS: [Target; 16] = [
    by(STOCK, OURS_STOCK, BULK, 1.0),
    alone(OURS_STOCK, BULK, SERVER_LOAD, Bound::AtMost(60.0)),
    // Each process counts only its own processor time. The figure for both together has no target.
    alone(OURS, BULK, SERVER_GBIT, Bound::AtLeast(5.0)),
    alone(OURS, BULK, CLIENT_GBIT, Bound::AtLeast(5.0)),
    by(OURS, OURS_UDP, BURSTS, 0.7),
    by(OURS_STOCK, OURS_STOCK_UDP, BURSTS, 0.7),
    alone(OURS, CROWD, RATIO_STALLED, Bound::AtMost(2.0)),
    alone(OURS_STOCK, CROWD, RATIO_STALLED, Bound::AtMost(2.0)),
    aborted(OURS, ECHO_BY_BEFORE),
    aborted(OURS, DIAL_BY_BEFORE),
    aborted(OURS, CPU_BY_BEFORE),
    aborted(OURS_STOCK, ECHO_BY_BEFORE),
    aborted(OURS_STOCK, DIAL_BY_BEFORE),
    aborted(OURS_STOCK, CPU_BY_BEFORE),
    alone(OURS, SWITCHED, FAILED, Bound::AtMost(0.0)),
    alone(OURS, SWITCHED, CUT, Bound::AtMost(0.0)),
];

#[cfg(test)]
mod tests {
    #![allow(clippy::unwrap_used, clippy::expect_used, clippy::indexing_slicing)]
    use super::*;
    use crate::figures::HUNG;
    use crate::openvpn::rows::{BOTH_GBIT, FRONT, ROWS};
    use crate::report::example::{self, expected};

    #[test]
    fn every_row_of_a_target_exists() {
        for row in TARGETS.iter().flat_map(|target| target.rows) {
            assert!(ROWS.iter().any(|known| known.name == *row), "{row}");
        }
    }

    fn said(
        row: &'static str,
        metric: Metric,
        medians: &[(&'static str, f64)],
    ) -> Vec<(String, bool)> {
        example::verdicts(&COMPARISON, FRONT, row, metric, medians)
    }

    #[test]
    fn each_target_has_its_own_reference() {
        let rates = [(OURS, 9.0), (OURS_STOCK, 2.0), (STOCK, 2.1)];
        let verdicts = expected([("ours+stock >= 1x stock", false)]);
        assert_eq!(said(BULK[0], RATE, &rates), verdicts);

        let rates = [
            (OURS, 10.0),
            (OURS_UDP, 7.1),
            (OURS_STOCK, 10.0),
            (OURS_STOCK_UDP, 6.9),
        ];
        let verdicts = expected([
            ("ours/udp >= 0.7x ours", true),
            ("o+s/udp >= 0.7x ours+stock", false),
        ]);
        assert_eq!(said(BURSTS[1], RATE, &rates), verdicts);

        assert_eq!(
            said(BULK[0], SERVER_GBIT, &[(OURS, 4.9)]),
            expected([("ours >= 5", false)])
        );
        assert_eq!(
            said(BULK[0], CLIENT_GBIT, &[(OURS, 5.0)]),
            expected([("ours >= 5", true)])
        );
        assert_eq!(said(BULK[0], BOTH_GBIT, &[(OURS, 2.5)]), expected([]));

        let verdicts = expected([("ours <= 0", false)]);
        assert_eq!(said(SWITCHED[0], CUT, &[(OURS, 1.0)]), verdicts);

        let verdicts = expected([("ours <= 2", true), ("ours+stock <= 2", false)]);
        let ratios = [(OURS, 1.9), (OURS_STOCK, HUNG)];
        assert_eq!(said(CROWD[0], RATIO_STALLED, &ratios), verdicts);
    }

    #[test]
    fn note_appears_only_with_its_figure() {
        let said = |metric| {
            let report = example::report(&COMPARISON, FRONT, BULK[0], metric, &[(OURS, 6.0)]);
            report.to_string().contains("the targets are per process")
        };
        assert!(said(SERVER_GBIT));
        assert!(!said(RATE));
    }
}
