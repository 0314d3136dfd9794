//! Binding the listener, with errors that name the flags to change.

use std::io;
use std::net::{Ipv4Addr, Ipv6Addr, SocketAddr};

use socket2::{Domain, Socket, Type};
use tokio::net::TcpListener;

use crate::net::dial::join_host_port;

/// Length of the kernel's queue of connections that wait to be accepted; the kernel cuts it to
/// `net.core.somaxconn`. After a restart all agents, nodes and clients come at once.
const BACKLOG: i32 = 4096;

/// Why a listener could not be bound.
#[derive(Debug, thiserror::Error)]
pub enum BindError {
    /// Another process has the port.
    #[error(
        "cannot listen on {address}: the port is in use; stop the other process or change {flag}"
    )]
    InUse {
        /// What was to be bound.
        address: String,
        /// The flag that set it.
        flag: String,
    },
    /// The process may not bind the port.
    #[error(
        "cannot listen on {address}: permission denied; choose a port from 1024 with {flag}, or grant CAP_NET_BIND_SERVICE"
    )]
    Permission {
        /// What was to be bound.
        address: String,
        /// The flag that set it.
        flag: String,
    },
    /// The host is not an address of this machine.
    #[error(
        "cannot listen on {address}: not an address of this machine ({reason}); correct the host given for {flag}"
    )]
    NotLocal {
        /// What was to be bound.
        address: String,
        /// The flag that set it.
        flag: String,
        /// The system's error.
        reason: io::Error,
    },
    /// Anything else.
    #[error("cannot listen on {address}: {reason}; check {flag}")]
    Other {
        /// What was to be bound.
        address: String,
        /// The flag that set it.
        flag: String,
        /// The system's error.
        reason: io::Error,
    },
}

/// Binds `host:port`. An empty host means all interfaces, IPv4 and IPv6 (IPv4 alone where there is
/// no IPv6). A name is resolved, and its IPv4 address preferred, as Go's `net.Listen` does. `flag`
/// names in errors what the operator can change, such as `--health-bind-port`. Port 0 takes any
/// free one.
///
/// # Errors
///
/// [`BindError`].
pub async fn bind(host: &str, port: u16, flag: &str) -> Result<TcpListener, BindError> {
    let fail = |reason: io::Error| {
        let (address, flag) = (join_host_port(host, port), flag.to_owned());
        match reason.kind() {
            io::ErrorKind::AddrInUse => BindError::InUse { address, flag },
            io::ErrorKind::PermissionDenied => BindError::Permission { address, flag },
            io::ErrorKind::AddrNotAvailable => BindError::NotLocal {
                address,
                flag,
                reason,
            },
            _ => BindError::Other {
                address,
                flag,
                reason,
            },
        }
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

fn bind_all(port: u16) -> io::Result<TcpListener> {
    match listen((Ipv6Addr::UNSPECIFIED, port).into()) {
        // No IPv6 in this kernel, or none configured.
        Err(error) if matches!(error.raw_os_error(), Some(97 | 99)) => {
            listen((Ipv4Addr::UNSPECIFIED, port).into())
        }
        outcome => outcome,
    }
}

/// The wildcard address of IPv6 takes IPv4 too, whatever the system's default.
fn listen(address: SocketAddr) -> io::Result<TcpListener> {
    let socket = Socket::new(Domain::for_address(address), Type::STREAM, None)?;
    if address.is_ipv6() {
        socket.set_only_v6(!address.ip().is_unspecified())?;
    }
    // As Go does: a restarted program gets its port back at once.
    socket.set_reuse_address(true)?;
    socket.set_nonblocking(true)?;
    socket.bind(&address.into())?;
    socket.listen(BACKLOG)?;
    TcpListener::from_std(socket.into())
}
