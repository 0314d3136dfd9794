//! The ports that the LoadBalancer Service in front of the proxy must have.
//!
//! The balancer forwards each of them to the same port of the proxy. Names and node ports that it
//! has already are kept: every change makes the balancer's implementation work, which is slow on
//! some clouds. No I/O.

mod json;
#[cfg(test)]
mod tests;

use std::collections::{BTreeMap, HashMap};

pub use self::json::{changed_ports, read_ports};
use super::exposure::Service;

/// The longest name of a Service port (an RFC 1123 label).
const MAX_NAME: usize = 63;

/// A port of the balancer's Service. Its protocol is TCP.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct BalancerPort {
    /// Unique within the Service.
    pub name: String,
    /// Where the balancer listens.
    pub port: u16,
    /// The proxy's port behind it, as a number; the same as `port`.
    pub target_port: u16,
    /// The balancer's own port on every node; 0 leaves the choice to Kubernetes.
    pub node_port: u16,
}

/// What the balancer has to offer.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct BalancerOptions {
    /// The key of the annotation to look at; see [`annotations`](super::annotations).
    pub annotation: String,
    /// The proxy's listener for TLS server names, named `sni-listener`; 0 for none.
    pub sni_port: u16,
    /// The proxy's listener for CONNECT requests, named `tunneling-listener`; 0 for none.
    pub tunneling_port: u16,
    /// The proxy's listener for `/healthz` and metrics, named `healthz`: 8002 in the stock proxy.
    /// 0 for none; but Kubernetes refuses a Service without ports.
    pub stats_port: u16,
    /// Takes only the Services of this namespace.
    pub namespace: Option<String>,
}

/// All ports of the balancer, sorted by name. If they equal the `current` ones sorted by name,
/// there is nothing to write.
///
/// Besides the fixed ports there is one for every node port of a Service that has a cluster IP and
/// whose annotation is exactly `true` or exactly `NodePort`, whatever its protocol and whether or
/// not there are endpoints. It is named `<namespace>-<service>-<node port>`, or
/// `<namespace>-<service>-<port>-<node port>` if the balancer has that name of an older scheme.
///
/// No port number comes twice, as Kubernetes would refuse the whole list: a fixed port wins, and
/// otherwise the first Service by name. TCP and UDP may share a node port.
pub fn balancer_ports<'a>(
    services: impl Iterator<Item = &'a Service>,
    options: &BalancerOptions,
    current: &[BalancerPort],
) -> Vec<BalancerPort> {
    let current: HashMap<&str, u16> = current
        .iter()
        .map(|port| (port.name.as_str(), port.node_port))
        .collect();
    let mut by_number = BTreeMap::new();
    for (name, number) in [
        ("healthz", options.stats_port),
        ("sni-listener", options.sni_port),
        ("tunneling-listener", options.tunneling_port),
    ] {
        let port = || balancer_port(number, name.to_owned(), name.to_owned(), &current);
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
                balancer_port(number, name_of(service, number), old_name, &current)
            });
        }
    }
    // What has no number has no port.
    by_number.remove(&0);
    let mut ports: Vec<BalancerPort> = by_number.into_values().collect();
    ports.sort_unstable_by(|a, b| a.name.cmp(&b.name));
    ports
}

/// Whether a Service has ports at the balancer, if it has node ports.
pub fn has_balancer_ports(service: &Service, options: &BalancerOptions) -> bool {
    let value = service.annotations.get(&options.annotation);
    let namespace = options.namespace.as_ref();
    value.is_some_and(|value| value == "true" || value == "NodePort")
        && service.has_cluster_ip
        && namespace.is_none_or(|namespace| *namespace == service.namespace)
}

/// The stock program does not shorten names, and one that is too long makes Kubernetes refuse all
/// of its updates. The node port at the end keeps shortened ones apart.
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
        port,
        target_port: port,
        node_port,
    }
}
