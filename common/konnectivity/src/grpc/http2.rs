//! The bodies of calls over `h2`.

use std::future::poll_fn;
use std::pin::Pin;
use std::task::{Context, Poll, ready};

use bytes::{Buf as _, Bytes};
use futures_util::Stream;
use h2::{Reason, RecvStream, SendStream};
use hyper::body::{Body, Frame};
use tonic::Status;
use tracing::debug;

use super::body::{PacketBody, Piece};
use super::pacer::Pacer;
use super::room::{SendError, room};
use crate::message::Message;

/// Body that a peer sends. A received frame returns its bytes to the windows at once, because a reader of packets
/// never waits long.
#[derive(Debug)]
pub struct Received {
    stream: RecvStream,
    is_data_done: bool,
}

/// Sends a body to its end. Ends early if the peer resets the stream. Without a `pacer`, the
/// send queue of HTTP/2 has the only limit.
pub(super) async fn send<S, F>(
    body: PacketBody<S>,
    mut stream: SendStream<Piece>,
    pacer: Option<Pacer<F>>,
) where
    S: Stream<Item = Result<Message, Status>> + Unpin,
    F: Fn() -> Option<usize>,
{
    match send_frames(body, &mut stream, pacer).await {
        Ok(()) => {}
        Err(error @ SendError::Packets(_)) => {
            debug!(%error, "resetting a stream");
            stream.send_reset(Reason::INTERNAL_ERROR);
        }
        Err(error) => debug!(%error, "a body was not sent to its end"),
    }
}

async fn send_frames<S, F>(
    mut body: PacketBody<S>,
    stream: &mut SendStream<Piece>,
    mut pacer: Option<Pacer<F>>,
) -> Result<(), SendError>
where
    S: Stream<Item = Result<Message, Status>> + Unpin,
    F: Fn() -> Option<usize>,
{
    loop {
        let next = poll_fn(|cx| {
            if let Poll::Ready(reset) = stream.poll_reset(cx) {
                return Poll::Ready(Err(reset.map_or_else(SendError::Http, SendError::Reset)));
            }
            Pin::new(&mut body).poll_frame(cx).map(Ok)
        });
        let Some(frame) = next.await? else {
            return Ok(stream.send_data(Piece::default(), true)?);
        };
        match frame.map_err(SendError::Packets)?.into_data() {
            Ok(mut piece) => {
                let is_last = body.is_end_stream();
                if piece.has_remaining() {
                    match &mut pacer {
                        Some(pacer) => {
                            pacer.room(stream).await?;
                            piece.charge = Some(pacer.charge(piece.remaining()));
                        }
                        None => room(stream).await?,
                    }
                }
                stream.send_data(piece, is_last)?;
                if is_last {
                    return Ok(());
                }
            }
            Err(frame) => {
                let trailers = frame.into_trailers().unwrap_or_default();
                // Unused room of the connection's window goes to other streams.
                stream.reserve_capacity(0);
                return Ok(stream.send_trailers(trailers)?);
            }
        }
    }
}

// === impl Received ===

impl Received {
    /// Wraps the body of a request or of a response.
    pub fn new(stream: RecvStream) -> Self {
        Self {
            stream,
            is_data_done: false,
        }
    }
}

/// Returns an error of a body, or `None` for an end: a peer that resets a stream without an error has sent
/// everything that it wanted to send.
fn broken(error: h2::Error) -> Option<h2::Error> {
    (error.reason() != Some(Reason::NO_ERROR)).then_some(error)
}

impl Body for Received {
    type Data = Bytes;
    type Error = h2::Error;

    fn poll_frame(
        self: Pin<&mut Self>,
        cx: &mut Context<'_>,
    ) -> Poll<Option<Result<Frame<Bytes>, h2::Error>>> {
        let this = self.get_mut();
        if !this.is_data_done {
            match ready!(this.stream.poll_data(cx)) {
                Some(Ok(bytes)) => {
                    // Fails only for more bytes than were received.
                    let _ = this.stream.flow_control().release_capacity(bytes.len());
                    return Poll::Ready(Some(Ok(Frame::data(bytes))));
                }
                Some(Err(error)) => return Poll::Ready(broken(error).map(Err)),
                None => this.is_data_done = true,
            }
        }
        Poll::Ready(match ready!(this.stream.poll_trailers(cx)) {
            Ok(trailers) => trailers.map(|trailers| Ok(Frame::trailers(trailers))),
            Err(error) => broken(error).map(Err),
        })
    }

    fn is_end_stream(&self) -> bool {
        self.stream.is_end_stream()
    }
}
