//! The targets for our programs: bounds for medians, mostly relative to other contenders in the same run.

use crate::door::contenders::{ENVOY, HAPROXY};
use crate::door::rows::{
    BULK, CHANGE, CHANGED, CROWD, DIALS, DROPPED, ECHOES, IDLE, SERVICES, SERVICES_MEMORY,
};
use crate::report::Metric;
use crate::rows::{
    CPU_PER_DIAL, CPU_PER_GIB, DIAL_RATE, IDLE_MEMORY, MEMORY, MEMORY_START, P50, RATIO_STALLED,
};
use crate::targets::{Bound, Target};
use crate::topology::OURS;

const SNI: &str = "SNI";
const NODE: &str = "node";

/// A target relative to another contender.
const fn by(
    against: &'static str,
    front: &'static str,
    rows: &'static [&'static str],
    metric: Metric,
    bound: Bound,
) -> Target {
    Target {
        front: Some(front),
        rows,
        metric,
        contender: OURS,
        against: Some(against),
        bound,
    }
}

/// An absolute target.
const fn alone(
    front: &'static str,
    rows: &'static [&'static str],
    metric: Metric,
    bound: f64,
) -> Target {
    Target {
        against: None,
        ..by("", front, rows, metric, Bound::AtMost(bound))
    }
}

/// Targets of `door`.
pub const TARGETS: [Target; 14] = [
    by(ENVOY, SNI, BULK, CPU_PER_GIB, Bound::AtMost(0.5)),
    by(HAPROXY, SNI, BULK, CPU_PER_GIB, Bound::AtMost(1.0)),
    by(ENVOY, SNI, DIALS, CPU_PER_DIAL, Bound::AtMost(0.667)),
    by(HAPROXY, SNI, DIALS, CPU_PER_DIAL, Bound::AtMost(1.0)),
    by(ENVOY, SNI, DIALS, DIAL_RATE, Bound::AtLeast(1.0)),
    by(HAPROXY, SNI, DIALS, DIAL_RATE, Bound::AtLeast(1.0)),
    by(ENVOY, NODE, BULK, CPU_PER_GIB, Bound::AtMost(0.9)),
    by(ENVOY, NODE, ECHOES, P50, Bound::AtMost(1.0)),
    alone(SNI, &[MEMORY], MEMORY_START, 15.0),
    alone(SNI, SERVICES, SERVICES_MEMORY, 40.0),
    alone(SNI, IDLE, IDLE_MEMORY, 4.0),
    alone(SNI, CHANGED, CHANGE, 200.0),
    alone(SNI, CHANGED, DROPPED, 0.0),
    alone(NODE, CROWD, RATIO_STALLED, 1.5),
];

#[cfg(test)]
mod tests {
    #![allow(clippy::unwrap_used, clippy::expect_used, clippy::indexing_slicing)]
    use super::*;
    use crate::door::COMPARISON;
    use crate::door::rows::ROWS;
    use crate::report::{Machine, Report};

    #[test]
    fn every_row_of_a_target_exists() {
        for target in &TARGETS {
            for row in target.rows {
                let mut known = ROWS.iter();
                let known = known.any(|r| r.name == *row && Some(r.front.name()) == target.front);
                assert!(known || *row == MEMORY, "{row}");
            }
        }
    }

    /// Returns the verdicts that the table prints for one line.
    fn said(
        front: &'static str,
        row: &'static str,
        metric: Metric,
        medians: &[(&'static str, f64)],
    ) -> Vec<(String, bool)> {
        let mut report = Report::new(&COMPARISON, Machine::this(), 1, 1.0);
        for (contender, value) in medians {
            report.add(front, row, contender, Ok(vec![(metric, *value)]));
        }
        let verdicts = report.lines()[0].verdicts();
        verdicts
            .iter()
            .map(|v| (v.target.to_string(), v.met()))
            .collect()
    }

    #[test]
    fn front_door_has_both_references_and_node_tunnel_only_envoy() {
        let medians = [(OURS, 0.4), (ENVOY, 1.0), (HAPROXY, 0.3)];
        let expected = [("<= 0.5x envoy", true), ("<= 1x haproxy", false)];
        let expected = expected.map(|(text, met)| (text.to_owned(), met));
        assert_eq!(said(SNI, BULK[0], CPU_PER_GIB, &medians), expected);
        let expected = [("<= 0.9x envoy".to_owned(), true)];
        assert_eq!(said(NODE, BULK[0], CPU_PER_GIB, &medians), expected);
    }

    #[test]
    fn any_dropped_connection_misses_the_target() {
        let judged = |dropped| said(SNI, CHANGED[0], DROPPED, &[(OURS, dropped), (ENVOY, 9.0)]);
        assert_eq!(judged(0.0), [("<= 0".to_owned(), true)]);
        assert_eq!(judged(1.0), [("<= 0".to_owned(), false)]);
    }
}
