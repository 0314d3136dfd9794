//! Metrics of the OpenVPN client's tunnel. Its connections are counted together with the connections of all
//! tunnels.

use std::sync::Arc;

use culvert_host::label_values;
use culvert_host::telemetry::metrics::{Family, LabelSet as _, Registry};
use culvert_openvpn::flows;
use culvert_openvpn::session;
use metrics::{Counter, Gauge};

macro_rules! name {
    ($name:literal) => {
        concat!("culvert_openvpn_client_", $name)
    };
}

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

label_values! {
    /// Direction of a packet, as seen from this client.
    pub enum Way("direction") {
        /// From the tunnel.
        In = "in",
        /// Into the tunnel.
        Out = "out",
    }
}

label_values! {
    /// Reason for dropping a packet.
    pub enum Cause("cause") {
        /// Not an OpenVPN packet that this version understands.
        Malformed = "malformed",
        /// Not authentic: wrong keys, or from a third party.
        Unauthentic = "unauthentic",
        /// Received before.
        Replayed = "replayed",
        /// For an unknown key or session.
        UnknownKey = "unknown_key",
        /// Compressed; compression is not supported.
        Compressed = "compressed",
        /// Inner packet that is not valid IPv4, has a wrong checksum, or is a fragment.
        Inner = "inner",
        /// SYN above the limit of connections.
        Crowded = "crowded",
        /// Larger than the tunnel's MTU, or sent while no usable key exists.
        Unsent = "unsent",
    }
}

/// Metrics of one client.
pub struct OpenVpnMetrics {
    /// 1 while the tunnel is established, otherwise 0.
    pub up: Gauge,
    /// Successful renegotiations.
    rekeys: Counter,
    connects: Family<Outcome, Counter>,
    bytes: Family<Way, Counter>,
    dropped: Family<Cause, Counter>,
}

/// Counter values that were already added. The counters of a session only grow.
#[derive(Clone, Copy, Debug, Default)]
pub struct Counted {
    session: session::Stats,
    flows: flows::Stats,
    unsent: u64,
}

impl OpenVpnMetrics {
    /// Registers the metrics.
    pub fn new(registry: &Arc<Registry>) -> Self {
        Self {
            up: registry.gauge(
                name!("up"),
                &[],
                "Whether the OpenVPN tunnel is established.",
            ),
            rekeys: registry.counter(
                name!("rekeys_total"),
                &[],
                "Renegotiations of the tunnel's keys that ended well.",
            ),
            connects: Family::new(
                registry,
                name!("connects_total"),
                "Tries to connect to an OpenVPN server, by outcome.",
            )
            .at_zero(Outcome::all()),
            bytes: Family::new(
                registry,
                name!("bytes_total"),
                "Bytes of inner packets, by direction.",
            )
            .at_zero(Way::all()),
            dropped: Family::new(
                registry,
                name!("dropped_packets_total"),
                "Packets that were dropped, by cause.",
            )
            .at_zero(Cause::all()),
        }
    }

    /// Counts an attempt to connect.
    pub fn connect(&self, outcome: Outcome) {
        self.connects.get(outcome).increment(1);
    }

    /// Adds the growth of the counters since the last call. If `flows` is `None`, the flow counters do not
    /// grow.
    pub fn count(
        &self,
        counted: &mut Counted,
        session: &session::Stats,
        flows: Option<flows::Stats>,
        unsent: u64,
    ) {
        let flows = flows.unwrap_or(counted.flows);
        let old = std::mem::replace(
            counted,
            Counted {
                session: *session,
                flows,
                unsent,
            },
        );
        let add = |counter: &Counter, pairs: &[(u64, u64)]| {
            let grown = pairs
                .iter()
                .map(|(new, old)| new.saturating_sub(*old))
                .sum();
            counter.increment(grown);
        };
        let (new, was) = (session, &old.session);
        add(&self.rekeys, &[(new.rekeys, was.rekeys)]);
        add(self.bytes.get(Way::In), &[(new.bytes_in, was.bytes_in)]);
        add(self.bytes.get(Way::Out), &[(new.bytes_out, was.bytes_out)]);
        let dropped = |cause, pairs: &[(u64, u64)]| add(self.dropped.get(cause), pairs);
        dropped(
            Cause::Malformed,
            &[
                (new.malformed, was.malformed),
                (new.unsupported, was.unsupported),
                (new.out_of_window, was.out_of_window),
            ],
        );
        dropped(
            Cause::Unauthentic,
            &[(new.bad_wrap, was.bad_wrap), (new.bad_data, was.bad_data)],
        );
        dropped(
            Cause::Replayed,
            &[
                (new.replayed_control, was.replayed_control),
                (new.replayed_data, was.replayed_data),
            ],
        );
        dropped(
            Cause::UnknownKey,
            &[
                (new.wrong_session, was.wrong_session),
                (new.wrong_key, was.wrong_key),
                (new.unknown_key, was.unknown_key),
                (new.after_end, was.after_end),
            ],
        );
        dropped(Cause::Compressed, &[(new.compressed, was.compressed)]);
        dropped(Cause::Unsent, &[(unsent, old.unsent)]);
        let (new, was) = (flows, &old.flows);
        dropped(
            Cause::Inner,
            &[
                (new.malformed, was.malformed),
                (new.bad_checksum, was.bad_checksum),
                (new.fragments, was.fragments),
            ],
        );
        dropped(Cause::Crowded, &[(new.syns_dropped, was.syns_dropped)]);
    }
}

#[cfg(test)]
mod tests {
    #![allow(clippy::unwrap_used)]

    use super::*;
    use crate::metrics::AgentMetrics;

    #[test]
    fn growth_of_session_counters_is_counted_once() {
        let agent = AgentMetrics::new().unwrap();
        let metrics = OpenVpnMetrics::new(agent.registry());
        let mut counted = Counted::default();
        let mut session = session::Stats {
            bytes_in: 10,
            replayed_data: 2,
            ..session::Stats::default()
        };
        let flows = flows::Stats {
            fragments: 3,
            ..flows::Stats::default()
        };
        metrics.count(&mut counted, &session, Some(flows), 1);
        session.bytes_in = 15;
        metrics.count(&mut counted, &session, Some(flows), 1);
        metrics.count(&mut counted, &session, None, 1);
        // The counters of the next session start at zero.
        metrics.count(&mut Counted::default(), &session, Some(flows), 0);
        let page = agent.registry().render();
        for line in [
            r#"bytes_total{direction="in"} 30"#,
            r#"dropped_packets_total{cause="replayed"} 4"#,
            r#"dropped_packets_total{cause="inner"} 6"#,
            r#"dropped_packets_total{cause="unsent"} 1"#,
            r#"dropped_packets_total{cause="crowded"} 0"#,
        ] {
            let line = format!("culvert_openvpn_client_{line}");
            assert!(page.lines().any(|other| other == line), "{line} in {page}");
        }
    }
}
