//! The UDP socket below a QUIC endpoint.
//!
//! Anybody can send a datagram whose answer the kernel refuses (`EINVAL`), for example from port 0. After this error quinn-udp
//! sends all datagrams of the socket one by one (`sendmsg` in its `unix.rs`), so such datagrams do not reach quinn.

use std::io::{self, IoSliceMut};
use std::net::{IpAddr, Ipv4Addr, SocketAddr, UdpSocket};
use std::pin::Pin;
use std::sync::Arc;
use std::task::{Context, Poll, ready};

use quinn::udp::{RecvMeta, Transmit};
use quinn::{AsyncUdpSocket, Runtime as _, TokioRuntime, UdpPoller};

/// A socket that drops datagrams without a possible answer.
#[derive(Debug)]
pub(super) struct Socket {
    inner: Arc<dyn AsyncUdpSocket>,
    /// True if the kernel may show IPv4 addresses in the form of IPv6. quinn gets the IPv4 addresses, because quinn keeps its
    /// measurements of the path only if the address is IPv4 and only the port changes (`Connection::migrate`).
    is_dual: bool,
}

impl Socket {
    /// Wraps the socket of a server.
    ///
    /// # Errors
    /// Fails if the socket cannot be used.
    pub(super) fn of_server(socket: UdpSocket) -> io::Result<Arc<Self>> {
        let is_dual = socket.local_addr()?.ip().is_ipv6();
        Self::wrap(socket, is_dual)
    }

    /// Wraps the socket of an agent for one connection.
    ///
    /// # Errors
    /// As [`of_server`](Self::of_server).
    pub(super) fn of_agent(socket: UdpSocket) -> io::Result<Arc<Self>> {
        Self::wrap(socket, false)
    }

    fn wrap(socket: UdpSocket, is_dual: bool) -> io::Result<Arc<Self>> {
        let inner = TokioRuntime.wrap_udp_socket(socket)?;
        Ok(Arc::new(Self { inner, is_dual }))
    }
}

impl AsyncUdpSocket for Socket {
    fn create_io_poller(self: Arc<Self>) -> Pin<Box<dyn UdpPoller>> {
        self.inner.clone().create_io_poller()
    }

    fn try_send(&self, transmit: &Transmit<'_>) -> io::Result<()> {
        let destination = match transmit.destination {
            SocketAddr::V4(to) if self.is_dual => (to.ip().to_ipv6_mapped(), to.port()).into(),
            to => to,
        };
        self.inner.try_send(&Transmit {
            destination,
            ecn: transmit.ecn,
            contents: transmit.contents,
            segment_size: transmit.segment_size,
            src_ip: transmit.src_ip,
        })
    }

    fn poll_recv(
        &self,
        cx: &mut Context<'_>,
        buffers: &mut [IoSliceMut<'_>],
        meta: &mut [RecvMeta],
    ) -> Poll<io::Result<usize>> {
        let count = ready!(self.inner.poll_recv(cx, buffers, meta))?;
        for received in meta.iter_mut().take(count) {
            if !is_answerable(received) {
                // quinn skips an empty datagram.
                received.len = 0;
            }
            if self.is_dual
                && let SocketAddr::V6(from) = received.addr
                && let Some(ip) = from.ip().to_ipv4_mapped()
            {
                received.addr = (ip, from.port()).into();
            }
        }
        Poll::Ready(Ok(count))
    }

    fn local_addr(&self) -> io::Result<SocketAddr> {
        self.inner.local_addr()
    }

    fn max_transmit_segments(&self) -> usize {
        self.inner.max_transmit_segments()
    }

    fn max_receive_segments(&self) -> usize {
        self.inner.max_receive_segments()
    }

    fn may_fragment(&self) -> bool {
        self.inner.may_fragment()
    }
}

/// Returns true if the kernel permits an answer: no datagram can be sent to port 0, or from an address of several hosts.
fn is_answerable(received: &RecvMeta) -> bool {
    received.addr.port() != 0 && received.dst_ip.is_none_or(is_unicast)
}

/// Returns true for an address of one host.
fn is_unicast(ip: IpAddr) -> bool {
    let ip = ip.to_canonical();
    !ip.is_multicast() && ip != IpAddr::V4(Ipv4Addr::BROADCAST)
}
