//! A source that records its end time.

use bytes::Bytes;
use culvert_stream::{CloseReason, Source};
use tokio::time::Instant;

/// Passes all bytes and errors on unchanged.
pub(super) struct Ending<'a, S> {
    source: &'a mut S,
    /// Time of the normal end of the source; `None` before the end.
    pub at: Option<Instant>,
}

impl<'a, S> Ending<'a, S> {
    /// Wraps a source that has not ended yet.
    pub(super) fn new(source: &'a mut S) -> Self {
        Self { source, at: None }
    }
}

impl<S: Source> Source for Ending<'_, S> {
    async fn recv(&mut self) -> Result<Option<Bytes>, CloseReason> {
        let next = self.source.recv().await;
        if next == Ok(None) {
            self.at = Some(Instant::now());
        }
        next
    }

    async fn aborted(&mut self) -> CloseReason {
        self.source.aborted().await
    }

    async fn fill(&mut self) {
        self.source.fill().await;
    }
}
