//! What the nodeport-proxy is told to do: the flags of the program that it replaces, and its own.

mod flags;

use std::ffi::OsString;
use std::path::PathBuf;
use std::time::Duration;

use culvert_host::flags::{Exit, GoDuration, HostPort};
use culvert_host::telemetry::logging::LogConfig;
use culvert_kube::election::Times;

use self::flags::Flags;
use super::allowed::AllowedNetworks;
use super::balancer::BalancerConfig;
use super::discovery::Cluster;

pub use culvert_host::net::listen::Keepalive;

/// The program's name in usage texts and log file names.
pub const PROGRAM: &str = "culvert-nodeport-proxy";

/// Everything the proxy is told at start.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Config {
    /// What says what is exposed.
    pub source: Source,
    /// Where TLS connections come in; `None` serves none.
    pub sni: Option<HostPort>,
    /// Where CONNECT requests come in; `None` serves none.
    pub tunneling: Option<Tunneling>,
    /// Health and metrics.
    pub stats: HostPort,
    /// The host of node ports.
    pub node_port_host: String,
    /// Timeouts and keepalive.
    pub limits: Limits,
    /// The most connections at once to one Service port. Envoy's default is 1024.
    pub max_connections: u64,
    /// How long connections may take to end after SIGTERM.
    pub drain_timeout: Duration,
    /// Threads that carry connections; 0 is one for each processor, 4 at most.
    pub worker_threads: usize,
    /// Where log lines go and how many of them.
    pub logging: LogConfig,
    /// What the operator should be told once logging works: one line each.
    pub warnings: Vec<String>,
}

/// What says what is exposed.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum Source {
    /// A file of routes (`--config`).
    File(PathBuf),
    /// The Kubernetes API.
    Kubernetes(Cluster),
}

/// The listener of CONNECT requests.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Tunneling {
    /// Where it listens.
    pub bind: HostPort,
    /// Certificate and key; clients that begin with TLS are served with it.
    pub tls: Option<(PathBuf, PathBuf)>,
    /// The CA bundle that clients' certificates must chain to.
    pub client_ca: Option<PathBuf>,
    /// Turns clients away that speak plain text.
    pub require_tls: bool,
    /// Who may connect.
    pub allowed: AllowedNetworks,
}

/// How long what may stand still, and how a dead peer is noticed. `None` never ends anything.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Limits {
    /// A TLS connection on which nothing moves. Envoy's default is 1 h.
    pub sni_idle: Option<Duration>,
    /// The same of a node port's connection, for which KKP has no flag. Envoy's default is 1 h.
    pub node_port_idle: Option<Duration>,
    /// An HTTP/2 connection without tunnels. Envoy's default is 1 h.
    pub connection_idle: Option<Duration>,
    /// A tunnel on which nothing moves. Envoy's default is 5 min.
    pub stream_idle: Option<Duration>,
    /// Toward clients.
    pub downstream_keepalive: Keepalive,
    /// Toward endpoints.
    pub upstream_keepalive: Keepalive,
}

/// Idle times of Envoy where KKP sets none.
pub(super) const IDLE: Duration = Duration::from_secs(3600);
/// The same for one stream.
pub(super) const STREAM_IDLE: Duration = Duration::from_secs(300);

/// Notices a peer that is gone within half a minute. Without it, tunnels whose path has changed
/// stay half open until TCP gives up, 15 minutes and more.
pub(super) const KEEPALIVE: Keepalive = Keepalive {
    idle: Duration::from_secs(10),
    interval: Duration::from_secs(5),
    probes: 3,
    // Whoever reads nothing for a while is not dead.
    user_timeout: None,
};

impl Default for Limits {
    fn default() -> Self {
        Self {
            sni_idle: Some(IDLE),
            node_port_idle: Some(IDLE),
            connection_idle: Some(IDLE),
            stream_idle: Some(STREAM_IDLE),
            downstream_keepalive: KEEPALIVE,
            upstream_keepalive: KEEPALIVE,
        }
    }
}

impl Config {
    /// Reads a command line, program name first. Flags may have one dash or two, as in Go.
    ///
    /// # Errors
    /// [`Exit`] when there is nothing to run: help was asked for (code 0), or the command line is
    /// wrong in one or more ways (code 1), all of which are named.
    pub fn from_args<I, A>(args: I) -> Result<Self, Exit>
    where
        I: IntoIterator<Item = A>,
        A: Into<OsString>,
    {
        Flags::read(args.into_iter().map(Into::into))
    }

    /// Every option in effect as `name=value`, for the log at start.
    pub fn describe(&self) -> Vec<String> {
        // Destructured so that a new field can not be left out.
        let Self {
            source,
            sni,
            tunneling,
            stats,
            node_port_host,
            limits,
            max_connections,
            drain_timeout,
            worker_threads,
            logging,
            warnings: _,
        } = self;
        let shown = |bind: Option<&HostPort>| bind.map_or("none".into(), ToString::to_string);
        let mut lines = source.describe();
        lines.extend([
            format!("sni={}", shown(sni.as_ref())),
            format!("tunneling={}", shown(tunneling.as_ref().map(|t| &t.bind))),
            format!("stats={stats}"),
            format!("node-port-host={node_port_host}"),
            format!("max-connections={max_connections}"),
            format!("drain-timeout={}", GoDuration::from(*drain_timeout)),
            format!("worker-threads={worker_threads}"),
        ]);
        if let Some(tunneling) = tunneling {
            lines.push(format!("tunneling-tls={}", tunneling.tls.is_some()));
            lines.push(format!("tunneling-mtls={}", tunneling.client_ca.is_some()));
            lines.push(format!("tunneling-require-tls={}", tunneling.require_tls));
            let allowed = tunneling.allowed.describe();
            lines.push(format!("tunneling-allowed-networks={allowed}"));
        }
        lines.extend(limits.describe());
        lines.extend(logging.describe());
        lines
    }
}

impl Source {
    fn describe(&self) -> Vec<String> {
        match self {
            Self::File(path) => vec![format!("config={}", path.display())],
            Self::Kubernetes(cluster) => {
                let kubeconfig = cluster.kubeconfig.clone().unwrap_or_default();
                let namespace = cluster.namespace.as_deref().unwrap_or_default();
                let mut lines = vec![
                    format!("kubeconfig={}", kubeconfig.display()),
                    format!("namespace={namespace}"),
                    format!("expose-annotation-key={}", cluster.options.annotation),
                ];
                lines.extend(cluster.balancer.iter().flat_map(|it| it.describe()));
                lines
            }
        }
    }
}

impl BalancerConfig {
    fn describe(&self) -> Vec<String> {
        let Times {
            lease_duration,
            renew_deadline,
            retry_period,
        } = self.times;
        let time = |name: &str, value: Duration| {
            format!("leader-elect-{name}={}", GoDuration::from(value))
        };
        vec![
            format!("update-loadbalancer={}/{}", self.namespace, self.name),
            format!("namespaced={}", self.options.namespace.is_some()),
            time("lease-duration", lease_duration),
            time("renew-deadline", renew_deadline),
            time("retry-period", retry_period),
        ]
    }
}

impl Limits {
    fn describe(&self) -> Vec<String> {
        let Self {
            sni_idle,
            node_port_idle,
            connection_idle,
            stream_idle,
            downstream_keepalive,
            upstream_keepalive,
        } = self;
        let shown = |bound: &Option<Duration>| GoDuration::from(bound.unwrap_or_default());
        let probing = |keepalive: &Keepalive| {
            let (idle, interval) = (keepalive.idle, keepalive.interval);
            let probes = keepalive.probes;
            format!("{}s+{probes}x{}s", idle.as_secs(), interval.as_secs())
        };
        vec![
            format!("sni-idle={}", shown(sni_idle)),
            format!("node-port-idle={}", shown(node_port_idle)),
            format!("tunneling-connection-idle={}", shown(connection_idle)),
            format!("tunneling-stream-idle={}", shown(stream_idle)),
            format!("downstream-keepalive={}", probing(downstream_keepalive)),
            format!("upstream-keepalive={}", probing(upstream_keepalive)),
        ]
    }
}

#[cfg(test)]
mod tests;
