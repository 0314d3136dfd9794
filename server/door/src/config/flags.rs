//! The command-line flags: names, defaults, help texts, and conversion to a [`Config`].

mod balancer;

use std::ffi::OsString;
use std::time::Duration;

use clap::{Args, Parser};
use culvert_host::flags::parse::with_two_dashes;
use culvert_host::flags::values::go_int;
use culvert_host::flags::{
    Exit, GoDuration, HostPort, KlogFlags, Parsed, Problems, StringSlice, parse,
};
use culvert_host::net::congestion::LinkCongestion;

use self::balancer::BalancerFlags;
use super::{
    Cluster, Config, IDLE, KEEPALIVE, Keepalive, Limits, PROGRAM, STREAM_IDLE, Source, Tunneling,
};
use crate::annotations::EXPOSE_ANNOTATION;
use crate::exposure::Options;

/// Longest keepalive time of the kernel (`MAX_TCP_KEEPIDLE`), about nine hours. Longer values are reduced to
/// this limit.
const MAX_KEEPALIVE: Duration = Duration::from_secs(32_767);

/// Verbosity without `-v` or `--log-debug`: no line per connection.
const VERBOSITY: &str = "2";

/// Forwards connections from outside to the Services of a seed cluster: TLS by server name, HTTP CONNECT, and
/// node ports.
#[derive(Parser, Debug)]
#[command(name = PROGRAM, version)]
#[command(mut_arg("v", |arg| arg.default_value(VERBOSITY)))]
pub(super) struct Flags {
    #[command(flatten)]
    source: SourceFlags,
    #[command(flatten)]
    listeners: ListenerFlags,
    #[command(flatten)]
    balancer: BalancerFlags,
    #[command(flatten)]
    times: TimeFlags,
    #[command(flatten)]
    operations: OperationsFlags,
    #[command(flatten)]
    klog: KlogFlags,
}

#[derive(Args, Debug)]
#[command(next_help_heading = "Source of routes")]
struct SourceFlags {
    /// YAML file of routes; changes take effect while the program runs
    #[arg(long, value_name = "FILE", default_value = "")]
    config: String,

    /// Kubeconfig file of the account that watches Services and EndpointSlices; empty uses the pod's own
    /// account. Not used with --config
    #[arg(long, value_name = "FILE", default_value = "")]
    kubeconfig: String,

    /// Namespace to watch; empty watches all
    #[arg(long, value_name = "NAMESPACE", default_value = "")]
    namespace: String,

    /// Annotation that exposes a Service
    #[arg(long, value_name = "KEY", default_value = EXPOSE_ANNOTATION)]
    expose_annotation_key: String,
}

#[derive(Args, Debug)]
#[command(next_help_heading = "Listeners")]
struct ListenerFlags {
    /// Address of all listeners; empty means all interfaces, IPv4 and IPv6
    #[arg(long, value_name = "HOST", default_value = "0.0.0.0")]
    bind_address: String,

    /// Port for TLS connections, routed by server name (SNI); 0 disables it
    #[arg(long, value_name = "PORT", default_value = "0", value_parser = go_int)]
    envoy_sni_port: i64,

    /// UDP port for QUIC connections, routed by server name to Services that have the annotation
    /// nodeport-proxy.k8s.io/quic-port; 0, the default, disables it
    #[arg(long, value_name = "PORT", default_value = "0", value_parser = go_int)]
    sni_quic_port: i64,

    /// Port for CONNECT requests, HTTP/1.1 and HTTP/2; 0 disables it
    #[arg(long, value_name = "PORT", default_value = "0", value_parser = go_int)]
    envoy_tunneling_port: i64,

    /// Port for health and metrics
    #[arg(long, value_name = "PORT", default_value = "8002", value_parser = go_int)]
    envoy_stats_port: i64,

    /// PEM certificate chain for CONNECT over TLS; plain text is still accepted on the same port
    #[arg(long, value_name = "FILE", default_value = "")]
    tunneling_cert: String,

    /// PEM private key of --tunneling-cert
    #[arg(long, value_name = "FILE", default_value = "")]
    tunneling_key: String,

    /// PEM CA bundle for the certificates of CONNECT clients; implies --tunneling-require-tls
    #[arg(long, value_name = "FILE", default_value = "")]
    tunneling_client_ca: String,

    /// Refuse CONNECT clients without TLS
    #[arg(long)]
    tunneling_require_tls: bool,

    /// Networks of permitted CONNECT clients, comma-separated; empty allows all
    #[arg(long, value_name = "CIDR,...")]
    tunneling_allowed_networks: Vec<StringSlice>,

    /// Networks of load balancers that send the PROXY protocol (version 1 or 2) to the ports for traffic,
    /// comma-separated; peers in these networks must send it
    #[arg(long, value_name = "CIDR,...")]
    proxy_protocol_from: Vec<StringSlice>,

    /// No effect: the proxy does not use Envoy
    #[arg(long, value_name = "ADDRESS", default_value = ":8001")]
    listen_address: String,

    /// No effect: the proxy does not use Envoy
    #[arg(long, value_name = "NAME", default_value = "kube")]
    envoy_node_name: String,

    /// Port on 127.0.0.1 for POST /healthcheck/fail and /healthcheck/ok, as in Envoy; 0, the default, disables it
    #[arg(long, value_name = "PORT", default_value = "0", value_parser = go_int)]
    envoy_admin_port: i64,
}

#[derive(Args, Debug)]
#[command(next_help_heading = "Times (0 means the default in parentheses)")]
struct TimeFlags {
    /// Idle time after which a TLS connection is closed (1h)
    #[arg(long, value_name = "DURATION", default_value = "0")]
    sni_listener_idle_timeout: GoDuration,

    /// Idle time after which a connection without CONNECT streams is closed (1h)
    #[arg(long, value_name = "DURATION", default_value = "0")]
    tunneling_connection_idle_timeout: GoDuration,

    /// Idle time after which a CONNECT stream is closed (5m)
    #[arg(long, value_name = "DURATION", default_value = "0")]
    tunneling_stream_idle_timeout: GoDuration,

    /// Silence of a client before TCP probes it (10s)
    #[arg(long, value_name = "DURATION", default_value = "0")]
    downstream_tcp_keepalive_time: GoDuration,

    /// Time between TCP probes to a client (5s)
    #[arg(long, value_name = "DURATION", default_value = "0")]
    downstream_tcp_keepalive_interval: GoDuration,

    /// Unanswered probes after which a client counts as dead (3)
    #[arg(long, value_name = "N", default_value = "0", value_parser = go_int)]
    downstream_tcp_keepalive_probes: i64,

    /// Silence of an endpoint before TCP probes it (10s)
    #[arg(long, value_name = "DURATION", default_value = "0")]
    upstream_tcp_keepalive_time: GoDuration,

    /// Time between TCP probes to an endpoint (5s)
    #[arg(long, value_name = "DURATION", default_value = "0")]
    upstream_tcp_keepalive_interval: GoDuration,

    /// Unanswered probes after which an endpoint counts as dead (3)
    #[arg(long, value_name = "N", default_value = "0", value_parser = go_int)]
    upstream_tcp_keepalive_probes: i64,
}

#[derive(Args, Debug)]
#[command(next_help_heading = "Operation")]
struct OperationsFlags {
    /// Maximum number of simultaneous connections to one Service port; more are refused
    #[arg(long, value_name = "N", default_value = "1024", value_parser = go_int)]
    max_connections: i64,

    /// Time for connections to end after SIGTERM; 0 ends them at once
    #[arg(long, value_name = "DURATION", default_value = "25s")]
    drain_timeout: GoDuration,

    /// Part of --drain-timeout in which new connections are still accepted: Services and load balancers send
    /// clients until they notice that this program is not ready
    #[arg(long, value_name = "DURATION", default_value = "5s")]
    drain_delay: GoDuration,

    /// Congestion control of connections of clients: auto (bbr if the kernel permits it), system (the kernel's
    /// default), or a name such as cubic
    #[arg(long, value_name = "NAME", default_value_t)]
    link_congestion: LinkCongestion,

    /// Threads for connections; 0 means one per processor, at most 4
    #[arg(long, value_name = "N", default_value = "0", value_parser = go_int)]
    worker_threads: i64,

    /// Log a line for each connection; the same as -v=4
    #[arg(long)]
    log_debug: bool,
}

impl Flags {
    /// Parses, validates and converts a command line.
    pub(super) fn read(args: impl Iterator<Item = OsString>) -> Result<Config, Exit> {
        let Parsed { flags, strays } = parse::<Self, _, _>(as_go_reads(args))?;
        flags
            .validate(Problems::new(&strays))
            .map_err(|problems| Exit::problems(PROGRAM, &problems))
    }

    fn validate(self, mut problems: Problems) -> Result<Config, Vec<String>> {
        let p = &mut problems;
        let listeners = &self.listeners;
        let source = &self.source;
        let file = p.file("config", &source.config);
        let kubeconfig = p.file("kubeconfig", &source.kubeconfig);
        p.require(!source.expose_annotation_key.is_empty(), || {
            "--expose-annotation-key cannot be empty".to_owned()
        });
        let host = listeners.bind_address.as_str();
        let mut port = |name: &str, value: i64| {
            p.require((0..=65_535).contains(&value), || {
                format!("--{name} must be 0 to 65535, got {value}")
            });
            u16::try_from(value).unwrap_or(0)
        };
        let sni = port("envoy-sni-port", listeners.envoy_sni_port);
        let sni_quic = port("sni-quic-port", listeners.sni_quic_port);
        let tunneling = port("envoy-tunneling-port", listeners.envoy_tunneling_port);
        let stats = port("envoy-stats-port", listeners.envoy_stats_port);
        let admin = port("envoy-admin-port", listeners.envoy_admin_port);
        p.require(sni_quic == 0 || sni != 0, || {
            "--sni-quic-port needs --envoy-sni-port: clients of QUIC fall back to TCP".to_owned()
        });
        let tunneling = self.tunneling(p, tunneling);
        let proxies = p.networks("proxy-protocol-from", &listeners.proxy_protocol_from);
        let limits = self.times.limits(p);
        let tunneling_port = tunneling.as_ref().map_or(0, |it| it.bind.port);
        let ports = [sni, sni_quic, tunneling_port, stats];
        let balancer = self.balancer.config(p, source, ports);
        let has_routes = balancer.as_ref().is_none_or(|balancer| !balancer.only);
        let max = self.operations.max_connections;
        p.require(max > 0, || {
            format!("--max-connections must be greater than 0, got {max}")
        });
        let worker_threads = p.threads("worker-threads", self.operations.worker_threads);
        let mut logging = self.klog.log_config();
        if self.operations.log_debug {
            logging.verbosity = logging.verbosity.max(4);
        }
        let source = match file {
            Some(file) => Source::File(file),
            None => Source::Kubernetes(Cluster {
                kubeconfig,
                namespace: [source.namespace.as_str()]
                    .into_iter()
                    .chain(self.balancer.namespace())
                    .find(|name| !name.is_empty())
                    .map(str::to_owned),
                options: Options {
                    annotation: source.expose_annotation_key.clone(),
                    server_names: sni != 0,
                    authorities: tunneling.is_some(),
                },
                balancer,
            }),
        };
        let drain_timeout = p.not_negative("drain-timeout", self.operations.drain_timeout);
        let drain_delay = p.not_negative("drain-delay", self.operations.drain_delay);
        if !drain_timeout.is_zero() && drain_delay >= drain_timeout {
            p.warn("--drain-delay is not shorter than --drain-timeout: connections are accepted until all are cut; lower --drain-delay or raise --drain-timeout".to_owned());
        }
        let warnings = problems.finish()?;
        Ok(Config {
            source,
            sni: (has_routes && sni != 0).then(|| HostPort::new(host, sni)),
            sni_quic: (has_routes && sni_quic != 0).then(|| HostPort::new(host, sni_quic)),
            tunneling: tunneling.filter(|_| has_routes),
            proxies,
            stats: HostPort::new(host, stats),
            admin: (admin != 0).then(|| HostPort::new("127.0.0.1", admin)),
            node_port_host: host.to_owned(),
            limits,
            max_connections: u64::try_from(max).unwrap_or(0),
            drain_timeout,
            drain_delay,
            worker_threads,
            link_congestion: self.operations.link_congestion,
            logging,
            warnings,
        })
    }

    fn tunneling(&self, p: &mut Problems, port: u16) -> Option<Tunneling> {
        let flags = &self.listeners;
        let tls = p.key_pair("tunneling", &flags.tunneling_cert, &flags.tunneling_key);
        let client_ca = p.file("tunneling client CA", &flags.tunneling_client_ca);
        let require_tls = flags.tunneling_require_tls || client_ca.is_some();
        p.require(!require_tls || !flags.tunneling_cert.is_empty(), || {
            "--tunneling-require-tls and --tunneling-client-ca need --tunneling-cert".to_owned()
        });
        let networks = &flags.tunneling_allowed_networks;
        let allowed = p.networks("tunneling-allowed-networks", networks);
        (port != 0).then(|| Tunneling {
            bind: HostPort::new(&flags.bind_address, port),
            tls,
            client_ca,
            require_tls,
            allowed,
        })
    }
}

impl TimeFlags {
    fn limits(&self, p: &mut Problems) -> Limits {
        let mut probes = |side: &str, value: i64| {
            p.require(value >= 0, || {
                format!("--{side}-tcp-keepalive-probes must be >= 0, got {value}")
            });
            // 127 is the kernel's limit for keepalive probes.
            match u32::try_from(value.clamp(0, 127)) {
                Ok(0) | Err(_) => KEEPALIVE.probes,
                Ok(probes) => probes,
            }
        };
        let downstream_probes = probes("downstream", self.downstream_tcp_keepalive_probes);
        let upstream_probes = probes("upstream", self.upstream_tcp_keepalive_probes);
        let mut time = |flag: &str, value: GoDuration, default: Duration| {
            // The stock nodeport-proxy truncates to whole seconds; a time below a second becomes 0, which
            // means the default.
            let seconds = Duration::from_secs(p.not_negative(flag, value).as_secs());
            if value.nanos() > 0 && seconds.is_zero() {
                p.warn(format!(
                    "--{flag}={value} is less than a second: the default applies"
                ));
            }
            if seconds.is_zero() { default } else { seconds }
        };
        let sni_idle = time(
            "sni-listener-idle-timeout",
            self.sni_listener_idle_timeout,
            IDLE,
        );
        let connection_idle = time(
            "tunneling-connection-idle-timeout",
            self.tunneling_connection_idle_timeout,
            IDLE,
        );
        let stream_idle = time(
            "tunneling-stream-idle-timeout",
            self.tunneling_stream_idle_timeout,
            STREAM_IDLE,
        );
        let mut keepalive = |side: &str, idle, interval, probes| Keepalive {
            idle: time(&format!("{side}-tcp-keepalive-time"), idle, KEEPALIVE.idle)
                .min(MAX_KEEPALIVE),
            interval: time(
                &format!("{side}-tcp-keepalive-interval"),
                interval,
                KEEPALIVE.interval,
            )
            .min(MAX_KEEPALIVE),
            probes,
            ..KEEPALIVE
        };
        Limits {
            sni_idle,
            node_port_idle: IDLE,
            connection_idle,
            stream_idle,
            downstream_keepalive: keepalive(
                "downstream",
                self.downstream_tcp_keepalive_time,
                self.downstream_tcp_keepalive_interval,
                downstream_probes,
            ),
            upstream_keepalive: keepalive(
                "upstream",
                self.upstream_tcp_keepalive_time,
                self.upstream_tcp_keepalive_interval,
                upstream_probes,
            ),
        }
    }
}

/// Converts KKP's forms of arguments: Go's flag package treats one dash like two, and KKP's programs have
/// their own names for log formats. The first argument is the program name.
fn as_go_reads(mut args: impl Iterator<Item = OsString>) -> Vec<OsString> {
    let program = args.next();
    let mut read: Vec<OsString> = program.into_iter().collect();
    let mut names_format = false;
    read.extend(args.map(|arg| {
        let Some(text) = arg.to_str() else {
            return arg;
        };
        let text = match names_format {
            true => log_format(text).to_owned(),
            false => as_pflag(text),
        };
        names_format = text == "--log-format";
        OsString::from(text)
    }));
    read
}

fn log_format(name: &str) -> &str {
    match name {
        "JSON" => "json",
        "Console" | "TEXT" => "text",
        other => other,
    }
}

fn as_pflag(arg: &str) -> String {
    let arg = with_two_dashes(arg);
    match arg.strip_prefix("--log-format=") {
        Some(name) => format!("--log-format={}", log_format(name)),
        None => arg,
    }
}

#[cfg(test)]
#[allow(clippy::unwrap_used)]
mod tests {
    use super::*;

    #[test]
    fn negative_times_are_errors() {
        let args = [
            PROGRAM,
            "--drain-timeout=-3s",
            "--drain-delay=-1s",
            "--sni-listener-idle-timeout=-2s",
        ];
        let parsed: Parsed<Flags> = parse(args).unwrap();
        let problems = parsed.flags.validate(Problems::new(&[])).unwrap_err();
        for flag in ["drain-timeout", "drain-delay", "sni-listener-idle-timeout"] {
            let text = format!("{flag} must be >= 0");
            assert!(problems.iter().any(|it| it.contains(&text)), "{problems:?}");
        }
    }
}
