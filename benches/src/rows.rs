//! The rows, their figures, and their durations.

use std::time::Duration;

use crate::delay::Path;
use crate::load::{Job, Work};
use crate::report::Metric;

/// Bytes per MiB and per GiB.
pub const MIB: f64 = (1u64 << 20) as f64;
pub const GIB: f64 = (1u64 << 30) as f64;

pub const RATE: Metric = Metric::higher("MiB/s");
pub const CPU_PER_GIB: Metric = Metric::lower("CPU s/GiB");
pub const P50: Metric = Metric::lower("p50 us");
pub const P99: Metric = Metric::lower("p99 us");
pub const CPU_PER_ECHO: Metric = Metric::lower("CPU us/echo");
pub const BULK_RATE: Metric = Metric::higher("bulk MiB/s");
pub const DIAL_RATE: Metric = Metric::higher("dials/s");
pub const CPU_PER_DIAL: Metric = Metric::lower("CPU us/dial");
pub const P99_STALLED: Metric = Metric::lower("p99 stalled");
pub const RATIO_STALLED: Metric = Metric::lower("by alone");
pub const MEMORY_START: Metric = Metric::lower("MiB at start");
pub const MEMORY_AFTER: Metric = Metric::lower("MiB after");
pub const IDLE_MEMORY: Metric = Metric::lower("KiB each");
pub const AGENT_MEMORY: Metric = Metric::lower("agent MiB");

/// Name of the last row: the memory of the long-running programs.
pub const MEMORY: &str = "memory";

/// Delay of a byte along the long path, one way.
const FAR: Duration = Duration::from_millis(50);

/// Bytes per second of a line of 1 Gbit/s.
const LINE: f64 = 125e6;

/// Measurement of a row.
#[derive(Debug, Clone, Copy, PartialEq)]
pub enum Kind {
    /// A load of a given amount. The job is the first warm-up, which estimates the speed of the contender.
    Load(Job),
    /// Echoes on one connection beside two downloads.
    EchoBesideBulk,
    /// Echoes, first alone and then beside connections that nobody reads.
    Stalled,
    /// One download along a simulated path.
    Far(Path),
    /// Idle connections.
    Idle,
    /// Memory of the agent beside bulk transfers.
    AgentMemory,
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
    Row {
        name,
        kind: Kind::Load(Job {
            work,
            connections,
            amount: warm_up,
        }),
    }
}

const fn far(name: &'static str, rate: Option<f64>) -> Row {
    Row {
        name,
        kind: Kind::Far(Path { one_way: FAR, rate }),
    }
}

const fn row(name: &'static str, kind: Kind) -> Row {
    Row { name, kind }
}

pub const ROWS: [Row; 15] = [
    load("download, 1 connection", Work::Download, 1, 32 << 20),
    load("download, 8 connections", Work::Download, 8, 8 << 20),
    load("download, 64 connections", Work::Download, 64, 1 << 20),
    load("upload, 1 connection", Work::Upload, 1, 32 << 20),
    load("upload, 8 connections", Work::Upload, 8, 8 << 20),
    load("upload, 64 connections", Work::Upload, 64, 1 << 20),
    load("64-byte echo, 1 connection", Work::Echo, 1, 500),
    load("64-byte echo, 8 connections", Work::Echo, 8, 100),
    row("64-byte echo beside 2 downloads", Kind::EchoBesideBulk),
    load("dial + 1 byte, 8 at a time", Work::Dials, 8, 20),
    row("50 echoes beside 16 stalled", Kind::Stalled),
    far("download, 100 ms RTT", None),
    far("download, 100 ms RTT, 1 Gbit/s", Some(LINE)),
    row("memory, 10,000 idle", Kind::Idle),
    row("memory beside bulk, 1000 idle", Kind::AgentMemory),
];

impl Row {
    /// Returns the number of rounds in which the row is measured. Rows that start a contender run less often;
    /// their figures differ little from round to round.
    pub fn rounds(&self, rounds: u32) -> u32 {
        match self.kind {
            Kind::Load(_) | Kind::EchoBesideBulk => rounds,
            Kind::Stalled | Kind::Far(_) => rounds.min(3),
            Kind::Idle | Kind::AgentMemory => 1,
        }
    }

    /// Returns true if the row also applies to a contender without programs.
    pub fn suits_direct(&self) -> bool {
        matches!(
            self.kind,
            Kind::Load(_) | Kind::EchoBesideBulk | Kind::Far(_)
        )
    }

    /// Returns true if the row starts a contender of its own.
    pub fn is_fresh(&self) -> bool {
        matches!(self.kind, Kind::Far(_) | Kind::Idle | Kind::AgentMemory)
    }

    /// Returns ramp and duration of a download along a long path. The ramp covers several round trips.
    pub fn far_times(seconds: f64) -> [Duration; 2] {
        [1.5, 2.0 * seconds].map(Duration::from_secs_f64)
    }

    /// Returns the duration of echoes on many connections. The duration must cover periodic work of the
    /// machine in both parts of the row: a kernel thread that uses a processor for 85 ms every 5 s affects
    /// more than one in a hundred echoes.
    pub fn crowd_time(seconds: f64) -> Duration {
        Duration::from_secs_f64((6.0 * seconds).min(seconds.max(7.2)))
    }

    /// Returns the approximate duration of one measurement, in seconds.
    pub fn estimate(&self, seconds: f64) -> f64 {
        match self.kind {
            Kind::Load(_) => 1.3 * seconds + 0.5,
            Kind::EchoBesideBulk => 2.0 * seconds + 0.6,
            // Some contenders hang.
            Kind::Stalled => 12.0 * seconds + 6.0,
            Kind::Far(_) => 2.0 * seconds + 4.0,
            Kind::Idle => 12.0,
            Kind::AgentMemory => 2.0 * seconds + 5.0,
        }
    }
}
