#![allow(
    clippy::unwrap_used,
    clippy::expect_used,
    clippy::indexing_slicing,
    clippy::panic
)]

use std::pin::pin;
use std::task::{Context, Poll, Waker};

use proptest::prelude::*;

use super::*;

/// Reads a request whose first `split` bytes are already in the buffer. Returns the target and the bytes
/// after the head, or `None` if the head is incomplete.
fn parse_at(split: usize, received: &[u8]) -> Result<Option<(String, Vec<u8>)>, ConnectError> {
    let (first, mut reader) = received.split_at(split);
    let mut buffer = BytesMut::from(first);
    let read = {
        let request = pin!(read_request(&mut reader, &mut buffer, MAX_HEAD_BYTES));
        request.poll(&mut Context::from_waker(Waker::noop()))
    };
    match read {
        Poll::Ready(Ok(target)) => Ok(Some((target, [&buffer[..], reader].concat()))),
        Poll::Ready(Err(RequestError::Bad(error))) => Err(error),
        Poll::Ready(Err(RequestError::Io(_))) => Ok(None),
        Poll::Pending => panic!("a slice is always ready"),
    }
}

fn parse(received: &[u8]) -> Result<Option<(String, Vec<u8>)>, ConnectError> {
    parse_at(0, received)
}

/// Returns the target of a complete request, and the bytes after its head.
fn target(received: &[u8]) -> (String, Vec<u8>) {
    parse(received).unwrap().expect("head is complete")
}

#[test]
fn target_comes_from_the_request_line() {
    let apiserver = b"CONNECT 10.0.0.1:10250 HTTP/1.1\r\nHost: 127.0.0.1\r\nUser-Agent: x\r\n\r\n";
    assert_eq!(target(apiserver), ("10.0.0.1:10250".into(), vec![]));
    for name in [
        "node-1.local:443",
        "[fd00::1]:10250",
        "node-1",
        "[::1]",
        "a:b:c",
        "%2F:1",
    ] {
        for version in ["HTTP/1.0", "HTTP/1.1"] {
            let request = format!("CONNECT {name} {version}\r\n\r\n");
            assert_eq!(target(request.as_bytes()), (name.into(), vec![]));
        }
    }
}

#[test]
fn bytes_after_the_head_are_not_consumed() {
    let received = b"CONNECT a:1 HTTP/1.1\r\nHost: b\r\n\r\n\r\n\r\nhello\x00\xff";
    assert_eq!(
        target(received),
        ("a:1".into(), b"\r\n\r\nhello\x00\xff".to_vec())
    );
    assert_eq!(
        target(b"CONNECT a:1 HTTP/1.1\nHost: b\n\nhi"),
        ("a:1".into(), b"hi".to_vec())
    );
}

#[test]
fn incomplete_head_returns_none() {
    let request = b"CONNECT a:1 HTTP/1.1\r\nHost: a:1\r\n\r\n";
    for end in 0..request.len() {
        assert_eq!(parse(&request[..end]), Ok(None));
    }
}

#[test]
fn invalid_requests_are_refused() {
    use ConnectError::*;
    let cases: &[(&[u8], ConnectError)] = &[
        (b"GET / HTTP/1.1\r\nHost: a\r\n\r\n", Method),
        (b"connect a:1 HTTP/1.1\r\n\r\n", Method),
        (b"CONNECT a:1 HTTP/2.0\r\n\r\n", Version),
        (b"CONNECT a:1 HTTP/0.9\r\n\r\n", Version),
        (b"CONNECT a:1 HTTP/x\r\n\r\n", Malformed),
        (b"CONNECT a:1 FTP/1.1\r\n\r\n", Malformed),
        (b"CONNECT a:1\r\n\r\n", Malformed),
        (b"CONNECT  HTTP/1.1\r\n\r\n", Malformed),
        (b"CONNECT /path HTTP/1.1\r\n\r\n", Malformed),
        (b"CONNECT http://a:1 HTTP/1.1\r\n\r\n", Malformed),
        (b"CONNECT user@a:1 HTTP/1.1\r\n\r\n", Malformed),
        (b"CONNECT a:1?b HTTP/1.1\r\n\r\n", Malformed),
        (b"CONNECT a\r:1 HTTP/1.1\r\n\r\n", Malformed),
        (b"CONNECT a\0:1 HTTP/1.1\r\n\r\n", Malformed),
        (b"CONNECT a\t:1 HTTP/1.1\r\n\r\n", Malformed),
        (b"CONNECT \xc3\xa4:1 HTTP/1.1\r\n\r\n", Malformed),
        (b"CONNECT a:1 HTTP/1.1\r\nno colon\r\n\r\n", Malformed),
        (b"\x16\x03\x01\x02\x00\x01\n\n", Malformed),
        (b"\r\n", Malformed),
        (b"\n\nCONNECT a:1 HTTP/1.1\r\n\r\n", Malformed),
    ];
    for (received, error) in cases {
        assert_eq!(
            parse(received),
            Err(*error),
            "{}",
            String::from_utf8_lossy(received)
        );
    }
}

/// Returns a request of `len` bytes with one header field.
fn request_of(len: usize) -> Vec<u8> {
    let (start, end) = (&b"CONNECT a:1 HTTP/1.1\r\nX: "[..], &b"\r\n\r\n"[..]);
    [start, &vec![b'a'; len - start.len() - end.len()], end].concat()
}

#[test]
fn head_size_and_header_count_are_limited() {
    let largest = [&request_of(MAX_HEAD_BYTES)[..], b"early"].concat();
    assert_eq!(target(&largest), ("a:1".into(), b"early".to_vec()));
    let larger = request_of(MAX_HEAD_BYTES + 1);
    assert_eq!(parse(&larger), Err(ConnectError::TooLarge));
    assert_eq!(
        parse(&larger[..MAX_HEAD_BYTES]),
        Err(ConnectError::TooLarge)
    );
    assert_eq!(parse(&larger[..MAX_HEAD_BYTES - 1]), Ok(None));

    let with_headers = |count: usize| {
        [
            "CONNECT a:1 HTTP/1.1\r\n",
            &"a: b\r\n".repeat(count),
            "\r\n",
        ]
        .concat()
        .into_bytes()
    };
    assert_eq!(target(&with_headers(MAX_HEADERS)).0, "a:1");
    assert_eq!(
        parse(&with_headers(MAX_HEADERS + 1)),
        Err(ConnectError::TooLarge)
    );
}

#[test]
fn error_responses_are_complete() {
    use ConnectError::*;
    for (error, status) in [
        (Method, 405),
        (Malformed, 400),
        (TooLarge, 431),
        (Version, 505),
    ] {
        let mut headers = [EMPTY_HEADER; 8];
        let mut response = httparse::Response::new(&mut headers);
        let Status::Complete(head) = response.parse(error.response()).unwrap() else {
            panic!("{error}: no end of the head");
        };
        assert_eq!(response.code, Some(status));
        let header = |name: &str| response.headers.iter().find(|header| header.name == name);
        assert_eq!(
            header("Content-Type").unwrap().value,
            b"text/plain; charset=utf-8"
        );
        assert_eq!(header("Connection").unwrap().value, b"close");
        let body = &error.response()[head..];
        if let Some(length) = header("Content-Length") {
            assert_eq!(length.value, body.len().to_string().as_bytes());
        }
        assert!(!body.is_empty());
    }
    assert_eq!(
        Malformed.response(),
        b"HTTP/1.1 400 Bad Request\r\nContent-Type: text/plain; charset=utf-8\r\n\
          Connection: close\r\n\r\n400 Bad Request"
    );
}

#[test]
fn failure_responses_have_upstreams_headers() {
    assert_eq!(
        failure(500, "currently no tunnels available: none"),
        b"HTTP/1.1 500 Internal Server Error\r\nContent-Type: text/plain\r\n\r\n\
          currently no tunnels available: none"
    );
    for (status, reason) in [
        (502, "Bad Gateway"),
        (503, "Service Unavailable"),
        (504, "Gateway Timeout"),
    ] {
        let expected = format!(
            "HTTP/1.1 {status} {reason}\r\nConnection: close\r\n\
             Content-Type: text/plain; charset=utf-8\r\n\r\nwhy"
        );
        assert_eq!(failure(status, "why"), expected.as_bytes());
    }
}

#[test]
fn dial_error_text_selects_the_status() {
    let cases = [
        ("dial tcp 10.0.0.1:80: i/o timeout", 504),
        ("context Deadline Exceeded", 504),
        ("TIMEOUT", 504),
        ("socket: Too many open files", 503),
        ("too many open files after timeout", 504),
        ("dial tcp 10.0.0.1:80: connect: connection refused", 502),
        ("", 502),
    ];
    for (error, status) in cases {
        assert_eq!(dial_failure_status(error), status, "{error}");
    }
}

/// Generates bytes that are, or almost are, a request.
fn received() -> impl Strategy<Value = Vec<u8>> {
    let pieces: [&[u8]; 11] = [
        b"CONNECT ",
        b"GET /",
        b"host:1",
        b"[::1]:2",
        b" HTTP/1.1",
        b" HTTP/3.0",
        b"\r\n",
        b"\n",
        b"\r",
        b"Host: a",
        b"\0\xff /",
    ];
    let piece = proptest::sample::select(pieces.to_vec());
    prop_oneof![
        proptest::collection::vec(any::<u8>(), 0..200),
        proptest::collection::vec(piece, 0..20).prop_map(|pieces| pieces.concat()),
    ]
}

proptest! {
    #[test]
    fn result_does_not_depend_on_where_the_request_is_split(received in received(), split in 0usize..200) {
        let whole = parse(&received);
        prop_assert_eq!(&parse_at(split.min(received.len()), &received), &whole);
        if let Ok(Some((target, rest))) = whole {
            prop_assert!(target.bytes().all(|byte| byte.is_ascii_graphic()));
            prop_assert!(received.ends_with(&rest));
        }
    }
}
