//! Messages out of a body.

use std::pin::Pin;
use std::task::{Context, Poll, ready};

use bytes::{Buf, Bytes, BytesMut};
use http::{HeaderMap, StatusCode};
use hyper::body::{Body, Incoming};
use tonic::{Code, Status};

use super::head::status_of;
use super::{PREFIX_BYTES, packet};
use crate::message::{MAX_MESSAGE_BYTES, Message};

/// Reads the messages of one call.
///
/// A message that lies within one DATA frame is handed out as a slice of it. One that spans frames
/// is gathered, in one buffer of its size. At most one frame is held beside that.
#[derive(Debug)]
pub struct Reader<B = Incoming> {
    body: B,
    ending: Ending,
    /// What has not been looked at of the frame that was received last.
    frame: Bytes,
    /// The next message's length, once its prefix is read.
    wanted: Option<usize>,
    /// The part of a prefix or of a message that earlier frames brought.
    gathered: BytesMut,
    ended: bool,
}

/// What a body's end means.
#[derive(Clone, Copy, Debug)]
enum Ending {
    /// The client has said all it wanted.
    Request,
    /// The trailers hold the call's status, or are missing and the HTTP status stands for it.
    Response(StatusCode),
    /// The status came with the head.
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

    /// Reads what a client sends.
    pub fn request(body: B) -> Self {
        Self::new(body, Ending::Request)
    }

    /// Reads what a server answers, its HTTP status being `status`.
    pub fn response(body: B, status: StatusCode) -> Self {
        Self::new(body, Ending::Response(status))
    }

    /// Reads the answer of a server whose head said that the call is over and went well.
    pub(super) fn ended(body: B) -> Self {
        Self::new(body, Ending::Told)
    }
}

impl<B> Reader<B>
where
    B: Body<Data = Bytes> + Unpin,
    B::Error: Into<Box<dyn std::error::Error + Send + Sync>>,
{
    /// The next message; `None` at the end of the call, again on every further call. Cancel safe.
    ///
    /// # Errors
    /// The status that ends the call: the server's, or what is wrong with what was received.
    pub async fn message(&mut self) -> Result<Option<Message>, Status> {
        std::future::poll_fn(|cx| self.poll_message(cx)).await
    }

    /// As [`message`](Self::message), for poll-based callers.
    ///
    /// # Errors
    /// As of `message`.
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

    /// The next packet, if all of it is there. Leaves nothing in `frame` otherwise.
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

    /// The next `len` bytes, if all of them are there.
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

    /// The body is over.
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
            Ending::Response(http) if !told => Err(missing(http)),
            _ => Ok(None),
        }
    }

    /// The stream or its connection is no more.
    fn broken(
        &self,
        error: Box<dyn std::error::Error + Send + Sync>,
    ) -> Result<Option<Message>, Status> {
        let status = Status::from_error(error);
        // A client that takes its call back has said all it wanted.
        if matches!(self.ending, Ending::Request) && status.code() == Code::Cancelled {
            return Ok(None);
        }
        Err(status)
    }
}

/// Reads a message's prefix; the texts are tonic's.
fn length(mut prefix: Bytes) -> Result<usize, Status> {
    match prefix.try_get_u8() {
        Ok(0) => {}
        // No call with an encoding is taken, so none was agreed on.
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
        return Err(Status::out_of_range(format!(
            "Error, decoded message length too large: found {len} bytes, the limit is: {MAX_MESSAGE_BYTES} bytes"
        )));
    }
    Ok(len)
}

/// What stands for the status of a call that ended without one: gRPC's mapping of HTTP's codes.
fn missing(http: StatusCode) -> Status {
    let code = match http {
        StatusCode::OK => {
            return Status::unknown(
                "protocol error: missing grpc-status trailer, stream was terminated without a \
                 final status (possible truncation by a proxy or load balancer)",
            );
        }
        StatusCode::BAD_REQUEST => Code::Internal,
        StatusCode::UNAUTHORIZED => Code::Unauthenticated,
        StatusCode::FORBIDDEN => Code::PermissionDenied,
        StatusCode::NOT_FOUND => Code::Unimplemented,
        StatusCode::TOO_MANY_REQUESTS
        | StatusCode::BAD_GATEWAY
        | StatusCode::SERVICE_UNAVAILABLE
        | StatusCode::GATEWAY_TIMEOUT => Code::Unavailable,
        _ => Code::Unknown,
    };
    let http = http.as_u16();
    Status::new(
        code,
        format!("grpc-status header missing, mapped from HTTP status code {http}"),
    )
}
