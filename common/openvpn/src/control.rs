//! What the sides say to each other over TLS behind the key method 2 messages: texts that end in a NUL.

pub mod push;
#[cfg(test)]
mod tests;

use bytes::{Buf, BytesMut};

/// The longest text, its NUL included, that is taken. Stock reads into a buffer of this size, and
/// sends about half of it at most.
pub const MAX_TEXT_LEN: usize = 2048;

/// Asks for the configuration.
pub const PUSH_REQUEST: &str = "PUSH_REQUEST";
/// Says goodbye, to peers that know `cc-exit`.
pub const EXIT: &str = "EXIT";
/// Tells a client that it is not let in. A comma and a reason may follow.
pub const AUTH_FAILED: &str = "AUTH_FAILED";
/// Tells a client to connect again. A comma, flags in brackets, and a text may follow.
pub const RESTART: &str = "RESTART";

/// Why control texts can not be read any further.
#[derive(Debug, Clone, Copy, PartialEq, Eq, thiserror::Error)]
#[error("control text is longer than {MAX_TEXT_LEN} bytes")]
pub struct TooLong;

/// Takes the first text out of what TLS gave; `None` if its end is not there yet. A stream that is read
/// until this returns `None` holds less than [`MAX_TEXT_LEN`] bytes.
///
/// Line ends at the end of a text are taken off, and everything that is not printable ASCII becomes `_`: texts
/// are for logs and comparisons, and stock does the same.
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

/// A control text.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum Message<'a> {
    /// A client asks for its configuration.
    PushRequest,
    /// One part of it, for [`push::Assembler`].
    PushReply(&'a str),
    /// A change of it, which is only for clients that offer to take it.
    PushUpdate(&'a str),
    /// A server does not let the client in.
    AuthFailed {
        /// Whether it may be otherwise a moment later.
        temporary: bool,
        /// Empty if there is none.
        reason: &'a str,
    },
    /// The server waits for another means of authentication.
    AuthPending(&'a str),
    /// The client is to connect again.
    Restart {
        /// To another server.
        next_server: bool,
        /// Empty if there is none.
        reason: &'a str,
    },
    /// The client is to end, and not to connect again.
    Halt(&'a str),
    /// The peer goes away.
    Exit,
    /// For a user: `INFO`, `INFO_PRE`, `CR_RESPONSE`, or unknown.
    Other(&'a str),
}

impl<'a> Message<'a> {
    /// Tells what a text is. Every text is something.
    pub fn parse(text: &'a str) -> Self {
        let (word, rest) = text.split_once(',').unwrap_or((text, ""));
        match word {
            "PUSH_REQUEST" => Self::PushRequest,
            "PUSH_REPLY" => Self::PushReply(rest),
            "PUSH_UPDATE" => Self::PushUpdate(rest),
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
            "AUTH_PENDING" => Self::AuthPending(rest),
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
