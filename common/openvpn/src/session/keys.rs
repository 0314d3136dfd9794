//! The data channel's keys of one session: which one to send with, which ones are still taken.

use std::time::Instant;

use crate::Role;
use crate::cipher::{Cipher, Digest};
use crate::compress::Framing;
use crate::data::{Opener, Sealer};
use crate::keys::KeyBlock;
use crate::negotiation::{Failure, Negotiation};
use crate::packet::{KeyId, SessionId};

/// What the sides agreed on. It stays as it is when keys are renegotiated.
#[derive(Clone, Copy, Debug)]
pub(super) struct Agreed {
    pub(super) cipher: Cipher,
    pub(super) digest: Digest,
    /// Keys come from TLS rather than from the PRF.
    pub(super) exporter: bool,
    /// In what we send; the other side's packets may carry anything.
    pub(super) peer_id: Option<u32>,
    pub(super) framing: Framing,
    pub(super) tun_mtu: u16,
    /// Goodbyes go over the control channel.
    pub(super) cc_exit: bool,
    /// The other side is this crate.
    pub(super) ours: bool,
}

/// The names of both sides' halves of a session.
#[derive(Clone, Copy, Debug)]
pub(super) struct Ids {
    pub(super) own: SessionId,
    pub(super) peer: SessionId,
}

/// Both directions of one key.
pub(super) struct DataKey {
    key_id: KeyId,
    pub(super) sealer: Sealer,
    pub(super) opener: Opener,
    began: Instant,
    /// The peer has used it.
    pub(super) confirmed: bool,
}

impl DataKey {
    /// From a negotiation in which both key-method messages are there.
    pub(super) fn derive(
        role: Role,
        negotiation: &Negotiation,
        ids: Ids,
        agreed: &Agreed,
    ) -> Result<Self, Failure> {
        let missing = || Failure::Protocol("keys are derived before there is material".into());
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

/// All keys of a session.
#[derive(Default)]
pub(super) struct Keys {
    active: Option<DataKey>,
    /// The one before, and until when it is taken.
    old: Option<(DataKey, Instant)>,
    /// Of a negotiation that has not ended.
    next: Option<DataKey>,
    /// When to send with the active key though the peer has not used it.
    switch_at: Option<Instant>,
}

impl Keys {
    /// The first key.
    pub(super) fn install(&mut self, key: DataKey) {
        self.active = Some(key);
    }

    /// The key of a renegotiation: taken from now on, but not sent with.
    pub(super) fn prepare(&mut self, key: DataKey) {
        self.next = Some(key);
    }

    /// The renegotiation is given up.
    pub(super) fn abandon(&mut self) {
        self.next = None;
    }

    /// The renegotiation has ended. The peer may not know that yet, so the old key stays in use until the
    /// peer uses the new one, or `patience` after the begin (stock: the smaller of `hand-window` and half
    /// of `reneg-sec`).
    pub(super) fn promote(
        &mut self,
        patience: std::time::Duration,
        tran_window: std::time::Duration,
    ) {
        let Some(new) = self.next.take() else { return };
        self.switch_at = Some(new.began + patience);
        let until = new.began + tran_window;
        self.old = self.active.replace(new).map(|key| (key, until));
    }

    /// When the old key expires.
    pub(super) fn expiry(&self) -> Option<Instant> {
        self.old.as_ref().map(|(_, until)| *until)
    }

    /// Forgets an old key whose time is over.
    pub(super) fn expire(&mut self, now: Instant) {
        if self.expiry().is_some_and(|until| until <= now) {
            self.old = None;
        }
    }

    /// The key to send with, and whether it is the newest.
    pub(super) fn sending(&mut self, now: Instant) -> Option<(&mut DataKey, bool)> {
        let active = self.active.as_mut()?;
        match &mut self.old {
            Some((old, _)) if !active.confirmed && self.switch_at.is_some_and(|at| now < at) => {
                Some((old, false))
            }
            _ => Some((active, true)),
        }
    }

    /// The key that a packet names.
    pub(super) fn named(&mut self, key_id: KeyId) -> Option<&mut DataKey> {
        let old = self.old.as_mut().map(|(key, _)| key);
        [self.active.as_mut(), self.next.as_mut(), old]
            .into_iter()
            .flatten()
            .find(|key| key.key_id == key_id)
    }
}
