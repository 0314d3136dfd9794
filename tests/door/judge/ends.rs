//! Half closes and resets, as seen at the other end.

use std::future::Future;
use std::io;
use std::time::Duration;

use bytes::Bytes;
use culvert_tests::ports::Ports;
use socket2::SockRef;
use tokio::io::{AsyncReadExt, AsyncWriteExt};
use tokio::net::TcpStream;

use super::clients::{Way, http2, http2_rest, open, rest, say};
use super::endpoints::{Endpoint, counts, ends_first, listens, resets};
use super::{Pair, Side, Verdicts, exposed};
use crate::support::{Http2, timely};

/// Starts both proxies in front of one endpoint, which is reachable through every listener.
async fn behind<S, F>(script: S) -> Option<(Pair, Endpoint, Ports)>
where
    S: Fn(TcpStream) -> F + Send + 'static,
    F: Future<Output = io::Result<&'static str>> + Send + 'static,
{
    let mut endpoint = Endpoint::start(script).await;
    let mut ports = Ports::default();
    let upstream = exposed("end", endpoint.address).node_port(ports.next_port());
    let pair = Pair::start(&[upstream]).await?;
    // The node port opens some time after the start.
    let at = pair.ours.node_ports["demo/end"];
    culvert_tests::eventually("the node port is open", crate::support::LIMIT, async || {
        TcpStream::connect(at).await.map(|_| ())
    })
    .await;
    assert_eq!(endpoint.saw().await, "unexpected end of file");
    Some((pair, endpoint, ports))
}

const WAYS: [Way; 3] = [Way::Sni, Way::NodePort, Way::Http1];

/// Expected results at Envoy and at our front door, for each of [`WAYS`] and then for HTTP/2.
type Known<'a> = [(&'a str, &'a str); 4];

#[tokio::test]
async fn a_client_that_half_closed_receives_the_answer() {
    let Some((pair, _endpoint, _ports)) = behind(counts).await else {
        return;
    };
    let mut verdicts = Verdicts::default();
    let known: Known<'_> = [
        ("5 end", "5 end"),
        ("5 end", "5 end"),
        ("end", "5 end"),
        ("ok5 end", "ok5 end"),
    ];
    for (way, (envoy, ours)) in WAYS.into_iter().zip(known) {
        let look = async |side: &Side| {
            let mut stream = open(side, way, "end").await;
            stream.write_all(b"go").await.unwrap();
            timely("ok", stream.read_exact(&mut [0; 2])).await.unwrap();
            stream.write_all(b"12345").await.unwrap();
            stream.shutdown().await.unwrap();
            rest(&mut stream).await
        };
        verdicts.differ(&format!("{way:?}"), pair.see(look).await, envoy, ours);
    }
    let look = async |side: &Side| {
        let client = Http2::connect(side.tunnel).await;
        let mut tunnel = http2(&client, "end").await.unwrap();
        say(&mut tunnel, b"go12345");
        tunnel.finish();
        http2_rest(&mut tunnel).await
    };
    verdicts.differ("HTTP/2", pair.see(look).await, known[3].0, known[3].1);
}

#[tokio::test]
async fn an_endpoint_that_half_closed_still_receives() {
    let Some((pair, endpoint, _ports)) = behind(ends_first).await else {
        return;
    };
    let endpoint = tokio::sync::Mutex::new(endpoint);
    let mut verdicts = Verdicts::default();
    let known: Known<'_> = [
        ("bye end, late", "bye end, late"),
        ("bye end, late", "bye end, late"),
        ("bye end, nothing", "bye end, late"),
        ("bye end, nothing", "bye end, late"),
    ];
    for (way, (envoy, ours)) in WAYS.into_iter().zip(known) {
        let look = async |side: &Side| {
            let mut stream = open(side, way, "end").await;
            stream.write_all(b"go").await.unwrap();
            let heard = rest(&mut stream).await;
            // Fails if the proxy has closed both directions.
            let _ = stream.write_all(b"late").await;
            let _ = stream.shutdown().await;
            format!("{heard}, {}", endpoint.lock().await.saw().await)
        };
        verdicts.differ(&format!("{way:?}"), pair.see(look).await, envoy, ours);
    }
    let look = async |side: &Side| {
        let client = Http2::connect(side.tunnel).await;
        let mut tunnel = http2(&client, "end").await.unwrap();
        say(&mut tunnel, b"go");
        let heard = http2_rest(&mut tunnel).await;
        let sent = tunnel.send.send_data(Bytes::from_static(b"late"), true);
        // Fails if the stream was reset.
        sent.ok();
        format!("{heard}, {}", endpoint.lock().await.saw().await)
    };
    verdicts.differ("HTTP/2", pair.see(look).await, known[3].0, known[3].1);
}

#[tokio::test]
async fn a_clients_reset_reaches_the_endpoint() {
    let Some((pair, endpoint, _ports)) = behind(listens).await else {
        return;
    };
    let endpoint = tokio::sync::Mutex::new(endpoint);
    let mut verdicts = Verdicts::default();
    let known: Known<'_> = [
        ("connection reset", "connection reset"),
        ("connection reset", "connection reset"),
        ("end", "connection reset"),
        ("end", "connection reset"),
    ];
    for (way, (envoy, ours)) in WAYS.into_iter().zip(known) {
        let look = async |side: &Side| {
            let mut stream = open(side, way, "end").await;
            stream.write_all(b"go").await.unwrap();
            timely("ok", stream.read_exact(&mut [0; 2])).await.unwrap();
            let socket = SockRef::from(&stream);
            socket.set_linger(Some(Duration::ZERO)).unwrap();
            drop(stream);
            endpoint.lock().await.saw().await
        };
        verdicts.differ(&format!("{way:?}"), pair.see(look).await, envoy, ours);
    }
    let look = async |side: &Side| {
        let client = Http2::connect(side.tunnel).await;
        let mut tunnel = http2(&client, "end").await.unwrap();
        say(&mut tunnel, b"go");
        assert_eq!(tunnel.hear(2).await, b"ok");
        tunnel.send.send_reset(h2::Reason::CANCEL);
        endpoint.lock().await.saw().await
    };
    verdicts.differ("HTTP/2", pair.see(look).await, known[3].0, known[3].1);
}

#[tokio::test]
async fn an_endpoints_reset_reaches_the_client() {
    let Some((pair, _endpoint, _ports)) = behind(resets).await else {
        return;
    };
    let mut verdicts = Verdicts::default();
    let known: Known<'_> = [
        ("reset", "end"),
        ("reset", "end"),
        ("end", "end"),
        ("reset", "reset"),
    ];
    for (way, (envoy, ours)) in WAYS.into_iter().zip(known) {
        let look = async |side: &Side| {
            let mut stream = open(side, way, "end").await;
            stream.write_all(b"go").await.unwrap();
            timely("ok", stream.read_exact(&mut [0; 2])).await.unwrap();
            stream.write_all(b"x").await.unwrap();
            rest(&mut stream).await
        };
        verdicts.differ(&format!("{way:?}"), pair.see(look).await, envoy, ours);
    }
    let look = async |side: &Side| {
        let client = Http2::connect(side.tunnel).await;
        let mut tunnel = http2(&client, "end").await.unwrap();
        say(&mut tunnel, b"go");
        assert_eq!(tunnel.hear(2).await, b"ok");
        say(&mut tunnel, b"x");
        let end = http2_rest(&mut tunnel).await;
        // The connection still works.
        http2(&client, "end").await.unwrap();
        end
    };
    verdicts.differ("HTTP/2", pair.see(look).await, known[3].0, known[3].1);
}
