//! The rows, their figures, and their durations.

use clap::ValueEnum;

use crate::aborts::By;
use crate::figures::Metric;
use crate::load::{Job, Work};
use crate::rows::{self, Row};

pub(super) const SERVICES_MEMORY: Metric = Metric::lower("MiB");
pub(super) const CHANGE: Metric = Metric::lower("ms to effect");
pub(super) const DROPPED: Metric = Metric::lower("dropped");

/// Names of rows by topic, for targets and pictures.
pub(super) const CROWD: &[&str] = &["1000 echoes beside 2 stalled"];
pub(super) const CHANGED: &[&str] = &["1 of 1,000 Services changes"];
pub(super) const SERVICES: &[&str] = &["memory, 1,000 Services"];

/// Number of Services in the rows with many Services.
pub(super) const MANY: usize = 1000;

/// Measurement of a row.
#[derive(Debug, Clone, Copy, PartialEq)]
pub(super) enum Kind {
    /// A load of a given amount. The job is the first warm-up, which estimates the speed of the contender.
    Load(Job),
    /// Echoes, first alone and then beside connections that nobody reads.
    Crowd,
    /// A paced load, first before bulk connections and then right after their abort.
    Aborted(By),
    /// A change of one of [`MANY`] Services.
    Change,
    /// Memory with [`MANY`] Services.
    Services,
    /// Idle connections.
    Idle,
}

/// The place where the load enters.
#[derive(Debug, Clone, Copy, PartialEq, Eq, ValueEnum)]
pub(super) enum Front {
    /// The TLS port of the front door
    Sni,
    /// A listener on a node, connected to the CONNECT port of the front door
    Node,
}

impl Front {
    /// Name of the entry point in the table.
    pub(super) const fn name(self) -> &'static str {
        match self {
            Self::Sni => "SNI",
            Self::Node => "node",
        }
    }

    /// Returns the rows of this entry point.
    pub(super) fn rows(self) -> &'static [Row<Kind>] {
        match self {
            Self::Sni => &SNI_ROWS,
            Self::Node => &NODE_ROWS,
        }
    }
}

const fn load(name: &'static str, work: Work, connections: u64, warm_up: u64) -> Row<Kind> {
    Row::new(name, Kind::Load(Job::new(work, connections, warm_up)))
}

const SNI_ROWS: [Row<Kind>; 10] = [
    load("download, 1 connection", Work::Fetch, 1, 32 << 20),
    load("download, 8 connections", Work::Fetch, 8, 8 << 20),
    load("upload, 1 connection", Work::Upload, 1, 32 << 20),
    load("upload, 8 connections", Work::Upload, 8, 8 << 20),
    load("dial + 1 byte, 8 at a time", Work::Dials, 8, 20),
    Row::new("8 aborted by clients", Kind::Aborted(By::Client)),
    Row::new("8 aborted by endpoints", Kind::Aborted(By::Endpoint)),
    Row::new("1 of 1,000 Services changes", Kind::Change),
    Row::new("memory, 1,000 Services", Kind::Services),
    Row::new("memory, 10,000 idle", Kind::Idle),
];

const NODE_ROWS: [Row<Kind>; 9] = [
    load("download, 1 connection", Work::Fetch, 1, 32 << 20),
    load("download, 8 connections", Work::Fetch, 8, 8 << 20),
    load("upload, 1 connection", Work::Upload, 1, 32 << 20),
    load("upload, 8 connections", Work::Upload, 8, 8 << 20),
    load("64-byte echo, 1 connection", Work::Echo, 1, 500),
    load("64-byte echo, 8 connections", Work::Echo, 8, 100),
    Row::new("1000 echoes beside 2 stalled", Kind::Crowd),
    Row::new("8 aborted by clients", Kind::Aborted(By::Client)),
    Row::new("8 aborted by endpoints", Kind::Aborted(By::Endpoint)),
];

impl rows::Kind for Kind {
    fn rounds(&self, rounds: u32) -> u32 {
        match self {
            Kind::Load(_) => rounds,
            Kind::Crowd | Kind::Aborted(_) | Kind::Change => rounds.min(3),
            Kind::Services | Kind::Idle => 1,
        }
    }

    fn is_fresh(&self) -> bool {
        matches!(self, Kind::Change | Kind::Services | Kind::Idle)
    }

    fn estimate(&self, seconds: f64) -> f64 {
        match self {
            Kind::Load(_) => 1.3 * seconds + 0.5,
            Kind::Crowd => 4.0 * seconds + 3.5,
            Kind::Aborted(_) => 4.0 * seconds + 1.5,
            Kind::Change => 3.0,
            Kind::Services => 4.0,
            Kind::Idle => 10.0,
        }
    }
}
