#![allow(clippy::unwrap_used, clippy::expect_used, clippy::indexing_slicing)]

use std::future::ready;
use std::net::SocketAddr;
use std::sync::atomic::{AtomicBool, Ordering};

use tokio::io::{AsyncReadExt, AsyncWriteExt};
use tokio::net::TcpStream;
use tokio::sync::Notify;
use tokio::task::JoinHandle;

use super::*;
use crate::telemetry::metrics::Registry;

struct Running {
    address: SocketAddr,
    shutdown: CancellationToken,
    task: JoinHandle<()>,
}

impl Running {
    async fn start(routes: Routes) -> Self {
        let listener = bind("127.0.0.1", 0, ["--port"; 2]).await.unwrap();
        let address = listener.local_addr().unwrap();
        let shutdown = CancellationToken::new();
        let task = tokio::spawn(serve(listener, routes, shutdown.clone()));
        Self {
            address,
            shutdown,
            task,
        }
    }

    async fn connect(&self) -> TcpStream {
        TcpStream::connect(self.address).await.unwrap()
    }

    /// Sends one request on its own connection and returns the whole response.
    async fn ask(&self, method: &str, path: &str) -> String {
        self.ask_as(method, path, "host.example:8095").await
    }

    async fn ask_as(&self, method: &str, path: &str, host: &str) -> String {
        let mut stream = self.connect().await;
        let request =
            format!("{method} {path} HTTP/1.1\r\nHost: {host}\r\nConnection: close\r\n\r\n");
        stream.write_all(request.as_bytes()).await.unwrap();
        let mut answer = String::new();
        stream.read_to_string(&mut answer).await.unwrap();
        answer
    }

    async fn stop(self) {
        self.shutdown.cancel();
        self.task.await.unwrap();
    }
}

fn status(answer: &str) -> &str {
    answer.split(' ').nth(1).unwrap()
}

fn body(answer: &str) -> &str {
    answer.split_once("\r\n\r\n").unwrap().1
}

#[tokio::test]
async fn paths_match_exactly() {
    let server = Running::start(Routes::new().with_healthz()).await;
    let answer = server.ask("GET", "/healthz").await;
    assert_eq!((status(&answer), body(&answer)), ("200", "ok"));
    assert!(answer.contains("content-type: text/plain; charset=utf-8\r\n"));
    for path in ["/", "/healthz/", "/livez", "/HEALTHZ"] {
        assert_eq!(status(&server.ask("GET", path).await), "404", "{path}");
    }
    server.stop().await;
}

#[tokio::test]
async fn health_and_metrics_accept_every_method() {
    let ping = Check {
        name: "ping",
        run: Box::new(|| Ok(())),
    };
    let registry = Registry::new(&[]).unwrap();
    registry.counter("x_total", &[], "h").increment(1);
    let routes = Routes::new()
        .with_healthz()
        .with_agent_readyz(vec![ping])
        .with_metrics(registry);
    let server = Running::start(routes).await;
    for method in ["GET", "OPTIONS", "POST", "PUT", "DELETE", "TRACE", "PURGE"] {
        for path in ["/healthz", "/readyz", "/ready"] {
            let answer = server.ask(method, path).await;
            let seen = (status(&answer), body(&answer));
            assert_eq!(seen, ("200", "ok"), "{method} {path}");
        }
        let answer = server.ask(method, "/metrics").await;
        assert_eq!(status(&answer), "200", "{method}");
        assert!(body(&answer).contains("x_total 1\n"), "{method}");
    }
    for path in ["/healthz", "/readyz", "/ready", "/metrics"] {
        let answer = server.ask("HEAD", path).await;
        assert_eq!((status(&answer), body(&answer)), ("200", ""), "{path}");
    }
    let answer = server.ask("HEAD", "/healthz").await;
    assert!(answer.contains("content-length: 2\r\n"));
    server.stop().await;
}

#[tokio::test]
async fn other_pages_accept_get_and_head() {
    let routes = Routes::new().route("/status", |_| ready(Reply::text(StatusCode::OK, "fine")));
    let server = Running::start(routes).await;
    for (method, expected) in [("GET", "fine"), ("HEAD", "")] {
        let answer = server.ask(method, "/status").await;
        assert_eq!((status(&answer), body(&answer)), ("200", expected));
    }
    for method in ["POST", "OPTIONS", "DELETE"] {
        let answer = server.ask(method, "/status").await;
        assert_eq!(status(&answer), "405", "{method}");
        assert!(answer.contains("allow: GET, HEAD\r\n"));
    }
    server.stop().await;
}

#[tokio::test]
async fn request_with_a_body_keeps_the_connection_open() {
    let server = Running::start(Routes::new().with_healthz()).await;
    let mut stream = server.connect().await;
    let longest = "x".repeat(MAX_BODY_BYTES);
    for (method, rest) in [
        ("GET", "Content-Length: 5\r\n\r\nhello".to_owned()),
        (
            "OPTIONS",
            format!("Content-Length: {MAX_BODY_BYTES}\r\n\r\n{longest}"),
        ),
        (
            "POST",
            "Transfer-Encoding: chunked\r\n\r\n5\r\nhello\r\n0\r\n\r\n".to_owned(),
        ),
        ("HEAD", "\r\n".to_owned()),
        ("GET", "\r\n".to_owned()),
    ] {
        let request = format!("{method} /healthz HTTP/1.1\r\nHost: x\r\n{rest}");
        stream.write_all(request.as_bytes()).await.unwrap();
        let end: &[u8] = match method {
            "HEAD" => b"\r\n\r\n",
            _ => b"\r\n\r\nok",
        };
        let mut answer = Vec::new();
        while !answer.ends_with(end) {
            answer.push(stream.read_u8().await.unwrap());
        }
        assert!(answer.starts_with(b"HTTP/1.1 200 "), "{method}");
    }
    server.stop().await;
}

#[tokio::test]
async fn request_with_a_body_beyond_the_limit_gets_413_and_ends_the_connection() {
    let server = Running::start(Routes::new().with_healthz()).await;
    let length = MAX_BODY_BYTES + 1;
    let chunk = "x".repeat(length);
    for rest in [
        format!("Content-Length: {length}\r\n\r\n"),
        format!("Transfer-Encoding: chunked\r\n\r\n{length:x}\r\n{chunk}"),
    ] {
        let mut stream = server.connect().await;
        let request = format!("OPTIONS /healthz HTTP/1.1\r\nHost: x\r\n{rest}");
        stream.write_all(request.as_bytes()).await.unwrap();
        let mut answer = String::new();
        stream.read_to_string(&mut answer).await.unwrap();
        assert_eq!(status(&answer), "413");
        assert!(answer.contains("connection: close\r\n"), "{answer}");
    }
    server.stop().await;
}

#[tokio::test]
async fn requests_for_profiles_get_404_with_the_remedy() {
    let server = Running::start(Routes::new().with_healthz()).await;
    for path in ["/debug/pprof", "/debug/pprof/", "/debug/pprof/heap?debug=1"] {
        let answer = server.ask("GET", path).await;
        assert_eq!(status(&answer), "404", "{path}");
        assert!(body(&answer).contains("perf record"), "{answer}");
    }
    let answer = server.ask("GET", "/debug/pprofile").await;
    assert_eq!(body(&answer), "404 page not found\n");
    server.stop().await;
}

#[tokio::test]
async fn server_readiness_matches_upstream() {
    let is_ready = Arc::new(AtomicBool::new(false));
    let seen = Arc::clone(&is_ready);
    let fault =
        move || (!seen.load(Ordering::Relaxed)).then_some("no connection to any proxy agent");
    let server = Running::start(Routes::new().with_server_readyz(fault)).await;
    for path in ["/readyz", "/ready", "/readyz?verbose"] {
        let answer = server.ask("GET", path).await;
        let expected = ("500", "no connection to any proxy agent");
        assert_eq!((status(&answer), body(&answer)), expected);
    }
    is_ready.store(true, Ordering::Relaxed);
    for path in ["/readyz", "/ready", "/readyz?verbose"] {
        let answer = server.ask("GET", path).await;
        assert_eq!((status(&answer), body(&answer)), ("200", "ok"));
    }
    server.stop().await;
}

#[tokio::test]
async fn agent_readiness_matches_upstream() {
    let is_ready = Arc::new(AtomicBool::new(false));
    let seen = Arc::clone(&is_ready);
    let ping = Check {
        name: "ping",
        run: Box::new(|| Ok(())),
    };
    let connected = Check {
        name: "server-connected",
        run: Box::new(move || match seen.load(Ordering::Relaxed) {
            true => Ok(()),
            false => Err("no servers connected".to_owned()),
        }),
    };
    let server = Running::start(Routes::new().with_agent_readyz(vec![ping, connected])).await;
    for path in ["/readyz", "/ready?verbose"] {
        let answer = server.ask("GET", path).await;
        assert_eq!(status(&answer), "503");
        assert_eq!(
            body(&answer),
            "[+]ping ok\n[-]server-connected failed: no servers connected\n"
        );
    }
    is_ready.store(true, Ordering::Relaxed);
    let answer = server.ask("GET", "/readyz").await;
    assert_eq!((status(&answer), body(&answer)), ("200", "ok"));
    for path in ["/readyz?verbose", "/ready?a=b&verbose=1"] {
        let answer = server.ask("GET", path).await;
        assert_eq!(
            body(&answer),
            "[+]ping ok\n[+]server-connected ok\ncheck passed\n"
        );
    }
    server.stop().await;
}

#[tokio::test]
async fn metrics_are_rendered_per_request() {
    let registry = Registry::new(&[]).unwrap();
    let counter = registry.counter("x_total", &[], "h");
    let server = Running::start(Routes::new().with_metrics(registry)).await;
    let answer = server.ask("GET", "/metrics").await;
    assert!(answer.contains("content-type: text/plain; version=0.0.4"));
    assert!(body(&answer).contains("x_total 0\n"));
    counter.increment(1);
    assert!(server.ask("GET", "/metrics").await.contains("x_total 1\n"));
    server.stop().await;
}

#[tokio::test]
async fn redirects_keep_the_host() {
    let routes = Routes::new().with_redirect_to_port("/metrics", 8093);
    let server = Running::start(routes).await;
    for (host, path, location) in [
        (
            "agent.example:8094",
            "/metrics",
            "//agent.example:8093/metrics",
        ),
        (
            "agent.example",
            "/metrics?a=b",
            "//agent.example:8093/metrics?a=b",
        ),
        ("[::1]:8094", "/metrics", "//[::1]:8093/metrics"),
        ("[::1]", "/metrics", "//[::1]:8093/metrics"),
    ] {
        let answer = server.ask_as("GET", path, host).await;
        assert_eq!(status(&answer), "301");
        assert!(
            answer.contains(&format!("location: {location}\r\n")),
            "{answer}"
        );
    }
    let answer = server.ask_as("GET", "/metrics", "evil/path").await;
    assert_eq!(status(&answer), "400");
    server.stop().await;
}

#[tokio::test]
async fn a_connection_serves_several_requests() {
    let server = Running::start(Routes::new().with_healthz()).await;
    let mut stream = server.connect().await;
    for _ in 0..3 {
        stream
            .write_all(b"GET /healthz HTTP/1.1\r\nHost: x\r\n\r\n")
            .await
            .unwrap();
        let mut answer = Vec::new();
        while !answer.ends_with(b"\r\n\r\nok") {
            answer.push(stream.read_u8().await.unwrap());
        }
    }
    // The connection is idle now, so the shutdown closes it at once.
    server.stop().await;
    assert_eq!(stream.read(&mut [0]).await.unwrap(), 0);
}

#[tokio::test]
async fn shutdown_lets_a_request_finish() {
    let (begun, release) = (Arc::new(Notify::new()), Arc::new(Notify::new()));
    let (at_begin, at_release) = (Arc::clone(&begun), Arc::clone(&release));
    let routes = Routes::new().route("/slow", move |_| {
        let (begun, release) = (Arc::clone(&at_begin), Arc::clone(&at_release));
        async move {
            begun.notify_one();
            release.notified().await;
            Reply::text(StatusCode::OK, "done")
        }
    });
    let server = Running::start(routes).await;
    let mut stream = server.connect().await;
    stream
        .write_all(b"GET /slow HTTP/1.1\r\nHost: x\r\n\r\n")
        .await
        .unwrap();
    begun.notified().await;
    server.shutdown.cancel();
    release.notify_one();
    let mut answer = String::new();
    stream.read_to_string(&mut answer).await.unwrap();
    assert!(answer.ends_with("\r\n\r\ndone"), "{answer}");
    server.stop().await;
}

#[tokio::test(start_paused = true)]
async fn silent_slow_and_idle_connections_are_closed() {
    let server = Running::start(Routes::new().with_healthz()).await;
    for bytes in [
        &b""[..],
        b"GET /hea",
        b"GET /healthz HTTP/1.1\r\nHost: x\r\n\r\n",
    ] {
        let mut stream = server.connect().await;
        stream.write_all(bytes).await.unwrap();
        // The read ends only if the server closes the connection.
        let mut answer = Vec::new();
        stream.read_to_end(&mut answer).await.unwrap();
    }
    server.stop().await;
}

#[tokio::test(start_paused = true)]
async fn connection_stays_open_between_scrapes_and_a_slow_head_ends_it() {
    let (near, mut far) = tokio::io::duplex(1 << 16);
    let routes = Arc::new(Routes::new().with_healthz());
    let shutdown = CancellationToken::new();
    let serving = tokio::spawn(serve_http(Box::new(near), routes, shutdown));
    for _ in 0..3 {
        far.write_all(b"GET /healthz HTTP/1.1\r\nHost: x\r\n\r\n")
            .await
            .unwrap();
        let mut answer = Vec::new();
        while !answer.ends_with(b"\r\n\r\nok") {
            answer.push(far.read_u8().await.unwrap());
        }
        tokio::time::sleep(HEADER_TIMEOUT * 2).await;
    }
    let begin = Instant::now();
    far.write_all(b"GET /hea").await.unwrap();
    far.read_to_end(&mut Vec::new()).await.unwrap();
    assert_eq!(begin.elapsed(), HEADER_TIMEOUT);
    serving.await.unwrap();
}

#[tokio::test]
async fn a_huge_head_is_refused() {
    let server = Running::start(Routes::new().with_healthz()).await;
    let mut stream = server.connect().await;
    let head = [
        b"GET / HTTP/1.1\r\nX: ".to_vec(),
        vec![b'x'; MAX_HEAD_BYTES],
    ]
    .concat();
    // The server may reset the connection before the request is written or the response is read.
    let _ = stream.write_all(&head).await;
    let mut answer = Vec::new();
    let _ = stream.read_to_end(&mut answer).await;
    let answer = String::from_utf8_lossy(&answer);
    assert!(answer.is_empty() || status(&answer) == "431", "{answer}");
    server.stop().await;
}

#[tokio::test]
async fn reply_may_have_any_content_type() {
    let page = Reply::new(StatusCode::CREATED, "application/json", "{}");
    let routes = Routes::new().route("/json", move |_| ready(page.clone()));
    let server = Running::start(routes).await;
    let answer = server.ask("GET", "/json").await;
    assert_eq!((status(&answer), body(&answer)), ("201", "{}"));
    assert!(answer.contains("content-type: application/json\r\n"));
    server.stop().await;
}

#[tokio::test]
async fn empty_host_binds_all_interfaces() {
    let listener = bind("", 0, ["--port"; 2]).await.unwrap();
    let address = listener.local_addr().unwrap();
    assert!(address.ip().is_unspecified());
    TcpStream::connect(("127.0.0.1", address.port()))
        .await
        .unwrap();
    if address.is_ipv6() {
        TcpStream::connect(("::1", address.port())).await.unwrap();
    }
    let named = bind("localhost", 0, ["--port"; 2]).await.unwrap();
    assert!(named.local_addr().unwrap().ip().is_loopback());
}

#[tokio::test]
async fn bind_errors_name_the_flag() {
    let taken = bind("127.0.0.1", 0, ["--health-port"; 2]).await.unwrap();
    let address = taken.local_addr().unwrap();
    let error = bind("127.0.0.1", address.port(), ["--health-port"; 2])
        .await
        .unwrap_err();
    assert_eq!(
        error.to_string(),
        format!(
            "cannot listen on {address}: the port is in use; stop the other process or change --health-port"
        )
    );
    let flags = ["--health-bind-address", "--health-port"];
    let error = bind("192.0.2.1", 0, flags).await.unwrap_err();
    let text = error.to_string();
    assert!(text.contains("not an address of this machine"), "{text}");
    assert!(text.ends_with("correct the host given for --health-bind-address"));
}

#[tokio::test]
async fn actions_are_posts_with_a_bounded_body() {
    let echo = |request: Request<Bytes>| ready(Reply::text(StatusCode::OK, request.into_body()));
    let server = Running::start(Routes::new().action("/act", echo)).await;
    let post = async |length: usize, body: &[u8]| {
        let mut stream = server.connect().await;
        let head = format!(
            "POST /act HTTP/1.1\r\nHost: x\r\nConnection: close\r\nContent-Length: {length}\r\n\r\n"
        );
        stream.write_all(head.as_bytes()).await.unwrap();
        stream.write_all(body).await.unwrap();
        let mut answer = String::new();
        stream.read_to_string(&mut answer).await.ok();
        answer
    };
    let answer = post(5, b"hello").await;
    assert_eq!((status(&answer), body(&answer)), ("200", "hello"));
    assert_eq!(status(&post(1 << 20, b"").await), "413");
    let answer = server.ask("GET", "/act").await;
    assert_eq!(status(&answer), "405");
    assert!(answer.contains("allow: POST\r\n"));
    server.stop().await;
}

#[tokio::test(start_paused = true)]
async fn missing_request_body_times_out() {
    let routes = Routes::new().action("/act", |_| ready(Reply::text(StatusCode::OK, "")));
    let server = Running::start(routes.with_healthz()).await;
    for path in ["/act", "/healthz"] {
        let mut stream = server.connect().await;
        let head = format!("POST {path} HTTP/1.1\r\nHost: x\r\nContent-Length: 9\r\n\r\n");
        stream.write_all(head.as_bytes()).await.unwrap();
        let mut answer = String::new();
        stream.read_to_string(&mut answer).await.unwrap();
        assert_eq!(status(&answer), "408", "{path}");
    }
    server.stop().await;
}

/// A page that is larger than the buffers of a connection.
struct Large(
    #[expect(dead_code, reason = "counts the pages")] Arc<()>,
    Vec<u8>,
);

impl AsRef<[u8]> for Large {
    fn as_ref(&self) -> &[u8] {
        &self.1
    }
}

#[tokio::test]
async fn unread_answer_is_dropped_in_time() {
    let (begun, pages) = (Arc::new(Notify::new()), Arc::new(()));
    let (at_begin, owner) = (Arc::clone(&begun), Arc::clone(&pages));
    let routes = Routes::new().route("/large", move |_| {
        at_begin.notify_one();
        let page = Bytes::from_owner(Large(Arc::clone(&owner), vec![0; 64 << 20]));
        ready(Reply::text(StatusCode::OK, page))
    });
    let server = Running::start(routes).await;
    let mut unread = server.connect().await;
    let request = b"GET /large HTTP/1.1\r\nHost: x\r\n\r\n";
    unread.write_all(request).await.unwrap();
    begun.notified().await;
    tokio::time::pause();
    tokio::time::sleep(progress::WRITE_TIMEOUT / 2).await;
    assert_eq!(Arc::strong_count(&pages), 3);
    // The kernel may have accepted another part meanwhile.
    tokio::time::sleep(2 * progress::WRITE_TIMEOUT).await;
    assert_eq!(Arc::strong_count(&pages), 2);
    server.stop().await;
}
