//! The settings of one peer's flows, and the types that report a flow's state.

use std::fmt;
use std::net::{Ipv4Addr, SocketAddrV4};
use std::time::Duration;

use crate::options::Transport;
use crate::session::LARGE_TUN_MTU;

/// Largest TCP payload of a packet over UDP, in bytes. With an AEAD cipher, the datagrams of full packets fit a path of
/// 1450 bytes, the MTU of pods behind VXLAN, over IPv4 and IPv6. Larger datagrams travel in fragments, and the kernel
/// does not split batches of them.
const UDP_MSS: u16 = 1320;

/// Settings and limits of the flows of one peer.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Config {
    /// Own address inside the VPN, the source of every dialed flow. KKP's clients masquerade only
    /// 10.20.0.0/24, so the address must be inside this network. Default 10.20.0.1.
    pub address: Ipv4Addr,
    /// Largest packet that the tunnel accepts, in bytes. Default 1500.
    pub tun_mtu: u16,
    /// Largest TCP payload of a packet, in bytes, for sending and as the advertised MSS. A larger payload
    /// than the path behind the peer allows is lost until a router reports its MTU (RFC 1191), and forever if no
    /// router does; a smaller payload costs more packets. Default 1360, which fits every tunnel that stock
    /// peers build on a path of 1500 bytes. See also [`for_tunnel`](Self::for_tunnel).
    pub mss: u16,
    /// Receive buffer of a flow, in bytes, and the largest receive window. A buffer smaller than the path's
    /// bandwidth-delay product limits the flow. Default 512 KiB.
    pub receive_buffer: usize,
    /// Send buffer of a flow, in bytes: data kept until the remote end has acknowledged it. Default 512 KiB.
    pub send_buffer: usize,
    /// Budget in bytes for data in flight toward receiving flows. Their receive windows share the budget;
    /// each window is at least 5840 bytes. Default 512 KiB, which is 385 packets and fits the queue of 500
    /// packets that Linux gives the tun device of a stock peer. Flows are exempt if both ends accept packets
    /// of `LARGE_TUN_MTU` bytes, as Culvert programs do over TCP.
    pub receive_budget: usize,
    /// Budget in bytes for data in flight from sending flows to the peer; each flow may use at least 5840
    /// bytes. Default 1 MiB, twice the receive budget: only the acknowledgements, one for every two packets,
    /// wait in the queue of the peer's tun device.
    pub send_budget: usize,
    /// Budget in bytes for the buffers of all flows. The buffers of a new flow get smaller as the budget
    /// fills, down to 16 KiB for each direction. This minimum is allocated even beyond the budget, so the
    /// total is at most the budget plus 32 KiB for each of [`max_flows`](Self::max_flows). Default 256 MiB.
    ///
    /// A buffer is allocated at once but zeroed by the allocator, so pages are used only when first written.
    /// smoltcp cannot shrink a buffer: an idle flow keeps its used pages until it ends.
    pub buffer_budget: usize,
    /// Largest number of flows at the same time. Default 8192.
    pub max_flows: usize,
    /// True if the owner accepts connections from the peer, to any address. Otherwise a SYN is treated like a
    /// segment of an unknown flow. Default false.
    pub accept: bool,
    /// Largest number of SYNs that wait for the owner's answer. Further SYNs are dropped and the remote end
    /// retries. Default 1024.
    pub max_pending: usize,
    /// Time for the owner to answer a SYN. Default 60 s.
    pub accept_timeout: Duration,
    /// Time for the handshake of a flow. Default 30 s.
    pub connect_timeout: Duration,
    /// Interval between keepalives of an idle flow. Default 60 s.
    pub keepalive: Duration,
    /// A flow ends when the remote end leaves data or keepalives unanswered for this long while the tunnel is
    /// alive: time without any packet from the peer does not count. At least two keepalive intervals. Default
    /// 150 s.
    pub user_timeout: Duration,
    /// Pacing for a datagram transport. `None` for a stream transport, which has its own flow control.
    pub pace: Option<Pace>,
}

impl Config {
    /// Returns the default settings for a tunnel with packets of `tun_mtu` bytes. With `LARGE_TUN_MTU` or
    /// more the MSS fills the packet: the peer either terminates connections itself, or leads to hosts whose
    /// SYN limits the MSS. Over UDP, the datagram of a full packet needs no fragments on a path of 1450 bytes.
    pub fn for_tunnel(transport: Transport, tun_mtu: u16) -> Self {
        let config = Self::default();
        Self {
            tun_mtu,
            mss: match transport {
                _ if tun_mtu >= LARGE_TUN_MTU => tun_mtu - 40,
                Transport::Tcp => config.mss,
                Transport::Udp => UDP_MSS,
            },
            ..config
        }
    }
}

impl Default for Config {
    fn default() -> Self {
        Self {
            address: Ipv4Addr::new(10, 20, 0, 1),
            tun_mtu: 1500,
            mss: 1360,
            receive_buffer: 512 << 10,
            receive_budget: 512 << 10,
            send_budget: 1 << 20,
            send_buffer: 512 << 10,
            buffer_budget: 256 << 20,
            max_flows: 8192,
            accept: false,
            max_pending: 1024,
            accept_timeout: Duration::from_secs(60),
            connect_timeout: Duration::from_secs(30),
            keepalive: Duration::from_secs(60),
            user_timeout: Duration::from_secs(150),
            pace: None,
        }
    }
}

/// Limits for the data in flight to one peer over a datagram transport.
///
/// The socket buffer of a stock peer accepts about 80 KiB of full packets. Packets beyond this limit are
/// lost, and smoltcp, whose sender does not use selective acknowledgements, then stalls for a second.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Pace {
    /// Initial limit of unacknowledged bytes of all flows together. Losses lower the limit, but not below
    /// 64 KiB or this initial limit, whichever is smaller. 64 KiB per round trip of 0.5 ms is 1 Gbit/s, per
    /// 50 ms 10 Mbit/s. Default 64 KiB.
    pub in_flight: usize,
    /// Maximum to which the limit may grow while nothing is lost, in bytes. Default 4 MiB.
    pub max_in_flight: usize,
    /// Maximum rate in bytes per second. The limit grows no further than this rate needs at the path's
    /// shortest round trip, and packets are sent no faster. Default 250 MB/s, which is 2 Gbit/s.
    pub rate: u64,
    /// Bytes that may be sent in one burst. Default 48 KiB.
    pub burst: usize,
}

impl Pace {
    /// Returns the pace toward a Culvert server, which receives many datagrams with one system call and is
    /// therefore faster. All clients share the server's socket.
    pub fn to_own_server() -> Self {
        Self {
            rate: 1_000_000_000,
            burst: 64 << 10,
            ..Self::default()
        }
    }

    /// Returns the pace toward a Culvert client. The client's socket receives only from this server. With
    /// the kernel's default `net.core.rmem_max` the socket accepts 255 KiB of full packets, twice as many
    /// as the socket of a stock client.
    pub fn to_own_client() -> Self {
        Self {
            in_flight: 192 << 10,
            burst: 128 << 10,
            ..Self::to_own_server()
        }
    }
}

impl Default for Pace {
    fn default() -> Self {
        Self {
            in_flight: 64 << 10,
            max_in_flight: 4 << 20,
            rate: 250_000_000,
            burst: 48 << 10,
        }
    }
}

/// Identifier of a flow in one [`Flows`](super::Flows). The identifier is invalid after the flow's
/// [`Event::Closed`], and is not used again.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, PartialOrd, Ord)]
pub struct FlowId {
    pub(crate) index: u32,
    pub(crate) generation: u32,
}

impl fmt::Display for FlowId {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{}.{}", self.index, self.generation)
    }
}

/// An event of a flow.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum Event {
    /// A host behind the peer wants to connect. Answer with [`accept`](super::Flows::accept) or
    /// [`refuse`](super::Flows::refuse).
    Incoming {
        /// The new flow.
        id: FlowId,
        /// Address of the host that dials.
        source: SocketAddrV4,
        /// Address that is dialed.
        destination: SocketAddrV4,
    },
    /// The flow is open in both directions.
    Connected(FlowId),
    /// Data or the end of the data can be read. Reported once, and again after [`recv`](super::Flows::recv)
    /// has returned [`Received::Empty`].
    Readable(FlowId),
    /// The send buffer has room again after [`send`](super::Flows::send) could not accept all bytes.
    Writable(FlowId),
    /// The remote end has acknowledged all queued bytes, and the end of the direction if the owner has closed it. Reported
    /// once after [`report_delivery`](super::Flows::report_delivery).
    Delivered(FlowId),
    /// The flow is gone and its id is invalid. All received data has been read before this event. With
    /// [`Closed::Finished`] the end of the data could be read as well.
    Closed(FlowId, Closed),
}

/// Reason why a flow is gone.
#[derive(Clone, Copy, Debug, PartialEq, Eq, thiserror::Error)]
pub enum Closed {
    /// Both sides closed and both ends were acknowledged.
    #[error("closed by both sides")]
    Finished,
    /// The destination answered the SYN with a reset.
    #[error("connection refused")]
    Refused,
    /// A router or the destination sent an ICMP error before the flow was connected.
    #[error("destination unreachable: {0}")]
    Unreachable(Unreachable),
    /// The handshake was not completed in time.
    #[error("connect timed out after {} s", .0.as_secs())]
    ConnectTimedOut(Duration),
    /// The owner did not answer the SYN in time.
    #[error("not accepted in time")]
    AcceptTimedOut,
    /// The remote end reset the flow.
    #[error("reset by the other side")]
    Reset,
    /// Data or keepalives were not acknowledged.
    #[error("the other side has not answered for {} s", .0.as_secs())]
    TimedOut(Duration),
}

/// Code of an ICMP "destination unreachable" message.
#[derive(Clone, Copy, Debug, PartialEq, Eq, thiserror::Error)]
pub enum Unreachable {
    /// Code 0.
    #[error("no route to the network")]
    Network,
    /// Code 1.
    #[error("no route to the host")]
    Host,
    /// Code 2.
    #[error("protocol not supported")]
    Protocol,
    /// Code 3.
    #[error("port closed")]
    Port,
    /// Codes 9, 10 and 13.
    #[error("forbidden by an administrator")]
    Prohibited,
    /// Any other code.
    #[error("code {0}")]
    Other(u8),
}

impl Unreachable {
    /// Converts the code of an ICMP message of type 3.
    pub(crate) fn from_code(code: u8) -> Self {
        match code {
            0 => Self::Network,
            1 => Self::Host,
            2 => Self::Protocol,
            3 => Self::Port,
            9 | 10 | 13 => Self::Prohibited,
            other => Self::Other(other),
        }
    }

    /// Returns the code for an ICMP message of type 3.
    pub fn code(self) -> u8 {
        match self {
            Self::Network => 0,
            Self::Host => 1,
            Self::Protocol => 2,
            Self::Port => 3,
            Self::Prohibited => 13,
            Self::Other(code) => code,
        }
    }
}

/// Answer to a refused connection.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Refusal {
    /// A reset, as from a host without a listener on the port.
    Reset,
    /// An ICMP error, as from a router on the path.
    Unreachable(Unreachable),
}

/// Reason why a dial failed before a SYN was sent.
#[derive(Clone, Copy, Debug, PartialEq, Eq, thiserror::Error)]
pub enum DialError {
    /// [`Config::max_flows`] is reached.
    #[error("the limit of {0} open flows is reached")]
    TooManyFlows(usize),
    /// Every local port has a current or recent flow to this destination.
    #[error("no local port is free for {0}")]
    PortsExhausted(SocketAddrV4),
    /// Port 0, the configured own address, or not a unicast address.
    #[error("{0} cannot be dialed")]
    Undialable(SocketAddrV4),
}

/// The flow is gone or already closed.
#[derive(Clone, Copy, Debug, PartialEq, Eq, thiserror::Error)]
#[error("the flow is closed")]
pub struct Gone;

/// Result of [`recv`](super::Flows::recv).
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Received {
    /// Number of bytes that were read.
    Bytes(usize),
    /// No data now; [`Event::Readable`] follows.
    Empty,
    /// End of the data: the remote end has closed its direction.
    End,
}

/// Result of [`input`](super::Flows::input).
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Input {
    /// The packet belongs to a flow, or to a flow that has just ended.
    Accepted,
    /// Not TCP, or no flow has these addresses and ports. If no other part of the program handles the packet,
    /// pass it to [`reject`](super::Flows::reject).
    Unknown,
    /// The packet is malformed and was dropped.
    Dropped,
}
