//! What other tasks and threads ask of the task that owns a peer.
//!
//! Owns what waits for that task, each kind with a bound, and wakes it. Locked once for a chunk or
//! a dial, never for a packet of a flow.

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

use super::pipe::Pipe;
use super::{Moment, now};

/// Dials that wait for the owner.
const MAX_DIALS: usize = 4096;

/// Bytes of forwarded packets that wait for room in the link: as many as a fast sender gets out
/// between two turns of the owner. Longer only makes the delay longer.
const MAX_FORWARDED: usize = 256 << 10;

/// What is asked once.
pub(super) enum Order {
    /// Connects a flow for the pipe.
    Dial(SocketAddrV4, Arc<Pipe>),
    /// Takes an incoming flow.
    Accept(FlowId, Arc<Pipe>),
    /// Refuses an incoming flow.
    Refuse(FlowId, Refusal),
    /// Ends the session.
    Close,
}

/// What waits for the owner.
#[derive(Default)]
pub(super) struct Mail {
    /// In the order in which they were given.
    pub(super) orders: Vec<Order>,
    /// Pipes whose handles did something; each is in here once.
    pub(super) pipes: Vec<Arc<Pipe>>,
    /// Packets of other peers.
    pub(super) packets: VecDeque<Vec<u8>>,
    packet_bytes: usize,
    dials: usize,
    /// Nobody will look any more.
    closed: bool,
}

/// One peer's mailbox.
pub(super) struct Mailbox {
    mail: Mutex<Mail>,
    any: AtomicBool,
    waker: AtomicWaker,
    /// Flows that are open or being opened.
    pub(super) flows: AtomicUsize,
    /// When the peer was heard, in milliseconds since `since`.
    heard: AtomicU64,
    since: Moment,
}

impl Mailbox {
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

    /// Gives an order; false if nobody will carry it out.
    pub(super) fn order(&self, order: Order) -> bool {
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

    /// A pipe's handle did something.
    pub(super) fn ring(&self, pipe: Arc<Pipe>) {
        self.put(|mail| {
            mail.pipes.push(pipe);
            true
        });
    }

    /// Queues a packet to be sent to the peer; false if it was dropped.
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

    fn put(&self, put: impl FnOnce(&mut Mail) -> bool) -> bool {
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

    /// Everything that waits. The packets are added to those that the owner still has, which count
    /// as waiting until they are [`sent`](Self::sent).
    pub(super) fn take(&self, packets: &mut VecDeque<Vec<u8>>) -> Option<Mail> {
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

    /// Forwarded packets of so many bytes are in the link.
    pub(super) fn sent(&self, bytes: usize) {
        if bytes > 0 {
            self.mail.lock().packet_bytes -= bytes;
        }
    }

    /// Ready once something waits.
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

    /// Takes nothing any more, and gives what nobody will carry out.
    pub(super) fn close(&self) -> Mail {
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

    pub(super) fn silence(&self) -> Duration {
        let heard = Duration::from_millis(self.heard.load(Ordering::Relaxed));
        let passed = now().saturating_duration_since(self.since);
        passed.saturating_sub(heard)
    }
}
