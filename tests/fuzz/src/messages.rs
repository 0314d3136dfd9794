//! The messages of a gRPC call, read from DATA frames. The messages and the end of the call do not depend on
//! the cut into frames. The payloads are not larger than the received bytes.

use std::collections::VecDeque;
use std::convert::Infallible;
use std::pin::Pin;
use std::task::{Context, Poll, Waker};

use bytes::Bytes;
use culvert_konnectivity::grpc::Reader;
use culvert_konnectivity::message::Message;
use hyper::body::{Body, Frame};

use crate::cut::Cut;

/// A body with these frames, without trailers.
struct Frames(VecDeque<Bytes>);

impl Body for Frames {
    type Data = Bytes;
    type Error = Infallible;

    fn poll_frame(
        mut self: Pin<&mut Self>,
        _: &mut Context<'_>,
    ) -> Poll<Option<Result<Frame<Bytes>, Infallible>>> {
        Poll::Ready(self.0.pop_front().map(|data| Ok(Frame::data(data))))
    }
}

/// Reads to the end of the call. Returns the messages, and the status as text.
fn read(mut reader: Reader<Frames>) -> (Vec<Message>, Option<String>) {
    let mut cx = Context::from_waker(Waker::noop());
    let mut messages = Vec::new();
    loop {
        match reader.poll_message(&mut cx) {
            Poll::Ready(Ok(Some(message))) => messages.push(message),
            Poll::Ready(end) => {
                let again = reader.poll_message(&mut cx);
                assert!(matches!(again, Poll::Ready(Ok(None))), "the call ends once");
                let status = end.err();
                return (messages, status.map(|status| status.to_string()));
            }
            Poll::Pending => panic!("the frames are always ready"),
        }
    }
}

/// Reads the input as the request of a client, and as the response of a server.
///
/// # Panics
/// If an invariant does not hold.
pub fn run(input: &[u8]) {
    let Some(cut) = Cut::new(input) else { return };
    let whole = || frames([cut.bytes].into_iter());
    let parts = || frames(cut.pieces());

    let (messages, status) = read(Reader::request(whole()));
    let payload: usize = messages.iter().map(payload).sum();
    assert!(payload + 5 * messages.len() <= cut.bytes.len());
    assert_eq!(read(Reader::request(parts())), (messages.clone(), status));

    // A response without trailers has no status.
    let (answered, status) = read(Reader::response(whole()));
    assert_eq!(answered, messages);
    assert!(status.is_some());
    assert_eq!(read(Reader::response(parts())), (answered, status));
}

/// Returns the pieces as frames, each after an empty frame.
fn frames<'a>(pieces: impl Iterator<Item = &'a [u8]>) -> Frames {
    let frames = pieces.flat_map(|piece| [Bytes::new(), Bytes::copy_from_slice(piece)]);
    Frames(frames.collect())
}

fn payload(message: &Message) -> usize {
    match message {
        Message::Data { bytes, .. } => bytes.len(),
        _ => 0,
    }
}
