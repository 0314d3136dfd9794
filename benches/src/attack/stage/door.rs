//! The front door with one Service, or Envoy with the same routes.

use std::net::{Ipv4Addr, SocketAddr, UdpSocket};
use std::time::Duration;

use anyhow::{Context as _, ensure};
use bytes::Bytes;
use culvert_tests::envoy::{Envoy, Seed};
use culvert_tests::hello::client_hello;
use culvert_tests::metrics::http_get;
use culvert_tests::ports::Ports;
use culvert_tests::{Program, eventually};
use serde_json::json;
use tempfile::TempDir;

use super::{Attacked, Make, Stage};
use crate::attack::honest::{Probe, Purpose};
use crate::attack::networks::Networks;
use crate::attack::rows::{Listener, Setting};
use crate::endpoint::Endpoints;
use crate::harness::harness;
use crate::names::PROXY;
use crate::programs::Programs;

/// Server name and authority of the Service.
const NAME: &str = "service.bench.example.com";
pub(in crate::attack) const AUTHORITY: &str = "service.bench.svc.cluster.local:443";

/// Time limit for the front door to become ready.
const START_LIMIT: Duration = Duration::from_secs(20);

/// Our running front door.
pub(super) struct Door {
    pub(super) program: Program,
    /// UDP port of the endpoint, which reads nothing.
    _udp: UdpSocket,
    _dir: TempDir,
}

/// Ports of the listeners.
struct Listeners {
    sni: u16,
    connect: u16,
    node_port: u16,
    stats: u16,
}

/// Starts a front door with the default limit of connections per Service.
pub(super) async fn start(
    make: Make,
    front: Listener,
    setting: Setting,
    programs: &Programs,
    networks: &Networks,
) -> anyhow::Result<Stage> {
    let endpoints = Endpoints::start().await?;
    let target = endpoints.lean();
    let mut ports = Ports::default();
    let (attacked, listeners) = match make {
        Make::Ours => {
            let [sni, connect, node_port, stats] = [(); 4].map(|()| ports.next_port());
            let listeners = Listeners {
                sni,
                connect,
                node_port,
                stats,
            };
            let door = harness(ours(programs, networks, setting, &listeners, target)).await??;
            (Attacked::Door(Box::new(door)), listeners)
        }
        Make::Stock => harness(envoy(networks, &mut ports, target)).await??,
    };
    let address = networks.address();
    let to = |port: u16| SocketAddr::from((address, port));
    let hello = Bytes::from(client_hello(NAME));
    let stats = to(listeners.stats);
    let get = format!("GET /healthz HTTP/1.1\r\nHost: {stats}\r\n\r\n");
    let connect = format!("CONNECT {AUTHORITY} HTTP/1.1\r\nHost: {AUTHORITY}\r\n\r\n");
    let sni = |hello: &Bytes| Probe::Echo {
        to: to(listeners.sni),
        first: hello.clone(),
    };
    let (at, greeting, client) = match front {
        Listener::Connect => {
            let to = to(listeners.connect);
            let authority = AUTHORITY.to_owned();
            (to, Bytes::from(connect), Probe::Connect { to, authority })
        }
        Listener::NodePort => {
            let (to, first) = (to(listeners.node_port), Bytes::new());
            (to, Bytes::new(), Probe::Echo { to, first })
        }
        Listener::Stats => (stats, Bytes::from(get), sni(&hello)),
        _ => (to(listeners.sni), hello.clone(), sni(&hello)),
    };
    let health = Probe::Get {
        to: stats,
        path: "/healthz",
    };
    Ok(Stage {
        attacked,
        at,
        greeting,
        name: NAME,
        tls: None,
        probes: vec![(Purpose::Client, client), (Purpose::Health, health)],
        api: None,
        _endpoints: endpoints,
    })
}

async fn ours(
    programs: &Programs,
    networks: &Networks,
    setting: Setting,
    listeners: &Listeners,
    target: SocketAddr,
) -> anyhow::Result<Door> {
    let dir = tempfile::Builder::new().prefix("culvert-").tempdir()?;
    let mut upstream = json!({
        "name": "bench/service",
        "endpoints": [target.to_string()],
        "serverNames": [NAME],
        "authorities": [AUTHORITY],
        "nodePorts": [listeners.node_port],
    });
    let quic = match setting {
        Setting::Quic => {
            if let Some(upstream) = upstream.as_object_mut() {
                upstream.insert("quicPort".to_owned(), json!("same"));
            }
            listeners.sni
        }
        _ => 0,
    };
    // JSON is also YAML.
    let file = dir.path().join("door.yaml");
    std::fs::write(&file, json!({ "upstreams": [upstream] }).to_string())?;
    let flags = [
        format!("--config={}", file.display()),
        format!("--bind-address={}", networks.bind()),
        format!("--envoy-sni-port={}", listeners.sni),
        format!("--sni-quic-port={quic}"),
        format!("--envoy-tunneling-port={}", listeners.connect),
        format!("--envoy-stats-port={}", listeners.stats),
    ];
    let program = Program::spawn(programs.path(PROXY), &flags, &[]);
    let stats = SocketAddr::from((Ipv4Addr::LOCALHOST, listeners.stats));
    eventually("the front door is ready", START_LIMIT, async || {
        let (status, _, body) = http_get(stats, "/readyz").await?;
        ensure!(status.is_success(), "{status} {body:?}");
        anyhow::Ok(())
    })
    .await;
    Ok(Door {
        program,
        _udp: UdpSocket::bind(target)?,
        _dir: dir,
    })
}

async fn envoy(
    networks: &Networks,
    ports: &mut Ports,
    target: SocketAddr,
) -> anyhow::Result<(Attacked, Listeners)> {
    const CLUSTER: &str = "bench/service";
    let envoy = Envoy::get().context("not installed")?;
    let mut seed = Seed::new(ports);
    let node_port = ports.next_port();
    seed.server_names
        .insert(NAME.to_owned(), CLUSTER.to_owned());
    seed.authorities
        .insert(AUTHORITY.to_owned(), CLUSTER.to_owned());
    seed.node_ports.insert(node_port, CLUSTER.to_owned());
    seed.clusters.insert(CLUSTER.to_owned(), vec![target]);
    let listeners = Listeners {
        sni: seed.sni.port(),
        connect: seed.tunnel.port(),
        node_port,
        stats: seed.stats.port(),
    };
    let mut bootstrap = seed.bootstrap();
    let all = bootstrap.config.pointer_mut("/static_resources/listeners");
    let all = all.and_then(|all| all.as_array_mut());
    for listener in all.context("a configuration without listeners")? {
        let address = listener.pointer_mut("/address/socket_address/address");
        *address.context("a listener without an address")? = json!(networks.bind().to_string());
    }
    let running = envoy.start(&bootstrap).await;
    Ok((Attacked::Envoy(Box::new(running)), listeners))
}
