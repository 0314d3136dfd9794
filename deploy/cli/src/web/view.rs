//! The data of the page, as JSON.

use culvert_server::switch::status::Status;
use culvert_server::tunnel::{Health, Peer};
use serde::Serialize;
use tokio::time::Instant;

use super::history::{self, Curve, History, with_label};
use crate::description::{address, facts};
use crate::figures::{Counters, Counts, Figures, FileSet};
use crate::verdict::{Expiry, duration};

/// Maximum number of peers on the page. The peers of the worst health come first.
const MAX_PEERS: usize = 500;

/// Data of the page.
#[derive(Serialize)]
#[serde(rename_all = "camelCase")]
pub(super) struct View {
    /// Path or address of the admin pages.
    pub(super) server: String,
    /// `ok` or `degraded`.
    pub(super) verdict: &'static str,
    /// Reasons of the verdict; empty if the verdict is ok.
    pub(super) reasons: Vec<String>,
    /// True if the data are not the current state of the server.
    pub(super) is_old: bool,
    /// Time of the data, in Unix seconds.
    pub(super) time: f64,
    version: Option<String>,
    facts: Vec<(&'static str, String)>,
    tunnels: Vec<Tunnel>,
    gone: Vec<GonePeer>,
    /// Age of each point of the curves, in seconds.
    ages: Vec<f64>,
    curves: Vec<NamedCurve>,
    failures: Vec<Row>,
    refusals: Vec<Row>,
    file_sets: Vec<Files>,
}

#[derive(Serialize)]
#[serde(rename_all = "camelCase")]
struct Tunnel {
    name: &'static str,
    health: &'static str,
    connections: usize,
    dials: usize,
    peers: Vec<PeerRow>,
    /// Number of peers that are left out.
    left_out: usize,
}

/// Name, kind, health, connections, address and identifiers of a peer.
type PeerRow = (String, String, &'static str, usize, String, String);

#[derive(Serialize)]
#[serde(rename_all = "camelCase")]
struct GonePeer {
    tunnel: &'static str,
    name: String,
    kind: String,
    /// Time since the peer was missing for the first time, in whole minutes, so that the page changes rarely.
    minutes: u64,
}

#[derive(Serialize)]
struct NamedCurve {
    name: &'static str,
    unit: &'static str,
    now: Option<f64>,
    values: Vec<Option<f64>>,
}

/// A counter with the values of its labels.
#[derive(Serialize)]
#[serde(rename_all = "camelCase")]
struct Row {
    labels: Vec<String>,
    per_second: f64,
    recent: f64,
    total: f64,
}

#[derive(Serialize)]
#[serde(rename_all = "camelCase")]
struct Files {
    name: String,
    certificates: Vec<Certificate>,
    last_reload_ok: Option<bool>,
    reloads: f64,
    failed_reloads: f64,
}

#[derive(Serialize)]
#[serde(rename_all = "camelCase")]
struct Certificate {
    kind: String,
    /// Time of the expiry, in Unix seconds.
    expires: f64,
    left: String,
    state: &'static str,
}

impl View {
    /// Describes the last answer of a server and its history, without a verdict and its reasons. `clock` is in Unix seconds.
    pub(super) fn new(
        status: &Status,
        figures: &Figures,
        history: &History,
        now: Instant,
        clock: f64,
    ) -> Self {
        let gone = history.gone(now).map(|gone| GonePeer {
            tunnel: gone.tunnel,
            name: gone.name.clone(),
            kind: gone.kind.clone(),
            minutes: now.saturating_duration_since(gone.at).as_secs() / 60,
        });
        let counts = &figures.counts;
        let tunnels = status.tunnels.iter().map(|tunnel| Tunnel {
            name: tunnel.tunnel.as_str(),
            health: tunnel.health.as_str(),
            connections: tunnel.connections,
            dials: tunnel.dials,
            peers: peers(&tunnel.peers),
            left_out: tunnel.peers.len().saturating_sub(MAX_PEERS),
        });
        Self {
            server: String::new(),
            verdict: "",
            reasons: Vec::new(),
            is_old: false,
            time: clock,
            version: figures.version.clone(),
            facts: facts(status),
            tunnels: tunnels.collect(),
            gone: gone.collect(),
            ages: history.ages(now),
            curves: curves(history),
            failures: rows(history, |counts| &counts.failures, counts),
            refusals: rows(history, |counts| &counts.refusals, counts),
            file_sets: figures
                .file_sets
                .iter()
                .map(|set| files(set, clock))
                .collect(),
        }
    }
}

fn peers(peers: &[Peer]) -> Vec<PeerRow> {
    let mut peers: Vec<&Peer> = peers.iter().collect();
    peers.sort_by_key(|peer| peer.health == Health::Healthy);
    let shown = peers.into_iter().take(MAX_PEERS);
    let row = |peer: &Peer| {
        let health = peer.health.as_str();
        (
            peer.name.clone(),
            peer.kind.clone(),
            health,
            peer.connections,
            address(peer),
            peer.describe_identifiers(),
        )
    };
    shown.map(row).collect()
}

fn curves(history: &History) -> Vec<NamedCurve> {
    let named = |name, unit, curve: Curve| NamedCurve {
        name,
        unit,
        now: curve.now,
        values: curve.values,
    };
    let bytes = |direction| history.rates(move |counts| with_label(&counts.bytes, direction));
    vec![
        named("open connections", "", history.values(|it| it.connections)),
        named("dials", "/s", history.rates(history::dials)),
        named("failed dials", "/s", history.rates(history::failures)),
        named("pending dials", "", history.values(|it| it.pending)),
        named("to endpoints", "B/s", bytes("to_endpoint")),
        named("from endpoints", "B/s", bytes("from_endpoint")),
    ]
}

fn rows(history: &History, family: impl Fn(&Counts) -> &Counters, counts: &Counts) -> Vec<Row> {
    let recent = history.recent(&family);
    let rows = recent.into_iter().map(|(labels, per_second, recent)| Row {
        total: family(counts).get(&labels).copied().unwrap_or_default(),
        labels,
        per_second,
        recent,
    });
    rows.filter(|row| row.total > 0.0 || row.recent > 0.0)
        .collect()
}

fn files(set: &FileSet, clock: f64) -> Files {
    let certificate = |(kind, expires): &(String, f64)| {
        let left = expires - clock;
        let (state, text) = match Expiry::of(kind, left) {
            Expiry::Valid => ("valid", duration(left)),
            Expiry::Soon => ("expires soon", duration(left)),
            Expiry::Expired => ("expired", format!("{} ago", duration(-left))),
        };
        Certificate {
            kind: kind.clone(),
            expires: *expires,
            left: text,
            state,
        }
    };
    Files {
        name: set.files.clone(),
        certificates: set.expiries.iter().map(certificate).collect(),
        last_reload_ok: set.last_reload_ok,
        reloads: set.reloads,
        failed_reloads: set.failed_reloads,
    }
}
