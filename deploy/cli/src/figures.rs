//! The figures of a server's metrics page for the verdict and for the status page.

use std::collections::{BTreeMap, BTreeSet};

use culvert_kit::metrics::Metrics;

/// Values of the counters of one family, by the values of their labels.
pub(crate) type Counters = BTreeMap<Vec<String>, f64>;

/// Counters of a server.
#[derive(Clone, Debug, Default, PartialEq)]
pub(crate) struct Counts {
    /// Dials, by tunnel and outcome. A dial that moved to the other tunnel counts there.
    pub(crate) dials: Counters,
    /// Failures of dials, by reason.
    pub(crate) failures: Counters,
    /// Refused peers, by listener and reason.
    pub(crate) refusals: Counters,
    /// Payload bytes, by direction.
    pub(crate) bytes: Counters,
}

/// A file set with certificates.
#[derive(Clone, Debug, PartialEq)]
pub(crate) struct FileSet {
    /// Name of the file set.
    pub(crate) files: String,
    /// Kind of each certificate, and its expiry in Unix seconds.
    pub(crate) expiries: Vec<(String, f64)>,
    /// `None` if the server does not report reloads of the file set.
    pub(crate) last_reload_ok: Option<bool>,
    /// Number of reloads.
    pub(crate) reloads: f64,
    /// Number of failed reloads.
    pub(crate) failed_reloads: f64,
}

/// Figures of one metrics page.
#[derive(Clone, Debug, Default, PartialEq)]
pub(crate) struct Figures {
    /// Open connections of all tunnels.
    pub(crate) connections: f64,
    /// Dials that wait for the answer of a peer.
    pub(crate) pending: f64,
    pub(crate) counts: Counts,
    pub(crate) file_sets: Vec<FileSet>,
    /// Version of the server; `None` if the page does not have the version.
    pub(crate) version: Option<String>,
}

impl Counts {
    /// Returns the increase since `before`, which belongs to an earlier page.
    pub(crate) fn since(&self, before: &Self) -> Self {
        Self {
            dials: increase(&before.dials, &self.dials),
            failures: increase(&before.failures, &self.failures),
            refusals: increase(&before.refusals, &self.refusals),
            bytes: increase(&before.bytes, &self.bytes),
        }
    }
}

impl Figures {
    /// Reads the figures from a metrics page.
    pub(crate) fn read(metrics: &Metrics) -> Self {
        let sum = |name| metrics.value(name, &[]).unwrap_or_default();
        let mut dials = counters(
            metrics,
            "culvert_tunnel_dials_total",
            &["tunnel", "outcome"],
        );
        dials.retain(|labels, _| labels.last().is_none_or(|outcome| outcome != "moved"));
        let failures = "konnectivity_network_proxy_server_dial_failure_count";
        let version = metrics.samples("culvert_build_info").next();
        Self {
            connections: sum("culvert_tunnel_connections"),
            pending: sum("konnectivity_network_proxy_server_pending_backend_dials"),
            counts: Counts {
                dials,
                failures: counters(metrics, failures, &["reason"]),
                refusals: counters(metrics, "culvert_rejected_total", &["listener", "reason"]),
                bytes: counters(metrics, "culvert_tunnel_bytes_total", &["direction"]),
            },
            file_sets: file_sets(metrics),
            version: version.and_then(|sample| sample.label("version").map(str::to_owned)),
        }
    }
}

/// Returns the sum of all counters.
pub(crate) fn total(counters: &Counters) -> f64 {
    counters.values().sum()
}

fn counters(metrics: &Metrics, name: &str, labels: &[&str]) -> Counters {
    let mut counters = Counters::new();
    for sample in metrics.samples(name) {
        let labels = labels.iter().map(|key| sample.label(key));
        let key = labels.map(|label| label.unwrap_or_default().to_owned());
        *counters.entry(key.collect()).or_default() += sample.value;
    }
    counters
}

/// Returns the increase of each counter. A counter below its earlier value has started again at 0, with its program. A
/// counter without an earlier value has appeared at its first use.
fn increase(before: &Counters, after: &Counters) -> Counters {
    let increase = |(key, now): (&Vec<String>, &f64)| {
        let before = before.get(key).copied().unwrap_or_default();
        let increase = if *now >= before { now - before } else { *now };
        (key.clone(), increase)
    };
    after.iter().map(increase).collect()
}

fn file_sets(metrics: &Metrics) -> Vec<FileSet> {
    const EXPIRY: &str = "culvert_certificate_expiry_seconds";
    const LAST: &str = "culvert_last_reload_successful";
    const RELOADS: &str = "culvert_reloads_total";
    let samples = [EXPIRY, LAST].into_iter().flat_map(|n| metrics.samples(n));
    let names: BTreeSet<&str> = samples.filter_map(|sample| sample.label("files")).collect();
    let read = |files: &str| {
        // The value of a certificate that no longer exists is NaN.
        let expiries = metrics
            .samples(EXPIRY)
            .filter(|sample| sample.label("files") == Some(files) && sample.value.is_finite());
        let reloads = |result| {
            let labels = [("files", files), ("result", result)];
            metrics.value(RELOADS, &labels).unwrap_or_default()
        };
        let last = metrics.value(LAST, &[("files", files)]);
        let expiries = expiries.map(|sample| {
            let certificate = sample.label("certificate").unwrap_or_default();
            (certificate.to_owned(), sample.value)
        });
        let mut expiries: Vec<_> = expiries.collect();
        // The order of a page is random. The program's own certificate is the first.
        expiries.sort_by(|(a, _), (b, _)| b.cmp(a));
        FileSet {
            files: files.to_owned(),
            expiries,
            last_reload_ok: last.map(|value| value != 0.0),
            reloads: reloads("ok") + reloads("failed"),
            failed_reloads: reloads("failed"),
        }
    };
    names.into_iter().map(read).collect()
}

#[cfg(test)]
mod tests {
    #![allow(clippy::unwrap_used)]

    use super::*;

    const PAGE: &str = r#"
culvert_build_info{component="server",version="0.1.0"} 1
culvert_tunnel_connections{tunnel="konnectivity"} 3
culvert_tunnel_connections{tunnel="openvpn"} 1
konnectivity_network_proxy_server_pending_backend_dials 2
konnectivity_network_proxy_server_dial_failure_count{reason="no_agent"} 4
culvert_tunnel_dials_total{tunnel="konnectivity",outcome="opened"} 10
culvert_tunnel_dials_total{tunnel="konnectivity",outcome="moved"} 5
culvert_rejected_total{listener="agent",reason="garbage"} 7
culvert_tunnel_bytes_total{direction="to_endpoint"} 100
culvert_certificate_expiry_seconds{files="agent",certificate="own"} 1800000000
culvert_certificate_expiry_seconds{files="agent",certificate="crl"} NaN
culvert_last_reload_successful{files="agent"} 0
culvert_last_reload_successful{files="kubeconfig"} 1
culvert_reloads_total{files="agent",result="ok"} 2
culvert_reloads_total{files="agent",result="failed"} 1
"#;

    #[test]
    fn figures_are_read_from_a_metrics_page() {
        let figures = Figures::read(&Metrics::parse(PAGE).unwrap());
        assert_eq!((figures.connections, figures.pending), (4.0, 2.0));
        assert_eq!(figures.version.as_deref(), Some("0.1.0"));
        assert_eq!(total(&figures.counts.dials), 10.0);
        let refused = ["agent".to_owned(), "garbage".to_owned()];
        assert_eq!(figures.counts.refusals.get(&refused[..]), Some(&7.0));
        let [agent, kubeconfig] = &figures.file_sets[..] else {
            panic!("{figures:?}");
        };
        assert_eq!(agent.expiries, [("own".to_owned(), 1.8e9)]);
        assert_eq!(agent.last_reload_ok, Some(false));
        assert_eq!((agent.reloads, agent.failed_reloads), (3.0, 1.0));
        assert_eq!(kubeconfig.files, "kubeconfig");
        assert!(kubeconfig.expiries.is_empty());
    }

    #[test]
    fn counter_that_starts_again_increases_by_its_new_value() {
        let counters = |values: &[(&str, f64)]| {
            let pairs = values.iter();
            pairs
                .map(|(key, value)| (vec![(*key).to_owned()], *value))
                .collect::<Counters>()
        };
        let before = counters(&[("a", 10.0), ("b", 10.0), ("gone", 1.0)]);
        let after = counters(&[("a", 16.0), ("b", 4.0), ("new", 3.0)]);
        let expected = counters(&[("a", 6.0), ("b", 4.0), ("new", 3.0)]);
        assert_eq!(increase(&before, &after), expected);
    }
}
