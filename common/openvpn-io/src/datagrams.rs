//! A UDP socket of the tunnel. If the kernel supports batches, one system call sends or receives many
//! datagrams.
//!
//! [`Datagrams`] owns the socket, the receive buffers, and the send queue. While the socket is not writable
//! the queue only grows, so callers check [`len`](Datagrams::len) before they append.

mod path_mtu;
mod queue;
#[cfg(test)]
mod tests;

use std::io::{self, IoSliceMut};
use std::task::{Context, Poll, ready};
use std::time::Duration;

use bytes::BytesMut;
use quinn_udp::{RecvMeta, UdpSocketState};
use rustix::net::sockopt;
use tokio::io::Interest;
use tokio::net::UdpSocket;

use queue::{Queue, Sent};

use crate::{Moment, now};
use culvert_host::net::{is_source, options};
use culvert_openvpn::hub::Path;

/// Size of one receive buffer, in bytes: fits the largest datagram, or several datagrams joined by the
/// kernel.
const BUFFER: usize = 64 << 10;

/// Buffers filled by one system call. A page of a buffer uses memory only after its first use.
const BUFFERS: usize = 8;

/// Time from the first refused source address until the state of the socket is replaced, which costs several system
/// calls.
const NEW_STATE_PAUSE: Duration = Duration::from_secs(1);

/// A UDP socket with batched input and output; see the module documentation.
#[derive(Debug)]
pub struct Datagrams {
    socket: UdpSocket,
    state: UdpSocketState,
    /// True if the socket receives at several addresses of this machine. An answer comes from the address at which its
    /// datagram was received, because the peer or a NAT between may refuse another source.
    is_wildcard: bool,
    /// Time at which the kernel refused a source address. quinn-udp takes this error for missing support, and sends
    /// without segmentation offload until its state is replaced.
    source_refused: Option<Moment>,
    input: Vec<u8>,
    /// Metadata of the filled buffers.
    metas: [RecvMeta; BUFFERS],
    filled: usize,
    /// Position of the next datagram: index of its buffer, and offset in that buffer.
    at: (usize, usize),
    queue: Queue,
}

/// Returns quinn-udp's state of a socket. quinn-udp forbids fragments and ignores reports of a path's MTU, as QUIC
/// requires. Here `tun-mtu` is 1500 on every path, so some datagrams must travel in fragments.
fn state_of(socket: &UdpSocket) -> io::Result<UdpSocketState> {
    let v4 = sockopt::ip_mtu_discover(socket);
    let v6 = sockopt::ipv6_mtu_discover(socket);
    let state = UdpSocketState::new(socket.into())?;
    if let Ok(before) = v4 {
        sockopt::set_ip_mtu_discover(socket, before)?;
    }
    if let Ok(before) = v6 {
        sockopt::set_ipv6_mtu_discover(socket, before)?;
        options::set_ipv6_dont_fragment(socket, false)?;
    }
    Ok(state)
}

impl Datagrams {
    /// Takes ownership of a socket.
    ///
    /// # Errors
    /// Fails if the socket's options cannot be set.
    pub fn new(socket: UdpSocket) -> io::Result<Self> {
        let state = state_of(&socket)?;
        let is_wildcard = socket.local_addr()?.ip().is_unspecified();
        Ok(Self {
            socket,
            state,
            is_wildcard,
            source_refused: None,
            input: vec![0; BUFFERS * BUFFER],
            metas: [RecvMeta::default(); BUFFERS],
            filled: 0,
            at: (0, 0),
            queue: Queue::new(),
        })
    }

    /// Receives a batch, which replaces the previous batch. Ready once the socket was readable, even if the
    /// batch is empty.
    pub fn poll_receive(&mut self, cx: &mut Context<'_>) -> Poll<()> {
        (self.filled, self.at) = (0, (0, 0));
        let Self {
            socket,
            state,
            input,
            metas,
            ..
        } = self;
        loop {
            if ready!(socket.poll_recv_ready(cx)).is_err() {
                return Poll::Ready(());
            }
            let mut free = input.chunks_exact_mut(BUFFER);
            let mut buffers: [IoSliceMut<'_>; BUFFERS] =
                std::array::from_fn(|_| IoSliceMut::new(free.next().unwrap_or_default()));
            let received = socket.try_io(Interest::READABLE, || {
                state.recv((&*socket).into(), &mut buffers, metas)
            });
            match received {
                Ok(filled) => self.filled = filled,
                Err(error) if error.kind() == io::ErrorKind::WouldBlock => continue,
                // An ICMP error caused by an earlier datagram.
                Err(_) => {}
            }
            return Poll::Ready(());
        }
    }

    /// Returns the size of the last batch, in bytes.
    pub fn received(&self) -> usize {
        let metas = self.metas.get(..self.filled).unwrap_or_default();
        metas.iter().map(|meta| meta.len).sum()
    }

    /// Returns the next received datagram and its addresses. Empty datagrams are skipped, and datagrams without a source
    /// port: the error of an answer to port 0 would end the segmentation offload of the socket (quinn-udp takes `EINVAL`
    /// for missing support).
    pub fn take(&mut self) -> Option<(Path, &mut [u8])> {
        loop {
            let (buffer, offset) = self.at;
            let meta = self.metas.get(..self.filled)?.get(buffer)?;
            let length = meta.stride.min(meta.len.saturating_sub(offset));
            if length == 0 || meta.addr.port() == 0 {
                self.at = (buffer + 1, 0);
                continue;
            }
            self.at = (buffer, offset + length);
            let start = buffer * BUFFER + offset;
            let datagram = self.input.get_mut(start..start + length)?;
            let local = meta.dst_ip.filter(|ip| self.is_wildcard && is_source(*ip));
            let path = Path {
                remote: meta.addr,
                local,
            };
            return Some((path, datagram));
        }
    }

    /// Returns the send buffer. Callers append a datagram and then call [`cut`](Self::cut).
    pub fn out(&mut self) -> &mut BytesMut {
        self.queue.out()
    }

    /// Ends the datagram that was appended at `start`. An empty datagram is ignored.
    pub fn cut(&mut self, to: impl Into<Path>, start: usize) {
        self.queue.cut(to.into(), start);
    }

    /// Returns the number of bytes in the send queue.
    pub fn len(&self) -> usize {
        self.queue.len()
    }

    /// Returns true if the send queue is empty.
    pub fn is_empty(&self) -> bool {
        self.len() == 0
    }

    /// Sends the queue. Ready once every datagram was sent, or dropped after an error.
    pub fn poll_flush(&mut self, cx: &mut Context<'_>) -> Poll<()> {
        let Self {
            socket,
            state,
            queue,
            source_refused,
            ..
        } = self;
        let now = now();
        if source_refused.is_some_and(|at| now.duration_since(at) >= NEW_STATE_PAUSE)
            && let Ok(new) = state_of(socket)
        {
            (*state, *source_refused) = (new, None);
        }
        while let Some((batch, transmit)) = queue.next(state.max_gso_segments(), now) {
            if ready!(socket.poll_send_ready(cx)).is_err() {
                queue.clear();
                break;
            }
            let sent = socket.try_io(Interest::WRITABLE, || {
                state.try_send((&*socket).into(), &transmit)
            });
            match sent {
                Err(error) if error.kind() == io::ErrorKind::WouldBlock => {}
                sent => {
                    if queue.sent(batch, sent, now) == Sent::SourceRefused {
                        source_refused.get_or_insert(now);
                    }
                }
            }
        }
        Poll::Ready(())
    }
}
