//! Leases of servers: a server keeps its own and deletes expired ones, agents count the live ones. Both programs
//! are ours, and the Kubernetes API is a fake.

use std::path::Path;
use std::time::Duration;

use culvert_tests::kube_api::{Fault, Gone, KubeApi, server_lease};
use culvert_tests::metrics::{http_get, scrape};
use culvert_tests::{Executable, Mode, Program, Signal, Topology, Transport, eventually};
use rustix::process::{Pid, kill_process};
use serde_json::{Value, json};
use tempfile::TempDir;
use tokio::time::sleep;

use crate::scripts::Server;
use crate::searching::Lone;
use crate::support::*;

/// Time limit for the expiry of a lease: 30 s until the lease is expired, and 15 s until the next list.
const EXPIRY: Duration = Duration::from_secs(120);

const PAST: &str = "2001-01-01T00:00:00.000000Z";
const FUTURE: &str = "2999-01-01T00:00:00.000000Z";

/// A Kubernetes API and its kubeconfig file.
struct Kube {
    api: KubeApi,
    kubeconfig: String,
    _dir: TempDir,
}

impl Kube {
    async fn start() -> Self {
        let dir = tempfile::tempdir().unwrap();
        let api = KubeApi::start().await;
        let path = api.kubeconfig(dir.path());
        Self {
            api,
            kubeconfig: format!("--kubeconfig={}", path.display()),
            _dir: dir,
        }
    }

    fn put(&self, name: &str, renewed: &str) {
        self.api.put("leases", server_lease(name, renewed));
    }

    fn delete(&self, name: &str) {
        self.api.delete("leases", "kube-system", name);
    }

    fn lease(&self, name: &str) -> Option<Value> {
        self.api.get("leases", "kube-system", name)
    }

    /// Waits until exactly these leases exist.
    async fn has(&self, names: &[&str]) {
        eventually(&format!("the leases are {names:?}"), EXPIRY, async || {
            let found = self.api.names("leases", "kube-system");
            (found == names).then_some(()).ok_or(format!("{found:?}"))
        })
        .await;
    }

    /// Renews leases every second, forever: the first by a clock that shows the year 2000, the second by a clock that
    /// shows 2090.
    async fn renew(&self, names: &[&str; 2]) {
        for second in 0.. {
            for (year, name) in [2000, 2090].iter().zip(names) {
                let (minute, second) = (second / 60 % 60, second % 60);
                let renewed = format!("{year}-01-01T00:{minute:02}:{second:02}.000000Z");
                self.put(name, &renewed);
            }
            sleep(Duration::from_secs(1)).await;
        }
    }
}

/// Starts a server with a lease and without agents.
async fn server(kube: &Kube) -> Topology {
    let flags = ["--enable-lease-controller", &kube.kubeconfig];
    Topology::builder(Mode::Grpc, Transport::Uds)
        .server(Executable::Ours, &flags)
        .start()
        .await
}

fn name_of(server: usize) -> String {
    format!("konnectivity-proxy-server-server-{server}")
}

async fn server_keeps_its_lease_and_deletes_expired_ones() {
    let kube = Kube::start().await;
    kube.put("dead-future", FUTURE);
    kube.put("dead-past", PAST);
    let mut other = server_lease("other-label", PAST);
    other["metadata"]["labels"] = json!({"k8s-app": "something-else"});
    kube.api.put("leases", other);
    for status in [429, 500] {
        let fault = Fault::status(status).times(1);
        kube.api.fault(fault.clone().method("POST"));
        kube.api.fault(fault.method("DELETE"));
    }
    let mut topology = server(&kube).await;
    let own = name_of(0);
    let lease = eventually("the server has a lease", LIMIT, async || {
        kube.lease(&own).ok_or("no lease")
    })
    .await;
    assert_eq!(
        lease["metadata"]["labels"],
        json!({"k8s-app": "konnectivity-server"})
    );
    let first = &lease["spec"];
    assert_eq!(first["holderIdentity"], "server-0");
    assert_eq!(first["leaseDurationSeconds"], 30);
    assert_eq!(first["acquireTime"], Value::Null);
    let alive = ["alive-past", "alive-future"];
    let left = ["alive-future", "alive-past", &own, "other-label"];
    tokio::select! {
        () = kube.renew(&alive) => {}
        () = kube.has(&left) => {}
    }
    let renewed = kube.lease(&own).unwrap();
    assert_ne!(renewed["spec"]["renewTime"], first["renewTime"]);
    assert_eq!(renewed["metadata"]["uid"], lease["metadata"]["uid"]);

    server_shows(&topology, "culled_leases_count", &[], 2.0).await;
    let metrics = topology.server_metrics(0).await;
    let total = |name: &str, code: &str, reason: &str| {
        let labels = [("http_status_code", code), ("reason", reason)];
        value(&metrics, &server_name(name), &labels)
    };
    assert!(total("lease_list_total", "200", "") >= 3.0);
    assert_eq!(total("lease_delete_total", "200", ""), 2.0);
    assert_eq!(value(&metrics, "culvert_lease_kept", &[]), 1.0);
    assert_eq!(total("lease_delete_total", "429", "TooManyRequests"), 1.0);
    assert_eq!(total("lease_delete_total", "500", "InternalError"), 1.0);
    for name in ["lease_list_latency_seconds", "lease_delete_latency_seconds"] {
        let name = server_name(&format!("{name}_count"));
        assert!(
            value(&metrics, &name, &[("http_status_code", "200")]) >= 2.0,
            "{name}"
        );
    }
    topology.server(0).signal(Signal::TERM);
    assert!(topology.server(0).wait_exit(LIMIT).await.success());
    kube.has(&["alive-future", "alive-past", "other-label"])
        .await;
}

/// Starts an agent that counts leases, and a server that announces 5 servers.
async fn agent(kube: &Kube, more: &[&str]) -> (Lone, Server) {
    let mut lone = Lone::new();
    let server = Server::start(&lone.pki.cluster, &["a"], "5").await;
    let port = format!("--proxy-server-port={}", server.addr.port());
    let flags = [port.as_str(), "--count-server-leases", &kube.kubeconfig];
    lone.start(&[&flags, more].concat(), &[]);
    (lone, server)
}

async fn agent_counts_only_leases_whose_renewals_it_sees() {
    let kube = Kube::start().await;
    kube.put("dead-future", FUTURE);
    kube.put("dead-past", PAST);
    let (lone, _server) = agent(&kube, &[]).await;
    let follow = async {
        lone.shows("known_server_count", 4.0).await;
        let shown = agent_name("known_server_count");
        eventually("the dead leases expire", EXPIRY, async || {
            let metrics = scrape(lone.health).await.map_err(|it| it.to_string())?;
            let shown = value(&metrics, &shown, &[]);
            (shown == 2.0).then_some(()).ok_or(shown.to_string())
        })
        .await;
    };
    tokio::select! {
        () = kube.renew(&["alive-past", "alive-future"]) => {}
        () = follow => {}
    }
}

#[tokio::test]
async fn only_leases_without_renewals_expire_whatever_the_clocks_show() {
    tokio::join!(
        server_keeps_its_lease_and_deletes_expired_ones(),
        agent_counts_only_leases_whose_renewals_it_sees(),
    );
}

#[tokio::test]
async fn agent_follows_the_leases_by_a_watch() {
    let kube = Kube::start().await;
    for name in ["a", "b", "c"] {
        kube.put(name, PAST);
    }
    kube.api.fault(Fault::status(429).on("/leases").times(1));
    let (lone, mut server) = agent(&kube, &[]).await;
    // The announced number does not count.
    let _call = server.call().await;
    lone.shows("known_server_count", 3.0).await;
    let mut other = server_lease("other", PAST);
    other["metadata"]["labels"] = json!({"k8s-app": "something-else"});
    kube.api.put("leases", other);
    let mut elsewhere = server_lease("elsewhere", PAST);
    elsewhere["metadata"]["namespace"] = json!("default");
    kube.api.put("leases", elsewhere);
    kube.delete("b");
    lone.shows("known_server_count", 2.0).await;
    kube.put("d", FUTURE);
    kube.put("e", PAST);
    lone.shows("known_server_count", 4.0).await;

    for gone in [Gone::Http, Gone::Event] {
        kube.api.expire(gone);
        kube.api.cut();
        kube.delete("a");
        lone.shows("known_server_count", 3.0).await;
        kube.put("a", PAST);
        lone.shows("known_server_count", 4.0).await;
    }
    kube.api.fault(Fault::status(500).on("/leases").times(1));
    kube.api.cut();
    kube.delete("a");
    lone.shows("known_server_count", 3.0).await;

    let metrics = scrape(lone.health).await.unwrap();
    let total = |name: &str, code: &str, reason: &str| {
        let labels = [("http_response_code", code), ("reason", reason)];
        value(&metrics, &agent_name(name), &labels)
    };
    assert_eq!(value(&metrics, "culvert_leases_counted", &[]), 1.0);
    assert!(total("lease_lists_total", "200", "") >= 3.0);
    assert!(total("lease_watches_total", "200", "") >= 3.0);
    assert!(total("lease_watches_total", "410", "Expired") >= 1.0);
    assert_eq!(total("lease_lists_total", "429", "TooManyRequests"), 1.0);
    assert_eq!(total("lease_watches_total", "500", "InternalError"), 1.0);
    let latency = agent_name("lease_list_latency_seconds_count");
    assert!(value(&metrics, &latency, &[("http_response_code", "200")]) >= 3.0);
}

#[tokio::test]
async fn larger_number_counts_with_max_and_selectors_may_contain_sets() {
    let kube = Kube::start().await;
    let labeled = |name: &str, app: &str, tier: &str| {
        let mut lease = server_lease(name, PAST);
        lease["metadata"]["labels"] = json!({"k8s-app": app, "tier": tier});
        kube.api.put("leases", lease);
    };
    labeled("a", "x", "front");
    labeled("b", "y", "front");
    labeled("c", "y", "back");
    labeled("d", "z", "front");
    let flags = [
        "--server-count-source=max",
        "--lease-label=k8s-app in (x, y),tier!=back",
    ];
    let (lone, mut server) = agent(&kube, &flags).await;
    // The server announces 5.
    let _call = server.call().await;
    lone.shows("known_server_count", 5.0).await;
    for index in 0..4 {
        labeled(&format!("more-{index}"), "x", "front");
    }
    lone.shows("known_server_count", 6.0).await;
    for index in 0..4 {
        kube.delete(&format!("more-{index}"));
    }
    lone.shows("known_server_count", 5.0).await;
}

#[tokio::test]
async fn unreachable_api_delays_neither_health_nor_servers() {
    let kube = Kube::start().await;
    kube.put("a", PAST);
    kube.put("b", PAST);
    kube.api.fault(Fault::refuse());
    let (mut lone, mut server) = agent(&kube, &[]).await;
    lone.program()
        .wait_for_log("cannot watch Leases", LIMIT)
        .await;
    let _call = server.call().await;
    lone.shows("open_server_connections", 1.0).await;
    lone.shows("known_server_count", 1.0).await;
    for path in ["/healthz", "/readyz"] {
        let (status, _, _) = http_get(lone.health, path).await.unwrap();
        assert!(status.is_success(), "{path}: {status}");
    }
    let metrics = scrape(lone.health).await.unwrap();
    assert_eq!(value(&metrics, "culvert_leases_counted", &[]), 0.0);
    kube.api.clear_faults();
    lone.shows("known_server_count", 2.0).await;
    lone.program()
        .wait_for_log("watching Leases of servers again", LIMIT)
        .await;
}

#[tokio::test]
async fn server_without_the_api_works_and_stops() {
    let kube = Kube::start().await;
    kube.api.fault(Fault::refuse());
    let mut topology = server(&kube).await;
    let log = "cannot get Lease kube-system/konnectivity-proxy-server-server-0";
    topology.server(0).wait_for_log(log, LIMIT).await;
    topology.server(0).signal(Signal::TERM);
    assert!(topology.server(0).wait_exit(LIMIT).await.success());
}

async fn agent_has(topology: &Topology, connected: f64, known: f64) {
    for (name, expected) in [
        ("open_server_connections", connected),
        ("known_server_count", known),
    ] {
        let name = agent_name(name);
        eventually(&format!("{name} is {expected}"), EXPIRY, async || {
            let shown = value(&topology.agent_metrics(0).await, &name, &[]);
            (shown == expected).then_some(()).ok_or(shown.to_string())
        })
        .await;
    }
}

#[tokio::test]
async fn agent_follows_servers_that_come_and_go() {
    let kube = Kube::start().await;
    let mut topology = Topology::builder(Mode::Grpc, Transport::Uds)
        .servers(3)
        .server_args(&[
            "--enable-lease-controller",
            &kube.kubeconfig,
            "--server-count=1",
        ])
        .agents(1)
        .agent_args(&["--count-server-leases", &kube.kubeconfig])
        .start()
        .await;
    let names = [0, 1, 2].map(name_of);
    let names = names.each_ref().map(String::as_str);
    kube.has(&names).await;
    agent_has(&topology, 3.0, 3.0).await;
    for server in [1, 2] {
        topology.server(server).signal(Signal::TERM);
        assert!(topology.server(server).wait_exit(LIMIT).await.success());
        topology.kill_server(server);
    }
    kube.has(&names[..1]).await;
    agent_has(&topology, 1.0, 1.0).await;
    for server in [1, 2] {
        topology.start_server(server).await;
    }
    kube.has(&names).await;
    agent_has(&topology, 3.0, 3.0).await;
    // A killed server leaves its lease, which the other servers delete.
    topology.kill_server(2);
    agent_has(&topology, 2.0, 2.0).await;
    kube.has(&names[..2]).await;
}

#[tokio::test]
async fn panic_in_the_task_of_leases_ends_the_process() {
    let kube = Kube::start().await;
    let mut topology = server(&kube).await;
    let args = topology.server(0).args();
    topology.kill_server(0);
    Program::panics("culvert-server", &args, &["leases"], LIMIT).await;
    let (mut lone, _server) = agent(&kube, &[]).await;
    let args = lone.program().args();
    lone.kill();
    Program::panics("culvert-agent", &args, &["leases"], LIMIT).await;
}

/// Returns server and agent with flags for leases, and the topology, which keeps the files of the flags. Both programs have
/// ended.
async fn programs_with_leases() -> (Topology, [(&'static str, Vec<String>); 2]) {
    let mut topology = Topology::simple(Mode::Grpc, Transport::Uds).await;
    let mut of_server = topology.server(0).args();
    let mut of_agent = topology.agent(0).args();
    topology.kill_server(0);
    topology.kill_agent(0);
    of_server.push("--enable-lease-controller".to_owned());
    of_agent.push("--count-server-leases".to_owned());
    (
        topology,
        [("culvert-server", of_server), ("culvert-agent", of_agent)],
    )
}

#[tokio::test]
async fn leases_need_an_account() {
    let kube = Kube::start().await;
    let missing = Path::new(kube.kubeconfig.trim_start_matches("--kubeconfig="));
    std::fs::write(missing, "nonsense: [").unwrap();
    let (_topology, programs) = programs_with_leases().await;
    for (program, args) in programs {
        let args = [args, vec![kube.kubeconfig.clone()]].concat();
        let mut program = Program::spawn(program, args, &[]);
        assert_eq!(program.wait_exit(LIMIT).await.code(), Some(1));
        let log = program.log();
        assert!(log.contains("not a valid kubeconfig"), "{log}");
    }
}

#[tokio::test]
async fn signal_ends_a_program_that_waits_for_a_credential_plugin() {
    let folder = tempfile::tempdir().unwrap();
    let (kubeconfig, started) = (folder.path().join("kubeconfig"), folder.path().join("pid"));
    let plugin = json!({
        "apiVersion": "client.authentication.k8s.io/v1",
        "command": "sh",
        "args": ["-c", format!("echo $$ >{}; exec sleep 60", started.display())],
        "interactiveMode": "Never",
    });
    let text = json!({
        "apiVersion": "v1",
        "kind": "Config",
        "current-context": "c",
        "contexts": [{"name": "c", "context": {"cluster": "c", "user": "u"}}],
        "clusters": [{"name": "c", "cluster": {"server": "https://127.0.0.1:1"}}],
        "users": [{"name": "u", "user": {"exec": plugin}}],
    });
    std::fs::write(&kubeconfig, text.to_string()).unwrap();
    let (_topology, programs) = programs_with_leases().await;
    for (program, args) in programs {
        let kubeconfig = format!("--kubeconfig={}", kubeconfig.display());
        let args = [args, vec![kubeconfig]].concat();
        let mut program = Program::spawn(program, args, &[]);
        let plugin = eventually("the plugin", LIMIT, async || {
            let text = std::fs::read_to_string(&started).unwrap_or_default();
            let pid = text.trim().parse::<i32>().ok();
            pid.and_then(Pid::from_raw).ok_or("no process id")
        })
        .await;
        program.signal(Signal::TERM);
        let status = program.wait_exit(LIMIT).await;
        kill_process(plugin, Signal::KILL).unwrap();
        std::fs::remove_file(&started).unwrap();
        assert_eq!(status.code(), Some(1));
        let log = program.log();
        assert!(log.contains("SIGTERM during the start"), "{log}");
    }
}

#[tokio::test]
async fn server_pushes_the_number_of_leases_to_agents_that_count_none() {
    let kube = Kube::start().await;
    let flags = ["--enable-lease-controller", &kube.kubeconfig];
    let builder = Topology::builder(Mode::Grpc, Transport::Uds);
    let builder = builder.server(Executable::Ours, &flags);
    let topology = builder.agents(1).start().await;
    kube.has(&[&name_of(0)]).await;
    agent_shows(&topology, "known_server_count", &[], 1.0).await;
    let others = ["other-past", "other-future"];
    tokio::select! {
        () = kube.renew(&others) => {}
        () = agent_shows(&topology, "known_server_count", &[], 3.0) => {}
    }
}
