//! What the agent is told to do: the stock program's flags, checked, as plain typed values.
//!
//! [`Config`] is all that the rest of the agent knows of the command line. [`Config::from_args`] makes it from flags
//! under the stock program's rules; tests and embedders build it by hand, where port 0 is allowed for listeners.

mod flags;
mod identifiers;
mod openvpn;
#[cfg(test)]
mod tests;
mod validate;

use std::ffi::OsString;
use std::net::SocketAddr;
use std::path::PathBuf;
use std::time::Duration;

use culvert_host::flags::{Exit, GoDuration, HostPort};
use culvert_host::telemetry::logging::LogConfig;

use flags::Flags;

pub use openvpn::OpenVpn;

/// The program's name in usage texts and log file names.
pub const PROGRAM: &str = "culvert-agent";

/// Everything the agent is told at start.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Config {
    /// The server's host name or address; also the name its certificate must carry. Default `127.0.0.1`.
    pub server_host: String,
    /// The server's port for agents. Default 8091.
    pub server_port: u16,
    /// Where the server is dialed, directly, instead of at `server_host`, whose name its certificate must carry all the
    /// same: curl's `--connect-to`. No flag sets it; it is for embedders whose names no resolver knows.
    pub server_address: Option<SocketAddr>,
    /// PEM bundle of the CAs that the server's certificate must chain to. `None`: no server is looked for, this agent
    /// is only an OpenVPN client.
    pub ca_cert: Option<PathBuf>,
    /// The agent's own certificate, for servers that ask for one.
    pub client_cert: Option<ClientCert>,
    /// ALPN names offered before `h2`. Default none.
    pub alpn: Vec<String>,
    /// The health listener (`/healthz`, `/readyz`, metrics). Default `:8093`.
    pub health: HostPort,
    /// The admin listener. Default `127.0.0.1:8094`.
    pub admin: HostPort,
    /// The agent's id toward servers. Never empty when it comes from the command line.
    pub agent_id: String,
    /// Addresses the agent serves, URL-encoded as servers expect them: `ipv4=1.2.3.4&host=node1`. Checked, or empty.
    pub agent_identifiers: String,
    /// Pause between two tries to reach a server that is not connected yet. Default 1 s, at least [`INTERVAL_FLOOR`].
    pub sync_interval: Duration,
    /// What the pause grows to after failures. Default 10 s, never below `sync_interval`.
    pub sync_interval_cap: Duration,
    /// Pause between two looks at a connection's state. Default 1 s, at least [`INTERVAL_FLOOR`].
    pub probe_interval: Duration,
    /// Idle time after which a server's connection is pinged. Default 1 h, at least [`KEEPALIVE_FLOOR`].
    pub keepalive_time: Duration,
    /// File with the service account token, read at every connect. `None` sends no token.
    pub token_path: Option<PathBuf>,
    /// Go on looking for servers when as many as announced are connected. Default false.
    pub sync_forever: bool,
    /// Chunks buffered per connection and direction. Default 150, at most [`XFR_CHANNEL_SIZE_MAX`].
    pub xfr_channel_size: usize,
    /// Bytes that connections may queue beyond their own budgets, all together. Smaller closes connections over short
    /// bursts, larger costs memory while endpoints are slow. Default 8 MiB.
    pub excess_buffer_bytes: usize,
    /// How long a connection may exceed its budget without a pause. Longer keeps the pool occupied. Default 10 s.
    pub stall_timeout: Duration,
    /// How the number of servers to look for is found.
    pub server_count_source: ServerCountSource,
    /// How long connections may live on after the first SIGTERM; then they are cut. Default 10 min.
    pub drain_timeout: Duration,
    /// How long a drained agent without connections goes on serving new dials before it exits. Default 5 s.
    pub drain_linger: Duration,
    /// The OpenVPN client, if there is one.
    pub openvpn: Option<OpenVpn>,
    /// Where log lines go and how many of them.
    pub logging: LogConfig,
    /// What the operator should be told once logging works: one line each.
    pub warnings: Vec<String>,
}

/// grpc-go's lower bound on a client's keepalive interval (`internal.KeepaliveMinPingTime`).
pub const KEEPALIVE_FLOOR: Duration = Duration::from_secs(10);

/// Lower bound on the sync and probe intervals. The stock agent has none and spins at zero, with a TLS handshake a turn.
pub const INTERVAL_FLOOR: Duration = Duration::from_millis(10);

/// Upper bound on [`Config::xfr_channel_size`]: a queue longer than this is a typing error, not a tuning.
pub const XFR_CHANNEL_SIZE_MAX: usize = 1 << 20;

/// PEM files of the agent's own identity.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct ClientCert {
    /// The certificate chain.
    pub cert: PathBuf,
    /// Its private key.
    pub key: PathBuf,
}

/// How the number of servers to look for is found (`--server-count-source`).
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub enum ServerCountSource {
    /// `default`: what the servers announce.
    #[default]
    Default,
    /// `max`: the larger of what servers announce and of their leases.
    Max,
}

// === impl Config ===

impl Config {
    /// Reads a command line, program name first, and the environment variable `PROXY_AGENT_ID`.
    ///
    /// # Errors
    /// [`Exit`] when there is nothing to run: help was asked for (code 0), or the command line is wrong in one or more
    /// ways (code 1), all of which are named.
    pub fn from_args<I, A>(args: I) -> Result<Self, Exit>
    where
        I: IntoIterator<Item = A>,
        A: Into<OsString> + Clone,
    {
        Flags::read(args)
    }

    /// Every option in effect as `name=value`, for the log at start. Holds paths of secrets, never secrets.
    pub fn describe(&self) -> Vec<String> {
        // Destructured so that a new field can not be left out.
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
            probe_interval,
            keepalive_time,
            token_path,
            sync_forever,
            xfr_channel_size,
            excess_buffer_bytes,
            stall_timeout,
            server_count_source,
            drain_timeout,
            drain_linger,
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
            format!("probe-interval={}", duration(probe_interval)),
            format!("keepalive-time={}", duration(keepalive_time)),
            format!("service-account-token-path={}", token_path.display()),
            format!("sync-forever={sync_forever}"),
            format!("xfr-channel-size={xfr_channel_size}"),
            format!("excess-buffer-bytes={excess_buffer_bytes}"),
            format!("stall-timeout={}", GoDuration::from(*stall_timeout)),
            format!("server-count-source={}", server_count_source.name()),
            format!("drain-timeout={}", duration(drain_timeout)),
            format!("drain-linger={}", duration(drain_linger)),
        ];
        lines.extend(openvpn.iter().flat_map(OpenVpn::describe));
        lines.extend(logging.describe());
        lines
    }
}

impl ServerCountSource {
    /// The spelling of `--server-count-source`.
    pub fn name(self) -> &'static str {
        match self {
            Self::Default => "default",
            Self::Max => "max",
        }
    }
}
