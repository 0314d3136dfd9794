//! Dials to nodes by ExternalIP and by name, through the OpenVPN tunnel. Both programs are ours. The nodes
//! have addresses of this machine, and the agent treats 127.0.0.0/16 as the network of the nodes.

use std::net::{IpAddr, Ipv4Addr, SocketAddr};
use std::time::Duration;

use culvert_kit::client::{self, FrontEnd};
use culvert_kit::pki::Pki;
use culvert_tests::kube_api::{Fault, Gone, KubeApi, node};
use culvert_tests::metrics::{http_get, scrape};
use culvert_tests::ports::Ports;
use culvert_tests::{Mode, Program, Topology, Transport, eventually};
use serde_json::{Value, json};
use tempfile::TempDir;
use tokio::io::{AsyncReadExt as _, AsyncWriteExt as _};
use tokio::net::TcpListener;
use tokio::task::JoinSet;

use crate::support::LIMIT;

/// KKP's routes: pods, Services and the node access network.
const ROUTES: &str = "--openvpn-route=172.25.0.0/16,10.240.16.0/20,10.254.0.0/16";

/// A server with a watch on Nodes, and the server's OpenVPN client.
struct Tunnel {
    api: KubeApi,
    server: Program,
    agent: Program,
    front_end: FrontEnd,
    health: SocketAddr,
    /// Port on which all nodes listen.
    port: u16,
    nodes: JoinSet<()>,
    dir: TempDir,
}

impl Tunnel {
    /// Starts both programs and a Kubernetes API, which `prepare` fills first.
    async fn start(prepare: impl FnOnce(&KubeApi)) -> Self {
        Self::start_with(prepare, &[], &[]).await
    }

    /// Starts like [`start`](Self::start), with additional flags of both programs.
    async fn start_with(
        prepare: impl FnOnce(&KubeApi),
        server_flags: &[&str],
        agent_flags: &[&str],
    ) -> Self {
        let dir = tempfile::tempdir().unwrap();
        let agents = Pki::create(dir.path()).unwrap();
        let pki = Pki::create_openvpn(dir.path()).unwrap();
        let clients = dir.path().join("clients");
        std::fs::create_dir(&clients).unwrap();
        let iroute = "iroute 10.254.0.0 255.255.0.0\n";
        std::fs::write(clients.join("user-cluster-client"), iroute).unwrap();
        let api = KubeApi::start().await;
        prepare(&api);
        let mut ports = Ports::default();
        let [
            listen,
            agent,
            admin,
            health,
            agent_admin,
            agent_health,
            port,
        ] = [(); 7].map(|()| ports.next_port());
        let socket = dir.path().join("front.sock");
        let more = |flags: &[&str]| flags.iter().copied().map(String::from).collect::<Vec<_>>();
        let flags = [
            "--mode=http-connect".to_owned(),
            "--server-port=0".to_owned(),
            format!("--uds-name={}", socket.display()),
            format!("--cluster-cert={}", agents.cluster.cert.display()),
            format!("--cluster-key={}", agents.cluster.key.display()),
            format!("--agent-port={agent}"),
            format!("--admin-port={admin}"),
            format!("--health-port={health}"),
            "--tunnel-mode=openvpn".to_owned(),
            format!("--openvpn-listen=tcp:127.0.0.1:{listen}"),
            format!("--openvpn-ca={}", pki.ca.display()),
            format!("--openvpn-cert={}", pki.server.cert.display()),
            format!("--openvpn-key={}", pki.server.key.display()),
            format!("--openvpn-client-config-dir={}", clients.display()),
            ROUTES.to_owned(),
            "--openvpn-watch-nodes".to_owned(),
            format!("--kubeconfig={}", api.kubeconfig(dir.path()).display()),
        ];
        let flags = [&flags[..], &more(server_flags)].concat();
        let server = Program::spawn("culvert-server", &flags, &[]);
        server.wait_for_log("serving OpenVPN", LIMIT).await;
        let flags = [
            format!("--openvpn-remote=127.0.0.1:{listen}"),
            format!("--openvpn-ca={}", pki.ca.display()),
            format!("--openvpn-cert={}", pki.user_cluster.cert.display()),
            format!("--openvpn-key={}", pki.user_cluster.key.display()),
            "--openvpn-nodes=127.0.0.0/16".to_owned(),
            format!("--admin-server-port={agent_admin}"),
            format!("--health-server-port={agent_health}"),
        ];
        let flags = [&flags[..], &more(agent_flags)].concat();
        let client = Program::spawn("culvert-agent", &flags, &[]);
        let health = SocketAddr::from((Ipv4Addr::LOCALHOST, health));
        eventually("the client is connected", LIMIT, async || {
            let answer = http_get(health, "/readyz").await;
            let (status, _, body) = answer.map_err(|error| format!("{error:#}"))?;
            status.is_success().then_some(()).ok_or(format!("{body:?}"))
        })
        .await;
        Self {
            api,
            server,
            agent: client,
            front_end: FrontEnd::ConnectUds(socket),
            health,
            port,
            nodes: JoinSet::new(),
            dir,
        }
    }

    /// Listens as the node with this InternalIP. Every client receives the InternalIP.
    async fn serve(&mut self, internal: &str) {
        let ip: IpAddr = internal.parse().unwrap();
        let listener = TcpListener::bind((ip, self.port)).await.unwrap();
        let answer = internal.to_owned();
        self.nodes.spawn(async move {
            while let Ok((mut stream, _)) = listener.accept().await {
                stream.write_all(answer.as_bytes()).await.ok();
            }
        });
    }

    /// Dials a node by address or name, and returns the InternalIP sent by the node.
    async fn dial(&self, host: &str) -> Result<String, String> {
        let target = format!("{host}:{}", self.port);
        let stream = client::connect(&self.front_end, &target, LIMIT).await;
        let mut stream = stream.map_err(|error| error.to_string())?;
        let mut answer = String::new();
        let read = stream.read_to_string(&mut answer).await;
        read.map_err(|error| error.to_string())?;
        Ok(answer)
    }

    async fn reaches(&self, host: &str, internal: &str) {
        let what = format!("{host} reaches {internal}");
        eventually(&what, LIMIT, async || {
            let answer = self.dial(host).await;
            (answer.as_deref() == Ok(internal))
                .then_some(())
                .ok_or_else(|| format!("{answer:?}"))
        })
        .await;
    }

    async fn comes_to_refuse(&self, host: &str) {
        let what = format!("{host} is refused");
        eventually(&what, LIMIT, async || self.refusal(host).await).await;
    }

    /// Checks that a dial is refused. Without an entry in the list of nodes, the server treats the address as
    /// an InternalIP, and nothing listens there.
    async fn refusal(&self, host: &str) -> Result<(), String> {
        match self.dial(host).await {
            Err(text) if text.contains("connection refused") => Ok(()),
            other => Err(format!("{other:?}")),
        }
    }

    async fn shows(&self, up: f64, nodes: f64) {
        eventually(&format!("up {up}, {nodes} nodes"), LIMIT, async || {
            let page = scrape(self.health)
                .await
                .map_err(|error| format!("{error:#}"))?;
            let series = ["culvert_openvpn_node_watch_up", "culvert_openvpn_nodes"];
            let shown = series.map(|name| page.value(name, &[]));
            (shown == [Some(up), Some(nodes)])
                .then_some(())
                .ok_or_else(|| format!("{shown:?}"))
        })
        .await;
    }

    /// Returns the number of occurrences of a text in the log.
    fn told(&self, text: &str) -> usize {
        self.server.log().matches(text).count()
    }

    /// Waits until a text occurs in the log `times` times. A line may arrive later than a metric that the server set after
    /// the line.
    async fn logs(&self, text: &str, times: usize) {
        eventually(&format!("{text:?} {times} times"), LIMIT, async || {
            let told = self.told(text);
            (told == times).then_some(()).ok_or(told)
        })
        .await;
    }

    /// Waits until the API has received `times` more requests.
    async fn asks(&self, times: usize) {
        let asked = || self.api.requests().len();
        let before = asked();
        eventually(
            &format!("{times} more requests to the API"),
            LIMIT,
            async || {
                let now = asked() - before;
                (now >= times).then_some(()).ok_or(now)
            },
        )
        .await;
    }
}

fn one() -> Value {
    node(
        "one",
        &[
            ("Hostname", "one"),
            ("InternalIP", "127.0.7.9"),
            ("ExternalIP", "203.0.113.10"),
            ("ExternalIP", "2001:db8::10"),
            ("ExternalDNS", "one.nodes.example"),
        ],
    )
}

fn two(external: &str) -> Value {
    node(
        "two",
        &[
            ("InternalIP", "127.0.7.10"),
            ("ExternalIP", external),
            ("Hostname", "two"),
        ],
    )
}

#[tokio::test]
async fn nodes_are_reached_by_external_ip_and_by_name() {
    let mut tunnel = Tunnel::start(|api| {
        api.put("nodes", one());
    })
    .await;
    tunnel.serve("127.0.7.9").await;
    tunnel.serve("127.0.7.10").await;
    for host in [
        "203.0.113.10",
        "one",
        "ONE.nodes.example.",
        "127.0.7.9",
        "10.254.7.9",
    ] {
        tunnel.reaches(host, "127.0.7.9").await;
    }
    tunnel.shows(1.0, 1.0).await;
    tunnel.refusal("203.0.113.11").await.unwrap();

    // A Node is added, changed and deleted.
    tunnel.api.put("nodes", two("203.0.113.11"));
    tunnel.reaches("203.0.113.11", "127.0.7.10").await;
    tunnel.reaches("two", "127.0.7.10").await;
    tunnel.api.put("nodes", two("203.0.113.12"));
    tunnel.reaches("203.0.113.12", "127.0.7.10").await;
    tunnel.comes_to_refuse("203.0.113.11").await;
    tunnel.shows(1.0, 2.0).await;
    tunnel.api.delete("nodes", "", "two");
    tunnel.comes_to_refuse("203.0.113.12").await;

    // A newer Node claims an ExternalIP of an older Node, and an address of a Service.
    let mut late = node(
        "late",
        &[
            ("InternalIP", "127.0.7.10"),
            ("ExternalIP", "203.0.113.10"),
            ("ExternalIP", "10.240.16.1"),
            ("ExternalIP", "203.0.113.13"),
        ],
    );
    late["metadata"]["creationTimestamp"] = json!("2100-01-01T00:00:00Z");
    tunnel.api.put("nodes", late.clone());
    tunnel.reaches("203.0.113.13", "127.0.7.10").await;
    tunnel.reaches("203.0.113.10", "127.0.7.9").await;
    let service = tunnel.dial("10.240.16.1").await.unwrap_err();
    assert!(!service.contains("connection refused"), "{service}");
    late["metadata"]["labels"] = json!({"changes": "nothing"});
    tunnel.api.put("nodes", late);
    tunnel.api.put("nodes", two("203.0.113.11"));
    tunnel.reaches("203.0.113.11", "127.0.7.10").await;
    for problem in [
        "203.0.113.10 also belongs to Node one",
        "ExternalIP 10.240.16.1 is",
    ] {
        assert_eq!(tunnel.told(problem), 1, "{problem}");
    }
}

#[tokio::test]
async fn nodes_stay_known_while_the_api_is_gone() {
    let mut tunnel = Tunnel::start(|api| {
        api.put("nodes", one());
        api.fault(Fault::status(403));
    })
    .await;
    tunnel.serve("127.0.7.9").await;
    tunnel.serve("127.0.7.10").await;
    // Before the first list, dials work as without a list.
    tunnel.asks(2).await;
    tunnel.reaches("127.0.7.9", "127.0.7.9").await;
    tunnel.refusal("203.0.113.10").await.unwrap();
    tunnel.shows(0.0, 0.0).await;
    let log = tunnel.server.log();
    assert_eq!(tunnel.told("cannot watch Nodes"), 1, "{log}");
    assert_eq!(tunnel.told("error with 403"), 0, "{log}");
    assert_eq!(tunnel.told("watching Nodes again"), 0, "{log}");

    tunnel.api.clear_faults();
    tunnel.reaches("203.0.113.10", "127.0.7.9").await;
    tunnel.shows(1.0, 1.0).await;
    tunnel.logs("watching Nodes again", 1).await;

    // Retries start quickly again after a watch has been up for a while.
    tokio::time::sleep(Duration::from_secs(4)).await;
    tunnel.api.fault(Fault::refuse());
    tunnel.api.cut();
    tunnel.shows(0.0, 1.0).await;
    // Changes during the outage are not seen, and known Nodes stay reachable.
    tunnel.api.put("nodes", two("203.0.113.11"));
    tokio::time::sleep(Duration::from_secs(4)).await;
    tunnel.reaches("203.0.113.10", "127.0.7.9").await;
    tunnel.reaches("one", "127.0.7.9").await;
    tunnel.refusal("203.0.113.11").await.unwrap();
    // The cut watch and the refused retries have different errors, and each new error is logged.
    let log = tunnel.server.log();
    assert!(tunnel.told("cannot watch Nodes") <= 4, "{log}");
    assert!(tunnel.told("of --kubeconfig") > 0, "{log}");
    // The Kubernetes client logs each failed request itself.
    assert_eq!(tunnel.told("failed with error"), 0, "{log}");

    tunnel.api.expire(Gone::Http);
    tunnel.api.clear_faults();
    tunnel.reaches("203.0.113.11", "127.0.7.10").await;
    tunnel.reaches("203.0.113.10", "127.0.7.9").await;
    tunnel.shows(1.0, 2.0).await;
    tunnel.logs("watching Nodes again", 2).await;

    // A cut watch resumes without a failure.
    tunnel.api.cut();
    tunnel.asks(1).await;
    tunnel.shows(1.0, 2.0).await;
    assert_eq!(tunnel.told("watching Nodes again"), 2);
    // Recovery after a failure is logged even if no Node has changed. The first two refused watches are repeated.
    tokio::time::sleep(Duration::from_secs(4)).await;
    tunnel
        .api
        .fault(Fault::status(500).on("watch=true").times(3));
    tunnel.api.cut();
    tunnel.logs("watching Nodes again", 3).await;
    tunnel.shows(1.0, 2.0).await;
}

#[tokio::test]
async fn panic_in_a_long_lived_task_ends_the_process() {
    let tunnel = Tunnel::start(|_| {}).await;
    let listen = "--openvpn-listen=tcp:";
    let of_server = tunnel.server.args().into_iter();
    let of_server = of_server.map(|arg| match arg.strip_prefix(listen) {
        Some(address) => format!("{listen}{address},udp:{address}"),
        None => arg,
    });
    let mut of_server: Vec<String> = of_server.collect();
    let socket = tunnel.dir.path().join("admin.sock");
    of_server.push(format!("--admin-uds={}", socket.display()));
    let of_agent = tunnel.agent.args();
    let Tunnel { server, agent, .. } = tunnel;
    server.kill();
    agent.kill();
    let of_both = ["metrics", "health", "admin", "reload"];
    let own = [
        "front end",
        "agents",
        "admin socket",
        "switch",
        "OpenVPN over TCP",
        "OpenVPN over UDP",
        "OpenVPN certificates",
        "Nodes",
    ];
    let tasks = [&of_both[..], &own].concat();
    Program::panics("culvert-server", &of_server, &tasks, LIMIT).await;
    let tasks = [&of_both[..], &["OpenVPN"]].concat();
    Program::panics("culvert-agent", &of_agent, &tasks, LIMIT).await;
    let mut topology = Topology::simple(Mode::HttpConnect, Transport::Uds).await;
    let args = topology.agent(0).args();
    topology.kill_agent(0);
    Program::panics("culvert-agent", &args, &["servers"], LIMIT).await;
}

#[tokio::test]
async fn denied_nodes_are_not_reached_by_any_address_or_name() {
    let prepare = |api: &KubeApi| {
        api.put("nodes", one());
        api.put("nodes", two("203.0.113.11"));
    };
    let server = ["--deny-destinations=127.0.7.9"];
    let agent = ["--deny-destinations=127.0.7.10"];
    let mut tunnel = Tunnel::start_with(prepare, &server, &agent).await;
    tunnel.shows(1.0, 2.0).await;
    tunnel.serve("127.0.7.9").await;
    tunnel.serve("127.0.7.10").await;
    tunnel.serve("127.0.7.11").await;
    for host in ["127.0.7.9", "203.0.113.10", "one", "one.nodes.example"] {
        let error = tunnel.dial(host).await.unwrap_err();
        assert!(error.contains("denied by the server"), "{host}: {error}");
    }
    // An OpenVPN client answers with ICMP, which has no text.
    for host in ["127.0.7.10", "203.0.113.11", "two"] {
        let error = tunnel.dial(host).await.unwrap_err();
        assert!(error.contains("no route to host"), "{host}: {error}");
    }
    tunnel.agent.wait_for_log("dial denied", LIMIT).await;
    assert_eq!(tunnel.dial("127.0.7.11").await.as_deref(), Ok("127.0.7.11"));
}
