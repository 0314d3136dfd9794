//! A flow: the datagrams between one client address and one endpoint, with a connected socket toward the endpoint.
//!
//! Received datagrams that the kernel has joined (GRO) are sent together (GSO). A socket that is not writable drops
//! datagrams from clients, as a router with a full queue does.

use std::cell::RefCell;
use std::io::{self, IoSliceMut};
use std::net::{IpAddr, SocketAddr};
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};
use std::time::Duration;

use culvert_native::quic::connection_id::{CONNECTION_ID_BYTES, ConnectionId, Tag};
use parking_lot::{Mutex, RwLock};
use quinn_udp::{EcnCodepoint, RecvMeta, Transmit, UdpSocketState};
use socket2::{Domain, Protocol, SockRef, Socket, Type};
use tokio::io::Interest;
use tokio::net::UdpSocket;
use tokio::task::coop::consume_budget;
use tokio::time::Instant;

use super::initial::Header;
use crate::upstream::Upstream;

/// Size of a receive buffer, in bytes: the largest datagram, or several joined datagrams.
pub(super) const BUFFER_BYTES: usize = 64 * 1024;

/// Requested size of the kernel's buffers of a socket, in bytes. Smaller buffers only reduce the speed.
const SOCKET_BYTES: usize = 4 * 1024 * 1024;

/// Age at which the endpoint's answers prove the client of a flow without a hello. Under a flood of forged addresses,
/// flows of this age have been displaced.
const PROOF_TIME: Duration = Duration::from_secs(1);

thread_local! {
    static BUFFER: RefCell<Box<[u8]>> = RefCell::new(vec![0; BUFFER_BYTES].into());
}

/// A UDP socket with batched input and output.
#[derive(Debug)]
pub(super) struct Wire {
    pub socket: UdpSocket,
    state: RwLock<UdpSocketState>,
}

/// Address information of received datagrams, for the way back.
#[derive(Clone, Copy, Debug)]
pub(super) struct Path {
    pub client: SocketAddr,
    /// The proxy's own address, which the client expects as the source of answers.
    pub local: Option<IpAddr>,
}

/// The datagrams between one client address and one endpoint.
#[derive(Debug)]
pub(super) struct Flow {
    pub path: Path,
    pub upstream: Arc<Upstream>,
    pub endpoint: SocketAddr,
    wire: Wire,
    tag: Tag,
    ids: Mutex<Ids>,
    /// True if the flow began without a hello.
    continues: bool,
    /// Bytes from the client.
    sent: AtomicU64,
    /// Bytes from the endpoint.
    received: AtomicU64,
    created: Instant,
    /// Time of the last datagram in either direction, in milliseconds after `created`.
    last: AtomicU64,
    /// Time of the endpoint's last datagram, in milliseconds after `created`.
    answered: AtomicU64,
    /// Set once the endpoint's host has refused a datagram.
    is_refused: AtomicBool,
}

/// Connection ids of a flow, besides those with the endpoint's tag. An empty id matches nothing.
#[derive(Debug, Default)]
struct Ids {
    /// Destination id of the client's latest hello.
    first: Vec<u8>,
    /// Last id in a long header of the endpoint.
    endpoint: Vec<u8>,
}

// === impl Wire ===

impl Wire {
    /// Registers a socket with the calling task's runtime.
    ///
    /// # Errors
    /// Fails without resources of the kernel.
    pub(super) fn new(socket: std::net::UdpSocket) -> io::Result<Self> {
        let socket = UdpSocket::from_std(socket)?;
        let state = UdpSocketState::new((&socket).into())?;
        Ok(Self {
            socket,
            state: RwLock::new(state),
        })
    }

    /// Opens a socket that sends to `endpoint` and receives from `endpoint` only.
    fn connect(endpoint: SocketAddr) -> io::Result<Self> {
        let socket = open(endpoint)?;
        socket.connect(&endpoint.into())?;
        Self::new(socket.into())
    }

    /// Receives datagrams without waiting.
    ///
    /// # Errors
    /// `WouldBlock` without a datagram, otherwise an error of an earlier datagram.
    pub(super) fn receive(
        &self,
        buffers: &mut [IoSliceMut<'_>],
        metas: &mut [RecvMeta],
    ) -> io::Result<usize> {
        let receive = || {
            let state = self.state.read();
            state.recv((&self.socket).into(), buffers, metas)
        };
        self.socket.try_io(Interest::READABLE, receive)
    }

    /// Sends datagrams of `stride` bytes each, the last possibly shorter, without waiting. Returns the bytes that were
    /// not sent because the socket is not writable.
    ///
    /// # Errors
    /// Fails if the kernel refuses the datagrams, or has received an error for an earlier datagram.
    fn send<'a>(
        &self,
        mut bytes: &'a [u8],
        stride: usize,
        ecn: Option<EcnCodepoint>,
        (destination, src_ip): (SocketAddr, Option<IpAddr>),
    ) -> io::Result<&'a [u8]> {
        let state = self.state.read();
        while !bytes.is_empty() {
            let batch = stride.max(1) * state.max_gso_segments().max(1);
            let batch = bytes.get(..batch).unwrap_or(bytes);
            let transmit = Transmit {
                destination,
                ecn,
                contents: batch,
                segment_size: Some(stride),
                src_ip,
            };
            let send = || state.try_send((&self.socket).into(), &transmit);
            let sent = match self.socket.try_io(Interest::WRITABLE, send) {
                // A new socket is writable, but tokio does not know this before its next poll.
                Err(error) if error.kind() == io::ErrorKind::WouldBlock => send(),
                sent => sent,
            };
            match sent {
                Ok(()) => bytes = bytes.get(batch.len()..).unwrap_or_default(),
                Err(error) if error.kind() == io::ErrorKind::WouldBlock => break,
                Err(error) => return Err(error),
            }
        }
        Ok(bytes)
    }

    /// Keeps segmentation offload after an error of [`send`](Self::send), if this machine no longer has the source
    /// address. The kernel then returns `EINVAL` for an IPv6 address, which quinn-udp takes for missing support.
    fn keep_offload(&self, error: &io::Error, src_ip: Option<IpAddr>) {
        let is_lost = |ip| {
            let bound = std::net::UdpSocket::bind((ip, 0));
            bound.is_err_and(|error| error.kind() == io::ErrorKind::AddrNotAvailable)
        };
        if error.kind() == io::ErrorKind::InvalidInput
            && src_ip.is_some_and(is_lost)
            && let Ok(state) = UdpSocketState::new((&self.socket).into())
        {
            *self.state.write() = state;
        }
    }
}

/// Binds a listening socket. With `is_shared`, several sockets share the address, and the kernel distributes the
/// clients.
///
/// # Errors
/// Fails if the address is in use or not local.
pub(super) fn bind(address: SocketAddr, is_shared: bool) -> io::Result<std::net::UdpSocket> {
    let socket = open(address)?;
    if address.is_ipv6() {
        socket.set_only_v6(!address.ip().is_unspecified())?;
    }
    socket.set_reuse_port(is_shared)?;
    socket.bind(&address.into())?;
    Ok(socket.into())
}

/// Returns the size of the kernel's receive buffer, in bytes.
pub(super) fn receive_buffer_bytes(socket: &std::net::UdpSocket) -> usize {
    // The kernel reports twice the size that it grants, for its own overhead (socket(7)).
    SockRef::from(socket).recv_buffer_size().unwrap_or(0) / 2
}

fn open(address: SocketAddr) -> io::Result<Socket> {
    let kind = Type::DGRAM.nonblocking();
    let socket = Socket::new(Domain::for_address(address), kind, Some(Protocol::UDP))?;
    // Fails only if the kernel is out of memory.
    let _ = socket.set_recv_buffer_size(SOCKET_BYTES);
    let _ = socket.set_send_buffer_size(SOCKET_BYTES);
    Ok(socket)
}

// === impl Flow ===

impl Flow {
    /// Opens a flow, without the destination id of a hello if the flow continues connections.
    ///
    /// # Errors
    /// As [`Wire::connect`].
    pub(super) fn open(
        path: Path,
        upstream: Arc<Upstream>,
        endpoint: SocketAddr,
        first_id: Option<Vec<u8>>,
    ) -> io::Result<Self> {
        Ok(Self {
            path,
            upstream,
            endpoint,
            wire: Wire::connect(endpoint)?,
            tag: Tag::of(endpoint),
            continues: first_id.is_none(),
            ids: Mutex::new(Ids {
                first: first_id.unwrap_or_default(),
                endpoint: Vec::new(),
            }),
            sent: AtomicU64::new(0),
            received: AtomicU64::new(0),
            created: Instant::now(),
            last: AtomicU64::new(0),
            answered: AtomicU64::new(0),
            is_refused: AtomicBool::new(false),
        })
    }

    /// Returns the socket toward the endpoint.
    pub(super) fn socket(&self) -> &UdpSocket {
        &self.wire.socket
    }

    /// Adds a connection that begins with a hello. Packets for the id of an earlier hello then belong to no flow; the
    /// client uses the endpoint's ids by then.
    pub(super) fn add_hello(&self, first_id: Vec<u8>) {
        self.ids.lock().first = first_id;
    }

    /// Returns true if a packet with this header surely belongs to the flow.
    pub(super) fn owns(&self, header: &Header<'_>) -> bool {
        let is_first = || match header {
            Header::Long { destination, .. } => *self.ids.lock().first == **destination,
            Header::Short(_) => false,
        };
        tag_of(header) == Some(self.tag) || is_first() || self.is_endpoint_id(id_of(header))
    }

    /// Returns true if the packet shows that the client receives the endpoint's packets: it contains the id that the
    /// endpoint has chosen. A flow without a hello continues a connection, and the endpoint's answers prove the client
    /// after [`PROOF_TIME`].
    pub(super) fn is_proven_by(&self, header: &Header<'_>) -> bool {
        let continues = self.continues
            && self.received.load(Ordering::Relaxed) > 0
            && self.created.elapsed() >= PROOF_TIME;
        continues || self.is_endpoint_id(id_of(header))
    }

    fn is_endpoint_id(&self, id: &[u8]) -> bool {
        let ids = self.ids.lock();
        !ids.endpoint.is_empty() && id.starts_with(&ids.endpoint)
    }

    /// Returns the number of bytes from the client.
    pub(super) fn sent(&self) -> u64 {
        self.sent.load(Ordering::Relaxed)
    }

    /// Returns the time since the last datagram in either direction.
    pub(super) fn idle(&self, now: Instant) -> Duration {
        self.since(&self.last, now)
    }

    /// Returns the time since the endpoint's last datagram, or since the flow was opened.
    pub(super) fn unanswered(&self, now: Instant) -> Duration {
        self.since(&self.answered, now)
    }

    fn since(&self, time: &AtomicU64, now: Instant) -> Duration {
        let time = Duration::from_millis(time.load(Ordering::Relaxed));
        now.duration_since(self.created).saturating_sub(time)
    }

    /// Sends datagrams of the client to the endpoint; drops them if the socket is not writable.
    pub(super) fn send(&self, bytes: &[u8], stride: usize, ecn: Option<EcnCodepoint>) {
        self.count(&self.sent, &self.upstream.stats.sent, bytes.len());
        let sent = self.wire.send(bytes, stride, ecn, (self.endpoint, None));
        self.note_refusal(sent.map(drop));
    }

    /// Returns true once the endpoint's host has refused a datagram: no program receives on the port.
    pub(super) fn is_refused(&self) -> bool {
        self.is_refused.load(Ordering::Relaxed)
    }

    /// Other errors concern only one datagram, for example a datagram that is larger than the MTU. The kernel reports
    /// each refusal once, to the next call for the socket.
    fn note_refusal(&self, result: io::Result<()>) {
        if result.is_err_and(|error| error.kind() == io::ErrorKind::ConnectionRefused) {
            self.is_refused.store(true, Ordering::Relaxed);
        }
    }

    /// Sends the endpoint's datagrams to the client through `listener`. Returns when the endpoint's host has refused
    /// a datagram, or the runtime ends.
    pub(super) async fn run(&self, listener: &Wire) {
        let to = (self.path.client, self.path.local);
        let socket = &self.wire.socket;
        while !self.is_refused()
            && let Ok(ready) = socket.ready(Interest::READABLE | Interest::ERROR).await
        {
            consume_budget().await;
            if ready.is_error() {
                // Without an error, `WouldBlock` clears the readiness.
                let error = || {
                    Err(socket
                        .take_error()?
                        .unwrap_or(io::ErrorKind::WouldBlock.into()))
                };
                self.note_refusal(socket.try_io(Interest::ERROR, error));
                continue;
            }
            let unsent = BUFFER.with_borrow_mut(|buffer| -> io::Result<_> {
                let mut metas = [RecvMeta::default()];
                self.wire
                    .receive(&mut [IoSliceMut::new(buffer)], &mut metas)?;
                let [meta] = metas;
                let bytes = buffer.get(..meta.len).unwrap_or_default();
                self.note(bytes);
                // An error concerns only these datagrams.
                let unsent = listener
                    .send(bytes, meta.stride, meta.ecn, to)
                    .inspect_err(|error| listener.keep_offload(error, to.1))
                    .unwrap_or_default();
                Ok((unsent.to_vec(), meta))
            });
            match unsent {
                Ok((unsent, meta)) => {
                    let mut unsent = unsent.as_slice();
                    while !unsent.is_empty() && listener.socket.writable().await.is_ok() {
                        let sent = listener.send(unsent, meta.stride, meta.ecn, to);
                        unsent = sent.unwrap_or_default();
                    }
                }
                Err(error) => self.note_refusal(Err(error)),
            }
        }
    }

    /// Counts bytes of the endpoint, and remembers its connection id.
    fn note(&self, bytes: &[u8]) {
        self.count(&self.received, &self.upstream.stats.received, bytes.len());
        self.answered
            .store(self.last.load(Ordering::Relaxed), Ordering::Relaxed);
        if let Some(Header::Long { source, .. }) = Header::parse(bytes) {
            self.ids.lock().endpoint = source.to_vec();
        }
    }

    fn count(&self, own: &AtomicU64, total: &AtomicU64, bytes: usize) {
        let elapsed = self.created.elapsed().as_millis();
        self.last
            .store(elapsed.try_into().unwrap_or(u64::MAX), Ordering::Relaxed);
        for counter in [own, total] {
            counter.fetch_add(bytes as u64, Ordering::Relaxed);
        }
    }
}

/// Returns bytes that begin with the destination id of a packet.
fn id_of<'a>(header: &Header<'a>) -> &'a [u8] {
    match header {
        Header::Long { destination, .. } => destination,
        Header::Short(rest) => rest,
    }
}

/// Returns the tag in the destination id of a packet, if the id may be one of a server of ours.
pub(super) fn tag_of(header: &Header<'_>) -> Option<Tag> {
    let id = match header {
        Header::Long { destination, .. } => destination,
        Header::Short(rest) => rest.get(..CONNECTION_ID_BYTES)?,
    };
    ConnectionId::parse(id).map(|id| id.tag)
}

#[cfg(test)]
mod tests {
    #![allow(clippy::unwrap_used)]

    use std::net::{Ipv6Addr, UdpSocket};

    use super::*;

    #[tokio::test]
    async fn refused_source_address_keeps_the_offload() {
        let address = SocketAddr::from((Ipv6Addr::UNSPECIFIED, 0));
        let Ok(socket) = bind(address, false) else {
            assert!(std::env::var_os("CI").is_none(), "no IPv6");
            return eprintln!("skipped: no IPv6");
        };
        let listener = Wire::new(socket).unwrap();
        let peer = UdpSocket::bind((Ipv6Addr::LOCALHOST, 0)).unwrap();
        let offload = listener.state.read().max_gso_segments();
        assert!(offload > 1, "the kernel has no segmentation offload");
        // An address that this machine does not have (RFC 3849).
        let lost = Some("2001:db8::1".parse().unwrap());
        let to = (peer.local_addr().unwrap(), lost);
        let error = listener.send(b"answer", 6, None, to).unwrap_err();
        assert_eq!(listener.state.read().max_gso_segments(), 1);
        listener.keep_offload(&error, lost);
        assert_eq!(listener.state.read().max_gso_segments(), offload);
    }
}
