//! Queries to running programs, and to the kernel about them.

use std::path::Path;

use anyhow::{Context as _, bail};
use culvert_tests::Program;
use culvert_tests::metrics::Metrics;
use tokio::io::{AsyncReadExt as _, AsyncWriteExt as _};
use tokio::net::UnixStream;

use crate::sockets;

/// Returns the last line that a program has logged.
pub(super) fn last_words(program: &Program) -> String {
    let log = program.log();
    log.lines().next_back().unwrap_or("nothing").to_owned()
}

/// Sends a request to the admin socket of our server and returns the body of the answer.
pub(super) async fn ask(
    socket: &Path,
    verb: &str,
    path: &str,
    body: &str,
) -> anyhow::Result<String> {
    let mut stream = UnixStream::connect(socket).await.context("admin socket")?;
    let length = body.len();
    let request = format!(
        "{verb} {path} HTTP/1.1\r\nHost: culvert\r\nConnection: close\r\nContent-Length: {length}\r\n\r\n{body}"
    );
    stream.write_all(request.as_bytes()).await?;
    let mut answer = String::new();
    stream.read_to_string(&mut answer).await?;
    match answer.split_once("\r\n\r\n") {
        Some((head, body)) if head.starts_with("HTTP/1.1 2") => Ok(body.to_owned()),
        _ => bail!("{verb} {path}: {answer}"),
    }
}

/// Returns the metrics of our server.
pub(super) async fn metrics(socket: &Path) -> anyhow::Result<Metrics> {
    Ok(Metrics::parse(&ask(socket, "GET", "/metrics", "").await?)?)
}

/// Returns the number of clients that our server counts.
pub(crate) async fn connected(socket: &Path) -> anyhow::Result<f64> {
    let metrics = metrics(socket).await?;
    let clients = metrics.value("culvert_openvpn_clients", &[]);
    Ok(clients.unwrap_or_default())
}

/// Returns the number of datagrams that the kernel has dropped at the UDP sockets of a program. See
/// `/proc/net/udp` in proc(5).
pub(super) fn dropped_datagrams(program: &Program) -> anyhow::Result<u64> {
    let mut dropped = 0;
    for table in ["udp", "udp6"] {
        for row in sockets::rows(program.pid(), table)? {
            let drops = row.split_whitespace().next_back();
            dropped += drops
                .and_then(|drops| drops.parse::<u64>().ok())
                .unwrap_or(0);
        }
    }
    Ok(dropped)
}
