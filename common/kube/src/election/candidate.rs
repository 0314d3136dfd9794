//! The I/O of an election: reads and writes the Lease over the Kubernetes API.

use std::time::Duration;

use k8s_openapi::api::coordination::v1::Lease;
use k8s_openapi::apimachinery::pkg::apis::meta::v1::MicroTime;
use k8s_openapi::jiff::Timestamp;
use kube::{Api, Client};
use metrics::Counter;
use tokio::sync::watch;
use tokio::time::{Instant, sleep_until, timeout};
use tokio_util::sync::CancellationToken;
use tracing::{info, warn};

use super::{Action, Election, Times};
use crate::request::{FailureLog, RequestError, Target, request, writes};

/// Time limit for releasing the lease at exit. Without a release, the lease expires later.
const RELEASE: Duration = Duration::from_secs(2);

/// A replica in the election.
pub struct Candidate {
    api: Api<Lease>,
    target: Target,
    election: Election,
    /// Time limit per request.
    limit: Duration,
    leads: watch::Sender<Option<Instant>>,
    program: &'static str,
    failures: Counter,
    failure_log: FailureLog,
    /// Holder of the lease in the last log line.
    holder: String,
}

impl Candidate {
    /// Creates a candidate, and a receiver of the time until which the candidate leads. The time is `None` or
    /// in the past while the candidate does not lead. `program` is the writer's name in `managedFields`;
    /// `failures` counts failed requests.
    pub fn new(
        client: Client,
        namespace: &str,
        name: &str,
        times: Times,
        program: &'static str,
        failures: Counter,
    ) -> (Self, watch::Receiver<Option<Instant>>) {
        let (leads, led) = watch::channel(None);
        let candidate = Self {
            api: Api::namespaced(client, namespace),
            target: Target {
                kind: "Lease",
                resource: "leases.coordination.k8s.io",
                namespace: namespace.to_owned(),
                name: name.to_owned(),
            },
            election: Election::new(name, &identity(program), times, Instant::now()),
            limit: times.renew_deadline / 2,
            leads,
            program,
            failures,
            failure_log: FailureLog::default(),
            holder: String::new(),
        };
        (candidate, led)
    }

    /// Acquires the lease whenever it is free and renews it, until `stop`. Does not release it at the end;
    /// call [`release`](Self::release).
    pub async fn campaign(&mut self, stop: &CancellationToken) {
        while stop.run_until_cancelled(self.step()).await.is_some() {}
        self.leads.send_replace(None);
    }

    /// Releases the lease if this candidate holds it, so that another replica can lead at once. The leader's
    /// work must already have stopped.
    pub async fn release(&mut self) {
        if !self.election.may_hold() {
            return;
        }
        let why = match timeout(RELEASE, self.try_release()).await {
            Ok(Ok(())) => return,
            Ok(Err(error)) => error.to_string(),
            Err(_) => format!("no answer within {RELEASE:?}"),
        };
        warn!("{} was not released; it expires later: {why}", self.target);
    }

    async fn try_release(&mut self) -> Result<(), RequestError> {
        // An earlier write may have succeeded although its answer was not received.
        let lease = self.get().await?;
        self.election.read(Instant::now(), lease);
        if let Some(lease) = self.election.release(&wall()) {
            self.put(&lease).await?;
            info!("released {}", self.target);
        }
        Ok(())
    }

    async fn step(&mut self) {
        let sent = Instant::now();
        let outcome = match self.election.next(sent, &wall()) {
            Action::Wait(until) => return sleep_until(until).await,
            Action::Read => {
                let lease = self.get().await;
                lease.map(|lease| self.election.read(Instant::now(), lease))
            }
            Action::Write(lease) => {
                let lease = self.put(&lease).await;
                lease.map(|lease| self.election.written(sent, Instant::now(), lease))
            }
        };
        match outcome {
            Ok(()) => self.failure_log.succeeded(&self.target),
            Err(error) => {
                self.failures.increment(1);
                self.failure_log.failed(&error);
                self.election.failed(Instant::now(), error.is_conflict());
            }
        }
        self.publish();
    }

    fn publish(&mut self) {
        if self.holder != self.election.holder() {
            self.holder = self.election.holder().to_owned();
            info!(holder = self.holder, "{} has a new holder", self.target);
        }
        let until = self.election.leads_until();
        self.leads.send_if_modified(|known| {
            let changed = *known != until;
            *known = until;
            changed
        });
    }

    async fn get(&self) -> Result<Option<Lease>, RequestError> {
        let call = self.api.get_opt(&self.target.name);
        request("get", &self.target, self.limit, call).await
    }

    async fn put(&self, lease: &Lease) -> Result<Lease, RequestError> {
        let (target, limit, writes) = (&self.target, self.limit, writes(self.program));
        match lease.metadata.resource_version {
            Some(_) => {
                let call = self.api.replace(&target.name, &writes, lease);
                request("update", target, limit, call).await
            }
            None => request("create", target, limit, self.api.create(&writes, lease)).await,
        }
    }
}

/// Returns the pod's name, for people, and a suffix unique to this run.
fn identity(program: &str) -> String {
    let names = ["POD_NAME", "HOSTNAME"].into_iter();
    let mut names = names.filter_map(|name| std::env::var(name).ok());
    let pod = names.find(|name| !name.is_empty());
    let pod = pod.unwrap_or_else(|| program.to_owned());
    format!("{pod}_{}", uuid::Uuid::new_v4())
}

fn wall() -> MicroTime {
    MicroTime(Timestamp::now())
}
