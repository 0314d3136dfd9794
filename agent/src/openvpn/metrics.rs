//! Metrics of the OpenVPN client's tunnel. The tunnel's connections are not counted here, but in the agent's
//! metrics of all connections.

use std::sync::Arc;

use culvert_host::label_values;
use culvert_host::telemetry::metrics::{Family, LabelSet as _, Registry};
use culvert_openvpn_io::metrics::{Counters, Growth, TrafficMetrics};
use metrics::{Counter, Gauge};

/// Start of the names of all metrics.
const PREFIX: &str = "culvert_openvpn_client_";

label_values! {
    /// Result of an attempt to connect.
    pub enum Outcome("outcome") {
        /// The tunnel was established.
        Established = "established",
        /// The server's host could not be reached.
        Unreachable = "unreachable",
        /// The server refused this client.
        Refused = "refused",
        /// This client's own files cannot be used.
        Files = "files",
        /// Any other failure: TLS, no common settings, timeouts.
        Failed = "failed",
    }
}

/// Metrics of one client.
pub struct OpenVpnMetrics {
    /// 1 while the tunnel is established, otherwise 0.
    pub up: Gauge,
    /// Successful renegotiations.
    rekeys: Counter,
    connects: Family<Outcome, Counter>,
    traffic: TrafficMetrics,
}

impl OpenVpnMetrics {
    /// Registers the metrics.
    pub fn new(registry: &Arc<Registry>) -> Self {
        Self {
            up: registry.gauge(
                "culvert_openvpn_client_up",
                &[],
                "1 while the OpenVPN tunnel is established.",
            ),
            rekeys: registry.counter(
                "culvert_openvpn_client_rekeys_total",
                &[],
                "Successful renegotiations of the tunnel's keys.",
            ),
            connects: Family::new(
                registry,
                "culvert_openvpn_client_connects_total",
                "Attempts to connect to an OpenVPN server, by outcome.",
            )
            .at_zero(Outcome::all()),
            traffic: TrafficMetrics::new(registry, PREFIX),
        }
    }

    /// Counts an attempt to connect.
    pub fn connect(&self, outcome: Outcome) {
        self.connects.get(outcome).increment(1);
    }

    /// Adds the counts of the session and its flows.
    pub fn add(&self, growth: &Growth<Counters>) {
        self.traffic.add(growth);
        self.rekeys.increment(growth.of(|c| c.session.rekeys));
    }
}

#[cfg(test)]
mod tests {
    #![allow(clippy::unwrap_used)]

    use culvert_openvpn::{flows, session};

    use super::*;
    use crate::metrics::AgentMetrics;

    #[test]
    fn growth_of_session_counters_is_counted_once() {
        let agent = AgentMetrics::new().unwrap();
        let metrics = OpenVpnMetrics::new(agent.registry());
        let mut counters = Counters::default();
        let mut session = session::Stats {
            bytes_in: 10,
            replayed_data: 2,
            ..session::Stats::default()
        };
        let flows = flows::Stats {
            fragments: 3,
            ..flows::Stats::default()
        };
        metrics.add(&counters.update(&session, Some(flows), 1));
        session.bytes_in = 15;
        metrics.add(&counters.update(&session, Some(flows), 1));
        metrics.add(&counters.update(&session, None, 1));
        // The counters of the next session start at zero.
        metrics.add(&Counters::default().update(&session, Some(flows), 0));
        let page = agent.registry().render();
        for line in [
            r#"bytes_total{direction="in"} 30"#,
            r#"dropped_packets_total{reason="replayed"} 4"#,
            r#"dropped_packets_total{reason="bad_inner_packet"} 6"#,
            r#"dropped_packets_total{reason="not_sealed"} 1"#,
            r#"dropped_packets_total{reason="full"} 0"#,
        ] {
            let line = format!("culvert_openvpn_client_{line}");
            assert!(page.lines().any(|other| other == line), "{line} in {page}");
        }
    }
}
