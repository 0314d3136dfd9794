//! The flows by id: open flows, and flows that wait for the owner's answer.
//!
//! Owns the flows, and the queues and timers in which they wait.

use std::collections::{BTreeSet, VecDeque};
use std::time::Instant;

use super::config::{Closed, FlowId};
use super::flow::Flow;
use crate::tuple::Tuple;

/// Event bits of a flow that wait to be reported. The lowest bit is reported first.
pub(crate) mod event {
    pub(crate) const INCOMING: u8 = 1;
    pub(crate) const CONNECTED: u8 = 2;
    pub(crate) const READABLE: u8 = 4;
    pub(crate) const WRITABLE: u8 = 8;
    pub(crate) const DELIVERED: u8 = 16;
    pub(crate) const CLOSED: u8 = 32;
}

/// A SYN that waits for the owner.
pub(crate) struct Pending {
    pub(crate) tuple: Tuple,
    pub(crate) syn: Vec<u8>,
    pub(crate) until: Instant,
    pub(crate) ending: Option<Closed>,
}

#[derive(Default)]
pub(crate) enum Slot {
    #[default]
    Free,
    Pending(Pending),
    Open(Box<Flow>),
}

#[derive(Default)]
pub(crate) struct Entry {
    generation: u32,
    pub(crate) slot: Slot,
    /// Bits of [`event`].
    pub(crate) events: u8,
    /// The flags `in_events`, `in_ready` and `in_waiting` are set while the index is in the queue `events`,
    /// `ready` or `waiting` of [`Slots`]. The index may stay in a queue after the slot was freed or reused.
    pub(crate) in_events: bool,
    pub(crate) in_ready: bool,
    pub(crate) in_waiting: bool,
    armed: Option<Instant>,
    /// Bytes in flight, charged to the shared limit.
    pub(crate) charge: usize,
}

#[derive(Default)]
pub(crate) struct Slots {
    entries: Vec<Entry>,
    free: Vec<u32>,
    timers: BTreeSet<(Instant, u32)>,
    pub(crate) ready: VecDeque<u32>,
    pub(crate) events: VecDeque<u32>,
    /// Flows that want to send more than the shared limit allows.
    pub(crate) waiting: VecDeque<u32>,
}

impl Slots {
    pub(crate) fn len(&self) -> usize {
        self.entries.len() - self.free.len()
    }

    pub(crate) fn insert(&mut self, slot: Slot) -> FlowId {
        let index = self.free.pop().unwrap_or_else(|| {
            self.entries.push(Entry::default());
            u32::try_from(self.entries.len() - 1).unwrap_or(u32::MAX)
        });
        let mut generation = 0;
        if let Some(entry) = self.entry(index) {
            entry.slot = slot;
            generation = entry.generation;
        }
        FlowId { index, generation }
    }

    /// Empties a slot. Its id becomes invalid forever.
    pub(crate) fn remove(&mut self, index: u32) -> Slot {
        self.disarm(index);
        let Some(entry) = self.entry(index) else {
            return Slot::Free;
        };
        if matches!(entry.slot, Slot::Free) {
            return Slot::Free;
        }
        entry.generation = entry.generation.wrapping_add(1);
        entry.events = 0;
        let slot = std::mem::take(&mut entry.slot);
        self.free.push(index);
        slot
    }

    pub(crate) fn entry(&mut self, index: u32) -> Option<&mut Entry> {
        self.entries.get_mut(usize::try_from(index).ok()?)
    }

    pub(crate) fn get(&mut self, id: FlowId) -> Option<&mut Entry> {
        self.entry(id.index)
            .filter(|entry| entry.generation == id.generation && !matches!(entry.slot, Slot::Free))
    }

    pub(crate) fn flow(&mut self, index: u32) -> Option<&mut Flow> {
        match &mut self.entry(index)?.slot {
            Slot::Open(flow) => Some(flow),
            _ => None,
        }
    }

    pub(crate) fn id(&mut self, index: u32) -> FlowId {
        let generation = self.entry(index).map_or(0, |entry| entry.generation);
        FlowId { index, generation }
    }

    /// Queues a flow that may have something to send.
    pub(crate) fn make_ready(&mut self, index: u32) {
        if let Some(entry) = self.entry(index)
            && !std::mem::replace(&mut entry.in_ready, true)
        {
            self.ready.push_back(index);
        }
    }

    pub(crate) fn report(&mut self, index: u32, events: u8) {
        let Some(entry) = self.entry(index) else {
            return;
        };
        entry.events |= events;
        if !std::mem::replace(&mut entry.in_events, true) {
            self.events.push_back(index);
        }
    }

    pub(crate) fn wait(&mut self, index: u32) {
        if let Some(entry) = self.entry(index)
            && !std::mem::replace(&mut entry.in_waiting, true)
        {
            self.waiting.push_back(index);
        }
    }

    /// Sets the timer of a flow to `at`, or leaves an earlier timer. A flow that wakes too early sleeps
    /// again, which costs less than moving the timer with each packet.
    pub(crate) fn arm(&mut self, index: u32, at: Instant) {
        let Some(entry) = self.entry(index) else {
            return;
        };
        match entry.armed {
            Some(armed) if armed <= at => {}
            armed => {
                entry.armed = Some(at);
                if let Some(armed) = armed {
                    self.timers.remove(&(armed, index));
                }
                self.timers.insert((at, index));
            }
        }
    }

    fn disarm(&mut self, index: u32) {
        if let Some(armed) = self.entry(index).and_then(|entry| entry.armed.take()) {
            self.timers.remove(&(armed, index));
        }
    }

    pub(crate) fn next_timer(&self) -> Option<Instant> {
        self.timers.first().map(|(at, _)| *at)
    }

    /// Removes the timer of a flow whose time has come, and returns the flow's index.
    pub(crate) fn expired(&mut self, now: Instant) -> Option<u32> {
        if self.next_timer()? > now {
            return None;
        }
        let (_, index) = self.timers.pop_first()?;
        if let Some(entry) = self.entry(index) {
            entry.armed = None;
        }
        Some(index)
    }
}
