//! The wanted ports of the LoadBalancer Service in front of the proxy.
//!
//! The load balancer forwards each port to the same port of the proxy. Existing names and node ports are
//! kept, because every change causes work in the implementation of the load balancer, which is slow on some
//! clouds. No I/O.

mod json;
#[cfg(test)]
pub(crate) mod tests;

use std::collections::{BTreeMap, HashMap};

pub(crate) use self::json::{changed_ports, read_ports};
use super::exposure::Service;

/// Longest name of a Service port, in characters (an RFC 1123 label).
const MAX_NAME: usize = 63;

/// A port of the load balancer's Service.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(crate) struct BalancerPort {
    /// Unique within the Service.
    pub name: String,
    /// True for UDP, false for TCP.
    pub is_udp: bool,
    /// Port of the load balancer.
    pub port: u16,
    /// Port of the proxy, as a number; the same as `port`.
    pub target_port: u16,
    /// The load balancer's own port on every node; 0 lets Kubernetes choose.
    pub node_port: u16,
}

/// Selection of the load balancer's ports.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct BalancerOptions {
    /// Key of the annotation that exposes a Service; see [`annotations`](super::annotations).
    pub annotation: String,
    /// The proxy's port for TLS server names, named `sni-listener`; 0 if there is no such port.
    pub sni_port: u16,
    /// The proxy's UDP port for QUIC, named `sni-quic-listener`; 0 if there is no such port. Included only on request:
    /// some load balancers refuse a Service with TCP and UDP ports.
    pub sni_quic_port: u16,
    /// The proxy's port for CONNECT requests, named `tunneling-listener`; 0 if there is no such port.
    pub tunneling_port: u16,
    /// The proxy's port for `/healthz` and metrics, named `healthz`: 8002 in the stock proxy. 0 if there is
    /// no such port; but Kubernetes refuses a Service without ports.
    pub stats_port: u16,
    /// Includes only the Services of this namespace; `None` includes all.
    pub namespace: Option<String>,
}

/// Returns all ports of the load balancer, sorted by name. If the result equals the `current` ports sorted by
/// name, no write is needed.
///
/// Besides the fixed ports there is a port for every node port of a Service with a cluster IP and an
/// annotation of exactly `true` or exactly `NodePort`, for any protocol, with or without endpoints. Its name
/// is `<namespace>-<service>-<node port>`, or `<namespace>-<service>-<port>-<node port>` if the load balancer
/// already has such a name of an older scheme.
///
/// Every port number occurs once, because Kubernetes would refuse the whole list otherwise: a fixed port
/// wins, and otherwise the first Service by name. Two Services may have the same node port, one for TCP and
/// one for UDP. The UDP port for QUIC has the number of a TCP port as a rule, which Kubernetes permits.
pub(crate) fn balancer_ports<'a>(
    services: impl Iterator<Item = &'a Service>,
    options: &BalancerOptions,
    has_quic: bool,
    current: &[BalancerPort],
) -> Vec<BalancerPort> {
    let node_ports = |is_udp: bool| -> HashMap<&str, u16> {
        let ports = current.iter().filter(|port| port.is_udp == is_udp);
        let ports = ports.map(|port| (port.name.as_str(), port.node_port));
        ports.collect()
    };
    let known = node_ports(false);
    let mut by_number = BTreeMap::new();
    for (name, number) in [
        ("healthz", options.stats_port),
        ("sni-listener", options.sni_port),
        ("tunneling-listener", options.tunneling_port),
    ] {
        let port = || balancer_port(number, name.to_owned(), name.to_owned(), &known);
        by_number.entry(number).or_insert_with(port);
    }
    let mut services: Vec<&Service> = services
        .filter(|service| has_balancer_ports(service, options))
        .collect();
    services.sort_unstable_by(|a, b| (&a.namespace, &a.name).cmp(&(&b.namespace, &b.name)));
    for service in services {
        for port in &service.ports {
            let number = port.node_port;
            by_number.entry(number).or_insert_with(|| {
                let old_name = format!(
                    "{}-{}-{}-{number}",
                    service.namespace, service.name, port.port
                );
                balancer_port(number, name_of(service, number), old_name, &known)
            });
        }
    }
    // Port 0 means not configured.
    by_number.remove(&0);
    let mut ports: Vec<BalancerPort> = by_number.into_values().collect();
    if has_quic && options.sni_quic_port != 0 {
        let [name, old_name] = [(); 2].map(|()| "sni-quic-listener".to_owned());
        ports.push(BalancerPort {
            is_udp: true,
            ..balancer_port(options.sni_quic_port, name, old_name, &node_ports(true))
        });
    }
    ports.sort_unstable_by(|a, b| a.name.cmp(&b.name));
    ports
}

/// Returns true if the node ports of a Service belong on the load balancer.
pub(crate) fn has_balancer_ports(service: &Service, options: &BalancerOptions) -> bool {
    let value = service.annotations.get(&options.annotation);
    let namespace = options.namespace.as_ref();
    value.is_some_and(|value| value == "true" || value == "NodePort")
        && service.has_cluster_ip
        && namespace.is_none_or(|namespace| *namespace == service.namespace)
}

/// Returns the name of a port, shortened to [`MAX_NAME`]; the node port at the end keeps shortened names
/// unique. The stock program does not shorten names, and a single long name makes Kubernetes refuse all its
/// updates.
fn name_of(service: &Service, node_port: u16) -> String {
    let end = format!("-{node_port}");
    let start = format!("{}-{}", service.namespace, service.name);
    let start = start.chars().take(MAX_NAME - end.len());
    start.chain(end.chars()).collect()
}

fn balancer_port(
    port: u16,
    name: String,
    old_name: String,
    current: &HashMap<&str, u16>,
) -> BalancerPort {
    let (name, node_port) = if let Some(&kept) = current.get(name.as_str()) {
        (name, kept)
    } else if let Some(&kept) = current.get(old_name.as_str()) {
        (old_name, kept)
    } else {
        (name, 0)
    };
    BalancerPort {
        name,
        is_udp: false,
        port,
        target_port: port,
        node_port,
    }
}
