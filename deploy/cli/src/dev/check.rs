//! The self-check of `culvert dev`: real traffic through every front end, and a table of the results.

mod door;
mod load;
mod openvpn;
mod switching;

use std::net::SocketAddr;
use std::time::Duration;

use culvert_kit::check::{Outcome, download, echo, http_get, upload};
use culvert_kit::client::{BoxedStream, ByteStream, connect};
use tokio::net::TcpStream;
use tokio::time::{Instant, sleep, timeout};

use super::server::Server;
use super::tunnel::Tunnel;

const MIB: u64 = 1 << 20;

/// Longest duration of one check. On a healthy machine, every check takes milliseconds.
const PATIENCE: Duration = Duration::from_secs(20);

/// Pause between two reads of the metrics.
const LOOK_AGAIN: Duration = Duration::from_millis(5);

/// Result of one check: a summary, or the reason for the failure.
type Verdict = Result<String, String>;

/// Runs every check and prints a row for each check. Returns true if every check passed.
pub(super) async fn all(tunnel: &Tunnel) -> bool {
    say!(
        "\n  {:<22} {:<22} {:>9}  result",
        "front end",
        "check",
        "time"
    );
    let mut passed = true;
    for server in &tunnel.servers {
        let agents = connected(server, tunnel.agents.len());
        passed &= row(server.title, "both agents connected", agents).await;
        let services = &tunnel.services;
        let http = services.http.to_string();
        let raw = services.raw.to_string();
        let page = async { got(open(server, &http).await?).await };
        passed &= row(server.title, "HTTP GET", page).await;
        let echoes = async { echoed(open(server, &raw).await?).await };
        passed &= row(server.title, "echo, 100 x 64 bytes", echoes).await;
        let bulk = async { downloaded(open(server, &raw).await?).await };
        passed &= row(server.title, "download 20 MiB", bulk).await;
        let bulk = async { uploaded(open(server, &raw).await?).await };
        passed &= row(server.title, "upload 20 MiB", bulk).await;
        passed &= row(server.title, "refused dial", refused(server)).await;
    }
    passed &= door::all(tunnel).await;
    if let Some(clients) = &tunnel.openvpn {
        passed &= openvpn::all(tunnel, clients).await;
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
async fn connected(server: &Server, agents: usize) -> Verdict {
    let series = "konnectivity_network_proxy_server_ready_backends{proxy_strategy=\"default\"}";
    counted(server.addresses.health, series, agents as u64).await?;
    Ok(format!("{agents} of {agents}"))
}

async fn got(stream: impl ByteStream + 'static) -> Verdict {
    let outcome = http_get(stream, "/").await;
    outcome.map(|o| format!("{} bytes", o.bytes)).map_err(text)
}

async fn echoed(stream: impl ByteStream) -> Verdict {
    let each = |o: Outcome| o.elapsed.as_micros() / 100;
    let outcome = echo(stream, 100, 64).await;
    outcome
        .map(|o| format!("{} us each", each(o)))
        .map_err(text)
}

async fn downloaded(stream: impl ByteStream) -> Verdict {
    let outcome = download(stream, 20 * MIB).await;
    outcome.map(|_| "every byte verified".into()).map_err(text)
}

async fn uploaded(stream: impl ByteStream) -> Verdict {
    let outcome = upload(stream, 20 * MIB).await;
    outcome.map(|_| "every byte verified".into()).map_err(text)
}

/// Waits until a series has the given value.
async fn counted(metrics: SocketAddr, series: &str, value: u64) -> Result<(), String> {
    while sample(metrics, series).await? != value {
        sleep(LOOK_AGAIN).await;
    }
    Ok(())
}

/// Returns the value of a series. `series` must have its labels as on the metrics page. The value must be a
/// whole number.
async fn sample(metrics: SocketAddr, series: &str) -> Result<u64, String> {
    let page = scrape(metrics).await?;
    let mut values = page.lines().filter_map(|line| line.strip_prefix(series));
    let value = values.find_map(|value| value.strip_prefix(' '));
    let value = value.ok_or_else(|| format!("http://{metrics}/metrics has no {series}"))?;
    value.parse().map_err(|_| format!("{series} is {value}"))
}

/// Fetches the metrics page with a minimal HTTP request.
async fn scrape(address: SocketAddr) -> Result<String, String> {
    use tokio::io::{AsyncReadExt as _, AsyncWriteExt as _};
    let page = async {
        let mut stream = TcpStream::connect(address).await?;
        let request = "GET /metrics HTTP/1.1\r\nHost: dev\r\nConnection: close\r\n\r\n";
        stream.write_all(request.as_bytes()).await?;
        let mut page = String::new();
        stream.read_to_string(&mut page).await?;
        Ok(page)
    };
    page.await
        .map_err(|error: std::io::Error| error.to_string())
}

/// Checks a dial to a port without a listener: the agent's error must arrive, without a hang.
async fn refused(server: &Server) -> Verdict {
    // The listener is bound and closed again to find a free port; the system does not reuse the port so soon.
    let free = tokio::net::TcpListener::bind("127.0.0.1:0")
        .await
        .map_err(text)?;
    let target = free.local_addr().map_err(text)?.to_string();
    drop(free);
    match connect(&server.front_end, &target, PATIENCE).await {
        Ok(_) => Err("the dial was accepted".into()),
        Err(error) => match error.refusal() {
            Some(told) if told.contains("connection refused") => Ok(told.to_owned()),
            _ => Err(error.to_string()),
        },
    }
}

fn text(error: impl std::fmt::Display) -> String {
    error.to_string()
}
