//! The negotiation of the data channel's cipher.

#[cfg(test)]
mod tests;

use crate::cipher::Cipher;
use crate::options::PeerOptions;
use crate::peer_info::{PeerInfo, printable};

/// Reason after `AUTH_FAILED,` for a client that shares no cipher with the server.
pub(crate) const NO_SHARED_CIPHER: &str =
    "Data channel cipher negotiation failed (no shared cipher)";

/// Longest list of offered ciphers in the log, in characters. A client chooses the list; a list of all ciphers of OpenVPN
/// 2.6 has about 400.
const MAX_OFFERED: usize = 512;

/// Server's choice for one client.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Choice {
    /// Cipher of the data channel.
    pub cipher: Cipher,
    /// True if the cipher is pushed. A client that cannot negotiate uses its configured cipher.
    pub push: bool,
}

/// Reason why a client has no cipher.
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
pub enum NcpError {
    /// The server chose a cipher that the client does not allow.
    #[error("server chose cipher {0:?}, which is not allowed here")]
    NotAllowed(String),
    /// The server neither pushed a cipher nor named a cipher in its options string.
    #[error("server neither pushed a cipher nor named a cipher in its options string")]
    Unnamed,
}

/// Chooses the first cipher of `allowed` that the client offers. A client that cannot negotiate offers only
/// its configured cipher; `fallback` is chosen if the client is configured with `fallback` or names no
/// cipher. Returns `None` if client and server share no cipher.
pub fn choose_as_server(
    allowed: &[Cipher],
    fallback: Option<Cipher>,
    client: &PeerInfo,
    options: &PeerOptions,
) -> Option<Choice> {
    let configured = options.cipher.as_deref().and_then(Cipher::from_name);
    let offered = |cipher: Cipher| match &client.ciphers {
        Some(list) => list.contains(&cipher),
        None => {
            let ncp = client.ncp >= 2 && matches!(cipher, Cipher::Aes256Gcm | Cipher::Aes128Gcm);
            ncp || configured == Some(cipher)
        }
    };
    let push = client.can_negotiate();
    let choice = allowed.iter().copied().find(|cipher| offered(*cipher));
    let fallback =
        fallback.filter(|_| !push && (options.cipher.is_none() || configured == fallback));
    let cipher = choice.or(fallback)?;
    Some(Choice { cipher, push })
}

/// Returns the ciphers that a client offers, for the log: the value of `IV_CIPHERS` in `lines`, which also names ciphers
/// that this crate does not support, or else the ciphers of an old client.
pub(crate) fn offered(lines: &str, client: &PeerInfo, options: &PeerOptions) -> String {
    let list = || {
        lines
            .lines()
            .find_map(|line| line.strip_prefix("IV_CIPHERS="))
    };
    let names = match client.ciphers.as_ref().and_then(|_| list()) {
        Some(list) => vec![list],
        None => {
            let ncp = (client.ncp >= 2).then_some("AES-256-GCM:AES-128-GCM");
            ncp.into_iter().chain(options.cipher.as_deref()).collect()
        }
    };
    let names = printable(&names.join(":"));
    match names.trim_end() {
        "" => "none".to_owned(),
        names => names.chars().take(MAX_OFFERED).collect(),
    }
}

/// Returns the cipher that the server pushed, or else the cipher in the server's options string. Fails if
/// `allowed` does not contain the cipher.
pub fn choose_as_client(
    allowed: &[Cipher],
    pushed: Option<&str>,
    options: &PeerOptions,
) -> Result<Cipher, NcpError> {
    let name = pushed
        .or(options.cipher.as_deref())
        .ok_or(NcpError::Unnamed)?;
    Cipher::from_name(name)
        .filter(|cipher| allowed.contains(cipher))
        .ok_or_else(|| NcpError::NotAllowed(name.to_owned()))
}
