//! Control texts: NUL-terminated messages that both sides send over TLS after the key method 2 messages.

pub mod push;
#[cfg(test)]
mod tests;

use bytes::{Buf, BytesMut};

/// Longest accepted text in bytes, including the NUL. Stock's receive buffer has this size; stock sends at
/// most about half as much.
pub const MAX_TEXT_LEN: usize = 2048;

/// Client's request for its configuration.
pub(crate) const PUSH_REQUEST: &str = "PUSH_REQUEST";
/// Notice that the sender leaves, for peers that support `cc-exit`.
pub(crate) const EXIT: &str = "EXIT";
/// Server's refusal of a client. A comma and a reason may follow.
pub const AUTH_FAILED: &str = "AUTH_FAILED";
/// Server's request to connect again. A comma, flags in brackets, and a text may follow.
pub const RESTART: &str = "RESTART";

/// Error for a text longer than [`MAX_TEXT_LEN`]. The rest of the stream cannot be read.
#[derive(Debug, Clone, Copy, PartialEq, Eq, thiserror::Error)]
#[error("control text is longer than {MAX_TEXT_LEN} bytes")]
pub struct TooLong;

/// Removes the first text from `stream` and returns the text, or `None` if the text is incomplete. After
/// `None`, `stream` contains less than [`MAX_TEXT_LEN`] bytes.
///
/// White space at the end is removed, and every byte outside printable ASCII becomes `_`, as in stock. The
/// texts are only logged and compared.
pub fn take_text(stream: &mut BytesMut) -> Result<Option<String>, TooLong> {
    let searched = stream
        .get(..MAX_TEXT_LEN.min(stream.len()))
        .unwrap_or_default();
    let Some(end) = searched.iter().position(|byte| *byte == 0) else {
        return if stream.len() >= MAX_TEXT_LEN {
            Err(TooLong)
        } else {
            Ok(None)
        };
    };
    let text = stream.split_to(end);
    stream.advance(1);
    let text = text.trim_ascii_end().iter();
    let printable = |byte: &u8| {
        if matches!(byte, b' '..=b'~') {
            char::from(*byte)
        } else {
            '_'
        }
    };
    Ok(Some(text.map(printable).collect()))
}

/// Parsed control text.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum Message<'a> {
    /// Client's request for its configuration.
    PushRequest,
    /// Part of the pushed configuration, for [`push::Assembler`].
    PushReply(&'a str),
    /// Server's refusal of the client.
    AuthFailed {
        /// True if a later attempt may succeed.
        temporary: bool,
        /// Reason of the refusal; may be empty.
        reason: &'a str,
    },
    /// Server's request to connect again.
    Restart {
        /// True if the client should connect to another server.
        next_server: bool,
        /// Reason of the restart; may be empty.
        reason: &'a str,
    },
    /// Server's request to stop and not to connect again.
    Halt(&'a str),
    /// Notice that the peer leaves.
    Exit,
    /// Text for a user (`INFO`, `INFO_PRE`, `AUTH_PENDING`, `CR_RESPONSE`), or an unknown text.
    Other(&'a str),
}

impl<'a> Message<'a> {
    /// Parses a text. Unknown texts become [`Message::Other`].
    pub fn parse(text: &'a str) -> Self {
        let (word, rest) = text.split_once(',').unwrap_or((text, ""));
        match word {
            "PUSH_REQUEST" => Self::PushRequest,
            "PUSH_REPLY" => Self::PushReply(rest),
            "AUTH_FAILED" => match rest.strip_prefix("TEMP") {
                // AUTH_FAILED,TEMP[backoff 42]:reason
                Some(rest) if rest.is_empty() || rest.starts_with(['[', ':']) => {
                    let rest = rest
                        .split_once(']')
                        .filter(|_| rest.starts_with('['))
                        .map_or(rest, |(_, rest)| rest);
                    Self::AuthFailed {
                        temporary: true,
                        reason: rest.strip_prefix(':').unwrap_or(rest),
                    }
                }
                _ => Self::AuthFailed {
                    temporary: false,
                    reason: rest,
                },
            },
            "RESTART" => {
                let (flags, reason) = rest
                    .strip_prefix('[')
                    .and_then(|rest| rest.split_once(']'))
                    .unwrap_or(("", rest));
                Self::Restart {
                    next_server: flags.contains('N'),
                    reason,
                }
            }
            "HALT" => Self::Halt(rest),
            "EXIT" => Self::Exit,
            _ => Self::Other(text),
        }
    }
}
