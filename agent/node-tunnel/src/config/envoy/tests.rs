#![allow(clippy::unwrap_used)]

use super::*;

/// The file of KKP's `envoy-agent` for a cluster with OpenVPN.
pub(crate) const OF_KKP: &str = include_str!("kkp.yaml");

fn error(text: &str) -> String {
    translate(text).unwrap_err()
}

/// Returns the error for KKP's file with a change.
fn error_with(from: &str, to: &str) -> String {
    assert!(OF_KKP.contains(from), "{from}");
    error(&OF_KKP.replace(from, to))
}

#[test]
fn file_of_kkp_is_translated() {
    let translated = translate(OF_KKP).unwrap();
    let route = |port, authority: &str| (HostPort::new("100.64.30.10", port), authority.to_owned());
    assert_eq!(
        translated,
        Translated {
            routes: vec![
                route(6443, "apiserver-external.cluster-x.svc.cluster.local:443"),
                route(1194, "openvpn-server.cluster-x.svc.cluster.local:1194"),
            ],
            proxy: HostPort::new("x.seed.example.com", 8088),
            pings: Pings {
                idle: Duration::from_secs(30),
                timeout: Duration::from_secs(5),
            },
            stats: Some(HostPort::new("0.0.0.0", 8002)),
            warnings: Vec::new(),
        }
    );
}

#[test]
fn optional_parts_have_defaults() {
    let keepalive = "http2_protocol_options:
              connection_keepalive:
                interval: 30s
                timeout: 5s";
    assert!(OF_KKP.contains(keepalive));
    let text = OF_KKP.replace(keepalive, "http2_protocol_options: {}");
    assert_eq!(translate(&text).unwrap().pings, PINGS);
    let text = OF_KKP.replace("connect_timeout: 5s", "connect_timeout: 0.5s");
    let warnings = translate(&text).unwrap().warnings;
    assert!(
        warnings.concat().contains("connect_timeout=0.5s"),
        "{warnings:?}"
    );
}

#[test]
fn parts_that_cannot_be_translated_are_named() {
    let tls = "type: LOGICAL_DNS\n      transport_socket: {name: tls}";
    for (from, to, part) in [
        ("type: LOGICAL_DNS", tls, "unknown field `transport_socket`"),
        ("type: LOGICAL_DNS", "type: EDS", "EDS"),
        (
            "http2_protocol_options:",
            "http_protocol_options:",
            "http_protocol_options",
        ),
        (
            "interval: 30s",
            "interval: soon",
            "\"soon\" is not a duration",
        ),
        ("interval: 30s", "interval: 0s", "\"0s\" is not a duration"),
        ("address: 100.64.30.10", "pipe: /x", "pipe"),
        (
            "port_value: 6443",
            "port_value: 70000",
            "invalid u16 at line 41",
        ),
        (
            "static_resources:",
            "admin: {}\nstatic_resources:",
            "duplicate mapping key: admin at line ",
        ),
        ("protocol: TCP", "protocol: UDP", "UDP"),
        ("tcp_proxy.v3.TcpProxy", "echo.v3.Echo", "echo.v3.Echo"),
        ("stat_prefix: tcp_stats", "idle_timeout: 1s", "idle_timeout"),
        (
            "cluster: \"proxy_cluster\"",
            "cluster: other",
            "no cluster \"other\"",
        ),
        (
            "name: service_stats\n      connect",
            "name: renamed\n      connect",
            "no cluster \"service_stats\"",
        ),
        (
            "port_value: 9902\nstatic",
            "port_value: 9903\nstatic",
            "must lead to the admin listener",
        ),
        (
            "http.router.v3.Router",
            "http.rbac.v3.RBAC",
            "http.rbac.v3.RBAC",
        ),
        (
            "static_resources:",
            "layered_runtime: {}\nstatic_resources:",
            "layered_runtime",
        ),
    ] {
        let error = error_with(from, to);
        assert!(error.contains(part), "{from} -> {to}: {error}");
    }
    let (before, rest) = OF_KKP.split_once("  - name: listener_0").unwrap();
    let (_, clusters) = rest.split_once("  clusters:").unwrap();
    let without_tunnels = format!("{before}  clusters:{clusters}");
    assert!(error(&without_tunnels).contains("no listener with a tcp_proxy"));
}

#[test]
fn listeners_of_two_clusters_are_refused() {
    let (before, after) = OF_KKP.rsplit_once("cluster: \"proxy_cluster\"").unwrap();
    let text = format!("{before}cluster: service_stats{after}");
    assert!(error(&text).contains("must have the same cluster"));
}

#[test]
fn cluster_without_http2_or_with_two_endpoints_is_refused() {
    let (before, rest) = OF_KKP
        .split_once("      typed_extension_protocol_options")
        .unwrap();
    let (_, after) = rest.split_once("      load_assignment").unwrap();
    let text = format!("{before}      load_assignment{after}");
    assert!(error(&text).contains("must have http2_protocol_options"));
    let one = "- endpoint:
                  address:
                    socket_address:
                      address: x.seed.example.com
                      port_value: 8088";
    let two = format!("{one}\n              {one}");
    assert!(error_with(one, &two).contains("must have one endpoint"));
}

#[test]
fn any_text_is_an_error_without_a_panic() {
    for text in ["", "{}", "[]", "a: b", "\0", "{{{{", "admin: &a [*a]"] {
        assert!(translate(text).is_err(), "{text:?}");
    }
    let half = OF_KKP.len() / 2;
    assert!(translate(OF_KKP.get(..half).unwrap()).is_err());
}

#[test]
fn unusable_file_is_named_with_the_remedy() {
    let dir = tempfile::tempdir().unwrap();
    let path = dir.path().join("envoy.yaml");
    let missing = read(&path).unwrap_err();
    assert!(
        missing.contains("envoy.yaml") && missing.contains("mounted"),
        "{missing}"
    );
    std::fs::write(&path, "a: b").unwrap();
    let unknown = read(&path).unwrap_err();
    assert!(
        unknown.contains("envoy.yaml") && unknown.contains("--listen"),
        "{unknown}"
    );
    std::fs::write(&path, vec![b'#'; 2 << 20]).unwrap();
    assert!(read(&path).unwrap_err().contains("larger than"));
}
