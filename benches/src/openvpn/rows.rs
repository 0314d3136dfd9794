//! The rows, their figures, and their durations.

use crate::load::{Job, Work};
use crate::openvpn::switching::SWITCHES;
use crate::report::Metric;

pub const SERVER_CPU: Metric = Metric::lower("server s/GiB");
pub const CLIENT_CPU: Metric = Metric::lower("client s/GiB");
pub const SERVER_LOAD: Metric = Metric::lower("server % of a core");
pub const SERVER_GBIT: Metric = Metric::higher("server Gbit/CPU-s");
pub const CLIENT_GBIT: Metric = Metric::higher("client Gbit/CPU-s");
pub const BOTH_GBIT: Metric = Metric::higher("both Gbit/CPU-s");
pub const RESENT: Metric = Metric::lower("segments resent");
pub const LOST: Metric = Metric::lower("datagrams lost");
pub const FAILED: Metric = Metric::lower("dials failed");
pub const CUT: Metric = Metric::lower("streams cut");
pub const DIALS: Metric = Metric::higher("dials");
pub const SHARE: Metric = Metric::higher("% by OpenVPN");
pub const SERVER_START: Metric = Metric::lower("server MiB start");
pub const SERVER_AFTER: Metric = Metric::lower("server MiB after");
pub const CLIENT_START: Metric = Metric::lower("client MiB start");
pub const CLIENT_AFTER: Metric = Metric::lower("client MiB after");

/// Names of rows by topic, for targets and pictures.
pub const BULK: &[&str] = &[
    "download, 1 connection",
    "download, 8 connections",
    "upload, 1 connection",
    "upload, 8 connections",
];
pub const BURSTS: &[&str] = &["download, bursts of 4 MiB", "upload, bursts of 4 MiB"];
pub const CROWD: &[&str] = &["200 echoes beside 2 stalled"];
pub const SWITCHED: &[&str] = &["40 switches beside 200 dials/s"];

/// Measurement of a row.
#[derive(Debug, Clone, Copy, PartialEq)]
pub enum Kind {
    /// A load of a given amount. The job is the first warm-up, which estimates the speed of the contender.
    Load(Job),
    /// A flow with pauses between bursts of data.
    Bursts(Work),
    /// Echoes, first alone and then beside connections that nobody reads.
    Crowd,
    /// Switches of the tunnel for new connections.
    Switch,
}

/// One row of the table.
#[derive(Debug, Clone, Copy)]
pub struct Row {
    /// Name of the row in the table.
    pub name: &'static str,
    /// Measurement of the row.
    pub kind: Kind,
}

const fn load(name: &'static str, work: Work, connections: u64, warm_up: u64) -> Row {
    let job = Job {
        work,
        connections,
        amount: warm_up,
    };
    row(name, Kind::Load(job))
}

const fn row(name: &'static str, kind: Kind) -> Row {
    Row { name, kind }
}

pub const ROWS: [Row; 8] = [
    load("download, 1 connection", Work::Download, 1, 8 << 20),
    load("download, 8 connections", Work::Download, 8, 2 << 20),
    load("upload, 1 connection", Work::Upload, 1, 8 << 20),
    load("upload, 8 connections", Work::Upload, 8, 2 << 20),
    row("download, bursts of 4 MiB", Kind::Bursts(Work::Download)),
    row("upload, bursts of 4 MiB", Kind::Bursts(Work::Upload)),
    row("200 echoes beside 2 stalled", Kind::Crowd),
    row("40 switches beside 200 dials/s", Kind::Switch),
];

impl Row {
    /// Returns the number of rounds in which the row is measured. Rows other than loads take long, and their
    /// figures differ little from round to round.
    pub fn rounds(&self, rounds: u32) -> u32 {
        match self.kind {
            Kind::Load(_) => rounds,
            Kind::Bursts(_) | Kind::Crowd => rounds.min(3),
            Kind::Switch => 1,
        }
    }

    /// Returns true if the row starts programs of its own.
    pub fn is_fresh(&self) -> bool {
        self.kind == Kind::Switch
    }

    /// Returns the approximate duration of one measurement, in seconds.
    pub fn estimate(&self, seconds: f64) -> f64 {
        match self.kind {
            Kind::Load(_) => 1.3 * seconds + 0.5,
            Kind::Bursts(_) => 2.0 * seconds + 0.5,
            Kind::Crowd => 4.0 * seconds + 3.5,
            Kind::Switch => f64::from(SWITCHES) * seconds.min(1.0) + 5.0,
        }
    }
}
