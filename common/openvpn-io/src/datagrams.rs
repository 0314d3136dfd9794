//! A UDP socket of the tunnel: many datagrams in and out with one call of the kernel, where it can.
//!
//! Owns the socket, the buffers of what has come, and the queue of what is to be sent. Nothing leaves the
//! queue while the socket takes nothing: who fills it asks [`len`](Datagrams::len) first.

mod queue;
#[cfg(test)]
mod tests;

use std::io::{self, IoSliceMut};
use std::net::SocketAddr;
use std::task::{Context, Poll, ready};

use bytes::BytesMut;
use quinn_udp::{RecvMeta, UdpSocketState};
use rustix::net::sockopt;
use tokio::io::Interest;
use tokio::net::UdpSocket;

use queue::Queue;

use culvert_host::net::options;

/// What one buffer takes: the largest datagram, or as many as the kernel has joined.
const BUFFER: usize = 64 << 10;

/// Buffers that are filled by one call. A page of them is memory from when it is first needed.
const BUFFERS: usize = 8;

/// See the module.
#[derive(Debug)]
pub struct Datagrams {
    socket: UdpSocket,
    state: UdpSocketState,
    input: Vec<u8>,
    /// What is in the buffers.
    metas: [RecvMeta; BUFFERS],
    filled: usize,
    /// The buffer that is being looked at, and how far.
    at: (usize, usize),
    queue: Queue,
}

impl Datagrams {
    /// Takes a socket over.
    ///
    /// # Errors
    /// When its options cannot be set.
    pub fn new(socket: UdpSocket) -> io::Result<Self> {
        // The crate forbids fragments and is deaf to a path's size, for QUIC's sake. Here `tun-mtu` is 1500
        // whatever the path, so that some datagrams have to travel in fragments.
        let v4 = sockopt::ip_mtu_discover(&socket);
        let v6 = sockopt::ipv6_mtu_discover(&socket);
        let state = UdpSocketState::new((&socket).into())?;
        if let Ok(before) = v4 {
            sockopt::set_ip_mtu_discover(&socket, before)?;
        }
        if let Ok(before) = v6 {
            sockopt::set_ipv6_mtu_discover(&socket, before)?;
            options::set_ipv6_dont_fragment(&socket, false)?;
        }
        Ok(Self {
            socket,
            state,
            input: vec![0; BUFFERS * BUFFER],
            metas: [RecvMeta::default(); BUFFERS],
            filled: 0,
            at: (0, 0),
            queue: Queue::new(),
        })
    }

    /// Receives, in place of what was received before. Ready once there may be something to look at.
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
                // What ICMP told of an earlier datagram.
                Err(_) => {}
            }
            return Poll::Ready(());
        }
    }

    /// How many bytes came last.
    pub fn received(&self) -> usize {
        let metas = self.metas.get(..self.filled).unwrap_or_default();
        metas.iter().map(|meta| meta.len).sum()
    }

    /// The next datagram of those received, and who sent it. None is empty.
    pub fn take(&mut self) -> Option<(SocketAddr, &mut [u8])> {
        loop {
            let (buffer, offset) = self.at;
            let meta = self.metas.get(..self.filled)?.get(buffer)?;
            let length = meta.stride.min(meta.len.saturating_sub(offset));
            if length == 0 {
                self.at = (buffer + 1, 0);
                continue;
            }
            self.at = (buffer, offset + length);
            let start = buffer * BUFFER + offset;
            let datagram = self.input.get_mut(start..start + length)?;
            return Some((meta.addr, datagram));
        }
    }

    /// Where datagrams to be sent are appended; after each, [`cut`](Self::cut).
    pub fn out(&mut self) -> &mut BytesMut {
        self.queue.out()
    }

    /// What was appended behind `start` is a datagram, if it is anything.
    pub fn cut(&mut self, to: SocketAddr, start: usize) {
        self.queue.cut(to, start);
    }

    /// Bytes that wait to be sent.
    pub fn len(&self) -> usize {
        self.queue.len()
    }

    /// Whether all is sent.
    pub fn is_empty(&self) -> bool {
        self.len() == 0
    }

    /// Sends what was appended. Ready once all is sent, or dropped because it cannot be.
    pub fn poll_flush(&mut self, cx: &mut Context<'_>) -> Poll<()> {
        let Self {
            socket,
            state,
            queue,
            ..
        } = self;
        while let Some((batch, transmit)) = queue.next(state.max_gso_segments()) {
            if ready!(socket.poll_send_ready(cx)).is_err() {
                queue.clear();
                break;
            }
            let sent = socket.try_io(Interest::WRITABLE, || {
                state.try_send((&*socket).into(), &transmit)
            });
            match sent {
                Err(error) if error.kind() == io::ErrorKind::WouldBlock => {}
                sent => queue.sent(batch, sent),
            }
        }
        Poll::Ready(())
    }
}
