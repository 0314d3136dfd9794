//! The head of a call: the request that opens the call, and the head of the response.

use std::future::poll_fn;

use futures_util::Stream;
use h2::client::SendRequest;
use h2::server::SendResponse;
use h2::{Reason, RecvStream};
use http::header::{CONTENT_TYPE, TE};
use http::uri::PathAndQuery;
use http::{HeaderMap, HeaderValue, Method, Request, Response, StatusCode, Uri, Version};
use hyper::body::Body as _;
use tokio_util::task::TaskTracker;
use tonic::metadata::{MetadataMap, MetadataValue};
use tonic::{Code, Status};
use tracing::debug;

use super::http2::{self, Received};
use super::pacer::{Pacer, SendLimits};
use super::reader::status_of;
use super::{PacketBody, Piece, Reader};
use crate::message::Message;

/// The media type of every gRPC message format; `+proto` or parameters may follow.
const GRPC: &str = "application/grpc";

const ENCODING: &str = "grpc-encoding";
const ACCEPT_ENCODING: &str = "grpc-accept-encoding";

/// Service with one method that carries packets in both directions.
pub trait Service<B = Received> {
    /// Path of the method.
    const PATH: &'static str;

    /// Stream of the replies.
    type Replies: Stream<Item = Result<Message, Status>> + Send + Unpin + 'static;

    /// Handles a call. A [`Progress`](crate::queue::Progress) in the extensions of the response receives reports of the
    /// written replies.
    ///
    /// # Errors
    /// Returns the status that refuses the call.
    fn take(
        &self,
        request: tonic::Request<Reader<B>>,
    ) -> impl Future<Output = Result<tonic::Response<Self::Replies>, Status>> + Send;
}

/// Answers a request with the reply of `service`, or with a refusal if the request is not a call of that
/// service.
pub async fn answer<S: Service<B>, B>(
    service: &S,
    request: Request<B>,
) -> Response<PacketBody<S::Replies>> {
    let (head, body) = request.into_parts();
    if let Err((http, status)) = is_call(&head, S::PATH) {
        let mut refusal: Response<PacketBody<S::Replies>> = status.into_http();
        *refusal.status_mut() = http;
        return refusal;
    }
    let metadata = MetadataMap::from_headers(head.headers);
    let inbound = Reader::request(body);
    let request = tonic::Request::from_parts(metadata, head.extensions, inbound);
    match service.take(request).await {
        Ok(answer) => {
            let (metadata, replies, mut extensions) = answer.into_parts();
            let body = PacketBody::response(replies).reporting_to(extensions.remove());
            let mut response = Response::new(body);
            *response.headers_mut() = metadata.into_headers();
            let headers = response.headers_mut();
            headers.insert(CONTENT_TYPE, HeaderValue::from_static(GRPC));
            response
        }
        Err(status) => status.into_http(),
    }
}

/// Answers a request with the reply of `service`, and sends the messages of the reply until the end. Ends early if
/// the peer resets the stream.
pub async fn serve<S: Service<Received>>(
    service: S,
    request: Request<RecvStream>,
    mut respond: SendResponse<Piece>,
) {
    // The future until the answer is boxed, so that its memory is free while messages are sent.
    let answering = Box::pin(async {
        tokio::select! {
            response = answer(&service, request.map(Received::new)) => Some(response),
            reset = poll_fn(|cx| respond.poll_reset(cx)) => {
                debug!(?reset, "the peer reset a stream before the answer");
                None
            }
        }
    });
    let Some(response) = answering.await else {
        return;
    };
    let (head, body) = response.into_parts();
    let is_head_only = body.is_end_stream();
    match respond.send_response(Response::from_parts(head, ()), is_head_only) {
        Ok(_) if is_head_only => {}
        Ok(stream) => {
            http2::send(body, stream, None::<Pacer<fn() -> Option<usize>>>).await;
        }
        Err(error) => {
            debug!(%error, "cannot send the head of an answer");
            respond.send_reset(Reason::INTERNAL_ERROR);
        }
    }
}

/// Checks that a request is a call of the method at `path`. If not, returns the HTTP status and the gRPC
/// status of the refusal, both as in grpc-go.
fn is_call(head: &http::request::Parts, path: &str) -> Result<(), (StatusCode, Status)> {
    let kind = head.headers.get(CONTENT_TYPE).map(HeaderValue::as_bytes);
    if !kind.is_some_and(is_grpc) {
        let kind = String::from_utf8_lossy(kind.unwrap_or_default());
        let text = format!("invalid gRPC request content-type {kind:?}");
        let status = Status::invalid_argument(text);
        return Err((StatusCode::UNSUPPORTED_MEDIA_TYPE, status));
    }
    if head.method != Method::POST {
        let method = head.method.as_str();
        let text = format!("Received a HEADERS frame with :method {method:?} which should be POST");
        return Err((StatusCode::METHOD_NOT_ALLOWED, Status::internal(text)));
    }
    if head.uri.path() != path {
        let status = Status::unimplemented(format!("unknown method {}", head.uri.path()));
        return Err((StatusCode::OK, status));
    }
    is_plain(&head.headers).map_err(|status| (StatusCode::OK, status))
}

fn is_grpc(kind: &[u8]) -> bool {
    let rest = kind.strip_prefix(GRPC.as_bytes());
    rest.is_some_and(|rest| matches!(rest.first(), None | Some(b'+' | b';')))
}

/// Refuses compressed messages, with the error text of tonic.
fn is_plain(headers: &HeaderMap) -> Result<(), Status> {
    let Some(encoding) = headers.get(ENCODING).filter(|value| *value != "identity") else {
        return Ok(());
    };
    let encoding = String::from_utf8_lossy(encoding.as_bytes());
    let mut status = Status::unimplemented(format!(
        "Content is compressed with `{encoding}` which isn't supported"
    ));
    let identity = MetadataValue::from_static("identity");
    status.metadata_mut().insert(ACCEPT_ENCODING, identity);
    Err(status)
}

/// Reason why a call was not answered with messages.
#[derive(Debug, thiserror::Error)]
pub enum CallError {
    /// The address is not a valid URI.
    #[error(transparent)]
    Address(#[from] http::uri::InvalidUriParts),
    /// The connection broke before the response.
    #[error(transparent)]
    Connection(#[from] h2::Error),
    /// The server refused the call.
    #[error("{} ({})", .0.message(), .0.code())]
    Refused(Box<Status>),
    /// A program other than a gRPC server answered with this HTTP status.
    #[error("the answer is not gRPC (HTTP status {0})")]
    NotGrpc(StatusCode),
}

/// Opens a call of the method at `path`, and waits for the head of the response. Returns the metadata and the
/// messages of the response. A task of `tasks` sends `body` within `limits`.
pub async fn call<S>(
    connection: SendRequest<Piece>,
    origin: &Uri,
    path: &'static str,
    metadata: MetadataMap,
    body: PacketBody<S>,
    limits: SendLimits<impl Fn() -> Option<usize> + Send + 'static>,
    tasks: &TaskTracker,
) -> Result<(MetadataMap, Reader), CallError>
where
    S: Stream<Item = Result<Message, Status>> + Send + Unpin + 'static,
{
    let mut uri = origin.clone().into_parts();
    uri.path_and_query = Some(PathAndQuery::from_static(path));
    let mut request = Request::new(());
    *request.method_mut() = Method::POST;
    *request.version_mut() = Version::HTTP_2;
    *request.uri_mut() = Uri::from_parts(uri)?;
    *request.headers_mut() = metadata.into_headers();
    let headers = request.headers_mut();
    headers.insert(TE, HeaderValue::from_static("trailers"));
    headers.insert(CONTENT_TYPE, HeaderValue::from_static(GRPC));
    let (response, stream) = connection.ready().await?.send_request(request, false)?;
    let pacer = Some(Pacer::new(limits));
    tasks.spawn(http2::send(body, stream, pacer));
    let response = response.await?;
    let refused = |status| CallError::Refused(Box::new(status));
    is_plain(response.headers()).map_err(refused)?;
    let (head, received) = response.map(Received::new).into_parts();
    let reader = match status_of(&head.headers) {
        Some(status) if status.code() != Code::Ok => return Err(refused(status)),
        Some(_) => Reader::ended(received),
        None if head.status != StatusCode::OK => {
            return Err(CallError::NotGrpc(head.status));
        }
        None => Reader::response(received),
    };
    Ok((MetadataMap::from_headers(head.headers), reader))
}
