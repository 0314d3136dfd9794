//! The real Prometheus with the alerts, beside the real programs.

use std::collections::{BTreeMap, BTreeSet};
use std::fmt::Write as _;
use std::net::{Ipv4Addr, SocketAddr};
use std::path::Path;
use std::time::Duration;

use anyhow::ensure;
use culvert_tests::charts::{deploy, root};
use culvert_tests::metrics::{http_get, scrape};
use culvert_tests::ports::Ports;
use culvert_tests::{Executable, Mode, Program, Topology, Transport, eventually};
use serde_json::Value;
use tempfile::TempDir;

use super::{all_expressions, dashboards, expressions, labels, prometheus};

/// Time limit for each step. Prometheus reads the programs every second.
const LIMIT: Duration = Duration::from_secs(60);

/// Panels without data in this test, because a program exports a metric at its first use or in another mode.
const EMPTY: [&str; 16] = [
    "agent: Failed dials",
    "agent: Leases",
    "agent: OpenVPN attempts to connect",
    "agent: OpenVPN traffic",
    "agent: OpenVPN tunnel",
    "front-door: Certificates",
    "front-door: Failed reloads",
    "front-door: Load balancer",
    "front-door: Time of CONNECT streams",
    "node-tunnel: Certificates",
    "node-tunnel: Failed reloads",
    "server: Failed dials",
    "server: OpenVPN clients",
    "server: OpenVPN handshakes",
    "server: OpenVPN packets that were dropped",
    "server: OpenVPN traffic",
];

/// A front door and a node tunnel.
struct Door {
    _programs: [Program; 2],
    stats: [SocketAddr; 2],
}

impl Door {
    async fn start(folder: &Path, ports: &mut Ports) -> Self {
        let mut next = || SocketAddr::from((Ipv4Addr::LOCALHOST, ports.next_port()));
        let [sni, tunneling, door, node, listen, endpoint] = [(); 6].map(|()| next());
        let routes = folder.join("door.yaml");
        let authority = "web.demo.svc.cluster.local:80";
        let text = format!(
            "upstreams:\n- {{name: demo/web, endpoints: ['{endpoint}'], authorities: ['{authority}']}}\n"
        );
        std::fs::write(&routes, text).unwrap();
        let door_args = [
            format!("--config={}", routes.display()),
            "--bind-address=127.0.0.1".to_owned(),
            format!("--envoy-sni-port={}", sni.port()),
            format!("--envoy-tunneling-port={}", tunneling.port()),
            format!("--envoy-stats-port={}", door.port()),
        ];
        let node_args = [
            format!("--proxy={tunneling}"),
            "--stats-address=127.0.0.1".to_owned(),
            format!("--stats-port={}", node.port()),
            format!("--listen={listen}={authority}"),
        ];
        let programs = [
            Program::spawn("culvert-nodeport-proxy", door_args, &[]),
            Program::spawn("culvert-node-tunnel", node_args, &[]),
        ];
        let stats = [door, node];
        for stats in stats {
            eventually("the program serves metrics", LIMIT, async || {
                scrape(stats).await
            })
            .await;
        }
        Self {
            _programs: programs,
            stats,
        }
    }
}

/// A running Prometheus that reads the programs every second.
struct Prometheus {
    _program: Program,
    address: SocketAddr,
}

impl Prometheus {
    fn start(
        program: &Path,
        folder: &Path,
        ports: &mut Ports,
        targets: &BTreeMap<&str, SocketAddr>,
    ) -> Self {
        let mut config = format!(
            "global: {{scrape_interval: 1s, scrape_timeout: 1s, evaluation_interval: 1s}}\nrule_files: ['{}']\nscrape_configs:\n",
            deploy("monitoring/rules.yaml").display()
        );
        for (pod, target) in targets {
            let labels = format!("{{namespace: seed, pod: {pod}}}");
            writeln!(
                config,
                "- {{job_name: {pod}, static_configs: [{{targets: ['{target}'], labels: {labels}}}]}}"
            )
            .unwrap();
        }
        let file = folder.join("prometheus.yaml");
        std::fs::write(&file, config).unwrap();
        let address = SocketAddr::from((Ipv4Addr::LOCALHOST, ports.next_port()));
        let args = [
            format!("--config.file={}", file.display()),
            format!("--storage.tsdb.path={}", folder.join("data").display()),
            format!("--web.listen-address={address}"),
            "--log.level=warn".to_owned(),
        ];
        Self {
            _program: Program::spawn(program, args, &[]),
            address,
        }
    }

    /// Returns the data of an answer of the API.
    async fn get(&self, path: &str) -> anyhow::Result<Value> {
        let (status, _, body) = http_get(self.address, path).await?;
        let text = String::from_utf8_lossy(&body).into_owned();
        ensure!(status.is_success(), "{path}: {status}: {text}");
        let answer: Value = serde_json::from_str(&text)?;
        ensure!(answer["status"] == "success", "{path}: {text}");
        Ok(answer["data"].clone())
    }

    /// Evaluates an expression.
    async fn query(&self, expression: &str) -> anyhow::Result<Vec<Value>> {
        let encoded = expression.bytes().fold(String::new(), |mut text, byte| {
            let _ = write!(text, "%{byte:02X}");
            text
        });
        let data = self.get(&format!("/api/v1/query?query={encoded}")).await?;
        Ok(data["result"].as_array().cloned().unwrap_or_default())
    }

    /// Returns the panels of all dashboards without data.
    async fn empty_panels(&self) -> anyhow::Result<BTreeSet<String>> {
        let mut empty = BTreeSet::new();
        for (dashboard, content) in dashboards() {
            for (panel, expressions) in expressions(&content) {
                let mut count = 0;
                for expression in expressions {
                    count += self.query(&expression).await?.len();
                }
                if count == 0 {
                    empty.insert(format!("{dashboard}: {panel}"));
                }
            }
        }
        Ok(empty)
    }

    /// Checks that the labels and their values in all expressions exist. Those of series that appear at their first use are
    /// in the documents.
    async fn knows_all_labels(&self) {
        let files = ["docs/compatibility.md", "docs/operations.md"];
        let text = files.map(|path| std::fs::read_to_string(root().join(path)).unwrap());
        let documents = text.concat();
        let words = async |path: &str| {
            let data = self.get(path).await.unwrap();
            let words = data.as_array().unwrap().iter();
            let words = words.map(|word| word.as_str().unwrap().to_owned());
            words.collect::<BTreeSet<String>>()
        };
        let known = words("/api/v1/labels").await;
        for expression in all_expressions() {
            for (label, values) in labels(&expression) {
                let is_known =
                    |label| known.contains(label) || documents.contains(&format!("`{label}`"));
                assert!(is_known(label), "{label} in {expression}");
                let found = words(&format!("/api/v1/label/{label}/values")).await;
                for value in values.into_iter().filter(|value| *value != ".*") {
                    let is_known =
                        found.contains(value) || documents.contains(&format!("`{value}`"));
                    assert!(is_known, "{label}={value} in {expression}");
                }
            }
        }
    }

    /// Returns the names of alerts whose expression is true now.
    async fn alerts(&self) -> anyhow::Result<BTreeSet<String>> {
        let data = self.get("/api/v1/alerts").await?;
        let alerts = data["alerts"].as_array().into_iter().flatten();
        let names = alerts.map(|alert| alert["labels"]["alertname"].as_str().unwrap().to_owned());
        Ok(names.collect())
    }
}

#[tokio::test]
async fn prometheus_evaluates_alerts_and_dashboards_beside_the_programs() {
    let Some(program) = prometheus("prometheus") else {
        return;
    };
    let folder = TempDir::new().unwrap();
    let mut ports = Ports::default();
    let mut topology = Topology::builder(Mode::HttpConnect, Transport::Uds)
        .server(Executable::Ours, &[])
        .agent(Executable::Ours, &[])
        .start()
        .await;
    let door = Door::start(folder.path(), &mut ports).await;
    let targets = BTreeMap::from([
        ("server", topology.server_health(0)),
        ("agent", topology.agent_health(0)),
        ("door", door.stats[0]),
        ("node", door.stats[1]),
    ]);
    let prometheus = Prometheus::start(&program, folder.path(), &mut ports, &targets);
    eventually("Prometheus has read all programs", LIMIT, async || {
        let query = "count(count_over_time(culvert_build_info[1m]) > 4)";
        let found = prometheus.query(query).await?;
        let count = found
            .first()
            .map_or("0", |it| it["value"][1].as_str().unwrap());
        ensure!(count == "4", "{count} programs");
        Ok(())
    })
    .await;

    eventually("all other panels have data", LIMIT, async || {
        let empty = prometheus.empty_panels().await?;
        ensure!(empty.iter().eq(EMPTY), "without data: {empty:#?}");
        Ok(())
    })
    .await;
    prometheus.knows_all_labels().await;

    let rules = prometheus.get("/api/v1/rules").await.unwrap();
    for group in rules["groups"].as_array().unwrap() {
        for rule in group["rules"].as_array().unwrap() {
            assert_eq!(rule["health"], "ok", "{rule}");
        }
    }
    eventually("no alert begins", LIMIT, async || {
        let alerts = prometheus.alerts().await?;
        ensure!(alerts.is_empty(), "{alerts:?}");
        Ok(())
    })
    .await;

    topology.kill_agent(0);
    eventually("the alerts about the agent begin", LIMIT, async || {
        let alerts = prometheus.alerts().await?;
        let wanted = "CulvertTunnelNotReady";
        ensure!(alerts.contains(wanted), "{alerts:?}");
        Ok(())
    })
    .await;
}
