//! The settings of one peer's flows, and the words in which a flow's fate is told.

use std::fmt;
use std::net::{Ipv4Addr, SocketAddrV4};
use std::time::Duration;

use crate::session::LARGE_TUN_MTU;

/// What bounds the flows of one peer.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Config {
    /// The own address inside the VPN, the source of every flow that is dialed. KKP's clients
    /// masquerade only 10.20.0.0/24, so it has to be in there: 10.20.0.1.
    pub address: Ipv4Addr,
    /// The largest packet that the tunnel takes. Default 1500.
    pub tun_mtu: u16,
    /// The largest TCP payload of a packet, sent and asked for. What does not fit the path behind
    /// the peer is lost without a word (smoltcp knows no path MTU discovery); too small costs
    /// packets. Default 1360, which fits every tunnel that stock peers make out of a path of 1500.
    pub mss: u16,
    /// Bytes that a flow holds for an owner that does not read: the largest receive window. The
    /// path's bandwidth times its delay, or it limits the flow. Default 512 KiB.
    pub receive_buffer: usize,
    /// Bytes that a flow holds until the peer has acknowledged them. Default 512 KiB.
    pub send_buffer: usize,
    /// What the flows that receive may be sent at once: their windows share it, none is less than 5840 bytes. Default
    /// 512 KiB, 385 packets, for the queue of 500 that Linux gives the tun device of a stock peer. Flows whose
    /// ends both take packets of [`LARGE_TUN_MTU`] bytes, as programs of ours do over TCP, have no part in it.
    pub receive_budget: usize,
    /// What the flows that send may have on the way to the peer, each at least 5840 bytes. Default
    /// 1 MiB: its acknowledgements, one for two packets, have to wait in the same queue.
    pub send_budget: usize,
    /// What the buffers of all flows may come to. The more of it is taken the smaller are the
    /// buffers of the next flow, down to 16 KiB for each direction, which are given even beyond
    /// it: in all no more than this and 32 KiB for each of [`max_flows`](Self::max_flows).
    /// Default 256 MiB.
    ///
    /// A buffer's memory is asked for at once but comes zeroed from the allocator, so that pages
    /// are used when they are first written. smoltcp can not shrink a buffer: an idle flow keeps
    /// the pages it has used until it ends.
    pub buffer_budget: usize,
    /// Flows at once. Default 8192.
    pub max_flows: usize,
    /// Whether the owner accepts connections from the peer, to any address. Without it a SYN is
    /// answered like a segment of an unknown flow.
    pub accept: bool,
    /// SYNs that wait for the owner's answer; more are dropped, the other side tries again.
    /// Default 1024.
    pub max_pending: usize,
    /// How long the owner may take to answer a SYN. Default 60 s.
    pub accept_timeout: Duration,
    /// How long a dial waits for its SYN-ACK. Default 30 s.
    pub connect_timeout: Duration,
    /// An idle flow asks the other side for a sign of life this often. Default 60 s.
    pub keepalive: Duration,
    /// A flow ends when the other side leaves data or keepalives unanswered for so long while the
    /// tunnel is alive: time in which nothing is heard of the peer does not count. Default 150 s.
    pub user_timeout: Duration,
    /// For a datagram transport; a stream takes what it can by itself.
    pub pace: Option<Pace>,
}

impl Config {
    /// For a tunnel that takes packets of `tun_mtu` bytes. Who takes [`LARGE_TUN_MTU`] ends connections itself, or leads
    /// to hosts that say in their SYN what fits.
    pub fn for_mtu(tun_mtu: u16) -> Self {
        let config = Self::default();
        Self {
            tun_mtu,
            mss: match tun_mtu >= LARGE_TUN_MTU {
                true => tun_mtu - 40,
                false => config.mss,
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

/// What may be on its way to one peer over a datagram transport.
///
/// The stock peer's socket buffer takes about 80 KiB of full packets. What comes on top is lost,
/// and the stack, whose sender does not use selective acknowledgements, then stands still for a
/// second.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Pace {
    /// Unacknowledged bytes of all flows together, to begin with; losses leave 64 KiB of it, if it is more. 64 KiB over a
    /// round trip of 0.5 ms is 1 Gbit/s, over 50 ms 10 Mbit/s. Default 64 KiB.
    pub in_flight: usize,
    /// How far it may grow while nothing is lost. Default 4 MiB.
    pub max_in_flight: usize,
    /// It grows no further than what this rate needs on the path's shortest round trip; packets
    /// leave no faster, either. Bytes a second; default 250 MB/s, 2 Gbit/s.
    pub rate: u64,
    /// Bytes that may leave at once. Default 48 KiB.
    pub burst: usize,
}

impl Pace {
    /// For a server of our own: many datagrams cost it one system call, so that it takes them faster.
    /// Its socket is shared by all clients.
    pub fn to_own_server() -> Self {
        Self {
            rate: 1_000_000_000,
            burst: 64 << 10,
            ..Self::default()
        }
    }

    /// For a client of our own. Nobody else sends to its socket, which takes 255 KiB of full packets
    /// where the kernel gives no more than by default (`net.core.rmem_max`), twice as many as a stock client's.
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

/// A flow of one [`Flows`](super::Flows). Never valid again once its [`Event::Closed`] was given.
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

/// What happened to a flow.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum Event {
    /// Somebody behind the peer wants to connect; answer with
    /// [`accept`](super::Flows::accept) or [`refuse`](super::Flows::refuse).
    Incoming {
        /// The flow to be.
        id: FlowId,
        /// Who dials.
        source: SocketAddrV4,
        /// What is dialed.
        destination: SocketAddrV4,
    },
    /// The flow is open: bytes may be sent and will come.
    Connected(FlowId),
    /// There is something to receive, or the end of it. Told once; again after
    /// [`recv`](super::Flows::recv) has found nothing.
    Readable(FlowId),
    /// There is room again after [`send`](super::Flows::send) has taken less than it was given.
    Writable(FlowId),
    /// The flow is gone, its id no longer valid. What had been received is read by then, and the
    /// other side's end was or could have been seen if it is [`Closed::Finished`].
    Closed(FlowId, Closed),
}

/// Why a flow is gone.
#[derive(Clone, Copy, Debug, PartialEq, Eq, thiserror::Error)]
pub enum Closed {
    /// Both sides closed and both know.
    #[error("closed by both sides")]
    Finished,
    /// The destination answered the SYN with a reset.
    #[error("connection refused")]
    Refused,
    /// A router or the destination said so by ICMP while the flow was being connected.
    #[error("destination unreachable: {0}")]
    Unreachable(Unreachable),
    /// Nobody answered the SYN.
    #[error("connect timed out after {} s", .0.as_secs())]
    ConnectTimedOut(Duration),
    /// The owner did not answer the SYN in time.
    #[error("not accepted in time")]
    AcceptTimedOut,
    /// The other side reset the flow.
    #[error("reset by the other side")]
    Reset,
    /// Data or keepalives were not acknowledged.
    #[error("nothing heard from the other side for {} s", .0.as_secs())]
    TimedOut(Duration),
}

/// What ICMP says of a destination.
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
    /// From the code of an ICMP message of type 3.
    pub fn from_code(code: u8) -> Self {
        match code {
            0 => Self::Network,
            1 => Self::Host,
            2 => Self::Protocol,
            3 => Self::Port,
            9 | 10 | 13 => Self::Prohibited,
            other => Self::Other(other),
        }
    }

    /// The code in an ICMP message of type 3.
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

/// How a connection is refused.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Refusal {
    /// As by a host with nobody on that port.
    Reset,
    /// As by a router on the way.
    Unreachable(Unreachable),
}

/// Why nothing is dialed.
#[derive(Clone, Copy, Debug, PartialEq, Eq, thiserror::Error)]
pub enum DialError {
    /// [`Config::max_flows`].
    #[error("{0} flows are open, no more are allowed")]
    TooManyFlows(usize),
    /// Every local port is in use for this destination, or was a moment ago.
    #[error("no local port is free for {0}")]
    PortsExhausted(SocketAddrV4),
    /// Port 0, or no unicast address.
    #[error("{0} can not be dialed")]
    Undialable(SocketAddrV4),
}

/// The flow is gone, or can not do that any more.
#[derive(Clone, Copy, Debug, PartialEq, Eq, thiserror::Error)]
#[error("the flow is closed")]
pub struct Gone;

/// What [`recv`](super::Flows::recv) has found.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Received {
    /// This many bytes were taken.
    Bytes(usize),
    /// Nothing now; [`Event::Readable`] will tell.
    Empty,
    /// Nothing any more: the other side has closed its direction.
    End,
}

/// Whose a packet was.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Input {
    /// A flow's.
    Taken,
    /// Nobody's here: not TCP, or no flow has these ports. For others to look at; what nobody
    /// wants goes to [`reject`](super::Flows::reject).
    Unknown,
    /// Broken, and dropped.
    Dropped,
}
