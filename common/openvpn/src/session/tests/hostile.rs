use proptest::prelude::*;

use super::*;

/// Delivers noise to both sessions, and every packet sent so far, unchanged and changed.
fn abuse(sim: &mut Sim, round: u64) {
    let mut rng = <rand::rngs::StdRng as rand::SeedableRng>::seed_from_u64(round);
    let sent = sim.sent.clone();
    for _ in 0..50 {
        let mut noise = vec![0; rand::Rng::random_range(&mut rng, 0..200)];
        rand::RngCore::fill_bytes(&mut rng, &mut noise);
        for to in [To::Client, To::Server] {
            let _ = sim.deliver(to, &noise);
        }
    }
    for (to, packet) in sent.iter() {
        // Unchanged, also back to the sender.
        let _ = sim.deliver(*to, packet);
        let _ = sim.deliver(to.other(), packet);
        // Data with a changed bit, and truncated packets.
        let is_data = DataHeader::parse(packet).is_some();
        let bit = rand::Rng::random_range(&mut rng, 0..packet.len() * 8);
        let mut changed = packet.clone();
        changed[bit / 8] ^= 1 << (bit % 8);
        if is_data {
            let _ = sim.deliver(*to, &changed);
        }
        for len in 0..packet.len().min(40) {
            if is_data || len < 14 {
                let _ = sim.deliver(*to, &packet[..len]);
            }
        }
    }
}

#[test]
fn session_survives_noise_and_replays_at_every_stage_over_udp() {
    for round in 0..20 {
        let mut client = client_config(Transport::Udp);
        client.common.timers.reneg = Duration::from_secs(5);
        let mut sim = Sim::new(client, server_config(Transport::Udp), CLEAN, round);
        sim.record = true;
        let until = sim.now + Duration::from_secs(30);
        let mut stage = 0;
        while sim.now < until {
            let soon = sim.now + Duration::from_millis(500);
            sim.step(soon);
            stage += 1;
            if stage % 3 == round % 3 && sim.sent.len() < 200 {
                abuse(&mut sim, round * 1000 + stage);
            }
        }
        for end in [&sim.client, &sim.server] {
            assert!(
                end.session.is_established(),
                "round {round}: {:?}",
                end.events
            );
            assert!(end.rekeys() >= 3, "round {round}: {:?}", end.events);
        }
        sim.client.inner.clear();
        sim.server.inner.clear();
        assert_eq!(sim.traffic(20, Duration::from_millis(10)), 0);
        sim.run(Duration::from_secs(1));
        assert_eq!((sim.client.inner.len(), sim.server.inner.len()), (20, 20));
        assert!(sim.server.session.stats().malformed > 0);
    }
}

#[test]
fn replayed_data_is_not_delivered_twice() {
    for transport in BOTH {
        let mut sim = Sim::default(transport);
        sim.connect();
        sim.record = true;
        sim.traffic(10, Duration::from_millis(10));
        sim.run(Duration::from_secs(1));
        for (to, packet) in sim.sent.clone() {
            assert_eq!(sim.deliver(to, &packet), Err(Dropped::ReplayedData));
        }
        assert_eq!((sim.client.inner.len(), sim.server.inner.len()), (10, 10));
        assert_eq!(sim.server.session.stats().replayed_data, 10);
        assert!(sim.server.session.is_established());
    }
}

#[test]
fn over_tcp_a_broken_control_packet_ends_the_session() {
    for broken in [
        &b"\x00\x05hello"[..],
        b"\x00\x0e\x38aaaaaaaa\x00\x00\x00\x00\x00",
        b"\x00\x01\x20",
    ] {
        let mut sim = Sim::default(Transport::Tcp);
        sim.connect();
        assert!(sim.deliver(To::Server, broken).is_err());
        sim.settle();
        assert!(
            matches!(sim.server.ended(), Some(Ended::Protocol(_))),
            "{:?}",
            sim.server.events
        );
    }
}

#[test]
fn unsupported_opcodes_are_named_in_the_error() {
    for (first, word) in [
        (1 << 3, "key method 1"),
        (10 << 3, "tls-crypt-v2"),
        (11 << 3, "tls-crypt-v2"),
    ] {
        let mut packet = vec![0, 60, first];
        packet.resize(62, 9);
        let mut sim = Sim::default(Transport::Tcp);
        assert_eq!(sim.deliver(To::Server, &packet), Err(Dropped::Unsupported));
        sim.settle();
        let ended = sim.server.ended().unwrap().to_string();
        assert!(ended.contains(word), "{ended}");
    }
}

#[test]
fn forged_tls_bytes_cause_a_renegotiation_over_udp() {
    let mut sim = Sim::default(Transport::Udp);
    sim.record = true;
    sim.connect();
    // Only an attacker on the path can forge the next message of the control channel.
    let (_, template) = sim
        .sent
        .iter()
        .rfind(|(to, packet)| *to == To::Server && packet[0] == 4 << 3)
        .unwrap();
    let mut forged = template[..9].to_vec();
    forged.push(0);
    let next = sim
        .sent
        .iter()
        .filter(|(to, packet)| *to == To::Server && packet[0] == 4 << 3);
    let id = next.map(|(_, packet)| message_id(packet)).max().unwrap() + 1;
    forged.extend_from_slice(&id.to_be_bytes());
    forged.extend_from_slice(&[0x17, 3, 3, 0, 40]);
    forged.extend_from_slice(&[0xaa; 40]);
    assert_eq!(sim.deliver(To::Server, &forged), Ok(()));
    sim.run(Duration::from_secs(5));
    assert!(sim.server.session.is_established());
    assert_eq!(
        (sim.server.rekeys(), sim.client.rekeys()),
        (1, 1),
        "{:?}",
        sim.server.events
    );
}

fn message_id(packet: &[u8]) -> u32 {
    crate::packet::ControlPacket::parse(packet)
        .unwrap()
        .id
        .unwrap()
}

#[test]
fn stray_reset_does_not_prevent_the_connection() {
    let reset = |echo: Option<crate::packet::SessionId>| {
        let mut reset = vec![8 << 3];
        reset.extend_from_slice(&[9; 8]);
        match echo {
            None => reset.push(0),
            Some(echo) => {
                reset.extend_from_slice(&[1, 0, 0, 0, 0]);
                reset.extend_from_slice(&echo.0);
            }
        }
        reset.extend_from_slice(&[0; 4]);
        reset
    };
    let mut sim = Sim::default(Transport::Udp);
    sim.settle();
    let another = reset(Some(crate::packet::SessionId([1; 8])));
    assert_eq!(
        sim.deliver(To::Client, &another),
        Err(Dropped::WrongSession)
    );
    assert_eq!(sim.deliver(To::Client, &reset(None)), Ok(()));
    sim.connect();
    let own = sim.client.session.own;
    assert_eq!(
        sim.deliver(To::Client, &reset(Some(own))),
        Err(Dropped::WrongSession)
    );
    assert!(sim.client.session.is_established());
}

proptest! {
    #![proptest_config(ProptestConfig::with_cases(200))]

    /// The packets arrive in any order, at any stage, from both sides.
    #[test]
    fn arbitrary_packets_do_not_panic(
        stage in 0..6_u32,
        tcp in any::<bool>(),
        packets in prop::collection::vec((any::<bool>(), 0..12_u8, 0..8_u8, prop::collection::vec(any::<u8>(), 0..80)), 0..40),
        own_session in any::<bool>(),
    ) {
        let transport = if tcp { Transport::Tcp } else { Transport::Udp };
        let mut sim = Sim::default(transport);
        for _ in 0..stage {
            let soon = sim.now + Duration::from_millis(20);
            sim.step(soon);
        }
        for (to_client, opcode, key, mut rest) in packets {
            let to = if to_client { To::Client } else { To::Server };
            // With the right session id a packet gets past the first checks.
            let from = sim.end(to.other()).session.own;
            if own_session && rest.len() >= 8 {
                rest[..8].copy_from_slice(&from.0);
            }
            let mut packet = vec![opcode << 3 | key];
            packet.extend_from_slice(&rest);
            let now = sim.now;
            let _ = sim.end(to).session.input(&mut packet, now, &mut |_| {});
            sim.settle();
        }
        sim.run(Duration::from_secs(100));
    }
}
