//! The static key files ("OpenVPN Static key V1") of `openvpn --genkey secret`: 256 bytes in hexadecimal
//! between two marker lines.

#[cfg(test)]
mod tests;

use crate::keys::{KEY_BLOCK_LEN, KeyBlock};

const BEGIN: &str = "-----BEGIN OpenVPN Static key V1-----";
const END: &str = "-----END OpenVPN Static key V1-----";
const TLS_CRYPT_V2: &str = "-----BEGIN OpenVPN tls-crypt-v2";

/// Reason why a text is not a static key. No variant contains key material.
#[derive(Debug, Clone, Copy, PartialEq, Eq, thiserror::Error)]
pub enum StaticKeyError {
    /// The first or the last line of the key is missing.
    #[error("not a static key file: {0:?} is missing")]
    NoMarker(&'static str),
    /// The key is a tls-crypt-v2 key.
    #[error("tls-crypt-v2 keys are not supported: use tls-crypt or tls-auth")]
    TlsCryptV2,
    /// A line between the markers contains a character that is not a hexadecimal digit.
    #[error("line {0} of the static key file is not hexadecimal")]
    Digit(usize),
    /// The key does not have 256 bytes.
    #[error("the static key has {0} bytes, not 256")]
    Length(usize),
}

/// Parses a key from the text of a file, or of an inline block in a configuration. Text before and after the
/// markers is ignored. Comments between the markers begin with `#` or `;`.
pub fn parse(text: &str) -> Result<KeyBlock, StaticKeyError> {
    let mut key = [0; KEY_BLOCK_LEN];
    let mut digits = 0_usize;
    let mut inside = false;
    for (line, number) in text.lines().map(str::trim).zip(1..) {
        if line.starts_with(TLS_CRYPT_V2) {
            return Err(StaticKeyError::TlsCryptV2);
        }
        if !inside {
            inside = line == BEGIN;
            continue;
        }
        if line == END {
            return match digits {
                512 => Ok(KeyBlock::from_bytes(key)),
                _ => Err(StaticKeyError::Length(digits.div_ceil(2))),
            };
        }
        if line.starts_with(['#', ';']) {
            continue;
        }
        for character in line.chars().filter(|c| !c.is_whitespace()) {
            let digit = character
                .to_digit(16)
                .ok_or(StaticKeyError::Digit(number))? as u8;
            if let Some(byte) = key.get_mut(digits / 2) {
                *byte = *byte << 4 | digit;
            }
            digits += 1;
        }
    }
    Err(StaticKeyError::NoMarker(if inside { END } else { BEGIN }))
}
