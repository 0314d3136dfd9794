//! The rtnetlink messages for interfaces: encodes requests, and decodes the relevant parts of answers. No
//! I/O. The layouts are the kernel's (`linux/netlink.h`, `rtnetlink.h`, `if_link.h`, `if_addr.h`), in the
//! machine's byte order.
//!
//! Written by hand, because few messages are needed. A crate for all of rtnetlink decodes every attribute of
//! an interface, and fails completely if a later kernel changes an attribute, even an unused attribute.

use std::iter::from_fn;
use std::net::{IpAddr, Ipv4Addr, Ipv6Addr};

use super::Interface;
use super::plan::{Address, Step};

/// Length of a message's header, in bytes. Messages and attributes start at multiples of [`ALIGNMENT`].
const HEADER: usize = 16;
const ALIGNMENT: usize = 4;

const NLMSG_ERROR: u16 = 2;
const NLMSG_DONE: u16 = 3;
const RTM_NEWLINK: u16 = 16;
const RTM_DELLINK: u16 = 17;
const RTM_GETLINK: u16 = 18;
const RTM_NEWADDR: u16 = 20;
const RTM_DELADDR: u16 = 21;
const RTM_GETADDR: u16 = 22;

const NLM_F_REQUEST: u16 = 0x001;
const NLM_F_ACK: u16 = 0x004;
const NLM_F_DUMP_INTR: u16 = 0x010;
const NLM_F_EXCL: u16 = 0x200;
const NLM_F_DUMP: u16 = 0x300;
const NLM_F_CREATE: u16 = 0x400;

const AF_INET: u8 = 2;
const AF_INET6: u8 = 10;

const IFF_UP: u32 = 1;
const IFLA_IFNAME: u16 = 3;
const IFLA_LINKINFO: u16 = 18;
const IFLA_INFO_KIND: u16 = 1;

const IFA_ADDRESS: u16 = 1;
const IFA_LOCAL: u16 = 2;
const IFA_F_NODAD: u8 = 0x02;
const RT_SCOPE_UNIVERSE: u8 = 0;
const RT_SCOPE_HOST: u8 = 254;

/// Flag bits in an attribute's type (`NLA_F_NESTED`, `NLA_F_NET_BYTEORDER`).
const ATTRIBUTE_FLAGS: u16 = 0xc000;

/// A request to the kernel. The kernel answers with zero or more messages, then an outcome.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Request<'a> {
    /// Finds the interface with this name.
    Find(&'a str),
    /// Lists the addresses of all interfaces.
    Addresses,
    /// Makes one change to an interface with this index, which is ignored for [`Step::Create`]. An IPv4 address
    /// gets host scope, as with network-interface-manager. An IPv6 address can be bound at once, without
    /// duplicate address detection: a dummy interface has no neighbors.
    Change(&'a Interface, u32, Step),
}

/// Relevant content of a message from the kernel.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Incoming<'a> {
    /// An interface that exists or was just removed.
    Link(LinkHead<'a>),
    /// An address that exists or was just removed.
    Address {
        index: u32,
        address: Address,
    },
    /// End of an answer: 0 for success, or an error number.
    Outcome(i32),
    Other,
}

/// An interface without its addresses.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) struct LinkHead<'a> {
    pub index: u32,
    pub name: &'a str,
    /// Kind of the interface, as the kernel names it; `None` for a hardware device.
    pub kind: Option<&'a str>,
    pub is_up: bool,
}

/// One message from the kernel.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) struct Message<'a> {
    /// Number of the request, if the message answers a request; otherwise 0.
    pub number: u32,
    /// Set when the listed objects changed during the listing; the request must then be repeated.
    pub is_interrupted: bool,
    pub incoming: Incoming<'a>,
}

// === impl Request ===

impl Request<'_> {
    /// Encodes the request. The kernel's answers carry the same `number`.
    pub(super) fn encode(&self, number: u32) -> Vec<u8> {
        let (kind, flags, body) = match *self {
            Self::Find(name) => {
                let mut body = link(0, 0);
                attribute(&mut body, IFLA_IFNAME, &text(name));
                (RTM_GETLINK, NLM_F_ACK, body)
            }
            Self::Addresses => (RTM_GETADDR, NLM_F_DUMP, vec![0; 8]),
            Self::Change(interface, _, Step::Create) => {
                let mut body = link(0, IFF_UP);
                attribute(&mut body, IFLA_IFNAME, &text(&interface.name));
                let mut info = Vec::new();
                attribute(&mut info, IFLA_INFO_KIND, &text(interface.kind));
                attribute(&mut body, IFLA_LINKINFO, &info);
                (RTM_NEWLINK, NLM_F_ACK | NLM_F_CREATE | NLM_F_EXCL, body)
            }
            Self::Change(_, index, Step::SetUp) => (RTM_NEWLINK, NLM_F_ACK, link(index, IFF_UP)),
            Self::Change(_, index, Step::Add(address)) => {
                let flags = NLM_F_ACK | NLM_F_CREATE | NLM_F_EXCL;
                (RTM_NEWADDR, flags, address_body(index, address))
            }
            Self::Change(_, index, Step::Remove(address)) => {
                (RTM_DELADDR, NLM_F_ACK, address_body(index, address))
            }
        };
        // Interface names have at most 15 bytes, so every length fits its field.
        let length = (HEADER + body.len()) as u32;
        let mut message = length.to_ne_bytes().to_vec();
        message.extend(kind.to_ne_bytes());
        message.extend((NLM_F_REQUEST | flags).to_ne_bytes());
        message.extend(number.to_ne_bytes());
        // The sender's port. The kernel fills in the real port.
        message.extend([0; 4]);
        message.extend(body);
        message
    }
}

/// Encodes `ifinfomsg`: an index, and flags to set.
fn link(index: u32, flags: u32) -> Vec<u8> {
    let mut body = vec![0; 4];
    body.extend(index.to_ne_bytes());
    body.extend(flags.to_ne_bytes());
    // The mask of flags to change.
    body.extend(flags.to_ne_bytes());
    body
}

/// Encodes `ifaddrmsg` and the address.
fn address_body(index: u32, Address { ip, prefix }: Address) -> Vec<u8> {
    let (family, flags, scope, octets) = match ip {
        IpAddr::V4(ip) => (AF_INET, 0, RT_SCOPE_HOST, ip.octets().to_vec()),
        IpAddr::V6(ip) => (
            AF_INET6,
            IFA_F_NODAD,
            RT_SCOPE_UNIVERSE,
            ip.octets().to_vec(),
        ),
    };
    let mut body = vec![family, prefix, flags, scope];
    body.extend(index.to_ne_bytes());
    attribute(&mut body, IFA_LOCAL, &octets);
    attribute(&mut body, IFA_ADDRESS, &octets);
    body
}

fn attribute(body: &mut Vec<u8>, kind: u16, value: &[u8]) {
    let length = (ALIGNMENT + value.len()) as u16;
    body.extend(length.to_ne_bytes());
    body.extend(kind.to_ne_bytes());
    body.extend(value);
    body.resize(body.len().next_multiple_of(ALIGNMENT), 0);
}

fn text(text: &str) -> Vec<u8> {
    [text.as_bytes(), &[0]].concat()
}

/// Decodes the messages of a datagram. Stops at a truncated message.
pub(super) fn decode(datagram: &[u8]) -> impl Iterator<Item = Message<'_>> {
    let mut reader = Reader(datagram);
    from_fn(move || {
        let length = reader.u32()? as usize;
        let (kind, flags, number) = (reader.u16()?, reader.u16()?, reader.u32()?);
        reader.u32()?;
        let body = Reader(reader.padded(length.checked_sub(HEADER)?)?);
        let incoming = match kind {
            NLMSG_ERROR | NLMSG_DONE => outcome(body),
            RTM_NEWLINK | RTM_DELLINK => link_head(body),
            RTM_NEWADDR | RTM_DELADDR => address(body),
            _ => None,
        };
        Some(Message {
            number,
            is_interrupted: flags & NLM_F_DUMP_INTR != 0,
            incoming: incoming.unwrap_or(Incoming::Other),
        })
    })
}

fn outcome(mut body: Reader<'_>) -> Option<Incoming<'_>> {
    let negative = i32::from_ne_bytes(body.array()?);
    Some(Incoming::Outcome(negative.saturating_neg()))
}

fn link_head(mut body: Reader<'_>) -> Option<Incoming<'_>> {
    body.array::<4>()?;
    let (index, flags) = (body.u32()?, body.u32()?);
    body.u32()?;
    let info = body.find(IFLA_LINKINFO).map(Reader);
    Some(Incoming::Link(LinkHead {
        index,
        name: body.find(IFLA_IFNAME).and_then(until_nul)?,
        kind: info.and_then(|info| info.find(IFLA_INFO_KIND).and_then(until_nul)),
        is_up: flags & IFF_UP != 0,
    }))
}

fn address(mut body: Reader<'_>) -> Option<Incoming<'_>> {
    let [family, prefix, _, _] = body.array()?;
    let index = body.u32()?;
    // On a point-to-point interface, IFA_ADDRESS is the peer's address.
    let octets = body.find(IFA_LOCAL).or_else(|| body.find(IFA_ADDRESS))?;
    let ip = match family {
        AF_INET => Ipv4Addr::from(<[u8; 4]>::try_from(octets).ok()?).into(),
        AF_INET6 => Ipv6Addr::from(<[u8; 16]>::try_from(octets).ok()?).into(),
        _ => return None,
    };
    let address = Address { ip, prefix };
    Some(Incoming::Address { index, address })
}

fn until_nul(value: &[u8]) -> Option<&str> {
    let text = value.split(|byte| *byte == 0).next()?;
    std::str::from_utf8(text).ok()
}

/// A parser that removes values from the front of a byte slice.
#[derive(Clone, Copy)]
struct Reader<'a>(&'a [u8]);

impl<'a> Reader<'a> {
    fn array<const N: usize>(&mut self) -> Option<[u8; N]> {
        let (value, rest) = self.0.split_first_chunk()?;
        self.0 = rest;
        Some(*value)
    }

    fn u16(&mut self) -> Option<u16> {
        self.array().map(u16::from_ne_bytes)
    }

    fn u32(&mut self) -> Option<u32> {
        self.array().map(u32::from_ne_bytes)
    }

    /// Removes `length` bytes and the padding up to a multiple of [`ALIGNMENT`]; returns the bytes without
    /// the padding.
    fn padded(&mut self, length: usize) -> Option<&'a [u8]> {
        let (value, _) = self.0.split_at_checked(length)?;
        let whole = length.next_multiple_of(ALIGNMENT).min(self.0.len());
        self.0 = self.0.get(whole..)?;
        Some(value)
    }

    /// Returns the value of the first attribute of the type `wanted` in the remaining bytes.
    fn find(mut self, wanted: u16) -> Option<&'a [u8]> {
        loop {
            let length = usize::from(self.u16()?);
            let kind = self.u16()? & !ATTRIBUTE_FLAGS;
            let value = self.padded(length.checked_sub(ALIGNMENT)?)?;
            if kind == wanted {
                return Some(value);
            }
        }
    }
}

#[cfg(test)]
mod tests;
