//! The HTTP CONNECT front end: the client sends one request, then the bytes of the connection. In every part
//! that clients parse, responses match upstream's byte for byte.

mod client;

use std::io;
use std::pin::pin;
use std::sync::Arc;
use std::time::Duration;

use bytes::{Bytes, BytesMut};
use culvert_host::net::connect::{self, MAX_HEAD_BYTES, RequestError};
use culvert_host::telemetry::metrics::GaugeGuard;
use culvert_stream::first_byte_gate::FirstByteGate;
use culvert_stream::io::{LINGER, ReadSource, WriteSink, linger_close};
use culvert_stream::progress::Progress;
use culvert_stream::{CloseReason, Dial, Sink, Source};
use tokio::io::{AsyncRead, AsyncReadExt, AsyncWrite, AsyncWriteExt};
use tokio::time::{Instant, timeout};
use tracing::debug;

pub(crate) use self::client::halves;
use self::client::{ClientRead, ClientWrite};
use super::Frontend;
use crate::backend::dial::StreamDialError;
use crate::backend::{Connection, DialError};
use crate::listener::ListenerContext;
use crate::metrics::{RejectReason, ServerMetrics};

/// Longest time for a client to send its request, as in upstream.
const HEAD_TIMEOUT: Duration = Duration::from_secs(60);

/// Maximum number of bytes kept from a client before its connection is open. While the buffer is full, the
/// server notices that the client has left only after the dial has an outcome.
const EARLY_BYTES: usize = 64 * 1024;

/// Serves a connection to its end.
pub(crate) async fn serve<R, W>(
    context: &ListenerContext,
    frontend: &Arc<Frontend>,
    mut read: R,
    mut write: W,
    peer: &str,
) where
    R: ClientRead,
    W: ClientWrite,
{
    let mut buffer = BytesMut::new();
    let head = tokio::select! {
        head = timeout(HEAD_TIMEOUT, connect::read_request(&mut read, &mut buffer, MAX_HEAD_BYTES)) => head,
        () = frontend.shutdown.cancelled() => return,
    };
    let address = match head {
        Ok(Ok(target)) => target,
        // The client left before any request: a port check.
        Ok(Err(RequestError::Io(_))) if buffer.is_empty() => return,
        Ok(Err(RequestError::Io(error))) => {
            debug!(peer, %error, "the client left before its request was complete");
            return;
        }
        Ok(Err(RequestError::Bad(error))) => {
            context.reject(RejectReason::Garbage, peer, &error.to_string());
            return refuse(read, write, error.response()).await;
        }
        Err(_) => {
            context.reject(
                RejectReason::Timeout,
                peer,
                "no CONNECT request within a minute",
            );
            return;
        }
    };
    let _open = GaugeGuard::new(&frontend.metrics.http_connections);
    let dial = Dial {
        protocol: "tcp".into(),
        address,
    };
    let outcome = tokio::select! {
        outcome = frontend.router.dial(&dial) => outcome,
        () = client_disconnected(&mut read, &mut buffer) => {
            debug!(peer, address = dial.address, "the client left while its dial was pending");
            return;
        }
        () = frontend.shutdown.cancelled() => return,
    };
    match outcome {
        Ok(connection) => {
            // If the write fails, the connection is dropped and thus closed at the agent.
            if write_flush(&mut write, connect::ESTABLISHED).await.is_ok() {
                carry(frontend, &dial, read, write, buffer.freeze(), connection).await;
            } else {
                frontend.closed(CloseReason::ClientLost);
            }
        }
        Err(error) => {
            frontend.log_failure(&dial, &error);
            refuse(read, write, &answer(&error)).await;
        }
    }
}

async fn carry<R, W>(
    frontend: &Frontend,
    dial: &Dial,
    read: R,
    write: W,
    early: Bytes,
    connection: Box<Connection>,
) where
    R: ClientRead,
    W: ClientWrite,
{
    let first_byte_gate = FirstByteGate::default();
    let mut source = ClientSource {
        inner: ReadSource::new(read, early, CloseReason::ClientLost),
        first_byte_gate: first_byte_gate.clone(),
    };
    let mut sink = ClientSink {
        inner: WriteSink::new(write, CloseReason::ClientLost).measured(W::unacknowledged),
        first_byte_gate,
        metrics: frontend.metrics.clone(),
        is_finished: false,
    };
    let id = frontend.next_connection();
    let gone = pin!(std::future::pending());
    let client = (&mut source, &mut sink);
    let reason = frontend.run(id, dial, client, gone, connection).await;
    let ends_orderly = match reason {
        // A reset would discard the last bytes of a complete answer.
        _ if sink.is_finished => true,
        CloseReason::EndpointClosed => true,
        CloseReason::AgentLost | CloseReason::Switched => !R::TELLS_INCOMPLETE_END,
        _ => false,
    };
    if ends_orderly {
        linger_close(source.inner.into_inner(), sink.inner.into_inner()).await;
    }
}

/// Resolves once the client has left. Keeps bytes that arrive meanwhile.
async fn client_disconnected<R: ClientRead>(read: &mut R, buffer: &mut BytesMut) {
    while buffer.len() < EARLY_BYTES {
        buffer.reserve(4096);
        match read.read_buf(buffer).await {
            // The client may have sent everything, and now wait for the response.
            Ok(0) if R::TELLS_HANG_UP => return read.hung_up().await,
            Ok(0) | Err(_) => return,
            Ok(_) => {}
        }
    }
    std::future::pending::<()>().await;
}

async fn write_flush<W: AsyncWrite + Unpin>(write: &mut W, bytes: &[u8]) -> io::Result<()> {
    write.write_all(bytes).await?;
    write.flush().await
}

async fn refuse<R, W>(read: R, mut write: W, bytes: &[u8])
where
    R: AsyncRead + Unpin,
    W: AsyncWrite + Unpin,
{
    // The text of an agent may be larger than the buffer of the socket.
    if let Ok(Ok(())) = timeout(LINGER, write_flush(&mut write, bytes)).await {
        linger_close(read, write).await;
    }
}

/// Returns the response to a failed dial, as in upstream. Upstream denies no dials and has no limits for them.
fn answer(error: &DialError) -> Vec<u8> {
    match error {
        DialError::NoAgent | DialError::NoClient => {
            connect::failure(500, &format!("currently no tunnels available: {error}"))
        }
        DialError::Uncarried(text) | DialError::Stream(StreamDialError::Refused(text), _) => {
            connect::failure(connect::dial_failure_status(text), text)
        }
        DialError::TooLong(_) => connect::failure(400, &error.to_string()),
        DialError::TooManyDials(_) => connect::failure(503, &error.to_string()),
        DialError::Denied(text) => connect::failure(403, text),
        DialError::Stream(
            StreamDialError::AgentLost | StreamDialError::ClientLost | StreamDialError::Abandoned,
            _,
        ) => connect::failure(502, &format!("Backend context error: {error}")),
        DialError::Stream(StreamDialError::NotSent, _) => {
            connect::failure(504, &format!("Failed to tunnel dial request: {error}"))
        }
        DialError::Stream(StreamDialError::TimedOut, _) => {
            connect::failure(504, &format!("Backend dial timeout: {error}"))
        }
    }
}

struct ClientSource<R> {
    inner: ReadSource<R>,
    first_byte_gate: FirstByteGate,
}

impl<R: ClientRead> Source for ClientSource<R> {
    async fn recv(&mut self) -> Result<Option<Bytes>, CloseReason> {
        let chunk = self.inner.recv().await?;
        self.first_byte_gate.open();
        Ok(chunk)
    }

    /// Resolves once the client has also closed its socket, which is an ordinary close after the end of its bytes.
    async fn aborted(&mut self) -> CloseReason {
        self.inner.get_ref().hung_up().await;
        CloseReason::ClientClosed
    }

    /// Watches for a hang-up. While the endpoint accepts no bytes, nothing reads from the client, and a
    /// client that leaves would go unnoticed. The client's last bytes wait in the socket.
    async fn fill(&mut self) {
        self.inner.get_ref().hung_up().await;
    }
}

struct ClientSink<W> {
    inner: WriteSink<W>,
    first_byte_gate: FirstByteGate,
    metrics: Arc<ServerMetrics>,
    /// True once the server has sent the end of the endpoint's bytes, or has tried to.
    is_finished: bool,
}

impl<W: AsyncWrite + Unpin + Send> Sink for ClientSink<W> {
    async fn send_counted(&mut self, chunk: Bytes, progress: &Progress) -> Result<(), CloseReason> {
        self.first_byte_gate.wait().await;
        let started = Instant::now();
        self.inner.send_counted(chunk, progress).await?;
        let elapsed = started.elapsed().as_secs_f64();
        self.metrics.frontend_write_duration.record(elapsed);
        Ok(())
    }

    async fn finish(&mut self) -> Result<(), CloseReason> {
        self.inner.finish().await?;
        self.is_finished = true;
        Ok(())
    }
}
