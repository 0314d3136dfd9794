//! The addresses of clients: from the PROXY protocol, toward endpoints, in allow-lists and in shares.

use std::collections::BTreeMap;
use std::net::SocketAddr;
use std::process::Stdio;

use culvert_kit::pki::Pki;
use culvert_kit::services::{HELLO, Services};
use culvert_tests::haproxy::{HaProxy, Options};
use culvert_tests::kube_api::{KubeApi, service, slice};
use culvert_tests::ports::Ports;
use culvert_tests::skip::has_program;
use culvert_tests::{Mode, Topology, Transport, eventually};
use futures_util::future::select_all;
use http::StatusCode;
use rustls::ALL_VERSIONS;
use tokio::io::{AsyncBufReadExt, AsyncReadExt, AsyncWriteExt, BufReader};
use tokio::net::{TcpListener, TcpStream};
use tokio::process::Command;

use crate::support::{
    Door, Http2, LIMIT, TlsEndpoint, Upstream, ask, connect_from, converse, timely,
};

const NAME: &str = "api.example.com";
const AUTHORITY: &str = "seer.demo.svc.cluster.local:443";
const HEADER: &[u8] = b"PROXY TCP4 203.0.113.7 203.0.113.8 40000 443\r\n";

/// Address of the clients.
const CLIENT: [u8; 4] = [127, 0, 0, 5];
/// Address of other clients.
const OTHER: [u8; 4] = [127, 0, 0, 6];

/// Starts an endpoint that answers each connection with its first line.
async fn first_line() -> SocketAddr {
    let listener = TcpListener::bind("127.0.0.1:0").await.unwrap();
    let address = listener.local_addr().unwrap();
    tokio::spawn(async move {
        while let Ok((stream, _)) = listener.accept().await {
            tokio::spawn(async move {
                let mut stream = BufReader::new(stream);
                let mut line = Vec::new();
                stream.read_until(b'\n', &mut line).await?;
                stream.write_all(&line).await
            });
        }
    });
    address
}

/// Sends bytes from an address, and reads the answer until the end of the stream or a reset.
async fn converse_from(from: [u8; 4], to: SocketAddr, bytes: &[u8]) -> String {
    let mut stream = connect_from(from, to).await;
    let mut answer = Vec::new();
    let _ = stream.write_all(bytes).await;
    let _ = timely("the end of the answer", stream.read_to_end(&mut answer)).await;
    String::from_utf8(answer).unwrap()
}

fn request() -> String {
    format!("CONNECT {AUTHORITY} HTTP/1.1\r\n\r\n")
}

#[tokio::test]
async fn addresses_pass_from_haproxy_to_haproxy() {
    let Some(haproxy) = HaProxy::get() else {
        return;
    };
    let endpoint = TlsEndpoint::start(NAME).await;
    let mut ports = Ports::default();
    let [before, behind] = [(); 2].map(|()| SocketAddr::from(([127, 0, 0, 1], ports.next_port())));
    let to = |address| BTreeMap::from([(NAME.to_owned(), vec![address])]);
    let accepts = Options {
        bind: "accept-proxy",
        only_source: Some(CLIENT.into()),
        ..Options::default()
    };
    let _behind = haproxy
        .start_with(behind, &to(endpoint.address), &accepts)
        .await;
    for (receives, sends) in [("send-proxy", "v2"), ("send-proxy-v2", "v1")] {
        let upstream = Upstream::new("ns/api", behind).server_name(NAME);
        let upstream = upstream.proxy_protocol(sends).allowed("127.0.0.5");
        let door = Door::start_with(&[upstream], &["--proxy-protocol-from=127.0.0.1"]).await;
        let options = Options {
            server: receives,
            ..Options::default()
        };
        let running = haproxy.start_with(before, &to(door.sni), &options).await;
        let client = connect_from(CLIENT, before).await;
        let stream = endpoint.connect_over(client, NAME, ALL_VERSIONS).await;
        assert_eq!(ask(&mut stream.unwrap()).await, NAME);
        let other = connect_from(OTHER, before).await;
        let refused = endpoint.connect_over(other, NAME, ALL_VERSIONS).await;
        assert!(refused.is_err());
        door.has_refused("sni", "address", 1.0).await;
        // The addresses are also in the log.
        door.program.wait_for_log("127.0.0.5:", LIMIT).await;
        drop(running);
    }
}

#[tokio::test]
async fn node_port_accepts_the_header_of_curl() {
    if !has_program("curl") {
        return;
    }
    let services = Services::start().await.unwrap();
    let mut door = Door::start_with(&[], &["--proxy-protocol-from=127.0.0.1"]).await;
    let port = door.ports.next_port();
    door.route(&[Upstream::new("ns/web", services.http).node_port(port)])
        .await;
    let curl = async |flags: &[&str]| {
        let output = Command::new("curl")
            .args(["-sS", "--max-time", "15"])
            .args(flags)
            .arg(format!("http://127.0.0.1:{port}/"))
            .stdin(Stdio::null())
            .kill_on_drop(true)
            .output();
        let output = timely("curl", output).await.expect("curl must start");
        String::from_utf8(output.stdout).unwrap()
    };
    eventually("the port is open", LIMIT, async || {
        let text = curl(&["--haproxy-protocol"]).await;
        (text == HELLO).then_some(()).ok_or(text)
    })
    .await;
    // This peer must send a header.
    assert_eq!(curl(&[]).await, "");
    door.has_refused("node_port", "proxy_header", 1.0).await;
}

#[tokio::test]
async fn header_from_another_address_is_refused_where_it_cannot_be_the_protocol() {
    let endpoint = first_line().await;
    let mut door = Door::start_with(&[], &["--proxy-protocol-from=127.0.0.9"]).await;
    let port = door.ports.next_port();
    let upstream = Upstream::new("ns/seer", endpoint).authority(AUTHORITY);
    door.route(&[upstream.node_port(port)]).await;
    for (listener, address) in [("sni", door.sni), ("tunneling", door.tunneling)] {
        let binary = b"\r\n\r\n\0\r\nQUIT\n\x20\0\0\0";
        for (count, header) in [(1.0, HEADER), (2.0, binary)] {
            assert_eq!(converse(address, header).await, b"");
            door.has_refused(listener, "proxy_header", count).await;
        }
    }
    door.program
        .wait_for_log("unexpected PROXY protocol header", LIMIT)
        .await;
    // The bytes of a node port may be anything.
    let address = ([127, 0, 0, 1], port).into();
    eventually("the port is open", LIMIT, async || {
        TcpStream::connect(address).await.map(|_| ())
    })
    .await;
    assert_eq!(converse(address, HEADER).await, HEADER);
}

#[tokio::test]
async fn endpoints_receive_the_address_of_the_client_on_request() {
    let endpoint = first_line().await;
    let mut door = Door::start_with(&[], &["--proxy-protocol-from=127.0.0.9"]).await;
    let port = door.ports.next_port();
    let upstream = Upstream::new("ns/seer", endpoint).authority(AUTHORITY);
    door.route(&[upstream.node_port(port).proxy_protocol("v1")])
        .await;
    let node_port = ([127, 0, 0, 1], port).into();
    eventually("the port is open", LIMIT, async || {
        TcpStream::connect(node_port).await.map(|_| ())
    })
    .await;
    let client = format!("PROXY TCP4 127.0.0.5 127.0.0.1 {{}} {port}");
    let line = converse_from(CLIENT, node_port, b"").await;
    let [begin, end] = [0, 1].map(|part| client.split("{}").nth(part).unwrap());
    assert!(line.starts_with(begin) && line.contains(end), "{line}");
    let line = converse_from(CLIENT, door.tunneling, request().as_bytes()).await;
    assert!(
        line.contains("\r\n\r\nPROXY TCP4 127.0.0.5 127.0.0.1 "),
        "{line}"
    );
    // The addresses in a header replace the addresses of the socket.
    let sent = [HEADER, request().as_bytes()].concat();
    let line = converse_from([127, 0, 0, 9], door.tunneling, &sent).await;
    let header = String::from_utf8(HEADER.to_vec()).unwrap();
    assert!(line.ends_with(&header), "{line}");
    let client = Http2::connect(door.tunneling).await;
    let mut tunnel = client.open(AUTHORITY, b"").await.unwrap();
    let line = tunnel.hear(30).await;
    assert!(
        line.starts_with(b"PROXY TCP4 127.0.0.1 127.0.0.1 "),
        "{line:?}"
    );
}

#[tokio::test]
async fn allow_list_of_a_service_follows_its_annotation() {
    const ALLOWED: &str = "nodeport-proxy.k8s.io/allowed-networks";
    let endpoint = first_line().await;
    let api = KubeApi::start().await;
    let put = |networks: Option<&str>| {
        let mut service = service("demo", "seer")
            .port("secure", 443)
            .annotation("nodeport-proxy.k8s.io/expose", "Tunneling");
        if let Some(networks) = networks {
            service = service.annotation(ALLOWED, networks);
        }
        api.put("services", service);
    };
    let slice = slice("demo", "seer").port("secure", endpoint.port());
    api.put("endpointslices", slice.ready("127.0.0.1"));
    put(None);
    let door = Door::watching(&api, &[]).await;
    door.is_ready().await;
    let client = Http2::connect(door.tunneling).await;
    let mut open = client.open(AUTHORITY, b"").await.unwrap();
    let becomes = async |expected: Option<StatusCode>| {
        let what = format!("the answer is {expected:?}");
        eventually(&what, LIMIT, async || {
            let status = client.open(AUTHORITY, b"").await.err();
            (status == expected)
                .then_some(())
                .ok_or(format!("{status:?}"))
        })
        .await;
    };
    put(Some("192.0.2.0/24"));
    becomes(Some(StatusCode::FORBIDDEN)).await;
    assert!(door.refused("tunneling", "address").await > 0.0);
    put(Some("192.0.2.0/24,127.0.0.1"));
    becomes(None).await;
    // A list with a mistake permits no client.
    put(Some("127.0.0.1,nowhere"));
    becomes(Some(StatusCode::FORBIDDEN)).await;
    let line = door.program.wait_for_log("Service demo/seer", LIMIT).await;
    assert!(line.contains(ALLOWED), "{line}");
    assert_eq!(
        door.value("culvert_nodeport_proxy_problems", &[]).await,
        1.0
    );
    // Connections from before the change stay.
    open.say(b"still here\n");
    assert_eq!(open.hear(11).await, b"still here\n");
    put(None);
    becomes(None).await;
}

#[tokio::test]
async fn allow_list_of_a_service_applies_to_every_listener() {
    let endpoint = TlsEndpoint::start(NAME).await;
    let mut door = Door::start(&[]).await;
    let port = door.ports.next_port();
    let upstream = Upstream::new("ns/api", endpoint.address).authority(AUTHORITY);
    let upstream = upstream.server_name(NAME).node_port(port);
    door.route(&[upstream.allowed("127.0.0.5/32, fd00::/8")])
        .await;
    let node_port = ([127, 0, 0, 1], port).into();
    eventually("the port is open", LIMIT, async || {
        TcpStream::connect(node_port).await.map(|_| ())
    })
    .await;
    for (from, is_allowed) in [(CLIENT, true), (OTHER, false)] {
        for address in [door.sni, node_port] {
            let stream = connect_from(from, address).await;
            let stream = endpoint.connect_over(stream, NAME, ALL_VERSIONS).await;
            assert_eq!(stream.is_ok(), is_allowed, "{from:?}");
        }
    }
    let answer = converse_from(OTHER, door.tunneling, request().as_bytes()).await;
    assert!(answer.starts_with("HTTP/1.1 403 "), "{answer}");
    door.has_refused("sni", "address", 1.0).await;
    door.has_refused("tunneling", "address", 1.0).await;
}

#[tokio::test]
async fn one_address_cannot_use_all_descriptors() {
    let endpoint = TlsEndpoint::start(NAME).await;
    let upstream = Upstream::new("ns/api", endpoint.address).server_name(NAME);
    let door = Door::start_limited(&[upstream], 300).await;
    let mut greedy = Vec::new();
    for _ in 0..400 {
        greedy.push(connect_from(OTHER, door.sni).await);
    }
    eventually("connections are refused", LIMIT, async || {
        let refused = door.refused("sni", "too_many_connections").await;
        (refused > 0.0).then_some(()).ok_or(refused)
    })
    .await;
    let mut streams = Vec::new();
    for _ in 0..10 {
        let client = connect_from(CLIENT, door.sni).await;
        let stream = endpoint.connect_over(client, NAME, ALL_VERSIONS).await;
        streams.push(stream.unwrap());
    }
    for stream in &mut streams {
        assert_eq!(ask(stream).await, NAME);
    }
}

#[tokio::test]
async fn incomplete_requests_of_one_address_do_not_lock_out_others() {
    let endpoint = TlsEndpoint::start(NAME).await;
    let upstream = Upstream::new("ns/api", endpoint.address).server_name(NAME);
    let door = Door::start(&[upstream.authority(AUTHORITY)]).await;
    let mut incomplete = Vec::new();
    for (address, bytes) in [
        (door.sni, &b"\x16\x03\x01\x10\x00\x01"[..]),
        (door.tunneling, b"CONNECT "),
    ] {
        for _ in 0..300 {
            let mut stream = connect_from(OTHER, address).await;
            stream.write_all(bytes).await.unwrap();
            incomplete.push(stream);
        }
    }
    // A hello and a request in two pieces need slots too.
    let mut client = connect_from(CLIENT, door.tunneling).await;
    let request = request();
    let (begin, rest) = request.split_at(20);
    client.write_all(begin.as_bytes()).await.unwrap();
    for listener in ["sni", "tunneling"] {
        eventually("older requests are refused", LIMIT, async || {
            let refused = door.refused(listener, "too_many_connections").await;
            (refused > 0.0).then_some(()).ok_or(refused)
        })
        .await;
    }
    client.write_all(rest.as_bytes()).await.unwrap();
    let mut status = [0; 12];
    timely("an answer", client.read_exact(&mut status))
        .await
        .unwrap();
    assert_eq!(&status, b"HTTP/1.1 200");
    endpoint.answers(door.sni, NAME).await;
}

#[tokio::test]
async fn complete_requests_need_no_slot() {
    let endpoint = first_line().await;
    let upstream = Upstream::new("ns/seer", endpoint).authority(AUTHORITY);
    let door = Door::start(&[upstream]).await;
    let mut incomplete = Vec::new();
    // More than all slots and places.
    for _ in 0..2400 {
        let mut stream = connect_from(OTHER, door.tunneling).await;
        stream.write_all(b"C").await.unwrap();
        incomplete.push(stream);
    }
    eventually("requests are refused", LIMIT, async || {
        let refused = door.refused("tunneling", "too_many_connections").await;
        (refused > 0.0).then_some(()).ok_or(refused)
    })
    .await;
    // The address is the same.
    for _ in 0..10 {
        let request = request() + "one line\n";
        let answer = converse_from(OTHER, door.tunneling, request.as_bytes()).await;
        assert!(answer.ends_with("\r\n\r\none line\n"), "{answer}");
        let client = Http2::over(connect_from(OTHER, door.tunneling).await).await;
        let mut tunnel = client.open(AUTHORITY, b"one line\n").await.unwrap();
        assert_eq!(tunnel.hear(9).await, b"one line\n");
    }
}

#[tokio::test]
async fn incomplete_hellos_of_one_client_do_not_lock_out_others_behind_a_balancer() {
    const BALANCER: [u8; 4] = [127, 0, 0, 9];
    let endpoint = TlsEndpoint::start(NAME).await;
    let upstream = Upstream::new("ns/api", endpoint.address).server_name(NAME);
    let door = Door::start_with(&[upstream], &["--proxy-protocol-from=127.0.0.9"]).await;
    let mut incomplete = Vec::new();
    // More than all slots and places.
    for _ in 0..2400 {
        let mut stream = connect_from(BALANCER, door.sni).await;
        let header = b"PROXY TCP4 192.0.2.66 203.0.113.8 40000 443\r\n";
        stream
            .write_all(&[header, &b"\x16"[..]].concat())
            .await
            .unwrap();
        incomplete.push(stream);
    }
    eventually("clients are refused", LIMIT, async || {
        let refused = door.refused("sni", "too_many_connections").await;
        (refused > 0.0).then_some(()).ok_or(refused)
    })
    .await;
    let mut stream = connect_from(BALANCER, door.sni).await;
    let header = b"PROXY TCP4 192.0.2.7 203.0.113.8 40000 443\r\n";
    stream.write_all(header).await.unwrap();
    let stream = endpoint.connect_over(stream, NAME, ALL_VERSIONS).await;
    assert_eq!(ask(&mut stream.unwrap()).await, NAME);
    assert_eq!(door.refused("sni", "proxy_header").await, 0.0);
}

#[tokio::test]
async fn server_behind_the_door_knows_the_addresses_of_agents() {
    let builder = Topology::builder(Mode::HttpConnect, Transport::Uds).servers(1);
    let trusts = ["--agent-proxy-protocol-from=127.0.0.1"];
    let mut topology = builder.server_args(&trusts).start().await;
    let agents = topology.agent_address(0);
    let upstream = Upstream::new("demo/server", agents).authority(AUTHORITY);
    let door = Door::start(&[upstream.proxy_protocol("v2")]).await;
    let hello = format!("{}not TLS", request());
    let answer = converse_from(CLIENT, door.tunneling, hello.as_bytes()).await;
    assert!(answer.starts_with("HTTP/1.1 200"), "{answer}");
    let server = topology.server(0);
    let line = server.wait_for_log("connection refused", LIMIT).await;
    assert!(line.contains("127.0.0.5:"), "{line}");
    // The door must send a header, and others must not.
    converse(agents, b"\x16\x03\x01").await;
    server
        .wait_for_log("no valid PROXY protocol header", LIMIT)
        .await;
    converse_from(OTHER, agents, HEADER).await;
    let unexpected = "unexpected PROXY protocol header";
    server.wait_for_log(unexpected, LIMIT).await;
}

/// The first packet of an OpenVPN client over TCP: length, HARD_RESET_CLIENT_V2, session id, no acknowledgement,
/// packet id 0.
const RESET: &[u8] = b"\x00\x0e\x38sessions\x00\x00\x00\x00\x00";

/// Returns the number of bytes that the program behind `server` has not read from a client, or an error without a
/// connection.
fn unread_from(client: &TcpStream, server: SocketAddr) -> Result<usize, String> {
    let hex = |at: SocketAddr| match at {
        SocketAddr::V4(at) => {
            let ip = u32::from_ne_bytes(at.ip().octets());
            format!("{ip:08X}:{:04X}", at.port())
        }
        SocketAddr::V6(_) => unreachable!("the test uses IPv4"),
    };
    let (server, client) = (hex(server), hex(client.local_addr().unwrap()));
    let sockets = std::fs::read_to_string("/proc/net/tcp").unwrap();
    let queues = sockets.lines().find_map(|line| {
        let fields: Vec<&str> = line.split_whitespace().collect();
        (fields.get(1..3) == Some(&[&*server, &*client])).then(|| fields[4].to_owned())
    });
    let (_, unread) = queues
        .as_deref()
        .unwrap_or_default()
        .split_once(':')
        .ok_or("no connection")?;
    usize::from_str_radix(unread, 16).map_err(|error| error.to_string())
}

#[tokio::test]
async fn openvpn_listener_displaces_silent_clients_first_and_accepts_headers() {
    let dir = tempfile::tempdir().unwrap();
    let pki = Pki::create(dir.path()).unwrap();
    let mut ports = Ports::default();
    let openvpn = SocketAddr::from(([127, 0, 0, 1], ports.next_port()));
    let args = [
        format!("--openvpn-listen=tcp:{openvpn}"),
        "--openvpn-proxy-protocol-from=127.0.0.9".to_owned(),
        format!("--openvpn-ca={}", pki.ca.display()),
        format!("--openvpn-cert={}", pki.server.cert.display()),
        format!("--openvpn-key={}", pki.server.key.display()),
    ];
    let args: Vec<&str> = args.iter().map(String::as_str).collect();
    let builder = Topology::builder(Mode::HttpConnect, Transport::Uds).servers(1);
    let mut topology = builder.server_args(&args).start().await;

    let mut honest = connect_from(CLIENT, openvpn).await;
    honest.write_all(&RESET[..2]).await.unwrap();
    // The server has read the bytes, so this client is not silent.
    let read = async || match unread_from(&honest, openvpn)? {
        0 => Ok(()),
        unread => Err(format!("{unread} bytes unread")),
    };
    eventually("the server reads", LIMIT, read).await;
    let mut silent = Vec::new();
    for _ in 0..300 {
        silent.push(connect_from(CLIENT, openvpn).await);
    }
    // Which one has waited longest depends on the threads of the server.
    let ends = silent
        .iter_mut()
        .map(|stream| Box::pin(async { stream.read(&mut [0]).await }));
    let (closed, ..) = timely("the end of a silent client", select_all(ends)).await;
    assert_eq!(closed.unwrap_or(0), 0);
    honest.write_all(&RESET[2..]).await.unwrap();
    let mut answer = [0; 3];
    timely("an answer", honest.read_exact(&mut answer))
        .await
        .unwrap();
    // HARD_RESET_SERVER_V2.
    assert_eq!(answer[2], 0x40);

    let mut behind = connect_from([127, 0, 0, 9], openvpn).await;
    behind.write_all(&[HEADER, RESET].concat()).await.unwrap();
    timely("an answer", behind.read_exact(&mut answer))
        .await
        .unwrap();
    assert_eq!(answer[2], 0x40);
    for (from, bytes, why) in [
        ([127, 0, 0, 9], RESET, "no valid PROXY protocol header"),
        (OTHER, HEADER, "unexpected PROXY protocol header"),
    ] {
        assert_eq!(converse_from(from, openvpn, bytes).await, "");
        topology.server(0).wait_for_log(why, LIMIT).await;
    }
}
