//! The socket below a session: packets out of a stream, or datagrams.

use std::collections::VecDeque;
use std::io;
use std::net::SocketAddr;
use std::task::{Context, Poll};

use bytes::{Buf as _, BytesMut};
use culvert_openvpn::framing;
use culvert_openvpn::options::Transport;
use tokio::io::{AsyncRead as _, AsyncWrite as _, ReadBuf};
use tokio::net::{TcpStream, UdpSocket};

/// The largest packet of a peer.
const MAX_PACKET: usize = 4096;

/// How much may wait to be sent, in bytes.
const FULL: usize = 256 * 1024;

/// A socket and what waits on it.
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
    /// A client's, with the address of its server; or a server's.
    Udp(UdpSocket, Option<SocketAddr>),
}

impl Link {
    /// A connection.
    pub fn tcp(stream: TcpStream) -> Self {
        stream.set_nodelay(true).expect("a TCP socket");
        Self::new(Socket::Tcp(stream))
    }

    /// A socket for one peer, or a server's.
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

    /// What carries the packets.
    pub fn transport(&self) -> Transport {
        match self.socket {
            Socket::Tcp(_) => Transport::Tcp,
            Socket::Udp(..) => Transport::Udp,
        }
    }

    /// The next packet and where it comes from. An error, or the end, of a stream.
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
                    // Of somebody else, or that nobody is there.
                    Poll::Ready(_) => {}
                    Poll::Pending => return Poll::Pending,
                }
            },
        }
    }

    /// Whether no more should be queued now.
    pub(super) fn is_full(&self) -> bool {
        self.bytes >= FULL
    }

    /// Whether nothing waits.
    pub(super) fn is_empty(&self) -> bool {
        self.waiting.is_empty()
    }

    /// Queues one packet, over TCP with its length, for the peer or for who is at this address.
    pub(super) fn queue(&mut self, packet: BytesMut, to: Option<SocketAddr>) {
        self.bytes += packet.len();
        self.waiting.push_back((packet, to));
    }

    /// Sends what is queued, and says whether there was anything that could be sent.
    pub(super) fn poll_flush(&mut self, cx: &mut Context<'_>) -> io::Result<bool> {
        let mut is_sent = false;
        while let Some((packet, to)) = self.waiting.front_mut() {
            let sent = match &mut self.socket {
                Socket::Tcp(stream) => std::pin::Pin::new(stream).poll_write(cx, packet),
                Socket::Udp(socket, peer) => {
                    let to = to.or(*peer).expect("an address");
                    // What cannot be sent is lost, as datagrams are.
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
