//! What the proxy is to do at one moment: listeners, names, and the endpoints behind them.
//!
//! A source (the Kubernetes API, or a file) makes whole [`Routes`]; the proxy compares them with
//! what it does and touches only what differs. Nothing here does I/O.

use std::collections::BTreeMap;
use std::fmt;
use std::net::SocketAddr;
use std::sync::Arc;

/// Names the endpoints of one Service port: `<namespace>/<service>-<port name>`, without the last
/// part if the port has no name. It is also the value of `envoy_cluster_name` in metrics.
#[derive(Clone, Debug, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub struct UpstreamKey(Arc<str>);

/// All that is exposed.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct Routes {
    /// The endpoints of every Service port that is exposed in any way, sorted, each once, at least
    /// one.
    pub upstreams: BTreeMap<UpstreamKey, Vec<SocketAddr>>,
    /// What listens on ports of its own.
    pub node_ports: BTreeMap<u16, UpstreamKey>,
    /// TLS server names in lower case, without a dot at the end. One that begins with `*.` stands
    /// for every name below it.
    pub server_names: BTreeMap<String, UpstreamKey>,
    /// Authorities of CONNECT requests, `<service>.<namespace>.svc.cluster.local:<port>`, in lower
    /// case.
    pub authorities: BTreeMap<String, UpstreamKey>,
}

// === impl UpstreamKey ===

impl UpstreamKey {
    /// Of a Service's port; an empty name counts as none.
    pub fn of_service(namespace: &str, service: &str, port_name: &str) -> Self {
        Self::from(if port_name.is_empty() {
            format!("{namespace}/{service}")
        } else {
            format!("{namespace}/{service}-{port_name}")
        })
    }

    /// The text.
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
