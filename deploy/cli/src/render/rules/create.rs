//! Rules for every write of a cluster, beside the rules of its network.

use crate::render::cluster::{Cluster, DUAL_STACK};
use crate::render::finding::{Findings, Problem};
use crate::render::kkp::{CNI_PLUGINS, cni_versions, minor_version};

use super::{network, ranges};

/// The expose strategies.
pub(super) const STRATEGIES: [&str; 3] = ["NodePort", "LoadBalancer", "Tunneling"];

/// Values of `hostAntiAffinity` and `zoneAntiAffinity`; empty means preferred.
const AFFINITIES: [&str; 3] = ["", "preferred", "required"];

pub(super) fn check(cluster: &Cluster, findings: &mut Findings) {
    exposure(cluster, findings);
    cni(cluster, findings);
    network::check(cluster, findings);
    components(cluster, findings);
}

fn exposure(cluster: &Cluster, findings: &mut Findings) {
    let strategy = cluster.spec.expose_strategy.as_str();
    if !STRATEGIES.contains(&strategy) {
        findings.error(Problem::unsupported(
            "spec.exposeStrategy",
            strategy,
            &STRATEGIES,
        ));
    }
    let ranges = cluster.spec.allowed_ranges();
    if !ranges.is_empty() && !cluster.is_load_balancer() {
        let problem = Problem::forbidden(
            "spec.apiServerAllowedIPRanges.cidrBlocks",
            ranges,
            "Access control for API server is supported only for LoadBalancer expose strategy",
        );
        findings.error(problem.named_by_kkp("spec.APIServerAllowedIPRanges"));
    }
    let address = &cluster.network.tunneling_agent_ip;
    if !address.is_empty() && !cluster.is_tunneling() {
        let problem = Problem::forbidden(
            "spec.clusterNetwork.tunnelingAgentIP",
            address,
            "Tunneling agent IP can be configured only for Tunneling Expose strategy",
        );
        findings.error(problem.named_by_kkp("spec.TunnelingAgentIP"));
    }
}

fn cni(cluster: &Cluster, findings: &mut Findings) {
    let Some(plugin) = &cluster.spec.cni_plugin else {
        return;
    };
    if !CNI_PLUGINS.contains(&plugin.kind.as_str()) {
        let problem = Problem::unsupported("spec.cniPlugin.type", &plugin.kind, &CNI_PLUGINS);
        findings.error(problem);
        return;
    }
    let mut known: Vec<&str> = cni_versions(&plugin.kind).to_vec();
    known.extend(cluster.facts().cni_versions.iter().map(String::as_str));
    if !known.contains(&plugin.version.as_str()) {
        let problem = Problem::unsupported("spec.cniPlugin.version", &plugin.version, &known);
        findings.error(problem);
    }
    let is_dual = cluster.network.ip_family == DUAL_STACK;
    let version = minor_version(&plugin.version);
    if is_dual && plugin.kind == "canal" && version.is_some_and(|version| version < (3, 22)) {
        findings.error(Problem::forbidden(
            "spec.cniPlugin",
            &plugin.version,
            "dual-stack not allowed on Canal CNI version lower than 3.22",
        ));
    }
}

fn components(cluster: &Cluster, findings: &mut Findings) {
    let components = &cluster.spec.components_override;
    let range = &components.apiserver.node_port_range;
    if let Err(reason) = ranges::port_range(range) {
        let path = "spec.componentsOverride.apiserver.nodePortRange";
        findings.error(match range.is_empty() {
            true => Problem::required(path, reason),
            false => Problem::invalid(path, range, reason),
        });
    }
    let new = components.core_dns.as_ref().and_then(|dns| dns.replicas);
    if let (Some(new), Some(old)) = (new, cluster.network.core_dns_replicas)
        && new != old
    {
        findings.error(Problem::invalid(
            "spec.componentsOverride.coreDNS.replicas",
            new,
            "both the new spec.componentsOverride.coreDNS.replicas and deprecated \
             spec.clusterNetwork.coreDNSReplicas fields are set",
        ));
    }
    let proxy = &components.konnectivity_proxy;
    for (field, value) in [
        ("hostAntiAffinity", &proxy.host_anti_affinity),
        ("zoneAntiAffinity", &proxy.zone_anti_affinity),
    ] {
        if !AFFINITIES.contains(&value.as_str()) {
            let path = format!("spec.componentsOverride.konnectivityProxy.{field}");
            findings.error(Problem::unsupported(&path, value, &AFFINITIES));
        }
    }
}
