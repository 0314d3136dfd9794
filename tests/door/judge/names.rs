//! TLS connections, routed by server name.

use culvert_kit::services::{BANNER, Services};
use tokio::io::{AsyncReadExt, AsyncWriteExt};
use tokio::net::TcpStream;

use super::clients::{converse, hello, last_words, rest};
use super::{Pair, Side, Verdicts, exposed};
use crate::support::{Upstream, timely};

/// Sends `hello`, in two pieces if `cut` is not 0. Returns `found` if the endpoint's echo of `hello` arrives.
async fn greet(side: &Side, hello: &[u8], cut: usize) -> String {
    let mut stream = TcpStream::connect(side.sni).await.unwrap();
    stream.set_nodelay(true).unwrap();
    stream.write_all(&hello[..cut]).await.unwrap();
    // Fails if the proxy has closed the connection already.
    let _ = stream.write_all(&hello[cut..]).await;
    let expected = [BANNER, hello].concat();
    let mut heard = vec![0; expected.len()];
    let arrived = timely("an answer", stream.read_exact(&mut heard)).await;
    match arrived {
        Ok(_) if heard == expected => "found".to_owned(),
        Ok(_) => "garbled".to_owned(),
        Err(error) if error.kind() == std::io::ErrorKind::UnexpectedEof => "closed".to_owned(),
        Err(_) => "reset".to_owned(),
    }
}

#[tokio::test]
async fn known_names_are_routed_and_others_are_closed() {
    let services = Services::start().await.unwrap();
    let wildcard = Upstream::new("demo/apps", services.first).server_name("*.apps.example.com");
    let upper = Upstream::new("demo/upper", services.first).server_name("Upper.example.com");
    let upstreams = [exposed("one", services.first), wildcard, upper];
    let Some(pair) = Pair::start(&upstreams).await else {
        return;
    };
    let mut verdicts = Verdicts::default();
    for (name, envoy, ours) in [
        (Some("one.example.com"), "found", "found"),
        (Some("ONE.Example.COM"), "found", "found"),
        (Some("two.apps.example.com"), "found", "found"),
        (Some("deep.two.apps.example.com"), "found", "found"),
        (Some("apps.example.com"), "reset", "closed"),
        (Some("other.example.com"), "reset", "closed"),
        (Some("example.com"), "reset", "closed"),
        (Some(""), "reset", "closed"),
        (Some("127.0.0.1"), "reset", "closed"),
        (None, "reset", "closed"),
        // RFC 6066 forbids the trailing dot, but some clients send it.
        (Some("one.example.com."), "reset", "found"),
        // KKP does not change the case of host names in the annotation.
        (Some("upper.example.com"), "found", "found"),
    ] {
        let seen = pair
            .see(async |side| greet(side, &hello(name), 0).await)
            .await;
        verdicts.differ(&format!("{name:?}"), seen, envoy, ours);
    }
}

#[tokio::test]
async fn a_client_hello_in_pieces_or_in_several_records_is_routed() {
    let services = Services::start().await.unwrap();
    let Some(pair) = Pair::start(&[exposed("one", services.first)]).await else {
        return;
    };
    let mut verdicts = Verdicts::default();
    let whole = hello(Some("one.example.com"));
    for cut in [1, 5, 6, 60] {
        let seen = pair.see(async |side| greet(side, &whole, cut).await).await;
        verdicts.same(&format!("in two pieces at {cut}"), seen, "found");
    }
    let (_, message) = whole.split_at(5);
    let mut records = Vec::new();
    for part in message.chunks(50) {
        records.extend([22, 3, 1, 0, u8::try_from(part.len()).unwrap()]);
        records.extend(part);
    }
    let seen = pair.see(async |side| greet(side, &records, 0).await).await;
    verdicts.same("in several records", seen, "found");
}

#[tokio::test]
async fn input_that_is_not_a_client_hello_is_closed() {
    let services = Services::start().await.unwrap();
    let Some(pair) = Pair::start(&[exposed("one", services.first)]).await else {
        return;
    };
    let mut verdicts = Verdicts::default();
    for (case, bytes) in [
        ("nothing", &b""[..]),
        ("HTTP", b"GET / HTTP/1.1\r\nHost: one.example.com\r\n\r\n"),
        ("SSH", b"SSH-2.0-x\r\n"),
        ("garbage in a record", b"\x16\x03\x01\x00\x05hello"),
        (
            "a record that is not a handshake",
            b"\x17\x03\x03\x00\x05hello",
        ),
        ("half a hello", &hello(Some("one.example.com"))[..50]),
    ] {
        let seen = pair
            .see(async |side| last_words(side.sni, bytes).await)
            .await;
        // Envoy only peeks at the input, and the kernel sends a reset when a socket with unread input is
        // closed.
        let at_envoy = if bytes.is_empty() { "end" } else { "reset" };
        verdicts.differ(case, seen, at_envoy, "end");
    }
    let silent = async |side: &Side| {
        let mut stream = TcpStream::connect(side.sni).await.unwrap();
        rest(&mut stream).await
    };
    verdicts.same("silence", pair.see_together(silent).await, "end");
}

#[tokio::test]
async fn listeners_are_open_before_any_service_is_exposed() {
    let Some(pair) = Pair::start(&[]).await else {
        return;
    };
    let mut verdicts = Verdicts::default();
    let hello = hello(Some("one.example.com"));
    let seen = pair
        .see(async |side| converse(side.sni, &hello).await)
        .await;
    verdicts.differ("SNI", seen, "refused", "end");
    let connect = b"CONNECT one.demo.svc.cluster.local:443 HTTP/1.1\r\n\r\n";
    let seen = pair
        .see(async |side| converse(side.tunnel, connect).await)
        .await;
    verdicts.differ("CONNECT", seen, "refused", "404 Not Found, end");
}
