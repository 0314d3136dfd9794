//! The contenders and their running programs.
//!
//! A front door maps the server name of each of its Services to an endpoint. A node tunnel is measured
//! together with the front door of the same maker; one listener of the node tunnel leads to one Service.

use std::collections::BTreeMap;
use std::net::{Ipv4Addr, SocketAddr};
use std::path::PathBuf;
use std::time::Duration;

use anyhow::{Context as _, bail, ensure};
use bytes::Bytes;
use culvert_tests::Program;
use culvert_tests::envoy::{self, Envoy, RunningEnvoy, Seed};
use culvert_tests::haproxy::{HaProxy, RunningHaProxy};
use culvert_tests::hello::client_hello;
use culvert_tests::kube_api::{KubeApi, service, slice};
use culvert_tests::ports::Ports;
use serde_json::json;
use tempfile::TempDir;
use tokio::time::{Instant, sleep, timeout};

use crate::door::rows::{Front, Kind};
use crate::entry::Entry;
use crate::harness::{ask, harness};
use crate::load::Echo;
use crate::measure::Subject;
use crate::names::{DIRECT, NODE, OURS, PROXY};
use crate::programs::Programs;

/// Name of Envoy, which KKP runs at both ends.
pub(super) const ENVOY: &str = "envoy";
/// Name of haproxy, which other operators run in front of their seeds.
pub(super) const HAPROXY: &str = "haproxy";

/// Connection limit of every front door per Service. Higher than the number of connections in any row.
const MAX_CONNECTIONS: u32 = 20_000;

/// Time limit for a program to become ready, and again to carry the first byte; and the pause between two
/// attempts.
const START_LIMIT: Duration = Duration::from_secs(20);
const TRY_INTERVAL: Duration = Duration::from_millis(50);

/// Namespace of all Services, and the name of their only port.
const NAMESPACE: &str = "bench";
const PORT: &str = "secure";

/// Maker of a front door.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum Make {
    Ours,
    Envoy,
    HaProxy,
    /// No program: the load goes straight to the endpoint.
    Direct,
}

/// A front door to measure, with a node tunnel where the row needs one.
#[derive(Debug, Clone, Copy)]
pub(super) struct Contender {
    /// Name of the column in the table.
    pub name: &'static str,
    make: Make,
}

const fn contender(name: &'static str, make: Make) -> Contender {
    Contender { name, make }
}

/// All contenders, ours first.
pub(super) const CONTENDERS: [Contender; 4] = [
    contender(OURS, Make::Ours),
    contender(ENVOY, Make::Envoy),
    contender(HAPROXY, Make::HaProxy),
    contender(DIRECT, Make::Direct),
];

impl Contender {
    /// Returns true if a program is not installed, and prints to stderr how to get it.
    pub(super) fn missing(self) -> bool {
        match self.make {
            Make::Envoy => Envoy::get().is_none(),
            Make::HaProxy => HaProxy::get().is_none(),
            Make::Ours | Make::Direct => false,
        }
    }

    /// File descriptors that the contender needs per connection. haproxy reserves some for pipes.
    pub(super) fn descriptors(self) -> u64 {
        match self.make {
            Make::HaProxy => 3,
            Make::Ours | Make::Envoy | Make::Direct => 2,
        }
    }

    /// Returns true if the row applies to the contender. haproxy has no node tunnel, and its behaviour when a
    /// Service changes depends on its operator.
    pub(super) fn has(self, front: Front, kind: Kind) -> bool {
        match self.make {
            Make::Ours | Make::Envoy => true,
            Make::HaProxy => front == Front::Sni && kind != Kind::Change,
            Make::Direct => matches!(kind, Kind::Load(_)),
        }
    }
}

/// A running program and its files.
#[derive(Debug)]
enum Running {
    Ours(Program),
    Envoy(RunningEnvoy),
    HaProxy(RunningHaProxy),
}

impl Running {
    fn program(&self) -> &Program {
        match self {
            Self::Ours(program) => program,
            Self::Envoy(envoy) => &envoy.program,
            Self::HaProxy(haproxy) => &haproxy.program,
        }
    }
}

/// Source of the Services of a front door.
#[derive(Debug)]
enum Source {
    Api(KubeApi),
    /// Envoy's listeners and clusters, in files of a folder.
    Files(Box<Seed>, PathBuf),
    /// A configuration that the program reads only once.
    Fixed,
}

/// A running front door, with a node tunnel if the row needs one. Dropping it kills all programs.
#[derive(Debug)]
pub(super) struct Door {
    entry: Entry,
    /// Address of the TLS listener.
    sni: SocketAddr,
    programs: Vec<Running>,
    source: Source,
    _ports: Ports,
    // The last field, so that the programs end before their files are removed.
    _dir: TempDir,
}

impl Door {
    /// Starts a front door with `services` Services that all lead to `endpoint`, and waits until the last
    /// Service has carried a byte. The programs log to stderr.
    pub(super) async fn start(
        contender: Contender,
        front: Front,
        programs: &Programs,
        endpoint: SocketAddr,
        services: usize,
    ) -> anyhow::Result<Self> {
        let plan = Plan {
            front,
            endpoint,
            services,
            dir: tempfile::Builder::new()
                .prefix("culvert-bench-")
                .tempdir()?,
            ports: Ports::default(),
        };
        let door = match contender.make {
            Make::Ours => harness(plan.ours(programs)).await?,
            Make::Envoy => harness(plan.envoy()).await??,
            Make::HaProxy => harness(plan.haproxy()).await??,
            Make::Direct => plan.direct(),
        };
        let carries = async {
            while Echo::proven(&door.entry, endpoint).await.is_err() {
                sleep(TRY_INTERVAL).await;
            }
        };
        let carried = timeout(START_LIMIT, carries).await;
        carried.with_context(|| format!("carries no data within {START_LIMIT:?}"))?;
        Ok(door)
    }

    /// Returns the entry of a client that connects to `service`.
    pub(super) fn service(&self, service: usize) -> Entry {
        sni(self.sni, service)
    }

    /// Changes the endpoint of a Service. Returns the time at which the front door could first see the
    /// change.
    pub(super) fn change(
        &mut self,
        service: usize,
        endpoint: SocketAddr,
    ) -> anyhow::Result<Instant> {
        match &mut self.source {
            Source::Api(api) => {
                let told = Instant::now();
                api.put("endpointslices", endpoints_of(service, endpoint));
                Ok(told)
            }
            Source::Files(seed, dir) => {
                seed.clusters.insert(name(service), vec![endpoint]);
                seed.write_clusters(dir);
                Ok(Instant::now())
            }
            Source::Fixed => bail!("reads its configuration only once"),
        }
    }

    /// Sums a figure of all programs. `None` without a program.
    fn sum<T: std::iter::Sum>(&self, figure: impl Fn(&Program) -> T) -> anyhow::Result<Option<T>> {
        let programs = self.programs.iter();
        let sum = ask(|| programs.map(|running| figure(running.program())).sum())?;
        Ok((!self.programs.is_empty()).then_some(sum))
    }
}

impl Subject for Door {
    fn entry(&self) -> &Entry {
        &self.entry
    }

    fn cpu_time(&mut self) -> anyhow::Result<Option<Duration>> {
        self.sum(Program::cpu_time)
    }

    fn rss(&mut self) -> anyhow::Result<Option<u64>> {
        self.sum(Program::rss)
    }
}

/// Configuration of the programs to start.
struct Plan {
    front: Front,
    endpoint: SocketAddr,
    services: usize,
    dir: TempDir,
    ports: Ports,
}

impl Plan {
    fn address(&mut self) -> SocketAddr {
        SocketAddr::from((Ipv4Addr::LOCALHOST, self.ports.next_port()))
    }

    /// Returns the number of the Service that carries the load.
    fn last(&self) -> usize {
        self.services - 1
    }

    fn door(self, entry: Entry, sni: SocketAddr, programs: Vec<Running>, source: Source) -> Door {
        Door {
            entry,
            sni,
            programs,
            source,
            _ports: self.ports,
            _dir: self.dir,
        }
    }

    async fn ours(mut self, programs: &Programs) -> Door {
        let api = KubeApi::start().await;
        for service in 0..self.services {
            api.put("services", service_of(service));
            api.put("endpointslices", endpoints_of(service, self.endpoint));
        }
        let [at, tunnel, stats] = [(); 3].map(|()| self.address());
        let door = [
            format!("--kubeconfig={}", api.kubeconfig(self.dir.path()).display()),
            "--bind-address=127.0.0.1".to_owned(),
            format!("--envoy-sni-port={}", at.port()),
            format!("--envoy-tunneling-port={}", tunnel.port()),
            format!("--envoy-stats-port={}", stats.port()),
            format!("--max-connections={MAX_CONNECTIONS}"),
        ];
        let mut running = vec![Running::Ours(programs.start(PROXY, &door, stats).await)];
        let entry = match self.front {
            Front::Sni => sni(at, self.last()),
            Front::Node => {
                let [listen, stats] = [(); 2].map(|()| self.address());
                let node = [
                    format!("--listen={listen}={}", authority(self.last())),
                    format!("--proxy={tunnel}"),
                    "--stats-address=127.0.0.1".to_owned(),
                    format!("--stats-port={}", stats.port()),
                ];
                running.push(Running::Ours(programs.start(NODE, &node, stats).await));
                Entry::Plain(listen)
            }
        };
        self.door(entry, at, running, Source::Api(api))
    }

    async fn envoy(mut self) -> anyhow::Result<Door> {
        let envoy = Envoy::get().context("not installed")?;
        let mut seed = Seed::new(&mut self.ports);
        for service in 0..self.services {
            let cluster = name(service);
            seed.server_names.insert(host(service), cluster.clone());
            seed.authorities.insert(authority(service), cluster.clone());
            seed.clusters.insert(cluster, vec![self.endpoint]);
        }
        // Envoy reads no connection limits of its own from these files, and rows with one Service need no
        // files.
        let (bootstrap, source) = if self.services > 1 {
            let dir = self.dir.path().to_owned();
            (
                seed.following(&dir),
                Source::Files(Box::new(seed.clone()), dir),
            )
        } else {
            (seed.bootstrap(), Source::Fixed)
        };
        let mut running = Vec::new();
        let bootstrap = bootstrap.allowing(MAX_CONNECTIONS);
        running.push(Running::Envoy(envoy.start(&bootstrap).await));
        let entry = match self.front {
            Front::Sni => sni(seed.sni, self.last()),
            Front::Node => {
                let (listen, authority) = (self.address(), authority(self.last()));
                let listeners = [(listen, authority.as_str())];
                let node = envoy::node(&mut self.ports, &listeners, seed.tunnel);
                let node = node.allowing(MAX_CONNECTIONS);
                running.push(Running::Envoy(envoy.start(&node).await));
                Entry::Plain(listen)
            }
        };
        Ok(self.door(entry, seed.sni, running, source))
    }

    async fn haproxy(mut self) -> anyhow::Result<Door> {
        let haproxy = HaProxy::get().context("not installed")?;
        ensure!(self.front == Front::Sni, "has no node tunnel");
        let at = self.address();
        let names = (0..self.services).map(|service| (host(service), vec![self.endpoint]));
        let names: BTreeMap<_, _> = names.collect();
        let running = Running::HaProxy(haproxy.start(at, &names).await);
        let entry = sni(at, self.last());
        Ok(self.door(entry, at, vec![running], Source::Fixed))
    }

    fn direct(self) -> Door {
        let endpoint = self.endpoint;
        let entry = match self.front {
            Front::Sni => sni(endpoint, self.last()),
            Front::Node => Entry::Plain(endpoint),
        };
        self.door(entry, endpoint, Vec::new(), Source::Fixed)
    }
}

// === Services ===

fn name(service: usize) -> String {
    format!("s{service}")
}

fn host(service: usize) -> String {
    format!("s{service}.bench.example.com")
}

fn authority(service: usize) -> String {
    format!("s{service}.{NAMESPACE}.svc.cluster.local:443")
}

/// Returns the entry of a client that selects a Service by its server name.
fn sni(door: SocketAddr, service: usize) -> Entry {
    Entry::Sni {
        door,
        hello: Bytes::from(client_hello(&host(service))),
    }
}

/// Returns a Service in the form in which KKP exposes the API server of a user cluster.
fn service_of(number: usize) -> serde_json::Value {
    service(NAMESPACE, &name(number))
        .port(PORT, 443)
        .annotation("nodeport-proxy.k8s.io/expose", "SNI,Tunneling")
        .annotation(
            "nodeport-proxy.k8s.io/port-mapping",
            &json!({ PORT: host(number) }).to_string(),
        )
        .into()
}

fn endpoints_of(number: usize, endpoint: SocketAddr) -> serde_json::Value {
    slice(NAMESPACE, &name(number))
        .port(PORT, endpoint.port())
        .ready(&endpoint.ip().to_string())
        .into()
}

#[cfg(test)]
pub(crate) mod tests;
