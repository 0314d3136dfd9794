//! Options of TCP connections with a long round trip, on which small messages wait long beside bulk.

use std::io;
use std::os::fd::AsFd;
use std::sync::LazyLock;
use std::time::Duration;

use culvert_stream::LONG_PATH;
use socket2::{Domain, SockRef, Socket, Type};
use tokio::net::TcpStream;

use super::congestion::{congestion, is_bbr};
use super::options::tcp_info;

/// Number of unsent bytes at which a socket stops accepting data (`tcp_notsent_lowat` in Linux `ip-sysctl.rst`). Small
/// messages wait behind these bytes, and overtake the bulk that waits in HTTP/2's queues. By default, only the send
/// buffer is a limit.
const UNSENT_BYTES: u32 = 128 * 1024;

/// Requested receive buffer of a short path before a long one, in bytes. The kernel grants at most `net.core.rmem_max`,
/// 208 KiB by default, and doubles it. About half of the result is the window.
const UNREAD_BYTES: usize = 256 * 1024;

/// Largest round trip at which a window of [`UNREAD_BYTES`] permits 400 MiB/s.
const NEAR: Duration = Duration::from_micros(500);

/// Requested send buffer, in bytes. The kernel doubles it, to the largest window of a stream.
const SEND_BUFFER_BYTES: usize = 16 * 1024 * 1024;

/// Send buffer to request, in bytes. `None` if the kernel allocates at least as much without a request.
static SEND_BUFFER: LazyLock<Option<usize>> = LazyLock::new(|| {
    let granted = send_buffer_on_request().ok()?;
    (granted > largest_automatic_send_buffer()?).then_some(SEND_BUFFER_BYTES)
});

/// Limits the unsent bytes of a connection whose path is known to be long.
pub fn limit_unsent(stream: &impl AsFd) {
    // A failure leaves the kernel's default, and small messages wait longer beside bulk.
    let _ = SockRef::from(stream).set_tcp_notsent_lowat(UNSENT_BYTES);
}

/// Undoes [`limit_unsent`].
pub fn restore_unsent(stream: &impl AsFd) {
    // 0 stands for the kernel's default.
    let _ = SockRef::from(stream).set_tcp_notsent_lowat(0);
}

/// Limits the bytes that wait in a proxy between a peer on a long path and a `near` one. The kernel enlarges a receive
/// buffer up to megabytes if its reader is slow, and small messages wait behind these bytes.
pub fn limit_unread(far: &TcpStream, near: &TcpStream) {
    if is_long(far) && shortest_round_trip(near).is_some_and(|time| time <= NEAR) {
        // A failure leaves the kernel's choice.
        let _ = SockRef::from(near).set_recv_buffer_size(UNREAD_BYTES);
    }
}

/// Limits the unsent bytes of a new connection if its handshake took as long as on a [`LONG_PATH`], and requests a larger
/// send buffer if the connection uses BBR. BBR starts with 2.9 times the bandwidth-delay product in flight. If the send
/// buffer is smaller, the startup phase does not end, and the queue of the path stays full (docs/decisions/0020). The kernel
/// knows the round trip to the next TCP peer only, which may be a proxy.
pub fn tune_link(stream: &TcpStream) {
    if !is_long(stream) {
        return;
    }
    limit_unsent(stream);
    if let Some(bytes) = *SEND_BUFFER
        && is_bbr(congestion(stream).as_bytes())
    {
        // A failure leaves the kernel's choice, which changes with the path.
        let _ = SockRef::from(stream).set_send_buffer_size(bytes);
    }
}

/// Returns true for a [`LONG_PATH`], by the shortest round trip. On a new connection, the handshake is the only one.
/// Without TCP timestamps, a repeated handshake yields no round trip, and counts as long.
pub fn is_long(stream: &TcpStream) -> bool {
    shortest_round_trip(stream).is_none_or(|time| time >= LONG_PATH)
}

/// Returns the shortest round trip so far; `None` if the kernel has measured none.
fn shortest_round_trip(stream: &TcpStream) -> Option<Duration> {
    let info = tcp_info(stream).ok()?;
    let time = match info.tcpi_min_rtt {
        // Not measured, or an older kernel.
        0 | u32::MAX => info.tcpi_rtt,
        shortest => shortest,
    };
    (time > 0).then(|| Duration::from_micros(time.into()))
}

/// Returns the send buffer that the kernel grants on request (`net.core.wmem_max`, socket(7)), in bytes.
fn send_buffer_on_request() -> io::Result<usize> {
    let socket = Socket::new(Domain::IPV4, Type::STREAM, None)?;
    socket.set_send_buffer_size(SEND_BUFFER_BYTES)?;
    socket.send_buffer_size()
}

/// Returns the largest send buffer that the kernel allocates without a request (`tcp_wmem`, tcp(7)), in bytes.
fn largest_automatic_send_buffer() -> Option<usize> {
    let limits = std::fs::read_to_string("/proc/sys/net/ipv4/tcp_wmem").ok()?;
    limits.split_whitespace().nth(2)?.parse().ok()
}
