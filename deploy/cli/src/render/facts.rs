//! Inputs of a rendered cluster that are not in KKP's cluster specification.

use std::collections::BTreeMap;

use serde::Deserialize;

use super::spec::{ComponentsOverride, Spec, present};

/// Port of the API server, and of the front door's TLS listener, with the strategy Tunneling.
pub(super) const TUNNELING_PORT: u16 = 6443;

/// Values of the cluster file beside `spec`. Flags override them.
#[derive(Clone, Debug, Default, PartialEq, Deserialize)]
#[serde(rename_all = "camelCase", default, deny_unknown_fields)]
pub(crate) struct Facts {
    /// Labels and specification of the cluster; the parser moves them out.
    #[serde(deserialize_with = "present")]
    pub(super) labels: BTreeMap<String, String>,
    pub(super) spec: Option<Spec>,
    /// Id of the cluster; the namespace in the seed is `cluster-<id>`.
    #[serde(rename = "clusterID")]
    pub(crate) cluster_id: Option<String>,
    /// Version of KKP whose objects are rendered, such as 2.31.
    pub(crate) kkp_version: Option<String>,
    /// Version of Kubernetes in the user cluster.
    pub(crate) kubernetes_version: Option<String>,
    /// Tunnel of the rendered objects: konnectivity or openvpn.
    pub(crate) tunnel: Option<String>,
    /// Public name of the API server; an address also works, except with Tunneling.
    pub(crate) external_name: Option<String>,
    /// Public address of the API server.
    #[serde(rename = "addressIP")]
    pub(crate) address_ip: Option<String>,
    #[serde(deserialize_with = "present")]
    pub(crate) node_ports: NodePorts,
    pub(crate) apiserver_replicas: Option<i32>,
    /// Network by which the OpenVPN tunnel addresses nodes. Default 10.254.0.0/16.
    pub(crate) node_access_network: Option<String>,
    /// Networks of the nodes, for the OpenVPN client.
    #[serde(deserialize_with = "present")]
    pub(crate) node_networks: Vec<String>,
    /// Number of nodes, if known.
    pub(crate) nodes: Option<u32>,
    /// Cloud provider; KKP's `spec.cloud.providerName`.
    pub(crate) provider: Option<String>,
    #[serde(deserialize_with = "present")]
    pub(crate) images: Images,
    /// Registry, with its folders, of the images without a value of their own.
    pub(crate) registry: Option<String>,
    /// Secrets for the registry of the images. `None`: KKP's Secret in the seed, and no Secret in the user cluster.
    pub(crate) image_pull_secrets: Option<Vec<String>>,
    /// Further versions of CNI plugins that the installation accepts.
    #[serde(deserialize_with = "present")]
    pub(crate) cni_versions: Vec<String>,
    #[serde(deserialize_with = "present")]
    pub(crate) seed: Seed,
    /// KKP's KubermaticConfiguration.
    #[serde(deserialize_with = "present")]
    pub(crate) configuration: Configuration,
}

/// Node ports of the seed's Services.
#[derive(Clone, Debug, Default, PartialEq, Eq, Deserialize)]
#[serde(rename_all = "camelCase", default, deny_unknown_fields)]
pub(crate) struct NodePorts {
    /// Node port of `apiserver-external`.
    pub(crate) apiserver: Option<u16>,
    /// Node port of `konnectivity-server`.
    pub(crate) konnectivity_server: Option<u16>,
    /// Node port of `openvpn-server`.
    pub(crate) openvpn_server: Option<u16>,
}

/// Images of the programs. `stock` selects the image of Konnectivity for server and agent.
#[derive(Clone, Debug, Default, PartialEq, Eq, Deserialize)]
#[serde(rename_all = "camelCase", default, deny_unknown_fields)]
pub(crate) struct Images {
    pub(crate) server: Option<String>,
    pub(crate) agent: Option<String>,
    pub(crate) door: Option<String>,
    pub(crate) node_tunnel: Option<String>,
}

/// Fields of KKP's `Seed` object that decide about the tunnel. Other fields are ignored.
#[derive(Clone, Debug, Default, PartialEq, Deserialize)]
#[serde(rename_all = "camelCase", default)]
pub(crate) struct Seed {
    #[serde(deserialize_with = "present")]
    pub(crate) expose_strategy: String,
    #[serde(deserialize_with = "present")]
    pub(crate) nodeport_proxy: NodeportProxy,
    #[serde(
        rename = "defaultAPIServerAllowedIPRanges",
        deserialize_with = "present"
    )]
    pub(crate) default_api_server_allowed_ip_ranges: Vec<String>,
    #[serde(deserialize_with = "present")]
    pub(crate) default_component_settings: ComponentsOverride,
    #[serde(deserialize_with = "present")]
    pub(crate) datacenter: Datacenter,
}

#[derive(Clone, Debug, Default, PartialEq, Eq, Deserialize)]
#[serde(rename_all = "camelCase", default, deny_unknown_fields)]
pub(crate) struct Datacenter {
    /// `spec.openstack.ipv6Enabled` or `spec.vsphere.ipv6Enabled` of KKP's datacenter.
    #[serde(deserialize_with = "present")]
    pub(crate) ipv6_enabled: bool,
}

#[derive(Clone, Debug, Default, PartialEq, Eq, Deserialize)]
#[serde(rename_all = "camelCase", default)]
pub(crate) struct NodeportProxy {
    /// Annotations of load balancers; deprecated by KKP, but in force.
    #[serde(deserialize_with = "present")]
    pub(crate) annotations: BTreeMap<String, String>,
    #[serde(deserialize_with = "present")]
    pub(crate) envoy: Envoy,
}

#[derive(Clone, Debug, Default, PartialEq, Eq, Deserialize)]
#[serde(rename_all = "camelCase", default)]
pub(crate) struct Envoy {
    pub(crate) replicas: Option<i32>,
    #[serde(deserialize_with = "present")]
    pub(crate) connection_settings: ConnectionSettings,
    #[serde(deserialize_with = "present")]
    pub(crate) load_balancer_service: LoadBalancerService,
}

/// Idle times and keepalives of the seed's front door.
#[derive(Clone, Debug, Default, PartialEq, Eq, Deserialize)]
#[serde(rename_all = "camelCase", default, deny_unknown_fields)]
pub(crate) struct ConnectionSettings {
    pub(crate) sni_listener_idle_timeout: Option<String>,
    pub(crate) tunneling_connection_idle_timeout: Option<String>,
    pub(crate) tunneling_stream_idle_timeout: Option<String>,
    #[serde(rename = "downstreamTCPKeepaliveTime")]
    pub(crate) downstream_tcp_keepalive_time: Option<String>,
    #[serde(rename = "downstreamTCPKeepaliveInterval")]
    pub(crate) downstream_tcp_keepalive_interval: Option<String>,
    #[serde(rename = "downstreamTCPKeepaliveProbes")]
    pub(crate) downstream_tcp_keepalive_probes: Option<i64>,
    #[serde(rename = "upstreamTCPKeepaliveTime")]
    pub(crate) upstream_tcp_keepalive_time: Option<String>,
    #[serde(rename = "upstreamTCPKeepaliveInterval")]
    pub(crate) upstream_tcp_keepalive_interval: Option<String>,
    #[serde(rename = "upstreamTCPKeepaliveProbes")]
    pub(crate) upstream_tcp_keepalive_probes: Option<i64>,
}

#[derive(Clone, Debug, Default, PartialEq, Eq, Deserialize)]
#[serde(rename_all = "camelCase", default)]
pub(crate) struct LoadBalancerService {
    /// Annotations of load balancers. They replace annotations of [`NodeportProxy`] with the same name.
    #[serde(deserialize_with = "present")]
    pub(crate) annotations: BTreeMap<String, String>,
    #[serde(deserialize_with = "present")]
    pub(crate) source_ranges: Vec<String>,
}

#[derive(Clone, Debug, Default, PartialEq, Eq, Deserialize)]
#[serde(rename_all = "camelCase", default)]
pub(crate) struct Configuration {
    #[serde(deserialize_with = "present")]
    pub(crate) expose_strategy: String,
}

// === impl ConnectionSettings ===

impl ConnectionSettings {
    /// Returns the durations: KKP's field, the flag of the front door without dashes, and the value.
    pub(crate) fn durations(&self) -> [(&'static str, &'static str, Option<&str>); 7] {
        [
            (
                "sniListenerIdleTimeout",
                "sni-listener-idle-timeout",
                self.sni_listener_idle_timeout.as_deref(),
            ),
            (
                "tunnelingConnectionIdleTimeout",
                "tunneling-connection-idle-timeout",
                self.tunneling_connection_idle_timeout.as_deref(),
            ),
            (
                "tunnelingStreamIdleTimeout",
                "tunneling-stream-idle-timeout",
                self.tunneling_stream_idle_timeout.as_deref(),
            ),
            (
                "downstreamTCPKeepaliveTime",
                "downstream-tcp-keepalive-time",
                self.downstream_tcp_keepalive_time.as_deref(),
            ),
            (
                "downstreamTCPKeepaliveInterval",
                "downstream-tcp-keepalive-interval",
                self.downstream_tcp_keepalive_interval.as_deref(),
            ),
            (
                "upstreamTCPKeepaliveTime",
                "upstream-tcp-keepalive-time",
                self.upstream_tcp_keepalive_time.as_deref(),
            ),
            (
                "upstreamTCPKeepaliveInterval",
                "upstream-tcp-keepalive-interval",
                self.upstream_tcp_keepalive_interval.as_deref(),
            ),
        ]
    }

    /// Returns the numbers of probes: KKP's field, the flag of the front door without dashes, and the value.
    pub(crate) fn probes(&self) -> [(&'static str, &'static str, Option<i64>); 2] {
        [
            (
                "downstreamTCPKeepaliveProbes",
                "downstream-tcp-keepalive-probes",
                self.downstream_tcp_keepalive_probes,
            ),
            (
                "upstreamTCPKeepaliveProbes",
                "upstream-tcp-keepalive-probes",
                self.upstream_tcp_keepalive_probes,
            ),
        ]
    }
}
