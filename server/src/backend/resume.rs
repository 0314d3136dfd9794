//! The sessions of native agents that may continue on another connection; see [`culvert_native::resume`].

use std::collections::HashMap;
use std::net::SocketAddr;
use std::sync::Arc;
use std::time::Duration;

use culvert_host::telemetry::metrics::GaugeGuard;
use culvert_native::resume::{
    Attached, Base, Binding, Process, ResumableIo, ResumeRequest, Session, State, Ticket,
    answer_head, over,
};
use culvert_native::window::Inbound;
use metrics::Gauge;
use parking_lot::Mutex;
use tokio::io::{AsyncRead, AsyncWrite};
use tokio::sync::{MutexGuard, watch};
use tracing::info;

use crate::listener::path_aware::LinkPath;
use crate::metrics::{ResumeOutcome, ServerMetrics};

/// Transport of a native agent connection.
pub(crate) trait Transport: AsyncRead + AsyncWrite + Unpin + Send {}

impl<S: AsyncRead + AsyncWrite + Unpin + Send> Transport for S {}

/// Transport of any type: a session may move between types.
pub(crate) type AnyTransport = Box<dyn Transport>;

/// Handle of the link of a native agent.
pub(crate) type AgentSession = Session<AnyTransport>;

/// Address of a native agent, which changes when its link resumes.
#[derive(Clone, Debug, Default)]
pub(crate) struct LinkAddress(Arc<Mutex<Option<SocketAddr>>>);

/// The sessions of a server. Each belongs to a registered agent connection, so their number has the same limit.
pub(crate) struct Sessions {
    /// Value of `--resume-grace`; 0 disables resumption.
    grace: Duration,
    table: Mutex<Table>,
    metrics: Arc<ServerMetrics>,
}

#[derive(Default)]
struct Table {
    by_id: HashMap<[u8; 16], Arc<Entry>>,
    /// Sessions of agents that report their place, by the place.
    by_place: HashMap<[u8; 16], Vec<Arc<Entry>>>,
}

/// Identity of an agent, which must be the same in the introduction and in each request to resume.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(crate) struct Owner {
    /// Id of the agent.
    pub agent_id: String,
    /// Identity that the token or the certificate proves, or the claimed id.
    pub identity: Arc<str>,
    /// True if the agent has proven the identity.
    pub is_proven: bool,
    /// Common name of the certificate.
    pub common_name: Option<Arc<str>>,
    /// The agent's process; `None` if the agent does not report it.
    pub process: Option<Process>,
}

struct Entry {
    ticket: Ticket,
    owner: Owner,
    /// Number of the connection that began the session.
    serial: u64,
    session: Arc<AgentSession>,
    inbound: Arc<Inbound>,
    address: LinkAddress,
    /// Number of the latest request.
    latest: watch::Sender<u64>,
    /// Held during a review.
    reviewing: tokio::sync::Mutex<()>,
}

/// Entry of a session; dropping the value removes the entry.
pub(crate) struct SessionGuard {
    sessions: Arc<Sessions>,
    id: [u8; 16],
}

/// Session that a request has proven to own.
pub(crate) struct Resumption {
    entry: Arc<Entry>,
    received: u64,
}

/// Session that continues on another transport.
pub(crate) struct Resumed {
    entry: Arc<Entry>,
    /// Number of the request.
    number: u64,
}

/// Follows the state of a session: logs breaks, and counts the agent as away until the value is dropped.
pub(crate) struct AwayWatch {
    gauge: Gauge,
    away: Option<GaugeGuard>,
}

// === impl LinkAddress ===

impl LinkAddress {
    /// Creates the address of a link.
    pub(crate) fn new(address: SocketAddr) -> Self {
        Self(Arc::new(Mutex::new(Some(address))))
    }

    /// Returns the address of the latest connection.
    pub(crate) fn get(&self) -> Option<SocketAddr> {
        *self.0.lock()
    }

    fn set(&self, address: SocketAddr) {
        *self.0.lock() = Some(address);
    }
}

// === impl Sessions ===

impl Sessions {
    /// Creates an empty table. A session without a transport ends after `grace`; 0 disables resumption.
    pub(crate) fn new(grace: Duration, metrics: Arc<ServerMetrics>) -> Arc<Self> {
        Arc::new(Self {
            grace,
            table: Mutex::default(),
            metrics,
        })
    }

    /// Returns the time after which a session without a transport ends.
    pub(crate) fn grace(&self) -> Duration {
        self.grace
    }

    /// Creates the ticket of a new session. Returns `None` if resumption is disabled.
    pub(crate) fn ticket(&self) -> Option<Ticket> {
        if self.grace.is_zero() {
            return None;
        }
        Ticket::random()
    }

    /// Makes the link of an accepted agent resumable. `serial` is the number of its connection.
    pub(crate) fn open(
        self: &Arc<Self>,
        transport: AnyTransport,
        inbound: Arc<Inbound>,
        address: LinkAddress,
        ticket: Ticket,
        owner: Owner,
        serial: u64,
    ) -> (ResumableIo<AnyTransport>, SessionGuard) {
        let stream = ResumableIo::accepting(transport, inbound.clone(), self.grace);
        let id = ticket.id;
        let entry = Entry {
            ticket,
            owner,
            serial,
            session: stream.session(),
            inbound,
            address,
            latest: watch::Sender::default(),
            reviewing: Default::default(),
        };
        self.table.lock().insert(Arc::new(entry));
        let sessions = self.clone();
        (stream, SessionGuard { sessions, id })
    }

    /// Ends the sessions of earlier processes in the place of an agent's process, or the agent's own session if the place
    /// has a later process already: a review of a token may outlast the process. Processes are ordered by the numbers of
    /// their connections; `serial` is the agent's. A session whose link works ends when the link breaks.
    pub(crate) fn replace(&self, owner: &Owner, serial: u64) {
        let Some(process) = owner.process else {
            return;
        };
        let in_place = self.table.lock().by_place.get(&process.place()).cloned();
        let in_place = in_place.unwrap_or_default();
        let has_successor = in_place
            .iter()
            .any(|entry| entry.serial > serial && entry.owner.replaces(owner));
        let is_over = |entry: &&Arc<Entry>| match has_successor {
            true => entry.serial == serial,
            false => entry.serial < serial && owner.replaces(&entry.owner),
        };
        for entry in in_place.iter().filter(is_over) {
            if entry.session.condemn("the agent has restarted") {
                self.count(ResumeOutcome::Replaced);
                info!(
                    agent = owner.agent_id,
                    earlier = entry.owner.agent_id,
                    "the agent has restarted; its earlier link does not resume"
                );
            }
        }
    }

    /// Returns the session of a request. Returns `None` if the session has ended, the request does not prove that the agent
    /// has the secret of the session, or `may_own` returns false for the owner of the session.
    pub(crate) fn find(
        &self,
        request: &ResumeRequest,
        binding: Option<&Binding>,
        may_own: impl FnOnce(&Owner) -> bool,
    ) -> Option<Resumption> {
        let entry = self.table.lock().by_id.get(&request.id).cloned();
        let Some(entry) = entry else {
            self.count(ResumeOutcome::Unknown);
            return None;
        };
        let proves = binding.is_some_and(|binding| entry.ticket.proves(request, binding));
        if !proves || !may_own(&entry.owner) {
            self.count(ResumeOutcome::Refused);
            info!(
                agent = entry.owner.agent_id,
                "request to resume a session refused: the agent does not prove that the session is its own"
            );
            return None;
        }
        Some(Resumption {
            entry,
            received: request.received,
        })
    }

    /// Continues a session on another transport, from `address`. Returns `None` if the session has ended. The caller counts
    /// a session that continues.
    pub(crate) async fn resume(
        &self,
        resumption: Resumption,
        transport: AnyTransport,
        path: &LinkPath,
        address: SocketAddr,
    ) -> Option<Resumed> {
        let Resumption { entry, received } = resumption;
        path.move_to(&entry.inbound);
        let attached = Attached {
            transport,
            base: Base::Answer {
                received,
                answer: answer_head,
            },
        };
        // The latest request has the latest transport, and its token is reviewed last.
        let (mut number, mut refused) = (0, None);
        entry.latest.send_modify(|latest| {
            *latest += 1;
            number = *latest;
            refused = entry.session.attach(attached).err();
            if refused.is_none() {
                entry.address.set(address);
            }
        });
        if let Some(mut refused) = refused {
            self.count(ResumeOutcome::Unknown);
            let _ = over(&mut refused.transport).await;
            return None;
        }
        info!(
            agent = entry.owner.agent_id,
            peer = %address,
            "the link to the agent resumed"
        );
        Some(Resumed { entry, number })
    }

    /// Counts a request to resume, or a session that ended without one.
    pub(crate) fn count(&self, outcome: ResumeOutcome) {
        self.metrics.resumes.get(outcome).increment(1);
    }

    /// Returns a watch for the session of one agent.
    pub(crate) fn watch(&self) -> AwayWatch {
        AwayWatch {
            gauge: self.metrics.agents_away.clone(),
            away: None,
        }
    }
}

// === impl Resumed ===

impl Resumed {
    /// Returns the owner of the session.
    pub(crate) fn owner(&self) -> &Owner {
        &self.entry.owner
    }

    /// Waits until the review of an earlier request has ended. Returns `None` if a later request arrives meanwhile. A review
    /// in progress is never cancelled: otherwise repeated requests could prevent its outcome.
    pub(crate) async fn turn(&self) -> Option<MutexGuard<'_, ()>> {
        let mut latest = self.entry.latest.subscribe();
        tokio::select! {
            biased;
            turn = self.entry.reviewing.lock() => Some(turn),
            _ = latest.wait_for(|latest| *latest != self.number) => None,
        }
    }

    /// Ends the link and closes its transport, for the given reason.
    pub(crate) fn revoke(&self, why: &'static str) {
        self.entry.session.revoke(why);
    }

    /// Resolves once the link has ended.
    pub(crate) async fn ended(&self) {
        self.entry.session.ended().await;
    }
}

// === impl Table ===

impl Table {
    fn insert(&mut self, entry: Arc<Entry>) {
        if let Some(process) = entry.owner.process {
            let in_place = self.by_place.entry(process.place()).or_default();
            in_place.push(entry.clone());
        }
        self.by_id.insert(entry.ticket.id, entry);
    }

    fn remove(&mut self, id: &[u8; 16]) {
        let entry = self.by_id.remove(id);
        let place = entry.and_then(|entry| entry.owner.process);
        if let Some(place) = place.map(|process| process.place())
            && let Some(in_place) = self.by_place.get_mut(&place)
        {
            in_place.retain(|entry| entry.ticket.id != *id);
            if in_place.is_empty() {
                self.by_place.remove(&place);
            }
        }
    }
}

// === impl Owner ===

impl Owner {
    /// Returns true if the agent's process runs in the place of the earlier one, which has ended. A place is a claim of
    /// the agent, so both must have proven the same identity. An agent that draws its id at random has another id.
    fn replaces(&self, earlier: &Self) -> bool {
        let (Some(new), Some(old)) = (&self.process, &earlier.process) else {
            return false;
        };
        let is_same = !self.is_proven || self.identity == earlier.identity;
        self.is_proven == earlier.is_proven
            && self.common_name == earlier.common_name
            && is_same
            && new.replaces(old)
    }
}

// === impl AwayWatch ===

impl AwayWatch {
    /// Returns true if the agent is away.
    pub(crate) fn is_away(&self) -> bool {
        self.away.is_some()
    }

    /// Follows a session. Never ends. Cancel safe.
    pub(crate) async fn run(&mut self, session: Option<&AgentSession>) {
        let Some(session) = session else {
            return std::future::pending().await;
        };
        let mut state = session.state();
        loop {
            match (*state.borrow_and_update(), &self.away) {
                (State::Away, None) => {
                    self.away = Some(GaugeGuard::new(&self.gauge));
                    info!("the link to the agent broke; waiting for the agent to resume");
                }
                (State::Attached | State::Silent, Some(_)) => self.away = None,
                _ => {}
            }
            if state.changed().await.is_err() {
                return std::future::pending().await;
            }
        }
    }
}

impl Drop for SessionGuard {
    fn drop(&mut self) {
        self.sessions.table.lock().remove(&self.id);
    }
}

#[cfg(test)]
mod tests {
    #![allow(clippy::unwrap_used)]

    use std::net::{IpAddr, Ipv4Addr};

    use culvert_native::resume::{Offer, add_request, offer};
    use http::HeaderMap;
    use tokio::io::{AsyncReadExt as _, duplex};

    use super::*;

    const BINDING: Binding = [3; 32];

    /// Address of the latest transport.
    const LATEST: SocketAddr = SocketAddr::new(IpAddr::V4(Ipv4Addr::LOCALHOST), 2);

    fn owner(agent_id: &str, identity: &str, common_name: Option<&str>) -> Owner {
        Owner {
            agent_id: agent_id.to_owned(),
            identity: identity.into(),
            is_proven: true,
            common_name: common_name.map(Into::into),
            process: None,
        }
    }

    fn request(ticket: &Ticket) -> ResumeRequest {
        let mut headers = HeaderMap::new();
        add_request(&mut headers, ticket, "s", &BINDING, 0);
        match offer(&headers).unwrap() {
            Offer::Resume(request) => request,
            other => panic!("{other:?}"),
        }
    }

    fn sessions(grace: u64) -> Arc<Sessions> {
        let metrics = Arc::new(ServerMetrics::new(&[]).unwrap());
        Sessions::new(Duration::from_secs(grace), metrics)
    }

    impl Sessions {
        fn is_empty(&self) -> bool {
            let table = self.table.lock();
            table.by_id.is_empty() && table.by_place.is_empty()
        }
    }

    fn counted(sessions: &Sessions, outcome: &str) -> bool {
        let line = format!("culvert_agent_resumes_total{{outcome=\"{outcome}\"}} 0\n");
        !sessions.metrics.registry().render().contains(&line)
    }

    #[tokio::test]
    async fn only_the_owner_of_a_session_finds_it_and_only_while_it_exists() {
        let sessions = sessions(30);
        let ticket = sessions.ticket().unwrap();
        let own = owner("a", "pod", Some("name"));
        let (near, _far) = duplex(64);
        let opened = sessions.open(
            Box::new(near),
            Arc::default(),
            LinkAddress::default(),
            ticket.clone(),
            own.clone(),
            1,
        );
        let request = request(&ticket);
        let find = |binding, own: &Owner| sessions.find(&request, binding, |owner| owner == own);
        assert!(find(Some(&BINDING), &own).is_some());
        let foreign = owner("b", "pod", Some("name"));
        assert!(find(Some(&BINDING), &foreign).is_none());
        for binding in [None, Some(&[4; 32])] {
            assert!(find(binding, &own).is_none());
        }
        assert!(counted(&sessions, "refused") && !counted(&sessions, "unknown"));
        drop(opened);
        assert!(find(Some(&BINDING), &own).is_none());
        assert!(counted(&sessions, "unknown") && sessions.is_empty());
    }

    #[tokio::test]
    async fn new_process_ends_only_the_sessions_of_the_process_that_it_replaces() {
        let sessions = sessions(30);
        let new = |place| Process::new(&[place]).unwrap();
        let of = |owner: Owner, process| Owner {
            process: Some(process),
            ..owner
        };
        let first = new("here");
        let owners = [
            of(owner("random-1", "pod", None), first),
            of(owner("random-1", "pod", None), first),
            of(owner("random-1", "pod", None), new("there")),
            of(owner("random-1", "other", None), first),
            of(owner("random-1", "pod", Some("name")), first),
            owner("random-1", "pod", None),
        ];
        let (mut links, mut guards) = (Vec::new(), Vec::new());
        for owner in owners {
            let ticket = sessions.ticket().unwrap();
            // The peer is gone, so the link breaks.
            let transport = Box::new(duplex(64).0);
            let (inbound, address) = (Arc::default(), LinkAddress::default());
            let (link, guard) = sessions.open(transport, inbound, address, ticket, owner, 1);
            guards.push(guard);
            let session = link.session();
            links.push(tokio::spawn(async move {
                let mut link = link;
                link.read_u8().await.unwrap_err().to_string()
            }));
            session.broke().await;
        }
        // Another connection of the same process.
        sessions.replace(&of(owner("random-1", "pod", None), first), 2);
        assert!(!counted(&sessions, "replaced"));
        sessions.replace(&of(owner("random-2", "pod", None), new("here")), 2);
        for link in links.drain(..2) {
            assert_eq!(link.await.unwrap(), "the agent has restarted");
        }
        assert!(links.iter().all(|link| !link.is_finished()));
        assert!(counted(&sessions, "replaced"));
        drop(guards);
        assert!(sessions.is_empty());
    }

    #[test]
    fn unproven_identity_is_no_part_of_the_comparison() {
        let of = |agent_id, is_proven| Owner {
            is_proven,
            process: Process::new(&["here"]),
            ..owner(agent_id, agent_id, None)
        };
        assert!(of("random-2", false).replaces(&of("random-1", false)));
        for (new, earlier) in [(true, true), (true, false), (false, true)] {
            assert!(!of("random-2", new).replaces(&of("random-1", earlier)));
        }
    }

    #[tokio::test]
    async fn request_for_a_session_that_ends_meanwhile_is_answered() {
        let sessions = sessions(30);
        let ticket = sessions.ticket().unwrap();
        let own = owner("a", "a", None);
        let (near, _far) = duplex(64);
        let address = LinkAddress::default();
        let opened = sessions.open(
            Box::new(near),
            Arc::default(),
            address.clone(),
            ticket.clone(),
            own.clone(),
            1,
        );
        let found = sessions.find(&request(&ticket), Some(&BINDING), |_| true);
        drop(opened);
        let (near, mut far) = duplex(1024);
        let (found, path) = (found.unwrap(), LinkPath::default());
        let resumed = sessions.resume(found, Box::new(near), &path, LATEST).await;
        assert!(resumed.is_none());
        assert_eq!(address.get(), None);
        let mut answer = String::new();
        far.read_to_string(&mut answer).await.unwrap();
        assert!(answer.starts_with("HTTP/1.1 409 "), "{answer}");
    }

    #[tokio::test]
    async fn later_request_replaces_a_waiting_review_but_not_a_running_one() {
        let sessions = sessions(30);
        let ticket = sessions.ticket().unwrap();
        let (near, _far) = duplex(64);
        let own = owner("a", "a", None);
        let address = LinkAddress::default();
        let (inbound, link) = (Arc::default(), address.clone());
        let _opened = sessions.open(Box::new(near), inbound, link, ticket.clone(), own, 1);
        let resumed = async || {
            let found = sessions.find(&request(&ticket), Some(&BINDING), |_| true);
            let (found, path) = (found.unwrap(), LinkPath::default());
            let transport = Box::new(duplex(64).0);
            let resumed = sessions.resume(found, transport, &path, LATEST).await;
            resumed.unwrap()
        };
        let (first, second, third) = (resumed().await, resumed().await, resumed().await);
        assert_eq!(address.get(), Some(LATEST));
        let in_progress = first.turn().await.unwrap();
        let replaced = async move {
            assert!(second.turn().await.is_none());
            drop(in_progress);
        };
        let ((), last) = tokio::join!(biased; replaced, third.turn());
        assert!(last.is_some());
    }

    #[test]
    fn grace_of_zero_disables_resumption() {
        assert!(sessions(0).ticket().is_none());
    }
}
