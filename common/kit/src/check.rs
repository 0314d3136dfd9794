//! Checks of a tunnelled stream: traffic with every byte verified.
//!
//! Each check needs a new stream to the matching [service](super::services), makes one exchange, and consumes
//! the stream. The checks have no time limits: the caller sets the limit.

use std::io;
use std::time::Duration;

use bytes::Bytes;
use http::header::HOST;
use http::{Request, StatusCode};
use http_body_util::{BodyExt as _, Empty};
use hyper_util::rt::TokioIo;
use tokio::io::{AsyncRead, AsyncReadExt as _, AsyncWrite, AsyncWriteExt as _};
use tokio::time::Instant;

use super::pattern::{self, Digest, MAX_PIECE, Verifier};
use super::services::{Answer, HELLO, answer};

/// Result of a successful check.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Outcome {
    /// Payload bytes moved and verified; only one direction counts.
    pub bytes: u64,
    /// Time from the first byte sent to the last byte received.
    pub elapsed: Duration,
}

/// Reason for a failed check.
#[derive(Debug, thiserror::Error)]
pub enum CheckError {
    /// The stream broke.
    #[error("the stream broke after {verified} verified bytes: {error}")]
    Broken {
        /// Number of bytes verified before the failure.
        verified: u64,
        /// Error of the stream.
        error: io::Error,
    },
    /// The stream ended too early.
    #[error("the stream ended after {verified} of {expected} bytes")]
    Short {
        /// Number of bytes verified before the end.
        verified: u64,
        /// Expected number of bytes.
        expected: u64,
    },
    /// A received byte differs from the sent byte, or follows the expected end.
    #[error("byte {offset} is wrong, or follows the expected end")]
    Wrong {
        /// Offset of the first wrong byte in the payload.
        offset: u64,
    },
    /// The far end received bytes other than the sent bytes.
    #[error("the far end has digest {theirs:?}, not {ours}")]
    Digest {
        /// Digest of the sent bytes.
        ours: String,
        /// Digest in the far end's answer.
        theirs: String,
    },
    /// The HTTP exchange failed.
    #[error("HTTP: {0}")]
    Http(#[from] hyper::Error),
    /// The answer's status is not 200.
    #[error("HTTP status {0}")]
    Status(StatusCode),
    /// The lab's HTTP service does not have the path, so the expected body is unknown.
    #[error("no such path in the lab: {0:?}")]
    Path(String),
}

fn broken(verified: u64) -> impl Fn(io::Error) -> CheckError {
    move |error| CheckError::Broken { verified, error }
}

/// Sends `GET path` to the HTTP service. Requires status 200 and exactly the body of the path.
///
/// # Errors
/// See [`CheckError`].
pub async fn http_get<S>(stream: S, path: &str) -> Result<Outcome, CheckError>
where
    S: AsyncRead + AsyncWrite + Unpin + Send + 'static,
{
    let unknown = || CheckError::Path(path.to_owned());
    let expected = answer(path).ok_or_else(unknown)?;
    let request = Request::get(path)
        .header(HOST, "lab")
        .body(Empty::<Bytes>::new())
        .map_err(|_| unknown())?;
    let started = Instant::now();
    let (mut sender, connection) =
        hyper::client::conn::http1::handshake(TokioIo::new(stream)).await?;
    let exchange = async move {
        let mut response = sender.send_request(request).await?;
        if response.status() != StatusCode::OK {
            return Err(CheckError::Status(response.status()));
        }
        let mut body = BodyVerifier::new(expected);
        while let Some(frame) = response.body_mut().frame().await {
            if let Ok(data) = frame?.into_data() {
                body.feed(&data)?;
            }
        }
        body.finish()
    };
    // hyper does the I/O of the exchange in the future `connection`, so both are polled. `connection` ends
    // once the exchange drops `sender`.
    let (bytes, _closed) = tokio::join!(exchange, connection);
    Ok(Outcome {
        bytes: bytes?,
        elapsed: started.elapsed(),
    })
}

/// Compares a response body with the body that the lab's HTTP service sends.
enum BodyVerifier {
    Hello { seen: usize },
    Pattern { verifier: Verifier, expected: u64 },
}

impl BodyVerifier {
    fn new(expected: Answer) -> Self {
        match expected {
            Answer::Hello => Self::Hello { seen: 0 },
            Answer::Pattern(expected) => Self::Pattern {
                verifier: Verifier::default(),
                expected,
            },
        }
    }

    fn feed(&mut self, data: &[u8]) -> Result<(), CheckError> {
        match self {
            Self::Hello { seen } => {
                let rest = HELLO.as_bytes().get(*seen..).unwrap_or_default();
                let offset = *seen as u64;
                *seen += data.len();
                rest.starts_with(data)
                    .then_some(())
                    .ok_or(CheckError::Wrong { offset })
            }
            // A body cannot be too long: the parser stops at Content-Length, and `finish` compares the
            // length.
            Self::Pattern { verifier, .. } => verifier
                .feed(data)
                .map_err(|offset| CheckError::Wrong { offset }),
        }
    }

    fn finish(self) -> Result<u64, CheckError> {
        let (verified, expected) = match self {
            Self::Hello { seen } => (seen as u64, HELLO.len() as u64),
            Self::Pattern { verifier, expected } => (verifier.verified(), expected),
        };
        if verified == expected {
            Ok(verified)
        } else {
            Err(CheckError::Short { verified, expected })
        }
    }
}

/// Downloads `count` bytes from the raw service. Requires the right bytes and then the end of the stream.
///
/// # Errors
/// See [`CheckError`].
pub async fn download<S>(mut stream: S, count: u64) -> Result<Outcome, CheckError>
where
    S: AsyncRead + AsyncWrite + Unpin,
{
    let started = Instant::now();
    command(&mut stream, &format!("download {count}\n")).await?;
    let mut verifier = Verifier::default();
    receive(&mut stream, &mut verifier, count).await?;
    expect_end(&mut stream, count).await?;
    Ok(Outcome {
        bytes: count,
        elapsed: started.elapsed(),
    })
}

/// Sends `count` bytes to the raw service. Requires the digest of the sent bytes as the answer.
///
/// # Errors
/// See [`CheckError`].
pub async fn upload<S>(mut stream: S, count: u64) -> Result<Outcome, CheckError>
where
    S: AsyncRead + AsyncWrite + Unpin,
{
    let started = Instant::now();
    command(&mut stream, &format!("upload {count}\n")).await?;
    let mut digest = Digest::default();
    for piece in pattern::pieces(count) {
        digest.update(&piece);
        stream.write_all(&piece).await.map_err(broken(0))?;
    }
    stream.flush().await.map_err(broken(0))?;
    let ours = digest.finish();
    let mut answer = Vec::new();
    // The digest, the newline, and one more byte to detect a longer answer.
    let limit = ours.len() as u64 + 2;
    let mut reader = (&mut stream).take(limit);
    reader
        .read_to_end(&mut answer)
        .await
        .map_err(broken(count))?;
    let theirs = String::from_utf8_lossy(&answer).into_owned();
    if theirs.strip_suffix('\n') != Some(ours.as_str()) {
        return Err(CheckError::Digest { ours, theirs });
    }
    Ok(Outcome {
        bytes: count,
        elapsed: started.elapsed(),
    })
}

/// Sends `rounds` pieces of `size` bytes to the raw service's echo, and waits for each echo before the next
/// piece. Sending and receiving overlap, so a piece may be larger than all buffers on the way. `elapsed`
/// divided by `rounds` is the mean round trip.
///
/// # Errors
/// See [`CheckError`].
pub async fn echo<S>(mut stream: S, rounds: u64, size: u64) -> Result<Outcome, CheckError>
where
    S: AsyncRead + AsyncWrite + Unpin,
{
    let started = Instant::now();
    command(&mut stream, "echo\n").await?;
    let (mut reader, mut writer) = tokio::io::split(&mut stream);
    let mut verifier = Verifier::default();
    for round in 0..rounds {
        let sending = async {
            let mut offset = round * size;
            let end = offset + size;
            while offset < end {
                let piece = pattern::piece(offset, end - offset);
                writer.write_all(&piece).await.map_err(broken(offset))?;
                offset += piece.len() as u64;
            }
            writer.flush().await.map_err(broken(offset))
        };
        let receiving = receive(&mut reader, &mut verifier, (round + 1) * size);
        tokio::try_join!(sending, receiving)?;
    }
    let elapsed = started.elapsed();
    drop((reader, writer));
    let bytes = rounds * size;
    stream.shutdown().await.map_err(broken(bytes))?;
    expect_end(&mut stream, bytes).await?;
    Ok(Outcome { bytes, elapsed })
}

async fn command(stream: &mut (impl AsyncWrite + Unpin), line: &str) -> Result<(), CheckError> {
    stream.write_all(line.as_bytes()).await.map_err(broken(0))?;
    stream.flush().await.map_err(broken(0))
}

/// Reads until the verifier has received `expected` bytes in total, and never more.
async fn receive(
    stream: &mut (impl AsyncRead + Unpin),
    verifier: &mut Verifier,
    expected: u64,
) -> Result<(), CheckError> {
    let missing = expected.saturating_sub(verifier.verified());
    let mut buffer = vec![0; usize::try_from(missing).map_or(MAX_PIECE, |n| n.min(MAX_PIECE))];
    let mut body = stream.take(missing);
    while body.limit() > 0 {
        let verified = verifier.verified();
        let n = body.read(&mut buffer).await.map_err(broken(verified))?;
        if n == 0 {
            return Err(CheckError::Short { verified, expected });
        }
        verifier
            .feed(buffer.get(..n).unwrap_or_default())
            .map_err(|offset| CheckError::Wrong { offset })?;
    }
    Ok(())
}

/// Requires the end of the stream. A TLS stream may end without close_notify, as a stock server's streams
/// sometimes do: all expected bytes have already arrived, so nothing was truncated.
async fn expect_end(
    stream: &mut (impl AsyncRead + Unpin),
    verified: u64,
) -> Result<(), CheckError> {
    match stream.read(&mut [0; 1]).await {
        Ok(0) => Ok(()),
        Ok(_) => Err(CheckError::Wrong { offset: verified }),
        Err(error) if error.kind() == io::ErrorKind::UnexpectedEof => Ok(()),
        Err(error) => Err(broken(verified)(error)),
    }
}

#[cfg(test)]
mod tests {
    #![allow(clippy::unwrap_used, clippy::expect_used, clippy::indexing_slicing)]
    use tokio::net::TcpStream;

    use super::*;
    use crate::services::Services;

    #[tokio::test]
    async fn correct_streams_pass() {
        let services = Services::start().await.unwrap();
        let raw = || async { TcpStream::connect(services.raw).await.unwrap() };
        let outcome = download(raw().await, 3_000_000).await.unwrap();
        assert_eq!(outcome.bytes, 3_000_000);
        let outcome = upload(raw().await, 3_000_000).await.unwrap();
        assert_eq!(outcome.bytes, 3_000_000);
        let outcome = echo(raw().await, 3, 8_000_000).await.unwrap();
        assert_eq!(outcome.bytes, 24_000_000);
        let outcome = echo(raw().await, 100, 1).await.unwrap();
        assert_eq!(outcome.bytes, 100);
        upload(raw().await, 0).await.unwrap();
        download(raw().await, 0).await.unwrap();
    }

    /// Runs `check` against a far end that sends `answer` and then ends the stream; returns the check's
    /// error.
    async fn against(
        answer: &'static [u8],
        check: impl AsyncFnOnce(tokio::io::DuplexStream) -> Result<Outcome, CheckError>,
    ) -> CheckError {
        let (near, mut far) = tokio::io::duplex(4096);
        let serve = async move {
            far.read_u8().await.unwrap();
            far.write_all(answer).await.unwrap();
            far.shutdown().await.unwrap();
            // Reads the rest of the input, so that the result depends only on the answer.
            tokio::io::copy(&mut far, &mut tokio::io::sink())
                .await
                .unwrap();
        };
        let (outcome, ()) = tokio::join!(check(near), serve);
        outcome.unwrap_err()
    }

    #[tokio::test]
    async fn each_kind_of_bad_stream_gets_its_own_error() {
        let error = against(&[0, 31], async |s| download(s, 3).await).await;
        assert!(matches!(
            error,
            CheckError::Short {
                verified: 2,
                expected: 3
            }
        ));
        let error = against(&[0, 30, 62], async |s| download(s, 3).await).await;
        assert!(matches!(error, CheckError::Wrong { offset: 1 }));
        let error = against(&[0, 31, 62, 93], async |s| download(s, 3).await).await;
        assert!(matches!(error, CheckError::Wrong { offset: 3 }));
        let error = against(b"abc\n", async |s| upload(s, 3).await).await;
        assert!(matches!(error, CheckError::Digest { .. }));
        let error = against(&[0, 31, 1], async |s| echo(s, 1, 3).await).await;
        assert!(matches!(error, CheckError::Wrong { offset: 2 }));
        let refused = b"HTTP/1.1 503 No\r\ncontent-length: 0\r\n\r\n";
        let error = against(refused, async |s| http_get(s, "/").await).await;
        assert!(matches!(error, CheckError::Status(status) if status == 503));
        let lies = b"HTTP/1.1 200 OK\r\ncontent-length: 3\r\n\r\nbye";
        let error = against(lies, async |s| http_get(s, "/").await).await;
        assert!(matches!(error, CheckError::Wrong { offset: 0 }));
    }
}
