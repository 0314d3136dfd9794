#![allow(clippy::unwrap_used)]

use culvert_stream::allowance::Allowance;
use tokio::io::{AsyncReadExt as _, AsyncWriteExt as _, DuplexStream, ReadBuf, duplex, sink};
use tokio::time::{Instant, sleep, timeout};

use super::super::window::{LONG_PATH_BYTES, UNCONFIRMED, WindowProfile};
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

/// Requests that a client cancels at once must not end its other streams.
#[tokio::test]
async fn client_may_reset_many_streams_before_they_are_accepted() {
    let (near, mut far) = duplex(1 << 16);
    let mut bytes = [&PREFACE[..], &SETTINGS].concat();
    let last = 399u32;
    for id in (1..=last).step_by(2) {
        // HEADERS with the fields ":method: POST", ":scheme: http" and ":path: /" of the static table (RFC 9113, 6.2;
        // RFC 7541, A), and RST_STREAM with CANCEL (RFC 9113, 6.4) for all streams but the last.
        let of = id.to_be_bytes();
        bytes.extend([&[0, 0, 3, 1, 4][..], &of, &[0x83, 0x86, 0x84]].concat());
        if id != last {
            bytes.extend([&[0, 0, 4, 3, 0][..], &of, &[0, 0, 0, 8]].concat());
        }
    }
    far.write_all(&bytes).await.unwrap();
    let mut taker = Taker::<_, Chunk>::for_client(near, SHORT).await.unwrap();
    let mut seen = 0;
    while seen != last {
        let (request, _respond) = taker.next().await.unwrap().unwrap();
        seen = request.body().stream_id().as_u32();
    }
}

#[tokio::test(start_paused = true)]
async fn peer_that_does_not_confirm_a_smaller_window_in_time_loses_its_connection() {
    // More than half of the allowance of all connections is used.
    let allowance = Allowance::new(4);
    let unread = allowance.hold(3);
    let (near, mut far) = duplex(1 << 16);
    far.write_all(PREFACE).await.unwrap();
    far.write_all(&SETTINGS).await.unwrap();
    let inbound = Inbound::new(WindowProfile::Fixed(1 << 20)).within(allowance.part(usize::MAX));
    let many = TAKER_HELD_BYTES / 32;
    inbound
        .held
        .store(many, std::sync::atomic::Ordering::Relaxed);
    let limits = TakerLimits {
        confirm_time: Some(LIMIT),
        ..TakerLimits::trusting()
    };
    let mut taker = Taker::new(near, Arc::new(inbound), limits).await.unwrap();
    let run = tokio::spawn(async move { taker.next().await.map(|_| ()) });
    sleep(LIMIT / 2).await;
    assert!(!run.is_finished());
    // A peer that confirms late may continue, but not without confirming the smaller window.
    far.write_all(&[0, 0, 0, 4, 1, 0, 0, 0, 0]).await.unwrap();
    sleep(LIMIT / 4 * 3).await;
    assert!(!run.is_finished());
    let why = timeout(LIMIT, run).await.unwrap().unwrap().unwrap_err();
    assert!(why.contains(UNCONFIRMED), "{why}");
    drop(unread);
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

/// Clients may leave many connections of an agent while bytes for them are on their way.
#[tokio::test]
async fn late_bytes_of_many_reset_streams_do_not_end_an_opener() {
    const STREAMS: usize = OPENER_RESET_STREAMS - 1;
    let (near, mut far) = duplex(1 << 24);
    far.write_all(&SETTINGS).await.unwrap();
    let (mut requests, mut opener) = Opener::new(near, Arc::default(), Pings::default())
        .await
        .unwrap();
    let run = tokio::spawn(async move { opener.run().await });
    for _ in 0..STREAMS {
        requests = requests.ready().await.unwrap();
        let (_response, mut send) = requests.send_request(Request::new(()), false).unwrap();
        tokio::task::yield_now().await;
        send.send_reset(h2::Reason::CANCEL);
    }
    for id in (1..).step_by(2).take(STREAMS) {
        let id = u32::to_be_bytes(id);
        // A response with status 200, and one byte of DATA.
        let response = [&[0_u8, 0, 1, 1, 4][..], &id, &[0x88]].concat();
        let data = [&[0_u8, 0, 1, 0, 0][..], &id, &[7]].concat();
        far.write_all(&[response, data].concat()).await.unwrap();
    }
    // The opener answers this PING if it has survived.
    let ping = |flags| [&[0_u8, 0, 8, 6, flags, 0, 0, 0, 0][..], b"alive???"].concat();
    far.write_all(&ping(0)).await.unwrap();
    let mut output = Vec::new();
    while !output.ends_with(&ping(1)) {
        let read = timeout(LIMIT, far.read_buf(&mut output)).await.unwrap();
        assert!(read.unwrap() > 0, "{:?}", run.await);
    }
    run.abort();
}

#[test]
fn reset_streams_are_remembered_until_a_broken_link_has_resumed() {
    for (grace, time) in [(0, 30), (20, 30), (30, 40), (60, 70), (3600, 120)] {
        let remembered = opener_reset_time(Duration::from_secs(grace));
        assert_eq!(remembered, Duration::from_secs(time));
    }
    assert_eq!(opener_reset_time(Duration::MAX), LONGEST_OPENER_RESET_TIME);
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
        let (mut requests, mut opener) = Opener::new(near, Arc::default(), SHORT).await.unwrap();
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

#[tokio::test]
async fn peer_that_leaves_without_an_alert_is_named_in_plain_words() {
    /// A stream that ends as rustls reports it.
    struct Left;

    impl AsyncRead for Left {
        fn poll_read(
            self: Pin<&mut Self>,
            _: &mut Context<'_>,
            _: &mut ReadBuf<'_>,
        ) -> Poll<io::Result<()>> {
            let text =
                "peer closed connection without sending TLS close_notify: https://docs.rs/rustls/";
            Poll::Ready(Err(io::Error::new(io::ErrorKind::UnexpectedEof, text)))
        }
    }

    let stream = tokio::io::join(Left, sink());
    let (_requests, mut opener) = Opener::new(stream, Arc::default(), SHORT).await.unwrap();
    let ended = opener.run().await.unwrap_err();
    assert_eq!(ended, "the peer closed the connection");
}
