//! The HTTP/1.1 service.

use std::convert::Infallible;
use std::io;

use bytes::Bytes;
use http::header::CONTENT_LENGTH;
use http::{Method, Request, Response, StatusCode};
use http_body_util::combinators::BoxBody;
use http_body_util::{BodyExt as _, Empty, Full, StreamBody};
use hyper::body::{Frame, Incoming};
use hyper::service::service_fn;
use hyper_util::rt::TokioIo;
use tokio::io::{AsyncRead, AsyncWrite};

use crate::pattern;

/// The body of `GET /`.
pub const HELLO: &str = "hello from the far end\n";

/// Answer to a `GET` request.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Answer {
    /// [`HELLO`].
    Hello,
    /// The given number of bytes of the [pattern].
    Pattern(u64),
}

/// Returns the answer to `GET path`, or `None` if the service does not have the path.
pub fn answer(path: &str) -> Option<Answer> {
    match path.strip_prefix("/bytes/") {
        Some(count) => count.parse().ok().map(Answer::Pattern),
        None => (path == "/").then_some(Answer::Hello),
    }
}

type Body = BoxBody<Bytes, hyper::Error>;

/// Serves one connection, including keep-alive.
pub(super) async fn serve<S>(stream: S) -> io::Result<()>
where
    S: AsyncRead + AsyncWrite + Unpin,
{
    let service = service_fn(async |request| Ok::<_, Infallible>(respond(request)));
    hyper::server::conn::http1::Builder::new()
        .half_close(true)
        .serve_connection(TokioIo::new(stream), service)
        .await
        .map_err(io::Error::other)
}

fn respond(request: Request<Incoming>) -> Response<Body> {
    if request.method() == Method::POST && request.uri().path() == "/echo" {
        return Response::new(request.into_body().boxed());
    }
    match answer(request.uri().path()) {
        Some(Answer::Hello) => {
            Response::new(Full::from(HELLO).map_err(|never| match never {}).boxed())
        }
        Some(Answer::Pattern(count)) => {
            let frames = pattern::pieces(count).map(|piece| Ok(Frame::data(piece)));
            let body = StreamBody::new(tokio_stream::iter(frames));
            let mut response = Response::new(BoxBody::new(body));
            response.headers_mut().insert(CONTENT_LENGTH, count.into());
            response
        }
        None => {
            let nothing = Empty::new().map_err(|never| match never {}).boxed();
            let mut response = Response::new(nothing);
            *response.status_mut() = StatusCode::NOT_FOUND;
            response
        }
    }
}
