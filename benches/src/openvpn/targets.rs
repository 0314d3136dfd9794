//! The targets for our programs: bounds for medians, some relative to other contenders in the same run.

use crate::openvpn::contenders::{OURS_STOCK_UDP, OURS_UDP};
use crate::openvpn::rows::{
    BULK, BURSTS, CLIENT_GBIT, CROWD, CUT, FAILED, SERVER_GBIT, SERVER_LOAD, SWITCHED,
};
use crate::report::Metric;
use crate::rows::{RATE, RATIO_STALLED};
use crate::targets::{Bound, Target};
use crate::topology::{OURS, OURS_STOCK, STOCK};

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

/// Targets of `openvpn`.
pub const TARGETS: [Target; 10] = [
    by(STOCK, OURS_STOCK, BULK, 1.0),
    alone(OURS_STOCK, BULK, SERVER_LOAD, Bound::AtMost(60.0)),
    // Each process counts only its own processor time. The figure for both together has no target.
    alone(OURS, BULK, SERVER_GBIT, Bound::AtLeast(5.0)),
    alone(OURS, BULK, CLIENT_GBIT, Bound::AtLeast(5.0)),
    by(OURS, OURS_UDP, BURSTS, 0.7),
    by(OURS_STOCK, OURS_STOCK_UDP, BURSTS, 0.7),
    alone(OURS, CROWD, RATIO_STALLED, Bound::AtMost(2.0)),
    alone(OURS_STOCK, CROWD, RATIO_STALLED, Bound::AtMost(2.0)),
    alone(OURS, SWITCHED, FAILED, Bound::AtMost(0.0)),
    alone(OURS, SWITCHED, CUT, Bound::AtMost(0.0)),
];

#[cfg(test)]
mod tests {
    #![allow(clippy::unwrap_used, clippy::expect_used, clippy::indexing_slicing)]
    use super::*;
    use crate::openvpn::rows::{BOTH_GBIT, ROWS};
    use crate::openvpn::{COMPARISON, FRONT};
    use crate::report::{HUNG, Machine, Report};

    #[test]
    fn every_row_of_a_target_exists() {
        for row in TARGETS.iter().flat_map(|target| target.rows) {
            assert!(ROWS.iter().any(|known| known.name == *row), "{row}");
        }
    }

    /// Returns the verdicts that the table prints for one line.
    fn said(
        row: &'static str,
        metric: Metric,
        medians: &[(&'static str, f64)],
    ) -> Vec<(String, bool)> {
        let mut report = Report::new(&COMPARISON, Machine::this(), 1, 1.0);
        for (contender, value) in medians {
            report.add(FRONT, row, contender, Ok(vec![(metric, *value)]));
        }
        let verdicts = report.lines()[0].verdicts();
        verdicts
            .iter()
            .map(|v| (format!("{} {}", v.target.contender, v.target), v.met()))
            .collect()
    }

    fn expected<const N: usize>(verdicts: [(&str, bool); N]) -> Vec<(String, bool)> {
        let verdicts = verdicts.into_iter();
        verdicts.map(|(text, met)| (text.to_owned(), met)).collect()
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
            let mut report = Report::new(&COMPARISON, Machine::this(), 1, 1.0);
            report.add(FRONT, BULK[0], OURS, Ok(vec![(metric, 6.0)]));
            report.to_string().contains("the targets are per process")
        };
        assert!(said(SERVER_GBIT));
        assert!(!said(RATE));
    }
}
