#![allow(clippy::unwrap_used, clippy::indexing_slicing)]

use std::net::{Ipv4Addr, SocketAddrV4};
use std::sync::Arc;
use std::time::Duration;

use culvert_openvpn::flows;
use culvert_openvpn::options::Transport;
use culvert_openvpn::packet::{ControlPacket, KeyId, Opcode, SessionId};
use culvert_openvpn::session::{ClientConfig, Push, ServerConfig};
use culvert_openvpn::tls::{ClientTls, Identity, MinVersion, ServerCheck, ServerTls};
use rcgen::{CertificateParams, CertifiedIssuer, DnType, IsCa, KeyPair};
use tokio::io::{AsyncReadExt as _, AsyncWriteExt as _};
use tokio::net::{TcpListener, TcpSocket};
use tokio::sync::mpsc;
use tokio::task::JoinHandle;
use tokio::time::timeout;

use super::super::stream::{Broken, Peer};
use super::*;

const SERVER: Ipv4Addr = Ipv4Addr::new(10, 20, 0, 1);
const CLIENT: Ipv4Addr = Ipv4Addr::new(10, 20, 0, 6);
const TARGET: SocketAddrV4 = SocketAddrV4::new(Ipv4Addr::new(172, 25, 1, 10), 443);
const PATIENCE: Duration = Duration::from_secs(30);

/// A role for both sides: accepts every peer, and echoes all bytes of a flow.
struct Echo {
    address: Ipv4Addr,
    peer: mpsc::UnboundedSender<Peer>,
    reports: u64,
    rekeyed: CancellationToken,
}

impl Role for Echo {
    fn event(
        &mut self,
        event: Event,
        session: &mut Session,
        streams: &mut Option<Streams>,
        now: Moment,
    ) {
        match event {
            Event::Authenticated(_) => {
                let options = vec![format!("ifconfig {CLIENT} 10.20.0.5")];
                session.accept(Push { options }, now).unwrap();
            }
            Event::Established(_) => {
                let config = flows::Config {
                    address: self.address,
                    accept: self.address == CLIENT,
                    ..flows::Config::default()
                };
                let established = Streams::new(config, now);
                let _ = self.peer.send(established.peer());
                *streams = Some(established);
            }
            Event::Rekeyed { .. } => self.rekeyed.cancel(),
            _ => {}
        }
    }

    fn packet(&mut self, packet: &[u8], streams: &mut Streams, now: Moment) {
        streams.input(packet, now);
    }

    fn incoming(&mut self, incoming: Incoming) {
        tokio::spawn(async move {
            let mut stream = incoming.accept().unwrap();
            let _ = tokio::io::copy(&mut stream.reader, &mut stream.writer).await;
            let _ = stream.writer.shutdown().await;
        });
    }

    fn report(&mut self, session: &Stats, _: Option<&Streams>, dropped: u64) {
        assert_eq!(dropped, 0);
        self.reports = session.packets_in;
    }
}

type Running = JoinHandle<(Echo, LinkEnd)>;

struct Pair {
    server: Running,
    client: Running,
    peer: Peer,
    rekeyed: CancellationToken,
    stop_server: CancellationToken,
    stop_client: CancellationToken,
}

impl Pair {
    async fn start(transport: Transport) -> Self {
        let (server, client) = configs(transport);
        let (give, mut peers) = mpsc::unbounded_channel();
        let (keep, _clients) = mpsc::unbounded_channel();
        let role = |address, peer| Echo {
            address,
            peer,
            reports: 0,
            rekeyed: CancellationToken::new(),
        };
        let (server_role, client_role) = (role(SERVER, give), role(CLIENT, keep));
        let rekeyed = server_role.rekeyed.clone();
        let server = Session::server(Arc::new(server), 0, now());
        let client = Session::client(Arc::new(client), now());
        let (server, client) = match transport {
            Transport::Tcp => {
                let listener = TcpListener::bind("127.0.0.1:0").await.unwrap();
                let address = listener.local_addr().unwrap();
                let (near, far) = tokio::join!(listener.accept(), TcpStream::connect(address));
                (
                    Link::tcp(near.unwrap().0, server, 1500, server_role),
                    Link::tcp(far.unwrap(), client, 1500, client_role),
                )
            }
            Transport::Udp => {
                let near = UdpSocket::bind("127.0.0.1:0").await.unwrap();
                let far = UdpSocket::bind("127.0.0.1:0").await.unwrap();
                near.connect(far.local_addr().unwrap()).await.unwrap();
                far.connect(near.local_addr().unwrap()).await.unwrap();
                (
                    Link::udp(near, server, server_role).unwrap(),
                    Link::udp(far, client, client_role).unwrap(),
                )
            }
        };
        let stops = [CancellationToken::new(), CancellationToken::new()];
        let [stop_server, stop_client] = stops.clone();
        let [for_server, for_client] = stops;
        Self {
            server: tokio::spawn(async move { server.run(&for_server).await }),
            client: tokio::spawn(async move { client.run(&for_client).await }),
            peer: timeout(PATIENCE, peers.recv()).await.unwrap().unwrap(),
            rekeyed,
            stop_server,
            stop_client,
        }
    }

    async fn echo(&self, length: usize) {
        let mut stream = self.peer.dial(TARGET).await.unwrap();
        let sent: Vec<u8> = (0..length).map(|i| ((i * 7) >> 4) as u8).collect();
        let mut back = Vec::new();
        let write = async {
            stream.writer.write_all(&sent).await.unwrap();
            stream.writer.shutdown().await.unwrap();
        };
        let read = async { stream.reader.read_to_end(&mut back).await.unwrap() };
        let both = async { tokio::join!(write, read) };
        timeout(PATIENCE, both).await.unwrap();
        assert!(back == sent);
    }
}

fn configs(transport: Transport) -> (ServerConfig, ClientConfig) {
    let named = |name: &str| {
        let mut params = CertificateParams::default();
        params.distinguished_name.push(DnType::CommonName, name);
        params
    };
    let mut params = named("CA");
    params.is_ca = IsCa::Ca(rcgen::BasicConstraints::Unconstrained);
    let ca = CertifiedIssuer::self_signed(params, KeyPair::generate().unwrap()).unwrap();
    let identity = |name: &str| {
        let key = KeyPair::generate().unwrap();
        let certificate = named(name).signed_by(&key, &ca).unwrap();
        let key = key.serialize_pem();
        Identity::from_pem(certificate.pem().as_bytes(), key.as_bytes()).unwrap()
    };
    let pem = ca.pem();
    let (pem, version) = (pem.as_bytes(), MinVersion::Tls12);
    let server = ServerTls::new(pem, None, identity("server"), version, false).unwrap();
    let check = ServerCheck {
        require_usage: false,
        name: None,
    };
    let client = ClientTls::new(pem, Some(identity("client")), check, version).unwrap();
    let mut server = ServerConfig::new(transport, Arc::new(server));
    server.common.timers.reneg = Duration::from_secs(1);
    let client = ClientConfig::new(transport, Arc::new(client));
    (server, client)
}

#[tokio::test]
async fn flows_work_over_both_transports_during_rekeys() {
    for transport in [Transport::Tcp, Transport::Udp] {
        let pair = Pair::start(transport).await;
        pair.echo(0).await;
        pair.echo(3_000_001).await;
        let until_rekeyed = async {
            while !pair.rekeyed.is_cancelled() {
                pair.echo(50_000).await;
            }
        };
        timeout(PATIENCE, until_rekeyed).await.unwrap();
        let many = (0..20).map(|_| pair.echo(50_000));
        futures_util::future::join_all(many).await;
        // A flow ends shortly after its streams.
        let none = async {
            while pair.peer.flows() > 0 {
                tokio::time::sleep(Duration::from_millis(1)).await;
            }
        };
        timeout(PATIENCE, none).await.unwrap();
        pair.stop_server.cancel();
        let (server, end) = timeout(PATIENCE, pair.server).await.unwrap().unwrap();
        assert!(matches!(end, LinkEnd::Session(Ended::Closed)), "{end}");
        assert!(server.reports > 1000);
        assert!(pair.peer.is_gone());
        let dialed = pair.peer.dial(TARGET).await;
        assert_eq!(dialed.err(), Some(Broken::TunnelLost));
        // The client learns that the server has closed the session.
        let (_, end) = timeout(PATIENCE, pair.client).await.unwrap().unwrap();
        match transport {
            Transport::Tcp => assert!(
                matches!(end, LinkEnd::Session(Ended::Disconnected { stage: None })),
                "{end}"
            ),
            Transport::Udp => assert!(matches!(end, LinkEnd::Session(Ended::PeerExit)), "{end}"),
        }
    }
}

#[tokio::test]
async fn stopping_a_client_ends_its_flows() {
    let pair = Pair::start(Transport::Tcp).await;
    let mut stream = pair.peer.dial(TARGET).await.unwrap();
    pair.stop_client.cancel();
    let mut all = Vec::new();
    let lost = stream.reader.read_to_end(&mut all).await.unwrap_err();
    assert_eq!(lost.kind(), std::io::ErrorKind::ConnectionAborted);
    let (_, end) = timeout(PATIENCE, pair.server).await.unwrap().unwrap();
    // The client's TCP connection was closed, or reset if data was in transit.
    let gone = matches!(end, LinkEnd::Session(Ended::Disconnected { stage: None }));
    assert!(gone, "{end}");
}

#[tokio::test]
async fn invalid_framing_ends_the_link() {
    let (config, _) = configs(Transport::Tcp);
    let config = Arc::new(config);
    for garbage in [&b"GET / HTTP/1.1\r\n\r\n"[..], &[0, 0, 1]] {
        let listener = TcpListener::bind("127.0.0.1:0").await.unwrap();
        let address = listener.local_addr().unwrap();
        let (near, far) = tokio::join!(listener.accept(), TcpStream::connect(address));
        let (peer, _peers) = mpsc::unbounded_channel();
        let role = Echo {
            address: SERVER,
            peer,
            reports: 0,
            rekeyed: CancellationToken::new(),
        };
        let session = Session::server(config.clone(), 0, now());
        let link = Link::tcp(near.unwrap().0, session, 1500, role);
        far.unwrap().write_all(garbage).await.unwrap();
        let never = CancellationToken::new();
        let (_, end) = timeout(PATIENCE, link.run(&never)).await.unwrap();
        let framing = matches!(end, LinkEnd::Wire(WireError::Framing(_)));
        assert!(framing, "{end}");
    }
}

/// Creates a connection with small buffers in the kernel, so that bytes soon wait in the programs.
async fn narrow_connection() -> (TcpStream, TcpStream) {
    const BYTES: u32 = 4096;
    let listener = TcpSocket::new_v4().unwrap();
    listener.set_send_buffer_size(BYTES).unwrap();
    listener.set_recv_buffer_size(BYTES).unwrap();
    listener.bind("127.0.0.1:0".parse().unwrap()).unwrap();
    let listener = listener.listen(1).unwrap();
    let client = TcpSocket::new_v4().unwrap();
    client.set_recv_buffer_size(BYTES).unwrap();
    client.set_send_buffer_size(BYTES).unwrap();
    let connect = client.connect(listener.local_addr().unwrap());
    let (near, far) = tokio::join!(listener.accept(), connect);
    (near.unwrap().0, far.unwrap())
}

/// Returns a control packet with the prefix of a stream.
fn control(opcode: Opcode, id: u32) -> Vec<u8> {
    let packet = ControlPacket {
        opcode,
        key_id: KeyId::of(0),
        session: SessionId([7; 8]),
        acks: Vec::new(),
        peer_session: None,
        id: Some(id),
        payload: &[],
    };
    let mut out = bytes::BytesMut::new();
    packet.write(&mut out);
    let length = u16::try_from(out.len()).unwrap().to_be_bytes();
    [&length[..], &out].concat()
}

#[tokio::test]
async fn output_for_a_peer_that_never_reads_is_bounded() {
    let (config, _) = configs(Transport::Tcp);
    let (near, far) = narrow_connection().await;
    let (peer, _peers) = mpsc::unbounded_channel();
    let role = Echo {
        address: SERVER,
        peer,
        reports: 0,
        rekeyed: CancellationToken::new(),
    };
    let session = Session::server(Arc::new(config), 0, now());
    let mut link = Link::tcp(near, session, 1500, role);
    // Every repeated packet is acknowledged. An id in the upper half counts as repeated.
    let repeated = (0..100).map(|id| control(Opcode::ControlV1, 1 << 31 | id));
    let repeated = repeated.collect::<Vec<_>>().concat();
    let mut unsent = control(Opcode::HardResetClientV2, 0);
    let mut send = || {
        if unsent.len() < repeated.len() {
            unsent.extend_from_slice(&repeated);
        }
        let written = far.try_write(&unsent).unwrap_or_default();
        unsent.drain(..written);
    };
    let fill = async {
        while link.wire.has_control_room() {
            tokio::select! {
                turn = poll_fn(|cx| link.poll_turn(cx)) => turn.unwrap(),
                _ = far.writable() => send(),
            }
        }
    };
    timeout(PATIENCE, fill).await.unwrap();
    let full = link.wire.out().len();
    assert!(full < 256 << 10, "{full} bytes wait");
    for _ in 0..100 {
        send();
        let turn = poll_fn(|cx| Poll::Ready(link.poll_turn(cx))).await;
        assert!(!matches!(turn, Poll::Ready(Err(_))));
        tokio::task::yield_now().await;
    }
    let after = link.wire.out().len();
    assert!(after <= full, "{after} bytes wait after {full}");
}
