//! Writes the ports of the load balancer's Service (`--update-loadbalancer`), as KKP's lb-updater does.
//!
//! Within the proxy, only this module writes the Service. [`discovery`](super::discovery) triggers a check of
//! the ports: after a change of the Services with ports on the load balancer, and after a change of the load
//! balancer's own Service. On each trigger the leader ([`election`](culvert_kube::election)) reads the Service
//! and, if the ports differ, replaces exactly the version just read. Without an election,
//! every replica leads. A replica whose watch of the Services fails does neither: its Services may be
//! outdated. The module does not affect connections.

use std::future::pending;
use std::time::Duration;

use culvert_host::telemetry::metrics::GaugeGuard;
use culvert_kube::election::Candidate;
use culvert_kube::request::{FailureLog, RequestError, Target, request, writes};
use k8s_openapi::api::core::v1 as core;
use kube::api::{ApiResource, DynamicObject};
use kube::{Api, Client};
use serde_json::{Value, json};
use tokio::sync::watch;
use tokio::time::{Instant, sleep, timeout, timeout_at};
use tokio_util::sync::CancellationToken;
use tracing::{debug, info};

use super::annotations::QUIC_LISTENER_ANNOTATION;
use super::balancer_ports::{
    BalancerOptions, balancer_ports, changed_ports, has_balancer_ports, read_ports,
};
use super::config::{BalancerConfig, PROGRAM};
use super::exposure::Service;
use super::metrics::{BalancerMetrics, ProxyMetrics, Step};

/// Time limit for one read or write of the Service.
const REQUEST: Duration = Duration::from_secs(10);

/// Pause after every check of the Service: a burst of changes causes only one update of the load balancer,
/// and a conflicting writer causes few requests to the API server. The pause doubles after each failure, up
/// to [`MAX_PAUSE`].
const FIRST_PAUSE: Duration = Duration::from_millis(200);

/// Longest pause after failures. This value limits both the load on an API server in trouble and the delay of
/// a change after the API server has recovered.
const MAX_PAUSE: Duration = Duration::from_secs(30);

/// The Services with ports on the load balancer; `None` until all Services are known. The same value is sent
/// again after a change of the load balancer's own Service.
type WithPorts = Option<Vec<Service>>;

/// Reports Services to the balancer.
#[derive(Debug)]
pub(crate) struct Reporter {
    config: BalancerConfig,
    services: watch::Sender<WithPorts>,
    up: watch::Sender<bool>,
}

/// The port updater of one replica: takes part in the election, and writes while this replica leads.
pub(crate) struct Balancer {
    leading: Leading,
    writer: Writer,
    /// False while the reported Services may be outdated.
    up: watch::Receiver<bool>,
}

/// The reason for which a replica leads.
enum Leading {
    /// The election decides.
    Elected(Box<Candidate>),
    /// Every replica leads while the sender exists.
    Always(watch::Sender<Option<Instant>>),
}

/// Time for which a replica without an election leads: as good as forever, and far from an overflow.
const ALWAYS: Duration = Duration::from_secs(86_400 * 365 * 30);

/// Writes the Service while this replica leads.
struct Writer {
    // Not the typed Service: fields from a newer API server must be written back unchanged.
    api: Api<DynamicObject>,
    target: Target,
    options: BalancerOptions,
    services: watch::Receiver<WithPorts>,
    leads: watch::Receiver<Option<Instant>>,
    metrics: BalancerMetrics,
    failure_log: FailureLog,
}

// === impl Reporter ===

impl Reporter {
    /// Reports the complete set of Services.
    pub(crate) fn services<'a>(&self, services: impl Iterator<Item = &'a Service> + Clone) {
        let with_ports = services.filter(|it| has_balancer_ports(it, &self.config.options));
        self.services.send_if_modified(|known| {
            let same = |known: &Vec<Service>| known.iter().eq(with_ports.clone());
            // Most changes concern only endpoints, so most calls must not trigger a check of the ports.
            let changed = !known.as_ref().is_some_and(same);
            if changed {
                *known = Some(with_ports.cloned().collect());
            }
            changed
        });
    }

    /// Reports whether the watch of the Services works. While it fails, the replica neither writes nor takes part in the
    /// election.
    pub(crate) fn set_up(&self, up: bool) {
        self.up
            .send_if_modified(|known| std::mem::replace(known, up) != up);
    }

    /// Reports any change of one Service. A change of the load balancer's own Service triggers a new read.
    pub(crate) fn touched(&self, service: &core::Service) {
        let metadata = &service.metadata;
        let is = |actual: &Option<String>, wanted| actual.as_ref() == Some(wanted);
        if is(&metadata.name, &self.config.name) && is(&metadata.namespace, &self.config.namespace)
        {
            self.services.send_modify(|_| ());
        }
    }
}

// === impl Balancer ===

impl Balancer {
    /// Creates a replica, and the reporter for changes of Services.
    pub(crate) fn new(
        client: Client,
        config: &BalancerConfig,
        metrics: &ProxyMetrics,
    ) -> (Self, Reporter) {
        let metrics = BalancerMetrics::new(metrics.registry());
        let (namespace, name) = (config.namespace.as_str(), config.name.as_str());
        let (leading, leads) = match config.election {
            Some(times) => {
                let lease = format!("{name}-updater");
                let failures = metrics.failures.get(Step::Lease).clone();
                let (candidate, leads) =
                    Candidate::new(client.clone(), namespace, &lease, times, PROGRAM, failures);
                (Leading::Elected(Box::new(candidate)), leads)
            }
            None => {
                let (leads, seen) = watch::channel(Some(Instant::now() + ALWAYS));
                (Leading::Always(leads), seen)
            }
        };
        let (sender, services) = watch::channel(None);
        let kind = ApiResource::erase::<core::Service>(&());
        let writer = Writer {
            api: Api::namespaced_with(client, namespace, &kind),
            target: Target {
                kind: "Service",
                resource: "services",
                namespace: namespace.to_owned(),
                name: name.to_owned(),
            },
            options: config.options.clone(),
            services,
            leads,
            metrics,
            failure_log: FailureLog::default(),
        };
        let (up, is_up) = watch::channel(false);
        let reporter = Reporter {
            config: config.clone(),
            services: sender,
            up,
        };
        let balancer = Self {
            leading,
            writer,
            up: is_up,
        };
        (balancer, reporter)
    }

    /// Updates the ports while this replica leads and its Services are current, until `stop`.
    pub(crate) async fn run(mut self, stop: CancellationToken) {
        let (mut services, mut up) = (self.writer.services.clone(), self.up.clone());
        loop {
            // A replica that does not know the current Services must not keep others from leading.
            let current = async {
                services.wait_for(Option::is_some).await?;
                up.wait_for(|up| *up).await.map(drop)
            };
            if !matches!(stop.run_until_cancelled(current).await, Some(Ok(()))) {
                return;
            }
            let until = stop.child_token();
            let outdated = async {
                // Fails only at the end of the process.
                let _ = up.wait_for(|up| !*up).await;
                until.cancel();
                pending::<()>().await;
            };
            tokio::select! {
                () = self.lead(&until) => {}
                () = outdated => {}
            }
        }
    }

    /// Updates the ports while this replica leads, until `stop`. Then releases the lease, if there is one, so that
    /// another replica can lead at once.
    async fn lead(&mut self, stop: &CancellationToken) {
        let writing = stop.run_until_cancelled(self.writer.run());
        match &mut self.leading {
            Leading::Elected(candidate) => {
                tokio::join!(candidate.campaign(stop), writing);
                candidate.release().await;
            }
            Leading::Always(_leads) => {
                writing.await;
            }
        }
    }
}

// === impl Writer ===

impl Writer {
    async fn run(&mut self) {
        let leads = |until: &Option<Instant>| until.is_some_and(|until| Instant::now() < until);
        while self.leads.wait_for(leads).await.is_ok() {
            info!("leading: this replica updates the ports of {}", self.target);
            let _leading = GaugeGuard::new(&self.metrics.leader);
            let lost = lost(self.leads.clone());
            tokio::select! {
                biased;
                () = lost => info!("no longer leading: another replica may update the ports of {}", self.target),
                () = self.keep() => return,
            }
        }
    }

    /// Updates the ports at once and after every change. Returns when the Services' sender is gone.
    async fn keep(&mut self) {
        let mut pause = FIRST_PAUSE;
        loop {
            let services = self.services.borrow_and_update().clone();
            let updated = self.update(&services.unwrap_or_default()).await;
            match &updated {
                Ok(()) => self.failure_log.succeeded(&self.target),
                Err(error) => self.failure_log.failed(error),
            }
            match updated {
                Ok(()) => {
                    pause = FIRST_PAUSE;
                    sleep(FIRST_PAUSE).await;
                    if self.services.changed().await.is_err() {
                        return;
                    }
                }
                // Discovery reports the Service once it exists. Until then, the failed reads are repeated only for alerts
                // on their counter.
                Err(RequestError::Missing { .. }) => {
                    pause = FIRST_PAUSE;
                    sleep(FIRST_PAUSE).await;
                    if let Ok(Err(_)) = timeout(MAX_PAUSE, self.services.changed()).await {
                        return;
                    }
                }
                Err(_) => {
                    sleep(pause).await;
                    pause = (2 * pause).min(MAX_PAUSE);
                }
            }
        }
    }

    async fn update(&self, services: &[Service]) -> Result<(), RequestError> {
        let count = |step| self.metrics.failures.get(step).increment(1);
        let call = self.api.get_opt(&self.target.name);
        let found = request("get", &self.target, REQUEST, call).await;
        let missing = || RequestError::Missing {
            what: self.target.to_string(),
        };
        let read = found.and_then(|found| found.ok_or_else(missing));
        let mut object = read.inspect_err(|_| count(Step::Read))?;
        let annotations = object.metadata.annotations.as_ref();
        let has_quic = annotations
            .and_then(|annotations| annotations.get(QUIC_LISTENER_ANNOTATION))
            .is_some_and(|value| value == "true");
        let spec = object.data.get_mut("spec").and_then(Value::as_object_mut);
        let ports = spec.map(|spec| spec.entry("ports").or_insert_with(|| json!([])));
        let Some(Value::Array(ports)) = ports else {
            count(Step::Read);
            return Err(RequestError::Failed {
                what: format!("cannot update {}", self.target),
                why: "its spec.ports is not a list".to_owned(),
            });
        };
        let known = read_ports(ports);
        let wanted = balancer_ports(services.iter(), &self.options, has_quic, &known);
        let Some(changed) = changed_ports(ports, &wanted) else {
            return Ok(());
        };
        *ports = changed;
        let writes = writes(PROGRAM);
        let call = self.api.replace(&self.target.name, &writes, &object);
        let written = request("update", &self.target, REQUEST, call).await;
        written.inspect_err(|_| count(Step::Write))?;
        self.metrics.updates.increment(1);
        let [added, removed] = [(&wanted, &known), (&known, &wanted)].map(|(these, those)| {
            let only = these.iter().filter(|port| !those.contains(port));
            only.map(|port| port.name.as_str()).collect::<Vec<_>>()
        });
        let (ports, new, gone) = (wanted.len(), added.len(), removed.len());
        info!(ports, new, gone, "updated {}", self.target);
        debug!(?added, ?removed, "updated {}", self.target);
        Ok(())
    }
}

/// Returns when this replica no longer leads.
async fn lost(mut leads: watch::Receiver<Option<Instant>>) {
    loop {
        let Some(until) = *leads.borrow_and_update() else {
            return;
        };
        if !matches!(timeout_at(until, leads.changed()).await, Ok(Ok(()))) {
            return;
        }
    }
}

#[cfg(test)]
mod tests;
