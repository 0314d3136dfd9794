#![allow(clippy::unwrap_used, clippy::expect_used, clippy::indexing_slicing)]

use super::*;

const ALL_STRATEGIES: [Strategy; 3] = [
    Strategy::Default,
    Strategy::DestHost,
    Strategy::DefaultRoute,
];

/// HELP and TYPE lines that upstream's tests compare literally.
const COMPARED: [(&str, &str, &str); 5] = [
    (
        "dial_failure_count",
        "counter",
        "Number of dial failures observed. Multiple failures can occur for a single dial request.",
    ),
    (
        "pending_backend_dials",
        "gauge",
        "Current number of pending backend dial requests",
    ),
    (
        "ready_backend_connections",
        "gauge",
        "Number of konnectivity agent connected to the proxy server. DEPRECATED, please use ready_backends",
    ),
    (
        "ready_backends",
        "gauge",
        "Number of konnectivity agent connected to the proxy server",
    ),
    (
        "established_connections",
        "gauge",
        "Current number of established end-to-end connections (post-dial).",
    ),
];

fn has_line(page: &str, line: &str) -> bool {
    page.lines().any(|candidate| candidate == line)
}

#[test]
fn compared_families_have_upstreams_headers() {
    let metrics = ServerMetrics::new(&ALL_STRATEGIES).unwrap();
    metrics
        .dial_failures(DialFailureReason::NoAgent)
        .increment(1);
    let page = metrics.registry().render();
    for (name, kind, help) in COMPARED {
        let name = format!("konnectivity_network_proxy_server_{name}");
        let header = format!("# HELP {name} {help}\n# TYPE {name} {kind}\n");
        assert!(page.contains(&header), "{header} is missing from\n{page}");
    }
}

#[test]
fn samples_that_upstream_compares_exactly_appear_with_their_first_use() {
    let metrics = ServerMetrics::new(&[Strategy::Default, Strategy::DestHost]).unwrap();
    let page = metrics.registry().render();
    assert!(!page.contains("dial_failure_count{"));
    assert!(!page.contains(r#"ready_backends{proxy_strategy="defaultRoute"}"#));

    metrics
        .dial_failures(DialFailureReason::FrontendClose)
        .increment(1);
    let page = metrics.registry().render();
    assert_eq!(page.matches("dial_failure_count{").count(), 1);
    assert!(has_line(
        &page,
        r#"konnectivity_network_proxy_server_dial_failure_count{reason="frontend_close"} 1"#
    ));
}

#[test]
fn all_other_series_exist_from_the_start() {
    let page = ServerMetrics::new(&ALL_STRATEGIES)
        .unwrap()
        .registry()
        .render();
    for series in [
        "dial_duration_seconds_count",
        r#"dial_duration_seconds_bucket{le="1e-06"}"#,
        r#"dial_duration_seconds_bucket{le="12.5"}"#,
        r#"frontend_write_duration_seconds_bucket{le="1e-05"}"#,
        r#"connection_duration_seconds_bucket{le="1"}"#,
        r#"connection_duration_seconds_bucket{le="86400"}"#,
        r#"grpc_connections{service_method="Proxy"}"#,
        r#"grpc_connections{service_method="Connect"}"#,
        "http_connections",
        "ready_backend_connections",
        r#"ready_backends{proxy_strategy="default"}"#,
        r#"ready_backends{proxy_strategy="destHost"}"#,
        r#"ready_backends{proxy_strategy="defaultRoute"}"#,
        "pending_backend_dials",
        "established_connections",
        r#"full_receive_channels{service_method="Connect"}"#,
        r#"stream_packets_total{segment="from_client",packet_type="DIAL_REQ"}"#,
    ] {
        let line = format!("konnectivity_network_proxy_server_{series} 0");
        assert!(has_line(&page, &line), "{line} is missing from\n{page}");
    }
    for line in [
        r#"culvert_rejected_total{listener="agent",reason="handshake_failed"} 0"#,
        concat!(
            r#"culvert_build_info{component="server",version=""#,
            env!("CARGO_PKG_VERSION"),
            r#""} 1"#
        ),
    ] {
        assert!(has_line(&page, line), "{line} is missing from\n{page}");
    }
}

#[test]
fn rejections_have_distinct_series() {
    let all = <(Listener, RejectReason)>::all();
    let indices: Vec<usize> = all.iter().map(|pair| pair.index()).collect();
    assert_eq!(indices, (0..all.len()).collect::<Vec<_>>());

    let metrics = ServerMetrics::new(&[]).unwrap();
    metrics
        .rejected
        .get((Listener::Frontend, RejectReason::Garbage))
        .increment(3);
    assert!(has_line(
        &metrics.registry().render(),
        r#"culvert_rejected_total{listener="frontend",reason="garbage"} 3"#
    ));
}
