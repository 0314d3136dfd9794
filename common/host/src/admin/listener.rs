//! TCP listeners, with bind errors that name the flag to change.

use std::io;
use std::net::{Ipv4Addr, Ipv6Addr, SocketAddr};

use socket2::{Domain, Socket, Type};
use tokio::net::TcpListener;

use crate::net::dial::join_host_port;
use crate::net::listen::{TOO_MANY_FILES, is_out_of_files};

/// Length of the kernel's queue of connections that wait to be accepted; the kernel limits the length to
/// `net.core.somaxconn`. The queue is long because all agents, nodes and clients connect at the same time
/// after a restart of this program.
const BACKLOG: i32 = 4096;

/// Flags with the address of a listener, for error texts.
#[derive(Clone, Copy, Debug)]
pub struct BindFlags<'a> {
    host: &'a str,
    port: &'a str,
}

impl<'a> From<&'a str> for BindFlags<'a> {
    /// One flag has both host and port.
    fn from(flag: &'a str) -> Self {
        Self::from([flag, flag])
    }
}

impl<'a> From<[&'a str; 2]> for BindFlags<'a> {
    /// The first flag has the host, the second the port.
    fn from([host, port]: [&'a str; 2]) -> Self {
        Self { host, port }
    }
}

/// Error returned when a listener cannot be bound. The text names the flag to change.
#[derive(Debug, thiserror::Error)]
#[error("cannot listen on {address}: {why}")]
pub struct BindError {
    address: String,
    why: String,
}

/// Binds `host:port`. Port 0 selects a free port. An empty host means all interfaces, IPv4 and IPv6, or only
/// IPv4 if the machine has no IPv6. A host name is resolved, and an IPv4 address is preferred, as in Go's
/// `net.Listen`. Error texts name one of the `flags`, such as `["--health-bind-address", "--health-port"]`,
/// so that the operator knows the flag to change.
///
/// # Errors
///
/// Returns a [`BindError`] if the name has no address or the address cannot be bound.
pub async fn bind<'a>(
    host: &str,
    port: u16,
    flags: impl Into<BindFlags<'a>>,
) -> Result<TcpListener, BindError> {
    let flags = flags.into();
    let fail = |reason: io::Error| BindError {
        address: join_host_port(host, port),
        why: why(&reason, flags),
    };
    if host.is_empty() {
        return bind_all(port).map_err(fail);
    }
    let found: Vec<SocketAddr> = tokio::net::lookup_host((host, port))
        .await
        .map_err(|error| fail(io::Error::new(io::ErrorKind::AddrNotAvailable, error)))?
        .collect();
    let v4 = found.iter().find(|address| address.is_ipv4());
    let address = v4.or(found.first()).copied().ok_or_else(|| {
        let text = "the name has no address";
        fail(io::Error::new(io::ErrorKind::AddrNotAvailable, text))
    })?;
    listen(address).map_err(fail)
}

/// Returns the reason why an address cannot be bound, and the remedy.
fn why(reason: &io::Error, flags: BindFlags<'_>) -> String {
    let BindFlags { host, port: flag } = flags;
    match reason.kind() {
        io::ErrorKind::AddrInUse => {
            format!("the port is in use; stop the other process or change {flag}")
        }
        io::ErrorKind::PermissionDenied => format!(
            "permission denied; choose a port from 1024 with {flag}, or grant CAP_NET_BIND_SERVICE"
        ),
        io::ErrorKind::AddrNotAvailable => {
            format!("not an address of this machine ({reason}); correct the host given for {host}")
        }
        _ if is_out_of_files(reason) => TOO_MANY_FILES.to_owned(),
        _ => format!("{reason}; check {flag}"),
    }
}

fn bind_all(port: u16) -> io::Result<TcpListener> {
    match listen((Ipv6Addr::UNSPECIFIED, port).into()) {
        // EAFNOSUPPORT or EADDRNOTAVAIL: the kernel has no IPv6, or IPv6 is not configured.
        Err(error) if matches!(error.raw_os_error(), Some(97 | 99)) => {
            listen((Ipv4Addr::UNSPECIFIED, port).into())
        }
        outcome => outcome,
    }
}

/// Binds one address. The IPv6 wildcard address accepts IPv4 too, regardless of the system's default.
fn listen(address: SocketAddr) -> io::Result<TcpListener> {
    let socket = Socket::new(Domain::for_address(address), Type::STREAM, None)?;
    if address.is_ipv6() {
        socket.set_only_v6(!address.ip().is_unspecified())?;
    }
    // As in Go, so that a restarted program can bind its port again at once.
    socket.set_reuse_address(true)?;
    socket.set_nonblocking(true)?;
    socket.bind(&address.into())?;
    socket.listen(BACKLOG)?;
    TcpListener::from_std(socket.into())
}

#[cfg(test)]
mod tests {
    use rustix::io::Errno;

    use super::*;

    #[test]
    fn lack_of_descriptors_is_no_mistake_in_a_flag() {
        let why = |errno: Errno| why(&errno.into(), "--port".into());
        assert_eq!(why(Errno::MFILE), TOO_MANY_FILES);
        assert!(why(Errno::ADDRINUSE).contains("change --port"));
    }
}
