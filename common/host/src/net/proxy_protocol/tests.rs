#![allow(
    clippy::unwrap_used,
    clippy::expect_used,
    clippy::indexing_slicing,
    clippy::panic
)]

use proptest::prelude::*;
use tokio::io::{AsyncReadExt as _, AsyncWriteExt as _};
use tokio::net::TcpListener;

use super::super::admission::AdmissionLimits;
use super::*;

const V4: &[u8] = b"PROXY TCP4 192.0.2.1 198.51.100.2 40000 443\r\n";

fn origin_of(source: &str, destination: &str) -> Origin {
    Origin {
        source: source.parse().unwrap(),
        destination: Some(destination.parse().unwrap()),
    }
}

/// Returns a header of version 2 with these bytes after the signature.
fn binary(command: u8, family: u8, rest: &[u8]) -> Vec<u8> {
    let len = u16::try_from(rest.len()).unwrap().to_be_bytes();
    [&SIGNATURE[..], &[command, family], &len, rest].concat()
}

#[test]
fn headers_of_the_specification_are_parsed() {
    let v4 = origin_of("192.0.2.1:40000", "198.51.100.2:443");
    let v6 = origin_of("[2001:db8::1]:40000", "[2001:db8::2]:443");
    let addresses = [192, 0, 2, 1, 198, 51, 100, 2, 0x9c, 0x40, 1, 0xbb];
    let with_extension = [&addresses[..], &[4, 0, 2, 0, 0]].concat();
    let cases = [
        (V4.to_vec(), Some(v4)),
        (
            b"PROXY TCP6 2001:db8::1 2001:db8::2 40000 443\r\n".to_vec(),
            Some(v6),
        ),
        (b"PROXY UNKNOWN\r\n".to_vec(), None),
        (
            b"PROXY UNKNOWN ffff::1 ffff::2 65535 65535\r\n".to_vec(),
            None,
        ),
        (binary(0x21, 0x11, &addresses), Some(v4)),
        (binary(0x21, 0x11, &with_extension), Some(v4)),
        (v6.header(Version::V2), Some(v6)),
        // LOCAL, with an address that has no meaning, and without the address.
        (binary(0x20, 0x11, &addresses), None),
        (binary(0x20, 0x11, &[]), None),
        // UNSPEC, and a Unix socket.
        (binary(0x21, 0, &[]), None),
        (binary(0x21, 0x31, &[0; 216]), None),
    ];
    for (bytes, origin) in cases {
        let len = bytes.len();
        for end in 0..len {
            assert!(
                parse(&bytes[..end]).unwrap().is_none(),
                "{bytes:?} to {end}"
            );
        }
        let header = Some(Header { len, origin });
        assert_eq!(parse(&bytes).unwrap(), header, "{bytes:?}");
        let with_more = [&bytes, &b"hello"[..]].concat();
        assert_eq!(parse(&with_more).unwrap(), header, "{bytes:?}");
    }
}

#[test]
fn line_feed_alone_does_not_end_a_line() {
    let line = b"PROXY UNKNOWN \n x\r\n";
    for end in 0..line.len() {
        assert_eq!(parse(&line[..end]).unwrap(), None, "{end}");
    }
    assert_eq!(parse(line).unwrap().unwrap().len, line.len());
}

#[test]
fn other_bytes_are_refused_at_once() {
    for bytes in [
        &b"\x16\x03\x01"[..],
        b"CONNECT",
        b"PRI * HTTP/2.0",
        b"PROXYxTCP4",
        b"PROXY TCP9 192.0.2.1 ",
        b"PROXY TCP4 192.0.2.1 ::1 1 1\r\n",
        b"PROXY TCP4 x\r\n",
        b"PROXY TCP4 192.0.2.1 192.0.2.2 1 65536\r\n",
        b"PROXY TCP4 192.0.2.1 192.0.2.2 1 1\rx",
        b"\r\n\r\nx",
    ] {
        assert!(
            matches!(parse(bytes), Err(HeaderError::Invalid)),
            "{bytes:?}"
        );
    }
    let long = [b"PROXY UNKNOWN ", &[b'x'; 94][..], b"\r\n"].concat();
    assert!(matches!(parse(&long), Err(HeaderError::Invalid)));
    assert!(matches!(parse(&long[..107]), Err(HeaderError::Invalid)));
    let version = binary(0x31, 0x11, &[0; 12]);
    assert!(matches!(parse(&version), Err(HeaderError::Invalid)));
    for command in [0x20, 0x21] {
        let long = binary(command, 0, &[0; MAX_HEADER_BYTES]);
        let parsed = parse(&long[..=MAX_HEADER_BYTES]);
        assert!(matches!(parsed, Err(HeaderError::TooLong)));
    }
}

#[test]
fn addresses_of_a_dual_stack_listener_are_sent_as_ipv4() {
    let mapped = origin_of("[::ffff:192.0.2.1]:40000", "[::ffff:198.51.100.2]:443");
    assert_eq!(mapped.header(Version::V1), V4);
    let v4 = origin_of("192.0.2.1:40000", "198.51.100.2:443");
    assert_eq!(mapped.header(Version::V2), v4.header(Version::V2));
}

proptest! {
    #[test]
    fn header_is_the_same_after_any_transport(
        ips: [std::net::Ipv6Addr; 2],
        v4: [bool; 2],
        ports: [u16; 2],
        is_text: bool,
    ) {
        let ends = [0, 1].map(|i| {
            let [.., a, b, c, d] = ips[i].octets();
            let ip = if v4[i] { [a, b, c, d].into() } else { IpAddr::V6(ips[i]) };
            SocketAddr::new(ip, ports[i])
        });
        let sent = Origin { source: ends[0], destination: Some(ends[1]) };
        let bytes = sent.header(if is_text { Version::V1 } else { Version::V2 });
        let header = parse(&bytes).unwrap().unwrap();
        prop_assert_eq!(header.len, bytes.len());
        let received = header.origin.unwrap();
        let destination = received.destination.unwrap();
        for (a, b) in [(received.source, ends[0]), (destination, ends[1])] {
            prop_assert_eq!(a.ip().to_canonical(), b.ip().to_canonical());
            prop_assert_eq!(a.port(), b.port());
        }
    }

    #[test]
    fn result_does_not_depend_on_the_pieces(
        begin in prop_oneof![Just(&V4[..11]), Just(&b"PROXY "[..]), Just(&SIGNATURE[..])],
        rest: Vec<u8>,
        end: prop::sample::Index,
    ) {
        let bytes = [begin, &rest].concat();
        let early = parse(&bytes[..end.index(bytes.len() + 1)]);
        match (early, parse(&bytes)) {
            (Ok(Some(early)), whole) => prop_assert_eq!(Some(early), whole.unwrap()),
            (Err(_), whole) => prop_assert!(whole.is_err()),
            (Ok(None), _) => {}
        }
    }
}

/// Returns an accepted connection and its client.
async fn accepted() -> (TcpStream, SocketAddr, TcpStream) {
    let listener = TcpListener::bind("127.0.0.1:0").await.unwrap();
    let client = TcpStream::connect(listener.local_addr().unwrap());
    let (client, accepted) = tokio::join!(client, listener.accept());
    let (stream, peer) = accepted.unwrap();
    let client = client.unwrap();
    client.set_nodelay(true).unwrap();
    (stream, peer, client)
}

fn slots() -> Arc<Admission> {
    slots_with_grace(Duration::ZERO)
}

fn slots_with_grace(grace: Duration) -> Arc<Admission> {
    Admission::new(AdmissionLimits {
        peers: 1,
        bytes: 1,
        deadline: HEADER_TIMEOUT,
        grace,
    })
}

fn networks(text: &str) -> Networks {
    Networks::parse([text]).unwrap()
}

#[tokio::test]
async fn header_in_single_bytes_leaves_the_bytes_after_it() {
    let (mut stream, peer, mut client) = accepted().await;
    let sent = origin_of("192.0.2.1:40000", "198.51.100.2:443");
    let send = async {
        for byte in [sent.header(Version::V2).as_slice(), V4].concat() {
            client.write_all(&[byte]).await.unwrap();
            tokio::task::yield_now().await;
        }
        client.shutdown().await.unwrap();
    };
    let receive = async {
        let trusted = networks("127.0.0.0/8");
        let origin = origin(&stream, peer, &trusted, &slots()).await.unwrap();
        assert_eq!(origin, sent);
        let mut rest = Vec::new();
        stream.read_to_end(&mut rest).await.unwrap();
        assert_eq!(rest, V4);
    };
    tokio::join!(send, receive);
}

#[tokio::test]
async fn peer_outside_of_the_networks_is_neither_read_nor_waited_for() {
    let (mut stream, peer, mut client) = accepted().await;
    let others = networks("192.0.2.0/24");
    let origin = origin(&stream, peer, &others, &slots()).await.unwrap();
    assert_eq!((origin.source, origin.destination), (peer, None));
    let local = stream.local_addr().unwrap();
    assert_eq!(origin.with_local(&stream).destination, Some(local));
    client.write_all(V4).await.unwrap();
    assert!(begins_with_header(&stream).await.unwrap());
    let mut bytes = [0; V4.len()];
    stream.read_exact(&mut bytes).await.unwrap();
    assert_eq!(bytes, V4);
}

#[tokio::test]
async fn peer_that_must_send_a_header_and_sends_none_is_refused() {
    let trusted = networks("127.0.0.1");
    for (bytes, left) in [
        (&b"\x16\x03\x01\x00"[..], false),
        (b"", true),
        (b"PROXY", true),
    ] {
        let (stream, peer, mut client) = accepted().await;
        client.write_all(bytes).await.unwrap();
        client.shutdown().await.unwrap();
        let error = origin(&stream, peer, &trusted, &slots()).await.unwrap_err();
        assert_eq!(matches!(error, HeaderError::Left), left, "{error}");
        assert_eq!(matches!(error, HeaderError::Invalid), !left, "{error}");
    }
}

#[tokio::test]
async fn peer_that_sends_no_complete_header_is_refused_in_time() {
    let (stream, peer, mut client) = accepted().await;
    client.write_all(&V4[..20]).await.unwrap();
    tokio::time::pause();
    let error = origin(&stream, peer, &networks("127.0.0.1"), &slots()).await;
    assert!(matches!(error, Err(HeaderError::Late)));
}

#[tokio::test]
async fn check_that_ends_with_a_reset_is_no_error_of_a_header() {
    let (stream, peer, client) = accepted().await;
    socket2::SockRef::from(&client)
        .set_linger(Some(Duration::ZERO))
        .unwrap();
    drop(client);
    let error = origin(&stream, peer, &networks("127.0.0.1"), &slots()).await;
    assert!(matches!(error, Err(HeaderError::Left)));
}

#[tokio::test]
async fn few_peers_wait_for_their_headers_at_once() {
    let (trusted, admission) = (networks("127.0.0.1"), slots());
    let mut waiting = Vec::new();
    let refused = loop {
        let (stream, peer, client) = accepted().await;
        let mut one = Box::pin({
            let (trusted, admission) = (trusted.clone(), admission.clone());
            async move { (origin(&stream, peer, &trusted, &admission).await, client) }
        });
        match futures_util::poll!(&mut one) {
            std::task::Poll::Ready((error, _)) => break error.unwrap_err(),
            std::task::Poll::Pending => waiting.push(one),
        }
    };
    assert!(matches!(refused, HeaderError::Unadmitted(_)), "{refused}");
    assert_eq!(waiting.len(), 8);
    // A header that has already arrived needs no place.
    let (stream, peer, mut client) = accepted().await;
    client.write_all(&[V4, b"\x16"].concat()).await.unwrap();
    stream.readable().await.unwrap();
    let entered = enter(&stream, peer, &trusted, &admission).await;
    assert_eq!(entered.unwrap().0, "192.0.2.1:40000".parse().unwrap());
    // A place becomes free again.
    waiting.pop();
    let (stream, peer, mut client) = accepted().await;
    let send = async { client.write_all(V4).await.unwrap() };
    let (origin, ()) = tokio::join!(origin(&stream, peer, &trusted, &admission), send);
    assert_eq!(origin.unwrap().source, "192.0.2.1:40000".parse().unwrap());
}

#[tokio::test]
async fn peers_that_wait_for_slots_leave_the_places_for_headers() {
    let (trusted, admission) = (networks("127.0.0.1"), slots_with_grace(HEADER_TIMEOUT));
    let enter = || Box::pin(admission.enter([192, 0, 2, 66].into(), Instant::now()));
    let _slot = enter().await.unwrap();
    let mut waiting: Vec<_> = (0..8).map(|_| enter()).collect();
    for one in &mut waiting {
        assert!(futures_util::poll!(one).is_pending());
    }
    assert!(enter().await.is_err());
    let (stream, peer, mut client) = accepted().await;
    let send = async { client.write_all(V4).await.unwrap() };
    let (origin, ()) = tokio::join!(origin(&stream, peer, &trusted, &admission), send);
    assert_eq!(origin.unwrap().source, "192.0.2.1:40000".parse().unwrap());
}
