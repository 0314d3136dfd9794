//! One HTTP/2 connection of the native transport, or of packet streams: the settings and the driver.

mod packets;

use std::future::{Future as _, poll_fn};
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

/// Number of reset streams that an [`Opener`] remembers: 550 resets per second for [`OPENER_RESET_TIME`].
const OPENER_RESET_STREAMS: usize = 4 * RESET_STREAMS;

/// Time for which an [`Opener`] remembers a reset stream. Frames that the peer sent before it learned of the reset arrive
/// within this time: a peer is lost if nothing arrives for 20 s after a ping.
const OPENER_RESET_TIME: Duration = Duration::from_secs(30);

/// Number of streams that the peer of an [`Opener`] may have reset because of its own errors before its connection ends.
/// Each may occupy 1.4 KiB while the peer does not read. Our programs cause such an error only by a frame for a stream that
/// the opener has forgotten.
const OPENER_ERROR_RESETS: usize = 4096;

/// Number of bytes that an [`Opener`] reads before the tasks of its streams run. Each stream that waits for its response
/// keeps the informational responses (1xx) in these bytes, up to 5 MiB, until its task discards them.
const OPENER_READ_QUOTA: usize = 64 * 1024;

/// Client end of an HTTP/2 connection, which opens streams; used by the server for a native agent connection, and by
/// the agent for a packet stream.
pub struct Opener<S, B: Buf = Chunk> {
    connection: client::Connection<CountingReader<S>, B>,
    tuner: Tuner,
    quota: Option<ReadQuota>,
}

/// Server end of an HTTP/2 connection, which accepts streams; used by the agent for a native agent connection, and by
/// the server for the packet streams of agents and of clients.
pub struct Taker<S, B: Buf = Chunk> {
    connection: server::Connection<CountingReader<S>, B>,
    tuner: Tuner,
    quota: Option<ReadQuota>,
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
        let quota = Some(ReadQuota::new(OPENER_READ_QUOTA));
        let reader = CountingReader::new(stream, inbound.clone()).within(quota.clone());
        let (requests, mut connection) = client::Builder::new()
            .initial_window_size(inbound.window())
            .initial_connection_window_size(CONNECTION_WINDOW_BYTES)
            .max_frame_size(FRAME_BYTES as u32)
            .max_send_buffer_size(SEND_BYTES)
            .max_header_list_size(HEADER_BYTES)
            .max_concurrent_reset_streams(OPENER_RESET_STREAMS)
            .reset_stream_duration(OPENER_RESET_TIME)
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
                return Poll::Ready(ended.map_err(|error| error.to_string()));
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
                Err(silent) => return Poll::Ready(Err(silent.to_string())),
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
        let tuner = Tuner::new(ping, inbound, limits.held_bytes, limits.pings);
        Ok(Self {
            connection,
            tuner,
            quota,
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
        let calm = h2::Reason::ENHANCE_YOUR_CALM;
        self.connection.abrupt_shutdown(calm);
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
        } = self;
        poll_fn(|cx| {
            loop {
                if let Poll::Ready(next) = connection.poll_accept(cx) {
                    if let Some(quota) = quota {
                        quota.accepted();
                    }
                    return Poll::Ready(next.transpose().map_err(|error| error.to_string()));
                }
                // All streams so far are accepted. Tasks that wait for these bytes run next.
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
                    Err(silent) => return Poll::Ready(Err(silent.to_string())),
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

/// Returns true if a request failed because HTTP/2 has no stream number left. All requests of the connection fail then;
/// its open streams continue.
pub fn is_exhausted(error: &h2::Error) -> bool {
    // `h2` reports errors of its caller in this way. A caller that waits until the connection is ready causes no other.
    error.reason().is_none() && !error.is_io()
}

#[cfg(test)]
mod tests {
    #![allow(clippy::unwrap_used)]

    use tokio::io::{AsyncReadExt as _, AsyncWriteExt as _, DuplexStream, duplex, sink};
    use tokio::time::{Instant, sleep, timeout};

    use super::super::window::{LONG_PATH_BYTES, WindowProfile};
    use super::*;

    const LIMIT: Duration = Duration::from_secs(5);

    /// Pings with a short timeout.
    const SHORT: Pings = Pings {
        idle: Duration::from_secs(30),
        timeout: LIMIT,
    };

    /// SETTINGS without a setting, and a WINDOW_UPDATE of one byte for the connection (RFC 9113, 6.5 and
    /// 6.9).
    const SETTINGS: [u8; 9] = [0, 0, 0, 4, 0, 0, 0, 0, 0];
    const WINDOW_UPDATE: [u8; 13] = [0, 0, 4, 8, 0, 0, 0, 0, 0, 0, 0, 0, 1];

    #[tokio::test(start_paused = true)]
    async fn any_frame_keeps_the_connection_alive_and_silence_ends_it() {
        let (near, far) = duplex(1 << 16);
        let (mut hears, mut says) = tokio::io::split(far);
        // The peer reads, and never answers a PING.
        tokio::spawn(async move { tokio::io::copy(&mut hears, &mut sink()).await });
        says.write_all(&SETTINGS).await.unwrap();
        let (_requests, mut opener) = Opener::new(near, Arc::default(), SHORT).await.unwrap();
        let run = tokio::spawn(async move { opener.run().await });
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

    /// First bytes of a client (RFC 9113, section 3.4).
    const PREFACE: &[u8; 24] = b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n";

    /// Answers PINGs (RFC 9113, section 6.7). Returns the times of the first four PINGs and the number of bytes
    /// received after the first PING.
    async fn four_pings(mut peer: DuplexStream) -> (Vec<u64>, usize) {
        let started = Instant::now();
        let (mut times, mut bytes) = (Vec::new(), 0);
        while times.len() < 4 {
            let mut head = [0; 9];
            peer.read_exact(&mut head).await.unwrap();
            let [high, mid, low, kind, flags, ..] = head;
            let mut payload = vec![0; u32::from_be_bytes([0, high, mid, low]) as usize];
            peer.read_exact(&mut payload).await.unwrap();
            if !times.is_empty() {
                bytes += head.len() + payload.len();
            }
            if (kind, flags) == (6, 0) {
                times.push(started.elapsed().as_secs());
                head[4] = 1;
                peer.write_all(&head).await.unwrap();
                peer.write_all(&payload).await.unwrap();
            }
        }
        (times, bytes)
    }

    #[tokio::test(start_paused = true)]
    async fn keepalive_time_shortens_the_idle_time_between_pings() {
        for (keepalive, idle) in [(1, 1), (10, 10), (60, 30), (3600, 30)] {
            let pings = Pings::with_keepalive(Duration::from_secs(keepalive));

            let (near, mut far) = duplex(1 << 16);
            far.write_all(&SETTINGS).await.unwrap();
            let opened = Opener::new(near, Arc::default(), pings).await;
            let (_requests, mut opener) = opened.unwrap();
            let run = tokio::spawn(async move { opener.run().await });
            far.read_exact(&mut [0; PREFACE.len()]).await.unwrap();
            let (of_opener, bytes) = four_pings(far).await;
            run.abort();

            let (near, mut far) = duplex(1 << 16);
            far.write_all(PREFACE).await.unwrap();
            far.write_all(&SETTINGS).await.unwrap();
            let limits = TakerLimits {
                pings,
                ..TakerLimits::trusting()
            };
            let mut taker = Taker::new(near, Arc::default(), limits).await.unwrap();
            let run = tokio::spawn(async move { taker.next().await.map(|_| ()) });
            let (of_taker, _) = four_pings(far).await;
            run.abort();

            let expected = [0, idle, 2 * idle, 3 * idle];
            assert_eq!(
                (&of_opener[..], &of_taker[..]),
                (&expected[..], &expected[..])
            );
            // An idle connection carries nothing but the pings.
            assert_eq!(bytes, 3 * 17);
        }
    }

    /// Stock clients open a connection for each dial. A ping would cost each of them a packet and a wake-up at each end.
    #[tokio::test(start_paused = true)]
    async fn client_of_a_front_end_is_pinged_only_after_the_idle_time() {
        let (near, mut far) = duplex(1 << 16);
        far.write_all(PREFACE).await.unwrap();
        far.write_all(&SETTINGS).await.unwrap();
        let mut taker = Taker::<_, Chunk>::for_client(near, SHORT).await.unwrap();
        let run = tokio::spawn(async move { taker.next().await.map(|_| ()) });
        sleep(SHORT.idle / 2).await;
        far.write_all(&WINDOW_UPDATE).await.unwrap();
        let (times, _) = four_pings(far).await;
        run.abort();
        let idle = SHORT.idle.as_secs();
        assert_eq!(times, [idle, 2 * idle, 3 * idle, 4 * idle]);
    }

    /// HEADERS frames of `count` streams, each of which depends on itself (RFC 7540, section 5.3.1). Each is an error that
    /// resets the stream.
    fn self_dependent_streams(count: u32) -> Vec<u8> {
        let mut frames = Vec::new();
        for id in (2..).step_by(2).take(count as usize) {
            let id = u32::to_be_bytes(id);
            frames.extend([0, 0, 5, 1, 0x24]);
            frames.extend([id, id].concat());
            frames.push(15);
        }
        frames
    }

    #[tokio::test(start_paused = true)]
    async fn flood_of_stream_errors_ends_an_opener() {
        let (near, mut far) = duplex(1 << 20);
        far.write_all(&SETTINGS).await.unwrap();
        let (_requests, mut opener) = Opener::new(near, Arc::default(), SHORT).await.unwrap();
        let errors = self_dependent_streams(OPENER_ERROR_RESETS as u32 + 1);
        far.write_all(&errors).await.unwrap();
        let ended = timeout(LIMIT * 3, opener.run()).await.unwrap();
        let why = ended.unwrap_err();
        assert!(!why.contains("silent"), "{why}");
    }

    #[tokio::test(start_paused = true)]
    async fn opener_survives_some_stream_errors() {
        let (near, mut far) = duplex(1 << 20);
        far.write_all(&SETTINGS).await.unwrap();
        let (_requests, mut opener) = Opener::new(near, Arc::default(), SHORT).await.unwrap();
        far.write_all(&self_dependent_streams(1000)).await.unwrap();
        let ended = timeout(LIMIT / 2, opener.run()).await;
        assert!(ended.is_err(), "{ended:?}");
    }

    /// A busy peer may write any number of frames before its own frame waits for our end to read.
    #[tokio::test(start_paused = true)]
    async fn opener_reads_while_an_answer_to_a_ping_waits_behind_its_frame() {
        const FRAME: usize = 16 * 1024;
        const FRAMES: usize = 512;
        let (near, mut far) = duplex(2 * FRAME);
        far.write_all(&SETTINGS).await.unwrap();
        let inbound = Arc::new(Inbound::new(WindowProfile::Fixed(LONG_PATH_BYTES)));
        let opened = Opener::new(near, inbound, SHORT).await;
        let (mut requests, mut opener) = opened.unwrap();
        let (response, mut send) = requests.send_request(Request::new(()), false).unwrap();
        let run = tokio::spawn(async move { opener.run().await });
        sleep(Duration::from_millis(1)).await;
        // The peer acknowledges the settings, answers `:status: 200` (RFC 7541, appendix A), and reads nothing.
        let acknowledged = [0, 0, 0, 4, 1, 0, 0, 0, 0];
        far.write_all(&acknowledged).await.unwrap();
        let answer = [0, 0, 1, 1, 4, 0, 0, 0, 1, 0x88];
        far.write_all(&answer).await.unwrap();
        let mut body = response.await.unwrap().into_body();
        let waits = Chunk::detached(vec![0; 3 * FRAME].into());
        send.send_data(waits, false).unwrap();
        sleep(Duration::from_millis(1)).await;
        let write = async {
            let ping = [0, 0, 8, 6, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0];
            far.write_all(&ping).await.unwrap();
            let data = [&[0, 64, 0, 0, 0, 0, 0, 0, 1][..], &[0; FRAME]].concat();
            for _ in 0..FRAMES {
                far.write_all(&data).await.unwrap();
            }
        };
        let read = async {
            let mut left = FRAMES * FRAME;
            while left > 0 {
                left -= body.data().await.unwrap().unwrap().len();
            }
        };
        let both = async { tokio::join!(read, write) };
        timeout(LIMIT, both).await.unwrap();
        run.abort();
    }

    #[tokio::test(start_paused = true)]
    async fn opener_reads_a_limited_burst_before_other_tasks_run() {
        // An informational response (103) of the first stream, with 200 fields that have no value. The first response
        // defines the field.
        let response = |definition: &[u8]| {
            let status = [8, 3, b'1', b'0', b'3'];
            let fields = [&status[..], definition, &[0x80 | 62; 200]].concat();
            let head = [0, 0, fields.len() as u8, 1, 4, 0, 0, 0, 1];
            [&head[..], &fields].concat()
        };
        let mut burst = response(&[0x40, 1, b'x', 0]);
        burst.extend(response(&[]).repeat(4000));
        let (near, mut far) = duplex(1 << 20);
        let inbound = Arc::<Inbound>::default();
        let opened = Opener::new(near, inbound.clone(), SHORT).await;
        let (mut requests, mut opener) = opened.unwrap();
        let (answer, _) = requests.send_request(Request::new(()), true).unwrap();
        let waiting = tokio::spawn(async move { answer.await.is_ok() });
        far.write_all(&SETTINGS).await.unwrap();
        // Sends the request.
        let sent = timeout(Duration::from_millis(1), opener.run()).await;
        assert!(sent.is_err(), "{sent:?}");
        let before = inbound.heard();
        let answer = [0_u8, 0, 1, 1, 4, 0, 0, 0, 1, 0x88];
        let all = [&burst[..], &answer].concat();
        far.write_all(&all).await.unwrap();
        tokio::select! {
            biased;
            ended = opener.run() => panic!("{ended:?}"),
            () = std::future::ready(()) => {}
        }
        assert!(inbound.heard() - before <= OPENER_READ_QUOTA as u64);
        tokio::select! {
            ended = opener.run() => panic!("{ended:?}"),
            answered = waiting => assert!(answered.unwrap()),
        }
        assert_eq!(inbound.heard() - before, all.len() as u64);
    }

    /// A server may cancel all pending dials of an agent that it has not heard for some time.
    #[tokio::test]
    async fn thousands_of_cancelled_requests_in_one_burst_do_not_end_a_taker() {
        const CANCELLED: usize = 3 * RESET_STREAMS;
        let (near, far) = duplex(1 << 22);
        let (opener, taker) = tokio::join!(
            Opener::new(near, Arc::default(), SHORT),
            Taker::<_>::new(far, Arc::default(), TakerLimits::trusting()),
        );
        let ((mut requests, mut opener), mut taker) = (opener.unwrap(), taker.unwrap());
        let run = tokio::spawn(async move { opener.run().await });
        for _ in 0..CANCELLED {
            requests = requests.ready().await.unwrap();
            drop(requests.send_request(Request::new(()), false).unwrap());
        }
        let (_response, _send) = requests.send_request(Request::new(()), false).unwrap();
        // Everything is in the pipe before the taker reads.
        sleep(Duration::from_millis(100)).await;
        for _ in 0..=CANCELLED {
            assert!(
                timeout(LIMIT, taker.next())
                    .await
                    .unwrap()
                    .unwrap()
                    .is_some()
            );
        }
        run.abort();
    }

    #[tokio::test]
    async fn broken_link_is_not_exhausted() {
        let (near, far) = duplex(1 << 16);
        let (requests, mut opener) = Opener::new(near, Arc::default(), SHORT).await.unwrap();
        // The end of stream numbers is an error of the caller for `h2`, as a request without an address is.
        let mut request = Request::new(());
        *request.version_mut() = http::Version::HTTP_2;
        let failed = requests.clone().send_request(request, true).map(|_| ());
        assert!(is_exhausted(&failed.unwrap_err()));
        drop(far);
        let _ = opener.run().await;
        drop(opener);
        let failed = requests.ready().await.map(|_| ());
        assert!(!is_exhausted(&failed.unwrap_err()));
    }

    #[tokio::test]
    async fn response_with_a_large_head_is_refused() {
        let (near, far) = duplex(1 << 20);
        let peer = async {
            let mut connection = server::handshake(far).await.unwrap();
            let (_request, mut respond) = connection.accept().await.unwrap().unwrap();
            let large = "a".repeat(2 * HEADER_BYTES as usize);
            let head = http::Response::builder().header("large", large);
            let head = head.body(()).unwrap();
            respond.send_response(head, true).unwrap();
            connection.accept().await.map(|_| ())
        };
        let ours = async {
            let (mut requests, mut opener) =
                Opener::new(near, Arc::default(), SHORT).await.unwrap();
            let (response, _) = requests.send_request(Request::new(()), true).unwrap();
            tokio::select! {
                response = response => response.map(|_| ()).map_err(|error| error.to_string()),
                ended = opener.run() => ended,
            }
        };
        let refused = tokio::select! {
            refused = ours => refused,
            _ = peer => Err("the peer ended".to_owned()),
        };
        assert!(refused.is_err(), "{refused:?}");
    }
}
