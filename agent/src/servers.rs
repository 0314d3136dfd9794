//! The search for servers. All servers share one address, and a load balancer picks a server for each
//! connection. The agent therefore keeps connecting until the number of distinct servers reaches the
//! announced number.

use std::collections::HashMap;
use std::sync::Arc;
use std::time::Duration;

use futures_util::future::Either;
use parking_lot::Mutex;
use rand::Rng;
use tokio::time::sleep;
use tokio_util::sync::CancellationToken;
use tracing::{Instrument, debug, info, info_span, warn};

use crate::agent::Agent;
use crate::config::Config;
use crate::connect::{Connected, Connector, Transport};
use crate::metrics::ServerDirection;
use crate::native::{NativeServer, Notices};
use crate::packet::ServerStream;
use crate::server_count::ServerCount;

/// Growth factor of the pause after each failure, as in upstream.
const BACKOFF_FACTOR: f64 = 1.5;

/// Largest random addition to a pause, as a fraction of the pause; the same as in upstream.
const JITTER: f64 = 0.1;

/// The connected servers of an agent.
pub(crate) struct Servers {
    agent: Arc<Agent>,
    streams: Mutex<HashMap<String, Stream>>,
}

/// Transport to one server.
#[derive(Clone)]
enum Stream {
    Packet(Arc<ServerStream>),
    Native(Arc<NativeServer>),
}

/// The search for servers.
pub(crate) struct Sync {
    servers: Arc<Servers>,
    connector: Connector,
    interval: Duration,
    cap: Duration,
    forever: bool,
    count: Arc<ServerCount>,
}

/// Result of one attempt to connect.
enum Outcome {
    Added,
    Duplicate,
    Failed,
}

// === impl Stream ===

impl Stream {
    /// Returns the notices of a Culvert server.
    fn notices(&self) -> Option<Notices> {
        match self {
            Self::Packet(_) => None,
            Self::Native(server) => Some(server.notices()),
        }
    }
}

// === impl Servers ===

impl Servers {
    /// Creates an empty set of servers.
    pub(crate) fn new(agent: Arc<Agent>) -> Arc<Self> {
        Arc::new(Self {
            agent,
            streams: Mutex::default(),
        })
    }

    /// Returns the number of connected servers.
    pub(crate) fn count(&self) -> usize {
        self.streams.lock().len()
    }

    /// Returns the number of connected servers that do not drain.
    fn staying(&self) -> usize {
        let streams = self.streams.lock();
        let stays = |stream: &&Stream| !stream.notices().is_some_and(|notices| notices.draining);
        streams.values().filter(stays).count()
    }

    /// Returns the largest number of servers that connected servers have reported after their introduction.
    fn pushed_count(&self) -> Option<i64> {
        let streams = self.streams.lock();
        let counts = streams
            .values()
            .filter_map(|stream| stream.notices()?.servers);
        counts.max()
    }

    /// Requests that every server prefer other agents.
    pub(crate) fn drain(&self) {
        for stream in self.streams.lock().values() {
            match stream {
                Stream::Packet(stream) => stream.drain(),
                Stream::Native(server) => server.drain(),
            }
        }
    }

    /// Adds a server and starts its stream, unless the server is already connected.
    fn add(self: &Arc<Self>, connected: Connected) -> Outcome {
        let Connected {
            server_id,
            transport,
            ended,
            ..
        } = connected;
        let native = matches!(transport, Transport::Native { .. });
        let run = {
            let mut streams = self.streams.lock();
            if streams.contains_key(&server_id) {
                return Outcome::Duplicate;
            }
            let agent = self.agent.clone();
            let (stream, run) = match transport {
                Transport::Packet {
                    half_close,
                    inbound,
                    outgoing,
                } => {
                    let stream = ServerStream::new(agent, half_close, outgoing, ended);
                    let run = stream.clone().run(*inbound);
                    (Stream::Packet(stream), Either::Left(run))
                }
                Transport::Native { taker, inbound } => {
                    let server = NativeServer::new(agent, inbound, ended);
                    let run = server.clone().run(*taker);
                    (Stream::Native(server), Either::Right(run))
                }
            };
            streams.insert(server_id.clone(), stream);
            self.report(&streams);
            run
        };
        info!(server = server_id, native, "connected to a server");
        let servers = self.clone();
        let span = info_span!("server", id = server_id);
        let run = async move {
            let ended = run.await;
            {
                let mut streams = servers.streams.lock();
                streams.remove(&server_id);
                servers.report(&streams);
            }
            if !servers.agent.shutdown.is_cancelled() {
                let broken = ended.is_err();
                if broken {
                    let metrics = &servers.agent.metrics;
                    let failures = &metrics.server_failures;
                    failures.get(ServerDirection::FromServer).increment(1);
                }
                let (Ok(reason) | Err(reason)) = ended;
                warn!(reason, "lost the server; its connections are closed");
            }
        };
        self.agent.tasks.spawn(run.instrument(span));
        Outcome::Added
    }

    fn report(&self, streams: &HashMap<String, Stream>) {
        let gauge = &self.agent.metrics.open_server_connections;
        gauge.set(streams.len() as f64);
    }
}

// === impl Sync ===

impl Sync {
    /// Creates a search with the configured pauses.
    pub(crate) fn new(
        servers: Arc<Servers>,
        connector: Connector,
        config: &Config,
        count: Arc<ServerCount>,
    ) -> Self {
        Self {
            servers,
            connector,
            interval: config.sync_interval,
            cap: config.sync_interval_cap,
            forever: config.sync_forever,
            count,
        }
    }

    /// Searches for servers until the token fires.
    pub(crate) async fn run(mut self, stop: CancellationToken) {
        let mut pause = self.interval;
        let mut last_failure = String::new();
        loop {
            let outcome = tokio::select! {
                outcome = self.step(&mut last_failure) => outcome,
                () = stop.cancelled() => return,
            };
            let wait = match outcome {
                Outcome::Failed => {
                    let wait = pause;
                    pause = pause.mul_f64(BACKOFF_FACTOR).min(self.cap);
                    wait
                }
                Outcome::Added | Outcome::Duplicate => {
                    pause = self.interval;
                    last_failure.clear();
                    self.interval
                }
            };
            let jitter = rand::rng().random_range(0.0..JITTER);
            tokio::select! {
                () = sleep(wait.mul_f64(1.0 + jitter)) => {}
                () = self.count.changed() => {}
                () = stop.cancelled() => return,
            }
        }
    }

    async fn step(&mut self, last_failure: &mut String) -> Outcome {
        if let Some(count) = self.servers.pushed_count() {
            self.count.announced(count.max(1));
        }
        let connected = i64::try_from(self.servers.staying()).unwrap_or(i64::MAX);
        if !self.forever && connected >= self.count.current() {
            return Outcome::Duplicate;
        }
        match self.connector.connect().await {
            Ok(connected) => {
                let count = connected.server_count;
                let outcome = self.servers.add(connected);
                // The number from a duplicate may be stale.
                if matches!(outcome, Outcome::Added) {
                    self.count.announced(count);
                }
                outcome
            }
            Err(error) => {
                let text = error.to_string();
                // Repeated failures with the same text are logged once.
                if text == *last_failure {
                    debug!(error = text, "still cannot connect");
                } else {
                    warn!(error = text, "cannot connect, trying again");
                    *last_failure = text;
                }
                Outcome::Failed
            }
        }
    }
}
