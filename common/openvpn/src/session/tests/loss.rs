use super::*;

/// Connects, sends, renegotiates, over a net that loses, repeats and reorders.
fn survives(seed: u64, net: Net) {
    let mut client = client_config(Transport::Udp);
    client.common.timers.reneg = Duration::from_secs(120);
    let mut server = server_config(Transport::Udp);
    server.common.timers.ping = Some(Duration::from_secs(10));
    let mut sim = Sim::new(client, server, net, seed);
    sim.connect();
    sim.traffic(20, Duration::from_millis(20));
    sim.run(Duration::from_secs(200));
    let lost = |end: &Endpoint| 20 - end.inner.len();
    assert!(
        lost(&sim.client) <= 12 && lost(&sim.server) <= 12,
        "seed {seed}"
    );
    for end in [&sim.client, &sim.server] {
        let mut unique = end.inner.clone();
        unique.sort();
        unique.dedup();
        assert_eq!(
            unique.len(),
            end.inner.len(),
            "seed {seed}: a packet came twice"
        );
        assert_eq!(end.rekeys(), 1, "seed {seed}: {:?}", end.events);
        let stats = end.session.stats();
        assert_eq!((stats.bad_data, stats.malformed), (0, 0), "seed {seed}");
    }
}

#[test]
fn loss_repetition_and_reordering_are_survived() {
    for seed in 0..200 {
        survives(seed, LOSSY);
    }
}

#[test]
fn heavy_loss_is_survived() {
    let net = Net {
        loss: 0.2,
        duplicate: 0.2,
        ..LOSSY
    };
    for seed in 0..50 {
        survives(seed, net);
    }
}

#[test]
fn every_seed_over_tcp_connects_at_once() {
    for seed in 0..50 {
        let mut sim = Sim::new(
            client_config(Transport::Tcp),
            server_config(Transport::Tcp),
            LOSSY,
            seed,
        );
        let start = sim.now;
        sim.connect();
        assert!(
            sim.now - start < Duration::from_millis(200),
            "{:?}",
            sim.now - start
        );
        assert_eq!(sim.traffic(5, Duration::from_millis(1)), 0);
        sim.run(Duration::from_secs(1));
        assert_eq!((sim.client.inner.len(), sim.server.inner.len()), (5, 5));
    }
}

/// Whatever is lost of the handshake, it ends: in a session or by the hand-window.
#[test]
fn a_net_that_loses_nearly_all_ends_in_time() {
    let net = Net { loss: 0.7, ..LOSSY };
    for seed in 0..100 {
        let mut sim = Sim::new(
            client_config(Transport::Udp),
            server_config(Transport::Udp),
            net,
            seed,
        );
        sim.run(Duration::from_secs(130));
        for end in [&sim.client, &sim.server] {
            let done = end.ended().is_some() || end.session.is_established();
            assert!(done, "seed {seed}: {:?}", end.events);
        }
    }
}
