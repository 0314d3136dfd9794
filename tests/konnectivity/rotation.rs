//! Certificates, keys and CAs that rotate while connections run.

use std::path::Path;

use culvert_kit::client::{self, FrontEnd, connect_tls};
use culvert_kit::pki::{Pair, Pki};
use culvert_kit::services::Services;
use culvert_tests::metrics::Metrics;
use culvert_tests::rotation::{Reloads, count, install, install_pair, read, uses};
use culvert_tests::{Mode, Topology, Transport, eventually};
use futures_util::StreamExt as _;
use futures_util::future::join_all;
use tokio::io::{AsyncReadExt as _, AsyncWriteExt as _};
use tokio::task::JoinSet;
use tokio_util::sync::CancellationToken;

use crate::support::*;

/// Number of connections that are open during the rotation.
const CONNECTIONS: usize = 1_000;

/// Number of connections that are opened at the same time.
const AT_ONCE: usize = 50;

/// Number of connections that transfer bytes without a pause.
const BUSY: usize = 16;

/// Creates certificates in a folder below `dir`. They expire later than those of a topology.
fn later_pki(dir: &Path) -> Pki {
    let dir = dir.join("later");
    std::fs::create_dir(&dir).unwrap();
    Pki::create_valid_for(&dir, 60).unwrap()
}

/// Copies a pair, so that the original can be replaced.
fn copy(pair: &Pair, dir: &Path, name: &str) -> Pair {
    let copy = Pair {
        cert: dir.join(format!("{name}.crt")),
        key: dir.join(format!("{name}.key")),
    };
    install_pair(pair, &copy);
    copy
}

/// Returns the front end of a topology with another certificate of the client. The client trusts the CAs that are
/// in the topology's bundle now.
fn front_with(topology: &Topology, pair: &Pair) -> FrontEnd {
    let tls = |alpn: &[&str]| topology.pki().client_tls(pair, alpn).unwrap();
    let mut front = topology.front_end().clone();
    match &mut front {
        FrontEnd::GrpcTcp { tls: own, .. } => *own = tls(&["h2"]),
        FrontEnd::ConnectTcp { tls: own, .. } => *own = tls(&[]),
        other => panic!("no TLS: {other:?}"),
    }
    front
}

/// Opens many connections to the echo service.
async fn open_many(front: &FrontEnd, services: &Services, number: usize) -> Vec<Innocent> {
    let target = services.raw.to_string();
    let opening = (0..number).map(|_| async {
        let opened = client::connect(front, &target, LIMIT).await;
        Innocent::over(opened.unwrap_or_else(|error| panic!("{error}"))).await
    });
    let opening = futures_util::stream::iter(opening);
    opening.buffer_unordered(AT_ONCE).collect().await
}

async fn all_echo(connections: &mut [Innocent], when: &str) {
    join_all(connections.iter_mut().map(|held| held.still_echoes(when))).await;
}

/// Echoes without a pause until `stop`; returns the number of bytes.
async fn stay_busy(front: FrontEnd, target: String, stop: CancellationToken) -> usize {
    let mut stream = client::connect(&front, &target, LIMIT).await.unwrap();
    stream.write_all(b"echo\n").await.unwrap();
    let (block, mut back, mut bytes) = ([7; 4096], [0; 4096], 0);
    while !stop.is_cancelled() {
        stream.write_all(&block).await.expect("a write");
        stream.flush().await.expect("a flush");
        stream.read_exact(&mut back).await.expect("a read");
        bytes += back.len();
    }
    bytes
}

/// Returns the number of closed connections.
fn closed(metrics: &Metrics) -> f64 {
    value(metrics, "culvert_connections_closed_total", &[])
}

/// Waits until the first server has refused its first handshake on a listener.
async fn refuses_a_handshake(topology: &Topology, listener: &str) {
    let labels = [("listener", listener), ("reason", "handshake_failed")];
    eventually(&format!("{listener} refuses"), LIMIT, async || {
        let metrics = topology.server_metrics(0).await;
        let refused = value(&metrics, "culvert_rejected_total", &labels);
        (refused >= 1.0).then_some(()).ok_or(refused)
    })
    .await;
}

/// Rotates the CA from old to both to new, and all certificates while both CAs are trusted.
async fn no_connection_is_lost(mode: Mode) {
    let services = Services::start().await.unwrap();
    let mut topology = Topology::simple(mode, Transport::Tcp).await;
    let (dir, pki) = (topology.dir().to_owned(), topology.pki().clone());
    let new = later_pki(&dir);
    let old_client = copy(&pki.client, &dir, "old-client");
    let old_agent = copy(&pki.agent, &dir, "old-agent");
    let old_ca = read(&pki.ca);
    let (server, agent) = (topology.server_health(0), topology.agent_health(0));
    let sets = [(server, "frontend"), (server, "agent"), (agent, "server")];

    let front = topology.front_end().clone();
    let mut held = open_many(&front, &services, CONNECTIONS / 2).await;
    let (mut busy, stop) = (JoinSet::new(), CancellationToken::new());
    for _ in 0..BUSY {
        let target = services.raw.to_string();
        busy.spawn(stay_busy(front.clone(), target, stop.clone()));
    }

    let reloads = Reloads::before(&sets).await;
    install(&[old_ca, read(&new.ca)].concat(), &pki.ca);
    reloads.happen().await;
    all_echo(&mut held, "both CAs are trusted").await;
    // Clients of both CAs are accepted.
    for pair in [&old_client, &new.client] {
        let front = front_with(&topology, pair);
        held.extend(open_many(&front, &services, CONNECTIONS / 8).await);
    }

    for (from, to) in [
        (&new.server, &pki.server),
        (&new.cluster, &pki.cluster),
        (&new.agent, &pki.agent),
    ] {
        install_pair(from, to);
    }
    uses(server, "frontend", Some(&new.server.cert), None).await;
    uses(server, "agent", Some(&new.cluster.cert), None).await;
    uses(agent, "server", Some(&new.agent.cert), None).await;
    for pair in [&old_client, &new.client] {
        let front = front_with(&topology, pair);
        held.extend(open_many(&front, &services, CONNECTIONS / 8).await);
    }
    all_echo(&mut held, "certificates are new").await;

    install(&read(&new.ca), &pki.ca);
    for (address, files) in sets {
        uses(address, files, None, Some(&new.ca)).await;
    }
    assert!(held.len() >= CONNECTIONS);
    all_echo(&mut held, "only the new CA is trusted").await;

    // Peers of the old CA are refused.
    let front = front_with(&topology, &old_client);
    let target = services.raw.to_string();
    assert!(client::connect(&front, &target, LIMIT).await.is_err());
    refuses_a_handshake(&topology, "frontend").await;
    let tls = topology.pki().client_tls(&old_agent, &["h2"]).unwrap();
    let name = "localhost".try_into().unwrap();
    let stream = connect_tls(topology.agent_address(0), &tls, &name).await;
    if let Ok(mut stream) = stream {
        // With TLS 1.3, the refusal arrives after the client has finished its handshake.
        assert!(timely("a refusal", stream.read_u8()).await.is_err());
    }
    refuses_a_handshake(&topology, "agent").await;

    // New peers are accepted, and no connection was lost.
    let front = front_with(&topology, &new.client);
    held.extend(open_many(&front, &services, 1).await);
    stop.cancel();
    for bytes in busy.join_all().await {
        assert!(bytes > 0);
    }
    all_echo(&mut held, "at the end").await;
    // Only the busy connections have ended.
    eventually("the busy connections are closed", LIMIT, async || {
        let closed = closed(&topology.server_metrics(0).await);
        (closed == BUSY as f64).then_some(()).ok_or(closed)
    })
    .await;
    for (address, files) in sets {
        assert_eq!(count(address, files, "failed").await, 0.0, "{files}");
    }
    assert_eq!(topology.ready_agents(0).await, 1.0);
    assert_unharmed(&mut topology).await;
}

#[tokio::test]
async fn no_connection_of_a_grpc_front_end_is_lost_in_a_rotation() {
    no_connection_is_lost(Mode::Grpc).await;
}

#[tokio::test]
async fn no_connection_of_a_connect_front_end_is_lost_in_a_rotation() {
    no_connection_is_lost(Mode::HttpConnect).await;
}

#[tokio::test]
async fn agent_connects_again_with_its_renewed_certificate_and_ca() {
    let services = Services::start().await.unwrap();
    let mut topology = Topology::simple(Mode::HttpConnect, Transport::Uds).await;
    let mut innocent = Innocent::open(&topology, services.raw).await;
    let (dir, pki) = (topology.dir().to_owned(), topology.pki().clone());
    let new = later_pki(&dir);
    install_pair(&new.cluster, &pki.cluster);
    install_pair(&new.agent, &pki.agent);
    install(&read(&new.ca), &pki.ca);
    let agent = topology.agent_health(0);
    uses(agent, "server", Some(&new.agent.cert), Some(&new.ca)).await;
    let server = topology.server_health(0);
    uses(server, "agent", Some(&new.cluster.cert), Some(&new.ca)).await;
    innocent.still_echoes("certificates and CA are new").await;
    assert_eq!(topology.ready_agents(0).await, 1.0);
    // The agent must connect again, and each side trusts only the new CA.
    topology.restart_server(0).await;
    topology.wait_for_agents().await;
    Innocent::open(&topology, services.raw).await;
    assert_unharmed(&mut topology).await;
}

#[tokio::test]
async fn broken_files_leave_the_certificates_in_use_and_are_reported_once() {
    let services = Services::start().await.unwrap();
    let mut topology = Topology::simple(Mode::HttpConnect, Transport::Tcp).await;
    let pki = topology.pki().clone();
    let server = topology.server_health(0);
    let key = read(&pki.server.key);
    install(&read(&pki.agent.key), &pki.server.key);
    let text = "does not belong to the certificate";
    topology.server(0).wait_for_log(text, LIMIT).await;
    Innocent::open(&topology, services.raw).await;
    let metrics = topology.server_metrics(0).await;
    let labels = [("files", "frontend")];
    let name = "culvert_last_reload_successful";
    assert_eq!(metrics.value(name, &labels), Some(0.0));
    std::fs::remove_file(&pki.server.key).unwrap();
    topology.server(0).wait_for_log("cannot read", LIMIT).await;
    Innocent::open(&topology, services.raw).await;
    install(&key, &pki.server.key);
    uses(server, "frontend", Some(&pki.server.cert), None).await;
    assert_eq!(count(server, "frontend", "failed").await, 2.0);
    let log = topology.server(0).log();
    assert_eq!(log.matches(text).count(), 1, "{log}");
    assert_unharmed(&mut topology).await;
}

#[tokio::test]
async fn admin_listener_uses_renewed_certificates() {
    let dir = tempfile::tempdir().unwrap();
    let admin = Pki::create(dir.path()).unwrap();
    let new = later_pki(dir.path());
    let flags = admin_flags(&admin);
    let flags: Vec<&str> = flags.iter().map(String::as_str).collect();
    let topology = Topology::builder(Mode::Grpc, Transport::Uds)
        .servers(1)
        .server_args(&flags)
        .start()
        .await;
    let ask = async |pki: &Pki| {
        let tls = pki.client_tls(&pki.client, &["http/1.1"]).unwrap();
        let name = "localhost".try_into().unwrap();
        let mut stream = connect_tls(topology.server_admin(0), &tls, &name)
            .await
            .ok()?;
        let request = b"GET /metrics HTTP/1.1\r\nHost: x\r\nConnection: close\r\n\r\n";
        stream.write_all(request).await.ok()?;
        let mut answer = String::new();
        timely("an answer", stream.read_to_string(&mut answer))
            .await
            .ok()?;
        answer.starts_with("HTTP/1.1 200").then_some(())
    };
    let old = Pki {
        ca: dir.path().join("old-ca.crt"),
        client: copy(&admin.client, dir.path(), "old-client"),
        ..admin.clone()
    };
    install(&read(&admin.ca), &old.ca);
    assert!(ask(&old).await.is_some());
    assert!(ask(&new).await.is_none());
    install_pair(&new.server, &admin.server);
    install(&read(&new.ca), &admin.ca);
    let server = topology.server_health(0);
    uses(server, "admin", Some(&new.server.cert), Some(&new.ca)).await;
    assert!(ask(&new).await.is_some());
    assert!(ask(&old).await.is_none());
}
