//! Rules of `spec.clusterNetwork` for every write.

use ipnet::IpNet;

use crate::render::cluster::{Cluster, DUAL_STACK, IPV4, Tunnel};
use crate::render::finding::{Findings, Problem};
use crate::render::spec::CidrBlocks;

use super::ranges::cidr;

/// Path of the network settings.
const PATH: &str = "spec.clusterNetwork";

/// Providers whose datacenters must enable IPv6. With other providers, IPv6 is always enabled or unknown to KKP.
const IPV6_BY_DATACENTER: [&str; 2] = ["openstack", "vsphere"];

pub(super) fn check(cluster: &Cluster, findings: &mut Findings) {
    let network = &cluster.network;
    counts(&network.pods, &network.services, findings);
    families("pods", &network.pods, findings);
    families("services", &network.services, findings);
    family(cluster, findings);
    masks(cluster, findings);
    if network.dns_domain != "cluster.local" {
        findings.error(Problem::invalid(
            &format!("{PATH}.dnsDomain"),
            &network.dns_domain,
            "dnsDomain must be 'cluster.local'",
        ));
    }
    proxy_mode(cluster, findings);
    if network.konnectivity_enabled == Some(false) {
        findings.error(Problem::invalid(
            &format!("{PATH}.konnectivityEnabled"),
            false,
            "Konnectivity can no longer be disabled; set tunnel to render the OpenVPN mode",
        ));
    }
}

fn counts(pods: &CidrBlocks, services: &CidrBlocks, findings: &mut Findings) {
    let path = |field| format!("{PATH}.{field}.cidrBlocks");
    let (pods, services) = (&pods.cidr_blocks, &services.cidr_blocks);
    for (field, what, blocks) in [("pods", "pod", pods), ("services", "service", services)] {
        if blocks.len() > 2 {
            findings.error(Problem::too_many(&path(field), blocks.len(), 2));
        }
        if blocks.is_empty() {
            let reason = format!("{what} CIDR must be provided");
            findings.error(Problem::required(&path(field), reason));
        }
    }
    if pods.len() < services.len() {
        let reason = format!("{} pod CIDRs must be provided", services.len());
        findings.error(Problem::invalid(&path("pods"), pods, reason));
    }
    if services.len() < pods.len() {
        let reason = format!("{} services CIDRs must be provided", pods.len());
        findings.error(Problem::invalid(&path("services"), services, reason));
    }
}

/// Checks that the first network is IPv4 and the second IPv6. KKP reports the first mistake of a list only; here
/// every network is checked.
fn families(field: &str, blocks: &CidrBlocks, findings: &mut Findings) {
    for (at, block) in blocks.cidr_blocks.iter().enumerate() {
        let path = format!("{PATH}.{field}.cidrBlocks[{at}]");
        let parsed = match cidr(block) {
            Ok(parsed) => parsed,
            Err(reason) => {
                findings.error(Problem::invalid(&path, block, reason));
                continue;
            }
        };
        let expected = match (at, parsed) {
            (0, IpNet::V6(_)) => Some(("primary", "IPv4")),
            (1, IpNet::V4(_)) => Some(("secondary", "IPv6")),
            _ => None,
        };
        if let Some((place, family)) = expected {
            let reason =
                format!("invalid address family for {place} CIDR {block:?}: has to be {family}");
            let problem = Problem::invalid(&path, block, reason);
            // KKP appends the path of the pods to the path of the list.
            let kkp = format!("spec.networkConfig.{field}.cidrBlocks.pods.cidrBlocks[{at}]");
            findings.error(problem.named_by_kkp(&kkp));
        }
    }
}

fn family(cluster: &Cluster, findings: &mut Findings) {
    let network = &cluster.network;
    let path = format!("{PATH}.ipFamily");
    let family = network.ip_family.as_str();
    let blocks = &network.pods.cidr_blocks;
    let expected = match family {
        IPV4 => 1,
        DUAL_STACK => 2,
        _ => {
            findings.error(Problem::unsupported(&path, family, &["", IPV4, DUAL_STACK]));
            return;
        }
    };
    if blocks.len() != expected {
        let reason =
            format!("IP family {family:?} does not match with provided pods CIDRs {blocks:?}");
        findings.error(Problem::invalid(&path, family, reason));
    }
    let needs_ipv6 = IPV6_BY_DATACENTER.contains(&cluster.provider.as_str());
    let has_ipv6 = cluster.facts().seed.datacenter.ipv6_enabled;
    if family == DUAL_STACK && needs_ipv6 && !has_ipv6 {
        let reason = format!("IP family {family:?} requires ipv6 to be enabled for the datacenter");
        findings.error(Problem::invalid(&path, family, reason));
    }
}

fn masks(cluster: &Cluster, findings: &mut Findings) {
    let network = &cluster.network;
    let blocks = network.pods.cidr_blocks.iter();
    let parsed: Vec<(&String, IpNet)> = blocks
        .filter_map(|block| Some((block, cidr(block).ok()?)))
        .collect();
    let ipv4 = parsed.iter().find(|(_, net)| matches!(net, IpNet::V4(_)));
    let ipv6 = parsed.iter().find(|(_, net)| matches!(net, IpNet::V6(_)));
    for (field, size, pods) in [
        (
            "nodeCidrMaskSizeIPv4",
            network.node_cidr_mask_size_ipv4,
            ipv4,
        ),
        (
            "nodeCidrMaskSizeIPv6",
            network.node_cidr_mask_size_ipv6,
            ipv6,
        ),
    ] {
        let (Some(size), Some((block, net))) = (size, pods) else {
            continue;
        };
        if i32::from(net.prefix_len()) >= size {
            let reason = format!(
                "node CIDR mask size ({size}) must be longer than the mask size of the pod CIDR ({block:?})"
            );
            findings.error(Problem::invalid(&format!("{PATH}.{field}"), size, reason));
        }
    }
}

fn proxy_mode(cluster: &Cluster, findings: &mut Findings) {
    let path = format!("{PATH}.proxyMode");
    let mode = cluster.network.proxy_mode.as_str();
    let modes = cluster.kkp.proxy_modes();
    if !modes.contains(&mode) {
        findings.error(Problem::unsupported(&path, mode, modes));
    }
    if mode != "ebpf" {
        return;
    }
    // KKP sets a plugin before it checks the mode. On updates, a missing plugin stays missing.
    let given = cluster.spec.cni_plugin.as_ref();
    if given.is_none_or(|plugin| plugin.kind == "canal") {
        let reason = "ebpf proxy mode is not valid for canal CNI";
        findings.error(Problem::invalid(&path, mode, reason));
    }
    let is_on = cluster.network.konnectivity_enabled == Some(true);
    if !is_on || cluster.tunnel == Tunnel::Openvpn {
        let reason = "ebpf proxy mode can be used only when Konnectivity is enabled";
        findings.error(Problem::invalid(&path, mode, reason));
    }
}
