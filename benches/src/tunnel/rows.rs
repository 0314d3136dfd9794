//! The rows, their figures, and their durations.

use std::time::Duration;

use clap::ValueEnum;
use culvert_tests::Mode;

use crate::aborts::By;
use crate::load::{Job, Work};
use crate::rows::{self, Row};
use crate::tunnel::delay::Path;

/// Protocol between the load and the server, over a Unix socket.
#[derive(Debug, Clone, Copy, PartialEq, Eq, ValueEnum)]
pub(super) enum Front {
    /// HTTP CONNECT
    Connect,
    /// The packet protocol
    Grpc,
}

impl Front {
    /// Name of the front end in the table.
    pub(super) fn name(self) -> &'static str {
        match self {
            Self::Connect => "CONNECT",
            Self::Grpc => "gRPC",
        }
    }

    /// Returns the server mode that has this front end.
    pub(super) fn mode(self) -> Mode {
        match self {
            Self::Connect => Mode::HttpConnect,
            Self::Grpc => Mode::Grpc,
        }
    }
}

/// Delay of a byte along the long path, one way.
const FAR: Duration = Duration::from_millis(50);

/// Bytes per second of a line of 1 Gbit/s.
const LINE: f64 = 125e6;

/// Measurement of a row.
#[derive(Debug, Clone, Copy, PartialEq)]
pub(super) enum Kind {
    /// A load of a given amount. The job is the first warm-up, which estimates the speed of the contender.
    Load(Job),
    /// Echoes on one connection beside two downloads.
    EchoBesideBulk,
    /// Echoes, first alone and then beside connections that nobody reads.
    Stalled,
    /// A paced load, first before bulk connections and then right after their abort.
    Aborted(By),
    /// The same load with two agents, right after one of them was killed.
    LostAgent,
    /// One download along a simulated path.
    Far(Path),
    /// Idle connections.
    Idle,
    /// Memory of the agent beside bulk transfers.
    AgentMemory,
}

const fn load(name: &'static str, work: Work, connections: u64, warm_up: u64) -> Row<Kind> {
    Row::new(name, Kind::Load(Job::new(work, connections, warm_up)))
}

const fn far(name: &'static str, rate: Option<f64>) -> Row<Kind> {
    Row::new(name, Kind::Far(Path { one_way: FAR, rate }))
}

/// Name of the row of [`Kind::LostAgent`].
pub(super) const LOST: &str = "8 aborted with their agent";

pub(super) const ROWS: [Row<Kind>; 18] = [
    load("download, 1 connection", Work::Download, 1, 32 << 20),
    load("download, 8 connections", Work::Download, 8, 8 << 20),
    load("download, 64 connections", Work::Download, 64, 1 << 20),
    load("upload, 1 connection", Work::Upload, 1, 32 << 20),
    load("upload, 8 connections", Work::Upload, 8, 8 << 20),
    load("upload, 64 connections", Work::Upload, 64, 1 << 20),
    load("64-byte echo, 1 connection", Work::Echo, 1, 500),
    load("64-byte echo, 8 connections", Work::Echo, 8, 100),
    Row::new("64-byte echo beside 2 downloads", Kind::EchoBesideBulk),
    load("dial + 1 byte, 8 at a time", Work::Dials, 8, 20),
    Row::new("50 echoes beside 16 stalled", Kind::Stalled),
    Row::new("8 aborted by clients", Kind::Aborted(By::Client)),
    Row::new("8 aborted by endpoints", Kind::Aborted(By::Endpoint)),
    Row::new(LOST, Kind::LostAgent),
    far("download, 100 ms RTT", None),
    far("download, 100 ms RTT, 1 Gbit/s", Some(LINE)),
    Row::new("memory, 10,000 idle", Kind::Idle),
    Row::new("memory beside bulk, 1000 idle", Kind::AgentMemory),
];

impl rows::Kind for Kind {
    fn rounds(&self, rounds: u32) -> u32 {
        match self {
            Kind::Load(_) | Kind::EchoBesideBulk => rounds,
            Kind::Stalled | Kind::Aborted(_) | Kind::LostAgent | Kind::Far(_) => rounds.min(3),
            Kind::Idle | Kind::AgentMemory => 1,
        }
    }

    fn is_fresh(&self) -> bool {
        matches!(
            self,
            Kind::LostAgent | Kind::Far(_) | Kind::Idle | Kind::AgentMemory
        )
    }

    fn estimate(&self, seconds: f64) -> f64 {
        match self {
            Kind::Load(_) => 1.3 * seconds + 0.5,
            Kind::EchoBesideBulk => 2.0 * seconds + 0.6,
            // Some contenders hang.
            Kind::Stalled => 12.0 * seconds + 6.0,
            Kind::Aborted(_) => 4.0 * seconds + 1.5,
            Kind::LostAgent => 4.0 * seconds + 6.0,
            Kind::Far(_) => 2.0 * seconds + 4.0,
            Kind::Idle => 12.0,
            Kind::AgentMemory => 2.0 * seconds + 5.0,
        }
    }
}

impl Kind {
    /// Returns true if the row also applies to a contender without programs.
    pub(super) fn suits_direct(&self) -> bool {
        matches!(self, Kind::Load(_) | Kind::EchoBesideBulk | Kind::Far(_))
    }
}

/// Returns ramp and duration of a download along a long path. The ramp covers several round trips.
pub(super) fn far_times(seconds: f64) -> [Duration; 2] {
    [1.5, 2.0 * seconds].map(Duration::from_secs_f64)
}

/// Returns the duration of echoes on many connections. The duration must cover periodic work of the
/// machine in both parts of the row: a kernel thread that uses a processor for 85 ms every 5 s affects
/// more than one in a hundred echoes.
pub(super) fn crowd_time(seconds: f64) -> Duration {
    Duration::from_secs_f64((6.0 * seconds).min(seconds.max(7.2)))
}
