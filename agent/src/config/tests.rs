#![allow(clippy::unwrap_used)]

use std::path::PathBuf;
use std::time::Duration;

use culvert_host::flags::{Exit, HostPort};
use culvert_host::net::congestion::LinkCongestion;
use culvert_host::telemetry::logging::LogConfig;
use tempfile::TempDir;

use super::flags::Flags;
use super::*;

/// A folder with the files that flags refer to.
struct Files(TempDir);

impl Files {
    fn new() -> Self {
        let dir = tempfile::tempdir().unwrap();
        for name in ["cert", "key", "ca", "token", "kubeconfig"] {
            std::fs::write(dir.path().join(name), "").unwrap();
        }
        Self(dir)
    }

    fn path(&self, name: &str) -> PathBuf {
        self.0.path().join(name)
    }

    /// Parses the flags after `--ca-cert`. `@name` in a flag is replaced by the path of the file `name`.
    fn read_with_id(&self, line: &[&str], id: Option<&str>) -> Result<Config, Exit> {
        let root = format!("{}/", self.0.path().display());
        let args = [PROGRAM, "--ca-cert=@ca"].iter().chain(line);
        let args: Vec<String> = args.map(|arg| arg.replace('@', &root)).collect();
        Flags::read(args, id.map(str::to_owned))
    }

    fn read(&self, line: &[&str]) -> Result<Config, Exit> {
        self.read_with_id(line, None)
    }

    /// Returns the error lines for an invalid command line, without their prefix.
    fn errors(&self, line: &[&str]) -> Vec<String> {
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

#[test]
fn a_grace_time_beyond_the_limit_for_closing_connections_causes_a_warning() {
    let files = Files::new();
    for (grace, expected) in [("30s", 0), ("31s", 1)] {
        let flag = format!("--resume-grace={grace}");
        let warnings = files.read(&[&flag]).unwrap().warnings;
        assert_eq!(warnings.len(), expected, "{warnings:?}");
        assert!(warnings.iter().all(|text| text.contains("30s")));
    }
}

#[test]
fn defaults_match_the_stock_agent() {
    let files = Files::new();
    let expected = Config {
        server_host: "127.0.0.1".to_owned(),
        server_port: 8091,
        server_address: None,
        ca_cert: Some(files.path("ca")),
        client_cert: None,
        alpn: vec![],
        health: HostPort::new("", 8093),
        admin: HostPort::new("127.0.0.1", 8094),
        agent_id: "from-env".to_owned(),
        agent_identifiers: String::new(),
        sync_interval: Duration::from_secs(1),
        sync_interval_cap: Duration::from_secs(10),
        keepalive_time: Duration::from_secs(3600),
        token_path: None,
        sync_forever: false,
        xfr_channel_size: 150,
        excess_buffer_bytes: 8 * 1024 * 1024,
        stall_timeout: Duration::from_secs(10),
        server_count_source: ServerCountSource::Default,
        leases: None,
        drain_timeout: Duration::from_secs(25),
        drain_linger: Duration::from_secs(5),
        link_congestion: LinkCongestion::Auto,
        transport: LinkTransport::Auto,
        resume_grace: Duration::ZERO,
        destinations: Destinations::of_agent(),
        openvpn: None,
        logging: LogConfig::default(),
        warnings: vec![],
    };
    assert_eq!(files.read_with_id(&[], Some("from-env")).unwrap(), expected);
}

#[test]
fn agent_id_comes_from_flag_then_environment_then_random() {
    let files = Files::new();
    let id = |line: &[&str], env| files.read_with_id(line, env).unwrap().agent_id;
    assert_eq!(id(&["--agent-id=flag"], Some("env")), "flag");
    assert_eq!(id(&[], Some("env")), "env");
    assert_eq!(id(&["--agent-id="], Some("env")), "env");
    for env in [None, Some("")] {
        let random = id(&[], env);
        assert_eq!(uuid::Uuid::parse_str(&random).unwrap().get_version_num(), 4);
    }
}

/// The stock test suite starts foreign agents with every flag, including hidden flags and empty values.
#[test]
fn all_flags_together_are_accepted() {
    let files = Files::new();
    let config = files
        .read(&[
            "--agent-cert=@cert",
            "--agent-key=@key",
            "--proxy-server-host=127.0.0.1",
            "--proxy-server-port=40001",
            "--alpn-proto=[]",
            "--health-server-host=",
            "--health-server-port=40002",
            "--admin-bind-address=127.0.0.1",
            "--admin-server-port=40003",
            "--enable-profiling=false",
            "--enable-contention-profiling=false",
            "--agent-id=a1",
            "--agent-identifiers=",
            "--sync-interval=100ms",
            "--probe-interval=100ms",
            "--sync-interval-cap=1s",
            "--keepalive-time=1h0m0s",
            "--service-account-token-path=",
            "--warn-on-channel-limit=false",
            "--sync-forever=false",
            "--xfr-channel-size=150",
            "--count-server-leases=false",
            "--lease-namespace=kube-system",
            "--lease-label=k8s-app=konnectivity-server",
            "--lease-label-selector=k8s-app=konnectivity-server",
            "--server-count-source=default",
            "--kubeconfig=",
            "--kube-api-content-type=application/vnd.kubernetes.protobuf",
        ])
        .unwrap();
    let (cert, key) = (files.path("cert"), files.path("key"));
    assert_eq!(config.client_cert, Some(ClientCert { cert, key }));
    assert_eq!(config.alpn, Vec::<String>::new());
    assert_eq!(config.server_port, 40001);
    assert_eq!((config.health.port, config.admin.port), (40002, 40003));
    assert_eq!(config.sync_interval, Duration::from_millis(100));
    assert_eq!(config.sync_interval_cap, Duration::from_secs(1));
    assert_eq!(config.warnings, Vec::<String>::new());
}

#[test]
fn command_lines_of_hosting_platforms_are_accepted() {
    let files = Files::new();
    let config = files
        .read(&[
            "--logtostderr=true",
            "--proxy-server-host=konnectivity.example",
            "--proxy-server-port=30443",
            "--admin-server-port=8133",
            "--health-server-port=8134",
            "--service-account-token-path=@token",
            "--sync-forever=true",
            "-v=3",
        ])
        .unwrap();
    assert_eq!(config.token_path, Some(files.path("token")));
    assert!(config.sync_forever);
    assert_eq!(config.warnings, Vec::<String>::new());

    let config = files
        .read(&[
            "--keepalive-time",
            "30s",
            "--probe-interval",
            "5s",
            "--sync-interval",
            "5s",
            "--sync-interval-cap",
            "30s",
            "--v",
            "3",
            "--agent-identifiers",
            "ipv4=1.2.3.4&ipv4=5.6.7.8&default-route=true",
            "--alpn-proto=a,b",
            "--alpn-proto",
            "c",
            "--drain-timeout=1m",
            "--drain-linger=0",
        ])
        .unwrap();
    assert_eq!(config.keepalive_time, Duration::from_secs(30));
    assert_eq!(
        config.agent_identifiers,
        "ipv4=1.2.3.4&ipv4=5.6.7.8&default-route=true"
    );
    assert_eq!(config.alpn, ["a", "b", "c"]);
    assert_eq!(config.drain_timeout, Duration::from_secs(60));
    assert_eq!(config.drain_linger, Duration::ZERO);
}

#[test]
fn invalid_flags_are_rejected_with_a_reason() {
    let files = Files::new();
    let cases = [
        (
            "--agent-cert=@cert",
            "cannot have agent key empty when agent cert is set to \"@cert\"",
        ),
        (
            "--agent-key=@key",
            "cannot have agent cert empty when agent key is set to \"@key\"",
        ),
        (
            "--ca-cert=@no",
            "error checking agent CA cert @no, got stat @no: no such file or directory",
        ),
        (
            "--ca-cert=",
            "--ca-cert must be set: the system's CAs are not used",
        ),
        (
            "--proxy-server-port=0",
            "proxy server port 0 must be greater than 0",
        ),
        (
            "--health-server-port=-1",
            "health server port -1 must be greater than 0",
        ),
        (
            "--admin-server-port=65536",
            "admin server port 65536 must not be greater than 65535",
        ),
        (
            "--enable-contention-profiling",
            "if --enable-contention-profiling is set, --enable-profiling must also be set",
        ),
        (
            "--sync-interval=11s",
            "sync interval 11s must be less than sync interval cap 10s",
        ),
        (
            "--service-account-token-path=@no",
            "error checking service account token path @no, got stat @no: no such file or directory",
        ),
        (
            "--agent-identifiers=uid=1",
            "agent address is invalid: unknown address type: uid",
        ),
        (
            "--agent-identifiers=host=\u{e4}",
            "--agent-identifiers must be printable ASCII, got \"host=\u{e4}\"",
        ),
        (
            "--agent-id=\u{e4}",
            "--agent-id must be printable ASCII, got \"\u{e4}\"",
        ),
        (
            "--xfr-channel-size=0",
            "channel size 0 must be greater than 0",
        ),
        (
            "--server-count-source=min",
            "--server-count-source must be one of '', 'default', 'max', got min",
        ),
        (
            "--alpn-proto=a,,b",
            "--alpn-proto: a name must have 1 to 255 bytes, got \"\"",
        ),
        (
            "--kubeconfig=@no",
            "error checking kubeconfig @no, got stat @no: no such file or directory",
        ),
        ("--drain-timeout=-1s", "drain-timeout must be >= 0, got -1s"),
        (
            "--graceful-shutdown-timeout=-1s",
            "graceful-shutdown-timeout must be >= 0, got -1s",
        ),
        ("--drain-linger=-1s", "drain-linger must be >= 0, got -1s"),
        (
            "--lease-label-selector=a in b",
            "invalid argument \"a in b\" for \"--lease-label-selector\" flag: invalid label key \"a in b\": expected \
             [dns.prefix/]name, the name at most 63 of [A-Za-z0-9._-] with a letter or digit at both ends",
        ),
    ];
    for (flag, expected) in cases {
        assert_eq!(files.errors(&[flag]), [expected], "{flag}");
    }
}

#[test]
fn listeners_with_one_port_are_refused_unless_their_hosts_differ() {
    let files = Files::new();
    let ports = ["--health-server-port=8200", "--admin-server-port=8200"];
    let error = "--health-server-port and --admin-server-port must differ, got 8200 for both";
    assert_eq!(files.errors(&ports), [error]);
    files
        .read(&[&ports[..], &["--health-server-host=192.0.2.1"]].concat())
        .unwrap();
}

#[test]
fn all_problems_are_reported_at_once() {
    let files = Files::new();
    assert_eq!(
        files.errors(&[
            "--proxy-server-port=0",
            "--agent-identifiers=x=1",
            "--xfr-channel-size=-1"
        ]),
        [
            "proxy server port 0 must be greater than 0",
            "agent address is invalid: unknown address type: x",
            "channel size -1 must be greater than 0",
        ]
    );
}

#[test]
fn flags_without_effect_are_named_in_warnings() {
    let files = Files::new();
    let config = files
        .read(&[
            "--kube-api-content-type=application/json",
            "--enable-profiling",
            "--enable-contention-profiling",
            "--warn-on-channel-limit",
            "--log-backtrace-at=x.go:1",
        ])
        .unwrap();
    assert_eq!(
        config.warnings,
        [
            "--enable-profiling and --enable-contention-profiling have no effect: this program has no pprof profiles; \
             use `perf record -g -p PID` on the node, and the metrics process_*",
            "accepted, without effect here: --warn-on-channel-limit (a full buffer delays only its own connection; \
             culvert_excess_buffer_bytes counts its bytes), --kube-api-content-type (requests are JSON), --log-backtrace-at (it names a line of the stock \
             program)",
        ]
    );
}

#[test]
fn leases_are_counted_only_if_requested() {
    let files = Files::new();
    let read = |line: &[&str]| files.read(line).unwrap();
    let unused = read(&["--lease-namespace=n", "--kubeconfig=@kubeconfig"]);
    assert_eq!((unused.leases, unused.warnings), (None, vec![]));
    let config = read(&["--count-server-leases"]);
    let expected = LeaseCount {
        namespace: "kube-system".to_owned(),
        selector: "k8s-app=konnectivity-server".to_owned(),
        kubeconfig: None,
    };
    assert_eq!(config.leases, Some(expected));
    let config = read(&[
        "--count-server-leases",
        "--lease-namespace=n",
        "--lease-label-selector=a in (b, c)",
        "--kubeconfig=@kubeconfig",
        "--server-count-source=max",
    ]);
    let lines = config.describe();
    let kubeconfig = format!("kubeconfig={}", files.path("kubeconfig").display());
    for expected in [
        "count-server-leases=true",
        "lease-namespace=n",
        "lease-label-selector=a in (b, c)",
        "server-count-source=max",
        &kubeconfig,
    ] {
        assert!(
            lines.iter().any(|line| line == expected),
            "{expected} in {lines:?}"
        );
    }
    assert_eq!(config.server_count_source, ServerCountSource::Max);
    assert_eq!(config.warnings, [""; 0]);
}

#[test]
fn lease_label_is_an_alias_of_lease_label_selector() {
    let files = Files::new();
    let selector = |last: &[&str]| {
        let line = [&["--count-server-leases"], last].concat();
        files.read(&line).unwrap().leases.unwrap().selector
    };
    let both = ["--lease-label=a=b", "--lease-label-selector=c=d"];
    assert_eq!(selector(&both[..1]), "a=b");
    assert_eq!(selector(&both), "c=d");
    assert_eq!(selector(&[both[1], both[0]]), "a=b");
    let help = files.read(&["--help"]).unwrap_err();
    assert_eq!(help.code, 0);
    assert!(!help.text.contains("--lease-label "), "{}", help.text);
}

#[test]
fn graceful_shutdown_timeout_is_another_name_of_drain_timeout() {
    let files = Files::new();
    let drain = |line: &[&str]| files.read(line).unwrap().drain_timeout;
    let both = ["--graceful-shutdown-timeout=35s", "--drain-timeout=40s"];
    assert_eq!(drain(&both[..1]), Duration::from_secs(35));
    assert_eq!(drain(&both), Duration::from_secs(40));
    assert_eq!(drain(&[both[1], both[0]]), Duration::from_secs(40));
}

#[test]
fn too_small_intervals_are_raised_with_a_warning() {
    let files = Files::new();
    let config = files
        .read(&[
            "--sync-interval=0",
            "--sync-interval-cap=0",
            "--keepalive-time=1s",
        ])
        .unwrap();
    assert_eq!(config.sync_interval, INTERVAL_FLOOR);
    assert_eq!(config.sync_interval_cap, INTERVAL_FLOOR);
    assert_eq!(config.keepalive_time, KEEPALIVE_FLOOR);
    assert_eq!(
        config.warnings,
        [
            "--sync-interval=0s is raised to 10ms",
            "--keepalive-time=1s is raised to 10s",
            "--keepalive-time=1s: a stock server is pinged every 31s, because a stock server closes connections that ping more often",
        ]
    );
}

#[test]
fn describe_lists_effective_options() {
    let files = Files::new();
    let config = files
        .read(&[
            "--agent-id=a",
            "--agent-identifiers=host=n1",
            "--service-account-token-path=@token",
        ])
        .unwrap();
    let lines = config.describe();
    let token = format!(
        "service-account-token-path={}",
        files.path("token").display()
    );
    for expected in [
        "proxy-server-host=127.0.0.1",
        "agent-id=a",
        "agent-identifiers=host=n1",
        "sync-interval-cap=10s",
        "keepalive-time=1h0m0s",
        "drain-timeout=25s",
        "server-count-source=default",
        "count-server-leases=false",
        &token,
    ] {
        assert!(
            lines.iter().any(|line| line == expected),
            "{expected} in {lines:?}"
        );
    }
}

#[test]
fn bounds_of_slow_connections_are_checked() {
    let files = Files::new();
    let config = files
        .read(&["--excess-buffer-bytes=0", "--stall-timeout=1m30s"])
        .unwrap();
    assert_eq!(config.excess_buffer_bytes, 0);
    assert_eq!(config.stall_timeout, Duration::from_secs(90));
    let refusal = files
        .read(&["--excess-buffer-bytes=-1", "--stall-timeout=0"])
        .unwrap_err()
        .text;
    for problem in [
        "excess-buffer-bytes must be >= 0, got -1",
        "stall-timeout must be > 0, got 0s",
    ] {
        assert!(refusal.contains(problem), "{problem} in {refusal}");
    }
}

#[test]
fn destinations_are_read_from_repeated_lists() {
    let files = Files::new();
    let read = |line: &[&str]| files.read(line).unwrap();
    let config = read(&[
        "--allow-destinations=10.0.0.0/8:443,[fd00::/8]:1-1024",
        "--allow-destinations=169.254.20.10:53",
        "--deny-destinations=*:22",
    ]);
    let lines = config.describe();
    let allow = "allow-destinations=10.0.0.0/8:443,[fd00::/8]:1-1024,169.254.20.10/32:53";
    assert!(lines.contains(&allow.to_owned()), "{lines:?}");
    assert!(lines.contains(&"deny-destinations=*:22".to_owned()));
    let allows = |address: &str| config.destinations.check(address.parse().unwrap()).is_ok();
    assert!(allows("169.254.20.10:53") && allows("10.0.0.1:443"));
    assert!(!allows("10.0.0.1:22") && !allows("169.254.169.254:443"));
    let narrow = read(&["--allow-destinations=169.254.20.10"]).warnings;
    assert!(
        matches!(narrow.as_slice(), [text] if text.contains("has only link-local")),
        "{narrow:?}"
    );
}
