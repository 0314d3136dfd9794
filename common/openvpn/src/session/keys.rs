//! The data channel keys of one session: the key for sending, and the keys accepted for receiving.

use std::time::{Duration, Instant};

use crate::Role;
use crate::cipher::{Cipher, Digest};
use crate::compress::Framing;
use crate::data::{Opener, Sealer};
use crate::keys::KeyBlock;
use crate::negotiation::{Failure, Negotiation};
use crate::packet::{KeyId, SessionId};

/// Parameters agreed by both sides. Renegotiations do not change the parameters.
#[derive(Clone, Copy, Debug)]
pub(super) struct Agreed {
    pub(super) cipher: Cipher,
    pub(super) digest: Digest,
    /// True if keys come from the TLS exporter, false if keys come from the PRF.
    pub(super) exporter: bool,
    /// Peer id in outgoing data packets. Incoming packets may contain any peer id.
    pub(super) peer_id: Option<u32>,
    pub(super) framing: Framing,
    pub(super) tun_mtu: u16,
    /// True if exit messages go through the control channel.
    pub(super) cc_exit: bool,
    /// True if the peer also runs this crate.
    pub(super) ours: bool,
}

/// Session ids of both sides.
#[derive(Clone, Copy, Debug)]
pub(super) struct Ids {
    pub(super) own: SessionId,
    pub(super) peer: SessionId,
}

/// Data channel keys of both directions for one key id.
pub(super) struct DataKey {
    key_id: KeyId,
    pub(super) sealer: Sealer,
    pub(super) opener: Opener,
    began: Instant,
    /// Set when the peer has used the key.
    pub(super) confirmed: bool,
}

impl DataKey {
    /// Derives the keys from a negotiation with both key-method messages.
    pub(super) fn derive(
        role: Role,
        negotiation: &Negotiation,
        ids: Ids,
        agreed: &Agreed,
    ) -> Result<Self, Failure> {
        let missing = || Failure::Protocol("the key material is incomplete".into());
        let block = if agreed.exporter {
            let channel = negotiation.channel().ok_or_else(missing)?;
            KeyBlock::from_bytes(channel.export_data_keys()?)
        } else {
            let (own, peer) = negotiation.sources().ok_or_else(missing)?;
            match role {
                Role::Client => KeyBlock::from_prf(own, peer, ids.own, ids.peer),
                Role::Server => KeyBlock::from_prf(peer, own, ids.peer, ids.own),
            }
        };
        let Agreed {
            cipher,
            digest,
            peer_id,
            ..
        } = *agreed;
        let key_id = negotiation.key_id();
        let refused = |error: crate::data::KeyError| Failure::Protocol(error.to_string());
        Ok(Self {
            key_id,
            sealer: Sealer::new(cipher, digest, &block, role, key_id, peer_id).map_err(refused)?,
            opener: Opener::new(cipher, digest, &block, role.peer()).map_err(refused)?,
            began: negotiation.began(),
            confirmed: false,
        })
    }
}

/// All data channel keys of a session.
#[derive(Default)]
pub(super) struct Keys {
    active: Option<DataKey>,
    /// Previous key, and the time until which the key is accepted.
    old: Option<(DataKey, Instant)>,
    /// Key of an unfinished renegotiation.
    next: Option<DataKey>,
    /// Time at which sending switches to the active key even if the peer has not used the key.
    switch_at: Option<Instant>,
}

impl Keys {
    pub(super) fn install(&mut self, key: DataKey) {
        self.active = Some(key);
    }

    /// Installs the key of a renegotiation. For now the key is only used for receiving.
    pub(super) fn prepare(&mut self, key: DataKey) {
        self.next = Some(key);
    }

    /// Returns true if the key of an unfinished renegotiation has this key id.
    pub(super) fn is_next(&self, key_id: KeyId) -> bool {
        self.next.as_ref().is_some_and(|key| key.key_id == key_id)
    }

    /// Returns true if an unfinished renegotiation has a key.
    pub(super) fn has_next(&self) -> bool {
        self.next.is_some()
    }

    pub(super) fn abandon(&mut self) {
        self.next = None;
    }

    /// Activates the key of a finished renegotiation. The peer may not have finished yet, so sending uses the
    /// old key until the peer uses the new key, or until `patience` after the start of the renegotiation (in
    /// stock OpenVPN, the smaller of `hand-window` and half of `reneg-sec`).
    pub(super) fn promote(&mut self, patience: Duration, tran_window: Duration) {
        let Some(new) = self.next.take() else { return };
        self.switch_at = Some(new.began + patience);
        let until = new.began + tran_window;
        self.old = self.active.replace(new).map(|key| (key, until));
    }

    pub(super) fn expiry(&self) -> Option<Instant> {
        self.old.as_ref().map(|(_, until)| *until)
    }

    pub(super) fn expire(&mut self, now: Instant) {
        if self.expiry().is_some_and(|until| until <= now) {
            self.old = None;
        }
    }

    /// Returns the key for sending, and true if the key is the newest key. A worn old key may be used up before its
    /// time, and the peer already accepts the new key.
    pub(super) fn sending(&mut self, now: Instant) -> Option<(&mut DataKey, bool)> {
        let active = self.active.as_mut()?;
        match &mut self.old {
            Some((old, _))
                if !active.confirmed
                    && !old.sealer.is_worn()
                    && self.switch_at.is_some_and(|at| now < at) =>
            {
                Some((old, false))
            }
            _ => Some((active, true)),
        }
    }

    pub(super) fn named(&mut self, key_id: KeyId) -> Option<&mut DataKey> {
        let old = self.old.as_mut().map(|(key, _)| key);
        [self.active.as_mut(), self.next.as_mut(), old]
            .into_iter()
            .flatten()
            .find(|key| key.key_id == key_id)
    }
}
