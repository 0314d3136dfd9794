//! Foreign peers of the front door: curl, haproxy, and a node's Envoy.

use std::collections::BTreeMap;
use std::process::Stdio;

use culvert_kit::check;
use culvert_kit::services::{HELLO, Services};
use culvert_tests::envoy::{self, Envoy};
use culvert_tests::haproxy::HaProxy;
use culvert_tests::ports::Ports;
use culvert_tests::skip::has_program;
use tokio::io::AsyncReadExt;
use tokio::net::TcpStream;
use tokio::process::Command;

use crate::support::{Door, TlsEndpoint, Upstream, timely};

const HTTP: &str = "web.demo.svc.cluster.local:80";
const RAW: &str = "raw.demo.svc.cluster.local:443";
const HALF: &str = "half.demo.svc.cluster.local:443";

async fn curl(door: &Door, url: &str) -> (Option<i32>, String) {
    let proxy = format!("http://{}", door.tunneling);
    let output = Command::new("curl")
        .args(["-sS", "--max-time", "15", "-p", "--proxy", &proxy, url])
        .stdin(Stdio::null())
        .kill_on_drop(true)
        .output();
    let output = timely("curl", output).await.expect("curl must start");
    let mut text = String::from_utf8_lossy(&output.stdout).into_owned();
    text.push_str(&String::from_utf8_lossy(&output.stderr));
    (output.status.code(), text)
}

#[tokio::test]
async fn curl_reaches_a_service_by_its_cluster_name() {
    if !has_program("curl") {
        return;
    }
    let services = Services::start().await.unwrap();
    let door = Door::start(&[Upstream::new("demo/web", services.http).authority(HTTP)]).await;
    let (code, text) = curl(&door, &format!("http://{HTTP}/")).await;
    assert_eq!((code, text.as_str()), (Some(0), HELLO));
    let (code, text) = curl(&door, "http://other.demo.svc.cluster.local:80/").await;
    // curl reports a refused CONNECT as exit code 56, a failure in receiving network data.
    assert_eq!(code, Some(56), "{text}");
    assert!(text.contains("404"), "{text}");
}

#[tokio::test]
async fn tls_works_through_haproxy_and_the_front_door() {
    let Some(haproxy) = HaProxy::get() else {
        return;
    };
    let endpoint = TlsEndpoint::start("api.example.com").await;
    let upstream = Upstream::new("ns/api", endpoint.address).server_name("api.example.com");
    let door = Door::start(&[upstream]).await;
    let mut ports = Ports::default();
    let listen = ([127, 0, 0, 1], ports.next_port()).into();
    let names = BTreeMap::from([("api.example.com".to_owned(), vec![door.sni])]);
    let _running = haproxy.start(listen, &names).await;
    endpoint.answers(listen, "api.example.com").await;
}

#[tokio::test]
async fn a_nodes_envoy_works_with_the_front_door() {
    let Some(envoy) = Envoy::get() else { return };
    let services = Services::start().await.unwrap();
    let gone = ([127, 0, 0, 1], 1).into();
    let door = Door::start(&[
        Upstream::new("demo/raw", services.raw).authority(RAW),
        Upstream::new("demo/half", services.half).authority(HALF),
        Upstream::new("demo/gone", gone).authority(HTTP),
    ])
    .await;
    let mut ports = Ports::default();
    let [raw, half, gone, unknown] = [(); 4].map(|()| ([127, 0, 0, 1], ports.next_port()).into());
    let listeners = [
        (raw, RAW),
        (half, HALF),
        (gone, HTTP),
        (unknown, "unknown.demo.svc.cluster.local:1"),
    ];
    let bootstrap = envoy::node(&mut ports, &listeners, door.tunneling);
    let _running = envoy.start(&bootstrap).await;
    let connect = async |address: std::net::SocketAddr| TcpStream::connect(address).await.unwrap();
    check::download(connect(raw).await, 20_000_000)
        .await
        .unwrap();
    check::upload(connect(raw).await, 20_000_000).await.unwrap();
    check::echo(connect(raw).await, 50, 10_000).await.unwrap();
    let many = (0..50).map(|_| async { check::echo(connect(raw).await, 5, 1000).await });
    for outcome in futures_util::future::join_all(many).await {
        outcome.unwrap();
    }
    let mut stream = connect(half).await;
    tokio::io::AsyncWriteExt::write_all(&mut stream, b"1234567")
        .await
        .unwrap();
    tokio::io::AsyncWriteExt::shutdown(&mut stream)
        .await
        .unwrap();
    let mut answer = String::new();
    timely("the answer", stream.read_to_string(&mut answer))
        .await
        .unwrap();
    assert_eq!(answer, "7\n");
    for address in [gone, unknown] {
        let mut stream = connect(address).await;
        let end = timely("the end", stream.read(&mut [0])).await;
        assert_eq!(end.unwrap_or(0), 0);
    }
    door.has_refused("tunneling", "upstream", 1.0).await;
    door.has_refused("tunneling", "unknown", 1.0).await;
}
