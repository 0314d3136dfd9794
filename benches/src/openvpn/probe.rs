//! Queries to running programs, and to the kernel about them.

use std::collections::HashSet;
use std::path::{Path, PathBuf};

use anyhow::{Context as _, bail};
use culvert_tests::Program;
use culvert_tests::metrics::Metrics;
use tokio::io::{AsyncReadExt as _, AsyncWriteExt as _};
use tokio::net::UnixStream;

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
    Metrics::parse(&ask(socket, "GET", "/metrics", "").await?)
}

/// Returns the number of datagrams that the kernel has dropped at the UDP sockets of a program. See
/// `/proc/net/udp` in proc(5).
pub(super) fn dropped_datagrams(program: &Program) -> anyhow::Result<u64> {
    let folder = PathBuf::from(format!("/proc/{}", program.pid()));
    let mut sockets = HashSet::new();
    for file in std::fs::read_dir(folder.join("fd"))? {
        // The program may have closed the file meanwhile.
        let link = std::fs::read_link(file?.path()).unwrap_or_default();
        let link = link.to_string_lossy().into_owned();
        let inode = link.strip_prefix("socket:[");
        sockets.extend(
            inode
                .and_then(|rest| rest.strip_suffix(']'))
                .map(str::to_owned),
        );
    }
    let mut dropped = 0;
    for name in ["net/udp", "net/udp6"] {
        let table = std::fs::read_to_string(folder.join(name)).unwrap_or_default();
        for line in table.lines().skip(1) {
            let mut fields = line.split_whitespace();
            let is_its = fields.nth(9).is_some_and(|inode| sockets.contains(inode));
            let drops = fields.next_back().and_then(|drops| drops.parse().ok());
            dropped += if is_its { drops.unwrap_or(0) } else { 0 };
        }
    }
    Ok(dropped)
}
