//! The body of a call, made from messages.

use std::io::IoSlice;
use std::pin::Pin;
use std::task::{Context, Poll};

use bytes::{Buf, Bytes};
use futures_util::Stream;
use http::HeaderMap;
use hyper::body::{Body, Frame};
use tonic::Status;

use super::packet;
use super::room::Charge;
use crate::message::Message;
use crate::queue::{Mark, Progress};

/// Approximate size limit, in bytes, for a DATA frame shared by messages that are ready together. Sharing
/// saves the cost of a frame: a write for the sender, and a queue entry for the receiver. The limit is twice
/// the frame size that stock peers accept; a higher limit gains nothing.
const BATCH_BYTES: usize = 32 * 1024;

/// Largest payload, in bytes, that is copied into the shared frame, because the copy is cheaper than a
/// separate write. Larger payloads are written from their own memory.
const COPY_BYTES: usize = 4 * 1024;

/// Body of one direction of a call: the messages of `packets`, until the stream ends.
#[derive(Debug)]
pub struct PacketBody<S> {
    packets: Option<S>,
    side: Side,
    /// Status that ends the call after all messages are sent.
    status: Option<Status>,
    /// Receives a report of each written message; `None` if nobody waits for reports.
    progress: Option<Progress>,
}

#[derive(Clone, Copy, Debug)]
enum Side {
    Client,
    Server,
}

/// Part of a body: framed messages. The last message may have its payload in separate memory. The default is empty,
/// for the end of a body.
#[derive(Debug, Default)]
pub struct Piece {
    pub(super) head: Bytes,
    payload: Bytes,
    pub(super) charge: Option<Charge>,
    /// Dropped with the piece, once HTTP/2 has written it.
    _mark: Option<Mark>,
}

// === impl PacketBody ===

impl<S> PacketBody<S> {
    fn new(packets: Option<S>, side: Side) -> Self {
        Self {
            packets,
            side,
            status: None,
            progress: None,
        }
    }

    /// Creates the body of a client's request; ends without trailers.
    pub fn request(packets: S) -> Self {
        Self::new(Some(packets), Side::Client)
    }

    /// Creates the body of a server's response; ends with the status in the trailers.
    pub fn response(packets: S) -> Self {
        Self::new(Some(packets), Side::Server)
    }

    /// Reports to `progress`, the handle of the queue of the messages, which messages HTTP/2 has written.
    #[must_use]
    pub fn reporting_to(mut self, progress: Option<Progress>) -> Self {
        self.progress = progress;
        self
    }
}

/// Creates a body that has ended.
impl<S> Default for PacketBody<S> {
    fn default() -> Self {
        Self::new(None, Side::Server)
    }
}

impl<S> PacketBody<S>
where
    S: Stream<Item = Result<Message, Status>> + Unpin,
{
    /// Returns the messages that are ready now, up to a batch, or `None` at the end. Pending only if no
    /// message is ready.
    fn poll_batch(&mut self, cx: &mut Context<'_>) -> Poll<Option<Piece>> {
        let Some(packets) = &mut self.packets else {
            return Poll::Ready(None);
        };
        let mut head = Vec::new();
        let mut payload = Bytes::new();
        while head.len() < BATCH_BYTES {
            match Pin::new(&mut *packets).poll_next(cx) {
                Poll::Ready(Some(Ok(Message::Data { connection, bytes })))
                    if bytes.len() > COPY_BYTES =>
                {
                    packet::encode_data_head(connection, bytes.len(), 0, &mut head);
                    payload = bytes;
                    break;
                }
                Poll::Ready(Some(Ok(message))) => packet::encode(message, &mut head),
                Poll::Ready(end) => {
                    self.status = Some(end.and_then(Result::err).unwrap_or_else(|| Status::ok("")));
                    self.packets = None;
                    break;
                }
                Poll::Pending if head.is_empty() => return Poll::Pending,
                Poll::Pending => break,
            }
        }
        let head = Bytes::from(head);
        Poll::Ready((!head.is_empty()).then(|| Piece {
            head,
            payload,
            charge: None,
            _mark: self.progress.as_ref().map(Progress::mark),
        }))
    }
}

impl<S> Body for PacketBody<S>
where
    S: Stream<Item = Result<Message, Status>> + Unpin,
{
    type Data = Piece;
    type Error = Status;

    fn poll_frame(
        self: Pin<&mut Self>,
        cx: &mut Context<'_>,
    ) -> Poll<Option<Result<Frame<Piece>, Status>>> {
        let this = self.get_mut();
        if let Some(piece) = std::task::ready!(this.poll_batch(cx)) {
            return Poll::Ready(Some(Ok(Frame::data(piece))));
        }
        let Some(status) = this.status.take() else {
            return Poll::Ready(None);
        };
        match this.side {
            Side::Server => {
                let mut trailers = HeaderMap::new();
                let added = status.add_header(&mut trailers);
                Poll::Ready(Some(added.map(|()| Frame::trailers(trailers))))
            }
            Side::Client if status.code() == tonic::Code::Ok => Poll::Ready(None),
            Side::Client => Poll::Ready(Some(Err(status))),
        }
    }

    fn is_end_stream(&self) -> bool {
        self.packets.is_none() && self.status.is_none()
    }
}

// === impl Piece ===

impl Buf for Piece {
    fn remaining(&self) -> usize {
        self.head.len() + self.payload.len()
    }

    fn chunk(&self) -> &[u8] {
        if self.head.is_empty() {
            &self.payload
        } else {
            &self.head
        }
    }

    fn advance(&mut self, count: usize) {
        let of_head = count.min(self.head.len());
        self.head.advance(of_head);
        self.payload.advance(count - of_head);
    }

    // Without this method, the two parts would be written separately.
    fn chunks_vectored<'a>(&'a self, slices: &mut [IoSlice<'a>]) -> usize {
        let parts = [&self.head, &self.payload].into_iter();
        let parts = parts.filter(|part| !part.is_empty());
        let mut filled = 0;
        for (slice, part) in slices.iter_mut().zip(parts) {
            *slice = IoSlice::new(part);
            filled += 1;
        }
        filled
    }
}
