//! Connections, and the path of a request: recorded, subjected to faults, performed, answered.

use std::convert::Infallible;
use std::sync::Arc;

use bytes::Bytes;
use http::header::{AUTHORIZATION, CONTENT_TYPE, HeaderName, RETRY_AFTER};
use http::request::Parts;
use http::{HeaderValue, Request, Response, StatusCode};
use http_body_util::combinators::UnsyncBoxBody;
use http_body_util::{BodyExt as _, Full, Limited};
use hyper::body::Incoming;
use hyper::server::conn::http1;
use hyper::service::service_fn;
use hyper_util::rt::TokioIo;
use parking_lot::Mutex;
use serde_json::Value;
use tokio::io::{AsyncRead, AsyncWrite};
use tokio::net::{TcpListener, TcpStream};
use tokio_rustls::TlsAcceptor;
use tokio_util::sync::CancellationToken;

use super::address::Query;
use super::fault::{self, Mishap};
use super::status::Failure;
use super::verbs::{self, Call, Reply};
use super::{Recorded, State, remember};

/// Longest body of a request, in bytes. Equal to the limit of the API server.
const MAX_BODY: usize = 3 << 20;

type Answer = Response<UnsyncBoxBody<Bytes, Infallible>>;

/// Accepts connections forever.
pub(super) async fn accept(listener: TcpListener, state: Arc<Mutex<State>>) {
    loop {
        let accepted = listener.accept().await;
        let (stream, _) = accepted.expect("accepting in a Kubernetes API");
        let admitted = state.lock().admit();
        if let Some(cut) = admitted {
            let connection = enter(stream, Arc::clone(&state));
            tokio::spawn(cut.run_until_cancelled_owned(connection));
        }
    }
}

/// Serves a connection until its end, over TLS if the API uses TLS.
async fn enter(stream: TcpStream, state: Arc<Mutex<State>>) {
    stream.set_nodelay(true).ok();
    let tls = state.lock().tls.clone();
    match tls {
        Some(config) => {
            // The client handles a failed handshake.
            if let Ok(stream) = TlsAcceptor::from(config).accept(stream).await {
                converse(stream, state).await;
            }
        }
        None => converse(stream, state).await,
    }
}

async fn converse<S>(stream: S, state: Arc<Mutex<State>>)
where
    S: AsyncRead + AsyncWrite + Unpin + 'static,
{
    let service = service_fn(move |request| {
        let state = Arc::clone(&state);
        async move { Ok::<_, Infallible>(respond(&state, request).await) }
    });
    let connection = http1::Builder::new().serve_connection(TokioIo::new(stream), service);
    // The client handles errors of its connection.
    connection.await.ok();
}

async fn respond(state: &Mutex<State>, request: Request<Incoming>) -> Answer {
    match answer(state, request).await {
        Ok(Reply::Object(status, object)) => of_object(status, &object),
        Ok(Reply::Watch(body)) => of_json(StatusCode::OK, body.boxed_unsync()),
        Err(failure) => {
            let (status, retry_after) = failure.head();
            let mut answer = of_object(status, &failure.object());
            if let Some(seconds) = retry_after {
                answer.headers_mut().insert(RETRY_AFTER, seconds.into());
            }
            answer
        }
    }
}

async fn answer(state: &Mutex<State>, request: Request<Incoming>) -> Result<Reply, Failure> {
    let (head, body) = request.into_parts();
    let query = Query::parse(head.uri.query().unwrap_or_default());
    let mishap = state.lock().receive(&head, &query);
    if !mishap.delay.is_zero() {
        tokio::time::sleep(mishap.delay).await;
    }
    if let Some(failure) = mishap.failure {
        return Err(failure);
    }
    let body = Limited::new(body, MAX_BODY).collect().await;
    let body = body.map_err(|error| {
        let message = format!("the body cannot be read: {error}");
        Failure::new(StatusCode::PAYLOAD_TOO_LARGE, message)
    })?;
    let content_type = header(&head, CONTENT_TYPE).unwrap_or_default();
    let media_type = content_type.split(';').next().unwrap_or_default().trim();
    let call = Call {
        method: head.method.to_string(),
        path: head.uri.path().to_owned(),
        query,
        sent: head.uri.to_string(),
        media_type: media_type.to_owned(),
        body: body.to_bytes(),
        silent: mishap.silent,
    };
    verbs::perform(&mut state.lock(), &call)
}

fn of_object(status: StatusCode, object: &Value) -> Answer {
    of_json(
        status,
        Full::<Bytes>::from(object.to_string()).boxed_unsync(),
    )
}

fn of_json(status: StatusCode, body: UnsyncBoxBody<Bytes, Infallible>) -> Answer {
    let mut answer = Response::new(body);
    *answer.status_mut() = status;
    let json = HeaderValue::from_static("application/json");
    answer.headers_mut().insert(CONTENT_TYPE, json);
    answer
}

fn header(head: &Parts, name: HeaderName) -> Option<String> {
    let value = head.headers.get(name)?;
    Some(String::from_utf8_lossy(value.as_bytes()).into_owned())
}

// === impl State ===

impl State {
    /// Returns the token that ends a new connection; `None` if the connection is refused.
    fn admit(&mut self) -> Option<CancellationToken> {
        (!fault::refuses(&mut self.faults)).then(|| self.cut.clone())
    }

    /// Records a request and returns the effect of the faults.
    fn receive(&mut self, head: &Parts, query: &Query) -> Mishap {
        let recorded = Recorded {
            method: head.method.to_string(),
            path: head.uri.to_string(),
            authorization: header(head, AUTHORIZATION),
        };
        let watch = recorded.method == "GET" && query.is_true("watch");
        let mishap = fault::strike(&mut self.faults, &recorded.method, &recorded.path, watch);
        remember(&mut self.requests, recorded);
        mishap
    }
}
