#![allow(clippy::unwrap_used, clippy::indexing_slicing)]

use super::*;

const API: &str = "100.64.30.10:6443=apiserver-external.cluster-x.svc.cluster.local:443";
const VPN: &str = "100.64.30.10:1194=openvpn-server.cluster-x.svc.cluster.local:1194";
const PROXY: &str = "--proxy=x.seed.example.com:8088";

fn read(line: &[&str]) -> Result<Config, Vec<String>> {
    let args = std::iter::once(PROGRAM).chain(line.iter().copied());
    Config::from_args(args).map_err(|exit| {
        assert_eq!(exit.code, 1);
        let lines = exit
            .text
            .lines()
            .filter_map(|line| line.strip_prefix("Error: "));
        lines.map(str::to_owned).collect()
    })
}

/// Returns the error text for one value of `--listen`.
fn listen_error(value: &str) -> String {
    read(&[PROXY, "--listen", value]).unwrap_err().join("\n")
}

#[test]
fn one_listener_and_a_proxy_are_enough() {
    let config = read(&[PROXY, "--listen", API]).unwrap();
    assert_eq!(config.routes.len(), 1);
    let Route { listen, authority } = &config.routes[0];
    assert_eq!(*listen, HostPort::new("100.64.30.10", 6443));
    assert_eq!(
        *authority,
        "apiserver-external.cluster-x.svc.cluster.local:443"
    );
    assert_eq!(config.proxy, HostPort::new("x.seed.example.com", 8088));
    assert_eq!((config.connections, config.logging.verbosity), (2, 2));
    assert_eq!(config.stats, HostPort::new("0.0.0.0", 8002));
    assert_eq!(config.drain_timeout, Duration::from_secs(25));
    assert!(config.warnings.is_empty(), "{:?}", config.warnings);
    assert_eq!(config.interface, None);
    let described = config.describe();
    assert!(
        described.contains(&format!("listen={API}")),
        "{described:?}"
    );
}

#[test]
fn listeners_are_repeated_or_separated_by_commas() {
    let both = format!("{API},{VPN}");
    let joined = read(&[PROXY, "--listen", &both]).unwrap();
    let repeated = read(&[PROXY, "--listen", API, "--listen", VPN]).unwrap();
    assert_eq!(joined, repeated);
    assert_eq!(joined.routes.len(), 2);
    assert_eq!(joined.routes[1].listen.port, 1194);
}

#[test]
fn ipv6_brackets_are_kept_only_in_authorities() {
    let config = read(&[
        "--proxy=[fd00::1]:8088",
        "--listen=[fd00::2]:6443=[fd00::3]:443",
    ]);
    let config = config.unwrap();
    assert_eq!(config.proxy.host, "fd00::1");
    assert_eq!(config.routes[0].listen.host, "fd00::2");
    assert_eq!(config.routes[0].authority, "[fd00::3]:443");
}

#[test]
fn invalid_listen_error_shows_an_example() {
    for (value, parts) in [
        ("100.64.30.10:6443", ["has no '='", "HOST:PORT=AUTHORITY"]),
        (
            ":6443=a.b:443",
            ["\":6443\" has no host", "100.64.30.10:6443"],
        ),
        (
            "100.64.30.10=a.b:443",
            ["missing port", "100.64.30.10:6443"],
        ),
        (
            "100.64.30.10:0=a.b:443",
            ["no port from 1", "100.64.30.10:6443"],
        ),
        (
            "100.64.30.10:70000=a.b:443",
            ["no port from 1", "100.64.30.10:6443"],
        ),
        (
            "100.64.30.10:6443=a.b",
            ["\"a.b\" missing port", "apiserver-external"],
        ),
        (
            "100.64.30.10:6443=:443",
            ["\":443\" has no host", "apiserver-external"],
        ),
        (
            "100.64.30.10:6443=u@a.b:443",
            ["is not a valid authority", "apiserver-external"],
        ),
        (
            "100.64.30.10:6443=a b:443",
            ["is not a valid authority", "apiserver-external"],
        ),
    ] {
        let error = listen_error(value);
        for part in parts {
            assert!(error.contains(part), "{value}: {error}\n{part}");
        }
    }
}

#[test]
fn duplicate_listen_address_is_rejected() {
    let again = format!("{API},100.64.30.10:6443=other.cluster-x.svc.cluster.local:443");
    let error = listen_error(&again);
    assert_eq!(
        error,
        "--listen: 100.64.30.10:6443 is given twice; write one authority for it"
    );
}

#[test]
fn all_problems_are_reported_at_once() {
    let flags = ["--connections=0", "--stats-port=-1", "--drain-timeout=-3s"];
    let problems = read(&flags).unwrap_err();
    let parts = [
        "--listen must be set",
        "--proxy: ",
        "--connections",
        "--stats-port",
        "drain-timeout must be >= 0",
    ];
    assert_eq!(problems.len(), parts.len(), "{problems:#?}");
    for (problem, part) in problems.iter().zip(parts) {
        assert!(problem.contains(part), "{problem}\n{part}");
    }
    let error = read(&["--listen", API, "--proxy=x.seed.example.com"])
        .unwrap_err()
        .join("\n");
    assert!(
        error.contains("missing port") && error.contains(":8088"),
        "{error}"
    );
}

#[test]
fn interface_flags_match_network_interface_manager() {
    let line = [PROXY, "--listen", API, "-if", "envoyagent", "-addr"];
    let config = read(&[&line[..], &["100.64.30.10,fd00::10"]].concat()).unwrap();
    let interface = config.interface.clone().unwrap();
    assert_eq!(
        (interface.name.as_str(), interface.kind),
        ("envoyagent", "dummy")
    );
    let addresses: Vec<String> = interface
        .addresses
        .iter()
        .map(ToString::to_string)
        .collect();
    assert_eq!(addresses, ["100.64.30.10", "fd00::10"]);
    let described = config.describe();
    for line in ["if=envoyagent", "addr=100.64.30.10", "addr=fd00::10"] {
        assert!(described.iter().any(|known| known == line), "{described:?}");
    }
}

#[test]
fn invalid_interface_error_shows_an_example() {
    for (flags, part) in [
        (&["--if=envoyagent"][..], "write --addr=100.64.30.10"),
        (&["--addr=100.64.30.10"], "write --if=envoyagent"),
        (
            &["--if=a-name-that-is-long", "--addr=10.0.0.1"],
            "\"a-name-that-is-long\" is not a valid interface name",
        ),
        (
            &["--if=a/b", "--addr=10.0.0.1"],
            "\"a/b\" is not a valid interface name",
        ),
        (
            &["--if=dummy%d", "--addr=10.0.0.1"],
            "\"dummy%d\" is not a valid interface name",
        ),
        (
            &["--if=a", "--addr=10.0.0.1/32"],
            "\"10.0.0.1/32\" is not an IP address",
        ),
        (
            &["--if=a", "--addr=0.0.0.0"],
            "cannot have the address 0.0.0.0",
        ),
        (&["--if=a", "--addr=::1"], "cannot have the address ::1"),
        (
            &["--if=a", "--addr=fd00::1,ff02::1"],
            "cannot have the address ff02::1",
        ),
        (
            &["--if=a", "--addr=fd00::1,fd00::1"],
            "fd00::1 is given twice",
        ),
    ] {
        let line = [&[PROXY, "--listen", API][..], flags].concat();
        let problems = read(&line).unwrap_err();
        assert_eq!(problems.len(), 1, "{flags:?}: {problems:?}");
        assert!(problems[0].contains(part), "{flags:?}: {problems:?}");
    }
}

/// Writes KKP's bootstrap file, and returns its folder and the flag.
fn file_of_kkp() -> (tempfile::TempDir, String) {
    let dir = tempfile::tempdir().unwrap();
    let path = dir.path().join("envoy.yaml");
    std::fs::write(&path, include_str!("envoy/kkp.yaml")).unwrap();
    let flag = format!("--config-path={}", path.display());
    (dir, flag)
}

#[test]
fn arguments_of_kkps_envoy_are_accepted() {
    let (dir, _) = file_of_kkp();
    let path = dir.path().join("envoy.yaml");
    let path = path.to_str().unwrap();
    for flag in ["--config-path", "-c"] {
        let config = read(&[flag, path, "--use-dynamic-base-id"]).unwrap();
        let routes: Vec<String> = config
            .routes
            .iter()
            .map(|route| format!("{}={}", route.listen, route.authority))
            .collect();
        assert_eq!(routes, [API, VPN]);
        assert_eq!(config.proxy, HostPort::new("x.seed.example.com", 8088));
        assert_eq!(config.stats, HostPort::new("0.0.0.0", 8002));
        assert_eq!(config.mode, Mode::Tunnel);
        assert!(config.warnings.is_empty(), "{:?}", config.warnings);
    }
}

#[test]
fn flags_of_the_stats_listener_win_over_the_file() {
    let (_dir, file) = file_of_kkp();
    let config = read(&[&file, "--stats-port=9000"]).unwrap();
    assert_eq!(config.stats, HostPort::new("0.0.0.0", 9000));
    let config = read(&[&file, "--stats-address=127.0.0.1"]).unwrap();
    assert_eq!(config.stats, HostPort::new("127.0.0.1", 8002));
}

#[test]
fn file_and_flags_for_the_same_settings_are_refused() {
    let (dir, file) = file_of_kkp();
    for flags in [&[PROXY][..], &["--listen", API]] {
        let problems = read(&[&[file.as_str()], flags].concat()).unwrap_err();
        assert_eq!(problems.len(), 1, "{problems:?}");
        assert!(
            problems[0].contains("leave out --listen and --proxy"),
            "{problems:?}"
        );
    }
    let path = dir.path().join("envoy.yaml");
    let text = std::fs::read_to_string(&path).unwrap();
    for (from, to, part) in [
        (
            "hostname: apiserver-external.cluster-x.svc.cluster.local:443",
            "hostname: a",
            "\"a\" missing port",
        ),
        ("port_value: 1194", "port_value: 6443", "is given twice"),
        ("port_value: 8088", "port_value: 0", "no port from 1"),
        ("address: 100.64.30.10", "address: ''", "has no host"),
    ] {
        assert!(text.contains(from), "{from}");
        std::fs::write(&path, text.replace(from, to)).unwrap();
        let problems = read(&[&file]).unwrap_err();
        assert_eq!(problems.len(), 1, "{problems:?}");
        assert!(problems[0].contains(part), "{problems:?}\n{part}");
    }
}

#[test]
fn arguments_of_network_interface_manager_are_accepted() {
    for (word, mode) in [("init", Mode::Init), ("probe", Mode::Probe)] {
        let line = ["-mode", word, "-if", "envoyagent", "-addr", "100.64.30.10"];
        let config = read(&line).unwrap();
        assert_eq!(config.mode, mode);
        assert_eq!(config.interface.as_ref().unwrap().name, "envoyagent");
        assert!(config.routes.is_empty() && config.warnings.is_empty());
        let described = config.describe();
        assert!(described.contains(&format!("mode={word}")), "{described:?}");
    }
    for (line, part) in [
        (&["-mode=init"][..], "write --if=envoyagent"),
        (
            &["-mode=watch", "-if=a", "-addr=10.0.0.1"],
            "--mode must be init, probe or empty",
        ),
        (
            &["-mode=probe", "-if=a", "-addr=10.0.0.1", PROXY],
            "carry no clients",
        ),
        (
            &["-mode=probe", "-if=a", "-addr=10.0.0.1", "--listen", API],
            "carry no clients",
        ),
        (
            &["-mode=init", "-if=a", "-addr=10.0.0.1", "-c=/x"],
            "carry no clients",
        ),
    ] {
        let problems = read(line).unwrap_err().join("\n");
        assert!(problems.contains(part), "{line:?}: {problems}");
    }
}

#[test]
fn tls_is_on_with_a_ca() {
    let file = concat!(env!("CARGO_MANIFEST_DIR"), "/Cargo.toml");
    let [ca, cert, key] = ["ca", "cert", "key"].map(|name| format!("--proxy-{name}={file}"));
    let line = |flags: &[&str]| read(&[&[PROXY, "--listen", API], flags].concat());
    assert_eq!(line(&[]).unwrap().tls, None);
    let tls = line(&[&ca]).unwrap().tls.unwrap();
    assert_eq!(tls.server_name.to_str(), "x.seed.example.com");
    assert_eq!(tls.identity, None);
    let name = "--proxy-server-name=door.example.com";
    let tls = line(&[&ca, &cert, &key, name]).unwrap().tls.unwrap();
    assert_eq!(tls.server_name.to_str(), "door.example.com");
    assert_eq!(tls.identity, Some((file.into(), file.into())));
    for (flags, part) in [
        (&[cert.as_str(), &key][..], "need --proxy-ca"),
        (&[name], "need --proxy-ca"),
        (&[&ca, &cert], "proxy key empty"),
        (
            &[&ca, "--proxy-server-name=a b"],
            "\"a b\" is neither a host name",
        ),
        (&["--proxy-ca=/nonexistent/ca.pem"], "/nonexistent/ca.pem"),
    ] {
        let problems = line(flags).unwrap_err();
        assert_eq!(problems.len(), 1, "{flags:?}: {problems:?}");
        assert!(problems[0].contains(part), "{problems:?}\n{part}");
    }
}
