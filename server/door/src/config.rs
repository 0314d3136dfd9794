//! The configuration of the nodeport-proxy: the flags of the program that it replaces, and new flags.

mod flags;

use std::ffi::OsString;
use std::path::PathBuf;
use std::time::Duration;

use culvert_host::flags::{Exit, GoDuration, HostPort};
use culvert_host::net::congestion::LinkCongestion;
use culvert_host::net::listen::Keepalive;
use culvert_host::net::networks::Networks;
use culvert_host::telemetry::logging::LogConfig;
use culvert_kube::election::Times;

use self::flags::Flags;
use super::balancer_ports::BalancerOptions;
use super::exposure::Options;

/// Name of the program in usage texts and log file names.
pub(crate) const PROGRAM: &str = "culvert-nodeport-proxy";

/// Flag with the host of the listeners, for error texts.
pub(crate) const HOST_FLAG: &str = "--bind-address";

/// The complete configuration of the proxy.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Config {
    /// Source of the routes.
    pub source: Source,
    /// Address for TLS connections; `None` disables this listener.
    pub sni: Option<HostPort>,
    /// Address for QUIC connections; `None` disables this listener.
    pub sni_quic: Option<HostPort>,
    /// Listener for CONNECT requests; `None` disables this listener.
    pub tunneling: Option<Tunneling>,
    /// Networks of load balancers that send the PROXY protocol. Empty, the default, expects no headers.
    pub proxies: Networks,
    /// Address for health and metrics.
    pub stats: HostPort,
    /// Address for changes of the health, which has no authentication; `None` disables this listener.
    pub admin: Option<HostPort>,
    /// Host for the listeners of node ports.
    pub node_port_host: String,
    /// Timeouts and keepalive.
    pub limits: Limits,
    /// Maximum number of simultaneous connections to one Service port. Envoy's default is 1024.
    pub max_connections: u64,
    /// Time for connections to end after SIGTERM.
    pub drain_timeout: Duration,
    /// Part of `drain_timeout` in which new connections are still accepted.
    pub drain_delay: Duration,
    /// Threads for connections; 0 means one per processor, at most 4.
    pub worker_threads: usize,
    /// Congestion control of clients' connections. Default [`LinkCongestion::Auto`].
    pub link_congestion: LinkCongestion,
    /// Destination and verbosity of the log.
    pub logging: LogConfig,
    /// Warnings for the operator, one line each, logged once logging works.
    pub warnings: Vec<String>,
}

/// The source of the routes.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum Source {
    /// A file of routes (`--config`).
    File(PathBuf),
    /// The Kubernetes API.
    Kubernetes(Cluster),
}

/// The cluster to watch, and the account to use.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Cluster {
    /// Kubeconfig file; `None` uses the first existing file in `KUBECONFIG`, or the pod's own account.
    pub kubeconfig: Option<PathBuf>,
    /// Namespace to watch; `None` watches all.
    pub namespace: Option<String>,
    /// Key of the annotation, and the available listeners.
    pub options: Options,
    /// Load balancer's Service to update; `None` updates no Service.
    pub balancer: Option<Box<BalancerConfig>>,
}

/// The Service to update, and its ports.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct BalancerConfig {
    /// True if the process only updates the Service, and serves no connections.
    pub only: bool,
    /// Namespace of the Service and of the lease.
    pub namespace: String,
    /// Name of the Service. The lease has the same name plus the suffix `-updater`.
    pub name: String,
    /// Selection of the ports.
    pub options: BalancerOptions,
    /// Times of the lease that elects one replica; `None` means that every replica writes, as the stock lb-updater.
    pub election: Option<Times>,
}

/// The listener for CONNECT requests.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Tunneling {
    /// Address of the listener.
    pub bind: HostPort,
    /// Certificate and key. With them, clients may also connect with TLS; `None` serves only plain text.
    pub tls: Option<(PathBuf, PathBuf)>,
    /// CA bundle for client certificates; `None` accepts clients without a certificate.
    pub client_ca: Option<PathBuf>,
    /// Refuses plain-text clients.
    pub require_tls: bool,
    /// Networks of permitted clients; an empty list permits all.
    pub allowed: Networks,
}

/// Idle limits and keepalive.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Limits {
    /// Limit for a TLS connection without any data. Envoy's default is 1 h.
    pub sni_idle: Duration,
    /// Limit for a node port connection without any data; KKP has no flag for it. Envoy's default is 1 h.
    pub node_port_idle: Duration,
    /// Limit for an HTTP/2 connection without CONNECT streams. Envoy's default is 1 h.
    pub connection_idle: Duration,
    /// Limit for a CONNECT tunnel without any data. Envoy's default is 5 min.
    pub stream_idle: Duration,
    /// Keepalive toward clients.
    pub downstream_keepalive: Keepalive,
    /// Keepalive toward endpoints.
    pub upstream_keepalive: Keepalive,
}

/// Envoy's idle limit for connections, used where KKP sets none.
pub(super) const IDLE: Duration = Duration::from_secs(3600);
/// Envoy's idle limit for one stream.
pub(super) const STREAM_IDLE: Duration = Duration::from_secs(300);

/// Detects a dead peer within half a minute. Without keepalive, a tunnel whose path has changed would stay
/// half open until TCP gives up, after 15 minutes or more.
pub(super) const KEEPALIVE: Keepalive = Keepalive {
    idle: Duration::from_secs(10),
    interval: Duration::from_secs(5),
    probes: 3,
    // A peer that stops reading for a while is not dead.
    user_timeout: None,
};

impl Default for Limits {
    fn default() -> Self {
        Self {
            sni_idle: IDLE,
            node_port_idle: IDLE,
            connection_idle: IDLE,
            stream_idle: STREAM_IDLE,
            downstream_keepalive: KEEPALIVE,
            upstream_keepalive: KEEPALIVE,
        }
    }
}

impl Config {
    /// Parses a command line, program name first. Flags may start with one dash or two, as in Go.
    ///
    /// # Errors
    /// Returns [`Exit`] if there is nothing to run: the user requested help (code 0), or the command line has
    /// mistakes (code 1), which are all listed.
    pub fn from_args(args: impl IntoIterator<Item: Into<OsString>>) -> Result<Self, Exit> {
        Flags::read(args.into_iter().map(Into::into))
    }

    /// Returns every option in effect as `name=value`, for the log at start.
    pub fn describe(&self) -> Vec<String> {
        // Destructured, so the compiler rejects a forgotten field.
        let Self {
            source,
            sni,
            sni_quic,
            tunneling,
            proxies,
            stats,
            admin,
            node_port_host,
            limits,
            max_connections,
            drain_timeout,
            drain_delay,
            worker_threads,
            link_congestion,
            logging,
            warnings: _,
        } = self;
        let shown = |bind: Option<&HostPort>| bind.map_or("none".into(), ToString::to_string);
        let mut lines = source.describe();
        lines.extend([
            format!("sni={}", shown(sni.as_ref())),
            format!("sni-quic={}", shown(sni_quic.as_ref())),
            format!("tunneling={}", shown(tunneling.as_ref().map(|t| &t.bind))),
            format!("proxy-protocol-from={proxies}"),
            format!("stats={stats}"),
            format!("admin={}", shown(admin.as_ref())),
            format!("node-port-host={node_port_host}"),
            format!("max-connections={max_connections}"),
            format!("drain-timeout={}", GoDuration::from(*drain_timeout)),
            format!("drain-delay={}", GoDuration::from(*drain_delay)),
            format!("worker-threads={worker_threads}"),
            format!("link-congestion={link_congestion}"),
        ]);
        if let Some(tunneling) = tunneling {
            lines.push(format!("tunneling-tls={}", tunneling.tls.is_some()));
            lines.push(format!("tunneling-mtls={}", tunneling.client_ca.is_some()));
            lines.push(format!("tunneling-require-tls={}", tunneling.require_tls));
            let allowed = &tunneling.allowed;
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
        let mut lines = vec![
            format!("update-loadbalancer={}/{}", self.namespace, self.name),
            format!("update-loadbalancer-only={}", self.only),
            format!("namespaced={}", self.options.namespace.is_some()),
            format!("leader-elect={}", self.election.is_some()),
        ];
        if let Some(times) = self.election {
            let time = |name: &str, value: Duration| {
                format!("leader-elect-{name}={}", GoDuration::from(value))
            };
            lines.extend([
                time("lease-duration", times.lease_duration),
                time("renew-deadline", times.renew_deadline),
                time("retry-period", times.retry_period),
            ]);
        }
        lines
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
        let probing = |keepalive: &Keepalive| {
            let (idle, interval) = (keepalive.idle, keepalive.interval);
            let probes = keepalive.probes;
            format!("{}s+{probes}x{}s", idle.as_secs(), interval.as_secs())
        };
        vec![
            format!("sni-idle={}", GoDuration::from(*sni_idle)),
            format!("node-port-idle={}", GoDuration::from(*node_port_idle)),
            format!(
                "tunneling-connection-idle={}",
                GoDuration::from(*connection_idle)
            ),
            format!("tunneling-stream-idle={}", GoDuration::from(*stream_idle)),
            format!("downstream-keepalive={}", probing(downstream_keepalive)),
            format!("upstream-keepalive={}", probing(upstream_keepalive)),
        ]
    }
}

#[cfg(test)]
mod tests;
