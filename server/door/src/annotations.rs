//! The annotations that expose a Service: their keys and the meaning of the values.
//!
//! People and other controllers write the values, so a wrong value is normal input. The errors explain the
//! correct form, and show only the beginning of a long value.

#[cfg(test)]
mod tests;

use std::collections::{BTreeMap, BTreeSet};

use culvert_host::net::networks::{NetworkError, Networks};
use rustls_pki_types::DnsName;

/// Annotation to expose a Service on the proxy of the whole cluster; see [`Exposure`] for the values.
pub(crate) const EXPOSE_ANNOTATION: &str = "nodeport-proxy.k8s.io/expose";

/// Annotation to map Service ports to TLS server names; see [`parse_port_mapping`].
pub(crate) const PORT_MAPPING_ANNOTATION: &str = "nodeport-proxy.k8s.io/port-mapping";

/// Annotation with the networks of permitted clients of a Service, comma-separated; see [`parse_networks`].
pub(crate) const ALLOWED_NETWORKS_ANNOTATION: &str = "nodeport-proxy.k8s.io/allowed-networks";

/// Annotation with the version of the PROXY protocol that the endpoints of a Service expect: `v1` or `v2`.
pub(crate) const PROXY_PROTOCOL_ANNOTATION: &str = "nodeport-proxy.k8s.io/proxy-protocol";

/// Annotation with the UDP port on which the endpoints of a Service serve QUIC: a number, or `same`; see
/// [`QuicPort`](super::routes::QuicPort).
pub(crate) const QUIC_PORT_ANNOTATION: &str = "nodeport-proxy.k8s.io/quic-port";

/// Annotation of the load balancer's own Service: `true` requests the UDP port of the proxy.
pub(crate) const QUIC_LISTENER_ANNOTATION: &str = "nodeport-proxy.k8s.io/quic-listener";

/// All annotations besides the annotation that exposes a Service.
pub(crate) const OTHER_ANNOTATIONS: [&str; 4] = [
    PORT_MAPPING_ANNOTATION,
    ALLOWED_NETWORKS_ANNOTATION,
    PROXY_PROTOCOL_ANNOTATION,
    QUIC_PORT_ANNOTATION,
];

/// Longest part of a value in an error, in characters. Kubernetes allows 256 KiB for all annotations of an
/// object, which is too much for a log line.
const MAX_SHOWN: usize = 100;

/// The ways to expose a Service. A valid value selects at least one way.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Exposure {
    /// `NodePort`: the proxy listens on the node port of every TCP port.
    pub node_port: bool,
    /// `SNI`: the proxy routes TLS connections by server name, according to the port mapping.
    pub sni: bool,
    /// `Tunneling`: the proxy accepts CONNECT requests for any TCP port.
    pub tunneling: bool,
}

/// Error for an annotation value with a wrong entry. The whole value is ignored then.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
#[error(
    "{entry:?} is not accepted: use a list of NodePort, SNI and Tunneling, such as \
     \"SNI,Tunneling\", or \"true\" alone, which means NodePort"
)]
pub struct ExposureError {
    /// The first wrong entry with the blanks around it, shortened.
    pub entry: String,
}

/// Reason to ignore a whole port mapping. Texts from the mapping are shortened.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
pub enum MappingError {
    /// The Service selects `SNI` but has no port mapping.
    #[error(
        "it is missing, but SNI needs it: add port names and their host names, such as \
         {{\"https\": \"name.example.com\"}}"
    )]
    Missing,
    /// The value is not a JSON object of strings.
    #[error(
        "it has to be a JSON object of port names and host names, such as \
         {{\"https\": \"name.example.com\"}}: {0}"
    )]
    Json(String),
    /// A host name is not a DNS name, and no TLS client can send such a name.
    #[error(
        "{host:?} of port {port:?} is not a DNS name; a name of letters, digits, hyphens and dots \
         is needed, and it may begin with \"*.\""
    )]
    HostName {
        /// Name of the Service port.
        port: String,
        /// Host name of the port in the mapping.
        host: String,
    },
    /// Two ports have the same host name.
    #[error(
        "the ports {first:?} and {second:?} both have the host name {host:?}: give each port its own"
    )]
    SharedHost {
        /// The host name in lower case.
        host: String,
        /// Name of the first port.
        first: String,
        /// Name of the second port.
        second: String,
    },
    /// A key is not the name of a TCP port of the Service.
    #[error("{port:?} is not the name of a TCP port of the Service; it has {known:?}")]
    UnknownPort {
        /// The key.
        port: String,
        /// Names of the Service's TCP ports.
        known: Vec<String>,
    },
}

/// Parses the value of `PORT_MAPPING_ANNOTATION`: a JSON object from names of Service ports (empty for a
/// port without a name) to host names. Returns the host names as routes use them: lower case, no dot at the
/// end. If a key occurs twice, the last value wins, as in Go's `encoding/json`.
///
/// # Errors
/// [`MappingError::Json`], [`MappingError::HostName`] or [`MappingError::SharedHost`].
pub fn parse_port_mapping(json: &str) -> Result<BTreeMap<String, String>, MappingError> {
    let given: BTreeMap<String, String> = serde_json::from_str(json)
        .map_err(|error| MappingError::Json(shortened(&error.to_string())))?;
    let mut mapping = BTreeMap::new();
    let mut ports_by_host = BTreeMap::new();
    for (port, host) in given {
        let Some(name) = server_name(&host) else {
            return Err(MappingError::HostName {
                port: shortened(&port),
                host: shortened(&host),
            });
        };
        if let Some(first) = ports_by_host.insert(name.clone(), port.clone()) {
            return Err(MappingError::SharedHost {
                host: shortened(&name),
                first: shortened(&first),
                second: shortened(&port),
            });
        }
        mapping.insert(port, name);
    }
    Ok(mapping)
}

/// Parses the value of `ALLOWED_NETWORKS_ANNOTATION`.
///
/// # Errors
/// Returns the first invalid network; an empty value counts as one empty network.
pub fn parse_networks(value: &str) -> Result<Networks, NetworkError> {
    let texts = value.split(',').map(str::trim);
    match texts.clone().find(|text| text.len() > MAX_SHOWN) {
        Some(long) => Networks::parse([shortened(long).as_str()]),
        None => Networks::parse(texts),
    }
}

/// Checks the keys of a mapping: each must be the name of a TCP port.
///
/// # Errors
/// [`MappingError::UnknownPort`] for the first wrong key.
pub fn check_ports(
    mapping: &BTreeMap<String, String>,
    tcp_ports: &BTreeSet<&str>,
) -> Result<(), MappingError> {
    let mut names = mapping.keys();
    match names.find(|name| !tcp_ports.contains(name.as_str())) {
        None => Ok(()),
        Some(name) => Err(MappingError::UnknownPort {
            port: shortened(name),
            known: tcp_ports.iter().map(|&known| known.to_owned()).collect(),
        }),
    }
}

/// Returns the form of a host name for comparisons, or `None` if `host` is not a DNS name. The stock proxy
/// accepts any text; no client can send such a name, so an error makes the mistake visible.
pub(crate) fn server_name(host: &str) -> Option<String> {
    DnsName::try_from(host.strip_prefix("*.").unwrap_or(host)).ok()?;
    Some(host.strip_suffix('.').unwrap_or(host).to_ascii_lowercase())
}

fn shortened(text: &str) -> String {
    text.chars().take(MAX_SHOWN).collect()
}

// === impl Exposure ===

impl Exposure {
    /// Parses the value of `EXPOSE_ANNOTATION`: exactly `true`, or a comma-separated list whose entries may
    /// have blanks around them. Case matters.
    ///
    /// # Errors
    /// [`ExposureError`] for the first wrong entry; an empty value counts as one empty entry.
    pub fn parse(value: &str) -> Result<Self, ExposureError> {
        let mut exposure = Self::default();
        if value == "true" {
            exposure.node_port = true;
            return Ok(exposure);
        }
        for entry in value.split(',') {
            match entry.trim() {
                "NodePort" => exposure.node_port = true,
                "SNI" => exposure.sni = true,
                "Tunneling" => exposure.tunneling = true,
                _ => {
                    return Err(ExposureError {
                        entry: shortened(entry),
                    });
                }
            }
        }
        Ok(exposure)
    }
}
