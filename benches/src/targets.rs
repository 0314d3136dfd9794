//! Targets for our programs: bounds for medians, mostly relative to other contenders in the same run.

use std::fmt;

use crate::figures::Metric;

/// Bound of a figure.
#[derive(Debug, Clone, Copy, PartialEq)]
pub(crate) enum Bound {
    /// Upper bound.
    AtMost(f64),
    /// Lower bound.
    AtLeast(f64),
    /// The figure is at most [`SLACK`] times the figure of the other contender. Both figures are raised to
    /// `floor`, because small figures differ by chance.
    NoWorse {
        /// Largest figure without effect.
        floor: f64,
    },
}

/// Largest ratio of two figures that are equal except for chance.
const SLACK: f64 = 1.1;

/// One target.
#[derive(Debug, Clone, Copy)]
pub(crate) struct Target {
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
pub(crate) struct Verdict {
    /// The target.
    pub target: Target,
    /// The figure, or its ratio. `None` if a measurement of the contender failed.
    pub value: Option<f64>,
}

impl Verdict {
    /// Returns true if the target is met.
    pub(crate) fn met(&self) -> bool {
        self.value.is_some_and(|value| match self.target.bound {
            Bound::AtMost(bound) => value <= bound,
            Bound::AtLeast(bound) => value >= bound,
            Bound::NoWorse { .. } => value <= SLACK,
        })
    }
}

impl fmt::Display for Target {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self.bound {
            Bound::AtMost(bound) => write!(f, "<= {bound}")?,
            Bound::AtLeast(bound) => write!(f, ">= {bound}")?,
            Bound::NoWorse { .. } => write!(f, "no worse than ")?,
        }
        match (self.against, self.bound) {
            (Some(against), Bound::NoWorse { .. }) => write!(f, "{against}"),
            (Some(against), _) => write!(f, "x {against}"),
            (None, _) => Ok(()),
        }
    }
}
