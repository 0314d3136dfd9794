#![allow(clippy::unwrap_used)]

use culvert_host::telemetry::logging::LogFormat;

use super::*;

/// Parses flags; `@` is replaced by an existing file.
fn read(line: &[&str]) -> Result<Config, Vec<String>> {
    let file = concat!(env!("CARGO_MANIFEST_DIR"), "/Cargo.toml");
    let args = line.iter().map(|arg| arg.replace('@', file));
    let args: Vec<String> = std::iter::once(PROGRAM.to_owned()).chain(args).collect();
    Config::from_args(args).map_err(|exit| {
        assert_eq!(exit.code, 1);
        let lines = exit
            .text
            .lines()
            .filter_map(|line| line.strip_prefix("Error: "));
        lines.map(str::to_owned).collect()
    })
}

#[test]
fn arguments_from_kkp_are_accepted() {
    let config = read(&[
        "-config=@",
        "-listen-address=:8001",
        "-envoy-node-name=kube",
        "-envoy-admin-port=9001",
        "-envoy-stats-port=8002",
        "-envoy-sni-port=6443",
        "-envoy-tunneling-port=8088",
        "-sni-listener-idle-timeout=0s",
        "-tunneling-connection-idle-timeout=0s",
        "-tunneling-stream-idle-timeout=10m",
        "-downstream-tcp-keepalive-time=60s",
        "-downstream-tcp-keepalive-interval=0s",
        "-downstream-tcp-keepalive-probes=0",
        "-upstream-tcp-keepalive-time=0s",
        "-upstream-tcp-keepalive-interval=500ms",
        "-upstream-tcp-keepalive-probes=9",
        "-log-debug=true",
        "-log-format=JSON",
    ])
    .unwrap();
    assert_eq!(config.sni, Some(HostPort::new("0.0.0.0", 6443)));
    assert_eq!(config.tunneling.as_ref().unwrap().bind.port, 8088);
    assert_eq!(config.stats.port, 8002);
    assert_eq!(config.admin, Some(HostPort::new("127.0.0.1", 9001)));
    assert_eq!(config.limits.sni_idle, IDLE);
    assert_eq!(config.limits.stream_idle, Duration::from_secs(600));
    let down = config.limits.downstream_keepalive;
    assert_eq!(
        (down.idle.as_secs(), down.interval, down.probes),
        (60, KEEPALIVE.interval, 3)
    );
    assert_eq!(config.limits.upstream_keepalive.probes, 9);
    assert_eq!(
        config.limits.upstream_keepalive.interval,
        KEEPALIVE.interval
    );
    assert_eq!(config.warnings.len(), 1, "{:?}", config.warnings);
    assert_eq!(
        (config.logging.verbosity, config.logging.format),
        (4, LogFormat::Json)
    );
}

#[test]
fn defaults_open_only_the_health_listener() {
    let config = read(&["--config", "@"]).unwrap();
    assert_eq!(
        (config.sni.as_ref(), config.tunneling.as_ref()),
        (None, None)
    );
    assert_eq!(config.stats, HostPort::new("0.0.0.0", 8002));
    assert_eq!(config.admin, None);
    assert_eq!(config.limits, Limits::default());
    assert_eq!(
        (config.max_connections, config.logging.verbosity),
        (1024, 2)
    );
    assert_eq!(read(&["--config=@", "-v=5"]).unwrap().logging.verbosity, 5);
    let described = config.describe();
    assert!(
        described.contains(&"upstream-keepalive=10s+3x5s".to_owned()),
        "{described:?}"
    );
}

#[test]
fn without_a_file_the_cluster_is_watched() {
    let config = read(&["-envoy-sni-port=6443", "-namespace=cluster-x"]).unwrap();
    let Source::Kubernetes(cluster) = config.source else {
        panic!("{:?}", config.source)
    };
    assert_eq!(cluster.kubeconfig, None);
    assert_eq!(cluster.namespace.as_deref(), Some("cluster-x"));
    let options = cluster.options;
    assert_eq!(options.annotation, "nodeport-proxy.k8s.io/expose");
    assert_eq!((options.server_names, options.authorities), (true, false));
    let key = "-expose-annotation-key=nodeport-proxy.k8s.io/expose-namespaced";
    let Source::Kubernetes(cluster) = read(&[key, "--kubeconfig=@"]).unwrap().source else {
        panic!("not Kubernetes")
    };
    assert_eq!(
        (cluster.namespace, cluster.kubeconfig.is_some()),
        (None, true)
    );
}

#[test]
fn quic_listener_needs_the_listener_for_server_names() {
    let sni_quic = |line: &[&str]| read(line).map(|config| config.sni_quic);
    let tcp = "--envoy-sni-port=6443";
    assert_eq!(sni_quic(&[tcp]), Ok(None));
    let both = sni_quic(&[tcp, "--sni-quic-port=6444"]);
    assert_eq!(both, Ok(Some(HostPort::new("0.0.0.0", 6444))));
    let alone = sni_quic(&["--sni-quic-port=6444"]).unwrap_err();
    assert!(
        alone.concat().contains("needs --envoy-sni-port"),
        "{alone:?}"
    );
}

#[test]
fn all_mistakes_are_reported_at_once() {
    let problems = read(&[
        "--expose-annotation-key=",
        "--envoy-sni-port=70000",
        "--tunneling-cert=@",
        "--tunneling-allowed-networks=10.0.0.0/8,nowhere",
        "--max-connections=0",
    ])
    .unwrap_err();
    let parts = [
        "--expose-annotation-key",
        "--envoy-sni-port",
        "tunneling key empty",
        "\"nowhere\"",
        "--max-connections",
    ];
    assert_eq!(problems.len(), parts.len(), "{problems:#?}");
    for (problem, part) in problems.iter().zip(parts) {
        assert!(problem.contains(part), "{problem}\n{part}");
    }
    let problems = read(&["--config=@", "--tunneling-require-tls"]).unwrap_err();
    assert!(
        problems.concat().contains("--tunneling-cert"),
        "{problems:?}"
    );
    let problems = read(&["--config=/nonexistent/door.yaml"]).unwrap_err();
    assert!(
        problems.concat().contains("/nonexistent/door.yaml"),
        "{problems:?}"
    );
}

#[test]
fn negative_number_of_probes_is_refused() {
    for side in ["downstream", "upstream"] {
        let flag = format!("--{side}-tcp-keepalive-probes");
        let problems = read(&[&format!("{flag}=-1")]).unwrap_err();
        assert_eq!(problems, [format!("{flag} must be >= 0, got -1")]);
        let many = read(&[&format!("{flag}=99999999999")]).unwrap().limits;
        let keepalive = match side {
            "downstream" => many.downstream_keepalive,
            _ => many.upstream_keepalive,
        };
        assert_eq!(keepalive.probes, 127);
    }
}

/// Returns the balancer's configuration for a valid command line.
fn balancer(line: &[&str]) -> (BalancerConfig, Vec<String>) {
    let config = read(line).unwrap();
    let described = config.describe();
    let Source::Kubernetes(cluster) = config.source else {
        panic!("{:?}", config.source)
    };
    (*cluster.balancer.unwrap(), described)
}

#[test]
fn arguments_from_kkp_for_its_updater_are_accepted() {
    let (balancer, described) = balancer(&[
        "-update-loadbalancer=true",
        "-lb-namespace=kubermatic",
        "-lb-name=nodeport-proxy",
        "-envoy-sni-port=6443",
        "-envoy-tunneling-port=8088",
    ]);
    let names = (balancer.namespace.as_str(), balancer.name.as_str());
    assert_eq!(names, ("kubermatic", "nodeport-proxy"));
    let options = &balancer.options;
    assert_eq!(
        (options.sni_port, options.tunneling_port, options.stats_port),
        (6443, 8088, 8002)
    );
    assert_eq!(options.annotation, "nodeport-proxy.k8s.io/expose");
    assert_eq!(options.namespace, None);
    assert_eq!(balancer.election, Some(Times::default()));
    let line = "update-loadbalancer=kubermatic/nodeport-proxy";
    assert!(described.iter().any(|it| it == line), "{described:?}");
}

#[test]
fn arguments_of_lb_updater_start_its_work_without_a_lease() {
    let (balancer, described) = balancer(&[
        "-lb-namespace=kubermatic",
        "-lb-name=nodeport-proxy",
        "-envoy-sni-port=6443",
        "-envoy-tunneling-port=8088",
    ]);
    assert_eq!(balancer.election, None);
    let line = "leader-elect=false";
    assert!(described.iter().any(|it| it == line), "{described:?}");

    let of_a_cluster = [
        "-lb-namespace=cluster-x",
        "-lb-name=front-loadbalancer",
        "-expose-annotation-key=nodeport-proxy.k8s.io/expose-namespaced",
        "-namespaced=true",
    ];
    let config = read(&of_a_cluster).unwrap();
    assert_eq!(config.warnings, [""; 0]);
    let Source::Kubernetes(cluster) = config.source else {
        panic!("{:?}", config.source)
    };
    assert_eq!(cluster.namespace.as_deref(), Some("cluster-x"));
    let balancer = cluster.balancer.unwrap();
    assert_eq!(balancer.options.namespace.as_deref(), Some("cluster-x"));
    assert_eq!(balancer.election, None);
}

#[test]
fn process_that_only_updates_has_no_listeners_for_connections() {
    let ports = [
        "-envoy-sni-port=6443",
        "-sni-quic-port=6443",
        "-envoy-tunneling-port=8088",
    ];
    for (flag, only) in [
        ("-update-loadbalancer=only", true),
        ("-lb-name=a", true),
        ("-update-loadbalancer", false),
        ("-update-loadbalancer=true", false),
    ] {
        let line = [&[flag], &ports[..]].concat();
        let config = read(&line).unwrap();
        let listens = [
            config.sni.is_some(),
            config.sni_quic.is_some(),
            config.tunneling.is_some(),
        ];
        assert_eq!(listens, [!only; 3], "{flag}");
        let (balancer, _) = balancer(&line);
        assert_eq!(balancer.only, only, "{flag}");
        assert_eq!(balancer.election.is_none(), only, "{flag}");
        let options = &balancer.options;
        let ports = (
            options.sni_port,
            options.sni_quic_port,
            options.tunneling_port,
        );
        assert_eq!(ports, (6443, 6443, 8088), "{flag}");
    }
    assert!(read(&["-update-loadbalancer=alone"]).is_err());
}

#[test]
fn leader_election_can_be_set_for_both_ways_of_updating() {
    for (line, elects) in [
        (&["-update-loadbalancer", "-leader-elect=false"][..], false),
        (&["-lb-name=a", "-leader-elect"], true),
        (&["-update-loadbalancer", "-lb-name=a"], true),
    ] {
        let (balancer, _) = balancer(line);
        assert_eq!(balancer.election.is_some(), elects, "{line:?}");
    }
    let line = ["-lb-name=a", "-leader-elect-retry-period=1s"];
    let warnings = read(&line).unwrap().warnings.concat();
    assert!(warnings.contains("without --leader-elect"), "{warnings}");
}

#[test]
fn balancer_of_one_namespace_is_configured() {
    let (balancer, _) = balancer(&[
        "-update-loadbalancer",
        "-namespace=cluster-x",
        "-lb-namespace=cluster-x",
        "-lb-name=front-loadbalancer",
        "-expose-annotation-key=nodeport-proxy.k8s.io/expose-namespaced",
        "-namespaced=true",
        "-leader-elect-lease-duration=30s",
        "-leader-elect-renew-deadline=20s",
        "-leader-elect-retry-period=500ms",
    ]);
    let options = &balancer.options;
    assert_eq!(options.namespace.as_deref(), Some("cluster-x"));
    assert_eq!(
        options.annotation,
        "nodeport-proxy.k8s.io/expose-namespaced"
    );
    let times = balancer.election.unwrap();
    assert_eq!(times.lease_duration, Duration::from_secs(30));
    assert_eq!(times.renew_deadline, Duration::from_secs(20));
    assert_eq!(times.retry_period, Duration::from_millis(500));
}

#[test]
fn invalid_balancer_flags_are_refused_with_the_remedy() {
    for (line, part) in [
        (&["--config=@"][..], "leave out --config"),
        (&["--lb-name="], "needs --lb-name"),
        (&["--lb-namespace="], "needs --lb-name and --lb-namespace"),
        (
            &["--namespace=x"],
            "make them equal, or leave out --namespace",
        ),
        (&["--envoy-stats-port=0"], "needs an --envoy-stats-port"),
        (
            &["--leader-elect-renew-deadline=15s"],
            "longer than the next",
        ),
        (&["--leader-elect-retry-period=10s"], "longer than the next"),
        (&["--leader-elect-retry-period=0"], "greater than 0"),
    ] {
        let problems = read(&[&["--update-loadbalancer"], line].concat()).unwrap_err();
        assert_eq!(problems.len(), 1, "{problems:#?}");
        let text = problems.concat();
        assert!(text.contains(part), "{text}\n{part}");
    }
}

#[test]
fn balancer_flags_without_update_loadbalancer_cause_a_warning() {
    for flag in [
        "--lb-name=a",
        "--lb-namespace=a",
        "--namespaced",
        "--leader-elect",
        "--leader-elect-retry-period=1s",
    ] {
        let config = read(&[flag, "--update-loadbalancer=false"]).unwrap();
        assert!(config.warnings.concat().contains("--update-loadbalancer"));
        let Source::Kubernetes(cluster) = config.source else {
            panic!("{:?}", config.source)
        };
        assert_eq!(cluster.balancer, None);
    }
    assert_eq!(read(&[]).unwrap().warnings, [""; 0]);
}
