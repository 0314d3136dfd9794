//! The deletion of expired leases, which dead servers have left.

use std::time::Duration;

use k8s_openapi::api::coordination::v1::{Lease, LeaseSpec};
use kube::api::{DeleteParams, ListParams, Preconditions};
use kube::{Api, Client, ResourceExt as _};
use metrics::Counter;
use tokio::time::{Instant, sleep};
use tracing::info;

use super::renewals::Renewals;
use super::{DURATION, REQUEST, api};
use crate::request::{FailureLog, RequestError, Target, request};

/// Pause between two lists. Shorter than the longest gap of [`Renewals`], so that only a failed list is a gap.
const INTERVAL: Duration = Duration::from_secs(15);

/// Largest number of leases to list. Nobody runs as many servers for one cluster, and the accounts of the cluster may
/// create leases. As expired leases are deleted, every lease is listed at some time.
const MOST: u32 = 100;

/// Deletes the expired leases with certain labels. Every server does so; the first deletion wins.
pub struct Collector {
    api: Api<Lease>,
    /// The leases, in the texts of errors.
    target: Target,
    labels: String,
    /// Name of this server's lease, which is never deleted here.
    own: String,
    renewals: Renewals,
    /// Time of the last reported number; `None` after the report that the number is not current.
    counted: Option<Instant>,
    deleted: Counter,
    failures: FailureLog,
}

impl Collector {
    /// Prepares the deletion; `labels` has the form `k=v[,k=v]`, `own` is the name of this server's lease, and
    /// `deleted` counts deletions.
    pub fn new(
        client: Client,
        namespace: &str,
        labels: String,
        own: String,
        deleted: Counter,
    ) -> Self {
        Self {
            api: api(client, namespace),
            target: Target {
                kind: "Leases",
                resource: "leases.coordination.k8s.io",
                namespace: namespace.to_owned(),
                name: labels.clone(),
            },
            labels,
            own,
            renewals: Renewals::default(),
            counted: None,
            deleted,
            failures: FailureLog::default(),
        }
    }

    /// Deletes expired leases forever. Reports the number of servers after each list that has a live lease.
    /// The number includes this server, even if it cannot write its lease. Reports `None` if the number may be wrong,
    /// because for longer than [`DURATION`] no list had a live lease.
    pub async fn run(mut self, mut report: impl FnMut(Option<usize>)) {
        loop {
            match self.collect(&mut report).await {
                Ok(()) => self.failures.succeeded(&self.target),
                Err(error) => self.failures.failed(&error),
            }
            let is_old = |at: &mut Instant| at.elapsed() > DURATION;
            if self.counted.take_if(is_old).is_some() {
                report(None);
            }
            sleep(INTERVAL).await;
        }
    }

    async fn collect(
        &mut self,
        report: &mut impl FnMut(Option<usize>),
    ) -> Result<(), RequestError> {
        let params = ListParams::default().labels(&self.labels).limit(MOST);
        let call = self.api.list(&params);
        let listed = request("list", &self.target, REQUEST, call).await;
        let leases = listed.inspect_err(|_| self.renewals.interrupted())?.items;
        let none = LeaseSpec::default();
        let named = leases.iter().map(|lease| {
            let name = lease.metadata.name.as_deref().unwrap_or_default();
            (name, lease.spec.as_ref().unwrap_or(&none))
        });
        self.renewals.observe(Instant::now(), named);
        let servers = self.renewals.live();
        if servers > 0 {
            self.counted = Some(Instant::now());
            report(Some(
                servers + usize::from(!self.renewals.is_live(&self.own)),
            ));
        }
        let mut outcome = Ok(());
        for lease in &leases {
            let name = lease.name_any();
            if name != self.own && self.renewals.is_expired(&name) {
                outcome = self.delete(lease).await.and(outcome);
            }
        }
        outcome
    }

    /// Deletes a lease, unless the lease has changed since the list.
    async fn delete(&self, lease: &Lease) -> Result<(), RequestError> {
        let target = Target {
            kind: "Lease",
            name: lease.name_any(),
            ..self.target.clone()
        };
        let params = DeleteParams {
            preconditions: Some(Preconditions {
                resource_version: lease.resource_version(),
                uid: None,
            }),
            ..DeleteParams::default()
        };
        let call = async {
            match self.api.delete(&target.name, &params).await {
                // Another server was faster, or the holder has renewed the lease.
                Err(kube::Error::Api(status)) if matches!(status.code, 404 | 409) => Ok(false),
                outcome => outcome.map(|_| true),
            }
        };
        if request("delete", &target, REQUEST, call).await? {
            info!("deleted {target}: it was not renewed for its whole duration");
            self.deleted.increment(1);
        }
        Ok(())
    }
}
