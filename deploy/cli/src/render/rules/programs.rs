//! Rules for values that KKP accepts, and that the rendered programs or the Kubernetes API refuse.

use std::collections::BTreeMap;
use std::net::Ipv4Addr;

use ipnet::Ipv4Net;

use crate::render::cluster::{Cluster, Tunnel};
use crate::render::finding::{Findings, Problem};
use crate::render::spec::{ComponentsOverride, Resources, quantity};

/// Smallest node port. The programs listen without the capability for lower ports.
const MIN_NODE_PORT: u16 = 1024;
/// Default range of node ports in Kubernetes.
const NODE_PORTS: std::ops::RangeInclusive<u16> = 30000..=32767;

pub(super) fn check(cluster: &Cluster, findings: &mut Findings) {
    node_ports(cluster, findings);
    replicas(cluster, findings);
    resources(cluster, findings);
    if cluster.tunnel == Tunnel::Openvpn {
        openvpn(cluster, findings);
    }
}

fn node_ports(cluster: &Cluster, findings: &mut Findings) {
    if cluster.is_tunneling() {
        return;
    }
    let ports = &cluster.facts().node_ports;
    let given = [
        ("nodePorts.apiserver", ports.apiserver),
        ("nodePorts.konnectivityServer", ports.konnectivity_server),
        ("nodePorts.openvpnServer", ports.openvpn_server),
    ];
    let given: Vec<(&str, u16)> = given
        .into_iter()
        .filter_map(|(path, port)| Some((path, port?)))
        .collect();
    for (at, (path, port)) in given.iter().enumerate() {
        if *port < MIN_NODE_PORT {
            let reason = "is below 1024; set the node port of the Service in the seed";
            findings.error(Problem::invalid(path, port, reason));
        } else if !NODE_PORTS.contains(port) {
            let reason =
                "is outside of 30000-32767; the seed's --service-node-port-range must contain it";
            findings.warn(path, port, reason);
        }
        let mut before = given.iter().take(at);
        if let Some((other, _)) = before.find(|(_, other)| other == port) {
            let reason =
                format!("is also the value of {other}; each Service has its own node port");
            findings.error(Problem::invalid(path, port, reason));
        }
    }
}

fn replicas(cluster: &Cluster, findings: &mut Findings) {
    let is_fact = cluster.facts().apiserver_replicas.is_some();
    let replicas = cluster.apiserver_replicas;
    if replicas < 1 {
        let path = match is_fact {
            true => "apiserverReplicas".to_owned(),
            false => path(cluster, "apiserver.replicas", |it| {
                it.apiserver.replicas.is_some()
            }),
        };
        findings.error(Problem::invalid(&path, replicas, "must be at least 1"));
    }
    let door = &cluster.spec.components_override.node_port_proxy_envoy;
    if let Some(replicas) = door.replicas.filter(|replicas| *replicas < 0) {
        let path = path(cluster, "nodePortProxyEnvoy.replicas", |it| {
            it.node_port_proxy_envoy.replicas.is_some()
        });
        findings.error(Problem::invalid(&path, replicas, "must not be negative"));
    }
}

/// Returns the path of a component's setting: in the Cluster if the Cluster `has` the setting, or else in the Seed.
pub(super) fn path(cluster: &Cluster, field: &str, has: fn(&ComponentsOverride) -> bool) -> String {
    match has(&cluster.input.spec.components_override) {
        true => format!("spec.componentsOverride.{field}"),
        false => format!("seed.defaultComponentSettings.{field}"),
    }
}

/// Resources of a component, if the settings have them.
type Of = fn(&ComponentsOverride) -> Option<&Resources>;

fn resources(cluster: &Cluster, findings: &mut Findings) {
    let components: [(&str, Of); 3] = [
        ("konnectivityProxy", |it| {
            it.konnectivity_proxy.resources.as_ref()
        }),
        ("nodePortProxyEnvoy", |it| {
            it.node_port_proxy_envoy.resources.as_ref()
        }),
        ("envoyAgent", |it| it.envoy_agent.resources.as_ref()),
    ];
    for (component, of) in components {
        let Some(given) = of(&cluster.spec.components_override) else {
            continue;
        };
        let parent = match of(&cluster.input.spec.components_override) {
            Some(_) => "spec.componentsOverride",
            None => "seed.defaultComponentSettings",
        };
        let path = format!("{parent}.{component}.resources");
        quantities(&format!("{path}.limits"), &given.limits, findings);
        quantities(&format!("{path}.requests"), &given.requests, findings);
        for (name, request) in &given.requests {
            let limit = given.limits.get(name);
            if let Some(limit) = limit.filter(|limit| quantity(request) > quantity(limit)) {
                let path = format!("{path}.requests.{name}");
                let reason = format!("is above the limit, {limit}");
                findings.error(Problem::invalid(&path, request, reason));
            }
        }
    }
}

fn quantities(path: &str, given: &BTreeMap<String, String>, findings: &mut Findings) {
    for (name, text) in given {
        if quantity(text).is_none() {
            let reason = "is not a quantity, such as 100m or 64Mi";
            findings.error(Problem::invalid(&format!("{path}.{name}"), text, reason));
        }
    }
}

fn openvpn(cluster: &Cluster, findings: &mut Findings) {
    let access = &cluster.node_access_network;
    let network: Option<Ipv4Net> = access.parse().ok();
    if network.is_none_or(|network| network.prefix_len() > 16) {
        let reason = "is not an IPv4 network of /16 or larger; set a network such as 10.254.0.0/16, which has an address \
                      for the last two octets of each node";
        findings.error(Problem::invalid("nodeAccessNetwork", access, reason));
    }
    for (at, text) in cluster.facts().node_networks.iter().enumerate() {
        let address = text.parse::<Ipv4Addr>().map(Ipv4Net::from);
        let network = address.or_else(|_| text.parse::<Ipv4Net>());
        if network.is_ok_and(|network| network.prefix_len() >= 16) {
            continue;
        }
        let reason = "is neither an IPv4 address nor an IPv4 network of /16 or smaller; name the networks of the nodes, such \
                      as 10.0.0.0/16 and 10.1.0.0/16";
        let path = format!("nodeNetworks[{at}]");
        findings.error(Problem::invalid(&path, text, reason));
    }
}
