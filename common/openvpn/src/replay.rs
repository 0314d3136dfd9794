//! Replay protection: records received packet ids, so that no packet is accepted twice.

#[cfg(test)]
mod tests;

use std::time::{Duration, Instant};

const WORD_BITS: u32 = u64::BITS;
const WORDS: u32 = 32;

/// Number of ids in the window, up to the newest id. Stock's default is 64, which drops late packets on fast
/// links; one bit per id costs next to nothing.
pub(crate) const WINDOW: u32 = (WORDS - 1) * WORD_BITS;

/// Shortest time for which a missing packet is accepted after a newer packet; the longest time is twice as
/// long. Stock's default.
pub(crate) const MAX_AGE: Duration = Duration::from_secs(15);

/// Reason why a packet id is rejected.
#[derive(Debug, Clone, Copy, PartialEq, Eq, thiserror::Error)]
pub enum ReplayError {
    /// The id is 0, which is never sent.
    #[error("packet id is zero")]
    Zero,
    /// The id was received before.
    #[error("packet id {0} was received before")]
    Repeated(u32),
    /// The id is too far behind the newest id, or arrived too long after newer ids.
    #[error("packet id {0} is too old")]
    TooOld(u32),
    /// The time of a long packet id is earlier than the time of a previous id.
    #[error("packet time {0} goes backwards")]
    TimeBackwards(u32),
}

/// Received ids of one key and direction: a ring of bits that ends at the newest id.
///
/// Call [`check`](Self::check) before a packet is authenticated, and [`record`](Self::record) only
/// afterwards: a forged packet must not move the window.
#[derive(Debug, Clone, Default)]
pub(crate) struct ReplayWindow {
    newest: u32,
    seen: [u64; WORDS as usize],
    /// Largest id that is too old by time.
    expired: u32,
    /// Newest id at an earlier time. The first packet after `MAX_AGE` moves the id to `expired` and sets a
    /// new mark.
    mark: Option<(u32, Instant)>,
}

impl ReplayWindow {
    /// Returns an error if a packet with this id must be rejected.
    pub(crate) fn check(&self, id: u32) -> Result<(), ReplayError> {
        if id == 0 {
            return Err(ReplayError::Zero);
        }
        if id > self.newest {
            return Ok(());
        }
        if self.newest - id >= WINDOW || id <= self.expired {
            return Err(ReplayError::TooOld(id));
        }
        match self.seen.get(word(id)) {
            Some(word) if word & bit(id) == 0 => Ok(()),
            _ => Err(ReplayError::Repeated(id)),
        }
    }

    /// Records that `id`, which [`check`](Self::check) allowed, was received at `now`.
    pub(crate) fn record(&mut self, id: u32, now: Instant) {
        if id > self.newest {
            let steps = (id / WORD_BITS - self.newest / WORD_BITS).min(WORDS);
            for step in 0..steps {
                if let Some(word) = self.seen.get_mut(word(id - step * WORD_BITS)) {
                    *word = 0;
                }
            }
            self.newest = id;
        }
        if let Some(word) = self.seen.get_mut(word(id)) {
            *word |= bit(id);
        }
        match self.mark {
            Some((marked, at)) if now.saturating_duration_since(at) >= MAX_AGE => {
                self.expired = marked;
                self.mark = Some((self.newest, now));
            }
            Some(_) => {}
            None => self.mark = Some((self.newest, now)),
        }
    }
}

fn word(id: u32) -> usize {
    (id / WORD_BITS % WORDS) as usize
}

fn bit(id: u32) -> u64 {
    1 << (id % WORD_BITS)
}

/// Long packet id of control packets inside their wraps: a counter, and the sender's time in seconds. After a
/// restart the sender's time is later, so its packets do not count as replays.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct LongId {
    /// Counter; starts at 1 for each value of `time`.
    pub(crate) id: u32,
    /// Unix time in seconds; may remain the start time of the session.
    pub(crate) time: u32,
}

impl LongId {
    pub(crate) const LEN: usize = 8;

    pub(crate) fn from_bytes(bytes: [u8; Self::LEN]) -> Self {
        let value = u64::from_be_bytes(bytes);
        Self {
            id: (value >> 32) as u32,
            time: value as u32,
        }
    }

    pub(crate) fn to_bytes(self) -> [u8; Self::LEN] {
        (u64::from(self.id) << 32 | u64::from(self.time)).to_be_bytes()
    }
}

/// Replay window for the long ids of one direction of a session. A later time starts an empty window.
#[derive(Debug, Clone, Default)]
pub(crate) struct LongReplayWindow {
    time: u32,
    window: ReplayWindow,
}

impl LongReplayWindow {
    /// Returns an error if a packet with this id must be rejected.
    pub(crate) fn check(&self, id: LongId) -> Result<(), ReplayError> {
        match id.time.cmp(&self.time) {
            std::cmp::Ordering::Less => Err(ReplayError::TimeBackwards(id.time)),
            std::cmp::Ordering::Equal => self.window.check(id.id),
            std::cmp::Ordering::Greater if id.id == 0 => Err(ReplayError::Zero),
            std::cmp::Ordering::Greater => Ok(()),
        }
    }

    /// Records that `id`, which [`check`](Self::check) allowed, was received at `now`.
    pub(crate) fn record(&mut self, id: LongId, now: Instant) {
        if id.time > self.time {
            *self = Self {
                time: id.time,
                window: ReplayWindow::default(),
            };
        }
        self.window.record(id.id, now);
    }
}
