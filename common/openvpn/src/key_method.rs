//! The key method 2 message: the first message of each side over TLS.
//!
//! ```text
//! [0 u32][2 u8][client only: pre master 48][random 32][random 32]
//!     [options][user name][password][peer info]
//! ```
//!
//! Each text is `[length u16][bytes][NUL]`. The length includes the NUL. An empty text is only a length of 0.

#[cfg(test)]
mod tests;

use bytes::{BufMut, BytesMut};

use crate::Role;
use crate::keys::KeySource;

/// Longest message in bytes. Stock's receive buffer has half this size.
pub const MAX_MESSAGE_LEN: usize = 4096;

/// Longest options string that stock accepts, in bytes including the NUL.
pub(crate) const MAX_OPTIONS_LEN: usize = 512;

/// Reason why a message is rejected.
#[derive(Debug, Clone, Copy, PartialEq, Eq, thiserror::Error)]
pub enum KeyMethodError {
    /// The message does not begin with the header of key method 2.
    #[error("not a key method 2 message")]
    Method,
    /// The message or a text in the message is too long.
    #[error("key method 2 message is too long")]
    TooLong,
    /// The user name or the password is not UTF-8.
    #[error("user name or password is not UTF-8")]
    Credentials,
}

/// Key method 2 message of either role.
#[derive(Clone, PartialEq, Eq)]
pub struct KeyMethod2 {
    /// Random bytes for the keys.
    pub(crate) source: KeySource,
    /// Options string; see [`options`](crate::options).
    pub options: String,
    /// User name; empty if missing.
    pub username: String,
    /// Password; empty if missing.
    pub password: String,
    /// Abilities of the client; see [`peer_info`](crate::peer_info).
    pub peer_info: String,
}

impl KeyMethod2 {
    /// Appends the message in the format of `role`. Send the message as one TLS record, because stock parses
    /// one record at a time.
    pub fn write(&self, role: Role, out: &mut BytesMut) -> Result<(), KeyMethodError> {
        let start = out.len();
        out.put_u32(0);
        out.put_u8(2);
        if role == Role::Client {
            out.put_slice(&self.source.pre_master);
        }
        out.put_slice(&self.source.random1);
        out.put_slice(&self.source.random2);
        for text in [
            &self.options,
            &self.username,
            &self.password,
            &self.peer_info,
        ] {
            write_text(text, out);
        }
        if self.options.len() >= MAX_OPTIONS_LEN || out.len() - start > MAX_MESSAGE_LEN {
            out.truncate(start);
            return Err(KeyMethodError::TooLong);
        }
        Ok(())
    }

    /// Parses a message of `sender` at the start of `bytes`, the plaintext of TLS. Returns the message and
    /// its length, or `None` if the message is incomplete.
    ///
    /// Peers may leave out texts at the end. A message is one TLS record, and TLS delivers whole records, so
    /// a message that ends between two texts is complete.
    pub fn parse(sender: Role, bytes: &[u8]) -> Result<Option<(Self, usize)>, KeyMethodError> {
        let mut rest = bytes;
        let message = match parse_message(sender, &mut rest) {
            Ok(message) => Some(message),
            Err(None) => None,
            Err(Some(error)) => return Err(error),
        };
        let len = bytes.len() - rest.len();
        let used = if message.is_some() { len } else { bytes.len() };
        if used > MAX_MESSAGE_LEN {
            return Err(KeyMethodError::TooLong);
        }
        Ok(message.map(|message| (message, len)))
    }
}

impl std::fmt::Debug for KeyMethod2 {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_struct("KeyMethod2")
            .field("options", &self.options)
            .field("username", &self.username)
            .field("peer_info", &self.peer_info)
            .finish_non_exhaustive()
    }
}

/// Parses a message. An error of `None` means that more bytes are needed.
fn parse_message(sender: Role, rest: &mut &[u8]) -> Result<KeyMethod2, Option<KeyMethodError>> {
    let [zero @ .., method] = take::<5>(rest)?;
    // Ignore the upper bits, because later methods may use them.
    if zero != [0; 4] || method & 0x0f != 2 {
        return Err(Some(KeyMethodError::Method));
    }
    let mut source = KeySource::zero();
    if sender == Role::Client {
        source.pre_master = take(rest)?;
    }
    (source.random1, source.random2) = (take(rest)?, take(rest)?);

    let options = take_text(rest, MAX_OPTIONS_LEN)?;
    let mut texts = [&[][..]; 3];
    for text in &mut texts {
        if rest.is_empty() {
            break;
        }
        *text = take_text(rest, MAX_MESSAGE_LEN)?;
    }
    let [username, password, peer_info] = texts;
    let credential = |bytes: &[u8]| {
        std::str::from_utf8(bytes)
            .map(str::to_owned)
            .map_err(|_| Some(KeyMethodError::Credentials))
    };
    Ok(KeyMethod2 {
        source,
        options: String::from_utf8_lossy(options).into_owned(),
        username: credential(username)?,
        password: credential(password)?,
        peer_info: String::from_utf8_lossy(peer_info).into_owned(),
    })
}

fn write_text(text: &str, out: &mut BytesMut) {
    match u16::try_from(text.len() + 1) {
        Ok(1) => out.put_u16(0),
        Ok(len) => {
            out.put_u16(len);
            out.put_slice(text.as_bytes());
            out.put_u8(0);
        }
        // The text is too long for any message; the caller checks the total length.
        Err(_) => out.put_slice(text.as_bytes()),
    }
}

/// Reads a text, and returns the part before the first NUL.
fn take_text<'a>(rest: &mut &'a [u8], max: usize) -> Result<&'a [u8], Option<KeyMethodError>> {
    let mut after = *rest;
    let len = usize::from(u16::from_be_bytes(take(&mut after)?));
    if len > max {
        return Err(Some(KeyMethodError::TooLong));
    }
    let (text, after) = after.split_at_checked(len).ok_or(None)?;
    *rest = after;
    Ok(text.split(|byte| *byte == 0).next().unwrap_or_default())
}

fn take<const N: usize>(rest: &mut &[u8]) -> Result<[u8; N], Option<KeyMethodError>> {
    let (taken, after) = rest.split_first_chunk().ok_or(None)?;
    *rest = after;
    Ok(*taken)
}
