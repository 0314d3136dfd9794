//! The requests of other tasks and threads to the task that owns a peer.
//!
//! A mailbox owns bounded queues of requests and wakes the owner. Its lock is taken once per chunk, dial, or
//! forwarded packet, never for a packet of a flow.

use std::collections::VecDeque;
use std::mem;
use std::net::SocketAddrV4;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, AtomicU64, AtomicUsize, Ordering};
use std::task::{Context, Poll};
use std::time::Duration;

use culvert_openvpn::flows::{FlowId, Refusal};
use futures_util::task::AtomicWaker;
use parking_lot::Mutex;

use super::{Moment, now};

/// Largest number of dials that wait for the owner.
const MAX_DIALS: usize = 4096;

/// Limit of forwarded packets that wait for room in the link, in bytes: the output of a fast sender between
/// two turns of the owner. A longer queue would only add delay.
const MAX_FORWARDED: usize = 256 << 10;

/// Request that the owner processes once.
pub(super) enum Order<P> {
    /// Opens a flow for the pipe.
    Dial(SocketAddrV4, Arc<P>),
    /// Accepts an incoming flow.
    Accept(FlowId, Arc<P>),
    /// Refuses an incoming flow.
    Refuse(FlowId, Refusal),
    /// Ends the session.
    Close,
}

/// Everything that waits for the owner.
pub(super) struct Mail<P> {
    /// Requests in order of arrival.
    pub(super) orders: Vec<Order<P>>,
    /// Pipes whose handles changed state. A pipe is listed at most once.
    pub(super) pipes: Vec<Arc<P>>,
    /// Packets from other peers.
    pub(super) packets: VecDeque<Vec<u8>>,
    packet_bytes: usize,
    dials: usize,
    /// Set once the owner no longer reads the mailbox.
    closed: bool,
}

impl<P> Default for Mail<P> {
    fn default() -> Self {
        Self {
            orders: Vec::new(),
            pipes: Vec::new(),
            packets: VecDeque::new(),
            packet_bytes: 0,
            dials: 0,
            closed: false,
        }
    }
}

/// Mailbox of one peer. `P` is the type of a flow's pipe.
pub(super) struct Mailbox<P> {
    mail: Mutex<Mail<P>>,
    any: AtomicBool,
    waker: AtomicWaker,
    /// Number of flows that are open or opening.
    pub(super) flows: AtomicUsize,
    /// Time of the last authentic packet from the peer, in milliseconds since `since`.
    heard: AtomicU64,
    since: Moment,
}

impl<P> Mailbox<P> {
    pub(super) fn new() -> Arc<Self> {
        Arc::new(Self {
            mail: Mutex::default(),
            any: AtomicBool::new(false),
            waker: AtomicWaker::new(),
            flows: AtomicUsize::new(0),
            heard: AtomicU64::new(0),
            since: now(),
        })
    }

    /// Queues a request. Returns false if the request will not be processed.
    pub(super) fn order(&self, order: Order<P>) -> bool {
        self.put(|mail| {
            if matches!(order, Order::Dial(..)) {
                if mail.dials >= MAX_DIALS {
                    return false;
                }
                mail.dials += 1;
            }
            mail.orders.push(order);
            true
        })
    }

    /// Queues a pipe after its handle changed state.
    pub(super) fn ring(&self, pipe: Arc<P>) {
        self.put(|mail| {
            mail.pipes.push(pipe);
            true
        });
    }

    /// Queues a packet for the peer. Returns false if the packet was dropped.
    pub(super) fn forward(&self, packet: &[u8]) -> bool {
        self.put(|mail| {
            let room = mail.packet_bytes + packet.len() <= MAX_FORWARDED;
            if room {
                mail.packet_bytes += packet.len();
                mail.packets.push_back(packet.to_vec());
            }
            room
        })
    }

    fn put(&self, put: impl FnOnce(&mut Mail<P>) -> bool) -> bool {
        {
            let mut mail = self.mail.lock();
            if mail.closed || !put(&mut mail) {
                return false;
            }
        }
        self.any.store(true, Ordering::Release);
        self.waker.wake();
        true
    }

    /// Takes all waiting mail. Appends forwarded packets to `packets`; these packets count towards the limit
    /// until [`sent`](Self::sent).
    pub(super) fn take(&self, packets: &mut VecDeque<Vec<u8>>) -> Option<Mail<P>> {
        if !self.any.swap(false, Ordering::Acquire) {
            return None;
        }
        let mut mail = self.mail.lock();
        packets.append(&mut mail.packets);
        mail.dials = 0;
        Some(Mail {
            orders: mem::take(&mut mail.orders),
            pipes: mem::take(&mut mail.pipes),
            ..Mail::default()
        })
    }

    /// Releases `bytes` of forwarded packets that were moved to the link.
    pub(super) fn sent(&self, bytes: usize) {
        if bytes > 0 {
            self.mail.lock().packet_bytes -= bytes;
        }
    }

    /// Ready once mail is waiting.
    pub(super) fn poll(&self, cx: &Context<'_>) -> Poll<()> {
        if self.any.load(Ordering::Acquire) {
            return Poll::Ready(());
        }
        self.waker.register(cx.waker());
        match self.any.load(Ordering::Acquire) {
            true => Poll::Ready(()),
            false => Poll::Pending,
        }
    }

    /// Closes the mailbox and returns the unprocessed mail.
    pub(super) fn close(&self) -> Mail<P> {
        let mut mail = self.mail.lock();
        let left = mem::take(&mut *mail);
        mail.closed = true;
        left
    }

    pub(super) fn is_closed(&self) -> bool {
        self.mail.lock().closed
    }

    pub(super) fn hear(&self, now: Moment) {
        let passed = now.saturating_duration_since(self.since).as_millis();
        let passed = u64::try_from(passed).unwrap_or(u64::MAX);
        self.heard.store(passed, Ordering::Relaxed);
    }

    /// Returns the time of the last authentic packet, in milliseconds since the start.
    pub(super) fn heard(&self) -> u64 {
        self.heard.load(Ordering::Relaxed)
    }

    pub(super) fn silence(&self) -> Duration {
        let heard = Duration::from_millis(self.heard());
        let passed = now().saturating_duration_since(self.since);
        passed.saturating_sub(heard)
    }
}
