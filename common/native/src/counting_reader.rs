//! The counter of all bytes read from a peer, below HTTP/2.

use std::io;
use std::pin::Pin;
use std::sync::Arc;
use std::sync::atomic::Ordering;
use std::task::{Context, Poll};

use tokio::io::{AsyncRead, ReadBuf};

use super::window::Inbound;

/// Stream with a counter of all bytes read, in [`Inbound::heard`].
#[derive(Debug)]
pub(crate) struct CountingReader<S> {
    inner: S,
    inbound: Arc<Inbound>,
}

impl<S> CountingReader<S> {
    /// Counts the bytes read from `inner`.
    pub(crate) fn new(inner: S, inbound: Arc<Inbound>) -> Self {
        Self { inner, inbound }
    }
}

impl<S: AsyncRead + Unpin> AsyncRead for CountingReader<S> {
    fn poll_read(
        mut self: Pin<&mut Self>,
        cx: &mut Context<'_>,
        target: &mut ReadBuf<'_>,
    ) -> Poll<io::Result<()>> {
        let before = target.filled().len();
        let read = Pin::new(&mut self.inner).poll_read(cx, target);
        let bytes = target.filled().len() - before;
        self.inbound
            .heard
            .fetch_add(bytes as u64, Ordering::Relaxed);
        read
    }
}

culvert_stream::delegate_write!(CountingReader);
