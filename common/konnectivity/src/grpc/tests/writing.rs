//! Tests of writing messages as frames.

use std::io::IoSlice;

use bytes::Buf;
use http_body_util::BodyExt;
use proptest::prelude::*;
use tonic::Code;

use super::*;

/// Returns the bytes of each DATA frame, and the trailers.
async fn write(mut body: PacketBody<Rounds>) -> (Vec<Vec<u8>>, Option<HeaderMap>) {
    let mut frames = Vec::new();
    while let Some(frame) = body.frame().await {
        match frame.unwrap().into_data() {
            Ok(mut piece) => frames.push(piece.copy_to_bytes(piece.remaining()).to_vec()),
            Err(frame) => {
                assert!(body.is_end_stream());
                return (frames, frame.into_trailers().ok());
            }
        }
    }
    assert!(body.is_end_stream());
    (frames, None)
}

fn all_framed(messages: &[Message]) -> Vec<u8> {
    messages.iter().cloned().flat_map(framed).collect()
}

fn joined(slices: &[IoSlice<'_>]) -> Vec<u8> {
    slices.iter().flat_map(|slice| slice.to_vec()).collect()
}

#[tokio::test]
async fn small_messages_that_are_ready_together_share_a_frame() {
    let first = vec![data(1, 10), Message::Drain, data(2, 4096)];
    let second = vec![data(3, 1)];
    let rounds = Rounds::new([first.clone(), second.clone()]);
    let (frames, trailers) = write(PacketBody::response(rounds)).await;
    assert_eq!(frames, [all_framed(&first), all_framed(&second)]);
    assert_eq!(trailers.unwrap()["grpc-status"], "0");
}

#[tokio::test]
async fn many_small_messages_are_split_into_frames() {
    let flood: Vec<_> = (0..10_000).map(|id| data(id, 1)).collect();
    let (frames, _) = write(PacketBody::request(Rounds::new([flood.clone()]))).await;
    assert!(frames.iter().all(|frame| frame.len() < 33_000));
    assert!(frames.len() < 10, "{}", frames.len());
    assert_eq!(frames.concat(), all_framed(&flood));
}

#[tokio::test]
async fn a_large_payload_is_not_copied() {
    let large = data(2, 60_000);
    let Message::Data { bytes, .. } = &large else {
        panic!("expected a DATA message");
    };
    let rounds = Rounds::new([vec![data(1, 3), large.clone(), data(3, 3)]]);
    let mut body = PacketBody::request(rounds);
    let piece = body.frame().await.unwrap().unwrap().into_data().unwrap();
    let mut slices = [IoSlice::new(&[]); 4];
    assert_eq!(piece.chunks_vectored(&mut slices), 2);
    assert_eq!(slices[1].as_ptr(), bytes.as_ptr());
    assert_eq!(
        joined(&slices[..2]),
        all_framed(&[data(1, 3), large.clone()])
    );
    let rest = body.frame().await.unwrap().unwrap().into_data().unwrap();
    assert_eq!(rest.chunk(), framed(data(3, 3)));
    assert!(body.frame().await.is_none());
}

#[tokio::test]
async fn a_failure_is_sent_after_the_earlier_messages() {
    let mut rounds = Rounds::new([vec![data(1, 3)]]);
    rounds.0.pop_back();
    let failure = Status::out_of_range("too much");
    rounds.0.push_back(Some(Err(failure)));
    let (frames, trailers) = write(PacketBody::response(rounds)).await;
    assert_eq!(frames, [framed(data(1, 3))]);
    let status = Status::from_header_map(&trailers.unwrap()).unwrap();
    assert_eq!(
        (status.code(), status.message()),
        (Code::OutOfRange, "too much")
    );
}

#[tokio::test]
async fn a_request_ends_without_trailers() {
    let (frames, trailers) = write(PacketBody::request(Rounds::new([]))).await;
    assert_eq!((frames.len(), trailers), (0, None));
}

proptest! {
    /// HTTP/2 reads a piece in parts, as its windows allow.
    #[test]
    fn a_piece_may_be_read_in_steps_of_any_size(
        lens in prop::collection::vec(0..9000_usize, 1..4),
        steps in prop::collection::vec(1..4000_usize, 1..30),
    ) {
        let messages: Vec<_> = (0..).zip(lens).map(|(id, len)| data(id, len)).collect();
        let mut body = PacketBody::request(Rounds::new([messages.clone()]));
        let runtime = tokio::runtime::Builder::new_current_thread().build().unwrap();
        let mut taken = Vec::new();
        let mut steps = steps.into_iter().cycle();
        while let Some(frame) = runtime.block_on(body.frame()) {
            let mut piece = frame.unwrap().into_data().unwrap();
            while piece.has_remaining() {
                let mut slices = [IoSlice::new(&[]); 2];
                let filled = piece.chunks_vectored(&mut slices);
                let all = joined(&slices[..filled]);
                prop_assert_eq!(all.len(), piece.remaining());
                prop_assert_eq!(piece.chunk(), &*slices[0]);
                let step = steps.next().unwrap().min(all.len());
                taken.extend_from_slice(&all[..step]);
                piece.advance(step);
            }
        }
        prop_assert_eq!(taken, all_framed(&messages));
    }
}
