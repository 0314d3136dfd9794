//! Conversion of flags to a [`Config`], under the stock server's rules and with its error texts.
//!
//! The stock server stops at the first problem; this module reports all problems.

use std::collections::BTreeMap;
use std::path::{Path, PathBuf};
use std::time::Duration;

use culvert_host::flags::labels::{is_dns_subdomain, parse_labels};
use culvert_host::flags::{GoDuration, HostPort, Problems, StringSlice};
use culvert_host::net::destinations::{Destinations, Program};

use culvert_kube::pace::Pace;
use culvert_kube::tokens::AgentAuth;

use super::flags::{
    CONTENT_TYPE, DRAIN_LINGER, DestinationFlags, Flags, FrontendFlags, KubernetesFlags,
    LimitFlags, OperationsFlags, SwitchFlags,
};
use super::{
    AgentListener, Config, Frontend, KEEPALIVE_FLOOR, Lease, Limits, Mode, TlsFiles,
    XFR_CHANNEL_SIZE_MAX,
};
use crate::backend::identity::AgentIdFrom;
use crate::metrics::Strategy;
use crate::switch::{self, Unavailable};
use crate::tunnel::{self, Kind};

/// Longest server id in the name of a lease, in bytes. A name may have 253 bytes, and has a prefix.
const MAX_SERVER_ID: usize = 220;

/// Keepalive time that grpc-go's server uses for 0 (`defaultServerKeepaliveTime`).
const KEEPALIVE_OF_ZERO: Duration = Duration::from_secs(2 * 60 * 60);

/// Burst of TokenReviews without `--kubeconfig-burst` (client-go's `DefaultBurst`).
const DEFAULT_BURST: u32 = 10;

impl Flags {
    /// Returns the checked configuration, or all problems.
    pub(super) fn validate(self, mut problems: Problems) -> Result<Config, Vec<String>> {
        let p = &mut problems;
        let mode = self.frontend.mode(p);
        let frontend = self.frontend.frontend(p);
        let agent_listener = self.agent_listener(p);
        let ops = &self.operations;
        let admin_port = port(p, "admin", ops.admin_port);
        let admin = HostPort::new(&ops.admin_bind_address, admin_port);
        let health_port = port(p, "health", ops.health_port);
        let health = HostPort::new(&ops.health_bind_address, health_port);
        let bind = match &frontend {
            Some(Frontend::Tcp { bind, .. }) => Some(bind),
            _ => None,
        };
        let agents = agent_listener.as_ref().map(|agents| &agents.bind);
        p.distinct_ports(&[
            ("server-port", bind),
            ("agent-port", agents),
            ("admin-port", Some(&admin)),
            ("health-port", Some(&health)),
        ]);
        let admin_tls = ops.admin_tls(p);
        let cluster = ("cluster-ca-cert", &*self.agents.cluster_ca_cert);
        ops.check_admin_ca(
            p,
            [cluster, ("server-ca-cert", &self.frontend.server_ca_cert)],
        );
        let kubeconfig = p.file("kubeconfig", &self.kubernetes.kubeconfig);
        let openvpn = self.openvpn.settings(p, kubeconfig.as_deref());
        let switch = self.switch.settings(p, openvpn.is_some());
        let agent_auth = self.agent_auth(p, kubeconfig.clone());
        let lease = self.lease(p, kubeconfig);
        let agent_id_from = self.agent_id_from(p);
        let destinations = self.destinations.validate(p);
        let strategies = self.strategies(p);
        let limits = self.limits.validate(p);
        self.check_rest(p);
        let tls = self.tls.validate(p);
        let max = XFR_CHANNEL_SIZE_MAX;
        let size = self.tunnel.xfr_channel_size;
        let xfr_channel_size = p.channel_size("xfr-channel-size", "channel", size, max);
        let excess_buffer_bytes = p.bytes("excess-buffer-bytes", self.tunnel.excess_buffer_bytes);
        let stall_timeout = p.above_zero("stall-timeout", self.tunnel.stall_timeout);
        let worker_threads = p.threads("worker-threads", self.tunnel.worker_threads);
        let backend_dial_timeout = self.tunnel.backend_dial_timeout.saturating();
        let grace = self.tunnel.graceful_shutdown_timeout;
        let graceful_shutdown_timeout = p.not_negative("graceful-shutdown-timeout", grace);
        let drain_linger = p.not_negative("drain-linger", self.tunnel.drain_linger);
        if drain_linger > graceful_shutdown_timeout && drain_linger != DRAIN_LINGER {
            p.warn("--drain-linger is longer than --graceful-shutdown-timeout, which ends the drain first");
        }
        let time = self.agents.keepalive_time;
        let keepalive_time = keepalive(p, "keepalive-time", time);
        let resume_grace = p.not_negative("resume-grace", self.agents.resume_grace);
        if let Some(warning) = culvert_native::resume::grace_warning(resume_grace) {
            p.warn(warning);
        }
        let time = self.frontend.frontend_keepalive_time;
        let frontend_keepalive_time = keepalive(p, "frontend-keepalive-time", time);
        let server_id = p.header_value("server-id", self.agents.server_id.clone());
        self.note_unneeded(p);
        if !ops.admin_uds.is_empty()
            && Path::new(&ops.admin_uds) == Path::new(&self.frontend.uds_name)
        {
            p.error("--admin-uds and --uds-name must be different paths".to_owned());
        }

        let warnings = problems.finish()?;
        // A value is missing only after an error, and then `finish` has already returned.
        let (Some(mode), Some(frontend), Some(agent_listener)) = (mode, frontend, agent_listener)
        else {
            return Err(vec!["the flags are incomplete".to_owned()]);
        };
        Ok(Config {
            mode,
            frontend,
            agent_listener,
            agent_auth,
            agent_id_from,
            destinations,
            admin,
            admin_tls,
            admin_uds: path(&ops.admin_uds),
            openvpn,
            switch,
            health,
            ready_without_agents: ops.ready_without_agents,
            keepalive_time,
            link_congestion: self.agents.link_congestion,
            resume_grace,
            frontend_keepalive_time,
            server_id,
            server_count: self.agents.server_count,
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
            backend_dial_timeout: Some(backend_dial_timeout).filter(|bound| !bound.is_zero()),
            logging: self.klog.log_config(),
            warnings,
        })
    }

    fn agent_listener(&self, p: &mut Problems) -> Option<AgentListener> {
        let flags = &self.agents;
        let pair = p.key_pair("cluster", &flags.cluster_cert, &flags.cluster_key);
        p.require(
            !flags.cluster_cert.is_empty() || !flags.cluster_key.is_empty(),
            || {
                "--cluster-cert and --cluster-key must be set: agents are served over TLS only"
                    .to_owned()
            },
        );
        let ca = p.file("cluster CA cert", &flags.cluster_ca_cert);
        let port = port(p, "agent", flags.agent_port);
        let proxies = p.networks(
            "agent-proxy-protocol-from",
            &flags.agent_proxy_protocol_from,
        );
        let quic_port = flags.agent_quic_port;
        let quic_port = (quic_port != 0).then(|| self::port(p, "agent QUIC", quic_port));
        let (cert, key) = pair?;
        Some(AgentListener {
            bind: HostPort::new(&flags.agent_bind_address, port),
            cert,
            key,
            ca,
            proxies,
            quic_port,
        })
    }

    /// Returns the requirements for tokens. Requires all three flags or none.
    fn agent_auth(&self, p: &mut Problems, kubeconfig: Option<PathBuf>) -> Option<AgentAuth> {
        let flags = [
            ("agent-namespace", &self.auth.agent_namespace),
            ("agent-service-account", &self.auth.agent_service_account),
            (
                "authentication-audience",
                &self.auth.authentication_audience,
            ),
        ];
        let pace = self.kubernetes.pace(p);
        if flags.iter().all(|(_, value)| value.is_empty()) {
            if pace.is_some() {
                p.warn(
                    "--kubeconfig-qps and --kubeconfig-burst have no effect: without --agent-namespace there are no \
                     TokenReviews",
                );
            }
            return None;
        }
        p.require(self.agents.cluster_ca_cert.is_empty(), || {
            "--cluster-ca-cert can not be used when agent authentication is enabled".to_owned()
        });
        for (name, value) in flags {
            p.require(!value.is_empty(), || {
                format!("--{name} cannot be empty when agent authentication is enabled")
            });
        }
        Some(AgentAuth {
            namespace: self.auth.agent_namespace.clone(),
            service_account: self.auth.agent_service_account.clone(),
            audience: self.auth.authentication_audience.clone(),
            kubeconfig,
            pace,
        })
    }

    /// Returns the source of agents' ids. Requires the authentication that proves the ids.
    fn agent_id_from(&self, p: &mut Problems) -> Option<AgentIdFrom> {
        match self.agents.agent_id_from.as_str() {
            "" => None,
            "certificate" => {
                p.require(!self.agents.cluster_ca_cert.is_empty(), || {
                    "--agent-id-from=certificate needs --cluster-ca-cert: without it, agents present no certificate"
                        .to_owned()
                });
                Some(AgentIdFrom::Certificate)
            }
            "token" => {
                p.require(!self.auth.agent_namespace.is_empty(), || {
                    "--agent-id-from=token needs --agent-namespace, --agent-service-account and \
                     --authentication-audience: without them, agents present no token"
                        .to_owned()
                });
                Some(AgentIdFrom::Token)
            }
            other => {
                p.error(format!(
                    "--agent-id-from must be certificate, token or empty, got {other:?}"
                ));
                None
            }
        }
    }

    /// Returns the strategies in order. The error texts are upstream's.
    fn strategies(&self, p: &mut Problems) -> Vec<Strategy> {
        let mut strategies = Vec::new();
        let names = self.agents.proxy_strategies.split(',');
        for name in names.filter(|name| !name.is_empty()) {
            match Strategy::ALL.iter().find(|known| known.as_str() == name) {
                Some(known) if strategies.contains(known) => {}
                Some(known) => strategies.push(*known),
                None => p.error(format!(
                    "invalid proxy strategies: unknown proxy strategy: {name}"
                )),
            }
        }
        let is_empty = self.agents.proxy_strategies.split(',').all(str::is_empty);
        p.require(!is_empty, || "ProxyStrategies cannot be empty".to_owned());
        strategies
    }

    /// Returns the server's lease. As in the stock server, the label is checked even if it is not used.
    fn lease(&self, p: &mut Problems, kubeconfig: Option<PathBuf>) -> Option<Lease> {
        let kube = &self.kubernetes;
        let labels = parse_labels(&kube.lease_label).unwrap_or_else(|error| {
            p.error(format!("--lease-label: {error}"));
            BTreeMap::new()
        });
        if !kube.enable_lease_controller {
            return None;
        }
        p.require(!kube.lease_namespace.is_empty(), || {
            "--lease-namespace cannot be empty with --enable-lease-controller".to_owned()
        });
        let id = &self.agents.server_id;
        if id.len() > MAX_SERVER_ID || !is_dns_subdomain(id) {
            p.warn(format!(
                "--server-id={id}: Kubernetes refuses this id in the name of a lease; use at most \
                 {MAX_SERVER_ID} lower-case letters, digits, '-' and '.'"
            ));
        }
        Some(Lease {
            namespace: kube.lease_namespace.clone(),
            labels,
            kubeconfig,
        })
    }

    fn check_rest(&self, p: &mut Problems) {
        let ops = &self.operations;
        p.profiling(ops.enable_profiling, ops.enable_contention_profiling);
        // Without a file the client would use the pod's own account, which belongs to the wrong cluster.
        p.require(
            !self.openvpn.openvpn_watch_nodes || !self.kubernetes.kubeconfig.is_empty(),
            || {
                "--openvpn-watch-nodes needs --kubeconfig: a file for the user cluster, of an account that may list and watch nodes".to_owned()
            },
        );
        p.not_negative("backend-dial-timeout", self.tunnel.backend_dial_timeout);
        let size = self.frontend.frontend_write_channel_size;
        p.require(size > 0, || {
            format!("frontend write channel size {size} must be greater than 0")
        });
    }

    fn note_unneeded(&self, p: &mut Problems) {
        let kube = &self.kubernetes;
        let uses_api = !self.auth.agent_namespace.is_empty()
            || self.openvpn.openvpn_watch_nodes
            || kube.enable_lease_controller;
        let why = "nothing here uses the Kubernetes API";
        p.unneeded(!kube.kubeconfig.is_empty() && !uses_api, "kubeconfig", why);
        let is_set = self.frontend.frontend_write_channel_size != 10;
        let why = "buffers are bounded in bytes by --xfr-channel-size";
        p.unneeded(is_set, "frontend-write-channel-size", why);
        let is_set = kube.kube_api_content_type != CONTENT_TYPE;
        p.unneeded(is_set, "kube-api-content-type", "requests are JSON");
        self.klog.note_unneeded(p);
    }
}

impl KubernetesFlags {
    /// Returns the limit of TokenReviews per time. A negative limit means none, as in client-go.
    fn pace(&self, p: &mut Problems) -> Option<Pace> {
        let (qps, burst) = (self.kubeconfig_qps, self.kubeconfig_burst);
        let limited = qps != 0.0 && !qps.is_sign_negative();
        p.require(!limited || (0.01..=1e6).contains(&qps), || {
            format!("--kubeconfig-qps must be 0, or from 0.01 to 1000000, got {qps}")
        });
        p.require((0..=1_000_000).contains(&burst), || {
            format!("--kubeconfig-burst must be 0 to 1000000, got {burst}")
        });
        if !limited {
            if burst > 0 {
                p.warn("--kubeconfig-burst has no effect without --kubeconfig-qps");
            }
            return None;
        }
        let burst = match burst {
            0 => DEFAULT_BURST,
            burst => u32::try_from(burst).unwrap_or(DEFAULT_BURST),
        };
        let interval = Duration::try_from_secs_f32(qps.recip()).ok()?;
        Some(Pace { interval, burst })
    }
}

impl LimitFlags {
    fn validate(&self, p: &mut Problems) -> Limits {
        let mut limit = |flag: &str, value: i64| {
            p.require(value >= 0, || format!("--{flag} must be >= 0, got {value}"));
            Some(usize::try_from(value).unwrap_or(0)).filter(|limit| *limit > 0)
        };
        Limits {
            frontend_connections: limit("max-frontend-connections", self.max_frontend_connections),
            agents: limit("max-agents", self.max_agents),
            connections_per_agent: limit(
                "max-connections-per-agent",
                self.max_connections_per_agent,
            ),
            pending_dials: limit("max-pending-dials", self.max_pending_dials),
        }
    }
}

impl DestinationFlags {
    fn validate(&self, p: &mut Problems) -> Destinations {
        let allow = StringSlice::concat(&self.allow_destinations);
        let deny = StringSlice::concat(&self.deny_destinations);
        let (destinations, problems) = Destinations::parse(Program::Server, &allow, &deny);
        problems.into_iter().for_each(|problem| p.error(problem));
        destinations
    }
}

impl OperationsFlags {
    /// Returns the admin certificates. Requires all three flags or none.
    fn admin_tls(&self, p: &mut Problems) -> Option<TlsFiles> {
        let pair = p.key_pair("admin", &self.admin_cert, &self.admin_key);
        let ca = p.file("admin CA cert", &self.admin_ca_cert);
        let has_cert = !self.admin_cert.is_empty() || !self.admin_key.is_empty();
        p.require(has_cert != self.admin_ca_cert.is_empty(), || {
            "--admin-cert, --admin-key and --admin-ca-cert must be set together".to_owned()
        });
        let (cert, key) = pair?;
        Some(TlsFiles { cert, key, ca: ca? })
    }

    /// Warns about an admin CA that also issues certificates for other listeners.
    fn check_admin_ca(&self, p: &mut Problems, others: [(&str, &str); 2]) {
        let read = |path: &str| std::fs::read(path).ok().filter(|ca| !ca.is_empty());
        let Some(admin) = read(&self.admin_ca_cert) else {
            return;
        };
        for (flag, path) in others {
            if read(path).as_ref() == Some(&admin) {
                p.warn(format!(
                    "--admin-ca-cert is the CA of --{flag}: every certificate of this CA may switch tunnels. \
                     Use a CA of its own for operators"
                ));
            }
        }
    }
}

impl SwitchFlags {
    fn settings(&self, p: &mut Problems, has_openvpn: bool) -> switch::Settings {
        let mode = self.tunnel_mode.parse().unwrap_or_else(|error| {
            p.error(format!("--tunnel-mode: {error}"));
            tunnel::Mode::Konnectivity
        });
        p.require(has_openvpn || mode.tunnel() == Kind::Konnectivity, || {
            format!("--tunnel-mode: {}", Unavailable(mode))
        });
        let state_file = path(&self.tunnel_state_file);
        if let Some(folder) = state_file.as_deref().and_then(Path::parent) {
            let is_there = folder.as_os_str().is_empty() || folder.is_dir();
            p.require(is_there, || {
                let folder = folder.display();
                format!("--tunnel-state-file: there is no folder {folder}; create it")
            });
        }
        switch::Settings {
            mode,
            mode_file: path(&self.tunnel_mode_file),
            state_file,
            drain: p.not_negative("tunnel-drain", self.tunnel_drain),
        }
    }
}

impl FrontendFlags {
    fn mode(&self, p: &mut Problems) -> Option<Mode> {
        match self.mode.as_str() {
            "grpc" => Some(Mode::Grpc),
            "http-connect" => Some(Mode::HttpConnect),
            other => {
                p.error(format!(
                    "mode must be set to either 'grpc' or 'http-connect' not {other:?}"
                ));
                None
            }
        }
    }

    fn frontend(&self, p: &mut Problems) -> Option<Frontend> {
        let pair = p.key_pair("server", &self.server_cert, &self.server_key);
        let ca = p.file("server CA cert", &self.server_ca_cert);
        if !self.uds_name.is_empty() {
            let port = self.server_port;
            p.require(port == 0, || {
                format!("server port should be set to 0 not {port} for UDS")
            });
            for (what, value) in [
                ("key", &self.server_key),
                ("cert", &self.server_cert),
                ("ca cert", &self.server_ca_cert),
            ] {
                p.require(value.is_empty(), || {
                    format!("server {what} should not be set for UDS")
                });
            }
            return Some(Frontend::Uds {
                path: PathBuf::from(&self.uds_name),
                delete_existing: self.delete_existing_uds_file,
            });
        }
        p.require(ca.is_some(), || {
            "server ca cert must be set when in TCP mode (uds-name is empty)".to_owned()
        });
        p.require(
            !self.server_cert.is_empty() || !self.server_key.is_empty(),
            || {
                "--server-cert and --server-key must be set when in TCP mode (uds-name is empty)"
                    .to_owned()
            },
        );
        let port = port(p, "server", self.server_port);
        let (cert, key) = pair?;
        Some(Frontend::Tcp {
            bind: HostPort::new(&self.server_bind_address, port),
            tls: TlsFiles { cert, key, ca: ca? },
        })
    }
}

/// Returns the path in a flag. The file may be missing.
fn path(flag: &str) -> Option<PathBuf> {
    (!flag.is_empty()).then(|| PathBuf::from(flag))
}

/// Checks a port. The stock server refuses ports below 1024 and above 49151.
fn port(p: &mut Problems, whose: &str, port: i64) -> u16 {
    let why = match port {
        ..1024 => "reserved",
        1024..=49151 => return u16::try_from(port).unwrap_or(0),
        _ => "ephemeral",
    };
    p.error(format!(
        "please do not try to use {why} port {port} for the {whose} port"
    ));
    0
}

fn keepalive(p: &mut Problems, flag: &str, time: GoDuration) -> Duration {
    if time == GoDuration::default() {
        return KEEPALIVE_OF_ZERO;
    }
    p.at_least(flag, time, KEEPALIVE_FLOOR)
}
