//! QUIC by a program of another project: quic-go as client and as server.

use std::path::{Path, PathBuf};
use std::process::{Command, Stdio};

use culvert_tests::Program;
use culvert_tests::skip::skip;
use rustls::pki_types::CertificateDer;
use tempfile::TempDir;

use super::support::{Nat, QuicEndpoint, ask, client, connect, door};
use super::{NAME, opened};
use crate::support::{LIMIT, Upstream};

/// Returns the built peer. Without Go, prints the reason and returns `None`.
fn peer() -> Option<PathBuf> {
    let peers = Path::new(env!("CARGO_MANIFEST_DIR")).join("peers");
    let build = Command::new(peers.join("quic/build"))
        .stdin(Stdio::null())
        .output()
        .unwrap();
    if !build.status.success() {
        skip(String::from_utf8_lossy(&build.stderr).trim());
        return None;
    }
    Some(peers.join("bin/quic-peer"))
}

fn spawn(peer: &Path, args: &[&str]) -> Program {
    Program::spawn(peer.to_str().unwrap(), args, &[])
}

fn write_pem(dir: &TempDir, name: &str, tag: &str, der: &[u8]) -> String {
    let path = dir.path().join(name);
    std::fs::write(&path, pem::encode(&pem::Pem::new(tag, der))).unwrap();
    path.display().to_string()
}

/// Starts the peer as a server; returns its address and certificate too.
async fn server(peer: &Path, dir: &TempDir) -> (Program, Upstream, CertificateDer<'static>) {
    let key = rcgen::generate_simple_self_signed([NAME.to_owned()]).unwrap();
    let certificate = key.cert.der().clone();
    let cert = write_pem(dir, "cert.pem", "CERTIFICATE", &certificate);
    let private = key.signing_key.serialize_der();
    let private = write_pem(dir, "key.pem", "PRIVATE KEY", &private);
    let server = spawn(peer, &["serve", &cert, &private]);
    let line = server.wait_for_log("127.0.0.1:", LIMIT).await;
    let upstream = Upstream::new("ns/one", line.trim().parse().unwrap())
        .server_name(NAME)
        .quic_port("same");
    (server, upstream, certificate)
}

#[tokio::test]
async fn foreign_client_keeps_its_connection_through_another_address_and_replica() {
    let Some(peer) = peer() else { return };
    let dir = tempfile::tempdir().unwrap();
    let one = QuicEndpoint::start(NAME);
    let upstreams = [one.upstream("ns/one", NAME)];
    let (a, b) = tokio::join!(door(&upstreams, &[]), door(&upstreams, &[]));
    let nat = Nat::start(a.sni).await;
    let ca = write_pem(&dir, "ca.pem", "CERTIFICATE", &one.certificate);
    let address = nat.address.to_string();
    // The client's hello has post-quantum key shares.
    let mut client = spawn(&peer, &["ask", &address, NAME, &ca]);
    client.wait_for_log("connected", LIMIT).await;
    for (number, next) in [&a, &b, &b].into_iter().enumerate() {
        client.send_line(&format!(" {number}"));
        let answer = format!("answer {NAME} {number}");
        client.wait_for_log(&answer, LIMIT).await;
        nat.rebind(next.sni).await;
    }
    client.send_line(" end");
    let answer = format!("answer {NAME} end");
    client.wait_for_log(&answer, LIMIT).await;
    assert_eq!((opened(&a).await, opened(&b).await), (2.0, 2.0));
}

#[tokio::test]
async fn foreign_server_gets_packets_by_name_and_by_connection_id() {
    let Some(peer) = peer() else { return };
    let dir = tempfile::tempdir().unwrap();
    let (_server, upstream, certificate) = server(&peer, &dir).await;
    let door = door(&[upstream], &[]).await;
    let nat = Nat::start(door.sni).await;
    let client = client(&certificate, true);
    let connection = connect(&client, nat.address, NAME).await;
    let bytes = vec![3; 1 << 20];
    for _ in 0..3 {
        assert_eq!(ask(&connection, &bytes).await, bytes);
        nat.rebind(door.sni).await;
    }
    assert_eq!(ask(&connection, b"end").await, b"end");
    assert_eq!(opened(&door).await, 4.0);
}
