//! The connected servers, and the task that searches for more; see [`crate::search`].

mod shortage;

use std::collections::HashMap;
use std::sync::Arc;

use culvert_host::telemetry::log_once::LogOnce;
use culvert_native::link::Taker;
use culvert_native::resume::Session;
use culvert_stream::CLOSE_STALL;
use futures_util::future::Either;
use futures_util::stream::{FuturesUnordered, StreamExt as _};
use parking_lot::Mutex;
use tokio::io::{AsyncRead, AsyncWrite};
use tokio::sync::Notify;
use tokio::time::{Instant, sleep_until, timeout};
use tokio_util::sync::CancellationToken;
use tracing::{Instrument, debug, info, info_span, warn};

use self::shortage::Shortage;
use crate::addresses::Via;
use crate::agent::Agent;
use crate::config::Config;
use crate::connect::{ConnectError, Connected, Connector, Reached, Transport};
use crate::link::{Absence, ResumableLink, SharedSocket, Tls};
use crate::metrics::{AttemptOutcome, ResumeOutcome, ServerDirection};
use crate::native::{NativeServer, Notices};
use crate::packet::ServerStream;
use crate::path::Cuts;
use crate::resume::{Known, keep};
use crate::search::{Outcome, Policy, Search, Step, Unanswered, View};
use crate::server_count::ServerCount;

/// The connected servers of an agent.
pub(crate) struct Servers {
    agent: Arc<Agent>,
    table: Mutex<HashMap<String, Server>>,
    /// Recent cuts of the TCP connections to servers, by their ids.
    cuts: Mutex<HashMap<String, Cuts>>,
    /// Wakes the search after a change of a server.
    changes: Notify,
}

/// A connected server.
struct Server {
    stream: Stream,
    /// Number of servers in the latest answer to an introduction.
    count: i64,
    /// True if the server pushes changes of the number, by its latest answer. A server that has just started may not
    /// know the leases yet, and pushes later.
    pushes: bool,
    /// Handle of a link that may resume.
    session: Option<Arc<Session<Tls>>>,
    /// Signals each answer to the search, for the attempts to resume the link.
    answered: Arc<Notify>,
    /// Socket of the link, which knows the QUIC link; `None` if the server offers no QUIC.
    socket: Option<SharedSocket>,
    /// Address of the server, if known.
    via: Option<Via>,
}

/// Transport to one server.
#[derive(Clone)]
enum Stream {
    Packet(Arc<ServerStream>),
    Native(Arc<NativeServer>),
}

/// The search for servers.
pub(crate) struct ServerSearch {
    servers: Arc<Servers>,
    connector: Arc<Connector>,
    search: Search,
    count: Arc<ServerCount>,
    failures: LogOnce,
    shortage: Shortage,
}

// === impl Server ===

impl Server {
    /// Returns the notices of a Culvert server; a stock server sends none.
    fn notices(&self) -> Notices {
        match &self.stream {
            Stream::Packet(_) => Notices::default(),
            Stream::Native(server) => server.notices(),
        }
    }

    /// Returns true if the link broke, and has not resumed yet.
    fn is_away(&self) -> bool {
        self.session
            .as_ref()
            .is_some_and(|session| session.is_away())
    }

    /// Returns true unless the server has been away for long, over TCP and QUIC.
    fn is_present(&self) -> bool {
        let is_gone = self.session.as_deref().is_some_and(Session::is_gone);
        !is_gone
            || self
                .socket
                .as_ref()
                .is_some_and(|socket| socket.lock().has_quic())
    }

    /// Accounts for an answer to the search.
    fn answered(&mut self, server_count: i64, pushes_count: bool) {
        (self.count, self.pushes) = (server_count, pushes_count);
        self.answered.notify_waiters();
    }

    /// Returns the announced number of servers.
    fn announced(&self) -> i64 {
        self.notices().servers.unwrap_or(self.count)
    }

    /// Returns true if the announced number follows the servers.
    fn follows(&self) -> bool {
        self.notices().follows.unwrap_or(self.pushes)
    }
}

// === impl Servers ===

impl Servers {
    /// Creates an empty set of servers.
    pub(crate) fn new(agent: Arc<Agent>) -> Arc<Self> {
        Arc::new(Self {
            agent,
            table: Mutex::default(),
            cuts: Mutex::default(),
            changes: Notify::new(),
        })
    }

    /// Returns the number of connected servers. A server whose link broke a moment ago counts.
    pub(crate) fn count(&self) -> usize {
        present(&self.table.lock())
    }

    /// Requests that every server prefer other agents.
    pub(crate) fn drain(&self) {
        for server in self.table.lock().values() {
            match &server.stream {
                Stream::Packet(stream) => stream.drain(),
                Stream::Native(server) => server.drain(),
            }
        }
    }

    /// Ends the calls of all packet streams, and waits at most [`CLOSE_STALL`] until the servers end them too. A server then
    /// has read all packets. grpc-go discards packets that a server has not read when the connection ends
    /// (`recvBufferReader` in `internal/transport/transport.go`).
    pub(crate) async fn finish(&self) {
        self.agent.finish.cancel();
        let streams = |server: &Server| server.stream.clone();
        let servers: Vec<_> = self.table.lock().values().map(streams).collect();
        let ended = async {
            for server in servers {
                if let Stream::Packet(stream) = server {
                    stream.ended().await;
                }
            }
        };
        let _ = timeout(CLOSE_STALL, ended).await;
    }

    fn ids(&self) -> Vec<String> {
        self.table.lock().keys().cloned().collect()
    }

    /// Returns the servers, for an attempt to resume the link to one of them.
    fn known(&self, server_id: &str) -> Known {
        let table = self.table.lock();
        let announced = table.values().map(Server::announced).max();
        let announced = announced.and_then(|count| usize::try_from(count).ok());
        Known {
            ids: table.keys().cloned().collect(),
            count: announced.unwrap_or(0).max(table.len()),
            has_other: table
                .iter()
                .any(|(id, server)| id != server_id && !server.is_away()),
        }
    }

    /// Stores the largest number that a connected server announces, and returns the view of the search. While servers
    /// are replaced, a smaller number may be stale. Servers that drain or are away may be lost soon, and their numbers do
    /// not count.
    fn view(&self, count: &ServerCount) -> View {
        let table = self.table.lock();
        let staying = || {
            let present = table.values().filter(|server| !server.is_away());
            present.filter(|server| !server.notices().draining)
        };
        let announced = staying().map(Server::announced).max();
        if let Some(announced) = announced {
            count.announced(announced);
        }
        let (connected, current) = (staying().count(), count.current());
        let follows = |announced| {
            let is_pushed = announced <= current && staying().all(Server::follows);
            is_pushed || count.leases_cover(connected)
        };
        View {
            connected,
            announced: usize::try_from(current).unwrap_or(usize::MAX),
            follows: announced.is_some_and(follows),
        }
    }

    /// Ends a link that is not needed. A server that does not receive the end would keep a link that can resume.
    fn leave(&self, transport: Transport) {
        if let Transport::Native {
            taker,
            link: Some(link),
            ..
        } = transport
        {
            drop(taker);
            let farewell = async move { link.session.farewell().await };
            self.agent.tasks.spawn(farewell);
        }
    }

    /// Adds a server and starts its stream, unless the server is already connected.
    fn add(self: &Arc<Self>, connector: &Arc<Connector>, connected: Connected) -> Outcome {
        let Connected {
            server_id,
            server_count,
            pushes_count,
            transport,
            ended,
            via,
            congestion,
            second,
            ..
        } = connected;
        let native = matches!(transport, Transport::Native { .. });
        let run = {
            let mut table = self.table.lock();
            if let Some(server) = table.get_mut(&server_id) {
                server.answered(server_count, pushes_count);
                self.leave(transport);
                return Outcome::Duplicate;
            }
            let agent = self.agent.clone();
            let socket = second.as_ref().map(|second| second.socket.clone());
            if let Some(second) = second {
                let cuts = self.cuts(&server_id);
                let run = second.run(agent.clone(), cuts, ended.clone());
                let span = info_span!("server", server = server_id);
                agent.tasks.spawn(run.instrument(span));
            }
            let (mut session, mut answered) = (None, Arc::default());
            let (stream, run) = match transport {
                Transport::Packet {
                    half_close,
                    packets,
                    outgoing,
                    inbound,
                } => {
                    let stream = ServerStream::new(agent, half_close, outgoing, inbound, ended);
                    let run = stream.clone().run(*packets);
                    (Stream::Packet(stream), Either::Left(run))
                }
                Transport::Native {
                    taker,
                    inbound,
                    link,
                } => {
                    let server = NativeServer::new(agent, inbound, ended);
                    if let Some(link) = &link {
                        session = Some(link.session.clone());
                        answered = link.answered.clone();
                    }
                    let link = link.map(|link| (connector.clone(), server_id.clone(), link));
                    let run = self.clone().run_native(server.clone(), *taker, link);
                    (Stream::Native(server), Either::Right(run))
                }
            };
            let server = Server {
                stream,
                count: server_count,
                pushes: pushes_count,
                session,
                answered,
                socket,
                via,
            };
            table.insert(server_id.clone(), server);
            self.report(&table);
            run
        };
        info!(
            server = server_id,
            native, congestion, "connected to a server"
        );
        let servers = self.clone();
        let span = info_span!("server", server = server_id);
        let run = async move {
            let ended = run.await;
            servers.lost(&server_id, native, ended);
        };
        self.agent.tasks.spawn(run.instrument(span));
        Outcome::Added
    }

    /// Removes a server whose connection has ended. An error as the end means that the connection broke.
    fn lost(&self, server_id: &str, native: bool, ended: Result<String, String>) {
        {
            let mut table = self.table.lock();
            let server = table.remove(server_id);
            self.report(&table);
            let drained = server.is_none_or(|server| server.notices().draining);
            if native && ended.is_err() && !drained {
                self.was_cut(server_id);
            }
        }
        self.changes.notify_one();
        let agent = &self.agent;
        if agent.shutdown.is_cancelled() || agent.finish.is_cancelled() {
            return;
        }
        if ended.is_err() {
            let failures = &agent.metrics.server_failures;
            failures.get(ServerDirection::FromServer).increment(1);
        }
        let (Ok(reason) | Err(reason)) = ended;
        warn!(reason, "lost the server; its connections are closed");
    }

    /// Returns the recent cuts of the connection to a server. The server's id proves that the server has lived since.
    fn cuts(&self, server_id: &str) -> Cuts {
        self.cuts.lock().get(server_id).cloned().unwrap_or_default()
    }

    /// Records a cut of the connection to a server, and forgets the servers whose cuts no longer count.
    fn was_cut(&self, server_id: &str) {
        let mut cuts = self.cuts.lock();
        let now = Instant::now();
        cuts.retain(|_, cuts| !cuts.is_over(now));
        cuts.entry(server_id.to_owned()).or_default().add(now);
    }

    /// Runs a native connection; the search learns of the notices of its server.
    async fn run_native<S>(
        self: Arc<Self>,
        server: Arc<NativeServer>,
        taker: Taker<S>,
        link: Option<(Arc<Connector>, String, ResumableLink)>,
    ) -> Result<String, String>
    where
        S: AsyncRead + AsyncWrite + Unpin,
    {
        let kept = async {
            let Some((connector, id, link)) = &link else {
                return std::future::pending().await;
            };
            let moved = |via| self.moved(id, via);
            keep(connector, id, link, || self.known(id), moved).await
        };
        let session = link.as_ref().map(|(.., link)| link.session.clone());
        let mut absence = Absence::new(&self.agent.metrics);
        let (ended, is_given_up) = tokio::select! {
            ended = server.clone().run(taker) => (ended, false),
            reason = kept => (Err(reason), true),
            () = server.on_notices(|| self.changes.notify_one()) => (Err("the notices ended".into()), false),
            () = absence.follow(session.as_deref(), || self.link_changed()) => (Err("the watch ended".into()), false),
        };
        if absence.is_away() && !is_given_up && !self.agent.shutdown.is_cancelled() {
            let resumes = &self.agent.metrics.resumes;
            resumes.get(ResumeOutcome::Expired).increment(1);
        }
        if let Some(session) = session {
            let farewell = async move { session.farewell().await };
            self.agent.tasks.spawn(farewell);
        }
        ended
    }

    /// Accounts for a change of a link.
    fn link_changed(&self) {
        self.report(&self.table.lock());
        self.changes.notify_one();
    }

    /// Accounts for a link that broke or resumed.
    fn moved(&self, server_id: &str, via: Option<Via>) {
        if via.is_some()
            && let Some(server) = self.table.lock().get_mut(server_id)
        {
            server.via = via;
        }
        self.changes.notify_one();
    }

    /// Accounts for an answer of a connected server.
    fn duplicate(&self, server_id: &str, server_count: i64, pushes_count: bool) -> Outcome {
        if let Some(server) = self.table.lock().get_mut(server_id) {
            server.answered(server_count, pushes_count);
        }
        Outcome::Duplicate
    }

    fn report(&self, table: &HashMap<String, Server>) {
        let gauge = &self.agent.metrics.open_server_connections;
        gauge.set(present(table) as f64);
    }
}

fn present(table: &HashMap<String, Server>) -> usize {
    table.values().filter(|server| server.is_present()).count()
}

// === impl ServerSearch ===

impl ServerSearch {
    /// Creates a search with the configured pauses.
    pub(crate) fn new(
        servers: Arc<Servers>,
        connector: Connector,
        config: &Config,
        count: Arc<ServerCount>,
    ) -> Self {
        let policy = Policy {
            interval: config.sync_interval,
            cap: config.sync_interval_cap,
            forever: config.sync_forever,
        };
        Self {
            servers,
            connector: Arc::new(connector),
            search: Search::new(policy, rand::random(), Instant::now()),
            count,
            failures: LogOnce::default(),
            shortage: Shortage::default(),
        }
    }

    /// Searches for servers until the token fires.
    pub(crate) async fn run(mut self, stop: CancellationToken) {
        stop.run_until_cancelled(self.search()).await;
    }

    async fn search(&mut self) {
        let (connector, servers, count) = (&self.connector, &self.servers, &self.count);
        let unanswered = Unanswered::default();
        let mut attempts = FuturesUnordered::new();
        loop {
            self.search.set_unanswered(unanswered.count());
            let until = match self.search.step(Instant::now(), servers.view(count)) {
                Step::Attempt => {
                    attempts.push(connector.connect(|| servers.ids(), &unanswered));
                    continue;
                }
                Step::Wait(until) => until,
            };
            let wake = async {
                match until {
                    Some(until) => sleep_until(until).await,
                    None => std::future::pending().await,
                }
            };
            tokio::select! {
                Some(result) = attempts.next() => {
                    let outcome = ended(servers, connector, result, &mut self.failures);
                    let view = servers.view(count);
                    if is_over(outcome, view) {
                        self.failures.has_recovered();
                    }
                    let now = Instant::now();
                    if self.shortage.is_due(now, outcome, view) {
                        warn!(
                            connected = view.connected,
                            expected = view.announced,
                            "every attempt reaches a server that is connected already: check the number of servers, the load \
                             balancer, and that each server has a --server-id of its own"
                        );
                    }
                    self.search.ended(now, outcome, view);
                }
                () = wake => {}
                () = servers.changes.notified() => {}
                () = count.changed() => {}
            }
        }
    }
}

/// Processes the result of an attempt.
fn ended(
    servers: &Arc<Servers>,
    connector: &Arc<Connector>,
    result: Result<Reached, ConnectError>,
    failures: &mut LogOnce,
) -> Outcome {
    let outcome = match result {
        Ok(Reached::New(connected)) => servers.add(connector, *connected),
        Ok(Reached::AlreadyConnected {
            server_id,
            server_count,
            pushes_count,
        }) => servers.duplicate(&server_id, server_count, pushes_count),
        Err(error) => {
            let text = error.to_string();
            match failures.failed(&text) {
                Some(due) => warn!(
                    error = text,
                    attempts = due.attempts,
                    failing_seconds = due.failing_seconds,
                    "cannot connect, trying again"
                ),
                None => debug!(error = text, "still cannot connect"),
            }
            Outcome::Failed
        }
    };
    let label = match outcome {
        Outcome::Added => AttemptOutcome::Added,
        Outcome::Duplicate => AttemptOutcome::Duplicate,
        Outcome::Failed => AttemptOutcome::Failed,
    };
    servers.agent.metrics.attempts.get(label).increment(1);
    outcome
}

/// Returns true if later failures belong to another outage. While servers are missing, an answer of a connected server
/// proves only that some addresses work.
fn is_over(outcome: Outcome, view: View) -> bool {
    match outcome {
        Outcome::Added => true,
        Outcome::Duplicate => view.connected >= view.announced,
        Outcome::Failed => false,
    }
}

#[cfg(test)]
mod tests;
