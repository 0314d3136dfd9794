//! One HTTP/2 connection of the native transport, or of packet streams: the settings and the driver.

mod packets;

use std::future::{Future as _, poll_fn};
use std::io;
use std::pin::Pin;
use std::sync::Arc;
use std::task::{Context, Poll};
use std::time::Duration;

use bytes::Buf;
use h2::server::SendResponse;
use h2::{RecvStream, client, server};
use http::Request;
use tokio::io::{AsyncRead, AsyncWrite};

use super::counting_reader::{CountingReader, ReadQuota};
use super::halves::Chunk;
use super::window::{Inbound, OPENER_HELD_BYTES, Pings, TAKER_HELD_BYTES, Tuner, Window};
use super::{CONNECTION_WINDOW_BYTES, FRAME_BYTES, SEND_BYTES};

pub use self::packets::{AGENT_SEND_BYTES, CLIENT_WINDOW_BYTES, SERVER_SEND_BYTES};

/// Number of reset streams to remember per connection. Frames in flight during the reset are expected for a
/// remembered stream; for a forgotten stream, every such frame costs another reset.
const RESET_STREAMS: usize = 4096;

/// Number of streams that one of our programs may reset before they are accepted: all dials that a server permits at once,
/// many times. Each occupies 1.4 KiB until all of them are read.
const MANY_RESETS: usize = 256 * 1024;

/// Time for which a reset stream is remembered, the default of `h2`.
const RESET_TIME: Duration = Duration::from_secs(1);

/// Budget for unread small DATA frames, in bytes as `h2` counts them; `h2` ends a connection over this
/// budget. Never nearly used up by our programs: they send nothing before the answer, and afterwards every frame is read
/// at once, see [`super::halves`].
const SMALL_FRAMES: usize = 64 * 1024 * 1024;

/// Largest accepted header block, in bytes. Our programs send less than 1 KiB, except for long error texts.
const HEADER_BYTES: u32 = 64 * 1024;

/// Number of reset streams that an [`Opener`] remembers: 1,090 resets per second for [`OPENER_RESET_TIME`], or 270 for
/// [`LONGEST_OPENER_RESET_TIME`]. Each occupies 0.4 KiB, and each late frame for a stream beyond them counts as one of the
/// [`OPENER_ERROR_RESETS`].
const OPENER_RESET_STREAMS: usize = 8 * RESET_STREAMS;

/// Shortest time for which an [`Opener`] remembers a reset stream. Frames that the peer sent before it learned of the reset
/// may arrive later only after a break of the link.
const OPENER_RESET_TIME: Duration = Duration::from_secs(30);

/// Longest time for which an [`Opener`] remembers a reset stream. During a longer time, more resets than
/// [`OPENER_RESET_STREAMS`] are likely.
const LONGEST_OPENER_RESET_TIME: Duration = Duration::from_secs(120);

/// Time for a link that has resumed to receive the frames that the peer sends again.
const REPLAY_TIME: Duration = Duration::from_secs(10);

/// Number of streams that the peer of an [`Opener`] may have reset because of its own errors before its connection ends.
/// Each may occupy 1.4 KiB while the peer does not read. Our programs cause such an error only by a frame for a stream that
/// the opener has forgotten.
const OPENER_ERROR_RESETS: usize = 4096;

/// Number of bytes that an [`Opener`] reads before the tasks of its streams run. Each stream that waits for its response
/// keeps the informational responses (1xx) in these bytes, up to 5 MiB, until its task discards them.
const OPENER_READ_QUOTA: usize = 64 * 1024;

/// Client end of an HTTP/2 connection, which opens streams; used by the server for a native agent connection, by the agent
/// for a packet stream, and by the node tunnel.
pub struct Opener<S, B: Buf = Chunk> {
    connection: client::Connection<CountingReader<S>, B>,
    tuner: Tuner,
    quota: Option<ReadQuota>,
}

/// Server end of an HTTP/2 connection, which accepts streams; used by the agent for a native agent connection, by the server
/// for the packet streams of agents and of clients, and by the front door.
pub struct Taker<S, B: Buf = Chunk> {
    connection: server::Connection<CountingReader<S>, B>,
    tuner: Tuner,
    quota: Option<ReadQuota>,
    /// True once the connection is ended because of the peer's requests.
    is_refused: bool,
}

/// Limits on the resources used by the peer of a [`Taker`].
#[derive(Clone, Copy, Debug)]
pub struct TakerLimits {
    /// Budget for the unread bytes of all streams together. Once the budget is used up, every stream gets the
    /// smallest window.
    pub held_bytes: usize,
    /// Largest number of streams open at once.
    pub streams: u32,
    /// Largest number of unsent bytes of one stream.
    pub send_bytes: usize,
    /// Number of streams that the peer may have reset because of its own errors during the life of the connection; the
    /// next such error ends the connection. `None` for no limit: each error costs memory while the peer does not read.
    pub error_resets: Option<usize>,
    /// Number of reset streams to remember. Frames in flight during the reset are expected for a remembered stream; for
    /// a forgotten stream, every such frame is an error of the peer.
    pub reset_streams: usize,
    /// Time for which a reset stream is remembered.
    pub reset_time: Duration,
    /// Largest accepted frame payload, in bytes. A peer may send a part of a frame, which waits in memory for the rest.
    pub frame_bytes: u32,
    /// Budget for unread small DATA frames of all streams, in bytes as `h2` counts them: 256 less the length of each frame.
    /// `h2` ends a connection over this budget.
    pub small_frames: usize,
    /// Largest accepted header list, in bytes as `h2` counts them: 32 more than the text of each field. A larger list resets
    /// its stream, and a list of four times the size ends the connection.
    pub header_bytes: u32,
    /// Number of bytes to read before the streams opened by these bytes are accepted. `None` for no limit: all requests
    /// that have arrived are in memory at once.
    pub read_quota: Option<usize>,
    /// Number of streams that the peer may reset before they are accepted; one more ends the connection. A peer that was
    /// not read for some time may have opened and reset many streams: all bytes that have arrived are read at once.
    pub unaccepted_resets: usize,
    /// Times of the pings.
    pub pings: Pings,
    /// Time for the peer to confirm SETTINGS while the windows of its streams have to shrink because of unread bytes. `None`
    /// for no limit.
    pub confirm_time: Option<Duration>,
}

impl TakerLimits {
    /// Returns limits for a peer that is one of our own programs: any number of streams.
    pub fn trusting() -> Self {
        Self {
            held_bytes: TAKER_HELD_BYTES,
            streams: u32::MAX,
            send_bytes: SEND_BYTES,
            error_resets: None,
            reset_streams: RESET_STREAMS,
            reset_time: RESET_TIME,
            frame_bytes: FRAME_BYTES as u32,
            small_frames: SMALL_FRAMES,
            header_bytes: HEADER_BYTES,
            read_quota: None,
            unaccepted_resets: MANY_RESETS,
            pings: Pings::default(),
            confirm_time: None,
        }
    }
}

/// Stream opened by the peer.
pub type Incoming<B = Chunk> = (Request<RecvStream>, SendResponse<B>);

/// Handle for opening streams.
pub type Requests<B = Chunk> = client::SendRequest<B>;

impl<S: AsyncRead + AsyncWrite + Unpin> Opener<S> {
    /// Starts HTTP/2 as the client.
    ///
    /// # Errors
    /// Fails if the connection breaks.
    pub async fn new(
        stream: S,
        inbound: Arc<Inbound>,
        pings: Pings,
    ) -> Result<(Requests, Self), h2::Error> {
        Self::resumable(stream, inbound, pings, Duration::ZERO).await
    }

    /// Starts HTTP/2 as the client, on a link that waits for the time `grace` when it breaks.
    ///
    /// # Errors
    /// Fails if the connection breaks.
    pub async fn resumable(
        stream: S,
        inbound: Arc<Inbound>,
        pings: Pings,
        grace: Duration,
    ) -> Result<(Requests, Self), h2::Error> {
        let quota = Some(ReadQuota::new(OPENER_READ_QUOTA));
        let reader = CountingReader::new(stream, inbound.clone()).within(quota.clone());
        let (requests, mut connection) = client::Builder::new()
            .initial_window_size(inbound.window())
            .initial_connection_window_size(CONNECTION_WINDOW_BYTES)
            .max_frame_size(FRAME_BYTES as u32)
            .max_send_buffer_size(SEND_BYTES)
            .max_header_list_size(HEADER_BYTES)
            .max_concurrent_reset_streams(OPENER_RESET_STREAMS)
            .reset_stream_duration(opener_reset_time(grace))
            .max_local_error_reset_streams(Some(OPENER_ERROR_RESETS))
            .data_frame_budget(SMALL_FRAMES)
            .initial_max_send_streams(usize::MAX >> 1)
            .enable_push(false)
            .handshake(reader.writing_behind())
            .await?;
        let ping = connection.ping_pong().ok_or_else(unpingable)?;
        let tuner = Tuner::new(ping, inbound, OPENER_HELD_BYTES, pings);
        let opener = Self {
            connection,
            tuner,
            quota,
        };
        Ok((requests, opener))
    }
}

/// Returns the time for which an [`Opener`] remembers a reset stream. A link that was broken for the time `grace` receives
/// the frames that the peer sent before the break.
fn opener_reset_time(grace: Duration) -> Duration {
    let time = grace.saturating_add(REPLAY_TIME);
    time.clamp(OPENER_RESET_TIME, LONGEST_OPENER_RESET_TIME)
}

impl<S: AsyncRead + AsyncWrite + Unpin, B: Buf> Opener<S, B> {
    /// Drives the connection to its end.
    ///
    /// # Errors
    /// Fails with the cause if the connection broke or the peer is silent.
    pub async fn run(&mut self) -> Result<(), String> {
        poll_fn(|cx| self.poll(cx)).await
    }

    /// Drives the connection until the peer's first bytes arrive. Before that, the peer may still refuse the
    /// connection: a TLS 1.3 client has finished its handshake before the server has checked the client's
    /// certificate.
    ///
    /// # Errors
    /// Fails with the cause if the connection ends before the first bytes.
    pub async fn first_bytes(&mut self) -> Result<(), String> {
        poll_fn(|cx| match self.poll(cx) {
            Poll::Ready(ended) => Poll::Ready(ended.and(Err("the peer closed it".to_owned()))),
            Poll::Pending if self.tuner.heard() > 0 => Poll::Ready(Ok(())),
            Poll::Pending => Poll::Pending,
        })
        .await
    }

    fn poll(&mut self, cx: &mut Context<'_>) -> Poll<Result<(), String>> {
        let Self {
            connection,
            tuner,
            quota,
        } = self;
        loop {
            if let Poll::Ready(ended) = Pin::new(&mut *connection).poll(cx) {
                return Poll::Ready(ended.map_err(|error| cause(&error)));
            }
            if let Some(quota) = quota.as_ref().filter(|quota| quota.is_used_up()) {
                quota.renew(tuner.is_admitted());
                // The tasks of the streams were woken before, and run first.
                cx.waker().wake_by_ref();
            }
            let announce = |window| match window {
                Window::Connection(bytes) => {
                    connection.set_target_window_size(bytes);
                    Ok(())
                }
                Window::Streams(bytes) => connection.set_initial_window_size(bytes),
            };
            match tuner.poll(cx, announce) {
                Ok(true) => {}
                Ok(false) => return Poll::Pending,
                Err(unfit) => return Poll::Ready(Err(unfit.to_string())),
            }
        }
    }
}

impl<S: AsyncRead + AsyncWrite + Unpin> Taker<S> {
    /// Starts HTTP/2 as the server.
    ///
    /// # Errors
    /// Fails if the connection breaks or the peer uses another protocol.
    pub async fn new(
        stream: S,
        inbound: Arc<Inbound>,
        limits: TakerLimits,
    ) -> Result<Self, h2::Error> {
        let quota = limits.read_quota.map(ReadQuota::new);
        let reader = CountingReader::new(stream, inbound.clone()).within(quota.clone());
        let mut connection = server::Builder::new()
            .initial_window_size(inbound.window())
            .initial_connection_window_size(CONNECTION_WINDOW_BYTES)
            .max_frame_size(limits.frame_bytes)
            .max_send_buffer_size(limits.send_bytes)
            .max_concurrent_streams(limits.streams)
            .max_header_list_size(limits.header_bytes)
            .max_concurrent_reset_streams(limits.reset_streams)
            .reset_stream_duration(limits.reset_time)
            .max_pending_accept_reset_streams(limits.unaccepted_resets)
            .max_local_error_reset_streams(limits.error_resets)
            .data_frame_budget(limits.small_frames)
            .handshake::<_, Chunk>(reader)
            .await?;
        let ping = connection.ping_pong().ok_or_else(unpingable)?;
        let tuner = Tuner::new(ping, inbound, limits.held_bytes, limits.pings)
            .confirmed_within(limits.confirm_time);
        Ok(Self {
            connection,
            tuner,
            quota,
            is_refused: false,
        })
    }
}

impl<S: AsyncRead + AsyncWrite + Unpin, B: Buf> Taker<S, B> {
    /// Makes the peer stop opening streams. Open streams continue, and [`next`](Self::next) ends with the
    /// last open stream.
    pub fn drain(&mut self) {
        self.connection.graceful_shutdown();
    }

    /// Ends the connection and all streams at once, with ENHANCE_YOUR_CALM: the peer makes too many requests.
    /// Call [`next`](Self::next) until the end, to send the error.
    pub fn refuse(&mut self) {
        self.is_refused = true;
        let calm = h2::Reason::ENHANCE_YOUR_CALM;
        self.connection.abrupt_shutdown(calm);
    }

    /// Returns true if the connection was ended with ENHANCE_YOUR_CALM, by [`refuse`](Self::refuse) or because `h2` refuses
    /// all undecided requests.
    pub fn is_refused(&self) -> bool {
        self.is_refused
    }

    /// Returns the next stream, or `None` once the connection has ended cleanly. Drives the connection
    /// meanwhile. Cancel safe.
    ///
    /// # Errors
    /// Fails with the cause if the connection broke or the peer is silent.
    pub async fn next(&mut self) -> Result<Option<Incoming<B>>, String> {
        let Self {
            connection,
            tuner,
            quota,
            is_refused,
        } = self;
        poll_fn(|cx| {
            loop {
                if let Poll::Ready(next) = connection.poll_accept(cx) {
                    if let Some(quota) = quota {
                        quota.accepted();
                    }
                    return Poll::Ready(next.transpose().map_err(|error| cause(&error)));
                }
                // All streams so far are accepted.
                if tuner.is_stuck() && !std::mem::replace(is_refused, true) {
                    connection.abrupt_shutdown(h2::Reason::ENHANCE_YOUR_CALM);
                    continue;
                }
                // Tasks that wait for these bytes run next.
                if quota
                    .as_ref()
                    .is_some_and(|quota| quota.is_used_up() && quota.renew(tuner.is_admitted()))
                {
                    cx.waker().wake_by_ref();
                }
                let announce = |window| match window {
                    Window::Connection(bytes) => {
                        connection.set_target_window_size(bytes);
                        Ok(())
                    }
                    Window::Streams(bytes) => connection.set_initial_window_size(bytes),
                };
                match tuner.poll(cx, announce) {
                    Ok(true) => {}
                    Ok(false) => return Poll::Pending,
                    Err(unfit) => return Poll::Ready(Err(unfit.to_string())),
                }
            }
        })
        .await
    }
}

/// Returns the error for a missing ping handle. Never happens, because a connection has a handle and the
/// constructor requests it only once.
fn unpingable() -> h2::Error {
    h2::Reason::INTERNAL_ERROR.into()
}

/// Returns the cause of the end of a connection. rustls has its own long text for a peer that leaves without an alert.
fn cause(error: &h2::Error) -> String {
    match error.get_io().map(io::Error::kind) {
        Some(io::ErrorKind::UnexpectedEof) => "the peer closed the connection".to_owned(),
        _ => error.to_string(),
    }
}

/// Returns true if a request failed because HTTP/2 has no stream number left. All requests of the connection fail then;
/// its open streams continue.
pub fn is_exhausted(error: &h2::Error) -> bool {
    // `h2` reports errors of its caller in this way. A caller that waits until the connection is ready causes no other.
    error.reason().is_none() && !error.is_io()
}

#[cfg(test)]
mod tests;
