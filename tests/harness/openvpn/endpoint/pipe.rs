//! A pipe between a flow of a tunnel and its stream.

use std::pin::Pin;
use std::task::{Context, Poll};

use bytes::{Buf as _, BytesMut};
use culvert_kit::client::BoxedStream;
use culvert_openvpn::flows::{FlowId, Flows, Received};
use tokio::io::{AsyncRead as _, AsyncWrite as _, ReadBuf};

/// Bytes between a flow and a stream. Each direction ends separately.
pub(super) struct Pipe {
    stream: BoxedStream,
    to_flow: BytesMut,
    is_read: bool,
    is_closed: bool,
    is_written: bool,
}

impl Pipe {
    pub(super) fn new(stream: BoxedStream) -> Self {
        Self {
            stream,
            to_flow: BytesMut::new(),
            is_read: false,
            is_closed: false,
            is_written: false,
        }
    }

    /// Moves as many bytes as possible in both directions. Returns true if anything moved.
    pub(super) fn pump(&mut self, id: FlowId, flows: &mut Flows, cx: &mut Context<'_>) -> bool {
        let sent = self.send(id, flows, cx);
        let received = self.receive(id, flows, cx);
        sent || received
    }

    fn send(&mut self, id: FlowId, flows: &mut Flows, cx: &mut Context<'_>) -> bool {
        let mut is_moved = false;
        if self.to_flow.is_empty() && !self.is_read {
            let mut bytes = [0; 16384];
            let mut buffer = ReadBuf::new(&mut bytes);
            match Pin::new(&mut self.stream).poll_read(cx, &mut buffer) {
                Poll::Ready(Ok(())) if !buffer.filled().is_empty() => {
                    self.to_flow.extend_from_slice(buffer.filled());
                    is_moved = true;
                }
                Poll::Ready(Ok(())) => self.is_read = true,
                Poll::Ready(Err(_)) => {
                    self.is_read = true;
                    self.is_closed = true;
                    flows.abort(id);
                }
                Poll::Pending => {}
            }
        }
        if !self.to_flow.is_empty() {
            let taken = flows.send(id, &self.to_flow).unwrap_or(0);
            self.to_flow.advance(taken);
            is_moved |= taken > 0;
        }
        if self.is_read && self.to_flow.is_empty() && !self.is_closed {
            flows.close(id);
            self.is_closed = true;
            is_moved = true;
        }
        is_moved
    }

    fn receive(&mut self, id: FlowId, flows: &mut Flows, cx: &mut Context<'_>) -> bool {
        if self.is_written {
            return false;
        }
        let stream = &mut self.stream;
        let write = |bytes: &[u8]| match Pin::new(&mut *stream).poll_write(cx, bytes) {
            Poll::Ready(Ok(written)) => written,
            // The stream is closed: discard the bytes.
            Poll::Ready(Err(_)) => bytes.len(),
            Poll::Pending => 0,
        };
        match flows.recv(id, write) {
            Ok(Received::Bytes(count)) => count > 0,
            Ok(Received::Empty) | Err(_) => false,
            Ok(Received::End) => {
                self.is_written = Pin::new(&mut self.stream).poll_shutdown(cx).is_ready();
                self.is_written
            }
        }
    }
}
