//! The control stream: messages about a whole agent connection, one per line, in both directions.
//!
//! The agent sends its messages in the response body, the server in the request body. Either end ignores lines
//! of newer versions.

use std::fmt;

use bytes::Bytes;
use h2::RecvStream;

/// Longest line to read, in bytes. Known messages are shorter; the rest of a longer line is dropped.
const LINE_BYTES: usize = 64;

/// Message on the control stream.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Control {
    /// The sender stops soon. A draining agent prefers to get no new dials. A draining server still sends
    /// dials; the agent connects to another server meanwhile.
    Drain,
    /// Number of servers that an agent should be connected to; only a server sends it.
    Servers(i64),
    /// True if the number of servers follows the servers, so that an agent rarely needs to look for more; only a
    /// server sends it.
    Follows(bool),
}

/// Splits the bytes of a control stream into lines.
#[derive(Debug, Default)]
pub(crate) struct Lines {
    line: Vec<u8>,
}

/// Receives messages until the peer ends the stream. Calls `message` for each.
///
/// # Errors
/// Fails if the stream or its connection breaks.
pub async fn receive(
    mut body: RecvStream,
    mut message: impl FnMut(Control),
) -> Result<(), h2::Error> {
    let mut lines = Lines::default();
    while let Some(part) = body.data().await.transpose()? {
        body.flow_control().release_capacity(part.len())?;
        lines.push(&part, &mut |line| {
            if let Some(control) = Control::parse(line) {
                message(control);
            }
        });
    }
    Ok(())
}

// === impl Control ===

impl Control {
    /// Returns the bytes of the message.
    pub fn to_line(self) -> Bytes {
        format!("{self}\n").into()
    }

    fn parse(line: &[u8]) -> Option<Self> {
        let line = std::str::from_utf8(line).ok()?;
        match line.split_once(' ') {
            None if line == "drain" => Some(Self::Drain),
            Some(("servers", count)) => count.parse().ok().map(Self::Servers),
            Some(("follows", "0")) => Some(Self::Follows(false)),
            Some(("follows", "1")) => Some(Self::Follows(true)),
            _ => None,
        }
    }
}

impl fmt::Display for Control {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::Drain => f.write_str("drain"),
            Self::Servers(count) => write!(f, "servers {count}"),
            Self::Follows(follows) => write!(f, "follows {}", u8::from(*follows)),
        }
    }
}

// === impl Lines ===

impl Lines {
    /// Calls `line` for each line that `bytes` complete.
    pub(crate) fn push(&mut self, mut bytes: &[u8], line: &mut impl FnMut(&[u8])) {
        while let Some(end) = bytes.iter().position(|byte| *byte == b'\n') {
            let (rest, next) = bytes.split_at(end);
            self.extend(rest);
            bytes = next.get(1..).unwrap_or_default();
            line(&std::mem::take(&mut self.line));
        }
        self.extend(bytes);
    }

    /// Appends a part of a line. A line over the limit stays one byte longer than the limit, so that its
    /// beginning is not taken for a whole message.
    fn extend(&mut self, part: &[u8]) {
        let room = (LINE_BYTES + 1).saturating_sub(self.line.len());
        self.line.extend(part.iter().take(room));
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn messages(parts: &[&[u8]]) -> Vec<Control> {
        let (mut lines, mut messages) = (Lines::default(), Vec::new());
        for part in parts {
            lines.push(part, &mut |line| messages.extend(Control::parse(line)));
            assert!(lines.line.len() <= LINE_BYTES + 1);
        }
        messages
    }

    #[test]
    fn messages_are_read_from_any_parts() {
        let sent = [
            Control::Drain,
            Control::Servers(5),
            Control::Servers(-1),
            Control::Follows(true),
            Control::Follows(false),
        ];
        let bytes: Vec<u8> = sent.iter().flat_map(|m| m.to_line()).collect();
        assert_eq!(
            bytes,
            b"drain\nservers 5\nservers -1\nfollows 1\nfollows 0\n"
        );
        assert_eq!(messages(&[&bytes]), sent);
        let single: Vec<&[u8]> = bytes.chunks(1).collect();
        assert_eq!(messages(&single), sent);
    }

    #[test]
    fn unknown_and_long_lines_are_ignored() {
        let long = [b"drain".as_slice(), &[b' '; 2 * LINE_BYTES], b"\n"].concat();
        assert_eq!(messages(&[&long, b"drain\n"]), [Control::Drain]);
        let unknown: [&[u8]; 7] = [
            b"\n",
            b"drain now\n",
            b"servers\n",
            b"servers many\n",
            b"servers 5 6\n",
            b"follows 2\n",
            b"\xff\n",
        ];
        assert_eq!(messages(&unknown), []);
    }
}
