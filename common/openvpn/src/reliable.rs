//! The reliability layer of the control channel: numbered messages that are kept until they are
//! acknowledged, put in order again, and the acknowledgements that are still owed.
//!
//! One [`Reliable`] belongs to one key negotiation: ids start at 0 with its RESET in either
//! direction. OpenVPN over TCP uses the very same layer, just without loss.

use std::collections::VecDeque;
use std::time::{Duration, Instant};

use crate::packet::{Acks, MAX_ACKS};

#[cfg(test)]
mod tests;

/// Messages that may be unacknowledged at once. Peers up to 2.5 buffer 8, but only 4 send slots are
/// common to all versions.
pub const SEND_WINDOW: usize = 4;

/// Messages that are accepted ahead of the next one in order, itself included: as many as 2.6 keeps,
/// whose send window is 6.
pub const RECEIVE_WINDOW: usize = 12;

/// Acknowledgements that ride on a packet with a payload. SoftEther takes no more than these.
pub const MAX_PIGGYBACK: usize = 4;

/// Acknowledgements that are remembered while the owner does not ask for output: a full receive
/// window and as many duplicates.
const MAX_PENDING_ACKS: usize = 2 * RECEIVE_WINDOW;

/// A message that was overtaken by this many acknowledged ones is sent again at once.
const EARLY_RESEND_AFTER: u8 = 3;

/// The longest pause between two attempts. The doubling would reach it only after five of them.
const MAX_RETRY: Duration = Duration::from_secs(60);

/// A message that waits for its acknowledgement.
#[derive(Debug)]
struct Outstanding<K> {
    id: u32,
    kind: K,
    payload: Vec<u8>,
    /// When it is to be sent; the first time at once.
    due: Instant,
    /// The pause after the next attempt.
    retry: Duration,
    /// Messages sent after this one that were acknowledged before it.
    overtaken: u8,
}

/// A message to put on the wire now.
#[derive(Debug, PartialEq, Eq)]
pub struct Transmit<'a, K> {
    /// Its number.
    pub id: u32,
    /// What was given to [`Reliable::push`].
    pub kind: K,
    /// Its bytes.
    pub payload: &'a [u8],
}

/// What became of a numbered message from the peer.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Received {
    /// New, and kept until all before it are there.
    New,
    /// Seen before: only acknowledged once more, since the first acknowledgement may be lost.
    Duplicate,
    /// Too far ahead, or more than can be acknowledged: dropped, the peer sends it again.
    Refused,
}

/// Both directions of one negotiation's control channel. `K` is what tells a RESET from a CONTROL.
#[derive(Debug)]
pub struct Reliable<K> {
    next_send: u32,
    sent: VecDeque<Outstanding<K>>,
    first_retry: Duration,
    next_receive: u32,
    received: VecDeque<Option<(K, Vec<u8>)>>,
    acks: VecDeque<u32>,
    /// Acknowledgements that were sent last, to be repeated where there is room (as 2.6 does): one that
    /// is lost would cost the peer a retransmission, and us a packet that is not understood without it.
    acked: VecDeque<u32>,
}

impl<K: Copy> Reliable<K> {
    /// Both directions start at id 0. `first_retry` is the pause before the first retransmission
    /// (`tls-timeout`, 2 s); it doubles each time.
    pub fn new(first_retry: Duration) -> Self {
        Self::after_reset(first_retry, 0)
    }

    /// Both directions start at `id`: 1 where the RESETs were exchanged without state.
    pub fn after_reset(first_retry: Duration, id: u32) -> Self {
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

    /// Messages that may be pushed now. The window is counted from the oldest unacknowledged one.
    pub fn window(&self) -> usize {
        let used = self
            .sent
            .front()
            .map_or(0, |oldest| self.next_send.wrapping_sub(oldest.id) as usize);
        SEND_WINDOW.saturating_sub(used)
    }

    /// Numbers a message and has it sent; false if the window is full.
    pub fn push(&mut self, kind: K, payload: Vec<u8>, now: Instant) -> bool {
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

    /// Whether everything that was pushed has been acknowledged.
    pub fn is_acknowledged(&self) -> bool {
        self.sent.is_empty()
    }

    /// The peer has the message `id`. Ids that are not outstanding are normal: 2.6 and later repeat
    /// acknowledgements.
    pub fn acknowledged(&mut self, id: u32) {
        let Some(at) = self.sent.iter().position(|message| message.id == id) else {
            return;
        };
        self.sent.remove(at);
        for earlier in self.sent.iter_mut().take(at) {
            earlier.overtaken = earlier.overtaken.saturating_add(1);
        }
    }

    /// A numbered message arrived.
    pub fn receive(&mut self, id: u32, kind: K, payload: &[u8]) -> Received {
        let ahead = id.wrapping_sub(self.next_receive);
        if ahead > u32::MAX / 2 {
            self.owe(id);
            return Received::Duplicate;
        }
        let ahead = ahead as usize;
        if ahead >= RECEIVE_WINDOW {
            return Received::Refused;
        }
        while self.received.len() <= ahead {
            self.received.push_back(None);
        }
        if self.received.get(ahead).is_some_and(Option::is_some) {
            self.owe(id);
            return Received::Duplicate;
        }
        if !self.owe(id) {
            return Received::Refused;
        }
        if let Some(slot) = self.received.get_mut(ahead) {
            *slot = Some((kind, payload.to_vec()));
        }
        Received::New
    }

    /// The next message in order, if it is there.
    pub fn deliver(&mut self) -> Option<(K, Vec<u8>)> {
        self.received.front()?.as_ref()?;
        self.next_receive = self.next_receive.wrapping_add(1);
        self.received.pop_front().flatten()
    }

    /// Notes an acknowledgement to be sent. False if too many wait already.
    fn owe(&mut self, id: u32) -> bool {
        if self.acks.contains(&id) {
            return true;
        }
        if self.acks.len() >= MAX_PENDING_ACKS {
            return false;
        }
        self.acks.push_back(id);
        true
    }

    /// Whether acknowledgements wait to be sent.
    pub fn owes_acks(&self) -> bool {
        !self.acks.is_empty()
    }

    /// Takes up to `most` acknowledgements, oldest first; earlier ones are repeated up to
    /// [`MAX_PIGGYBACK`].
    pub fn take_acks(&mut self, most: usize) -> Acks {
        let mut acks = Acks::new();
        let count = most.min(self.acks.len());
        for id in self.acks.drain(..count) {
            acks.push(id);
            self.acked.retain(|earlier| *earlier != id);
            self.acked.push_front(id);
        }
        self.acked.truncate(MAX_ACKS);
        let room = MAX_PIGGYBACK.min(most).saturating_sub(count);
        for id in self.acked.iter().skip(count).take(room) {
            acks.push(*id);
        }
        acks
    }

    /// Forgets the acknowledgements that are owed.
    pub fn discard_acks(&mut self) {
        self.acks.clear();
    }

    /// The oldest message whose time has come. It is taken as sent.
    pub fn transmit(&mut self, now: Instant) -> Option<Transmit<'_, K>> {
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

    /// When [`Reliable::transmit`] has something next; an instant in the past if it has now.
    pub fn timeout(&self) -> Option<Instant> {
        self.sent
            .iter()
            .map(|message| {
                if message.overtaken >= EARLY_RESEND_AFTER {
                    // Due whenever asked: what the peer acknowledged since then overtook it.
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
