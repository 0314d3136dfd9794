//! The part of the introductions about resumption.
//!
//! ```text
//! agent:   GET /agent HTTP/1.1            server:  HTTP/1.1 101 Switching Protocols
//!          ...                                     ...
//!          culvert-resume: 1                       culvert-resume: <id>.<secret>
//!
//! agent:   GET /agent HTTP/1.1            server:  HTTP/1.1 101 Switching Protocols
//!          ...                                     culvert-received: <received>.<from>
//!          culvert-server: <server id>    or       409 if the session has ended, with culvert-resume
//!          culvert-resume:                or       421 from another server
//!            <id>.<proof>.<received>      or       403 and a text for the agent's log
//! ```
//!
//! The proof is an HMAC with the secret over bytes that both ends derive from the TLS handshake (RFC 5705), so the
//! secret travels once, and a proof is of no use on another connection. Servers of older versions ignore the headers
//! and answer as to any introduction; the answer then has no header `culvert-received` or `culvert-resume`.

use std::fmt;
use std::io;

use aws_lc_rs::rand::SystemRandom;
use aws_lc_rs::{hmac, rand::SecureRandom as _};
use http::{HeaderMap, HeaderName, HeaderValue};
use tokio::io::{AsyncRead, AsyncWrite, AsyncWriteExt as _};

use super::session::Positions;
use crate::hello::{HelloError, add_lines, exchange, refusal_text, upgrade_head};

/// Label of the bytes that both ends derive from the TLS handshake.
pub const EXPORTER_LABEL: &[u8] = b"EXPORTER-culvert-resume";

/// Header with the offer, the ticket or the request.
const RESUME: HeaderName = HeaderName::from_static("culvert-resume");

/// Header of a request with the id of the server that has the session.
const SERVER: HeaderName = HeaderName::from_static("culvert-server");

/// Header of an answer with the positions of the server.
const RECEIVED: HeaderName = HeaderName::from_static("culvert-received");

/// Value of the agent's offer.
const OFFER: HeaderValue = HeaderValue::from_static("1");

/// Bytes that both ends derive from the TLS handshake of one connection.
pub type Binding = [u8; 32];

/// Right to resume a session.
#[derive(Clone, PartialEq, Eq)]
pub struct Ticket {
    /// Id of the session.
    pub id: [u8; 16],
    secret: [u8; 32],
}

/// Request of an agent to resume a session.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct ResumeRequest {
    /// Id of the session.
    pub id: [u8; 16],
    /// Number of bytes that the agent has received.
    pub received: u64,
    proof: [u8; 32],
    server: Vec<u8>,
}

/// Part of an introduction about resumption.
#[derive(Debug, PartialEq, Eq)]
pub enum Offer {
    /// The agent does not support resumption.
    None,
    /// The agent offers to resume the new session.
    New,
    /// The agent resumes a session.
    Resume(ResumeRequest),
}

/// Answer of a server to a request.
#[derive(Debug, PartialEq, Eq)]
pub enum ResumeAnswer {
    /// The session continues from these positions of the server.
    Resumed(Positions),
    /// The session has ended.
    Over,
    /// Another server answered.
    Other,
    /// The server refused the agent; contains the text of the answer.
    Refused(String),
}

// === impl Ticket ===

impl Ticket {
    /// Creates the ticket of a new session. Returns `None` if the system has no random numbers.
    pub fn random() -> Option<Self> {
        let mut bytes = [0; 48];
        SystemRandom::new().fill(&mut bytes).ok()?;
        let (id, secret) = bytes.split_at(16);
        Some(Self {
            id: id.try_into().ok()?,
            secret: secret.try_into().ok()?,
        })
    }

    /// Returns the proof that the sender has the ticket.
    fn proof(&self, binding: &Binding) -> [u8; 32] {
        let tag = hmac::sign(&self.key(), binding);
        // SHA-256 has 32 bytes.
        tag.as_ref().try_into().unwrap_or_default()
    }

    /// Returns true if the request was made with this ticket, on the connection with this binding.
    pub fn proves(&self, request: &ResumeRequest, binding: &Binding) -> bool {
        self.id == request.id && hmac::verify(&self.key(), binding, &request.proof).is_ok()
    }

    fn key(&self) -> hmac::Key {
        hmac::Key::new(hmac::HMAC_SHA256, &self.secret)
    }
}

impl fmt::Debug for Ticket {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str("Ticket")
    }
}

// === impl ResumeRequest ===

impl ResumeRequest {
    /// Returns true if the session belongs to the server.
    pub fn is_for(&self, server_id: &str) -> bool {
        self.server == server_id.as_bytes()
    }
}

/// Adds the agent's offer to an introduction.
pub fn add_offer(headers: &mut HeaderMap) {
    headers.insert(RESUME, OFFER);
}

/// Adds the ticket to the server's answer.
pub fn add_ticket(headers: &mut HeaderMap, ticket: &Ticket) {
    let text = format!("{}.{}", hex(&ticket.id), hex(&ticket.secret));
    if let Ok(mut value) = HeaderValue::try_from(text) {
        value.set_sensitive(true);
        headers.insert(RESUME, value);
    }
}

/// Adds a request to an introduction. `received` is the number of bytes that the agent has received.
pub fn add_request(
    headers: &mut HeaderMap,
    ticket: &Ticket,
    server_id: &str,
    binding: &Binding,
    received: u64,
) {
    let (id, proof) = (hex(&ticket.id), hex(&ticket.proof(binding)));
    let text = format!("{id}.{proof}.{received}");
    let values = (
        HeaderValue::try_from(text),
        HeaderValue::try_from(server_id),
    );
    if let (Ok(request), Ok(server)) = values {
        headers.insert(RESUME, request);
        headers.insert(SERVER, server);
    }
}

/// Returns the ticket in a server's answer. Returns `None` if the server does not resume sessions.
pub fn ticket(headers: &HeaderMap) -> Option<Ticket> {
    let (id, secret) = headers.get(RESUME)?.to_str().ok()?.split_once('.')?;
    Some(Ticket {
        id: unhex(id)?,
        secret: unhex(secret)?,
    })
}

/// Returns the part of an introduction about resumption. A value of a newer version counts as no offer.
///
/// # Errors
/// Fails if the request is malformed.
pub fn offer(headers: &HeaderMap) -> Result<Offer, HelloError> {
    let Some(value) = headers.get(RESUME) else {
        return Ok(Offer::None);
    };
    if *value == OFFER {
        return Ok(Offer::New);
    }
    let text = value.to_str().unwrap_or_default();
    if !text.contains('.') {
        return Ok(Offer::None);
    }
    let request = || {
        let mut fields = text.split('.');
        let (id, proof) = (unhex(fields.next()?)?, unhex(fields.next()?)?);
        let received = fields.next()?.parse().ok()?;
        let server = headers.get(SERVER)?.as_bytes().to_vec();
        fields.next().is_none().then_some(ResumeRequest {
            id,
            received,
            proof,
            server,
        })
    };
    let malformed = || HelloError::Malformed("a malformed request to resume a session".into());
    request().map(Offer::Resume).ok_or_else(malformed)
}

/// Sends a request to resume a session, and returns the server's answer.
///
/// # Errors
/// Fails if the connection broke, or the peer is not a server.
pub async fn resume<S>(stream: &mut S, headers: &HeaderMap) -> Result<ResumeAnswer, HelloError>
where
    S: AsyncRead + AsyncWrite + Unpin,
{
    let (code, headers) = exchange(stream, headers).await?;
    match code {
        Some(101) => {
            let positions = positions(&headers).map(ResumeAnswer::Resumed);
            return Ok(positions.unwrap_or(ResumeAnswer::Other));
        }
        Some(409) if headers.contains_key(RESUME) => return Ok(ResumeAnswer::Over),
        Some(409 | 421) => return Ok(ResumeAnswer::Other),
        _ => {}
    }
    Ok(ResumeAnswer::Refused(refusal_text(stream).await))
}

/// Returns the positions in a server's answer.
fn positions(headers: &HeaderMap) -> Option<Positions> {
    let value = headers.get(RECEIVED)?.to_str().ok()?;
    let (received, from) = value.split_once('.')?;
    Some(Positions {
        received: received.parse().ok()?,
        from: from.parse().ok()?,
    })
}

/// Returns the answer that continues a session from these positions of the server. Frames follow.
pub fn answer_head(Positions { received, from }: Positions) -> Vec<u8> {
    let mut head = b"HTTP/1.1 101 Switching Protocols\r\n".to_vec();
    let mut headers = HeaderMap::new();
    // Digits and a dot are a valid value.
    if let Ok(value) = HeaderValue::try_from(format!("{received}.{from}")) {
        headers.insert(RECEIVED, value);
    }
    upgrade_head(&mut head, &headers);
    head
}

/// Answers that the session has ended.
///
/// # Errors
/// Fails if the connection broke.
pub async fn over<S: AsyncWrite + Unpin>(stream: &mut S) -> io::Result<()> {
    let headers = HeaderMap::from_iter([(RESUME, HeaderValue::from_static("over"))]);
    refusal(stream, "409 Conflict", &headers).await
}

/// Answers that the session belongs to another server.
///
/// # Errors
/// Fails if the connection broke.
pub async fn misdirected<S: AsyncWrite + Unpin>(stream: &mut S) -> io::Result<()> {
    refusal(stream, "421 Misdirected Request", &HeaderMap::new()).await
}

async fn refusal<S>(stream: &mut S, status: &str, headers: &HeaderMap) -> io::Result<()>
where
    S: AsyncWrite + Unpin,
{
    let head = format!("HTTP/1.1 {status}\r\nconnection: close\r\ncontent-length: 0\r\n");
    let mut head = head.into_bytes();
    add_lines(&mut head, headers);
    stream.write_all(&head).await?;
    stream.shutdown().await
}

pub(super) fn hex(bytes: &[u8]) -> String {
    use fmt::Write as _;
    let mut text = String::with_capacity(2 * bytes.len());
    for byte in bytes {
        // Cannot fail: the target is a String.
        let _ = write!(text, "{byte:02x}");
    }
    text
}

pub(super) fn unhex<const N: usize>(text: &str) -> Option<[u8; N]> {
    let mut bytes = [0; N];
    let digits = text.as_bytes();
    if digits.len() != 2 * N || !digits.iter().all(u8::is_ascii_hexdigit) {
        return None;
    }
    for (byte, pair) in bytes.iter_mut().zip(digits.chunks(2)) {
        *byte = u8::from_str_radix(std::str::from_utf8(pair).ok()?, 16).ok()?;
    }
    Some(bytes)
}

#[cfg(test)]
mod tests {
    #![allow(clippy::unwrap_used)]

    use super::*;
    use crate::hello;

    const BINDING: Binding = [7; 32];

    fn request(ticket: &Ticket, binding: &Binding) -> HeaderMap {
        let mut headers = HeaderMap::new();
        add_request(&mut headers, ticket, "s", binding, 12);
        headers
    }

    #[test]
    fn ticket_and_request_travel_as_headers() {
        let ticket = Ticket::random().unwrap();
        let mut answer = HeaderMap::new();
        add_ticket(&mut answer, &ticket);
        assert_eq!(super::ticket(&answer).as_ref(), Some(&ticket));
        let Ok(Offer::Resume(request)) = offer(&request(&ticket, &BINDING)) else {
            panic!("no request");
        };
        assert!(request.is_for("s") && !request.is_for("t"));
        assert_eq!((request.id, request.received), (ticket.id, 12));
        assert!(ticket.proves(&request, &BINDING));
        assert!(!ticket.proves(&request, &[8; 32]));
        let mut foreign = Ticket::random().unwrap();
        assert!(!foreign.proves(&request, &BINDING));
        foreign.id = ticket.id;
        assert!(!foreign.proves(&request, &BINDING));
    }

    #[test]
    fn secret_is_neither_in_a_request_nor_in_debug_output() {
        let ticket = Ticket::random().unwrap();
        let headers = format!("{:?}", request(&ticket, &BINDING));
        assert!(!headers.contains(&hex(&ticket.secret)));
        let mut answer = HeaderMap::new();
        add_ticket(&mut answer, &ticket);
        let shown = format!("{answer:?} {ticket:?}");
        assert!(!shown.contains(&hex(&ticket.secret)), "{shown}");
    }

    #[test]
    fn malformed_requests_are_errors_and_unknown_offers_are_none() {
        let ticket = Ticket::random().unwrap();
        let good = request(&ticket, &BINDING);
        let text = good.get(RESUME).unwrap().to_str().unwrap().to_owned();
        for bad in [
            ".",
            "a.b.c",
            text.trim_end_matches("12"),
            &text.replacen('.', "", 1),
            &format!("{text}.1"),
            &format!("{text}x"),
            &text.to_uppercase().replace('.', "-."),
        ] {
            let mut headers = good.clone();
            headers.insert(RESUME, bad.parse().unwrap());
            assert!(offer(&headers).is_err(), "{bad}");
        }
        let mut headers = good;
        headers.remove(SERVER);
        assert!(offer(&headers).is_err());
        for (value, expected) in [("1", Offer::New), ("2", Offer::None), ("", Offer::None)] {
            headers.insert(RESUME, value.parse().unwrap());
            assert_eq!(offer(&headers).unwrap(), expected);
        }
        assert_eq!(offer(&HeaderMap::new()).unwrap(), Offer::None);
    }

    async fn answer_of<F>(answer: impl FnOnce(tokio::io::DuplexStream) -> F) -> ResumeAnswer
    where
        F: Future<Output = ()>,
    {
        let (mut agent, mut server) = tokio::io::duplex(4096);
        let serve = async {
            hello::read(&mut server).await.unwrap();
            answer(server).await;
        };
        let headers = HeaderMap::new();
        let (answer, ()) = tokio::join!(resume(&mut agent, &headers), serve);
        answer.unwrap()
    }

    #[tokio::test]
    async fn every_answer_reaches_the_agent() {
        let positions = Positions {
            received: 34,
            from: 12,
        };
        let resumed = answer_of(async |mut server| {
            server.write_all(&answer_head(positions)).await.unwrap();
        });
        assert_eq!(resumed.await, ResumeAnswer::Resumed(positions));
        let ended = answer_of(async |mut server| over(&mut server).await.unwrap());
        assert_eq!(ended.await, ResumeAnswer::Over);
        let other = answer_of(async |mut server| misdirected(&mut server).await.unwrap());
        assert_eq!(other.await, ResumeAnswer::Other);
        let refused = answer_of(async |mut server| {
            hello::refuse(&mut server, "no such token").await.unwrap();
        });
        let text = "no such token".to_owned();
        assert_eq!(refused.await, ResumeAnswer::Refused(text));
    }

    /// Servers of older versions answer a request as any introduction.
    #[tokio::test]
    async fn answers_of_older_servers_are_from_another_server() {
        let headers = HeaderMap::new();
        let accepted = answer_of(async |mut server| {
            hello::accept(&mut server, &headers).await.unwrap();
        });
        assert_eq!(accepted.await, ResumeAnswer::Other);
        let connected = answer_of(async |mut server| {
            let answered = hello::already_connected(&mut server, &headers).await;
            answered.unwrap();
        });
        assert_eq!(connected.await, ResumeAnswer::Other);
    }
}
