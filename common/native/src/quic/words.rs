//! Words on the control stream of a QUIC link, one on each line.

use std::fmt;

use bytes::Bytes;
use culvert_stream::CloseReason;

use crate::control::Lines;

/// Word on the control stream. Either end ignores words of newer versions.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Word {
    /// The agent wants new dials on this link, or on the TCP link. Before the first such word, the server uses the
    /// TCP link.
    Prefer(Preferred),
    /// A stream ends with a reason after some bytes. A reset would discard the bytes that are still on their way, and
    /// the ordinary end of a stream has no reason.
    End(End),
    /// Many packets of the server get lost on this link. The agent then prefers the TCP link for some time: the loss may
    /// come from UDP, and not from the path.
    Slow,
    /// Asks for an answer.
    Ping,
    /// Answer to a ping.
    Pong,
}

/// Link for new dials.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Preferred {
    /// The HTTP/2 connection over TCP.
    Tcp,
    /// The QUIC connection.
    Quic,
}

/// End of a stream with a reason.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct End {
    /// Number of the stream.
    pub stream: u64,
    /// Reason of the end; `None` for a reason of a newer peer that this version does not know.
    pub reason: Option<CloseReason>,
    /// Number of bytes on the stream before the end.
    pub offset: u64,
}

/// Reads the words of a control stream.
#[derive(Debug, Default)]
pub struct WordReader(Lines);

// === impl WordReader ===

impl WordReader {
    /// Calls `on_word` for each word that `bytes` complete. Skips words that this version does not know.
    pub fn push(&mut self, bytes: &[u8], mut on_word: impl FnMut(Word)) {
        self.0.push(bytes, &mut |line| {
            if let Some(word) = Word::parse(line) {
                on_word(word);
            }
        });
    }
}

// === impl Word ===

impl Word {
    /// Returns the bytes of the word.
    pub fn to_line(self) -> Bytes {
        format!("{self}\n").into()
    }

    /// Parses a line; `None` for a word that this version does not know.
    fn parse(line: &[u8]) -> Option<Self> {
        let mut parts = std::str::from_utf8(line).ok()?.split(' ');
        let mut next = || parts.next();
        let word = match next()? {
            "prefer" => Self::Prefer(match next()? {
                "tcp" => Preferred::Tcp,
                "quic" => Preferred::Quic,
                _ => return None,
            }),
            "end" => Self::End(End {
                stream: next()?.parse().ok()?,
                reason: CloseReason::from_code(next()?.parse().ok()?),
                offset: next()?.parse().ok()?,
            }),
            "slow" => Self::Slow,
            "ping" => Self::Ping,
            "pong" => Self::Pong,
            _ => return None,
        };
        next().is_none().then_some(word)
    }
}

impl fmt::Display for Word {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::Prefer(Preferred::Tcp) => f.write_str("prefer tcp"),
            Self::Prefer(Preferred::Quic) => f.write_str("prefer quic"),
            Self::End(end) => {
                let code = end.reason.map_or(u8::MAX, CloseReason::code);
                write!(f, "end {} {code} {}", end.stream, end.offset)
            }
            Self::Slow => f.write_str("slow"),
            Self::Ping => f.write_str("ping"),
            Self::Pong => f.write_str("pong"),
        }
    }
}

#[cfg(test)]
mod tests {
    #![allow(clippy::indexing_slicing)]

    use super::*;

    #[test]
    fn words_round_trip_through_their_lines_and_others_are_ignored() {
        let end = End {
            stream: u64::MAX,
            reason: None,
            offset: u64::MAX,
        };
        let words = [
            Word::Prefer(Preferred::Tcp),
            Word::Prefer(Preferred::Quic),
            Word::End(end),
            Word::Slow,
            Word::Ping,
            Word::Pong,
        ];
        for word in words {
            let line = word.to_line();
            assert_eq!(Word::parse(&line[..line.len() - 1]), Some(word));
        }
        let recorded = Word::parse(b"end 5 4 1000");
        let expected = End {
            stream: 5,
            reason: Some(CloseReason::EndpointLost),
            offset: 1000,
        };
        assert_eq!(recorded, Some(Word::End(expected)));
        let unknown: [&[u8]; 8] = [
            b"",
            b"prefer",
            b"prefer both",
            b"end 1 2",
            b"end 1 256 0",
            b"end -1 2 0",
            b"ping 1",
            b"\xff",
        ];
        for line in unknown {
            assert_eq!(Word::parse(line), None);
        }
    }
}
