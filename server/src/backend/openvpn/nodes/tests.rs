#![allow(clippy::unwrap_used)]

use k8s_openapi::api::core::v1::{NodeAddress, NodeStatus};
use k8s_openapi::apimachinery::pkg::apis::meta::v1::Time;
use k8s_openapi::jiff::Timestamp;
use proptest::prelude::*;

use super::*;

/// Creates a Node object; `addresses` have the form `TYPE=ADDRESS`.
fn object(name: &str, created: i64, addresses: &[&str]) -> core::Node {
    let addresses = addresses.iter().map(|address| {
        let (kind, address) = address.split_once('=').unwrap();
        NodeAddress {
            type_: kind.to_owned(),
            address: address.to_owned(),
        }
    });
    let mut node = core::Node {
        status: Some(NodeStatus {
            addresses: Some(addresses.collect()),
            ..NodeStatus::default()
        }),
        ..core::Node::default()
    };
    node.metadata.name = Some(name.to_owned());
    let created = Timestamp::from_second(created).unwrap();
    node.metadata.creation_timestamp = Some(Time(created));
    node
}

fn node(name: &str, created: i64, addresses: &[&str]) -> Node {
    Node::of(object(name, created, addresses)).unwrap()
}

fn known(nodes: &[Node]) -> (Known, Vec<String>) {
    let direct = ["172.25.0.0/16", "10.240.16.0/20", "10.254.0.0/16"];
    let direct = direct.map(|network| network.parse().unwrap());
    Known::of(nodes.iter(), &direct)
}

fn dialed(known: &Known, address: &str) -> String {
    let named = known.named(address);
    let address = named.unwrap_or_else(|| address.parse().unwrap());
    known.internal(address).to_string()
}

#[test]
fn node_is_dialed_by_its_internal_ip_for_every_address_and_name() {
    let nodes = [
        node(
            "one",
            1,
            &[
                "Hostname=one",
                "ExternalIP=203.0.113.10",
                "ExternalIP=203.0.113.11",
                "ExternalIP=2001:db8::1",
                "InternalIP=fd00::1",
                "InternalIP=192.168.7.9",
                "InternalIP=192.168.8.9",
                "InternalDNS=one.internal.example.",
                "ExternalDNS=One.Example.com",
            ],
        ),
        node("two", 2, &["InternalIP=192.168.7.10", "Hostname=two"]),
    ];
    let (known, problems) = known(&nodes);
    assert_eq!((known.nodes, problems), (2, Vec::new()));
    for (address, through) in [
        ("203.0.113.10:10250", "192.168.7.9:10250"),
        ("203.0.113.11:9100", "192.168.7.9:9100"),
        ("one:10250", "192.168.7.9:10250"),
        ("ONE.internal.example:10250", "192.168.7.9:10250"),
        ("one.example.com.:10250", "192.168.7.9:10250"),
        ("two:1", "192.168.7.10:1"),
        // Not translated.
        ("192.168.7.9:10250", "192.168.7.9:10250"),
        ("192.168.8.9:10250", "192.168.8.9:10250"),
        ("203.0.113.12:10250", "203.0.113.12:10250"),
    ] {
        assert_eq!(dialed(&known, address), through, "{address}");
    }
    for unknown in ["three:1", "one", "one:", "one:65536", ":1", "", "[::1]:1"] {
        assert_eq!(known.named(unknown), None, "{unknown}");
    }
}

#[test]
fn node_without_ipv4_internal_ip_is_not_translated() {
    for addresses in [
        &[][..],
        &["ExternalIP=203.0.113.10", "Hostname=one"],
        &["InternalIP=fd00::1", "ExternalIP=203.0.113.10"],
        &["InternalIP=192.168.7", "InternalIP=192.168.007.9"],
    ] {
        let (known, problems) = known(&[node("one", 1, addresses)]);
        assert_eq!(known, Known::default(), "{addresses:?}");
        assert_eq!(problems, Vec::<String>::new());
    }
    assert_eq!(Node::of(core::Node::default()), None);
}

#[test]
fn name_of_a_node_without_addresses_cannot_be_claimed() {
    let owner = node("two", 2, &[]);
    let liar = node(
        "one",
        1,
        &["InternalIP=192.168.7.9", "Hostname=one", "InternalDNS=TWO"],
    );
    let (known, problems) = known(&[owner, liar]);
    assert_eq!(known.named("two:1"), None);
    assert_eq!(
        (known.nodes, dialed(&known, "one:1").as_str()),
        (1, "192.168.7.9:1")
    );
    let reported = "Node one: its name two also belongs to Node two, which has no InternalIP; the name is not translated";
    assert_eq!(problems, [reported]);
}

#[test]
fn older_node_wins_a_shared_address_or_name() {
    let older = node(
        "zebra",
        1,
        &[
            "InternalIP=192.168.7.9",
            "ExternalIP=203.0.113.10",
            "Hostname=shared",
        ],
    );
    let newer = node(
        "ant",
        2,
        &[
            "InternalIP=192.168.7.10",
            "ExternalIP=203.0.113.10",
            "Hostname=Shared",
            // A repeated address is not a problem.
            "ExternalIP=203.0.113.20",
            "ExternalIP=203.0.113.20",
        ],
    );
    for nodes in [
        [older.clone(), newer.clone()],
        [newer.clone(), older.clone()],
    ] {
        let (known, problems) = known(&nodes);
        assert_eq!(dialed(&known, "203.0.113.10:1"), "192.168.7.9:1");
        assert_eq!(dialed(&known, "shared:1"), "192.168.7.9:1");
        assert_eq!(dialed(&known, "203.0.113.20:1"), "192.168.7.10:1");
        assert_eq!(problems.len(), 2, "{problems:?}");
        assert!(
            problems.iter().all(|text| text.starts_with("Node ant: ")
                && text.contains("also belongs to Node zebra")),
            "{problems:?}"
        );
    }
    // After the older Node is deleted.
    let (known, problems) = known(&[newer]);
    assert_eq!(dialed(&known, "203.0.113.10:1"), "192.168.7.10:1");
    assert_eq!(problems, Vec::<String>::new());
}

#[test]
fn claims_do_not_redirect_pods_services_or_other_nodes() {
    let honest = node("honest", 2, &["InternalIP=192.168.7.9"]);
    let liar = node(
        "liar",
        1,
        &[
            "InternalIP=192.168.7.10",
            // Some platforms report the InternalIP as the ExternalIP.
            "ExternalIP=192.168.7.10",
            "ExternalIP=192.168.7.9",
            "ExternalIP=10.240.16.1",
            "ExternalIP=172.25.3.4",
            "ExternalIP=10.254.7.9",
            "Hostname=hook.default.svc",
            "InternalDNS=hook.default.SVC.cluster.local.",
            "ExternalDNS=localhost",
            "Hostname=10.240.16.1",
            "Hostname=",
        ],
    );
    assert_eq!(liar.names, Vec::<String>::new());
    let (known, problems) = known(&[honest, liar]);
    for address in [
        "192.168.7.9:1",
        "192.168.7.10:1",
        "10.240.16.1:443",
        "172.25.3.4:443",
        "10.254.7.9:1",
    ] {
        assert_eq!(dialed(&known, address), address);
    }
    assert_eq!(problems.len(), 4, "{problems:?}");
}

#[test]
fn object_name_outweighs_claimed_names() {
    let older = node(
        "liar",
        1,
        &["InternalIP=192.168.7.10", "Hostname=honest", "Hostname=x"],
    );
    let younger = node(
        "liar-too",
        3,
        // A second InternalIP does not block the translation of another Node's ExternalIP.
        &["InternalIP=192.168.7.11", "InternalIP=203.0.113.10"],
    );
    let honest = node(
        "honest",
        2,
        &[
            "InternalIP=192.168.7.9",
            "ExternalIP=203.0.113.10",
            "Hostname=honest",
        ],
    );
    let (known, problems) = known(&[older, younger, honest]);
    assert_eq!(dialed(&known, "honest:1"), "192.168.7.9:1");
    assert_eq!(dialed(&known, "x:1"), "192.168.7.10:1");
    assert_eq!(dialed(&known, "203.0.113.10:1"), "192.168.7.9:1");
    let told = "Node liar: its name honest also belongs to Node honest, which is dialed";
    assert_eq!(problems, [told]);
}

#[test]
fn addresses_are_not_accepted_as_names() {
    for name in ["one", "ip-10-0-0-1.ec2.internal", "10-0-0-1", "1a", "a_b"] {
        assert!(name_of(name).is_some(), "{name}");
    }
    for text in [
        "010.1.2.3",
        "0x7f000001",
        "2130706433",
        "[2001:db8::1]",
        "::1",
        "a.localhost",
        "a b",
        "a:b",
        "",
        ".",
    ] {
        assert_eq!(name_of(text), None, "{text}");
    }
}

#[test]
fn addresses_and_problems_are_bounded() {
    let many: Vec<String> = (0..10_000u32)
        .map(|i| format!("ExternalIP={}", Ipv4Addr::from_bits((203 << 24) + i)))
        .collect();
    let many: Vec<&str> = [&"InternalIP=192.168.7.9"]
        .into_iter()
        .copied()
        .chain(many.iter().map(String::as_str))
        .collect();
    let liars: Vec<Node> = (0..1000)
        .map(|i| node(&format!("liar-{i}"), i, &many))
        .collect();
    let (known, problems) = known(&liars);
    assert!(known.external.len() < MAX_ADDRESSES);
    assert_eq!(problems.len(), MAX_PROBLEMS);
}

fn addresses() -> impl Strategy<Value = Vec<String>> {
    let kind = prop::sample::select(vec![
        "InternalIP",
        "ExternalIP",
        "Hostname",
        "InternalDNS",
        "ExternalDNS",
        "Other",
    ]);
    // Few values, so that collisions are likely.
    let address = prop_oneof![
        (0u8..4).prop_map(|d| format!("192.168.7.{d}")),
        (0u8..4).prop_map(|d| format!("10.240.16.{d}")),
        prop::sample::select(vec!["one", "two", "hook.svc", "fd00::1"]).prop_map(str::to_owned),
        "\\PC{0,20}",
    ];
    let one = (kind, address).prop_map(|(kind, address)| format!("{kind}={address}"));
    prop::collection::vec(one, 0..8)
}

proptest! {
    /// For arbitrary Nodes: translations lead only to InternalIPs, InternalIPs and pods are not translated,
    /// and the order of the Nodes does not matter.
    #[test]
    fn arbitrary_nodes_give_a_consistent_translation(all in prop::collection::vec((addresses(), 0i64..3), 0..8)) {
        let nodes: Vec<Node> = all
            .iter()
            .enumerate()
            .filter_map(|(i, (addresses, created))| {
                let addresses: Vec<&str> = addresses.iter().map(String::as_str).collect();
                Node::of(object(&format!("node-{i}"), *created, &addresses))
            })
            .collect();
        let (known, problems) = known(&nodes);
        let own: Vec<Ipv4Addr> = nodes.iter().filter_map(|node| node.internal).collect();
        for to in known.external.values().chain(known.names.values()) {
            prop_assert!(own.contains(to));
        }
        for ip in &own {
            let dialed = SocketAddrV4::new(*ip, 1);
            prop_assert_eq!(known.internal(dialed), dialed);
        }
        let pod = SocketAddrV4::new(Ipv4Addr::new(10, 240, 16, 1), 1);
        prop_assert_eq!(known.internal(pod), pod);
        prop_assert_eq!(known.named("hook.svc:1"), None);
        let reversed: Vec<Node> = nodes.iter().rev().cloned().collect();
        prop_assert_eq!(self::known(&reversed), (known, problems));
    }
}
