#![allow(clippy::unwrap_used)]

use std::ffi::OsString;
use std::io::{Read as _, Write as _};
use std::net::{Ipv4Addr, TcpListener, TcpStream};
use std::time::Duration;

use tokio::task::yield_now;

use super::*;
use crate::client_hello::tests::hello_for;

/// Far more time than a byte needs on one machine.
const LIMIT: Duration = Duration::from_secs(5);

/// Returns the configuration of a proxy with two threads, including the test's own thread, and with one Service at
/// `endpoint`.
fn config(endpoint: SocketAddr, dir: &tempfile::TempDir) -> Config {
    let routes = dir.path().join("routes.yaml");
    let text = format!(
        "upstreams:\n  - {{name: a, endpoints: ['{endpoint}'], serverNames: [a.example]}}\n"
    );
    std::fs::write(&routes, text).unwrap();
    let flags = [
        "culvert-nodeport-proxy".to_owned(),
        format!("--config={}", routes.display()),
        "--bind-address=127.0.0.1".to_owned(),
        "--envoy-sni-port=6443".to_owned(),
        "--worker-threads=2".to_owned(),
    ];
    let mut config = Config::from_args(flags.map(OsString::from)).unwrap();
    config.sni.as_mut().unwrap().port = 0;
    config.stats.port = 0;
    config
}

#[tokio::test]
async fn errors_of_listeners_name_the_flag_to_change() {
    let listener = TcpListener::bind((Ipv4Addr::LOCALHOST, 0)).unwrap();
    let socket = UdpSocket::bind((Ipv4Addr::LOCALHOST, 0)).unwrap();
    let taken = listener.local_addr().unwrap().port();
    let dir = tempfile::tempdir().unwrap();
    let error = async |host: &str, sni, quic, stats| {
        let endpoint = SocketAddr::from((Ipv4Addr::LOCALHOST, 1));
        let mut config = config(endpoint, &dir);
        config.sni = Some(HostPort::new(host, sni));
        config.sni_quic = Some(HostPort::new(host, quic));
        config.stats = HostPort::new(host, stats);
        let bound = Bound::bind(config).await;
        bound.map(|_| ()).unwrap_err().to_string()
    };
    let foreign = error("192.0.2.1", 0, 0, 0).await;
    assert!(
        foreign.ends_with("correct the host given for --bind-address"),
        "{foreign}"
    );
    let udp = socket.local_addr().unwrap().port();
    for (sni, quic, stats, flag) in [
        (taken, 0, 0, "--envoy-sni-port"),
        (0, udp, 0, "--sni-quic-port"),
        (0, 0, taken, "--envoy-stats-port"),
    ] {
        let used = error("127.0.0.1", sni, quic, stats).await;
        let end = format!("the port is in use; stop the other process or change {flag}");
        assert!(used.ends_with(&end), "{used}");
    }
}

#[tokio::test]
async fn busy_thread_does_not_delay_new_connections() {
    let listener = TcpListener::bind((Ipv4Addr::LOCALHOST, 0)).unwrap();
    let endpoint = listener.local_addr().unwrap();
    let hello = hello_for(b"a.example");
    let length = hello.len();
    let echo = std::thread::spawn(move || {
        let (mut stream, _) = listener.accept().unwrap();
        let mut received = vec![0; length];
        stream.read_exact(&mut received).unwrap();
        stream.write_all(&received).unwrap();
    });
    let dir = tempfile::tempdir().unwrap();
    let bound = Bound::bind(config(endpoint, &dir)).await.unwrap();
    let door = bound.addresses.sni.unwrap();
    let shutdown = CancellationToken::new();
    let running = tokio::spawn(bound.run(shutdown.clone()));
    // The proxy's tasks start; after that, only the test runs on this thread.
    yield_now().await;
    let mut client = TcpStream::connect(door).unwrap();
    client.set_read_timeout(Some(LIMIT)).unwrap();
    client.write_all(&hello).unwrap();
    let mut received = vec![0; length];
    client.read_exact(&mut received).unwrap();
    assert_eq!(received, hello);
    drop(client);
    echo.join().unwrap();
    shutdown.cancel();
    running.await.unwrap();
    TcpStream::connect(door).unwrap_err();
}
