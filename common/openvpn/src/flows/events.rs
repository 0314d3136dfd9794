//! Events for the owner, and the end of flows.

use super::slots::{Slot, event};
use super::time_wait::Last;
use super::{Closed, Event, Flows};

impl Flows {
    /// Returns the next event for the owner.
    pub fn poll_event(&mut self) -> Option<Event> {
        loop {
            let index = self.slots.events.pop_front()?;
            let id = self.slots.id(index);
            let entry = self.slots.entry(index)?;
            entry.in_events = false;
            let event = entry.events & entry.events.wrapping_neg();
            entry.events &= !event;
            if entry.events != 0 {
                self.slots.report(index, 0);
            }
            let Some(entry) = self.slots.get(id) else {
                continue;
            };
            let (tuple, ending) = match &entry.slot {
                Slot::Free => continue,
                Slot::Pending(pending) => (pending.tuple, pending.ending),
                Slot::Open(flow) => (flow.tuple, flow.ending),
            };
            return Some(match event {
                event::INCOMING => Event::Incoming {
                    id,
                    source: tuple.remote,
                    destination: tuple.local,
                },
                event::CONNECTED => Event::Connected(id),
                event::READABLE => Event::Readable(id),
                event::WRITABLE => Event::Writable(id),
                event::DELIVERED => Event::Delivered(id),
                event::CLOSED => {
                    self.remove(index);
                    Event::Closed(id, ending.unwrap_or(Closed::Finished))
                }
                _ => continue,
            });
        }
    }

    /// Updates the sum of the bytes in flight.
    pub(super) fn recharge(&mut self, index: u32) {
        if self.pacer.is_none() {
            return;
        }
        let Some(entry) = self.slots.entry(index) else {
            return;
        };
        let charge = match &entry.slot {
            Slot::Open(flow) if !flow.is_over() => flow.charge(),
            _ => 0,
        };
        let before = std::mem::replace(&mut entry.charge, charge);
        self.charged = self.charged + charge - before;
    }

    /// Reports state changes of a flow to the owner. Removes an aborted flow that is over.
    pub(super) fn settle(&mut self, index: u32) {
        let Some(flow) = self.slots.flow(index) else {
            return;
        };
        let over = flow.is_over();
        if flow.abandoned {
            if over {
                self.remove(index);
            }
            return;
        }
        let mut events = 0;
        if flow.becomes_connected() {
            events |= event::CONNECTED;
            if flow.wants_room {
                flow.wants_room = false;
                events |= event::WRITABLE;
            }
        }
        if !flow.readable_reported && flow.is_readable() {
            flow.readable_reported = true;
            events |= event::READABLE;
        }
        if flow.wants_delivery && flow.is_delivered() {
            flow.wants_delivery = false;
            events |= event::DELIVERED;
        }
        if flow.wants_room && flow.connected && flow.send_room() >= flow.room_to_report() {
            // Under a shared limit, flows wait in turn for room, but a flow with nothing in flight gets room
            // at once.
            if self.pacer.is_none() || flow.charge() == 0 {
                flow.wants_room = false;
                events |= event::WRITABLE;
            } else {
                self.slots.wait(index);
            }
        }
        if over && !self.slots.flow(index).is_some_and(|flow| flow.unread()) {
            events |= event::CLOSED;
        }
        if events != 0 {
            self.slots.report(index, events);
        }
    }

    /// Reports room below the shared limit to the flows that wait for it.
    pub(super) fn wake_waiting(&mut self) {
        let Some(pacer) = &self.pacer else {
            return;
        };
        let mss = usize::from(self.config.mss);
        let mut room = pacer.room(self.charged);
        while room >= 2 * mss
            && let Some(index) = self.slots.waiting.pop_front()
        {
            if let Some(entry) = self.slots.entry(index) {
                entry.in_waiting = false;
            }
            if let Some(flow) = self.slots.flow(index)
                && flow.wants_room
                && flow.connected
                && flow.send_room() > 0
            {
                flow.wants_room = false;
                room = room.saturating_sub(flow.room_to_report());
                self.slots.report(index, event::WRITABLE);
            }
        }
    }

    /// Removes a flow. Its tuple stays reserved for a while.
    pub(super) fn remove(&mut self, index: u32) {
        let charge = self
            .slots
            .entry(index)
            .map_or(0, |entry| std::mem::take(&mut entry.charge));
        self.charged -= charge;
        let tuple = match self.slots.remove(index) {
            Slot::Free => return,
            Slot::Pending(pending) => {
                self.pending -= 1;
                pending.tuple
            }
            Slot::Open(flow) => {
                self.buffers -= flow.buffers;
                let finished = flow.ending.is_none() && !flow.abandoned;
                let last = finished.then(|| Last {
                    sequence: flow.track.sent(),
                    expected: flow.track.expected(),
                });
                if flow.track.syn_sent() {
                    self.time_wait.add(flow.tuple.into(), last, self.now);
                }
                flow.tuple
            }
        };
        self.table.remove(&tuple.into());
        self.last.1 = u32::MAX;
        self.wake_waiting();
    }
}
