#![allow(clippy::unwrap_used)]

use std::collections::HashMap;
use std::time::Duration;

use culvert_konnectivity::excess::OverflowBudget;
use culvert_konnectivity::identifiers::Identifiers;
use metrics::Gauge;

use super::*;
use crate::backend::agent::{AgentStream, Carrier, Hello, Limits};

/// A registry with agents whose connections carry nothing.
struct World {
    registry: Arc<Registry>,
    agents: Vec<(Registration, Arc<AgentStream>)>,
}

impl World {
    fn new(strategies: &[Strategy]) -> Self {
        Self::with_limit(strategies, usize::MAX)
    }

    fn with_limit(strategies: &[Strategy], connections: usize) -> Self {
        let metrics = Arc::new(ServerMetrics::new(strategies).unwrap());
        let limits = AgentLimits {
            connections,
            ..AgentLimits::NONE
        };
        Self {
            registry: Registry::new(strategies.to_vec(), limits, metrics),
            agents: Vec::new(),
        }
    }

    fn connect(&mut self, id: &str, identifiers: &str) -> Arc<AgentStream> {
        let hello = Hello {
            agent_id: id.into(),
            half_close: false,
            identifiers: Identifiers::parse(identifiers).unwrap(),
        };
        let limits = Limits {
            connection_bytes: 1,
            stall: Duration::from_secs(1),
            excess: OverflowBudget::new(1, Gauge::noop(), Gauge::noop()),
        };
        let metrics = self.registry.metrics.clone();
        let (stream, _) = AgentStream::new(hello, limits, Carrier::default(), metrics);
        let place = self
            .registry
            .place(&id.into(), MAX_IDENTITY_CONNECTIONS, &stream.hello)
            .unwrap();
        let registration = self
            .registry
            .register(AgentConnection::Packet(stream.clone()), place);
        self.agents.push((registration, stream.clone()));
        stream
    }

    fn leave(&mut self, id: &str) {
        self.agents
            .retain(|(_, stream)| stream.hello.agent_id != id);
    }

    fn chosen(&self, address: &str) -> Option<Chosen> {
        let scope = self.registry.scope(address)?;
        self.registry.choose(&scope, &[])
    }

    /// Returns the id of the agent that gets a dial, if all equal choices are the same agent.
    fn dial(&self, address: &str) -> Option<String> {
        let ids: Vec<_> = (0..20).map(|_| self.chosen(address).map(id_of)).collect();
        let first = ids.first().cloned().flatten();
        assert!(ids.iter().all(|id| *id == first), "{address}: {ids:?}");
        first
    }

    fn ready(&self) -> Vec<String> {
        let page = self.registry.metrics.registry().render();
        let lines = page.lines();
        let mut lines: Vec<_> = lines
            .filter_map(|line| line.strip_prefix("konnectivity_network_proxy_server_ready_backend"))
            .map(ToOwned::to_owned)
            .collect();
        lines.sort_unstable();
        lines
    }
}

fn id_of(chosen: Chosen) -> String {
    chosen.agent.hello().agent_id.clone()
}

#[test]
fn destination_host_decides_in_any_notation() {
    let mut world = World::new(&[Strategy::DestHost]);
    world.connect("a", "ipv4=10.0.0.1&host=node-a");
    world.connect("b", "ipv6=fd00::b&host=Node-B.");
    world.connect("c", "default-route=true&cidr=10.0.0.0/8");
    for (address, id) in [
        ("10.0.0.1:10250", Some("a")),
        ("[::ffff:10.0.0.1]:10250", Some("a")),
        ("NODE-A:443", Some("a")),
        ("[FD00:0::b]:1", Some("b")),
        ("node-b:443", Some("b")),
        // Agents for other networks are no fallback.
        ("10.0.0.2:10250", None),
        ("node-c:443", None),
    ] {
        assert_eq!(world.dial(address).as_deref(), id, "{address}");
    }
}

#[test]
fn strategies_are_tried_in_order() {
    let mut world = World::new(&[Strategy::DestHost, Strategy::DefaultRoute]);
    assert_eq!(world.dial("10.0.0.1:1"), None);
    world.connect("node", "ipv4=10.0.0.1");
    assert_eq!(world.dial("10.0.0.2:1"), None);
    world.connect("route", "default-route=true");
    world.connect("other", "host=x");
    assert_eq!(world.dial("10.0.0.1:1").as_deref(), Some("node"));
    assert_eq!(world.dial("10.0.0.2:1").as_deref(), Some("route"));
    world.leave("node");
    assert_eq!(world.dial("10.0.0.1:1").as_deref(), Some("route"));
}

#[test]
fn retry_never_leaves_the_scope_of_the_dial() {
    let mut world = World::new(&[Strategy::DestHost, Strategy::Default]);
    let node = world.connect("node", "ipv4=10.0.0.1");
    world.connect("other", "");
    let scope = world.registry.scope("10.0.0.1:1").unwrap();
    assert!(!world.registry.has_other(&scope, &[node.serial]));
    assert!(world.registry.choose(&scope, &[node.serial]).is_none());
    world.connect("second", "ipv4=10.0.0.1");
    assert!(world.registry.has_other(&scope, &[node.serial]));
    let second = world.registry.choose(&scope, &[node.serial]).unwrap();
    assert_eq!(id_of(second), "second");
}

#[test]
fn longest_network_decides() {
    let mut world = World::new(&[Strategy::Cidr, Strategy::DefaultRoute]);
    world.connect("wide", "cidr=10.0.0.0/8&cidr=fd00::/8");
    world.connect("narrow", "cidr=10.1.2.99/24&cidr=fd00:1::/32");
    world.connect("all", "cidr=0.0.0.0/0");
    world.connect("route", "default-route=1");
    for (address, id) in [
        ("10.1.2.3:1", "narrow"),
        ("10.1.3.3:1", "wide"),
        ("192.0.2.1:1", "all"),
        ("[fd00:1::1]:1", "narrow"),
        ("[fd01::1]:1", "wide"),
        ("[2001:db8::1]:1", "route"),
        // Only agents resolve names.
        ("kubelet:1", "route"),
    ] {
        assert_eq!(world.dial(address).as_deref(), Some(id), "{address}");
    }
    world.leave("narrow");
    assert_eq!(world.dial("10.1.2.3:1").as_deref(), Some("wide"));
}

#[test]
fn metrics_count_the_keys_of_each_strategy() {
    use Strategy::{Cidr, Default, DefaultRoute, DestHost};
    let mut world = World::new(&[Default, DestHost, DefaultRoute, Cidr]);
    world.connect("a", "ipv4=10.0.0.1&host=x&default-route=true");
    world.connect("a", "ipv4=10.0.0.1");
    world.connect("b", "host=x&host=y&cidr=10.0.0.0/8");
    assert_eq!(
        world.ready(),
        [
            "_connections 1",
            "s{proxy_strategy=\"cidr\"} 1",
            "s{proxy_strategy=\"default\"} 2",
            "s{proxy_strategy=\"defaultRoute\"} 1",
            "s{proxy_strategy=\"destHost\"} 3",
        ]
        .map(str::to_owned)
    );
    world.agents.clear();
    assert!(world.ready().iter().all(|line| line.ends_with(" 0")));
    let agents = world.registry.agents.lock();
    assert!(agents.by_host.is_empty() && agents.by_network.is_empty());
}

#[test]
fn peers_have_the_first_identifiers_and_the_number_of_the_others() {
    let mut world = World::new(&[Strategy::DestHost]);
    let hosts: Vec<_> = (0..20).map(|n| format!("host=h{n:02}")).collect();
    world.connect("many", &format!("{}&default-route=1", hosts.join("&")));
    world.connect("none", "");
    let mut peers = world.registry.peers();
    peers.sort_by(|a, b| a.name.cmp(&b.name));
    let shown: Vec<_> = peers.iter().map(Peer::describe_identifiers).collect();
    let many = "default-route=true, host=h00, host=h01, host=h02, host=h03, host=h04, host=h05, host=h06, and 13 more";
    assert_eq!(shown, [many, ""]);
}

#[test]
fn health_follows_the_best_agent_of_all_strategies() {
    let mut world = World::new(&[Strategy::DestHost, Strategy::DefaultRoute]);
    assert_eq!(world.registry.health(), Health::Absent);
    // No strategy uses this agent.
    world.connect("a", "");
    assert_eq!(world.registry.health(), Health::Absent);
    world.connect("b", "default-route=true");
    assert_eq!(world.registry.health(), Health::Healthy);
}

#[test]
fn agent_with_the_fewest_connections_gets_the_dial() {
    let mut world = World::new(&[Strategy::Default]);
    for id in ["a", "b", "c"] {
        world.connect(id, "");
    }
    let mut open: Vec<Chosen> = Vec::new();
    for round in 1..=50 {
        for _ in 0..3 {
            open.push(world.chosen("x:1").unwrap());
        }
        let mut counts = HashMap::<_, usize>::new();
        for chosen in &open {
            *counts.entry(&chosen.agent.hello().agent_id).or_default() += 1;
        }
        assert!(counts.values().all(|count| *count == round), "{counts:?}");
    }
    // An agent that has lost its connections gets the next dials.
    open.retain(|chosen| chosen.agent.hello().agent_id != "b");
    assert_eq!(world.dial("x:1").as_deref(), Some("b"));
}

#[test]
fn load_of_many_agents_stays_even() {
    let mut world = World::new(&[Strategy::Default]);
    for n in 0..100 {
        world.connect(&n.to_string(), "");
    }
    let open: Vec<Chosen> = (0..5_000).map(|_| world.chosen("x:1").unwrap()).collect();
    let loads = |world: &World| -> Vec<usize> {
        let agents = world.registry.agents.lock();
        agents.all.entries().map(|entry| entry.load.get()).collect()
    };
    // Random choices alone would exceed 70 with near certainty.
    assert!(loads(&world).iter().all(|load| (40..=60).contains(load)));
    drop(open);
    assert!(loads(&world).iter().all(|load| *load == 0));
}

#[test]
fn draining_agents_come_last_also_among_many() {
    for count in [2, 100] {
        let mut world = World::new(&[Strategy::Default]);
        let streams: Vec<_> = (0..count)
            .map(|n| world.connect(&n.to_string(), ""))
            .collect();
        let (last, others) = streams.split_last().unwrap();
        for stream in others {
            stream.abandon();
        }
        let expected = last.hello.agent_id.clone();
        assert_eq!(world.dial("x:1"), Some(expected));
        last.abandon();
        assert_eq!(world.registry.health(), Health::Draining);
        assert!(world.chosen("x:1").is_some());
    }
}

#[test]
fn oldest_connection_of_an_agent_is_used() {
    let mut world = World::new(&[Strategy::Default]);
    let first = world.connect("a", "");
    world.connect("a", "");
    assert_eq!(world.chosen("x:1").unwrap().agent.serial(), first.serial);
    world.agents.remove(0);
    assert_ne!(world.chosen("x:1").unwrap().agent.serial(), first.serial);
}

#[test]
fn full_agent_gets_no_dial_until_a_connection_ends() {
    let mut world = World::with_limit(&[Strategy::Default], 2);
    for n in 0..6 {
        world.connect(&n.to_string(), "");
    }
    let mut open: Vec<_> = (0..12).map(|_| world.chosen("x:1").unwrap()).collect();
    assert!(world.chosen("x:1").is_none());
    open.pop();
    assert!(world.chosen("x:1").is_some());
}

#[test]
fn full_agent_is_no_other_agent_for_a_dial() {
    let mut world = World::with_limit(&[Strategy::Default], 1);
    let first = world.connect("first", "").serial;
    world.connect("second", "");
    assert!(world.registry.has_other(&Scope::All, &[first]));
    let second = world.registry.choose(&Scope::All, &[first]).unwrap();
    assert!(!world.registry.has_other(&Scope::All, &[first]));
    drop(second);
    assert!(world.registry.has_other(&Scope::All, &[first]));
}

#[test]
fn clients_that_arrive_before_their_dials_are_spread_over_the_shards_of_agents() {
    let runtimes = [(); 3].map(|()| tokio::runtime::Builder::new_current_thread().build());
    let mut world = World::new(&[Strategy::Default]);
    assert!(world.registry.seat().is_none());
    // Two agents on the first shard, one on the second, none on the third.
    let of_agents = [
        ("a", &runtimes[0]),
        ("b", &runtimes[0]),
        ("c", &runtimes[1]),
    ];
    let [a, b, c] = of_agents.map(|(id, runtime)| {
        let _on = runtime.as_ref().unwrap().enter();
        world.connect(id, "")
    });
    let shards = runtimes.each_ref().map(|runtime| {
        let _on = runtime.as_ref().unwrap().enter();
        Shards::current().unwrap()
    });
    let seats: Vec<_> = (0..99).map(|_| world.registry.seat().unwrap()).collect();
    let count = |shard| seats.iter().filter(|seat| seat.shard == shard).count();
    assert_eq!(shards.map(count), [66, 33, 0]);
    // The agents of the first shard drain, and then leave.
    let shard = |world: &World| world.registry.seat().map(|seat| seat.shard);
    a.abandon();
    b.abandon();
    assert_eq!(shard(&world), Some(shards[1]));
    c.abandon();
    assert!(shard(&world).is_some());
    world.leave("a");
    world.leave("b");
    assert_eq!(shard(&world), Some(shards[1]));
    world.leave("c");
    assert_eq!(shard(&world), None);
}
