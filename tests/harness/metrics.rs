//! Scraping, and plain HTTP to the programs' own listeners.

use std::net::SocketAddr;

use anyhow::ensure;
use bytes::Bytes;
pub use culvert_kit::metrics::{Metrics, Sample};
use http::header::HOST;
use http::{HeaderMap, Method, Request, StatusCode};
use http_body_util::{BodyExt as _, Empty, Limited};
use hyper_util::rt::TokioIo;
use tokio::net::TcpStream;

/// Longest accepted body, in bytes.
const MAX_BODY: usize = 64 << 20;

/// Sends `GET path` on a new connection.
///
/// # Errors
/// If the answer is missing or broken. An answer with any status is a success.
pub async fn http_get(
    addr: SocketAddr,
    path: &str,
) -> anyhow::Result<(StatusCode, HeaderMap, Bytes)> {
    request(Method::GET, addr, path).await
}

/// Sends a POST without a body, like [`http_get`].
///
/// # Errors
/// As [`http_get`].
pub async fn http_post(
    addr: SocketAddr,
    path: &str,
) -> anyhow::Result<(StatusCode, HeaderMap, Bytes)> {
    request(Method::POST, addr, path).await
}

async fn request(
    method: Method,
    addr: SocketAddr,
    path: &str,
) -> anyhow::Result<(StatusCode, HeaderMap, Bytes)> {
    let stream = TcpStream::connect(addr).await?;
    let (mut sender, connection) =
        hyper::client::conn::http1::handshake(TokioIo::new(stream)).await?;
    let exchange = async move {
        let request = Request::builder().method(method).uri(path);
        let request = request.header(HOST, addr.to_string());
        let response = sender
            .send_request(request.body(Empty::<Bytes>::new())?)
            .await?;
        let (head, body) = response.into_parts();
        let body = Limited::new(body, MAX_BODY).collect().await;
        let body = body.map_err(|error| anyhow::anyhow!(error))?.to_bytes();
        anyhow::Ok((head.status, head.headers, body))
    };
    // The connection task moves the bytes. The exchange reports any error of the connection.
    let (answer, _closed) = tokio::join!(exchange, connection);
    answer
}

/// Sends `GET /metrics`.
///
/// # Errors
/// If the request fails, the status is not 200, or the answer is not Prometheus text.
pub async fn scrape(addr: SocketAddr) -> anyhow::Result<Metrics> {
    let (status, _, body) = http_get(addr, "/metrics").await?;
    ensure!(status == StatusCode::OK, "status {status}");
    Ok(Metrics::parse(std::str::from_utf8(&body)?)?)
}

#[cfg(test)]
mod tests {
    use culvert_kit::services::{HELLO, Services};

    use super::*;

    #[tokio::test]
    async fn http_get_accepts_any_status() {
        let services = Services::start().await.unwrap();
        let (status, headers, body) = http_get(services.http, "/").await.unwrap();
        assert_eq!(status, StatusCode::OK);
        assert_eq!(headers["content-length"], HELLO.len().to_string().as_str());
        assert_eq!(body, HELLO);
        let (status, _, _) = http_get(services.http, "/none").await.unwrap();
        assert_eq!(status, StatusCode::NOT_FOUND);
        assert!(scrape(services.http).await.is_err());
    }
}
