//! Answers to CONNECT requests and to other requests.

use culvert_kit::pattern;
use culvert_kit::services::{BANNER, Services};
use tokio::io::{AsyncReadExt, AsyncWriteExt};
use tokio::net::TcpStream;

use super::clients::{converse, head, http1, http2_get, http2_status, last_words, rest, status};
use super::{Pair, Side, Verdicts, authority, exposed};
use crate::frames::{self, END_HEADERS, GOAWAY, HEADERS, RST_STREAM, connect_fields, field, frame};
use crate::support::{Http2, timely};

async fn pair(services: &Services) -> Option<Pair> {
    Pair::start(&[
        exposed("raw", services.raw),
        exposed("first", services.first),
        exposed("gone", ([127, 0, 0, 1], 1).into()),
    ])
    .await
}

#[tokio::test]
async fn http1_answers_match_envoy() {
    let services = Services::start().await.unwrap();
    let Some(pair) = pair(&services).await else {
        return;
    };
    let mut verdicts = Verdicts::default();
    let known = authority("raw");
    let connect = |target: &str| format!("CONNECT {target} HTTP/1.1\r\nHost: {target}\r\n\r\n");
    let long = "x".repeat(70_000);
    for (case, request, envoy, ours) in [
        (
            "unknown",
            connect(&authority("other")),
            "404 Not Found, end",
            "404 Not Found, end",
        ),
        (
            "another port",
            connect("raw.demo.svc.cluster.local:444"),
            "404 Not Found, end",
            "404 Not Found, end",
        ),
        (
            "no port",
            connect("raw.demo.svc.cluster.local"),
            "400 Bad Request, end",
            "400 Bad Request, end",
        ),
        (
            "no endpoint accepts",
            connect(&authority("gone")),
            "503 Service Unavailable, end",
            "503 Service Unavailable, end",
        ),
        (
            "GET of an exposed authority",
            format!("GET / HTTP/1.1\r\nHost: {known}\r\n\r\n"),
            "404 Not Found, open",
            "404 Not Found, end",
        ),
        (
            "GET of an unknown authority",
            "GET / HTTP/1.1\r\nHost: x\r\n\r\n".to_owned(),
            "404 Not Found, open",
            "404 Not Found, end",
        ),
        (
            "a path as target",
            connect("/"),
            "400 Bad Request, end",
            "400 Bad Request, end",
        ),
        (
            "user information",
            connect(&format!("user@{known}")),
            "400 Bad Request, end",
            "400 Bad Request, end",
        ),
        (
            "not a request",
            "nonsense\r\n\r\n".to_owned(),
            "400 Bad Request, end",
            "400 Bad Request, end",
        ),
        (
            "an unknown version",
            format!("CONNECT {known} HTTP/3.7\r\n\r\n"),
            "426 Upgrade Required, end",
            "505 HTTP Version Not Supported: unsupported protocol version, end",
        ),
        (
            "HTTP/1.0",
            format!("CONNECT {} HTTP/1.0\r\n\r\n", authority("other")),
            "426 Upgrade Required, end",
            "404 Not Found, end",
        ),
        (
            "an oversized head",
            format!("CONNECT {known} HTTP/1.1\r\nx: {long}\r\n\r\n"),
            "431 Request Header Fields Too Large, end",
            "431 Request Header Fields Too Large, end",
        ),
    ] {
        let seen = pair
            .see(async |side| converse(side.tunnel, request.as_bytes()).await)
            .await;
        verdicts.differ(case, seen, envoy, ours);
    }
    for (case, bytes) in [("half a request", &b"CONNECT raw"[..]), ("nothing", b"")] {
        let seen = pair
            .see(async |side| last_words(side.tunnel, bytes).await)
            .await;
        verdicts.same(case, seen, "end");
    }
    // Bytes after a refused CONNECT are not read as a second request.
    let other = connect(&authority("other"));
    let smuggled = format!("{other}{}", connect(&known));
    let seen = pair
        .see(async |side| converse(side.tunnel, smuggled.as_bytes()).await)
        .await;
    verdicts.same("after a refused CONNECT", seen, "404 Not Found, end");
}

/// Opens a tunnel to an endpoint that sends a banner first. Returns the status line, and `, banner` if the
/// banner arrived.
async fn banner(side: &Side, request: &str) -> String {
    let mut stream = TcpStream::connect(side.tunnel).await.unwrap();
    stream.write_all(request.as_bytes()).await.unwrap();
    let head = head(&mut stream).await;
    let mut heard = vec![0; BANNER.len()];
    let read = timely("the banner", stream.read_exact(&mut heard)).await;
    let tail = if read.is_ok() && heard == BANNER {
        ", banner"
    } else {
        ""
    };
    format!("{}{tail}", status(&head))
}

#[tokio::test]
async fn http1_tunnels_open_like_envoys() {
    let services = Services::start().await.unwrap();
    let Some(pair) = pair(&services).await else {
        return;
    };
    let mut verdicts = Verdicts::default();
    let known = authority("first");
    let upper = known.to_uppercase();
    for (case, request) in [
        (
            "a valid request",
            format!("CONNECT {known} HTTP/1.1\r\nHost: {known}\r\n\r\n"),
        ),
        ("no Host", format!("CONNECT {known} HTTP/1.1\r\n\r\n")),
        (
            "another Host",
            format!("CONNECT {known} HTTP/1.1\r\nHost: other:1\r\n\r\n"),
        ),
        (
            "upper case",
            format!("CONNECT {upper} HTTP/1.1\r\nHost: {upper}\r\n\r\n"),
        ),
        (
            "line feeds only",
            format!("CONNECT {known} HTTP/1.1\nHost: {known}\n\n"),
        ),
    ] {
        let seen = pair.see(async |side| banner(side, &request).await).await;
        verdicts.same(case, seen, "HTTP/1.1 200 OK, banner");
    }
    let early = async |side: &Side| {
        let raw = authority("raw");
        let request = format!("CONNECT {raw} HTTP/1.1\r\nHost: {raw}\r\n\r\ndownload 10\n");
        let mut stream = TcpStream::connect(side.tunnel).await.unwrap();
        stream.write_all(request.as_bytes()).await.unwrap();
        let line = status(&head(&mut stream).await);
        let mut heard = vec![0; 10];
        let read = timely("early data's echo", stream.read_exact(&mut heard)).await;
        let kept = read.is_ok() && heard == pattern::prefix(10);
        format!("{line}, {}", if kept { "kept" } else { "lost" })
    };
    verdicts.same("early data", pair.see(early).await, "HTTP/1.1 200 OK, kept");
    let again = async |side: &Side| {
        let mut stream = TcpStream::connect(side.tunnel).await.unwrap();
        let first = http1(&mut stream, &authority("other")).await;
        // Fails if the door has closed the connection already.
        let second = format!("GET / HTTP/1.1\r\nHost: {}\r\n\r\n", authority("raw"));
        let _ = stream.write_all(second.as_bytes()).await;
        let second = head(&mut stream).await;
        format!("{}, {}", status(&first), status(&second))
    };
    verdicts.same(
        "a refused connection is closed",
        pair.see(again).await,
        "HTTP/1.1 404 Not Found, ",
    );
    let texts = async |side: &Side| {
        let mut stream = TcpStream::connect(side.tunnel).await.unwrap();
        let head = http1(&mut stream, &authority("gone")).await;
        let length = String::from_utf8_lossy(&head).to_lowercase();
        let length = length
            .lines()
            .find_map(|line| line.strip_prefix("content-length: "));
        match length {
            Some(length) => {
                let mut body = vec![0; length.parse().unwrap()];
                timely("the body", stream.read_exact(&mut body))
                    .await
                    .unwrap();
                String::from_utf8(body).unwrap()
            }
            None => rest(&mut stream).await,
        }
    };
    verdicts.differ(
        "the text of a 503",
        pair.see(texts).await,
        "upstream connect error or disconnect/reset before headers. reset reason: remote connection failure",
        "no endpoint of the Service accepted the connection\nend",
    );
}

#[tokio::test]
async fn http2_answers_match_envoy() {
    let services = Services::start().await.unwrap();
    let Some(pair) = pair(&services).await else {
        return;
    };
    let mut verdicts = Verdicts::default();
    for (case, target, envoy, ours) in [
        ("known", authority("raw"), "200", "200"),
        ("upper case", authority("raw").to_uppercase(), "200", "200"),
        ("unknown", authority("other"), "404", "404"),
        (
            "another port",
            authority("raw").replace("443", "444"),
            "404",
            "404",
        ),
        (
            "no port",
            authority("raw").replace(":443", ""),
            "404",
            "404",
        ),
        // Envoy ends the whole connection with all tunnels.
        (
            "user information",
            format!("user@{}", authority("raw")),
            "lost",
            "404",
        ),
        ("no endpoint accepts", authority("gone"), "503", "503"),
    ] {
        let look = async |side: &Side| {
            let client = Http2::connect(side.tunnel).await;
            http2_status(&client, &target).await
        };
        verdicts.differ(case, pair.see(look).await, envoy, ours);
    }
    for (case, target) in [
        ("GET of an exposed authority", authority("raw")),
        ("GET of an unknown authority", authority("other")),
    ] {
        let look = async |side: &Side| {
            let client = Http2::connect(side.tunnel).await;
            let status = http2_get(&client, &target).await;
            // The connection still works.
            format!(
                "{status}, {}",
                http2_status(&client, &authority("raw")).await
            )
        };
        verdicts.same(case, pair.see(look).await, "404, 200");
    }
}

/// Sends one request in a raw HTTP/2 frame. Returns the answer on the stream or on the connection.
async fn raw(side: &Side, fields: &[u8]) -> String {
    let (mut frames, mut write) = frames::connect(side.tunnel, &[]).await;
    let request = frame(HEADERS, END_HEADERS, 1, fields);
    write.write_all(&request).await.unwrap();
    while let Some(next) = frames.next().await {
        match next.kind {
            HEADERS => return next.status().map_or("other".into(), |s| s.to_string()),
            RST_STREAM => return format!("reset {}", next.code()),
            GOAWAY => return format!("goaway {}", next.code()),
            _ => {}
        }
    }
    "end".to_owned()
}

#[tokio::test]
async fn malformed_http2_requests_are_refused() {
    let services = Services::start().await.unwrap();
    let Some(pair) = pair(&services).await else {
        return;
    };
    let mut verdicts = Verdicts::default();
    let known = connect_fields(&authority("raw"));
    let with = |name, value| [known.clone(), field(name, value)].concat();
    let seen = pair.see(async |side| raw(side, &known).await).await;
    verdicts.same("a valid request", seen, "200");
    // Envoy ends the whole connection with all tunnels, and sends no GOAWAY.
    for (case, fields, ours) in [
        ("with a path", with(":path", "/"), "reset 1"),
        ("with a scheme", with(":scheme", "http"), "reset 1"),
        ("no authority", field(":method", "CONNECT"), "404"),
        ("no method", field(":authority", "x"), "reset 1"),
        ("two authorities", with(":authority", "y:1"), "reset 1"),
        ("a header of HTTP/1", with("connection", "close"), "reset 1"),
        ("upper case in a name", with("X", "y"), "goaway 1"),
    ] {
        let seen = pair.see(async |side| raw(side, &fields).await).await;
        verdicts.differ(case, seen, "end", ours);
    }
}
