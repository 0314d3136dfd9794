//! Congestion control of connections that do not leave the host.

use std::net::IpAddr;

use socket2::SockRef;
use tokio::net::TcpStream;

/// Congestion control for connections within the host. Every kernel has `reno` and lets every process choose
/// it (`tcp_allowed_congestion_control`, tcp(7)). `reno` sends without pacing, as much as the peer accepts.
const PLAIN: &[u8] = b"reno";

/// Switches a connection from BBR to `reno` if its two addresses are equal or the peer's address is a
/// loopback address. BBR, the default of many systems, spreads packets over time, so that no queue builds up
/// on the path. A connection within a host has no path with queues, and the kernel would arm a timer for each
/// 64 KiB (docs/decisions/0004). Other connections and other congestion controls stay as they are.
pub fn disable_bbr_on_loopback(stream: &TcpStream) {
    let socket = SockRef::from(stream);
    let is_bbr = |name: Vec<u8>| name.starts_with(b"bbr");
    if socket.tcp_congestion().is_ok_and(is_bbr)
        && let (Ok(own), Ok(peer)) = (stream.local_addr(), stream.peer_addr())
        && is_this_host(own.ip(), peer.ip())
    {
        // A failure only makes the connection slower.
        let _ = socket.set_tcp_congestion(PLAIN);
    }
}

/// Returns true if a connection from `own` to `peer` stays on one host.
fn is_this_host(own: IpAddr, peer: IpAddr) -> bool {
    let [own, peer] = [own, peer].map(|address| address.to_canonical());
    own == peer || peer.is_loopback()
}

#[cfg(test)]
mod tests {
    #![allow(clippy::unwrap_used)]

    use tokio::net::TcpListener;

    use super::*;

    #[tokio::test]
    async fn connection_within_the_host_changes_from_bbr_to_reno() {
        let listener = TcpListener::bind("127.0.0.1:0").await.unwrap();
        let stream = TcpStream::connect(listener.local_addr().unwrap());
        let stream = stream.await.unwrap();
        let socket = SockRef::from(&stream);
        let control = || {
            let name = socket.tcp_congestion().unwrap();
            String::from_utf8(name).unwrap().replace('\0', "")
        };
        if socket.set_tcp_congestion(b"bbr").is_ok() {
            disable_bbr_on_loopback(&stream);
            assert_eq!(control(), "reno");
        }
        for name in ["cubic", "reno"] {
            if socket.set_tcp_congestion(name.as_bytes()).is_ok() {
                disable_bbr_on_loopback(&stream);
                assert_eq!(control(), name);
            }
        }
    }

    #[test]
    fn a_peer_with_the_same_or_a_loopback_address_is_on_this_host() {
        let is_this_host = |own: &str, peer: &str| {
            let [own, peer] = [own, peer].map(|address| address.parse().unwrap());
            super::is_this_host(own, peer)
        };
        assert!(is_this_host("127.0.0.1", "127.0.0.2"));
        assert!(is_this_host("::1", "::1"));
        assert!(is_this_host("::ffff:192.168.30.10", "192.168.30.10"));
        assert!(is_this_host("::ffff:127.0.0.1", "::ffff:127.0.0.1"));
        assert!(!is_this_host("192.168.30.10", "192.168.30.11"));
        assert!(!is_this_host("::1", "fd00::1"));
    }
}
