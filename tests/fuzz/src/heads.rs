//! The heads that open a tunnel, as received from a peer: the introduction of an agent, the server's answer,
//! and the answer of an HTTP proxy to a CONNECT request.
//!
//! The outcome does not depend on the cut into pieces. A head ends with its empty line, and no later byte is
//! read, because the later bytes belong to the tunnel. An error is one line of bounded size.

use std::collections::VecDeque;
use std::io;
use std::pin::{Pin, pin};
use std::task::{Context, Poll, Waker};

use culvert_host::net::proxy::read_answer;
use culvert_native::hello::{introduce, read};
use culvert_native::resume::{self, Offer, Process, ResumeAnswer};
use http::{HeaderMap, HeaderName, HeaderValue};
use tokio::io::{AsyncRead, AsyncWrite, ReadBuf};

use crate::cut::Cut;

/// Largest text of an error, in bytes: a head, or the text of a refusal, and some words.
const MAX_ERROR_BYTES: usize = 2 * 64 * 1024 + 256;

/// The peer's bytes, one piece per read, then the end of the connection. Written bytes are dropped.
struct Pieces<'a>(VecDeque<&'a [u8]>);

impl Pieces<'_> {
    fn len(&self) -> usize {
        self.0.iter().map(|piece| piece.len()).sum()
    }
}

impl AsyncRead for Pieces<'_> {
    fn poll_read(
        mut self: Pin<&mut Self>,
        _: &mut Context<'_>,
        target: &mut ReadBuf<'_>,
    ) -> Poll<io::Result<()>> {
        if let Some(piece) = self.0.front_mut() {
            let (now, later) = piece.split_at(piece.len().min(target.remaining()));
            target.put_slice(now);
            *piece = later;
            if later.is_empty() {
                self.0.pop_front();
            }
        }
        Poll::Ready(Ok(()))
    }
}

impl AsyncWrite for Pieces<'_> {
    fn poll_write(
        self: Pin<&mut Self>,
        _: &mut Context<'_>,
        bytes: &[u8],
    ) -> Poll<io::Result<usize>> {
        Poll::Ready(Ok(bytes.len()))
    }

    fn poll_flush(self: Pin<&mut Self>, _: &mut Context<'_>) -> Poll<io::Result<()>> {
        Poll::Ready(Ok(()))
    }

    fn poll_shutdown(self: Pin<&mut Self>, _: &mut Context<'_>) -> Poll<io::Result<()>> {
        Poll::Ready(Ok(()))
    }
}

fn ready<T>(work: impl Future<Output = T>) -> T {
    match pin!(work).poll(&mut Context::from_waker(Waker::noop())) {
        Poll::Ready(done) => done,
        Poll::Pending => panic!("the bytes are always ready"),
    }
}

/// Parses the bytes in one piece and in the pieces of `cut`. Returns the outcome of `parse`, and the number of
/// bytes that were read.
fn parse_both<T: PartialEq + std::fmt::Debug>(
    cut: &Cut<'_>,
    parse: impl Fn(&mut Pieces<'_>) -> Result<T, String>,
) -> (Result<T, String>, usize) {
    let parse = |mut pieces: Pieces<'_>| {
        let outcome = parse(&mut pieces);
        (outcome, cut.bytes.len() - pieces.len())
    };
    let whole = parse(Pieces(VecDeque::from([cut.bytes])));
    assert_eq!(parse(Pieces(cut.pieces().collect())), whole);
    if let (Err(error), _) = &whole {
        assert!(
            !error.is_empty() && error.len() <= MAX_ERROR_BYTES,
            "{error}"
        );
    }
    whole
}

/// Checks that `bytes` is one head: the first empty line is at the end.
fn assert_one_head(bytes: &[u8]) {
    let mut lines = bytes.split_inclusive(|byte| *byte == b'\n');
    let last = lines.next_back();
    assert!(matches!(last, Some(b"\n" | b"\r\n")), "{bytes:?}");
    assert!(
        lines.all(|line| !matches!(line, b"\n" | b"\r\n")),
        "{bytes:?}"
    );
}

/// The introduction of an agent, at the server, and the answer of a server, at the agent.
pub fn run_native(input: &[u8]) {
    let Some(cut) = Cut::new(input) else { return };
    let (outcome, length) = parse_both(&cut, |bytes| {
        ready(read(bytes)).map_err(|error| error.to_string())
    });
    if let Ok(headers) = outcome {
        assert_one_head(&cut.bytes[..length]);
        check_resumption(&headers);
    }
    let headers = HeaderMap::new();
    let (outcome, length) = parse_both(&cut, |bytes| {
        ready(resume::resume(bytes, &headers)).map_err(|error| format!("refused: {error}"))
    });
    if outcome.is_ok_and(|answer| matches!(answer, ResumeAnswer::Resumed(_))) {
        assert_one_head(&cut.bytes[..length]);
    }
    let (outcome, length) = parse_both(&cut, |bytes| {
        ready(introduce(bytes, &headers)).map_err(|error| format!("refused: {error}"))
    });
    if outcome.is_ok() {
        assert_one_head(&cut.bytes[..length]);
    }
}

/// Checks the headers about resumption: no request proves a ticket that its sender does not have, and an identity of a
/// process travels unchanged.
fn check_resumption(headers: &HeaderMap) {
    if let Ok(Offer::Resume(request)) = resume::offer(headers) {
        let id: String = request.id.map(|byte| format!("{byte:02x}")).concat();
        let secret = "5a".repeat(32);
        let line = HeaderValue::try_from(format!("{id}.{secret}")).expect("a valid value");
        let headers = HeaderMap::from_iter([(HeaderName::from_static("culvert-resume"), line)]);
        let ticket = resume::ticket(&headers).expect("a ticket");
        assert!(!ticket.proves(&request, &[0; 32]));
    }
    let _ = resume::ticket(headers);
    if let Some(process) = Process::of(headers) {
        let mut again = HeaderMap::new();
        process.add_to(&mut again);
        assert_eq!(Process::of(&again), Some(process));
    }
}

/// The answer of an HTTP proxy.
pub fn run_proxy(input: &[u8]) {
    let Some(cut) = Cut::new(input) else { return };
    let (outcome, length) = parse_both(&cut, |bytes| {
        ready(read_answer(bytes)).map_err(|error| error.to_string())
    });
    match outcome {
        Ok(()) => assert_one_head(&cut.bytes[..length]),
        // The text of a refusal is the proxy's, and appears in the log.
        Err(error) => assert!(!error.contains(['\r', '\n', '\0']), "{error:?}"),
    }
}
