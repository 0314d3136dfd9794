//! Route changes while connections are open, and the end of the program.

use std::io::ErrorKind;
use std::net::SocketAddr;
use std::time::Duration;

use culvert_kit::check;
use culvert_kit::services::Services;
use culvert_tests::metrics::{http_get, http_post};
use culvert_tests::ports::Ports;
use culvert_tests::{Signal, eventually};
use http::StatusCode;
use tokio::io::{AsyncReadExt, AsyncWriteExt};
use tokio::net::{TcpListener, TcpStream};

use crate::support::{Door, Http2, LIMIT, TlsEndpoint, Upstream, ask, timely};

const RAW: &str = "raw.demo.svc.cluster.local:443";

#[tokio::test]
async fn changing_one_of_a_thousand_routes_closes_no_connection() {
    let services = Services::start().await.unwrap();
    let endpoint = TlsEndpoint::start("api.example.com").await;
    let mut upstreams: Vec<Upstream> = (0..1000)
        .map(|i| {
            Upstream::new(&format!("cluster-{i}/apiserver"), services.raw)
                .server_name(&format!("c{i}.example.com"))
                .authority(&format!("apiserver.cluster-{i}.svc.cluster.local:443"))
        })
        .collect();
    upstreams[7].endpoints = vec![endpoint.address];
    upstreams[7].server_names = vec!["api.example.com".to_owned()];
    let mut door = Door::start(&upstreams).await;
    let mut tls = endpoint
        .connect(door.sni, "api.example.com", rustls::ALL_VERSIONS)
        .await
        .unwrap();
    let client = Http2::connect(door.tunneling).await;
    let mut tunnels = Vec::new();
    for i in [0, 7, 500, 999] {
        let authority = format!("apiserver.cluster-{i}.svc.cluster.local:443");
        tunnels.push(client.open(&authority, b"").await.unwrap());
    }
    let port = door.ports.next_port();
    // One upstream gets another endpoint, one upstream is removed, and one upstream is added.
    upstreams[7].endpoints = vec![services.first];
    upstreams.remove(500);
    upstreams.push(Upstream::new("new/service", services.raw).node_port(port));
    door.route(&upstreams).await;
    assert_eq!(ask(&mut tls).await, "api.example.com");
    for (i, tunnel) in tunnels.iter_mut().enumerate().filter(|(i, _)| *i != 1) {
        tunnel.say(b"download 5\n");
        assert_eq!(tunnel.hear(9).await.len(), 5, "{i}");
    }
    eventually("the new node port is open", LIMIT, async || {
        TcpStream::connect(("127.0.0.1", port)).await.map(|_| ())
    })
    .await;
    assert_eq!(
        client
            .open("apiserver.cluster-500.svc.cluster.local:443", b"")
            .await
            .err(),
        Some(StatusCode::NOT_FOUND)
    );
    assert_eq!(
        door.value(
            "culvert_connections_closed_total",
            &[("reason", "shutdown")]
        )
        .await,
        0.0
    );
}

#[tokio::test]
async fn each_of_many_mistakes_in_the_file_is_reported() {
    let door = Door::start(&[]).await;
    let mut text = String::from("upstreams:\n");
    for entry in 0..30 {
        text += &format!("  - name: x{entry}\n    endpoints: [nowhere-{entry}-]\n");
    }
    std::fs::write(door.file(), text).unwrap();
    for entry in 0..30 {
        let name = format!("nowhere-{entry}-");
        door.program.wait_for_log(&name, LIMIT).await;
    }
}

#[tokio::test]
async fn an_invalid_file_is_reported_and_the_last_routes_stay() {
    let services = Services::start().await.unwrap();
    let door = Door::start(&[Upstream::new("demo/raw", services.raw).authority(RAW)]).await;
    let client = Http2::connect(door.tunneling).await;
    std::fs::write(
        door.file(),
        "upstreams:\n  - name: x\n    endpoints: [nowhere]\n",
    )
    .unwrap();
    let line = door.program.wait_for_log("nowhere", LIMIT).await;
    assert!(line.contains("door.yaml:3: "), "{line}");
    assert!(client.open(RAW, b"").await.is_ok());
    assert_eq!(
        door.value("culvert_nodeport_proxy_rejected_configs_total", &[])
            .await,
        1.0
    );
    let up = async || door.value("culvert_nodeport_proxy_source_up", &[]).await;
    let says = async |text: &str| {
        let what = format!("/readyz is 200 and contains {text:?}");
        eventually(&what, LIMIT, async || {
            let (status, detail) = door.readiness().await;
            let as_wanted = status == StatusCode::OK && detail.contains(text);
            as_wanted.then_some(()).ok_or(detail)
        })
        .await;
    };
    says("the file is not in force").await;
    assert_eq!(up().await, 0.0);
    std::fs::remove_file(door.file()).unwrap();
    says("cannot be read").await;
    assert_eq!(up().await, 0.0);
    assert!(client.open(RAW, b"").await.is_ok());
    door.route(&[]).await;
    assert_eq!(
        client.open(RAW, b"").await.err(),
        Some(StatusCode::NOT_FOUND)
    );
    eventually("/readyz reports no problem", LIMIT, async || {
        let (_, detail) = door.readiness().await;
        (detail == "ok").then_some(()).ok_or(detail)
    })
    .await;
    assert_eq!(up().await, 1.0);
}

#[tokio::test]
async fn a_drain_accepts_connections_for_a_while_and_lets_open_ones_finish() {
    let services = Services::start().await.unwrap();
    let mut door = Door::start_with(
        &[Upstream::new("demo/raw", services.raw).authority(RAW)],
        &["--drain-timeout=30s", "--drain-delay=2s"],
    )
    .await;
    let client = Http2::connect(door.tunneling).await;
    let mut tunnel = client.open(RAW, b"echo\n").await.unwrap();
    let (status, _, _) = http_get(door.stats, "/readyz").await.unwrap();
    assert_eq!(status, StatusCode::OK);
    door.program.signal(Signal::TERM);
    eventually("the proxy drains", LIMIT, async || {
        let (status, _, body) = http_get(door.stats, "/healthz").await?;
        anyhow::ensure!(
            status == StatusCode::SERVICE_UNAVAILABLE,
            "{status} {body:?}"
        );
        Ok::<_, anyhow::Error>(())
    })
    .await;
    // Services and load balancers learn of the drain later.
    let late = Http2::connect(door.tunneling).await;
    let mut late = late.open(RAW, b"echo\nlate").await.unwrap();
    assert_eq!(late.hear(4).await, b"late");
    late.finish();
    eventually("the listener is closed", LIMIT, async || {
        TcpStream::connect(door.tunneling).await.is_err()
    })
    .await;
    tunnel.say(b"still here");
    assert_eq!(tunnel.hear(10).await, b"still here");
    tunnel.finish();
    assert_eq!(tunnel.hear(1).await, b"");
    let status = door.program.wait_exit(LIMIT).await;
    assert!(status.success(), "{status}");
    drop(client);
}

#[tokio::test]
async fn healthcheck_fail_makes_health_and_readiness_fail_until_healthcheck_ok() {
    let services = Services::start().await.unwrap();
    let mut ports = Ports::default();
    let admin = SocketAddr::from(([127, 0, 0, 1], ports.next_port()));
    let door = Door::start_with(
        &[Upstream::new("demo/raw", services.raw).authority(RAW)],
        &[&format!("-envoy-admin-port={}", admin.port())],
    )
    .await;
    door.is_ready().await;
    let client = Http2::connect(door.tunneling).await;
    let live = async || door.value("envoy_server_live", &[]).await;
    let healthz = async || http_get(door.stats, "/healthz").await.unwrap().0;
    let post = async |path| http_post(admin, path).await.unwrap().0;
    assert_eq!((healthz().await, live().await), (StatusCode::OK, 1.0));
    // Repeated requests change nothing.
    for _ in 0..2 {
        assert_eq!(post("/healthcheck/fail").await, StatusCode::OK);
        assert_eq!(healthz().await, StatusCode::SERVICE_UNAVAILABLE);
        let (status, _, body) = http_get(door.stats, "/livez").await.unwrap();
        assert_eq!((status, &body[..]), (StatusCode::OK, &b"ok"[..]));
        let (status, text) = door.readiness().await;
        assert_eq!(status, StatusCode::SERVICE_UNAVAILABLE);
        assert!(text.contains("/healthcheck/fail"), "{text}");
        assert_eq!(live().await, 0.0);
    }
    // Traffic continues: a load balancer needs time to react.
    let mut tunnel = client.open(RAW, b"echo\nx").await.unwrap();
    assert_eq!(tunnel.hear(1).await, b"x");
    assert_eq!(post("/healthcheck/ok").await, StatusCode::OK);
    assert_eq!((healthz().await, live().await), (StatusCode::OK, 1.0));
    door.is_ready().await;
    // The port for probes, which others can reach, does not change the health.
    let elsewhere = http_post(door.stats, "/healthcheck/fail").await.unwrap();
    assert_eq!(elsewhere.0, StatusCode::NOT_FOUND);
    assert_eq!(healthz().await, StatusCode::OK);
}

#[tokio::test]
async fn open_connections_are_cut_after_the_drain_timeout_or_a_second_signal() {
    let services = Services::start().await.unwrap();
    for (flag, signals, code) in [("--drain-timeout=1s", 1, 0), ("--drain-timeout=5m", 2, 1)] {
        let upstreams = [Upstream::new("demo/raw", services.raw).authority(RAW)];
        let mut door = Door::start_with(&upstreams, &[flag]).await;
        let client = Http2::connect(door.tunneling).await;
        let mut tunnel = client.open(RAW, b"echo\n").await.unwrap();
        door.program.signal(Signal::TERM);
        door.program.wait_for_log("a second signal", LIMIT).await;
        if signals == 2 {
            door.program.signal(Signal::TERM);
        }
        let status = door.program.wait_exit(LIMIT).await;
        assert_eq!(status.code(), Some(code), "{flag}");
        let end = timely("the end", tunnel.receive.data()).await;
        assert!(!matches!(end, Some(Ok(_))), "{end:?}");
    }
}

#[tokio::test]
async fn endpoint_of_a_cut_connection_sees_a_reset() {
    let listener = TcpListener::bind("127.0.0.1:0").await.unwrap();
    let upstream = Upstream::new("demo/raw", listener.local_addr().unwrap());
    let mut door = Door::start_with(&[], &["--drain-timeout=1s"]).await;
    let port = door.ports.next_port();
    door.route(&[upstream.authority(RAW).node_port(port)]).await;
    let mut client = eventually("the port is open", LIMIT, async || {
        TcpStream::connect(("127.0.0.1", port)).await
    })
    .await;
    client.write_all(b"a part").await.unwrap();
    let http2 = Http2::connect(door.tunneling).await;
    let _tunnel = http2.open(RAW, b"a part").await.unwrap();
    let mut endpoints = Vec::new();
    for _ in 0..2 {
        let (mut endpoint, _) = timely("a client", listener.accept()).await.unwrap();
        let mut part = [0; 6];
        timely("a part", endpoint.read_exact(&mut part))
            .await
            .unwrap();
        endpoints.push(endpoint);
    }
    door.program.signal(Signal::TERM);
    for mut endpoint in endpoints {
        let end = timely("the end", endpoint.read(&mut [0])).await;
        assert_eq!(end.unwrap_err().kind(), ErrorKind::ConnectionReset);
    }
}

#[tokio::test]
async fn a_connection_outlives_its_route_and_ends_with_its_endpoint() {
    let services = Services::start().await.unwrap();
    let mut door = Door::start(&[]).await;
    let port = door.ports.next_port();
    door.route(&[Upstream::new("ns/a", services.raw).node_port(port)])
        .await;
    eventually("the port is open", LIMIT, async || {
        TcpStream::connect(("127.0.0.1", port)).await.map(|_| ())
    })
    .await;
    let stream = TcpStream::connect(("127.0.0.1", port)).await.unwrap();
    check::echo(
        TcpStream::connect(("127.0.0.1", port)).await.unwrap(),
        1,
        10,
    )
    .await
    .unwrap();
    door.route(&[]).await;
    let mut stream = stream;
    stream.write_all(b"echo\nx").await.unwrap();
    assert_eq!(timely("an echo", stream.read_u8()).await.unwrap(), b'x');
    services.shutdown().await;
    assert_eq!(
        timely("the end", stream.read(&mut [0])).await.unwrap_or(0),
        0
    );
}

#[tokio::test]
async fn a_drain_keeps_the_connections_of_every_thread() {
    let services = Services::start().await.unwrap();
    let flags = ["--worker-threads=3", "--drain-timeout=30s"];
    let mut door = Door::start_with(&[], &flags).await;
    let port = door.ports.next_port();
    door.route(&[Upstream::new("ns/a", services.raw).node_port(port)])
        .await;
    eventually("the port is open", LIMIT, async || {
        TcpStream::connect(("127.0.0.1", port)).await.map(|_| ())
    })
    .await;
    let mut open = Vec::new();
    for _ in 0..6 {
        let mut stream = TcpStream::connect(("127.0.0.1", port)).await.unwrap();
        stream.write_all(b"echo\n").await.unwrap();
        // Enough bytes at once that the connections spread over the threads.
        let sent: Vec<_> = (0..2_000_000_u32).map(|i| (i % 251) as u8).collect();
        let mut heard = vec![0; sent.len()];
        let (mut read, mut write) = stream.split();
        let echo = tokio::try_join!(write.write_all(&sent), read.read_exact(&mut heard));
        echo.unwrap();
        assert!(heard == sent);
        open.push(stream);
    }
    // Each thread serves two connections with two sockets each.
    let watched = watched_per_thread(door.program.pid());
    assert!(watched.len() >= 3, "{watched:?}");
    assert!(watched.iter().all(|sockets| *sockets >= 4), "{watched:?}");
    door.program.signal(Signal::TERM);
    eventually("the listener is closed", LIMIT, async || {
        TcpStream::connect(door.tunneling).await.is_err()
    })
    .await;
    // Longer than the threads of an exiting program need to stop.
    tokio::time::sleep(Duration::from_millis(300)).await;
    for mut stream in open {
        stream.write_all(b"y").await.unwrap();
        assert_eq!(timely("an echo", stream.read_u8()).await.unwrap(), b'y');
    }
    let status = door.program.wait_exit(LIMIT).await;
    assert!(status.success(), "{status}");
}

/// Returns the number of sockets that each epoll descriptor of a process watches. A thread may have two
/// descriptors of its epoll instance.
fn watched_per_thread(pid: u32) -> Vec<usize> {
    let path = |file: &str| format!("/proc/{pid}/{file}");
    let is_socket = |fd: &str| {
        let link = std::fs::read_link(path(&format!("fd/{fd}"))).unwrap_or_default();
        link.to_string_lossy().starts_with("socket:")
    };
    let mut watched = Vec::new();
    for entry in std::fs::read_dir(path("fdinfo")).unwrap() {
        // The descriptor may be closed by now.
        let Ok(info) = std::fs::read_to_string(entry.unwrap().path()) else {
            continue;
        };
        let targets = info.lines().filter_map(|line| line.strip_prefix("tfd:"));
        let fds = targets.filter_map(|line| line.split_whitespace().next());
        let fds: Vec<_> = fds.collect();
        if !fds.is_empty() {
            watched.push(fds.iter().filter(|fd| is_socket(fd)).count());
        }
    }
    watched
}

#[tokio::test]
async fn a_service_that_returns_keeps_its_connection_count_and_metrics() {
    let services = Services::start().await.unwrap();
    let routes = [Upstream::new("demo/raw", services.raw).authority(RAW)];
    let door = Door::start_with(&routes, &["--max-connections=2"]).await;
    let client = Http2::connect(door.tunneling).await;
    let open = async || client.open(RAW, b"echo\n").await;
    let mut one = open().await.unwrap();
    let _other = open().await.unwrap();
    door.route(&[]).await;
    assert_eq!(open().await.err(), Some(StatusCode::NOT_FOUND));
    door.route(&routes).await;
    // The open connections still count towards the limit.
    assert_eq!(open().await.err(), Some(StatusCode::SERVICE_UNAVAILABLE));
    let cluster = [("envoy_cluster_name", "demo/raw")];
    for (series, expected) in [("active", 2.0), ("total", 2.0), ("overflow", 1.0)] {
        let name = format!("envoy_cluster_upstream_cx_{series}");
        assert_eq!(door.value(&name, &cluster).await, expected, "{series}");
    }
    one.say(b"x");
    assert_eq!(one.hear(1).await, b"x");
    one.finish();
    assert_eq!(one.hear(1).await, b"");
    eventually("a new connection is accepted again", LIMIT, async || {
        open()
            .await
            .map(|_| ())
            .map_err(|status| status.to_string())
    })
    .await;
}
