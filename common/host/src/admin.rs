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
mod socket;

use std::collections::HashMap;
use std::convert::Infallible;
use std::fmt;
use std::pin::{Pin, pin};
use std::sync::Arc;
use std::time::Duration;

use bytes::Bytes;
use http::header::{ALLOW, CONTENT_TYPE, HOST, HeaderValue};
use http::{HeaderName, Method, Request, Response, StatusCode};
use http_body_util::{BodyExt as _, Full, LengthLimitError, Limited};
use hyper::body::{Body as _, Incoming};
use hyper::server::conn::http1;
use hyper::service::service_fn;
use hyper_util::rt::{TokioIo, TokioTimer};
use tokio::io::{AsyncRead, AsyncWrite};
use tokio::sync::Semaphore;
use tokio::time::timeout;
use tokio_util::sync::CancellationToken;
use tokio_util::task::TaskTracker;

pub use listener::{BindError, bind};
pub use pages::{Check, METRICS_TYPE};
pub use socket::{AdminSocket, TlsSocket, UnixSocket};

/// Maximum number of open connections. Further connections wait in the kernel's queue.
const MAX_CONNECTIONS: usize = 256;

/// Time limit for a request head (upstream's `ReadHeaderTimeout`).
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
type Handler = Box<dyn Fn(Ask) -> BoxFuture<Reply> + Send + Sync>;

/// Parts of a request that a handler can read.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct Ask {
    /// Query string without the question mark; empty if missing.
    pub query: String,
    /// `Host` header; empty if missing.
    pub host: String,
    /// Request body of an action; empty for other paths.
    pub body: Bytes,
}

/// Response of a handler.
#[derive(Clone, Debug)]
pub struct Reply {
    status: StatusCode,
    headers: Vec<(HeaderName, HeaderValue)>,
    body: Bytes,
}

/// Paths and their handlers.
#[derive(Default)]
pub struct Routes {
    handlers: HashMap<&'static str, (Verb, Handler)>,
}

/// HTTP methods that a path accepts.
#[derive(Clone, Copy, PartialEq, Eq)]
enum Verb {
    /// GET and HEAD.
    Show,
    /// POST.
    Act,
}

// === impl Ask ===

impl Ask {
    /// Returns true if the query has the parameter `name`, with or without a value.
    pub fn has(&self, name: &str) -> bool {
        self.query
            .split('&')
            .any(|pair| pair.split('=').next() == Some(name))
    }
}

// === impl Reply ===

impl Reply {
    /// Creates a reply with any status, content type and body.
    pub fn new(status: StatusCode, content_type: &'static str, body: impl Into<Bytes>) -> Self {
        Self {
            status,
            headers: vec![(CONTENT_TYPE, HeaderValue::from_static(content_type))],
            body: body.into(),
        }
    }

    /// Creates a reply in plain text.
    pub fn text(status: StatusCode, body: impl Into<Bytes>) -> Self {
        Self::new(status, "text/plain; charset=utf-8", body)
    }

    /// Adds a header.
    #[must_use]
    pub fn with(mut self, name: HeaderName, value: HeaderValue) -> Self {
        self.headers.push((name, value));
        self
    }

    fn into_response(self) -> Response<Full<Bytes>> {
        let mut response = Response::new(Full::new(self.body));
        *response.status_mut() = self.status;
        response.headers_mut().extend(self.headers);
        response
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
        F: Fn(Ask) -> R + Send + Sync + 'static,
        R: Future<Output = Reply> + Send + 'static,
    {
        self.add(Verb::Show, path, handler)
    }

    /// Adds a path that changes state. POST requests reach the handler, with a body of at most 64 KiB; other
    /// methods get 405.
    #[must_use]
    pub fn action<F, R>(self, path: &'static str, handler: F) -> Self
    where
        F: Fn(Ask) -> R + Send + Sync + 'static,
        R: Future<Output = Reply> + Send + 'static,
    {
        self.add(Verb::Act, path, handler)
    }

    fn add<F, R>(mut self, verb: Verb, path: &'static str, handler: F) -> Self
    where
        F: Fn(Ask) -> R + Send + Sync + 'static,
        R: Future<Output = Reply> + Send + 'static,
    {
        let handler = move |ask| Box::pin(handler(ask)) as BoxFuture<Reply>;
        self.handlers.insert(path, (verb, Box::new(handler)));
        self
    }

    async fn answer(&self, request: Request<Incoming>) -> Reply {
        let Some((verb, handler)) = self.handlers.get(request.uri().path()) else {
            // Go's `net/http` sends this body with a 404.
            return Reply::text(StatusCode::NOT_FOUND, "404 page not found\n");
        };
        let allowed = match verb {
            Verb::Show => matches!(*request.method(), Method::GET | Method::HEAD),
            Verb::Act => *request.method() == Method::POST,
        };
        if !allowed {
            let allow = match verb {
                Verb::Show => "GET, HEAD",
                Verb::Act => "POST",
            };
            return Reply::text(StatusCode::METHOD_NOT_ALLOWED, "Method Not Allowed\n")
                .with(ALLOW, HeaderValue::from_static(allow));
        }
        let host = request.headers().get(HOST);
        let mut ask = Ask {
            query: request.uri().query().unwrap_or_default().to_owned(),
            host: host
                .and_then(|host| host.to_str().ok())
                .unwrap_or_default()
                .to_owned(),
            body: Bytes::new(),
        };
        if *verb == Verb::Act {
            ask.body = match read_body(request.into_body()).await {
                Ok(body) => body,
                Err(reply) => return reply,
            };
        }
        handler(ask).await
    }
}

async fn read_body(body: Incoming) -> Result<Bytes, Reply> {
    let too_long = || Reply::text(StatusCode::PAYLOAD_TOO_LARGE, "Request Entity Too Large\n");
    if body.size_hint().lower() > MAX_BODY_BYTES as u64 {
        return Err(too_long());
    }
    let body = Limited::new(body, MAX_BODY_BYTES).collect();
    match timeout(BODY_TIMEOUT, body).await {
        Ok(Ok(body)) => Ok(body.to_bytes()),
        Ok(Err(error)) if error.is::<LengthLimitError>() => Err(too_long()),
        Ok(Err(error)) => Err(Reply::text(StatusCode::BAD_REQUEST, format!("{error}\n"))),
        Err(_) => {
            let text = "Request Timeout\n";
            Err(Reply::text(StatusCode::REQUEST_TIMEOUT, text))
        }
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
    let permits = Arc::new(Semaphore::new(MAX_CONNECTIONS));
    let connections = TaskTracker::new();
    let accept = async {
        // The semaphore is never closed, so only cancellation ends this loop.
        while let Ok(permit) = Arc::clone(&permits).acquire_owned().await {
            match socket.accept().await {
                Ok(guest) => {
                    let (routes, shutdown) = (Arc::clone(&routes), shutdown.clone());
                    connections.spawn(async move {
                        let entered = shutdown.run_until_cancelled(guest.enter()).await;
                        if let Some(Some(stream)) = entered {
                            serve_http(stream, routes, shutdown).await;
                        }
                        drop(permit);
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
async fn serve_http<S>(stream: S, routes: Arc<Routes>, shutdown: CancellationToken)
where
    S: AsyncRead + AsyncWrite + Unpin + Send + 'static,
{
    let service = service_fn(move |request| {
        let routes = Arc::clone(&routes);
        async move { Ok::<_, Infallible>(routes.answer(request).await.into_response()) }
    });
    let connection = http1::Builder::new()
        .timer(TokioTimer::new())
        .header_read_timeout(HEADER_TIMEOUT)
        .max_buf_size(MAX_HEAD_BYTES)
        .serve_connection(TokioIo::new(stream), service);
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
