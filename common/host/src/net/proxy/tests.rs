#![allow(clippy::unwrap_used, clippy::expect_used, clippy::indexing_slicing)]

use std::time::Duration;

use tokio::io::AsyncReadExt as _;
use tokio::net::{TcpListener, TcpSocket};

use super::*;

fn by(
    variables: &[(&str, &str)],
    host: &str,
    port: u16,
) -> Result<Option<ProxyTarget>, ProxyError> {
    from_variables(host, port, ProxyScheme::Counts, |name| {
        let found = variables.iter().find(|(variable, _)| *variable == name);
        found.map(|(_, value)| (*value).to_owned())
    })
}

fn soon() -> Instant {
    Instant::now() + Duration::from_secs(60)
}

#[test]
fn proxy_variables_are_read_in_either_case() {
    for (variables, expected) in [
        (&[][..], None),
        (&[("HTTP_PROXY", "http://p:1")], None),
        (&[("HTTPS_PROXY", "http://p:3128")], Some("p:3128")),
        (&[("https_proxy", "http://p:3128/")], Some("p:3128")),
        (
            &[("HTTPS_PROXY", ""), ("https_proxy", "http://q")],
            Some("q:80"),
        ),
        (
            &[("HTTPS_PROXY", "p:3128"), ("https_proxy", "http://q")],
            Some("p:3128"),
        ),
        (
            &[("HTTPS_PROXY", "HTTP://[2001:db8::1]:8080")],
            Some("[2001:db8::1]:8080"),
        ),
    ] {
        let proxy = by(variables, "server.example", 8091).unwrap();
        assert_eq!(
            proxy.map(|proxy| proxy.to_string()).as_deref(),
            expected,
            "{variables:?}"
        );
    }
}

#[test]
fn the_scheme_may_be_ignored_as_in_grpc_go() {
    for (url, expected) in [
        ("https://p:3128", "p:3128"),
        ("socks5://user:secret@p:1080", "p:1080"),
        ("http://p", "p:443"),
        ("p", "p:443"),
    ] {
        let proxy = ProxyTarget::parse(url, ProxyScheme::Ignored).unwrap();
        assert_eq!(proxy.to_string(), expected, "{url}");
    }
    for url in ["https://", "http://user:secret@"] {
        let error = ProxyTarget::parse(url, ProxyScheme::Ignored).unwrap_err();
        assert_eq!(error, ProxyError::Invalid, "{url}");
    }
}

#[test]
fn unusable_proxy_error_does_not_show_the_value() {
    for (url, error) in [
        ("https://p:3128", ProxyError::Scheme),
        ("socks5://user:secret@p:1080", ProxyError::Scheme),
        ("http://", ProxyError::Invalid),
        ("http://user:secret@", ProxyError::Invalid),
        ("not a url", ProxyError::Invalid),
    ] {
        let found = by(&[("HTTPS_PROXY", url)], "server.example", 8091).unwrap_err();
        assert_eq!(found, error, "{url}");
        assert!(!found.to_string().contains("secret"));
    }
    // The proxy is not used, so its URL is not checked.
    assert!(
        by(&[("HTTPS_PROXY", "https://p"), ("NO_PROXY", "*")], "x", 1)
            .unwrap()
            .is_none()
    );
}

#[test]
fn credentials_are_sent_but_not_shown() {
    let variables = [("HTTPS_PROXY", "http://Aladdin:open%20sesame@p:3128")];
    let proxy = by(&variables, "server.example", 8091).unwrap().unwrap();
    assert_eq!(format!("{proxy} {proxy:?}"), "p:3128 ProxyTarget(p:3128)");
    let request = connect_request(&proxy, "server.example", 8091).unwrap();
    assert_eq!(
        String::from_utf8(request.to_vec()).unwrap(),
        "CONNECT server.example:8091 HTTP/1.1\r\nHost: server.example:8091\r\n\
         Proxy-Authorization: Basic QWxhZGRpbjpvcGVuIHNlc2FtZQ==\r\n\r\n"
    );
}

#[test]
fn no_proxy_matches_as_in_go() {
    for (exceptions, host, port, exempt) in [
        ("", "localhost", 1, true),
        ("", "LOCALHOST", 1, true),
        ("", "127.0.0.2", 1, true),
        ("", "::1", 1, true),
        ("", "example.com", 443, false),
        ("*", "example.com", 443, true),
        ("other, *", "example.com", 443, true),
        ("example.com", "example.com", 443, true),
        ("example.com", "Sub.Example.com", 443, true),
        ("example.com", "notexample.com", 443, false),
        (".example.com", "sub.example.com", 443, true),
        (".example.com", "example.com", 443, false),
        ("*.example.com", "sub.example.com", 443, true),
        ("*.example.com", "example.com", 443, false),
        ("example.com:8091", "example.com", 8091, true),
        ("example.com:8091", "sub.example.com", 8091, true),
        ("example.com:8091", "example.com", 443, false),
        ("10.0.0.1", "10.0.0.1", 443, true),
        ("10.0.0.1:443", "10.0.0.1", 443, true),
        ("10.0.0.1:443", "10.0.0.1", 80, false),
        ("[2001:db8::1]:443", "2001:db8::1", 443, true),
        ("2001:db8::1", "2001:db8::1", 443, true),
        ("10.0.0.0/8", "10.9.8.7", 443, true),
        ("10.0.0.0/8", "11.0.0.1", 443, false),
        ("0.0.0.0/0", "11.0.0.1", 443, true),
        ("10.0.0.1/32", "10.0.0.1", 443, true),
        ("10.0.0.1/32", "10.0.0.2", 443, false),
        ("2001:db8::/32", "2001:db8:1::1", 443, true),
        ("::/0", "2001:db8:1::1", 443, true),
        ("::/0", "10.0.0.1", 443, false),
        ("10.0.0.0/33", "10.0.0.1", 443, false),
        (" , :443, ., *.", "example.com", 443, false),
        (
            "a.example, 10.0.0.0/8 ,example.com",
            "example.com",
            443,
            true,
        ),
    ] {
        assert_eq!(
            is_exempt(host, port, exceptions),
            exempt,
            "{exceptions:?} for {host}:{port}"
        );
    }
}

/// Starts a proxy that answers one CONNECT request with `answer`. The task returns the request.
async fn proxy_that_answers(
    answer: &'static [u8],
) -> (ProxyTarget, tokio::task::JoinHandle<String>) {
    let listener = TcpListener::bind("127.0.0.1:0").await.unwrap();
    let url = format!("http://{}", listener.local_addr().unwrap());
    let task = tokio::spawn(async move {
        let (mut stream, _) = listener.accept().await.unwrap();
        let request = read_answer_head(&mut stream).await.unwrap();
        stream.write_all(answer).await.unwrap();
        String::from_utf8(request.to_vec()).unwrap()
    });
    (ProxyTarget::parse(&url, ProxyScheme::Counts).unwrap(), task)
}

#[tokio::test]
async fn tunnel_starts_directly_after_the_proxys_response() {
    let answer = b"HTTP/1.1 200 Connection established\r\nVia: x\r\n\r\nfirst bytes";
    let (proxy, task) = proxy_that_answers(answer).await;
    let mut stream = connect(&proxy, "2001:db8::1", 8091, soon()).await.unwrap();
    let mut rest = String::new();
    stream.read_to_string(&mut rest).await.unwrap();
    assert_eq!(rest, "first bytes");
    assert_eq!(
        task.await.unwrap(),
        "CONNECT [2001:db8::1]:8091 HTTP/1.1\r\nHost: [2001:db8::1]:8091\r\n\r\n"
    );
}

#[tokio::test]
async fn refusals_and_invalid_responses_are_reported() {
    for (answer, text) in [
        (
            &b"HTTP/1.1 407 Proxy Authentication Required\r\n\r\n"[..],
            "refused the CONNECT request: 407 Proxy Authentication Required",
        ),
        (
            b"HTTP/1.1 204 No Content\r\n\r\n",
            "refused the CONNECT request: 204",
        ),
        (b"SSH-2.0-x\r\n\r\n", "the answer is not HTTP"),
        (
            b"HTTP/1.1 200 OK\r\n",
            "closed the connection instead of answering",
        ),
        (
            &[b'x'; MAX_HEAD_BYTES + 1],
            "the answer's head is longer than 8192 bytes",
        ),
    ] {
        let (proxy, task) = proxy_that_answers(answer).await;
        let error = connect(&proxy, "h", 1, soon())
            .await
            .unwrap_err()
            .to_string();
        assert!(error.starts_with(&format!("proxy {proxy}: ")), "{error}");
        assert!(error.contains(text), "{error}");
        task.await.unwrap();
    }
}

#[tokio::test]
async fn silent_proxy_times_out_at_the_deadline() {
    let listener = TcpListener::bind("127.0.0.1:0").await.unwrap();
    let url = format!("http://{}", listener.local_addr().unwrap());
    let proxy = ProxyTarget::parse(&url, ProxyScheme::Counts).unwrap();
    let deadline = Instant::now() + Duration::from_millis(100);
    let error = connect(&proxy, "h", 1, deadline).await.unwrap_err();
    assert_eq!(error.kind(), io::ErrorKind::TimedOut);
}

#[tokio::test]
async fn unreachable_proxy_and_invalid_host_are_reported() {
    // Bound but not listening, so that no other process gets the port.
    let socket = TcpSocket::new_v4().unwrap();
    socket.bind("127.0.0.1:0".parse().unwrap()).unwrap();
    let address = socket.local_addr().unwrap();
    let proxy = ProxyTarget::parse(&format!("http://{address}"), ProxyScheme::Counts).unwrap();
    let error = connect(&proxy, "h", 1, soon())
        .await
        .unwrap_err()
        .to_string();
    assert!(error.contains("connection refused"), "{error}");

    for host in ["", "a b", "a\r\nX: y"] {
        let error = connect(&proxy, host, 1, soon()).await.unwrap_err();
        assert_eq!(error.kind(), io::ErrorKind::InvalidInput);
    }
}
