//! The socket of one peer, TCP or UDP: packets in and out, in batches.
//!
//! Owns the buffers. What is to be sent is collected until a batch is full or there is no more,
//! and while the socket takes nothing nothing more is collected: a queue of packets here would
//! only make every flow's answers late.

use std::io;
use std::net::SocketAddr;
use std::pin::Pin;
use std::task::{Context, Poll, ready};

use bytes::{Buf, BytesMut};
use culvert_host::net::options;
use culvert_openvpn::framing::{self, LengthError, PREFIX_LEN};
use tokio::io::{AsyncRead, AsyncWrite, ReadBuf};
use tokio::net::{TcpStream, UdpSocket};

use super::batching::{Batching, LOW_WATER};
use super::datagrams::Datagrams;
use super::{Moment, now};

/// Bytes that are collected before they are written.
const OUT_BYTES: usize = 128 << 10;
/// The read buffer of a TCP peer at first: handshakes are small and may be many.
const FIRST_READ: usize = 8 << 10;
/// The most that is read at once. A larger batch saves system calls and falls out of the caches.
const MAX_READ: usize = 256 << 10;
/// What a packet has beside its inner packet, at most: headers, HMAC, IV and padding.
const OVERHEAD: usize = 256;

/// Why nothing comes any more.
#[derive(Debug, thiserror::Error)]
pub enum WireError {
    /// The peer closed the connection.
    #[error("the peer closed the connection")]
    Closed,
    /// The socket broke.
    #[error(transparent)]
    Io(#[from] io::Error),
    /// What the peer sends is not OpenVPN over TCP.
    #[error("not OpenVPN over TCP: {0}")]
    Framing(#[from] LengthError),
}

impl WireError {
    /// Whether the peer has gone: a connection that is closed with bytes unread is reset.
    pub(super) fn is_hangup(&self) -> bool {
        use io::ErrorKind::{BrokenPipe, ConnectionReset};
        match self {
            Self::Closed => true,
            Self::Io(error) => matches!(error.kind(), ConnectionReset | BrokenPipe),
            Self::Framing(_) => false,
        }
    }
}

/// A socket and its buffers.
pub(super) enum Wire {
    Tcp(Stream),
    /// Connected to the peer, whose address it is.
    Udp(Box<Datagrams>, SocketAddr),
}

/// A TCP connection.
pub(super) struct Stream {
    socket: TcpStream,
    input: Vec<u8>,
    filled: usize,
    out: BytesMut,
    max_packet: usize,
    batching: Batching,
}

impl Wire {
    pub(super) fn tcp(socket: TcpStream, tun_mtu: u16) -> Self {
        let max_packet = usize::from(tun_mtu.max(1500)) + OVERHEAD;
        Self::Tcp(Stream {
            socket,
            input: vec![0; FIRST_READ.max(PREFIX_LEN + max_packet)],
            filled: 0,
            out: BytesMut::new(),
            max_packet,
            batching: Batching::new(now()),
        })
    }

    pub(super) fn udp(socket: UdpSocket) -> io::Result<Self> {
        let peer = socket.peer_addr()?;
        Ok(Self::Udp(Box::new(Datagrams::new(socket)?), peer))
    }

    /// Where packets to be sent are appended; after each, [`cut`](Self::cut).
    pub(super) fn out(&mut self) -> &mut BytesMut {
        match self {
            Self::Tcp(stream) => &mut stream.out,
            Self::Udp(datagrams, _) => datagrams.out(),
        }
    }

    /// One packet was appended behind `start`.
    pub(super) fn cut(&mut self, start: usize) {
        if let Self::Udp(datagrams, peer) = self {
            datagrams.cut(*peer, start);
        }
    }

    fn len(&self) -> usize {
        match self {
            Self::Tcp(stream) => stream.out.len(),
            Self::Udp(datagrams, _) => datagrams.len(),
        }
    }

    /// Whether more should be appended now.
    pub(super) fn has_room(&self) -> bool {
        self.len() < OUT_BYTES
    }

    pub(super) fn is_empty(&self) -> bool {
        self.len() == 0
    }

    /// Writes what was appended. Ready once all of it is written.
    pub(super) fn poll_flush(&mut self, cx: &mut Context<'_>) -> Poll<io::Result<()>> {
        match self {
            Self::Tcp(stream) => stream.poll_flush(cx),
            Self::Udp(datagrams, _) => datagrams.poll_flush(cx).map(Ok),
        }
    }

    /// Reads a batch. Ready once there is something to look at.
    pub(super) fn poll_fill(&mut self, cx: &mut Context<'_>) -> Poll<Result<(), WireError>> {
        match self {
            Self::Tcp(stream) => stream.poll_fill(cx),
            // Errors are not its: the peer's port is closed for now, or a router says something.
            Self::Udp(datagrams, _) => datagrams.poll_receive(cx).map(Ok),
        }
    }

    /// When [`handle_timeout`](Self::handle_timeout) is to be called.
    pub(super) fn poll_timeout(&self) -> Option<Moment> {
        match self {
            Self::Tcp(stream) => stream.batching.poll_timeout(),
            Self::Udp(..) => None,
        }
    }

    /// Has the socket wake for whatever it holds, if that has waited for long enough.
    pub(super) fn handle_timeout(&mut self, now: Moment) {
        if let Self::Tcp(stream) = self
            && stream.batching.expired(now)
        {
            stream.wake_at(false);
        }
    }

    /// Shows each packet of the batch to `take`.
    pub(super) fn packets(&mut self, mut take: impl FnMut(&mut [u8])) -> Result<(), LengthError> {
        match self {
            Self::Tcp(stream) => stream.packets(take),
            Self::Udp(datagrams, _) => {
                while let Some((_, packet)) = datagrams.take() {
                    take(packet);
                }
                Ok(())
            }
        }
    }
}

impl Stream {
    fn poll_flush(&mut self, cx: &mut Context<'_>) -> Poll<io::Result<()>> {
        while !self.out.is_empty() {
            let written = ready!(Pin::new(&mut self.socket).poll_write(cx, &self.out))?;
            if written == 0 {
                return Poll::Ready(Err(io::ErrorKind::WriteZero.into()));
            }
            self.out.advance(written);
        }
        Poll::Ready(Ok(()))
    }

    fn poll_fill(&mut self, cx: &mut Context<'_>) -> Poll<Result<(), WireError>> {
        self.grow();
        let free = self.input.get_mut(self.filled..).unwrap_or_default();
        let mut buffer = ReadBuf::new(free);
        ready!(Pin::new(&mut self.socket).poll_read(cx, &mut buffer))?;
        let read = buffer.filled().len();
        if read == 0 {
            return Poll::Ready(Err(WireError::Closed));
        }
        self.filled += read;
        if let Some(waits) = self.batching.read(read, now()) {
            self.wake_at(waits);
        }
        self.grow();
        Poll::Ready(Ok(()))
    }

    /// Has the socket wake its reader at the mark, or at the first byte.
    fn wake_at(&self, mark: bool) {
        // Without it every packet costs a turn, no more.
        let _ = options::set_receive_low_water(&self.socket, if mark { LOW_WATER } else { 1 });
    }

    /// Makes room where there is none.
    fn grow(&mut self) {
        if self.filled == self.input.len() && self.filled < MAX_READ {
            self.input.resize((2 * self.filled).min(MAX_READ), 0);
        }
    }

    fn packets(&mut self, mut take: impl FnMut(&mut [u8])) -> Result<(), LengthError> {
        let batch = self.input.get_mut(..self.filled).unwrap_or_default();
        let mut at = 0;
        loop {
            let rest = batch.get_mut(at..).unwrap_or_default();
            let Some((packet, _)) = framing::split_first(rest, self.max_packet)? else {
                break;
            };
            at += PREFIX_LEN + packet.len();
            take(packet);
        }
        self.input.copy_within(at..self.filled, 0);
        self.filled -= at;
        Ok(())
    }
}
