//! Session ids of the server as cookies. A client that echoes a cookie has proven that it receives at its
//! source address. Until then the server keeps no state.

use std::net::{IpAddr, SocketAddr};
use std::time::{Duration, Instant};

use aws_lc_rs::hmac;
use rand::RngCore as _;

use crate::packet::SessionId;

/// Number of past time slots with valid cookies. A client may need the whole hand-window, which is two slots.
const OLD_SLOTS: u64 = 2;

/// Creates and checks the cookies of one server.
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

    /// Returns the server's session id for a client with this `address` and this `session` id.
    pub(super) fn make(&self, address: SocketAddr, session: SessionId, now: Instant) -> SessionId {
        self.of_slot(address, session, self.slot_at(now))
    }

    /// True if `echoed` was created recently for this client.
    pub(super) fn check(
        &self,
        address: SocketAddr,
        session: SessionId,
        echoed: SessionId,
        now: Instant,
    ) -> bool {
        let newest = self.slot_at(now);
        let oldest = newest.saturating_sub(OLD_SLOTS);
        // A constant-time comparison is not needed: the cookie has 64 bits and is worthless after a minute.
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
        // An id of zeros means no session.
        SessionId(if id == [0; 8] { [1; 8] } else { id })
    }
}
