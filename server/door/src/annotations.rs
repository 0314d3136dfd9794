//! The annotations by which a Service asks to be exposed: their keys, and what their values mean.
//!
//! Values are written by people and by other controllers, so a wrong one is normal input; the
//! errors say what would be right, and show no more than the beginning of a long value.

#[cfg(test)]
mod tests;

use std::collections::{BTreeMap, BTreeSet};

use rustls_pki_types::DnsName;

/// How a Service is exposed by the proxy of the whole cluster; see [`Exposure`].
pub const EXPOSE_ANNOTATION: &str = "nodeport-proxy.k8s.io/expose";

/// The same for a proxy that serves the Services of its own namespace only.
pub const EXPOSE_NAMESPACED_ANNOTATION: &str = "nodeport-proxy.k8s.io/expose-namespaced";

/// Which TLS server name leads to which port; see [`parse_port_mapping`].
pub const PORT_MAPPING_ANNOTATION: &str = "nodeport-proxy.k8s.io/port-mapping";

/// How many characters of a value an error shows. A value may have 256 KiB (the limit that
/// Kubernetes sets for all annotations of an object); a log line should not.
const MAX_SHOWN: usize = 100;

/// The ways in which a Service asks to be exposed. A value that parses has at least one.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Exposure {
    /// `NodePort`: a listener on the node port of every TCP port.
    pub node_port: bool,
    /// `SNI`: connections by their TLS server name, as the port mapping says.
    pub sni: bool,
    /// `Tunneling`: CONNECT requests for any TCP port.
    pub tunneling: bool,
}

/// A value that is no list of ways to be exposed. All of it is void then.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
#[error(
    "{entry:?} is not accepted: use a list such as \"SNI,Tunneling\" out of NodePort, SNI and \
     Tunneling, or \"true\" alone, which means NodePort"
)]
pub struct ExposureError {
    /// The first wrong entry, without blanks around it and shortened.
    pub entry: String,
}

/// Why a port mapping is void. What stems from its text is shortened.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
pub enum MappingError {
    /// `SNI` without a mapping.
    #[error(
        "it is missing, and SNI needs it: add port names and their host names, such as \
         {{\"https\": \"name.example.com\"}}"
    )]
    Missing,
    /// Not a JSON object of strings.
    #[error(
        "it has to be a JSON object of port names and host names, such as \
         {{\"https\": \"name.example.com\"}}: {0}"
    )]
    Json(String),
    /// Nothing that a TLS client can ask for.
    #[error(
        "{host:?} of port {port:?} is not a DNS name; a name of letters, digits, hyphens and dots \
         is needed, and it may begin with \"*.\""
    )]
    HostName {
        /// The port's name.
        port: String,
        /// What the mapping has for it.
        host: String,
    },
    /// Two ports with one host name.
    #[error(
        "the ports {first:?} and {second:?} both have the host name {host:?}: give each its own"
    )]
    SharedHost {
        /// The host name in lower case.
        host: String,
        /// The name of one port.
        first: String,
        /// The name of the other.
        second: String,
    },
    /// A key that is not the name of a TCP port.
    #[error("{port:?} is not the name of a TCP port of the Service; it has {known:?}")]
    UnknownPort {
        /// The key.
        port: String,
        /// The names of the Service's TCP ports.
        known: Vec<String>,
    },
}

/// Parses the value of [`PORT_MAPPING_ANNOTATION`]: a JSON object from names of Service ports
/// (empty for a port without a name) to host names. Returns the host names in the form of a route:
/// lower case, no dot at the end. Of a key that is given twice the last value counts, as with Go's
/// `encoding/json`.
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

/// Checks that every key of a mapping is the name of a TCP port.
///
/// # Errors
/// [`MappingError::UnknownPort`] for the first that is not.
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

/// The form in which server names are compared. The stock proxy takes any text here; this one
/// does not, for a name that no client can send is a mistake that should be seen.
pub fn server_name(host: &str) -> Option<String> {
    DnsName::try_from(host.strip_prefix("*.").unwrap_or(host)).ok()?;
    Some(host.strip_suffix('.').unwrap_or(host).to_ascii_lowercase())
}

fn shortened(text: &str) -> String {
    text.chars().take(MAX_SHOWN).collect()
}

// === impl Exposure ===

impl Exposure {
    /// Parses the value of [`EXPOSE_ANNOTATION`]: exactly `true`, or a comma-separated list with
    /// blanks allowed around its entries. Case matters.
    ///
    /// # Errors
    /// [`ExposureError`] for the first wrong entry; an empty value is one empty entry.
    pub fn parse(value: &str) -> Result<Self, ExposureError> {
        let mut exposure = Self::default();
        if value == "true" {
            exposure.node_port = true;
            return Ok(exposure);
        }
        for entry in value.split(',').map(str::trim) {
            match entry {
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
