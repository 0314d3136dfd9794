#![allow(clippy::unwrap_used, clippy::indexing_slicing)]

use proptest::prelude::*;

use super::*;

fn net(text: &str) -> Ipv4Net {
    text.parse().unwrap()
}

#[test]
fn the_newest_of_two_equal_peers_wins_and_the_other_is_the_fallback() {
    let mut routes = Routes::new();
    let cluster = [
        net("172.25.0.0/16"),
        net("10.240.16.0/20"),
        net("10.254.0.0/16"),
    ];
    routes.add(PeerId(1), [10, 20, 0, 6].into(), &cluster);
    routes.add(PeerId(2), [10, 20, 0, 10].into(), &cluster);
    routes.add(PeerId(3), [10, 20, 0, 14].into(), &[]);
    let pod = [172, 25, 3, 4].into();
    assert_eq!(routes.lookup(pod), Some(PeerId(2)));
    assert!(routes.permits(PeerId(1), pod) && routes.permits(PeerId(2), pod));
    assert!(!routes.permits(PeerId(3), pod));
    assert!(!routes.permits(PeerId(3), [10, 20, 0, 6].into()));
    routes.remove(PeerId(2));
    assert_eq!(routes.lookup(pod), Some(PeerId(1)));
    routes.remove(PeerId(1));
    assert_eq!(routes.lookup(pod), None);
    assert_eq!(routes.lookup([10, 20, 0, 14].into()), Some(PeerId(3)));
    assert_eq!(routes.networks(PeerId(1)), []);
}

#[test]
fn overlapping_networks_go_to_the_longest_prefix() {
    let mut routes = Routes::new();
    routes.add(PeerId(1), [10, 20, 0, 6].into(), &[net("172.25.7.0/24")]);
    routes.add(
        PeerId(9),
        [10, 20, 0, 10].into(),
        &[net("172.25.0.0/16"), net("0.0.0.0/0")],
    );
    assert_eq!(routes.lookup([172, 25, 7, 1].into()), Some(PeerId(1)));
    assert_eq!(routes.lookup([172, 25, 8, 1].into()), Some(PeerId(9)));
    assert_eq!(routes.lookup([8, 8, 8, 8].into()), Some(PeerId(9)));
    // Host bits are ignored.
    routes.add(PeerId(10), [10, 20, 0, 11].into(), &[net("172.25.7.99/24")]);
    assert_eq!(routes.lookup([172, 25, 7, 1].into()), Some(PeerId(10)));
}

/// Reference implementation: a linear search.
#[derive(Default)]
struct Naive(Vec<(PeerId, Ipv4Net)>);

impl Naive {
    fn add(&mut self, peer: PeerId, address: Ipv4Addr, iroutes: &[Ipv4Net]) {
        self.remove(peer);
        self.0.push((peer, address.into()));
        self.0
            .extend(iroutes.iter().map(|network| (peer, *network)));
    }

    fn remove(&mut self, peer: PeerId) {
        self.0.retain(|(other, _)| *other != peer);
    }

    fn lookup(&self, destination: Ipv4Addr) -> Option<PeerId> {
        self.0
            .iter()
            .filter(|(_, network)| network.contains(&destination))
            .max_by_key(|(peer, network)| (network.prefix_len(), *peer))
            .map(|(peer, _)| *peer)
    }
}

/// Addresses that are often inside each other's networks.
fn address() -> impl Strategy<Value = Ipv4Addr> {
    (0..4_u32, 0..4_u32, 0..4_u32).prop_map(|(a, b, c)| Ipv4Addr::from_bits(a << 30 | b << 16 | c))
}

proptest! {
    #[test]
    fn equals_the_naive_model(
        steps in proptest::collection::vec(
            (0..6_u64, address(), proptest::collection::vec((address(), 0..=32_u8), 0..4), any::<bool>()),
            1..40,
        ),
        probes in proptest::collection::vec(address(), 20),
    ) {
        let (mut routes, mut naive) = (Routes::new(), Naive::default());
        for (peer, own, iroutes, add) in steps {
            let peer = PeerId(peer);
            let iroutes: Vec<_> = iroutes
                .iter()
                .map(|(address, length)| Ipv4Net::new(*address, *length).unwrap())
                .collect();
            if add {
                routes.add(peer, own, &iroutes);
                naive.add(peer, own, &iroutes);
            } else {
                routes.remove(peer);
                naive.remove(peer);
            }
            for probe in &probes {
                prop_assert_eq!(routes.lookup(*probe), naive.lookup(*probe));
                for peer in (0..6).map(PeerId) {
                    let permitted = naive.0.iter().any(|(p, n)| *p == peer && n.contains(probe));
                    prop_assert_eq!(routes.permits(peer, *probe), permitted);
                }
            }
        }
        for peer in (0..6).map(PeerId) {
            routes.remove(peer);
        }
        prop_assert!(routes.owners.is_empty());
        prop_assert_eq!(routes.lengths, [0; 33]);
    }
}
