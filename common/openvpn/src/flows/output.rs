//! The output of the flows: timers, and the order in which flows send.

use std::time::{Duration, Instant};

use super::flow::{QUANTUM, Turn};
use super::slots::Slot;
use super::{Closed, Flows};

/// Shortest delay until a flow that was just polled is polled again.
const PAUSE: Duration = Duration::from_millis(10);

impl Flows {
    /// Passes packets to the link until no packet is left or the link is full. A full link returns false; the
    /// same packet is offered again later.
    pub fn poll_output(&mut self, now: Instant, link: &mut dyn FnMut(&[u8]) -> bool) {
        self.tick(now);
        self.time_wait.expire(now);
        while let Some(index) = self.slots.expired(now) {
            self.wake(index, now);
        }
        self.blocked = !self.outbox.flush(link) || !self.send_replies(link);
        self.paced_until = None;
        if !self.blocked {
            self.send_flows(now, link);
        }
    }

    fn send_replies(&mut self, link: &mut dyn FnMut(&[u8]) -> bool) -> bool {
        while let Some(reply) = self.replies.front() {
            if !link(reply) {
                return false;
            }
            self.outbox.packets += 1;
            self.replies.pop();
        }
        true
    }

    /// Gives each flow with something to send its turn, until all flows are done.
    fn send_flows(&mut self, now: Instant, link: &mut dyn FnMut(&[u8]) -> bool) {
        while let Some(index) = self.slots.ready.front().copied() {
            let mut packets = (QUANTUM / usize::from(self.config.mss.max(536))).max(1);
            if let Some(pacer) = &mut self.pacer {
                packets = packets.min(pacer.packets(usize::from(self.config.tun_mtu), now));
                if packets == 0 {
                    self.paced_until = Some(pacer.ready_at());
                    return;
                }
            }
            self.slots.ready.pop_front();
            if let Some(entry) = self.slots.entry(index) {
                entry.in_ready = false;
            }
            let bytes = self.outbox.bytes;
            let Some(flow) = self.slots.flow(index).filter(|flow| !flow.is_over()) else {
                self.settle(index);
                continue;
            };
            flow.receive_share = self.receiving.of(flow.received_in);
            let turn = flow.transmit(now, packets, &mut self.outbox, link);
            let repeated = std::mem::take(&mut flow.retransmitted);
            self.stats.retransmitted += repeated;
            if let Some(pacer) = &mut self.pacer {
                pacer.spend(self.outbox.bytes - bytes);
                if repeated > 0 {
                    self.recharge(index);
                }
            }
            match turn {
                Turn::Done => {
                    self.schedule(index, now);
                    self.settle(index);
                }
                Turn::More => self.slots.make_ready(index),
                Turn::Full => {
                    self.slots.make_ready(index);
                    self.blocked = true;
                    return;
                }
            }
        }
    }

    /// Returns the time at which `poll_output` must be called again, even without input; `now` or earlier
    /// means at once. A full link sets no timeout, because its owner knows when the link has room.
    pub fn poll_timeout(&self) -> Option<Instant> {
        let work = !self.slots.ready.is_empty() || !self.replies.is_empty();
        let soon = (work && !self.blocked).then(|| self.paced_until.unwrap_or(self.now));
        [soon, self.slots.next_timer()].into_iter().flatten().min()
    }

    /// Handles the timer of a flow.
    fn wake(&mut self, index: u32, now: Instant) {
        let silent_since = self.liveness.now(now).checked_sub(self.user_timeout());
        let connect_timeout = self.config.connect_timeout;
        let Some(entry) = self.slots.entry(index) else {
            return;
        };
        let flow = match &mut entry.slot {
            Slot::Free => return,
            Slot::Pending(pending) => {
                if pending.until <= now && pending.ending.is_none() {
                    pending.ending = Some(Closed::AcceptTimedOut);
                    self.give_up(index);
                }
                return;
            }
            Slot::Open(flow) => flow,
        };
        if flow.connect_by.is_some_and(|until| until <= now) {
            flow.connect_by = None;
            flow.dropped = true;
            flow.ending
                .get_or_insert(Closed::ConnectTimedOut(connect_timeout));
            self.recharge(index);
            self.settle(index);
            return;
        }
        // A flow that is over waits only for its reader.
        if flow.is_over() {
            return;
        }
        if flow.connected
            && flow.ending.is_none()
            && silent_since.is_some_and(|since| flow.last_received <= since)
        {
            flow.ending = Some(Closed::TimedOut(self.config.user_timeout));
            flow.abort();
        }
        self.slots.make_ready(index);
        self.schedule_deadlines(index, now);
    }

    /// Sets the timer of a flow after the flow has sent everything.
    fn schedule(&mut self, index: u32, now: Instant) {
        let Some(flow) = self.slots.flow(index).filter(|flow| !flow.is_over()) else {
            return;
        };
        if let Some(at) = flow.poll_at(now) {
            let at = if at <= now { now + PAUSE } else { at };
            self.slots.arm(index, at);
        }
        self.schedule_deadlines(index, now);
    }

    fn schedule_deadlines(&mut self, index: u32, now: Instant) {
        let user_timeout = self.user_timeout();
        let Some(flow) = self.slots.flow(index) else {
            return;
        };
        let last_received = flow.last_received;
        let until = match flow.connect_by {
            Some(until) => until,
            None => self
                .liveness
                .when(last_received + user_timeout, now)
                .max(now + PAUSE),
        };
        self.slots.arm(index, until);
    }

    /// Returns the effective user timeout. Less than two keepalive intervals would end idle flows.
    fn user_timeout(&self) -> Duration {
        self.config.user_timeout.max(self.config.keepalive * 2)
    }
}
