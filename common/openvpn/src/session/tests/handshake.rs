use super::*;
use crate::cipher::{Cipher, Digest};
use crate::compress::Framing;
use crate::flows::Config;
use crate::keys::{KEY_BLOCK_LEN, KeyBlock};
use crate::wrap::{KeyDirection, WrapKey};

fn static_key() -> KeyBlock {
    KeyBlock::from_bytes(std::array::from_fn::<u8, KEY_BLOCK_LEN, _>(|index| {
        index as u8
    }))
}

/// Connects, and sends 20 packets in each direction.
fn connects(mut sim: Sim) -> Sim {
    sim.connect();
    assert_eq!(sim.traffic(20, Duration::from_millis(1)), 0);
    sim.run(Duration::from_secs(1));
    assert_eq!((sim.client.inner.len(), sim.server.inner.len()), (20, 20));
    assert!(
        sim.client
            .inner
            .iter()
            .all(|inner| inner.len() == 100 && inner[0] == 0x45)
    );
    for end in [&sim.client, &sim.server] {
        let Stats {
            packets_in,
            bytes_in,
            packets_out,
            bytes_out,
            ..
        } = *end.session.stats();
        assert_eq!(
            (packets_in, bytes_in, packets_out, bytes_out),
            (20, 2000, 20, 2000)
        );
        let clean = Stats {
            packets_in,
            bytes_in,
            packets_out,
            bytes_out,
            ..Stats::default()
        };
        assert_eq!(*end.session.stats(), clean);
    }
    sim
}

#[test]
fn connects_over_both_transports() {
    for transport in BOTH {
        let sim = connects(Sim::default(transport));
        let client = sim.client.established();
        assert_eq!(client.cipher, Cipher::Aes256Gcm);
        assert!(client.exporter);
        assert_eq!(client.peer_id, Some(7));
        assert_eq!(
            client.identity.as_ref().unwrap().common_name,
            "openvpn-server"
        );
        let (mtu, last) = match transport {
            Transport::Tcp => (LARGE_TUN_MTU, &["tun-mtu 16384"][..]),
            Transport::Udp => (1500, &["culvert-peer", "tun-mtu 1500"][..]),
        };
        assert_eq!(client.tun_mtu, mtu);
        assert_eq!(
            client.options[..6],
            [
                "route 10.20.0.1",
                "topology net30",
                "ifconfig 10.20.0.6 10.20.0.5",
                "peer-id 7",
                "cipher AES-256-GCM",
                "protocol-flags cc-exit tls-ekm",
            ]
        );
        assert_eq!(client.options[6..], *last);
        let server = sim.server.established();
        assert_eq!(
            (server.ours, client.ours),
            (true, transport == Transport::Udp)
        );
        assert_eq!(server.tun_mtu, mtu);
        assert_eq!(server.options, client.options);
        assert_eq!(
            server.identity.as_ref().unwrap().subject,
            "CN=user-cluster-client"
        );
        assert!(server.tls.starts_with("TLSv1_3"), "{}", server.tls);
    }
}

#[test]
fn connects_with_every_wrap() {
    let key = static_key();
    for transport in BOTH {
        for wrap in 0..5 {
            let mut client = client_config(transport);
            let mut server = server_config(transport);
            let digest = if wrap == 1 {
                Digest::Sha256
            } else {
                Digest::Sha1
            };
            (client.common.digest, server.common.digest) = (digest, digest);
            let auth = |direction| (WrapKey::tls_auth(&key, direction, digest), Some(direction));
            (
                (client.common.wrap, client.common.tls_auth),
                (server.common.wrap, server.common.tls_auth),
            ) = match wrap {
                0 | 1 => (auth(KeyDirection::Inverse), auth(KeyDirection::Normal)),
                2 => (auth(KeyDirection::Both), auth(KeyDirection::Both)),
                3 => (auth(KeyDirection::Normal), auth(KeyDirection::Inverse)),
                _ => (
                    (WrapKey::tls_crypt(&key, Role::Client).unwrap(), None),
                    (WrapKey::tls_crypt(&key, Role::Server).unwrap(), None),
                ),
            };
            client.common.timers.reneg = Duration::from_secs(20);
            let mut sim = connects(Sim::new(client, server, CLEAN, 1));
            sim.run(Duration::from_secs(30));
            assert_eq!(sim.client.rekeys(), 1);
        }
    }
}

#[test]
fn server_over_tcp_explains_every_wrap_mismatch() {
    let other = KeyBlock::from_bytes([7; KEY_BLOCK_LEN]);
    let auth = |key: &KeyBlock, direction| WrapKey::tls_auth(key, direction, Digest::Sha1);
    let ours = auth(&static_key(), KeyDirection::Normal);
    for (at_server, at_client) in [
        (WrapKey::none(), auth(&other, KeyDirection::Inverse)),
        (
            WrapKey::none(),
            WrapKey::tls_crypt(&other, Role::Client).unwrap(),
        ),
        (ours.clone(), WrapKey::none()),
        (ours.clone(), auth(&other, KeyDirection::Inverse)),
        (ours, auth(&static_key(), KeyDirection::Normal)),
    ] {
        let mut client = client_config(Transport::Tcp);
        let mut server = server_config(Transport::Tcp);
        client.common.wrap = at_client;
        server.common.wrap = at_server;
        let mut sim = Sim::new(client, server, CLEAN, 1);
        sim.run(Duration::from_secs(1));
        let ended = sim.server.ended().unwrap().to_string();
        assert!(ended.contains("same tls-auth or tls-crypt key"), "{ended}");
    }
}

#[test]
fn wrap_mismatch_ends_tcp_and_times_out_over_udp() {
    for transport in BOTH {
        let mut server = server_config(transport);
        server.common.wrap = WrapKey::tls_auth(&static_key(), KeyDirection::Normal, Digest::Sha1);
        let mut sim = Sim::new(client_config(transport), server, CLEAN, 1);
        sim.run(Duration::from_secs(100));
        assert!(sim.server.session.stats().bad_wrap + sim.server.session.stats().malformed > 0);
        let ended = sim.client.ended().unwrap().to_string();
        assert!(ended.contains("same tls-auth or tls-crypt key"), "{ended}");
        match (transport, sim.server.ended().unwrap()) {
            (Transport::Tcp, Ended::Protocol(_))
            | (Transport::Udp, Ended::HandshakeTimeout { .. }) => {}
            (_, other) => panic!("{other}"),
        }
    }
}

#[test]
fn every_cipher_carries_data() {
    for transport in BOTH {
        for cipher in Cipher::ALL {
            for digest in [Digest::Sha1, Digest::Sha256, Digest::Sha512] {
                if cipher.is_aead() && digest != Digest::Sha1 {
                    continue;
                }
                let mut client = client_config(transport);
                client.common.ciphers = vec![cipher];
                client.common.digest = digest;
                let mut server = server_config(transport);
                server.common.ciphers = Cipher::ALL.to_vec();
                server.common.digest = digest;
                let sim = connects(Sim::new(client, server, CLEAN, 1));
                assert_eq!(sim.server.established().cipher, cipher);
            }
        }
    }
}

#[test]
fn full_packet_over_udp_needs_no_fragments_in_a_vxlan_network() {
    const PATH_MTU: usize = 1450;
    for cipher in Cipher::ALL {
        let mut client = client_config(Transport::Udp);
        client.common.ciphers = vec![cipher];
        let mut server = server_config(Transport::Udp);
        server.common.ciphers = Cipher::ALL.to_vec();
        let mut sim = connects(Sim::new(client, server, CLEAN, 1));
        let flows = Config::for_tunnel(Transport::Udp, sim.server.established().tun_mtu);
        let inner = vec![0; usize::from(flows.mss) + 40];
        // The headers of IP, with CBC of IPv4 only, and of UDP.
        let headers = if cipher.is_aead() { 40 } else { 20 } + 8;
        for which in [To::Client, To::Server] {
            let (now, mut out) = (sim.now, BytesMut::new());
            sim.end(which).session.seal(&inner, now, &mut out).unwrap();
            assert!(out.len() + headers <= PATH_MTU, "{cipher}: {}", out.len());
        }
    }
}

#[test]
fn cipher_is_chosen_in_the_servers_order() {
    let mut client = client_config(Transport::Udp);
    client.common.ciphers = vec![Cipher::Aes256Gcm, Cipher::ChaCha20Poly1305];
    let mut server = server_config(Transport::Udp);
    server.common.ciphers = vec![
        Cipher::Aes128Gcm,
        Cipher::ChaCha20Poly1305,
        Cipher::Aes256Gcm,
    ];
    let sim = connects(Sim::new(client, server, CLEAN, 1));
    assert_eq!(sim.client.established().cipher, Cipher::ChaCha20Poly1305);
}

#[test]
fn client_is_refused_without_a_shared_cipher() {
    for transport in BOTH {
        let mut client = client_config(transport);
        client.common.ciphers = vec![Cipher::ChaCha20Poly1305];
        let mut server = server_config(transport);
        server.common.ciphers = vec![Cipher::Aes256Gcm];
        let mut sim = Sim::new(client, server, CLEAN, 1);
        sim.run(Duration::from_secs(10));
        let Some(Ended::AuthFailed {
            reason,
            temporary: false,
        }) = sim.client.ended()
        else {
            panic!("{:?}", sim.client.events);
        };
        assert!(reason.contains("no shared cipher"), "{reason}");
        assert!(!reason.contains("AES-256-GCM"), "{reason}");
        let lists = Ended::NoSharedCipher {
            offered: "CHACHA20-POLY1305".to_owned(),
            allowed: "AES-256-GCM".to_owned(),
        };
        assert_eq!(sim.server.ended(), Some(&lists));
        let identity = sim.server.session.identity().unwrap();
        assert_eq!(identity.common_name, "user-cluster-client");
    }
}

/// The table has the peer info of other versions, and the expected exporter, peer-id and options.
#[test]
fn old_clients_get_only_supported_options() {
    let ciphers = "IV_CIPHERS=AES-256-GCM:AES-128-GCM";
    for (lines, exporter, peer_id, options) in [
        // 2.5.2, used by KKP
        (
            format!("IV_VER=2.5.2\nIV_PROTO=6\n{ciphers}\n"),
            false,
            true,
            "peer-id 7,cipher AES-256-GCM",
        ),
        // 2.4.12
        (
            format!("IV_VER=2.4.12\nIV_PROTO=2\nIV_NCP=2\n{ciphers}\n"),
            false,
            true,
            "peer-id 7,cipher AES-256-GCM",
        ),
        // 2.4 with ncp-disable
        (
            "IV_VER=2.4.12\nIV_PROTO=2\n".into(),
            false,
            true,
            "peer-id 7",
        ),
        // no peer info, so no peer-id either
        (String::new(), false, false, ""),
        // exporter without protocol-flags
        (
            format!("IV_PROTO=14\n{ciphers}\n"),
            true,
            true,
            "peer-id 7,cipher AES-256-GCM,key-derivation tls-ekm",
        ),
        // protocol-flags without exporter
        (
            format!("IV_PROTO=130\n{ciphers}\n"),
            false,
            true,
            "peer-id 7,cipher AES-256-GCM,protocol-flags cc-exit",
        ),
        // 2.6.14, then 2.7.6 with abilities that this crate declines
        (
            format!("IV_PROTO=990\nIV_MTU=1600\n{ciphers}\n"),
            true,
            true,
            "peer-id 7,cipher AES-256-GCM,protocol-flags cc-exit tls-ekm,tun-mtu 1500",
        ),
        (
            format!("IV_PROTO=8094\nIV_MTU=1400\n{ciphers}\n"),
            true,
            true,
            "peer-id 7,cipher AES-256-GCM,protocol-flags cc-exit tls-ekm,tun-mtu 1400",
        ),
    ] {
        for transport in BOTH {
            let mut client = client_config(transport);
            client.common.timers.reneg = Duration::from_secs(20);
            let mut sim = Sim::new(client, server_config(transport), CLEAN, 1);
            sim.client.session.pretended = Some(lines.clone());
            let mut sim = connects(sim);
            let server = sim.server.established();
            assert_eq!(
                (server.exporter, server.peer_id.is_some()),
                (exporter, peer_id),
                "{lines}"
            );
            assert_eq!(server.options[3..].join(","), options, "{lines}");
            sim.run(Duration::from_secs(30));
            assert_eq!(sim.server.rekeys(), 1);
            assert_eq!(sim.traffic(5, Duration::from_millis(1)), 0);
            sim.run(Duration::from_secs(1));
            assert_eq!((sim.client.inner.len(), sim.server.inner.len()), (25, 25));
        }
    }
}

#[test]
fn compression_framing_is_migrated_to_the_cheapest_form() {
    for (framing, lines, pushed) in [
        (
            Framing::Lzo,
            "IV_PROTO=6\nIV_NCP=2\nIV_COMP_STUBv2=1\n",
            Some("compress stub-v2"),
        ),
        (
            Framing::Stub,
            "IV_PROTO=6\nIV_NCP=2\nIV_LZO_STUB=1\n",
            Some("comp-lzo no"),
        ),
        (
            Framing::None,
            "IV_PROTO=6\nIV_NCP=2\nIV_COMP_STUBv2=1\n",
            None,
        ),
    ] {
        let mut client = client_config(Transport::Udp);
        client.common.framing = framing;
        let mut sim = Sim::new(client, server_config(Transport::Udp), CLEAN, 1);
        sim.client.session.pretended = Some(lines.into());
        let sim = connects(sim);
        let options = &sim.client.established().options;
        let found = options
            .iter()
            .find(|option| option.starts_with("comp"))
            .map(String::as_str);
        assert_eq!(found, pushed);
    }
}

#[test]
fn options_are_pushed_at_once_only_to_clients_that_expect_them() {
    // Without bit 2 of IV_PROTO the options arrive a second later, on request; with the bit they arrive at
    // once.
    for (lines, least) in [
        ("IV_PROTO=2\nIV_NCP=2\n", 1000),
        ("IV_PROTO=6\nIV_NCP=2\n", 0),
    ] {
        let mut sim = Sim::default(Transport::Tcp);
        sim.client.session.pretended = Some(lines.into());
        let start = sim.now;
        sim.connect();
        let took = (sim.now - start).as_millis();
        assert!((least..least + 500).contains(&took), "{lines}: {took} ms");
    }
}

#[test]
fn long_configuration_spans_several_texts() {
    let mut sim = Sim::default(Transport::Udp);
    sim.accept = false;
    sim.run(Duration::from_secs(1));
    assert!(matches!(sim.server.events[..], [Event::Authenticated(_)]));
    let options: Vec<String> = (0..300)
        .map(|n| format!("route 10.{}.{}.0 255.255.255.0", n / 250, n % 250))
        .collect();
    let now = sim.now;
    let bad = Push {
        options: vec!["route 1.2.3.4,ping 5".into()],
    };
    assert!(sim.server.session.accept(bad, now).is_err());
    sim.server
        .session
        .accept(
            Push {
                options: options.clone(),
            },
            now,
        )
        .unwrap();
    sim.connect();
    assert_eq!(sim.client.established().options[..300], options);
}

#[test]
fn credentials_reach_the_owner_and_logs_do_not_show_them() {
    let mut client = client_config(Transport::Tcp);
    client.credentials = Some(("jane".into(), "hunter2".into()));
    assert!(!format!("{client:?}").contains("hunter2"));
    let mut sim = Sim::new(client, server_config(Transport::Tcp), CLEAN, 1);
    sim.connect();
    let Event::Authenticated(who) = &sim.server.events[0] else {
        panic!()
    };
    assert_eq!(
        (who.username.as_str(), who.password.as_str()),
        ("jane", "hunter2")
    );
    assert!(!format!("{:?}", sim.server.events).contains("hunter2"));
}

#[test]
fn packets_larger_than_the_mtu_are_not_sent() {
    for transport in BOTH {
        // The client's configured maximum also applies over TCP.
        let mut client = client_config(transport);
        client.common.max_tun_mtu = 1500;
        let mut sim = Sim::new(client, server_config(transport), CLEAN, 1);
        assert!(!sim.send(To::Server, &[0x45; 100]), "not established");
        sim.connect();
        assert!(sim.send(To::Server, &[0x45; 1500]));
        let mut out = BytesMut::new();
        let now = sim.now;
        assert_eq!(
            sim.server.session.seal(&[0x45; 1501], now, &mut out),
            Err(SealError::TooLarge)
        );
        assert!(out.is_empty());
    }
}

#[test]
fn tap_and_fragment_are_refused_with_a_reason() {
    // Only stock sends these options, so the client sends a substituted options string.
    for (options, word) in [
        ("V4,dev-type tap", "dev tap"),
        ("V4,dev-type tun,mtu-dynamic", "fragment"),
    ] {
        let mut sim = Sim::default(Transport::Tcp);
        sim.client.session.pretended_options = Some(options.into());
        sim.run(Duration::from_secs(3));
        let Some(Ended::AuthFailed { reason, .. }) = sim.client.ended() else {
            panic!()
        };
        assert!(reason.contains(word), "{reason}");
    }
}

#[test]
fn client_refuses_tap_and_fragment_of_a_server() {
    for (options, word) in [
        ("V4,dev-type tap", "dev tap"),
        ("V4,dev-type tun,mtu-dynamic", "fragment"),
    ] {
        let mut sim = Sim::default(Transport::Tcp);
        sim.server.session.pretended_options = Some(options.into());
        sim.run(Duration::from_secs(3));
        let Some(Ended::Negotiation(text)) = sim.client.ended() else {
            panic!()
        };
        assert!(text.contains(word), "{text}");
    }
}

#[test]
fn keys_come_from_the_prf_if_either_side_cannot_export() {
    for exporters in [(false, true), (true, false)] {
        let mut client = client_config(Transport::Udp);
        let mut server = server_config(Transport::Udp);
        (client.common.exporter, server.common.exporter) = exporters;
        let sim = connects(Sim::new(client, server, CLEAN, 1));
        for end in [&sim.client, &sim.server] {
            assert!(!end.established().exporter);
        }
    }
}

#[test]
fn disconnect_reports_the_progress_of_the_handshake() {
    let now = Instant::now();
    let mut session = Session::client(Arc::new(client_config(Transport::Tcp)), now);
    session.disconnected(now);
    let Some(Event::Ended(ended)) = session.poll_event() else {
        panic!("no end");
    };
    let text = ended.to_string();
    assert!(
        text.starts_with("the peer closed the connection during the handshake"),
        "{text}"
    );
    assert!(session.poll_event().is_none());
}

#[test]
fn connect_timeout_limits_only_the_wait_for_the_first_answer() {
    let mut config = client_config(Transport::Udp);
    config.connect_timeout = Some(Duration::from_secs(5));
    for is_silent in [true, false] {
        let server = server_config(Transport::Udp);
        let mut sim = Sim::new(config.clone(), server, CLEAN, 1);
        let began = sim.now;
        if !is_silent {
            sim.run(3 * CLEAN.delay);
        }
        sim.net.loss = 1.0;
        let hand_window = config.common.timers.hand_window;
        for (until, is_over) in [
            (Duration::from_secs(4), false),
            (Duration::from_secs(6), is_silent),
            (hand_window - Duration::from_secs(1), is_silent),
            (hand_window + Duration::from_secs(1), true),
        ] {
            let lived = sim.now - began;
            sim.run(until - lived);
            let ended = sim.client.ended();
            assert_eq!(
                matches!(ended, Some(Ended::HandshakeTimeout { .. })),
                is_over
            );
        }
    }
}
