#![allow(clippy::unwrap_used, clippy::indexing_slicing)]

use std::sync::atomic::{AtomicBool, Ordering};
use std::task::{Wake, Waker};

use rand::rngs::StdRng;
use rand::{Rng as _, SeedableRng as _};
use tokio::io::{AsyncReadExt as _, AsyncWriteExt as _, BufStream, DuplexStream, duplex};
use tokio::time::{advance, timeout};
use tokio_util::sync::CancellationToken;

use super::*;
use crate::resume::farewell::FAREWELL_TIMEOUT;
use crate::resume::silence::SILENCE;

const GRACE: Duration = Duration::from_secs(30);

type End = ResumableIo<DuplexStream>;

#[derive(Default)]
struct Woken(AtomicBool);

impl Wake for Woken {
    fn wake(self: Arc<Self>) {
        self.0.store(true, Ordering::Relaxed);
    }
}

fn pair(buffer: usize) -> (End, End) {
    let (near, far) = duplex(buffer);
    (
        ResumableIo::opening(near, Arc::default(), GRACE),
        ResumableIo::accepting(far, Arc::default(), GRACE),
    )
}

/// Attaches a new transport to both ends, as agent and server do.
async fn resume(agent: &Session<DuplexStream>, server: &Session<DuplexStream>, buffer: usize) {
    let (mut near, far) = duplex(buffer);
    let told = agent.received();
    let answer = |Positions { received, from }: Positions| {
        [received.to_be_bytes(), from.to_be_bytes()].concat()
    };
    let attached = Attached {
        transport: far,
        base: Base::Answer {
            received: told,
            answer,
        },
    };
    assert!(server.attach(attached).is_ok());
    let received = near.read_u64().await.unwrap();
    let from = near.read_u64().await.unwrap();
    assert!(from >= told);
    let attached = Attached {
        transport: near,
        base: Base::Told(Positions { received, from }),
    };
    assert!(agent.attach(attached).is_ok());
}

/// An end that sends and receives at the same time, as HTTP/2 does.
struct Exchange {
    end: End,
    sent: Vec<u8>,
    at: usize,
    got: Vec<u8>,
    expected: usize,
}

impl Exchange {
    fn new(end: End, sent: Vec<u8>, expected: usize) -> Self {
        Self {
            end,
            sent,
            at: 0,
            got: Vec::new(),
            expected,
        }
    }

    /// Returns true once all bytes were sent and received.
    fn poll(&mut self, cx: &mut Context<'_>) -> bool {
        let mut buffer = [0; 8192];
        loop {
            let mut target = ReadBuf::new(&mut buffer);
            let read = Pin::new(&mut self.end).poll_read(cx, &mut target);
            if let Poll::Ready(read) = &read {
                read.as_ref().unwrap();
                assert!(!target.filled().is_empty(), "the session ended");
                self.got.extend_from_slice(target.filled());
            }
            let mut wrote = false;
            let rest = &self.sent[self.at..];
            if !rest.is_empty()
                && let Poll::Ready(written) = Pin::new(&mut self.end).poll_write(cx, rest)
            {
                self.at += written.unwrap();
                wrote = true;
            }
            if read.is_pending() && !wrote {
                break;
            }
        }
        let flushed = Pin::new(&mut self.end).poll_flush(cx).is_ready();
        self.at == self.sent.len() && self.got.len() == self.expected && flushed
    }
}

/// Drives both ends until both have sent and received everything. An end that is done still sends again what the other
/// end has lost.
async fn exchange(near: &mut Exchange, far: &mut Exchange) {
    std::future::poll_fn(|cx| match near.poll(cx) & far.poll(cx) {
        true => Poll::Ready(()),
        false => Poll::Pending,
    })
    .await;
}

fn noise(seed: u64, count: usize) -> Vec<u8> {
    let mut random = StdRng::seed_from_u64(seed);
    (0..count).map(|_| random.random()).collect()
}

#[tokio::test(start_paused = true)]
async fn bytes_arrive_once_and_in_order_over_a_thousand_transports() {
    const COUNT: usize = 8 << 20;
    let mut random = StdRng::seed_from_u64(1);
    let (near, far) = pair(4096);
    let (agent, server) = (near.session(), far.session());
    let (up, down) = (noise(2, COUNT), noise(3, COUNT));
    let mut near = Exchange::new(near, up.clone(), COUNT);
    let mut far = Exchange::new(far, down.clone(), COUNT);
    let last = CancellationToken::new();
    let stop = last.clone();
    let exchanging = tokio::spawn(async move {
        // An end that has everything still takes part in the next resumption.
        let driving = std::future::poll_fn(|cx| {
            let _ = near.poll(cx) & far.poll(cx);
            Poll::<()>::Pending
        });
        stop.run_until_cancelled(driving).await;
        exchange(&mut near, &mut far).await;
        (near, far)
    });
    for _ in 0..1000 {
        let buffer = random.random_range(1..5000);
        // The server leaves its transport; the agent reads what the old transport still has.
        resume(&agent, &server, buffer).await;
        for _ in 0..random.random_range(0..6) {
            tokio::task::yield_now().await;
        }
    }
    resume(&agent, &server, 1 << 16).await;
    last.cancel();
    let (near, far) = exchanging.await.unwrap();
    assert!(far.got == up && near.got == down);
}

#[tokio::test(start_paused = true)]
async fn broken_transport_waits_for_the_next_and_then_continues() {
    let (mut near, mut far) = pair(1 << 16);
    near.write_all(b"one").await.unwrap();
    near.flush().await.unwrap();
    let mut got = [0; 3];
    far.read_exact(&mut got).await.unwrap();
    let (agent, server) = (near.session(), far.session());
    let mut state = agent.state();
    // The network takes the transport away.
    drop(near.transport.take().unwrap());
    near.transport = Some(duplex(1).0);
    let waiting = timeout(GRACE / 4, near.read_u8()).await;
    assert!(waiting.is_err() && agent.is_away());
    assert!(*state.borrow_and_update() == State::Away);
    assert!(timeout(GRACE / 4, far.read_u8()).await.is_err() && server.is_away());
    let driving = async {
        near.write_all(b"two").await.unwrap();
        near.flush().await.unwrap();
        near.read_u8().await.unwrap()
    };
    let answering = async {
        far.read_exact(&mut got).await.unwrap();
        far.write_u8(9).await.unwrap();
        far.flush().await.unwrap();
    };
    let resuming = resume(&agent, &server, 1 << 16);
    let (nine, (), ()) = tokio::join!(driving, answering, resuming);
    assert_eq!((&got, nine, agent.is_away()), (b"two", 9, false));
}

#[tokio::test(start_paused = true)]
async fn session_ends_after_the_grace_time_and_accepts_no_transport() {
    let (mut near, far) = pair(1 << 16);
    let session = near.session();
    near.transport = Some(duplex(1).0);
    let started = Instant::now();
    let error = near.read_u8().await.unwrap_err();
    assert_eq!(
        (started.elapsed(), error.kind()),
        (GRACE, ErrorKind::TimedOut)
    );
    assert!(error.to_string().contains("did not resume within 30s"));
    let attached = Attached {
        transport: duplex(1).0,
        base: Base::Told(Positions {
            received: 0,
            from: 0,
        }),
    };
    assert!(session.attach(attached).is_err());
    assert_eq!(*session.state().borrow(), State::Ended);
    // Every later call fails, too.
    assert!(near.write_u8(1).await.is_err() && near.flush().await.is_err());
    drop(far);
}

#[tokio::test(start_paused = true)]
async fn dropped_end_ends_the_session_of_the_peer_at_once() {
    let (mut near, far) = pair(1 << 16);
    let started = Instant::now();
    drop(far);
    let end = near.read_u8().await.unwrap_err();
    assert_eq!(end.kind(), ErrorKind::UnexpectedEof);
    assert_eq!(started.elapsed(), Duration::ZERO);
    assert!(near.write_all(b"x").await.is_err());
    let (mut near, mut far) = pair(1 << 16);
    near.write_all(b"bye").await.unwrap();
    near.shutdown().await.unwrap();
    let mut rest = Vec::new();
    far.read_to_end(&mut rest).await.unwrap();
    assert_eq!(rest, b"bye");
}

/// Drives an end until its session is over, and returns the number of bytes that it has received.
async fn drive_to_the_end(mut end: End, sent: Vec<u8>) -> usize {
    let (mut at, mut got, mut buffer) = (0, 0, vec![0; 8192]);
    std::future::poll_fn(|cx| {
        loop {
            // As HTTP/2 does, reads nothing while a write waits.
            if at < sent.len() {
                match Pin::new(&mut end).poll_write(cx, &sent[at..]) {
                    Poll::Ready(Ok(count)) => at += count,
                    Poll::Ready(Err(_)) => return Poll::Ready(got),
                    Poll::Pending => return Poll::Pending,
                }
            }
            let mut target = ReadBuf::new(&mut buffer);
            match Pin::new(&mut end).poll_read(cx, &mut target) {
                Poll::Ready(Ok(())) if target.filled().is_empty() => return Poll::Ready(got),
                Poll::Ready(read) => read.unwrap(),
                Poll::Pending if at == sent.len() => return Poll::Pending,
                Poll::Pending => {}
            }
            got += target.filled().len();
        }
    })
    .await
}

#[tokio::test(start_paused = true)]
async fn end_of_a_session_reaches_a_peer_in_the_middle_of_bulk() {
    const COUNT: usize = 4 << 20;
    let (mut near, far) = pair(1 << 16);
    let (near_session, far_session) = (near.session(), far.session());
    let started = Instant::now();
    // The transport is full, and most of the bytes wait in the link.
    let mut rest = vec![1; COUNT];
    std::future::poll_fn(|cx| {
        while let Poll::Ready(written) = Pin::new(&mut near).poll_write(cx, &rest) {
            rest.drain(..written.unwrap());
        }
        Poll::Ready(())
    })
    .await;
    let written = COUNT - rest.len();
    assert!(near.core.kept() > 1 << 16);
    let driving = tokio::spawn(drive_to_the_end(far, vec![2; COUNT]));
    tokio::task::yield_now().await;
    drop(near);
    assert_eq!(*near_session.state().borrow(), State::Ended);
    let (got, ()) = tokio::join!(driving, near_session.farewell());
    assert!((1..=written).contains(&got.unwrap()));
    assert_eq!(*far_session.state().borrow(), State::Ended);
    assert_eq!(started.elapsed(), Duration::ZERO);
}

#[tokio::test(start_paused = true)]
async fn peer_that_reads_nothing_delays_the_end_by_a_bounded_time() {
    let (mut near, far) = pair(100);
    let session = near.session();
    near.write_all(&[1; 4096]).await.unwrap();
    let started = Instant::now();
    drop(near);
    session.farewell().await;
    assert_eq!(started.elapsed(), FAREWELL_TIMEOUT);
    // Nothing is left to deliver.
    session.farewell().await;
    assert_eq!(started.elapsed(), FAREWELL_TIMEOUT);
    drop(far);
}

#[tokio::test(start_paused = true)]
async fn condemned_link_ends_once_it_has_no_transport() {
    const WHY: &str = "the agent has restarted";
    for is_away in [true, false] {
        let (mut near, mut far) = pair(1 << 16);
        let session = far.session();
        let started = Instant::now();
        near.write_all(b"one").await.unwrap();
        near.flush().await.unwrap();
        let mut got = [0; 3];
        far.read_exact(&mut got).await.unwrap();
        if is_away {
            far.transport = Some(duplex(1).0);
            let reading = tokio::spawn(async move { far.read_u8().await.unwrap_err() });
            session.broke().await;
            assert!(session.condemn(WHY) && !session.condemn(WHY));
            assert_eq!(reading.await.unwrap().to_string(), WHY);
        } else {
            assert!(session.condemn(WHY));
            near.write_all(b"two").await.unwrap();
            near.flush().await.unwrap();
            far.read_exact(&mut got).await.unwrap();
            far.transport = Some(duplex(1).0);
            assert_eq!(far.read_u8().await.unwrap_err().to_string(), WHY);
        }
        assert_eq!(started.elapsed(), Duration::ZERO);
        let attached = Attached {
            transport: duplex(1).0,
            base: Base::Told(Positions {
                received: 0,
                from: 0,
            }),
        };
        assert!(session.attach(attached).is_err());
    }
}

#[tokio::test]
async fn revoked_link_ends_although_it_has_a_transport() {
    let (mut near, mut far) = pair(1 << 16);
    let session = far.session();
    let reading = tokio::spawn(async move { far.read_u8().await.unwrap_err() });
    tokio::task::yield_now().await;
    let (waiting, mut peer_of_waiting) = duplex(64);
    let attached = |transport| Attached {
        transport,
        base: Base::Told(Positions {
            received: 0,
            from: 0,
        }),
    };
    assert!(session.attach(attached(waiting)).is_ok());
    session.revoke("refused");
    assert_eq!(reading.await.unwrap().to_string(), "refused");
    session.ended().await;
    assert_eq!(peer_of_waiting.read(&mut [0; 1]).await.unwrap(), 0);
    assert!(session.attach(attached(duplex(64).0)).is_err());
    // The peer's transport is closed, and the end of the session was not sent.
    let transport = near.transport.as_mut().unwrap();
    assert_eq!(transport.read(&mut [0; 1]).await.unwrap(), 0);
}

#[tokio::test(start_paused = true)]
async fn peer_that_never_acknowledges_bounds_the_memory() {
    let (near, mut far) = duplex(1 << 16);
    let mut near = ResumableIo::accepting(near, Arc::default(), GRACE);
    let reading = tokio::spawn(async move {
        let mut bytes = vec![0; 1 << 16];
        let mut total = 0;
        while let Ok(count) = far.read(&mut bytes).await
            && count > 0
        {
            total += count;
        }
        total
    });
    let bulk = vec![1; 1 << 20];
    let endless = async {
        loop {
            near.write_all(&bulk).await.unwrap();
        }
    };
    assert!(timeout(GRACE, endless).await.is_err());
    assert_eq!(near.core.kept(), REPLAY_BYTES as u64);
    drop(near);
    assert!(reading.await.unwrap() >= REPLAY_BYTES);
}

/// HTTP/2 has read until nothing was left, and then writes: it must read again.
#[tokio::test]
async fn bytes_that_were_read_during_a_write_wake_the_reader() {
    let (mut near, mut far) = pair(1 << 16);
    let filling = async { near.write_all(&vec![1; REPLAY_BYTES + 1]).await };
    let mut sink = vec![0; 1 << 16];
    let reading = async {
        // The peer's frames are taken from its transport, so that it acknowledges nothing.
        let transport = far.transport.as_mut().unwrap();
        while transport.read(&mut sink).await.unwrap() > 0 {}
    };
    tokio::select! {
        filled = filling => panic!("{filled:?}"),
        () = reading => {}
        () = tokio::time::sleep(Duration::from_millis(200)) => {}
    }
    far.write_all(b"word").await.unwrap();
    far.flush().await.unwrap();
    let woken = Arc::new(Woken::default());
    let waker = Waker::from(woken.clone());
    let mut cx = Context::from_waker(&waker);
    let written = Pin::new(&mut near).poll_write(&mut cx, &[1]);
    assert!(written.is_pending());
    assert_eq!(near.ahead, "word");
    assert!(woken.0.load(Ordering::Relaxed));
}

/// Both ends only write until they have written everything: acknowledgements are read although nothing else is. The
/// transports keep written bytes until they are flushed, as TLS may.
#[tokio::test(start_paused = true)]
async fn ends_that_do_not_read_still_receive_acknowledgements() {
    const COUNT: usize = REPLAY_BYTES + (4 << 20);
    let (near, far) = duplex(2 * COUNT);
    let (near, far) = (
        ResumableIo::opening(BufStream::new(near), Arc::default(), GRACE),
        ResumableIo::accepting(BufStream::new(far), Arc::default(), GRACE),
    );
    let write = async |mut end: ResumableIo<BufStream<DuplexStream>>| {
        end.write_all(&vec![5; COUNT]).await.unwrap();
        end.flush().await.unwrap();
        end
    };
    let both = async { tokio::join!(write(near), write(far)) };
    let (mut near, mut far) = timeout(GRACE, both).await.unwrap();
    assert!(near.ahead.len() <= REPLAY_BYTES + AHEAD_READ_BYTES);
    let mut got = vec![0; COUNT];
    let (read, _) = tokio::join!(near.read_exact(&mut got), far.flush());
    read.unwrap();
    assert!(got.iter().all(|byte| *byte == 5));
    // The memory for bytes that were read ahead is free again.
    assert_eq!(near.ahead.capacity(), 0);
}

#[tokio::test(start_paused = true)]
async fn idle_link_keeps_nothing_and_sends_nothing() {
    let (near, far) = pair(1 << 16);
    let mut near = Exchange::new(near, vec![1; 1000], 1000);
    let mut far = Exchange::new(far, vec![2; 1000], 1000);
    exchange(&mut near, &mut far).await;
    let (mut near, mut far) = (near.end, far.end);
    for _ in 0..4 {
        let idle = async { tokio::join!(near.read_u8(), far.read_u8()) };
        assert!(timeout(ACK_DELAY, idle).await.is_err());
    }
    assert_eq!((near.core.kept(), far.core.kept()), (0, 0));
    assert!(!near.is_timed && !far.is_timed);
    advance(GRACE * 100).await;
    assert!(timeout(GRACE, near.read_u8()).await.is_err());
    assert_eq!(*near.session.state().borrow(), State::Attached);
}

#[tokio::test(start_paused = true)]
async fn transport_that_carries_nothing_is_silent_after_five_seconds() {
    let (near, _far) = duplex(1 << 16);
    let mut near = ResumableIo::opening(near, Arc::default(), GRACE);
    // An idle link is not silent.
    assert!(timeout(GRACE, near.read_u8()).await.is_err());
    let mut state = near.session().state();
    let started = Instant::now();
    near.write_all(b"lost").await.unwrap();
    let silent = async {
        state
            .wait_for(|state| *state == State::Silent)
            .await
            .unwrap();
        started.elapsed()
    };
    let after = tokio::select! {
        after = silent => after,
        _ = near.read_u8() => unreachable!(),
    };
    assert!(
        (SILENCE..=SILENCE + 2 * SILENCE_CHECK).contains(&after),
        "{after:?}"
    );
}

/// HTTP/2 may write, and then read nothing until its task is woken.
/// HTTP/2 reads nothing while a control frame waits behind the repeated bytes.
#[tokio::test(start_paused = true)]
async fn end_that_repeats_bytes_over_a_slow_transport_hears_the_peer() {
    const COUNT: usize = 8 << 20;
    const ROUND_TRIP: usize = 1 << 16;
    let (near, far) = pair(COUNT * 2);
    let (agent, server) = (near.session(), far.session());
    let (mut near, mut far) = (near, far);
    near.write_all(&vec![3; COUNT]).await.unwrap();
    // The first transport breaks before the server has read a byte.
    let read = timeout(ACK_DELAY, far.read_u8());
    let (_, read) = tokio::join!(resume(&agent, &server, ROUND_TRIP), read);
    assert!(read.is_err());
    let mut silent = agent.state();
    let write = async {
        near.write_all(b"new").await.unwrap();
        near
    };
    let read = async {
        let mut buffer = [0; ROUND_TRIP];
        for _ in 0..COUNT / ROUND_TRIP {
            far.read_exact(&mut buffer).await.unwrap();
            far.write_all(b"alive").await.unwrap();
            far.flush().await.unwrap();
            tokio::time::sleep(SILENCE / 4).await;
        }
        far
    };
    let silent = async { drop(silent.wait_for(|state| *state == State::Silent).await) };
    let both = async { tokio::join!(write, read) };
    let ends = tokio::select! {
        ends = both => Some(ends),
        () = silent => None,
    };
    assert!(ends.is_some(), "the agent found the transport silent");
    let (mut near, _far) = ends.unwrap();
    let mut word = [0; 5];
    near.read_exact(&mut word).await.unwrap();
    assert_eq!(&word, b"alive");
}

#[tokio::test(start_paused = true)]
async fn silence_after_a_single_write_is_noticed() {
    let (near, _far) = duplex(1 << 16);
    let mut near = ResumableIo::opening(near, Arc::default(), GRACE);
    let session = near.session();
    let started = Instant::now();
    let mut is_written = false;
    let driving = std::future::poll_fn(|cx| {
        if is_written {
            let mut buffer = [0; 8];
            let read = Pin::new(&mut near).poll_read(cx, &mut ReadBuf::new(&mut buffer));
            assert!(read.is_pending());
        } else {
            is_written = true;
            assert!(Pin::new(&mut near).poll_write(cx, b"lost").is_ready());
            assert!(Pin::new(&mut near).poll_flush(cx).is_ready());
        }
        Poll::<()>::Pending
    });
    let mut state = session.state();
    let silent = state.wait_for(|state| *state == State::Silent);
    tokio::select! {
        silent = timeout(GRACE, silent) => drop(silent.unwrap().unwrap()),
        () = driving => unreachable!(),
    }
    assert!(started.elapsed() <= SILENCE + 2 * SILENCE_CHECK);
}

#[tokio::test(start_paused = true)]
async fn violation_of_the_protocol_ends_the_session() {
    let (near, mut far) = duplex(1 << 16);
    let mut near = ResumableIo::accepting(near, Arc::default(), GRACE);
    far.write_all(&[0x7f; 12]).await.unwrap();
    let error = near.read_u8().await.unwrap_err();
    assert_eq!(error.kind(), ErrorKind::InvalidData);
    assert_eq!(*near.session.state().borrow(), State::Ended);
}

/// Drives both ends of an HTTP/2 connection over a link.
#[tokio::test(start_paused = true)]
async fn pings_pause_during_a_break_and_streams_continue_after_it() {
    use crate::link::{Opener, Taker, TakerLimits};
    use crate::window::Pings;

    let pings = Pings {
        idle: Duration::from_secs(1),
        timeout: Duration::from_secs(5),
    };
    let (near, far) = duplex(1 << 16);
    let inbound = Arc::new(Inbound::default());
    let agent = ResumableIo::opening(near, inbound.clone(), GRACE);
    let of_server = Arc::new(Inbound::default());
    let server = ResumableIo::accepting(far, of_server.clone(), GRACE);
    let sessions = (agent.session(), server.session());
    let limits = TakerLimits {
        pings,
        ..TakerLimits::trusting()
    };
    let taking = tokio::spawn(async move {
        let mut taker = Taker::new(agent, inbound, limits).await.unwrap();
        while let Some((_, mut respond)) = taker.next().await? {
            let response = http::Response::new(());
            respond.send_response(response, true).unwrap();
        }
        Ok::<(), String>(())
    });
    let (requests, mut opener) = Opener::new(server, of_server, pings).await.unwrap();
    let opening = tokio::spawn(async move { opener.run().await });
    let ask = || {
        let (mut request, requests) = (http::Request::new(()), requests.clone());
        *request.uri_mut() = "https://agent/".parse().unwrap();
        async move {
            let mut requests = requests.ready().await.unwrap();
            let (response, _) = requests.send_request(request, true).unwrap();
            response.await.unwrap().status()
        }
    };
    assert_eq!(ask().await, 200);
    // A transport without a peer replaces the transport of each end.
    let (agent, server) = sessions;
    let told = (agent.received(), server.received());
    let breaks = |session: &Session<DuplexStream>, from, received| {
        let attached = Attached {
            transport: duplex(1).0,
            base: Base::Told(Positions { received, from }),
        };
        assert!(session.attach(attached).is_ok());
    };
    breaks(&agent, told.0, told.1);
    breaks(&server, told.1, told.0);
    let answer = tokio::spawn(ask());
    tokio::time::sleep(GRACE * 2 / 3).await;
    assert!(agent.is_away() && server.is_away() && !answer.is_finished());
    resume(&agent, &server, 1 << 16).await;
    assert_eq!(answer.await.unwrap(), 200);
    tokio::time::sleep(GRACE).await;
    assert!(!taking.is_finished() && !opening.is_finished());
}
