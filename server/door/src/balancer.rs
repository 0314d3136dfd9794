//! Keeps the ports of the LoadBalancer Service in front of the proxy (`--update-loadbalancer`): the
//! job of KKP's lb-updater.
//!
//! Owns the writes to that one Service. They follow what [`discovery`](super::discovery) sees, which
//! reports Services that change, and the balancer's own when somebody else edits it. Each time the
//! leader ([`election`](culvert_kube::election)) reads it and writes what differs, in place of the version
//! that it read. Nothing here touches a connection.

use std::sync::Arc;
use std::time::Duration;

use culvert_host::telemetry::metrics::GaugeGuard;
use culvert_kube::election::{Candidate, Times};
use culvert_kube::request::{Failing, RequestError, Target, request, writes};
use k8s_openapi::api::core::v1 as core;
use kube::api::{ApiResource, DynamicObject};
use kube::{Api, Client};
use serde_json::{Value, json};
use tokio::sync::watch;
use tokio::time::{Instant, sleep, timeout_at};
use tokio_util::sync::CancellationToken;
use tracing::{debug, info};

use super::balancer_ports::{
    BalancerOptions, balancer_ports, changed_ports, has_balancer_ports, read_ports,
};
use super::config::PROGRAM;
use super::exposure::Service;
use super::metrics::{ProxyMetrics, Step};

/// How long one read or write may take.
const REQUEST: Duration = Duration::from_secs(10);

/// The pause after every look at the Service: changes that come together cost the balancer one
/// update, and another writer that disagrees costs the API server little. After failures it doubles
/// each time, up to [`MAX_PAUSE`].
const FIRST_PAUSE: Duration = Duration::from_millis(200);

/// The longest pause: what it costs an API server that is in trouble, and how late a change may be
/// once it is well again.
const MAX_PAUSE: Duration = Duration::from_secs(30);

/// Which Service is kept, and how.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct BalancerConfig {
    /// The Service's namespace, and the lease's.
    pub namespace: String,
    /// Its name. The lease has it, too, and `-updater` behind it.
    pub name: String,
    /// Which ports it has.
    pub options: BalancerOptions,
    /// The lease's times.
    pub times: Times,
}

/// The Services that have ports at the balancer; `None` while they are not all known. It is sent
/// again, unchanged, when the balancer's own Service has changed.
type WithPorts = Option<Vec<Service>>;

/// Tells the balancer what happens to Services.
#[derive(Debug)]
pub struct Reporter {
    config: BalancerConfig,
    services: watch::Sender<WithPorts>,
}

/// One replica's part in keeping the ports.
pub struct Balancer {
    candidate: Candidate,
    writer: Writer,
}

/// Writes while it leads.
struct Writer {
    // Not the typed Service: what a newer API server has in it must come back as it is.
    api: Api<DynamicObject>,
    target: Target,
    options: BalancerOptions,
    services: watch::Receiver<WithPorts>,
    leads: watch::Receiver<Option<Instant>>,
    metrics: Arc<ProxyMetrics>,
    failing: Failing,
}

// === impl Reporter ===

impl Reporter {
    /// All Services are known, and these are they.
    pub fn services<'a>(&self, services: impl Iterator<Item = &'a Service> + Clone) {
        let with_ports = services.filter(|it| has_balancer_ports(it, &self.config.options));
        self.services.send_if_modified(|known| {
            let same = |known: &Vec<Service>| known.iter().eq(with_ports.clone());
            // Most changes are of endpoints.
            let changed = !known.as_ref().is_some_and(same);
            if changed {
                *known = Some(with_ports.cloned().collect());
            }
            changed
        });
    }

    /// A Service has come, gone or changed in whatever way; the balancer's own is read anew.
    pub fn touched(&self, service: &core::Service) {
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
    /// A replica, and what it has to be told.
    pub fn new(
        client: Client,
        config: &BalancerConfig,
        metrics: Arc<ProxyMetrics>,
    ) -> (Self, Reporter) {
        let (namespace, name) = (config.namespace.as_str(), config.name.as_str());
        let lease = format!("{name}-updater");
        let times = config.times;
        let failures = metrics.balancer_failures(Step::Lease).clone();
        let (candidate, leads) =
            Candidate::new(client.clone(), namespace, &lease, times, PROGRAM, failures);
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
            failing: Failing::default(),
        };
        let reporter = Reporter {
            config: config.clone(),
            services: sender,
        };
        (Self { candidate, writer }, reporter)
    }

    /// Keeps the ports while this replica leads, until `stop`; the next one leads at once then.
    pub async fn run(mut self, stop: CancellationToken) {
        // Who does not know the Services must not keep others from leading.
        let mut services = self.writer.services.clone();
        let known = services.wait_for(Option::is_some);
        if !matches!(stop.run_until_cancelled(known).await, Some(Ok(_))) {
            return;
        }
        let writing = stop.run_until_cancelled(self.writer.run());
        tokio::join!(self.candidate.campaign(&stop), writing);
        self.candidate.release().await;
    }
}

// === impl Writer ===

impl Writer {
    async fn run(&mut self) {
        let leads = |until: &Option<Instant>| until.is_some_and(|until| Instant::now() < until);
        while self.leads.wait_for(leads).await.is_ok() {
            info!("leading: this replica keeps the ports of {}", self.target);
            let _leading = GaugeGuard::new(&self.metrics.leader);
            let lost = lost(self.leads.clone());
            tokio::select! {
                biased;
                () = lost => info!("no longer leading: the ports of {} are another's", self.target),
                () = self.keep() => return,
            }
        }
    }

    /// Updates at once and then whenever something changes, as long as something can.
    async fn keep(&mut self) {
        let mut pause = FIRST_PAUSE;
        loop {
            let services = self.services.borrow_and_update().clone();
            let updated = self.update(&services.unwrap_or_default()).await;
            match &updated {
                Ok(()) => self.failing.over(&self.target),
                Err(error) => self.failing.say(error),
            }
            match updated {
                // A Service that comes is seen; asking for it would not bring it.
                Ok(()) | Err(RequestError::Missing { .. }) => {
                    pause = FIRST_PAUSE;
                    sleep(FIRST_PAUSE).await;
                    if self.services.changed().await.is_err() {
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
        let read = self.read().await;
        let mut object =
            read.inspect_err(|_| self.metrics.balancer_failures(Step::Read).increment(1))?;
        let spec = object.data.get_mut("spec").and_then(Value::as_object_mut);
        let ports = spec.map(|spec| spec.entry("ports").or_insert_with(|| json!([])));
        let Some(Value::Array(ports)) = ports else {
            return Err(RequestError::Failed {
                what: format!("cannot update {}", self.target),
                why: "its spec.ports are no list".to_owned(),
            });
        };
        let known = read_ports(ports);
        let wanted = balancer_ports(services.iter(), &self.options, &known);
        let Some(changed) = changed_ports(ports, &wanted) else {
            return Ok(());
        };
        *ports = changed;
        let writes = writes(PROGRAM);
        let call = self.api.replace(&self.target.name, &writes, &object);
        let written = request("update", &self.target, REQUEST, call).await;
        written.inspect_err(|_| self.metrics.balancer_failures(Step::Write).increment(1))?;
        self.metrics.balancer_updates.increment(1);
        let [added, removed] = [(&wanted, &known), (&known, &wanted)].map(|(these, those)| {
            let only = these.iter().filter(|port| !those.contains(port));
            only.map(|port| port.name.as_str()).collect::<Vec<_>>()
        });
        let (ports, new, gone) = (wanted.len(), added.len(), removed.len());
        info!(ports, new, gone, "updated {}", self.target);
        debug!(?added, ?removed, "updated {}", self.target);
        Ok(())
    }

    async fn read(&self) -> Result<DynamicObject, RequestError> {
        let call = self.api.get_opt(&self.target.name);
        let found = request("get", &self.target, REQUEST, call).await?;
        found.ok_or_else(|| RequestError::Missing {
            what: self.target.to_string(),
        })
    }
}

/// Returns when the leadership has ended.
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
