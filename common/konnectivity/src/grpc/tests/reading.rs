//! Tests of reading messages from frames, and of the ends of calls.

use proptest::prelude::*;
use tonic::Code;

use super::*;
use crate::message::MAX_MESSAGE_BYTES;

/// Reads all messages to the end of the call. Returns the messages and the end.
async fn read(mut reader: Reader<Frames>) -> (Vec<Message>, Result<(), Status>) {
    let mut messages = Vec::new();
    loop {
        match reader.message().await {
            Ok(Some(message)) => messages.push(message),
            end => {
                assert!(matches!(reader.message().await, Ok(None)), "ended once");
                return (messages, end.map(|_| ()));
            }
        }
    }
}

async fn refusal(frames: Frames) -> (Code, String) {
    let (_, end) = read(Reader::request(frames)).await;
    let status = end.unwrap_err();
    (status.code(), status.message().to_owned())
}

proptest! {
    #[test]
    fn messages_are_read_from_frames_of_any_size(
        lens in prop::collection::vec(0..3000_usize, 0..8),
        cuts in prop::collection::vec(1..2000_usize, 0..40),
    ) {
        let messages: Vec<_> = (0..).zip(lens).map(|(id, len)| data(id, len)).collect();
        let mut wire = Bytes::from(messages.iter().cloned().flat_map(framed).collect::<Vec<_>>());
        let mut frames = Vec::new();
        for cut in cuts {
            frames.push(wire.split_to(cut.min(wire.len())));
        }
        frames.push(wire);
        let runtime = tokio::runtime::Builder::new_current_thread().build().unwrap();
        let (read, end) = runtime.block_on(read(Reader::request(Frames::new(frames))));
        prop_assert_eq!(read, messages);
        prop_assert!(end.is_ok());
    }
}

#[tokio::test]
async fn a_message_within_one_frame_is_a_slice_of_it() {
    let wire: Bytes = [framed(data(1, 5000)), framed(data(2, 10))].concat().into();
    let memory = wire.as_ptr_range();
    let (messages, _) = read(Reader::request(Frames::new([wire.clone()]))).await;
    for message in messages {
        let Message::Data { bytes, .. } = message else {
            panic!("expected a DATA message");
        };
        assert!(memory.contains(&bytes.as_ptr()));
    }
}

#[tokio::test]
async fn a_message_beyond_the_limit_is_refused_before_it_arrives() {
    let prefix = |len: usize| [&[0], &(len as u32).to_be_bytes()[..]].concat();
    let (code, text) = refusal(Frames::new([prefix(MAX_MESSAGE_BYTES + 1).into()])).await;
    assert_eq!(code, Code::ResourceExhausted);
    let lengths = format!("({} vs. {MAX_MESSAGE_BYTES})", MAX_MESSAGE_BYTES + 1);
    assert_eq!(
        text,
        format!("grpc: received message larger than max {lengths}")
    );
    let mut fits = framed(data(1, 4 * 1024 * 1024));
    fits.extend(framed(data(2, 1)));
    let frames = fits.chunks(60_000).map(Bytes::copy_from_slice);
    let (messages, end) = read(Reader::request(Frames::new(frames))).await;
    assert_eq!(messages, [data(1, 4 * 1024 * 1024), data(2, 1)]);
    assert!(end.is_ok());
}

#[tokio::test]
async fn compressed_and_malformed_messages_are_refused() {
    for (wire, text) in [
        (&[1, 0, 0, 0, 0][..], "compressed-flag"),
        (&[7, 0, 0, 0, 0], "invalid compression flag: 7"),
        (&[0, 0, 0, 0, 2, 0x08, 0xff], "varint"),
        (&[0, 0, 0, 0, 2, 0x08], "Unexpected EOF"),
        (&[0, 0, 0, 0, 2], "Unexpected EOF"),
        (&[0, 0, 0], "Unexpected EOF"),
    ] {
        let (code, message) = refusal(Frames::new([Bytes::copy_from_slice(wire)])).await;
        assert_eq!(code, Code::Internal, "{wire:?}");
        assert!(message.contains(text), "{wire:?}: {message}");
    }
}

#[tokio::test]
async fn an_answer_ends_with_the_status_of_its_trailers() {
    let frames = || Frames::new([framed(data(1, 3)).into()]);
    let response = |frames| read(Reader::response(frames));
    let ok = response(frames().with_trailers(&[("grpc-status", "0")])).await;
    assert_eq!(ok.0, [data(1, 3)]);
    assert!(ok.1.is_ok());
    let failed = frames().with_trailers(&[("grpc-status", "5"), ("grpc-message", "not%20here")]);
    let (messages, end) = response(failed).await;
    assert_eq!(messages, [data(1, 3)]);
    let status = end.unwrap_err();
    assert_eq!(
        (status.code(), status.message()),
        (Code::NotFound, "not here")
    );
    let details = [("grpc-status", "5"), ("grpc-status-details-bin", "!")];
    let (_, end) = response(frames().with_trailers(&details)).await;
    assert_eq!(end.unwrap_err().code(), Code::NotFound);
}

#[tokio::test]
async fn an_answer_without_a_status_is_an_error() {
    let (_, end) = read(Reader::response(Frames::new([]))).await;
    assert_eq!(end.unwrap_err().code(), Code::Unknown);
    let trailers = Frames::new([]).with_trailers(&[("other", "1")]);
    let (_, end) = read(Reader::response(trailers)).await;
    assert_eq!(end.unwrap_err().code(), Code::Unknown);
}

#[tokio::test]
async fn a_broken_request_fails() {
    let frames = Frames::new([framed(data(1, 3)).into()]);
    let (messages, end) = read(Reader::request(frames.broken(Status::unavailable("gone")))).await;
    assert_eq!(messages, [data(1, 3)]);
    let status = end.unwrap_err();
    assert_eq!(
        (status.code(), status.message()),
        (Code::Unavailable, "gone")
    );
}
