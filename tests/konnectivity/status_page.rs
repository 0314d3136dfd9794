//! `culvert status --web`: the status page of a running server, with HTTP and with a real browser.

use std::net::SocketAddr;
use std::path::Path;
use std::process::Stdio;

use culvert_kit::pki::KONNECTIVITY_NAME;
use culvert_kit::services::Services;
use culvert_tests::metrics::{http_get, http_post};
use culvert_tests::process::Signal;
use culvert_tests::skip::has_program;
use culvert_tests::{Executable, Mode, Program, Topology, Transport, eventually};
use http::StatusCode;
use serde_json::Value;
use tokio::io::{AsyncReadExt as _, AsyncWriteExt as _};
use tokio::net::TcpStream;
use tokio::time::timeout;

use crate::support::*;

/// Name of an agent that would be markup in a careless page.
const HOSTILE: &str = "<b>agent</b>&<script>alert(1)</script>";

/// A running `culvert status --web`.
struct Page {
    program: Program,
    url: String,
    address: SocketAddr,
    token: String,
}

impl Page {
    async fn open(args: &[&str]) -> Self {
        let args = [&["status", "--web"], args].concat();
        let program = Program::spawn("culvert", args, &[]);
        let line = program.wait_for_log("http://", LIMIT).await;
        let (_, rest) = line.split_once("http://").unwrap();
        let (address, token) = rest.split_once("/?token=").unwrap();
        Self {
            url: format!("http://{rest}"),
            address: address.parse().unwrap(),
            token: token.to_owned(),
            program,
        }
    }

    async fn data(&self) -> Value {
        let path = format!("/data?token={}", self.token);
        let (status, _, body) = http_get(self.address, &path).await.unwrap();
        assert_eq!(status, StatusCode::OK);
        serde_json::from_slice(&body).unwrap()
    }

    /// Waits until the data are as expected.
    async fn shows(&self, what: &str, expected: impl Fn(&Value) -> bool) -> Value {
        eventually(what, LIMIT, async || {
            let data = self.data().await;
            match expected(&data) {
                true => Ok(data),
                false => Err(data.to_string()),
            }
        })
        .await
    }
}

/// Starts a server with an admin socket, and an agent with a hostile name.
async fn topology() -> (Topology, tempfile::TempDir, String) {
    let folder = tempfile::tempdir().unwrap();
    let socket = format!("--admin-uds={}", folder.path().join("admin.sock").display());
    let builder = Topology::builder(Mode::HttpConnect, Transport::Uds).servers(1);
    let id = format!("--agent-id={HOSTILE}");
    let builder = builder.server_args(&[&socket]);
    let topology = builder.agent(Executable::Ours, &[&id]).start().await;
    (topology, folder, socket)
}

/// Returns the first line of the answer to a request with any head.
async fn first_line(address: SocketAddr, head: &str) -> String {
    let mut stream = TcpStream::connect(address).await.unwrap();
    let head = format!("{head}\r\nConnection: close\r\n\r\n");
    stream.write_all(head.as_bytes()).await.unwrap();
    let mut answer = String::new();
    stream.read_to_string(&mut answer).await.unwrap();
    answer.lines().next().unwrap_or_default().to_owned()
}

#[tokio::test]
async fn page_shows_the_server_and_its_end_and_ends_on_signals() {
    let services = Services::start().await.unwrap();
    let (mut topology, _folder, socket) = topology().await;
    let mut page = Page::open(&[&socket]).await;
    let path = format!("/?token={}", page.token);
    let (status, headers, body) = http_get(page.address, &path).await.unwrap();
    assert_eq!(status, StatusCode::OK);
    let html = String::from_utf8(body.to_vec()).unwrap();
    assert!(html.starts_with("<!doctype html>"), "{html}");
    let policy = headers["content-security-policy"].to_str().unwrap();
    assert!(policy.starts_with("default-src 'none'; style-src 'sha256-"));
    for (name, value) in [
        ("content-type", "text/html; charset=utf-8"),
        ("cache-control", "no-store"),
        ("referrer-policy", "no-referrer"),
        ("x-content-type-options", "nosniff"),
    ] {
        assert_eq!(headers[name], value, "{name}");
    }

    let data = page.data().await;
    assert_eq!(data["reasons"], serde_json::json!([]), "{data}");
    let tunnel = &data["tunnels"][0];
    let peers = tunnel["peers"].as_array().unwrap();
    assert_eq!(peers.len(), 1, "{data}");
    let peer = peers[0].as_array().unwrap();
    let expected = [HOSTILE, "agent, native", "healthy"];
    assert_eq!(peer[..3], expected);
    let address: SocketAddr = peer[4].as_str().unwrap().parse().unwrap();
    assert!(address.ip().is_loopback(), "{address}");
    let files = data["fileSets"].as_array().unwrap();
    let agent = files.iter().find(|set| set["name"] == "agent").unwrap();
    assert_eq!(agent["certificates"][0]["state"], "valid", "{agent}");

    let _innocent = Innocent::open(&topology, services.raw).await;
    let curve = |data: &Value, name: &str| {
        let curves = data["curves"].as_array().unwrap().iter();
        let curve = curves
            .into_iter()
            .find(|curve| curve["name"] == name)
            .cloned();
        curve.unwrap()["values"].as_array().unwrap().clone()
    };
    page.shows("one connection after one dial", |data| {
        let connections = curve(data, "open connections");
        let mut dials = curve(data, "dials").into_iter();
        connections.last().unwrap() == 1.0
            && dials.any(|rate| rate.as_f64().is_some_and(|rate| rate > 0.0))
    })
    .await;

    topology.kill_server(0);
    // A request that was interrupted has another reason.
    page.shows("the end of the server", |data| {
        let reason = data["reasons"][0].as_str().unwrap_or_default();
        data["isOld"] == true && reason.contains("cannot reach a server at")
    })
    .await;
    topology.start_server(0).await;
    page.shows("the next server", |data| data["isOld"] == false)
        .await;

    page.program.signal(Signal::INT);
    assert_eq!(page.program.wait_exit(LIMIT).await.code(), Some(0));
    let mut page = Page::open(&[&socket]).await;
    page.program.signal(Signal::TERM);
    assert_eq!(page.program.wait_exit(LIMIT).await.code(), Some(0));
}

#[tokio::test]
async fn requests_without_the_token_or_from_other_names_are_refused() {
    let (_topology, _folder, socket) = topology().await;
    let page = Page::open(&[&socket]).await;
    let (address, token) = (page.address, &page.token);
    for path in ["/", "/data", "/?token=", "/data?token=00"] {
        let (status, headers, body) = http_get(address, path).await.unwrap();
        assert_eq!(status, StatusCode::FORBIDDEN, "{path}");
        assert_eq!(headers["cache-control"], "no-store");
        let text = String::from_utf8(body.to_vec()).unwrap();
        assert!(
            text.contains("that `culvert status --web` printed"),
            "{text}"
        );
        assert_eq!(text.lines().count(), 1);
    }
    let good = format!("/data?token={token}");
    let (status, headers, _) = http_post(address, &good).await.unwrap();
    assert_eq!(status, StatusCode::METHOD_NOT_ALLOWED);
    assert_eq!(headers["allow"], "GET, HEAD");
    let head = format!("HEAD {good} HTTP/1.1\r\nHost: {address}");
    assert_eq!(first_line(address, &head).await, "HTTP/1.1 200 OK");
    let rebound = format!(
        "GET {good} HTTP/1.1\r\nHost: evil.example:{}",
        address.port()
    );
    let line = first_line(address, &rebound).await;
    assert_eq!(line, "HTTP/1.1 421 Misdirected Request");
}

#[tokio::test]
async fn wrong_uses_fail_at_once() {
    let folder = tempfile::tempdir().unwrap();
    let socket = format!("--admin-uds={}", folder.path().join("none.sock").display());
    for (args, code, text) in [
        (&["--web"][..], 1, "Error: cannot reach a server at"),
        (&["--web=0.0.0.0:0"][..], 2, "not a loopback address"),
        (&["--web", "--json"][..], 2, "cannot be used with"),
        (&["--web", "--check"][..], 2, "cannot be used with"),
        (&["--web", "--timeout=1s"][..], 2, "cannot be used with"),
        (&["--timeout=-1s"][..], 2, "must be >= 0"),
    ] {
        let args = [&["status", &socket], args].concat();
        let mut program = Program::spawn("culvert", args, &[]);
        let status = program.wait_exit(LIMIT).await;
        assert_eq!(status.code(), Some(code), "{}", program.log());
        assert!(program.log().contains(text), "{}", program.log());
    }
}

/// An operator forwards the admin port of a pod to this machine, so the address is not in the certificate.
#[tokio::test]
async fn page_works_over_mutual_tls_with_a_forwarded_port() {
    let builder = Topology::builder(Mode::HttpConnect, Transport::Uds).agents(1);
    let certificates = tempfile::tempdir().unwrap();
    let pki = culvert_kit::pki::Pki::create(certificates.path()).unwrap();
    let file = |path: &Path| path.display().to_string();
    let (flags, ca) = (admin_flags(&pki), file(&pki.ca));
    let flags: Vec<&str> = flags.iter().map(String::as_str).collect();
    let topology = builder.server(Executable::Ours, &flags).start().await;
    let (cert, key) = (file(&pki.client.cert), file(&pki.client.key));
    let admin = format!("--admin={}", topology.server_admin(0));
    let who = [&admin, "--ca-cert", &ca, "--cert", &cert, "--key", &key];
    let name = format!("--server-name={KONNECTIVITY_NAME}");
    let page = Page::open(&[&who[..], &[&name]].concat()).await;
    let data = page.data().await;
    assert_eq!(data["tunnels"][0]["peers"][0][0], "agent-0", "{data}");

    let wrong = [
        &["status", "--web", "--server-name=other.example.com"],
        &who[..],
    ]
    .concat();
    let mut program = Program::spawn("culvert", wrong, &[]);
    assert_eq!(program.wait_exit(LIMIT).await.code(), Some(1));
}

/// Returns the page as the browser shows it, and the browser's log.
async fn browsed(url: &str) -> (String, String) {
    let profile = tempfile::tempdir().unwrap();
    let mut browser = tokio::process::Command::new("chromium");
    browser.args([
        "--headless=new",
        "--no-sandbox",
        "--disable-gpu",
        "--no-first-run",
        "--disable-background-networking",
        "--disable-component-update",
        "--disable-sync",
        "--disable-quic",
        "--no-proxy-server",
        "--enable-logging=stderr",
        "--v=0",
        "--virtual-time-budget=5000",
        "--dump-dom",
    ]);
    browser.arg(format!("--user-data-dir={}", profile.path().display()));
    browser.arg(url).stdin(Stdio::null()).kill_on_drop(true);
    let mut browser = browser
        .stdout(Stdio::piped())
        .stderr(Stdio::piped())
        .spawn()
        .unwrap();
    let [mut dom, mut log] = [(); 2].map(|()| String::new());
    let mut stdout = browser.stdout.take().unwrap();
    let mut stderr = browser.stderr.take().unwrap();
    let reading = async {
        tokio::join!(
            stdout.read_to_string(&mut dom),
            stderr.read_to_string(&mut log)
        )
    };
    let is_late = timeout(LIMIT, reading).await.is_err();
    if is_late {
        browser.start_kill().unwrap();
    }
    // A browser that still runs would write into the folder after its removal.
    let status = browser.wait().await.unwrap();
    assert!(!is_late && status.success(), "{log}");
    (dom, log)
}

#[tokio::test]
async fn browser_shows_the_page_without_an_error_and_hostile_names_as_text() {
    if !has_program("chromium") {
        return;
    }
    let (mut topology, _folder, socket) = topology().await;
    let leaver = topology
        .add_agent(Executable::Ours, &["--agent-id=leaver"])
        .await;
    topology.wait_for_agents().await;
    let page = Page::open(&[&socket]).await;
    topology.kill_agent(leaver);
    page.shows("the agent is gone", |data| {
        data["gone"][0]["name"] == "leaver"
    })
    .await;
    let (dom, log) = browsed(&page.url).await;
    // Errors of the script, and violations of the content security policy.
    assert!(!log.contains("CONSOLE"), "{log}");
    assert!(dom.contains("class=\"state ok\">ok</span>"), "{dom}");
    assert!(dom.contains("class=\"state ok\">healthy</span>"), "{dom}");
    let name = "<bdi>&lt;b&gt;agent&lt;/b&gt;&amp;&lt;script&gt;alert(1)&lt;/script&gt;</bdi>";
    assert!(dom.contains(name), "{dom}");
    assert!(!dom.contains(HOSTILE), "{dom}");
    for text in [
        "<bdi>leaver</bdi>",
        "gone for ",
        "agent, native",
        "set by flag",
        "data from",
        "<svg",
        "expires",
    ] {
        assert!(dom.contains(text), "{text}: {dom}");
    }
}
