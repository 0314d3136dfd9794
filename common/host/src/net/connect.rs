//! The head of an HTTP/1 CONNECT request, and the responses.
//!
//! [`read_request`] reads a request from a connection. The responses are the bytes that Go's `net/http` server
//! and the upstream proxy send, without a `Date` header: kube-apiserver shows these texts in its errors, and
//! people search for them.
//!
//! The target is the authority in the request line. The Host header is optional and ignored: kube-apiserver
//! sends `CONNECT host:port` together with `Host: 127.0.0.1`.

#[cfg(test)]
mod tests;

use std::io;

use bytes::BytesMut;
use culvert_stream::head::{HeadError, read_head_ahead};
use httparse::{EMPTY_HEADER, Error as Syntax, Request, Status};
use tokio::io::AsyncRead;

/// Response for a request whose target is connected. The client refuses tunnel data that it reads together
/// with this response, so write the response separately.
pub const ESTABLISHED: &[u8] = b"HTTP/1.1 200 Connection Established\r\n\r\n";

/// Maximum size of a head in bytes, including the empty line (Go's `http.DefaultMaxHeaderBytes`).
pub const MAX_HEAD_BYTES: usize = 1 << 20;

/// Maximum number of header fields. Go has no such limit; clients send fewer than ten.
pub const MAX_HEADERS: usize = 256;

/// Reason for sending [`response`](Self::response) instead of opening a tunnel.
#[derive(Debug, Clone, Copy, PartialEq, Eq, thiserror::Error)]
pub enum ConnectError {
    /// A well-formed request with another method.
    #[error("method is not CONNECT")]
    Method,
    /// Not an HTTP request, or a target that is not an authority.
    #[error("malformed request")]
    Malformed,
    /// More bytes than the caller's limit, or more than [`MAX_HEADERS`] fields.
    #[error("request head too large")]
    TooLarge,
    /// An HTTP version other than 1.0 and 1.1.
    #[error("unsupported HTTP version")]
    Version,
}

/// Reason why [`read_request`] returned no request.
#[derive(Debug)]
pub enum RequestError {
    /// The connection broke or ended before the end of the request.
    Io(io::Error),
    /// Not an acceptable request.
    Bad(ConnectError),
}

impl ConnectError {
    /// Returns the whole response. The caller must close the connection after the response.
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

/// Reads a request whose head has at most `limit` bytes and begins with the bytes in `buffer`. Early tunnel
/// data that was read along with the head is left in `buffer`. If the client sent nothing, `buffer` is empty
/// after the error.
///
/// Returns the authority of the request line, verbatim: normally `host:port`, with an IPv6 address in
/// brackets. The authority is not empty, has only visible ASCII characters, and may lack a port.
///
/// # Errors
/// See [`RequestError`].
pub async fn read_request<R: AsyncRead + Unpin>(
    reader: &mut R,
    buffer: &mut BytesMut,
    limit: usize,
) -> Result<String, RequestError> {
    let head = match read_head_ahead(reader, buffer, limit).await {
        Ok(head) => head,
        Err(HeadError::Io(error)) => return Err(RequestError::Io(error)),
        Err(HeadError::TooLarge) => return Err(RequestError::Bad(ConnectError::TooLarge)),
    };
    parse_head(&head).map_err(RequestError::Bad)
}

/// Returns the target of a complete head.
fn parse_head(head: &[u8]) -> Result<String, ConnectError> {
    let mut headers = [EMPTY_HEADER; MAX_HEADERS];
    let mut request = Request::new(&mut headers);
    match request.parse(head) {
        Ok(Status::Complete(len)) if len == head.len() => {}
        Err(Syntax::TooManyHeaders) => return Err(ConnectError::TooLarge),
        Err(Syntax::Version) if names_a_version(head) => return Err(ConnectError::Version),
        // Includes requests that do not end at the end of the head, for example without a request line.
        Ok(_) | Err(_) => return Err(ConnectError::Malformed),
    }
    match (request.method, request.path) {
        (Some("CONNECT"), Some(target)) if is_authority(target) => Ok(target.to_owned()),
        (Some("CONNECT"), _) => Err(ConnectError::Malformed),
        _ => Err(ConnectError::Method),
    }
}

/// Returns true if the request line ends in a version, supported or not: `HTTP/`, a digit, a dot, a digit.
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

/// Returns true if a target can be the authority of a URI without user information (RFC 3986, section 3.2).
/// The agent's resolver checks the rest.
fn is_authority(target: &str) -> bool {
    let allowed = |byte: u8| byte.is_ascii_graphic() && !b"/?#@\\".contains(&byte);
    !target.is_empty() && target.bytes().all(allowed)
}

/// Builds the response for a target that could not be connected. The caller must close the connection after
/// the response.
///
/// The headers are upstream's: for 500, the headers of its "no tunnels available" response; for 502, 503 and
/// 504, the headers of its dial failures. The response has no Content-Length; the end of the connection ends
/// the body.
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

/// Returns the status for an agent's dial error, by its text: 504 for a timeout, 503 for too many open files,
/// 502 otherwise.
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
