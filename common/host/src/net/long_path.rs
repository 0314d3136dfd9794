//! Options of TCP connections with a long round trip, on which small messages wait long beside bulk.

use std::io;
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

/// Requested send buffer, in bytes. The kernel doubles it, to the largest window of a stream.
const SEND_BUFFER_BYTES: usize = 16 * 1024 * 1024;

/// Send buffer to request, in bytes. `None` if the kernel allocates at least as much without a request.
static SEND_BUFFER: LazyLock<Option<usize>> = LazyLock::new(|| {
    let granted = send_buffer_on_request().ok()?;
    (granted > largest_automatic_send_buffer()?).then_some(SEND_BUFFER_BYTES)
});

/// Limits the unsent bytes of a new connection if its handshake took as long as on a [`LONG_PATH`]. The kernel knows the
/// round trip to the next TCP peer only, which may be a proxy.
pub fn limit_unsent(stream: &TcpStream) {
    if is_long(stream) {
        set_unsent(stream);
    }
}

/// Limits the unsent bytes of a new link as [`limit_unsent`] does, and requests a larger send buffer if the link uses
/// BBR. BBR starts with 2.9 times the bandwidth-delay product in flight. If the send buffer is smaller, the startup
/// phase does not end, and the queue of the path stays full (docs/decisions/0020).
pub fn tune_link(stream: &TcpStream) {
    if !is_long(stream) {
        return;
    }
    set_unsent(stream);
    if let Some(bytes) = *SEND_BUFFER
        && is_bbr(congestion(stream).as_bytes())
    {
        // A failure leaves the kernel's choice, which changes with the path.
        let _ = SockRef::from(stream).set_send_buffer_size(bytes);
    }
}

fn set_unsent(stream: &TcpStream) {
    // A failure leaves the kernel's default, and small messages wait longer beside bulk.
    let _ = SockRef::from(stream).set_tcp_notsent_lowat(UNSENT_BYTES);
}

/// Returns true if the handshake took as long as on a long path. Without TCP timestamps, a repeated handshake yields no
/// round trip, and counts as long.
fn is_long(stream: &TcpStream) -> bool {
    let round_trip = tcp_info(stream).map_or(0, |info| info.tcpi_rtt);
    round_trip == 0 || Duration::from_micros(round_trip.into()) >= LONG_PATH
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
