//! Netlink sockets: a blocking socket for requests, and an asynchronous socket for notifications of changes.

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

/// Largest datagram from the kernel, in bytes.
const DATAGRAM_BYTES: usize = 32 * 1024;

/// Longest wait for an answer. The kernel answers while processing the request, so the timeout only prevents
/// a defect from blocking a thread forever.
const ANSWER_TIMEOUT: Duration = Duration::from_secs(5);

/// Bit mask of the multicast groups RTNLGRP_LINK, RTNLGRP_IPV4_IFADDR and RTNLGRP_IPV6_IFADDR.
const GROUPS: u32 = 1 << 0 | 1 << 4 | 1 << 8;

/// A blocking socket for requests.
pub(super) struct Netlink {
    socket: OwnedFd,
    buffer: Vec<u8>,
    /// Number of the last request.
    number: u32,
}

/// A socket that receives every change to interfaces and addresses. Needs no permission.
pub(super) struct Monitor(AsyncFd<OwnedFd>);

// === impl Netlink ===

impl Netlink {
    /// Opens a socket for requests.
    ///
    /// # Errors
    /// Fails if the system does not support or does not allow netlink sockets.
    pub(super) fn open() -> Result<Self, Errno> {
        let socket = open(SocketFlags::CLOEXEC, 0)?;
        set_socket_timeout(&socket, Timeout::Recv, Some(ANSWER_TIMEOUT))?;
        Ok(Self {
            socket,
            buffer: vec![0; DATAGRAM_BYTES],
            number: 0,
        })
    }

    /// Returns the interface named `name` with its addresses, or `None` if the interface does not exist.
    ///
    /// # Errors
    /// Returns the kernel's error, or [`Errno::INTR`] if addresses changed during the listing.
    pub(super) fn find(&mut self, name: &str) -> Result<Option<Link>, Errno> {
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

    /// Makes one change. `index` is the index of the interface; ignored for [`Step::Create`].
    ///
    /// # Errors
    /// Returns the kernel's error.
    pub(super) fn apply(
        &mut self,
        interface: &Interface,
        index: u32,
        step: &Step,
    ) -> Result<(), Errno> {
        self.ask(Request::Change(interface, index, *step), |_| {})
    }

    /// Sends a request and passes each answer to `on_answer`, until the outcome.
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
                // Skip a late answer to an earlier request that timed out.
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
    /// Opens a socket that receives changes from now on.
    ///
    /// # Errors
    /// Fails if the system does not support or does not allow netlink sockets.
    #[expect(
        deprecated,
        reason = "the replacement is unsafe, for types with a changing descriptor; an OwnedFd keeps its descriptor"
    )]
    pub(super) fn open() -> io::Result<Self> {
        let flags = SocketFlags::CLOEXEC | SocketFlags::NONBLOCK;
        AsyncFd::new(open(flags, GROUPS)?).map(Self)
    }

    /// Waits for a change for which `concerns` returns true, or for a receive error. The error may mean lost
    /// changes: the kernel drops changes that do not fit into the socket's buffer. Reads all pending changes,
    /// except after an error. Cancel safe.
    pub(super) async fn changed(&self, concerns: impl Fn(&Incoming<'_>) -> bool) {
        loop {
            let Ok(mut guard) = self.0.readable().await else {
                // The runtime is shutting down.
                return;
            };
            // A buffer is allocated at each wakeup and not kept, because changes are rare.
            let mut buffer = vec![0; DATAGRAM_BYTES];
            let mut is_concerned = false;
            loop {
                match receive(self.0.get_ref(), &mut buffer) {
                    Ok(datagram) => {
                        let mut messages = decode(datagram);
                        is_concerned |= messages.any(|message| concerns(&message.incoming));
                    }
                    Err(Errno::AGAIN) => break,
                    // More messages may follow the error, so the socket stays marked as readable.
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
    // Protocol 0 is NETLINK_ROUTE.
    let socket = socket_with(AddressFamily::NETLINK, SocketType::RAW, flags, None)?;
    bind(&socket, &SocketAddrNetlink::new(0, groups))?;
    Ok(socket)
}

fn receive<'a>(socket: &OwnedFd, buffer: &'a mut [u8]) -> Result<&'a [u8], Errno> {
    let (length, _) = retry_on_intr(|| recv(socket, &mut *buffer, RecvFlags::empty()))?;
    Ok(buffer.get(..length).unwrap_or_default())
}
