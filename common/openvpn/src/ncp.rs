//! The choice of the data channel's cipher.

#[cfg(test)]
mod tests;

use crate::cipher::Cipher;
use crate::options::PeerOptions;
use crate::peer_info::PeerInfo;

/// What a server tells a client with which it shares no cipher, behind `AUTH_FAILED,`.
pub const NO_SHARED_CIPHER: &str = "Data channel cipher negotiation failed (no shared cipher)";

/// What a server has chosen for one client.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Choice {
    /// To be used.
    pub cipher: Cipher,
    /// Whether the client is to be told: one that can not negotiate uses what it is configured with.
    pub push: bool,
}

/// Why there is no cipher.
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
pub enum NcpError {
    /// The client has none that the server allows.
    #[error("client shares no cipher with us")]
    NoShared,
    /// The server chose one that the client does not allow.
    #[error("server chose cipher {0:?}, which is not allowed here")]
    NotAllowed(String),
    /// The server neither chose a cipher nor says which one it uses.
    #[error("server names no cipher")]
    Unnamed,
}

/// The server's choice: the first of `allowed` that the client offers. One that offers nothing has to
/// be configured with one of `allowed`, or with the `fallback`.
pub fn choose_as_server(
    allowed: &[Cipher],
    fallback: Option<Cipher>,
    client: &PeerInfo,
    options: &PeerOptions,
) -> Result<Choice, NcpError> {
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
    choice
        .or(fallback)
        .map(|cipher| Choice { cipher, push })
        .ok_or(NcpError::NoShared)
}

/// The client's choice: what the server pushed, or else what it is configured with.
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
