//! The names and sizes of the data channel's ciphers and digests.

#[cfg(test)]
mod tests;

use std::fmt;
use std::str::FromStr;

/// A cipher of the data channel.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub enum Cipher {
    /// The default wherever it can be negotiated.
    Aes256Gcm,
    /// Negotiable.
    Aes192Gcm,
    /// Negotiable.
    Aes128Gcm,
    /// Negotiable from 2.5 on.
    ChaCha20Poly1305,
    /// With a separate MAC, for old peers.
    Aes256Cbc,
    /// With a separate MAC, for old peers.
    Aes192Cbc,
    /// With a separate MAC, for old peers.
    Aes128Cbc,
}

/// A name that stands for no cipher or digest that is supported.
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
#[error("{0:?} is not supported")]
pub struct UnknownName(pub String);

impl Cipher {
    /// All that are supported.
    pub const ALL: [Self; 7] = [
        Self::Aes256Gcm,
        Self::Aes192Gcm,
        Self::Aes128Gcm,
        Self::ChaCha20Poly1305,
        Self::Aes256Cbc,
        Self::Aes192Cbc,
        Self::Aes128Cbc,
    ];

    /// What stock 2.6 offers unless told otherwise.
    pub const DEFAULT: [Self; 3] = [Self::Aes256Gcm, Self::Aes128Gcm, Self::ChaCha20Poly1305];

    /// The name in options, in lists, and on the wire.
    pub fn name(self) -> &'static str {
        match self {
            Self::Aes256Gcm => "AES-256-GCM",
            Self::Aes192Gcm => "AES-192-GCM",
            Self::Aes128Gcm => "AES-128-GCM",
            Self::ChaCha20Poly1305 => "CHACHA20-POLY1305",
            Self::Aes256Cbc => "AES-256-CBC",
            Self::Aes192Cbc => "AES-192-CBC",
            Self::Aes128Cbc => "AES-128-CBC",
        }
    }

    /// The cipher of that name. Case does not matter; mbedTLS and old OpenSSL libraries spell some names
    /// in a way of their own.
    pub fn from_name(name: &str) -> Option<Self> {
        let alias = [
            ("id-aes256-GCM", Self::Aes256Gcm),
            ("id-aes192-GCM", Self::Aes192Gcm),
            ("id-aes128-GCM", Self::Aes128Gcm),
        ];
        let names = Self::ALL.into_iter().map(|cipher| (cipher.name(), cipher));
        names
            .chain(alias)
            .find(|(known, _)| known.eq_ignore_ascii_case(name))
            .map(|(_, cipher)| cipher)
    }

    /// Whether the cipher authenticates what it encrypts, and needs no MAC of its own.
    pub fn is_aead(self) -> bool {
        !matches!(self, Self::Aes256Cbc | Self::Aes192Cbc | Self::Aes128Cbc)
    }

    /// The length of its key in bytes.
    pub fn key_len(self) -> usize {
        match self {
            Self::Aes256Gcm | Self::ChaCha20Poly1305 | Self::Aes256Cbc => 32,
            Self::Aes192Gcm | Self::Aes192Cbc => 24,
            Self::Aes128Gcm | Self::Aes128Cbc => 16,
        }
    }

    /// Reads a list like `AES-256-GCM:AES-128-GCM`, and leaves out the unknown and what is there already.
    pub fn known_in(list: &str) -> Vec<Self> {
        let mut known = Vec::new();
        for cipher in list.split(':').filter_map(Self::from_name) {
            if !known.contains(&cipher) {
                known.push(cipher);
            }
        }
        known
    }

    /// Writes such a list.
    pub fn list(ciphers: &[Self]) -> String {
        let names: Vec<_> = ciphers.iter().map(|cipher| cipher.name()).collect();
        names.join(":")
    }
}

impl fmt::Display for Cipher {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(self.name())
    }
}

impl FromStr for Cipher {
    type Err = UnknownName;

    fn from_str(name: &str) -> Result<Self, UnknownName> {
        Self::from_name(name).ok_or_else(|| UnknownName(name.to_owned()))
    }
}

/// The hash of the MACs: of tls-auth, and of a data channel whose cipher has no MAC built in. It is never
/// negotiated; both sides are configured alike.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash, Default)]
pub enum Digest {
    /// The default of every version.
    #[default]
    Sha1,
    /// SHA-256.
    Sha256,
    /// SHA-384.
    Sha384,
    /// SHA-512.
    Sha512,
}

impl Digest {
    /// The name in options and on the wire.
    pub fn name(self) -> &'static str {
        match self {
            Self::Sha1 => "SHA1",
            Self::Sha256 => "SHA256",
            Self::Sha384 => "SHA384",
            Self::Sha512 => "SHA512",
        }
    }

    /// The length of its output, and of the keys that OpenVPN gives to its HMAC.
    pub fn output_len(self) -> usize {
        match self {
            Self::Sha1 => 20,
            Self::Sha256 => 32,
            Self::Sha384 => 48,
            Self::Sha512 => 64,
        }
    }

    /// Its HMAC, keyed with as much of `material` as it uses.
    pub(crate) fn hmac_key(self, material: &[u8]) -> aws_lc_rs::hmac::Key {
        use aws_lc_rs::hmac;
        let algorithm = match self {
            Self::Sha1 => hmac::HMAC_SHA1_FOR_LEGACY_USE_ONLY,
            Self::Sha256 => hmac::HMAC_SHA256,
            Self::Sha384 => hmac::HMAC_SHA384,
            Self::Sha512 => hmac::HMAC_SHA512,
        };
        hmac::Key::new(
            algorithm,
            material.get(..self.output_len()).unwrap_or(material),
        )
    }
}

impl fmt::Display for Digest {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(self.name())
    }
}

impl FromStr for Digest {
    type Err = UnknownName;

    /// Case does not matter; OpenSSL's `RSA-SHA1` and `SHA-1` forms are names of the same.
    fn from_str(name: &str) -> Result<Self, UnknownName> {
        let plain = name.to_ascii_uppercase().replace('-', "");
        let plain = plain.strip_prefix("RSA").unwrap_or(&plain);
        [Self::Sha1, Self::Sha256, Self::Sha384, Self::Sha512]
            .into_iter()
            .find(|digest| digest.name() == plain)
            .ok_or_else(|| UnknownName(name.to_owned()))
    }
}
