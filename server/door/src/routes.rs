//! The routes at one moment: node ports, names, and the endpoints behind them. No I/O.
//!
//! A source (the Kubernetes API, or a file) always produces complete [`Routes`]; the proxy compares them with
//! the current routes and touches only the difference.

use std::collections::BTreeMap;
use std::fmt;
use std::net::SocketAddr;
use std::num::NonZeroU16;
use std::str::FromStr;
use std::sync::Arc;

use culvert_host::net::networks::Networks;
use culvert_host::net::proxy_protocol::Version;

/// Longest part of a wrong text in an error, in characters.
const MAX_SHOWN: usize = 100;

/// Key of a Service port: `<namespace>/<service>-<port name>`, without the last part if the port has no name.
/// Also the value of `envoy_cluster_name` in metrics.
#[derive(Clone, Debug, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub struct UpstreamKey(Arc<str>);

/// Everything exposed by the proxy.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct Routes {
    /// Every exposed Service port.
    pub upstreams: BTreeMap<UpstreamKey, Backend>,
    /// Service ports with a node port.
    pub node_ports: BTreeMap<u16, UpstreamKey>,
    /// TLS server names in lower case, without a dot at the end. A name with the prefix `*.` matches every
    /// name below the domain after the prefix.
    pub server_names: BTreeMap<String, UpstreamKey>,
    /// Authorities of CONNECT requests, `<service>.<namespace>.svc.cluster.local:<port>`, in lower case.
    pub authorities: BTreeMap<String, UpstreamKey>,
}

/// Endpoints of a Service port, and the conditions for connections to them.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct Backend {
    /// Endpoints, sorted, without duplicates; at least one in a route.
    pub endpoints: Vec<SocketAddr>,
    /// Version of the PROXY protocol that the endpoints expect; `None` sends no header.
    pub header: Option<Version>,
    /// Networks of permitted clients; `None` permits all.
    pub allowed: Option<Networks>,
    /// UDP port of the endpoints for QUIC by server name; `None` serves no QUIC.
    pub quic_port: Option<QuicPort>,
}

/// UDP port of endpoints that serve QUIC.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum QuicPort {
    /// The number of the endpoint's TCP port.
    Same,
    /// Another number.
    Number(NonZeroU16),
}

/// Error for a text that is not a [`QuicPort`].
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
#[error(
    "the UDP port for QUIC is {0:?}; expected a number from 1 to 65535, or \"same\" for the number of the TCP port"
)]
pub struct UnknownQuicPort(String);

// === impl Backend ===

impl Backend {
    /// Returns the UDP address of an endpoint; `None` if the endpoints serve no QUIC.
    pub(crate) fn quic_address(&self, endpoint: SocketAddr) -> Option<SocketAddr> {
        let port = match self.quic_port? {
            QuicPort::Same => endpoint.port(),
            QuicPort::Number(port) => port.get(),
        };
        Some(SocketAddr::new(endpoint.ip(), port))
    }
}

// === impl QuicPort ===

impl FromStr for QuicPort {
    type Err = UnknownQuicPort;

    fn from_str(text: &str) -> Result<Self, Self::Err> {
        match text {
            "same" => Ok(Self::Same),
            number => number
                .parse()
                .map(Self::Number)
                .map_err(|_| UnknownQuicPort(text.chars().take(MAX_SHOWN).collect())),
        }
    }
}

// === impl UpstreamKey ===

impl UpstreamKey {
    /// Returns the key of a Service port; `port_name` may be empty.
    pub fn of_service(namespace: &str, service: &str, port_name: &str) -> Self {
        Self::from(if port_name.is_empty() {
            format!("{namespace}/{service}")
        } else {
            format!("{namespace}/{service}-{port_name}")
        })
    }

    /// Returns the key as text.
    pub fn as_str(&self) -> &str {
        &self.0
    }
}

impl From<String> for UpstreamKey {
    fn from(key: String) -> Self {
        Self(key.into())
    }
}

impl fmt::Display for UpstreamKey {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(&self.0)
    }
}
