//! The ciphers and digests of the data channel: names and sizes.

#[cfg(test)]
mod tests;

use std::fmt;
use std::str::FromStr;

/// Cipher of the data channel.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub enum Cipher {
    /// AES-256-GCM, the default wherever ciphers are negotiated.
    Aes256Gcm,
    /// AES-192-GCM.
    Aes192Gcm,
    /// AES-128-GCM.
    Aes128Gcm,
    /// ChaCha20-Poly1305, negotiable with peers from 2.5 on.
    ChaCha20Poly1305,
    /// AES-256-CBC with a separate MAC, for old peers.
    Aes256Cbc,
    /// AES-192-CBC with a separate MAC, for old peers.
    Aes192Cbc,
    /// AES-128-CBC with a separate MAC, for old peers.
    Aes128Cbc,
}

/// Name of an unknown or unsupported cipher or digest.
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
#[error("{0:?} is not supported")]
pub struct UnknownName(pub String);

impl Cipher {
    /// All supported ciphers.
    pub const ALL: [Self; 7] = [
        Self::Aes256Gcm,
        Self::Aes192Gcm,
        Self::Aes128Gcm,
        Self::ChaCha20Poly1305,
        Self::Aes256Cbc,
        Self::Aes192Cbc,
        Self::Aes128Cbc,
    ];

    /// Ciphers that stock 2.6 offers by default.
    pub const DEFAULT: [Self; 3] = [Self::Aes256Gcm, Self::Aes128Gcm, Self::ChaCha20Poly1305];

    /// Returns the name used in options, in cipher lists, and on the wire.
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

    /// Returns the cipher called `name`, or `None` if no supported cipher has this name. The comparison
    /// ignores case. The aliases are spellings of mbedTLS and old OpenSSL libraries.
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

    /// Returns true if the cipher authenticates its data and needs no separate MAC.
    pub(crate) fn is_aead(self) -> bool {
        !matches!(self, Self::Aes256Cbc | Self::Aes192Cbc | Self::Aes128Cbc)
    }

    pub(crate) fn key_len(self) -> usize {
        match self {
            Self::Aes256Gcm | Self::ChaCha20Poly1305 | Self::Aes256Cbc => 32,
            Self::Aes192Gcm | Self::Aes192Cbc => 24,
            Self::Aes128Gcm | Self::Aes128Cbc => 16,
        }
    }

    /// Parses a list like `AES-256-GCM:AES-128-GCM`. Unknown names and duplicates are left out.
    pub(crate) fn known_in(list: &str) -> Vec<Self> {
        let mut known = Vec::new();
        for cipher in list.split(':').filter_map(Self::from_name) {
            if !known.contains(&cipher) {
                known.push(cipher);
            }
        }
        known
    }

    /// Formats `ciphers` as a list like `AES-256-GCM:AES-128-GCM`.
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

/// Hash of the MACs: in tls-auth, and in a data channel with a CBC cipher. The digest is never negotiated;
/// both sides must be configured alike.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash, Default)]
pub enum Digest {
    /// SHA-1, the default of every OpenVPN version.
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
    /// Returns the name used in options and on the wire.
    pub fn name(self) -> &'static str {
        match self {
            Self::Sha1 => "SHA1",
            Self::Sha256 => "SHA256",
            Self::Sha384 => "SHA384",
            Self::Sha512 => "SHA512",
        }
    }

    /// Returns the length of the output in bytes. OpenVPN's HMAC keys have the same length.
    pub(crate) fn output_len(self) -> usize {
        match self {
            Self::Sha1 => 20,
            Self::Sha256 => 32,
            Self::Sha384 => 48,
            Self::Sha512 => 64,
        }
    }

    /// Returns an HMAC key made from the first [`output_len`](Self::output_len) bytes of `material`.
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

    /// Ignores case, and accepts OpenSSL's forms such as `RSA-SHA1` and `SHA-1`.
    fn from_str(name: &str) -> Result<Self, UnknownName> {
        let plain = name.to_ascii_uppercase().replace('-', "");
        let plain = plain.strip_prefix("RSA").unwrap_or(&plain);
        [Self::Sha1, Self::Sha256, Self::Sha384, Self::Sha512]
            .into_iter()
            .find(|digest| digest.name() == plain)
            .ok_or_else(|| UnknownName(name.to_owned()))
    }
}
