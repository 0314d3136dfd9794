//! A server's session ids as cookies: whoever echoes one receives at the address that it came from, and
//! until then the server remembers nothing.

use std::net::{IpAddr, SocketAddr};
use std::time::{Duration, Instant};

use aws_lc_rs::hmac;
use rand::RngCore as _;

use crate::packet::SessionId;

/// Slots of time in which a cookie is good beside the current one: a client may take the whole
/// hand-window, which is two slots.
const OLD_SLOTS: u64 = 2;

/// Makes and knows the cookies of one server.
pub(super) struct Cookies {
    key: hmac::Key,
    began: Instant,
    slot: Duration,
}

impl Cookies {
    pub(super) fn new(hand_window: Duration, now: Instant) -> Self {
        let mut secret = [0; 32];
        rand::rng().fill_bytes(&mut secret);
        let slot = (hand_window / 2).max(Duration::from_secs(1));
        Self {
            key: hmac::Key::new(hmac::HMAC_SHA256, &secret),
            began: now,
            slot,
        }
    }

    /// The server's session id for a client that sends `session` from `address`.
    pub(super) fn make(&self, address: SocketAddr, session: SessionId, now: Instant) -> SessionId {
        self.of_slot(address, session, self.slot_at(now))
    }

    /// Whether `echoed` was made for this client a short time ago.
    pub(super) fn check(
        &self,
        address: SocketAddr,
        session: SessionId,
        echoed: SessionId,
        now: Instant,
    ) -> bool {
        let newest = self.slot_at(now);
        let oldest = newest.saturating_sub(OLD_SLOTS);
        // Of 64 bits that are worth nothing after a minute, the time of a comparison gives nothing away.
        (oldest..=newest).any(|slot| self.of_slot(address, session, slot) == echoed)
    }

    fn slot_at(&self, now: Instant) -> u64 {
        now.saturating_duration_since(self.began).as_secs() / self.slot.as_secs().max(1)
    }

    fn of_slot(&self, address: SocketAddr, session: SessionId, slot: u64) -> SessionId {
        let mut mac = hmac::Context::with_key(&self.key);
        mac.update(&slot.to_be_bytes());
        match address.ip() {
            IpAddr::V4(ip) => mac.update(&ip.octets()),
            IpAddr::V6(ip) => mac.update(&ip.octets()),
        }
        mac.update(&address.port().to_be_bytes());
        mac.update(&session.0);
        let tag = mac.sign();
        let id = tag.as_ref().first_chunk().copied().unwrap_or_default();
        // Zeros stand for no session.
        SessionId(if id == [0; 8] { [1; 8] } else { id })
    }
}
