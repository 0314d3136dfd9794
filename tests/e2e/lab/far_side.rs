//! A server beside the node's kubelet: an admission webhook, an aggregated API, and byte streams with digests.

use std::convert::Infallible;
use std::net::{IpAddr, SocketAddrV4};
use std::sync::Arc;

use bytes::Bytes;
use culvert_kit::pattern::{self, Digest};
use culvert_kit::pki::{Pair, load_certs, load_key};
use culvert_tests::openvpn::Namespace;
use http_body_util::combinators::UnsyncBoxBody;
use http_body_util::{BodyExt as _, Full, StreamBody};
use hyper::body::{Frame, Incoming};
use hyper::header::CONTENT_TYPE;
use hyper::service::service_fn;
use hyper::{Method, Request, Response, StatusCode};
use hyper_util::rt::TokioIo;
use parking_lot::Mutex;
use rustls::ServerConfig;
use serde_json::{Value, json};
use tokio::net::TcpListener;
use tokio_rustls::TlsAcceptor;

/// Text of the webhook's refusal.
pub(crate) const REFUSAL: &str = "refused by the far side";

/// Group and version of the aggregated API.
pub(crate) const GROUP_VERSION: &str = "greetings.culvert.test/v1";

type Answer = Response<UnsyncBoxBody<Bytes, Infallible>>;

/// Source addresses of the connections so far.
#[derive(Debug, Clone, Default)]
pub(crate) struct Sources(Arc<Mutex<Vec<IpAddr>>>);

impl Sources {
    /// Removes and returns the addresses.
    pub(crate) fn take(&self) -> Vec<IpAddr> {
        std::mem::take(&mut self.0.lock())
    }
}

/// Starts the server in a namespace, on a task of the runtime.
pub(crate) fn serve(at: &Namespace, address: SocketAddrV4, pair: &Pair) -> Sources {
    let provider = Arc::new(rustls::crypto::aws_lc_rs::default_provider());
    let tls = ServerConfig::builder_with_provider(provider)
        .with_safe_default_protocol_versions()
        .unwrap()
        .with_no_client_auth()
        .with_single_cert(
            load_certs(&pair.cert).unwrap(),
            load_key(&pair.key).unwrap(),
        )
        .unwrap();
    let sources = Sources::default();
    let listener = at.listen(address);
    tokio::spawn(accept(listener, Arc::new(tls).into(), sources.clone()));
    sources
}

async fn accept(listener: TcpListener, tls: TlsAcceptor, sources: Sources) {
    while let Ok((stream, from)) = listener.accept().await {
        sources.0.lock().push(from.ip());
        let tls = tls.clone();
        tokio::spawn(async move {
            // Probes of a port end without a handshake.
            let Ok(stream) = tls.accept(stream).await else {
                return;
            };
            let service = service_fn(async |request| Ok::<_, Infallible>(answer(request).await));
            hyper::server::conn::http1::Builder::new()
                .serve_connection(TokioIo::new(stream), service)
                .await
                .ok();
        });
    }
}

async fn answer(request: Request<Incoming>) -> Answer {
    let path = request.uri().path().to_owned();
    let api = format!("/apis/{GROUP_VERSION}");
    match (request.method(), path.as_str()) {
        (&Method::POST, "/validate") => {
            let body = request.into_body().collect().await;
            let review = body.map(|body| serde_json::from_slice(&body.to_bytes()));
            match review {
                Ok(Ok(review)) => json_answer(&verdict(&review)),
                _ => status(StatusCode::BAD_REQUEST),
            }
        }
        (&Method::POST, "/digest") => digest(request.into_body()).await,
        (&Method::GET, path) if path == api => json_answer(&json!({
            "kind": "APIResourceList", "apiVersion": "v1", "groupVersion": GROUP_VERSION,
            "resources": [{"name": "greetings", "singularName": "greeting", "namespaced": false,
                "kind": "Greeting", "verbs": ["get", "list"]}],
        })),
        (&Method::GET, path) if path == format!("{api}/greetings") => json_answer(&json!({
            "kind": "GreetingList", "apiVersion": GROUP_VERSION, "metadata": {},
            "items": [{"kind": "Greeting", "apiVersion": GROUP_VERSION, "metadata": {"name": "hello"}}],
        })),
        (&Method::GET, path) => match path.strip_prefix("/bytes/").map(str::parse) {
            Some(Ok(count)) => pattern_answer(count),
            _ => status(StatusCode::NOT_FOUND),
        },
        _ => status(StatusCode::NOT_FOUND),
    }
}

fn verdict(review: &Value) -> Value {
    let request = &review["request"];
    let is_allowed = request["object"]["data"]["verdict"] != "deny";
    json!({
        "kind": "AdmissionReview", "apiVersion": "admission.k8s.io/v1",
        "response": {"uid": request["uid"], "allowed": is_allowed, "status": {"message": REFUSAL}},
    })
}

async fn digest(mut body: Incoming) -> Answer {
    let (mut digest, mut count) = (Digest::default(), 0);
    while let Some(frame) = body.frame().await {
        match frame.map(Frame::into_data) {
            Ok(Ok(data)) => {
                count += data.len();
                digest.update(&data);
            }
            Ok(Err(_)) => {}
            Err(_) => return status(StatusCode::BAD_REQUEST),
        }
    }
    json_answer(&json!({"count": count, "digest": digest.finish()}))
}

fn pattern_answer(count: u64) -> Answer {
    let frames = pattern::pieces(count).map(|piece| Ok(Frame::data(piece)));
    let body = StreamBody::new(futures_util::stream::iter(frames));
    Response::new(body.boxed_unsync())
}

fn json_answer(value: &Value) -> Answer {
    let body = Full::new(Bytes::from(value.to_string())).boxed_unsync();
    let answer = Response::builder().header(CONTENT_TYPE, "application/json");
    answer.body(body).unwrap()
}

fn status(code: StatusCode) -> Answer {
    let answer = Response::builder().status(code);
    answer.body(Full::default().boxed_unsync()).unwrap()
}
