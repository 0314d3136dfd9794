//! A live cluster with both tunnels, switched back and forth under load.

use std::net::{Ipv4Addr, SocketAddrV4};
use std::path::Path;
use std::sync::Arc;
use std::sync::atomic::{AtomicUsize, Ordering};
use std::time::Duration;

use culvert_kit::check;
use culvert_kit::pki::Pki;
use culvert_server::switch::status::{Progress, Status};
use culvert_server::tunnel::{Health, Kind};
use culvert_tests::interop::Interop;
use culvert_tests::metrics::Metrics;
use culvert_tests::namespace::alone;
use culvert_tests::openvpn::cluster::{POD, RAW, SEED};
use culvert_tests::openvpn::scenario::Dial as _;
use culvert_tests::openvpn::{Cluster, OpenVpn, scenario};
use culvert_tests::topology::PATIENCE;
use culvert_tests::{Program, eventually};
use tokio::io::copy_bidirectional;
use tokio::task::{JoinHandle, JoinSet};
use tokio::time::{MissedTickBehavior, interval, timeout};
use tokio_util::sync::CancellationToken;

use crate::agent::{Agent, platform_file};
use crate::ours::readable;
use crate::server::{Server, user_cluster};

/// Number of switches.
const SWITCHES: usize = 20;
/// Number of finished dials to wait for after each switch.
const DIALS: usize = 100;
/// Number of streams of each tunnel that must survive all switches.
const LONG: usize = 10;
/// Port of the server for agents.
const AGENTS: u16 = 8091;

const TO: SocketAddrV4 = SocketAddrV4::new(POD, RAW);

/// A server with both tunnels.
pub(crate) struct Both {
    pub server: Arc<Server>,
    admin: String,
}

impl Both {
    pub(crate) async fn start(cluster: &Cluster, front_end: &str) -> Self {
        let pki = Pki::create(&cluster.dir("agents")).unwrap();
        let admin = cluster.dir("culvert").join("admin.sock");
        let flags = [
            format!("--cluster-cert={}", pki.cluster.cert.display()),
            format!("--cluster-key={}", pki.cluster.key.display()),
            format!("--agent-port={AGENTS}"),
            format!("--admin-uds={}", admin.display()),
            "--tunnel-mode=konnectivity".to_owned(),
            "--openvpn-listen=tcp::1194".to_owned(),
        ];
        let flags: Vec<&str> = flags.iter().map(String::as_str).collect();
        let server = Server::start(cluster, front_end, &flags).await;
        Self {
            server: Arc::new(server),
            admin: format!("--admin-uds={}", admin.display()),
        }
    }

    pub(crate) async fn culvert(&self, args: &[&str]) -> String {
        let args = args.iter().copied().chain([self.admin.as_str()]);
        let mut program = Program::spawn("culvert", args, &[]);
        let status = program.wait_exit(PATIENCE).await;
        let log = program.log();
        assert!(status.success(), "{log}");
        log
    }

    async fn status(&self) -> Status {
        let text = self.culvert(&["status", "--json"]).await;
        serde_json::from_str(&text).unwrap()
    }

    async fn shows(&self, what: &str, wanted: impl Fn(&Status) -> bool) {
        eventually(what, PATIENCE, async || {
            let status = self.status().await;
            wanted(&status)
                .then_some(())
                .ok_or_else(|| format!("{status:?}"))
        })
        .await;
    }

    async fn switch(&self, to: Kind, drain: &str) {
        let drain = format!("--drain={drain}");
        self.culvert(&["switch", "--to", name(to), &drain]).await;
        self.new_dials_go_to(to).await;
    }

    pub(crate) async fn new_dials_go_to(&self, to: Kind) {
        let goes = |status: &Status| status.new_dials.first() == Some(&to);
        self.shows(&format!("new dials go to {to:?}"), goes).await;
    }

    /// Waits until both tunnels are healthy.
    pub(crate) async fn is_healthy(&self) {
        let healthy = |status: &Status| {
            let mut tunnels = status.tunnels.iter();
            tunnels.len() == 2 && tunnels.all(|tunnel| tunnel.health == Health::Healthy)
        };
        self.shows("both tunnels are up", healthy).await;
    }

    async fn opened(&self, tunnel: Kind) -> f64 {
        self.dials(tunnel, "opened").await
    }

    /// Returns the number of dials of a tunnel with this outcome.
    pub(crate) async fn dials(&self, tunnel: Kind, outcome: &str) -> f64 {
        let answer = self.server.get("/metrics").await.unwrap();
        let (_, page) = answer.split_once("\r\n\r\n").unwrap();
        let labels = [("tunnel", name(tunnel)), ("outcome", outcome)];
        let metrics = Metrics::parse(page).unwrap();
        metrics
            .value("culvert_tunnel_dials_total", &labels)
            .unwrap_or_default()
    }
}

fn name(tunnel: Kind) -> &'static str {
    match tunnel {
        Kind::Konnectivity => "konnectivity",
        Kind::Openvpn => "openvpn",
    }
}

/// Relays agents to the server from a local address that is in the server's certificate.
pub(crate) fn way(cluster: &Cluster) -> JoinHandle<()> {
    let near = SocketAddrV4::new(Ipv4Addr::LOCALHOST, AGENTS);
    let listener = cluster.client.listen(near);
    let client = cluster.client.clone();
    tokio::spawn(async move {
        let mut connections = JoinSet::new();
        while let Ok((mut agent, _)) = listener.accept().await {
            let server = client.connect(SocketAddrV4::new(SEED, AGENTS)).await;
            connections.spawn(async move { copy_bidirectional(&mut agent, &mut server?).await });
        }
    })
}

/// Returns the flags that an agent needs to connect to the server.
pub(crate) fn konnectivity(cluster: &Cluster) -> [String; 3] {
    let ca = cluster.dir("agents").join("ca.crt");
    [
        format!("--ca-cert={}", ca.display()),
        "--proxy-server-host=127.0.0.1".to_owned(),
        format!("--proxy-server-port={AGENTS}"),
    ]
}

/// Load of up to 200 new connections per second. A slow machine opens fewer.
struct Load {
    done: Arc<AtomicUsize>,
    stop: CancellationToken,
    task: JoinHandle<Vec<String>>,
}

impl Load {
    fn start(server: &Arc<Server>) -> Self {
        let (done, stop) = (Arc::<AtomicUsize>::default(), CancellationToken::new());
        let (server, count, stopped) = (server.clone(), done.clone(), stop.clone());
        let task = tokio::spawn(async move {
            let mut tick = interval(Duration::from_millis(5));
            tick.set_missed_tick_behavior(MissedTickBehavior::Delay);
            let (mut dials, mut failed) = (JoinSet::new(), Vec::new());
            while stopped.run_until_cancelled(tick.tick()).await.is_some() {
                let (server, count) = (server.clone(), count.clone());
                dials.spawn(async move {
                    let stream = server.dial(TO).await.map_err(|error| error.to_string())?;
                    let exchange = timeout(PATIENCE, check::echo(stream, 2, 500)).await;
                    let exchange = exchange.map_err(|_| "stuck".to_owned())?;
                    exchange.map_err(|error| error.to_string())?;
                    count.fetch_add(1, Ordering::Relaxed);
                    Ok::<_, String>(())
                });
                while let Some(dial) = dials.try_join_next() {
                    failed.extend(dial.unwrap().err());
                }
            }
            failed.extend(dials.join_all().await.into_iter().filter_map(Result::err));
            failed
        });
        Self { done, stop, task }
    }

    fn done(&self) -> usize {
        self.done.load(Ordering::Relaxed)
    }

    async fn more(&self, count: usize) {
        let before = self.done();
        eventually("more dials are done", PATIENCE, async || {
            let more = self.done() - before;
            (more >= count).then_some(()).ok_or(more)
        })
        .await;
    }
}

async fn open(streams: &mut JoinSet<std::io::Result<()>>, both: &Both, stop: &CancellationToken) {
    for _ in 0..LONG {
        let stream = both.server.dial(TO).await.unwrap();
        streams.spawn(scenario::long(stream, stop.clone()));
    }
}

/// Switches back and forth, and asserts that no dial and no stream fails. Then switches with a drain that ends
/// before the open connections.
async fn switches(both: &Both) {
    both.is_healthy().await;
    let (stop, mut streams) = (CancellationToken::new(), JoinSet::new());
    let load = Load::start(&both.server);
    open(&mut streams, both, &stop).await;
    for number in 0..SWITCHES {
        let to = [Kind::Openvpn, Kind::Konnectivity][number % 2];
        both.switch(to, "5m").await;
        if number == 0 {
            open(&mut streams, both, &stop).await;
        }
        let before = both.opened(to).await;
        load.more(DIALS).await;
        let opened = both.opened(to).await - before;
        assert!(opened >= DIALS as f64 / 2.0, "{to:?}: {opened}");
        if let Some(ended) = streams.try_join_next() {
            panic!("a stream ended after {number} switches: {ended:?}");
        }
    }
    load.stop.cancel();
    assert_eq!(load.task.await.unwrap(), Vec::<String>::new());
    let left = |status: &Status| matches!(status.switch, Progress::Draining { left: LONG, .. });
    both.shows("the other tunnel drains", left).await;
    stop.cancel();
    for ended in streams.join_all().await {
        ended.unwrap();
    }
    let settled = |status: &Status| status.switch == Progress::Settled;
    both.shows("the switch is settled", settled).await;

    let (stop, mut streams) = (CancellationToken::new(), JoinSet::new());
    open(&mut streams, both, &stop).await;
    both.switch(Kind::Openvpn, "1s").await;
    both.shows("the remaining streams are closed", settled)
        .await;
    for ended in streams.join_all().await {
        ended.unwrap_err();
    }
    let stream = both.server.dial(TO).await.unwrap();
    check::echo(stream, 1, 1000).await.unwrap();
}

#[test]
fn switching_a_cluster_of_stock_programs_loses_no_connection() {
    alone(async || {
        let (Some(openvpn), Some(interop)) = (OpenVpn::get(), Interop::get()) else {
            return;
        };
        let cluster = Cluster::start().await;
        let both = Both::start(&cluster, "grpc").await;
        let way = way(&cluster);
        let mut user = user_cluster(openvpn, &cluster, "user");
        let program: &Path = &interop.proxy_agent;
        let _agent = cluster.client.spawn(program, &konnectivity(&cluster));
        user.is_up().await;
        switches(&both).await;
        way.abort();
    });
}

#[test]
fn switching_a_cluster_with_one_agent_loses_no_connection() {
    alone(async || {
        if OpenVpn::get().is_none() {
            return;
        }
        let cluster = Cluster::start().await;
        let both = Both::start(&cluster, "http-connect").await;
        let way = way(&cluster);
        let config = platform_file(&cluster, "");
        let config = format!("--openvpn-config={}", config.display());
        readable(&[&cluster.dir("agents")]);
        let flags = konnectivity(&cluster);
        let flags = [&config].into_iter().chain(&flags).map(String::as_str);
        let flags: Vec<&str> = flags.collect();
        let mut agent = Agent::start(&cluster.client, &flags);
        agent.is_ready(true).await;
        switches(&both).await;
        agent.has_no_privileges();
        way.abort();
    });
}
