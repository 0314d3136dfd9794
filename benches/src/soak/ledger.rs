//! The connections of a run, their results, and the outages that explain failures.
//!
//! A failure is explained only by an event that ends the connection by design:
//!
//! | event | explains |
//! |---|---|
//! | an end of the only program of a path | every failure of a connection that exists between the event and the recovery |
//! | a drain of the only program of a path | a failed dial |
//! | an end of one of several agents | connections through that agent, which its ports show, and dials in progress |
//!
//! A frozen program, an attack, a rotation, and a drain of one of several agents explain nothing.

use std::collections::{BTreeMap, HashMap, HashSet};
use std::fmt;
use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering};
use std::time::Duration;

use parking_lot::Mutex;
use tokio::time::Instant;

use crate::soak::plan::{PROBES, Plan};

/// Way of a connection.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub(super) enum Path {
    /// CONNECT front end, agents.
    Connect,
    /// gRPC front end, agents.
    Grpc,
    /// CONNECT front end, OpenVPN client.
    OpenVpn,
    /// Front door, by server name.
    Sni,
    /// Node tunnel and front door.
    Node,
}

impl Path {
    /// Returns the name in the report.
    pub(super) const fn name(self) -> &'static str {
        match self {
            Self::Connect => "CONNECT",
            Self::Grpc => "gRPC",
            Self::OpenVpn => "OpenVPN",
            Self::Sni => "SNI",
            Self::Node => "node",
        }
    }
}

/// Part of a connection that an outage ends.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) enum Scope {
    /// The dial, up to the endpoint's first byte.
    Dials,
    /// The dial and the open connection.
    Everything,
}

/// Results of a path.
#[derive(Debug, Clone, Default)]
pub(super) struct Tally {
    /// Connections that ended as planned.
    pub done: u64,
    /// Failures that an event explains.
    pub explained: u64,
    /// All other failures.
    pub unexplained: u64,
    /// Verified bytes in both directions.
    pub bytes: u64,
    /// The slowest successful dial.
    pub slowest: Duration,
    /// Successful dials that took longer than a second.
    pub slow: u64,
}

#[derive(Debug)]
struct Open {
    path: Path,
    began: Instant,
    /// Port of the endpoint's peer, once the header has arrived.
    peer: Option<u16>,
    /// True if an event has ended the connection.
    lost: bool,
}

#[derive(Debug)]
struct Outage {
    paths: Vec<Path>,
    scope: Scope,
    from: Instant,
    /// `None` before the recovery.
    to: Option<Instant>,
}

#[derive(Debug, Default)]
struct State {
    open: HashMap<u64, Open>,
    /// Numbers whose headers have arrived.
    arrived: HashSet<u64>,
    outages: Vec<Outage>,
    tallies: BTreeMap<Path, Tally>,
    wrong: Vec<String>,
    failures: Vec<String>,
    events: Vec<(Duration, String)>,
    /// True after a failure of the run: its programs end, so failures of connections say nothing more.
    is_over: bool,
}

/// All connections of a run.
#[derive(Debug)]
pub(super) struct Ledger {
    /// Seed of the run.
    pub seed: u64,
    begin: Instant,
    next: AtomicU64,
    next_probe: AtomicU64,
    state: Mutex<State>,
}

/// Everything that a run has recorded.
#[derive(Debug)]
pub(super) struct Account {
    /// Results by path.
    pub tallies: BTreeMap<Path, Tally>,
    /// Wrong bytes, one text each.
    pub wrong: Vec<String>,
    /// Unexplained failures, one text each.
    pub failures: Vec<String>,
    /// Events with their times.
    pub events: Vec<(Duration, String)>,
}

/// An outage, which ends when the value is dropped.
#[derive(Debug)]
pub(super) struct OutageGuard {
    ledger: Arc<Ledger>,
    at: usize,
}

impl Ledger {
    /// Creates the ledger of a run.
    pub(super) fn new(seed: u64) -> Arc<Self> {
        Arc::new(Self {
            seed,
            begin: Instant::now(),
            next: AtomicU64::new(0),
            next_probe: AtomicU64::new(PROBES),
            state: Mutex::default(),
        })
    }

    /// Returns the plan of the next connection.
    pub(super) fn plan(&self) -> Plan {
        Plan::new(self.seed, self.next.fetch_add(1, Ordering::Relaxed))
    }

    /// Returns the plan of a probe. Probes have no results.
    pub(super) fn probe(&self) -> Plan {
        Plan::new(self.seed, self.next_probe.fetch_add(1, Ordering::Relaxed))
    }

    /// Records an event and prints it to stderr.
    pub(super) fn event(&self, what: impl fmt::Display) {
        let at = self.begin.elapsed();
        eprintln!("{:7.1} s  {what}", at.as_secs_f64());
        self.state.lock().events.push((at, what.to_string()));
    }

    /// Begins a connection.
    pub(super) fn begins(&self, path: Path, plan: &Plan) {
        let open = Open {
            path,
            began: Instant::now(),
            peer: None,
            lost: false,
        };
        self.state.lock().open.insert(plan.number, open);
    }

    /// Records the arrival of a header at the endpoint. Returns its plan, or `None` if the line is wrong.
    pub(super) fn arrives(&self, line: &str, peer: u16) -> Option<Plan> {
        let plan = Plan::parse(self.seed, line);
        let mut state = self.state.lock();
        let Some(plan) = plan else {
            state.wrong.push(format!("the endpoint received {line:?}"));
            return None;
        };
        if let Some(open) = state.open.get_mut(&plan.number) {
            open.peer = Some(peer);
        }
        if !state.arrived.insert(plan.number) {
            let number = plan.number;
            state
                .wrong
                .push(format!("connection {number} arrived twice at the endpoint"));
            return None;
        }
        Some(plan)
    }

    /// Returns true if the header of a connection has arrived at the endpoint.
    pub(super) fn has_arrived(&self, plan: &Plan) -> bool {
        self.state.lock().arrived.contains(&plan.number)
    }

    /// Records wrong bytes.
    pub(super) fn wrong(&self, plan: &Plan, what: impl fmt::Display) {
        let text = format!("connection {}: {what}", plan.number);
        eprintln!("WRONG {text}");
        self.state.lock().wrong.push(text);
    }

    /// Records a failure of the run that is not a failure of a connection. Later failures of connections are ignored.
    pub(super) fn fails(&self, what: impl fmt::Display) {
        eprintln!("FAILED {what}");
        let mut state = self.state.lock();
        state.failures.push(what.to_string());
        state.is_over = true;
    }

    /// Ends a connection that was carried out as planned.
    pub(super) fn succeeds(&self, plan: &Plan, dial: Duration) {
        let mut state = self.state.lock();
        let Some(open) = state.open.remove(&plan.number) else {
            return;
        };
        let tally = state.tallies.entry(open.path).or_default();
        tally.done += 1;
        tally.bytes += plan.verified();
        tally.slowest = tally.slowest.max(dial);
        tally.slow += u64::from(dial > Duration::from_secs(1));
    }

    /// Ends a connection that has failed.
    pub(super) fn failed(&self, plan: &Plan, why: &anyhow::Error) {
        let now = Instant::now();
        let mut state = self.state.lock();
        let Some(open) = state.open.remove(&plan.number) else {
            return;
        };
        if state.is_over {
            return;
        }
        let explained = open.lost
            || state
                .outages
                .iter()
                .any(|outage| outage.explains(&open, now));
        let tally = state.tallies.entry(open.path).or_default();
        if explained {
            tally.explained += 1;
            return;
        }
        tally.unexplained += 1;
        let text = format!(
            "{} connection {} from {:.2} s to {:.2} s, {}, {} bytes up, {} down, {:?}: {why:#}",
            open.path.name(),
            plan.number,
            (open.began - self.begin).as_secs_f64(),
            (now - self.begin).as_secs_f64(),
            match open.peer {
                Some(port) => format!("arrived from port {port}"),
                None => "never arrived".to_owned(),
            },
            plan.up,
            plan.down,
            plan.ending,
        );
        eprintln!("FAILED {text}");
        state.failures.push(text);
    }

    /// Begins an outage.
    pub(super) fn outage(self: &Arc<Self>, paths: &[Path], scope: Scope) -> OutageGuard {
        let outages = &mut self.state.lock().outages;
        outages.push(Outage {
            paths: paths.to_vec(),
            scope,
            from: Instant::now(),
            to: None,
        });
        OutageGuard {
            ledger: Arc::clone(self),
            at: outages.len() - 1,
        }
    }

    /// Explains failures of the connections from these ports, and of dials in progress: one of several agents is about
    /// to end.
    pub(super) fn loses(&self, paths: &[Path], ports: &HashSet<u16>) {
        let mut state = self.state.lock();
        let open = state.open.values_mut();
        for open in open.filter(|open| paths.contains(&open.path)) {
            open.lost |= open.peer.is_none_or(|port| ports.contains(&port));
        }
    }

    /// Returns everything recorded so far.
    pub(super) fn account(&self) -> Account {
        let state = self.state.lock();
        Account {
            tallies: state.tallies.clone(),
            wrong: state.wrong.clone(),
            failures: state.failures.clone(),
            events: state.events.clone(),
        }
    }
}

impl Outage {
    fn explains(&self, open: &Open, failed: Instant) -> bool {
        let overlaps = self.from <= failed && self.to.is_none_or(|to| open.began <= to);
        let affects = self.scope == Scope::Everything || open.peer.is_none();
        overlaps && affects && self.paths.contains(&open.path)
    }
}

impl Drop for OutageGuard {
    fn drop(&mut self) {
        let mut state = self.ledger.state.lock();
        if let Some(outage) = state.outages.get_mut(self.at) {
            outage.to = Some(Instant::now());
        }
    }
}

#[cfg(test)]
mod tests {
    #![allow(clippy::unwrap_used, clippy::indexing_slicing)]
    use anyhow::anyhow;
    use tokio::time::advance;

    use super::*;

    const STEP: Duration = Duration::from_secs(1);

    /// Begins a connection, and lets its header arrive from `port`.
    fn begin(ledger: &Ledger, path: Path, port: Option<u16>) -> Plan {
        let plan = ledger.plan();
        ledger.begins(path, &plan);
        if let Some(port) = port {
            ledger.arrives(plan.header().trim_end(), port).unwrap();
        }
        plan
    }

    fn fail(ledger: &Ledger, plan: &Plan) {
        ledger.failed(plan, &anyhow!("it broke"));
    }

    fn counts(ledger: &Ledger, path: Path) -> [u64; 2] {
        let tally = &ledger.account().tallies[&path];
        [tally.explained, tally.unexplained]
    }

    #[tokio::test(start_paused = true)]
    async fn outage_explains_failures_of_its_paths_while_it_lasts() {
        let ledger = Ledger::new(1);
        let early = begin(&ledger, Path::Sni, Some(1));
        fail(&ledger, &early);
        assert_eq!(counts(&ledger, Path::Sni), [0, 1]);
        advance(STEP).await;
        let open = begin(&ledger, Path::Sni, Some(2));
        let late = begin(&ledger, Path::Sni, Some(3));
        let other = begin(&ledger, Path::Node, Some(4));
        advance(STEP).await;
        let outage = ledger.outage(&[Path::Sni], Scope::Everything);
        fail(&ledger, &open);
        fail(&ledger, &other);
        advance(STEP).await;
        drop(outage);
        advance(STEP).await;
        // The connection existed during the outage.
        fail(&ledger, &late);
        let after = begin(&ledger, Path::Sni, Some(5));
        fail(&ledger, &after);
        assert_eq!(counts(&ledger, Path::Sni), [2, 2]);
        assert_eq!(counts(&ledger, Path::Node), [0, 1]);
        assert_eq!(ledger.account().failures.len(), 3);
    }

    #[tokio::test(start_paused = true)]
    async fn drain_explains_only_dials() {
        let ledger = Ledger::new(1);
        let dialing = begin(&ledger, Path::Node, None);
        let open = begin(&ledger, Path::Node, Some(1));
        let _outage = ledger.outage(&[Path::Node], Scope::Dials);
        fail(&ledger, &dialing);
        fail(&ledger, &open);
        assert_eq!(counts(&ledger, Path::Node), [1, 1]);
    }

    #[test]
    fn lost_agent_explains_its_connections_and_dials_in_progress() {
        let ledger = Ledger::new(1);
        let lost = begin(&ledger, Path::Grpc, Some(7));
        let dialing = begin(&ledger, Path::Grpc, None);
        let spared = begin(&ledger, Path::Grpc, Some(8));
        let elsewhere = begin(&ledger, Path::OpenVpn, Some(7));
        ledger.loses(&[Path::Connect, Path::Grpc], &HashSet::from([7]));
        for plan in [&lost, &dialing, &spared, &elsewhere] {
            fail(&ledger, plan);
        }
        let later = begin(&ledger, Path::Grpc, Some(7));
        fail(&ledger, &later);
        assert_eq!(counts(&ledger, Path::Grpc), [2, 2]);
        assert_eq!(counts(&ledger, Path::OpenVpn), [0, 1]);
    }

    #[test]
    fn failure_of_the_run_hides_later_failures_of_connections() {
        let ledger = Ledger::new(1);
        let plan = begin(&ledger, Path::Grpc, Some(1));
        ledger.fails("the server does not return");
        fail(&ledger, &plan);
        assert_eq!(ledger.account().failures, ["the server does not return"]);
    }

    #[test]
    fn invented_and_repeated_headers_are_wrong_bytes() {
        let ledger = Ledger::new(1);
        let plan = begin(&ledger, Path::Sni, Some(1));
        assert!(ledger.arrives("soak 5 5", 2).is_none());
        assert!(ledger.arrives(plan.header().trim_end(), 3).is_none());
        assert_eq!(ledger.account().wrong.len(), 2);
        ledger.succeeds(&plan, STEP);
        assert_eq!(ledger.account().tallies[&Path::Sni].done, 1);
    }
}
