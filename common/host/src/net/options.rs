//! Socket options that no crate in use offers: the only unsafe code of the workspace, some of it from
//! the macro of a crate.

use std::io;
use std::os::fd::{AsFd, AsRawFd as _};

use nix::sys::socket::sockopt::GetStruct;

/// Has a stream socket say that it can be read once it holds `bytes`, or has reached its end
/// (`SO_RCVLOWAT`, socket(7)). What it holds can be read at any time, but whoever waits for readiness finds it
/// late: see to a deadline. A lower mark takes effect at once (Linux `tcp_set_rcvlowat`). The kernel's
/// default is 1.
///
/// # Errors
/// When the socket is none, or its kind has no such mark.
pub fn set_receive_low_water(socket: &impl AsFd, bytes: u16) -> io::Result<()> {
    set(socket, libc::SOL_SOCKET, libc::SO_RCVLOWAT, bytes.into())
}

/// Whether an IPv6 socket refuses datagrams that would have to travel in fragments (`IPV6_DONTFRAG`,
/// RFC 3542 section 11.2).
///
/// # Errors
/// When the socket is none, or not of IPv6.
pub fn set_ipv6_dont_fragment(socket: &impl AsFd, refuses: bool) -> io::Result<()> {
    set(
        socket,
        libc::IPPROTO_IPV6,
        libc::IPV6_DONTFRAG,
        refuses.into(),
    )
}

/// What the kernel knows of a TCP connection (`TCP_INFO`, tcp(7)).
#[derive(Clone, Copy, Debug)]
pub struct TcpInfo;

// Numbers only, in whichever way they are filled in.
nix::getsockopt_impl!(
    TcpInfo,
    libc::IPPROTO_TCP,
    libc::TCP_INFO,
    libc::tcp_info,
    GetStruct<libc::tcp_info>
);

fn set(
    socket: &impl AsFd,
    level: libc::c_int,
    name: libc::c_int,
    value: libc::c_int,
) -> io::Result<()> {
    let length = size_of_val(&value) as libc::socklen_t;
    // SAFETY: the descriptor is borrowed and open; the kernel reads `length` bytes at the pointer, which
    // are a live integer's, and keeps neither.
    #[allow(unsafe_code, reason = "a system call without a safe wrapper")]
    let result = unsafe {
        libc::setsockopt(
            socket.as_fd().as_raw_fd(),
            level,
            name,
            std::ptr::from_ref(&value).cast(),
            length,
        )
    };
    match result {
        0 => Ok(()),
        _ => Err(io::Error::last_os_error()),
    }
}

#[cfg(test)]
mod tests {
    #![allow(clippy::unwrap_used)]

    use std::time::Duration;

    use tokio::io::{AsyncReadExt as _, AsyncWriteExt as _};
    use tokio::net::{TcpListener, TcpStream, UdpSocket};
    use tokio::time::timeout;

    use super::*;

    #[tokio::test]
    async fn a_reader_wakes_at_the_mark_and_when_it_is_lowered() {
        let listener = TcpListener::bind("127.0.0.1:0").await.unwrap();
        let mut here = TcpStream::connect(listener.local_addr().unwrap())
            .await
            .unwrap();
        let (mut there, _) = listener.accept().await.unwrap();
        set_receive_low_water(&here, 1000).unwrap();
        let mut read = [0; 2000];
        there.write_all(&[1; 999]).await.unwrap();
        timeout(Duration::from_millis(50), here.read(&mut read))
            .await
            .unwrap_err();
        there.write_all(&[1]).await.unwrap();
        assert_eq!(here.read(&mut read).await.unwrap(), 1000);

        there.write_all(&[1; 5]).await.unwrap();
        timeout(Duration::from_millis(50), here.read(&mut read))
            .await
            .unwrap_err();
        set_receive_low_water(&here, 1).unwrap();
        assert_eq!(here.read(&mut read).await.unwrap(), 5);

        // The end waits for nothing.
        set_receive_low_water(&here, 1000).unwrap();
        drop(there);
        assert_eq!(here.read(&mut read).await.unwrap(), 0);
    }

    #[tokio::test]
    async fn what_has_no_mark_says_so() {
        let file = tempfile::tempfile().unwrap();
        set_receive_low_water(&file, 1).unwrap_err();
        // Datagrams are taken one by one, whatever the mark.
        let socket = UdpSocket::bind("127.0.0.1:0").await.unwrap();
        set_receive_low_water(&socket, 1).unwrap();
    }
}
