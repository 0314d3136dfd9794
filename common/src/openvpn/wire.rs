//! The socket of one peer, TCP or UDP: packets in and out, in batches.
//!
//! Owns the buffers. What is to be sent is collected until a batch is full or there is no more,
//! and while the socket takes nothing nothing more is collected: a queue of packets here would
//! only make every flow's answers late.

use std::collections::VecDeque;
use std::io;
use std::pin::Pin;
use std::task::{Context, Poll, ready};

use bytes::{Buf, BytesMut};
use culvert_openvpn::framing::{self, LengthError, PREFIX_LEN};
use tokio::io::{AsyncRead, AsyncWrite, ReadBuf};
use tokio::net::{TcpStream, UdpSocket};

use super::pace::{LOW_WATER, Pace};
use super::{Moment, now};
use crate::net::low_water;

/// Bytes that are collected before they are written.
const OUT_BYTES: usize = 128 << 10;
/// The read buffer of a TCP peer at first: handshakes are small and may be many.
const FIRST_READ: usize = 8 << 10;
/// The most that is read at once. A larger batch saves system calls and falls out of the caches.
const MAX_READ: usize = 256 << 10;
/// Datagrams that are read at once.
const MAX_DATAGRAMS: usize = 64;
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
pub(super) struct Wire {
    socket: Socket,
    input: Vec<u8>,
    filled: usize,
    /// Lengths of the datagrams in `input`.
    datagrams: Vec<usize>,
    out: BytesMut,
    /// Lengths of the datagrams in `out`.
    cuts: VecDeque<usize>,
    max_packet: usize,
}

enum Socket {
    Tcp(TcpStream, Pace),
    /// Connected to the peer.
    Udp(UdpSocket),
}

impl Wire {
    pub(super) fn tcp(stream: TcpStream, tun_mtu: u16) -> Self {
        Self::new(Socket::Tcp(stream, Pace::new(now())), tun_mtu)
    }

    pub(super) fn udp(socket: UdpSocket, tun_mtu: u16) -> Self {
        Self::new(Socket::Udp(socket), tun_mtu)
    }

    fn new(socket: Socket, tun_mtu: u16) -> Self {
        let max_packet = usize::from(tun_mtu.max(1500)) + OVERHEAD;
        let first = match socket {
            Socket::Tcp(..) => FIRST_READ.max(PREFIX_LEN + max_packet),
            Socket::Udp(_) => MAX_DATAGRAMS * max_packet,
        };
        Self {
            socket,
            input: vec![0; first],
            filled: 0,
            datagrams: Vec::new(),
            out: BytesMut::new(),
            cuts: VecDeque::new(),
            max_packet,
        }
    }

    /// Where packets to be sent are appended; after each, [`cut`](Self::cut).
    pub(super) fn out(&mut self) -> &mut BytesMut {
        &mut self.out
    }

    /// One packet was appended behind `start`.
    pub(super) fn cut(&mut self, start: usize) {
        if matches!(self.socket, Socket::Udp(_)) && self.out.len() > start {
            self.cuts.push_back(self.out.len() - start);
        }
    }

    /// Whether more should be appended now.
    pub(super) fn has_room(&self) -> bool {
        self.out.len() < OUT_BYTES
    }

    pub(super) fn is_empty(&self) -> bool {
        self.out.is_empty()
    }

    /// Writes what was appended. Ready once all of it is written.
    pub(super) fn poll_flush(&mut self, cx: &mut Context<'_>) -> Poll<io::Result<()>> {
        while !self.out.is_empty() {
            let written = match &mut self.socket {
                Socket::Tcp(stream, _) => ready!(Pin::new(stream).poll_write(cx, &self.out))?,
                Socket::Udp(socket) => {
                    let length = self.cuts.front().copied().unwrap_or(self.out.len());
                    let datagram = self.out.get(..length).unwrap_or(&self.out);
                    match ready!(socket.poll_send(cx, datagram)) {
                        // A datagram may be lost anyway. What ends the session is silence.
                        Ok(_) | Err(_) => {}
                    }
                    self.cuts.pop_front();
                    length
                }
            };
            if written == 0 {
                return Poll::Ready(Err(io::ErrorKind::WriteZero.into()));
            }
            self.out.advance(written.min(self.out.len()));
        }
        Poll::Ready(Ok(()))
    }

    /// Reads a batch. Ready once there is something to look at.
    pub(super) fn poll_fill(&mut self, cx: &mut Context<'_>) -> Poll<Result<(), WireError>> {
        match &mut self.socket {
            Socket::Tcp(stream, pace) => {
                if self.filled == self.input.len() && self.filled < MAX_READ {
                    self.input.resize((2 * self.filled).min(MAX_READ), 0);
                }
                let free = self.input.get_mut(self.filled..).unwrap_or_default();
                let mut buffer = ReadBuf::new(free);
                ready!(Pin::new(&mut *stream).poll_read(cx, &mut buffer))?;
                let read = buffer.filled().len();
                if read == 0 {
                    return Poll::Ready(Err(WireError::Closed));
                }
                self.filled += read;
                if let Some(waits) = pace.read(read, now()) {
                    wake_at(stream, waits);
                }
                if self.filled == self.input.len() && self.filled < MAX_READ {
                    self.input.resize((2 * self.filled).min(MAX_READ), 0);
                }
            }
            Socket::Udp(socket) => {
                self.filled = 0;
                self.datagrams.clear();
                for _ in 0..MAX_DATAGRAMS {
                    let end = self.filled + self.max_packet;
                    let Some(free) = self.input.get_mut(self.filled..end) else {
                        break;
                    };
                    let mut buffer = ReadBuf::new(free);
                    match socket.poll_recv(cx, &mut buffer) {
                        Poll::Ready(Ok(())) => {
                            let length = buffer.filled().len();
                            self.datagrams.push(length);
                            self.filled += length;
                        }
                        // The peer's port is closed for now, or a router says something.
                        Poll::Ready(Err(_)) => {}
                        Poll::Pending if self.datagrams.is_empty() => return Poll::Pending,
                        Poll::Pending => return Poll::Ready(Ok(())),
                    }
                }
                if self.datagrams.is_empty() {
                    cx.waker().wake_by_ref();
                    return Poll::Pending;
                }
            }
        }
        Poll::Ready(Ok(()))
    }

    /// When [`handle_timeout`](Self::handle_timeout) is to be called.
    pub(super) fn poll_timeout(&self) -> Option<Moment> {
        match &self.socket {
            Socket::Tcp(_, pace) => pace.poll_timeout(),
            Socket::Udp(_) => None,
        }
    }

    /// Has the socket wake for whatever it holds, if it has waited for long enough.
    pub(super) fn handle_timeout(&mut self, now: Moment) {
        if let Socket::Tcp(stream, pace) = &mut self.socket
            && pace.expired(now)
        {
            wake_at(stream, false);
        }
    }

    /// Shows each packet of the batch to `take`.
    pub(super) fn packets(&mut self, mut take: impl FnMut(&mut [u8])) -> Result<(), LengthError> {
        let batch = self.input.get_mut(..self.filled).unwrap_or_default();
        match self.socket {
            Socket::Tcp(..) => {
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
            }
            Socket::Udp(_) => {
                let mut rest = batch;
                for length in self.datagrams.drain(..) {
                    let Some((packet, next)) = rest.split_at_mut_checked(length) else {
                        break;
                    };
                    if !packet.is_empty() {
                        take(packet);
                    }
                    rest = next;
                }
                self.filled = 0;
            }
        }
        Ok(())
    }
}

/// Has a socket wake its reader at the mark, or at the first byte.
fn wake_at(stream: &TcpStream, mark: bool) {
    // Without it every packet costs a turn, no more.
    let _ = low_water::set(stream, if mark { LOW_WATER } else { 1 });
}
