//! The socket below a session: packets from a stream, or datagrams.

use std::collections::VecDeque;
use std::io;
use std::net::SocketAddr;
use std::task::{Context, Poll};

use bytes::{Buf as _, BytesMut};
use culvert_openvpn::framing;
use culvert_openvpn::options::Transport;
use tokio::io::{AsyncRead as _, AsyncWrite as _, ReadBuf};
use tokio::net::{TcpStream, UdpSocket};

/// Largest packet from a peer, in bytes.
const MAX_PACKET: usize = 4096;

/// Number of queued bytes at which the link is full.
const FULL: usize = 256 * 1024;

/// A socket and the packets in its send queue.
#[derive(Debug)]
pub struct Link {
    socket: Socket,
    received: BytesMut,
    waiting: VecDeque<(BytesMut, Option<SocketAddr>)>,
    bytes: usize,
}

#[derive(Debug)]
enum Socket {
    Tcp(TcpStream),
    /// A client's socket with the address of its server, or a server's socket without an address.
    Udp(UdpSocket, Option<SocketAddr>),
}

impl Link {
    /// Creates a link on a TCP connection.
    pub fn tcp(stream: TcpStream) -> Self {
        stream.set_nodelay(true).expect("a TCP socket");
        Self::new(Socket::Tcp(stream))
    }

    /// Creates a link on a UDP socket: for a single `peer`, or without `peer` for a server.
    pub fn udp(socket: UdpSocket, peer: Option<SocketAddr>) -> Self {
        Self::new(Socket::Udp(socket, peer))
    }

    fn new(socket: Socket) -> Self {
        Self {
            socket,
            received: BytesMut::new(),
            waiting: VecDeque::new(),
            bytes: 0,
        }
    }

    /// Returns the transport of the packets.
    pub fn transport(&self) -> Transport {
        match self.socket {
            Socket::Tcp(_) => Transport::Tcp,
            Socket::Udp(..) => Transport::Udp,
        }
    }

    /// Returns the next packet and its source address. Fails on an error or the end of a stream.
    pub(super) fn poll_packet(
        &mut self,
        cx: &mut Context<'_>,
    ) -> Poll<io::Result<(BytesMut, SocketAddr)>> {
        let Self {
            socket, received, ..
        } = self;
        match socket {
            Socket::Tcp(stream) => loop {
                let first = framing::take_first(received, MAX_PACKET);
                if let Some(packet) = first.map_err(io::Error::other)? {
                    return Poll::Ready(Ok((packet, stream.peer_addr()?)));
                }
                let mut bytes = [0; 16384];
                let mut buffer = ReadBuf::new(&mut bytes);
                match std::pin::Pin::new(&mut *stream).poll_read(cx, &mut buffer) {
                    Poll::Ready(Ok(())) if buffer.filled().is_empty() => {
                        return Poll::Ready(Err(io::ErrorKind::UnexpectedEof.into()));
                    }
                    Poll::Ready(Ok(())) => received.extend_from_slice(buffer.filled()),
                    Poll::Ready(Err(error)) => return Poll::Ready(Err(error)),
                    Poll::Pending => return Poll::Pending,
                }
            },
            Socket::Udp(socket, peer) => loop {
                let mut bytes = [0; MAX_PACKET];
                let mut buffer = ReadBuf::new(&mut bytes);
                match socket.poll_recv_from(cx, &mut buffer) {
                    Poll::Ready(Ok(from)) if peer.is_none_or(|peer| peer == from) => {
                        return Poll::Ready(Ok((buffer.filled().into(), from)));
                    }
                    // A packet from another peer, or an ICMP error because the peer does not listen.
                    Poll::Ready(_) => {}
                    Poll::Pending => return Poll::Pending,
                }
            },
        }
    }

    /// Returns true if the caller must not queue more packets now.
    pub(super) fn is_full(&self) -> bool {
        self.bytes >= FULL
    }

    /// Returns true if the send queue is empty.
    pub(super) fn is_empty(&self) -> bool {
        self.waiting.is_empty()
    }

    /// Queues a packet for the peer, or for the address `to`. Over TCP, the packet must include its length
    /// prefix.
    pub(super) fn queue(&mut self, packet: BytesMut, to: Option<SocketAddr>) {
        self.bytes += packet.len();
        self.waiting.push_back((packet, to));
    }

    /// Sends queued packets. Returns true if anything was sent.
    pub(super) fn poll_flush(&mut self, cx: &mut Context<'_>) -> io::Result<bool> {
        let mut is_sent = false;
        while let Some((packet, to)) = self.waiting.front_mut() {
            let sent = match &mut self.socket {
                Socket::Tcp(stream) => std::pin::Pin::new(stream).poll_write(cx, packet),
                Socket::Udp(socket, peer) => {
                    let to = to.or(*peer).expect("an address");
                    // A datagram that cannot be sent is lost, as on any network.
                    let sent = socket.poll_send_to(cx, packet, to);
                    sent.map(|sent| Ok(sent.unwrap_or(packet.len())))
                }
            };
            let Poll::Ready(sent) = sent else {
                break;
            };
            let sent = sent?;
            self.bytes -= sent;
            packet.advance(sent);
            if packet.is_empty() {
                self.waiting.pop_front();
            }
            is_sent = true;
        }
        Ok(is_sent)
    }
}
