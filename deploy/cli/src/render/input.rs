//! The cluster file: Culvert's own format, or KKP's `Cluster` object.

use std::collections::BTreeMap;

use culvert_host::yaml;
use serde::Deserialize;

use super::facts::{Facts, Images, NodePorts, Seed, TUNNELING_PORT};
use super::spec::{Spec, present};

/// A cluster as read from files and flags, before defaults.
#[derive(Clone, Debug, Default, PartialEq)]
pub(crate) struct Input {
    /// Labels of the Cluster object; some of them permit changes.
    pub(crate) labels: BTreeMap<String, String>,
    pub(crate) spec: Spec,
    pub(crate) facts: Facts,
    /// True for KKP's Cluster object.
    pub(crate) is_object: bool,
}

/// The keys that distinguish the formats.
#[derive(Default, Deserialize)]
#[serde(default, rename_all = "camelCase")]
struct Head {
    kind: Option<String>,
    api_version: Option<String>,
}

/// KKP's Cluster object.
#[derive(Deserialize, Default)]
#[serde(default)]
struct Object {
    #[serde(deserialize_with = "present")]
    metadata: Metadata,
    #[serde(deserialize_with = "present")]
    spec: Spec,
    #[serde(deserialize_with = "present")]
    status: Status,
}

#[derive(Deserialize, Default)]
#[serde(default)]
struct Metadata {
    name: Option<String>,
    #[serde(deserialize_with = "present")]
    labels: BTreeMap<String, String>,
}

#[derive(Deserialize, Default)]
#[serde(default)]
struct Status {
    #[serde(deserialize_with = "present")]
    address: Address,
}

#[derive(Deserialize, Default)]
#[serde(default, rename_all = "camelCase")]
struct Address {
    external_name: Option<String>,
    ip: Option<String>,
    port: Option<u16>,
}

/// API group of KKP's objects.
const GROUP: &str = "kubermatic.k8c.io/";

/// Parses a cluster file of either format.
///
/// # Errors
/// Fails if the text is not YAML, or if Culvert's own format has an unknown key.
pub(crate) fn parse(text: &str) -> anyhow::Result<Input> {
    let head: Head = read(text)?;
    match (head.kind.as_deref(), head.api_version.as_deref()) {
        (Some("Cluster"), Some(version)) if version.starts_with(GROUP) => {
            let object: Object = read(text)?;
            Ok(object.into())
        }
        (None, None) => {
            let mut facts: Facts = read(text)?;
            Ok(Input {
                labels: std::mem::take(&mut facts.labels),
                spec: facts.spec.take().unwrap_or_default(),
                facts,
                is_object: false,
            })
        }
        (kind, version) => {
            let named = |value: Option<&str>| value.unwrap_or("none").to_owned();
            anyhow::bail!(
                "kind {} of apiVersion {} is not a cluster; expected kind Cluster of {GROUP}v1, or a file \
                 without kind and apiVersion",
                named(kind),
                named(version)
            )
        }
    }
}

/// Parses a file of facts: Culvert's own format.
///
/// # Errors
/// Fails as [`parse`] does.
pub(crate) fn parse_facts(text: &str) -> anyhow::Result<Facts> {
    let facts: Facts = read(text)?;
    anyhow::ensure!(
        facts.spec.is_none() && facts.labels.is_empty(),
        "a file of facts has neither spec nor labels; they belong in the cluster file"
    );
    Ok(facts)
}

/// Parses YAML; an empty text has the default value. Empty documents are ignored.
///
/// # Errors
/// Fails if the text is not YAML of the type, or has more than one document.
pub(super) fn read<T: Default + serde::de::DeserializeOwned>(text: &str) -> anyhow::Result<T> {
    let documents: Vec<T> = serde_saphyr::from_multiple(text)
        .map_err(|error| anyhow::Error::msg(yaml::explain(&error, text)))?;
    let mut documents = documents.into_iter();
    let value = documents.next().unwrap_or_default();
    anyhow::ensure!(
        documents.next().is_none(),
        "the file has more than one document; remove all but one"
    );
    Ok(value)
}

// === impl Input ===

impl From<Object> for Input {
    fn from(object: Object) -> Self {
        let Address {
            external_name,
            ip,
            port,
        } = object.status.address;
        let filled = |text: Option<String>| text.filter(|text| !text.is_empty());
        let mut facts = Facts {
            cluster_id: filled(object.metadata.name),
            external_name: filled(external_name),
            address_ip: filled(ip),
            ..Facts::default()
        };
        // With Tunneling, the port is not a node port. A file for a change of the strategy has the new strategy, and the
        // status of the old one.
        facts.node_ports.apiserver = port.filter(|port| *port != TUNNELING_PORT);
        Self {
            labels: object.metadata.labels,
            spec: object.spec,
            facts,
            is_object: true,
        }
    }
}

// === impl Facts ===

impl Facts {
    /// Returns these facts, completed by `other` where a value is missing.
    pub(crate) fn or(self, other: Self) -> Self {
        let list = |ours: Vec<String>, theirs| if ours.is_empty() { theirs } else { ours };
        let empty_seed = self.seed == Seed::default();
        let empty_configuration = self.configuration.expose_strategy.is_empty();
        Self {
            labels: BTreeMap::new(),
            spec: None,
            cluster_id: self.cluster_id.or(other.cluster_id),
            kkp_version: self.kkp_version.or(other.kkp_version),
            kubernetes_version: self.kubernetes_version.or(other.kubernetes_version),
            tunnel: self.tunnel.or(other.tunnel),
            external_name: self.external_name.or(other.external_name),
            address_ip: self.address_ip.or(other.address_ip),
            node_ports: NodePorts {
                apiserver: self.node_ports.apiserver.or(other.node_ports.apiserver),
                konnectivity_server: self
                    .node_ports
                    .konnectivity_server
                    .or(other.node_ports.konnectivity_server),
                openvpn_server: self
                    .node_ports
                    .openvpn_server
                    .or(other.node_ports.openvpn_server),
            },
            apiserver_replicas: self.apiserver_replicas.or(other.apiserver_replicas),
            node_access_network: self.node_access_network.or(other.node_access_network),
            node_networks: list(self.node_networks, other.node_networks),
            nodes: self.nodes.or(other.nodes),
            provider: self.provider.or(other.provider),
            images: Images {
                server: self.images.server.or(other.images.server),
                agent: self.images.agent.or(other.images.agent),
                door: self.images.door.or(other.images.door),
                node_tunnel: self.images.node_tunnel.or(other.images.node_tunnel),
            },
            registry: self.registry.or(other.registry),
            image_pull_secrets: self.image_pull_secrets.or(other.image_pull_secrets),
            cni_versions: list(self.cni_versions, other.cni_versions),
            seed: if empty_seed { other.seed } else { self.seed },
            configuration: if empty_configuration {
                other.configuration
            } else {
                self.configuration
            },
        }
    }
}
