//! The rows, their figures, and their durations.

use crate::aborts::By;
use crate::figures::Metric;
use crate::load::{Job, Work};
use crate::rows::{self, Row};

/// Name of the only entry point, for the table.
pub(super) const FRONT: &str = "CONNECT";

/// Number of switches: 20 in each direction.
pub(super) const SWITCHES: u32 = 40;

pub(super) const SERVER_CPU: Metric = Metric::lower("server s/GiB");
pub(super) const CLIENT_CPU: Metric = Metric::lower("client s/GiB");
pub(super) const SERVER_LOAD: Metric = Metric::lower("server % of a core");
pub(super) const SERVER_GBIT: Metric = Metric::higher("server Gbit/CPU-s");
pub(super) const CLIENT_GBIT: Metric = Metric::higher("client Gbit/CPU-s");
pub(super) const BOTH_GBIT: Metric = Metric::higher("both Gbit/CPU-s");
pub(super) const RESENT: Metric = Metric::lower("segments resent");
pub(super) const LOST: Metric = Metric::lower("datagrams lost");
pub(super) const FAILED: Metric = Metric::lower("dials failed");
pub(super) const CUT: Metric = Metric::lower("streams cut");
pub(super) const DIALS: Metric = Metric::higher("dials");
pub(super) const SHARE: Metric = Metric::higher("% by OpenVPN");
pub(super) const SERVER_START: Metric = Metric::lower("server MiB start");
pub(super) const SERVER_AFTER: Metric = Metric::lower("server MiB after");
pub(super) const CLIENT_START: Metric = Metric::lower("client MiB start");
pub(super) const CLIENT_AFTER: Metric = Metric::lower("client MiB after");

/// Names of rows by topic, for targets and pictures.
pub(super) const BURSTS: &[&str] = &["download, bursts of 4 MiB", "upload, bursts of 4 MiB"];
pub(super) const CROWD: &[&str] = &["200 echoes beside 2 stalled"];
pub(super) const SWITCHED: &[&str] = &["40 switches beside 200 dials/s"];

/// Measurement of a row.
#[derive(Debug, Clone, Copy, PartialEq)]
pub(super) enum Kind {
    /// A load of a given amount. The job is the first warm-up, which estimates the speed of the contender.
    Load(Job),
    /// A flow with pauses between bursts of data.
    Bursts(Work),
    /// Echoes, first alone and then beside connections that nobody reads.
    Crowd,
    /// A paced load, first before bulk connections and then right after their abort.
    Aborted(By),
    /// Switches of the tunnel for new connections.
    Switch,
}

const fn load(name: &'static str, work: Work, connections: u64, warm_up: u64) -> Row<Kind> {
    Row::new(name, Kind::Load(Job::new(work, connections, warm_up)))
}

pub(super) const ROWS: [Row<Kind>; 10] = [
    load("download, 1 connection", Work::Download, 1, 8 << 20),
    load("download, 8 connections", Work::Download, 8, 2 << 20),
    load("upload, 1 connection", Work::Upload, 1, 8 << 20),
    load("upload, 8 connections", Work::Upload, 8, 2 << 20),
    Row::new("download, bursts of 4 MiB", Kind::Bursts(Work::Download)),
    Row::new("upload, bursts of 4 MiB", Kind::Bursts(Work::Upload)),
    Row::new("200 echoes beside 2 stalled", Kind::Crowd),
    Row::new("8 aborted by clients", Kind::Aborted(By::Client)),
    Row::new("8 aborted by endpoints", Kind::Aborted(By::Endpoint)),
    Row::new("40 switches beside 200 dials/s", Kind::Switch),
];

impl rows::Kind for Kind {
    fn rounds(&self, rounds: u32) -> u32 {
        match self {
            Kind::Load(_) => rounds,
            Kind::Bursts(_) | Kind::Crowd | Kind::Aborted(_) => rounds.min(3),
            Kind::Switch => 1,
        }
    }

    fn is_fresh(&self) -> bool {
        *self == Self::Switch
    }

    fn estimate(&self, seconds: f64) -> f64 {
        match self {
            Kind::Load(_) => 1.3 * seconds + 0.5,
            Kind::Bursts(_) => 2.0 * seconds + 0.5,
            Kind::Crowd => 4.0 * seconds + 3.5,
            Kind::Aborted(_) => 4.0 * seconds + 1.5,
            Kind::Switch => f64::from(SWITCHES) * seconds.min(1.0) + 5.0,
        }
    }
}
