//! Links that repeat, damage and invent packets.

use std::net::SocketAddrV4;
use std::time::Duration;

use culvert_openvpn::Role;
use culvert_openvpn::wrap::KeyDirection;
use culvert_tests::namespace::alone;
use culvert_tests::openvpn::stock::{Options, lost_pings};
use culvert_tests::openvpn::tamper::Tamper;
use culvert_tests::openvpn::{Endpoint, Link, OpenVpn, Pki};

use crate::support::{
    CLIENT, PUSH, Proto, SERVER, Wire, client_config, our_client_carries, our_server_carries,
    server_config, tls_auth, tls_crypt,
};

/// Port of the tampering relay, next to the server.
const TAMPERED: u16 = 1195;

#[test]
fn our_server_survives_a_tampered_link() {
    alone(async || {
        let Some(openvpn) = OpenVpn::get() else {
            return;
        };
        let (pki, wire) = (Pki::create(), Wire::new(1));
        let (file, key) = pki.static_key();
        let at = |port| SocketAddrV4::new(wire.our_address, port);
        let tamper = Tamper::start(&wire.ours, at(TAMPERED), at(1194));
        let mut config = server_config(Proto::Udp, &pki, &pki.server);
        tls_auth(&key, KeyDirection::Normal, &mut config.common);
        let listener = wire.listener(Proto::Udp);
        let options = Options::default()
            .with(
                "--client --proto udp --dev tun --nobind --verb 4 --key-direction 1 --reneg-sec 3",
            )
            .with(&format!("--remote {} {TAMPERED}", wire.our_address))
            .option("--tls-auth", &file)
            .identity(&pki.ca, &pki.user_cluster);
        let mut client = openvpn.start(&wire.theirs, &options);
        let ours = Endpoint::server(listener.link().await, config, &PUSH);
        ours.established().await;
        client.is_up().await;
        our_server_carries(&ours, &wire).await;
        let interval = Duration::from_millis(10);
        assert_eq!(
            lost_pings(&wire.theirs, &SERVER.to_string(), 400, interval).await,
            0
        );
        ours.rekeyed(1).await;
        survived(&ours, &tamper);
    });
}

#[test]
fn our_client_survives_a_tampered_link() {
    alone(async || {
        let Some(openvpn) = OpenVpn::get() else {
            return;
        };
        let (pki, wire) = (Pki::create(), Wire::new(1));
        let (file, key) = pki.static_key();
        let server = SocketAddrV4::new(wire.their_address, 1194);
        let near = SocketAddrV4::new(wire.our_address, TAMPERED);
        let tamper = Tamper::start(&wire.ours, near, server);
        let with = format!("--tls-crypt {} --reneg-sec 3", file.display());
        let _stock = wire.stock_server(openvpn, Proto::Udp, &pki, &with).await;
        let mut config = client_config(Proto::Udp, &pki, &pki.user_cluster);
        tls_crypt(&key, Role::Client, &mut config.common);
        let socket = wire.ours.udp(SocketAddrV4::new(wire.our_address, 0));
        let link = Link::udp(socket, Some(near.into()));
        let ours = Endpoint::client(link, config, Some(wire.ours.clone()));
        ours.established().await;
        our_client_carries(&ours, &wire, CLIENT).await;
        let interval = Duration::from_millis(10);
        assert_eq!(
            lost_pings(&wire.theirs, &CLIENT.to_string(), 400, interval).await,
            0
        );
        ours.rekeyed(1).await;
        survived(&ours, &tamper);
    });
}

/// Asserts that the session is still up, and that the bad packets were dropped and counted by kind.
fn survived(ours: &Endpoint, tamper: &Tamper) {
    let seen = ours.seen();
    assert_eq!(seen.ended, None);
    let stats = seen.stats;
    eprintln!("{} datagrams were added: {stats:?}", tamper.added());
    for (what, count) in [
        ("damaged data", stats.bad_data),
        ("repeated data", stats.replayed_data),
        ("noise", stats.malformed + stats.unsupported),
        ("damaged control packets", stats.bad_wrap),
    ] {
        assert!(count > 0, "no {what}: {stats:?}");
    }
}
