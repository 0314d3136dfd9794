#![allow(clippy::unwrap_used)]

use std::path::PathBuf;
use std::time::Duration;

use culvert_host::flags::{Exit, HostPort};
use culvert_host::net::congestion::LinkCongestion;
use culvert_host::telemetry::logging::LogConfig;
use culvert_host::tls::MinVersion;
use culvert_kube::pace::Pace;
use tempfile::TempDir;

use super::flags::Flags;
use super::*;

/// A folder with the files named by flags.
pub(super) struct Files(TempDir);

impl Files {
    pub(super) fn new() -> Self {
        let dir = tempfile::tempdir().unwrap();
        for name in ["cert", "key", "ca", "kubeconfig"] {
            std::fs::write(dir.path().join(name), "").unwrap();
        }
        Self(dir)
    }

    pub(super) fn path(&self, name: &str) -> PathBuf {
        self.0.path().join(name)
    }

    /// Reads flags; `@name` stands for the path of a file in the folder.
    fn read_with_id(&self, line: &[&str], id: Option<&str>) -> Result<Config, Exit> {
        let root = format!("{}/", self.0.path().display());
        let args = line.iter().map(|arg| arg.replace('@', &root));
        let args: Vec<String> = std::iter::once(PROGRAM.to_owned()).chain(args).collect();
        Flags::read(args, id.map(str::to_owned))
    }

    fn read(&self, line: &[&str]) -> Result<Config, Exit> {
        self.read_with_id(line, None)
    }

    /// Reads flags for a Unix socket front end and agent TLS, followed by `more`.
    pub(super) fn uds(&self, more: &[&str]) -> Result<Config, Exit> {
        self.read(&[&UDS[..], more].concat())
    }

    fn tcp(&self, more: &[&str]) -> Result<Config, Exit> {
        self.read(&[&TCP[..], more].concat())
    }

    /// Returns the error lines of a refused command line, without their prefix.
    pub(super) fn errors(&self, line: &[&str]) -> Vec<String> {
        let exit = self.read(line).unwrap_err();
        assert_eq!(exit.code, 1, "{line:?}");
        let root = format!("{}/", self.0.path().display());
        let lines = exit
            .text
            .lines()
            .filter_map(|line| line.strip_prefix("Error: "));
        lines.map(|line| line.replace(&root, "@")).collect()
    }
}

pub(super) const UDS: [&str; 4] = [
    "--uds-name=/run/s.sock",
    "--server-port=0",
    "--cluster-cert=@cert",
    "--cluster-key=@key",
];
const TCP: [&str; 5] = [
    "--server-cert=@cert",
    "--server-key=@key",
    "--server-ca-cert=@ca",
    "--cluster-cert=@cert",
    "--cluster-key=@key",
];

#[test]
fn syntax_is_checked_without_required_flags_and_files() {
    let check = |args: &[&str]| {
        let line = std::iter::once(PROGRAM).chain(args.iter().copied());
        Config::check_syntax(line).map_err(|exit| (exit.code, exit.text))
    };
    assert_eq!(
        check(&["--graceful-shutdown-timeout=25s", "--cluster-cert=/missing"]),
        Ok(())
    );
    let (code, text) = check(&["--drain-timeout=20s"]).unwrap_err();
    assert_eq!(code, 1);
    assert!(text.contains("unknown flag: --drain-timeout"), "{text}");
    let (code, text) = check(&["--graceful-shutdown-timeout=soon"]).unwrap_err();
    assert_eq!(code, 1);
    assert!(text.contains("invalid argument \"soon\""), "{text}");
}

#[test]
fn defaults_match_the_stock_server() {
    let files = Files::new();
    let config = files.read_with_id(&TCP, Some("from-env")).unwrap();
    let expected = Config {
        mode: Mode::Grpc,
        frontend: Frontend::Tcp {
            bind: HostPort::new("", 8090),
            tls: TlsFiles {
                cert: files.path("cert"),
                key: files.path("key"),
                ca: files.path("ca"),
            },
        },
        agent_listener: AgentListener {
            proxies: Default::default(),
            bind: HostPort::new("", 8091),
            cert: files.path("cert"),
            key: files.path("key"),
            ca: None,
            quic_port: None,
        },
        agent_auth: None,
        agent_id_from: None,
        destinations: Destinations::default(),
        admin: HostPort::new("127.0.0.1", 8095),
        admin_tls: None,
        admin_uds: None,
        openvpn: None,
        switch: switch::Settings::default(),
        health: HostPort::new("", 8092),
        ready_without_agents: false,
        keepalive_time: Duration::from_secs(3600),
        link_congestion: LinkCongestion::Auto,
        resume_grace: Duration::ZERO,
        frontend_keepalive_time: Duration::from_secs(3600),
        server_id: "from-env".to_owned(),
        server_count: 1,
        strategies: vec![Strategy::Default],
        limits: Limits {
            frontend_connections: Some(100_000),
            agents: Some(10_000),
            connections_per_agent: Some(50_000),
            pending_dials: Some(10_000),
        },
        graceful_shutdown_timeout: Duration::ZERO,
        drain_linger: Duration::from_secs(5),
        lease: None,
        tls: TlsOptions::default(),
        xfr_channel_size: 10,
        excess_buffer_bytes: 64 * 1024 * 1024,
        stall_timeout: Duration::from_secs(10),
        worker_threads: 0,
        backend_dial_timeout: None,
        logging: LogConfig::default(),
        warnings: vec![],
    };
    assert_eq!(config, expected);
}

#[test]
fn server_id_comes_from_the_flag_or_the_environment_or_is_random() {
    let files = Files::new();
    let id = |more: &[&str], env| {
        let line = [&UDS[..], more].concat();
        files.read_with_id(&line, env).unwrap().server_id
    };
    assert_eq!(id(&["--server-id=flag"], Some("env")), "flag");
    assert_eq!(id(&[], Some("env")), "env");
    assert_eq!(id(&["--server-id="], Some("env")), "env");
    for env in [None, Some("")] {
        let random = id(&[], env);
        assert_eq!(uuid::Uuid::parse_str(&random).unwrap().get_version_num(), 4);
        assert_ne!(random, id(&[], env));
    }
}

#[test]
fn a_hosting_platforms_server_starts() {
    let files = Files::new();
    let config = files
        .uds(&[
            "--kubeconfig=@kubeconfig",
            "--mode=grpc",
            "--agent-port=8132",
            "--admin-port=8133",
            "--admin-bind-address=0.0.0.0",
            "--health-bind-address=localhost",
            "--health-port=8134",
            "--logtostderr=true",
            "--stderrthreshold=1",
            "-v=3",
            "--enable-profiling=false",
            "--delete-existing-uds-file",
            "--server-id=7f3a",
            "--server-count=3",
            "--proxy-strategies=destHost,defaultRoute,default",
            "--cipher-suites=TLS_ECDHE_ECDSA_WITH_AES_128_GCM_SHA256,TLS_ECDHE_RSA_WITH_CHACHA20_POLY1305_SHA256",
            "--graceful-shutdown-timeout=1ns",
            "--drain-linger=20s",
            "--xfr-channel-size=150",
        ])
        .unwrap();
    assert_eq!(config.agent_listener.bind.to_string(), ":8132");
    assert_eq!(config.admin.to_string(), "0.0.0.0:8133");
    assert_eq!(config.health.to_string(), "localhost:8134");
    assert_eq!(
        (config.server_id.as_str(), config.server_count),
        ("7f3a", 3)
    );
    let strategies = [
        Strategy::DestHost,
        Strategy::DefaultRoute,
        Strategy::Default,
    ];
    assert_eq!(config.strategies, strategies);
    assert_eq!(config.graceful_shutdown_timeout, Duration::from_nanos(1));
    assert_eq!(config.drain_linger, Duration::from_secs(20));
    assert_eq!(config.xfr_channel_size, 150);
    assert_eq!(config.logging.verbosity, 3);
    assert_eq!(
        config.tls.cipher_suites,
        [
            "TLS_ECDHE_ECDSA_WITH_AES_128_GCM_SHA256",
            "TLS_ECDHE_RSA_WITH_CHACHA20_POLY1305_SHA256"
        ]
    );
    assert_eq!(
        config.warnings,
        [
            "--drain-linger is longer than --graceful-shutdown-timeout, which ends the drain first",
            "accepted, without effect here: --kubeconfig (nothing here uses the Kubernetes API)"
        ]
    );
}

#[test]
fn an_http_connect_sidecar_starts() {
    let files = Files::new();
    let config = files
        .tcp(&[
            "--mode",
            "http-connect",
            "--server-port",
            "8090",
            "--agent-port",
            "8091",
            "--health-port",
            "2041",
            "--admin-port",
            "8093",
            "--keepalive-time",
            "30s",
            "--frontend-keepalive-time",
            "30s",
            "--log-file-max-size=0",
            "--cluster-ca-cert",
            "@ca",
            "--backend-dial-timeout=1m",
            "--server-count=-1",
            "--mode=http-connect",
            "--warn-on-channel-limit=false",
        ])
        .unwrap();
    assert_eq!(config.mode, Mode::HttpConnect);
    assert_eq!(config.keepalive_time, Duration::from_secs(30));
    assert_eq!(config.frontend_keepalive_time, Duration::from_secs(30));
    assert_eq!(config.agent_listener.ca, Some(files.path("ca")));
    assert_eq!(config.backend_dial_timeout, Some(Duration::from_secs(60)));
    assert_eq!(config.server_count, -1);
    assert_eq!(config.warnings, Vec::<String>::new());
}

#[test]
fn invalid_values_of_single_flags_are_refused() {
    let files = Files::new();
    let cases = [
        (
            "--mode=http",
            "mode must be set to either 'grpc' or 'http-connect' not \"http\"",
        ),
        (
            "--server-port=1",
            "server port should be set to 0 not 1 for UDS",
        ),
        (
            "--agent-port=8092",
            "--agent-port and --health-port must differ, got 8092 for both",
        ),
        (
            "--agent-port=1023",
            "please do not try to use reserved port 1023 for the agent port",
        ),
        (
            "--agent-port=0",
            "please do not try to use reserved port 0 for the agent port",
        ),
        (
            "--admin-port=-5",
            "please do not try to use reserved port -5 for the admin port",
        ),
        (
            "--health-port=49152",
            "please do not try to use ephemeral port 49152 for the health port",
        ),
        (
            "--cluster-ca-cert=@no",
            "error checking cluster CA cert @no, got stat @no: no such file or directory",
        ),
        (
            "--cluster-key=",
            "cannot have cluster key empty when cluster cert is set to \"@cert\"",
        ),
        (
            "--cluster-cert=",
            "cannot have cluster cert empty when cluster key is set to \"@key\"",
        ),
        (
            "--kubeconfig=@no",
            "error checking kubeconfig @no, got stat @no: no such file or directory",
        ),
        (
            "--enable-contention-profiling",
            "if --enable-contention-profiling is set, --enable-profiling must also be set",
        ),
        ("--proxy-strategies=", "ProxyStrategies cannot be empty"),
        ("--proxy-strategies=,", "ProxyStrategies cannot be empty"),
        (
            "--proxy-strategies=default,desthost",
            "invalid proxy strategies: unknown proxy strategy: desthost",
        ),
        (
            "--proxy-strategies=default, destHost",
            "invalid proxy strategies: unknown proxy strategy:  destHost",
        ),
        (
            "--cipher-suites=[]",
            "cipher suite [] not supported, doesn't exist or considered as insecure",
        ),
        (
            "--xfr-channel-size=0",
            "channel size 0 must be greater than 0",
        ),
        (
            "--frontend-write-channel-size=0",
            "frontend write channel size 0 must be greater than 0",
        ),
        (
            "--tls-min-version=1.2",
            "unsupported TLS version \"1.2\", supported values are: VersionTLS10, VersionTLS11, VersionTLS12, \
             VersionTLS13",
        ),
        (
            "--admin-uds=/run/s.sock",
            "--admin-uds and --uds-name must be different paths",
        ),
        (
            "--lease-label=x",
            "--lease-label: invalid label format: \"x\", expected key=value",
        ),
        (
            "--lease-label=",
            "--lease-label: invalid label format: \"\", expected key=value",
        ),
        (
            "--graceful-shutdown-timeout=-1s",
            "graceful-shutdown-timeout must be >= 0, got -1s",
        ),
        ("--drain-linger=-1s", "drain-linger must be >= 0, got -1s"),
        (
            "--backend-dial-timeout=-1m",
            "backend-dial-timeout must be >= 0, got -1m0s",
        ),
        (
            "--tunnel-mode=vpn",
            "--tunnel-mode: unknown tunnel mode \"vpn\"; expected konnectivity, openvpn, prefer-konnectivity or \
             prefer-openvpn",
        ),
        (
            "--tunnel-mode=openvpn",
            "--tunnel-mode: the tunnel mode openvpn needs an OpenVPN tunnel, and this server has none configured; \
             konnectivity and prefer-konnectivity are possible",
        ),
        (
            "--tunnel-mode=prefer-openvpn",
            "--tunnel-mode: the tunnel mode prefer-openvpn needs an OpenVPN tunnel, and this server has none \
             configured; konnectivity and prefer-konnectivity are possible",
        ),
        (
            "--tunnel-state-file=@no/state",
            "--tunnel-state-file: there is no folder @no; create it",
        ),
        ("--tunnel-drain=-1s", "tunnel-drain must be >= 0, got -1s"),
        (
            "--admin-ca-cert=@ca",
            "--admin-cert, --admin-key and --admin-ca-cert must be set together",
        ),
        (
            "--server-id=a\nb",
            "--server-id must be printable ASCII, got \"a\\nb\"",
        ),
    ];
    for (flag, expected) in cases {
        assert_eq!(
            files.errors(&[&UDS[..], &[flag]].concat()),
            [expected],
            "{flag}"
        );
    }
}

#[test]
fn incomplete_flags_of_a_tcp_front_end_are_refused() {
    let files = Files::new();
    let without = |flag: &str| -> Vec<&str> {
        TCP.into_iter()
            .filter(|arg| !arg.starts_with(flag))
            .collect()
    };
    assert_eq!(
        files.errors(&without("--server-ca-cert=")),
        ["server ca cert must be set when in TCP mode (uds-name is empty)"]
    );
    assert_eq!(
        files.errors(&without("--server-cert=")),
        ["cannot have server cert empty when server key is set to \"@key\""]
    );
    let bare = [
        "--server-ca-cert=@ca",
        "--cluster-cert=@cert",
        "--cluster-key=@key",
    ];
    assert_eq!(
        files.errors(&bare),
        ["--server-cert and --server-key must be set when in TCP mode (uds-name is empty)"]
    );
    assert_eq!(
        files.errors(&[&TCP[..], &["--server-port=0"]].concat()),
        ["please do not try to use reserved port 0 for the server port"]
    );
    assert_eq!(
        files.errors(&[&TCP[..], &["--server-cert=@no"]].concat()),
        ["error checking server cert @no, got stat @no: no such file or directory"]
    );
}

#[test]
fn all_problems_are_reported_at_once() {
    let files = Files::new();
    assert_eq!(
        files.errors(&[
            "--uds-name=/x",
            "--server-ca-cert=@ca",
            "--agent-port=80",
            "--xfr-channel-size=-1"
        ]),
        [
            "server port should be set to 0 not 8090 for UDS",
            "server ca cert should not be set for UDS",
            "--cluster-cert and --cluster-key must be set: agents are served over TLS only",
            "please do not try to use reserved port 80 for the agent port",
            "channel size -1 must be greater than 0",
        ]
    );
}

#[test]
fn token_authentication_takes_all_three_flags_or_none() {
    let files = Files::new();
    let all = [
        "--agent-namespace=n",
        "--agent-service-account=s",
        "--authentication-audience=a",
        "--kubeconfig=@kubeconfig",
    ];
    let config = files.uds(&all).unwrap();
    let expected = AgentAuth {
        namespace: "n".to_owned(),
        service_account: "s".to_owned(),
        audience: "a".to_owned(),
        kubeconfig: Some(files.path("kubeconfig")),
        pace: None,
    };
    assert_eq!(config.agent_auth, Some(expected));
    assert_eq!(config.warnings, [""; 0]);
    let described = config.describe();
    assert!(
        described.contains(&"agent-namespace=n".to_owned()),
        "{described:?}"
    );

    assert_eq!(
        files.errors(
            &[
                &UDS[..],
                &["--agent-service-account=s", "--cluster-ca-cert=@ca"]
            ]
            .concat()
        ),
        [
            "--cluster-ca-cert can not be used when agent authentication is enabled",
            "--agent-namespace cannot be empty when agent authentication is enabled",
            "--authentication-audience cannot be empty when agent authentication is enabled",
        ]
    );
}

#[test]
fn lease_is_kept_only_if_requested() {
    let files = Files::new();
    let read = |line: &[&str]| files.uds(line).unwrap();
    let unused = read(&["--lease-namespace=n", "--lease-label=a=b"]);
    assert_eq!((unused.lease, unused.warnings), (None, vec![]));
    let lease = read(&["--enable-lease-controller"]).lease.unwrap();
    assert_eq!(lease.namespace, "kube-system");
    assert_eq!(lease.selector(), "k8s-app=konnectivity-server");
    assert_eq!(lease.kubeconfig, None);
    let config = read(&[
        "--enable-lease-controller",
        "--lease-namespace=n",
        "--lease-label=c=d, a=b",
        "--kubeconfig=@kubeconfig",
        "--server-id=konnectivity-server-0",
    ]);
    let lines = config.describe();
    let kubeconfig = format!("kubeconfig={}", files.path("kubeconfig").display());
    for expected in [
        "enable-lease-controller=true",
        "lease-namespace=n",
        "lease-label=a=b,c=d",
        &kubeconfig,
    ] {
        assert!(
            lines.iter().any(|line| line == expected),
            "{expected} in {lines:?}"
        );
    }
    assert_eq!(config.warnings, [""; 0]);
}

#[test]
fn a_grace_time_beyond_the_limit_for_closing_connections_causes_a_warning() {
    let files = Files::new();
    for (grace, expected) in [("30s", 0), ("31s", 1)] {
        let flag = format!("--resume-grace={grace}");
        let warnings = files.uds(&[&flag]).unwrap().warnings;
        assert_eq!(warnings.len(), expected, "{warnings:?}");
        assert!(warnings.iter().all(|text| text.contains("30s")));
    }
}

#[test]
fn unusable_names_of_leases_are_reported_at_start() {
    let files = Files::new();
    let line = ["--enable-lease-controller", "--server-id=Server 1"];
    let warnings = files.uds(&line).unwrap().warnings;
    assert!(
        matches!(warnings.as_slice(), [text] if text.starts_with("--server-id=Server 1: Kubernetes refuses")),
        "{warnings:?}"
    );
    let line = ["--enable-lease-controller", "--lease-namespace="];
    assert_eq!(
        files.errors(&[&UDS[..], &line].concat()),
        ["--lease-namespace cannot be empty with --enable-lease-controller"]
    );
}

#[test]
fn flags_without_effect_are_named_in_warnings() {
    let files = Files::new();
    let config = files
        .uds(&[
            "--enable-profiling",
            "--enable-contention-profiling",
            "--kubeconfig=@kubeconfig",
            "--kubeconfig-qps=75",
            "--kubeconfig-burst=150",
            "--kube-api-content-type=application/json",
            "--frontend-write-channel-size=20",
            "--vmodule=a=1",
        ])
        .unwrap();
    assert_eq!(
        config.warnings,
        [
            "--kubeconfig-qps and --kubeconfig-burst have no effect: without --agent-namespace there are no TokenReviews",
            "--enable-profiling and --enable-contention-profiling have no effect: this program has no pprof profiles; \
             use `perf record -g -p PID` on the node, and the metrics process_*",
            "accepted, without effect here: --kubeconfig (nothing here uses the Kubernetes API), --frontend-write-channel-size (buffers are bounded in bytes by \
             --xfr-channel-size), --kube-api-content-type (requests are JSON), --vmodule (it names files of the stock \
             program; -v sets the verbosity of the whole program)",
        ]
    );
}

#[test]
fn kubeconfig_qps_and_burst_limit_token_reviews() {
    let files = Files::new();
    let auth = [
        "--agent-namespace=n",
        "--agent-service-account=s",
        "--authentication-audience=a",
    ];
    let pace = |flags: &[&str]| {
        let config = files.uds(&[&auth, flags].concat()).unwrap();
        (config.agent_auth.unwrap().pace, config.warnings)
    };
    let limit = |interval, burst| {
        let interval = Duration::from_millis(interval);
        (Some(Pace { interval, burst }), Vec::new())
    };
    assert_eq!(pace(&[]), (None, Vec::new()));
    assert_eq!(pace(&["--kubeconfig-qps=-1"]), (None, Vec::new()));
    assert_eq!(pace(&["--kubeconfig-qps=4"]), limit(250, 10));
    let both = ["--kubeconfig-qps=0.5", "--kubeconfig-burst=150"];
    assert_eq!(pace(&both), limit(2000, 150));
    let (none, warnings) = pace(&["--kubeconfig-burst=150"]);
    assert_eq!((none, warnings.len()), (None, 1), "{warnings:?}");
    for flag in [
        "--kubeconfig-qps=NaN",
        "--kubeconfig-qps=inf",
        "--kubeconfig-qps=1e-9",
        "--kubeconfig-burst=-1",
    ] {
        let problems = files.errors(&[&UDS[..], &auth, &[flag]].concat());
        let name = flag.split('=').next().unwrap();
        assert_eq!(problems.len(), 1, "{problems:?}");
        assert!(problems.concat().contains(name), "{problems:?}");
    }
}

#[test]
fn out_of_range_values_are_adjusted_with_a_warning() {
    let files = Files::new();
    let config = files
        .uds(&[
            "--keepalive-time=5ms",
            "--frontend-keepalive-time=0",
            "--xfr-channel-size=9999999999",
            "stray",
        ])
        .unwrap();
    assert_eq!(config.keepalive_time, KEEPALIVE_FLOOR);
    assert_eq!(config.frontend_keepalive_time, Duration::from_secs(7200));
    assert_eq!(config.xfr_channel_size, XFR_CHANNEL_SIZE_MAX);
    assert_eq!(
        config.warnings,
        [
            "ignored arguments that are not flags: stray",
            "--xfr-channel-size=9999999999 is lowered to 1048576",
            "--keepalive-time=5ms is raised to 1s",
        ]
    );
}

#[test]
fn tls_flags_limit_version_and_cipher_suites() {
    const GCM: &str = "TLS_ECDHE_RSA_WITH_AES_128_GCM_SHA256";
    const CBC: &str = "TLS_ECDHE_RSA_WITH_AES_128_CBC_SHA";
    let files = Files::new();
    let limits = |min: &str, suites: &str| {
        let (min, suites) = (
            format!("--tls-min-version={min}"),
            format!("--cipher-suites={suites}"),
        );
        files
            .uds(&[&min, &suites])
            .map(|config| (config.tls, config.warnings))
    };
    let (tls, warnings) = limits("", "").unwrap();
    assert_eq!((tls, warnings), (TlsOptions::default(), vec![]));

    let (tls, warnings) = limits("VersionTLS10", &format!("{CBC},{GCM},{GCM}")).unwrap();
    assert_eq!(tls.min_version, MinVersion::Tls12);
    assert_eq!(tls.cipher_suites, [GCM]);
    assert_eq!(
        warnings,
        [
            "--tls-min-version=VersionTLS10 is below TLS 1.2, which is the lowest version spoken here".to_owned(),
            format!("cipher suites not available here, left out: {CBC}"),
        ]
    );

    let (tls, _) = limits("VersionTLS13", CBC).unwrap();
    assert_eq!(
        tls,
        TlsOptions {
            min_version: MinVersion::Tls13,
            cipher_suites: vec![]
        }
    );
    let (tls, _) = limits("VersionTLS12", "TLS_AES_128_GCM_SHA256").unwrap();
    assert_eq!(tls.cipher_suites, ["TLS_AES_128_GCM_SHA256"]);

    let refusal = limits("", CBC).unwrap_err().text;
    assert!(
        refusal
            .starts_with("Error: none of the cipher suites of --cipher-suites is available here"),
        "{refusal}"
    );
}

#[test]
fn unknown_flags_are_errors_but_help_and_version_are_not() {
    let files = Files::new();
    let exit = files.uds(&["--bogus"]).unwrap_err();
    assert_eq!(exit.code, 1);
    assert!(
        exit.text.starts_with("Error: unknown flag: --bogus\n"),
        "{}",
        exit.text
    );
    let help = files.read(&["--help"]).unwrap_err();
    assert_eq!(help.code, 0);
    assert!(help.text.contains("--uds-name <PATH>"), "{}", help.text);
    assert_eq!(files.read(&["--version"]).unwrap_err().code, 0);
}

#[test]
fn effective_options_are_described() {
    let files = Files::new();
    let config = files
        .uds(&[
            "--server-id=s",
            "--keepalive-time=90s",
            "--tls-min-version=VersionTLS13",
            "--health-bind-address=::1",
        ])
        .unwrap();
    let lines = config.describe();
    for expected in [
        "mode=grpc",
        "uds-name=/run/s.sock",
        "delete-existing-uds-file=true",
        "agent-bind=:8091",
        "cluster-ca-cert=",
        "health-bind=[::1]:8092",
        "keepalive-time=1m30s",
        "frontend-keepalive-time=1h0m0s",
        "server-id=s",
        "server-count=1",
        "tls-min-version=VersionTLS13",
        "backend-dial-timeout=0s",
        "v=4",
    ] {
        assert!(
            lines.iter().any(|line| line == expected),
            "{expected} in {lines:?}"
        );
    }
    let lines = files.tcp(&[]).unwrap().describe();
    assert!(
        lines.iter().any(|line| line == "server-bind=:8090"),
        "{lines:?}"
    );
}

#[test]
fn tunnel_choice_flags_are_read() {
    let files = Files::new();
    let config = files
        .uds(&[
            "--tunnel-mode=prefer-konnectivity",
            "--tunnel-mode-file=@not-there-yet",
            "--tunnel-state-file=@state",
            "--tunnel-drain=90s",
            "--admin-uds=@admin.socket",
            "--admin-cert=@cert",
            "--admin-key=@key",
            "--admin-ca-cert=@ca",
        ])
        .unwrap();
    let expected = switch::Settings {
        mode: crate::tunnel::Mode::PreferKonnectivity,
        mode_file: Some(files.path("not-there-yet")),
        state_file: Some(files.path("state")),
        drain: Duration::from_secs(90),
    };
    assert_eq!(config.switch, expected);
    assert_eq!(config.admin_uds, Some(files.path("admin.socket")));
    assert_eq!(config.admin_tls.as_ref().unwrap().ca, files.path("ca"));
    let lines = config.describe();
    for expected in ["tunnel-mode=prefer-konnectivity", "tunnel-drain=1m30s"] {
        assert!(lines.iter().any(|line| line == expected), "{lines:?}");
    }
}

#[test]
fn admin_ca_of_another_listener_causes_a_warning() {
    let files = Files::new();
    std::fs::write(files.path("ca"), "certificates").unwrap();
    let admin = [
        "--admin-cert=@cert",
        "--admin-key=@key",
        "--admin-ca-cert=@ca",
    ];
    let warns = |others: &[&str]| {
        let config = files.uds(&[&admin, others].concat()).unwrap();
        let text = "--admin-ca-cert is the CA of --cluster-ca-cert";
        config.warnings.iter().any(|line| line.starts_with(text))
    };
    assert!(!warns(&[]));
    assert!(warns(&["--cluster-ca-cert=@ca"]));
}

#[test]
fn bounds_of_slow_connections_are_read_and_checked() {
    let files = Files::new();
    let config = files
        .uds(&["--excess-buffer-bytes=0", "--stall-timeout=1m30s"])
        .unwrap();
    assert_eq!(config.excess_buffer_bytes, 0);
    assert_eq!(config.stall_timeout, Duration::from_secs(90));
    let refusal = files
        .uds(&[
            "--excess-buffer-bytes=-1",
            "--stall-timeout=0",
            "--worker-threads=1025",
        ])
        .unwrap_err()
        .text;
    for problem in [
        "excess-buffer-bytes must be >= 0, got -1",
        "stall-timeout must be > 0, got 0s",
        "worker-threads must be 0 to 1024, got 1025",
    ] {
        assert!(refusal.contains(problem), "{problem} in {refusal}");
    }
}

#[test]
fn destinations_are_read_from_repeated_lists() {
    let files = Files::new();
    let config = files
        .uds(&[
            "--allow-destinations=10.0.0.0/8:443,[fd00::/8]:1-1024",
            "--allow-destinations=*:10250",
            "--deny-destinations=10.0.0.1",
        ])
        .unwrap();
    let lines = config.describe();
    let allow = "allow-destinations=10.0.0.0/8:443,[fd00::/8]:1-1024,*:10250";
    assert!(lines.contains(&allow.to_owned()), "{lines:?}");
    assert!(lines.contains(&"deny-destinations=10.0.0.1/32".to_owned()));
    let allows = |address: &str| config.destinations.check(address.parse().unwrap()).is_ok();
    assert!(allows("169.254.169.254:10250") && !allows("10.0.0.1:443"));
}

#[test]
fn agent_ids_need_the_authentication_that_proves_them() {
    let files = Files::new();
    let tokens = [
        "--agent-namespace=n",
        "--agent-service-account=a",
        "--authentication-audience=x",
    ];
    let from = |more: &[&str]| files.uds(more).unwrap().agent_id_from;
    assert_eq!(from(&["--agent-id-from="]), None);
    let certificate = ["--agent-id-from=certificate", "--cluster-ca-cert=@ca"];
    assert_eq!(from(&certificate), Some(AgentIdFrom::Certificate));
    let token = [&["--agent-id-from=token"], &tokens[..]].concat();
    assert_eq!(from(&token), Some(AgentIdFrom::Token));
    let lines = files.uds(&token).unwrap().describe();
    assert!(lines.contains(&"agent-id-from=token".to_owned()));

    let wrong = [&["--agent-id-from=certificate"], &tokens[..]].concat();
    let cases: [(&[&str], &str); 3] = [
        (
            &wrong,
            "--agent-id-from=certificate needs --cluster-ca-cert",
        ),
        (
            &["--agent-id-from=token", "--cluster-ca-cert=@ca"],
            "--agent-id-from=token needs --agent-namespace",
        ),
        (
            &["--agent-id-from=header"],
            "--agent-id-from must be certificate, token or empty, got \"header\"",
        ),
    ];
    for (more, start) in cases {
        let errors = files.errors(&[&UDS[..], more].concat());
        assert!(
            matches!(errors.as_slice(), [error] if error.starts_with(start)),
            "{errors:?}"
        );
    }
}

#[test]
fn limit_of_zero_means_no_limit() {
    let files = Files::new();
    let config = files.uds(&[
        "--max-agents=0",
        "--max-connections-per-agent=5",
        "--max-pending-dials=7",
        "--proxy-strategies=cidr,default,cidr",
    ]);
    let config = config.unwrap();
    let expected = Limits {
        frontend_connections: Some(100_000),
        agents: None,
        connections_per_agent: Some(5),
        pending_dials: Some(7),
    };
    assert_eq!(config.limits, expected);
    assert_eq!(config.strategies, [Strategy::Cidr, Strategy::Default]);
    let problems = files.errors(&[&UDS[..], &["--max-agents=-1"]].concat());
    assert_eq!(problems, ["--max-agents must be >= 0, got -1"]);
}
