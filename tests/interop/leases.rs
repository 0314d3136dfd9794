//! Leases between our programs and the stock programs, and the behaviour of the stock programs that
//! docs/compatibility.md describes. The Kubernetes API is a fake.

use std::net::{Ipv4Addr, SocketAddr};
use std::time::Duration;

use culvert_kit::pki::Pki;
use culvert_tests::interop::Interop;
use culvert_tests::kube_api::{Fault, KubeApi, Recorded, server_lease};
use culvert_tests::metrics::{http_get, scrape};
use culvert_tests::ports::Ports;
use culvert_tests::topology::Builder;
use culvert_tests::{Executable, Mode, Program, Signal, Topology, Transport, eventually};
use serde_json::{Value, json};
use tempfile::TempDir;

use crate::case::{LIMIT, Make, agent_value};

const PAST: &str = "2001-01-01T00:00:00.000000Z";
const FUTURE: &str = "2999-01-01T00:00:00.000000Z";

/// A Kubernetes API, and the flags for programs that use it.
struct Kube {
    api: KubeApi,
    flags: [String; 2],
    _dir: TempDir,
}

impl Kube {
    async fn start() -> Self {
        let dir = tempfile::tempdir().unwrap();
        let api = KubeApi::start().await;
        let kubeconfig = api.kubeconfig(dir.path());
        Self {
            api,
            flags: [
                format!("--kubeconfig={}", kubeconfig.display()),
                "--kube-api-content-type=application/json".to_owned(),
            ],
            _dir: dir,
        }
    }

    /// Returns the account's flags after `more`.
    fn with<'a>(&'a self, more: &[&'a str]) -> Vec<&'a str> {
        let account = self.flags.iter().map(String::as_str);
        more.iter().copied().chain(account).collect()
    }

    async fn has(&self, names: &[&str]) {
        self.has_within(LIMIT, names).await;
    }

    async fn has_within(&self, limit: Duration, names: &[&str]) {
        eventually(&format!("the leases are {names:?}"), limit, async || {
            let found = self.api.names("leases", "kube-system");
            (found == names).then_some(()).ok_or(format!("{found:?}"))
        })
        .await;
    }

    fn lease(&self, name: &str) -> Option<Value> {
        self.api.get("leases", "kube-system", name)
    }

    /// Starts two servers with leases, and one agent that counts leases. Each server announces only one server.
    /// Returns `None` without Go.
    async fn tunnel(&self, server: Make, agent: Make) -> Option<Topology> {
        let server = server.executable(|release| &release.proxy_server)?;
        let agent = agent.executable(|release| &release.proxy_agent)?;
        let flags = self.with(&["--enable-lease-controller", "--server-count=1"]);
        let builder = Topology::builder(Mode::Grpc, Transport::Uds);
        let builder = (0..2).fold(builder, |builder: Builder, _| {
            builder.server(server.clone(), &flags)
        });
        let flags = self.with(&["--count-server-leases"]);
        Some(builder.agent(agent, &flags).start().await)
    }
}

/// Time limit for the lease of a stopped stock server to disappear. A stock server does not stop its renewals before it
/// deletes its lease, so a renewal at this moment creates the lease again. It then expires after 30 s, and the other
/// server looks for expired leases every 15 s.
const COLLECTED: Duration = Duration::from_secs(30 + 15 + 15);

const NAMES: [&str; 2] = [
    "konnectivity-proxy-server-server-0",
    "konnectivity-proxy-server-server-1",
];

async fn known(topology: &Topology, expected: f64) {
    eventually(
        &format!("{expected} servers are known"),
        LIMIT,
        async || {
            let metrics = topology.agent_metrics(0).await;
            let known = agent_value(&metrics, "known_server_count");
            (known == expected).then_some(()).ok_or(known)
        },
    )
    .await;
}

/// Runs the servers of one make with the agent of another make.
async fn pair(server: Make, agent: Make) {
    let kube = Kube::start().await;
    // The agent connects to both servers, although each server announces one.
    let Some(mut topology) = kube.tunnel(server, agent).await else {
        return;
    };
    known(&topology, 2.0).await;
    kube.has(&NAMES).await;
    let lease = kube.lease(NAMES[0]).unwrap();
    let mut fields = lease["spec"].clone();
    let renewed = fields["renewTime"].take();
    assert!(renewed.is_string(), "{lease}");
    let expected =
        json!({"holderIdentity": "server-0", "leaseDurationSeconds": 30, "renewTime": null});
    assert_eq!(fields, expected);
    assert_eq!(
        lease["metadata"]["labels"],
        json!({"k8s-app": "konnectivity-server"})
    );
    // Servers of both makes renew within 15.6 s.
    eventually("the lease is renewed", LIMIT, async || {
        let lease = kube.lease(NAMES[0]).ok_or("no lease")?;
        (lease["spec"]["renewTime"] != renewed)
            .then_some(())
            .ok_or("unchanged")
    })
    .await;
    topology.server(1).signal(Signal::TERM);
    topology.server(1).wait_exit(LIMIT).await;
    topology.kill_server(1);
    let limit = match server {
        Make::Stock | Make::Release(_) => COLLECTED,
        Make::Ours => LIMIT,
    };
    kube.has_within(limit, &NAMES[..1]).await;
    known(&topology, 1.0).await;
    let metrics = topology.agent_metrics(0).await;
    // The stock agent counts its watches as lists.
    let watches = metrics.samples("konnectivity_network_proxy_agent_lease_watches_total");
    let watched: f64 = watches.map(|sample| sample.value).sum();
    assert_eq!(watched > 0.0, agent == Make::Ours);
}

#[tokio::test]
async fn our_agent_counts_the_leases_of_stock_servers() {
    pair(Make::Stock, Make::Ours).await;
}

#[tokio::test]
async fn stock_agent_counts_the_leases_of_our_servers() {
    pair(Make::Ours, Make::Stock).await;
}

/// The stock programs compare the times in leases with their own clocks.
#[tokio::test]
async fn stock_programs_judge_leases_by_their_own_clocks() {
    let Some(interop) = Interop::get() else {
        return;
    };
    let kube = Kube::start().await;
    kube.api.put("leases", server_lease("future", FUTURE));
    kube.api.put("leases", server_lease("past", PAST));
    let flags = kube.with(&["--enable-lease-controller"]);
    let _server = Topology::builder(Mode::Grpc, Transport::Uds)
        .server(Executable::At(interop.proxy_server.clone()), &flags)
        .start()
        .await;
    // A lease in the past is deleted at once, even if its server is alive. A lease in the future stays.
    kube.has(&["future", NAMES[0]]).await;
    let lone = StockAgent::start(&kube, interop, &[]);
    kube.api.put("leases", server_lease("past", PAST));
    lone.healthy().await;
    lone.knows(2.0).await;
}

/// The stock agent watches all leases of the namespace, and returns to a count of 1 without live leases.
#[tokio::test]
async fn stock_agent_knows_one_server_without_live_leases() {
    let Some(interop) = Interop::get() else {
        return;
    };
    let kube = Kube::start().await;
    for name in ["a", "b", "c"] {
        kube.api.put("leases", server_lease(name, FUTURE));
    }
    let lone = StockAgent::start(&kube, interop, &[]);
    lone.healthy().await;
    lone.knows(3.0).await;
    for name in ["a", "b", "c"] {
        kube.api.delete("leases", "kube-system", name);
    }
    lone.knows(1.0).await;
    let requests = kube.api.requests();
    let is_selective = |it: &Recorded| it.path.contains("labelSelector");
    assert!(
        !requests.is_empty() && !requests.iter().any(is_selective),
        "{requests:?}"
    );
}

/// The stock programs crash if a lease has no duration, and the stock agent accepts no sets of labels.
#[tokio::test]
async fn stock_programs_end_on_unusual_leases_and_selectors() {
    let Some(interop) = Interop::get() else {
        return;
    };
    let kube = Kube::start().await;
    let mut sets = StockAgent::start(&kube, interop, &["--lease-label=k8s-app in (a, b)"]);
    assert_eq!(sets.program.wait_exit(LIMIT).await.code(), Some(1));
    let mut lease = server_lease("a", FUTURE);
    lease["spec"]
        .as_object_mut()
        .unwrap()
        .remove("leaseDurationSeconds");
    kube.api.put("leases", lease);
    let mut lone = StockAgent::start(&kube, interop, &[]);
    assert_eq!(lone.program.wait_exit(LIMIT).await.code(), Some(2));
    let log = lone.program.log();
    assert!(log.contains("nil pointer dereference"), "{log}");
}

/// The health server of the stock agent waits for the first list of leases.
#[tokio::test]
async fn stock_agent_serves_no_health_without_the_api() {
    let Some(interop) = Interop::get() else {
        return;
    };
    let kube = Kube::start().await;
    kube.api.fault(Fault::refuse());
    let lone = StockAgent::start(&kube, interop, &[]);
    eventually("three requests have failed", LIMIT, async || {
        let failures = lone
            .program
            .log()
            .matches("Got a Retry-After response")
            .count();
        failures >= 3
    })
    .await;
    assert!(http_get(lone.health, "/healthz").await.is_err());
    kube.api.clear_faults();
    lone.healthy().await;
}

/// A stock agent that counts leases and finds no server.
struct StockAgent {
    program: Program,
    health: SocketAddr,
    _ports: Ports,
    _dir: TempDir,
}

impl StockAgent {
    fn start(kube: &Kube, interop: &Interop, more: &[&str]) -> Self {
        let dir = tempfile::tempdir().unwrap();
        let pki = Pki::create(dir.path()).unwrap();
        let mut ports = Ports::default();
        let [server, admin, health] = [(); 3].map(|()| ports.next_port());
        let mut args = vec![
            format!("--ca-cert={}", pki.ca.display()),
            format!("--proxy-server-port={server}"),
            format!("--admin-server-port={admin}"),
            "--health-server-host=127.0.0.1".to_owned(),
            format!("--health-server-port={health}"),
            "--count-server-leases".to_owned(),
        ];
        args.extend(kube.flags.iter().cloned());
        args.extend(more.iter().copied().map(String::from));
        Self {
            program: Program::spawn(&interop.proxy_agent, &args, &[]),
            health: (Ipv4Addr::LOCALHOST, health).into(),
            _ports: ports,
            _dir: dir,
        }
    }

    /// Waits until the agent looks for this number of servers.
    async fn knows(&self, expected: f64) {
        eventually(
            &format!("{expected} servers are known"),
            LIMIT,
            async || {
                let metrics = scrape(self.health).await.map_err(|it| it.to_string())?;
                let known = agent_value(&metrics, "known_server_count");
                (known == expected).then_some(()).ok_or(known.to_string())
            },
        )
        .await;
    }

    async fn healthy(&self) {
        eventually("the agent is healthy", LIMIT, async || {
            http_get(self.health, "/healthz").await
        })
        .await;
    }
}
