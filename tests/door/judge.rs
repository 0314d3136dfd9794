//! Comparison with Envoy: the same client runs against Envoy and against our front door.
//!
//! Envoy has the configuration of KKP's control plane. Each row has the expected result at the client or at the
//! endpoint: one result for both proxies, or one result for each. docs/compatibility.md gives the reasons for
//! the differences.
//!
//! | module | content |
//! |---|---|
//! | [`clients`], [`endpoints`] | clients and endpoints that report results |
//! | [`names`] | TLS by server name: known and unknown names |
//! | [`answers`] | answers to CONNECT requests |
//! | [`ends`] | half closes and resets on every listener |
//! | [`limits`] | idle timeouts, circuit breakers, endpoints that do not accept |
//! | [`changes`] | a new route while connections are open |
//! | [`node`] | requests from a node to a seed |
//! | [`stats`] | health and metrics |

mod clients;
mod endpoints;

mod answers;
mod changes;
mod ends;
mod limits;
mod names;
mod node;
mod stats;

use std::collections::BTreeMap;
use std::net::{Ipv4Addr, SocketAddr};

use culvert_tests::envoy::{Envoy, RunningEnvoy, Seed, Settings};
use culvert_tests::ports::Ports;

use crate::support::{Door, Upstream};

/// Addresses of one of the two proxies.
#[derive(Clone, Debug)]
pub(crate) struct Side {
    pub sni: SocketAddr,
    pub tunnel: SocketAddr,
    pub stats: SocketAddr,
    /// Node port addresses by upstream name.
    pub node_ports: BTreeMap<String, SocketAddr>,
}

/// Envoy and our front door with the same routes.
pub(crate) struct Pair {
    pub envoy: Side,
    pub ours: Side,
    pub running: RunningEnvoy,
    pub door: Door,
    /// Admin listener of our front door.
    admin: SocketAddr,
    _ports: Ports,
}

/// Returns an upstream that is reachable by server name and by CONNECT.
pub(crate) fn exposed(name: &str, endpoint: SocketAddr) -> Upstream {
    Upstream::new(&format!("demo/{name}"), endpoint)
        .server_name(&server_name(name))
        .authority(&authority(name))
}

pub(crate) fn server_name(name: &str) -> String {
    format!("{name}.example.com")
}

pub(crate) fn authority(name: &str) -> String {
    format!("{name}.demo.svc.cluster.local:443")
}

impl Pair {
    /// Starts both proxies. If Envoy is not installed, prints a line to stderr and returns `None`.
    pub(crate) async fn start(upstreams: &[Upstream]) -> Option<Self> {
        Self::start_with(upstreams, Settings::default()).await
    }

    pub(crate) async fn start_with(upstreams: &[Upstream], settings: Settings) -> Option<Self> {
        let envoy = Envoy::get()?;
        let mut ports = Ports::default();
        let mut seed = Seed::new(&mut ports);
        seed.settings = settings;
        // Both proxies listen on the same address, so Envoy gets other numbers for the node ports.
        let local = |port| SocketAddr::from((Ipv4Addr::LOCALHOST, port));
        let (mut theirs, mut own) = (BTreeMap::new(), BTreeMap::new());
        for upstream in upstreams {
            add(&mut seed, upstream);
            for port in &upstream.node_ports {
                let other = ports.next_port();
                seed.node_ports.insert(other, upstream.name.clone());
                theirs.insert(upstream.name.clone(), local(other));
                own.insert(upstream.name.clone(), local(*port));
            }
        }
        let running = envoy.start(&seed.bootstrap()).await;
        let admin = local(ports.next_port());
        let mut flags = flags(&settings);
        flags.push(format!("-envoy-admin-port={}", admin.port()));
        let flags: Vec<&str> = flags.iter().map(String::as_str).collect();
        let door = Door::start_with(upstreams, &flags).await;
        Some(Self {
            envoy: Side {
                sni: seed.sni,
                tunnel: seed.tunnel,
                stats: seed.stats,
                node_ports: theirs,
            },
            ours: Side {
                sni: door.sni,
                tunnel: door.tunneling,
                stats: door.stats,
                node_ports: own,
            },
            running,
            door,
            admin,
            _ports: ports,
        })
    }

    /// Returns the address of the admin listener.
    pub(crate) fn admin(&self, side: &Side) -> SocketAddr {
        match side.stats == self.ours.stats {
            true => self.admin,
            false => self.running.admin,
        }
    }

    /// Runs `look` against Envoy, and then against our front door.
    pub(crate) async fn see<T>(&self, look: impl AsyncFn(&Side) -> T) -> [T; 2] {
        [look(&self.envoy).await, look(&self.ours).await]
    }

    /// Runs `look` against both proxies at the same time; saves time in slow checks.
    pub(crate) async fn see_together<T>(&self, look: impl AsyncFn(&Side) -> T) -> [T; 2] {
        let (envoy, ours) = tokio::join!(look(&self.envoy), look(&self.ours));
        [envoy, ours]
    }
}

/// Adds the names, authorities and endpoints of an upstream to a seed.
pub(crate) fn add(seed: &mut Seed, upstream: &Upstream) {
    let cluster = &upstream.name;
    for name in &upstream.server_names {
        seed.server_names.insert(name.clone(), cluster.clone());
    }
    for authority in &upstream.authorities {
        seed.authorities.insert(authority.clone(), cluster.clone());
    }
    seed.clusters
        .insert(cluster.clone(), upstream.endpoints.clone());
}

/// Returns KKP's settings as flags of our front door.
fn flags(settings: &Settings) -> Vec<String> {
    let idle = [
        ("sni-listener", settings.sni_idle),
        ("tunneling-connection", settings.connection_idle),
        ("tunneling-stream", settings.stream_idle),
    ];
    let idle = idle.into_iter().filter_map(|(what, time)| {
        let time = time?;
        Some(format!("--{what}-idle-timeout={time}"))
    });
    let most = settings.max_connections;
    idle.chain(most.map(|most| format!("--max-connections={most}")))
        .collect()
}

/// Compares observed with expected results row by row. A drop panics with all wrong rows.
#[derive(Default)]
pub(crate) struct Verdicts(Vec<String>);

impl Verdicts {
    /// Expects the same result at both proxies.
    pub(crate) fn same(&mut self, case: &str, seen: [String; 2], both: &str) {
        self.differ(case, seen, both, both);
    }

    /// Expects different results on purpose.
    pub(crate) fn differ(
        &mut self,
        case: &str,
        [envoy, ours]: [String; 2],
        at_envoy: &str,
        at_ours: &str,
    ) {
        for (door, seen, known) in [("envoy", envoy, at_envoy), ("ours", ours, at_ours)] {
            if seen != known {
                self.0
                    .push(format!("{case}, {door}: {seen:?} instead of {known:?}"));
            }
        }
    }
}

impl Drop for Verdicts {
    fn drop(&mut self) {
        let quiet = self.0.is_empty() || std::thread::panicking();
        assert!(quiet, "{}", self.0.join("\n"));
    }
}
