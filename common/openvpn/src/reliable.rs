//! The reliability layer of the control channel: keeps numbered messages until the peer acknowledges them,
//! restores the order of received messages, and queues acknowledgements.
//!
//! One [`Reliable`] belongs to one key negotiation: in both directions the RESET has id 0. OpenVPN over TCP
//! uses the same layer, but without loss.

use std::collections::VecDeque;
use std::time::{Duration, Instant};

use crate::packet::MAX_ACKS;

#[cfg(test)]
mod tests;

/// Most messages that may be unacknowledged at once. Peers up to 2.5 buffer 8 messages, but only 4 send slots
/// are common to all versions.
pub(crate) const SEND_WINDOW: usize = 4;

/// Size of the receive window in messages, including the next message in order. Stock 2.6 keeps as many
/// messages, and has a send window of 6.
pub(crate) const RECEIVE_WINDOW: usize = 12;

/// Largest message that is stored until earlier messages arrive, in bytes. Stock peers send at most 1,250 bytes
/// per message (`tls-mtu`). Without the limit, a peer without a certificate could fill the window with datagrams
/// of 64 KiB. A larger message is accepted in order only.
const MAX_STORED_BYTES: usize = 2048;

/// Most acknowledgements in a packet with a payload. SoftEther accepts no more.
pub(crate) const MAX_PIGGYBACK: usize = 4;

/// Most acknowledgements that are queued until the owner polls for output: a full receive window and as many
/// duplicates.
const MAX_PENDING_ACKS: usize = 2 * RECEIVE_WINDOW;

/// Number of acknowledged later messages after which an unacknowledged message is sent again at once.
const EARLY_RESEND_AFTER: u8 = 3;

/// Longest pause between two attempts. Doubling from 2 s reaches this limit only after five attempts.
const MAX_RETRY: Duration = Duration::from_secs(60);

/// Message that waits for its acknowledgement.
#[derive(Debug)]
struct Outstanding<K> {
    id: u32,
    kind: K,
    payload: Vec<u8>,
    /// Time of the next attempt. The first attempt is due at once.
    due: Instant,
    /// Pause after the next attempt.
    retry: Duration,
    /// Number of later messages acknowledged since the last attempt.
    overtaken: u8,
}

/// Message to be sent now.
#[derive(Debug, PartialEq, Eq)]
pub(crate) struct Transmit<'a, K> {
    pub(crate) id: u32,
    /// Kind passed to [`Reliable::push`].
    pub(crate) kind: K,
    /// Payload passed to [`Reliable::push`].
    pub(crate) payload: &'a [u8],
}

/// Outcome of a numbered message from the peer.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Received {
    /// New message, kept until all earlier messages have arrived.
    New,
    /// Repeated message, only acknowledged again, because the first acknowledgement may be lost.
    Duplicate,
    /// Message beyond the receive window, or with a full queue of acknowledgements. The message is dropped,
    /// and the peer sends it again.
    Refused,
}

/// Both directions of one negotiation's control channel. `K` distinguishes a RESET from a CONTROL message.
#[derive(Debug)]
pub(crate) struct Reliable<K> {
    next_send: u32,
    sent: VecDeque<Outstanding<K>>,
    first_retry: Duration,
    next_receive: u32,
    received: VecDeque<Option<(K, Vec<u8>)>>,
    acks: VecDeque<u32>,
    /// Acknowledgements that were sent last, repeated in packets with room, as in 2.6. A lost acknowledgement
    /// costs the peer a retransmission, and may make a packet of this side useless to the peer.
    acked: VecDeque<u32>,
}

impl<K: Copy> Reliable<K> {
    /// Creates a state in which both directions start at id 0. `first_retry` is the pause before the first
    /// retransmission (`tls-timeout`, 2 s); the pause doubles with each attempt.
    pub(crate) fn new(first_retry: Duration) -> Self {
        Self::after_reset(first_retry, 0)
    }

    /// Creates a state in which both directions start at `id`: 1 after a stateless exchange of the RESETs.
    pub(crate) fn after_reset(first_retry: Duration, id: u32) -> Self {
        Self {
            next_send: id,
            sent: VecDeque::new(),
            first_retry,
            next_receive: id,
            received: VecDeque::new(),
            acks: VecDeque::new(),
            acked: VecDeque::new(),
        }
    }

    /// Returns the number of messages that may be pushed now. The window starts at the oldest unacknowledged
    /// message.
    pub(crate) fn window(&self) -> usize {
        let used = self
            .sent
            .front()
            .map_or(0, |oldest| self.next_send.wrapping_sub(oldest.id) as usize);
        SEND_WINDOW.saturating_sub(used)
    }

    /// Numbers a message and queues it for sending. Returns false if the window is full.
    pub(crate) fn push(&mut self, kind: K, payload: Vec<u8>, now: Instant) -> bool {
        if self.window() == 0 {
            return false;
        }
        let id = self.next_send;
        self.next_send = self.next_send.wrapping_add(1);
        self.sent.push_back(Outstanding {
            id,
            kind,
            payload,
            due: now,
            retry: self.first_retry,
            overtaken: 0,
        });
        true
    }

    pub(crate) fn is_acknowledged(&self) -> bool {
        self.sent.is_empty()
    }

    /// Processes an acknowledgement of message `id`. An id that is not outstanding is normal, because peers
    /// from 2.6 on repeat acknowledgements.
    pub(crate) fn acknowledged(&mut self, id: u32) {
        let Some(at) = self.sent.iter().position(|message| message.id == id) else {
            return;
        };
        self.sent.remove(at);
        for earlier in self.sent.iter_mut().take(at) {
            earlier.overtaken = earlier.overtaken.saturating_add(1);
        }
    }

    /// Processes a numbered message from the peer.
    pub(crate) fn receive(&mut self, id: u32, kind: K, payload: &[u8]) -> Received {
        let ahead = id.wrapping_sub(self.next_receive);
        if ahead > u32::MAX / 2 {
            self.queue_ack(id);
            return Received::Duplicate;
        }
        let ahead = ahead as usize;
        if ahead >= RECEIVE_WINDOW || (ahead > 0 && payload.len() > MAX_STORED_BYTES) {
            return Received::Refused;
        }
        while self.received.len() <= ahead {
            self.received.push_back(None);
        }
        if self.received.get(ahead).is_some_and(Option::is_some) {
            self.queue_ack(id);
            return Received::Duplicate;
        }
        if !self.queue_ack(id) {
            return Received::Refused;
        }
        if let Some(slot) = self.received.get_mut(ahead) {
            *slot = Some((kind, payload.to_vec()));
        }
        Received::New
    }

    /// Returns the next message in order, if it has arrived.
    pub(crate) fn deliver(&mut self) -> Option<(K, Vec<u8>)> {
        self.received.front()?.as_ref()?;
        self.next_receive = self.next_receive.wrapping_add(1);
        self.received.pop_front().flatten()
    }

    /// Queues an acknowledgement. Returns false if the queue is full.
    fn queue_ack(&mut self, id: u32) -> bool {
        if self.acks.contains(&id) {
            return true;
        }
        if self.acks.len() >= MAX_PENDING_ACKS {
            return false;
        }
        self.acks.push_back(id);
        true
    }

    pub(crate) fn has_pending_acks(&self) -> bool {
        !self.acks.is_empty()
    }

    /// Removes and returns up to `most` acknowledgements, oldest first. Acknowledgements sent before are
    /// repeated while the result has less than [`MAX_PIGGYBACK`] ids.
    pub(crate) fn take_acks(&mut self, most: usize) -> Vec<u32> {
        let mut acks = Vec::new();
        let count = most.min(self.acks.len());
        for id in self.acks.drain(..count) {
            acks.push(id);
            self.acked.retain(|earlier| *earlier != id);
            self.acked.push_front(id);
        }
        self.acked.truncate(MAX_ACKS);
        let room = MAX_PIGGYBACK.min(most).saturating_sub(count);
        acks.extend(self.acked.iter().skip(count).take(room));
        acks
    }

    pub(crate) fn discard_acks(&mut self) {
        self.acks.clear();
    }

    /// Returns the oldest due message and counts the message as sent.
    pub(crate) fn transmit(&mut self, now: Instant) -> Option<Transmit<'_, K>> {
        let message = self
            .sent
            .iter_mut()
            .find(|message| message.due <= now || message.overtaken >= EARLY_RESEND_AFTER)?;
        message.overtaken = 0;
        message.due = now + message.retry;
        message.retry = (message.retry * 2).min(MAX_RETRY);
        Some(Transmit {
            id: message.id,
            kind: message.kind,
            payload: &message.payload,
        })
    }

    /// Returns the time at which [`Reliable::transmit`] has a message; a time in the past if a message is due
    /// already.
    pub(crate) fn timeout(&self) -> Option<Instant> {
        self.sent
            .iter()
            .map(|message| {
                if message.overtaken >= EARLY_RESEND_AFTER {
                    // The message is due at once: return a time that is not in the future.
                    message
                        .due
                        .checked_sub(message.retry)
                        .unwrap_or(message.due)
                } else {
                    message.due
                }
            })
            .min()
    }
}
