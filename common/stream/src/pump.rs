//! The pump: one task that moves bytes between the two sides of one connection.

use std::pin::pin;
use std::sync::OnceLock;
use std::sync::atomic::{AtomicBool, Ordering};
use std::time::Duration;

use bytes::Bytes;
use metrics::Counter;
use tokio::sync::Notify;
use tokio::time::{Instant, sleep, timeout};

use super::progress::Progress;
use super::{CLOSE_STALL, CloseReason, Sink, Source};

/// One direction of a connection.
pub struct Direction {
    /// Progress of the sink.
    progress: Progress,
    /// Time of the normal end of the source.
    ended: OnceLock<Instant>,
    /// Tells the opposite direction that this direction has ended.
    done: Notify,
    /// Set once the sink was given up, because it accepted nothing after the other side had closed.
    given_up: AtomicBool,
}

impl Direction {
    /// Creates the state of a new direction. `total` counts the bytes of all connections of the program.
    pub fn new(total: Counter) -> Self {
        Self {
            progress: Progress::new(total),
            ended: OnceLock::new(),
            done: Notify::new(),
            given_up: AtomicBool::new(false),
        }
    }

    /// Returns the number of bytes that the sink has accepted.
    pub fn bytes(&self) -> u64 {
        self.progress.accepted()
    }

    /// Returns true if the sink was given up, because it accepted nothing for [`CLOSE_STALL`] after the other side had closed.
    pub fn is_given_up(&self) -> bool {
        self.given_up.load(Ordering::Relaxed)
    }

    fn give_up(&self) -> CloseReason {
        self.given_up.store(true, Ordering::Relaxed);
        CloseReason::Stalled
    }

    /// Returns the time of the normal end of the source; `None` before the end.
    pub fn ended(&self) -> Option<Instant> {
        self.ended.get().copied()
    }
}

/// Moves bytes both ways until both directions have ended or a direction has failed. Each direction waits
/// only for its own sink. If a sink fails, its direction ends; the opposite direction continues to its end,
/// as long as bytes move. `up` counts bytes from `client` to `endpoint`. After one direction has ended, the
/// other direction may stay without movement for at most `half_open`.
///
/// The pump closes nothing: the caller owns the halves and reports the returned reason to both sides.
#[expect(
    clippy::manual_async_fn,
    reason = "an async fn would keep its arguments twice"
)]
pub fn pump<CS, CK, ES, EK>(
    client: (&mut CS, &mut CK),
    endpoint: (&mut ES, &mut EK),
    [up, down]: [&Direction; 2],
    half_open: Duration,
) -> impl Future<Output = CloseReason>
where
    CS: Source,
    CK: Sink,
    ES: Source,
    EK: Sink,
{
    async move {
        let upward = one_way(client.0, endpoint.1, [up, down], half_open);
        let downward = one_way(endpoint.0, client.1, [down, up], half_open);
        match tokio::try_join!(upward, downward) {
            Ok(((), ())) => CloseReason::Finished,
            Err(reason) => reason,
        }
    }
}

/// Moves bytes one way. The futures of a send and of the end are boxed: an idle connection waits for its source, and
/// needs no memory for the other steps.
#[expect(
    clippy::manual_async_fn,
    reason = "an async fn would keep its arguments twice"
)]
fn one_way(
    source: &mut impl Source,
    sink: &mut impl Sink,
    [own, other]: [&Direction; 2],
    half_open: Duration,
) -> impl Future<Output = Result<(), CloseReason>> {
    async move {
        while let Some(chunk) = source.recv().await? {
            match Box::pin(send(source, sink, chunk, &own.progress)).await {
                Sent::Taken => {}
                Sent::Failed(reason) => {
                    // Bytes in the opposite direction are still useful: an endpoint may answer and close before
                    // reading everything.
                    Box::pin(async {
                        tokio::select! {
                            () = other.done.notified() => {}
                            () = other.progress.stalled(CLOSE_STALL) => {}
                            // Bytes that nobody takes from the source would count for no limit. Once the source was
                            // aborted, its peer takes no bytes of the opposite direction either.
                            () = async { source.fill().await; sleep(CLOSE_STALL).await } => {}
                        }
                    })
                    .await;
                    return Err(reason);
                }
                // The side that would receive an answer is gone.
                Sent::GivenUp => return Err(own.give_up()),
            }
        }
        let _ = own.ended.set(Instant::now());
        Box::pin(finish(source, sink, [own, other], half_open)).await
    }
}

/// Ends a direction whose source has ended, then waits for the other direction.
async fn finish(
    source: &mut impl Source,
    sink: &mut impl Sink,
    [own, other]: [&Direction; 2],
    half_open: Duration,
) -> Result<(), CloseReason> {
    let aborted = {
        let mut ended = pin!(sink.finish());
        tokio::select! {
            biased;
            ended = &mut ended => {
                ended?;
                None
            }
            // The alert that ends a TLS stream needs room in the socket.
            reason = source.aborted() => {
                let ended = timeout(CLOSE_STALL, ended).await;
                ended.unwrap_or_else(|_| Err(own.give_up()))?;
                Some(reason)
            }
        }
    };
    own.done.notify_one();
    let aborted = async {
        match aborted {
            Some(reason) => reason,
            None => source.aborted().await,
        }
    };
    tokio::select! {
        // In this order, because a peer closes the connection as soon as both directions have ended, and the
        // close must not change the reason.
        biased;
        () = other.done.notified() => Ok(()),
        reason = aborted => Err(reason),
        () = other.progress.stalled(half_open) => Err(CloseReason::HalfOpenIdle),
    }
}

/// Result of sending one chunk.
enum Sent {
    Taken,
    /// The sink failed.
    Failed(CloseReason),
    /// The source was aborted, and the sink accepts nothing.
    GivenUp,
}

/// Sends one chunk while the source keeps buffering. Once the source was aborted, gives up a sink that makes no
/// progress for [`CLOSE_STALL`]: otherwise the waiting bytes would stay as long as the sink.
async fn send(
    source: &mut impl Source,
    sink: &mut impl Sink,
    chunk: Bytes,
    progress: &Progress,
) -> Sent {
    let mut sent = pin!(sink.send_counted(chunk, progress));
    let sent = tokio::select! {
        biased;
        sent = &mut sent => sent,
        () = source.fill() => tokio::select! {
            biased;
            sent = sent => sent,
            () = progress.stalled(CLOSE_STALL) => return Sent::GivenUp,
        },
    };
    match sent {
        Ok(()) => Sent::Taken,
        Err(reason) => Sent::Failed(reason),
    }
}

#[cfg(test)]
mod tests {
    #![allow(clippy::unwrap_used)]

    use std::io;
    use std::pin::Pin;
    use std::sync::atomic::{AtomicU32, Ordering};
    use std::task::{Context, Poll};

    use bytes::Bytes;
    use tokio::io::{
        AsyncReadExt, AsyncWrite, AsyncWriteExt, DuplexStream, ReadHalf, WriteHalf, duplex, split,
    };

    use super::super::HALF_OPEN_IDLE;
    use super::super::io::{ReadSource, WriteSink};
    use super::*;

    type Halves = (
        ReadSource<ReadHalf<DuplexStream>>,
        WriteSink<WriteHalf<DuplexStream>>,
    );

    /// Returns the directions of a connection with counters that nobody reads.
    fn directions() -> [Direction; 2] {
        [(); 2].map(|()| Direction::new(Counter::noop()))
    }

    fn halves(stream: DuplexStream, lost: CloseReason) -> Halves {
        let (read, write) = split(stream);
        (
            ReadSource::new(read, Bytes::new(), lost),
            WriteSink::new(write, lost),
        )
    }

    #[tokio::test]
    async fn each_direction_ends_independently() {
        let (mut client, near) = duplex(64);
        let (far, mut endpoint) = duplex(64);
        let (mut cs, mut ck) = halves(near, CloseReason::ClientLost);
        let (mut es, mut ek) = halves(far, CloseReason::EndpointLost);
        let [up, down] = directions();
        let run = pump(
            (&mut cs, &mut ck),
            (&mut es, &mut ek),
            [&up, &down],
            HALF_OPEN_IDLE,
        );
        let talk = async {
            client.write_all(b"question").await.unwrap();
            client.shutdown().await.unwrap();
            let mut asked = String::new();
            endpoint.read_to_string(&mut asked).await.unwrap();
            endpoint.write_all(b"a longer answer").await.unwrap();
            endpoint.shutdown().await.unwrap();
            let mut answer = String::new();
            client.read_to_string(&mut answer).await.unwrap();
            (asked, answer)
        };
        let (reason, (asked, answer)) = tokio::join!(run, talk);
        assert_eq!(
            (asked.as_str(), answer.as_str()),
            ("question", "a longer answer")
        );
        assert_eq!(reason, CloseReason::Finished);
        assert_eq!((up.bytes(), down.bytes()), (8, 15));
    }

    #[tokio::test(start_paused = true)]
    async fn a_half_open_connection_ends_once_nothing_moves() {
        let (mut client, near) = duplex(64);
        let (far, mut endpoint) = duplex(64);
        let (mut cs, mut ck) = halves(near, CloseReason::ClientLost);
        let (mut es, mut ek) = halves(far, CloseReason::EndpointLost);
        let [up, down] = directions();
        let started = tokio::time::Instant::now();
        let talk = async {
            client.shutdown().await.unwrap();
            sleep(HALF_OPEN_IDLE / 2).await;
            endpoint.write_all(b"late").await.unwrap();
        };
        let run = pump(
            (&mut cs, &mut ck),
            (&mut es, &mut ek),
            [&up, &down],
            HALF_OPEN_IDLE,
        );
        let (reason, ()) = tokio::join!(run, talk);
        assert_eq!(reason, CloseReason::HalfOpenIdle);
        assert_eq!(down.bytes(), 4);
        assert_eq!(started.elapsed(), HALF_OPEN_IDLE * 2);
    }

    #[tokio::test(start_paused = true)]
    async fn a_half_open_connection_may_idle_for_the_callers_bound() {
        let (mut client, near) = duplex(64);
        let (far, mut endpoint) = duplex(64);
        let (mut cs, mut ck) = halves(near, CloseReason::ClientLost);
        let (mut es, mut ek) = halves(far, CloseReason::EndpointLost);
        let [up, down] = directions();
        let (client_side, endpoint_side) = ((&mut cs, &mut ck), (&mut es, &mut ek));
        let bound = HALF_OPEN_IDLE * 12;
        let run = pump(client_side, endpoint_side, [&up, &down], bound);
        let talk = async {
            client.shutdown().await.unwrap();
            sleep(HALF_OPEN_IDLE * 3).await;
            endpoint.write_all(b"late").await.unwrap();
            endpoint.shutdown().await.unwrap();
            let mut answer = String::new();
            client.read_to_string(&mut answer).await.unwrap();
            answer
        };
        let (reason, answer) = tokio::join!(run, talk);
        assert_eq!((reason, answer.as_str()), (CloseReason::Finished, "late"));
    }

    #[tokio::test]
    async fn an_answer_arrives_although_the_question_was_not_read() {
        let (mut client, near) = duplex(64);
        let (far, mut endpoint) = duplex(64);
        let (mut cs, mut ck) = halves(near, CloseReason::ClientLost);
        let (es, _) = halves(far, CloseReason::EndpointLost);
        let mut es = es;
        let (gone, _) = duplex(1);
        let (_, mut ek) = halves(gone, CloseReason::EndpointLost);
        let [up, down] = directions();
        let run = pump(
            (&mut cs, &mut ck),
            (&mut es, &mut ek),
            [&up, &down],
            HALF_OPEN_IDLE,
        );
        let talk = async {
            client.write_all(b"too long").await.unwrap();
            endpoint.write_all(b"413").await.unwrap();
            endpoint.shutdown().await.unwrap();
            let mut answer = String::new();
            client.read_to_string(&mut answer).await.unwrap();
            answer
        };
        let (reason, answer) = tokio::join!(run, talk);
        assert_eq!(
            (reason, answer.as_str()),
            (CloseReason::EndpointLost, "413")
        );
    }

    /// Source of one chunk whose connection has been aborted.
    struct Aborted(Option<Bytes>);

    impl Source for Aborted {
        async fn recv(&mut self) -> Result<Option<Bytes>, CloseReason> {
            self.0.take().map(Some).ok_or(CloseReason::ClientClosed)
        }

        async fn fill(&mut self) {}
    }

    /// Reads a piece of at most 64 bytes shortly before each end of [`CLOSE_STALL`].
    async fn read_slowly(stream: &mut DuplexStream) -> usize {
        let (mut all, mut piece) = (0, [0; 64]);
        loop {
            sleep(CLOSE_STALL - Duration::from_secs(1)).await;
            match stream.read(&mut piece).await.unwrap() {
                0 => return all,
                count => all += count,
            }
        }
    }

    /// Pumps until the connection ends.
    async fn between(
        client: (&mut impl Source, &mut impl Sink),
        endpoint: (&mut impl Source, &mut impl Sink),
    ) -> CloseReason {
        let [up, down] = directions();
        pump(client, endpoint, [&up, &down], HALF_OPEN_IDLE).await
    }

    #[tokio::test(start_paused = true)]
    async fn bytes_before_an_abort_reach_a_slow_endpoint() {
        let (far, mut endpoint) = duplex(64);
        let run = async {
            let (mut es, mut ek) = halves(far, CloseReason::EndpointLost);
            let mut cs = Aborted(Some(Bytes::from_static(&[7; 1000])));
            let (_client, near) = duplex(64);
            let (_, mut ck) = halves(near, CloseReason::ClientLost);
            between((&mut cs, &mut ck), (&mut es, &mut ek)).await
        };
        let (reason, received) = tokio::join!(run, read_slowly(&mut endpoint));
        assert_eq!((reason, received), (CloseReason::ClientClosed, 1000));
    }

    /// Writer into a full socket. Each look at the unacknowledged bytes finds `read` bytes less.
    struct Full {
        unacknowledged: AtomicU32,
        read: u32,
        /// True for a writer with a buffer of its own, such as a TLS stream.
        is_buffered: bool,
    }

    impl Full {
        fn poll(&self) -> Poll<()> {
            match self.unacknowledged.load(Ordering::Relaxed) {
                0 => Poll::Ready(()),
                _ => Poll::Pending,
            }
        }
    }

    impl AsyncWrite for Full {
        fn poll_write(
            self: Pin<&mut Self>,
            _: &mut Context<'_>,
            bytes: &[u8],
        ) -> Poll<io::Result<usize>> {
            match self.is_buffered {
                true => Poll::Ready(Ok(bytes.len())),
                false => self.poll().map(|()| Ok(bytes.len())),
            }
        }

        fn poll_flush(self: Pin<&mut Self>, _: &mut Context<'_>) -> Poll<io::Result<()>> {
            match self.is_buffered {
                true => self.poll().map(Ok),
                false => Poll::Ready(Ok(())),
            }
        }

        fn poll_shutdown(self: Pin<&mut Self>, cx: &mut Context<'_>) -> Poll<io::Result<()>> {
            self.poll_flush(cx)
        }
    }

    /// Source that has ended, and whose connection has been aborted since.
    struct Left;

    impl Source for Left {
        async fn recv(&mut self) -> Result<Option<Bytes>, CloseReason> {
            Ok(None)
        }

        async fn aborted(&mut self) -> CloseReason {
            CloseReason::EndpointClosed
        }
    }

    #[tokio::test(start_paused = true)]
    async fn client_without_room_for_the_end_is_stalled_after_an_abort() {
        let started = Instant::now();
        let (_client, near) = duplex(64);
        let (mut cs, _) = halves(near, CloseReason::ClientLost);
        let (_endpoint, far) = duplex(64);
        let (_, mut ek) = halves(far, CloseReason::EndpointLost);
        let full = Full {
            unacknowledged: AtomicU32::new(10),
            read: 0,
            is_buffered: true,
        };
        let mut ck = WriteSink::new(full, CloseReason::ClientLost);
        let reason = between((&mut cs, &mut ck), (&mut Left, &mut ek)).await;
        let expected = (CloseReason::Stalled, CLOSE_STALL);
        assert_eq!((reason, started.elapsed()), expected);
    }

    /// Pumps the last chunk of a client that has closed into a full socket. Returns the reason and the time until then.
    async fn upload_to(read: u32, is_buffered: bool) -> (CloseReason, Duration) {
        let started = Instant::now();
        let mut cs = Aborted(Some(Bytes::from_static(b"upload")));
        let (_client, near) = duplex(64);
        let (_, mut ck) = halves(near, CloseReason::ClientLost);
        let (_endpoint, far) = duplex(64);
        let (mut es, _) = halves(far, CloseReason::EndpointLost);
        let full = Full {
            unacknowledged: AtomicU32::new(10),
            read,
            is_buffered,
        };
        let look = |full: &Full| Some(full.unacknowledged.fetch_sub(full.read, Ordering::Relaxed));
        let mut ek = WriteSink::new(full, CloseReason::EndpointLost).measured(look);
        let reason = between((&mut cs, &mut ck), (&mut es, &mut ek)).await;
        (reason, started.elapsed())
    }

    #[tokio::test(start_paused = true)]
    async fn endpoint_that_reads_from_a_full_socket_is_slow_and_not_stalled() {
        for is_buffered in [false, true] {
            let (reason, time) = upload_to(1, is_buffered).await;
            assert_eq!(reason, CloseReason::ClientClosed, "{is_buffered}");
            assert!(time > CLOSE_STALL * 5, "{time:?}");
            let reads_nothing = upload_to(0, is_buffered).await;
            assert_eq!(reads_nothing, (CloseReason::Stalled, CLOSE_STALL));
        }
    }

    #[tokio::test(start_paused = true)]
    async fn an_answer_reaches_a_slow_client_although_the_question_was_not_read() {
        let (mut client, near) = duplex(64);
        client.write_all(b"too long").await.unwrap();
        let run = async {
            let (mut cs, mut ck) = halves(near, CloseReason::ClientLost);
            let (gone, _) = duplex(1);
            let (_, mut ek) = halves(gone, CloseReason::EndpointLost);
            let answer = [7; 1000];
            let mut es = ReadSource::new(&answer[..], Bytes::new(), CloseReason::EndpointLost);
            between((&mut cs, &mut ck), (&mut es, &mut ek)).await
        };
        let (reason, received) = tokio::join!(run, read_slowly(&mut client));
        assert_eq!((reason, received), (CloseReason::EndpointLost, 1000));
    }

    #[tokio::test(start_paused = true)]
    async fn a_lost_sink_ends_both_directions() {
        let (client, near) = duplex(64);
        let (far, mut endpoint) = duplex(64);
        let (mut cs, mut ck) = halves(near, CloseReason::ClientLost);
        let (mut es, mut ek) = halves(far, CloseReason::EndpointLost);
        let [up, down] = directions();
        drop(client);
        endpoint.write_all(b"nobody reads this").await.unwrap();
        let run = pump(
            (&mut cs, &mut ck),
            (&mut es, &mut ek),
            [&up, &down],
            HALF_OPEN_IDLE,
        );
        assert_eq!(run.await, CloseReason::ClientLost);
    }
}
