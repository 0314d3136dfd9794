//! A cluster after defaults: typed values for the rules, and for the rendered objects.

use super::facts::Facts;
use super::finding::{Findings, Problem};
use super::input::Input;
use super::kkp::{Kkp, VERSIONS, minor_version};
use super::spec::{CidrBlocks, ClusterNetwork, CniPlugin, ComponentsOverride, Ipvs, Spec};

/// Default of `spec.exposeStrategy`.
const EXPOSE_STRATEGY: &str = "NodePort";
/// Default of `spec.clusterNetwork.tunnelingAgentIP`, with the strategy Tunneling only.
const TUNNELING_AGENT_IP: &str = "100.64.30.10";
/// Default of `spec.componentsOverride.apiserver.nodePortRange`.
const NODE_PORT_RANGE: &str = "30000-32767";
/// Default number of API servers.
const APISERVER_REPLICAS: i32 = 2;
/// Value of `ipFamily` for IPv4 alone.
pub(crate) const IPV4: &str = "IPv4";
/// Value of `ipFamily` for both families.
pub(crate) const DUAL_STACK: &str = "IPv4+IPv6";
/// Default network by which the OpenVPN tunnel addresses nodes.
const NODE_ACCESS_NETWORK: &str = "10.254.0.0/16";

/// The tunnel of the rendered objects.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Tunnel {
    Konnectivity,
    Openvpn,
}

/// A cluster with defaults.
#[derive(Clone, Debug, PartialEq)]
pub(crate) struct Cluster {
    pub(crate) input: Input,
    /// The specification with all defaults.
    pub(crate) spec: Spec,
    /// The network settings with all defaults.
    pub(crate) network: ClusterNetwork,
    pub(crate) kkp: Kkp,
    pub(crate) tunnel: Tunnel,
    /// Minor version of Kubernetes 1, if known.
    pub(crate) kubernetes_minor: Option<u32>,
    pub(crate) provider: String,
    pub(crate) node_access_network: String,
    pub(crate) apiserver_replicas: i32,
}

// === impl Tunnel ===

impl Tunnel {
    pub(crate) const ALL: [&'static str; 2] = ["konnectivity", "openvpn"];

    pub(crate) fn parse(text: &str) -> Option<Self> {
        match text {
            "konnectivity" => Some(Self::Konnectivity),
            "openvpn" => Some(Self::Openvpn),
            _ => None,
        }
    }
}

// === impl Cluster ===

impl Cluster {
    /// Adds KKP's defaults, in KKP's order. `is_new` is false for an update: KKP then leaves a missing
    /// `konnectivityEnabled` as it is. Reports values that are needed for the choice of defaults.
    pub(crate) fn new(input: Input, is_new: bool, findings: &mut Findings) -> Self {
        let facts = &input.facts;
        let kkp = kkp(facts, findings);
        let version = facts.kubernetes_version.as_ref();
        let version = version.or(input.spec.version.as_ref()).cloned();
        let kubernetes_minor = kubernetes_minor(version.as_deref(), kkp, findings);
        let provider = facts.provider.clone();
        let provider = provider.unwrap_or_else(|| input.spec.cloud.provider_name.clone());
        let mut spec = input.spec.clone();
        spec.version = version;
        api_server_defaults(&mut spec);
        seed_defaults(
            &mut spec.components_override,
            &facts.seed.default_component_settings,
        );
        let strategies = [
            &facts.seed.expose_strategy,
            &facts.configuration.expose_strategy,
        ];
        expose_strategy(&mut spec, strategies);
        cni(&mut spec, kkp, &provider, is_new);
        let mut network = spec.network();
        let defaults = NetworkDefaults {
            kkp,
            provider: &provider,
            // KKP compares the version; without one the oldest of this KKP counts.
            kubernetes_minor: kubernetes_minor.unwrap_or(kkp.kubernetes().0),
            is_tunneling: spec.expose_strategy == "Tunneling",
        };
        network_defaults(&mut network, &defaults);
        if is_new && network.konnectivity_enabled.is_none() {
            network.konnectivity_enabled = Some(true);
        }
        let range = &mut spec.components_override.apiserver.node_port_range;
        if range.is_empty() {
            NODE_PORT_RANGE.clone_into(range);
        }
        spec.cluster_network = Some(network.clone());
        let replicas = facts.apiserver_replicas;
        let replicas = replicas.or(spec.components_override.apiserver.replicas);
        let tunnel = tunnel(facts, findings);
        let node_access = facts.node_access_network.clone();
        Self {
            kkp,
            tunnel,
            kubernetes_minor,
            provider,
            network,
            node_access_network: node_access.unwrap_or_else(|| NODE_ACCESS_NETWORK.to_owned()),
            apiserver_replicas: replicas.unwrap_or(APISERVER_REPLICAS),
            spec,
            input,
        }
    }

    /// Returns a cluster as stored by KKP. KKP's own object already has the defaults of its time; a file of
    /// Culvert's format gets the defaults of a new cluster.
    pub(crate) fn stored(input: Input) -> Self {
        let mut findings = Findings::default();
        let is_object = input.is_object;
        let mut cluster = Self::new(input, true, &mut findings);
        if is_object {
            cluster.spec = cluster.input.spec.clone();
            cluster.network = cluster.spec.network();
        }
        cluster
    }

    pub(crate) fn facts(&self) -> &Facts {
        &self.input.facts
    }

    pub(crate) fn is_tunneling(&self) -> bool {
        self.spec.expose_strategy == "Tunneling"
    }

    pub(crate) fn is_load_balancer(&self) -> bool {
        self.spec.expose_strategy == "LoadBalancer"
    }
}

fn kkp(facts: &Facts, findings: &mut Findings) -> Kkp {
    let Some(text) = &facts.kkp_version else {
        return Kkp::V2_31;
    };
    Kkp::parse(text).unwrap_or_else(|| {
        findings.error(Problem::unsupported("kkpVersion", text, &VERSIONS));
        Kkp::V2_31
    })
}

fn kubernetes_minor(version: Option<&str>, kkp: Kkp, findings: &mut Findings) -> Option<u32> {
    let text = version?;
    let path = "spec.version";
    let Some((major, minor)) = minor_version(text) else {
        let reason = "is not a version of Kubernetes, such as 1.33.4";
        findings.error(Problem::invalid(path, text, reason));
        return None;
    };
    let (oldest, newest) = kkp.kubernetes();
    if major != 1 || !(oldest..=newest).contains(&minor) {
        let supported: Vec<String> = (oldest..=newest).map(|n| format!("1.{n}")).collect();
        let supported: Vec<&str> = supported.iter().map(String::as_str).collect();
        findings.error(Problem::unsupported(path, text, &supported));
    }
    Some(minor)
}

fn tunnel(facts: &Facts, findings: &mut Findings) -> Tunnel {
    let Some(text) = &facts.tunnel else {
        return Tunnel::Konnectivity;
    };
    Tunnel::parse(text).unwrap_or_else(|| {
        findings.error(Problem::unsupported("tunnel", text, &Tunnel::ALL));
        Tunnel::Konnectivity
    })
}

/// Defaults of the CRD. The API server sets them inside a given `clusterNetwork` only.
fn api_server_defaults(spec: &mut Spec) {
    let Some(network) = &mut spec.cluster_network else {
        return;
    };
    if network.proxy_mode.is_empty() {
        "ipvs".clone_into(&mut network.proxy_mode);
    }
    network.node_local_dns_cache_enabled.get_or_insert(true);
    network.konnectivity_enabled.get_or_insert(true);
    let ipvs = network.ipvs.get_or_insert_default();
    ipvs.strict_arp.get_or_insert(true);
}

/// Fills empty settings with the settings of the seed.
fn seed_defaults(ours: &mut ComponentsOverride, seed: &ComponentsOverride) {
    let text = |ours: &mut String, seed: &String| {
        if ours.is_empty() {
            ours.clone_from(seed);
        }
    };
    let (api, theirs) = (&mut ours.apiserver, &seed.apiserver);
    api.replicas = api.replicas.or(theirs.replicas);
    text(&mut api.node_port_range, &theirs.node_port_range);
    api.endpoint_reconciling_disabled = api
        .endpoint_reconciling_disabled
        .or(theirs.endpoint_reconciling_disabled);
    let (proxy, theirs) = (&mut ours.konnectivity_proxy, &seed.konnectivity_proxy);
    text(&mut proxy.keepalive_time, &theirs.keepalive_time);
    text(&mut proxy.host_anti_affinity, &theirs.host_anti_affinity);
    text(&mut proxy.zone_anti_affinity, &theirs.zone_anti_affinity);
    if proxy.args.is_empty() {
        proxy.args.clone_from(&theirs.args);
    }
    if proxy.resources.is_none() {
        proxy.resources.clone_from(&theirs.resources);
    }
    for (ours, theirs) in [
        (&mut ours.node_port_proxy_envoy, &seed.node_port_proxy_envoy),
        (&mut ours.envoy_agent, &seed.envoy_agent),
    ] {
        ours.replicas = ours.replicas.or(theirs.replicas);
        if ours.resources.is_none() {
            ours.resources.clone_from(&theirs.resources);
        }
    }
    if ours.core_dns.is_none() {
        ours.core_dns.clone_from(&seed.core_dns);
    }
}

fn expose_strategy(spec: &mut Spec, others: [&String; 2]) {
    if spec.expose_strategy.is_empty() {
        let other = others.into_iter().find(|strategy| !strategy.is_empty());
        spec.expose_strategy = other.cloned().unwrap_or_else(|| EXPOSE_STRATEGY.to_owned());
    }
}

/// A plugin that an update leaves out stays left out, because KKP refuses its removal.
fn cni(spec: &mut Spec, kkp: Kkp, provider: &str, is_new: bool) {
    if spec.cni_plugin.is_none() && is_new {
        let kind = match provider {
            "edge" => "canal",
            _ => "cilium",
        };
        spec.cni_plugin = Some(CniPlugin {
            kind: kind.to_owned(),
            version: String::new(),
        });
    }
    let Some(plugin) = &mut spec.cni_plugin else {
        return;
    };
    if plugin.version.is_empty() {
        kkp.default_cni_version(&plugin.kind)
            .clone_into(&mut plugin.version);
    }
}

/// Values that decide about the defaults of the network.
struct NetworkDefaults<'a> {
    kkp: Kkp,
    provider: &'a str,
    kubernetes_minor: u32,
    is_tunneling: bool,
}

fn network_defaults(network: &mut ClusterNetwork, given: &NetworkDefaults<'_>) {
    if network.ip_family.is_empty() {
        let family = match network.pods.cidr_blocks.len() {
            0 | 1 => IPV4,
            _ => DUAL_STACK,
        };
        family.clone_into(&mut network.ip_family);
    }
    let is_kubevirt = given.provider == "kubevirt";
    let (pods, services) = match is_kubevirt {
        true => ("172.26.0.0/16", "10.241.0.0/20"),
        false => ("172.25.0.0/16", "10.240.16.0/20"),
    };
    let is_dual = network.ip_family == DUAL_STACK;
    let blocks = |list: &mut CidrBlocks, ipv4, ipv6| {
        if list.cidr_blocks.is_empty() {
            *list = match is_dual {
                true => CidrBlocks::new(&[ipv4, ipv6]),
                false => CidrBlocks::new(&[ipv4]),
            };
        }
    };
    blocks(&mut network.pods, pods, "fd01::/48");
    blocks(&mut network.services, services, "fd02::/108");
    let has = |ipv6: bool| {
        let mut blocks = network.pods.cidr_blocks.iter();
        blocks.any(|block| block.contains(':') == ipv6)
    };
    let (has_ipv4, has_ipv6) = (has(false), has(true));
    if has_ipv4 {
        network.node_cidr_mask_size_ipv4.get_or_insert(24);
    }
    if has_ipv6 {
        network.node_cidr_mask_size_ipv6.get_or_insert(64);
    }
    if network.proxy_mode.is_empty() {
        let mode = given
            .kkp
            .default_proxy_mode(given.provider, given.kubernetes_minor);
        mode.clone_into(&mut network.proxy_mode);
    }
    if network.proxy_mode == "ipvs" {
        let ipvs = network.ipvs.get_or_insert_with(Ipvs::default);
        ipvs.strict_arp.get_or_insert(true);
    }
    network.node_local_dns_cache_enabled.get_or_insert(true);
    if network.dns_domain.is_empty() {
        "cluster.local".clone_into(&mut network.dns_domain);
    }
    if given.is_tunneling && network.tunneling_agent_ip.is_empty() {
        TUNNELING_AGENT_IP.clone_into(&mut network.tunneling_agent_ip);
    }
}
