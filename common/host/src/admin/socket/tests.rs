#![allow(clippy::unwrap_used)]

use std::future::ready;
use std::os::unix::fs::MetadataExt as _;

use parking_lot::Mutex;
use rcgen::{BasicConstraints, CertificateParams, IsCa, Issuer, KeyPair};
use rustls_pki_types::ServerName;
use tokio::io::{AsyncReadExt as _, AsyncWriteExt as _};
use tokio_rustls::TlsConnector;
use tokio_util::sync::CancellationToken;

use super::super::{Reply, Routes, bind, serve};
use super::*;
use crate::reload::Latest;
use crate::tls::{Identity, TlsOptions, TrustBundle, client_config, server_config};

fn routes() -> Routes {
    Routes::new().route("/", |_| ready(Reply::text(http::StatusCode::OK, "hello")))
}

async fn ask(mut stream: impl AsyncRead + AsyncWrite + Unpin) -> String {
    let request = b"GET / HTTP/1.1\r\nHost: x\r\nConnection: close\r\n\r\n";
    // The server may close a rejected connection before the request is written.
    stream.write_all(request).await.ok();
    let mut answer = String::new();
    stream.read_to_string(&mut answer).await.ok();
    answer
}

#[tokio::test]
async fn socket_is_private_and_removed_at_the_end() {
    let folder = tempfile::tempdir().unwrap();
    let path = folder.path().join("admin.socket");
    let socket = UnixSocket::bind(&path, "--admin-uds").unwrap();
    let mode = std::fs::metadata(&path).unwrap().mode();
    assert_eq!(mode & 0o777, 0o600);
    let stop = CancellationToken::new();
    let task = tokio::spawn(serve(AdminSocket::Unix(socket), routes(), stop.clone()));
    let answer = ask(UnixStream::connect(&path).await.unwrap()).await;
    assert!(answer.ends_with("\r\n\r\nhello"), "{answer}");
    stop.cancel();
    task.await.unwrap();
    assert!(!path.exists());
}

#[tokio::test]
async fn only_a_stale_socket_is_replaced() {
    let folder = tempfile::tempdir().unwrap();
    let path = folder.path().join("admin.socket");
    let fails = || {
        UnixSocket::bind(&path, "--admin-uds")
            .err()
            .unwrap()
            .to_string()
    };
    std::fs::write(&path, "precious").unwrap();
    let error = fails();
    assert!(
        error.contains("is not a socket") && error.contains("--admin-uds"),
        "{error}"
    );
    std::fs::remove_file(&path).unwrap();
    let served = UnixSocket::bind(&path, "--admin-uds").unwrap();
    assert!(fails().contains("another program"));
    drop(served);
    // Leave a socket file behind, as a killed program does.
    drop(std::os::unix::net::UnixListener::bind(&path).unwrap());
    assert!(path.exists());
    UnixSocket::bind(&path, "--admin-uds").unwrap();
}

/// A CA file, and a certificate from this CA with its key.
struct Authority {
    ca: std::path::PathBuf,
    cert: std::path::PathBuf,
    key: std::path::PathBuf,
}

fn authority(folder: &Path, name: &str) -> Authority {
    let ca_key = KeyPair::generate().unwrap();
    let mut params = CertificateParams::default();
    params.is_ca = IsCa::Ca(BasicConstraints::Unconstrained);
    let ca_pem = params.self_signed(&ca_key).unwrap().pem();
    let issuer = Issuer::new(params, ca_key);
    let key = KeyPair::generate().unwrap();
    let leaf = CertificateParams::new(vec!["admin.test".to_owned()]).unwrap();
    let leaf = leaf.signed_by(&key, &issuer).unwrap();
    let write = |what: &str, pem: String| {
        let path = folder.join(format!("{name}.{what}"));
        std::fs::write(&path, pem).unwrap();
        path
    };
    Authority {
        ca: write("ca", ca_pem),
        cert: write("cert", leaf.pem()),
        key: write("key", key.serialize_pem()),
    }
}

#[tokio::test]
async fn only_clients_with_a_certificate_of_the_ca_are_served() {
    let folder = tempfile::tempdir().unwrap();
    let ours = authority(folder.path(), "ours");
    let foreign = authority(folder.path(), "foreign");
    let options = TlsOptions::default();
    let identity = |of: &Authority| Identity::load(&of.cert, &of.key).unwrap();
    let trust = TrustBundle::load(&ours.ca).unwrap();
    let config = server_config(&identity(&ours), Some(&trust), &[b"http/1.1"], &options);
    let listener = bind("127.0.0.1", 0, ["--admin-port"; 2]).await.unwrap();
    let address = listener.local_addr().unwrap();
    let stop = CancellationToken::new();
    let refused = Arc::<Mutex<Vec<_>>>::default();
    let on_refused = {
        let refused = refused.clone();
        Arc::new(move |peer, _: &_| refused.lock().push(peer))
    };
    let socket = AdminSocket::Tls(listener, Latest::fixed(config.unwrap()), on_refused);
    let task = tokio::spawn(serve(socket, routes(), stop.clone()));
    let mut peers = Vec::new();
    for (who, lets_in) in [(Some(&ours), true), (Some(&foreign), false), (None, false)] {
        let who = who.map(identity);
        let config = client_config(&trust, who.as_ref(), &[b"http/1.1"], &options).unwrap();
        let stream = TcpStream::connect(address).await.unwrap();
        peers.push(stream.local_addr().unwrap());
        let name = ServerName::try_from("admin.test").unwrap();
        let answer = match TlsConnector::from(config).connect(name, stream).await {
            Ok(stream) => ask(stream).await,
            Err(_) => String::new(),
        };
        assert_eq!(answer.ends_with("hello"), lets_in, "{answer}");
    }
    let answer = ask(TcpStream::connect(address).await.unwrap()).await;
    assert!(!answer.contains("hello"), "{answer}");
    stop.cancel();
    task.await.unwrap();
    assert_eq!(refused.lock().get(..2), peers.get(1..));
    assert_eq!(refused.lock().len(), 3);
}
