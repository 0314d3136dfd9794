//! The attacked listeners, the attacks, and the figures.

use clap::ValueEnum;

use crate::attack::attackers::Crowd;
use crate::figures::Metric;
use crate::rows::{self, Row};

pub(super) const CONNECTIONS: Metric = Metric::higher("attacker's connections");
pub(super) const CONNECTION_RATE: Metric = Metric::higher("connections/s");
pub(super) const SENT: Metric = Metric::higher("MiB sent");
pub(super) const GROWTH: Metric = Metric::lower("MiB growth");
pub(super) const DESCRIPTORS: Metric = Metric::lower("descriptors");
pub(super) const CLIENT_P99: Metric = Metric::lower("client p99 ms");
pub(super) const DIAL_P99: Metric = Metric::lower("dial p99 ms");
pub(super) const HEALTH_P99: Metric = Metric::lower("healthz p99 ms");
pub(super) const FAILED: Metric = Metric::lower("failed %");
pub(super) const RECOVERY: Metric = Metric::lower("recovery s");

/// Duration of an attack, in units of `--seconds`.
pub(super) const ATTACK: f64 = 5.0;

pub(super) const SILENT: &str = "silent";
pub(super) const SILENT_MANY: &str = "silent, 250 addresses";
pub(super) const SLOW: &str = "one byte per 0.1 s";
pub(super) const NOISE: &str = "noise";
pub(super) const REFUSALS: &str = "refusals";
pub(super) const STALLED_LOG: &str = "refusals, log not read";
pub(super) const BODIES: &str = "30 MB bodies before review";
pub(super) const CALLS: &str = "5,000 calls before review";
pub(super) const TOKENS: &str = "random tokens";
pub(super) const ONE_SERVICE: &str = "one Service, 2,000 connections";
pub(super) const STREAMS: &str = "one Service, 1,024 streams";
pub(super) const RESETS: &str = "streams reset at once";
pub(super) const HALF_OPEN: &str = "half-open sessions";
pub(super) const UNREAD: &str = "unread control output";
pub(super) const LARGE: &str = "large early control packets";
pub(super) const INITIALS: &str = "forged QUIC Initials";

/// Names of all rows.
pub(super) const ALL: &[&str] = &[
    SILENT,
    SILENT_MANY,
    SLOW,
    NOISE,
    REFUSALS,
    STALLED_LOG,
    BODIES,
    CALLS,
    TOKENS,
    ONE_SERVICE,
    STREAMS,
    RESETS,
    HALF_OPEN,
    UNREAD,
    LARGE,
    INITIALS,
];

/// The attacked listener.
#[derive(Debug, Clone, Copy, PartialEq, Eq, ValueEnum)]
pub(super) enum Listener {
    /// Agents, at the server
    Agents,
    /// Front end over TCP, at the server
    FrontEnd,
    /// Health, at the server
    Health,
    /// Admin, at the server
    Admin,
    /// Server names (6443), at the front door
    Sni,
    /// CONNECT (8088), at the front door
    Connect,
    /// A node port, at the front door
    NodePort,
    /// Health and metrics, at the front door
    Stats,
    /// OpenVPN over TCP, at the server
    OpenvpnTcp,
    /// OpenVPN over UDP, at the server
    OpenvpnUdp,
}

/// An attack.
#[derive(Debug, Clone, Copy, PartialEq)]
pub(super) enum Attack {
    /// Connections without a byte.
    Silent,
    /// The first message of a client, one byte at a time.
    Slow,
    /// Random bytes, or random datagrams.
    Noise,
    /// Calls with large bodies, while no token is reviewed.
    Bodies,
    /// Calls with this many streams on each connection, and tokens of this length.
    Calls { streams: usize, token: usize },
    /// The complete first message of a client, and then nothing.
    Greet,
    /// Tunnels of one connection to one Service.
    Streams,
    /// Tunnels that are reset at once.
    Resets,
    /// OpenVPN sessions over UDP without a handshake.
    HalfOpen,
    /// Repeated control packets whose acknowledgements are not read.
    Unread,
    /// Control packets of 60 KB that arrive too early.
    Large,
    /// First packets of QUIC clients with forged addresses.
    Initials,
}

/// State of the programs during an attack.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) enum Setting {
    /// Agents authenticate by certificate.
    Usual,
    /// The log's pipe is full, because its reader has stopped.
    StalledLog,
    /// Agents authenticate by token. The Kubernetes API answers.
    Tokens,
    /// Agents authenticate by token. During the attack, the Kubernetes API does not answer.
    SilentApi,
    /// Agents authenticate by certificate, and the listener has a UDP port for QUIC, which is attacked.
    Quic,
}

/// Measurement of a row.
#[derive(Debug, Clone, Copy, PartialEq)]
pub(super) struct Kind {
    pub attack: Attack,
    pub crowd: Crowd,
    /// Number of the attacker's addresses.
    pub addresses: u16,
    pub setting: Setting,
}

const fn row(name: &'static str, attack: Attack, held: usize, rate: f64) -> Row<Kind> {
    Row::new(
        name,
        Kind {
            attack,
            crowd: Crowd { held, rate },
            addresses: 1,
            setting: Setting::Usual,
        },
    )
}

const fn with(row: Row<Kind>, addresses: u16, setting: Setting) -> Row<Kind> {
    let kind = Kind {
        addresses,
        setting,
        ..row.kind
    };
    Row::new(row.name, kind)
}

/// More silent connections than a server of the first release accepted, and the rate that kept honest agents out.
const fn silent(name: &'static str, addresses: u16) -> Row<Kind> {
    with(
        row(name, Attack::Silent, 4300, 273.0),
        addresses,
        Setting::Usual,
    )
}

const SILENT_ROW: Row<Kind> = silent(SILENT, 1);
const SILENT_MANY_ROW: Row<Kind> = silent(SILENT_MANY, 250);
const SLOW_ROW: Row<Kind> = row(SLOW, Attack::Slow, 1000, 50.0);
const NOISE_ROW: Row<Kind> = row(NOISE, Attack::Noise, 200, 200.0);
const REFUSALS_ROW: Row<Kind> = row(REFUSALS, Attack::Noise, 500, 1000.0);
const CALLS_ATTACK: Attack = Attack::Calls {
    streams: 5000,
    token: 2048,
};
const TOKENS_ATTACK: Attack = Attack::Calls {
    streams: 16,
    token: 64,
};

/// Packets of 65,535 addresses.
const INITIALS_ROW: Row<Kind> = with(
    row(INITIALS, Attack::Initials, 0, 20_000.0),
    u16::MAX,
    Setting::Quic,
);

const AGENTS: [Row<Kind>; 10] = [
    SILENT_ROW,
    SILENT_MANY_ROW,
    SLOW_ROW,
    NOISE_ROW,
    REFUSALS_ROW,
    with(
        row(STALLED_LOG, Attack::Noise, 500, 1000.0),
        1,
        Setting::StalledLog,
    ),
    with(row(BODIES, Attack::Bodies, 8, 10.0), 1, Setting::SilentApi),
    with(row(CALLS, CALLS_ATTACK, 1, 1.0), 1, Setting::SilentApi),
    with(row(TOKENS, TOKENS_ATTACK, 50, 20.0), 1, Setting::Tokens),
    INITIALS_ROW,
];
const FRONT_END: [Row<Kind>; 4] = [SILENT_ROW, SILENT_MANY_ROW, SLOW_ROW, NOISE_ROW];
const HEALTH: [Row<Kind>; 3] = [SILENT_ROW, SILENT_MANY_ROW, SLOW_ROW];
const SNI: [Row<Kind>; 5] = [
    SILENT_ROW,
    SLOW_ROW,
    NOISE_ROW,
    row(ONE_SERVICE, Attack::Greet, 2000, 100.0),
    INITIALS_ROW,
];
const CONNECT: [Row<Kind>; 5] = [
    SILENT_ROW,
    SLOW_ROW,
    NOISE_ROW,
    row(STREAMS, Attack::Streams, 1, 1.0),
    row(RESETS, Attack::Resets, 1, 10.0),
];
const NODE_PORT: [Row<Kind>; 2] = [NOISE_ROW, row(ONE_SERVICE, Attack::Silent, 2000, 100.0)];
const OPENVPN_TCP: [Row<Kind>; 6] = [
    SILENT_ROW,
    SILENT_MANY_ROW,
    SLOW_ROW,
    NOISE_ROW,
    row(HALF_OPEN, Attack::Greet, 900, 500.0),
    row(UNREAD, Attack::Unread, 4, 1.0),
];
const OPENVPN_UDP: [Row<Kind>; 3] = [
    row(NOISE, Attack::Noise, 500, 1000.0),
    row(HALF_OPEN, Attack::HalfOpen, 256, 500.0),
    row(LARGE, Attack::Large, 256, 50.0),
];

impl Listener {
    /// Name of the listener in the table.
    pub(super) const fn name(self) -> &'static str {
        match self {
            Self::Agents => "agents",
            Self::FrontEnd => "frontend",
            Self::Health => "health",
            Self::Admin => "admin",
            Self::Sni => "6443",
            Self::Connect => "8088",
            Self::NodePort => "nodeport",
            Self::Stats => "stats",
            Self::OpenvpnTcp => "vpn/tcp",
            Self::OpenvpnUdp => "vpn/udp",
        }
    }

    /// Returns the rows of this listener.
    pub(super) fn rows(self) -> &'static [Row<Kind>] {
        match self {
            Self::Agents => &AGENTS,
            Self::FrontEnd => &FRONT_END,
            Self::Health | Self::Admin | Self::Stats => &HEALTH,
            Self::Sni => &SNI,
            Self::Connect => &CONNECT,
            Self::NodePort => &NODE_PORT,
            Self::OpenvpnTcp => &OPENVPN_TCP,
            Self::OpenvpnUdp => &OPENVPN_UDP,
        }
    }
}

impl rows::Kind for Kind {
    fn rounds(&self, rounds: u32) -> u32 {
        rounds.min(3)
    }

    fn is_fresh(&self) -> bool {
        true
    }

    fn estimate(&self, seconds: f64) -> f64 {
        ATTACK * seconds + 4.0
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn every_row_has_a_known_name() {
        for front in Listener::value_variants() {
            for row in front.rows() {
                assert!(ALL.contains(&row.name), "{}", row.name);
            }
        }
    }
}
