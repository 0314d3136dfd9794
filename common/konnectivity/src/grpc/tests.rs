#![allow(clippy::unwrap_used, clippy::indexing_slicing)]

mod calls;
mod packets;
mod reading;
mod writing;

use std::collections::VecDeque;
use std::pin::Pin;
use std::task::{Context, Poll};

use bytes::Bytes;
use culvert_proto::Packet;
use futures_util::Stream;
use http::HeaderMap;
use hyper::body::{Body, Frame};
use prost::Message as _;
use tonic::Status;

use super::*;
use crate::message::{ConnectId, Message};

/// Returns a message in the wire form that a library writes.
fn framed(message: Message) -> Vec<u8> {
    let packet = Packet::from(message).encode_to_vec();
    let mut framed = vec![0];
    framed.extend((packet.len() as u32).to_be_bytes());
    framed.extend(packet);
    framed
}

fn data(connection: i64, len: usize) -> Message {
    Message::Data {
        connection: ConnectId(connection),
        bytes: (0..len).map(|i| i as u8).collect(),
    }
}

/// Body with the given frames.
struct Frames(VecDeque<Result<Frame<Bytes>, Status>>);

impl Frames {
    fn new(frames: impl IntoIterator<Item = Bytes>) -> Self {
        Self(frames.into_iter().map(Frame::data).map(Ok).collect())
    }

    fn with_trailers(mut self, pairs: &[(&'static str, &'static str)]) -> Self {
        let mut trailers = HeaderMap::new();
        for (name, value) in pairs {
            trailers.append(*name, value.parse().unwrap());
        }
        self.0.push_back(Ok(Frame::trailers(trailers)));
        self
    }

    fn broken(mut self, status: Status) -> Self {
        self.0.push_back(Err(status));
        self
    }
}

impl Body for Frames {
    type Data = Bytes;
    type Error = Status;

    fn poll_frame(
        mut self: Pin<&mut Self>,
        _: &mut Context<'_>,
    ) -> Poll<Option<Result<Frame<Bytes>, Status>>> {
        Poll::Ready(self.0.pop_front())
    }
}

/// Stream of messages in rounds: the messages of one round are ready together.
struct Rounds(VecDeque<Option<Result<Message, Status>>>);

impl Rounds {
    fn new(rounds: impl IntoIterator<Item = Vec<Message>>) -> Self {
        let mut items = VecDeque::new();
        for round in rounds {
            items.extend(round.into_iter().map(Ok).map(Some));
            items.push_back(None);
        }
        Self(items)
    }
}

impl Stream for Rounds {
    type Item = Result<Message, Status>;

    fn poll_next(mut self: Pin<&mut Self>, cx: &mut Context<'_>) -> Poll<Option<Self::Item>> {
        match self.0.pop_front() {
            Some(None) => {
                cx.waker().wake_by_ref();
                Poll::Pending
            }
            Some(item) => Poll::Ready(item),
            None => Poll::Ready(None),
        }
    }
}
