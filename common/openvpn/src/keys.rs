//! The key material of one negotiation: from the random bytes of both sides to the keys of each direction.
//! `KeySource` and [`KeyBlock`] wipe their bytes when dropped. Copies made by callers are not wiped.

#[cfg(test)]
mod tests;

use rand::RngCore;
use zeroize::{Zeroize as _, Zeroizing};

use crate::Role;
use crate::packet::SessionId;
use crate::prf::tls1_prf;

/// Label for exporting a key block from TLS (RFC 5705), without a context.
pub(crate) const EXPORTER_LABEL: &[u8] = b"EXPORTER-OpenVPN-datakeys";

/// Length in bytes of a [`KeyBlock`], and of the key in a static key file.
pub(crate) const KEY_BLOCK_LEN: usize = 256;

/// Random bytes of one side in its key method 2 message.
#[derive(Clone, PartialEq, Eq)]
pub(crate) struct KeySource {
    /// Pre-master secret of the client; zeros for a server.
    pub(crate) pre_master: [u8; 48],
    /// Input to the master secret.
    pub(crate) random1: [u8; 32],
    /// Input to the key expansion.
    pub(crate) random2: [u8; 32],
}

impl KeySource {
    pub(crate) fn zero() -> Self {
        Self {
            pre_master: [0; 48],
            random1: [0; 32],
            random2: [0; 32],
        }
    }

    pub(crate) fn random(role: Role, rng: &mut dyn RngCore) -> Self {
        let mut source = Self::zero();
        if role == Role::Client {
            rng.fill_bytes(&mut source.pre_master);
        }
        rng.fill_bytes(&mut source.random1);
        rng.fill_bytes(&mut source.random2);
        source
    }
}

impl Drop for KeySource {
    fn drop(&mut self) {
        self.pre_master.zeroize();
        self.random1.zeroize();
        self.random2.zeroize();
    }
}

impl std::fmt::Debug for KeySource {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.write_str("KeySource")
    }
}

/// Key material shared by both sides: two directions, each with 64 bytes for a cipher and 64 for a MAC.
#[derive(Clone, PartialEq, Eq)]
pub struct KeyBlock([u8; KEY_BLOCK_LEN]);

impl KeyBlock {
    /// Creates a block from the bytes of a static key file, or from the TLS export for `EXPORTER_LABEL`.
    pub fn from_bytes(bytes: [u8; KEY_BLOCK_LEN]) -> Self {
        Self(bytes)
    }

    /// Derives the keys with the PRF, for peers that cannot export keys from TLS.
    pub(crate) fn from_prf(
        client: &KeySource,
        server: &KeySource,
        client_session: SessionId,
        server_session: SessionId,
    ) -> Self {
        let mut master = Zeroizing::new([0; 48]);
        let seed = [&client.random1[..], &server.random1[..]];
        tls1_prf(
            &client.pre_master,
            b"OpenVPN master secret",
            &seed,
            &mut *master,
        );
        let mut block = Self([0; KEY_BLOCK_LEN]);
        let seed = [
            &client.random2[..],
            &server.random2[..],
            &client_session.0,
            &server_session.0,
        ];
        tls1_prf(&master, b"OpenVPN key expansion", &seed, &mut block.0);
        block
    }

    /// Returns one half of the block: the keys of one direction.
    pub(crate) fn half(&self, half: Half) -> HalfBlock<'_> {
        let (zero, one) = self.0.split_at(KEY_BLOCK_LEN / 2);
        let (cipher, mac) = match half {
            Half::Zero => zero,
            Half::One => one,
        }
        .split_at(KEY_BLOCK_LEN / 4);
        HalfBlock { cipher, mac }
    }

    /// Returns the keys for data packets from `sender`.
    pub(crate) fn data(&self, sender: Role) -> HalfBlock<'_> {
        self.half(match sender {
            Role::Client => Half::Zero,
            Role::Server => Half::One,
        })
    }
}

impl Drop for KeyBlock {
    fn drop(&mut self) {
        self.0.zeroize();
    }
}

impl std::fmt::Debug for KeyBlock {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.write_str("KeyBlock")
    }
}

/// Half of a [`KeyBlock`], in storage order.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum Half {
    /// Bytes 0 to 127.
    Zero,
    /// Bytes 128 to 255.
    One,
}

/// Keys of one direction. Ciphers and MACs use the first bytes, up to their key length.
#[derive(Clone, Copy)]
pub(crate) struct HalfBlock<'a> {
    /// 64 bytes for a cipher.
    pub(crate) cipher: &'a [u8],
    /// 64 bytes for a MAC, or for the nonces of an AEAD cipher.
    pub(crate) mac: &'a [u8],
}
