//! The head of an HTTP/1 CONNECT request, and the answers to it.
//!
//! Does no I/O: the caller collects what the client sends and asks a [`HeadReader`] whether the head is
//! complete. The answers are the bytes that Go's `net/http` server and the upstream proxy send, without
//! a `Date`: kube-apiserver shows them in its errors, and people search for those texts.
//!
//! The target is what stands in the request line. The Host header is neither needed nor looked at:
//! kube-apiserver sends `CONNECT host:port` together with `Host: 127.0.0.1`.

#[cfg(test)]
mod tests;

use httparse::{EMPTY_HEADER, Error as Syntax, Request, Status};

/// The answer to a request whose target is connected. The client refuses any tunnel data that it
/// reads together with this, so it has to be written on its own.
pub const ESTABLISHED: &[u8] = b"HTTP/1.1 200 Connection Established\r\n\r\n";

/// The largest head, in bytes, the empty line included (Go's `http.DefaultMaxHeaderBytes`).
pub const MAX_HEAD_BYTES: usize = 1 << 20;

/// The most header fields a head may have. Go has no such limit; clients send below ten.
pub const MAX_HEADERS: usize = 256;

/// A complete CONNECT request.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct ConnectHead {
    /// The authority of the request line, verbatim: normally `host:port`, with an IPv6 address in
    /// brackets. It has visible ASCII characters only, is not empty, and need not have a port.
    pub target: String,
    /// The length of the head in bytes; what follows is tunnel data that came early.
    pub head_len: usize,
}

/// Why a request gets [`response`](Self::response) instead of a tunnel.
#[derive(Debug, Clone, Copy, PartialEq, Eq, thiserror::Error)]
pub enum ConnectError {
    /// A well-formed request of another method.
    #[error("method is not CONNECT")]
    Method,
    /// Not a request, or a target that is no authority.
    #[error("malformed request")]
    Malformed,
    /// More than [`MAX_HEAD_BYTES`] or [`MAX_HEADERS`].
    #[error("request head too large")]
    TooLarge,
    /// An HTTP version other than 1.0 and 1.1.
    #[error("unsupported HTTP version")]
    Version,
}

impl ConnectError {
    /// The whole answer; the connection is to be closed behind it.
    pub fn response(self) -> &'static [u8] {
        match self {
            Self::Method => {
                b"HTTP/1.1 405 Method Not Allowed\r\n\
                  Content-Type: text/plain; charset=utf-8\r\n\
                  X-Content-Type-Options: nosniff\r\n\
                  Content-Length: 45\r\n\
                  Connection: close\r\n\r\n\
                  this proxy only supports CONNECT passthrough\n"
            }
            Self::Malformed => {
                b"HTTP/1.1 400 Bad Request\r\n\
                  Content-Type: text/plain; charset=utf-8\r\n\
                  Connection: close\r\n\r\n\
                  400 Bad Request"
            }
            Self::TooLarge => {
                b"HTTP/1.1 431 Request Header Fields Too Large\r\n\
                  Content-Type: text/plain; charset=utf-8\r\n\
                  Connection: close\r\n\r\n\
                  431 Request Header Fields Too Large"
            }
            Self::Version => {
                b"HTTP/1.1 505 HTTP Version Not Supported: unsupported protocol version\r\n\
                  Content-Type: text/plain; charset=utf-8\r\n\
                  Connection: close\r\n\r\n\
                  505 HTTP Version Not Supported: unsupported protocol version"
            }
        }
    }
}

/// Finds the end of a head that arrives in pieces.
///
/// Remembers how far it has looked, so that a head of any length and any number of pieces is searched
/// once. One reader is for one request.
#[derive(Debug, Default)]
pub struct HeadReader {
    /// No line ends before this offset that has not been looked at.
    searched: usize,
    /// Where the line begins that `searched` lies in.
    line: usize,
}

impl HeadReader {
    /// Looks at everything received so far; `None` while the head is incomplete. `received` may only grow
    /// at its end between calls.
    ///
    /// # Errors
    /// [`ConnectError`], whose response ends the connection.
    pub fn read(&mut self, received: &[u8]) -> Result<Option<ConnectHead>, ConnectError> {
        let within_limit = received.get(..MAX_HEAD_BYTES).unwrap_or(received);
        match self.find_end(within_limit) {
            Some(head) => parse_head(head).map(Some),
            None if within_limit.len() == MAX_HEAD_BYTES => Err(ConnectError::TooLarge),
            None => Ok(None),
        }
    }

    /// The head up to and with its empty line. Lines may end in a bare LF, as Go allows.
    fn find_end<'a>(&mut self, received: &'a [u8]) -> Option<&'a [u8]> {
        loop {
            let unseen = received.get(self.searched..)?;
            let Some(offset) = unseen.iter().position(|&byte| byte == b'\n') else {
                self.searched = received.len();
                return None;
            };
            let end = self.searched + offset;
            let line = received.get(self.line..end)?;
            if line.is_empty() || line == b"\r" {
                // The fields stay as they are: another call finds the same end.
                return received.get(..=end);
            }
            self.searched = end + 1;
            self.line = end + 1;
        }
    }
}

/// Parses what a client has sent; `None` while the head is incomplete. For a head that arrives in many
/// pieces use a [`HeadReader`].
///
/// # Errors
/// [`ConnectError`], whose response ends the connection.
pub fn parse(received: &[u8]) -> Result<Option<ConnectHead>, ConnectError> {
    HeadReader::default().read(received)
}

/// Parses a head that is complete.
fn parse_head(head: &[u8]) -> Result<ConnectHead, ConnectError> {
    let mut headers = [EMPTY_HEADER; MAX_HEADERS];
    let mut request = Request::new(&mut headers);
    match request.parse(head) {
        Ok(Status::Complete(len)) if len == head.len() => {}
        Err(Syntax::TooManyHeaders) => return Err(ConnectError::TooLarge),
        Err(Syntax::Version) if names_a_version(head) => return Err(ConnectError::Version),
        // A request that does not end where its head ends: no request line, for one.
        Ok(_) | Err(_) => return Err(ConnectError::Malformed),
    }
    match (request.method, request.path) {
        (Some("CONNECT"), Some(target)) if is_authority(target) => Ok(ConnectHead {
            target: target.to_owned(),
            head_len: head.len(),
        }),
        (Some("CONNECT"), _) => Err(ConnectError::Malformed),
        _ => Err(ConnectError::Method),
    }
}

/// Whether the request line ends in a version, supported or not: `HTTP/`, a digit, a dot, a digit.
fn names_a_version(head: &[u8]) -> bool {
    let line = head
        .split(|&byte| byte == b'\n')
        .next()
        .unwrap_or_default()
        .trim_ascii_end();
    let version = line.rsplit(|&byte| byte == b' ').next().unwrap_or_default();
    matches!(version, [b'H', b'T', b'T', b'P', b'/', major, b'.', minor]
        if major.is_ascii_digit() && minor.is_ascii_digit())
}

/// Whether a target can be the authority of a URI without user information (RFC 3986, section 3.2).
/// The agent's resolver judges the rest.
fn is_authority(target: &str) -> bool {
    let allowed = |byte: u8| byte.is_ascii_graphic() && !b"/?#@\\".contains(&byte);
    !target.is_empty() && target.bytes().all(allowed)
}

/// An answer that says why a target is not connected; the connection is to be closed behind it.
///
/// The headers are upstream's: those of its "no tunnels available" for 500, those of its dial
/// failures for 502, 503 and 504. There is no Content-Length, the body ends with the connection.
pub fn failure(status: u16, body: &str) -> Vec<u8> {
    let headers = match status {
        500 => "Content-Type: text/plain",
        _ => "Connection: close\r\nContent-Type: text/plain; charset=utf-8",
    };
    let reason = http::StatusCode::from_u16(status)
        .ok()
        .and_then(|code| code.canonical_reason());
    let reason = reason.unwrap_or_default();
    format!("HTTP/1.1 {status} {reason}\r\n{headers}\r\n\r\n{body}").into_bytes()
}

/// The status for an agent's dial error, told by its text: 504 for a timeout, 503 for a lack of
/// sockets, 502 for all else.
pub fn dial_failure_status(error: &str) -> u16 {
    let error = error.to_ascii_lowercase();
    let mentions = |texts: &[&str]| texts.iter().any(|text| error.contains(text));
    if mentions(&["timeout", "deadline exceeded"]) {
        504
    } else if mentions(&["too many open files"]) {
        503
    } else {
        502
    }
}
