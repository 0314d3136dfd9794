//! The routes from the Kubernetes API: watches Services and EndpointSlices, and computes new routes after
//! each relevant change. While the API is unreachable, the last routes stay in force. A process that only
//! updates the load balancer watches Services alone, and computes no routes.
//!
//! Only exposed Services are stored, but all EndpointSlices are: if a Service is annotated later, the watch
//! does not report its slices again.

use std::ffi::OsStr;
use std::path::PathBuf;
use std::pin::pin;
use std::sync::Arc;
use std::sync::atomic::Ordering;
use std::time::Duration;

use culvert_kube::client::client;
use culvert_kube::object_cache::{ObjectCache, objects};
use futures_util::StreamExt as _;
use k8s_openapi::api::core::v1 as core;
use k8s_openapi::api::discovery::v1 as discovery;
use kube::runtime::watcher::{self, Event};
use kube::{Api, Client};
use tokio::sync::watch;
use tokio::time::{Instant, sleep_until};
use tokio_util::sync::CancellationToken;
use tracing::warn;

use super::annotations::OTHER_ANNOTATIONS;
use super::balancer::{Balancer, Reporter};
use super::config::Cluster;
use super::exposure::{Service, ServicePort, Slice, expose};
use super::files::{Files, Reloader};
use super::metrics::{ProxyMetrics, SourceState};
use super::table::Table;

/// Time to collect changes before they are applied together: a rollout changes many slices at once.
const COLLECT: Duration = Duration::from_millis(20);

/// Pause after a computation of the routes, as a multiple of its duration: the thread also accepts connections,
/// and the computations may use at most a fifth of its time.
const REST: u32 = 4;

/// Longest pause after a computation. The duration includes times in which the process was suspended.
const MAX_REST: Duration = Duration::from_secs(2);

/// Label of an EndpointSlice with the name of its Service.
const SERVICE_LABEL: &str = "kubernetes.io/service-name";

pub(crate) struct Discovery {
    client: Client,
    cluster: Cluster,
    table: Arc<Table>,
    metrics: Arc<ProxyMetrics>,
    /// Services with the annotation.
    services: ObjectCache<Service>,
    slices: ObjectCache<Slice>,
    /// Reports Services to the balancer; `None` if the proxy does not update the load balancer.
    reporter: Option<Reporter>,
    /// False if the process only updates the load balancer.
    has_routes: bool,
    /// Problems already logged, sorted.
    problems: Vec<String>,
}

impl Discovery {
    /// Reads the account's credentials. `reloader` follows them.
    ///
    /// # Errors
    /// Fails if the credentials are missing or unusable.
    pub(crate) async fn new(
        cluster: Cluster,
        table: Arc<Table>,
        metrics: Arc<ProxyMetrics>,
        reloader: &mut Reloader,
    ) -> anyhow::Result<Self> {
        let from_env = || first_kubeconfig(&std::env::var_os("KUBECONFIG")?);
        let kubeconfig: Option<PathBuf> = cluster.kubeconfig.clone().or_else(from_env);
        let client = client(kubeconfig.as_deref(), reloader, Files::Kubeconfig).await?;
        let balancer = cluster.balancer.as_ref();
        Ok(Self {
            has_routes: balancer.is_none_or(|balancer| !balancer.only),
            client,
            cluster,
            table,
            metrics,
            services: ObjectCache::new("Services"),
            slices: ObjectCache::new("EndpointSlices"),
            reporter: None,
            problems: Vec::new(),
        })
    }

    /// Returns the updater of the load balancer's ports, if configured. The updater receives the Services
    /// from this watch.
    pub(crate) fn balancer(&mut self) -> Option<Balancer> {
        let config = self.cluster.balancer.as_ref()?;
        let (balancer, reporter) = Balancer::new(self.client.clone(), config, &self.metrics);
        self.reporter = Some(reporter);
        Some(balancer)
    }

    /// Watches until `stop`; sends to `changes` after each applied change.
    pub(crate) async fn run(mut self, changes: watch::Sender<u64>, stop: CancellationToken) {
        let namespace = self.cluster.namespace.clone();
        let namespace = namespace.as_deref();
        let mut services = pin!(objects(api_of::<core::Service>(&self.client, namespace)));
        let mut slices = pin!(objects(api_of::<discovery::EndpointSlice>(
            &self.client,
            namespace
        )));
        // Time at which the collected changes are applied.
        let mut due: Option<Instant> = None;
        // Start and end of the last computation.
        let mut last = [Instant::now(); 2];
        loop {
            let changed = tokio::select! {
                Some(event) = services.next() => {
                    self.report(&event);
                    self.take_service(event)
                }
                Some(event) = slices.next(), if self.has_routes => self.take_slice(event),
                () = sleep_until(due.unwrap_or_else(Instant::now)), if due.is_some() => {
                    due = None;
                    let begun = Instant::now();
                    self.apply();
                    last = [begun, Instant::now()];
                    changes.send_modify(|count| *count += 1);
                    false
                }
                () = stop.cancelled() => return,
            };
            let synced = self.is_synced();
            let up = synced && self.services.is_up() && self.slices.is_up();
            *self.metrics.source.lock() = match up {
                true => SourceState::Good,
                false => SourceState::Unreadable,
            };
            if changed && synced {
                due.get_or_insert_with(|| next_computation(Instant::now(), last));
            }
            self.report_watch(due.is_none());
        }
    }

    fn is_synced(&self) -> bool {
        self.services.is_synced() && (self.slices.is_synced() || !self.has_routes)
    }

    /// Stores a Service event; returns true if the routes must be computed again.
    fn take_service(&mut self, event: Result<Event<core::Service>, watcher::Error>) -> bool {
        let annotation = &self.cluster.options.annotation;
        let convert = |service| service_of(service, annotation);
        self.services.take(event, convert)
    }

    /// Stores an EndpointSlice event; returns true if the routes must be computed again. A slice changes
    /// nothing while its Service is not exposed or not known yet.
    fn take_slice(
        &mut self,
        event: Result<Event<discovery::EndpointSlice>, watcher::Error>,
    ) -> bool {
        let exposed = |slice: &Slice| self.services.has(&slice.namespace, &slice.service);
        self.slices.take_where(event, slice_of, exposed)
    }

    fn report(&self, event: &Result<Event<core::Service>, watcher::Error>) {
        if let (
            Some(reporter),
            Ok(Event::Apply(service) | Event::Delete(service) | Event::InitApply(service)),
        ) = (&self.reporter, event)
        {
            reporter.touched(service);
        }
    }

    /// Reports to the balancer whether its Services are current. `is_applied` is false while changes are not reported yet.
    fn report_watch(&self, is_applied: bool) {
        let is_up = self.services.is_up();
        if let Some(reporter) = self.reporter.as_ref().filter(|_| !is_up || is_applied) {
            reporter.set_up(is_up);
        }
    }

    fn apply(&mut self) {
        if self.has_routes {
            self.apply_routes();
        }
        if let Some(reporter) = &self.reporter {
            reporter.services(self.services.values());
        }
        self.metrics.synced.store(true, Ordering::Relaxed);
    }

    fn apply_routes(&mut self) {
        let (services, slices) = (&self.services, &self.slices);
        let options = &self.cluster.options;
        let (routes, problems) = expose(services.values(), slices.values(), options);
        let change = self.table.apply(routes);
        self.metrics.problems.set(problems.len() as f64);
        if change != Default::default() {
            self.metrics.applied.increment(1);
            change.log();
        }
        let is_new = |problem: &&String| self.problems.binary_search(problem).is_err();
        for problem in problems.iter().filter(is_new) {
            // As the reason, each problem has its own limit in the log.
            warn!(reason = problem, "a Service has a mistake");
        }
        self.problems = problems;
    }
}

/// Returns the time to apply a change. `last` has start and end of the last computation.
fn next_computation(changed: Instant, [begun, ended]: [Instant; 2]) -> Instant {
    let rest = ended.duration_since(begun).saturating_mul(REST);
    (changed + COLLECT).max(ended + rest.min(MAX_REST))
}

/// Returns the API for one kind of object, in one namespace or in all.
fn api_of<K>(client: &Client, namespace: Option<&str>) -> Api<K>
where
    K: kube::Resource<Scope = k8s_openapi::NamespaceResourceScope>,
    K::DynamicType: Default,
{
    match namespace {
        Some(namespace) => Api::namespaced(client.clone(), namespace),
        None => Api::all(client.clone()),
    }
}

/// Returns the relevant part of a Service; `None` without the annotation.
fn service_of(service: core::Service, annotation: &str) -> Option<Service> {
    let metadata = service.metadata;
    let mut annotations = metadata.annotations?;
    if !annotations.contains_key(annotation) {
        return None;
    }
    annotations.retain(|key, _| key == annotation || OTHER_ANNOTATIONS.contains(&key.as_str()));
    let spec = service.spec.unwrap_or_default();
    let port = |port: core::ServicePort| ServicePort {
        is_tcp: is_tcp(port.protocol.as_deref()),
        port: number(Some(port.port)),
        node_port: number(port.node_port),
        name: port.name.unwrap_or_default(),
    };
    Some(Service {
        namespace: metadata.namespace.unwrap_or_default(),
        name: metadata.name.unwrap_or_default(),
        uid: metadata.uid.unwrap_or_default(),
        created: metadata
            .creation_timestamp
            .map_or(0, |time| time.0.as_second()),
        is_node_port: spec.type_.as_deref() == Some("NodePort"),
        has_cluster_ip: spec
            .cluster_ip
            .is_some_and(|ip| !ip.is_empty() && ip != "None"),
        annotations,
        ports: spec.ports.into_iter().flatten().map(port).collect(),
    })
}

/// Returns the relevant part of an EndpointSlice; `None` if the slice belongs to no Service.
fn slice_of(slice: discovery::EndpointSlice) -> Option<Slice> {
    let metadata = slice.metadata;
    let port = |port: discovery::EndpointPort| {
        let number = number(port.port);
        let counts = is_tcp(port.protocol.as_deref()) && number != 0;
        counts.then(|| (port.name.unwrap_or_default(), number))
    };
    let is_ready = |endpoint: &&discovery::Endpoint| {
        let conditions = endpoint.conditions.as_ref();
        conditions.and_then(|conditions| conditions.ready) == Some(true)
    };
    let ready = slice.endpoints.iter().filter(is_ready);
    // Host names are skipped: a slice may contain them, but only name servers use them.
    let addresses = ready.flat_map(|endpoint| &endpoint.addresses);
    Some(Slice {
        service: metadata.labels?.remove(SERVICE_LABEL)?,
        namespace: metadata.namespace.unwrap_or_default(),
        ports: slice.ports.into_iter().flatten().filter_map(port).collect(),
        ready: addresses.filter_map(|ip| ip.parse().ok()).collect(),
    })
}

/// Returns true for TCP, which is also the API's default.
fn is_tcp(protocol: Option<&str>) -> bool {
    protocol.is_none_or(|protocol| protocol == "TCP")
}

fn number(port: Option<i32>) -> u16 {
    port.and_then(|port| u16::try_from(port).ok()).unwrap_or(0)
}

/// Returns the file that the variable KUBECONFIG names. Unlike client-go, the proxy does not merge several files; it uses the
/// first one that exists.
fn first_kubeconfig(files: &OsStr) -> Option<PathBuf> {
    let named = std::env::split_paths(files).filter(|path| !path.as_os_str().is_empty());
    let (mut existing, missing): (Vec<_>, Vec<_>) = named.partition(|path| path.exists());
    if let [first, others @ ..] = existing.as_slice()
        && !others.is_empty()
    {
        warn!(
            used = %first.display(),
            "KUBECONFIG names several files, and only the first is used; set --kubeconfig to a single file"
        );
    }
    existing.extend(missing);
    existing.into_iter().next()
}

#[cfg(test)]
mod tests;
