//! The plain HTTP listener for health, metrics and admin paths.
//!
//! [`bind`] opens a TCP listener, [`Routes`] maps paths to handlers, and [`serve`] runs both until shutdown.
//! As in upstream, the TCP listener has neither TLS nor authentication, because probes and scrapers expect
//! plain HTTP. The listener limits its cost instead: request heads are bounded in size and time, connections
//! in number and age.
//!
//! Paths that change state belong on an [`AdminSocket`] that authenticates its clients: a Unix socket for the
//! process's own user, or mutual TLS.

mod listener;
mod pages;
mod progress;
mod shared_page;
mod socket;

use std::collections::HashMap;
use std::convert::Infallible;
use std::fmt;
use std::pin::{Pin, pin};
use std::sync::Arc;
use std::time::Duration;

use bytes::Bytes;
use http::header::{ALLOW, CONNECTION, CONTENT_TYPE, HeaderValue};
use http::{HeaderName, Method, Request, Response, StatusCode};
use http_body_util::{BodyExt as _, Collected, Full, LengthLimitError, Limited};
use hyper::body::{Body as _, Incoming};
use hyper::server::conn::http1;
use hyper::service::service_fn;
use hyper_util::rt::TokioIo;
use tokio::time::{Instant, timeout};
use tokio_util::sync::CancellationToken;
use tokio_util::task::TaskTracker;

use crate::net::admission::{Admission, AdmissionLimits};

pub use listener::{BindError, bind};
pub use pages::Check;
pub(crate) use pages::NO_PROFILES;
use progress::Progress;
use socket::Stream;
pub use socket::{AdminSocket, OnRefused, UnixSocket};

/// Limits for open connections. At the limit, a new connection displaces an older one, so that idle
/// connections cannot keep a probe from its answer. The deadline only has to be later than [`MAX_AGE`].
const CONNECTIONS: AdmissionLimits = AdmissionLimits {
    peers: 256,
    bytes: usize::MAX,
    deadline: Duration::from_secs(660),
    grace: Duration::from_millis(100),
};

/// Time limit for a request head (upstream's `ReadHeaderTimeout`). As in Go's server, the time of a later request begins with
/// its first byte, so that scrapers may keep their connections open between requests. If the first part of a head arrives
/// together with the previous request, only [`MAX_AGE`] limits the wait for the rest.
const HEADER_TIMEOUT: Duration = Duration::from_secs(60);

/// Maximum size of a request head, in bytes. Upstream allows 1 MiB; no client needs so much, and 1 MiB for
/// each of 256 connections would cost too much memory.
const MAX_HEAD_BYTES: usize = 64 << 10;

/// Maximum size of a request body, in bytes.
const MAX_BODY_BYTES: usize = 64 << 10;

/// Time limit for a request body.
const BODY_TIMEOUT: Duration = Duration::from_secs(10);

/// Maximum age of a connection. The server closes older connections gracefully, so that idle connections
/// cannot fill the listener. A scraper that keeps its connection open only has to reconnect now and then.
const MAX_AGE: Duration = Duration::from_secs(600);

/// Time limit for the graceful close of a connection.
const GRACE: Duration = Duration::from_secs(5);

/// Pause after a failed accept, for example when the process is out of file descriptors.
const ACCEPT_PAUSE: Duration = Duration::from_millis(100);

type BoxFuture<T> = Pin<Box<dyn Future<Output = T> + Send>>;
type Handler = Box<dyn Fn(Request<Bytes>) -> BoxFuture<Reply> + Send + Sync>;

/// Response of a handler.
#[derive(Clone, Debug)]
pub struct Reply(Response<Full<Bytes>>);

/// Paths, their HTTP methods, and their handlers. Handlers of actions get the body of a request; other handlers get an empty
/// body.
#[derive(Default)]
pub struct Routes {
    handlers: HashMap<&'static str, (Methods, Handler)>,
}

/// HTTP methods of a path.
#[derive(Clone, Copy)]
enum Methods {
    /// Every method, as in Go's `http.ServeMux` without a method in the pattern.
    Any,
    /// GET and HEAD.
    Read,
    /// POST.
    Action,
}

// === impl Reply ===

impl Reply {
    /// Creates a reply with any status, content type and body.
    pub fn new(status: StatusCode, content_type: &'static str, body: impl Into<Bytes>) -> Self {
        let mut response = Response::new(Full::new(body.into()));
        *response.status_mut() = status;
        Self(response).with(CONTENT_TYPE, HeaderValue::from_static(content_type))
    }

    /// Creates a reply in plain text.
    pub fn text(status: StatusCode, body: impl Into<Bytes>) -> Self {
        Self::new(status, "text/plain; charset=utf-8", body)
    }

    /// Adds a header.
    #[must_use]
    pub fn with(mut self, name: HeaderName, value: HeaderValue) -> Self {
        self.0.headers_mut().append(name, value);
        self
    }
}

// === impl Routes ===

impl Routes {
    /// Creates an empty table of routes: every request gets 404.
    pub fn new() -> Self {
        Self::default()
    }

    /// Adds a path, or replaces the handler of an existing path. Requests must match the path exactly. GET
    /// and HEAD requests reach the handler; other methods get 405.
    #[must_use]
    pub fn route<F, R>(self, path: &'static str, handler: F) -> Self
    where
        F: Fn(Request<Bytes>) -> R + Send + Sync + 'static,
        R: Future<Output = Reply> + Send + 'static,
    {
        self.add(Methods::Read, path, handler)
    }

    /// Adds a path whose handler gets the requests of every method, and must not change any state. Health checks need such
    /// paths: haproxy's `option httpchk` sends OPTIONS by default.
    #[must_use]
    pub fn any_method<F, R>(self, path: &'static str, handler: F) -> Self
    where
        F: Fn(Request<Bytes>) -> R + Send + Sync + 'static,
        R: Future<Output = Reply> + Send + 'static,
    {
        self.add(Methods::Any, path, handler)
    }

    /// Adds a path that changes state. POST requests reach the handler, with a body of at most 64 KiB; other
    /// methods get 405.
    #[must_use]
    pub fn action<F, R>(self, path: &'static str, handler: F) -> Self
    where
        F: Fn(Request<Bytes>) -> R + Send + Sync + 'static,
        R: Future<Output = Reply> + Send + 'static,
    {
        self.add(Methods::Action, path, handler)
    }

    fn add<F, R>(mut self, methods: Methods, path: &'static str, handler: F) -> Self
    where
        F: Fn(Request<Bytes>) -> R + Send + Sync + 'static,
        R: Future<Output = Reply> + Send + 'static,
    {
        let handler = move |request| Box::pin(handler(request)) as BoxFuture<Reply>;
        self.handlers.insert(path, (methods, Box::new(handler)));
        self
    }

    async fn answer(&self, request: Request<Incoming>) -> Reply {
        let path = request.uri().path();
        let Some((methods, handler)) = self.handlers.get(path) else {
            return pages::not_found(path);
        };
        if let Some(allowed) = methods.refuse(request.method()) {
            return Reply::text(StatusCode::METHOD_NOT_ALLOWED, "Method Not Allowed\n")
                .with(ALLOW, HeaderValue::from_static(allowed));
        }
        let (head, body) = request.into_parts();
        match read_body(body, *methods).await {
            Ok(body) => handler(Request::from_parts(head, body)).await,
            Err((status, text)) => {
                // hyper closes the connection, because the rest of the body is unread.
                let reply = Reply::text(status, text);
                reply.with(CONNECTION, HeaderValue::from_static("close"))
            }
        }
    }
}

impl Methods {
    /// Returns the permitted methods, separated by `, `, if `method` is not one of them.
    fn refuse(self, method: &Method) -> Option<&'static str> {
        match (self, method) {
            (Self::Any, _)
            | (Self::Read, &Method::GET | &Method::HEAD)
            | (Self::Action, &Method::POST) => None,
            (Self::Read, _) => Some("GET, HEAD"),
            (Self::Action, _) => Some("POST"),
        }
    }
}

/// Reads the body of a request to its end, because a connection with unread bytes cannot serve another request. Returns the
/// body of an action, and no bytes of other bodies.
async fn read_body(body: Incoming, methods: Methods) -> Result<Bytes, (StatusCode, String)> {
    let too_long = || {
        let text = "Request Entity Too Large\n";
        (StatusCode::PAYLOAD_TOO_LARGE, text.to_owned())
    };
    if body.size_hint().lower() > MAX_BODY_BYTES as u64 {
        return Err(too_long());
    }
    let mut body = Limited::new(body, MAX_BODY_BYTES);
    let read = async {
        if let Methods::Action = methods {
            return body.collect().await.map(Collected::to_bytes);
        }
        while let Some(frame) = body.frame().await {
            frame?;
        }
        Ok(Bytes::new())
    };
    match timeout(BODY_TIMEOUT, read).await {
        Ok(Ok(body)) => Ok(body),
        Ok(Err(error)) if error.is::<LengthLimitError>() => Err(too_long()),
        Ok(Err(error)) => Err((StatusCode::BAD_REQUEST, format!("{error}\n"))),
        Err(_) => Err((StatusCode::REQUEST_TIMEOUT, "Request Timeout\n".to_owned())),
    }
}

impl fmt::Debug for Routes {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_set().entries(self.handlers.keys()).finish()
    }
}

/// Serves `routes` on a listener until `shutdown`, then allows 5 s for requests in flight. Returns when all
/// connections are closed.
pub async fn serve(socket: impl Into<AdminSocket>, routes: Routes, shutdown: CancellationToken) {
    let socket = socket.into();
    let routes = Arc::new(routes);
    let admission = Admission::new(CONNECTIONS);
    let connections = TaskTracker::new();
    let accept = async {
        loop {
            match socket.accept().await {
                Ok((from, entering)) => {
                    let (routes, shutdown) = (Arc::clone(&routes), shutdown.clone());
                    let admission = Arc::clone(&admission);
                    connections.spawn(async move {
                        let slot = shutdown
                            .run_until_cancelled(admission.enter(from, Instant::now()))
                            .await;
                        let Some(Ok(slot)) = slot else { return };
                        let serve = async {
                            let entered = shutdown.run_until_cancelled(entering).await;
                            if let Some(Some(stream)) = entered {
                                serve_http(stream, routes, shutdown.clone()).await;
                            }
                        };
                        let _ = slot.run(serve).await;
                    });
                }
                Err(error) => {
                    tracing::warn!(%error, "admin listener could not accept");
                    tokio::time::sleep(ACCEPT_PAUSE).await;
                }
            }
        }
    };
    shutdown.run_until_cancelled(accept).await;
    drop(socket);
    connections.close();
    connections.wait().await;
}

/// Serves one connection until the connection ends.
async fn serve_http(stream: Box<dyn Stream>, routes: Arc<Routes>, shutdown: CancellationToken) {
    let service = service_fn(move |request| {
        let routes = Arc::clone(&routes);
        async move { Ok::<_, Infallible>(routes.answer(request).await.0) }
    });
    let connection = http1::Builder::new()
        .header_read_timeout(None)
        .max_buf_size(MAX_HEAD_BYTES)
        .serve_connection(TokioIo::new(Progress::new(stream, HEADER_TIMEOUT)), service);
    let mut connection = pin!(connection);
    let ended = tokio::select! {
        outcome = connection.as_mut() => Some(outcome),
        () = shutdown.cancelled() => None,
        () = tokio::time::sleep(MAX_AGE) => None,
    };
    let outcome = match ended {
        Some(outcome) => outcome,
        None => {
            connection.as_mut().graceful_shutdown();
            // Drop a peer that does not read its response in time.
            let ended = tokio::time::timeout(GRACE, connection).await;
            ended.unwrap_or(Ok(()))
        }
    };
    if let Err(error) = outcome {
        tracing::debug!(%error, "admin connection ended early");
    }
}

#[cfg(test)]
mod tests;
