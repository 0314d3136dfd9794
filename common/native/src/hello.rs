//! The introduction of the two ends: one HTTP/1.1 upgrade on the fresh TLS connection. The headers are the
//! metadata of the `Connect` call in the packet dialect. The server sends the reason of a refusal in an
//! ordinary response.
//!
//! ```text
//! agent:   GET /agent HTTP/1.1            server:  HTTP/1.1 101 Switching Protocols
//!          upgrade: culvert/1                      upgrade: culvert/1
//!          agentid: ...                            serverid: ...
//!          agentidentifiers: ...                   servercount: ...
//!          authorization: Bearer ...
//!          culvert-connected: ...
//! ```
//!
//! The agent lists the servers that it is connected to. A listed server answers `409 Conflict`, with the same headers
//! as for an accepted agent, and closes the connection. An older server ignores the list.

use std::io;

use bytes::BytesMut;
use culvert_stream::head::{HeadError, read_head};
use http::{HeaderMap, HeaderName, HeaderValue};
use tokio::io::{AsyncRead, AsyncReadExt, AsyncWrite, AsyncWriteExt};

/// Largest head to read, in bytes. Tokens make a head a few KiB long.
const HEAD_BYTES: usize = 64 * 1024;

/// Largest number of header lines to read.
pub(crate) const HEADER_LINES: usize = 64;

/// Request header with the id of a server that the agent is connected to. Repeated for each server.
const CONNECTED_HEADER: &str = "culvert-connected";

/// Largest number of listed servers, and of bytes of their ids. Servers accept few lines, and a duplicate connection to
/// a server that is not listed only costs more.
const CONNECTED_LINES: usize = 16;
const CONNECTED_BYTES: usize = 4096;

/// Answer of a server.
#[derive(Debug, PartialEq, Eq)]
pub enum Answer {
    /// The server accepts the agent. HTTP/2 follows.
    Accepted(HeaderMap),
    /// The agent is already connected to the server. The connection ends.
    AlreadyConnected(HeaderMap),
}

/// Reason why an introduction failed.
#[derive(Debug, thiserror::Error)]
pub enum HelloError {
    /// The connection broke.
    #[error("{0}")]
    Io(#[from] io::Error),
    /// The peer did not send an introduction.
    #[error("not an introduction of the native protocol: {0}")]
    Malformed(String),
    /// The server refused the agent; contains the text of the server's answer.
    #[error("{0}")]
    Refused(String),
}

/// Beginning of a server's refusal of a QUIC link whose session began at another server.
pub const NO_SESSION: &str = "the agent has no such session";

/// Lists connected servers in an agent's introduction, as many as fit.
pub fn add_connected(headers: &mut HeaderMap, server_ids: &[String]) {
    let mut bytes = 0;
    for id in server_ids.iter().take(CONNECTED_LINES) {
        bytes += id.len();
        let Ok(value) = HeaderValue::try_from(id) else {
            continue;
        };
        if bytes > CONNECTED_BYTES {
            return;
        }
        headers.append(CONNECTED_HEADER, value);
    }
}

/// Returns true if an agent's introduction lists the server.
pub fn has_connected(headers: &HeaderMap, server_id: &str) -> bool {
    let mut ids = headers.get_all(CONNECTED_HEADER).iter();
    ids.any(|id| id.as_bytes() == server_id.as_bytes())
}

/// Introduces the agent to the server, and returns the server's answer.
pub async fn introduce<S>(stream: &mut S, headers: &HeaderMap) -> Result<Answer, HelloError>
where
    S: AsyncRead + AsyncWrite + Unpin,
{
    let (code, headers) = exchange(stream, headers).await?;
    match code {
        Some(101) => return Ok(Answer::Accepted(headers)),
        Some(409) => return Ok(Answer::AlreadyConnected(headers)),
        _ => {}
    }
    Err(HelloError::Refused(refusal_text(stream).await))
}

/// Sends the head of an agent's request, and returns the status and the headers of the answer.
pub(crate) async fn exchange<S>(
    stream: &mut S,
    headers: &HeaderMap,
) -> Result<(Option<u16>, HeaderMap), HelloError>
where
    S: AsyncRead + AsyncWrite + Unpin,
{
    let mut head = b"GET /agent HTTP/1.1\r\nhost: culvert\r\n".to_vec();
    upgrade_head(&mut head, headers);
    stream.write_all(&head).await?;
    stream.flush().await?;
    let head = read_hello(stream).await?;
    let mut lines = [httparse::EMPTY_HEADER; HEADER_LINES];
    let mut response = httparse::Response::new(&mut lines);
    let parsed = response.parse(&head);
    parsed.map_err(|error| HelloError::Malformed(error.to_string()))?;
    let headers = header_map(response.headers)?;
    let code = response.code;
    Ok((code, headers))
}

/// Reads the text of a refusal. The peer closes the connection after the text.
pub(crate) async fn refusal_text<S: AsyncRead + Unpin>(stream: &mut S) -> String {
    let mut text = String::new();
    let mut rest = stream.take(HEAD_BYTES as u64);
    let _ = rest.read_to_string(&mut text).await;
    text.trim().to_owned()
}

/// Reads the introduction of an agent, on the server.
pub async fn read<S: AsyncRead + Unpin>(stream: &mut S) -> Result<HeaderMap, HelloError> {
    let head = read_hello(stream).await?;
    let mut lines = [httparse::EMPTY_HEADER; HEADER_LINES];
    let mut request = httparse::Request::new(&mut lines);
    let parsed = request.parse(&head);
    parsed.map_err(|error| HelloError::Malformed(error.to_string()))?;
    header_map(request.headers)
}

/// Accepts the agent, on the server. HTTP/2 follows.
///
/// # Errors
/// Fails if the connection broke.
pub async fn accept<S: AsyncWrite + Unpin>(stream: &mut S, headers: &HeaderMap) -> io::Result<()> {
    let mut head = b"HTTP/1.1 101 Switching Protocols\r\n".to_vec();
    upgrade_head(&mut head, headers);
    stream.write_all(&head).await?;
    stream.flush().await
}

/// Answers an agent that is already connected, on the server.
///
/// # Errors
/// Fails if the connection broke.
pub async fn already_connected<S>(stream: &mut S, headers: &HeaderMap) -> io::Result<()>
where
    S: AsyncWrite + Unpin,
{
    let mut head = b"HTTP/1.1 409 Conflict\r\nconnection: close\r\ncontent-length: 0\r\n".to_vec();
    add_lines(&mut head, headers);
    stream.write_all(&head).await?;
    stream.shutdown().await
}

/// Refuses the agent, on the server, with a text for the agent's log.
///
/// # Errors
/// Fails if the connection broke.
pub async fn refuse<S: AsyncWrite + Unpin>(stream: &mut S, text: &str) -> io::Result<()> {
    let answer = format!(
        "HTTP/1.1 403 Forbidden\r\ncontent-type: text/plain\r\nconnection: close\r\ncontent-length: {}\r\n\r\n{text}",
        text.len()
    );
    stream.write_all(answer.as_bytes()).await?;
    stream.shutdown().await
}

pub(crate) fn upgrade_head(head: &mut Vec<u8>, headers: &HeaderMap) {
    head.extend_from_slice(b"connection: upgrade\r\nupgrade: ");
    head.extend_from_slice(super::ALPN);
    head.extend_from_slice(b"\r\n");
    add_lines(head, headers);
}

/// Adds the lines of the headers, and the empty line.
pub(crate) fn add_lines(head: &mut Vec<u8>, headers: &HeaderMap) {
    for (name, value) in headers {
        head.extend_from_slice(name.as_str().as_bytes());
        head.extend_from_slice(b": ");
        head.extend_from_slice(value.as_bytes());
        head.extend_from_slice(b"\r\n");
    }
    head.extend_from_slice(b"\r\n");
}

/// Reads a head and no byte more: HTTP/2 begins directly after the empty line. Reading single bytes is cheap
/// here, because TLS has already decrypted the whole record.
async fn read_hello<S: AsyncRead + Unpin>(stream: &mut S) -> Result<BytesMut, HelloError> {
    let head = read_head(stream, HEAD_BYTES).await;
    head.map_err(|error| match error {
        HeadError::Io(error) => error.into(),
        HeadError::TooLarge => HelloError::Malformed("the head is too large".into()),
    })
}

pub(crate) fn header_map(lines: &[httparse::Header<'_>]) -> Result<HeaderMap, HelloError> {
    let mut headers = HeaderMap::with_capacity(lines.len());
    for line in lines {
        let name = HeaderName::from_bytes(line.name.as_bytes());
        let value = HeaderValue::from_bytes(line.value);
        let (Ok(name), Ok(value)) = (name, value) else {
            let what = format!("invalid header {:?}", line.name);
            return Err(HelloError::Malformed(what));
        };
        headers.append(name, value);
    }
    Ok(headers)
}

#[cfg(test)]
mod tests {
    #![allow(clippy::unwrap_used, clippy::indexing_slicing)]

    use super::*;

    fn headers(pairs: &[(&'static str, &'static str)]) -> HeaderMap {
        let pairs = pairs.iter();
        pairs
            .map(|(name, value)| {
                (
                    HeaderName::from_static(name),
                    HeaderValue::from_static(value),
                )
            })
            .collect()
    }

    #[tokio::test]
    async fn both_ends_exchange_headers_and_read_nothing_beyond_them() {
        let (mut agent, mut server) = tokio::io::duplex(4096);
        let says = headers(&[("agentid", "a"), ("agentidentifiers", "")]);
        let answers = headers(&[("serverid", "s")]);
        let serve = async {
            let heard = read(&mut server).await.unwrap();
            accept(&mut server, &answers).await.unwrap();
            server.write_all(b"PRI").await.unwrap();
            heard
        };
        let (answer, heard) = tokio::join!(introduce(&mut agent, &says), serve);
        assert_eq!(
            (&heard["agentid"], &heard["agentidentifiers"]),
            (&"a".parse().unwrap(), &"".parse().unwrap())
        );
        let Answer::Accepted(answer) = answer.unwrap() else {
            panic!("not accepted");
        };
        assert_eq!(answer["serverid"], "s");
        let mut next = [0; 3];
        agent.read_exact(&mut next).await.unwrap();
        assert_eq!(&next, b"PRI");
    }

    #[tokio::test]
    async fn a_refusal_reaches_the_agent_as_text() {
        let (mut agent, mut server) = tokio::io::duplex(4096);
        let serve = async {
            read(&mut server).await.unwrap();
            refuse(&mut server, "no such cluster").await.unwrap();
            drop(server);
        };
        let says = headers(&[("agentid", "a")]);
        let (answer, ()) = tokio::join!(introduce(&mut agent, &says), serve);
        assert_eq!(answer.unwrap_err().to_string(), "no such cluster");
    }

    #[tokio::test]
    async fn listed_server_answers_that_it_is_connected() {
        let (mut agent, mut server) = tokio::io::duplex(4096);
        let mut says = headers(&[("agentid", "a")]);
        add_connected(&mut says, &["one, two".to_owned(), "s".to_owned()]);
        let answers = headers(&[("serverid", "s"), ("servercount", "3")]);
        let serve = async {
            let heard = read(&mut server).await.unwrap();
            already_connected(&mut server, &answers).await.unwrap();
            ["s", "one, two", "one", ""].map(|id| has_connected(&heard, id))
        };
        let (answer, listed) = tokio::join!(introduce(&mut agent, &says), serve);
        assert_eq!(listed, [true, true, false, false]);
        let Answer::AlreadyConnected(answer) = answer.unwrap() else {
            panic!("accepted");
        };
        assert_eq!(answer["servercount"], "3");
    }

    #[test]
    fn list_of_servers_is_bounded() {
        let mut says = HeaderMap::new();
        let ids: Vec<_> = (0..100).map(|id| id.to_string()).collect();
        add_connected(&mut says, &ids);
        assert_eq!(says.len(), CONNECTED_LINES);
        says.clear();
        let long = [3000, 1000, 100].map(|bytes| "x".repeat(bytes));
        add_connected(&mut says, &long);
        add_connected(&mut says, &["not\na value".to_owned()]);
        assert_eq!(says.len(), 2);
    }

    #[tokio::test]
    async fn garbage_and_endless_heads_are_malformed() {
        let endless = [b"GET / HTTP/1.1\r\nx: ".to_vec(), vec![b'y'; HEAD_BYTES]].concat();
        for bytes in [b"\x16\x03\x01 hello\r\n\r\n".to_vec(), endless] {
            let error = read(&mut bytes.as_slice()).await.unwrap_err();
            assert!(matches!(error, HelloError::Malformed(_)), "{error}");
        }
    }
}
