//! Routes from the Kubernetes API: watches Services and EndpointSlices, and plans anew whenever
//! one of them changes. While the API can not be reached the last routes stay in force.

use std::collections::HashMap;
use std::fmt;
use std::path::PathBuf;
use std::pin::pin;
use std::sync::Arc;
use std::time::Duration;

use futures_util::{Stream, StreamExt as _};
use k8s_openapi::api::core::v1 as core;
use k8s_openapi::api::discovery::v1 as discovery;
use kube::runtime::watcher::{self, Event};
use kube::runtime::{WatchStreamExt as _, watcher as watch_all};
use kube::{Api, Client};
use tokio::sync::watch;
use tokio::time::{Instant, sleep, sleep_until};
use tokio_util::sync::CancellationToken;
use tracing::{error, info, warn};

use super::balancer::{Balancer, BalancerConfig, Reporter};
use super::exposure::{
    Endpoint, Options, Problem, Protocol, Service, ServicePort, Slice, SlicePort, expose,
};
use super::metrics::ProxyMetrics;
use super::table::Table;
use crate::auth::client;

/// How long changes are collected before they are put in force together: a rollout changes many
/// slices at once.
const COLLECT: Duration = Duration::from_millis(20);

/// The pause before a watch begins anew with a list, which is the expensive way.
const BEGIN_ANEW: Duration = Duration::from_secs(1);

/// By which an EndpointSlice names its Service.
const SERVICE_LABEL: &str = "kubernetes.io/service-name";

/// What is watched, and by which account.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Cluster {
    /// A kubeconfig file; `None` uses the pod's own account, or what `KUBECONFIG` names.
    pub kubeconfig: Option<PathBuf>,
    /// Only this namespace; `None` watches all.
    pub namespace: Option<String>,
    /// Which annotation exposes a Service, and what can be served.
    pub options: Options,
    /// The load balancer's Service whose ports are kept; `None` leaves them alone.
    pub balancer: Option<Box<BalancerConfig>>,
}

/// Watches one cluster.
pub struct Discovery {
    client: Client,
    cluster: Cluster,
    table: Arc<Table>,
    metrics: Arc<ProxyMetrics>,
    services: Mirror<Service>,
    slices: Mirror<Slice>,
    /// Who else wants to know of Services.
    reporter: Option<Reporter>,
    /// What the log has named.
    problems: Vec<Problem>,
}

/// A kind's objects, as far as they are known.
struct Mirror<T> {
    /// Whose they are, for the log.
    kind: &'static str,
    objects: HashMap<Key, T>,
    /// A list that is being received; it replaces the objects when it is complete.
    listing: Option<HashMap<Key, T>>,
    /// The first list is complete.
    synced: bool,
    /// Why the watch fails at present, as the log has it.
    failing: Option<String>,
}

/// Namespace and name.
type Key = (String, String);

impl Discovery {
    /// Reads the account's credentials.
    ///
    /// # Errors
    /// When there are none, or they can not be used.
    pub async fn new(
        cluster: Cluster,
        table: Arc<Table>,
        metrics: Arc<ProxyMetrics>,
    ) -> anyhow::Result<Self> {
        let client = client(cluster.kubeconfig.as_deref()).await?;
        Ok(Self {
            client,
            cluster,
            table,
            metrics,
            services: Mirror::new("Services"),
            slices: Mirror::new("EndpointSlices"),
            reporter: None,
            problems: Vec::new(),
        })
    }

    /// Who keeps the load balancer's ports, if that is wanted; it follows what is seen here.
    pub fn balancer(&mut self) -> Option<Balancer> {
        let config = self.cluster.balancer.as_ref()?;
        let (client, metrics) = (self.client.clone(), self.metrics.clone());
        let (balancer, reporter) = Balancer::new(client, config, metrics);
        self.reporter = Some(reporter);
        Some(balancer)
    }

    /// Watches until `stop`; each change that was put in force is sent to `changes`.
    pub async fn run(mut self, changes: watch::Sender<u64>, stop: CancellationToken) {
        let namespace = self.cluster.namespace.clone();
        let mut services = pin!(objects::<core::Service>(&self.client, namespace.as_deref()));
        let mut slices = pin!(objects::<discovery::EndpointSlice>(
            &self.client,
            namespace.as_deref()
        ));
        // When what has changed is put in force.
        let mut due: Option<Instant> = None;
        loop {
            let changed = tokio::select! {
                Some(event) = services.next() => {
                    if is_gone(&event) {
                        sleep(BEGIN_ANEW).await;
                        services.set(objects(&self.client, namespace.as_deref()));
                    }
                    self.report(&event);
                    self.services.take(event, service_of)
                }
                Some(event) = slices.next() => {
                    if is_gone(&event) {
                        sleep(BEGIN_ANEW).await;
                        slices.set(objects(&self.client, namespace.as_deref()));
                    }
                    self.slices.take(event, slice_of)
                }
                () = sleep_until(due.unwrap_or_else(Instant::now)), if due.is_some() => {
                    due = None;
                    self.apply();
                    changes.send_modify(|count| *count += 1);
                    false
                }
                () = stop.cancelled() => return,
            };
            let up = self.services.failing.is_none() && self.slices.failing.is_none();
            self.metrics.set_source_up(up);
            if changed && self.services.synced && self.slices.synced {
                due.get_or_insert(Instant::now() + COLLECT);
            }
        }
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

    fn apply(&mut self) {
        let (services, slices) = (&self.services.objects, &self.slices.objects);
        let options = &self.cluster.options;
        let (routes, problems) = expose(services.values(), slices.values(), options);
        let change = self.table.apply(routes);
        if let Some(reporter) = &self.reporter {
            reporter.services(services.values());
        }
        self.metrics.set_synced();
        self.metrics.problems.set(problems.len() as f64);
        if change != Default::default() {
            self.metrics.applied.increment(1);
            info!(?change, "routes changed");
        }
        for problem in problems
            .iter()
            .filter(|problem| !self.problems.contains(problem))
        {
            warn!("{problem}");
        }
        self.problems = problems;
    }
}

/// Everything of a kind, from now on.
fn objects<K>(
    client: &Client,
    namespace: Option<&str>,
) -> impl Stream<Item = Result<Event<K>, watcher::Error>> + use<K>
where
    K: kube::Resource<Scope = k8s_openapi::NamespaceResourceScope>
        + Clone
        + fmt::Debug
        + serde::de::DeserializeOwned
        + Send
        + 'static,
    K::DynamicType: Default,
{
    let api: Api<K> = match namespace {
        Some(namespace) => Api::namespaced(client.clone(), namespace),
        None => Api::all(client.clone()),
    };
    watch_all(api, watcher::Config::default()).default_backoff()
}

/// Whether a watch can not go on from the version it knows. The watcher begins anew if an event
/// says so; a status that says so, as some proxies in between make of it, it would repeat for ever.
fn is_gone<K>(event: &Result<Event<K>, watcher::Error>) -> bool {
    matches!(
        event,
        Err(watcher::Error::WatchStartFailed(kube::Error::Api(status))) if status.code == 410
    )
}

// === impl Mirror ===

impl<T: PartialEq> Mirror<T> {
    fn new(kind: &'static str) -> Self {
        Self {
            kind,
            objects: HashMap::new(),
            listing: None,
            synced: false,
            failing: None,
        }
    }

    /// Whether anything differs now.
    fn take<K: kube::ResourceExt>(
        &mut self,
        event: Result<Event<K>, watcher::Error>,
        convert: fn(K) -> Option<T>,
    ) -> bool {
        let event = match event {
            Ok(event) => event,
            Err(failed) => {
                let text = failed.to_string();
                if self.failing.as_ref() != Some(&text) {
                    error!(
                        error = text,
                        "cannot watch {}; the last routes stay in force, and it is tried again",
                        self.kind
                    );
                    self.failing = Some(text);
                }
                return false;
            }
        };
        if self.failing.take().is_some() {
            info!("watching {} again", self.kind);
        }
        let key = |object: &K| (object.namespace().unwrap_or_default(), object.name_any());
        match event {
            Event::Apply(object) => {
                let key = key(&object);
                match convert(object) {
                    Some(object) => {
                        let same = self.objects.get(&key) == Some(&object);
                        self.objects.insert(key, object);
                        !same
                    }
                    None => self.objects.remove(&key).is_some(),
                }
            }
            Event::Delete(object) => self.objects.remove(&key(&object)).is_some(),
            Event::Init => {
                self.listing = Some(HashMap::new());
                false
            }
            Event::InitApply(object) => {
                let key = key(&object);
                if let (Some(listing), Some(object)) = (&mut self.listing, convert(object)) {
                    listing.insert(key, object);
                }
                false
            }
            Event::InitDone => {
                let listed = self.listing.take().unwrap_or_default();
                let changed = !self.synced || listed != self.objects;
                self.objects = listed;
                self.synced = true;
                changed
            }
        }
    }
}

/// What matters of a Service.
fn service_of(service: core::Service) -> Option<Service> {
    let spec = service.spec.unwrap_or_default();
    let metadata = service.metadata;
    let port = |port: core::ServicePort| ServicePort {
        protocol: protocol_of(port.protocol.as_deref()),
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
        annotations: metadata.annotations.unwrap_or_default(),
        ports: spec
            .ports
            .unwrap_or_default()
            .into_iter()
            .map(port)
            .collect(),
    })
}

/// What matters of an EndpointSlice; `None` for one that belongs to no Service.
fn slice_of(slice: discovery::EndpointSlice) -> Option<Slice> {
    let metadata = slice.metadata;
    let port = |port: discovery::EndpointPort| SlicePort {
        protocol: protocol_of(port.protocol.as_deref()),
        port: number(port.port),
        name: port.name.unwrap_or_default(),
    };
    let endpoint = |endpoint: discovery::Endpoint| Endpoint {
        ready: endpoint.conditions.and_then(|conditions| conditions.ready) == Some(true),
        // A slice may hold host names; those are for name servers.
        addresses: endpoint
            .addresses
            .iter()
            .filter_map(|ip| ip.parse().ok())
            .collect(),
    };
    Some(Slice {
        service: metadata.labels?.remove(SERVICE_LABEL)?,
        namespace: metadata.namespace.unwrap_or_default(),
        ports: slice
            .ports
            .unwrap_or_default()
            .into_iter()
            .map(port)
            .collect(),
        endpoints: slice.endpoints.into_iter().map(endpoint).collect(),
    })
}

fn protocol_of(protocol: Option<&str>) -> Protocol {
    match protocol {
        // The API's default.
        None | Some("TCP") => Protocol::Tcp,
        Some(_) => Protocol::Other,
    }
}

fn number(port: Option<i32>) -> u16 {
    port.and_then(|port| u16::try_from(port).ok()).unwrap_or(0)
}
