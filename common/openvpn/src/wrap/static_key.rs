//! Static key files ("OpenVPN Static key V1"), as `openvpn --genkey secret` writes them: 256 bytes in
//! hexadecimal between two marker lines.

#[cfg(test)]
mod tests;

use crate::keys::{KEY_BLOCK_LEN, KeyBlock};

const BEGIN: &str = "-----BEGIN OpenVPN Static key V1-----";
const END: &str = "-----END OpenVPN Static key V1-----";
const TLS_CRYPT_V2: &str = "-----BEGIN OpenVPN tls-crypt-v2";

/// Why a text is not a static key. None of them shows any of it.
#[derive(Debug, Clone, Copy, PartialEq, Eq, thiserror::Error)]
pub enum StaticKeyError {
    /// The first or the last line of the key is not there.
    #[error("not a static key file: {0:?} is missing")]
    NoMarker(&'static str),
    /// The key is of a wrap that is not supported.
    #[error("a tls-crypt-v2 key, which is not supported: use tls-crypt or tls-auth")]
    TlsCryptV2,
    /// Something else than digits between the markers.
    #[error("line {0} of the static key file is not hexadecimal")]
    Digit(usize),
    /// Not 256 bytes.
    #[error("the static key has {0} bytes, not 256")]
    Length(usize),
}

/// Reads a key out of the text of its file, or of a configuration's inline block. What is before and
/// after the markers does not matter; comments between them begin with `#` or `;`.
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
