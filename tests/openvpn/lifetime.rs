//! Renegotiations, exit notifications, and peers that stop, die and reconnect.

use std::time::Duration;

use culvert_tests::Signal;
use culvert_tests::namespace::alone;
use culvert_tests::openvpn::stock::{Options, lost_pings};
use culvert_tests::openvpn::{Endpoint, OpenVpn, Pki};

use crate::support::{
    CLIENT, Listener, PUSH, Proto, SERVER, Wire, client_config, each, our_client_carries,
    our_server_carries, server_config,
};

/// The side that starts the renegotiations.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum Starter {
    Ours,
    Theirs,
    Both,
}

impl Starter {
    fn ours(self) -> Duration {
        match self {
            Self::Ours | Self::Both => Duration::from_secs(3),
            Self::Theirs => Duration::ZERO,
        }
    }

    fn theirs(self) -> &'static str {
        match self {
            Self::Theirs | Self::Both => "--reneg-sec 3",
            Self::Ours => "--reneg-sec 0",
        }
    }
}

/// Returns the cases: transport, starting side, and use of TLS keying material exporters. Each pair
/// renegotiates at least three times.
fn starters() -> [(Proto, Starter, bool); 6] {
    [
        (Proto::Tcp, Starter::Ours, true),
        (Proto::Tcp, Starter::Theirs, true),
        (Proto::Udp, Starter::Ours, true),
        (Proto::Udp, Starter::Theirs, true),
        (Proto::Udp, Starter::Both, true),
        // Without the TLS exporter.
        (Proto::Tcp, Starter::Both, false),
    ]
}

/// Number and interval of the pings during the renegotiations.
const FLOOD: (u16, Duration) = (1000, Duration::from_millis(10));

#[test]
fn our_server_renegotiates_without_packet_loss() {
    alone(async || {
        let Some(openvpn) = OpenVpn::get() else {
            return;
        };
        let pki = Pki::create();
        each(starters(), async |number, (proto, starter, exporter)| {
            let wire = Wire::new(number);
            let mut config = server_config(proto, &pki, &pki.server);
            config.common.timers.reneg = starter.ours();
            config.common.exporter = exporter;
            let listener = wire.listener(proto);
            let mut client = wire.stock_client(openvpn, proto, &pki, starter.theirs());
            let ours = Endpoint::server(listener.link().await, config, &PUSH);
            ours.established().await;
            client.is_up().await;
            let server = SERVER.to_string();
            let (theirs, own) = tokio::join!(
                lost_pings(&wire.theirs, &server, FLOOD.0.into(), FLOOD.1),
                ours.lost_pings(CLIENT, FLOOD.0 / 2, 2 * FLOOD.1),
            );
            assert_eq!((theirs, own), (0, 0), "{proto:?} {starter:?}");
            ours.rekeyed(3).await;
            our_server_carries(&ours, &wire).await;
            is_quiet(&ours, &client.program.log());
        })
        .await;
    });
}

#[test]
fn our_client_renegotiates_without_packet_loss() {
    alone(async || {
        let Some(openvpn) = OpenVpn::get() else {
            return;
        };
        let pki = Pki::create();
        each(starters(), async |number, (proto, starter, exporter)| {
            let wire = Wire::new(number);
            let mut config = client_config(proto, &pki, &pki.user_cluster);
            config.common.timers.reneg = starter.ours();
            config.common.exporter = exporter;
            let server = wire
                .stock_server(openvpn, proto, &pki, starter.theirs())
                .await;
            let cluster = Some(wire.ours.clone());
            let ours = Endpoint::client(wire.link(proto).await, config, cluster);
            ours.established().await;
            let client = CLIENT.to_string();
            let (theirs, own) = tokio::join!(
                lost_pings(&wire.theirs, &client, FLOOD.0.into(), FLOOD.1),
                ours.lost_pings(SERVER, FLOOD.0 / 2, 2 * FLOOD.1),
            );
            assert_eq!((theirs, own), (0, 0), "{proto:?} {starter:?}");
            ours.rekeyed(3).await;
            our_client_carries(&ours, &wire, CLIENT).await;
            is_quiet(&ours, &server.program.log());
        })
        .await;
    });
}

/// Asserts that no renegotiation failed on either side.
fn is_quiet(ours: &Endpoint, log: &str) {
    let seen = ours.seen();
    assert_eq!(seen.ended, None);
    assert_eq!(seen.notices, [""; 0]);
    assert_eq!(seen.stats.rekeys_failed, 0);
    for complaint in ["TLS Error", "TLS handshake failed", "Authenticate/Decrypt"] {
        let line = log.lines().find(|line| line.contains(complaint));
        assert_eq!(line, None);
    }
}

#[test]
fn exit_notifications_end_the_session() {
    alone(async || {
        let Some(openvpn) = OpenVpn::get() else {
            return;
        };
        let pki = Pki::create();
        // A stock client sends an exit notification in the control channel.
        let wire = Wire::new(1);
        let listener = wire.listener(Proto::Udp);
        let with = "--explicit-exit-notify 1";
        let mut client = wire.stock_client(openvpn, Proto::Udp, &pki, with);
        let config = server_config(Proto::Udp, &pki, &pki.server);
        let ours = Endpoint::server(listener.link().await, config, &PUSH);
        ours.established().await;
        client.is_up().await;
        client.stop().await;
        assert_eq!(ours.ended().await, "the peer left");

        // A stock client that ignores the pushed protocol flags sends an exit notification as a data packet.
        let wire = Wire::new(2);
        let listener = wire.listener(Proto::Udp);
        let with = "--explicit-exit-notify 1 --pull-filter ignore protocol-flags";
        let mut client = wire.stock_client(openvpn, Proto::Udp, &pki, with);
        let mut config = server_config(Proto::Udp, &pki, &pki.server);
        config.common.exporter = false;
        let ours = Endpoint::server(listener.link().await, config, &PUSH);
        ours.established().await;
        client.is_up().await;
        client.stop().await;
        assert_eq!(ours.ended().await, "the peer left");

        // Our client notifies a stock server.
        let wire = Wire::new(3);
        let with = "--explicit-exit-notify 1";
        let server = wire.stock_server(openvpn, Proto::Udp, &pki, with).await;
        let config = client_config(Proto::Udp, &pki, &pki.user_cluster);
        let ours = Endpoint::client(wire.link(Proto::Udp).await, config, None);
        ours.established().await;
        ours.close().await;
        server.says("exit message received by peer", 1).await;

        // A stock server that exits asks its clients to reconnect.
        let config = client_config(Proto::Udp, &pki, &pki.user_cluster);
        let ours = Endpoint::client(wire.link(Proto::Udp).await, config, None);
        ours.established().await;
        server.program.signal(Signal::TERM);
        let why = ours.ended().await;
        assert!(why.starts_with("the server asks to connect again"), "{why}");

        // Our server notifies a stock client.
        let wire = Wire::new(4);
        let listener = wire.listener(Proto::Udp);
        let mut client = wire.stock_client(openvpn, Proto::Udp, &pki, "");
        let config = server_config(Proto::Udp, &pki, &pki.server);
        let ours = Endpoint::server(listener.link().await, config, &PUSH);
        ours.established().await;
        client.is_up().await;
        ours.close().await;
        client.says("exit", 1).await;
    });
}

#[test]
fn a_stopped_client_times_out_and_reconnects() {
    alone(async || {
        let Some(openvpn) = OpenVpn::get() else {
            return;
        };
        let (pki, wire) = (Pki::create(), Wire::new(1));
        let Listener::Tcp(listener) = wire.listener(Proto::Tcp) else {
            unreachable!()
        };
        let mut client = wire.stock_client(openvpn, Proto::Tcp, &pki, "--ping 1 --ping-restart 4");
        let accept = async || {
            let mut config = server_config(Proto::Tcp, &pki, &pki.server);
            config.common.timers.ping = Some(Duration::from_secs(1));
            config.common.timers.ping_restart = Some(Duration::from_secs(3));
            let (stream, _) = listener.accept().await.unwrap();
            let ours = Endpoint::server(culvert_tests::openvpn::Link::tcp(stream), config, &PUSH);
            ours.established().await;
            ours
        };
        let ours = accept().await;
        client.is_up().await;
        client.program.signal(Signal::STOP);
        assert_eq!(ours.ended().await, "nothing received for 3 s");
        drop(ours);
        // The client continues, and finds the connection closed.
        client.program.signal(Signal::CONT);
        let ours = accept().await;
        client.is_up_again(2).await;
        our_server_carries(&ours, &wire).await;

        // The client is killed and replaced.
        client.program.kill();
        assert_eq!(ours.ended().await, "the peer closed the connection");
        let mut client = wire.stock_client(openvpn, Proto::Tcp, &pki, "");
        let ours = accept().await;
        client.is_up().await;
        our_server_carries(&ours, &wire).await;
    });
}

#[test]
fn a_stopped_server_times_out_and_serves_a_new_connection() {
    alone(async || {
        let Some(openvpn) = OpenVpn::get() else {
            return;
        };
        let (pki, wire) = (Pki::create(), Wire::new(1));
        // The server pushes `ping 1` and `ping-restart 3`.
        let server = wire
            .stock_server(openvpn, Proto::Udp, &pki, "--keepalive 1 3")
            .await;
        let connect = async || {
            let config = client_config(Proto::Udp, &pki, &pki.user_cluster);
            let cluster = Some(wire.ours.clone());
            let ours = Endpoint::client(wire.link(Proto::Udp).await, config, cluster);
            ours.established().await;
            ours
        };
        let ours = connect().await;
        server.program.signal(Signal::STOP);
        assert_eq!(ours.ended().await, "nothing received for 3 s");
        server.program.signal(Signal::CONT);
        let ours = connect().await;
        // The server is killed without a notification, and replaced.
        server.program.kill();
        assert_eq!(ours.ended().await, "nothing received for 3 s");
        let _server = wire
            .stock_server(openvpn, Proto::Udp, &pki, "--keepalive 1 3")
            .await;
        let ours = connect().await;
        our_client_carries(&ours, &wire, CLIENT).await;
    });
}

#[test]
fn a_client_that_returns_over_udp_replaces_its_old_session() {
    alone(async || {
        let Some(openvpn) = OpenVpn::get() else {
            return;
        };
        let (pki, wire) = (Pki::create(), Wire::new(1));
        let listener = wire.listener(Proto::Udp);
        // The client returns from the same port, like a client behind NAT.
        let start = || {
            let options = Options::default()
                .with("--client --dev tun --verb 4 --proto udp --lport 5000")
                .with(&format!("--remote {} 1194", wire.our_address))
                .identity(&pki.ca, &pki.user_cluster);
            openvpn.start(&wire.theirs, &options)
        };
        let mut client = start();
        let config = server_config(Proto::Udp, &pki, &pki.server);
        let ours = Endpoint::server(listener.link().await, config, &PUSH);
        ours.established().await;
        client.is_up().await;
        client.program.kill();
        let mut client = start();
        client.is_up().await;
        assert_eq!(ours.seen().sessions, 2);
        our_server_carries(&ours, &wire).await;
        client.program.kill();

        // The client returns from another port.
        let mut client = wire.stock_client(openvpn, Proto::Udp, &pki, "");
        client.is_up().await;
        assert_eq!(ours.seen().sessions, 3);
        our_server_carries(&ours, &wire).await;
    });
}
