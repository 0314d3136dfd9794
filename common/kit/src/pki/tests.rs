#![allow(clippy::unwrap_used, clippy::expect_used, clippy::indexing_slicing)]

use std::os::unix::fs::PermissionsExt as _;

use rustls::ServerConfig;
use rustls::server::WebPkiClientVerifier;
use rustls_pki_types::ServerName;
use tokio::io::{AsyncReadExt as _, AsyncWriteExt as _};
use tokio_rustls::{TlsAcceptor, TlsConnector};

use super::*;

fn server_tls(pki: &Pki, pair: &Pair) -> Arc<ServerConfig> {
    let provider = Arc::new(rustls::crypto::aws_lc_rs::default_provider());
    let mut roots = RootCertStore::empty();
    for cert in load_certs(&pki.ca).unwrap() {
        roots.add(cert).unwrap();
    }
    let verifier =
        WebPkiClientVerifier::builder_with_provider(Arc::new(roots), Arc::clone(&provider))
            .build()
            .unwrap();
    let config = ServerConfig::builder_with_provider(provider)
        .with_safe_default_protocol_versions()
        .unwrap()
        .with_client_cert_verifier(verifier)
        .with_single_cert(
            load_certs(&pair.cert).unwrap(),
            load_key(&pair.key).unwrap(),
        )
        .unwrap();
    Arc::new(config)
}

/// Runs a mutual TLS handshake in memory and sends one line from the client to the server.
async fn handshake(
    server: Arc<ServerConfig>,
    client: Arc<ClientConfig>,
    name: &'static str,
) -> io::Result<String> {
    let (near, far) = tokio::io::duplex(16 * 1024);
    let connect = async move {
        let name = ServerName::try_from(name).unwrap();
        let mut stream = TlsConnector::from(client).connect(name, near).await?;
        stream.write_all(b"hello").await?;
        stream.shutdown().await?;
        // Kept open until the server is done, because the server may still write session tickets.
        io::Result::Ok(stream)
    };
    let accept = async move {
        let mut stream = TlsAcceptor::from(server).accept(far).await?;
        let mut line = String::new();
        stream.read_to_string(&mut line).await?;
        io::Result::Ok(line)
    };
    let (connected, accepted) = tokio::join!(connect, accept);
    let line = accepted?;
    connected?;
    Ok(line)
}

#[tokio::test]
async fn mutual_tls_succeeds_under_every_name() {
    let dir = tempfile::tempdir().unwrap();
    let pki = Pki::create(dir.path()).unwrap();
    for (server, client) in [(&pki.server, &pki.client), (&pki.cluster, &pki.agent)] {
        for name in NAMES {
            let client = pki.client_tls(client, &["h2"]).unwrap();
            let line = handshake(server_tls(&pki, server), client, name).await;
            assert_eq!(line.unwrap(), "hello", "as {name}");
        }
    }
}

#[tokio::test]
async fn client_of_another_authority_is_rejected() {
    let dir = tempfile::tempdir().unwrap();
    let pki = Pki::create(dir.path()).unwrap();
    let stranger = Pki::create_other(dir.path()).unwrap();
    let client = pki.client_tls(&stranger.client, &[]).unwrap();
    let refused = handshake(server_tls(&pki, &pki.server), client, "localhost").await;
    assert!(refused.unwrap_err().to_string().contains("UnknownIssuer"));
}

#[tokio::test]
async fn server_certificate_is_rejected_as_client_certificate() {
    let dir = tempfile::tempdir().unwrap();
    let pki = Pki::create(dir.path()).unwrap();
    let client = pki.client_tls(&pki.server, &[]).unwrap();
    let refused = handshake(server_tls(&pki, &pki.server), client, "localhost").await;
    assert!(refused.is_err());
}

#[test]
fn key_files_are_private_and_never_overwritten() {
    let dir = tempfile::tempdir().unwrap();
    let pki = Pki::create(dir.path()).unwrap();
    let openvpn = Pki::create_openvpn(dir.path()).unwrap();
    let lab = [&pki.server, &pki.cluster, &pki.agent, &pki.client];
    let vpn = [&openvpn.server, &openvpn.user_cluster, &openvpn.stock];
    for pair in lab.into_iter().chain(vpn) {
        let mode = std::fs::metadata(&pair.key).unwrap().permissions().mode();
        assert_eq!(mode & 0o777, 0o600, "{}", pair.key.display());
    }
    let again = Pki::create(dir.path());
    assert!(matches!(again, Err(PkiError::Write { .. })), "{again:?}");
}
