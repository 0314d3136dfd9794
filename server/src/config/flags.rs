//! The server's flags as given on the command line: names, defaults and help texts. The module `validate`
//! checks and converts the values.

use std::ffi::OsString;
use std::time::Duration;

use clap::{Args, Parser};
use culvert_host::flags::values::go_int;
use culvert_host::flags::{Exit, GoDuration, KlogFlags, Parsed, Problems, StringSlice, parse};
use culvert_host::net::congestion::LinkCongestion;
use culvert_kube::leases;

use super::openvpn::OpenvpnFlags;
use super::{Config, PROGRAM};

/// Carries kube-apiserver's connections into a worker network, through agents that connect from there.
#[derive(Parser, Debug)]
#[command(name = PROGRAM, version)]
pub(super) struct Flags {
    #[command(flatten)]
    pub(super) frontend: FrontendFlags,
    #[command(flatten)]
    pub(super) agents: AgentFlags,
    #[command(flatten)]
    pub(super) tls: TlsFlags,
    #[command(flatten)]
    pub(super) operations: OperationsFlags,
    #[command(flatten)]
    pub(super) tunnel: TunnelFlags,
    #[command(flatten)]
    pub(super) limits: LimitFlags,
    #[command(flatten)]
    pub(super) destinations: DestinationFlags,
    #[command(flatten)]
    pub(super) openvpn: OpenvpnFlags,
    #[command(flatten)]
    pub(super) switch: SwitchFlags,
    #[command(flatten)]
    pub(super) auth: AuthFlags,
    #[command(flatten)]
    pub(super) kubernetes: KubernetesFlags,
    #[command(flatten)]
    pub(super) klog: KlogFlags,
}

#[derive(Args, Debug)]
#[command(next_help_heading = "Front end (kube-apiserver connects here)")]
pub(super) struct FrontendFlags {
    /// Protocol of the front end: grpc or http-connect
    #[arg(long, default_value = "grpc")]
    pub(super) mode: String,

    /// Path of the unix socket to serve; empty serves TCP with mutual TLS
    #[arg(long, value_name = "PATH", default_value = "")]
    pub(super) uds_name: String,

    /// Remove an existing file at --uds-name before listening
    #[arg(long, default_value = "true")]
    pub(super) delete_existing_uds_file: bool,

    /// Address to listen on; empty means all interfaces
    #[arg(long, value_name = "HOST", default_value = "")]
    pub(super) server_bind_address: String,

    /// TCP port, 1024 to 49151; must be 0 with --uds-name
    #[arg(long, value_name = "PORT", default_value = "8090", value_parser = go_int)]
    pub(super) server_port: i64,

    /// PEM certificate chain; required without --uds-name
    #[arg(long, value_name = "FILE", default_value = "")]
    pub(super) server_cert: String,

    /// PEM private key of --server-cert
    #[arg(long, value_name = "FILE", default_value = "")]
    pub(super) server_key: String,

    /// PEM CA bundle that client certificates must chain to; required without --uds-name
    #[arg(long, value_name = "FILE", default_value = "")]
    pub(super) server_ca_cert: String,

    /// Idle time after which a gRPC client is pinged; at least 1s. No effect with --mode=http-connect
    #[arg(long, value_name = "DURATION", default_value = "1h")]
    pub(super) frontend_keepalive_time: GoDuration,

    /// No effect: buffers are bounded in bytes, by --xfr-channel-size
    #[arg(long, value_name = "N", default_value = "10", value_parser = go_int)]
    pub(super) frontend_write_channel_size: i64,
}

#[derive(Args, Debug)]
#[command(next_help_heading = "Agents (they connect here)")]
pub(super) struct AgentFlags {
    /// Address to listen on; empty means all interfaces
    #[arg(long, value_name = "HOST", default_value = "")]
    pub(super) agent_bind_address: String,

    /// TCP port, 1024 to 49151
    #[arg(long, value_name = "PORT", default_value = "8091", value_parser = go_int)]
    pub(super) agent_port: i64,

    /// Networks of load balancers that send the PROXY protocol (version 1 or 2) to the agents' port,
    /// comma-separated; peers in these networks must send it
    #[arg(long, value_name = "CIDR,...")]
    pub(super) agent_proxy_protocol_from: Vec<StringSlice>,

    /// UDP port for a second link of Culvert agents over QUIC, 1024 to 49151. With the number of --agent-port, agents
    /// use the UDP port with the number of the TCP port that they connect to. 0 offers no QUIC: without packet loss QUIC
    /// needs more processor time, and one connection carries at most 20 MiB/s over a round trip of 100ms
    #[arg(long, value_name = "PORT", default_value = "0", value_parser = go_int)]
    pub(super) agent_quic_port: i64,

    /// PEM certificate chain sent to agents; required
    #[arg(long, value_name = "FILE", default_value = "")]
    pub(super) cluster_cert: String,

    /// PEM private key of --cluster-cert; required
    #[arg(long, value_name = "FILE", default_value = "")]
    pub(super) cluster_key: String,

    /// PEM CA bundle that agents' certificates must chain to; empty requests no certificate from agents
    #[arg(long, value_name = "FILE", default_value = "")]
    pub(super) cluster_ca_cert: String,

    /// Source of agents' ids: certificate (the common name of the client certificate) or token (the pod of the
    /// service account token); empty lets agents choose their ids. Agents with one id count as one agent
    #[arg(long, value_name = "SOURCE", default_value = "")]
    pub(super) agent_id_from: String,

    /// Idle time after which an agent is pinged; at least 1s. A Culvert agent is pinged after 30s at the latest
    #[arg(long, value_name = "DURATION", default_value = "1h")]
    pub(super) keepalive_time: GoDuration,

    /// Congestion control of connections of agents: auto (bbr if the kernel permits it), system (the kernel's
    /// default), or a name such as cubic
    #[arg(long, value_name = "NAME", default_value_t)]
    pub(super) link_congestion: LinkCongestion,

    /// Time for which the connections of a Culvert agent wait when its link breaks; the agent resumes the link
    /// meanwhile. 0 closes the connections at once; 30s suits rolling updates of a front door. Both programs need the flag
    #[arg(long, value_name = "DURATION", default_value = "0s")]
    pub(super) resume_grace: GoDuration,

    /// Unique id of this server; empty uses the environment variable PROXY_SERVER_ID, or else a random UUID
    #[arg(long, value_name = "ID", default_value = "")]
    pub(super) server_id: String,

    /// Number of servers announced to agents
    #[arg(long, value_name = "N", default_value = "1", value_parser = go_int)]
    pub(super) server_count: i64,

    /// Strategies for choosing an agent, comma-separated; the first with an agent for the destination decides.
    /// destHost: agents with the host as identifier; cidr: agents with the longest network; defaultRoute: agents
    /// with default-route=true; default: all agents
    #[arg(long, value_name = "LIST", default_value = "default")]
    pub(super) proxy_strategies: String,
}

#[derive(Args, Debug)]
#[command(next_help_heading = "TLS (both listeners)")]
pub(super) struct TlsFlags {
    /// Comma-separated cipher suites allowed below TLS 1.3, named as in Go; empty allows all
    #[arg(long, value_name = "LIST")]
    pub(super) cipher_suites: Vec<StringSlice>,

    /// Lowest TLS version: VersionTLS10, VersionTLS11, VersionTLS12 or VersionTLS13; empty means
    /// VersionTLS12, and lower versions are raised to VersionTLS12
    #[arg(long, value_name = "VERSION", default_value = "")]
    pub(super) tls_min_version: String,
}

#[derive(Args, Debug)]
#[command(next_help_heading = "Health, metrics, admin")]
pub(super) struct OperationsFlags {
    /// Address of the health listener; empty means all interfaces
    #[arg(long, value_name = "HOST", default_value = "")]
    pub(super) health_bind_address: String,

    /// Port of the health listener, 1024 to 49151
    #[arg(long, value_name = "PORT", default_value = "8092", value_parser = go_int)]
    pub(super) health_port: i64,

    /// Answer 200 on /readyz before an agent is connected. Use it if agents reach this server through a Service that
    /// routes to ready servers only
    #[arg(long)]
    pub(super) ready_without_agents: bool,

    /// Address of the admin listener; empty means all interfaces
    #[arg(long, value_name = "HOST", default_value = "127.0.0.1")]
    pub(super) admin_bind_address: String,

    /// Port of the admin listener, 1024 to 49151
    #[arg(long, value_name = "PORT", default_value = "8095", value_parser = go_int)]
    pub(super) admin_port: i64,

    /// Unix socket for `culvert status` and `culvert switch`, for this process's own user and root; empty
    /// disables the socket
    #[arg(long, value_name = "PATH", default_value = "")]
    pub(super) admin_uds: String,

    /// PEM certificate chain of the admin listener, which then requires mutual TLS and also serves
    /// `culvert status` and `culvert switch`
    #[arg(long, value_name = "FILE", default_value = "")]
    pub(super) admin_cert: String,

    /// PEM private key of --admin-cert
    #[arg(long, value_name = "FILE", default_value = "")]
    pub(super) admin_key: String,

    /// PEM CA bundle that the admin listener's clients must chain to; required with --admin-cert
    #[arg(long, value_name = "FILE", default_value = "")]
    pub(super) admin_ca_cert: String,

    /// No effect, except for a warning: this program has no profiles, and /debug/pprof answers 404
    #[arg(long)]
    pub(super) enable_profiling: bool,

    /// No effect; needs --enable-profiling
    #[arg(long)]
    pub(super) enable_contention_profiling: bool,
}

#[derive(Args, Debug)]
#[command(next_help_heading = "Tunnel")]
pub(super) struct TunnelFlags {
    /// Buffer of one connection, in units of 32 KiB; at least 256 KiB and at most 16 MiB are used
    #[arg(long, value_name = "N", default_value = "10", value_parser = go_int)]
    pub(super) xfr_channel_size: i64,

    /// Bytes that all connections together may queue beyond their own buffers while their clients are slow;
    /// when these bytes are used up, the connection that uses the largest part of them is closed
    #[arg(long, value_name = "BYTES", default_value = "67108864", value_parser = go_int)]
    pub(super) excess_buffer_bytes: i64,

    /// Time for which a connection may continuously exceed its own buffer before it is closed
    #[arg(long, value_name = "DURATION", default_value = "10s")]
    pub(super) stall_timeout: GoDuration,

    /// Threads that carry connections; 0 means one for each processor, at most 4
    #[arg(long, value_name = "N", default_value = "0", value_parser = go_int)]
    pub(super) worker_threads: i64,

    /// Longest time to send a dial to an agent and to receive the answer; 0 means the built-in limit of 35s
    #[arg(long, value_name = "DURATION", default_value = "0")]
    pub(super) backend_dial_timeout: GoDuration,

    /// Longest time for connections to end after SIGTERM; 0 ends them at once. Meanwhile /readyz fails, agents
    /// search for other servers, and new dials are served. The server ends earlier once no dial
    /// or connection has existed for --drain-linger
    #[arg(long, value_name = "DURATION", default_value = "0")]
    pub(super) graceful_shutdown_timeout: GoDuration,

    /// Time a draining server without connections serves new dials before the server exits; at most
    /// --graceful-shutdown-timeout
    #[arg(long, value_name = "DURATION", default_value_t = DRAIN_LINGER.into())]
    pub(super) drain_linger: GoDuration,

    /// No effect, and deprecated upstream
    #[arg(long, default_value = "true")]
    pub(super) warn_on_channel_limit: bool,
}

#[derive(Args, Debug)]
#[command(next_help_heading = "Limits (0 means no limit)")]
pub(super) struct LimitFlags {
    /// Client connections at the front end; further clients are closed
    #[arg(long, value_name = "N", default_value = "100000", value_parser = go_int)]
    pub(super) max_frontend_connections: i64,

    /// Agent connections; further agents are refused with the reason
    #[arg(long, value_name = "N", default_value = "10000", value_parser = go_int)]
    pub(super) max_agents: i64,

    /// Dials and connections of one agent connection; further dials go to other agents, or fail as without an
    /// agent
    #[arg(long, value_name = "N", default_value = "50000", value_parser = go_int)]
    pub(super) max_connections_per_agent: i64,

    /// Dials that wait for an answer; further dials fail at once
    #[arg(long, value_name = "N", default_value = "10000", value_parser = go_int)]
    pub(super) max_pending_dials: i64,
}

#[derive(Args, Debug)]
#[command(next_help_heading = "Destinations")]
pub(super) struct DestinationFlags {
    /// Networks that clients may dial, comma-separated: 10.0.0.0/8, 10.0.0.0/8:443, [fd00::/8]:1-1024, *:22; empty
    /// allows all. Names are not checked here, because agents resolve names; the OpenVPN tunnel checks them too
    #[arg(long, value_name = "LIST")]
    pub(super) allow_destinations: Vec<StringSlice>,

    /// Networks that clients must not dial, in the same form and with the same limits; wins over
    /// --allow-destinations. Use the agents' flags as well, because they also check the addresses of names
    #[arg(long, value_name = "LIST")]
    pub(super) deny_destinations: Vec<StringSlice>,
}

#[derive(Args, Debug)]
#[command(next_help_heading = "Choice of the tunnel")]
pub(super) struct SwitchFlags {
    /// Tunnel for new connections: konnectivity, openvpn, prefer-konnectivity or prefer-openvpn
    #[arg(long, value_name = "MODE", default_value = "konnectivity")]
    pub(super) tunnel_mode: String,

    /// File with the tunnel mode, followed as it changes: a value of --tunnel-mode, or
    /// `konnectivityEnabled: true` or `false`, in YAML or JSON
    #[arg(long, value_name = "FILE", default_value = "")]
    pub(super) tunnel_mode_file: String,

    /// File that keeps the last tunnel mode, and a switch in progress, across restarts
    #[arg(long, value_name = "FILE", default_value = "")]
    pub(super) tunnel_state_file: String,

    /// Time for which connections of the old tunnel may stay open after a switch
    #[arg(long, value_name = "DURATION", default_value = "5m")]
    pub(super) tunnel_drain: GoDuration,
}

#[derive(Args, Debug)]
#[command(
    next_help_heading = "Service account tokens of agents (all or none), checked by TokenReview"
)]
pub(super) struct AuthFlags {
    /// Namespace required in agents' tokens
    #[arg(long, value_name = "NAMESPACE", default_value = "")]
    pub(super) agent_namespace: String,

    /// Service account required in agents' tokens
    #[arg(long, value_name = "NAME", default_value = "")]
    pub(super) agent_service_account: String,

    /// Audience required in agents' tokens
    #[arg(long, value_name = "AUDIENCE", default_value = "")]
    pub(super) authentication_audience: String,
}

/// Default of `--drain-linger`.
pub(super) const DRAIN_LINGER: Duration = Duration::from_secs(5);
/// Default of `--kube-api-content-type`.
pub(super) const CONTENT_TYPE: &str = "application/vnd.kubernetes.protobuf";

#[derive(Args, Debug)]
#[command(next_help_heading = "Kubernetes API")]
pub(super) struct KubernetesFlags {
    /// Kubeconfig file; empty means the pod's own account
    #[arg(long, value_name = "FILE", default_value = "")]
    pub(super) kubeconfig: String,

    /// Largest number of TokenReviews per second, on average; 0 sets no limit
    #[arg(long, value_name = "QPS", default_value = "0")]
    pub(super) kubeconfig_qps: f32,

    /// Largest number of TokenReviews at once, before --kubeconfig-qps delays them; 0 means 10
    #[arg(long, value_name = "N", default_value = "0", value_parser = go_int)]
    pub(super) kubeconfig_burst: i64,

    /// No effect: requests are JSON
    #[arg(long, value_name = "TYPE", default_value = CONTENT_TYPE)]
    pub(super) kube_api_content_type: String,

    /// Keep a lease of this server, so that agents can count servers, and delete expired leases; the account may
    /// create, get, update, list and delete leases
    #[arg(long)]
    pub(super) enable_lease_controller: bool,

    /// Namespace of the leases
    #[arg(long, value_name = "NAMESPACE", default_value = leases::DEFAULT_NAMESPACE)]
    pub(super) lease_namespace: String,

    /// Labels of the leases: key=value, comma-separated
    #[arg(long, value_name = "LABELS", default_value = leases::DEFAULT_LABEL)]
    pub(super) lease_label: String,
}

impl Flags {
    /// Reads, checks and converts a command line. Without `--server-id`, the server id is `id`, the value from
    /// the environment, or else a random UUID.
    pub(super) fn read(
        args: impl IntoIterator<Item = impl Into<OsString> + Clone>,
        id: Option<String>,
    ) -> Result<Config, Exit> {
        let Parsed { mut flags, strays } = parse::<Self, _, _>(args)?;
        if flags.agents.server_id.is_empty() {
            flags.agents.server_id = id
                .filter(|id| !id.is_empty())
                .unwrap_or_else(|| uuid::Uuid::new_v4().to_string());
        }
        flags
            .validate(Problems::new(&strays))
            .map_err(|problems| Exit::problems(PROGRAM, &problems))
    }
}
