//! The node tunnel, with our front door and with Envoy at the seed.

use std::net::SocketAddr;

use culvert_kit::check;
use culvert_kit::pki::Pki;
use culvert_kit::services::Services;
use culvert_tests::envoy::{self, Envoy, Seed};
use culvert_tests::haproxy::HaProxy;
use culvert_tests::kube_api::KubeApi;
use culvert_tests::metrics::{http_get, scrape};
use culvert_tests::ports::Ports;
use culvert_tests::rotation::{count, uses};
use culvert_tests::{Program, Signal, eventually};
use http::StatusCode;
use tokio::io::{AsyncBufReadExt as _, AsyncReadExt, AsyncWriteExt};
use tokio::net::{TcpListener, TcpStream};
use tokio::sync::watch;

use crate::support::{Door, LIMIT, Upstream, stands_still, timely};

const RAW: &str = "raw.demo.svc.cluster.local:443";
const HALF: &str = "half.demo.svc.cluster.local:443";
const GONE: &str = "gone.demo.svc.cluster.local:443";

/// A running node tunnel.
pub(crate) struct Node {
    program: Program,
    stats: SocketAddr,
    _ports: Ports,
    listeners: Vec<SocketAddr>,
}

impl Node {
    /// Starts a node tunnel with one listener for each authority.
    pub(crate) async fn start(proxy: SocketAddr, authorities: &[&str], flags: &[&str]) -> Self {
        Self::start_with(proxy, authorities, flags, &[]).await
    }

    /// Does the same as [`start`](Self::start), with environment variables.
    async fn start_with(
        proxy: SocketAddr,
        authorities: &[&str],
        flags: &[&str],
        env: &[(&str, &str)],
    ) -> Self {
        let mut ports = Ports::default();
        let mut next = || SocketAddr::from(([127, 0, 0, 1], ports.next_port()));
        let stats = next();
        let listeners: Vec<SocketAddr> = authorities.iter().map(|_| next()).collect();
        let mut args = vec![
            format!("--proxy={proxy}"),
            "--stats-address=127.0.0.1".to_owned(),
            format!("--stats-port={}", stats.port()),
            "-v=4".to_owned(),
        ];
        for (listen, authority) in listeners.iter().zip(authorities) {
            args.push(format!("--listen={listen}={authority}"));
        }
        args.extend(flags.iter().map(|flag| (*flag).to_owned()));
        let node = Self {
            program: Program::spawn("culvert-node-tunnel", &args, env),
            stats,
            _ports: ports,
            listeners,
        };
        node.serves().await;
        node
    }

    async fn serves(&self) {
        eventually("the node tunnel serves", LIMIT, async || {
            scrape(self.stats).await
        })
        .await;
    }

    async fn connect(&self, listener: usize) -> TcpStream {
        TcpStream::connect(self.listeners[listener]).await.unwrap()
    }

    pub(crate) async fn is_ready(&self) {
        eventually("the node tunnel is ready", LIMIT, async || {
            let (status, _, body) = http_get(self.stats, "/readyz").await?;
            anyhow::ensure!(status == StatusCode::OK, "{status} {body:?}");
            anyhow::Ok(())
        })
        .await;
    }

    async fn value(&self, name: &str, labels: &[(&str, &str)]) -> f64 {
        let metrics = scrape(self.stats).await.unwrap();
        metrics.value(name, labels).unwrap_or_default()
    }
}

/// Checks all traffic that a node must carry, with any proxy at the seed.
async fn carries(node: &Node, download: u64) {
    check::download(node.connect(0).await, download)
        .await
        .unwrap();
    check::upload(node.connect(0).await, 20_000_000)
        .await
        .unwrap();
    let many = (0..100).map(|_| async { check::echo(node.connect(0).await, 5, 2000).await });
    for outcome in futures_util::future::join_all(many).await {
        outcome.unwrap();
    }
    let mut half = node.connect(1).await;
    half.write_all(b"1234567").await.unwrap();
    half.shutdown().await.unwrap();
    let mut answer = String::new();
    timely("the answer", half.read_to_string(&mut answer))
        .await
        .unwrap();
    assert_eq!(answer, "7\n");
    for refused in [2, 3] {
        let mut stream = node.connect(refused).await;
        assert_eq!(
            timely("the end", stream.read(&mut [0])).await.unwrap_or(0),
            0
        );
    }
    // Tunnels still work after the refusals.
    check::echo(node.connect(0).await, 2, 100).await.unwrap();
}

const UNKNOWN: &str = "unknown.demo.svc.cluster.local:1";

#[tokio::test]
async fn node_tunnel_works_with_our_front_door() {
    let services = Services::start().await.unwrap();
    let gone = ([127, 0, 0, 1], 1).into();
    let door = Door::start(&[
        Upstream::new("demo/raw", services.raw).authority(RAW),
        Upstream::new("demo/half", services.half).authority(HALF),
        Upstream::new("demo/gone", gone).authority(GONE),
    ])
    .await;
    let node = Node::start(door.tunneling, &[RAW, HALF, GONE, UNKNOWN], &[]).await;
    node.is_ready().await;
    carries(&node, 60_000_000).await;
    let refused = async |reason| {
        let labels = [("reason", reason)];
        node.value("culvert_node_tunnel_refused_total", &labels)
            .await
    };
    assert_eq!((refused("404").await, refused("503").await), (1.0, 1.0));
    // The log line contains the remedy.
    let line = node.program.wait_for_log("answered 404", LIMIT).await;
    assert!(line.contains("nodeport-proxy.k8s.io/expose"), "{line}");
    door.has_refused("tunneling", "unknown", 1.0).await;
    let cluster = [("envoy_cluster_name", "proxy_cluster")];
    let received = node
        .value("envoy_cluster_upstream_cx_rx_bytes_total", &cluster)
        .await;
    assert!(received > 60_000_000.0, "{received}");
}

#[tokio::test]
async fn client_beyond_max_connections_is_closed_and_the_log_names_the_flag() {
    let services = Services::start().await.unwrap();
    let door = door(&services, &["--max-connections=1"]).await;
    let node = Node::start(door.tunneling, &[RAW], &[]).await;
    let mut first = node.connect(0).await;
    first.write_all(b"echo\nx").await.unwrap();
    assert_eq!(timely("an echo", first.read_u8()).await.unwrap(), b'x');
    let mut second = node.connect(0).await;
    let end = timely("the end", second.read(&mut [0])).await;
    assert_eq!(end.unwrap_or(0), 0);
    let text = "raise --max-connections of the nodeport-proxy";
    node.program.wait_for_log(text, LIMIT).await;
    let labels = [("reason", "503")];
    let refused = node.value("culvert_node_tunnel_refused_total", &labels);
    assert_eq!(refused.await, 1.0);
    let clients = node.value("culvert_node_tunnel_clients_total", &[]);
    assert_eq!(clients.await, 2.0);
    first.write_all(b"y").await.unwrap();
    assert_eq!(timely("an echo", first.read_u8()).await.unwrap(), b'y');
}

#[tokio::test]
async fn node_tunnel_works_with_envoy() {
    let Some(envoy) = Envoy::get() else { return };
    let services = Services::start().await.unwrap();
    let mut ports = Ports::default();
    let mut seed = Seed::new(&mut ports);
    for (authority, cluster, endpoint) in [
        (RAW, "raw", services.raw),
        (HALF, "half", services.half),
        (GONE, "gone", ([127, 0, 0, 1], 1).into()),
    ] {
        seed.authorities
            .insert(authority.to_owned(), cluster.to_owned());
        seed.clusters.insert(cluster.to_owned(), vec![endpoint]);
    }
    let _running = envoy.start(&seed.bootstrap()).await;
    let node = Node::start(seed.tunnel, &[RAW, HALF, GONE, UNKNOWN], &[]).await;
    node.is_ready().await;
    // If the endpoint closes first, Envoy loses all bytes beyond the stream window of 16 MiB.
    carries(&node, 15_000_000).await;
}

/// Returns a front door with the routes of [`carries`].
async fn door(services: &Services, flags: &[&str]) -> Door {
    let gone = ([127, 0, 0, 1], 1).into();
    let upstreams = [
        Upstream::new("demo/raw", services.raw).authority(RAW),
        Upstream::new("demo/half", services.half).authority(HALF),
        Upstream::new("demo/gone", gone).authority(GONE),
    ];
    Door::start_with(&upstreams, flags).await
}

/// A node's Envoy and the node tunnel use the same file.
#[tokio::test]
async fn bootstrap_file_of_a_nodes_envoy_configures_the_node_tunnel() {
    let services = Services::start().await.unwrap();
    let door = door(&services, &[]).await;
    let mut ports = Ports::default();
    let [raw, half, gone, unknown, stats] =
        [(); 5].map(|()| SocketAddr::from(([127, 0, 0, 1], ports.next_port())));
    let routes = [(raw, RAW), (half, HALF), (gone, GONE), (unknown, UNKNOWN)];
    let bootstrap = envoy::node(&mut ports, &routes, door.tunneling);
    let dir = tempfile::tempdir().unwrap();
    let path = dir.path().join("envoy.yaml");
    std::fs::write(&path, bootstrap.config.to_string()).unwrap();
    let args = [
        "--config-path".to_owned(),
        path.display().to_string(),
        "--use-dynamic-base-id".to_owned(),
        "--stats-address=127.0.0.1".to_owned(),
        format!("--stats-port={}", stats.port()),
    ];
    let node = Node {
        program: Program::spawn("culvert-node-tunnel", args, &[]),
        stats,
        _ports: ports,
        listeners: routes.map(|(listen, _)| listen).to_vec(),
    };
    node.is_ready().await;
    carries(&node, 1_000_000).await;
}

/// Flags of a front door that requires a client certificate.
fn mutual_tls(pki: &Pki) -> [String; 3] {
    [
        format!("--tunneling-cert={}", pki.cluster.cert.display()),
        format!("--tunneling-key={}", pki.cluster.key.display()),
        format!("--tunneling-client-ca={}", pki.ca.display()),
    ]
}

/// Flags of a node tunnel with a client certificate.
fn client_tls(pki: &Pki) -> [String; 3] {
    [
        format!("--proxy-ca={}", pki.ca.display()),
        format!("--proxy-cert={}", pki.agent.cert.display()),
        format!("--proxy-key={}", pki.agent.key.display()),
    ]
}

#[tokio::test]
async fn node_tunnel_works_over_mutual_tls_with_our_front_door() {
    let dir = tempfile::tempdir().unwrap();
    let pki = Pki::create(dir.path()).unwrap();
    let services = Services::start().await.unwrap();
    let flags = mutual_tls(&pki);
    let door = door(&services, &flags.each_ref().map(String::as_str)).await;
    let flags = client_tls(&pki);
    let [ca, cert, key] = flags.each_ref().map(String::as_str);
    let authorities = [RAW, HALF, GONE, UNKNOWN];
    let node = Node::start(door.tunneling, &authorities, &[ca, cert, key]).await;
    node.is_ready().await;
    carries(&node, 20_000_000).await;
    for (flags, part) in [
        (&[][..], "needs --proxy-ca"),
        (&[ca], "(--proxy-cert, --proxy-key)"),
        (
            &[ca, cert, key, "--proxy-server-name=other.example.com"],
            "check --proxy-ca, --proxy-cert and --proxy-server-name",
        ),
    ] {
        let refused = Node::start(door.tunneling, &[RAW], flags).await;
        let text = "cannot connect to the proxy";
        let line = refused.program.wait_for_log(text, LIMIT).await;
        assert!(line.contains(part), "{flags:?}: {line}");
        let (status, ..) = http_get(refused.stats, "/readyz").await.unwrap();
        assert_eq!(status, StatusCode::SERVICE_UNAVAILABLE, "{flags:?}");
    }
}

#[tokio::test]
async fn renewed_client_certificate_is_used_without_a_restart() {
    let dir = tempfile::tempdir().unwrap();
    let pki = Pki::create(dir.path()).unwrap();
    let strangers = tempfile::tempdir().unwrap();
    let stranger = Pki::create(strangers.path()).unwrap();
    let services = Services::start().await.unwrap();
    let door_flags = mutual_tls(&pki);
    let door_flags = door_flags.each_ref().map(String::as_str);
    let first = door(&services, &door_flags).await;
    let (address, target) = balancer(first.tunneling).await;
    // The certificate of the other authority is like one that has expired.
    let flags = [
        format!("--proxy-ca={}", pki.ca.display()),
        format!("--proxy-cert={}", stranger.agent.cert.display()),
        format!("--proxy-key={}", stranger.agent.key.display()),
    ];
    let flags = flags.each_ref().map(String::as_str);
    let node = Node::start(address, &[RAW], &flags).await;
    let text = "cannot connect to the proxy";
    let line = node.program.wait_for_log(text, LIMIT).await;
    assert!(line.contains("(--proxy-cert, --proxy-key)"), "{line}");
    std::fs::copy(&pki.agent.key, &stranger.agent.key).unwrap();
    std::fs::copy(&pki.agent.cert, &stranger.agent.cert).unwrap();
    node.is_ready().await;
    check::echo(node.connect(0).await, 2, 100).await.unwrap();
    uses(node.stats, "proxy", Some(&pki.agent.cert), Some(&pki.ca)).await;

    // Files that cannot be used leave the last good ones in use, also for new connections.
    std::fs::write(&stranger.agent.key, "no key").unwrap();
    eventually("the bad key is noticed", LIMIT, async || {
        let failed = count(node.stats, "proxy", "failed").await;
        (failed > 0.0).then_some(()).ok_or(failed)
    })
    .await;
    let next = door(&services, &door_flags).await;
    target.send(next.tunneling).unwrap();
    first.program.kill();
    eventually("connections work again", LIMIT, async || {
        check::echo(node.connect(0).await, 2, 100).await.map(|_| ())
    })
    .await;
}

#[tokio::test]
async fn node_tunnel_works_through_haproxy_that_ends_mutual_tls() {
    let Some(haproxy) = HaProxy::get() else {
        return;
    };
    let dir = tempfile::tempdir().unwrap();
    let pki = Pki::create(dir.path()).unwrap();
    let services = Services::start().await.unwrap();
    let door = door(&services, &[]).await;
    let identity = dir.path().join("haproxy.pem");
    let read = |path| std::fs::read_to_string(path).unwrap();
    let text = read(&pki.cluster.cert) + &read(&pki.cluster.key);
    std::fs::write(&identity, text).unwrap();
    let mut ports = Ports::default();
    let listen = ([127, 0, 0, 1], ports.next_port()).into();
    let running = haproxy.terminate(listen, &identity, &pki.ca, door.tunneling);
    let _running = running.await;
    let mut flags = client_tls(&pki).to_vec();
    flags.push("--proxy-server-name=localhost".to_owned());
    let flags: Vec<&str> = flags.iter().map(String::as_str).collect();
    let node = Node::start(listen, &[RAW, HALF, GONE, UNKNOWN], &flags).await;
    node.is_ready().await;
    carries(&node, 20_000_000).await;
}

#[tokio::test]
async fn health_checks_of_haproxy_pass() {
    let Some(haproxy) = HaProxy::get() else {
        return;
    };
    let services = Services::start().await.unwrap();
    let door = door(&services, &[]).await;
    let node = Node::start(door.tunneling, &[RAW], &[]).await;
    node.is_ready().await;
    let mut ports = Ports::default();
    for (health, path) in [
        (door.stats, "/healthz"),
        (door.stats, "/readyz"),
        (door.stats, "/livez"),
        (node.stats, "/healthz"),
        (node.stats, "/readyz"),
    ] {
        let listen = SocketAddr::from(([127, 0, 0, 1], ports.next_port()));
        let checking = haproxy.check(listen, node.listeners[0], health, path);
        let (_running, line) = checking.await;
        let has_passed = line.contains("Layer7 check passed, code: 200");
        assert!(has_passed, "{path}: {line}");
        let client = TcpStream::connect(listen).await.unwrap();
        let echoed = check::echo(client, 2, 100);
        timely("an echo through haproxy", echoed).await.unwrap();
    }
}

#[tokio::test]
async fn proxy_that_cannot_be_reached_is_named_with_its_flag() {
    let closed = ([127, 0, 0, 1], Ports::default().next_port()).into();
    let node = Node::start(closed, &[RAW], &[]).await;
    let text = "cannot connect to the proxy";
    let line = node.program.wait_for_log(text, LIMIT).await;
    assert!(line.contains("connection refused; check --proxy"), "{line}");
}

#[tokio::test]
async fn node_tunnel_uses_the_http_proxy_of_the_environment() {
    let services = Services::start().await.unwrap();
    let door = door(&services, &[]).await;
    let target = door.tunneling;
    let proxy = TcpListener::bind("127.0.0.1:0").await.unwrap();
    let url = format!("http://{}", proxy.local_addr().unwrap());
    let (asks, mut asked) = tokio::sync::mpsc::unbounded_channel();
    tokio::spawn(async move {
        while let Ok((client, _)) = proxy.accept().await {
            let asks = asks.clone();
            tokio::spawn(async move {
                let mut client = tokio::io::BufReader::new(client);
                let mut head = String::new();
                while !head.ends_with("\r\n\r\n") {
                    client.read_line(&mut head).await?;
                }
                asks.send(head).ok();
                client.write_all(b"HTTP/1.1 200 OK\r\n\r\n").await?;
                let mut server = TcpStream::connect(target).await?;
                tokio::io::copy_bidirectional(&mut client, &mut server).await
            });
        }
    });
    // Proxies are never used for loopback addresses, and 0.0.0.0 is not one of them.
    let address = SocketAddr::from(([0, 0, 0, 0], target.port()));
    let env = [("HTTPS_PROXY", url.as_str())];
    let node = Node::start_with(address, &[RAW], &[], &env).await;
    let head = timely("a request to the proxy", asked.recv())
        .await
        .unwrap();
    assert!(
        head.starts_with(&format!("CONNECT {address} HTTP/1.1\r\n")),
        "{head}"
    );
    node.is_ready().await;
    check::echo(node.connect(0).await, 2, 100).await.unwrap();
    let direct = [env[0], ("NO_PROXY", "0.0.0.0")];
    let node = Node::start_with(address, &[RAW], &[], &direct).await;
    node.is_ready().await;
    while let Ok(head) = asked.try_recv() {
        assert!(head.starts_with("CONNECT"), "{head}");
    }
    check::echo(node.connect(0).await, 2, 100).await.unwrap();
    assert!(asked.try_recv().is_err());
}

#[tokio::test]
async fn a_client_that_reads_nothing_stalls_only_itself() {
    let services = Services::start().await.unwrap();
    let door = Door::start(&[Upstream::new("demo/raw", services.raw).authority(RAW)]).await;
    let node = Node::start(door.tunneling, &[RAW], &["--connections=1"]).await;
    let mut stalled = Vec::new();
    for _ in 0..8 {
        let mut stream = node.connect(0).await;
        stream.write_all(b"download 1000000000\n").await.unwrap();
        stalled.push(stream);
    }
    stands_still(&door, LIMIT).await;
    check::download(node.connect(0).await, 5_000_000)
        .await
        .unwrap();
    check::echo(node.connect(0).await, 20, 1000).await.unwrap();
}

/// Starts a relay that keeps its address, like a load balancer, while its target changes.
async fn balancer(target: SocketAddr) -> (SocketAddr, watch::Sender<SocketAddr>) {
    let balancer = TcpListener::bind("127.0.0.1:0").await.unwrap();
    let address = balancer.local_addr().unwrap();
    let (target, current) = watch::channel(target);
    tokio::spawn(async move {
        while let Ok((mut client, _)) = balancer.accept().await {
            let target = *current.borrow();
            tokio::spawn(async move {
                let mut server = TcpStream::connect(target).await?;
                tokio::io::copy_bidirectional(&mut client, &mut server).await
            });
        }
    });
    (address, target)
}

#[tokio::test]
async fn node_tunnel_reconnects_to_a_restarted_front_door() {
    let services = Services::start().await.unwrap();
    let upstreams = [Upstream::new("demo/raw", services.raw).authority(RAW)];
    let door = Door::start(&upstreams).await;
    let (address, target) = balancer(door.tunneling).await;
    let node = Node::start(address, &[RAW], &[]).await;
    node.is_ready().await;
    check::echo(node.connect(0).await, 2, 100).await.unwrap();
    let next = Door::start(&upstreams).await;
    target.send(next.tunneling).unwrap();
    door.program.kill();
    // New connections may fail for a short time.
    eventually("connections work again", LIMIT, async || {
        check::echo(node.connect(0).await, 2, 100).await.map(|_| ())
    })
    .await;
    let labels = [("envoy_cluster_name", "demo/raw")];
    assert!(next.value("envoy_cluster_upstream_rq_total", &labels).await >= 1.0);
}

#[tokio::test]
async fn a_draining_node_tunnel_serves_until_no_client_is_connected() {
    let services = Services::start().await.unwrap();
    let door = Door::start(&[Upstream::new("demo/raw", services.raw).authority(RAW)]).await;
    let mut node = Node::start(door.tunneling, &[RAW], &["--drain-timeout=30s"]).await;
    let mut stream = node.connect(0).await;
    stream.write_all(b"echo\nx").await.unwrap();
    assert_eq!(timely("an echo", stream.read_u8()).await.unwrap(), b'x');
    node.program.signal(Signal::TERM);
    eventually("the node tunnel drains", LIMIT, async || {
        let (status, ..) = http_get(node.stats, "/readyz").await.unwrap();
        (status != StatusCode::OK).then_some(()).ok_or(status)
    })
    .await;
    // No other program on the node has the address.
    check::echo(node.connect(0).await, 2, 100).await.unwrap();
    stream.write_all(b"y").await.unwrap();
    assert_eq!(timely("an echo", stream.read_u8()).await.unwrap(), b'y');
    stream.shutdown().await.unwrap();
    assert_eq!(timely("the end", stream.read(&mut [0])).await.unwrap(), 0);
    let status = node.program.wait_exit(LIMIT).await;
    assert!(status.success(), "{status}");
}

#[tokio::test]
async fn node_tunnel_names_the_limit_or_list_that_refuses_its_client() {
    let services = Services::start().await.unwrap();
    let listed = Upstream::new("demo/listed", services.raw).authority(GONE);
    let raw = Upstream::new("demo/raw", services.raw).authority(RAW);
    let upstreams = [raw, listed.allowed("192.0.2.0/24")];
    let door = Door::start_with(&upstreams, &["--max-connections=1"]).await;
    let node = Node::start(door.tunneling, &[RAW, GONE], &[]).await;
    let mut first = node.connect(0).await;
    first.write_all(b"echo\nx").await.unwrap();
    assert_eq!(timely("an echo", first.read_u8()).await.unwrap(), b'x');
    let mut second = node.connect(0).await;
    assert_eq!(timely("the end", second.read(&mut [0])).await.unwrap(), 0);
    let mut third = node.connect(1).await;
    assert_eq!(timely("the end", third.read(&mut [0])).await.unwrap(), 0);
    let limit = "raise --max-connections";
    node.program.wait_for_log(limit, LIMIT).await;
    door.program.wait_for_log(limit, LIMIT).await;
    let list = "nodeport-proxy.k8s.io/allowed-networks";
    node.program.wait_for_log(list, LIMIT).await;
}

#[tokio::test]
async fn panic_in_a_long_lived_task_ends_the_process() {
    let endpoint = Services::start().await.unwrap().raw;
    let mut door = Door::start(&[]).await;
    let port = door.ports.next_port();
    door.route(&[Upstream::new("raw", endpoint).node_port(port)])
        .await;
    let node = Node::start(door.tunneling, &[RAW], &[]).await;
    let of_node = node.program.args();
    node.program.kill();
    let tasks = ["pool", "stats", "metrics", "listener"];
    Program::panics("culvert-node-tunnel", &of_node, &tasks, LIMIT).await;
    let Door { program, dir, .. } = door;
    let of_door = program.args();
    program.kill();
    let tasks = [
        "routes",
        "node ports",
        "node port",
        "stats",
        "metrics",
        "reload",
        "server names",
        "CONNECT",
    ];
    Program::panics("culvert-nodeport-proxy", &of_door, &tasks, LIMIT).await;
    let api = KubeApi::start().await;
    let kubeconfig = format!("--kubeconfig={}", api.kubeconfig(dir.path()).display());
    let from_file = |arg: &String| !arg.starts_with("--config=");
    let mut of_door: Vec<String> = of_door.into_iter().filter(from_file).collect();
    of_door.push(kubeconfig);
    Program::panics("culvert-nodeport-proxy", &of_door, &["discovery"], LIMIT).await;
}
