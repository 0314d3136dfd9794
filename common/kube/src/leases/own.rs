//! The lease of one server: created, renewed until the server stops, then deleted.

use std::collections::BTreeMap;
use std::time::Duration;

use k8s_openapi::api::coordination::v1::Lease;
use k8s_openapi::apimachinery::pkg::apis::meta::v1::MicroTime;
use k8s_openapi::jiff::Timestamp;
use kube::api::{DeleteParams, Preconditions};
use kube::{Api, Client};
use metrics::Gauge;
use rand::Rng as _;
use tokio::time::{Instant, sleep, timeout};
use tokio_util::sync::CancellationToken;
use tracing::{info, warn};

use super::{DURATION, REQUEST, api};
use crate::request::{FailureLog, RequestError, Target, request, writes};

/// Shortest pause between two renewals, half of [`DURATION`] as in upstream.
const RENEWAL: Duration = Duration::from_secs(15);

/// Largest random addition to the pause between renewals, as a fraction of the pause; the same as in upstream.
const JITTER: f64 = 0.04;

/// Pauses after the first failure and after many failures; each pause is twice as long as the one before.
const PAUSES: [Duration; 2] = [Duration::from_millis(200), Duration::from_secs(7)];

/// Time for a write in progress to end at the stop, and time for the deletion. A lease that is not deleted expires.
const RELEASE: Duration = Duration::from_secs(2);

/// The lease of one server.
pub struct OwnLease {
    api: Api<Lease>,
    target: Target,
    holder: String,
    labels: BTreeMap<String, String>,
    program: &'static str,
    known: Known,
    /// Unique id of the lease after the last write; `None` if the outcome of the write is not known.
    uid: Option<String>,
    /// Set before the first write.
    may_exist: bool,
    /// Time of the last write; `None` before the first.
    written: Option<Instant>,
    /// See [`OwnLease::new`].
    kept: Gauge,
    /// Pause after the next failure.
    pause: Duration,
    failures: FailureLog,
}

/// Known state of the lease in the API.
enum Known {
    /// At the start and after a failure: the lease must be read.
    Nothing,
    Absent,
    Present(Box<Lease>),
}

/// Contents of a server's lease.
#[derive(Clone, Debug)]
pub struct Contents {
    /// Namespace of the lease.
    pub namespace: String,
    /// Name of the lease.
    pub name: String,
    /// Id of the server.
    pub holder: String,
    /// Labels by which agents and other servers find the lease.
    pub labels: BTreeMap<String, String>,
}

impl OwnLease {
    /// Prepares a lease; nothing is written yet. `program` is the writer's name in `managedFields`. `kept` is 1 while the
    /// lease is live, 0 after failures for its whole duration, and NaN after the stop.
    pub fn new(client: Client, contents: Contents, program: &'static str, kept: Gauge) -> Self {
        let [pause, _] = PAUSES;
        let Contents {
            namespace,
            name,
            holder,
            labels,
        } = contents;
        Self {
            api: api(client, &namespace),
            target: Target {
                kind: "Lease",
                resource: "leases.coordination.k8s.io",
                namespace,
                name,
            },
            holder,
            labels,
            program,
            known: Known::Nothing,
            uid: None,
            may_exist: false,
            written: None,
            kept,
            pause,
            failures: FailureLog::default(),
        }
    }

    /// Creates and renews the lease until `stop` fires, then deletes the lease.
    pub async fn keep(mut self, stop: CancellationToken) {
        while !stop.is_cancelled() {
            // A write that reaches the API after the deletion would create the lease again, so a write in progress
            // may end.
            let overdue = async {
                stop.cancelled().await;
                sleep(RELEASE).await;
            };
            let pause = tokio::select! {
                pause = self.step() => pause,
                () = overdue => break,
            };
            stop.run_until_cancelled(sleep(pause)).await;
        }
        self.kept.set(f64::NAN);
        self.delete().await;
    }

    /// Makes one request. Returns the pause before the next request.
    async fn step(&mut self) -> Duration {
        let outcome = match std::mem::replace(&mut self.known, Known::Nothing) {
            Known::Nothing => self.read().await,
            Known::Absent => self.write(None).await,
            Known::Present(lease) => self.write(Some(*lease)).await,
        };
        outcome.unwrap_or_else(|error| {
            self.failures.failed(&error);
            if self.written.is_none_or(|at| at.elapsed() > DURATION) {
                self.kept.set(0.0);
            }
            let pause = self.pause;
            let [_, longest] = PAUSES;
            self.pause = (2 * pause).min(longest);
            pause.mul_f64(rand::rng().random_range(0.5..=1.0))
        })
    }

    async fn read(&mut self) -> Result<Duration, RequestError> {
        let call = self.api.get_opt(&self.target.name);
        let lease = request("get", &self.target, REQUEST, call).await?;
        self.known = lease.map_or(Known::Absent, |lease| Known::Present(Box::new(lease)));
        Ok(Duration::ZERO)
    }

    /// Renews the known lease, or creates the lease.
    async fn write(&mut self, known: Option<Lease>) -> Result<Duration, RequestError> {
        self.may_exist = true;
        self.uid = None;
        let (name, writes) = (&self.target.name, writes(self.program));
        let written = match known {
            Some(known) => {
                let lease = self.renewed(known);
                let call = self.api.replace(name, &writes, &lease);
                request("update", &self.target, REQUEST, call).await?
            }
            None => {
                let lease = self.renewed(Lease::default());
                let call = self.api.create(&writes, &lease);
                let lease = request("create", &self.target, REQUEST, call).await?;
                info!("created {}", self.target);
                lease
            }
        };
        self.uid.clone_from(&written.metadata.uid);
        self.known = Known::Present(Box::new(written));
        [self.pause, _] = PAUSES;
        self.failures.succeeded(&self.target);
        self.written = Some(Instant::now());
        self.kept.set(1.0);
        Ok(RENEWAL.mul_f64(rand::rng().random_range(1.0..=1.0 + JITTER)))
    }

    /// Returns the lease as renewed now. As in upstream, the lease has exactly the configured labels.
    fn renewed(&self, mut lease: Lease) -> Lease {
        lease.metadata.name = Some(self.target.name.clone());
        lease.metadata.labels = Some(self.labels.clone());
        let spec = lease.spec.get_or_insert_default();
        spec.holder_identity = Some(self.holder.clone());
        spec.lease_duration_seconds = i32::try_from(DURATION.as_secs()).ok();
        spec.renew_time = Some(MicroTime(Timestamp::now()));
        lease
    }

    /// Deletes the lease, unless another program has replaced it meanwhile.
    async fn delete(&mut self) {
        if !self.may_exist {
            return;
        }
        let mut why = format!("no answer within {RELEASE:?}");
        let deleted = timeout(RELEASE, async {
            let [mut pause, _] = PAUSES;
            loop {
                match self.try_delete().await {
                    Ok(()) => return,
                    Err(error) if error.is_conflict() => {
                        return info!("{} now belongs to another server", self.target);
                    }
                    Err(error) => why = error.to_string(),
                }
                sleep(pause).await;
                pause *= 2;
            }
        });
        if deleted.await.is_err() {
            let (target, seconds) = (&self.target, DURATION.as_secs());
            warn!("{target} was not deleted; it expires after {seconds} s: {why}");
        }
    }

    async fn try_delete(&self) -> Result<(), RequestError> {
        let preconditions = self.uid.clone().map(|uid| Preconditions {
            uid: Some(uid),
            resource_version: None,
        });
        let params = DeleteParams {
            preconditions,
            ..DeleteParams::default()
        };
        let call = async {
            match self.api.delete(&self.target.name, &params).await {
                Err(kube::Error::Api(status)) if status.code == 404 => Ok(()),
                outcome => outcome.map(drop),
            }
        };
        request("delete", &self.target, RELEASE, call).await?;
        info!("{} is deleted", self.target);
        Ok(())
    }
}
