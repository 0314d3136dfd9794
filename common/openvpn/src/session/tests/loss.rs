use super::*;

/// Connects, sends and renegotiates over a network that loses, repeats and reorders packets.
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
            "seed {seed}: a packet was delivered twice"
        );
        assert_eq!(end.rekeys(), 1, "seed {seed}: {:?}", end.events);
        let stats = end.session.stats();
        assert_eq!((stats.bad_data, stats.malformed), (0, 0), "seed {seed}");
    }
}

#[test]
fn session_survives_loss_repetition_and_reordering() {
    for seed in 0..200 {
        survives(seed, LOSSY);
    }
}

#[test]
fn session_survives_heavy_loss() {
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
fn tcp_connects_at_once_with_every_seed() {
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

/// With any loss of packets, the handshake ends in a session or at the hand-window.
#[test]
fn handshake_ends_in_time_despite_extreme_loss() {
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
