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

/// Error returned when a listener cannot be bound. The text names the flag to change.
#[derive(Debug, thiserror::Error)]
#[error("cannot listen on {address}: {why}")]
pub struct BindError {
    address: String,
    why: String,
}

impl BindError {
    /// Creates an error for an address. The first flag has the host, the second the port.
    pub fn new(address: impl Into<String>, reason: &io::Error, flags: [&str; 2]) -> Self {
        let (address, why) = (address.into(), why(reason, flags));
        Self { address, why }
    }
}

/// Binds `host:port`. Port 0 selects a free port. An empty host means all interfaces, IPv4 and IPv6, or only
/// IPv4 if the machine has no IPv6. A host name is resolved, and an IPv4 address is preferred, as in Go's
/// `net.Listen`. `flags` are the names of the flags with the host and with the port, for error texts; both are the
/// same if one flag has both.
///
/// # Errors
///
/// Returns a [`BindError`] if the name has no address or the address cannot be bound.
pub async fn bind(host: &str, port: u16, flags: [&str; 2]) -> Result<TcpListener, BindError> {
    let fail = |reason: io::Error| BindError::new(join_host_port(host, port), &reason, flags);
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
fn why(reason: &io::Error, [host, port]: [&str; 2]) -> String {
    match reason.kind() {
        io::ErrorKind::AddrInUse => {
            format!("the port is in use; stop the other process or change {port}")
        }
        io::ErrorKind::PermissionDenied => format!(
            "permission denied; change {port} to a port from 1024, or grant CAP_NET_BIND_SERVICE"
        ),
        io::ErrorKind::AddrNotAvailable => {
            format!("not an address of this machine ({reason}); correct the host given for {host}")
        }
        _ if is_out_of_files(reason) => TOO_MANY_FILES.to_owned(),
        _ => format!("{reason}; check {port}"),
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
    fn each_cause_has_its_remedy() {
        let why = |errno: Errno| why(&errno.into(), ["--host", "--port"]);
        assert_eq!(why(Errno::MFILE), TOO_MANY_FILES);
        assert!(why(Errno::ADDRINUSE).contains("change --port"));
        assert!(why(Errno::ACCESS).contains("change --port to a port from 1024, or grant CAP_"));
        assert!(why(Errno::ADDRNOTAVAIL).contains("given for --host"));
    }
}
