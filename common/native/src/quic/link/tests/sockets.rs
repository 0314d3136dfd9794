//! Handshakes, and properties of the sockets below the links.

use nix::libc;
use nix::sys::socket::setsockopt;
use nix::sys::socket::sockopt::SetBool;
use quinn::{EndpointConfig, TokioRuntime, TransportErrorCode};
use socket2::{Domain, Protocol, Socket, Type};

use super::*;
use crate::quic::endpoint::rebind;

/// Socket option for datagrams without a checksum (`SO_NO_CHECK`). Linux then refuses batches of datagrams
/// (`udp_send_skb`), and still sends single datagrams.
#[derive(Clone, Copy, Debug)]
struct NoChecksum;

nix::setsockopt_impl!(
    NoChecksum,
    libc::SOL_SOCKET,
    libc::SO_NO_CHECK,
    bool,
    SetBool
);

#[tokio::test]
async fn bytes_arrive_although_the_kernel_refuses_batches_of_datagrams() {
    for is_refused in [false, true] {
        let socket = UdpSocket::bind((Ipv4Addr::LOCALHOST, 0)).unwrap();
        setsockopt(&socket, NoChecksum, &is_refused).unwrap();
        let (config, runtime) = (EndpointConfig::default(), Arc::new(TokioRuntime));
        let endpoint = Endpoint::new(config, None, socket, runtime).unwrap();
        let pair = Pair::over(endpoint, 64 * MIB).await;
        let sent = pattern(4 * MIB);
        let mut counted = Vec::new();
        for _ in 0..2 {
            let ((mut from_agent, _to_agent), (_from_server, mut to_server)) = pair.open().await;
            let send = async {
                to_server.send(sent.clone()).await.unwrap();
                to_server.finish().await.unwrap();
            };
            let ((), (received, end)) = tokio::join!(send, read(&mut from_agent));
            assert!(received == sent && end.is_none());
            counted.push(pair.agent_connection.stats().udp_tx);
        }
        // The kernel has refused a batch of the first transfer at the latest.
        let datagrams = counted[1].datagrams - counted[0].datagrams;
        let calls = counted[1].ios - counted[0].ios;
        assert_eq!(calls == datagrams, is_refused, "{calls} of {datagrams}");
    }
}

#[tokio::test]
async fn streams_survive_a_changed_port_of_the_agent() {
    let pair = Pair::new().await;
    let ((mut from_agent, _to_agent), (_from_server, mut to_server)) = pair.open().await;
    let sent = pattern(4 * MIB);
    let copy = sent.clone();
    let sender = tokio::spawn(async move {
        for part in copy.chunks(AHEAD_BYTES) {
            to_server.send(Bytes::copy_from_slice(part)).await.unwrap();
            sleep(Duration::from_millis(5)).await;
        }
        to_server.finish().await.unwrap();
    });
    let moves = async {
        for _ in 0..5 {
            sleep(Duration::from_millis(50)).await;
            rebind(&pair.agent_endpoint, pair.address).unwrap();
        }
    };
    let ((received, end), ()) = tokio::join!(read(&mut from_agent), moves);
    assert!(
        received == sent && end.is_none(),
        "{} bytes",
        received.len()
    );
    sender.await.unwrap();
}

/// Returns true if quinn passes the server's datagrams to the kernel in batches.
async fn sends_batches(pair: &Pair) -> bool {
    let before = pair.server.connection.stats().udp_tx;
    let ((_from_agent, mut to_agent), (mut from_server, _to_server)) = pair.open().await;
    let sent = pattern(4 * MIB);
    let send = async {
        to_agent.send(sent.clone()).await.unwrap();
        to_agent.finish().await.unwrap();
    };
    let ((), (received, end)) = tokio::join!(send, read(&mut from_server));
    assert!(received == sent && end.is_none());
    let after = pair.server.connection.stats().udp_tx;
    after.ios - before.ios < after.datagrams - before.datagrams
}

#[tokio::test]
async fn datagram_without_a_source_port_does_not_end_the_batches() {
    let raw = Socket::new(Domain::IPV4, Type::RAW, Some(Protocol::UDP));
    let Ok(raw) = raw else {
        assert_ne!(std::env::var("CI").as_deref(), Ok("true"), "no CAP_NET_RAW");
        return eprintln!("skipped: a raw socket needs CAP_NET_RAW");
    };
    let pair = Pair::new().await;
    assert!(sends_batches(&pair).await);
    // An unknown version. The answer would be a list of versions (RFC 8999, 6).
    let mut hello = vec![0; 1200];
    hello[..6].copy_from_slice(&[0xc0, 0xfa, 0xfa, 0xfa, 0xfa, 8]);
    let len = u16::try_from(8 + hello.len()).unwrap().to_be_bytes();
    // A UDP header without a checksum.
    let port = pair.address.port().to_be_bytes();
    let header = [&[0, 0], &port[..], &len, &[0, 0]].concat();
    let datagram = [header, hello].concat();
    raw.send_to(&datagram, &pair.address.into()).unwrap();
    assert!(sends_batches(&pair).await);
}

/// A peer with a forged address never answers a Retry packet, and so never reaches the code behind `accept`.
#[tokio::test]
async fn first_packets_of_unproved_addresses_get_a_retry_and_nothing_else() {
    let (server_tls, client_tls) = tls();
    let recorder = tokio::net::UdpSocket::bind((Ipv4Addr::LOCALHOST, 0))
        .await
        .unwrap();
    let address = recorder.local_addr().unwrap();
    let config = client_config(&client_tls).unwrap();
    let agent = client(address).unwrap();
    let _connecting = agent.connect_with(config, address, "server").unwrap();
    let mut initial = vec![0; 1500];
    let length = recorder.recv(&mut initial).await.unwrap();
    initial.truncate(length);

    let socket = UdpSocket::bind((Ipv4Addr::LOCALHOST, 0)).unwrap();
    let address = socket.local_addr().unwrap();
    let keys = EndpointKeys::derive(b"key");
    let endpoint = ServerEndpoint::new(socket, &server_tls, keys).unwrap();
    let flood = async {
        for _ in 0..1000 {
            let peer = tokio::net::UdpSocket::bind((Ipv4Addr::LOCALHOST, 0))
                .await
                .unwrap();
            peer.send_to(&initial, address).await.unwrap();
            let mut answer = [0; 1500];
            let length = timeout(LIMIT, peer.recv(&mut answer))
                .await
                .unwrap()
                .unwrap();
            // Type of a long header (RFC 9000, 17.2).
            assert_eq!(answer[0] & 0xf0, 0xf0, "not a Retry packet");
            assert!(length <= initial.len());
        }
    };
    tokio::select! {
        _ = endpoint.accept() => panic!("an unproved address was accepted"),
        () = flood => {}
    }
}

#[tokio::test]
async fn other_protocol_is_refused_in_the_handshake() {
    let (server_tls, mut client_tls) = tls();
    let socket = UdpSocket::bind((Ipv4Addr::LOCALHOST, 0)).unwrap();
    let address = socket.local_addr().unwrap();
    let keys = EndpointKeys::derive(b"key");
    let endpoint = ServerEndpoint::new(socket, &server_tls, keys).unwrap();
    client_tls.alpn_protocols = vec![b"h3".to_vec()];
    let crypto = quinn::crypto::rustls::QuicClientConfig::try_from(client_tls).unwrap();
    let config = quinn::ClientConfig::new(Arc::new(crypto));
    let other = client(address).unwrap();
    let connecting = other.connect_with(config, address, "server").unwrap();
    let accept = async {
        let incoming = endpoint.accept().await.unwrap();
        let config = endpoint.config(&server_tls).unwrap();
        incoming.accept_with(config).err()
    };
    let (connected, refused) = tokio::join!(connecting, accept);
    assert!(refused.is_some(), "the server accepted another protocol");
    let alert = TransportErrorCode::crypto(120);
    match connected.unwrap_err() {
        quinn::ConnectionError::ConnectionClosed(close) => assert_eq!(close.error_code, alert),
        other => panic!("{other}"),
    }
}
