#![allow(clippy::unwrap_used, clippy::expect_used, clippy::indexing_slicing)]

use socket2::{Domain, Socket, Type};
use tokio::net::TcpListener;

use super::super::destinations::Program;
use super::lookups::MAX_LOOKUPS;
use super::*;

/// Timeout that is long enough for every test.
const AMPLE: Duration = Duration::from_secs(60);

async fn error_of(protocol: &str, address: &str) -> DialError {
    dial(protocol, address, AMPLE).await.unwrap_err()
}

fn target(address: SocketAddr) -> Target {
    Target::from(address)
}

/// Returns a port of `ip` that refuses connections: bound, but not listening.
fn refusing(ip: IpAddr) -> (Socket, SocketAddr) {
    let address = SocketAddr::new(ip, 0);
    let socket = Socket::new(Domain::for_address(address), Type::STREAM, None).unwrap();
    socket.bind(&address.into()).unwrap();
    let address = socket.local_addr().unwrap().as_socket().unwrap();
    (socket, address)
}

/// A port of `ip` that never answers: the queue of its listener is full, so the kernel drops every further
/// SYN.
struct BlackHole {
    address: SocketAddr,
    _sockets: Vec<Socket>,
}

impl BlackHole {
    fn new(ip: IpAddr) -> Self {
        let (listener, address) = refusing(ip);
        listener.listen(0).unwrap();
        let mut sockets = vec![listener];
        for _ in 0..4 {
            let socket = Socket::new(Domain::for_address(address), Type::STREAM, None).unwrap();
            socket.set_nonblocking(true).unwrap();
            // The attempts stay in progress: the first ones fill the queue, and the last one already waits.
            let _ = socket.connect(&address.into());
            sockets.push(socket);
        }
        Self {
            address,
            _sockets: sockets,
        }
    }
}

/// Returns a listener on the IPv6 loopback; `None` if there is no IPv6. Continuous integration must have
/// IPv6.
async fn listener_v6() -> Option<TcpListener> {
    match TcpListener::bind("[::1]:0").await {
        Ok(listener) => Some(listener),
        Err(error) if std::env::var_os("CI").is_none() => {
            eprintln!("skipped: no IPv6 loopback ({error})");
            None
        }
        Err(error) => panic!("no IPv6 loopback: {error}"),
    }
}

#[tokio::test]
async fn a_connection_has_gos_options() {
    let listener = TcpListener::bind("127.0.0.1:0").await.unwrap();
    let address = listener.local_addr().unwrap().to_string();
    for protocol in ["tcp", "tcp4"] {
        let stream = dial(protocol, &address, AMPLE).await.unwrap();
        assert!(stream.nodelay().unwrap());
        let socket = SockRef::from(&stream);
        assert!(socket.keepalive().unwrap());
        assert_eq!(socket.tcp_keepalive_time().unwrap(), KEEPALIVE);
        assert_eq!(socket.tcp_keepalive_interval().unwrap(), KEEPALIVE);
    }
    let port = listener.local_addr().unwrap().port();
    dial("tcp", &format!("localhost:{port}"), AMPLE)
        .await
        .unwrap();
    dial("tcp", &format!(":{port}"), AMPLE).await.unwrap();
    dial("tcp", &format!("[::ffff:127.0.0.1]:{port}"), AMPLE)
        .await
        .unwrap();
}

#[tokio::test]
async fn refused_dial_names_the_address() {
    let (_socket, address) = refusing(Ipv4Addr::LOCALHOST.into());
    let error = error_of("tcp", &address.to_string()).await;
    assert_eq!(
        error.text,
        format!("dial tcp {address}: connect: connection refused")
    );
    assert_eq!(error.kind, io::ErrorKind::ConnectionRefused);
    let error = error_of("tcp4", &format!(":{}", address.port())).await;
    assert_eq!(
        error.text,
        format!("dial tcp4 :{}: connect: connection refused", address.port())
    );
}

fn denying(entries: &[&str]) -> Destinations {
    let deny: Vec<String> = entries.iter().map(|entry| (*entry).to_owned()).collect();
    let (destinations, problems) = Destinations::parse(Program::Agent, &[], &deny);
    assert!(problems.is_empty(), "{problems:?}");
    destinations
}

#[tokio::test]
async fn denied_address_of_a_name_is_not_dialed() {
    let listener = TcpListener::bind("127.0.0.1:0").await.unwrap();
    let port = listener.local_addr().unwrap().port();
    let both = denying(&["127.0.0.0/8", "::1"]);
    for host in [
        "localhost",
        "127.0.0.1",
        "[::ffff:127.0.0.1]",
        "0.0.0.0",
        "",
    ] {
        let address = format!("{host}:{port}");
        let denied = dial_permitted("tcp", &address, AMPLE, &both).await;
        let error = denied.unwrap_err();
        assert!(error.denial.is_some(), "{address}: {}", error.text);
        assert_eq!(error.kind, io::ErrorKind::PermissionDenied);
        let end = "denied by the agent: the destination is in --deny-destinations";
        assert!(error.text.ends_with(end), "{}", error.text);
    }
    // The addresses of the other family remain.
    let v6 = denying(&["::1"]);
    let address = format!("localhost:{port}");
    dial_permitted("tcp", &address, AMPLE, &v6).await.unwrap();
    let accepted = listener.accept().await.unwrap();
    drop(accepted);
    let targets = |texts: [&str; 3]| texts.map(|text| target(text.parse().unwrap())).to_vec();
    let all = targets(["127.0.0.1:1", "10.0.0.1:1", "[::1]:1"]);
    let left = permitted("tcp", all, &both).unwrap();
    assert_eq!(left.len(), 1);
    assert_eq!(left[0].text, "10.0.0.1:1");
}

#[tokio::test(start_paused = true)]
async fn silent_endpoint_times_out() {
    let hole = BlackHole::new(Ipv4Addr::LOCALHOST.into());
    let address = hole.address;
    let error = error_of("tcp", &address.to_string()).await;
    assert_eq!(error.text, format!("dial tcp {address}: i/o timeout"));
    assert!(error.is_timeout());
}

#[tokio::test]
async fn refused_addresses_have_gos_texts() {
    for (protocol, address, text) in [
        (
            "udp",
            "127.0.0.1:53",
            "dial udp: unknown network udp (only tcp is allowed)",
        ),
        (
            "unix",
            "/run/x",
            "dial unix: unknown network unix (only tcp is allowed)",
        ),
        (
            "",
            "127.0.0.1:1",
            "dial : unknown network  (only tcp is allowed)",
        ),
        ("tcp", "", "dial tcp: missing address"),
        (
            "tcp",
            "host",
            "dial tcp: address host: missing port in address",
        ),
        (
            "tcp",
            "::1:80",
            "dial tcp: address ::1:80: too many colons in address",
        ),
        (
            "tcp",
            "10.0.0.1:http",
            "dial tcp: lookup tcp/http: unknown port",
        ),
        (
            "tcp",
            "10.0.0.1:65536",
            "dial tcp: address 65536: invalid port",
        ),
        ("tcp", "10.0.0.1:-1", "dial tcp: address -1: invalid port"),
        (
            "tcp",
            "10.0.0.1:99999999999999999999",
            "dial tcp: address 99999999999999999999: invalid port",
        ),
        (
            "tcp6",
            "10.0.0.1:80",
            "dial tcp6: address 10.0.0.1: no suitable address found",
        ),
        (
            "tcp4",
            "[2001:db8::1]:80",
            "dial tcp4: address 2001:db8::1: no suitable address found",
        ),
        ("tcp", "a\0b:80", "dial tcp: lookup a\0b: no such host"),
    ] {
        let error = error_of(protocol, address).await;
        assert_eq!(error.text, text);
        assert!(!error.is_timeout());
    }
}

#[test]
fn ports_parse_as_in_go() {
    for (port, number) in [
        ("", 0),
        ("0", 0),
        ("-0", 0),
        ("+80", 80),
        ("00080", 80),
        ("65535", 65535),
    ] {
        assert_eq!(parse_port("tcp", port), Ok(number), "{port:?}");
    }
}

#[test]
fn addresses_split_as_in_go() {
    for (address, host, port) in [
        ("host:80", "host", "80"),
        ("host:", "host", ""),
        (":80", "", "80"),
        ("[::1]:80", "::1", "80"),
        ("[fe80::1%eth0]:80", "fe80::1%eth0", "80"),
        ("[host]:http", "host", "http"),
        ("[]:", "", ""),
    ] {
        assert_eq!(split_host_port(address).unwrap(), (host, port));
    }
    for (address, reason) in [
        ("", "missing port in address"),
        ("host", "missing port in address"),
        ("[::1]", "missing port in address"),
        ("[host]", "missing port in address"),
        ("[::1]x:80", "missing port in address"),
        ("[::1", "missing ']' in address"),
        ("[host:80", "missing ']' in address"),
        ("::1", "too many colons in address"),
        ("a:b:80", "too many colons in address"),
        ("[::1]:80:90", "too many colons in address"),
        ("[a[b]:80", "unexpected '[' in address"),
        ("a[b:80", "unexpected '[' in address"),
        ("[a]:[80", "unexpected '[' in address"),
        ("a]b:80", "unexpected ']' in address"),
        ("[a]:80]", "unexpected ']' in address"),
    ] {
        let error = split_host_port(address).unwrap_err();
        assert_eq!((error.address.as_str(), error.reason), (address, reason));
    }
    assert_eq!(join_host_port("::1", 80), "[::1]:80");
    assert_eq!(join_host_port("host", 80), "host:80");
}

#[test]
fn lookup_errors_have_gos_texts() {
    let gai =
        |text: &str| io::Error::other(format!("failed to lookup address information: {text}"));
    for (error, text) in [
        (gai("Name or service not known"), "lookup n: no such host"),
        (
            gai("No address associated with hostname"),
            "lookup n: no such host",
        ),
        (gai("Name does not resolve"), "lookup n: no such host"),
        (
            gai("Temporary failure in name resolution"),
            "lookup n: server misbehaving",
        ),
        (gai("Try again"), "lookup n: server misbehaving"),
        (
            gai("Non-recoverable failure in name resolution"),
            "lookup n: Non-recoverable failure in name resolution",
        ),
        (
            io::Error::from_raw_os_error(24),
            "lookup n: too many open files",
        ),
    ] {
        assert_eq!(lookup_text("n", &error), text);
    }
}

#[test]
fn errnos_have_gos_texts() {
    for (code, text) in [
        (24, "too many open files"),
        (101, "network is unreachable"),
        (104, "connection reset by peer"),
        (111, "connection refused"),
        (113, "no route to host"),
        (32, "broken pipe"),
    ] {
        assert_eq!(errno_text(code, &io::Error::from_raw_os_error(code)), text);
    }
}

#[test]
fn errnos_have_kinds() {
    for (code, expected) in [
        (1, io::ErrorKind::PermissionDenied),
        (11, io::ErrorKind::TimedOut),
        (13, io::ErrorKind::PermissionDenied),
        (101, io::ErrorKind::NetworkUnreachable),
        (110, io::ErrorKind::TimedOut),
        (111, io::ErrorKind::ConnectionRefused),
        (112, io::ErrorKind::HostUnreachable),
        (113, io::ErrorKind::HostUnreachable),
    ] {
        assert_eq!(kind(&io::Error::from_raw_os_error(code)), expected);
    }
}

#[test]
fn remaining_time_is_shared_as_in_go() {
    let seconds = Duration::from_secs;
    assert_eq!(partial_timeout(seconds(12), 3), seconds(4));
    assert_eq!(partial_timeout(seconds(5), 1), seconds(5));
    assert_eq!(partial_timeout(seconds(5), 4), seconds(2));
    assert_eq!(partial_timeout(seconds(1), 4), seconds(1));
    assert_eq!(partial_timeout(Duration::ZERO, 2), Duration::ZERO);
}

#[tokio::test]
async fn next_address_is_tried_and_the_first_error_is_reported() {
    let listener = TcpListener::bind("127.0.0.1:0").await.unwrap();
    let (_one, refused) = refusing(Ipv4Addr::LOCALHOST.into());
    let (_two, also) = refusing(Ipv4Addr::LOCALHOST.into());
    let deadline = Instant::now() + AMPLE;
    let targets = vec![target(refused), target(listener.local_addr().unwrap())];
    dial_any("tcp", targets, deadline, &OWN).await.unwrap();

    let error = dial_any("tcp", vec![target(refused), target(also)], deadline, &OWN)
        .await
        .unwrap_err();
    assert_eq!(
        error.text,
        format!("dial tcp {refused}: connect: connection refused")
    );
}

#[tokio::test]
async fn socket_with_a_reserved_descriptor_is_not_connected() {
    let listener = TcpListener::bind("127.0.0.1:0").await.unwrap();
    let address = listener.local_addr().unwrap();
    let bounds = Bounds {
        is_reserved: |_| true,
        lookups: None,
    };
    let deadline = Instant::now() + AMPLE;
    let error = dial_any("tcp", vec![target(address)], deadline, &bounds)
        .await
        .unwrap_err();
    let text = format!("dial tcp {address}: socket: too many open files; raise the limit");
    assert!(error.text.starts_with(&text), "{}", error.text);
    assert!(error.text.contains("memory limit"), "{}", error.text);
}

#[tokio::test]
async fn refused_address_family_falls_back_to_the_other() {
    let Some(listener) = listener_v6().await else {
        return;
    };
    let v6 = listener.local_addr().unwrap();
    let (_socket, refused) = refusing(Ipv4Addr::LOCALHOST.into());
    let deadline = Instant::now() + AMPLE;
    let stream = dial_any("tcp", vec![target(refused), target(v6)], deadline, &OWN)
        .await
        .unwrap();
    assert_eq!(stream.peer_addr().unwrap(), v6);
}

#[tokio::test]
async fn silent_address_family_falls_back_to_the_other() {
    let Some(listener) = listener_v6().await else {
        return;
    };
    let v6 = listener.local_addr().unwrap();
    let hole = BlackHole::new(Ipv4Addr::LOCALHOST.into());
    let deadline = Instant::now() + AMPLE;
    let stream = dial_any(
        "tcp",
        vec![target(hole.address), target(v6)],
        deadline,
        &OWN,
    )
    .await
    .unwrap();
    assert_eq!(stream.peer_addr().unwrap(), v6);
}

#[tokio::test]
async fn error_of_the_first_address_family_is_reported() {
    let Some(listener) = listener_v6().await else {
        return;
    };
    drop(listener);
    let (_one, v4) = refusing(Ipv4Addr::LOCALHOST.into());
    let (_two, v6) = refusing(Ipv6Addr::LOCALHOST.into());
    let deadline = Instant::now() + AMPLE;
    let error = dial_any("tcp", vec![target(v6), target(v4)], deadline, &OWN)
        .await
        .unwrap_err();
    assert_eq!(
        error.text,
        format!("dial tcp {v6}: connect: connection refused")
    );
}

#[tokio::test]
async fn name_has_each_address_once_and_in_order() {
    let found = lookup("tcp", "localhost", 80, AMPLE).await.unwrap();
    assert!(found.contains(&([127, 0, 0, 1], 80).into()), "{found:?}");
    assert!(found.is_sorted_by(|a, b| a < b), "{found:?}");
    let error = lookup("tcp", "", 80, Duration::ZERO).await;
    assert_eq!(error.unwrap(), [([127, 0, 0, 1], 80).into()]);
    let error = lookup("tcp", "no-such-name.invalid", 80, AMPLE).await;
    let text = error.unwrap_err().text;
    assert!(
        text.starts_with("dial tcp: lookup no-such-name.invalid: "),
        "{text}"
    );
}

#[tokio::test(start_paused = true)]
async fn names_of_endpoints_wait_for_a_place_and_names_of_servers_do_not() {
    let _all = LOOKUPS
        .places
        .acquire_many(MAX_LOOKUPS as u32)
        .await
        .unwrap();
    let any = Destinations::default();
    let error = dial_permitted("tcp", "waiting.invalid:1", AMPLE, &any).await;
    let text = "dial tcp: lookup waiting.invalid: i/o timeout";
    assert_eq!(error.unwrap_err().text, text);
    lookup("tcp", "localhost", 80, AMPLE).await.unwrap();
}

#[tokio::test]
async fn addresses_are_dialed_in_the_given_order() {
    let dead = refusing([127, 0, 0, 1].into());
    let mut listeners = Vec::new();
    for _ in 0..2 {
        listeners.push(TcpListener::bind("127.0.0.1:0").await.unwrap());
    }
    let alive: Vec<_> = listeners
        .iter()
        .map(|one| one.local_addr().unwrap())
        .collect();
    for second in [[alive[0], alive[1]], [alive[1], alive[0]]] {
        let order = [vec![dead.1], second.to_vec()].concat();
        let stream = dial_addresses("tcp", order, AMPLE).await.unwrap();
        assert_eq!(stream.peer_addr().unwrap(), second[0]);
        assert!(stream.nodelay().unwrap());
    }
    let error = dial_addresses("tcp", vec![dead.1], AMPLE)
        .await
        .unwrap_err();
    assert_eq!(
        error.text,
        format!("dial tcp {}: connect: connection refused", dead.1)
    );
}
