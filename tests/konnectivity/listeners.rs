//! Health, admin and metrics pages: paths, status codes, bodies, metric families, and gauges that match the
//! actual state.

use std::net::SocketAddr;

use culvert_kit::services::Services;
use culvert_tests::metrics::http_get;
use culvert_tests::{Mode, Topology, Transport, black_hole, eventually};
use tokio::io::{AsyncReadExt as _, AsyncWriteExt as _};
use tokio::net::TcpStream;

use crate::searching::Lone;
use crate::support::*;

pub(crate) async fn get(addr: SocketAddr, path: &str) -> (u16, String) {
    let (status, _, body) = timely(path, http_get(addr, path)).await.unwrap();
    (status.as_u16(), String::from_utf8_lossy(&body).into_owned())
}

async fn page(addr: SocketAddr, path: &str, status: u16, body: &str) {
    let seen = get(addr, path).await;
    assert_eq!(seen, (status, body.to_owned()), "{path}");
}

#[tokio::test]
async fn server_serves_health_readiness_and_metrics_pages() {
    let builder = Topology::builder(Mode::Grpc, Transport::Uds);
    let topology = builder.servers(1).start().await;
    let (health, admin) = (topology.server_health(0), topology.server_admin(0));
    page(health, "/healthz", 200, "ok").await;
    for path in ["/readyz", "/ready"] {
        page(health, path, 500, "no connection to any proxy agent").await;
    }
    let tunnel_ready = async || {
        let metrics = topology.server_metrics(0).await;
        metrics.value("culvert_tunnel_ready", &[])
    };
    assert_eq!(tunnel_ready().await, Some(0.0));
    let agent = crate::scripts::agent(&topology, "one").await;
    server_shows(&topology, "ready_backends", &[], 1.0).await;
    assert_eq!(tunnel_ready().await, Some(1.0));
    for path in ["/readyz", "/ready", "/readyz?verbose"] {
        page(health, path, 200, "ok").await;
    }
    drop(agent);
    eventually("unready again", LIMIT, async || {
        get(health, "/readyz").await.0 == 500
    })
    .await;
    for (addr, path) in [
        (health, "/livez"),
        (health, "/"),
        (admin, "/"),
        (admin, "/healthz"),
    ] {
        assert_eq!(get(addr, path).await.0, 404, "{path}");
    }
    for addr in [health, admin] {
        let (status, text) = get(addr, "/metrics").await;
        assert_eq!(status, 200);
        assert!(text.contains("konnectivity_network_proxy_server_ready_backends"));
        assert!(text.contains("process_open_fds"));
    }
}

#[tokio::test]
async fn agent_serves_health_and_readiness_pages_and_redirects_metrics() {
    let mut lone = Lone::new();
    lone.start(&["--proxy-server-port=1"], &[]);
    lone.shows("open_server_connections", 0.0).await;
    page(lone.health, "/healthz", 200, "ok").await;
    for path in ["/readyz", "/ready", "/readyz?verbose"] {
        let (status, body) = get(lone.health, path).await;
        assert_eq!(status, 503, "{path}");
        assert!(body.contains("[+]ping ok\n"), "{body:?}");
        assert!(
            body.contains("[-]server-connected failed: no servers connected\n"),
            "{body:?}"
        );
    }
    let topology = Topology::simple(Mode::Grpc, Transport::Uds).await;
    let (health, admin) = (topology.agent_health(0), topology.agent_admin(0));
    for path in ["/readyz", "/ready"] {
        page(health, path, 200, "ok").await;
    }
    let (status, body) = get(health, "/readyz?verbose").await;
    assert_eq!(status, 200);
    assert!(body.contains("[+]server-connected ok\n"), "{body:?}");
    assert!(body.contains("check passed"), "{body:?}");
    assert_eq!(get(health, "/livez").await.0, 404);
    let (status, headers, _) = http_get(admin, "/metrics").await.unwrap();
    assert_eq!(status, 301);
    let location = headers["location"].to_str().unwrap();
    assert!(
        location.contains(&format!("127.0.0.1:{}/metrics", health.port())),
        "{location}"
    );
}

/// Name, type and label names of a metric family.
type Expected = (&'static str, &'static str, &'static [&'static str]);

const SERVER: [Expected; 13] = [
    ("dial_duration_seconds", "histogram", &["le"]),
    ("frontend_write_duration_seconds", "histogram", &["le"]),
    ("connection_duration_seconds", "histogram", &["le"]),
    ("grpc_connections", "gauge", &["service_method"]),
    ("http_connections", "gauge", &[]),
    ("ready_backend_connections", "gauge", &[]),
    ("ready_backends", "gauge", &["proxy_strategy"]),
    ("pending_backend_dials", "gauge", &[]),
    ("established_connections", "gauge", &[]),
    ("full_receive_channels", "gauge", &["service_method"]),
    ("dial_failure_count", "counter", &["reason"]),
    (
        "stream_packets_total",
        "counter",
        &["packet_type", "segment"],
    ),
    (
        "stream_errors_total",
        "counter",
        &["code", "packet_type", "segment"],
    ),
];

const AGENT: [Expected; 8] = [
    ("dial_duration_seconds", "histogram", &["le"]),
    ("server_connection_failure_count", "counter", &["direction"]),
    ("endpoint_dial_failure_total", "counter", &["reason"]),
    ("open_server_connections", "gauge", &[]),
    ("known_server_count", "gauge", &[]),
    ("open_endpoint_connections", "gauge", &[]),
    (
        "stream_packets_total",
        "counter",
        &["packet_type", "segment"],
    ),
    (
        "stream_errors_total",
        "counter",
        &["code", "packet_type", "segment"],
    ),
];

fn assert_families(metrics: &culvert_tests::metrics::Metrics, prefix: &str, all: &[Expected]) {
    for (name, kind, labels) in all {
        let name = format!("{prefix}{name}");
        let type_line = format!("# TYPE {name} {kind}");
        assert!(
            metrics.text().lines().any(|line| line == type_line),
            "{type_line} is missing"
        );
        let help = format!("# HELP {name} ");
        let help = metrics
            .text()
            .lines()
            .find_map(|line| line.strip_prefix(&help));
        assert!(
            help.is_some_and(|text| !text.is_empty()),
            "{name} has no help"
        );
        let sampled = match *kind {
            "histogram" => format!("{name}_bucket"),
            _ => name,
        };
        let first = metrics.samples(&sampled).next();
        let first = first.unwrap_or_else(|| panic!("no sample of {sampled}"));
        let names: Vec<_> = first.labels.keys().map(String::as_str).collect();
        assert_eq!(names, *labels, "{sampled}");
    }
}

#[tokio::test]
async fn all_metric_families_are_present_after_some_use() {
    let services = Services::start().await.unwrap();
    let mut topology = Topology::simple(Mode::Grpc, Transport::Uds).await;
    Innocent::open(&topology, services.raw).await;
    refusal(&topology, "127.0.0.1:1").await;
    assert_families(
        &topology.agent_metrics(0).await,
        &agent_name(""),
        &AGENT[..7],
    );
    topology.kill_agent(0);
    server_shows(&topology, "ready_backends", &[], 0.0).await;
    assert_families(&topology.server_metrics(0).await, &server_name(""), &SERVER);
    topology.start_agent(0).await;
    topology.wait_for_agents().await;
    topology.kill_server(0);
    agent_shows(&topology, "open_server_connections", &[], 0.0).await;
    break_counted(&topology).await;
    let page = topology.agent_metrics(0).await;
    let of_errors = &AGENT[7..];
    assert_families(&page, &agent_name(""), of_errors);
    assert_families(
        &page,
        "culvert_",
        &[
            ("build_info", "gauge", &["component", "version"]),
            ("tunnel_bytes_total", "counter", &["direction"]),
            ("connections_closed_total", "counter", &["reason"]),
        ],
    );
}

/// Waits until the agent has counted its broken stream. Upstream's counter of failed sends must stay 0.
async fn break_counted(topology: &Topology) {
    let name = agent_name("server_connection_failure_count");
    eventually("from_server", LIMIT, async || {
        let metrics = topology.agent_metrics(0).await;
        value(&metrics, &name, &[("direction", "from_server")]) > 0.0
    })
    .await;
    let metrics = topology.agent_metrics(0).await;
    assert_eq!(value(&metrics, &name, &[("direction", "to_server")]), 0.0);
}

#[tokio::test]
async fn gauges_match_the_actual_state_and_return_to_zero() {
    let services = Services::start().await.unwrap();
    let hole = black_hole().await;
    for (mode, transport) in FRONTS {
        let topology = Topology::simple(mode, transport).await;
        let connects = [("service_method", "Connect")];
        let proxies = [("service_method", "Proxy")];
        server_shows(
            &topology,
            "ready_backends",
            &[("proxy_strategy", "default")],
            1.0,
        )
        .await;
        server_shows(&topology, "ready_backend_connections", &[], 1.0).await;
        server_shows(&topology, "grpc_connections", &connects, 1.0).await;
        agent_shows(&topology, "open_server_connections", &[], 1.0).await;
        agent_shows(&topology, "known_server_count", &[], 1.0).await;
        let mut held = Vec::new();
        for _ in 0..5 {
            held.push(Innocent::open(&topology, services.raw).await);
        }
        server_shows(&topology, "established_connections", &[], 5.0).await;
        agent_shows(&topology, "open_endpoint_connections", &[], 5.0).await;
        let (grpc, http) = match mode {
            Mode::Grpc => (5.0, 0.0),
            Mode::HttpConnect => (0.0, 5.0),
        };
        server_shows(&topology, "grpc_connections", &proxies, grpc).await;
        server_shows(&topology, "http_connections", &[], http).await;
        {
            let target = hole.addr().to_string();
            let dialing = topology.connect(&target);
            tokio::select! {
                _ = dialing => panic!("the dial ended"),
                () = server_shows(&topology, "pending_backend_dials", &[], 1.0) => {}
            }
        }
        held.truncate(2);
        server_shows(&topology, "established_connections", &[], 2.0).await;
        drop(held);
        server_is_idle(&topology).await;
        agent_shows(&topology, "open_endpoint_connections", &[], 0.0).await;
        let metrics = topology.server_metrics(0).await;
        for (histogram, count) in [
            ("connection_duration_seconds", 5.0),
            ("dial_duration_seconds", 5.0),
        ] {
            let name = format!("{}_count", server_name(histogram));
            assert_eq!(metrics.value(&name, &[]), Some(count), "{name}");
        }
    }
}

#[tokio::test]
async fn malformed_requests_do_not_disturb_health_and_admin_pages() {
    let mut topology = Topology::simple(Mode::Grpc, Transport::Uds).await;
    let listeners = [
        topology.server_health(0),
        topology.server_admin(0),
        topology.agent_health(0),
        topology.agent_admin(0),
    ];
    let requests: [&[u8]; 5] = [
        b"\x16\x03\x01\x02\x00\x01\x00\x01\xfc\x03\x03",
        b"POST /metrics HTTP/1.1\r\nHost: x\r\nContent-Length: 5\r\n\r\nhello",
        b"GET http://\xff/ HTTP/1.1\r\n\r\n",
        b"GET /metrics HTTP/1.1\r\nHost: a\r\nHost: b\r\n\r\n",
        b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n",
    ];
    for addr in listeners {
        for request in requests {
            let mut stream = TcpStream::connect(addr).await.unwrap();
            stream.write_all(request).await.unwrap();
            stream.shutdown().await.unwrap();
            let mut answer = Vec::new();
            timely("the end of an answer", stream.read_to_end(&mut answer))
                .await
                .ok();
        }
        let long = format!("GET /{} HTTP/1.1\r\nHost: x\r\n\r\n", "a".repeat(2 << 20));
        let mut stream = TcpStream::connect(addr).await.unwrap();
        stream.write_all(long.as_bytes()).await.ok();
        let mut answer = Vec::new();
        timely("the end of an answer", stream.read_to_end(&mut answer))
            .await
            .ok();
        assert!(!answer.starts_with(b"HTTP/1.1 200"));
    }
    page(topology.server_health(0), "/healthz", 200, "ok").await;
    page(topology.agent_health(0), "/healthz", 200, "ok").await;
    assert_unharmed(&mut topology).await;
}
