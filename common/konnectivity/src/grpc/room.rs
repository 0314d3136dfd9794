//! Room for the bytes of a body in the send queue of HTTP/2 and in the window of the stream.

use std::future::poll_fn;
use std::sync::Arc;
use std::sync::atomic::{AtomicUsize, Ordering};
use std::task::Poll;

use bytes::Buf;
use h2::{Reason, SendStream};
use tokio::sync::Notify;
use tonic::Status;

/// Bytes in the send queue of HTTP/2.
#[derive(Debug, Default)]
pub(super) struct Queued {
    bytes: AtomicUsize,
    written: Notify,
}

/// Counts the bytes of a piece until HTTP/2 has written the piece.
#[derive(Debug)]
pub(super) struct Charge {
    queued: Arc<Queued>,
    bytes: usize,
}

/// Reason why a body was not sent to its end.
#[derive(Debug, thiserror::Error)]
pub(super) enum SendError {
    #[error("the peer reset the stream: {0}")]
    Reset(Reason),
    #[error(transparent)]
    Http(#[from] h2::Error),
    #[error("the stream has ended")]
    Ended,
    #[error("the packets ended with an error: {0}")]
    Packets(Status),
}

/// Waits until the stream may send something. `h2` then accepts a whole piece, and the rest of the piece waits in
/// `h2`. The room is requested only once a piece is there: a stream without data must not reserve the window of the
/// connection.
pub(super) async fn room<B: Buf>(stream: &mut SendStream<B>) -> Result<(), SendError> {
    stream.reserve_capacity(1);
    while stream.capacity() == 0 {
        more_room(stream).await?;
    }
    Ok(())
}

/// Waits until the peer returns bytes to the window.
pub(super) async fn more_room<B: Buf>(stream: &mut SendStream<B>) -> Result<(), SendError> {
    let more = poll_fn(|cx| match stream.poll_reset(cx) {
        Poll::Ready(Ok(reason)) => Poll::Ready(Some(Err(reason.into()))),
        Poll::Ready(Err(error)) => Poll::Ready(Some(Err(error))),
        Poll::Pending => stream.poll_capacity(cx),
    });
    more.await.ok_or(SendError::Ended)??;
    Ok(())
}

// === impl Queued ===

impl Queued {
    /// Returns the number of bytes in the queue.
    pub(super) fn bytes(&self) -> usize {
        self.bytes.load(Ordering::Relaxed)
    }

    /// Resolves once HTTP/2 has written a piece.
    pub(super) async fn less(&self) {
        self.written.notified().await;
    }
}

// === impl Charge ===

impl Charge {
    /// Counts the bytes of a piece that enters the queue.
    pub(super) fn new(queued: &Arc<Queued>, bytes: usize) -> Self {
        queued.bytes.fetch_add(bytes, Ordering::Relaxed);
        Self {
            queued: queued.clone(),
            bytes,
        }
    }
}

impl Drop for Charge {
    fn drop(&mut self) {
        self.queued.bytes.fetch_sub(self.bytes, Ordering::Relaxed);
        self.queued.written.notify_one();
    }
}
