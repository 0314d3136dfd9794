//! Events of the front door and of a node tunnel.

use std::net::SocketAddr;
use std::sync::Arc;
use std::time::Duration;

use anyhow::Context as _;
use bytes::Bytes;
use culvert_tests::hello::client_hello;
use culvert_tests::kube_api::{KubeApi, service, slice};
use culvert_tests::ports::Ports;
use serde_json::json;
use tempfile::TempDir;
use tokio::time::{Instant, sleep};

use crate::entry::Entry;
use crate::names::{NODE, PROXY};
use crate::programs::Programs;
use crate::soak::Run;
use crate::soak::flow::recovers;
use crate::soak::ledger::{Path, Scope};
use crate::soak::random::Random;
use crate::soak::unit::Unit;

/// Names of the programs.
const DOOR_NAME: &str = "front door";
const NODE_NAME: &str = "node tunnel";

/// Paths through the door, and through the node tunnel.
const DOOR_PATHS: [Path; 2] = [Path::Sni, Path::Node];
const NODE_PATHS: [Path; 1] = [Path::Node];

/// Server name and authority of the Service.
const HOST: &str = "soak.example.com";
const AUTHORITY: &str = "soak.soak.svc.cluster.local:443";

/// Drain timeout of the node tunnel.
const NODE_DRAIN: Duration = Duration::from_secs(8);

/// Time limit for a path to work again after a restart of a program.
const LIMIT: Duration = Duration::from_secs(40);

/// An event in the life of a program.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum Event {
    KillDoor,
    DrainDoor,
    FreezeDoor,
    KillNode,
    DrainNode,
    FreezeNode,
    ChangeServices,
}

impl Event {
    fn ends_a_program(self) -> bool {
        !matches!(
            self,
            Self::FreezeDoor | Self::FreezeNode | Self::ChangeServices
        )
    }
}

/// The running programs.
pub(super) struct Door {
    door: Unit,
    node: Unit,
    entries: [(Path, Entry); 2],
    listeners: [SocketAddr; 3],
    target: SocketAddr,
    api: KubeApi,
    run: Run,
    random: Random,
    /// Number of changes of other Services.
    changes: u64,
    _ports: Ports,
    // The last field, so that the programs end before their files are removed.
    _dir: TempDir,
}

impl Door {
    /// Starts the programs, and waits until both paths to `target` work.
    pub(super) async fn start(
        programs: &Programs,
        target: SocketAddr,
        run: Run,
        random: Random,
    ) -> anyhow::Result<Self> {
        let dir = tempfile::Builder::new().prefix("culvert-").tempdir()?;
        let mut ports = Ports::default();
        let api = KubeApi::start().await;
        put(&api, "soak", HOST, target);
        let [sni, tunnel, stats, listen, node_stats] =
            [(); 5].map(|()| SocketAddr::from(([127, 0, 0, 1], ports.next_port())));
        let words = vec![
            format!("--kubeconfig={}", api.kubeconfig(dir.path()).display()),
            "--bind-address=127.0.0.1".to_owned(),
            format!("--envoy-sni-port={}", sni.port()),
            format!("--envoy-tunneling-port={}", tunnel.port()),
            format!("--envoy-stats-port={}", stats.port()),
        ];
        let door = Unit::start(DOOR_NAME, programs.path(PROXY), words, &run.lives)?;
        let words = vec![
            format!("--listen={listen}={AUTHORITY}"),
            format!("--proxy={tunnel}"),
            "--stats-address=127.0.0.1".to_owned(),
            format!("--stats-port={}", node_stats.port()),
            format!("--drain-timeout={}s", NODE_DRAIN.as_secs()),
        ];
        let node = Unit::start(NODE_NAME, programs.path(NODE), words, &run.lives)?;
        let hello = Bytes::from(client_hello(HOST));
        let this = Self {
            door,
            node,
            entries: [
                (Path::Sni, Entry::Sni { door: sni, hello }),
                (Path::Node, Entry::Plain(listen)),
            ],
            listeners: [sni, tunnel, stats],
            target,
            api,
            run,
            random,
            changes: 0,
            _ports: ports,
            _dir: dir,
        };
        this.works().await?;
        Ok(this)
    }

    /// Returns the entries of the paths.
    pub(super) fn entries(&self) -> [(Path, Entry); 2] {
        self.entries.clone()
    }

    /// Returns the TLS listener, the CONNECT listener, and the listener for health checks of the door.
    pub(super) fn listeners(&self) -> [SocketAddr; 3] {
        self.listeners
    }

    /// Lets one event follow another until the end of the run.
    pub(super) async fn live(mut self, end: Instant) -> anyhow::Result<Self> {
        while self.run.pause(&mut self.random, end).await {
            let event = self.choose();
            if event.ends_a_program() && !self.run.may_end(end) {
                continue;
            }
            self.happens(event)
                .await
                .with_context(|| format!("{event:?}"))?;
        }
        Ok(self)
    }

    fn choose(&mut self) -> Event {
        match self.random.below(10) {
            0 => Event::KillDoor,
            1 | 2 => Event::DrainDoor,
            3 => Event::FreezeDoor,
            4 => Event::KillNode,
            5 | 6 => Event::DrainNode,
            7 => Event::FreezeNode,
            _ => Event::ChangeServices,
        }
    }

    async fn happens(&mut self, event: Event) -> anyhow::Result<()> {
        let ledger = Arc::clone(&self.run.ledger);
        match event {
            Event::KillDoor => {
                let _outage = ledger.outage(&DOOR_PATHS, Scope::Everything);
                ledger.event(format_args!("{DOOR_NAME}: SIGKILL"));
                self.door.kill()?;
                sleep(self.random.millis(0, 1500)).await;
                self.door.restart()?;
                self.works().await
            }
            Event::DrainDoor => {
                let _outage = ledger.outage(&DOOR_PATHS, Scope::Dials);
                ledger.event(format_args!("{DOOR_NAME}: SIGTERM"));
                self.door.terminate().await?;
                sleep(self.random.millis(0, 1500)).await;
                self.door.restart()?;
                self.works().await
            }
            Event::KillNode => {
                let _outage = ledger.outage(&NODE_PATHS, Scope::Everything);
                ledger.event(format_args!("{NODE_NAME}: SIGKILL"));
                self.node.kill()?;
                sleep(self.random.millis(0, 1500)).await;
                self.node.restart()?;
                self.works().await
            }
            Event::DrainNode => {
                let _outage = ledger.outage(&NODE_PATHS, Scope::Dials);
                ledger.event(format_args!("{NODE_NAME}: SIGTERM"));
                self.node.begins_to_end()?;
                // The node tunnel accepts clients nearly to the end of its drain, and then cuts the last ones.
                sleep(NODE_DRAIN - Duration::from_secs(1)).await;
                let _cut = ledger.outage(&NODE_PATHS, Scope::Everything);
                self.node.ends().await?;
                sleep(self.random.millis(0, 1500)).await;
                self.node.restart()?;
                self.works().await
            }
            Event::FreezeDoor => {
                let time = self.random.millis(1000, 4000);
                ledger.event(format_args!("{DOOR_NAME}: frozen for {time:.1?}"));
                self.door.freeze(time).await?;
                self.works().await
            }
            Event::FreezeNode => {
                let time = self.random.millis(1000, 4000);
                ledger.event(format_args!("{NODE_NAME}: frozen for {time:.1?}"));
                self.node.freeze(time).await?;
                self.works().await
            }
            Event::ChangeServices => {
                self.changes += 1;
                ledger.event("another Service appears or changes");
                let name = format!("other{}", self.changes % 5);
                let host = format!("{name}-{}.example.com", self.changes);
                put(&self.api, &name, &host, self.target);
                Ok(())
            }
        }
    }

    /// Waits until both paths carry data.
    async fn works(&self) -> anyhow::Result<()> {
        for (_, entry) in &self.entries {
            recovers(entry, self.target, &self.run.ledger, LIMIT).await?;
        }
        Ok(())
    }
}

/// Adds or replaces a Service in the form in which KKP exposes API servers.
fn put(api: &KubeApi, name: &str, host: &str, target: SocketAddr) {
    const NAMESPACE: &str = "soak";
    const PORT: &str = "secure";
    let mapping = json!({ PORT: host }).to_string();
    let service = service(NAMESPACE, name)
        .port(PORT, 443)
        .annotation("nodeport-proxy.k8s.io/expose", "SNI,Tunneling")
        .annotation("nodeport-proxy.k8s.io/port-mapping", &mapping);
    api.put("services", service);
    let endpoints = slice(NAMESPACE, name)
        .port(PORT, target.port())
        .ready(&target.ip().to_string());
    api.put("endpointslices", endpoints);
}
