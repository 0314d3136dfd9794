//! Warnings about mistakes that KKP accepts.

use std::net::{IpAddr, Ipv4Addr};

use culvert_host::flags::GoDuration;
use ipnet::IpNet;

use crate::render::cluster::{Cluster, Tunnel};
use crate::render::finding::Findings;

use super::ranges::cidr;

/// Address of node-local-dns on every node.
const NODE_LOCAL_DNS: Ipv4Addr = Ipv4Addr::new(169, 254, 20, 10);

/// Network of the OpenVPN tunnel itself.
const OPENVPN_NETWORK: &str = "10.20.0.0/24";

/// Arguments that the rendered server and agent already have, and that decide about the connection between them. KKP's
/// own arguments come first, so an argument of the user replaces them.
const FIXED_ARGUMENTS: [&str; 27] = [
    "admin-bind-address",
    "admin-port",
    "admin-server-port",
    "agent-namespace",
    "agent-port",
    "agent-service-account",
    "authentication-audience",
    "ca-cert",
    "cluster-cert",
    "cluster-key",
    "delete-existing-uds-file",
    "health-port",
    "health-server-port",
    "keepalive-time",
    "kubeconfig",
    "mode",
    "proxy-server-host",
    "proxy-server-port",
    "proxy-strategies",
    "server-count",
    "server-port",
    "service-account-token-path",
    "sync-forever",
    "uds-name",
    "tunnel-mode",
    "tunnel-mode-file",
    "admin-uds",
];

pub(super) fn check(cluster: &Cluster, old: Option<&Cluster>, findings: &mut Findings) {
    tunneling(cluster, findings);
    networks(cluster, findings);
    service_network(cluster, findings);
    konnectivity(cluster, findings);
    for name in cluster.network.unknown.keys() {
        let path = format!("spec.clusterNetwork.{name}");
        findings.warn(&path, name, "KKP does not know this field and drops it");
    }
    let ranges = cluster.spec.allowed_ranges();
    for (at, range) in ranges.iter().enumerate() {
        if let Err(reason) = cidr(range) {
            let path = format!("spec.apiServerAllowedIPRanges.cidrBlocks[{at}]");
            findings.warn(&path, range, reason);
        }
    }
    let address = &cluster.network.tunneling_agent_ip;
    if let Some(old) = old
        && old.is_tunneling()
        && cluster.is_tunneling()
        && old.network.tunneling_agent_ip != *address
    {
        findings.warn(
            "spec.clusterNetwork.tunnelingAgentIP",
            address,
            "a change restarts the node tunnel on every node, and the certificate of the API server needs the \
             new address first",
        );
    }
}

fn tunneling(cluster: &Cluster, findings: &mut Findings) {
    if !cluster.is_tunneling() {
        return;
    }
    // An address is an error.
    if let Some(name) = &cluster.facts().external_name
        && name.parse::<IpAddr>().is_err()
    {
        let reason = format!(
            "DNS must also resolve konnectivity-server.{name}; a wildcard record covers both names if {name} \
             itself has no record"
        );
        findings.warn("externalName", name, reason);
    }
    let path = "spec.clusterNetwork.tunnelingAgentIP";
    let text = &cluster.network.tunneling_agent_ip;
    let Ok(address) = text.parse::<Ipv4Addr>() else {
        findings.warn(
            path,
            text,
            "is not an IPv4 address; the node tunnel cannot listen on it",
        );
        return;
    };
    if address == NODE_LOCAL_DNS {
        findings.warn(path, text, "is the address of node-local-dns");
    } else if address.is_loopback() || address.is_unspecified() || address.is_multicast() {
        findings.warn(path, text, "cannot be an address of an interface for pods");
    }
    let network = &cluster.network;
    let nodes = &cluster.facts().node_networks;
    for (what, blocks) in [
        ("pods", &network.pods.cidr_blocks),
        ("services", &network.services.cidr_blocks),
        ("nodes", nodes),
    ] {
        let inside = |block: &&String| {
            cidr(block).is_ok_and(|network| network.contains(&IpAddr::V4(address)))
        };
        if let Some(block) = blocks.iter().find(inside) {
            findings.warn(
                path,
                text,
                format!("is inside the network of the {what}, {block}"),
            );
        }
    }
}

/// A network of the cluster: its path, its text, its parsed value.
type Named<'a> = (String, &'a str, IpNet);

fn networks(cluster: &Cluster, findings: &mut Findings) {
    let network = &cluster.network;
    let facts = cluster.facts();
    let mut all: Vec<Named<'_>> = Vec::new();
    for (path, blocks) in [
        (
            "spec.clusterNetwork.pods.cidrBlocks",
            &network.pods.cidr_blocks,
        ),
        (
            "spec.clusterNetwork.services.cidrBlocks",
            &network.services.cidr_blocks,
        ),
        ("nodeNetworks", &facts.node_networks),
    ] {
        for (at, block) in blocks.iter().enumerate() {
            match cidr(block) {
                Ok(net) => all.push((format!("{path}[{at}]"), block, net)),
                // Other wrong networks are errors already.
                Err(reason) if path == "nodeNetworks" && cluster.tunnel != Tunnel::Openvpn => {
                    findings.warn(&format!("{path}[{at}]"), block, reason);
                }
                Err(_) => {}
            }
        }
    }
    if cluster.tunnel == Tunnel::Openvpn || facts.node_access_network.is_some() {
        openvpn_networks(cluster, &mut all, findings);
    }
    for (path, block, net) in &all {
        if net.addr() != net.network() {
            let reason = format!("has host bits; the network is {}", net.trunc());
            findings.warn(path, block, reason);
        }
    }
    for (at, (path, block, net)) in all.iter().enumerate() {
        for (other, text, before) in all.iter().take(at) {
            if net.contains(&before.network()) || before.contains(&net.network()) {
                findings.warn(path, block, format!("overlaps {text} of {other}"));
            }
        }
    }
}

fn openvpn_networks<'a>(cluster: &'a Cluster, all: &mut Vec<Named<'a>>, findings: &mut Findings) {
    let access = cluster.node_access_network.as_str();
    match cidr(access) {
        Ok(net) => all.push(("nodeAccessNetwork".to_owned(), access, net)),
        Err(reason) if cluster.tunnel != Tunnel::Openvpn => {
            findings.warn("nodeAccessNetwork", access, reason);
        }
        Err(_) => {}
    }
    if cluster.tunnel == Tunnel::Openvpn
        && let Ok(net) = cidr(OPENVPN_NETWORK)
    {
        all.push(("the OpenVPN tunnel".to_owned(), OPENVPN_NETWORK, net));
    }
}

/// The first address of the services is in the certificates, and belongs to the Service `kubernetes`.
fn service_network(cluster: &Cluster, findings: &mut Findings) {
    let Some(block) = cluster.network.services.cidr_blocks.first() else {
        return;
    };
    if cidr(block).is_ok_and(|net| net.max_prefix_len() - net.prefix_len() < 2) {
        findings.warn(
            "spec.clusterNetwork.services.cidrBlocks[0]",
            block,
            "has no room for the Services kubernetes and kube-dns",
        );
    }
}

fn konnectivity(cluster: &Cluster, findings: &mut Findings) {
    let proxy = &cluster.spec.components_override.konnectivity_proxy;
    let path = "spec.componentsOverride.konnectivityProxy";
    let time = &proxy.keepalive_time;
    if !time.is_empty() {
        let path = format!("{path}.keepaliveTime");
        match time.parse::<GoDuration>() {
            Err(_) => findings.warn(
                &path,
                time,
                "is not a duration, such as 1m; server and agent do not start with it",
            ),
            Ok(time) if time.nanos() < 10_000_000_000 => {
                findings.warn(&path, time.to_string(), "is raised to 10s by the agent");
            }
            Ok(_) => {}
        }
    }
    for (at, argument) in proxy.args.iter().enumerate() {
        let name = argument.trim_start_matches('-');
        let name = name.split(['=', ' ']).next().unwrap_or(name);
        let path = format!("{path}.args[{at}]");
        if !argument.starts_with('-') {
            findings.warn(&path, argument, "is not a flag, and has no effect");
        } else if FIXED_ARGUMENTS.contains(&name) {
            findings.warn(
                &path,
                argument,
                format!("replaces --{name} of the rendered arguments"),
            );
        }
    }
    if cluster.facts().nodes == Some(1) {
        let reason = match proxy.host_anti_affinity.as_str() {
            "required" => "one of the two agents stays Pending, because a node must not have both",
            _ => "both agents run on the same node; a restart of the node ends the tunnel",
        };
        findings.warn("nodes", 1, reason);
    }
}
