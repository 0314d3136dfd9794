//! The flag `--agent-identifiers`: a URL query. Each key is a kind of address that an agent can serve.
//!
//! This module only checks the text, by the rules of Go's `url.ParseQuery`. The agent sends the text to
//! servers unchanged.

use thiserror::Error;

/// Valid keys. A server ignores other keys; the stock agent rejects them.
const KEYS: [&str; 5] = ["ipv4", "ipv6", "host", "cidr", "default-route"];

/// Reason why identifiers are invalid.
#[derive(Clone, Debug, PartialEq, Eq, Error)]
pub(super) enum IdentifierError {
    #[error("agent address is invalid: unknown address type: {0}")]
    UnknownType(String),
    #[error("agent address is invalid: invalid URL escape {0:?}")]
    Escape(String),
    #[error("agent address is invalid: invalid semicolon separator in query")]
    Semicolon,
}

/// Checks the whole text. An empty text and empty items are valid.
pub(super) fn check(text: &str) -> Result<(), IdentifierError> {
    for item in text.split('&').filter(|item| !item.is_empty()) {
        if item.contains(';') {
            return Err(IdentifierError::Semicolon);
        }
        let (key, value) = item.split_once('=').unwrap_or((item, ""));
        let key = unescape(key)?;
        unescape(value)?;
        if !KEYS.iter().any(|known| known.as_bytes() == key) {
            let key = String::from_utf8_lossy(&key).into_owned();
            return Err(IdentifierError::UnknownType(key));
        }
    }
    Ok(())
}

fn unescape(text: &str) -> Result<Vec<u8>, IdentifierError> {
    let mut bytes = Vec::with_capacity(text.len());
    let mut rest = text.bytes();
    while let Some(byte) = rest.next() {
        bytes.push(match byte {
            b'+' => b' ',
            b'%' => {
                let escape = [rest.next(), rest.next()];
                hex_pair(escape).ok_or_else(|| bad_escape(escape))?
            }
            other => other,
        });
    }
    Ok(bytes)
}

fn hex_pair([high, low]: [Option<u8>; 2]) -> Option<u8> {
    let digit = |byte: Option<u8>| char::from(byte?).to_digit(16);
    u8::try_from(digit(high)? * 16 + digit(low)?).ok()
}

fn bad_escape(escape: [Option<u8>; 2]) -> IdentifierError {
    let bytes: Vec<u8> = escape.into_iter().flatten().collect();
    IdentifierError::Escape(format!("%{}", String::from_utf8_lossy(&bytes)))
}

#[cfg(test)]
mod tests {
    use super::check;

    #[test]
    fn known_keys_in_url_syntax_are_valid() {
        let valid = [
            "",
            "ipv4=1.2.3.4",
            "ipv4=1.2.3.4&ipv4=5.6.7.8&host=node1&cidr=10.0.0.0/8&ipv6=::1",
            "default-route=true",
            "host",
            "&&host=a&",
            "host=%41+b",
            "%68ost=a",
        ];
        for text in valid {
            assert_eq!(check(text), Ok(()), "{text:?}");
        }
    }

    #[test]
    fn invalid_identifiers_get_upstreams_error_texts() {
        let invalid = [
            (
                "uid=7",
                "agent address is invalid: unknown address type: uid",
            ),
            (
                "IPv4=1.2.3.4",
                "agent address is invalid: unknown address type: IPv4",
            ),
            (
                "host=a&=b",
                "agent address is invalid: unknown address type: ",
            ),
            (
                "host=%4",
                "agent address is invalid: invalid URL escape \"%4\"",
            ),
            (
                "host=%zz",
                "agent address is invalid: invalid URL escape \"%zz\"",
            ),
            (
                "host=a;b",
                "agent address is invalid: invalid semicolon separator in query",
            ),
        ];
        for (text, expected) in invalid {
            let shown = check(text).map_err(|error| error.to_string());
            assert_eq!(shown, Err(expected.to_owned()), "{text:?}");
        }
    }
}
