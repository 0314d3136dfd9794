//! What the server is told to do: the stock program's flags, checked, as plain typed values.
//!
//! [`Config`] is all that the rest of the server knows of the command line. [`Config::from_args`] makes it from flags
//! under the stock program's rules; tests and embedders build it by hand, where port 0 is allowed.

mod flags;
mod openvpn;
#[cfg(test)]
mod tests;
mod tls;
mod validate;

use std::ffi::OsString;
use std::path::{Path, PathBuf};
use std::time::Duration;

use culvert_host::flags::{Exit, GoDuration, HostPort};
use culvert_host::telemetry::logging::LogConfig;
use culvert_host::tls::TlsOptions;
use culvert_kube::tokens::AgentAuth;
use flags::Flags;

use crate::backend::openvpn::settings::Settings as Openvpn;
use crate::switch;

/// The program's name in usage texts and log file names.
pub const PROGRAM: &str = "culvert-server";

/// Everything the server is told at start.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Config {
    /// The protocol that kube-apiserver speaks to the front end.
    pub mode: Mode,
    /// Where kube-apiserver connects.
    pub frontend: Frontend,
    /// Where agents connect.
    pub agent_listener: AgentListener,
    /// Whose tokens agents have to have; `None` asks for none.
    pub agent_auth: Option<AgentAuth>,
    /// The admin listener (metrics). Default `127.0.0.1:8095`.
    pub admin: HostPort,
    /// Makes the admin listener one of mutual TLS, which serves the tunnels' status and switch too.
    pub admin_tls: Option<TlsFiles>,
    /// A Unix socket for the tunnels' status and switch.
    pub admin_uds: Option<PathBuf>,
    /// The tunnel of OpenVPN clients, if there is one.
    pub openvpn: Option<Openvpn>,
    /// Which tunnel new connections go by.
    pub switch: switch::Settings,
    /// The health listener (`/healthz`, `/readyz`, metrics). Default `:8092`.
    pub health: HostPort,
    /// Idle time after which an agent's connection is pinged. Default 1 h, at least [`KEEPALIVE_FLOOR`].
    pub keepalive_time: Duration,
    /// The same toward gRPC front-end clients. Default 1 h, at least [`KEEPALIVE_FLOOR`].
    pub frontend_keepalive_time: Duration,
    /// What agents tell servers apart by. Never empty when it comes from the command line.
    pub server_id: String,
    /// How many servers agents are told to look for; sent as it is, zero and negative values too. Default 1.
    pub server_count: i64,
    /// TLS limits of both TLS listeners.
    pub tls: TlsOptions,
    /// Packets buffered per agent stream and per front-end stream. Default 10, at most [`XFR_CHANNEL_SIZE_MAX`].
    pub xfr_channel_size: usize,
    /// Bytes that connections may queue beyond their own budgets, all together. Smaller closes connections over short
    /// bursts, larger costs memory while clients are slow. Default 64 MiB.
    pub excess_buffer_bytes: usize,
    /// How long a connection may exceed its budget without a pause. Longer keeps the pool occupied. Default 10 s.
    pub stall_timeout: Duration,
    /// Threads that carry connections; 0, the default, is one for each processor, 4 at most.
    pub worker_threads: usize,
    /// Bound on sending a dial to an agent and on its answer. `None` (the default) does not bound it.
    pub backend_dial_timeout: Option<Duration>,
    /// Where log lines go and how many of them.
    pub logging: LogConfig,
    /// What the operator should be told once logging works: one line each.
    pub warnings: Vec<String>,
}

/// grpc-go's lower bound on a server's keepalive interval (`internal.KeepaliveMinServerPingTime`).
pub const KEEPALIVE_FLOOR: Duration = Duration::from_secs(1);

/// Upper bound on [`Config::xfr_channel_size`]: a queue longer than this is a typing error, not a tuning.
pub const XFR_CHANNEL_SIZE_MAX: usize = 1 << 20;

/// The front end's protocol (`--mode`).
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Mode {
    /// `grpc`: the Konnectivity packet protocol, the default.
    Grpc,
    /// `http-connect`: HTTP/1.1 CONNECT.
    HttpConnect,
}

/// Where kube-apiserver connects.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum Frontend {
    /// A unix socket (`--uds-name`); who may connect is decided by the file system.
    Uds {
        /// The socket's path.
        path: PathBuf,
        /// Remove what is at the path before binding (`--delete-existing-uds-file`, default true).
        delete_existing: bool,
    },
    /// TCP with mutual TLS.
    Tcp {
        /// Default `:8090`.
        bind: HostPort,
        /// Certificate, key and the clients' CA.
        tls: TlsFiles,
    },
}

/// PEM files of a listener that demands client certificates.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct TlsFiles {
    /// The certificate chain shown to clients.
    pub cert: PathBuf,
    /// Its private key.
    pub key: PathBuf,
    /// The CA bundle that client certificates must chain to.
    pub ca: PathBuf,
}

/// Where agents connect: TCP with TLS.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct AgentListener {
    /// Default `:8091`.
    pub bind: HostPort,
    /// PEM certificate chain shown to agents.
    pub cert: PathBuf,
    /// Its PEM private key.
    pub key: PathBuf,
    /// CA bundle that agents' certificates must chain to. `None` asks agents for no certificate.
    pub ca: Option<PathBuf>,
}

// === impl Config ===

impl Config {
    /// Reads a command line, program name first, and the environment variable `PROXY_SERVER_ID`.
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
            mode,
            frontend,
            agent_listener,
            agent_auth,
            admin,
            admin_tls,
            admin_uds,
            openvpn,
            switch,
            health,
            keepalive_time,
            frontend_keepalive_time,
            server_id,
            server_count,
            tls,
            xfr_channel_size,
            excess_buffer_bytes,
            stall_timeout,
            worker_threads,
            backend_dial_timeout,
            logging,
            warnings: _,
        } = self;
        let ca = agent_listener.ca.clone().unwrap_or_default();
        let mut lines = vec![format!("mode={}", mode.name())];
        lines.extend(frontend.describe());
        lines.extend([
            format!("agent-bind={}", agent_listener.bind),
            format!("cluster-cert={}", agent_listener.cert.display()),
            format!("cluster-key={}", agent_listener.key.display()),
            format!("cluster-ca-cert={}", ca.display()),
            format!("admin-bind={admin}"),
            format!("admin-uds={}", shown(admin_uds)),
            format!("health-bind={health}"),
            format!("keepalive-time={}", GoDuration::from(*keepalive_time)),
            format!(
                "frontend-keepalive-time={}",
                GoDuration::from(*frontend_keepalive_time)
            ),
            format!("server-id={server_id}"),
            format!("server-count={server_count}"),
            format!("tls-min-version={}", tls.min_version.name()),
            format!("cipher-suites={}", tls.cipher_suites.join(",")),
            format!("xfr-channel-size={xfr_channel_size}"),
            format!("excess-buffer-bytes={excess_buffer_bytes}"),
            format!("stall-timeout={}", GoDuration::from(*stall_timeout)),
            format!("worker-threads={worker_threads}"),
            format!(
                "backend-dial-timeout={}",
                GoDuration::from(backend_dial_timeout.unwrap_or_default())
            ),
        ]);
        if let Some(files) = admin_tls {
            lines.extend([
                format!("admin-cert={}", files.cert.display()),
                format!("admin-key={}", files.key.display()),
                format!("admin-ca-cert={}", files.ca.display()),
            ]);
        }
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
        let watched = openvpn.as_ref().map(|openvpn| &openvpn.watch_nodes);
        let reviews = agent_auth.as_ref().map(|auth| &auth.kubeconfig);
        if let Some(kubeconfig) = reviews.or(watched.filter(|file| file.is_some())) {
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

// === impl Mode, Frontend ===

impl Mode {
    /// The spelling of `--mode`.
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
