//! The last minutes of a server: figures for the curves of the page, and peers that are gone.

use std::collections::{BTreeMap, VecDeque};
use std::time::Duration;

use culvert_server::switch::status::Status;
use tokio::time::Instant;

use crate::figures::{Counters, Counts, Figures, total};

/// Time that the curves show.
pub(super) const SPAN: Duration = Duration::from_secs(300);

/// Time for which a peer that is gone stays on the page.
pub(super) const GONE_FOR: Duration = Duration::from_secs(600);

/// Maximum number of peers that are gone; the newest stay on the page.
const MAX_GONE: usize = 100;

/// One request to the server.
struct Point {
    at: Instant,
    /// `None` if the server did not answer.
    figures: Option<Figures>,
    /// Increase since the last answer, and the time since that answer. `None` for the first answer, and without an answer.
    increase: Option<(Counts, Duration)>,
}

/// A peer that has left.
#[derive(Clone, Debug, PartialEq)]
pub(super) struct Gone {
    pub(super) tunnel: &'static str,
    pub(super) name: String,
    pub(super) kind: String,
    /// Time of the first answer of the server without the peer.
    pub(super) at: Instant,
}

/// One curve of the page.
pub(super) struct Curve {
    /// Latest value; `None` until the server has answered twice, if the curve shows a rate.
    pub(super) now: Option<f64>,
    /// A value for each request to the server; `None` without an answer.
    pub(super) values: Vec<Option<f64>>,
}

/// History of a server.
#[derive(Default)]
pub(super) struct History {
    points: VecDeque<Point>,
    last: Option<(Instant, Counts)>,
    /// Kind of each connected peer, by tunnel and name.
    present: BTreeMap<(&'static str, String), String>,
    gone: VecDeque<Gone>,
}

impl History {
    /// Adds an answer of the server.
    pub(super) fn add(&mut self, at: Instant, status: &Status, figures: &Figures) {
        let last = self.last.replace((at, figures.counts.clone()));
        let increase = last.map(|(before, counts)| {
            let elapsed = at.saturating_duration_since(before);
            (figures.counts.since(&counts), elapsed)
        });
        self.push(Point {
            at,
            figures: Some(figures.clone()),
            increase,
        });
        self.compare_peers(at, status);
    }

    /// Adds a request without an answer.
    pub(super) fn add_failure(&mut self, at: Instant) {
        self.push(Point {
            at,
            figures: None,
            increase: None,
        });
    }

    /// Returns the age of each point at `now`, in seconds. The oldest point is the first.
    pub(super) fn ages(&self, now: Instant) -> Vec<f64> {
        let age = |point: &Point| now.saturating_duration_since(point.at).as_secs_f64();
        self.points.iter().map(age).collect()
    }

    /// Returns a curve of values.
    pub(super) fn values(&self, value: impl Fn(&Figures) -> f64) -> Curve {
        self.curve(|point| point.figures.as_ref().map(&value))
    }

    /// Returns a curve of rates of a counter, for each second.
    pub(super) fn rates(&self, value: impl Fn(&Counts) -> f64) -> Curve {
        self.curve(|point| {
            let (counts, elapsed) = point.increase.as_ref()?;
            Some(per_second(value(counts), *elapsed))
        })
    }

    /// Returns the rate of each counter at the last answer, for each second, and the increase within [`SPAN`].
    pub(super) fn recent(
        &self,
        family: impl Fn(&Counts) -> &Counters,
    ) -> Vec<(Vec<String>, f64, f64)> {
        let Some((_, counts)) = &self.last else {
            return Vec::new();
        };
        let latest = self.points.iter().rev();
        let latest = latest.filter_map(|point| point.increase.as_ref()).next();
        let row = |key: &Vec<String>| {
            let of = |counts: &Counts| family(counts).get(key).copied().unwrap_or_default();
            let rate = latest.map_or(0.0, |(counts, elapsed)| per_second(of(counts), *elapsed));
            let increases = self
                .points
                .iter()
                .filter_map(|point| point.increase.as_ref());
            (
                key.clone(),
                rate,
                increases.map(|(counts, _)| of(counts)).sum(),
            )
        };
        family(counts).keys().map(row).collect()
    }

    /// Returns the peers that are gone, the latest first.
    pub(super) fn gone(&self, now: Instant) -> impl Iterator<Item = &Gone> {
        let is_recent = move |gone: &&Gone| now.saturating_duration_since(gone.at) < GONE_FOR;
        self.gone.iter().rev().filter(is_recent)
    }

    fn curve(&self, value: impl Fn(&Point) -> Option<f64>) -> Curve {
        let values: Vec<Option<f64>> = self.points.iter().map(value).collect();
        let now = values.last().copied().flatten();
        Curve { now, values }
    }

    fn push(&mut self, point: Point) {
        let now = point.at;
        self.points.push_back(point);
        while let Some(oldest) = self.points.front()
            && now.saturating_duration_since(oldest.at) > SPAN
        {
            self.points.pop_front();
        }
    }

    fn compare_peers(&mut self, at: Instant, status: &Status) {
        let peers = status.tunnels.iter().flat_map(|tunnel| {
            let key = tunnel.tunnel.as_str();
            tunnel.peers.iter().map(move |peer| (key, peer))
        });
        let present = peers.map(|(tunnel, peer)| ((tunnel, peer.name.clone()), peer.kind.clone()));
        let before = std::mem::replace(&mut self.present, present.collect());
        for ((tunnel, name), kind) in before {
            let key = (tunnel, name);
            if !self.present.contains_key(&key) {
                let (tunnel, name) = key;
                self.gone.push_back(Gone {
                    tunnel,
                    name,
                    kind,
                    at,
                });
            }
        }
        let present = &self.present;
        self.gone.retain(|gone| {
            at.saturating_duration_since(gone.at) < GONE_FOR
                && !present.contains_key(&(gone.tunnel, gone.name.clone()))
        });
        let surplus = self.gone.len().saturating_sub(MAX_GONE);
        self.gone.drain(..surplus);
    }
}

/// Returns the sum of the counters with this value of a label.
pub(super) fn with_label(counters: &Counters, value: &str) -> f64 {
    let with = counters
        .iter()
        .filter(|(labels, _)| labels.iter().any(|label| label == value));
    with.map(|(_, value)| value).sum()
}

/// Returns the sum of all dials.
pub(super) fn dials(counts: &Counts) -> f64 {
    total(&counts.dials)
}

/// Returns the sum of all failures of dials.
pub(super) fn failures(counts: &Counts) -> f64 {
    total(&counts.failures)
}

fn per_second(increase: f64, elapsed: Duration) -> f64 {
    // Two answers within a millisecond have no useful rate.
    increase / elapsed.as_secs_f64().max(0.001)
}
