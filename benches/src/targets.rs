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
}

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
    /// The figure, or its ratio.
    pub value: f64,
}

impl Verdict {
    /// Returns true if the target is met.
    pub(crate) fn met(&self) -> bool {
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
