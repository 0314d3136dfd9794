//! Which packet ids have been received, so that none is taken twice.

#[cfg(test)]
mod tests;

use std::time::{Duration, Instant};

const WORD_BITS: u32 = u64::BITS;
const WORDS: u32 = 32;

/// How far behind the newest id one is still taken. Stock's default is 64, which drops what
/// arrives late on fast links; a bit per id costs next to nothing.
pub const WINDOW: u32 = (WORDS - 1) * WORD_BITS;

/// How long after a newer packet a missing one is still taken, at least; at most it is twice as
/// long. Stock's default.
pub const MAX_AGE: Duration = Duration::from_secs(15);

/// Why a packet id is not taken.
#[derive(Debug, Clone, Copy, PartialEq, Eq, thiserror::Error)]
pub enum ReplayError {
    /// 0 is never sent.
    #[error("packet id is zero")]
    Zero,
    /// It was received before.
    #[error("packet id {0} was received before")]
    Repeated(u32),
    /// Too far behind the newest id, or too long after newer ones.
    #[error("packet id {0} is too old")]
    TooOld(u32),
    /// The time of a long packet id is before that of an earlier one.
    #[error("packet time {0} goes backwards")]
    TimeBackwards(u32),
}

/// The ids of one key and direction: a ring of bits behind the newest.
///
/// Ask with [`check`](Self::check) before a packet is authenticated, and [`record`](Self::record) it
/// only afterwards: what anyone may have sent must not move the window.
#[derive(Debug, Clone, Default)]
pub struct ReplayWindow {
    newest: u32,
    seen: [u64; WORDS as usize],
    /// Ids up to this one are too old by time.
    expired: u32,
    /// The newest id at some moment, less than twice `MAX_AGE` ago while packets arrive.
    mark: Option<(u32, Instant)>,
}

impl ReplayWindow {
    /// A window in which everything is new.
    pub fn new() -> Self {
        Self::default()
    }

    /// Whether `id` may be taken.
    pub fn check(&self, id: u32) -> Result<(), ReplayError> {
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

    /// Notes that `id`, which [`check`](Self::check) allowed, was received by `now`.
    pub fn record(&mut self, id: u32, now: Instant) {
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

/// A packet id in long form, as control packets carry it inside of their wraps: a count, and the
/// sender's time in seconds, so that a sender that starts anew is not taken for a replay.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct LongId {
    /// Counts from 1 while the time stays.
    pub id: u32,
    /// Unix time in seconds; may stay what it was when the session began.
    pub time: u32,
}

impl LongId {
    /// Its length on the wire.
    pub const LEN: usize = 8;

    /// Reads it.
    pub fn from_bytes(bytes: [u8; Self::LEN]) -> Self {
        let value = u64::from_be_bytes(bytes);
        Self {
            id: (value >> 32) as u32,
            time: value as u32,
        }
    }

    /// As it is on the wire.
    pub fn to_bytes(self) -> [u8; Self::LEN] {
        (u64::from(self.id) << 32 | u64::from(self.time)).to_be_bytes()
    }
}

/// The long ids of one direction of a session. A later time starts an empty window.
#[derive(Debug, Clone, Default)]
pub struct LongReplayWindow {
    time: u32,
    window: ReplayWindow,
}

impl LongReplayWindow {
    /// Whether `id` may be taken.
    pub fn check(&self, id: LongId) -> Result<(), ReplayError> {
        match id.time.cmp(&self.time) {
            std::cmp::Ordering::Less => Err(ReplayError::TimeBackwards(id.time)),
            std::cmp::Ordering::Equal => self.window.check(id.id),
            std::cmp::Ordering::Greater if id.id == 0 => Err(ReplayError::Zero),
            std::cmp::Ordering::Greater => Ok(()),
        }
    }

    /// Notes that `id`, which [`check`](Self::check) allowed, was received by `now`.
    pub fn record(&mut self, id: LongId, now: Instant) {
        if id.time > self.time {
            *self = Self {
                time: id.time,
                window: ReplayWindow::new(),
            };
        }
        self.window.record(id.id, now);
    }
}
