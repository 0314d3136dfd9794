//! The comparison of `door`, and the targets for our programs.

use crate::door::contenders::{ENVOY, HAPROXY};
use crate::door::rows::{CHANGE, CHANGED, CROWD, DROPPED, Front, SERVICES, SERVICES_MEMORY};
use crate::figures::{
    CPU_BY_BEFORE, CPU_PER_DIAL, CPU_PER_GIB, DIAL_BY_BEFORE, DIAL_RATE, ECHO_BY_BEFORE,
    IDLE_MEMORY, MEMORY_START, Metric, P50, RATIO_STALLED,
};
use crate::names::{ABORTED, BULK, DIALS, DIRECT, ECHOES, IDLE, MEMORY, OURS};
use crate::report::Comparison;
use crate::targets::{Bound, Target};

const SNI: &str = Front::Sni.name();
const NODE: &str = Front::Node.name();

/// Our front door, compared with Envoy at both ends and with haproxy.
pub(crate) static COMPARISON: Comparison = Comparison {
    contenders: &[OURS, ENVOY, HAPROXY, DIRECT],
    everyone_by: ENVOY,
    ours_by: HAPROXY,
    ratios: &[
        ("ours/envoy", OURS, ENVOY),
        ("ours/hapr.", OURS, HAPROXY),
        ("hapr./envoy", HAPROXY, ENVOY),
    ],
    targets: &TARGETS,
    notes: &[],
};

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
const TARGETS: [Target; 20] = [
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
    alone(SNI, ABORTED, ECHO_BY_BEFORE, 1.1),
    alone(SNI, ABORTED, DIAL_BY_BEFORE, 1.1),
    alone(SNI, ABORTED, CPU_BY_BEFORE, 1.1),
    alone(NODE, ABORTED, ECHO_BY_BEFORE, 1.1),
    alone(NODE, ABORTED, DIAL_BY_BEFORE, 1.1),
    alone(NODE, ABORTED, CPU_BY_BEFORE, 1.1),
];

#[cfg(test)]
mod tests {
    #![allow(clippy::unwrap_used, clippy::expect_used, clippy::indexing_slicing)]
    use super::*;
    use crate::report::example::{self, expected};

    #[test]
    fn every_row_of_a_target_exists() {
        for target in &TARGETS {
            for row in target.rows {
                let fronts = [Front::Sni, Front::Node].into_iter();
                let mut fronts = fronts.filter(|front| Some(front.name()) == target.front);
                let known = fronts.any(|front| front.rows().iter().any(|r| r.name == *row));
                assert!(known || *row == MEMORY, "{row}");
            }
        }
    }

    fn said(
        front: &'static str,
        row: &'static str,
        metric: Metric,
        medians: &[(&'static str, f64)],
    ) -> Vec<(String, bool)> {
        example::verdicts(&COMPARISON, front, row, metric, medians)
    }

    #[test]
    fn front_door_has_both_references_and_node_tunnel_only_envoy() {
        let medians = [(OURS, 0.4), (ENVOY, 1.0), (HAPROXY, 0.3)];
        let verdicts = expected([("ours <= 0.5x envoy", true), ("ours <= 1x haproxy", false)]);
        assert_eq!(said(SNI, BULK[0], CPU_PER_GIB, &medians), verdicts);
        let verdicts = expected([("ours <= 0.9x envoy", true)]);
        assert_eq!(said(NODE, BULK[0], CPU_PER_GIB, &medians), verdicts);
    }

    #[test]
    fn any_dropped_connection_misses_the_target() {
        let judged = |dropped| said(SNI, CHANGED[0], DROPPED, &[(OURS, dropped), (ENVOY, 9.0)]);
        assert_eq!(judged(0.0), expected([("ours <= 0", true)]));
        assert_eq!(judged(1.0), expected([("ours <= 0", false)]));
    }
}
