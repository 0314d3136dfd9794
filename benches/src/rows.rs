//! Rows of the table.

/// One row of the table.
#[derive(Debug, Clone, Copy)]
pub(crate) struct Row<K> {
    /// Name of the row in the table.
    pub(crate) name: &'static str,
    /// Measurement of the row.
    pub(crate) kind: K,
}

impl<K: Copy> Row<K> {
    /// Creates a row.
    pub(crate) const fn new(name: &'static str, kind: K) -> Self {
        Self { name, kind }
    }
}

/// Measurement of a row.
pub(crate) trait Kind {
    /// Returns the number of rounds in which the row is measured. Rows that start a contender run less often;
    /// their figures differ little from round to round.
    fn rounds(&self, rounds: u32) -> u32;

    /// Returns true if the row starts a contender of its own.
    fn is_fresh(&self) -> bool;

    /// Returns the approximate duration of one measurement, in seconds.
    fn estimate(&self, seconds: f64) -> f64;
}
