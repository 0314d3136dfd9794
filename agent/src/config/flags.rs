//! The agent's command-line flags: names, defaults and help texts. The module `validate` checks the flags and
//! converts them to the configuration.

use std::ffi::OsString;

use clap::{Args, Parser};
use culvert_host::flags::labels::{LabelError, check_selector};
use culvert_host::flags::values::go_int;
use culvert_host::flags::{Exit, GoDuration, KlogFlags, Parsed, Problems, StringSlice, parse};
use culvert_host::net::congestion::LinkCongestion;
use culvert_kube::leases;

use super::openvpn::OpenVpnFlags;
use super::{Config, PROGRAM};

/// Connects to the servers of a control plane and carries their connections into the agent's network.
#[derive(Parser, Debug)]
#[command(name = PROGRAM, version)]
pub(super) struct Flags {
    #[command(flatten)]
    pub(super) server: ServerFlags,
    #[command(flatten)]
    pub(super) identity: IdentityFlags,
    #[command(flatten)]
    pub(super) sync: SyncFlags,
    #[command(flatten)]
    pub(super) tunnel: TunnelFlags,
    #[command(flatten)]
    pub(super) destinations: DestinationFlags,
    #[command(flatten)]
    pub(super) openvpn: OpenVpnFlags,
    #[command(flatten)]
    pub(super) operations: OperationsFlags,
    #[command(flatten)]
    pub(super) kubernetes: KubernetesFlags,
    #[command(flatten)]
    pub(super) klog: KlogFlags,
}

/// Default of `--proxy-server-host`.
pub(super) const SERVER_HOST: &str = "127.0.0.1";

#[derive(Args, Debug)]
#[command(next_help_heading = "Server")]
pub(super) struct ServerFlags {
    /// Host name or address of the server; the server's certificate must be valid for it
    #[arg(long, value_name = "HOST", default_value = SERVER_HOST)]
    pub(super) proxy_server_host: String,

    /// The server's port for agents
    #[arg(long, value_name = "PORT", default_value = "8091", value_parser = go_int)]
    pub(super) proxy_server_port: i64,

    /// PEM CA bundle that the server's certificate must chain to; required, unless this agent is only an
    /// OpenVPN client
    #[arg(long, value_name = "FILE", default_value = "")]
    pub(super) ca_cert: String,

    /// ALPN names offered before h2, comma-separated; a load balancer can recognize agents by them
    #[arg(long, value_name = "LIST")]
    pub(super) alpn_proto: Vec<StringSlice>,

    /// Idle time after which the server is pinged; at least 10s, and at least 31s for stock servers, which close
    /// connections that ping more often. A Culvert server is pinged after 30s at the latest
    #[arg(long, value_name = "DURATION", default_value = "1h")]
    pub(super) keepalive_time: GoDuration,
}

#[derive(Args, Debug)]
#[command(next_help_heading = "Identity")]
pub(super) struct IdentityFlags {
    /// Unique id of this agent; if empty, the environment variable PROXY_AGENT_ID, else a random UUID
    #[arg(long, value_name = "ID", default_value = "")]
    pub(super) agent_id: String,

    /// Addresses that this agent serves, URL-encoded: ipv4=, ipv6=, host=, cidr=, default-route=true, joined
    /// by &
    #[arg(long, value_name = "QUERY", default_value = "")]
    pub(super) agent_identifiers: String,

    /// PEM client certificate chain, for servers that require one
    #[arg(long, value_name = "FILE", default_value = "")]
    pub(super) agent_cert: String,

    /// PEM private key of --agent-cert
    #[arg(long, value_name = "FILE", default_value = "")]
    pub(super) agent_key: String,

    /// Service account token sent to the server; read at every connect
    #[arg(long, value_name = "FILE", default_value = "")]
    pub(super) service_account_token_path: String,
}

#[derive(Args, Debug)]
#[command(next_help_heading = "Finding servers")]
pub(super) struct SyncFlags {
    /// Pause between attempts to reach servers that are not connected yet; at least 10ms
    #[arg(long, value_name = "DURATION", default_value = "1s")]
    pub(super) sync_interval: GoDuration,

    /// Longest pause after repeated failures; at least --sync-interval
    #[arg(long, value_name = "DURATION", default_value = "10s")]
    pub(super) sync_interval_cap: GoDuration,

    /// Not needed: the agent notices the end of a connection at once, not at the next check
    #[arg(long, value_name = "DURATION", default_value = "1s")]
    pub(super) probe_interval: GoDuration,

    /// Keep looking for servers after reaching the announced number
    #[arg(long)]
    pub(super) sync_forever: bool,

    /// Source of the number of servers: default (the number of leases with --count-server-leases, or else the
    /// number that the servers announce) or max (the larger of both)
    #[arg(long, value_name = "SOURCE", default_value = "default")]
    pub(super) server_count_source: String,
}

#[derive(Args, Debug)]
#[command(next_help_heading = "Tunnel and drain")]
pub(super) struct TunnelFlags {
    /// Buffer of one connection, in units of 32 KiB; at least 256 KiB and at most 16 MiB are used
    #[arg(long, value_name = "N", default_value = "150", value_parser = go_int)]
    pub(super) xfr_channel_size: i64,

    /// Bytes that all connections together may queue beyond their own buffers while endpoints are slow; when
    /// these bytes are used up, the connection that uses the largest part of them is closed
    #[arg(long, value_name = "BYTES", default_value = "8388608", value_parser = go_int)]
    pub(super) excess_buffer_bytes: i64,

    /// Longest uninterrupted time that a connection may exceed its own buffer before the connection is closed
    #[arg(long, value_name = "DURATION", default_value = "10s")]
    pub(super) stall_timeout: GoDuration,

    /// Time for connections to end after SIGTERM, 25s by default; connections still open are then closed. Must be
    /// shorter than the pod's termination grace period
    #[arg(long, value_name = "DURATION")]
    pub(super) drain_timeout: Option<GoDuration>,

    /// The server's name of --drain-timeout, for argument lists that server and agent share; has no effect beside
    /// --drain-timeout
    #[arg(long, value_name = "DURATION")]
    pub(super) graceful_shutdown_timeout: Option<GoDuration>,

    /// Time a draining agent without connections keeps serving new ones before the agent exits
    #[arg(long, value_name = "DURATION", default_value = "5s")]
    pub(super) drain_linger: GoDuration,

    /// Congestion control of connections to servers: auto (bbr if the kernel permits it), system (the kernel's
    /// default), or a name such as cubic
    #[arg(long, value_name = "NAME", default_value_t)]
    pub(super) link_congestion: LinkCongestion,

    /// Links to servers that offer QUIC (--agent-quic-port): auto (TCP, and QUIC for new connections while the path loses
    /// packets or cuts TCP connections), tcp, or quic (QUIC for new connections whenever it works)
    #[arg(long, value_name = "LINK", default_value = "auto")]
    pub(super) transport: String,
    /// Time for which connections wait when the link to a Culvert server breaks; the agent resumes the link
    /// meanwhile. 0 closes the connections at once; 30s suits rolling updates of a front door. Both programs need the flag
    #[arg(long, value_name = "DURATION", default_value = "0s")]
    pub(super) resume_grace: GoDuration,

    /// No effect: a full buffer delays only its own connection, and culvert_excess_buffer_bytes counts its bytes
    #[arg(long)]
    pub(super) warn_on_channel_limit: bool,
}

#[derive(Args, Debug)]
#[command(next_help_heading = "Destinations")]
pub(super) struct DestinationFlags {
    /// Networks that servers may dial, comma-separated: 10.0.0.0/8, 10.0.0.0/8:443, [fd00::/8]:1-1024, *:22;
    /// empty allows all. Link-local and metadata addresses stay denied, unless an entry has only such addresses
    #[arg(long, value_name = "LIST")]
    pub(super) allow_destinations: Vec<StringSlice>,

    /// Networks that servers must not dial, in the same form; wins over --allow-destinations. Names are checked
    /// by their addresses
    #[arg(long, value_name = "LIST")]
    pub(super) deny_destinations: Vec<StringSlice>,
}

#[derive(Args, Debug)]
#[command(next_help_heading = "Health, metrics, admin")]
pub(super) struct OperationsFlags {
    /// Address of the health listener; empty means all interfaces
    #[arg(long, value_name = "HOST", default_value = "")]
    pub(super) health_server_host: String,

    /// Port of the health listener
    #[arg(long, value_name = "PORT", default_value = "8093", value_parser = go_int)]
    pub(super) health_server_port: i64,

    /// Address of the admin listener; empty means all interfaces
    #[arg(long, value_name = "HOST", default_value = "127.0.0.1")]
    pub(super) admin_bind_address: String,

    /// Port of the admin listener
    #[arg(long, value_name = "PORT", default_value = "8094", value_parser = go_int)]
    pub(super) admin_server_port: i64,

    /// No effect, except for a warning: this program has no profiles, and /debug/pprof answers 404
    #[arg(long)]
    pub(super) enable_profiling: bool,

    /// No effect; needs --enable-profiling
    #[arg(long)]
    pub(super) enable_contention_profiling: bool,
}

/// Default of `--kube-api-content-type`.
pub(super) const CONTENT_TYPE: &str = "application/vnd.kubernetes.protobuf";

#[derive(Args, Debug)]
#[command(next_help_heading = "Kubernetes API")]
pub(super) struct KubernetesFlags {
    /// Count servers by their leases; the account may list and watch leases
    #[arg(long)]
    pub(super) count_server_leases: bool,

    /// Namespace of the leases; empty means all namespaces
    #[arg(long, value_name = "NAMESPACE", default_value = leases::DEFAULT_NAMESPACE)]
    pub(super) lease_namespace: String,

    // In the stock agent, --lease-label is a deprecated alias of the same value, so the last of the two flags
    // wins.
    /// Label selector of the leases; empty selects all
    #[arg(long, alias = "lease-label", value_name = "SELECTOR", default_value = leases::DEFAULT_LABEL,
          value_parser = selector)]
    pub(super) lease_label_selector: String,

    /// Kubeconfig file; empty means the pod's own account
    #[arg(long, value_name = "FILE", default_value = "")]
    pub(super) kubeconfig: String,

    /// No effect: requests are JSON
    #[arg(long, value_name = "TYPE", default_value = CONTENT_TYPE)]
    pub(super) kube_api_content_type: String,
}

fn selector(text: &str) -> Result<String, LabelError> {
    check_selector(text).map(|()| text.to_owned())
}

impl Flags {
    /// Parses, checks and converts a command line. Without `--agent-id`, the agent id is `id`, the value from
    /// the environment, or else a random UUID.
    pub(super) fn read(
        args: impl IntoIterator<Item = impl Into<OsString> + Clone>,
        id: Option<String>,
    ) -> Result<Config, Exit> {
        let Parsed { mut flags, strays } = parse::<Self, _, _>(args)?;
        if flags.identity.agent_id.is_empty() {
            flags.identity.agent_id = id
                .filter(|id| !id.is_empty())
                .unwrap_or_else(|| uuid::Uuid::new_v4().to_string());
        }
        flags
            .validate(Problems::new(&strays))
            .map_err(|problems| Exit::problems(PROGRAM, &problems))
    }
}
