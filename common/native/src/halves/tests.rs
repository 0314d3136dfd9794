//! Tests with both ends of one HTTP/2 connection in memory, and with failures between the ends.
#![allow(clippy::unwrap_used, clippy::indexing_slicing)]

use culvert_stream::progress::Progress;
use culvert_stream::pump::{Direction, pump};
use culvert_stream::{CLOSE_STALL, HALF_OPEN_IDLE};
use http::{Request, Response};
use metrics::Counter;
use tokio::io::{AsyncReadExt as _, AsyncWriteExt as _, DuplexStream};
use tokio::sync::{mpsc, watch};
use tokio::task::{JoinHandle, JoinSet};
use tokio::time::{Instant, sleep, sleep_until};

use super::super::link::{Incoming, Opener, Requests, Taker, TakerLimits};
use super::super::window::{CROWDED_BYTES, Pings, SHORT_PATH_BYTES};
use super::super::{FRAME_BYTES, LONG_PATH_FRAME_BYTES};
use super::*;

mod random;

/// More bytes than windows and send queues have room for.
const MUCH: usize = 1 << 20;

type Side = (NativeSource, NativeSink);

/// Connection of the native transport; the server opens streams.
struct Link {
    requests: Requests,
    incoming: mpsc::UnboundedReceiver<Incoming>,
    opened: usize,
    server: Arc<Inbound>,
    agent: Arc<Inbound>,
    drivers: [JoinHandle<Result<(), String>>; 2],
}

/// Passes bytes on after the current delay, in both directions.
async fn delay_line(mut streams: [DuplexStream; 2], delay: watch::Receiver<Duration>) {
    let mut late: [VecDeque<(Instant, Bytes)>; 2] = Default::default();
    loop {
        let mut buffers = [BytesMut::new(), BytesMut::new()];
        let due = late.iter().filter_map(|queue| Some(queue.front()?.0)).min();
        let [first, second] = &mut streams;
        let [to_second, to_first] = &mut buffers;
        tokio::select! {
            Ok(1..) = first.read_buf(to_second) => {}
            Ok(1..) = second.read_buf(to_first) => {}
            () = sleep_until(due.unwrap_or_else(Instant::now)), if due.is_some() => {}
            else => return,
        }
        for (direction, buffer) in buffers.into_iter().enumerate() {
            if !buffer.is_empty() {
                let due = Instant::now() + *delay.borrow();
                late[direction].push_back((due, buffer.freeze()));
            }
            let queue = &mut late[direction];
            while queue.front().is_some_and(|late| late.0 <= Instant::now())
                && let Some((_, bytes)) = queue.pop_front()
            {
                if streams[1 - direction].write_all(&bytes).await.is_err() {
                    return;
                }
            }
        }
    }
}

impl Link {
    async fn new() -> Self {
        let (near, far) = tokio::io::duplex(64 * 1024);
        Self::over(near, far).await
    }

    /// Creates a connection with a round trip of twice the current delay.
    async fn along(delay: watch::Receiver<Duration>) -> Self {
        let (near, near_line) = tokio::io::duplex(4 * MUCH);
        let (far, far_line) = tokio::io::duplex(4 * MUCH);
        tokio::spawn(delay_line([near_line, far_line], delay));
        Self::over(near, far).await
    }

    async fn over(near: DuplexStream, far: DuplexStream) -> Self {
        Self::limited(near, far, Inbound::default(), TakerLimits::trusting()).await
    }

    async fn limited(
        near: DuplexStream,
        far: DuplexStream,
        agent: Inbound,
        limits: TakerLimits,
    ) -> Self {
        let (server, agent) = (Arc::<Inbound>::default(), Arc::new(agent));
        let (opener, taker) = tokio::join!(
            Opener::new(near, server.clone(), Pings::default()),
            Taker::new(far, agent.clone(), limits),
        );
        let ((requests, mut opener), taker) = (opener.unwrap(), taker.unwrap());
        let (streams, incoming) = mpsc::unbounded_channel();
        let drivers = [
            tokio::spawn(async move { opener.run().await }),
            tokio::spawn(take(taker, streams)),
        ];
        Self {
            requests,
            incoming,
            opened: 0,
            server,
            agent,
            drivers,
        }
    }

    /// Opens a connection; returns the server's side and the agent's side.
    async fn open(&mut self) -> (Side, Side) {
        let mut requests = self.requests.clone().ready().await.unwrap();
        self.opened += 1;
        let target = format!("host-{}:443", self.opened);
        let request = Request::connect(&target).body(()).unwrap();
        let (response, send) = requests.send_request(request, false).unwrap();
        let (request, mut respond) = loop {
            let incoming = self.incoming.recv().await.unwrap();
            // Skip streams that the test has cancelled.
            if *incoming.0.uri() == *target {
                break incoming;
            }
        };
        let answer = respond.send_response(Response::new(()), false).unwrap();
        let body = response.await.unwrap().into_body();
        let (server, agent) = (self.server.clone(), self.agent.clone());
        let near = halves(send, body, server, CloseReason::AgentLost);
        let lost = CloseReason::ServerLost;
        (near, halves(answer, request.into_body(), agent, lost))
    }

    /// Asserts that the connection is up and that bytes pass both ways.
    async fn works(&mut self) {
        let ((mut near, mut to_far), (mut far, mut to_near)) = self.open().await;
        to_far.send(Bytes::from_static(b"there")).await.unwrap();
        assert_eq!(far.recv().await.unwrap().unwrap(), "there");
        to_near.send(Bytes::from_static(b"back")).await.unwrap();
        assert_eq!(near.recv().await.unwrap().unwrap(), "back");
        assert!(self.drivers.iter().all(|driver| !driver.is_finished()));
    }

    fn held(&self) -> [usize; 2] {
        [&self.server, &self.agent].map(|inbound| inbound.held.load(Ordering::Relaxed))
    }
}

async fn take(
    mut taker: Taker<DuplexStream>,
    streams: mpsc::UnboundedSender<Incoming>,
) -> Result<(), String> {
    while let Some(incoming) = taker.next().await? {
        let _ = streams.send(incoming);
    }
    Ok(())
}

fn pattern(count: usize) -> Bytes {
    (0..count).map(|i| (i * 31 + (i >> 8)) as u8).collect()
}

/// Sends `bytes` in pieces of many sizes.
async fn send_all(sink: &mut NativeSink, mut bytes: Bytes) {
    let mut size = 1;
    while !bytes.is_empty() {
        let piece = bytes.split_to(size.min(bytes.len()));
        sink.send(piece).await.unwrap();
        size = size * 3 % 100_003;
    }
}

/// Receives to the end; returns the bytes and the end.
async fn receive(source: &mut NativeSource) -> (Vec<u8>, Result<(), CloseReason>) {
    let mut received = Vec::new();
    loop {
        match source.recv().await {
            Ok(Some(bytes)) => {
                assert!(!bytes.is_empty());
                received.extend_from_slice(&bytes);
            }
            Ok(None) => return (received, Ok(())),
            Err(reason) => return (received, Err(reason)),
        }
    }
}

#[tokio::test]
async fn bytes_pass_both_ways_at_once_and_each_direction_ends_independently() {
    let mut link = Link::new().await;
    let ((mut near, mut to_far), (mut far, mut to_near)) = link.open().await;
    let says = |mut sink: NativeSink, bytes| async move {
        send_all(&mut sink, bytes).await;
        sink.finish().await.unwrap();
        sink
    };
    let sent = pattern(MUCH);
    let (up, _to_far) = tokio::join!(receive(&mut far), says(to_far, sent.clone()));
    assert!(up == (sent.to_vec(), Ok(())), "upward");
    // The server has ended its direction; the agent's direction continues.
    let sent = pattern(MUCH + 1);
    send_all(&mut to_near, Bytes::from_static(b"x")).await;
    assert_eq!(near.recv().await.unwrap().unwrap(), "x");
    let (down, _to_near) = tokio::join!(receive(&mut near), says(to_near, sent.clone()));
    assert!(down == (sent.to_vec(), Ok(())), "downward");

    // The same with the ends reversed, and then both directions at once.
    let ((near_2, to_far_2), (far_2, mut to_near_2)) = link.open().await;
    (near, to_far, far) = (near_2, to_far_2, far_2);
    to_near_2.finish().await.unwrap();
    assert_eq!(near.recv().await, Ok(None));
    let (up, _to_far) = tokio::join!(receive(&mut far), says(to_far, sent.clone()));
    assert!(
        up == (sent.to_vec(), Ok(())),
        "upward after the other direction has ended"
    );
    let ((mut near, to_far), (mut far, to_near)) = link.open().await;
    let (up, down, _, _) = tokio::join!(
        receive(&mut far),
        receive(&mut near),
        says(to_far, sent.clone()),
        says(to_near, sent.clone()),
    );
    assert!(
        up == (sent.to_vec(), Ok(())) && down == up,
        "both directions at once"
    );
    assert_eq!(link.held(), [0, 0]);
}

/// Moves bulk in both directions of a link, in real time: with paused time, a busy link sends no second PING.
async fn moves_both_ways(mut link: Link) {
    const STREAMS: usize = 8;
    const BYTES: usize = 8 << 20;
    let mut ends = JoinSet::new();
    for _ in 0..STREAMS {
        let (near, far) = link.open().await;
        for (mut source, mut sink) in [near, far] {
            ends.spawn(async move {
                let send = async {
                    let piece = pattern(256 * 1024);
                    for _ in 0..BYTES / piece.len() {
                        sink.send(piece.clone()).await?;
                    }
                    sink.finish().await
                };
                let receive = async {
                    let mut received = 0;
                    while let Some(bytes) = source.recv().await? {
                        received += bytes.len();
                    }
                    Ok(received)
                };
                tokio::try_join!(send, receive).map(|((), received)| received)
            });
        }
    }
    for received in ends.join_all().await {
        assert_eq!(received, Ok(BYTES));
    }
}

#[tokio::test]
async fn bulk_in_both_directions_never_waits_for_itself() {
    moves_both_ways(Link::new().await).await;
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn bulk_in_both_directions_of_a_large_pipe_never_waits_for_itself() {
    for _ in 0..4 {
        let (near, far) = tokio::io::duplex(2 << 20);
        moves_both_ways(Link::over(near, far).await).await;
    }
}

/// Returns the size of the largest frame of a bulk transfer, after the path was measured.
async fn largest_frame(link: &mut Link) -> usize {
    let ((mut source, _near), (_far, mut sink)) = link.open().await;
    sleep(Duration::from_secs(1)).await;
    let sender = tokio::spawn(async move {
        sink.send(pattern(MUCH)).await.unwrap();
        sink.finish().await.unwrap();
    });
    let (mut largest, mut received) = (0, 0);
    while let Some(bytes) = poll_fn(|cx| source.poll_frame(cx)).await {
        largest = largest.max(bytes.len());
        received += bytes.len();
    }
    assert_eq!(received, MUCH);
    sender.await.unwrap();
    largest
}

#[tokio::test(start_paused = true)]
async fn frames_are_small_on_a_long_path() {
    let mut short = Link::new().await;
    assert_eq!(largest_frame(&mut short).await, FRAME_BYTES);
    let (_delay, delayed) = watch::channel(Duration::from_millis(5));
    let mut long = Link::along(delayed).await;
    let largest = largest_frame(&mut long).await;
    assert!(largest <= LONG_PATH_FRAME_BYTES, "{largest}");
}

#[tokio::test(start_paused = true)]
async fn one_late_answer_does_not_make_a_path_long() {
    let (delay, delayed) = watch::channel(Duration::from_millis(5));
    let mut link = Link::along(delayed).await;
    sleep(Duration::from_millis(500)).await;
    delay.send_replace(Duration::ZERO);
    // The next measurement is due after a second.
    sleep(Duration::from_secs(1)).await;
    assert_eq!(largest_frame(&mut link).await, FRAME_BYTES);
}

#[tokio::test]
async fn a_limited_sink_sends_all_bytes_and_releases_its_charges() {
    let mut link = Link::new().await;
    let ((_near, to_far), (mut far, _to_near)) = link.open().await;
    let allowance = Allowance::new(MUCH);
    let mut to_far = to_far.toward_any_peer().within(allowance.clone());
    let others = allowance.hold(MUCH);
    let sent = pattern(MUCH);
    let send = async {
        send_all(&mut to_far, sent.clone()).await;
        to_far.finish().await.unwrap();
    };
    let (received, ()) = tokio::join!(receive(&mut far), send);
    assert!(received == (sent.to_vec(), Ok(())));
    to_far.queued.all_written().await;
    assert_eq!(allowance.held(), MUCH);
    drop(others);
    assert_eq!(allowance.held(), 0);
}

/// Moves frames out of HTTP/2 until the agent has received a number of bytes since its start.
async fn fill_until(link: &Link, far: &mut NativeSource, bytes: usize) {
    let all = async {
        while link.agent.received.load(Ordering::Relaxed) < bytes as u64 {
            let _ = timeout(Duration::from_millis(1), far.fill()).await;
        }
    };
    timeout(Duration::from_secs(10), all).await.unwrap();
}

#[tokio::test]
async fn waiting_frames_are_joined_unless_they_are_large() {
    let mut link = Link::new().await;
    let ((_near, mut to_far), (mut far, _to_near)) = link.open().await;
    let mut sent = pattern(6 * 16 * 1024 + ENOUGH_BYTES);
    let whole = sent.clone();
    for _ in 0..6 {
        to_far.send(sent.split_to(16 * 1024)).await.unwrap();
    }
    to_far.send(sent).await.unwrap();
    to_far.finish().await.unwrap();
    fill_until(&link, &mut far, whole.len()).await;
    let first = far.recv().await.unwrap().unwrap();
    assert_eq!((first.len(), far.recv().await), (whole.len(), Ok(None)));
    assert_eq!(first, whole);
    assert_eq!(link.held(), [0, 0]);

    let large = pattern(ENOUGH_BYTES);
    let ((_near, mut to_far), (mut far, _to_near)) = link.open().await;
    for _ in 0..2 {
        to_far.send(large.clone()).await.unwrap();
    }
    fill_until(&link, &mut far, whole.len() + 2 * ENOUGH_BYTES).await;
    assert_eq!(far.recv().await.unwrap().unwrap().len(), ENOUGH_BYTES);
}

#[tokio::test]
async fn all_bytes_arrive_before_the_close_reason() {
    let mut link = Link::new().await;
    let tasks = TaskTracker::new();
    for reason in [CloseReason::ClientLost, CloseReason::Stalled] {
        let ((_near, mut to_far), (mut far, _to_near)) = link.open().await;
        let sent = pattern(MUCH);
        let sends = async {
            send_all(&mut to_far, sent.clone()).await;
            to_far.end(reason, &tasks);
        };
        let reads = async {
            // By now the first bytes wait in queues.
            tokio::task::yield_now().await;
            receive(&mut far).await
        };
        let ((), (received, end)) = tokio::join!(sends, reads);
        assert!(received == sent, "{} bytes", received.len());
        assert_eq!(end, Err(reason));
    }
    tasks.close();
    tasks.wait().await;
    link.works().await;
}

#[tokio::test(start_paused = true)]
async fn an_end_does_not_wait_for_a_peer_that_reads_nothing() {
    let mut link = Link::new().await;
    let tasks = TaskTracker::new();
    let ((_near, mut to_far), (mut far, _to_near)) = link.open().await;
    // Until the window is full and a chunk remains in the queue.
    let piece = pattern(16 * 1024);
    while timeout(CLOSE_STALL, to_far.send(piece.clone()))
        .await
        .is_ok()
    {}
    let started = Instant::now();
    to_far.end(CloseReason::Shutdown, &tasks);
    tasks.close();
    tasks.wait().await;
    assert!(started.elapsed() <= REST_STALL * 2);
    let (_, end) = receive(&mut far).await;
    assert_eq!(end, Err(CloseReason::Shutdown));
    link.works().await;
}

#[tokio::test(start_paused = true)]
async fn an_end_waits_for_a_peer_that_reads_slowly() {
    let mut link = Link::new().await;
    let tasks = TaskTracker::new();
    let ((_near, mut to_far), (mut far, _to_near)) = link.open().await;
    let piece = pattern(16 * 1024);
    let mut sent = 0;
    while timeout(CLOSE_STALL, to_far.send(piece.clone()))
        .await
        .is_ok()
    {
        sent += piece.len();
    }
    to_far.end(CloseReason::ClientClosed, &tasks);
    let mut received = 0;
    let end = loop {
        sleep(CLOSE_STALL / 3).await;
        match far.recv().await {
            Ok(Some(bytes)) => received += bytes.len(),
            end => break end,
        }
    };
    assert_eq!(end, Err(CloseReason::ClientClosed));
    assert!(received >= sent, "{received} of {sent} bytes");
    link.works().await;
}

#[tokio::test]
async fn an_abort_is_noticed_after_a_half_close() {
    let mut link = Link::new().await;
    let tasks = TaskTracker::new();
    let ((mut near, _to_far), (_far, mut to_near)) = link.open().await;
    to_near.finish().await.unwrap();
    assert_eq!(near.recv().await, Ok(None));
    let aborts = async { to_near.end(CloseReason::EndpointLost, &tasks) };
    let (reason, ()) = tokio::join!(near.aborted(), aborts);
    assert_eq!(reason, CloseReason::EndpointLost);

    let ((_near, mut to_far), (mut far, _to_near)) = link.open().await;
    to_far.finish().await.unwrap();
    assert_eq!(far.recv().await, Ok(None));
    let aborts = async { to_far.end(CloseReason::ClientLost, &tasks) };
    let (reason, ()) = tokio::join!(far.aborted(), aborts);
    assert_eq!(reason, CloseReason::ClientLost);
}

#[tokio::test]
async fn dropped_halves_end_one_connection_and_a_lost_transport_ends_all() {
    let mut link = Link::new().await;
    let ((mut near, mut to_far), far) = link.open().await;
    drop(far);
    assert_eq!(receive(&mut near).await.1, Err(CloseReason::AgentLost));
    let piece = pattern(16 * 1024);
    while to_far.send(piece.clone()).await.is_ok() {}

    let (near, (mut far, _to_near)) = link.open().await;
    drop(near);
    assert_eq!(receive(&mut far).await.1, Err(CloseReason::ServerLost));
    link.works().await;

    let ((mut near, _to_far), (mut far, mut to_near)) = link.open().await;
    to_near.send(Bytes::from_static(b"last")).await.unwrap();
    assert_eq!(near.recv().await.unwrap().unwrap(), "last");
    link.drivers[0].abort();
    assert_eq!(receive(&mut near).await.1, Err(CloseReason::AgentLost));
    assert_eq!(receive(&mut far).await.1, Err(CloseReason::ServerLost));
}

#[tokio::test]
async fn an_unread_stream_does_not_block_other_streams() {
    let mut link = Link::new().await;
    let ((_near, mut to_far), (mut far, _to_near)) = link.open().await;
    let ((mut near, _to_far), (_far, mut to_near)) = link.open().await;
    let sent = pattern(4 * MUCH);
    let (up, down) = (sent.clone(), sent.clone());
    let fills = [
        tokio::spawn(async move {
            send_all(&mut to_far, up).await;
            to_far.finish().await.unwrap();
            to_far
        }),
        tokio::spawn(async move {
            send_all(&mut to_near, down).await;
            to_near.finish().await.unwrap();
            to_near
        }),
    ];
    for _ in 0..100 {
        link.works().await;
    }
    assert!(fills.iter().all(|fill| !fill.is_finished()));
    let (up, down) = tokio::join!(receive(&mut far), receive(&mut near));
    assert!(up == (sent.to_vec(), Ok(())) && down == up);
    assert_eq!(link.held(), [0, 0]);
}

/// HTTP/2 ends a connection with too many waiting small frames.
#[tokio::test]
async fn many_small_chunks_to_a_stalled_stream_do_not_end_the_connection() {
    const CHUNKS: usize = 10_000;
    for taken_while_it_waits in [true, false] {
        let mut link = Link::new().await;
        let ((mut near, mut to_far), (mut far, mut to_near)) = link.open().await;
        let sent = pattern(CHUNKS);
        for at in 0..CHUNKS {
            let chunk = sent.slice(at..=at);
            to_far.send(chunk.clone()).await.unwrap();
            to_near.send(chunk).await.unwrap();
            tokio::task::yield_now().await;
            if taken_while_it_waits {
                // As a pump does while its sink is busy.
                let _ = futures_util::FutureExt::now_or_never(far.fill());
                let _ = futures_util::FutureExt::now_or_never(near.fill());
            }
        }
        link.works().await;
        to_far.finish().await.unwrap();
        to_near.finish().await.unwrap();
        let (up, down) = tokio::join!(receive(&mut far), receive(&mut near));
        assert!(up == (sent.to_vec(), Ok(())) && down == up);
        assert_eq!(link.held(), [0, 0]);
        link.works().await;
    }
}

#[tokio::test]
async fn unread_bytes_are_counted_until_they_are_read_or_dropped() {
    let mut link = Link::new().await;
    let ((_near, mut to_far), (mut far, _to_near)) = link.open().await;
    to_far.send(pattern(400_000)).await.unwrap();
    let first = far.recv().await.unwrap().unwrap();
    assert_eq!(link.held(), [0, first.len()]);
    // The rest arrives while the sink is busy with the first chunk.
    let filling = timeout(CLOSE_STALL, async {
        while link.held() != [0, 400_000] {
            let _ = futures_util::FutureExt::now_or_never(far.fill());
            tokio::task::yield_now().await;
        }
    });
    filling.await.unwrap();
    let second = far.recv().await.unwrap().unwrap();
    assert_eq!(link.held(), [0, 400_000 - first.len()]);
    assert_eq!(pattern(400_000)[first.len()..][..second.len()], second);
    drop(far);
    assert_eq!(link.held(), [0, 0]);
}

/// Both ends count resets, and end a connection with too many resets.
#[tokio::test]
async fn thousands_of_resets_with_bytes_in_flight_do_not_end_the_connection() {
    let mut link = Link::new().await;
    let tasks = TaskTracker::new();
    let bytes = pattern(20_000);
    for turn in 0..2000 {
        let ((near, mut to_far), (far, mut to_near)) = link.open().await;
        to_far.send(bytes.clone()).await.unwrap();
        to_near.send(bytes.clone()).await.unwrap();
        // Bytes that the other end still sends arrive for a closed stream.
        match turn % 4 {
            0 => drop((near, to_far)),
            1 => drop((far, to_near)),
            2 => to_far.end(CloseReason::ClientLost, &tasks),
            _ => to_near.end(CloseReason::EndpointLost, &tasks),
        }
    }
    link.works().await;
    // Cancel streams that the agent has not answered, too.
    for _ in 0..2000 {
        let mut requests = link.requests.clone().ready().await.unwrap();
        let request = Request::connect("given-up:443").body(()).unwrap();
        drop(requests.send_request(request, false).unwrap());
    }
    link.works().await;
}

/// Number of resets that a link with few remembered streams permits at once.
const FEW: usize = 4;

/// Creates a link whose agent remembers few reset streams for `time`, and tolerates no error of the server. Bytes are in
/// flight for 50 ms.
async fn forgetful_link(time: Duration) -> Link {
    let (delay, along) = watch::channel(Duration::from_millis(50));
    let (near, near_line) = tokio::io::duplex(4 * MUCH);
    let (far, far_line) = tokio::io::duplex(4 * MUCH);
    tokio::spawn(async move {
        delay_line([near_line, far_line], along).await;
        drop(delay);
    });
    let limits = TakerLimits {
        reset_streams: 2 * FEW,
        reset_time: time,
        error_resets: Some(0),
        ..TakerLimits::trusting()
    };
    let agent = Inbound::default().pacing_resets(FEW, time);
    Link::limited(near, far, agent, limits).await
}

#[tokio::test]
async fn resets_beyond_the_remembered_streams_wait_and_do_not_end_the_connection() {
    let mut link = forgetful_link(Duration::from_millis(500)).await;
    let tasks = TaskTracker::new();
    let (mut uploads, mut ends) = (JoinSet::new(), Vec::new());
    for _ in 0..4 * FEW {
        let ((mut near, mut to_far), end) = link.open().await;
        ends.push(end);
        uploads.spawn(async move {
            // Until the reset arrives.
            while to_far.send(pattern(1000)).await.is_ok() {
                sleep(Duration::from_millis(5)).await;
            }
            near.recv().await
        });
    }
    for (_, to_near) in ends {
        to_near.end(CloseReason::EndpointLost, &tasks);
    }
    while let Some(end) = uploads.join_next().await {
        assert_eq!(end.unwrap(), Err(CloseReason::EndpointLost));
    }
    tasks.close();
    tasks.wait().await;
    link.works().await;
}

#[tokio::test]
async fn a_waiting_reset_ends_with_the_stream_of_the_peer() {
    let mut link = forgetful_link(Duration::from_secs(600)).await;
    let tasks = TaskTracker::new();
    let mut held = Vec::new();
    for _ in 0..FEW {
        let (near, (_, to_near)) = link.open().await;
        to_near.end(CloseReason::EndpointLost, &tasks);
        held.push(near);
    }
    let ((_near, to_far), (_far, to_near)) = link.open().await;
    let place = Arc::new(());
    let taken = Arc::downgrade(&place);
    to_near.end_holding(place, CloseReason::EndpointLost, &tasks);
    assert!(taken.upgrade().is_some());
    to_far.end(CloseReason::ClientLost, &tasks);
    tasks.close();
    tasks.wait().await;
    assert!(taken.upgrade().is_none());
}

#[tokio::test]
async fn complete_streams_are_not_reset() {
    let mut link = forgetful_link(Duration::from_secs(600)).await;
    let tasks = TaskTracker::new();
    for _ in 0..FEW {
        let ((mut near, mut to_far), (mut far, mut to_near)) = link.open().await;
        to_far.finish().await.unwrap();
        assert_eq!(far.recv().await, Ok(None));
        to_near.finish().await.unwrap();
        to_near.end(CloseReason::ClientClosed, &tasks);
        assert_eq!(near.recv().await, Ok(None));
    }
    tasks.close();
    tasks.wait().await;
    assert!((0..FEW).all(|_| link.agent.resets.take()));
}

#[tokio::test(start_paused = true)]
async fn requests_wait_while_too_many_are_undecided() {
    let (near, far) = tokio::io::duplex(64 * 1024);
    let agent = Inbound::default().limiting_undecided(2);
    let mut link = Link::limited(near, far, agent, TakerLimits::trusting()).await;
    let mut open = vec![link.open().await, link.open().await];
    let guards = [(); 2].map(|()| link.agent.undecided_request());
    let second = Duration::from_secs(1);
    assert!(timeout(second, link.open()).await.is_err());
    drop(guards);
    // The request that has waited is the first undecided one now.
    open.push(timeout(second, link.open()).await.unwrap());
    let _guard = link.agent.undecided_request();
    assert!(timeout(second, link.open()).await.is_err());
    link.agent.lift_undecided();
    link.works().await;
}

#[tokio::test(start_paused = true)]
async fn connection_ends_once_no_undecided_request_can_be_decided() {
    let (near, far) = tokio::io::duplex(64 * 1024);
    let agent = Inbound::default().limiting_undecided(2);
    let mut link = Link::limited(near, far, agent, TakerLimits::trusting()).await;
    let _open = [link.open().await, link.open().await];
    let guard = link.agent.undecided_request();
    let second = Duration::from_secs(1);
    assert!(timeout(second, link.open()).await.is_err());
    // A new answer waits in the meantime.
    let again = link.agent.undecided_again();
    drop(guard);
    assert!(timeout(second, link.open()).await.is_err());
    let [server, _] = link.drivers;
    assert!(!server.is_finished());
    drop(again);
    let ended = timeout(second, server).await.unwrap().unwrap();
    assert!(ended.is_err(), "{ended:?}");
}

/// Sink that accepts the first chunk and is then busy forever.
struct Stuck;

impl Sink for Stuck {
    async fn send_counted(&mut self, _: Bytes, _: &Progress) -> Result<(), CloseReason> {
        std::future::pending().await
    }

    async fn finish(&mut self) -> Result<(), CloseReason> {
        Ok(())
    }
}

/// Source that neither sends anything nor ends.
struct Quiet;

impl Source for Quiet {
    async fn recv(&mut self) -> Result<Option<Bytes>, CloseReason> {
        std::future::pending().await
    }
}

#[tokio::test(start_paused = true)]
async fn an_aborted_connection_does_not_wait_for_an_endpoint_that_reads_nothing() {
    for ends_first in [false, true] {
        gives_up_a_stuck_endpoint(ends_first).await;
    }
}

/// Aborts a connection whose endpoint reads nothing, `ends_first` after the orderly end of the client's direction.
async fn gives_up_a_stuck_endpoint(ends_first: bool) {
    let mut link = Link::new().await;
    let tasks = TaskTracker::new();
    let ((_near, mut to_far), (mut far, mut to_near)) = link.open().await;
    let [up, down] = [(); 2].map(|()| Direction::new(Counter::noop()));
    let started = Instant::now();
    {
        let (mut quiet, mut stuck) = (Quiet, Stuck);
        let run = pump(
            (&mut far, &mut to_near),
            (&mut quiet, &mut stuck),
            [&up, &down],
            HALF_OPEN_IDLE,
        );
        tokio::pin!(run);
        to_far.send(pattern(10_000)).await.unwrap();
        if ends_first {
            to_far.finish().await.unwrap();
        }
        // While the client is there, the pump waits without limit.
        assert!(timeout(CLOSE_STALL * 100, &mut run).await.is_err());
        let aborted = Instant::now();
        to_far.end(CloseReason::ClientLost, &tasks);
        assert_eq!(run.await, CloseReason::Stalled);
        assert!(
            aborted.elapsed() >= CLOSE_STALL,
            "a slow sink must get CLOSE_STALL"
        );
        assert!(aborted.elapsed() < CLOSE_STALL * 2);
    }
    assert!(started.elapsed() >= CLOSE_STALL * 101);
    drop((far, to_near));
    assert_eq!(link.held(), [0, 0]);
}

/// Each time a stream has used a part of its window too small for an update, the window becomes smaller than
/// this part.
#[tokio::test]
async fn a_shrinking_window_stalls_no_stream() {
    let mut link = Link::new().await;
    let ((_source, mut sink), (mut source, _sink)) = link.open().await;
    let (arrived, mut arrivals) = mpsc::unbounded_channel();
    let reader = tokio::spawn(async move {
        while let Ok(Some(bytes)) = source.recv().await {
            arrived.send(bytes.len()).unwrap();
        }
    });
    let (mut other, mut far) = link.open().await;
    for (used, left) in [(300_000, CROWDED_BYTES), (0, SHORT_PATH_BYTES)].repeat(3) {
        for sent in [used, 1] {
            let pass = async {
                sink.send(pattern(sent)).await.unwrap();
                let mut missing = sent;
                while missing > 0 {
                    missing -= arrivals.recv().await.unwrap();
                }
            };
            let passed = timeout(CLOSE_STALL, pass).await;
            assert!(passed.is_ok(), "the stream is stalled");
            let held = &link.agent.held;
            match (sent, left) {
                (1, _) => continue,
                (_, CROWDED_BYTES) => held.fetch_add(1 << 24, Ordering::Relaxed),
                _ => held.fetch_sub(1 << 24, Ordering::Relaxed),
            };
            // The tuner checks when something happens, and measures from time to time.
            while link.agent.window() != left {
                let count = 1 << 18;
                let receive = async {
                    let mut missing = count;
                    while missing > 0 {
                        missing -= far.0.recv().await.unwrap().unwrap().len();
                    }
                };
                let (sent, ()) = tokio::join!(other.1.send(pattern(count)), receive);
                sent.unwrap();
                tokio::time::sleep(Duration::from_millis(60)).await;
            }
        }
    }
    reader.abort();
}
