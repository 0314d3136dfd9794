//! The routes from a YAML file. The module follows changes of the file; a file with mistakes changes nothing.
//!
//! ```yaml
//! upstreams:
//!   - name: demo/apiserver
//!     endpoints: [127.0.0.1:8443]
//!     serverNames: [api.example.com]
//!     authorities: ["apiserver.demo.svc.cluster.local:443"]
//!     nodePorts: [30443]
//!     allowedNetworks: [192.0.2.0/24]
//!     proxyProtocol: v2
//!     quicPort: same
//! ```

use std::collections::BTreeSet;
use std::net::SocketAddr;
use std::path::Path;
use std::sync::Arc;
use std::sync::atomic::Ordering;
use std::time::Duration;

use culvert_host::file_follower::{
    FileFollower, Limits, Outcome, SLOW_READ, read_in_background, too_slow,
};
use culvert_host::net::dial::split_host_port;
use culvert_host::net::networks::Networks;
use culvert_host::net::proxy_protocol::UnknownVersion;
use culvert_host::yaml;
use serde::{Deserialize, Deserializer};
use serde_saphyr::Spanned;
use tokio::sync::watch;
use tokio::time::sleep;
use tokio_util::sync::CancellationToken;
use tracing::{error, warn};

use super::annotations::server_name;
use super::metrics::{ProxyMetrics, SourceState};
use super::routes::{Backend, QuicPort, Routes, UnknownQuicPort, UpstreamKey};
use super::table::Table;

/// Time between checks of the file. A change takes effect once two consecutive checks have read the same text.
const POLL: Duration = Duration::from_millis(100);

/// Size limit of the file, enough for 10,000 upstreams.
const LIMITS: Limits = Limits {
    max_bytes: 8 * 1024 * 1024,
    if_empty: "write `upstreams: []` to expose nothing",
};

/// Form of the file, for errors.
const FORM: &str = "the file has upstreams, each with a name and with lists: endpoints, nodePorts (numbers), serverNames, authorities, allowedNetworks; and proxyProtocol (v1 or v2), quicPort (a number or same)";

/// All reasons why a file cannot be used, one line each.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
#[error("{}", .0.join("\n"))]
pub struct FileError(pub Vec<String>);

pub(crate) struct Follower {
    file: FileFollower,
    /// Result of the last read.
    read: SourceState,
    table: Arc<Table>,
    metrics: Arc<ProxyMetrics>,
}

/// Result of one look at the file.
#[derive(Debug, PartialEq, Eq)]
enum Look {
    /// No new routes are in force.
    Unchanged,
    /// The file's new routes are in force.
    Changed,
    /// The file cannot be read any more, for this reason. The thread of a look does not log the reason, because a look may
    /// outlast the follower, when the file may be removed.
    Unreadable(String),
}

#[derive(Deserialize)]
#[serde(deny_unknown_fields)]
struct Document {
    /// An `upstreams` key without a value counts as an empty list.
    #[serde(default)]
    upstreams: Option<Vec<Entry>>,
}

#[derive(Deserialize)]
#[serde(deny_unknown_fields, rename_all = "camelCase")]
struct Entry {
    name: Spanned<String>,
    #[serde(default)]
    endpoints: Vec<Spanned<String>>,
    #[serde(default)]
    node_ports: Vec<Spanned<i64>>,
    #[serde(default)]
    server_names: Vec<Spanned<String>>,
    #[serde(default)]
    authorities: Vec<Spanned<String>>,
    /// Networks of permitted clients; without the key, every client is permitted. A key without a value permits no
    /// client.
    #[serde(default, deserialize_with = "present")]
    allowed_networks: Option<Vec<Spanned<String>>>,
    /// Version of the PROXY protocol that the endpoints expect.
    #[serde(default, deserialize_with = "present")]
    proxy_protocol: Option<Spanned<String>>,
    /// UDP port on which the endpoints serve QUIC.
    #[serde(default, deserialize_with = "present")]
    quic_port: Option<Spanned<String>>,
}

/// Reads the value of a key that exists. A missing value is then not the same as a missing key.
fn present<'de, D, T>(deserializer: D) -> Result<Option<T>, D::Error>
where
    D: Deserializer<'de>,
    T: Deserialize<'de>,
{
    T::deserialize(deserializer).map(Some)
}

// === impl Follower ===

impl Follower {
    /// Reads the file for the first time on a thread of its own, and applies its routes. Logs a warning if this takes
    /// longer than [`SLOW_READ`].
    ///
    /// # Errors
    /// As [`open`](Self::open).
    pub(crate) async fn load(
        path: &Path,
        table: Arc<Table>,
        metrics: Arc<ProxyMetrics>,
    ) -> Result<Self, FileError> {
        let why = too_slow(path.display(), SLOW_READ);
        let is_slow = || warn!("{why}; this program starts once the file is read");
        let path = path.to_owned();
        let open = move || Self::open(&path, table, metrics);
        read_in_background(open, is_slow).await.0
    }

    /// Reads the file for the first time and applies its routes.
    ///
    /// # Errors
    /// Fails if the file cannot be read or has mistakes.
    pub(crate) fn open(
        path: &Path,
        table: Arc<Table>,
        metrics: Arc<ProxyMetrics>,
    ) -> Result<Self, FileError> {
        let file = FileFollower::open(path, LIMITS).map_err(|error| FileError(vec![error]))?;
        table.apply(parse(file.text(), &path.display().to_string())?);
        metrics.synced.store(true, Ordering::Relaxed);
        *metrics.source.lock() = SourceState::Good;
        Ok(Self {
            file,
            read: SourceState::Good,
            table,
            metrics,
        })
    }

    /// Follows the file until `stop`; sends to `changes` after each applied change.
    pub(crate) async fn run(self, changes: watch::Sender<u64>, stop: CancellationToken) {
        stop.run_until_cancelled(self.follow(changes)).await;
    }

    /// Follows the file. Each look runs on a thread of its own: a file system over the network may never answer, and a
    /// large file takes time.
    async fn follow(mut self, changes: watch::Sender<u64>) {
        let (metrics, why) = (
            self.metrics.clone(),
            too_slow(self.file.path().display(), SLOW_READ),
        );
        let mut was_slow = false;
        loop {
            sleep(POLL).await;
            let is_slow = || {
                *metrics.source.lock() = SourceState::Unreadable;
                if !was_slow {
                    error!("{why}; the last routes stay in force");
                }
            };
            let look = move || (self.look(), self);
            let looked;
            ((looked, self), was_slow) = read_in_background(look, is_slow).await;
            match looked {
                Look::Changed => changes.send_modify(|count| *count += 1),
                // The next look decides if the file can be read again.
                Look::Unchanged if was_slow => *metrics.source.lock() = SourceState::Unreadable,
                Look::Unchanged => {}
                Look::Unreadable(why) => error!("{why}; the last routes stay in force"),
            }
        }
    }

    /// Looks at the file, and applies its routes if they have changed.
    fn look(&mut self) -> Look {
        let (source, looked) = match self.file.check() {
            Outcome::Same => (self.read, Look::Unchanged),
            Outcome::Changed => {
                let looked;
                (self.read, looked) = match self.apply() {
                    true => (SourceState::Good, Look::Changed),
                    false => (SourceState::Rejected, Look::Unchanged),
                };
                (self.read, looked)
            }
            Outcome::Unreadable { why, is_new: true } => {
                (SourceState::Unreadable, Look::Unreadable(why))
            }
            Outcome::Unreadable { is_new: false, .. } => (SourceState::Unreadable, Look::Unchanged),
        };
        *self.metrics.source.lock() = source;
        looked
    }

    /// Applies the current text; returns false if it has mistakes.
    fn apply(&self) -> bool {
        match parse(self.file.text(), &self.file.path().display().to_string()) {
            Ok(routes) => {
                let change = self.table.apply(routes);
                self.metrics.applied.increment(1);
                change.log();
                true
            }
            Err(problems) => {
                self.metrics.rejected.increment(1);
                for problem in problems.0 {
                    // As the reason, each problem has its own limit in the log.
                    error!(reason = problem, "the file of routes has a mistake");
                }
                error!("the last routes stay in force");
                false
            }
        }
    }
}

/// Parses routes from YAML text; `origin` is the name of the file in errors.
///
/// # Errors
/// Returns the first mistake in the syntax, the fields or the types, or else every mistake in the contents.
/// Every error text begins with the line.
pub fn parse(text: &str, origin: &str) -> Result<Routes, FileError> {
    // Text with only comments contains no YAML document: `None`.
    let document: Option<Document> = serde_saphyr::from_str(text)
        .map_err(|error| FileError(vec![explain(&error, text, origin)]))?;
    let upstreams = document.and_then(|document| document.upstreams);
    let mut reader = RouteReader::default();
    for entry in upstreams.unwrap_or_default() {
        reader.entry(&entry);
    }
    if reader.problems.is_empty() {
        return Ok(reader.routes);
    }
    reader.problems.sort_by_key(|(line, _)| *line);
    let located = |(line, text)| format!("{origin}:{line}: {text}");
    let problems = reader.problems.into_iter().map(located);
    Err(FileError(problems.collect()))
}

/// Returns the text for an error from the YAML parser: the line, the mistake, and the form of the file.
fn explain(error: &serde_saphyr::Error, text: &str, origin: &str) -> String {
    let line = error.location().map_or(1, |location| location.line());
    let why = yaml::explain(error, text);
    format!("{origin}:{line}: {why}; {FORM}")
}

#[derive(Default)]
struct RouteReader {
    routes: Routes,
    /// Each problem with its line.
    problems: Vec<(u64, String)>,
    names: BTreeSet<String>,
}

impl RouteReader {
    fn problem<T>(&mut self, at: &Spanned<T>, text: &str) {
        self.problems.push((at.referenced.line(), text.to_owned()));
    }

    fn entry(&mut self, entry: &Entry) {
        let name = &entry.name.value;
        // The name becomes a metric label.
        if name.is_empty()
            || !name
                .bytes()
                .all(|b| b.is_ascii_graphic() && !b"\"\\".contains(&b))
        {
            let text = format!("name {name:?} must be visible ASCII without quotes");
            self.problem(&entry.name, &text);
        }
        if !self.names.insert(name.clone()) {
            self.problem(
                &entry.name,
                &format!("a second upstream has the name {name:?}"),
            );
        }
        let key = UpstreamKey::from(name.clone());
        let endpoints = self.endpoints(entry);
        for port in &entry.node_ports {
            match u16::try_from(port.value) {
                Ok(number @ 1..) => {
                    let before = self.routes.node_ports.insert(number, key.clone());
                    self.taken(port, before, &format!("node port {number}"));
                }
                _ => self.problem(port, &format!("node port {} is not 1 to 65535", port.value)),
            }
        }
        for host in &entry.server_names {
            let Some(name) = server_name(&host.value) else {
                let text = format!("server name {:?} is not a DNS name", host.value);
                self.problem(host, &text);
                continue;
            };
            let before = self.routes.server_names.insert(name.clone(), key.clone());
            self.taken(host, before, &format!("server name {name}"));
        }
        for authority in &entry.authorities {
            let lower = authority.value.to_ascii_lowercase();
            let is_whole = split_host_port(&lower)
                .is_ok_and(|(host, port)| !host.is_empty() && port.parse::<u16>().is_ok());
            if !is_whole {
                let text = format!("authority {:?} is not host:port", authority.value);
                self.problem(authority, &text);
            }
            let before = self.routes.authorities.insert(lower.clone(), key.clone());
            self.taken(authority, before, &format!("authority {lower}"));
        }
        let backend = Backend {
            endpoints,
            header: entry.proxy_protocol.as_ref().and_then(|version| {
                let parsed = version.value.parse();
                parsed
                    .map_err(|error: UnknownVersion| self.problem(version, &error.to_string()))
                    .ok()
            }),
            allowed: entry
                .allowed_networks
                .as_ref()
                .map(|networks| self.networks(networks)),
            quic_port: entry
                .quic_port
                .as_ref()
                .and_then(|port| self.quic_port(entry, port)),
        };
        self.routes.upstreams.insert(key, backend);
    }

    fn networks(&mut self, texts: &[Spanned<String>]) -> Networks {
        for text in texts {
            if let Err(error) = Networks::parse([text.value.as_str()]) {
                self.problem(text, &error.to_string());
            }
        }
        let texts = texts.iter().map(|text| text.value.as_str());
        Networks::parse(texts).unwrap_or_default()
    }

    fn quic_port(&mut self, entry: &Entry, port: &Spanned<String>) -> Option<QuicPort> {
        if entry.server_names.is_empty() {
            self.problem(port, "quicPort needs serverNames: QUIC is routed by name");
        }
        let parsed = port.value.parse();
        parsed
            .map_err(|error: UnknownQuicPort| self.problem(port, &error.to_string()))
            .ok()
    }

    fn endpoints(&mut self, entry: &Entry) -> Vec<SocketAddr> {
        if entry.endpoints.is_empty() {
            let text = format!(
                "upstream {:?} needs at least one endpoint",
                entry.name.value
            );
            self.problem(&entry.name, &text);
        }
        let mut endpoints = BTreeSet::new();
        for endpoint in &entry.endpoints {
            match endpoint.value.parse::<SocketAddr>() {
                Ok(address) if address.port() != 0 => {
                    endpoints.insert(address);
                }
                _ => {
                    let text = format!(
                        "endpoint {:?} is not an IP address with a port, such as 10.0.0.1:6443 or [fd00::1]:6443",
                        endpoint.value
                    );
                    self.problem(endpoint, &text);
                }
            }
        }
        endpoints.into_iter().collect()
    }

    fn taken<T>(&mut self, at: &Spanned<T>, before: Option<UpstreamKey>, what: &str) {
        if let Some(owner) = before {
            self.problem(at, &format!("{what} belongs to upstream {owner} already"));
        }
    }
}

#[cfg(test)]
mod tests;
