//! The head of a CONNECT request: the result does not depend on how the input is cut into pieces, and a
//! target contains printable ASCII only.
#![no_main]

use std::pin::pin;
use std::task::{Context, Poll, Waker};

use bytes::BytesMut;
use culvert_fuzz::Cut;
use culvert_host::net::connect::{ConnectError, MAX_HEAD_BYTES, RequestError, read_request};
use libfuzzer_sys::fuzz_target;

/// Reads a request whose first `split` bytes are already in the buffer. Returns the target and the length
/// of the head, or `None` if the head is incomplete.
fn parse(bytes: &[u8], split: usize) -> Result<Option<(String, usize)>, ConnectError> {
    let (first, mut reader) = bytes.split_at(split);
    let mut buffer = BytesMut::from(first);
    let read = {
        let request = pin!(read_request(&mut reader, &mut buffer, MAX_HEAD_BYTES));
        request.poll(&mut Context::from_waker(Waker::noop()))
    };
    match read {
        Poll::Ready(Ok(target)) => Ok(Some((target, bytes.len() - buffer.len() - reader.len()))),
        Poll::Ready(Err(RequestError::Bad(error))) => Err(error),
        Poll::Ready(Err(RequestError::Io(_))) => Ok(None),
        Poll::Pending => unreachable!("a slice is always ready"),
    }
}

fuzz_target!(|input: &[u8]| {
    let Some(cut) = Cut::new(input) else { return };
    let whole = parse(cut.bytes, 0);
    for end in cut.ends(cut.bytes.len()) {
        assert_eq!(parse(cut.bytes, end), whole);
    }

    match whole {
        Ok(Some((target, length))) => {
            assert!(!target.is_empty());
            assert!(target.bytes().all(|byte| byte.is_ascii_graphic()));
            assert!(cut.bytes[..length].ends_with(b"\n"));
        }
        Ok(None) => {}
        Err(error) => assert!(error.response().starts_with(b"HTTP/1.1 ")),
    }
});
