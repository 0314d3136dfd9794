//! The fields of KKP's `Cluster` object that decide about the tunnel. Names and meaning are KKP's.

use std::collections::BTreeMap;

use serde::{Deserialize, Deserializer};
use serde_json::Value;

/// `spec` of a Cluster. Other fields are ignored.
#[derive(Clone, Debug, Default, PartialEq, Deserialize)]
#[serde(rename_all = "camelCase", default)]
pub(crate) struct Spec {
    pub(crate) version: Option<String>,
    #[serde(deserialize_with = "present")]
    pub(crate) expose_strategy: String,
    #[serde(deserialize_with = "present")]
    pub(crate) cloud: Cloud,
    pub(crate) cluster_network: Option<ClusterNetwork>,
    pub(crate) cni_plugin: Option<CniPlugin>,
    #[serde(deserialize_with = "present")]
    pub(crate) components_override: ComponentsOverride,
    #[serde(rename = "apiServerAllowedIPRanges")]
    pub(crate) api_server_allowed_ip_ranges: Option<CidrBlocks>,
    #[serde(deserialize_with = "present")]
    pub(crate) features: BTreeMap<String, bool>,
    pub(crate) service_account: Option<ServiceAccount>,
}

/// `spec.serviceAccount`.
#[derive(Clone, Debug, Default, PartialEq, Eq, Deserialize)]
#[serde(rename_all = "camelCase", default)]
pub(crate) struct ServiceAccount {
    /// Issuer of service account tokens; empty for the URL of the API server.
    #[serde(deserialize_with = "present")]
    pub(crate) issuer: String,
    /// Audiences of kube-apiserver, in place of the issuer.
    #[serde(deserialize_with = "present")]
    pub(crate) api_audiences: Vec<String>,
}

#[derive(Clone, Debug, Default, PartialEq, Deserialize)]
#[serde(rename_all = "camelCase", default)]
pub(crate) struct Cloud {
    #[serde(deserialize_with = "present")]
    pub(crate) provider_name: String,
}

/// `spec.clusterNetwork`.
#[derive(Clone, Debug, Default, PartialEq, Deserialize)]
#[serde(rename_all = "camelCase", default)]
pub(crate) struct ClusterNetwork {
    #[serde(deserialize_with = "present")]
    pub(crate) ip_family: String,
    #[serde(deserialize_with = "present")]
    pub(crate) pods: CidrBlocks,
    #[serde(deserialize_with = "present")]
    pub(crate) services: CidrBlocks,
    #[serde(rename = "nodeCidrMaskSizeIPv4")]
    pub(crate) node_cidr_mask_size_ipv4: Option<i32>,
    #[serde(rename = "nodeCidrMaskSizeIPv6")]
    pub(crate) node_cidr_mask_size_ipv6: Option<i32>,
    #[serde(deserialize_with = "present")]
    pub(crate) dns_domain: String,
    #[serde(deserialize_with = "present")]
    pub(crate) proxy_mode: String,
    pub(crate) ipvs: Option<Ipvs>,
    #[serde(rename = "nodeLocalDNSCacheEnabled")]
    pub(crate) node_local_dns_cache_enabled: Option<bool>,
    #[serde(rename = "coreDNSReplicas")]
    pub(crate) core_dns_replicas: Option<i32>,
    pub(crate) konnectivity_enabled: Option<bool>,
    #[serde(rename = "tunnelingAgentIP", deserialize_with = "present")]
    pub(crate) tunneling_agent_ip: String,
    /// Fields that KKP does not know.
    #[serde(flatten)]
    pub(crate) unknown: BTreeMap<String, Value>,
}

/// A list of networks.
#[derive(Clone, Debug, Default, PartialEq, Eq, Deserialize)]
#[serde(rename_all = "camelCase", default)]
pub(crate) struct CidrBlocks {
    #[serde(deserialize_with = "present")]
    pub(crate) cidr_blocks: Vec<String>,
}

#[derive(Clone, Debug, Default, PartialEq, Eq, Deserialize)]
#[serde(rename_all = "camelCase", default)]
pub(crate) struct Ipvs {
    pub(crate) strict_arp: Option<bool>,
}

#[derive(Clone, Debug, Default, PartialEq, Eq, Deserialize)]
#[serde(default)]
pub(crate) struct CniPlugin {
    #[serde(rename = "type", deserialize_with = "present")]
    pub(crate) kind: String,
    #[serde(deserialize_with = "present")]
    pub(crate) version: String,
}

/// `spec.componentsOverride`, and `defaultComponentSettings` of a seed.
#[derive(Clone, Debug, Default, PartialEq, Deserialize)]
#[serde(rename_all = "camelCase", default)]
pub(crate) struct ComponentsOverride {
    #[serde(deserialize_with = "present")]
    pub(crate) apiserver: ApiserverSettings,
    #[serde(deserialize_with = "present")]
    pub(crate) konnectivity_proxy: KonnectivityProxy,
    #[serde(deserialize_with = "present")]
    pub(crate) node_port_proxy_envoy: DeploymentSettings,
    #[serde(deserialize_with = "present")]
    pub(crate) envoy_agent: DeploymentSettings,
    #[serde(rename = "coreDNS")]
    pub(crate) core_dns: Option<DeploymentSettings>,
}

#[derive(Clone, Debug, Default, PartialEq, Deserialize)]
#[serde(rename_all = "camelCase", default)]
pub(crate) struct ApiserverSettings {
    pub(crate) replicas: Option<i32>,
    #[serde(deserialize_with = "present")]
    pub(crate) node_port_range: String,
    pub(crate) endpoint_reconciling_disabled: Option<bool>,
}

#[derive(Clone, Debug, Default, PartialEq, Deserialize)]
#[serde(rename_all = "camelCase", default)]
pub(crate) struct KonnectivityProxy {
    pub(crate) resources: Option<Resources>,
    #[serde(deserialize_with = "present")]
    pub(crate) keepalive_time: String,
    #[serde(deserialize_with = "present")]
    pub(crate) args: Vec<String>,
    #[serde(deserialize_with = "present")]
    pub(crate) host_anti_affinity: String,
    #[serde(deserialize_with = "present")]
    pub(crate) zone_anti_affinity: String,
}

#[derive(Clone, Debug, Default, PartialEq, Deserialize)]
#[serde(rename_all = "camelCase", default)]
pub(crate) struct DeploymentSettings {
    pub(crate) replicas: Option<i32>,
    pub(crate) resources: Option<Resources>,
}

/// Requests and limits of a container, by resource name.
#[derive(Clone, Debug, Default, PartialEq, Eq, Deserialize)]
#[serde(default)]
pub(crate) struct Resources {
    #[serde(deserialize_with = "present")]
    pub(crate) requests: BTreeMap<String, String>,
    #[serde(deserialize_with = "present")]
    pub(crate) limits: BTreeMap<String, String>,
}

/// Reads a field whose value may be `null`, as Go writes empty lists: the default value then.
pub(super) fn present<'de, D, T>(deserializer: D) -> Result<T, D::Error>
where
    D: Deserializer<'de>,
    T: Default + Deserialize<'de>,
{
    let value: Option<T> = Option::deserialize(deserializer)?;
    Ok(value.unwrap_or_default())
}

/// Suffixes of quantities, with their factors.
const SUFFIXES: [(&str, f64); 15] = [
    ("n", 1e-9),
    ("u", 1e-6),
    ("m", 1e-3),
    ("k", 1e3),
    ("M", 1e6),
    ("G", 1e9),
    ("T", 1e12),
    ("P", 1e15),
    ("E", 1e18),
    ("Ki", 1024.0),
    ("Mi", 1_048_576.0),
    ("Gi", 1_073_741_824.0),
    ("Ti", 1_099_511_627_776.0),
    ("Pi", 1_125_899_906_842_624.0),
    ("Ei", 1_152_921_504_606_846_976.0),
];

/// Returns the value of a quantity such as `100m` or `64Mi`, or `None` if the text is not a quantity.
pub(super) fn quantity(text: &str) -> Option<f64> {
    let is_number = |text: &str| text.ends_with(|last: char| last.is_ascii_digit() || last == '.');
    let number = |text: &str| text.parse::<f64>().ok().filter(|_| is_number(text));
    let with_suffix =
        |(suffix, factor): &(&str, f64)| Some(number(text.strip_suffix(suffix)?)? * factor);
    number(text).or_else(|| SUFFIXES.iter().find_map(with_suffix))
}

// === impl CidrBlocks ===

impl CidrBlocks {
    pub(crate) fn new(blocks: &[&str]) -> Self {
        Self {
            cidr_blocks: blocks.iter().map(|block| (*block).to_owned()).collect(),
        }
    }
}

// === impl Spec ===

impl Spec {
    /// Returns the networks that may reach the API server; empty if the cluster sets none.
    pub(crate) fn allowed_ranges(&self) -> &[String] {
        let ranges = self.api_server_allowed_ip_ranges.as_ref();
        ranges.map_or(&[], |ranges| &ranges.cidr_blocks)
    }

    /// Returns the network settings; the defaults of Go if the object has none.
    pub(crate) fn network(&self) -> ClusterNetwork {
        self.cluster_network.clone().unwrap_or_default()
    }
}
