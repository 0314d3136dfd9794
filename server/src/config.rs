//! The server's configuration: the stock program's flags, checked and converted to typed values.
//!
//! The rest of the server sees the command line only as a [`Config`]. [`Config::from_args`] applies the
//! stock program's rules to flags; tests and embedders build a [`Config`] by hand and may use port 0.

mod flags;
mod openvpn;
#[cfg(test)]
mod tests;
mod tls;
mod validate;

use std::collections::BTreeMap;
use std::ffi::OsString;
use std::path::{Path, PathBuf};
use std::time::Duration;

use culvert_host::flags::{Exit, GoDuration, HostPort, parse};
use culvert_host::net::congestion::LinkCongestion;
use culvert_host::net::destinations::Destinations;
use culvert_host::net::networks::Networks;
use culvert_host::telemetry::logging::LogConfig;
use culvert_host::tls::TlsOptions;
use culvert_kube::tokens::AgentAuth;
use flags::Flags;

use crate::backend::identity::AgentIdFrom;
use crate::backend::openvpn::settings::Settings as Openvpn;
use crate::metrics::Strategy;
use crate::switch;

/// Name of the program in usage texts and log file names.
pub const PROGRAM: &str = "culvert-server";

/// Configuration of the server at start.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Config {
    /// Protocol between kube-apiserver and the front end.
    pub mode: Mode,
    /// Listener for kube-apiserver.
    pub frontend: Frontend,
    /// Listener for agents.
    pub agent_listener: AgentListener,
    /// Requirements for agents' tokens; `None` requires no tokens.
    pub agent_auth: Option<AgentAuth>,
    /// Source of agents' ids; `None`, the default, lets agents choose their ids.
    pub agent_id_from: Option<AgentIdFrom>,
    /// Destinations that clients of the front end may dial. Default: all.
    pub destinations: Destinations,
    /// Admin listener (metrics). Default `127.0.0.1:8095`.
    pub admin: HostPort,
    /// Certificates for mutual TLS on the admin listener. With mutual TLS the listener also serves the
    /// tunnels' status and switch. `None` serves plain HTTP.
    pub admin_tls: Option<TlsFiles>,
    /// Unix socket for the tunnels' status and switch.
    pub admin_uds: Option<PathBuf>,
    /// The OpenVPN tunnel, if the server has one.
    pub openvpn: Option<Openvpn>,
    /// Choice of the tunnel for new connections.
    pub switch: switch::Settings,
    /// Health listener (`/healthz`, `/readyz`, metrics). Default `:8092`.
    pub health: HostPort,
    /// True if the server is ready before an agent is connected. Default false.
    pub ready_without_agents: bool,
    /// Idle time before the server pings an agent's connection. Default 1 h, at least [`KEEPALIVE_FLOOR`].
    pub keepalive_time: Duration,
    /// Congestion control of agents' connections. Default [`LinkCongestion::Auto`].
    pub link_congestion: LinkCongestion,
    /// Time for which the connections of a native agent wait for the agent when its link breaks; 0 closes them at
    /// once. Default 0.
    pub resume_grace: Duration,
    /// Idle time before the server pings a gRPC front-end client. Default 1 h, at least
    /// [`KEEPALIVE_FLOOR`].
    pub frontend_keepalive_time: Duration,
    /// Id by which agents distinguish servers. Never empty if it comes from the command line.
    pub server_id: String,
    /// Number of servers announced to agents, sent as is, even if zero or negative. Default 1.
    pub server_count: i64,
    /// Strategies for choosing an agent, in the order of preference. Default `default`.
    pub strategies: Vec<Strategy>,
    /// Limits for clients, agents and dials.
    pub limits: Limits,
    /// Longest time for connections to end after the first signal. Zero, the default, ends them at once.
    pub graceful_shutdown_timeout: Duration,
    /// Time without a dial or connection after which a draining server ends. Default 5 s.
    pub drain_linger: Duration,
    /// Lease of this server, by which agents count servers. `None`, the default, keeps no lease.
    pub lease: Option<Lease>,
    /// TLS limits of both TLS listeners.
    pub tls: TlsOptions,
    /// Packets buffered per agent stream and per front-end stream. Default 10, at most [`XFR_CHANNEL_SIZE_MAX`].
    pub xfr_channel_size: usize,
    /// Bytes that all connections together may queue beyond their own budgets. A smaller pool closes
    /// connections over short bursts; a larger pool costs memory while clients are slow. Default 64 MiB.
    pub excess_buffer_bytes: usize,
    /// Longest time for which a connection may continuously exceed its budget. A longer time keeps the pool
    /// occupied. Default 10 s.
    pub stall_timeout: Duration,
    /// Threads that carry connections; 0, the default, means one for each processor, at most 4.
    pub worker_threads: usize,
    /// Longest time to send a dial to an agent and to receive the answer. `None`, the default, leaves only
    /// the bound of the router, `MAX_DIAL`.
    pub backend_dial_timeout: Option<Duration>,
    /// Destination and amount of log lines.
    pub logging: LogConfig,
    /// Warnings for the operator, one line each, logged once logging works.
    pub warnings: Vec<String>,
}

/// grpc-go's lower bound on a server's keepalive interval (`internal.KeepaliveMinServerPingTime`).
pub const KEEPALIVE_FLOOR: Duration = Duration::from_secs(1);

/// Upper bound on [`Config::xfr_channel_size`]: a longer queue is a typing error, not a tuning.
pub const XFR_CHANNEL_SIZE_MAX: usize = 1 << 20;

/// The front end's protocol (`--mode`).
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Mode {
    /// `grpc`: the Konnectivity packet protocol, the default.
    Grpc,
    /// `http-connect`: HTTP/1.1 CONNECT.
    HttpConnect,
}

/// Limits for clients, agents and dials. `None` means no limit.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Limits {
    /// Client connections at the front end. Default 100,000.
    pub frontend_connections: Option<usize>,
    /// Agent connections. Default 10,000.
    pub agents: Option<usize>,
    /// Dials and connections of one agent connection. Default 50,000.
    pub connections_per_agent: Option<usize>,
    /// Dials that wait for an answer. Default 10,000.
    pub pending_dials: Option<usize>,
}

/// Listener for kube-apiserver.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum Frontend {
    /// A Unix socket (`--uds-name`); the file system decides which processes may connect.
    Uds {
        /// Path of the socket.
        path: PathBuf,
        /// True if an existing file at the path is removed before binding (`--delete-existing-uds-file`,
        /// default true).
        delete_existing: bool,
    },
    /// TCP with mutual TLS.
    Tcp {
        /// Address to listen on. Default `:8090`.
        bind: HostPort,
        /// Certificate, key and the clients' CA.
        tls: TlsFiles,
    },
}

/// Lease of a server (`--enable-lease-controller`).
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Lease {
    /// Namespace of the leases of all servers. Default `kube-system`.
    pub namespace: String,
    /// Labels of the leases of all servers, never empty. Default `k8s-app=konnectivity-server`.
    pub labels: BTreeMap<String, String>,
    /// Kubeconfig of the account that writes leases; `None` means the pod's own account.
    pub kubeconfig: Option<PathBuf>,
}

/// PEM files of a listener that requires client certificates.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct TlsFiles {
    /// Certificate chain sent to clients.
    pub cert: PathBuf,
    /// Private key of the certificate.
    pub key: PathBuf,
    /// CA bundle that client certificates must chain to.
    pub ca: PathBuf,
}

/// Listener for agents: TCP with TLS.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct AgentListener {
    /// Address to listen on. Default `:8091`.
    pub bind: HostPort,
    /// PEM certificate chain sent to agents.
    pub cert: PathBuf,
    /// PEM private key of the certificate.
    pub key: PathBuf,
    /// CA bundle that agents' certificates must chain to. `None` requests no certificate from agents.
    pub ca: Option<PathBuf>,
    /// Networks of load balancers that send the PROXY protocol. Empty, the default, expects no headers.
    pub proxies: Networks,
    /// UDP port for the QUIC links of agents. `None`, the default, offers no QUIC.
    pub quic_port: Option<u16>,
}

// === impl Config ===

impl Config {
    /// Reads a command line, program name first, and the environment variable `PROXY_SERVER_ID`.
    ///
    /// # Errors
    /// Returns [`Exit`] for a help request (code 0) or an invalid command line (code 1). The text for an
    /// invalid command line lists every problem.
    pub fn from_args(
        args: impl IntoIterator<Item = impl Into<OsString> + Clone>,
    ) -> Result<Self, Exit> {
        Flags::read(args, std::env::var("PROXY_SERVER_ID").ok())
    }

    /// Checks the names of the flags and the syntax of their values. Required flags may be missing, and files need not
    /// exist. The first argument is the program name.
    ///
    /// # Errors
    /// Returns [`Exit`] for a help request (code 0), or for the first argument that the server refuses (code 1).
    pub fn check_syntax(
        args: impl IntoIterator<Item = impl Into<OsString> + Clone>,
    ) -> Result<(), Exit> {
        parse::<Flags, _, _>(args).map(drop)
    }

    /// Returns every option in effect as `name=value`, for the log at start. The values include paths of
    /// secrets, but no secrets.
    pub fn describe(&self) -> Vec<String> {
        // Destructured so that a new field cannot be left out.
        let Self {
            mode,
            frontend,
            agent_listener,
            agent_auth,
            agent_id_from,
            destinations,
            admin,
            admin_tls,
            admin_uds,
            openvpn,
            switch,
            health,
            ready_without_agents,
            keepalive_time,
            link_congestion,
            resume_grace,
            frontend_keepalive_time,
            server_id,
            server_count,
            strategies,
            limits,
            graceful_shutdown_timeout,
            drain_linger,
            lease,
            tls,
            xfr_channel_size,
            excess_buffer_bytes,
            stall_timeout,
            worker_threads,
            backend_dial_timeout,
            logging,
            warnings: _,
        } = self;
        let strategies: Vec<&str> = strategies.iter().map(|s| s.as_str()).collect();
        let duration = |value: &Duration| GoDuration::from(*value);
        let dial_timeout = backend_dial_timeout.unwrap_or_default();
        let mut lines = vec![format!("mode={}", mode.name())];
        lines.extend(frontend.describe());
        lines.extend([
            format!("agent-bind={}", agent_listener.bind),
            format!("cluster-cert={}", agent_listener.cert.display()),
            format!("cluster-key={}", agent_listener.key.display()),
            format!("cluster-ca-cert={}", shown(&agent_listener.ca)),
            format!(
                "agent-id-from={}",
                agent_id_from.map_or("", AgentIdFrom::name)
            ),
            format!("agent-proxy-protocol-from={}", agent_listener.proxies),
            format!(
                "agent-quic-port={}",
                agent_listener.quic_port.unwrap_or_default()
            ),
            format!("admin-bind={admin}"),
            format!("admin-uds={}", shown(admin_uds)),
            format!("health-bind={health}"),
            format!("ready-without-agents={ready_without_agents}"),
            format!("keepalive-time={}", duration(keepalive_time)),
            format!("link-congestion={link_congestion}"),
            format!("resume-grace={}", duration(resume_grace)),
            format!(
                "frontend-keepalive-time={}",
                duration(frontend_keepalive_time)
            ),
            format!("server-id={server_id}"),
            format!("server-count={server_count}"),
            format!("proxy-strategies={}", strategies.join(",")),
            format!("tls-min-version={}", tls.min_version.name()),
            format!("cipher-suites={}", tls.cipher_suites.join(",")),
            format!("xfr-channel-size={xfr_channel_size}"),
            format!("excess-buffer-bytes={excess_buffer_bytes}"),
            format!("stall-timeout={}", duration(stall_timeout)),
            format!("worker-threads={worker_threads}"),
            format!("backend-dial-timeout={}", duration(&dial_timeout)),
            format!(
                "graceful-shutdown-timeout={}",
                duration(graceful_shutdown_timeout)
            ),
            format!("drain-linger={}", duration(drain_linger)),
        ]);
        lines.extend(limits.describe());
        if let Some(files) = admin_tls {
            lines.extend([
                format!("admin-cert={}", files.cert.display()),
                format!("admin-key={}", files.key.display()),
                format!("admin-ca-cert={}", files.ca.display()),
            ]);
        }
        lines.extend(destinations.describe());
        lines.extend([
            format!("tunnel-mode={}", switch.mode),
            format!("tunnel-mode-file={}", shown(&switch.mode_file)),
            format!("tunnel-state-file={}", shown(&switch.state_file)),
            format!("tunnel-drain={}", GoDuration::from(switch.drain)),
        ]);
        if let Some(openvpn) = openvpn {
            lines.extend(openvpn.describe());
        }
        if let Some(auth) = agent_auth {
            lines.extend([
                format!("agent-namespace={}", auth.namespace),
                format!("agent-service-account={}", auth.service_account),
                format!("authentication-audience={}", auth.audience),
            ]);
        }
        if let Some(lease) = lease {
            lines.extend([
                "enable-lease-controller=true".to_owned(),
                format!("lease-namespace={}", lease.namespace),
                format!("lease-label={}", lease.selector()),
            ]);
        }
        let watched = openvpn.as_ref().map(|openvpn| &openvpn.watch_nodes);
        let reviews = agent_auth.as_ref().map(|auth| &auth.kubeconfig);
        let leases = lease.as_ref().map(|lease| &lease.kubeconfig);
        let watched = watched.filter(|file| file.is_some());
        if let Some(kubeconfig) = reviews.or(leases).or(watched) {
            lines.push(format!("kubeconfig={}", shown(kubeconfig)));
        }
        lines.extend(logging.describe());
        lines
    }
}

fn shown(path: &Option<PathBuf>) -> String {
    let path = path.as_deref().unwrap_or(Path::new(""));
    path.display().to_string()
}

// === impl Limits ===

impl Limits {
    fn describe(&self) -> [String; 4] {
        let Self {
            frontend_connections,
            agents,
            connections_per_agent,
            pending_dials,
        } = self;
        [
            ("max-frontend-connections", frontend_connections),
            ("max-agents", agents),
            ("max-connections-per-agent", connections_per_agent),
            ("max-pending-dials", pending_dials),
        ]
        .map(|(flag, limit)| format!("{flag}={}", limit.unwrap_or(0)))
    }
}

// === impl Mode, Frontend, Lease ===

impl Mode {
    /// Returns the value of `--mode`.
    pub fn name(self) -> &'static str {
        match self {
            Self::Grpc => "grpc",
            Self::HttpConnect => "http-connect",
        }
    }
}

impl Frontend {
    fn describe(&self) -> Vec<String> {
        match self {
            Self::Uds {
                path,
                delete_existing,
            } => vec![
                format!("uds-name={}", path.display()),
                format!("delete-existing-uds-file={delete_existing}"),
            ],
            Self::Tcp { bind, tls } => vec![
                format!("server-bind={bind}"),
                format!("server-cert={}", tls.cert.display()),
                format!("server-key={}", tls.key.display()),
                format!("server-ca-cert={}", tls.ca.display()),
            ],
        }
    }
}

impl Lease {
    /// Returns the labels in the form of `--lease-label`, which is also a selector.
    pub fn selector(&self) -> String {
        let labels = self.labels.iter();
        let labels: Vec<String> = labels
            .map(|(key, value)| format!("{key}={value}"))
            .collect();
        labels.join(",")
    }
}
