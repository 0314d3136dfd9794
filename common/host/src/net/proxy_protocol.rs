//! The PROXY protocol, versions 1 and 2: a load balancer sends the addresses of its client before the first byte
//! of a connection (`doc/proxy-protocol.txt` of haproxy).
//!
//! Only the peers of configured networks may send a header, and these peers must send one, as with haproxy and
//! nginx. A header from another peer is part of the connection's bytes.

use std::fmt;
use std::io;
use std::net::{IpAddr, Ipv4Addr, SocketAddr};
use std::str::FromStr;
use std::sync::Arc;
use std::time::Duration;

use proxy_header::{ParseConfig, ProxiedAddress, ProxyHeader};
use rustix::net::{RecvFlags, recv};
use tokio::io::Interest;
use tokio::net::TcpStream;
use tokio::time::{Instant, timeout};

use super::admission::{Admission, Candidate, Unadmitted};
use super::networks::Networks;

/// Largest header, in bytes. Addresses need at most 232 bytes. The rest is for extensions (TLVs), which have no
/// meaning here: load balancers send some of 100 bytes, or the subject of a certificate.
pub const MAX_HEADER_BYTES: usize = 4096;

/// Time for a complete header, from the accept. A load balancer sends the header first and in one packet, so the
/// time is for retransmissions.
const HEADER_TIMEOUT: Duration = Duration::from_secs(10);

/// Bytes read at once.
const READ_BYTES: usize = 256;

/// First bytes of a header of version 1.
const TEXT: &[u8] = b"PROXY ";

/// Largest header of version 1, in bytes.
const MAX_TEXT_BYTES: usize = 107;

/// First bytes of a header of version 2.
const SIGNATURE: &[u8; 12] = b"\r\n\r\n\0\r\nQUIT\n";

/// Bytes of a header of version 2 before its addresses.
const HEAD_BYTES: usize = 16;

/// Version and command of a connection of the load balancer itself, such as a health check.
const LOCAL: u8 = 0x20;

/// Error text for a header from a peer that may not send one, and for a second header.
pub const UNEXPECTED_HEADER: &str = "unexpected PROXY protocol header: disable the PROXY protocol in the load balancer, or name its network in the proxy-protocol-from flag of the listener";

/// Version of a header.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Version {
    /// Text.
    V1,
    /// Binary.
    V2,
}

/// Error for an unknown version.
#[derive(Clone, Copy, Debug, PartialEq, Eq, thiserror::Error)]
#[error("the versions of the PROXY protocol are v1 and v2")]
pub struct UnknownVersion;

/// The addresses of both ends of a client's connection.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Origin {
    /// Address of the client.
    pub source: SocketAddr,
    /// Address that the client connected to. `None` until [`Origin::with_local`] for a client without a header:
    /// reading the address of a socket costs a system call, and most connections do not need the address.
    pub destination: Option<SocketAddr>,
}

/// A complete header.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Header {
    /// Length of the header, in bytes.
    pub len: usize,
    /// Addresses of the client's connection; `None` if the header has none, as for a health check.
    pub origin: Option<Origin>,
}

/// Error for a connection that must begin with a header.
#[derive(Debug, thiserror::Error)]
pub enum HeaderError {
    /// The connection does not begin with a header.
    #[error(
        "no valid PROXY protocol header: let the load balancer send one, or remove its network from the flag"
    )]
    Invalid,
    /// The header exceeds [`MAX_HEADER_BYTES`].
    #[error(
        "the PROXY protocol header exceeds {MAX_HEADER_BYTES} bytes: let the load balancer send fewer extensions"
    )]
    TooLong,
    /// The header is not complete in time.
    #[error("no complete PROXY protocol header within {HEADER_TIMEOUT:?}")]
    Late,
    /// The peer left before the end of the header, as a port check does.
    #[error("left before the end of the PROXY protocol header")]
    Left,
    /// The peer may not send a header, or sends a second header.
    #[error("{UNEXPECTED_HEADER}")]
    Unexpected,
    /// The peer got no slot, or lost its slot.
    #[error(transparent)]
    Unadmitted(#[from] Unadmitted),
    /// The socket failed.
    #[error(transparent)]
    Io(#[from] io::Error),
}

/// A peer that is refused.
#[derive(Debug)]
pub struct Refused {
    /// Address of the peer: the address of the sender for a wrong header, or else of the origin.
    pub peer: SocketAddr,
    /// Reason.
    pub why: HeaderError,
}

/// Returns the origin of a new connection from `peer`. Reads a header if the peer is in one of the networks `from`,
/// and no byte after the header. A peer whose header has not arrived yet is one of the waiting peers of `admission`.
///
/// # Errors
/// Fails if the peer must send a header and sends none, and if too many peers wait for their headers.
pub async fn origin(
    stream: &TcpStream,
    peer: SocketAddr,
    from: &Networks,
    admission: &Admission,
) -> Result<Origin, HeaderError> {
    let mut origin = Origin {
        source: peer,
        destination: None,
    };
    if from.contains(peer.ip()) {
        let mut received = Vec::new();
        let header = match outcome(look(stream, &mut received))? {
            Some(header) => header,
            None => {
                let _waiting = admission.wait_for_header()?;
                // In a box, because most connections have no header and do not need the space.
                let rest = Box::pin(read(stream, received));
                let header = timeout(HEADER_TIMEOUT, rest).await;
                header.map_err(|_| HeaderError::Late)??
            }
        };
        origin = header.origin.unwrap_or(origin);
    }
    Ok(origin)
}

/// Takes a slot for a new peer under the address of its origin, and waits for its first bytes. Returns the address.
///
/// # Errors
/// Fails for a wrong or unexpected header, and without a slot. The first use of the stream reports a socket that fails
/// after the header.
pub async fn enter(
    stream: &TcpStream,
    peer: SocketAddr,
    from: &Networks,
    admission: &Arc<Admission>,
) -> Result<(SocketAddr, Arc<Candidate>), Refused> {
    let since = Instant::now();
    let refused = |peer: SocketAddr| {
        let peer = SocketAddr::new(peer.ip().to_canonical(), peer.port());
        move |why| Refused { peer, why }
    };
    let origin = origin(stream, peer, from, admission).await;
    let source = origin.map_err(refused(peer))?.source;
    let entered = async {
        let candidate = admission.enter(source.ip(), since).await?;
        let first = candidate.run(begins_with_header(stream)).await?;
        Ok::<_, Unadmitted>((candidate, first))
    };
    let entered = entered.await.map_err(HeaderError::from);
    let (candidate, first) = entered.map_err(refused(source))?;
    match first {
        Ok(true) => return Err(refused(peer)(HeaderError::Unexpected)),
        Ok(false) => candidate.has_sent(),
        Err(_) => {}
    }
    Ok((source, candidate))
}

/// Returns true if a connection begins with a header. Waits for the first bytes.
///
/// # Errors
/// Fails if the socket fails.
async fn begins_with_header(stream: &TcpStream) -> io::Result<bool> {
    let mut first = [0; SIGNATURE.len()];
    let read = stream.peek(&mut first).await?;
    Ok(is_header(first.get(..read).unwrap_or_default()))
}

/// Returns true if the bytes begin with a header.
pub fn is_header(first: &[u8]) -> bool {
    first.starts_with(TEXT) || first.starts_with(SIGNATURE)
}

/// Parses the header at the start of `received`; returns `None` while the header is incomplete.
///
/// # Errors
/// Fails if the bytes cannot become a header of [`MAX_HEADER_BYTES`] at most.
pub fn parse(received: &[u8]) -> Result<Option<Header>, HeaderError> {
    let may_begin = |first: &[u8]| received.starts_with(first) || first.starts_with(received);
    if !may_begin(TEXT) && !may_begin(SIGNATURE) {
        return Err(HeaderError::Invalid);
    }
    let head = received.first_chunk::<HEAD_BYTES>();
    if let Some([signature @ .., LOCAL, _, high, low]) = head
        && signature == SIGNATURE
    {
        // Whatever a local connection has in place of addresses is ignored.
        let len = HEAD_BYTES + usize::from(u16::from_be_bytes([*high, *low]));
        return sized(len, None, received.len());
    }
    let config = ParseConfig {
        include_tlvs: false,
        ..ParseConfig::default()
    };
    match ProxyHeader::parse(received, config) {
        // The parser accepts longer text if all of it arrives at once.
        Ok((_, len)) if received.starts_with(TEXT) && len > MAX_TEXT_BYTES => {
            Err(HeaderError::Invalid)
        }
        Ok((header, len)) => {
            let origin = header.proxied_address().map(|ends| Origin {
                source: ends.source,
                destination: Some(ends.destination),
            });
            sized(len, origin, received.len())
        }
        // The parser asks for more bytes of some complete lines.
        Err(proxy_header::Error::BufferTooShort)
            if received.starts_with(TEXT) && received.windows(2).any(|pair| pair == b"\r\n") =>
        {
            Err(HeaderError::Invalid)
        }
        Err(proxy_header::Error::BufferTooShort) => sized(received.len() + 1, None, received.len()),
        Err(_) => Err(HeaderError::Invalid),
    }
}

/// Returns a header of `len` bytes, if as many have been received.
fn sized(
    len: usize,
    origin: Option<Origin>,
    received: usize,
) -> Result<Option<Header>, HeaderError> {
    if len > MAX_HEADER_BYTES {
        return Err(HeaderError::TooLong);
    }
    Ok((len <= received).then_some(Header { len, origin }))
}

/// Reads the rest of a header that begins with `received`, and no byte after the header.
async fn read(stream: &TcpStream, mut received: Vec<u8>) -> Result<Header, HeaderError> {
    loop {
        stream.readable().await?;
        let looked = stream.try_io(Interest::READABLE, || look(stream, &mut received));
        if let Some(header) = outcome(looked)? {
            return Ok(header);
        }
    }
}

/// Returns the header if [`look`] has found all of it.
fn outcome(
    looked: io::Result<Result<Option<Header>, HeaderError>>,
) -> Result<Option<Header>, HeaderError> {
    match looked {
        Ok(header) => header,
        Err(error) if error.kind() == io::ErrorKind::WouldBlock => Ok(None),
        // The health checks of some load balancers end with a reset.
        Err(error) if error.kind() == io::ErrorKind::ConnectionReset => Err(HeaderError::Left),
        Err(error) => Err(error.into()),
    }
}

/// Moves the next bytes of the header from the socket to `received`. A peek shows how many of the socket's bytes
/// belong to the header.
fn look(
    stream: &TcpStream,
    received: &mut Vec<u8>,
) -> io::Result<Result<Option<Header>, HeaderError>> {
    let mut bytes = [0; READ_BYTES];
    let before = received.len();
    let (peeked, _) = recv(stream, &mut bytes[..], RecvFlags::PEEK)?;
    if peeked == 0 {
        return Ok(Err(HeaderError::Left));
    }
    received.extend_from_slice(bytes.get(..peeked).unwrap_or_default());
    let header = parse(received);
    let end = match header {
        Ok(Some(header)) => header.len,
        _ => received.len(),
    };
    if let Some(taken) = bytes.get_mut(..end.saturating_sub(before)) {
        // Cannot be short: the bytes are in the socket.
        recv(stream, taken, RecvFlags::empty())?;
    }
    Ok(header)
}

impl Origin {
    /// Returns the address of the client, without the port.
    pub fn ip(&self) -> IpAddr {
        self.source.ip()
    }

    /// Returns the origin with the address of the socket as destination, unless a header had a destination. A socket
    /// without an address is already broken, so the origin stays as before.
    #[must_use]
    pub fn with_local(mut self, stream: &TcpStream) -> Self {
        self.destination = self.destination.or_else(|| stream.local_addr().ok());
        self
    }

    /// Returns the header with these addresses. A missing destination becomes the unspecified address. The IPv4
    /// addresses of a dual-stack listener, which are mapped to IPv6, become IPv4 addresses again.
    pub fn header(&self, version: Version) -> Vec<u8> {
        let unspecified = SocketAddr::from((Ipv4Addr::UNSPECIFIED, 0));
        let ends = [self.source, self.destination.unwrap_or(unspecified)];
        let [mut source, mut destination] =
            ends.map(|end| SocketAddr::new(end.ip().to_canonical(), end.port()));
        if source.is_ipv4() != destination.is_ipv4() {
            (source, destination) = (mapped(source), mapped(destination));
        }
        let header = ProxyHeader::with_address(ProxiedAddress::stream(source, destination));
        let mut bytes = Vec::new();
        let encoded = match version {
            Version::V1 => header.encode_v1(&mut bytes),
            Version::V2 => header.encode_v2(&mut bytes),
        };
        // Fails only for addresses of two families.
        debug_assert!(encoded.is_ok());
        bytes
    }
}

fn mapped(address: SocketAddr) -> SocketAddr {
    match address.ip() {
        IpAddr::V4(v4) => SocketAddr::new(v4.to_ipv6_mapped().into(), address.port()),
        IpAddr::V6(_) => address,
    }
}

impl fmt::Display for Origin {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        self.source.fmt(f)
    }
}

impl FromStr for Version {
    type Err = UnknownVersion;

    fn from_str(text: &str) -> Result<Self, UnknownVersion> {
        match text {
            "v1" => Ok(Self::V1),
            "v2" => Ok(Self::V2),
            _ => Err(UnknownVersion),
        }
    }
}

#[cfg(test)]
mod tests;
