//! The reader of messages from the body of a call.

use std::io;
use std::pin::Pin;
use std::task::{Context, Poll, ready};

use bytes::{Buf, Bytes, BytesMut};
use h2::Reason;
use http::HeaderMap;
use hyper::body::Body;
use tonic::{Code, Status};

use super::http2::Received;
use super::{PREFIX_BYTES, packet};
use crate::message::{MAX_MESSAGE_BYTES, Message};

/// Reader of the messages of one call.
///
/// A message within one DATA frame is a slice of that frame. A message that spans frames is gathered in one
/// buffer of the message's size. Besides that buffer, the reader keeps at most one frame.
#[derive(Debug)]
pub struct Reader<B = Received> {
    body: B,
    ending: Ending,
    /// Unread rest of the last received frame.
    frame: Bytes,
    /// Length of the next message, in bytes; `None` before its prefix is read.
    wanted: Option<usize>,
    /// Part of a prefix or of a message, from earlier frames.
    gathered: BytesMut,
    ended: bool,
}

/// Meaning of the end of a body.
#[derive(Clone, Copy, Debug)]
enum Ending {
    /// The client has sent everything.
    Request,
    /// The trailers contain the status of the call.
    Response,
    /// The head contained the status.
    Told,
}

impl<B> Reader<B> {
    fn new(body: B, ending: Ending) -> Self {
        Self {
            body,
            ending,
            frame: Bytes::new(),
            wanted: None,
            gathered: BytesMut::new(),
            ended: false,
        }
    }

    /// Creates a reader for the request of a client.
    pub fn request(body: B) -> Self {
        Self::new(body, Ending::Request)
    }

    /// Creates a reader for the response of a server.
    pub fn response(body: B) -> Self {
        Self::new(body, Ending::Response)
    }

    /// Creates a reader for a response with a successful status in its head.
    pub(super) fn ended(body: B) -> Self {
        Self::new(body, Ending::Told)
    }
}

impl<B> Reader<B>
where
    B: Body<Data = Bytes> + Unpin,
    B::Error: Into<Box<dyn std::error::Error + Send + Sync>>,
{
    /// Returns the next message, or `None` at the end of the call and on every further call. Cancel safe.
    ///
    /// # Errors
    /// Returns the status that ends the call: the server's status, or the error in the received bytes.
    pub async fn message(&mut self) -> Result<Option<Message>, Status> {
        std::future::poll_fn(|cx| self.poll_message(cx)).await
    }

    /// Polls for the next message, as [`message`](Self::message) does.
    ///
    /// # Errors
    /// As for `message`.
    pub fn poll_message(&mut self, cx: &mut Context<'_>) -> Poll<Result<Option<Message>, Status>> {
        if self.ended {
            return Poll::Ready(Ok(None));
        }
        let next = ready!(self.poll_next(cx));
        if !matches!(next, Ok(Some(_))) {
            self.ended = true;
            self.frame = Bytes::new();
            self.gathered = BytesMut::new();
        }
        Poll::Ready(next)
    }

    fn poll_next(&mut self, cx: &mut Context<'_>) -> Poll<Result<Option<Message>, Status>> {
        loop {
            if let Some(packet) = self.cut()? {
                let message = packet::decode(packet);
                let message = message.map_err(|error| Status::internal(error.to_string()))?;
                return Poll::Ready(Ok(Some(message)));
            }
            match ready!(Pin::new(&mut self.body).poll_frame(cx)) {
                Some(Ok(frame)) => match frame.into_data() {
                    Ok(data) => self.frame = data,
                    Err(frame) => {
                        let trailers = frame.into_trailers().ok();
                        return Poll::Ready(self.end(trailers.as_ref()));
                    }
                },
                Some(Err(error)) => return Poll::Ready(self.broken(error.into())),
                None => return Poll::Ready(self.end(None)),
            }
        }
    }

    /// Returns the next packet if it is complete. Otherwise moves the rest of `frame` to `gathered`.
    fn cut(&mut self) -> Result<Option<Bytes>, Status> {
        let len = match self.wanted {
            Some(len) => len,
            None => {
                let Some(prefix) = self.collect(PREFIX_BYTES) else {
                    return Ok(None);
                };
                let len = length(prefix)?;
                self.wanted = Some(len);
                len
            }
        };
        let packet = self.collect(len);
        if packet.is_some() {
            self.wanted = None;
        }
        Ok(packet)
    }

    /// Returns the next `len` bytes if all of them have arrived.
    fn collect(&mut self, len: usize) -> Option<Bytes> {
        if self.gathered.is_empty() && self.frame.len() >= len {
            return Some(self.frame.split_to(len));
        }
        if self.frame.is_empty() {
            return None;
        }
        let missing = len.saturating_sub(self.gathered.len());
        self.gathered.reserve(missing);
        let part = self.frame.split_to(missing.min(self.frame.len()));
        self.gathered.extend_from_slice(&part);
        (self.gathered.len() == len).then(|| std::mem::take(&mut self.gathered).freeze())
    }

    /// Returns the result of the end of the body.
    fn end(&self, trailers: Option<&HeaderMap>) -> Result<Option<Message>, Status> {
        let status = trailers.and_then(status_of);
        let told = status.is_some();
        if let Some(status) = status.filter(|status| status.code() != Code::Ok) {
            return Err(status);
        }
        if self.wanted.is_some() || !self.gathered.is_empty() {
            return Err(Status::internal("Unexpected EOF decoding stream."));
        }
        match self.ending {
            Ending::Response if !told => Err(Status::unknown(
                "protocol error: missing grpc-status trailer, stream was terminated without a \
                 final status (possible truncation by a proxy or load balancer)",
            )),
            _ => Ok(None),
        }
    }

    /// Returns the result of a broken stream or connection.
    fn broken(
        &self,
        error: Box<dyn std::error::Error + Send + Sync>,
    ) -> Result<Option<Message>, Status> {
        match error.downcast::<h2::Error>() {
            // As in grpc-go, whose server cancels a call with its stream.
            Ok(error) if matches!(self.ending, Ending::Request) => {
                Err(Status::cancelled(text_of(&error)))
            }
            Ok(error) => Err(Status::new(code_of(&error), text_of(&error))),
            Err(error) => Err(Status::from_error(error)),
        }
    }
}

/// Returns the text of an error of HTTP/2. rustls has its own long text for a peer that leaves without an alert.
fn text_of(error: &h2::Error) -> String {
    match error.get_io().map(io::Error::kind) {
        Some(io::ErrorKind::UnexpectedEof) => "the peer closed the connection".to_owned(),
        _ => error.to_string(),
    }
}

/// Returns the code for the end of a response by an error of HTTP/2: grpc-go's mapping of the codes of resets, and
/// `Unavailable` for a lost connection.
fn code_of(error: &h2::Error) -> Code {
    match error.reason() {
        Some(reason) if error.is_reset() => match reason {
            Reason::CANCEL => Code::Cancelled,
            Reason::ENHANCE_YOUR_CALM | Reason::FLOW_CONTROL_ERROR => Code::ResourceExhausted,
            Reason::INADEQUATE_SECURITY => Code::PermissionDenied,
            Reason::REFUSED_STREAM => Code::Unavailable,
            _ => Code::Internal,
        },
        _ => Code::Unavailable,
    }
}

/// Parses the prefix of a message. The texts of the errors about compression are tonic's.
fn length(mut prefix: Bytes) -> Result<usize, Status> {
    match prefix.try_get_u8() {
        Ok(0) => {}
        // Calls with an encoding are refused, so no encoding was agreed on.
        Ok(1) => {
            return Err(Status::internal(
                "protocol error: received message with compressed-flag but no grpc-encoding was specified",
            ));
        }
        flag => {
            return Err(Status::internal(format!(
                "protocol error: received message with invalid compression flag: {} (valid flags are 0 and 1)",
                flag.unwrap_or_default(),
            )));
        }
    }
    let len = prefix.try_get_u32().unwrap_or_default() as usize;
    if len > MAX_MESSAGE_BYTES {
        // The code and the text of grpc-go.
        return Err(Status::resource_exhausted(format!(
            "grpc: received message larger than max ({len} vs. {MAX_MESSAGE_BYTES})"
        )));
    }
    Ok(len)
}

/// Returns the status in a head or in trailers. Ignores the status details: our programs never send details,
/// and tonic assumes that their encoding is valid.
pub(super) fn status_of(headers: &HeaderMap) -> Option<Status> {
    if !headers.contains_key(Status::GRPC_STATUS_DETAILS) {
        return Status::from_header_map(headers);
    }
    let mut headers = headers.clone();
    headers.remove(Status::GRPC_STATUS_DETAILS);
    Status::from_header_map(&headers)
}
