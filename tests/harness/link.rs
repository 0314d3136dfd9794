//! A network link between two addresses of one network namespace, with delay, loss, a limited rate and pauses.
//!
//! A program that dials [`FAR`] reaches a listener at [`LISTENER`]. Each packet passes a tun device, and a thread of this
//! process delays or drops the packet. Unlike a proxy, the link keeps the TCP connection of the two programs as one
//! connection: their kernel sees the delay and the loss.
//!
//! Both ends have addresses of this network, so the kernel would connect them directly. The thread therefore changes the
//! addresses of each packet:
//!
//! ```text
//! dialer   10.9.0.1 -> 10.9.1.2   becomes   10.9.1.1 -> 10.9.0.2   listener
//! dialer   10.9.1.2 -> 10.9.0.1   <- was    10.9.0.2 -> 10.9.1.1   listener
//! ```
//!
//! One address gains what the other loses, so all checksums stay valid.

mod nat;
mod shaper;

use std::io;
use std::os::fd::AsFd as _;
use std::path::Path;
use std::process::Command;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, AtomicU64, AtomicUsize, Ordering};
use std::thread::JoinHandle;
use std::time::Duration;

use parking_lot::Mutex;
use rustix::event::{PollFd, PollFlags, Timespec, poll};
use tokio::time::{Instant, sleep};
use tun_rs::{DeviceBuilder, SyncDevice};

use self::nat::{Nat, is_udp};
pub use self::shaper::Conditions;
use self::shaper::Shaper;
use crate::namespace::{ip, is_inside};
use crate::skip::skip;

/// Address that the dialer uses for the listener.
pub const FAR: &str = "10.9.1.2";

/// Address of the listener.
pub const LISTENER: &str = "10.9.0.2";

/// Address of the dialer.
const DIALER: &str = "10.9.0.1";

/// Name of the tun device.
const NAME: &str = "link";

/// Largest packet, in bytes, as on Ethernet.
const MTU: u16 = 1500;

/// Packets that wait for the thread. The link's own queue, not this one, limits a fast sender.
const DEVICE_QUEUE: u32 = 10_000;

/// Longest time until the thread notices the end of the link.
const LOOK: Duration = Duration::from_millis(50);

/// Packets read before due packets are sent again.
const BATCH: usize = 64;

/// Offsets in the IPv4 header of the third byte of source and destination: the byte that says "near" or "far".
const SOURCE: usize = 14;
const DESTINATION: usize = 18;

/// Direction of a packet.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Way {
    /// From the dialer to the listener.
    FromDialer,
    /// From the listener to the dialer.
    FromListener,
}

/// A running link. Dropping the value removes the device.
#[derive(Debug)]
pub struct Link {
    shared: Arc<Shared>,
    thread: Option<JoinHandle<()>>,
}

#[derive(Debug)]
struct Shared {
    stop: AtomicBool,
    dark: AtomicBool,
    /// Sizes of the largest packets that are not dropped, in bytes; for UDP by the direction.
    largest_udp: [AtomicUsize; 2],
    largest_tcp: AtomicUsize,
    nat: Mutex<Nat>,
    forwarded: AtomicU64,
    dropped: AtomicU64,
    conditions: Mutex<Conditions>,
}

/// Returns true if this machine has tun devices. Otherwise prints a message on stderr.
///
/// # Panics
/// If the machine has no tun devices and `CI=true`.
pub fn is_possible() -> bool {
    let found = Path::new("/dev/net/tun").exists();
    if !found {
        skip("/dev/net/tun not found");
    }
    found
}

/// Conditions under which bulk fills every queue: 4 MB/s and a round trip of 40 ms, with a queue of half a second.
pub fn slow_path() -> Conditions {
    Conditions {
        delay: Duration::from_millis(20),
        rate: Some(4e6),
        queue: Duration::from_millis(500),
        ..Conditions::default()
    }
}

/// Looks at both ends of the only connection along the link for three seconds, while bulk moves. Returns the largest
/// number of unsent bytes.
///
/// # Panics
/// If the link has no connection or several, or is idle most of the time, or if `ss` (iproute2) is not installed.
pub async fn most_unsent_bytes() -> u64 {
    let (mut most, mut busy) = (0, 0);
    for _ in 0..30 {
        sleep(Duration::from_millis(100)).await;
        let (unsent, in_flight) = unsent_bytes();
        assert_eq!(unsent.len(), 2, "the ends of one connection");
        most = most.max(unsent.into_iter().max().unwrap_or_default());
        busy += u64::from(in_flight > 100);
    }
    assert!(busy > 10, "busy at {busy} of 30 looks");
    most
}

/// Returns the numbers of unsent bytes of the connections along the link, and the sum of their packets in flight.
fn unsent_bytes() -> (Vec<u64>, u64) {
    let shown = Command::new("ss")
        .args(["-tinH", "state", "established"])
        .output();
    let shown = String::from_utf8(shown.expect("starting ss").stdout).expect("text of ss");
    let field = |line: &str, name: &str| {
        let value = line
            .split_whitespace()
            .find_map(|word| word.strip_prefix(name));
        value.map_or(0, |value| value.parse().expect("a number of ss"))
    };
    // The second line of a connection has its state. Packets of the loopback interface are larger than the link's.
    let states = shown.lines().filter(|line| line.contains("mss:14"));
    let states: Vec<(u64, u64)> = states
        .map(|line| (field(line, "notsent:"), field(line, "unacked:")))
        .collect();
    let in_flight = states.iter().map(|(_, packets)| packets).sum();
    (
        states.into_iter().map(|(unsent, _)| unsent).collect(),
        in_flight,
    )
}

impl Link {
    /// Creates the link. `seed` decides which packets are lost or late, so two runs with the same packets lose the same
    /// ones.
    ///
    /// # Errors
    /// If the tun device cannot be created.
    ///
    /// # Panics
    /// If the caller is not in a network of its own.
    pub fn start(conditions: Conditions, seed: u64) -> io::Result<Self> {
        assert!(is_inside(), "call namespace::alone first");
        let device = DeviceBuilder::new()
            .name(NAME)
            .ipv4(DIALER, 24, None)
            .mtu(MTU)
            .tx_queue_len(DEVICE_QUEUE)
            .packet_information(false)
            .build_sync()?;
        device.set_nonblocking(true)?;
        ip(&format!("addr add {LISTENER}/32 dev {NAME}")).map_err(io::Error::other)?;
        ip(&format!("route add 10.9.1.0/24 dev {NAME} src {DIALER}")).map_err(io::Error::other)?;
        let shared = Arc::new(Shared {
            stop: AtomicBool::new(false),
            dark: AtomicBool::new(false),
            largest_udp: [usize::MAX; 2].map(AtomicUsize::new),
            largest_tcp: AtomicUsize::new(usize::MAX),
            nat: Mutex::default(),
            forwarded: AtomicU64::new(0),
            dropped: AtomicU64::new(0),
            conditions: Mutex::new(conditions),
        });
        let work = shared.clone();
        let thread = std::thread::Builder::new()
            .name("link".to_owned())
            .spawn(move || work.run(&device, seed))?;
        Ok(Self {
            shared,
            thread: Some(thread),
        })
    }

    /// Changes the conditions for packets from now on.
    pub fn set(&self, conditions: Conditions) {
        *self.shared.conditions.lock() = conditions;
    }

    /// Drops every packet while `dark` is true.
    pub fn set_dark(&self, dark: bool) {
        self.shared.dark.store(dark, Ordering::Relaxed);
    }

    /// Drops every UDP packet while `dark` is true.
    pub fn set_udp_dark(&self, dark: bool) {
        self.set_largest_udp(if dark { 0 } else { usize::MAX });
    }

    /// Drops every UDP packet of one direction.
    pub fn darken_udp(&self, way: Way) {
        self.shared.largest_udp[way as usize].store(0, Ordering::Relaxed);
    }

    /// Drops every packet that is not UDP while `dark` is true.
    pub fn set_tcp_dark(&self, dark: bool) {
        let largest = if dark { 0 } else { usize::MAX };
        self.shared.largest_tcp.store(largest, Ordering::Relaxed);
    }

    /// Drops every UDP packet of more than `bytes` bytes, with its IP header. No router reports the loss.
    pub fn set_largest_udp(&self, bytes: usize) {
        for largest in &self.shared.largest_udp {
            largest.store(bytes, Ordering::Relaxed);
        }
    }

    /// Lets the NAT device at the dialer's end forget its UDP flows: the listener sees the dialer's next packets from
    /// another port, and with `changes_address` from another address. Packets to the old ones are dropped.
    pub fn rebind_nat(&self, changes_address: bool) {
        self.shared.nat.lock().rebind(changes_address);
    }

    /// Returns the number of forwarded packets.
    pub fn forwarded(&self) -> u64 {
        self.shared.forwarded.load(Ordering::Relaxed)
    }

    /// Returns the number of dropped packets.
    pub fn dropped(&self) -> u64 {
        self.shared.dropped.load(Ordering::Relaxed)
    }
}

impl Drop for Link {
    fn drop(&mut self) {
        self.shared.stop.store(true, Ordering::Relaxed);
        if let Some(thread) = self.thread.take() {
            let _ = thread.join();
        }
    }
}

impl Shared {
    fn run(&self, device: &SyncDevice, seed: u64) {
        // The two directions have separate queues, as on a line.
        let mut ways = [Shaper::new(seed), Shaper::new(!seed)];
        let mut buffer = [0; MTU as usize];
        while !self.stop.load(Ordering::Relaxed) {
            let now = Instant::now();
            for way in &mut ways {
                while let Some(packet) = way.due(now) {
                    // The kernel drops a packet if the receiver's queue is full, as a host would.
                    let _ = device.send(&packet);
                }
            }
            for _ in 0..BATCH {
                match device.recv(&mut buffer) {
                    Ok(length) => self.take(&mut ways, &mut buffer[..length]),
                    Err(_) => break,
                }
            }
            let next = ways.iter().filter_map(Shaper::next).min();
            let wait = next.map_or(LOOK, |at| at.saturating_duration_since(Instant::now()));
            wait_readable(device, wait.min(LOOK));
        }
    }

    fn take(&self, ways: &mut [Shaper; 2], packet: &mut [u8]) {
        let Some(way) = cross(packet, &mut self.nat.lock()) else {
            return;
        };
        let conditions = *self.conditions.lock();
        let largest = match is_udp(packet) {
            true => &self.largest_udp[way as usize],
            false => &self.largest_tcp,
        };
        let is_dark =
            self.dark.load(Ordering::Relaxed) || packet.len() > largest.load(Ordering::Relaxed);
        let is_taken = !is_dark && ways[way as usize].push(Instant::now(), packet, &conditions);
        let counter = if is_taken {
            &self.forwarded
        } else {
            &self.dropped
        };
        counter.fetch_add(1, Ordering::Relaxed);
    }
}

/// Changes the addresses of a packet to those at the other end, and returns the direction. Returns `None` for a packet
/// that is not for the other end, or that the NAT device drops.
fn cross(packet: &mut [u8], nat: &mut Nat) -> Option<Way> {
    let is_version_4 = packet.first().is_some_and(|byte| byte >> 4 == 4);
    if !is_version_4 || packet.len() < 20 || (packet[SOURCE], packet[DESTINATION]) != (0, 1) {
        return None;
    }
    let way = match packet[SOURCE + 1] {
        1 => Way::FromDialer,
        2 => Way::FromListener,
        _ => return None,
    };
    if way == Way::FromListener && !nat.inward(packet) {
        return None;
    }
    (packet[SOURCE], packet[DESTINATION]) = (1, 0);
    if way == Way::FromDialer {
        nat.outward(packet);
    }
    Some(way)
}

/// Waits until the device has a packet, or for `time`.
fn wait_readable(device: &SyncDevice, time: Duration) {
    let device = device.as_fd();
    let mut polled = [PollFd::new(&device, PollFlags::IN)];
    let time = Timespec {
        tv_sec: 0,
        tv_nsec: time.subsec_nanos().into(),
    };
    // An interrupted wait is only shorter.
    let _ = poll(&mut polled, Some(&time));
}

#[cfg(test)]
mod tests {
    use std::time::Duration;

    use tokio::io::{AsyncReadExt as _, AsyncWriteExt as _};
    use tokio::net::{TcpListener, TcpStream};
    use tokio::time::timeout;

    use super::*;
    use crate::namespace::alone;

    /// Returns the two ends of a connection over the link.
    async fn connect() -> (TcpStream, TcpStream) {
        let listener = TcpListener::bind((LISTENER, 0)).await.unwrap();
        let port = listener.local_addr().unwrap().port();
        let (dialed, accepted) = tokio::join!(TcpStream::connect((FAR, port)), listener.accept());
        (dialed.unwrap(), accepted.unwrap().0)
    }

    #[test]
    fn bytes_arrive_complete_in_both_directions_although_packets_are_lost() {
        if !is_possible() {
            return;
        }
        alone(async || {
            let conditions = Conditions {
                delay: Duration::from_millis(2),
                jitter: Duration::from_millis(1),
                loss: 0.02,
                reorder: 0.02,
                ..Conditions::default()
            };
            let link = Link::start(conditions, 7).unwrap();
            let (dialed, accepted) = connect().await;
            let sent: Vec<u8> = (0..1_000_000_u32).map(|n| (n % 251) as u8).collect();
            let send = |stream: TcpStream| async {
                let (mut from, mut to) = stream.into_split();
                let write = async {
                    to.write_all(&sent).await.unwrap();
                    to.shutdown().await.unwrap();
                };
                let mut received = Vec::new();
                let (read, ()) = tokio::join!(from.read_to_end(&mut received), write);
                read.unwrap();
                received
            };
            let (one, other) = tokio::join!(send(dialed), send(accepted));
            assert!(one == sent && other == sent, "other bytes arrived");
            assert!(link.dropped() > 0 && link.forwarded() > link.dropped());
        });
    }

    #[test]
    fn no_byte_arrives_while_the_link_is_dark_and_all_arrive_afterwards() {
        if !is_possible() {
            return;
        }
        alone(async || {
            let link = Link::start(Conditions::default(), 1).unwrap();
            let (mut dialed, mut accepted) = connect().await;
            link.set_dark(true);
            dialed.write_all(b"x").await.unwrap();
            let wait = Duration::from_millis(300);
            timeout(wait, accepted.read_u8()).await.unwrap_err();
            link.set_dark(false);
            assert_eq!(accepted.read_u8().await.unwrap(), b'x');
            assert!(link.dropped() > 0);
        });
    }

    #[test]
    fn packets_for_other_addresses_do_not_cross() {
        let mut packet = [0; 20];
        packet[0] = 0x45;
        packet[12..20].copy_from_slice(&[10, 9, 0, 1, 10, 9, 1, 2]);
        let mut nat = Nat::default();
        assert_eq!(cross(&mut packet, &mut nat), Some(Way::FromDialer));
        assert_eq!(packet[12..20], [10, 9, 1, 1, 10, 9, 0, 2]);
        assert_eq!(cross(&mut packet, &mut nat), None);
        assert_eq!(cross(&mut packet[..10], &mut nat), None);
        assert_eq!(cross(&mut [], &mut nat), None);
    }
}
