//! The sockets: one that asks and waits for the answer, and one that hears of changes.

use std::io;
use std::os::fd::OwnedFd;
use std::time::Duration;

use rustix::io::{Errno, retry_on_intr};
use rustix::net::netlink::SocketAddrNetlink;
use rustix::net::sockopt::{Timeout, set_socket_timeout};
use rustix::net::{
    AddressFamily, RecvFlags, SendFlags, SocketFlags, SocketType, bind, recv, send, socket_with,
};
use tokio::io::unix::AsyncFd;

use super::Interface;
use super::message::{Incoming, Request, decode};
use super::plan::{Link, Step};

/// The most that the kernel puts into one datagram, in bytes.
const DATAGRAM_BYTES: usize = 32 * 1024;

/// How long an answer may take. The kernel gives it while it takes the request; this only keeps a
/// defect from holding a thread for ever.
const ANSWER_TIMEOUT: Duration = Duration::from_secs(5);

/// RTNLGRP_LINK, RTNLGRP_IPV4_IFADDR and RTNLGRP_IPV6_IFADDR, as bits.
const GROUPS: u32 = 1 << 0 | 1 << 4 | 1 << 8;

/// A socket for requests. It blocks.
pub struct Netlink {
    socket: OwnedFd,
    buffer: Vec<u8>,
    /// Of the last request.
    number: u32,
}

/// A socket that hears of every change to interfaces and addresses. It needs no permission.
pub struct Monitor(AsyncFd<OwnedFd>);

// === impl Netlink ===

impl Netlink {
    /// Opens a socket.
    ///
    /// # Errors
    /// When the system has no sockets of this family, or allows none.
    pub fn open() -> Result<Self, Errno> {
        let socket = open(SocketFlags::CLOEXEC, 0)?;
        set_socket_timeout(&socket, Timeout::Recv, Some(ANSWER_TIMEOUT))?;
        Ok(Self {
            socket,
            buffer: vec![0; DATAGRAM_BYTES],
            number: 0,
        })
    }

    /// The interface of a name with its addresses, or nothing.
    ///
    /// # Errors
    /// The kernel's; [`Errno::INTR`] when addresses changed while they were listed.
    pub fn find(&mut self, name: &str) -> Result<Option<Link>, Errno> {
        let mut link = None;
        let found = self.ask(Request::Find(name), |incoming| {
            if let Incoming::Link(head) = incoming {
                link = Some(Link {
                    index: head.index,
                    kind: head.kind.map(str::to_owned),
                    is_up: head.is_up,
                    addresses: Vec::new(),
                });
            }
        });
        match (found, &mut link) {
            (Err(Errno::NODEV), _) => return Ok(None),
            (Err(errno), _) => return Err(errno),
            (Ok(()), None) => return Err(Errno::PROTO),
            (Ok(()), Some(link)) => self.ask(Request::Addresses, |incoming| match incoming {
                Incoming::Address { index, address } if index == link.index => {
                    link.addresses.push(address);
                }
                _ => {}
            })?,
        }
        Ok(link)
    }

    /// Makes one change; `index` is that of the interface, unless the step makes it.
    ///
    /// # Errors
    /// The kernel's.
    pub fn carry_out(
        &mut self,
        interface: &Interface,
        index: u32,
        step: &Step,
    ) -> Result<(), Errno> {
        let request = match *step {
            Step::Create => Request::Create(&interface.name, interface.kind),
            Step::SetUp => Request::SetUp(index),
            Step::Remove(address) => Request::Remove(index, address),
            Step::Add(address) => Request::Add(index, address),
        };
        self.ask(request, |_| {})
    }

    /// Sends a request and hands on what answers it, up to its outcome.
    fn ask(
        &mut self,
        request: Request<'_>,
        mut on_answer: impl FnMut(Incoming<'_>),
    ) -> Result<(), Errno> {
        self.number += 1;
        let message = request.encode(self.number);
        retry_on_intr(|| send(&self.socket, &message, SendFlags::empty()))?;
        let mut is_interrupted = false;
        loop {
            let datagram = receive(&self.socket, &mut self.buffer)?;
            for message in decode(datagram) {
                // A late answer to a request that was given up.
                if message.number != self.number {
                    continue;
                }
                is_interrupted |= message.is_interrupted;
                match message.incoming {
                    Incoming::Outcome(0) if is_interrupted => return Err(Errno::INTR),
                    Incoming::Outcome(0) => return Ok(()),
                    Incoming::Outcome(errno) => return Err(Errno::from_raw_os_error(errno)),
                    incoming => on_answer(incoming),
                }
            }
        }
    }
}

// === impl Monitor ===

impl Monitor {
    /// Opens a socket that hears of what changes from now on.
    ///
    /// # Errors
    /// When the system has no sockets of this family, or allows none.
    #[expect(
        deprecated,
        reason = "its successor is unsafe, for types whose descriptor may change: an OwnedFd's does not"
    )]
    pub fn open() -> io::Result<Self> {
        let flags = SocketFlags::CLOEXEC | SocketFlags::NONBLOCK;
        AsyncFd::new(open(flags, GROUPS)?).map(Self)
    }

    /// Waits until something was said that `concerns` the caller, or may have been: the kernel
    /// drops what does not fit into the socket's buffer. All that has come by then is taken.
    /// Cancel-safe.
    pub async fn heard(&self, concerns: impl Fn(&Incoming<'_>) -> bool) {
        loop {
            let Ok(mut guard) = self.0.readable().await else {
                // The runtime ends.
                return;
            };
            // For the time that it takes: there is seldom anything to read.
            let mut buffer = vec![0; DATAGRAM_BYTES];
            let mut is_concerned = false;
            loop {
                match receive(self.0.get_ref(), &mut buffer) {
                    Ok(datagram) => {
                        let mut messages = decode(datagram);
                        is_concerned |= messages.any(|message| concerns(&message.incoming));
                    }
                    Err(Errno::AGAIN) => break,
                    // There may be more behind it, so it stays readable.
                    Err(_) => return,
                }
            }
            guard.clear_ready();
            if is_concerned {
                return;
            }
        }
    }
}

fn open(flags: SocketFlags, groups: u32) -> Result<OwnedFd, Errno> {
    // No protocol is NETLINK_ROUTE.
    let socket = socket_with(AddressFamily::NETLINK, SocketType::RAW, flags, None)?;
    bind(&socket, &SocketAddrNetlink::new(0, groups))?;
    Ok(socket)
}

fn receive<'a>(socket: &OwnedFd, buffer: &'a mut [u8]) -> Result<&'a [u8], Errno> {
    let (length, _) = retry_on_intr(|| recv(socket, &mut *buffer, RecvFlags::empty()))?;
    Ok(buffer.get(..length).unwrap_or_default())
}
