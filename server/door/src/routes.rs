//! The routes at one moment: node ports, names, and the endpoints behind them. No I/O.
//!
//! A source (the Kubernetes API, or a file) always produces complete [`Routes`]; the proxy compares them with
//! the current routes and touches only the difference.

use std::collections::BTreeMap;
use std::fmt;
use std::net::SocketAddr;
use std::sync::Arc;

use culvert_host::net::networks::Networks;
use culvert_host::net::proxy_protocol::Version;

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
