//! An HTTP CONNECT client. The request has the same bytes as the request of kube-apiserver's egress selector.

use tokio::io::{AsyncRead, AsyncReadExt as _, AsyncWrite, AsyncWriteExt as _};

use super::{ClientError, MAX_REFUSAL_BYTES, io_error};

/// Largest accepted answer head, in bytes: the limit of Go's HTTP client.
const MAX_HEAD_BYTES: usize = 1 << 20;

/// Requests a connection to `target` over `io`. After an answer with status 200, `io` is the tunnelled
/// stream.
pub(super) async fn open<S>(mut io: S, target: &str) -> Result<S, ClientError>
where
    S: AsyncRead + AsyncWrite + Unpin,
{
    let request = format!("CONNECT {target} HTTP/1.1\r\nHost: 127.0.0.1\r\n\r\n");
    let broke = io_error("request the connection");
    io.write_all(request.as_bytes()).await.map_err(&broke)?;
    io.flush().await.map_err(&broke)?;
    let head = read_head(&mut io).await?;
    let status = status_of(&head)?;
    if status == 200 {
        return Ok(io);
    }
    let mut body = Vec::new();
    // The body runs to the end of the connection. An incomplete body is still useful.
    let _cut = (&mut io)
        .take(MAX_REFUSAL_BYTES)
        .read_to_end(&mut body)
        .await;
    Err(ClientError::Refused {
        status,
        body: String::from_utf8_lossy(&body).into_owned(),
    })
}

/// Reads exactly up to the end of the empty line; the next bytes belong to the tunnelled stream.
async fn read_head(io: &mut (impl AsyncRead + Unpin)) -> Result<Vec<u8>, ClientError> {
    let mut head = Vec::with_capacity(128);
    while !head.ends_with(b"\r\n\r\n") {
        if head.len() >= MAX_HEAD_BYTES {
            return Err(ClientError::Protocol("answer head too long".to_owned()));
        }
        let byte = io.read_u8().await;
        head.push(byte.map_err(io_error("read the answer"))?);
    }
    Ok(head)
}

/// Parses the status of an HTTP/1.x status line.
fn status_of(head: &[u8]) -> Result<u16, ClientError> {
    let head = String::from_utf8_lossy(head);
    let line = head.lines().next().unwrap_or_default();
    let mut words = line.splitn(3, ' ');
    let version = words.next().unwrap_or_default();
    let status = words.next().and_then(|word| word.parse().ok());
    match status {
        Some(status) if version.starts_with("HTTP/1.") => Ok(status),
        _ => Err(ClientError::Protocol(format!(
            "unexpected status line {line:?}"
        ))),
    }
}
