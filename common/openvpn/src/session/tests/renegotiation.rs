use super::*;
use crate::packet::{ControlPacket, Opcode};
use crate::tls::tests::{PKI, Pki};
use crate::tls::{MinVersion, ServerTls};

fn every(transport: Transport, client: u64, server: u64) -> Sim {
    let mut ours = client_config(transport);
    ours.common.timers.reneg = Duration::from_secs(client);
    let mut theirs = server_config(transport);
    theirs.common.timers.reneg = Duration::from_secs(server);
    Sim::new(ours, theirs, CLEAN, 1)
}

#[test]
fn either_side_renegotiates_under_traffic_without_loss() {
    for transport in BOTH {
        for (client, server) in [(8, 0), (0, 8), (8, 8)] {
            let mut sim = every(transport, client, server);
            sim.connect();
            // 100 s, so that key ids wrap from 7 to 1.
            assert_eq!(sim.traffic(10_000, Duration::from_millis(10)), 0);
            sim.run(Duration::from_secs(1));
            // The times of renegotiations are random, so one may be in progress.
            for _ in 0..100 {
                if sim.client.rekeys() != sim.server.rekeys() {
                    sim.run(Duration::from_millis(10));
                }
            }
            assert!(sim.client.rekeys() >= 11, "{}", sim.client.rekeys());
            assert_eq!(sim.client.rekeys(), sim.server.rekeys());
            assert_eq!(
                (sim.client.inner.len(), sim.server.inner.len()),
                (10_000, 10_000)
            );
            for end in [&sim.client, &sim.server] {
                let stats = *end.session.stats();
                let clean = Stats {
                    packets_in: 10_000,
                    bytes_in: 1_000_000,
                    packets_out: 10_000,
                    bytes_out: 1_000_000,
                    rekeys: stats.rekeys,
                    ..Stats::default()
                };
                assert_eq!(stats, clean);
            }
            let ids = sim.client.events.iter().filter_map(|event| match event {
                Event::Rekeyed { key_id } => Some(*key_id),
                _ => None,
            });
            let ids: Vec<_> = ids.take(9).collect();
            assert_eq!(ids, [1, 2, 3, 4, 5, 6, 7, 1, 2]);
        }
    }
}

#[test]
fn simultaneous_renegotiations_succeed() {
    for transport in BOTH {
        for offset in [-15_i64, -5, 0, 5, 15] {
            let mut sim = every(transport, 0, 0);
            sim.connect();
            let later = Duration::from_secs(5);
            let start = sim.now + later;
            let shifted = |by: i64| start + Duration::from_millis((20 + by).try_into().unwrap());
            sim.client.session.clocks.renegotiate_at = Some(shifted(offset));
            sim.server.session.clocks.renegotiate_at = Some(shifted(0));
            assert_eq!(sim.traffic(1000, Duration::from_millis(10)), 0);
            sim.run(Duration::from_secs(1));
            assert_eq!(
                (sim.client.rekeys(), sim.server.rekeys()),
                (1, 1),
                "{transport:?} {offset}"
            );
            assert_eq!(
                (sim.client.inner.len(), sim.server.inner.len()),
                (1000, 1000)
            );
        }
    }
}

/// A session sends with the old key for up to a minute, like stock, unless the peer has used the new key.
#[test]
fn new_key_is_used_after_the_peer_used_it_or_after_a_minute() {
    let mut sim = every(Transport::Udp, 0, 0);
    sim.connect();
    let now = sim.now;
    sim.client.session.clocks.renegotiate_at = Some(now);
    sim.run(Duration::from_secs(1));
    assert_eq!((sim.client.rekeys(), sim.server.rekeys()), (1, 1));
    sim.record = true;
    let key_of = |sim: &mut Sim, from: To| {
        sim.sent.clear();
        assert!(sim.send(from, &[0x45; 20]));
        let (_, packet) = sim.sent.pop().unwrap();
        packet[0] & 7
    };
    assert_eq!(key_of(&mut sim, To::Client), 0);
    assert_eq!(key_of(&mut sim, To::Server), 0);
    sim.run(Duration::from_secs(57));
    assert_eq!(key_of(&mut sim, To::Client), 0);
    sim.run(Duration::from_secs(3));
    // The client began first and has reached 60 s. Its packet confirms the new key to the server.
    assert_eq!(key_of(&mut sim, To::Client), 1);
    sim.run(Duration::from_secs(1));
    assert_eq!(key_of(&mut sim, To::Server), 1);
    assert_eq!(sim.client.session.stats().unknown_key, 0);
}

#[test]
fn old_key_is_dropped_after_the_transition_window() {
    let mut server = server_config(Transport::Udp);
    server.common.timers.tran_window = Duration::from_secs(100);
    server.common.timers.reneg = Duration::ZERO;
    let mut sim = Sim::new(client_config(Transport::Udp), server, CLEAN, 1);
    sim.connect();
    let mut kept = Vec::new();
    for _ in 0..2 {
        let mut out = BytesMut::new();
        let now = sim.now;
        sim.client.session.seal(&[0x45; 20], now, &mut out).unwrap();
        kept.push(out.to_vec());
    }
    let now = sim.now;
    sim.client.session.clocks.renegotiate_at = Some(now);
    sim.run(Duration::from_secs(90));
    assert_eq!(sim.deliver(To::Server, &kept[0]), Ok(()));
    sim.run(Duration::from_secs(11));
    assert_eq!(sim.deliver(To::Server, &kept[1]), Err(Dropped::UnknownKey));
}

#[test]
fn a_worn_key_is_replaced() {
    for transport in BOTH {
        let mut sim = every(transport, 0, 0);
        sim.connect();
        let now = sim.now;
        let (key, _) = sim.client.session.keys.sending(now).unwrap();
        key.sealer.wear_out();
        // The client sends more packets than its old key has ids, and the server sends none.
        for _ in 0..200 {
            assert!(sim.send(To::Client, &[0x45; 20]));
            sim.run(Duration::from_millis(10));
        }
        sim.run(Duration::from_secs(1));
        assert_eq!((sim.client.rekeys(), sim.server.rekeys()), (1, 1));
        assert_eq!(sim.server.inner.len(), 200);
    }
}

#[test]
fn text_sent_during_a_renegotiation_arrives_afterwards() {
    let mut sim = every(Transport::Udp, 0, 0);
    sim.connect();
    let now = sim.now;
    sim.server.session.clocks.renegotiate_at = Some(now);
    sim.server.session.handle_timeout(now);
    assert!(sim.server.session.next.is_some());
    sim.server.session.send_text("INFO,hello", now);
    sim.run(Duration::from_secs(1));
    let is_notice = |event: &Event| matches!(event, Event::Notice(text) if text == "INFO,hello");
    assert!(
        sim.client.events.iter().any(is_notice),
        "{:?}",
        sim.client.events
    );
}

#[test]
fn client_in_a_renegotiation_learns_of_a_restart_over_udp() {
    for initiator in [To::Client, To::Server] {
        let mut sim = every(Transport::Udp, 0, 0);
        sim.connect();
        let now = sim.now;
        sim.end(initiator).session.clocks.renegotiate_at = Some(now);
        while sim.server.session.next.is_none() {
            let soon = sim.now + CLEAN.delay;
            sim.step(soon);
        }
        assert!(sim.server.session.texts_wait());
        let now = sim.now;
        sim.server.session.restart(false, now);
        sim.run(Duration::from_secs(1));
        assert_eq!(sim.client.ended(), Some(&Ended::PeerExit));
        sim.run(LINGER);
        assert!(sim.server.session.is_finished());
    }
}

#[test]
fn long_texts_of_a_peer_are_cut_for_the_log() {
    let mut sim = every(Transport::Udp, 0, 0);
    sim.connect();
    let now = sim.now;
    let text = format!("INFO,{}", "x".repeat(1000));
    sim.client.session.send_text(&text, now);
    sim.server.session.send_text(&text, now);
    sim.run(Duration::from_secs(1));
    for end in [&sim.client, &sim.server] {
        let notices = end.events.iter().filter_map(|event| match event {
            Event::Notice(text) => Some(text.as_str()),
            _ => None,
        });
        assert_eq!(notices.collect::<Vec<_>>(), [&text[..512]]);
    }
}

#[test]
fn peer_cannot_flood_the_log_with_texts() {
    let mut sim = every(Transport::Tcp, 0, 0);
    sim.connect();
    for second in 0..60 {
        for number in 0..10 {
            let now = sim.now;
            let text = format!("INFO,{second} {number}");
            sim.client.session.send_text(&text, now);
            sim.server.session.send_text(&text, now);
        }
        sim.run(Duration::from_secs(1));
    }
    for end in [&sim.client, &sim.server] {
        let is_notice = |event: &&Event| matches!(event, Event::Notice(_));
        let notices = end.events.iter().filter(is_notice).count();
        assert!((10..=11).contains(&notices), "{notices}");
        assert_eq!(end.ended(), None);
    }
}

#[test]
fn another_certificate_or_user_in_a_renegotiation_is_refused() {
    for transport in BOTH {
        for change in 0..3 {
            let mut client = client_config(transport);
            client.credentials = Some(("jane".into(), "secret".into()));
            let mut changed = client.clone();
            match change {
                // A new certificate with the same name is refused, too.
                0 => changed.tls = crate::tls::tests::PKI.client_tls("user-cluster-client"),
                1 => changed.tls = crate::tls::tests::PKI.client_tls("internal-client"),
                _ => changed.credentials = Some(("joe".into(), "secret".into())),
            }
            let mut sim = Sim::new(client, server_config(transport), CLEAN, 1);
            sim.connect();
            let now = sim.now;
            sim.client.session.side = Side::Client(Arc::new(changed));
            sim.client.session.clocks.renegotiate_at = Some(now);
            sim.run(Duration::from_secs(10));
            let Some(Ended::Rejected(reason)) = sim.server.ended() else {
                panic!("{:?}", sim.server.events)
            };
            assert!(reason.contains("same"), "{reason}");
            assert_eq!(sim.server.session.stats().rekeys_failed, 1);
            assert!(matches!(sim.client.ended(), Some(Ended::AuthFailed { .. })));
            assert!(!sim.send(To::Client, &[0x45; 20]));
        }
    }
}

#[test]
fn client_uses_a_renewed_token_and_later_its_password() {
    for transport in BOTH {
        let mut client = client_config(transport);
        client.credentials = Some(("jane".into(), "secret".into()));
        let mut sim = Sim::new(client, server_config(transport), CLEAN, 1);
        sim.connect();
        // As in OpenVPN 2.5 and 2.6.
        for (begin, token) in [("PUSH_REPLY, ", "SESS_ID_1"), ("PUSH_REPLY,", "SESS_ID_2")] {
            let now = sim.now;
            let text = format!("{begin}auth-token {token}");
            sim.server.session.send_text(&text, now);
            sim.run(Duration::from_secs(1));
            let used = sim.client.session.server.token.as_deref();
            assert_eq!(used, Some(token));
        }
        assert_eq!(sim.client.ended(), None);
        let now = sim.now;
        let expired = "AUTH_FAILED,SESSION: token expired";
        sim.server.session.send_text(expired, now);
        sim.run(Duration::from_secs(1));
        // A session without the token may succeed at once.
        let ended = sim.client.ended();
        assert!(
            matches!(
                ended,
                Some(Ended::AuthFailed {
                    temporary: true,
                    ..
                })
            ),
            "{ended:?}"
        );
    }
}

#[test]
fn renewed_server_certificates_are_used_for_the_next_key() {
    let mut sim = every(Transport::Tcp, 0, 0);
    sim.connect();
    let other = server_config(Transport::Tcp);
    sim.server.session.set_config(Arc::new(other));
    let now = sim.now;
    sim.client.session.clocks.renegotiate_at = Some(now);
    sim.run(Duration::from_secs(5));
    assert_eq!((sim.client.rekeys(), sim.server.rekeys()), (1, 1));
}

#[test]
fn renewed_authority_of_the_client_is_used_for_the_next_key() {
    let new = Pki::named("new CA");
    for is_known in [false, true] {
        let mut sim = every(Transport::Tcp, 0, 0);
        sim.connect();
        let (ca, identity) = (PKI.ca(), new.server().identity());
        let tls = ServerTls::new(ca.as_bytes(), None, identity, MinVersion::Tls12, false);
        let renewed = ServerConfig::new(Transport::Tcp, Arc::new(tls.unwrap()));
        sim.server.session.set_config(Arc::new(renewed));
        if is_known {
            // The session keeps its own certificate: the server would refuse another one.
            let newer = new.client_tls("user-cluster-client");
            sim.client.session.set_authorities(&newer);
        }
        let now = sim.now;
        sim.server.session.clocks.renegotiate_at = Some(now);
        sim.run(Duration::from_secs(5));
        let rekeys = usize::from(is_known);
        assert_eq!((sim.client.rekeys(), sim.server.rekeys()), (rekeys, rekeys));
        assert_eq!(sim.client.ended().is_none(), is_known);
    }
}

#[test]
fn failed_renegotiation_is_tried_again_over_udp() {
    let mut sim = every(Transport::Udp, 0, 0);
    sim.connect();
    sim.client.session.clocks.ping_restart_for_test(None);
    let now = sim.now;
    sim.client.session.clocks.renegotiate_at = Some(now);
    sim.net.loss = 1.0;
    sim.run(Duration::from_secs(61));
    assert_eq!(sim.client.session.stats().rekeys_failed, 1);
    assert!(sim.client.session.is_established());
    sim.net.loss = 0.0;
    sim.run(Duration::from_secs(61));
    assert_eq!(
        (sim.client.rekeys(), sim.server.rekeys()),
        (1, 1),
        "{:?}",
        sim.client.events
    );
    assert_eq!(sim.traffic(100, Duration::from_millis(10)), 0);
    sim.run(Duration::from_secs(1));
    assert_eq!((sim.client.inner.len(), sim.server.inner.len()), (100, 100));
}

#[test]
fn renegotiation_that_ends_the_session_counts_as_failed() {
    // Over TCP the session of a client that finishes no renegotiation ends.
    let mut sim = every(Transport::Tcp, 0, 0);
    sim.connect();
    let session = &mut sim.server.session;
    session.clocks.ping_restart_for_test(None);
    session.renegotiate(true, sim.now);
    let late = sim.now + Duration::from_secs(60);
    session.handle_timeout(late);
    sim.settle();
    let ended = sim.server.ended();
    assert!(
        matches!(ended, Some(Ended::HandshakeTimeout { .. })),
        "{ended:?}"
    );
    assert_eq!(sim.server.session.stats().rekeys_failed, 1);

    // Over both transports a refused certificate ends the session.
    for transport in BOTH {
        let mut sim = every(transport, 0, 0);
        sim.connect();
        let (ca, identity) = (Pki::named("new CA").ca(), PKI.server().identity());
        let tls = ServerTls::new(ca.as_bytes(), None, identity, MinVersion::Tls12, false);
        let config = ServerConfig::new(transport, Arc::new(tls.unwrap()));
        sim.server.session.set_config(Arc::new(config));
        sim.client.session.clocks.renegotiate_at = Some(sim.now);
        sim.run(Duration::from_secs(5));
        let ended = sim.server.ended();
        assert!(matches!(ended, Some(Ended::Tls(_))), "{ended:?}");
        assert_eq!(sim.server.session.stats().rekeys_failed, 1);
    }
}

#[test]
fn data_with_the_new_key_finishes_a_renegotiation_without_acknowledgements() {
    for initiator in [To::Client, To::Server] {
        let mut sim = every(Transport::Udp, 0, 0);
        sim.connect();
        let now = sim.now;
        sim.end(initiator).session.clocks.renegotiate_at = Some(now);
        while !sim.server.session.keys.has_next() {
            let soon = sim.now + Duration::from_secs(1);
            sim.step(soon);
        }
        sim.mute = Some(To::Client);
        assert_eq!(sim.traffic(120, Duration::from_secs(1)), 0);
        assert_eq!((sim.client.rekeys(), sim.server.rekeys()), (1, 1));
        sim.run(Duration::from_secs(1));
        assert_eq!((sim.client.inner.len(), sim.server.inner.len()), (120, 120));
        // Acknowledgements that arrive later change nothing, and the next renegotiation succeeds.
        sim.mute = None;
        sim.client.session.clocks.ping_restart_for_test(None);
        sim.run(Duration::from_secs(200));
        let now = sim.now;
        sim.end(initiator).session.clocks.renegotiate_at = Some(now);
        sim.run(Duration::from_secs(10));
        assert_eq!((sim.client.rekeys(), sim.server.rekeys()), (2, 2));
        assert_eq!(sim.server.session.stats().rekeys_failed, 0);
    }
}

#[test]
fn three_failed_renegotiations_end_the_session() {
    let mut sim = every(Transport::Udp, 0, 0);
    sim.connect();
    let now = sim.now;
    sim.client.session.clocks.ping_restart_for_test(None);
    sim.client.session.clocks.renegotiate_at = Some(now);
    sim.net.loss = 1.0;
    sim.run(Duration::from_secs(400));
    assert!(
        matches!(sim.client.ended(), Some(Ended::Protocol(_))),
        "{:?}",
        sim.client.events
    );
}

/// Returns a packet of the client for the next key: a SOFT_RESET, or an acknowledgement of the server's. The
/// client does nothing else for the key.
fn for_next_key(sim: &Sim, opcode: Opcode) -> Vec<u8> {
    let current = sim.server.session.current.as_ref().unwrap();
    let acknowledges = opcode == Opcode::AckV1;
    let packet = ControlPacket {
        opcode,
        key_id: current.key_id().next(),
        session: sim.client.session.own,
        acks: Vec::from_iter(acknowledges.then_some(0)),
        peer_session: acknowledges.then_some(sim.server.session.own),
        id: (!acknowledges).then_some(0),
        payload: &[],
    };
    let mut out = BytesMut::new();
    packet.write(&mut out);
    out.to_vec()
}

/// The client starts a renegotiation whenever the server could start one, and finishes none, so that the server
/// cannot check its certificate again.
#[test]
fn client_that_finishes_no_renegotiation_loses_its_session() {
    let mut sim = every(Transport::Udp, 0, 600);
    sim.connect();
    sim.client.session.clocks.ping_restart_for_test(None);
    // From here on, only packets that the test delivers arrive.
    sim.net.loss = 1.0;
    let connected = sim.now;
    while sim.server.ended().is_none() {
        let reset = for_next_key(&sim, Opcode::SoftResetV1);
        let _ = sim.deliver(To::Server, &reset);
        let mut data = BytesMut::new();
        let now = sim.now;
        sim.client
            .session
            .seal(&[0x45; 20], now, &mut data)
            .unwrap();
        assert_eq!(sim.deliver(To::Server, &data), Ok(()));
        let lived = sim.now - connected;
        assert!(lived < Duration::from_secs(3600), "{lived:?}");
        sim.step(now + Duration::from_secs(1));
    }
    let why = sim.server.ended().unwrap().to_string();
    assert!(why.contains("before its key expired"), "{why}");
    assert_eq!(sim.server.rekeys(), 0);
    // `reneg`, three attempts of the server of 60 s each, and two pauses of 60 s. The server was established
    // slightly before the client.
    let lived = sim.now - connected;
    assert!((899..=900).contains(&lived.as_secs()), "{lived:?}");
}

#[test]
fn renegotiations_of_the_client_extend_the_session() {
    let mut sim = every(Transport::Udp, 300, 600);
    sim.connect();
    sim.client.session.clocks.ping_restart_for_test(None);
    sim.run(Duration::from_secs(4000));
    assert_eq!(sim.server.ended(), None);
    assert!(sim.server.rekeys() >= 10, "{}", sim.server.rekeys());
}

#[test]
fn client_renegotiates_at_a_limited_rate() {
    for transport in BOTH {
        let mut sim = every(transport, 0, 0);
        sim.connect();
        let start = sim.now;
        while sim.now < start + Duration::from_secs(10) {
            let now = sim.now;
            if sim.client.session.next.is_none() {
                sim.client.session.clocks.renegotiate_at = Some(now);
            }
            sim.run(Duration::from_millis(10));
        }
        let rekeys = sim.server.rekeys();
        // The client repeats a refused SOFT_RESET after 2 s.
        assert!((4..=10).contains(&rekeys), "{rekeys}");
        sim.run(Duration::from_secs(3));
        assert_eq!(sim.traffic(100, Duration::from_millis(10)), 0);
        sim.run(Duration::from_secs(1));
        assert_eq!((sim.client.inner.len(), sim.server.inner.len()), (100, 100));
    }
}

/// A renegotiation that fails uses the server's time, too.
#[test]
fn failed_renegotiations_of_the_client_count_for_its_limit() {
    let mut sim = every(Transport::Udp, 0, 0);
    sim.connect();
    let now = sim.now;
    let reset = for_next_key(&sim, Opcode::SoftResetV1);
    assert_eq!(sim.deliver(To::Server, &reset), Ok(()));
    sim.server.session.abandon("test", now);
    assert_eq!(sim.deliver(To::Server, &reset), Err(Dropped::WrongKey));
    sim.now += Duration::from_secs(1);
    assert_eq!(sim.deliver(To::Server, &reset), Ok(()));
}

#[test]
fn requests_for_options_during_a_renegotiation_are_answered_once() {
    let mut sim = every(Transport::Udp, 0, 0);
    sim.connect();
    sim.net.loss = 1.0;
    for opcode in [Opcode::SoftResetV1, Opcode::AckV1] {
        let packet = for_next_key(&sim, opcode);
        assert_eq!(sim.deliver(To::Server, &packet), Ok(()));
        sim.settle();
    }
    let replies = sim.server.session.reply.len();
    assert!(replies > 0);
    for _ in 0..5 {
        sim.now += Duration::from_secs(6);
        let now = sim.now;
        sim.server.session.push_requested(now);
    }
    assert_eq!(sim.server.session.texts.len(), replies);
    // The client finishes no renegotiation. The answer follows once the server gives up.
    sim.run(Duration::from_secs(61));
    assert!(sim.server.session.next.is_none());
    assert_eq!(sim.server.session.texts.len(), 0);
}
