//! The agent's configuration: the stock program's flags, checked, as typed values.
//!
//! The rest of the agent sees only [`Config`], never the command line. [`Config::from_args`] applies the
//! stock program's rules. Tests and embedders fill in the fields directly and may use port 0 for listeners.

mod flags;
mod openvpn;
#[cfg(test)]
mod tests;
mod validate;

use std::ffi::OsString;
use std::net::SocketAddr;
use std::path::PathBuf;
use std::time::Duration;

use culvert_host::flags::{Exit, GoDuration, HostPort, parse};
use culvert_host::net::congestion::LinkCongestion;
use culvert_host::net::destinations::Destinations;
use culvert_host::telemetry::logging::LogConfig;

use flags::Flags;

pub use openvpn::OpenVpn;

/// The program's name in usage texts and log file names.
pub const PROGRAM: &str = "culvert-agent";

/// Complete configuration of an agent.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Config {
    /// Host name or address of the server. The server's certificate must be valid for this name. Default
    /// `127.0.0.1`.
    pub server_host: String,
    /// The server's port for agents. Default 8091.
    pub server_port: u16,
    /// Address to dial instead of resolving `server_host`, like curl's `--connect-to`. The certificate must
    /// still be valid for `server_host`. Not set by any flag; embedders need the field for names missing in
    /// DNS.
    pub server_address: Option<SocketAddr>,
    /// PEM bundle of the CAs that the server's certificate must chain to. `None` means the agent is only an
    /// OpenVPN client and looks for no servers.
    pub ca_cert: Option<PathBuf>,
    /// The agent's own certificate, for servers that require client certificates.
    pub client_cert: Option<ClientCert>,
    /// ALPN names offered before `h2`. Empty by default.
    pub alpn: Vec<String>,
    /// The health listener (`/healthz`, `/readyz`, metrics). Default `:8093`.
    pub health: HostPort,
    /// The admin listener. Default `127.0.0.1:8094`.
    pub admin: HostPort,
    /// The agent id, as sent to servers. Never empty when the configuration comes from the command line.
    pub agent_id: String,
    /// Addresses served by the agent, URL-encoded as servers expect them: `ipv4=1.2.3.4&host=node1`. Syntax
    /// already checked; may be empty.
    pub agent_identifiers: String,
    /// Pause between two attempts to reach a server that is not connected yet. Default 1 s, at least
    /// [`INTERVAL_FLOOR`].
    pub sync_interval: Duration,
    /// Longest pause after repeated failures. Default 10 s, never below `sync_interval`.
    pub sync_interval_cap: Duration,
    /// Idle time before the agent pings a server. Default 1 h, at least [`KEEPALIVE_FLOOR`]. The packet transport uses at
    /// least [`PACKET_KEEPALIVE_FLOOR`].
    pub keepalive_time: Duration,
    /// File with the service account token, read again for every attempt to connect. `None` sends no token.
    pub token_path: Option<PathBuf>,
    /// True if the agent keeps looking for servers after reaching the announced number. Default false.
    pub sync_forever: bool,
    /// Budget of one connection, as a number of packets of the stock size, at most [`XFR_CHANNEL_SIZE_MAX`].
    /// Default 150.
    pub xfr_channel_size: usize,
    /// Bytes in the shared pool for connections that exceed their own budgets. A smaller value closes
    /// connections during short bursts, a larger value costs memory while endpoints are slow. Default 8 MiB.
    pub excess_buffer_bytes: usize,
    /// Longest time a connection may exceed the budget without a pause. A longer time keeps the shared pool
    /// occupied. Default 10 s.
    pub stall_timeout: Duration,
    /// Source of the number of servers to look for.
    pub server_count_source: ServerCountSource,
    /// Count of servers by their leases. `None`, the default, uses only the number that servers announce.
    pub leases: Option<LeaseCount>,
    /// Time for connections to end after the first SIGTERM; connections still open are then closed. Default
    /// 25 s.
    pub drain_timeout: Duration,
    /// Time a drained agent without connections keeps serving new dials before exiting. Default 5 s.
    pub drain_linger: Duration,
    /// Congestion control of connections to servers. Default [`LinkCongestion::Auto`].
    pub link_congestion: LinkCongestion,
    /// Links to servers. Default [`LinkTransport::Auto`].
    pub transport: LinkTransport,
    /// Time for which connections wait when the link to a native server breaks; 0 closes them at once. Default 0.
    pub resume_grace: Duration,
    /// Destinations that servers may dial. By default, all but link-local and metadata addresses.
    pub destinations: Destinations,
    /// OpenVPN client, if configured.
    pub openvpn: Option<OpenVpn>,
    /// Destination and verbosity of the log.
    pub logging: LogConfig,
    /// Warnings to log once logging works, one line each.
    pub warnings: Vec<String>,
}

/// grpc-go's lower bound on a client's keepalive interval (`internal.KeepaliveMinPingTime`).
pub const KEEPALIVE_FLOOR: Duration = Duration::from_secs(10);

/// Interval of pings that a stock server accepts (`MinTime` in upstream's `cmd/server/app/server.go`). A stock server closes
/// connections that ping more often.
pub const STOCK_PING_INTERVAL: Duration = Duration::from_secs(30);

/// Shortest idle time before the agent pings a server over the packet transport. One second longer than
/// [`STOCK_PING_INTERVAL`], because the clocks of two hosts differ.
pub const PACKET_KEEPALIVE_FLOOR: Duration = Duration::from_secs(31);

/// Lower bound on the sync intervals. The stock agent has no lower bound: at 0 the agent loops
/// without a pause, with one TLS handshake per turn.
pub const INTERVAL_FLOOR: Duration = Duration::from_millis(10);

/// Upper bound on [`Config::xfr_channel_size`]. A larger value is treated as a typing error.
pub const XFR_CHANNEL_SIZE_MAX: usize = 1 << 20;

/// PEM files of the agent's certificate and key.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct ClientCert {
    /// The certificate chain.
    pub cert: PathBuf,
    /// The private key of the certificate.
    pub key: PathBuf,
}

/// Count of servers by their leases (`--count-server-leases`).
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct LeaseCount {
    /// Namespace of the leases; empty means all namespaces. Default `kube-system`.
    pub namespace: String,
    /// Label selector of the leases; empty selects every lease. Default `k8s-app=konnectivity-server`.
    pub selector: String,
    /// Kubeconfig of the account that reads leases; `None` means the pod's own account.
    pub kubeconfig: Option<PathBuf>,
}

/// Source of the number of servers to look for (`--server-count-source`).
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub enum ServerCountSource {
    /// `default`: the number of server leases if they are counted, or else the number that the servers announce.
    #[default]
    Default,
    /// `max`: the larger of the announced number and the number of server leases.
    Max,
}

/// Links to servers that offer QUIC (`--transport`).
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub enum LinkTransport {
    /// `auto`: TCP, and a QUIC link beside it for paths that lose packets or cut TCP connections.
    #[default]
    Auto,
    /// `tcp`: no QUIC link.
    Tcp,
    /// `quic`: new connections use the QUIC link whenever it works.
    Quic,
}

// === impl Config ===

impl Config {
    /// Reads a command line, program name first, and the environment variable `PROXY_AGENT_ID`.
    ///
    /// # Errors
    /// Returns [`Exit`] for a help request (code 0) or an invalid command line (code 1). The text for an
    /// invalid command line lists every problem.
    pub fn from_args(
        args: impl IntoIterator<Item = impl Into<OsString> + Clone>,
    ) -> Result<Self, Exit> {
        Flags::read(args, std::env::var("PROXY_AGENT_ID").ok())
    }

    /// Checks the names of the flags and the syntax of their values. Required flags may be missing, and files need not
    /// exist. The first argument is the program name.
    ///
    /// # Errors
    /// Returns [`Exit`] for a help request (code 0), or for the first argument that the agent refuses (code 1).
    pub fn check_syntax(
        args: impl IntoIterator<Item = impl Into<OsString> + Clone>,
    ) -> Result<(), Exit> {
        parse::<Flags, _, _>(args).map(drop)
    }

    /// Returns every option in effect as `name=value`, for the log at start. The output has the paths of
    /// secrets, never the secrets.
    pub fn describe(&self) -> Vec<String> {
        // Destructured so that a new field cannot be left out.
        let Self {
            server_host,
            server_port,
            server_address: _,
            ca_cert,
            client_cert,
            alpn,
            health,
            admin,
            agent_id,
            agent_identifiers,
            sync_interval,
            sync_interval_cap,
            keepalive_time,
            token_path,
            sync_forever,
            xfr_channel_size,
            excess_buffer_bytes,
            stall_timeout,
            server_count_source,
            leases,
            drain_timeout,
            drain_linger,
            link_congestion,
            transport,
            resume_grace,
            destinations,
            openvpn,
            logging,
            warnings: _,
        } = self;
        let (cert, key) = client_cert
            .clone()
            .map_or_else(Default::default, |files| (files.cert, files.key));
        let ca_cert = ca_cert.clone().unwrap_or_default();
        let token_path = token_path.clone().unwrap_or_default();
        let duration = |value: &Duration| GoDuration::from(*value);
        let mut lines = vec![
            format!("proxy-server-host={server_host}"),
            format!("proxy-server-port={server_port}"),
            format!("ca-cert={}", ca_cert.display()),
            format!("agent-cert={}", cert.display()),
            format!("agent-key={}", key.display()),
            format!("alpn-proto={}", alpn.join(",")),
            format!("health-server={health}"),
            format!("admin-server={admin}"),
            format!("agent-id={agent_id}"),
            format!("agent-identifiers={agent_identifiers}"),
            format!("sync-interval={}", duration(sync_interval)),
            format!("sync-interval-cap={}", duration(sync_interval_cap)),
            format!("keepalive-time={}", duration(keepalive_time)),
            format!("service-account-token-path={}", token_path.display()),
            format!("sync-forever={sync_forever}"),
            format!("xfr-channel-size={xfr_channel_size}"),
            format!("excess-buffer-bytes={excess_buffer_bytes}"),
            format!("stall-timeout={}", duration(stall_timeout)),
            format!("server-count-source={}", server_count_source.name()),
            format!("count-server-leases={}", leases.is_some()),
            format!("drain-timeout={}", duration(drain_timeout)),
            format!("drain-linger={}", duration(drain_linger)),
            format!("link-congestion={link_congestion}"),
            format!("transport={}", transport.name()),
            format!("resume-grace={}", duration(resume_grace)),
        ];
        if let Some(leases) = leases {
            let kubeconfig = leases.kubeconfig.clone().unwrap_or_default();
            lines.extend([
                format!("lease-namespace={}", leases.namespace),
                format!("lease-label-selector={}", leases.selector),
                format!("kubeconfig={}", kubeconfig.display()),
            ]);
        }
        lines.extend(destinations.describe());
        lines.extend(openvpn.iter().flat_map(OpenVpn::describe));
        lines.extend(logging.describe());
        lines
    }
}

// === impl LinkTransport ===

impl LinkTransport {
    /// Returns the value's name as `--transport` spells it.
    pub fn name(self) -> &'static str {
        match self {
            Self::Auto => "auto",
            Self::Tcp => "tcp",
            Self::Quic => "quic",
        }
    }

    /// Returns the value with a name.
    pub(crate) fn from_name(name: &str) -> Option<Self> {
        let all = [Self::Auto, Self::Tcp, Self::Quic];
        all.into_iter().find(|value| value.name() == name)
    }
}

impl ServerCountSource {
    /// Returns the value's name as `--server-count-source` spells it.
    pub fn name(self) -> &'static str {
        match self {
            Self::Default => "default",
            Self::Max => "max",
        }
    }
}
