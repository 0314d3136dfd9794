//! Congestion control of TCP connections.

use std::fmt;
use std::fs;
use std::io;
use std::net::{IpAddr, SocketAddr};
use std::os::fd::AsFd;
use std::str::FromStr;

use socket2::{Domain, SockRef, Socket, Type};
use tokio::net::{TcpListener, TcpStream};

/// Congestion control for connections within the host. Every kernel has `reno` and lets every process choose
/// it (`tcp_allowed_congestion_control`, tcp(7)). `reno` sends without pacing, as much as the peer accepts.
const PLAIN: &[u8] = b"reno";

/// Congestion control of links that lose packets. BBR takes the measured rate of the path for the sending rate,
/// while `cubic` and `reno` halve theirs, roughly, at each loss.
const BBR: &str = "bbr";

/// Longest name of a congestion control, in bytes (`TCP_CA_NAME_MAX` in Linux `net/tcp.h`, without the zero).
const NAME_BYTES: usize = 15;

/// Files with the names of the kernel's congestion controls (tcp(7)).
const AVAILABLE: &str = "/proc/sys/net/ipv4/tcp_available_congestion_control";
const ALLOWED: &str = "/proc/sys/net/ipv4/tcp_allowed_congestion_control";

/// Congestion control of links between hosts (`--link-congestion`).
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub enum LinkCongestion {
    /// `auto`: BBR if the kernel permits it, otherwise as [`LinkCongestion::System`].
    #[default]
    Auto,
    /// `system`: the kernel's default.
    System,
    /// The congestion control with this name.
    Named(String),
}

/// A text that `--link-congestion` does not accept.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
#[error(
    "expected auto, system or the name of a congestion control of the kernel, such as bbr or cubic, got {0:?}"
)]
pub struct LinkCongestionSyntax(String);

/// Error returned if the kernel does not permit the chosen congestion control.
#[derive(Debug, thiserror::Error)]
#[error(
    "--link-congestion={name}: {cause}; available: {available}; permitted without CAP_NET_ADMIN: {allowed}; \
     to permit {name} on a node, load the kernel module tcp_{name} and add the name to the sysctl \
     net.ipv4.tcp_allowed_congestion_control"
)]
pub struct LinkCongestionError {
    name: String,
    available: String,
    allowed: String,
    /// Part of the text, and therefore not the source of the error.
    cause: io::Error,
}

/// The congestion control that links get, after a look at what the kernel permits.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct ChosenCongestion {
    /// Name to set. `None` leaves the kernel's default.
    name: Option<String>,
    /// True if connections within the host keep the kernel's default.
    between_hosts: bool,
}

// === impl LinkCongestion ===

impl LinkCongestion {
    /// Decides which congestion control links get.
    ///
    /// # Errors
    /// Fails if the kernel does not permit a [`LinkCongestion::Named`] congestion control to this process.
    pub fn choose(&self) -> Result<ChosenCongestion, LinkCongestionError> {
        let (name, between_hosts) = match self {
            Self::Auto => (probe(BBR).ok().map(|()| BBR.to_owned()), true),
            Self::System => (None, false),
            Self::Named(name) => {
                probe(name).map_err(|cause| LinkCongestionError {
                    name: name.clone(),
                    available: names(AVAILABLE),
                    allowed: names(ALLOWED),
                    cause,
                })?;
                (Some(name.clone()), false)
            }
        };
        Ok(ChosenCongestion {
            name,
            between_hosts,
        })
    }
}

impl FromStr for LinkCongestion {
    type Err = LinkCongestionSyntax;

    fn from_str(text: &str) -> Result<Self, Self::Err> {
        let is_name = |text: &str| {
            let is_valid = |byte: u8| byte.is_ascii_alphanumeric() || b"_-".contains(&byte);
            (1..=NAME_BYTES).contains(&text.len()) && text.bytes().all(is_valid)
        };
        match text {
            "auto" => Ok(Self::Auto),
            "system" => Ok(Self::System),
            name if is_name(name) => Ok(Self::Named(name.to_owned())),
            _ => Err(LinkCongestionSyntax(text.to_owned())),
        }
    }
}

impl fmt::Display for LinkCongestion {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(match self {
            Self::Auto => "auto",
            Self::System => "system",
            Self::Named(name) => name,
        })
    }
}

// === impl ChosenCongestion ===

impl ChosenCongestion {
    /// Sets the congestion control of a connection. With `auto`, a connection within the host keeps the kernel's
    /// default.
    pub fn apply(&self, stream: &TcpStream) {
        if !self.between_hosts || !stays_on_this_host(stream) {
            self.set(stream);
        }
    }

    /// Sets the congestion control of a listener. The kernel copies it to the connections that the listener accepts.
    /// With `auto`, a listener on a loopback address keeps the kernel's default.
    pub fn apply_to_listener(&self, listener: &TcpListener) {
        let is_loopback = |address: SocketAddr| address.ip().to_canonical().is_loopback();
        if !self.between_hosts || !listener.local_addr().is_ok_and(is_loopback) {
            self.set(listener);
        }
    }

    fn set(&self, socket: &impl AsFd) {
        if let Some(name) = &self.name {
            // The kernel has accepted the name before. A failure leaves the default.
            let _ = SockRef::from(socket).set_tcp_congestion(name.as_bytes());
        }
    }
}

/// Returns the name of the congestion control of a connection or listener, as the kernel reports it. Empty if the
/// socket is not a TCP socket.
pub fn congestion(socket: &impl AsFd) -> String {
    let name = SockRef::from(socket).tcp_congestion().unwrap_or_default();
    let name: Vec<u8> = name.into_iter().take_while(|byte| *byte != 0).collect();
    String::from_utf8_lossy(&name).into_owned()
}

/// Returns an error if this process may not use a congestion control. The kernel loads the module if the process may
/// load modules.
fn probe(name: &str) -> io::Result<()> {
    let socket = Socket::new(Domain::IPV4, Type::STREAM, None)?;
    socket.set_tcp_congestion(name.as_bytes())
}

fn names(file: &str) -> String {
    match fs::read_to_string(file) {
        Ok(names) => names.split_whitespace().collect::<Vec<_>>().join(" "),
        Err(error) => format!("unknown ({error})"),
    }
}

/// Switches a connection from BBR to `reno` if its two addresses are equal or the peer's address is a
/// loopback address. BBR, the default of many systems, spreads packets over time, so that no queue builds up
/// on the path. A connection within a host has no path with queues, and the kernel would arm a timer for each
/// 64 KiB (docs/decisions/0004). Other connections and other congestion controls stay as they are.
pub fn disable_bbr_on_loopback(stream: &TcpStream) {
    let socket = SockRef::from(stream);
    if socket.tcp_congestion().is_ok_and(|name| is_bbr(&name)) && stays_on_this_host(stream) {
        // A failure only makes the connection slower.
        let _ = socket.set_tcp_congestion(PLAIN);
    }
}

/// Returns true if this is the name of a version of BBR.
pub(super) fn is_bbr(name: &[u8]) -> bool {
    name.starts_with(BBR.as_bytes())
}

fn stays_on_this_host(stream: &TcpStream) -> bool {
    match (stream.local_addr(), stream.peer_addr()) {
        (Ok(own), Ok(peer)) => is_this_host(own.ip(), peer.ip()),
        _ => false,
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

    use std::io::Write as _;

    use super::*;

    /// Returns true if the kernel permits a congestion control. Otherwise reports on stderr that a part of a test is
    /// skipped.
    ///
    /// # Panics
    /// If `CI=true` and `CULVERT_KERNEL_LACKS` does not list the congestion control, as in `tests/harness/skip.rs`.
    fn permits(control: &str) -> bool {
        let is_permitted = probe(control).is_ok();
        if !is_permitted {
            let is_ci = std::env::var("CI").is_ok_and(|ci| ci == "true");
            let lacks = std::env::var("CULVERT_KERNEL_LACKS").unwrap_or_default();
            assert!(
                !is_ci || lacks.split(',').any(|listed| listed == control),
                "this kernel lacks {control}, though CI=true and CULVERT_KERNEL_LACKS is {lacks:?}"
            );
            // Bypasses the capture of libtest, which would hide the line.
            let _ = writeln!(io::stderr(), "skipped: this kernel lacks {control}");
        }
        is_permitted
    }

    #[tokio::test]
    async fn connection_within_the_host_changes_from_bbr_to_reno() {
        let listener = TcpListener::bind("127.0.0.1:0").await.unwrap();
        let stream = TcpStream::connect(listener.local_addr().unwrap());
        let stream = stream.await.unwrap();
        let socket = SockRef::from(&stream);
        let control = || congestion(&stream);
        for (name, expected) in [(BBR, "reno"), ("cubic", "cubic"), ("reno", "reno")] {
            if permits(name) {
                socket.set_tcp_congestion(name.as_bytes()).unwrap();
                disable_bbr_on_loopback(&stream);
                assert_eq!(control(), expected);
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

    #[test]
    fn text_is_auto_system_or_a_name() {
        for text in ["auto", "system", "bbr", "cubic", "dctcp-x"] {
            let parsed: LinkCongestion = text.parse().unwrap();
            assert_eq!(parsed.to_string(), text);
        }
        for text in ["", "b b r", "a-name-of-16-byte", "bbr\n", "../bbr"] {
            text.parse::<LinkCongestion>().unwrap_err();
        }
    }

    #[test]
    fn name_without_a_congestion_control_is_an_error_with_the_permitted_names() {
        let error = LinkCongestion::Named("no-such".to_owned()).choose();
        let error = error.unwrap_err();
        // A program prints the text and all sources.
        assert!(std::error::Error::source(&error).is_none());
        let error = error.to_string();
        assert!(error.starts_with("--link-congestion=no-such: "), "{error}");
        assert!(error.contains("without CAP_NET_ADMIN: "), "{error}");
        assert!(error.contains("reno"), "{error}");
    }

    #[tokio::test]
    async fn links_get_the_named_congestion_control_at_both_ends() {
        let chosen = LinkCongestion::Named("reno".to_owned()).choose().unwrap();
        let listener = TcpListener::bind("127.0.0.1:0").await.unwrap();
        chosen.apply_to_listener(&listener);
        let address = listener.local_addr().unwrap();
        let dialed = TcpStream::connect(address).await.unwrap();
        let (accepted, _) = listener.accept().await.unwrap();
        chosen.apply(&dialed);
        assert_eq!(
            [&dialed, &accepted].map(congestion),
            ["reno", "reno"].map(str::to_owned)
        );
    }

    #[tokio::test]
    async fn auto_and_system_keep_the_default_within_the_host() {
        let listener = TcpListener::bind("127.0.0.1:0").await.unwrap();
        let address = listener.local_addr().unwrap();
        let default = congestion(&listener);
        for choice in [LinkCongestion::Auto, LinkCongestion::System] {
            let dialed = TcpStream::connect(address).await.unwrap();
            choice.choose().unwrap().apply(&dialed);
            assert_eq!(congestion(&dialed), default, "{choice}");
        }
    }

    #[tokio::test]
    async fn auto_sets_bbr_on_listeners_for_other_hosts_if_the_kernel_permits_it() {
        let chosen = LinkCongestion::Auto.choose().unwrap();
        let is_permitted = permits(BBR);
        for (address, is_link) in [("127.0.0.1:0", false), ("0.0.0.0:0", true)] {
            let listener = TcpListener::bind(address).await.unwrap();
            SockRef::from(&listener).set_tcp_congestion(PLAIN).unwrap();
            chosen.apply_to_listener(&listener);
            let expected = if is_link && is_permitted {
                "bbr"
            } else {
                "reno"
            };
            assert_eq!(congestion(&listener), expected, "{address}");
        }
    }
}
