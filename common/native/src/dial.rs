//! Requests and answers of dials, as HTTP messages. HTTP/2 carries the messages in frames, a QUIC stream as the
//! text of an HTTP/1.1 head.

use std::time::Duration;

use bytes::{Bytes, BytesMut};
use culvert_stream::Dial;
use culvert_stream::head::{HeadError, read_head_ahead};
use http::uri::Authority;
use http::{HeaderMap, HeaderName, HeaderValue, Method, Request, Response, StatusCode, Uri};
use tokio::io::AsyncRead;

use super::hello::add_lines;
use super::{ADDRESS_HEADER, ERROR_HEADER, NETWORK_HEADER, decode, encode};

/// Largest head of a dial or of its answer, in bytes. Heads are shorter than 1 KiB, except for long error texts.
const HEAD_BYTES: usize = 64 * 1024;

/// Largest number of header lines in a head.
const HEADER_LINES: usize = 16;

/// Time for the head of a dial to arrive, once its stream is open.
pub const HEAD_TIMEOUT: Duration = Duration::from_secs(20);

/// Error for a head that is not one of this module.
#[derive(Debug, thiserror::Error)]
#[error("not the head of a dial: {0}")]
pub struct MalformedHead(String);

/// Returns the request for a dial.
pub fn request(dial: &Dial) -> Request<()> {
    let mut request = Request::new(());
    *request.method_mut() = Method::CONNECT;
    // Most addresses are valid HTTP authorities. Other addresses travel in a header.
    let authority = Authority::try_from(dial.address.as_str())
        .ok()
        .filter(|parsed| parsed.as_str() == dial.address && !dial.address.contains('@'));
    let authority = authority.unwrap_or_else(|| {
        let address = encode(&dial.address);
        request.headers_mut().insert(ADDRESS_HEADER, address);
        Authority::from_static("address.invalid:0")
    });
    if dial.protocol != "tcp" {
        let network = encode(&dial.protocol);
        request.headers_mut().insert(NETWORK_HEADER, network);
    }
    *request.uri_mut() = Uri::from(authority);
    request
}

/// Returns the dial of a request.
pub fn dial_of<B>(request: &Request<B>) -> Dial {
    let header = |name: &'static str| request.headers().get(name).map(decode);
    let authority = || {
        let authority = request.uri().authority();
        authority.map_or_else(String::new, ToString::to_string)
    };
    Dial {
        protocol: header(NETWORK_HEADER).unwrap_or_else(|| "tcp".into()),
        address: header(ADDRESS_HEADER).unwrap_or_else(authority),
    }
}

/// Returns the answer for an open connection.
pub fn accepted() -> Response<()> {
    Response::new(())
}

/// Returns the answer for a failed dial, with the error's text.
pub fn refusal(is_timeout: bool, text: &str) -> Response<()> {
    let mut response = Response::new(());
    *response.status_mut() = match is_timeout {
        true => StatusCode::GATEWAY_TIMEOUT,
        false => StatusCode::BAD_GATEWAY,
    };
    response.headers_mut().insert(ERROR_HEADER, encode(text));
    response
}

/// Returns the text of an answer for a failed dial.
pub fn error_text<B>(answer: &Response<B>) -> String {
    let text = answer.headers().get(ERROR_HEADER).map(decode);
    text.unwrap_or_else(|| format!("the agent answered the dial with {}", answer.status()))
}

/// Returns the text of a request.
pub fn request_text(request: &Request<()>) -> Bytes {
    let authority = request.uri().authority().map_or("", Authority::as_str);
    text(
        format!("CONNECT {authority} HTTP/1.1\r\n"),
        request.headers(),
    )
}

/// Returns the text of an answer.
pub fn response_text(response: &Response<()>) -> Bytes {
    let status = response.status().as_u16();
    text(format!("HTTP/1.1 {status} \r\n"), response.headers())
}

/// Reads a head. Later bytes that arrive with the head stay in `buffer`.
///
/// # Errors
/// See [`read_head_ahead`].
pub async fn read_head<R: AsyncRead + Unpin>(
    reader: &mut R,
    buffer: &mut BytesMut,
) -> Result<BytesMut, HeadError> {
    read_head_ahead(reader, buffer, HEAD_BYTES).await
}

/// Parses the text of a request.
///
/// # Errors
/// Fails if the text is not a CONNECT request.
pub fn parse_request(head: &[u8]) -> Result<Request<()>, MalformedHead> {
    let mut lines = [httparse::EMPTY_HEADER; HEADER_LINES];
    let mut parsed = httparse::Request::new(&mut lines);
    parsed.parse(head).map_err(malformed)?;
    if parsed.method != Some("CONNECT") {
        return Err(MalformedHead("the method is not CONNECT".into()));
    }
    let authority = Authority::try_from(parsed.path.unwrap_or_default()).map_err(malformed)?;
    let mut request = Request::new(());
    *request.method_mut() = Method::CONNECT;
    *request.uri_mut() = Uri::from(authority);
    *request.headers_mut() = header_map(parsed.headers)?;
    Ok(request)
}

/// Parses the text of an answer.
///
/// # Errors
/// Fails if the text is not a response.
pub fn parse_response(head: &[u8]) -> Result<Response<()>, MalformedHead> {
    let mut lines = [httparse::EMPTY_HEADER; HEADER_LINES];
    let mut parsed = httparse::Response::new(&mut lines);
    parsed.parse(head).map_err(malformed)?;
    let status = StatusCode::from_u16(parsed.code.unwrap_or_default()).map_err(malformed)?;
    let mut response = Response::new(());
    *response.status_mut() = status;
    *response.headers_mut() = header_map(parsed.headers)?;
    Ok(response)
}

fn text(start: String, headers: &HeaderMap) -> Bytes {
    let mut head = start.into_bytes();
    add_lines(&mut head, headers);
    head.into()
}

fn header_map(lines: &[httparse::Header<'_>]) -> Result<HeaderMap, MalformedHead> {
    let mut headers = HeaderMap::with_capacity(lines.len());
    for line in lines {
        let name = HeaderName::from_bytes(line.name.as_bytes()).map_err(malformed)?;
        let value = HeaderValue::from_bytes(line.value).map_err(malformed)?;
        headers.append(name, value);
    }
    Ok(headers)
}

fn malformed(error: impl ToString) -> MalformedHead {
    MalformedHead(error.to_string())
}

#[cfg(test)]
mod tests {
    #![allow(clippy::unwrap_used)]

    use super::*;

    #[test]
    fn any_dial_round_trips_through_a_request_and_its_text() {
        for (protocol, address) in [
            ("tcp", "10.0.0.1:443"),
            ("tcp", "[fd00::1]:10250"),
            ("tcp", "kubelet.example:10250"),
            ("udp", "10.0.0.1:53"),
            ("tcp", "user@host:1"),
            ("tcp", "not an address\r\n"),
            ("tcp", ""),
        ] {
            let dial = Dial {
                protocol: protocol.into(),
                address: address.into(),
            };
            let request = request(&dial);
            assert_eq!(dial_of(&request), dial);
            let parsed = parse_request(&request_text(&request)).unwrap();
            assert_eq!(dial_of(&parsed), dial);
        }
    }

    #[test]
    fn answers_round_trip_through_their_text() {
        let parsed = parse_response(&response_text(&accepted())).unwrap();
        assert_eq!(parsed.status(), StatusCode::OK);
        for (is_timeout, code) in [(true, 504), (false, 502)] {
            let refused = refusal(is_timeout, "no route\r\nto host");
            let parsed = parse_response(&response_text(&refused)).unwrap();
            assert_eq!(parsed.status().as_u16(), code);
            assert_eq!(error_text(&parsed), "no route\r\nto host");
        }
    }

    #[test]
    fn malformed_heads_are_refused() {
        for head in [
            "",
            "GET / HTTP/1.1\r\n\r\n",
            "CONNECT / HTTP/1.1\r\n\r\n",
            "\u{1}",
        ] {
            parse_request(head.as_bytes()).unwrap_err();
        }
        for head in ["", "HTTP/1.1 99 \r\n\r\n", "CONNECT a:1 HTTP/1.1\r\n\r\n"] {
            parse_response(head.as_bytes()).unwrap_err();
        }
    }
}
