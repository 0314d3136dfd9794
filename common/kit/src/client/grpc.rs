//! The packet protocol over gRPC, as in konnectivity-client: one HTTP/2 connection with one `Proxy` stream,
//! and one dial on the stream.
//!
//! The code uses plain HTTP/2 instead of a gRPC library, because the stream needs backpressure: window credit
//! returns to the server only as the reader reads, and a write waits for the server's windows.

use std::io;
use std::pin::Pin;
use std::task::{Context, Poll, ready};
use std::time::Duration;

use bytes::{Buf as _, Bytes, BytesMut};
use culvert_proto::packet::Payload;
use culvert_proto::{CloseDial, CloseRequest, Data, DialRequest, Packet, PacketType};
use h2::client::ResponseFuture;
use h2::{RecvStream, SendStream};
use http::{HeaderMap, Request, Version};
use tokio::io::{AsyncRead, AsyncWrite, ReadBuf};
use tokio::sync::oneshot;
use tokio::time::{Instant, timeout, timeout_at};

use super::{ClientError, framing, io_error};

/// HTTP/2 window of the stream and of the connection, in bytes. Both are equal because the connection has
/// only one stream. Large enough not to limit the throughput on one machine.
const WINDOW_BYTES: u32 = 8 << 20;

/// Largest amount of data queued for sending in HTTP/2, in bytes.
const SEND_BUFFER_BYTES: usize = 1 << 20;

/// Largest payload of one DATA packet, in bytes: the size of a stock server's reads.
const MAX_DATA_BYTES: usize = 32 * 1024;

/// Longest time a dropped stream keeps the socket open to send its last frames.
const FAREWELL: Duration = Duration::from_secs(1);

/// A tunnelled connection over gRPC.
pub(super) struct GrpcStream {
    sender: Sender,
    receiver: Receiver,
    connect_id: i64,
    /// Received bytes that the caller has not read yet.
    ready: Bytes,
    /// Set when CLOSE_RSP arrived or the stream ended.
    ended: bool,
    /// Set when CLOSE_REQ was queued.
    closing: bool,
    _farewell: Farewell,
}

/// Opens the RPC over `io` and dials `target`.
pub(super) async fn open<S>(
    io: S,
    authority: &str,
    target: &str,
    deadline: Instant,
) -> Result<GrpcStream, ClientError>
where
    S: AsyncRead + AsyncWrite + Send + Unpin + 'static,
{
    let random = random_id()?;
    let calling = async {
        let mut call = call(io, authority).await?;
        call.sender.queue(&dial_request(target, random))?;
        call.sender.drain().await?;
        Ok::<_, ClientError>(call)
    };
    let late = |_| ClientError::Timeout;
    let Call {
        mut sender,
        response,
        mut farewell,
    } = timeout_at(deadline, calling).await.map_err(late)??;
    let mut dialing = Box::pin(dialed(response, random));
    let Ok(dialed) = timeout_at(deadline, &mut dialing).await else {
        let give_up = Payload::CloseDial(CloseDial { random });
        sender.queue(&packet(PacketType::DialCls, give_up))?;
        timeout(FAREWELL, sender.drain()).await.ok();
        farewell.keep(Box::new((sender, dialing)));
        return Err(ClientError::Timeout);
    };
    let (mut receiver, connect_id) = dialed?;
    farewell.keep(Box::new(receiver.stream.flow_control().clone()));
    Ok(GrpcStream {
        sender,
        receiver,
        connect_id,
        ready: Bytes::new(),
        ended: false,
        closing: false,
        _farewell: farewell,
    })
}

/// An RPC before the server's answer.
struct Call {
    sender: Sender,
    response: ResponseFuture,
    farewell: Farewell,
}

/// Starts HTTP/2 over `io` and sends the request head.
async fn call<S>(io: S, authority: &str) -> Result<Call, ClientError>
where
    S: AsyncRead + AsyncWrite + Send + Unpin + 'static,
{
    let (client, connection) = h2::client::Builder::new()
        .initial_window_size(WINDOW_BYTES)
        .initial_connection_window_size(WINDOW_BYTES)
        .max_send_buffer_size(SEND_BUFFER_BYTES)
        .enable_push(false)
        .handshake::<_, Bytes>(io)
        .await?;
    let (leave, left) = oneshot::channel();
    tokio::spawn(drive(connection, left));
    let farewell = Farewell {
        kept: None,
        leave: Some(leave),
    };
    let request = Request::post(format!("http://{authority}/ProxyService/Proxy"))
        .version(Version::HTTP_2)
        .header("content-type", "application/grpc")
        .header("te", "trailers")
        .header("user-agent", "culvert-lab")
        .body(())
        .map_err(|error| ClientError::Protocol(error.to_string()))?;
    let (response, stream) = client.ready().await?.send_request(request, false)?;
    let sender = Sender {
        stream,
        pending: BytesMut::new(),
    };
    Ok(Call {
        sender,
        response,
        farewell,
    })
}

/// A handle that keeps an HTTP/2 stream open.
type Held = Box<dyn Send>;

/// Makes sure that the last frames of a dropped stream are still sent.
///
/// HTTP/2 resets a stream when the last handle is dropped, and then discards the stream's queued frames. This
/// type keeps one more handle and passes the handle to the connection's task on drop. The task writes the
/// frames first and then drops the handle.
struct Farewell {
    kept: Option<Held>,
    leave: Option<oneshot::Sender<Option<Held>>>,
}

impl Farewell {
    fn keep(&mut self, handle: Held) {
        self.kept = Some(handle);
    }
}

impl Drop for Farewell {
    fn drop(&mut self) {
        if let Some(leave) = self.leave.take() {
            // Fails if the connection has already ended; then there is nothing to write.
            leave.send(self.kept.take()).ok();
        }
    }
}

/// Moves the connection's frames until the connection ends, or until [`FAREWELL`] after the stream was
/// dropped.
async fn drive<S>(
    mut connection: h2::client::Connection<S>,
    mut left: oneshot::Receiver<Option<Held>>,
) where
    S: AsyncRead + AsyncWrite + Send + Unpin + 'static,
{
    // The result is ignored: a failure of the connection also reaches its only stream.
    let held = tokio::select! {
        // In this order, so that queued frames are written before the handle is dropped.
        biased;
        _ = &mut connection => return,
        held = &mut left => held,
    };
    drop(held);
    timeout(FAREWELL, connection).await.ok();
}

/// Waits for the response and for the answer to the dial.
async fn dialed(response: ResponseFuture, random: i64) -> Result<(Receiver, i64), ClientError> {
    let (head, stream) = response.await?.into_parts();
    if head.status != 200 {
        return Err(ClientError::Protocol(format!("status {}", head.status)));
    }
    check_status(&head.headers)?;
    let mut receiver = Receiver {
        stream,
        buffer: BytesMut::new(),
    };
    let answer = std::future::poll_fn(|cx| receiver.poll_packet(cx)).await?;
    match answer.map(|answer| answer.payload) {
        Some(Some(Payload::DialResponse(answer))) if answer.random == random => {
            if answer.error.is_empty() {
                Ok((receiver, answer.connect_id))
            } else {
                Err(ClientError::Dial(answer.error))
            }
        }
        None | Some(Some(Payload::CloseDial(_))) => Err(ClientError::Closed),
        Some(other) => Err(ClientError::Protocol(format!(
            "dial answered with {other:?}"
        ))),
    }
}

/// Checks the gRPC status in the trailers, or in the head of a response without trailers.
fn check_status(headers: &HeaderMap) -> Result<(), ClientError> {
    let text = |name| {
        let value = headers.get(name).map(http::HeaderValue::as_bytes);
        String::from_utf8_lossy(value.unwrap_or_default()).into_owned()
    };
    let status = text("grpc-status");
    if status.is_empty() || status == "0" {
        return Ok(());
    }
    Err(ClientError::Status {
        status,
        message: text("grpc-message"),
    })
}

/// Returns a random positive number. The server repeats the number in the answer to the dial.
fn random_id() -> Result<i64, ClientError> {
    let mut bytes = [0; 8];
    aws_lc_rs::rand::fill(&mut bytes)
        .map_err(|_| ClientError::Protocol("no randomness".to_owned()))?;
    Ok(i64::from_ne_bytes(bytes) & i64::MAX)
}

fn packet(kind: PacketType, payload: Payload) -> Packet {
    Packet {
        r#type: kind.into(),
        payload: Some(payload),
    }
}

fn dial_request(target: &str, random: i64) -> Packet {
    let request = DialRequest {
        protocol: "tcp".to_owned(),
        address: target.to_owned(),
        random,
    };
    packet(PacketType::DialReq, Payload::DialRequest(request))
}

/// Sends packets within the server's windows. Buffers at most one packet.
#[derive(Debug)]
struct Sender {
    stream: SendStream<Bytes>,
    pending: BytesMut,
}

impl Sender {
    fn queue(&mut self, packet: &Packet) -> Result<(), ClientError> {
        framing::encode(packet, &mut self.pending).map_err(io_error("encode a packet"))
    }

    async fn drain(&mut self) -> Result<(), ClientError> {
        std::future::poll_fn(|cx| self.poll_drain(cx))
            .await
            .map_err(io_error("send a packet"))
    }

    /// Passes pending bytes to HTTP/2, as far as the windows allow.
    fn poll_drain(&mut self, cx: &mut Context<'_>) -> Poll<io::Result<()>> {
        while !self.pending.is_empty() {
            let capacity = self.stream.capacity();
            if capacity == 0 {
                self.stream.reserve_capacity(self.pending.len());
                match ready!(self.stream.poll_capacity(cx)) {
                    Some(granted) => granted.map_err(io::Error::other)?,
                    None => return Poll::Ready(Err(io::ErrorKind::BrokenPipe.into())),
                };
                continue;
            }
            let part = self.pending.split_to(capacity.min(self.pending.len()));
            self.stream
                .send_data(part.freeze(), false)
                .map_err(io::Error::other)?;
        }
        Poll::Ready(Ok(()))
    }
}

/// Receives packets. Buffers less than one packet plus one HTTP/2 frame.
#[derive(Debug)]
struct Receiver {
    stream: RecvStream,
    buffer: BytesMut,
}

impl Receiver {
    /// Returns the next packet, or `None` if the server ended the RPC without an error.
    fn poll_packet(&mut self, cx: &mut Context<'_>) -> Poll<Result<Option<Packet>, ClientError>> {
        loop {
            let decoded = framing::decode(&mut self.buffer);
            if let Some(packet) = decoded.map_err(|e| ClientError::Protocol(e.to_string()))? {
                return Poll::Ready(Ok(Some(packet)));
            }
            let Some(chunk) = ready!(self.stream.poll_data(cx)).transpose()? else {
                break;
            };
            self.stream.flow_control().release_capacity(chunk.len())?;
            self.buffer.extend_from_slice(&chunk);
        }
        if let Some(trailers) = ready!(self.stream.poll_trailers(cx))? {
            check_status(&trailers)?;
        }
        if !self.buffer.is_empty() {
            let text = "the stream ended within a packet".to_owned();
            return Poll::Ready(Err(ClientError::Protocol(text)));
        }
        Poll::Ready(Ok(None))
    }
}

impl AsyncRead for GrpcStream {
    fn poll_read(
        self: Pin<&mut Self>,
        cx: &mut Context<'_>,
        buf: &mut ReadBuf<'_>,
    ) -> Poll<io::Result<()>> {
        let this = self.get_mut();
        while this.ready.is_empty() && !this.ended {
            let packet = ready!(this.receiver.poll_packet(cx));
            // No packets follow an error.
            this.ended = !matches!(packet, Ok(Some(_)));
            let payload = packet
                .map_err(io::Error::other)?
                .map(|packet| packet.payload);
            match payload {
                Some(Some(Payload::Data(data))) if data.connect_id == this.connect_id => {
                    this.ready = data.data;
                }
                Some(Some(Payload::CloseResponse(close)))
                    if close.connect_id == this.connect_id =>
                {
                    this.ended = true;
                }
                None => {}
                Some(other) => {
                    let text = format!("unexpected packet in an open connection: {other:?}");
                    return Poll::Ready(Err(io::Error::new(io::ErrorKind::InvalidData, text)));
                }
            }
        }
        let n = this.ready.len().min(buf.remaining());
        buf.put_slice(this.ready.get(..n).unwrap_or_default());
        this.ready.advance(n);
        Poll::Ready(Ok(()))
    }
}

impl AsyncWrite for GrpcStream {
    fn poll_write(
        self: Pin<&mut Self>,
        cx: &mut Context<'_>,
        buf: &[u8],
    ) -> Poll<io::Result<usize>> {
        let this = self.get_mut();
        if this.ended || this.closing {
            return Poll::Ready(Err(io::ErrorKind::BrokenPipe.into()));
        }
        ready!(this.sender.poll_drain(cx))?;
        let part = buf.get(..MAX_DATA_BYTES).unwrap_or(buf);
        let data = Data {
            connect_id: this.connect_id,
            error: String::new(),
            data: Bytes::copy_from_slice(part),
        };
        this.sender
            .queue(&packet(PacketType::Data, Payload::Data(data)))
            .map_err(io::Error::other)?;
        // The next write or flush sends the bytes that the windows do not allow now.
        if let Poll::Ready(Err(error)) = this.sender.poll_drain(cx) {
            return Poll::Ready(Err(error));
        }
        Poll::Ready(Ok(part.len()))
    }

    fn poll_flush(self: Pin<&mut Self>, cx: &mut Context<'_>) -> Poll<io::Result<()>> {
        self.get_mut().sender.poll_drain(cx)
    }

    fn poll_shutdown(self: Pin<&mut Self>, cx: &mut Context<'_>) -> Poll<io::Result<()>> {
        let this = self.get_mut();
        if this.ended {
            return Poll::Ready(Ok(()));
        }
        ready!(this.sender.poll_drain(cx))?;
        if !this.closing {
            this.closing = true;
            let connect_id = this.connect_id;
            let close = Payload::CloseRequest(CloseRequest { connect_id });
            this.sender
                .queue(&packet(PacketType::CloseReq, close))
                .map_err(io::Error::other)?;
        }
        this.sender.poll_drain(cx)
    }
}
