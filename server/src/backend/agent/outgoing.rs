//! The messages to the agent: the body of the `Connect` call's response.

use std::pin::Pin;
use std::sync::Arc;
use std::task::{Context, Poll, ready};

use culvert_konnectivity::message::Message;
use culvert_konnectivity::metrics::Segment;
use culvert_konnectivity::queue;
use futures_util::Stream;
use tokio_util::sync::WaitForCancellationFutureOwned;
use tonic::Status;

use super::AgentStream;

/// Stream of messages to the agent; counts every message.
pub(crate) struct Outgoing {
    messages: queue::Receiver<Message>,
    stream: Arc<AgentStream>,
    retired: Pin<Box<WaitForCancellationFutureOwned>>,
}

impl Outgoing {
    /// Wraps a stream's outgoing queue. Dropping the wrapper retires the stream.
    pub(crate) fn new(messages: queue::Receiver<Message>, stream: Arc<AgentStream>) -> Self {
        let retired = Box::pin(stream.retired.clone().cancelled_owned());
        Self {
            messages,
            stream,
            retired,
        }
    }
}

impl Stream for Outgoing {
    type Item = Result<Message, Status>;

    fn poll_next(mut self: Pin<&mut Self>, cx: &mut Context<'_>) -> Poll<Option<Self::Item>> {
        if self.retired.as_mut().poll(cx).is_ready() {
            return Poll::Ready(None);
        }
        let Some(message) = ready!(self.messages.poll_recv(cx)) else {
            return Poll::Ready(None);
        };
        self.stream
            .metrics
            .streams
            .count(Segment::ToAgent, &message);
        Poll::Ready(Some(Ok(message)))
    }
}

impl Drop for Outgoing {
    fn drop(&mut self) {
        self.stream.retire();
    }
}
