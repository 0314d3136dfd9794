//! A link between a stock peer and one of our sessions, in separate network namespaces.

use std::net::{Ipv4Addr, SocketAddrV4};
use std::panic::AssertUnwindSafe;
use std::sync::Arc;
use std::time::Duration;

use culvert_openvpn::Role;
use culvert_openvpn::session::{ClientConfig, Common, ServerConfig, Transport};
use culvert_openvpn::tls::{ClientTls, Identity, MinVersion, ServerCheck, ServerTls};
use culvert_openvpn::wrap::static_key;
use culvert_openvpn::wrap::{KeyDirection, WrapKey};
use culvert_tests::eventually;
use culvert_tests::openvpn::cluster::serve;
use culvert_tests::openvpn::pki::Pair;
use culvert_tests::openvpn::stock::{Options, lost_pings};
use culvert_tests::openvpn::{Endpoint, Link, Namespace, OpenVpn, Pki, Stock, scenario};
use culvert_tests::topology::PATIENCE;
use futures_util::FutureExt as _;
use futures_util::future::join_all;

/// The server's address in the tunnel.
pub(crate) const SERVER: Ipv4Addr = Ipv4Addr::new(10, 20, 0, 1);

/// The first client's address in the tunnel.
pub(crate) const CLIENT: Ipv4Addr = Ipv4Addr::new(10, 20, 0, 6);

/// Options that our server pushes to a client, like a stock server with topology net30.
pub(crate) const PUSH: [&str; 3] = [
    "topology net30",
    "ifconfig 10.20.0.6 10.20.0.5",
    "route 10.20.0.1",
];

/// Number of bytes per direction for every pair.
const BULK: u64 = 300_001;

/// Transport protocol of a tunnel.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum Proto {
    Tcp,
    Udp,
}

impl Proto {
    pub(crate) fn name(self) -> &'static str {
        match self {
            Self::Tcp => "tcp",
            Self::Udp => "udp",
        }
    }

    fn transport(self) -> Transport {
        match self {
            Self::Tcp => Transport::Tcp,
            Self::Udp => Transport::Udp,
        }
    }
}

/// A link between two network namespaces: ours and the stock program's.
#[derive(Debug)]
pub(crate) struct Wire {
    pub ours: Namespace,
    pub theirs: Namespace,
    pub our_address: Ipv4Addr,
    pub their_address: Ipv4Addr,
}

impl Wire {
    /// Creates a link. `number` must be unique within a test.
    pub(crate) fn new(number: u8) -> Self {
        let ours = Namespace::add(&format!("ours{number}"));
        let theirs = Namespace::add(&format!("theirs{number}"));
        let our_address = Ipv4Addr::new(192, 168, number, 1);
        let their_address = Ipv4Addr::new(192, 168, number, 2);
        ours.link(
            &format!("{our_address}/24"),
            &theirs,
            &format!("{their_address}/24"),
        );
        Self {
            ours,
            theirs,
            our_address,
            their_address,
        }
    }

    pub(crate) fn listener(&self, proto: Proto) -> Listener {
        let at = SocketAddrV4::new(self.our_address, 1194);
        match proto {
            Proto::Tcp => Listener::Tcp(self.ours.listen(at)),
            Proto::Udp => Listener::Udp(self.ours.udp(at)),
        }
    }

    /// Starts a stock client of our server.
    pub(crate) fn stock_client(
        &self,
        openvpn: &OpenVpn,
        proto: Proto,
        pki: &Pki,
        with: &str,
    ) -> Stock {
        let options = Options::client(proto.name(), &self.our_address.to_string(), pki);
        openvpn.start(&self.theirs, &options.with(with))
    }

    /// Starts a stock server, and waits until the server listens.
    pub(crate) async fn stock_server(
        &self,
        openvpn: &OpenVpn,
        proto: Proto,
        pki: &Pki,
        with: &str,
    ) -> Stock {
        let options = Options::server(proto.name(), pki);
        let mut server = openvpn.start(&self.theirs, &options.with(with));
        server.is_up().await;
        server
    }

    /// Connects to the stock server.
    pub(crate) async fn link(&self, proto: Proto) -> Link {
        let to = SocketAddrV4::new(self.their_address, 1194);
        match proto {
            Proto::Tcp => {
                let connect = async || self.ours.connect(to).await;
                Link::tcp(eventually("a connection", PATIENCE, connect).await)
            }
            Proto::Udp => {
                let socket = self.ours.udp(SocketAddrV4::new(self.our_address, 0));
                Link::udp(socket, Some(to.into()))
            }
        }
    }
}

/// Runs `body` for all cases at once, numbered from 1.
///
/// # Panics
/// If a case has panicked, after all cases have ended.
pub(crate) async fn each<T>(cases: impl IntoIterator<Item = T>, body: impl AsyncFn(u8, T)) {
    let body = &body;
    let runs = (1..).zip(cases).map(async |(number, case)| {
        let run = AssertUnwindSafe(body(number, case)).catch_unwind();
        run.await.is_ok()
    });
    let passed = join_all(runs).await;
    let count = passed.len();
    let failed = passed.iter().filter(|passed| !**passed).count();
    assert_eq!(failed, 0, "failed cases out of {count}; see above");
}

/// Listening socket of our server.
pub(crate) enum Listener {
    Tcp(tokio::net::TcpListener),
    Udp(tokio::net::UdpSocket),
}

impl Listener {
    /// Returns the link to the next client. Over UDP, there is only one client.
    pub(crate) async fn link(self) -> Link {
        match self {
            Self::Tcp(listener) => Link::tcp(listener.accept().await.expect("a client").0),
            Self::Udp(socket) => Link::udp(socket, None),
        }
    }
}

fn read(path: &std::path::Path) -> Vec<u8> {
    std::fs::read(path).expect("a file")
}

fn identity(pair: &Pair) -> Identity {
    Identity::from_pem(&read(&pair.cert), &read(&pair.key)).expect("a certificate")
}

/// Returns the configuration of a server of ours with the certificate in `pair`.
pub(crate) fn server_config(proto: Proto, pki: &Pki, pair: &Pair) -> ServerConfig {
    let tls = ServerTls::new(
        &read(&pki.ca),
        None,
        identity(pair),
        MinVersion::Tls12,
        false,
    );
    ServerConfig::new(proto.transport(), Arc::new(tls.expect("a TLS server")))
}

/// Returns the configuration of a client of ours with the certificate in `pair`.
pub(crate) fn client_config(proto: Proto, pki: &Pki, pair: &Pair) -> ClientConfig {
    let check = ServerCheck {
        require_usage: true,
        name: None,
    };
    let tls = ClientTls::new(
        &read(&pki.ca),
        Some(identity(pair)),
        check,
        MinVersion::Tls12,
    );
    ClientConfig::new(proto.transport(), Arc::new(tls.expect("a TLS client")))
}

/// Enables `tls-auth`.
pub(crate) fn tls_auth(key: &str, direction: KeyDirection, common: &mut Common) {
    let key = static_key::parse(key).expect("a static key");
    common.wrap = WrapKey::tls_auth(&key, direction, common.digest);
    common.tls_auth = Some(direction);
}

/// Enables `tls-crypt`.
pub(crate) fn tls_crypt(key: &str, role: Role, common: &mut Common) {
    let key = static_key::parse(key).expect("a static key");
    common.wrap = WrapKey::tls_crypt(&key, role).expect("a key");
}

/// Interval of pings. Once all requests are sent, ping waits for the last reply only twice the longest round trip, or
/// one interval (iputils `__schedule_exit`), and `-W` has no effect on this wait. A TLS handshake on a busy machine
/// takes longer than 20 ms.
const PING_INTERVAL: Duration = Duration::from_millis(250);

/// Checks pings in both directions, and TCP from the flows of our server to services at the stock client.
pub(crate) async fn our_server_carries(ours: &Endpoint, wire: &Wire) {
    let interval = PING_INTERVAL;
    assert_eq!(
        lost_pings(&wire.theirs, &SERVER.to_string(), 5, interval).await,
        0
    );
    assert_eq!(ours.lost_pings(CLIENT, 5, interval).await, 0);
    let _services = serve(&wire.theirs).await;
    scenario::carries(ours, CLIENT, BULK).await;
    scenario::refuses(ours, CLIENT).await;
}

/// Checks pings in both directions, and TCP from the stock server to services behind the flows of our client.
pub(crate) async fn our_client_carries(ours: &Endpoint, wire: &Wire, own: Ipv4Addr) {
    let interval = PING_INTERVAL;
    assert_eq!(
        lost_pings(&wire.theirs, &own.to_string(), 5, interval).await,
        0
    );
    assert_eq!(ours.lost_pings(SERVER, 5, interval).await, 0);
    // Our client dials services in this namespace.
    wire.ours.address(own);
    let _services = serve(&wire.ours).await;
    scenario::carries(&wire.theirs, own, BULK).await;
    scenario::refuses(&wire.theirs, own).await;
}
