//! The HTTP/2 connection of packet streams, with a stock program at the other end.
//!
//! All connections of an agent share one stream, so bulk queues up in front of small messages, up to the window. The
//! stream keeps a window of [`PACKETS_LONG_PATH_BYTES`] for its life. The window of the *connection* follows the path:
//! a change needs no SETTINGS round trip, and a smaller window takes nothing back from the sender.
//!
//! A client of a front end has a stream for each of its connections, and comes from the same machine or network. The
//! windows of its streams are fixed.

use std::sync::Arc;

use bytes::Buf;
use h2::{client, server};
use tokio::io::{AsyncRead, AsyncWrite};

use super::{HEADER_BYTES, Opener, SMALL_FRAMES, Taker, unpingable};
use crate::counting_reader::{CountingReader, ReadQuota};
use crate::window::{
    Inbound, OPENER_HELD_BYTES, PACKETS_LONG_PATH_BYTES, Pings, Tuner, WindowProfile,
};

/// Largest accepted frame, in bytes; stock peers send at most 16 KiB.
const FRAME_BYTES: u32 = 64 * 1024;

/// Largest number of unsent bytes of a stream in HTTP/2 at the server. The queue in front of HTTP/2 has a bound of
/// its own.
pub const SERVER_SEND_BYTES: usize = 400 * 1024;

/// Largest number of unsent bytes of the stream in HTTP/2 at the agent. The sender observes this limit, because the limit of
/// `h2` would hide the part of the server's window above it.
pub const AGENT_SEND_BYTES: usize = 1024 * 1024;

/// Number of streams that a client may have reset because of its own errors before its connection ends.
const CLIENT_ERROR_RESETS: usize = 1024;

/// Number of streams that a packet stream's peer may have reset because of its own errors, or because it opened too many,
/// before its connection ends. Each occupies 1.4 KiB. The peer has one stream, so its errors matter little.
const ERROR_RESETS: usize = 64;

/// Largest header list of an agent, in bytes as `h2` counts them: its token, its id and its identifiers. A field without a
/// text counts 32 bytes, and occupies 72.
const AGENT_HEADER_BYTES: u32 = 16 * 1024;

/// Bytes of HTTP/2 that the server reads before the first call of an agent: a header list, and the frames before it.
const FIRST_BYTES: usize = 20 * 1024;

/// Number of bytes to read before calls in them are accepted. Between its call and its admission, an agent may send as much
/// again: nothing but pings is expected, because stock agents wait for the answer. A DATA frame of one byte occupies 250
/// bytes, and trailers up to 36 KiB.
const FIRST_READ_BYTES: usize = 1024;

/// Unread bytes of all connections of a packet stream together from which the stream has the smallest window. The
/// buffers of each connection have a bound of their own. A smaller value would shrink the window of a long path.
const HELD_BYTES: usize = OPENER_HELD_BYTES;

/// Receive window of a stream of a client, in bytes.
pub const CLIENT_WINDOW_BYTES: u32 = 1024 * 1024;

/// Receive window of all streams of a client together, in bytes: 40 full streams. Stock clients open one stream on a
/// connection.
const CLIENT_CONNECTION_WINDOW_BYTES: u32 = 40 * CLIENT_WINDOW_BYTES;

/// Budget for unread small DATA frames of a client, in bytes as `h2` counts them: 256 less the length of each frame. The
/// frames of a client stay unread while its endpoint reads nothing. The budget covers a stream that is full of the
/// smallest messages: frames of 14 bytes count 17.3 MiB.
const CLIENT_SMALL_FRAMES: usize = 20 * 1024 * 1024;

/// Number of calls that an agent opens on one connection.
const CALLS: usize = 1;

impl<S: AsyncRead + AsyncWrite + Unpin, B: Buf> Taker<S, B> {
    /// Starts HTTP/2 as the server of at most `streams` calls at once. `inbound` has the profile
    /// [`Packets`](crate::window::WindowProfile::Packets).
    ///
    /// # Errors
    /// Fails if the connection breaks or the peer uses another protocol.
    pub async fn for_packets(
        stream: S,
        inbound: Arc<Inbound>,
        streams: u32,
        pings: Pings,
    ) -> Result<Self, h2::Error> {
        let mut settings = server::Builder::new();
        settings
            .initial_window_size(PACKETS_LONG_PATH_BYTES)
            .max_concurrent_streams(streams)
            .max_header_list_size(AGENT_HEADER_BYTES)
            .max_local_error_reset_streams(Some(ERROR_RESETS))
            .data_frame_budget(SMALL_FRAMES);
        let quota = ReadQuota::until_admission(FIRST_READ_BYTES, FIRST_BYTES);
        Self::of_calls(settings, stream, inbound, pings, Some(quota)).await
    }

    /// Starts HTTP/2 as the server of a client of a front end. An idle client is pinged after the idle time of `pings`.
    ///
    /// # Errors
    /// Fails if the connection breaks or the peer uses another protocol.
    pub async fn for_client(stream: S, pings: Pings) -> Result<Self, h2::Error> {
        let inbound = Inbound::new(WindowProfile::Unmeasured(CLIENT_WINDOW_BYTES));
        let mut settings = server::Builder::new();
        settings
            .initial_window_size(CLIENT_WINDOW_BYTES)
            .initial_connection_window_size(CLIENT_CONNECTION_WINDOW_BYTES)
            .max_header_list_size(HEADER_BYTES)
            .max_local_error_reset_streams(Some(CLIENT_ERROR_RESETS))
            .max_pending_accept_reset_streams(CLIENT_ERROR_RESETS)
            .data_frame_budget(CLIENT_SMALL_FRAMES);
        Self::of_calls(settings, stream, Arc::new(inbound), pings, None).await
    }

    async fn of_calls(
        mut settings: server::Builder,
        stream: S,
        inbound: Arc<Inbound>,
        pings: Pings,
        quota: Option<ReadQuota>,
    ) -> Result<Self, h2::Error> {
        let reader = CountingReader::new(stream, inbound.clone()).within(quota.clone());
        let mut connection = settings
            .max_frame_size(FRAME_BYTES)
            .max_send_buffer_size(SERVER_SEND_BYTES)
            .handshake::<_, B>(reader)
            .await?;
        let ping = connection.ping_pong().ok_or_else(unpingable)?;
        let tuner = Tuner::new(ping, inbound, HELD_BYTES, pings);
        Ok(Self {
            connection,
            tuner,
            quota,
            is_refused: false,
        })
    }
}

impl<S: AsyncRead + AsyncWrite + Unpin, B: Buf> Opener<S, B> {
    /// Starts HTTP/2 as the client of one call. `inbound` has the profile
    /// [`Packets`](crate::window::WindowProfile::Packets).
    ///
    /// # Errors
    /// Fails if the connection breaks.
    pub async fn for_packets(
        stream: S,
        inbound: Arc<Inbound>,
        pings: Pings,
    ) -> Result<(client::SendRequest<B>, Self), h2::Error> {
        let (requests, mut connection) = client::Builder::new()
            .initial_window_size(PACKETS_LONG_PATH_BYTES)
            .max_frame_size(FRAME_BYTES)
            .max_send_buffer_size(u32::MAX as usize)
            .max_header_list_size(HEADER_BYTES)
            .max_local_error_reset_streams(Some(ERROR_RESETS))
            .data_frame_budget(SMALL_FRAMES)
            .initial_max_send_streams(CALLS)
            .enable_push(false)
            .handshake(CountingReader::new(stream, inbound.clone()).writing_behind())
            .await?;
        let ping = connection.ping_pong().ok_or_else(unpingable)?;
        let tuner = Tuner::new(ping, inbound, HELD_BYTES, pings);
        let opener = Self {
            connection,
            tuner,
            quota: None,
        };
        Ok((requests, opener))
    }
}

#[cfg(test)]
mod tests;
