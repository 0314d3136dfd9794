//! The self-check: real traffic through every front end, and a small table of it.

use std::time::Duration;

use tokio::time::{Instant, sleep, timeout};

use super::tunnel::{AGENTS, Server, Tunnel};
use crate::lab::check::{Outcome, download, echo, http_get, upload};
use crate::lab::client::{BoxedStream, connect};

const MIB: u64 = 1 << 20;

/// How long one check may take; all of them take milliseconds on a machine that works.
const PATIENCE: Duration = Duration::from_secs(20);

/// What one check saw, or why it failed.
type Verdict = Result<String, String>;

/// Runs every check, prints a row for each, and says whether all passed.
pub async fn all(tunnel: &Tunnel) -> bool {
    say!(
        "\n  {:<22} {:<22} {:>9}  result",
        "front end",
        "check",
        "time"
    );
    let mut passed = true;
    for server in &tunnel.servers {
        passed &= row(server.title, "both agents connected", agents(server)).await;
        let services = &tunnel.services;
        let http = services.http.to_string();
        let raw = services.raw.to_string();
        passed &= row(server.title, "HTTP GET", async {
            let outcome = http_get(open(server, &http).await?, "/").await;
            outcome.map(|o| format!("{} bytes", o.bytes)).map_err(text)
        })
        .await;
        passed &= row(server.title, "echo, 100 x 64 bytes", async {
            let outcome = echo(open(server, &raw).await?, 100, 64).await;
            let each = |o: Outcome| o.elapsed.as_micros() / 100;
            outcome
                .map(|o| format!("{} us each", each(o)))
                .map_err(text)
        })
        .await;
        passed &= row(server.title, "download 20 MiB", async {
            let outcome = download(open(server, &raw).await?, 20 * MIB).await;
            outcome.map(|_| "every byte verified".into()).map_err(text)
        })
        .await;
        passed &= row(server.title, "upload 20 MiB", async {
            let outcome = upload(open(server, &raw).await?, 20 * MIB).await;
            outcome.map(|_| "every byte verified".into()).map_err(text)
        })
        .await;
        passed &= row(server.title, "refused dial", refused(server)).await;
    }
    passed
}

async fn row(front_end: &str, check: &str, run: impl Future<Output = Verdict>) -> bool {
    let started = Instant::now();
    let verdict = match timeout(PATIENCE, run).await {
        Ok(verdict) => verdict,
        Err(_) => Err(format!("no result within {} s", PATIENCE.as_secs())),
    };
    let millis = started.elapsed().as_secs_f64() * 1000.0;
    let result = match &verdict {
        Ok(seen) => format!("ok: {seen}"),
        Err(error) => format!("FAILED: {error}"),
    };
    say!("  {front_end:<22} {check:<22} {millis:>6.1} ms  {result}");
    verdict.is_ok()
}

async fn open(server: &Server, target: &str) -> Result<BoxedStream, String> {
    let stream = connect(&server.front_end, target, PATIENCE).await;
    stream.map_err(text)
}

/// Waits until the server's own metrics count every agent.
async fn agents(server: &Server) -> Verdict {
    let want = format!(
        "konnectivity_network_proxy_server_ready_backends{{proxy_strategy=\"default\"}} {AGENTS}"
    );
    loop {
        let page = scrape(server).await?;
        if page.lines().any(|line| line == want) {
            return Ok(format!("{AGENTS} of {AGENTS}"));
        }
        sleep(Duration::from_millis(5)).await;
    }
}

/// The metrics page, read as plainly as the protocol allows.
async fn scrape(server: &Server) -> Result<String, String> {
    use tokio::io::{AsyncReadExt as _, AsyncWriteExt as _};
    let address = server.addresses.health;
    let page = async {
        let mut stream = tokio::net::TcpStream::connect(address).await?;
        let request = "GET /metrics HTTP/1.1\r\nHost: dev\r\nConnection: close\r\n\r\n";
        stream.write_all(request.as_bytes()).await?;
        let mut page = String::new();
        stream.read_to_string(&mut page).await?;
        Ok(page)
    };
    page.await
        .map_err(|error: std::io::Error| error.to_string())
}

/// A target that nobody listens on must come back as the agent's error, not as a hang.
async fn refused(server: &Server) -> Verdict {
    // Bound and closed again: nobody else is given the port so soon.
    let free = tokio::net::TcpListener::bind("127.0.0.1:0")
        .await
        .map_err(text)?;
    let target = free.local_addr().map_err(text)?.to_string();
    drop(free);
    match connect(&server.front_end, &target, PATIENCE).await {
        Ok(_) => Err("it was accepted".into()),
        Err(error) => match error.refusal() {
            Some(told) if told.contains("connection refused") => Ok(told.to_owned()),
            _ => Err(error.to_string()),
        },
    }
}

fn text(error: impl std::fmt::Display) -> String {
    error.to_string()
}
