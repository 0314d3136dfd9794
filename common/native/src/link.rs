//! One HTTP/2 connection of the native transport: its settings, and what drives it.

use std::future::{Future as _, poll_fn};
use std::pin::Pin;
use std::sync::Arc;
use std::task::Poll;
use std::time::Duration;

use bytes::Bytes;
use h2::server::SendResponse;
use h2::{RecvStream, client, server};
use http::Request;
use tokio::io::{AsyncRead, AsyncWrite};

use super::halves::Chunk;
use super::heard::Heard;
use super::window::{Inbound, PING_TIMEOUT, Tuner};
use super::{CONNECTION_WINDOW_BYTES, FRAME_BYTES, SEND_BYTES};

/// How many streams that were reset a connection remembers. Frames that cross a reset in flight
/// are expected for these; for others they cost a reset each.
const RESET_STREAMS: usize = 4096;

/// How much unread small DATA frames may cost before `h2` ends the connection (its own measure).
/// Every frame is taken at once, see [`super::halves`], so that this is never near.
const SMALL_FRAMES: usize = 64 * 1024 * 1024;

/// The largest header block that is taken; ours are below 1 KiB, but for long texts of errors.
const HEADER_BYTES: u32 = 64 * 1024;

/// The server's end: opens streams.
pub struct Opener<S> {
    connection: client::Connection<Heard<S>, Chunk>,
    tuner: Tuner,
}

/// The agent's end: takes streams.
pub struct Taker<S> {
    connection: server::Connection<Heard<S>, Chunk>,
    tuner: Tuner,
}

/// What the peer of a [`Taker`] may make it hold.
#[derive(Clone, Copy, Debug)]
pub struct TakerLimits {
    /// Bytes that all streams together may hold unread, before each gets the smallest window.
    pub held_bytes: usize,
    /// How many streams there are at once.
    pub streams: u32,
    /// Bytes of one stream that may wait to be sent.
    pub send_bytes: usize,
}

impl TakerLimits {
    /// Of a peer that is one of ours: as many streams as it likes.
    pub fn trusting(held_bytes: usize) -> Self {
        Self {
            held_bytes,
            streams: u32::MAX,
            send_bytes: SEND_BYTES,
        }
    }
}

/// A stream that the server opened.
pub type Incoming = (Request<RecvStream>, SendResponse<Chunk>);

/// How one stream is opened.
pub type Requests = client::SendRequest<Chunk>;

impl<S: AsyncRead + AsyncWrite + Unpin> Opener<S> {
    /// Begins HTTP/2 as its client. `budget` bounds what all streams may hold unread, in bytes; a
    /// peer that sends nothing for `ping_timeout` after it was pinged counts as gone.
    ///
    /// # Errors
    /// When the connection breaks.
    pub async fn new(
        stream: S,
        inbound: Arc<Inbound>,
        budget: usize,
        ping_timeout: Duration,
    ) -> Result<(Requests, Self), h2::Error> {
        let (requests, mut connection) = client::Builder::new()
            .initial_window_size(inbound.window())
            .initial_connection_window_size(CONNECTION_WINDOW_BYTES)
            .max_frame_size(FRAME_BYTES as u32)
            .max_send_buffer_size(SEND_BYTES)
            .max_concurrent_reset_streams(RESET_STREAMS)
            .max_local_error_reset_streams(None)
            .data_frame_budget(SMALL_FRAMES)
            .initial_max_send_streams(usize::MAX >> 1)
            .enable_push(false)
            .handshake(Heard::new(stream, inbound.clone()))
            .await?;
        let ping = connection.ping_pong().ok_or_else(unpingable)?;
        let tuner = Tuner::new(ping, inbound, budget, ping_timeout);
        Ok((requests, Self { connection, tuner }))
    }

    /// Drives the connection to its end; an error says why it broke.
    ///
    /// # Errors
    /// When the connection broke, or the peer is silent.
    pub async fn run(mut self) -> Result<(), String> {
        let Self { connection, tuner } = &mut self;
        poll_fn(|cx| {
            loop {
                if let Poll::Ready(ended) = Pin::new(&mut *connection).poll(cx) {
                    return Poll::Ready(ended.map_err(|error| error.to_string()));
                }
                let announce = |window| connection.set_initial_window_size(window);
                match tuner.poll(cx, announce) {
                    Ok(true) => {}
                    Ok(false) => return Poll::Pending,
                    Err(silent) => return Poll::Ready(Err(silent.to_string())),
                }
            }
        })
        .await
    }
}

impl<S: AsyncRead + AsyncWrite + Unpin> Taker<S> {
    /// Begins HTTP/2 as its server.
    ///
    /// # Errors
    /// When the connection breaks, or the peer speaks something else.
    pub async fn new(
        stream: S,
        inbound: Arc<Inbound>,
        limits: TakerLimits,
    ) -> Result<Self, h2::Error> {
        let mut connection = server::Builder::new()
            .initial_window_size(inbound.window())
            .initial_connection_window_size(CONNECTION_WINDOW_BYTES)
            .max_frame_size(FRAME_BYTES as u32)
            .max_send_buffer_size(limits.send_bytes)
            .max_concurrent_streams(limits.streams)
            .max_header_list_size(HEADER_BYTES)
            .max_concurrent_reset_streams(RESET_STREAMS)
            .max_pending_accept_reset_streams(RESET_STREAMS)
            .max_local_error_reset_streams(None)
            .data_frame_budget(SMALL_FRAMES)
            .handshake::<_, Chunk>(Heard::new(stream, inbound.clone()))
            .await?;
        let ping = connection.ping_pong().ok_or_else(unpingable)?;
        let tuner = Tuner::new(ping, inbound, limits.held_bytes, PING_TIMEOUT);
        Ok(Self { connection, tuner })
    }

    /// Tells the peer to open no more streams; those that are open go on, and
    /// [`next`](Self::next) ends with the last of them.
    pub fn drain(&mut self) {
        self.connection.graceful_shutdown();
    }

    /// Ends the connection at once, with every stream, and tells the peer that it asks for too much.
    /// [`next`](Self::next) has to be called until it ends, to send that.
    pub fn refuse(&mut self) {
        let calm = h2::Reason::ENHANCE_YOUR_CALM;
        self.connection.abrupt_shutdown(calm);
    }

    /// The next stream; `None` once the connection ended in order. Drives the connection
    /// meanwhile. Cancel safe.
    ///
    /// # Errors
    /// When the connection broke, or the peer is silent.
    pub async fn next(&mut self) -> Result<Option<Incoming>, String> {
        let Self { connection, tuner } = self;
        poll_fn(|cx| {
            loop {
                if let Poll::Ready(next) = connection.poll_accept(cx) {
                    return Poll::Ready(next.transpose().map_err(|error| error.to_string()));
                }
                let announce = |window| connection.set_initial_window_size(window);
                match tuner.poll(cx, announce) {
                    Ok(true) => {}
                    Ok(false) => return Poll::Pending,
                    Err(silent) => return Poll::Ready(Err(silent.to_string())),
                }
            }
        })
        .await
    }
}

/// Bytes as HTTP/2 takes them here.
pub fn chunk(bytes: Bytes) -> Chunk {
    Chunk::detached(bytes)
}

/// There is one handle for pings, and it is taken once.
fn unpingable() -> h2::Error {
    h2::Reason::INTERNAL_ERROR.into()
}

#[cfg(test)]
mod tests {
    #![allow(clippy::unwrap_used)]

    use tokio::io::{AsyncWriteExt as _, duplex, sink};
    use tokio::time::{Instant, sleep, timeout};

    use super::*;

    const LIMIT: Duration = Duration::from_secs(5);

    /// SETTINGS without a setting, and one more byte for the connection (RFC 9113, 6.5 and 6.9).
    const SETTINGS: [u8; 9] = [0, 0, 0, 4, 0, 0, 0, 0, 0];
    const WINDOW_UPDATE: [u8; 13] = [0, 0, 4, 8, 0, 0, 0, 0, 0, 0, 0, 0, 1];

    #[tokio::test(start_paused = true)]
    async fn every_frame_is_a_sign_of_life_and_silence_is_none() {
        let (near, far) = duplex(1 << 16);
        let (mut hears, mut says) = tokio::io::split(far);
        // It reads, and answers no PING.
        tokio::spawn(async move { tokio::io::copy(&mut hears, &mut sink()).await });
        says.write_all(&SETTINGS).await.unwrap();
        let (_requests, opener) = Opener::new(near, Arc::default(), 1 << 20, LIMIT)
            .await
            .unwrap();
        let run = tokio::spawn(opener.run());
        for _ in 0..10 {
            sleep(LIMIT / 2).await;
            assert!(!run.is_finished());
            says.write_all(&WINDOW_UPDATE).await.unwrap();
        }
        let mute = Instant::now();
        let ended = timeout(LIMIT * 3, run).await.unwrap().unwrap();
        assert!(ended.unwrap_err().contains("silent"));
        assert!(mute.elapsed() >= LIMIT, "{:?}", mute.elapsed());
    }
}
