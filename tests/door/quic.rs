//! QUIC connections, routed by server name and then by connection id.

mod flood;
mod foreign;
mod support;

use std::net::SocketAddr;

use culvert_native::quic::connection_id::{ConnectionId, Tag};
use culvert_tests::eventually;
use culvert_tests::process::Signal;
use culvert_tests::skip::skip;
use futures_util::future::join_all;
use socket2::{Domain, Protocol, Socket, Type};
use tokio::net::UdpSocket;

use self::support::{
    ALPN, Nat, QuicEndpoint, ask, client, client_with, connect, door, first_datagrams, receive, udp,
};
use crate::support::{Door, LIMIT, TlsEndpoint, Upstream};

const NAME: &str = "one.example.com";

/// Returns the number of flows that were opened.
async fn opened(door: &Door) -> f64 {
    let labels = [("listener", "quic")];
    door.value("culvert_nodeport_proxy_connections_total", &labels)
        .await
}

/// Waits until `count` flows are open.
async fn has_flows(door: &Door, count: f64) {
    eventually("the number of flows", LIMIT, async || {
        let labels = [("listener", "quic")];
        let open = door
            .value("culvert_nodeport_proxy_connections", &labels)
            .await;
        (open == count).then_some(()).ok_or(open)
    })
    .await;
}

/// Starts a front door whose only endpoint is a plain UDP socket.
async fn door_of_socket(flags: &[&str]) -> (Door, UdpSocket) {
    let endpoint = udp().await;
    let upstream = Upstream::new("ns/one", endpoint.local_addr().unwrap())
        .server_name(NAME)
        .quic_port("same");
    (door(&[upstream], flags).await, endpoint)
}

/// Asserts that no datagram has arrived. Whatever the front door forwards, it forwards before it counts a later
/// datagram as refused.
fn is_silent(endpoint: &UdpSocket) {
    let received = endpoint.try_recv(&mut [0]);
    assert!(received.is_err(), "{received:?}");
}

#[tokio::test]
async fn each_name_reaches_its_service() {
    let one = QuicEndpoint::start(NAME);
    let two = QuicEndpoint::start("two.apps.example.com");
    let door = door(
        &[
            one.upstream("ns/one", "One.example.com"),
            two.upstream("ns/two", "*.apps.example.com"),
        ],
        &[],
    )
    .await;
    let first = one.answers(door.sni, NAME).await;
    two.answers(door.sni, "two.apps.example.com").await;
    // One socket of a client may have several connections to an endpoint.
    let shared = client(&one.certificate, false);
    let pair = [
        connect(&shared, door.sni, "ONE.example.com").await,
        connect(&shared, door.sni, NAME).await,
    ];
    for connection in &pair {
        assert_eq!(ask(connection, b"").await, NAME.as_bytes());
    }
    let large = vec![7; 4 << 20];
    let answer = ask(&first, &large).await;
    assert_eq!(answer[NAME.len()..], large);
    let labels = [("envoy_cluster_name", "ns/one")];
    for name in [
        "envoy_cluster_upstream_cx_tx_bytes_total",
        "envoy_cluster_upstream_cx_rx_bytes_total",
    ] {
        let bytes = door.value(name, &labels).await;
        assert!(bytes > large.len() as f64, "{name} {bytes}");
    }
    assert_eq!(opened(&door).await, 3.0);
}

#[tokio::test]
async fn hello_in_two_datagrams_is_routed_in_any_order() {
    let one = QuicEndpoint::start(NAME);
    let door = door(&[one.upstream("ns/one", NAME)], &[]).await;
    let client = client(&one.certificate, true);
    let connection = connect(&client, door.sni, NAME).await;
    assert_eq!(ask(&connection, b"").await, NAME.as_bytes());

    let (door, endpoint) = door_of_socket(&[]).await;
    let hello = first_datagrams(&client, NAME, 2).await;
    let sender = udp().await;
    for datagram in hello.iter().rev() {
        sender.send_to(datagram, door.sni).await.unwrap();
    }
    // The endpoint gets the datagrams unchanged, in the order of their arrival.
    for datagram in hello.iter().rev() {
        assert_eq!(receive(&endpoint).await, *datagram);
    }
    has_flows(&door, 1.0).await;
}

#[tokio::test]
async fn connection_survives_new_addresses_of_the_client() {
    let one = QuicEndpoint::start(NAME);
    let other = QuicEndpoint::start("two.example.com");
    let upstreams = [
        one.upstream("ns/one", NAME),
        other.upstream("ns/two", "two.example.com"),
    ];
    let door = door(&upstreams, &[]).await;
    let nat = Nat::start(door.sni).await;
    let client = client(&one.certificate, false);
    let connection = connect(&client, nat.address, NAME).await;
    let bytes = vec![5; 256 * 1024];
    // Servers ignore new addresses until they have confirmed the handshake (RFC 9000, 9).
    assert_eq!(ask(&connection, b"").await, NAME.as_bytes());
    for _ in 0..5 {
        let streams = (0..20).map(|_| ask(&connection, &bytes));
        let (answers, ()) = tokio::join!(join_all(streams), nat.rebind(door.sni));
        for answer in answers {
            assert_eq!(answer[NAME.len()..], bytes);
        }
    }
    assert_eq!(opened(&door).await, 6.0);
    assert_eq!(door.refused("quic", "unknown").await, 0.0);
}

#[tokio::test]
async fn another_replica_without_state_continues_connections() {
    let one = QuicEndpoint::start(NAME);
    let upstreams = [one.upstream("ns/one", NAME)];
    let (a, b) = tokio::join!(door(&upstreams, &[]), door(&upstreams, &[]));
    let nat = Nat::start(a.sni).await;
    let client = client(&one.certificate, true);
    let connection = connect(&client, nat.address, NAME).await;
    assert_eq!(ask(&connection, b"").await, NAME.as_bytes());
    let bytes = vec![5; 256 * 1024];
    let streams = (0..100).map(|_| ask(&connection, &bytes));
    let restart = async {
        nat.rebind(b.sni).await;
        drop(a);
    };
    let (answers, ()) = tokio::join!(join_all(streams), restart);
    for answer in answers {
        assert_eq!(answer[NAME.len()..], bytes);
    }
    assert_eq!(ask(&connection, b" again").await, b"one.example.com again");
    assert_eq!(opened(&b).await, 1.0);
}

#[tokio::test]
async fn datagrams_that_route_nothing_are_dropped_and_counted() {
    let (door, endpoint) = door_of_socket(&[]).await;
    let certificate = QuicEndpoint::start(NAME).certificate.clone();
    let quinn = client(&certificate, false);
    let sender = udp().await;
    let send = async |datagram: &[u8]| {
        sender.send_to(datagram, door.sni).await.unwrap();
    };
    let hello = first_datagrams(&quinn, NAME, 1).await.remove(0);
    let unknown = first_datagrams(&quinn, "unknown.example.com", 1).await;
    send(&unknown[0]).await;
    door.has_refused("quic", "unknown", 1.0).await;
    // A name that is an address cannot be sent.
    let nameless = first_datagrams(&quinn, "127.0.0.1", 1).await;
    send(&nameless[0]).await;
    door.has_refused("quic", "no_server_name", 1.0).await;
    // No QUIC, a foreign version, version negotiation, a damaged and a truncated hello.
    let with_version = |version: u32| [&[0xc0], &version.to_be_bytes()[..], &hello[5..]].concat();
    let mut damaged = hello.clone();
    damaged[600] ^= 1;
    let garbage = [
        with_version(0x6b33_43cf),
        with_version(0x0a0a_0a0a),
        with_version(0),
        damaged,
        hello[..1199].to_vec(),
    ];
    for datagram in &garbage {
        send(datagram).await;
    }
    door.has_refused("quic", "garbage", garbage.len() as f64)
        .await;
    // A short header with the id of no endpoint, and a packet of a handshake that began elsewhere.
    send(&[0x40; 100]).await;
    send(&[&[0xe0], &hello[1..]].concat()).await;
    door.has_refused("quic", "unknown", 3.0).await;
    is_silent(&endpoint);
    // The sender's hello is still served, and the front door has sent nothing.
    send(&hello).await;
    assert_eq!(receive(&endpoint).await, hello);
    is_silent(&sender);
    assert_eq!(opened(&door).await, 1.0);
}

#[tokio::test]
async fn datagram_without_a_source_port_is_dropped() {
    let raw = Socket::new(Domain::IPV4, Type::RAW, Some(Protocol::UDP));
    let Ok(raw) = raw else {
        return skip("a raw socket needs CAP_NET_RAW");
    };
    let (door, endpoint) = door_of_socket(&[]).await;
    let other = QuicEndpoint::start(NAME);
    let hello = first_datagrams(&client(&other.certificate, false), NAME, 1).await;
    let len = u16::try_from(8 + hello[0].len()).unwrap().to_be_bytes();
    // A UDP header without a checksum.
    let header = [&[0, 0], &door.sni.port().to_be_bytes()[..], &len, &[0, 0]].concat();
    let datagram = [header, hello[0].clone()].concat();
    raw.send_to(&datagram, &door.sni.into()).unwrap();
    door.has_refused("quic", "garbage", 1.0).await;
    is_silent(&endpoint);
    assert_eq!(opened(&door).await, 0.0);
}

#[tokio::test]
async fn hello_beyond_the_bound_and_incomplete_hello_are_dropped() {
    let (door, endpoint) = door_of_socket(&[]).await;
    let certificate = QuicEndpoint::start(NAME).certificate.clone();
    let names: Vec<Vec<u8>> = (0..20).map(|at| vec![b'a' + at; 250]).collect();
    let names: Vec<&[u8]> = names.iter().map(Vec::as_slice).chain([ALPN]).collect();
    let large = client_with(&certificate, false, &names);
    let hello = first_datagrams(&large, NAME, 4).await;
    let sender = udp().await;
    sender.send_to(&hello[0], door.sni).await.unwrap();
    door.has_refused("quic", "garbage", 1.0).await;
    let hello = first_datagrams(&client(&certificate, true), NAME, 2).await;
    sender.send_to(&hello[1], door.sni).await.unwrap();
    door.has_refused("quic", "timeout", 1.0).await;
    is_silent(&endpoint);
}

#[tokio::test]
async fn next_endpoint_gets_the_connection_if_one_is_gone() {
    let gone = QuicEndpoint::start(NAME);
    let dead = gone.address;
    let one = QuicEndpoint::start(NAME);
    let mut upstream = one.upstream("ns/one", NAME);
    upstream.endpoints = vec![dead, one.address];
    let door = door(&[upstream.clone()], &[]).await;
    gone.endpoint.close(0u32.into(), b"");
    drop(gone);
    eventually("the endpoint's socket is closed", LIMIT, async || {
        std::net::UdpSocket::bind(dead).map(drop)
    })
    .await;
    // In the rotation, at least one of two connections comes to the dead endpoint first.
    let connections = [
        one.answers(door.sni, NAME).await,
        one.answers(door.sni, NAME).await,
    ];
    eventually(
        "a refusal of the dead endpoint is counted",
        LIMIT,
        async || door.refused("quic", "upstream").await >= 1.0,
    )
    .await;
    // An endpoint that leaves the routes keeps its connections, and gets no new ones.
    upstream.endpoints = vec![dead];
    door.route(&[upstream]).await;
    for connection in &connections {
        assert_eq!(ask(connection, b"").await, NAME.as_bytes());
    }
}

#[tokio::test]
async fn only_permitted_clients_reach_a_service() {
    let one = QuicEndpoint::start(NAME);
    let restricted = |networks| one.upstream("ns/one", NAME).allowed(networks);
    let sender = udp().await;
    let hello = first_datagrams(&client(&one.certificate, false), NAME, 1).await;
    let ours = short_packet(one.address);
    for (networks, flags) in [
        ("192.0.2.0/24", &[][..]),
        // A load balancer in front hides the addresses of clients.
        ("127.0.0.0/8", &["--proxy-protocol-from=127.0.0.1"]),
    ] {
        let door = door(&[restricted(networks)], flags).await;
        sender.send_to(&hello[0], door.sni).await.unwrap();
        sender.send_to(&ours, door.sni).await.unwrap();
        door.has_refused("quic", "address", 2.0).await;
        assert_eq!(opened(&door).await, 0.0);
    }
    let door = door(&[restricted("127.0.0.1")], &[]).await;
    one.answers(door.sni, NAME).await;
}

/// Returns a packet with a short header and a connection id of the endpoint at `address`.
fn short_packet(address: SocketAddr) -> Vec<u8> {
    let id = ConnectionId {
        tag: Tag::of(address),
        shard: 0,
        random: [0; 3],
    };
    [&[0x40][..], &id.to_bytes(), &[0; 40]].concat()
}

#[tokio::test]
async fn services_without_the_setting_are_not_reachable_by_quic() {
    let one = QuicEndpoint::start(NAME);
    let upstream = Upstream::new("ns/one", one.address).server_name(NAME);
    let door = door(&[upstream], &[]).await;
    let hello = first_datagrams(&client(&one.certificate, false), NAME, 1).await;
    let sender = udp().await;
    sender.send_to(&hello[0], door.sni).await.unwrap();
    door.has_refused("quic", "upstream", 1.0).await;
    let ours = short_packet(one.address);
    sender.send_to(&ours, door.sni).await.unwrap();
    door.has_refused("quic", "unknown", 1.0).await;
}

#[tokio::test]
async fn limit_of_a_service_refuses_new_quic_connections_only() {
    let one = QuicEndpoint::start(NAME);
    let tcp = TlsEndpoint::start(NAME).await;
    let mut upstream = one.upstream("ns/one", NAME);
    let port = one.address.port().to_string();
    upstream.endpoints = vec![tcp.address];
    let door = door(&[upstream.quic_port(&port)], &["--max-connections=2"]).await;
    let connections = [(); 2].map(|()| one.answers(door.sni, NAME));
    let connections = join_all(connections).await;
    let hello = first_datagrams(&client(&one.certificate, false), NAME, 1).await;
    let sender = udp().await;
    sender.send_to(&hello[0], door.sni).await.unwrap();
    door.has_refused("quic", "overflow", 1.0).await;
    assert_eq!(ask(&connections[0], b"").await, NAME.as_bytes());
    tcp.answers(door.sni, NAME).await;
}

#[tokio::test]
async fn drain_serves_flows_until_they_are_silent() {
    let one = QuicEndpoint::start(NAME);
    let door = door(&[one.upstream("ns/one", NAME)], &["--drain-timeout=60s"]).await;
    let connection = one.answers(door.sni, NAME).await;
    door.program.signal(Signal::TERM);
    eventually("the drain begins", LIMIT, async || {
        door.value("envoy_server_live", &[]).await == 0.0
    })
    .await;
    assert_eq!(ask(&connection, b"").await, NAME.as_bytes());
    // Other replicas would continue a new connection.
    one.answers(door.sni, NAME).await;
    // The connections go on elsewhere; their last packets may take a moment.
    connection.close(0u32.into(), b"");
    let mut door = door;
    let status = door.program.wait_exit(LIMIT).await;
    assert!(status.success(), "{status}");
}

#[tokio::test]
async fn flow_ends_once_the_service_no_longer_allows_its_client() {
    let one = QuicEndpoint::start(NAME);
    let allowed = |networks| [one.upstream("ns/one", NAME).allowed(networks)];
    let door = door(&allowed("127.0.0.0/8"), &[]).await;
    let _connection = one.answers(door.sni, NAME).await;
    has_flows(&door, 1.0).await;
    door.route(&allowed("192.0.2.0/24")).await;
    has_flows(&door, 0.0).await;
}

#[tokio::test]
async fn flow_ends_once_another_service_owns_the_endpoint_and_does_not_allow_its_client() {
    let one = QuicEndpoint::start(NAME);
    let door = door(&[one.upstream("ns/one", NAME)], &[]).await;
    let _connection = one.answers(door.sni, NAME).await;
    has_flows(&door, 1.0).await;
    let two = one.upstream("ns/two", NAME).allowed("192.0.2.0/24");
    door.route(&[two]).await;
    has_flows(&door, 0.0).await;
}
