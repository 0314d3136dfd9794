//! The socket of one peer, TCP or UDP: reads and writes packets in batches.
//!
//! The wire owns the buffers. Outgoing packets are collected until a batch is full or no packet is left. No
//! packet is collected while the socket is not writable, because a queue here would only delay the answers of
//! every flow.

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

/// Size of an outgoing batch, in bytes.
const OUT_BYTES: usize = 128 << 10;
/// Number of bytes by which control packets may exceed [`OUT_BYTES`].
const CONTROL_BYTES: usize = 64 << 10;
/// Initial read buffer of a TCP peer, in bytes. Small, because there may be many peers in a handshake.
const FIRST_READ: usize = 8 << 10;
/// Largest read buffer, in bytes. A larger batch saves system calls, but exceeds the CPU caches.
const MAX_READ: usize = 256 << 10;
/// Largest difference between a packet and its inner packet, in bytes: headers, HMAC, IV and padding.
const OVERHEAD: usize = 256;

/// Reason why a socket stopped delivering packets.
#[derive(Debug, thiserror::Error)]
pub enum WireError {
    /// The peer closed the connection.
    #[error("the peer closed the connection")]
    Closed,
    /// The socket failed.
    #[error(transparent)]
    Io(#[from] io::Error),
    /// The peer's bytes are not OpenVPN over TCP.
    #[error("not OpenVPN over TCP: {0}")]
    Framing(#[from] LengthError),
}

impl WireError {
    /// Returns true if the peer has left. Closing a connection with unread bytes resets the connection.
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
    /// A socket that is connected to the peer, and the peer's address.
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

    /// Returns the output buffer. Callers append a packet and then call [`cut`](Self::cut).
    pub(super) fn out(&mut self) -> &mut BytesMut {
        match self {
            Self::Tcp(stream) => &mut stream.out,
            Self::Udp(datagrams, _) => datagrams.out(),
        }
    }

    /// Ends the packet that was appended at `start`.
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

    /// Returns true if there is room for the control packets that answer another batch of the peer.
    pub(super) fn has_control_room(&self) -> bool {
        self.len() < OUT_BYTES + CONTROL_BYTES
    }

    /// Returns true if there is room for more packets.
    pub(super) fn has_room(&self) -> bool {
        self.len() < OUT_BYTES
    }

    pub(super) fn is_empty(&self) -> bool {
        self.len() == 0
    }

    /// Writes the output buffer. Ready once the whole buffer is written.
    pub(super) fn poll_flush(&mut self, cx: &mut Context<'_>) -> Poll<io::Result<()>> {
        match self {
            Self::Tcp(stream) => stream.poll_flush(cx),
            Self::Udp(datagrams, _) => datagrams.poll_flush(cx).map(Ok),
        }
    }

    /// Reads a batch. Ready once there may be packets. The read buffer grows only for a peer that is established,
    /// because there may be many others.
    pub(super) fn poll_fill(
        &mut self,
        is_established: bool,
        cx: &mut Context<'_>,
    ) -> Poll<Result<(), WireError>> {
        match self {
            Self::Tcp(stream) => stream.poll_fill(is_established, cx),
            // UDP errors are ignored: the peer's port may be closed for a moment, or a router may have sent
            // an ICMP error.
            Self::Udp(datagrams, _) => datagrams.poll_receive(cx).map(Ok),
        }
    }

    /// Returns the time of the next call of [`handle_timeout`](Self::handle_timeout).
    pub(super) fn poll_timeout(&self) -> Option<Moment> {
        match self {
            Self::Tcp(stream) => stream.batching.poll_timeout(),
            Self::Udp(..) => None,
        }
    }

    /// Makes the socket readable at the first byte again, if its bytes have waited long enough.
    pub(super) fn handle_timeout(&mut self, now: Moment) {
        if let Self::Tcp(stream) = self
            && stream.batching.expired(now)
        {
            stream.wake_at(false);
        }
    }

    /// Passes each packet of the batch to `take`.
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

    fn poll_fill(
        &mut self,
        is_established: bool,
        cx: &mut Context<'_>,
    ) -> Poll<Result<(), WireError>> {
        if is_established {
            self.grow();
        }
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
        if is_established {
            self.grow();
        }
        Poll::Ready(Ok(()))
    }

    /// Makes the socket readable at the mark, or at the first byte.
    fn wake_at(&self, mark: bool) {
        // If the option cannot be set, the only cost is one turn per packet.
        let _ = options::set_receive_low_water(&self.socket, if mark { LOW_WATER } else { 1 });
    }

    /// Doubles the read buffer if the buffer is full, up to the limit.
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

#[cfg(test)]
mod tests {
    #![allow(clippy::unwrap_used)]

    use std::future::poll_fn;

    use tokio::io::AsyncWriteExt as _;
    use tokio::net::TcpListener;

    use super::*;

    #[tokio::test]
    async fn read_buffer_grows_only_for_an_established_peer() {
        let listener = TcpListener::bind("127.0.0.1:0").await.unwrap();
        let mut peer = TcpStream::connect(listener.local_addr().unwrap())
            .await
            .unwrap();
        let mut wire = Wire::tcp(listener.accept().await.unwrap().0, 1500);
        let sends = tokio::spawn(async move {
            let packet = [&1000_u16.to_be_bytes()[..], &[0; 1000]].concat();
            while peer.write_all(&packet).await.is_ok() {}
        });
        let buffer = |wire: &Wire| match wire {
            Wire::Tcp(stream) => stream.input.len(),
            Wire::Udp(..) => 0,
        };
        let first = buffer(&wire);
        let mut packets = 0;
        while packets < 10_000 {
            poll_fn(|cx| wire.poll_fill(false, cx)).await.unwrap();
            wire.packets(|_| packets += 1).unwrap();
        }
        assert_eq!(buffer(&wire), first);
        while buffer(&wire) == first {
            poll_fn(|cx| wire.poll_fill(true, cx)).await.unwrap();
            wire.packets(|_| ()).unwrap();
        }
        drop(wire);
        sends.await.unwrap();
    }
}
