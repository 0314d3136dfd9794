use super::*;
use crate::control::RESTART;

fn established(transport: Transport) -> Sim {
    let mut sim = Sim::default(transport);
    sim.connect();
    sim
}

#[test]
fn closing_client_notifies_the_server_over_udp() {
    // First with EXIT in the control channel, then with OCC's EXIT for peers without protocol-flags.
    for lines in [None, Some("IV_PROTO=6\nIV_NCP=2\n")] {
        let mut sim = Sim::default(Transport::Udp);
        sim.client.session.pretended = lines.map(str::to_owned);
        sim.connect();
        let now = sim.now;
        sim.client.session.close(now);
        assert!(!sim.client.session.is_finished());
        sim.run(Duration::from_secs(1));
        assert_eq!(sim.client.ended(), Some(&Ended::Closed));
        assert_eq!(sim.server.ended(), Some(&Ended::PeerExit));
        sim.run(Duration::from_secs(2));
        assert!(sim.client.session.is_finished() && sim.server.session.is_finished());
    }
}

#[test]
fn closing_server_notifies_the_client_over_udp() {
    let mut sim = established(Transport::Udp);
    let now = sim.now;
    sim.server.session.close(now);
    sim.run(Duration::from_secs(1));
    assert_eq!(sim.client.ended(), Some(&Ended::PeerExit));
}

#[test]
fn tcp_session_closed_before_establishment_is_finished_at_once() {
    // The server's answer to the first packet is on its way.
    let mut sim = Sim::default(Transport::Tcp);
    sim.run(CLEAN.delay);
    let now = sim.now;
    sim.server.session.close(now);
    assert!(sim.server.session.is_finished());
    // The same is true for a session that has ended already.
    let mut sim = Sim::default(Transport::Tcp);
    sim.run(CLEAN.delay);
    let now = sim.now;
    sim.server.session.end(Ended::PeerExit, now);
    assert!(!sim.server.session.is_finished());
    sim.server.session.close(now);
    assert!(sim.server.session.is_finished());
}

#[test]
fn restart_halt_and_auth_failed_have_distinct_reasons() {
    for (text, expected) in [
        (
            "RESTART",
            Ended::Restart {
                next_server: false,
                reason: String::new(),
            },
        ),
        (
            "RESTART,[N]maintenance",
            Ended::Restart {
                next_server: true,
                reason: "maintenance".into(),
            },
        ),
        ("HALT,for good", Ended::Halt("for good".into())),
        (
            "AUTH_FAILED,TEMP:later",
            Ended::AuthFailed {
                reason: "later".into(),
                temporary: true,
            },
        ),
        (
            "AUTH_FAILED",
            Ended::AuthFailed {
                reason: String::new(),
                temporary: false,
            },
        ),
    ] {
        let mut sim = established(Transport::Tcp);
        let now = sim.now;
        sim.server.session.send_text(text, now);
        sim.run(Duration::from_secs(1));
        assert_eq!(sim.client.ended(), Some(&expected));
    }
    let mut sim = established(Transport::Udp);
    let now = sim.now;
    sim.server.session.restart(true, now);
    sim.run(Duration::from_secs(1));
    let expected = Ended::Restart {
        next_server: true,
        reason: String::new(),
    };
    assert_eq!(sim.client.ended(), Some(&expected), "{RESTART}");
}

#[test]
fn rejected_client_receives_the_reason() {
    for transport in BOTH {
        let mut sim = Sim::default(transport);
        sim.accept = false;
        sim.run(Duration::from_secs(1));
        let now = sim.now;
        sim.server.session.reject("no client config\nfor you", now);
        sim.run(Duration::from_secs(1));
        let reason = "no client config_for you".to_owned();
        assert_eq!(
            sim.client.ended(),
            Some(&Ended::AuthFailed {
                reason,
                temporary: false
            })
        );
        assert!(sim.server.session.is_finished());
        // A late decision has no effect.
        assert!(sim.server.session.accept(push(), now).is_ok());
        sim.run(Duration::from_secs(10));
        assert!(!sim.server.session.is_established());
        assert_eq!(sim.server.events.len(), 2);
    }
}

#[test]
fn undecided_owner_causes_a_handshake_timeout() {
    let mut sim = Sim::default(Transport::Tcp);
    sim.accept = false;
    sim.run(Duration::from_secs(70));
    for (end, words) in [
        (&sim.server, "neither accepted nor rejected"),
        (&sim.client, "PUSH_REQUEST"),
    ] {
        let ended = end.ended().unwrap().to_string();
        assert!(ended.contains(words), "{ended}");
    }
}

#[test]
fn missing_peer_is_reported_with_a_hint() {
    let mut sim = Sim::default(Transport::Udp);
    sim.net.loss = 1.0;
    sim.record = true;
    sim.run(Duration::from_secs(70));
    let ended = sim.client.ended().unwrap().to_string();
    assert!(ended.contains("no answer at all"), "{ended}");
    let resets = sim
        .sent
        .iter()
        .filter(|(_, packet)| packet[0] == 7 << 3)
        .count();
    assert_eq!(resets, 5, "at 0, 2, 6, 14 and 30 s");
    assert!(
        sim.server
            .ended()
            .unwrap()
            .to_string()
            .contains("the client sent nothing")
    );
}

#[test]
fn pings_keep_a_session_and_silence_ends_it() {
    for transport in BOTH {
        let mut server = server_config(transport);
        server.common.timers.ping = Some(Duration::from_secs(5));
        server.common.timers.ping_restart = Some(Duration::from_secs(60));
        let mut sim = Sim::new(client_config(transport), server, CLEAN, 1);
        sim.accept = false;
        sim.run(Duration::from_secs(1));
        let now = sim.now;
        let options = ["ping 5", "ping-restart 30"].map(str::to_owned).to_vec();
        sim.server.session.accept(Push { options }, now).unwrap();
        sim.run(Duration::from_secs(600));
        assert!(sim.client.session.is_established() && sim.server.session.is_established());
        assert!(sim.client.inner.is_empty() && sim.server.inner.is_empty());
        if transport == Transport::Udp {
            sim.net.loss = 1.0;
            sim.run(Duration::from_secs(31));
            assert_eq!(
                sim.client.ended(),
                Some(&Ended::PingTimeout(Duration::from_secs(30)))
            );
            assert!(sim.server.ended().is_none());
            sim.run(Duration::from_secs(30));
            assert_eq!(
                sim.server.ended(),
                Some(&Ended::PingTimeout(Duration::from_secs(60)))
            );
        }
    }
}

/// An idle client sends only pings, so a session must outlive the pause between two pings of its client.
#[test]
fn server_waits_for_three_pings_of_its_client() {
    for (pushed, own, expected) in [
        ("ping 60", Some(60), Some(180)),
        ("ping 0", Some(60), None),
        ("ping 5", Some(60), Some(60)),
        ("ping 60", None, None),
        ("ping-restart 300", Some(60), Some(60)),
    ] {
        let mut server = server_config(Transport::Udp);
        server.common.timers.ping_restart = own.map(Duration::from_secs);
        let mut sim = Sim::new(client_config(Transport::Udp), server, CLEAN, 1);
        sim.accept = false;
        sim.run(Duration::from_secs(1));
        let (now, options) = (sim.now, vec![pushed.to_owned()]);
        sim.server.session.accept(Push { options }, now).unwrap();
        sim.connect();
        sim.net.loss = 1.0;
        sim.run(Duration::from_secs(200));
        let ended = expected.map(|seconds| Ended::PingTimeout(Duration::from_secs(seconds)));
        assert_eq!(sim.server.ended(), ended.as_ref(), "{pushed}, {own:?}");
    }
}

#[test]
fn default_ping_restart_is_two_minutes_over_udp() {
    let mut sim = established(Transport::Udp);
    sim.net.loss = 1.0;
    sim.run(Duration::from_secs(119));
    assert!(sim.client.ended().is_none());
    sim.run(Duration::from_secs(2));
    assert_eq!(
        sim.client.ended(),
        Some(&Ended::PingTimeout(Duration::from_secs(120)))
    );
    let mut sim = established(Transport::Tcp);
    sim.run(Duration::from_secs(3000));
    assert!(sim.client.ended().is_none());
}
