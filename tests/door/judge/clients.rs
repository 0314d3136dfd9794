//! Clients that return their results as text.

use std::net::SocketAddr;
use std::time::Duration;

use bytes::Bytes;
use http::{Request, StatusCode};
use tokio::io::{AsyncReadExt, AsyncWriteExt};
use tokio::net::TcpStream;
use tokio::time::timeout;

use super::{Side, authority, server_name};
use crate::support::{Http2, Tunnel, timely};

/// Listeners for clients with a plain socket.
#[derive(Clone, Copy, Debug)]
pub(super) enum Way {
    Sni,
    NodePort,
    Http1,
}

/// Returns a whole TLS 1.2 ClientHello in one record. A `name` of `None` omits the server name.
pub(super) fn hello(name: Option<&str>) -> Vec<u8> {
    let two = |len: usize| u16::try_from(len).unwrap().to_be_bytes();
    let vector = |bytes: &[u8]| [&two(bytes.len()), bytes].concat();
    // supported_groups: x25519.
    let mut extensions = vec![0, 10, 0, 4, 0, 2, 0, 29];
    if let Some(name) = name {
        let host = [&[0], vector(name.as_bytes()).as_slice()].concat();
        extensions.extend([0, 0]);
        extensions.extend(vector(&vector(&host)));
    }
    let mut body = vec![3, 3];
    body.extend([7; 32]);
    body.extend([0, 0, 2, 0xc0, 0x2f, 1, 0]);
    body.extend(vector(&extensions));
    let [high, low] = two(body.len());
    let message = [&[1, 0, high, low], body.as_slice()].concat();
    [&[22, 3, 1], vector(&message).as_slice()].concat()
}

/// Connects to an upstream through a proxy. With [`Way::Sni`], the endpoint receives a ClientHello first.
pub(super) async fn open(side: &Side, way: Way, name: &str) -> TcpStream {
    let at = match way {
        Way::Sni => side.sni,
        Way::NodePort => side.node_ports[&format!("demo/{name}")],
        Way::Http1 => side.tunnel,
    };
    let mut stream = TcpStream::connect(at).await.unwrap();
    match way {
        Way::Sni => {
            let hello = hello(Some(&server_name(name)));
            stream.write_all(&hello).await.unwrap();
        }
        Way::NodePort => {}
        Way::Http1 => {
            let head = http1(&mut stream, &authority(name)).await;
            assert_eq!(status(&head), "HTTP/1.1 200 OK");
        }
    }
    stream
}

/// Sends a CONNECT and returns the head of the answer, or a part of the head if the connection ends.
pub(super) async fn http1(stream: &mut TcpStream, authority: &str) -> Vec<u8> {
    let request = format!("CONNECT {authority} HTTP/1.1\r\nHost: {authority}\r\n\r\n");
    stream.write_all(request.as_bytes()).await.unwrap();
    head(stream).await
}

/// Reads until an empty line or the end of the connection.
pub(super) async fn head(stream: &mut TcpStream) -> Vec<u8> {
    let mut head = Vec::new();
    while !head.ends_with(b"\r\n\r\n") {
        match timely("an answer", stream.read_u8()).await {
            Ok(byte) => head.push(byte),
            Err(_) => break,
        }
    }
    head
}

/// Returns the first line of a head.
pub(super) fn status(head: &[u8]) -> String {
    let text = String::from_utf8_lossy(head);
    text.lines().next().unwrap_or_default().to_owned()
}

/// Time after which a connection counts as open if the proxy has not closed it.
const PATIENCE: Duration = Duration::from_secs(3);

/// Reads until the end of the connection. Returns the received text, followed by `end` or `reset`.
pub(super) async fn rest(stream: &mut TcpStream) -> String {
    let mut heard = Vec::new();
    let end = timely("the end", stream.read_to_end(&mut heard)).await;
    let end = end.map_or("reset", |_| "end");
    format!("{}{end}", String::from_utf8_lossy(&heard))
}

/// Sends bytes to a port. Returns the status lines of all answers (or the received text if no answer is HTTP),
/// followed by `end`, `reset` or `open`.
pub(super) async fn converse(at: SocketAddr, bytes: &[u8]) -> String {
    speak(at, bytes, false).await
}

/// Sends bytes like [`converse`], and then closes the client's sending side.
pub(super) async fn last_words(at: SocketAddr, bytes: &[u8]) -> String {
    speak(at, bytes, true).await
}

async fn speak(at: SocketAddr, bytes: &[u8], last: bool) -> String {
    let Ok(mut stream) = TcpStream::connect(at).await else {
        return "refused".to_owned();
    };
    // Both calls fail if the proxy has closed the connection already.
    let _ = stream.write_all(bytes).await;
    if last {
        let _ = stream.shutdown().await;
    }
    let mut heard = Vec::new();
    let end = match timeout(PATIENCE, stream.read_to_end(&mut heard)).await {
        Ok(Ok(_)) => "end",
        Ok(Err(_)) => "reset",
        Err(_) => "open",
    };
    let heard = format!("{}{end}", String::from_utf8_lossy(&heard));
    let lines = heard.split("HTTP/1.1 ").skip(1);
    let lines: Vec<&str> = lines.filter_map(|answer| answer.lines().next()).collect();
    match lines.is_empty() {
        true => heard,
        false => format!("{}, {end}", lines.join(", ")),
    }
}

/// Opens a tunnel in an HTTP/2 stream.
pub(super) async fn http2(client: &Http2, name: &str) -> Result<Tunnel, StatusCode> {
    client.open(&authority(name), b"").await
}

/// Returns the status of a CONNECT, followed by the value of `x-envoy-overloaded` if the answer has this header. Returns
/// `reset` if the stream ends first, and `lost` if the connection ends first.
pub(super) async fn http2_status(client: &Http2, authority: &str) -> String {
    match client.connect_to(authority, b"").await {
        Ok((status, tunnel)) => {
            let status = status.as_u16();
            match tunnel.headers.get("x-envoy-overloaded") {
                Some(value) => format!("{status} overloaded={}", value.to_str().unwrap()),
                None => status.to_string(),
            }
        }
        Err(error) if error.is_reset() => "reset".to_owned(),
        Err(_) => "lost".to_owned(),
    }
}

/// Returns the status of a GET.
pub(super) async fn http2_get(client: &Http2, authority: &str) -> String {
    let get = Request::get(format!("http://{authority}/"));
    let status = client.ask(get.body(()).unwrap()).await;
    status.as_u16().to_string()
}

/// Reads until the end of a stream. Returns the received text, followed by `end`, `reset` or `lost`.
pub(super) async fn http2_rest(tunnel: &mut Tunnel) -> String {
    let mut heard = Vec::new();
    let end = loop {
        match timely("bytes or the end", tunnel.receive.data()).await {
            Some(Ok(bytes)) => {
                let control = tunnel.receive.flow_control();
                control.release_capacity(bytes.len()).unwrap();
                heard.extend_from_slice(&bytes);
            }
            Some(Err(error)) => break if error.is_reset() { "reset" } else { "lost" },
            None => break "end",
        }
    };
    format!("{}{end}", String::from_utf8_lossy(&heard))
}

/// Sends bytes on a stream.
pub(super) fn say(tunnel: &mut Tunnel, bytes: &'static [u8]) {
    let sent = tunnel.send.send_data(Bytes::from_static(bytes), false);
    // Fails if the stream was reset.
    sent.ok();
}
