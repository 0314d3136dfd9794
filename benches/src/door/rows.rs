//! The rows, their figures, and their durations.

use crate::door::Front;
use crate::load::{Job, Work};
use crate::report::Metric;

pub const SERVICES_MEMORY: Metric = Metric::lower("MiB");
pub const CHANGE: Metric = Metric::lower("ms to effect");
pub const DROPPED: Metric = Metric::lower("dropped");

/// Names of rows by topic, for targets and pictures.
pub const BULK: &[&str] = &[
    "download, 1 connection",
    "download, 8 connections",
    "upload, 1 connection",
    "upload, 8 connections",
];
pub const DIALS: &[&str] = &["dial + 1 byte, 8 at a time"];
pub const ECHOES: &[&str] = &["64-byte echo, 1 connection", "64-byte echo, 8 connections"];
pub const CROWD: &[&str] = &["1000 echoes beside 2 stalled"];
pub const CHANGED: &[&str] = &["1 of 1,000 Services changes"];
pub const SERVICES: &[&str] = &["memory, 1,000 Services"];
pub const IDLE: &[&str] = &["memory, 10,000 idle"];

/// Number of Services in the rows with many Services.
pub const MANY: usize = 1000;

/// Measurement of a row.
#[derive(Debug, Clone, Copy, PartialEq)]
pub enum Kind {
    /// A load of a given amount. The job is the first warm-up, which estimates the speed of the contender.
    Load(Job),
    /// Echoes, first alone and then beside connections that nobody reads.
    Crowd,
    /// A change of one of [`MANY`] Services.
    Change,
    /// Memory with [`MANY`] Services.
    Services,
    /// Idle connections.
    Idle,
}

/// One row of the table.
#[derive(Debug, Clone, Copy)]
pub struct Row {
    /// The place where the load enters.
    pub front: Front,
    /// Name of the row in the table.
    pub name: &'static str,
    /// Measurement of the row.
    pub kind: Kind,
}

const fn load(front: Front, name: &'static str, work: Work, connections: u64, warm_up: u64) -> Row {
    let job = Job {
        work,
        connections,
        amount: warm_up,
    };
    row(front, name, Kind::Load(job))
}

const fn row(front: Front, name: &'static str, kind: Kind) -> Row {
    Row { front, name, kind }
}

pub const ROWS: [Row; 15] = [
    load(
        Front::Sni,
        "download, 1 connection",
        Work::Fetch,
        1,
        32 << 20,
    ),
    load(
        Front::Sni,
        "download, 8 connections",
        Work::Fetch,
        8,
        8 << 20,
    ),
    load(
        Front::Sni,
        "upload, 1 connection",
        Work::Upload,
        1,
        32 << 20,
    ),
    load(
        Front::Sni,
        "upload, 8 connections",
        Work::Upload,
        8,
        8 << 20,
    ),
    load(Front::Sni, "dial + 1 byte, 8 at a time", Work::Dials, 8, 20),
    row(Front::Sni, "1 of 1,000 Services changes", Kind::Change),
    row(Front::Sni, "memory, 1,000 Services", Kind::Services),
    row(Front::Sni, "memory, 10,000 idle", Kind::Idle),
    load(
        Front::Node,
        "download, 1 connection",
        Work::Fetch,
        1,
        32 << 20,
    ),
    load(
        Front::Node,
        "download, 8 connections",
        Work::Fetch,
        8,
        8 << 20,
    ),
    load(
        Front::Node,
        "upload, 1 connection",
        Work::Upload,
        1,
        32 << 20,
    ),
    load(
        Front::Node,
        "upload, 8 connections",
        Work::Upload,
        8,
        8 << 20,
    ),
    load(
        Front::Node,
        "64-byte echo, 1 connection",
        Work::Echo,
        1,
        500,
    ),
    load(
        Front::Node,
        "64-byte echo, 8 connections",
        Work::Echo,
        8,
        100,
    ),
    row(Front::Node, "1000 echoes beside 2 stalled", Kind::Crowd),
];

impl Row {
    /// Returns the number of rounds in which the row is measured. Rows that start a contender run less often;
    /// their figures differ little from round to round.
    pub fn rounds(&self, rounds: u32) -> u32 {
        match self.kind {
            Kind::Load(_) => rounds,
            Kind::Crowd | Kind::Change => rounds.min(3),
            Kind::Services | Kind::Idle => 1,
        }
    }

    /// Returns true if the row starts a contender of its own.
    pub fn is_fresh(&self) -> bool {
        matches!(self.kind, Kind::Change | Kind::Services | Kind::Idle)
    }

    /// Returns the approximate duration of one measurement, in seconds.
    pub fn estimate(&self, seconds: f64) -> f64 {
        match self.kind {
            Kind::Load(_) => 1.3 * seconds + 0.5,
            Kind::Crowd => 4.0 * seconds + 3.5,
            Kind::Change => 3.0,
            Kind::Services => 4.0,
            Kind::Idle => 10.0,
        }
    }
}
