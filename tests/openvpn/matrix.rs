//! The options of OpenVPN, one by one, with our sessions in either role.

use culvert_openvpn::Role;
use culvert_openvpn::cipher::{Cipher, Digest};
use culvert_openvpn::compress::Framing;
use culvert_openvpn::session::{Common, Established};
use culvert_openvpn::wrap::KeyDirection;
use culvert_tests::namespace::alone;
use culvert_tests::openvpn::{Endpoint, OpenVpn, Pki};

use crate::support::{
    PUSH, Proto, Wire, client_config, each, our_client_carries, our_server_carries, server_config,
    tls_auth, tls_crypt,
};

use Proto::{Tcp, Udp};

/// Opcode of data packets without a peer id.
const DATA_V1: u8 = 6;
/// Opcode of data packets with a peer id.
const DATA_V2: u8 = 9;

/// One pair of a stock peer and our session.
struct Case {
    proto: Proto,
    /// Options of the stock program; `KEY` stands for the path of a static key.
    stock: &'static str,
    /// Sets the same options for our session, from the text of the static key.
    ours: fn(&mut Common, &str),
    /// Checks the negotiated parameters.
    agreed: fn(&Established) -> bool,
}

/// Keeps all defaults.
fn plain(_: &mut Common, _: &str) {}

fn is_default(agreed: &Established) -> bool {
    agreed.cipher == Cipher::Aes256Gcm && agreed.exporter && agreed.tls.contains("1_3")
}

/// Offers one cipher.
fn only(common: &mut Common, cipher: Cipher) {
    common.ciphers = vec![cipher];
}

/// Returns the cases that exist in both roles. `role` is the role of our session.
fn cases(role: Role) -> Vec<Case> {
    let case = |proto, stock, ours, agreed| Case {
        proto,
        stock,
        ours,
        agreed,
    };
    let mut cases = vec![
        case(Tcp, "", plain, is_default),
        case(Udp, "", plain, is_default),
        case(Tcp, "--tls-version-max 1.2", plain, |agreed| {
            agreed.exporter && agreed.tls.contains("1_2")
        }),
        case(Udp, "--data-ciphers AES-128-GCM", plain, |agreed| {
            agreed.cipher == Cipher::Aes128Gcm
        }),
        case(Udp, "--data-ciphers CHACHA20-POLY1305", plain, |agreed| {
            agreed.cipher == Cipher::ChaCha20Poly1305
        }),
        case(
            Tcp,
            "--data-ciphers AES-256-CBC",
            |common, _| only(common, Cipher::Aes256Cbc),
            |agreed| agreed.cipher == Cipher::Aes256Cbc,
        ),
        case(
            Udp,
            "--data-ciphers AES-256-CBC --auth SHA256",
            |common, _| {
                only(common, Cipher::Aes256Cbc);
                common.digest = Digest::Sha256;
            },
            |agreed| agreed.cipher == Cipher::Aes256Cbc,
        ),
    ];
    let wraps = match role {
        Role::Server => [
            case(
                Tcp,
                "--tls-auth KEY 1",
                |common, key| tls_auth(key, KeyDirection::Normal, common),
                is_default,
            ),
            case(
                Udp,
                "--tls-crypt KEY",
                |common, key| tls_crypt(key, Role::Server, common),
                is_default,
            ),
            case(
                Tcp,
                "--tls-crypt KEY --tls-version-max 1.2",
                |common, key| tls_crypt(key, Role::Server, common),
                |agreed| agreed.tls.contains("1_2"),
            ),
        ],
        Role::Client => [
            case(
                Tcp,
                "--tls-auth KEY 0",
                |common, key| tls_auth(key, KeyDirection::Inverse, common),
                is_default,
            ),
            case(
                Udp,
                "--tls-crypt KEY",
                |common, key| tls_crypt(key, Role::Client, common),
                is_default,
            ),
            case(
                Tcp,
                "--tls-crypt KEY --tls-version-max 1.2",
                |common, key| tls_crypt(key, Role::Client, common),
                |agreed| agreed.tls.contains("1_2"),
            ),
        ],
    };
    cases.extend(wraps);
    cases.push(case(
        Udp,
        "--tls-auth KEY --auth SHA256",
        |common, key| {
            common.digest = Digest::Sha256;
            tls_auth(key, KeyDirection::Both, common);
        },
        is_default,
    ));
    cases
}

/// Returns the cases that exist only for our server.
fn odd_clients() -> Vec<Case> {
    let case = |proto, stock| Case {
        proto,
        stock,
        ours: plain,
        agreed: is_default,
    };
    vec![
        case(Tcp, "--comp-lzo no"),
        case(Udp, "--compress stub"),
        case(Tcp, "--compress stub-v2"),
        // The client ignores its peer id, and therefore sends P_DATA_V1.
        case(Tcp, "--pull-filter ignore peer-id"),
        case(Udp, "--pull-filter ignore peer-id"),
        case(Tcp, "--link-mtu 1432"),
    ]
}

/// Returns the cases that exist only for our client.
fn odd_servers() -> Vec<Case> {
    let case = |proto, stock, ours| Case {
        proto,
        stock,
        ours,
        agreed: is_default,
    };
    vec![
        case(Tcp, "--topology subnet", plain),
        case(Tcp, "--topology p2p", plain),
        case(Tcp, "--keepalive 1 10", plain),
        case(Udp, "--comp-lzo no --push \"comp-lzo no\"", plain),
        case(Tcp, "--compress stub --push \"compress stub\"", plain),
        case(Tcp, "--compress stub-v2 --push \"compress stub-v2\"", plain),
        case(Udp, "--comp-lzo no", |common, _| {
            common.framing = Framing::Lzo
        }),
    ]
}

#[test]
fn our_server_works_with_stock_clients() {
    alone(async || {
        let Some(openvpn) = OpenVpn::get() else {
            return;
        };
        let pki = Pki::create();
        let cases = [cases(Role::Server), odd_clients()];
        each(cases.into_iter().flatten(), async |number, case| {
            stock_client(openvpn, &pki, number, &case).await;
        })
        .await;
    });
}

#[test]
fn our_client_works_with_stock_servers() {
    alone(async || {
        let Some(openvpn) = OpenVpn::get() else {
            return;
        };
        let pki = Pki::create();
        let cases = [cases(Role::Client), odd_servers()];
        each(cases.into_iter().flatten(), async |number, case| {
            stock_server(openvpn, &pki, number, &case).await;
        })
        .await;
    });
}

async fn stock_client(openvpn: &OpenVpn, pki: &Pki, number: u8, case: &Case) {
    let name = format!("{:?} {}", case.proto, case.stock);
    let wire = Wire::new(number);
    let (file, key) = pki.static_key();
    let mut config = server_config(case.proto, pki, &pki.server);
    (case.ours)(&mut config.common, &key);
    let listener = wire.listener(case.proto);
    let stock = case.stock.replace("KEY", file.to_str().unwrap());
    let mut client = wire.stock_client(openvpn, case.proto, pki, &stock);
    let ours = Endpoint::server(listener.link().await, config, &PUSH);
    let agreed = ours.established().await;
    assert!((case.agreed)(&agreed), "{name}: {agreed:?}");
    let peer = agreed
        .identity
        .as_ref()
        .map(|peer| peer.common_name.as_str());
    assert_eq!(peer, Some("user-cluster-client"), "{name}");
    client.is_up().await;
    our_server_carries(&ours, &wire).await;
    let received = ours.seen().received;
    let version = if case.stock.contains("peer-id") {
        [DATA_V1, DATA_V2]
    } else {
        [DATA_V2, DATA_V1]
    };
    assert!(received.contains_key(&version[0]), "{name}: {received:?}");
    assert!(!received.contains_key(&version[1]), "{name}: {received:?}");
    is_clean(&name, &ours, &client.program.log());
}

async fn stock_server(openvpn: &OpenVpn, pki: &Pki, number: u8, case: &Case) {
    let name = format!("{:?} {}", case.proto, case.stock);
    let wire = Wire::new(number);
    let (file, key) = pki.static_key();
    let mut config = client_config(case.proto, pki, &pki.user_cluster);
    (case.ours)(&mut config.common, &key);
    let stock = case.stock.replace("KEY", file.to_str().unwrap());
    let server = wire.stock_server(openvpn, case.proto, pki, &stock).await;
    let link = wire.link(case.proto).await;
    let ours = Endpoint::client(link, config, Some(wire.ours.clone()));
    let agreed = ours.established().await;
    assert!((case.agreed)(&agreed), "{name}: {agreed:?}");
    let peer = agreed
        .identity
        .as_ref()
        .map(|peer| peer.common_name.as_str());
    assert_eq!(peer, Some("openvpn-server"), "{name}");
    let own = agreed.push.as_ref().unwrap().ifconfig.unwrap().local;
    our_client_carries(&ours, &wire, own).await;
    is_clean(&name, &ours, &server.program.log());
}

/// Asserts that our session dropped no packet, and that the stock peer logged no complaint about the options.
fn is_clean(name: &str, ours: &Endpoint, log: &str) {
    let seen = ours.seen();
    let dropped = culvert_openvpn::session::Stats {
        packets_in: 0,
        bytes_in: 0,
        packets_out: 0,
        bytes_out: 0,
        ..seen.stats
    };
    assert_eq!(
        dropped,
        culvert_openvpn::session::Stats::default(),
        "{name}"
    );
    assert_eq!(seen.ended, None, "{name}");
    for complaint in ["is used inconsistently", "is present in", "error", "Bad "] {
        let line = log.lines().find(|line| line.contains(complaint));
        assert_eq!(line, None, "{name}");
    }
}
