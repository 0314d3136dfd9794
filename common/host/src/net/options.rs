//! Socket options that no crate in use offers. This module has the only unsafe blocks of the programs.

use std::io;
use std::os::fd::{AsFd, AsRawFd as _};

/// Sets the number of bytes that a stream socket must have received before it becomes readable
/// (`SO_RCVLOWAT`, socket(7)). The end of the stream also makes the socket readable. Received bytes can be
/// read at any time, but a task that waits for readiness gets them late, so the caller needs a timeout after
/// which it reads anyway. Lowering the number takes effect at once (Linux `tcp_set_rcvlowat`). The kernel's
/// default is 1.
///
/// # Errors
/// Fails if the descriptor is not a socket, or its socket type does not have this option.
pub fn set_receive_low_water(socket: &impl AsFd, bytes: u16) -> io::Result<()> {
    set(socket, libc::SOL_SOCKET, libc::SO_RCVLOWAT, bytes.into())
}

/// Sets `IPV6_DONTFRAG` to `refuses`. If true, the IPv6 socket refuses datagrams that need fragmentation (RFC
/// 3542, section 11.2).
///
/// # Errors
/// Fails if the descriptor is not an IPv6 socket.
pub fn set_ipv6_dont_fragment(socket: &impl AsFd, refuses: bool) -> io::Result<()> {
    set(
        socket,
        libc::IPPROTO_IPV6,
        libc::IPV6_DONTFRAG,
        refuses.into(),
    )
}

/// Returns the kernel's state of a TCP connection (`TCP_INFO`, tcp(7)). The structure has grown with Linux: the fields
/// that the running kernel does not know are 0.
///
/// # Errors
/// Fails if the descriptor is not a TCP socket.
pub fn tcp_info(socket: &impl AsFd) -> io::Result<libc::tcp_info> {
    first_of_tcp_info(socket, size_of::<libc::tcp_info>())
}

/// Reads the first `bytes` of the structure, as on an older kernel.
fn first_of_tcp_info(socket: &impl AsFd, bytes: usize) -> io::Result<libc::tcp_info> {
    // SAFETY: the structure contains only numbers, for which zeros are valid.
    #[allow(unsafe_code, reason = "the structure has no safe constructor")]
    let mut info: libc::tcp_info = unsafe { std::mem::zeroed() };
    let mut length = bytes.min(size_of_val(&info)) as libc::socklen_t;
    // SAFETY: the descriptor is borrowed and open. The kernel writes at most `length` bytes at the pointer, all inside
    // the structure, for which any bytes are valid, and keeps no pointer.
    #[allow(unsafe_code, reason = "a system call without a safe wrapper")]
    let result = unsafe {
        libc::getsockopt(
            socket.as_fd().as_raw_fd(),
            libc::IPPROTO_TCP,
            libc::TCP_INFO,
            std::ptr::from_mut(&mut info).cast(),
            &raw mut length,
        )
    };
    match result {
        0 => Ok(info),
        _ => Err(io::Error::last_os_error()),
    }
}

/// Returns how many written bytes the peer of a TCP or Unix socket has not acknowledged: the request `SIOCOUTQ` (tcp(7), and
/// `unix_ioctl` of Linux), which has the number of `TIOCOUTQ`. For a Unix socket, the result includes the kernel's overhead.
/// `None` if the system call fails.
pub fn unacknowledged(socket: &impl AsFd) -> Option<u32> {
    let mut bytes: libc::c_int = 0;
    // SAFETY: the descriptor is borrowed and open. The kernel writes one integer at the pointer and does not keep it.
    #[allow(unsafe_code, reason = "a system call without a safe wrapper")]
    let result = unsafe {
        libc::ioctl(
            socket.as_fd().as_raw_fd(),
            libc::TIOCOUTQ,
            std::ptr::from_mut(&mut bytes),
        )
    };
    u32::try_from(bytes).ok().filter(|_| result == 0)
}

fn set(
    socket: &impl AsFd,
    level: libc::c_int,
    name: libc::c_int,
    value: libc::c_int,
) -> io::Result<()> {
    let length = size_of_val(&value) as libc::socklen_t;
    // SAFETY: the descriptor is borrowed and open. The kernel reads `length` bytes at the pointer, all inside
    // a live integer, and keeps neither the descriptor nor the pointer.
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
    use tokio::net::{TcpListener, TcpStream, UdpSocket, UnixStream};
    use tokio::time::timeout;

    use super::*;

    #[tokio::test]
    async fn reader_wakes_at_the_mark_at_a_lowered_mark_and_at_the_end() {
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

        // The end of the stream wakes the reader regardless of the mark.
        set_receive_low_water(&here, 1000).unwrap();
        drop(there);
        assert_eq!(here.read(&mut read).await.unwrap(), 0);
    }

    #[tokio::test]
    async fn unacknowledged_bytes_are_those_that_the_peer_has_not_read() {
        let listener = TcpListener::bind("127.0.0.1:0").await.unwrap();
        let mut here = TcpStream::connect(listener.local_addr().unwrap())
            .await
            .unwrap();
        let (mut there, _) = listener.accept().await.unwrap();
        assert_eq!(unacknowledged(&here), Some(0));
        // Writes until both sockets are full.
        let filled = async { while here.write_all(&[1; 65536]).await.is_ok() {} };
        timeout(Duration::from_millis(200), filled)
            .await
            .unwrap_err();
        let before = unacknowledged(&here).unwrap();
        assert!(before > 0);
        let read = async {
            let mut piece = vec![0; 65536];
            while unacknowledged(&here) == Some(before) {
                assert!(there.read(&mut piece).await.unwrap() > 0);
            }
        };
        timeout(Duration::from_secs(30), read).await.unwrap();

        let (mut here, mut there) = UnixStream::pair().unwrap();
        assert_eq!(unacknowledged(&here), Some(0));
        here.write_all(&[1; 100]).await.unwrap();
        assert!(unacknowledged(&here) >= Some(100));
        there.read_exact(&mut [0; 100]).await.unwrap();
        assert_eq!(unacknowledged(&here), Some(0));
        assert_eq!(
            unacknowledged(&std::fs::File::open("/dev/null").unwrap()),
            None
        );
    }

    #[tokio::test]
    async fn tcp_info_of_an_older_kernel_has_zeros_in_place_of_unknown_fields() {
        let listener = TcpListener::bind("127.0.0.1:0").await.unwrap();
        let mut here = TcpStream::connect(listener.local_addr().unwrap())
            .await
            .unwrap();
        here.write_all(&[1]).await.unwrap();
        let whole = tcp_info(&here).unwrap();
        assert_eq!((whole.tcpi_state, whole.tcpi_data_segs_out), (1, 1));
        // The structure had 104 bytes in Linux 2.6, and 232 in Linux 6.1.
        for bytes in [0, 104, 192, 232] {
            let info = first_of_tcp_info(&here, bytes).unwrap();
            assert_eq!(info.tcpi_state, u8::from(bytes > 0), "{bytes}");
            assert_eq!(info.tcpi_data_segs_out, u32::from(bytes >= 192), "{bytes}");
        }
        let socket = UdpSocket::bind("127.0.0.1:0").await.unwrap();
        tcp_info(&socket).unwrap_err();
    }

    #[tokio::test]
    async fn low_water_mark_fails_on_a_file_but_not_on_udp() {
        let file = tempfile::tempfile().unwrap();
        set_receive_low_water(&file, 1).unwrap_err();
        // A UDP socket accepts the option, although datagrams are read one by one.
        let socket = UdpSocket::bind("127.0.0.1:0").await.unwrap();
        set_receive_low_water(&socket, 1).unwrap();
    }
}
