//! The comparison of `attack`, and the targets for our programs.

use crate::attack::rows::{ALL, CLIENT_P99, DIAL_P99, GROWTH, HEALTH_P99, RECOVERY};
use crate::figures::Metric;
use crate::names::{OURS, STOCK};
use crate::report::Comparison;
use crate::targets::{Bound, Target};

/// Our programs, and the stock program for the same listener.
pub(super) static COMPARISON: Comparison = Comparison {
    contenders: &[OURS, STOCK],
    everyone_by: STOCK,
    ours_by: STOCK,
    ratios: &[],
    targets: &TARGETS,
    notes: &[],
};

const fn at_most(metric: Metric, bound: f64) -> Target {
    Target {
        front: None,
        rows: ALL,
        metric,
        contender: OURS,
        against: None,
        bound: Bound::AtMost(bound),
    }
}

/// A target for a figure that must not be worse than the figure of the stock program. Figures below `floor`
/// count as `floor`.
const fn no_worse(metric: Metric, floor: f64) -> Target {
    Target {
        against: Some(STOCK),
        bound: Bound::NoWorse { floor },
        ..at_most(metric, 0.0)
    }
}

const TARGETS: [Target; 10] = [
    at_most(GROWTH, 32.0),
    at_most(CLIENT_P99, 1000.0),
    at_most(DIAL_P99, 1000.0),
    at_most(HEALTH_P99, 100.0),
    at_most(RECOVERY, 2.0),
    no_worse(GROWTH, 16.0),
    no_worse(CLIENT_P99, 250.0),
    no_worse(DIAL_P99, 250.0),
    no_worse(HEALTH_P99, 50.0),
    no_worse(RECOVERY, 1.0),
];

#[cfg(test)]
mod tests {
    #![allow(clippy::unwrap_used, clippy::expect_used, clippy::indexing_slicing)]
    use super::*;
    use crate::attack::rows::SILENT;
    use crate::figures::HUNG;
    use crate::report::example::{self, expected};

    fn said(metric: Metric, medians: &[(&'static str, f64)]) -> Vec<(String, bool)> {
        example::verdicts(&COMPARISON, "agents", SILENT, metric, medians)
    }

    #[test]
    fn figure_has_an_absolute_and_a_relative_bound() {
        let verdicts = [("ours <= 32", true), ("ours no worse than stock", true)];
        assert_eq!(
            said(GROWTH, &[(OURS, 15.0), (STOCK, 1.0)]),
            expected(verdicts)
        );
        let verdicts = [("ours <= 32", true), ("ours no worse than stock", false)];
        assert_eq!(
            said(GROWTH, &[(OURS, 30.0), (STOCK, 20.0)]),
            expected(verdicts)
        );
        assert_eq!(
            said(GROWTH, &[(OURS, 33.0)]),
            expected([("ours <= 32", false)])
        );
    }

    #[test]
    fn hung_figure_is_worse_than_any_figure_and_equal_to_a_hung_figure() {
        let verdicts = [("ours <= 1000", false), ("ours no worse than stock", false)];
        assert_eq!(
            said(CLIENT_P99, &[(OURS, HUNG), (STOCK, 4000.0)]),
            expected(verdicts)
        );
        let verdicts = [("ours <= 1000", false), ("ours no worse than stock", true)];
        assert_eq!(
            said(CLIENT_P99, &[(OURS, HUNG), (STOCK, HUNG)]),
            expected(verdicts)
        );
    }
}
