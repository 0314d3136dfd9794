#![allow(clippy::unwrap_used, clippy::indexing_slicing, clippy::panic)]

use culvert_host::net::options::tcp_info;
use tokio::io::{AsyncReadExt, AsyncWriteExt};
use tokio::net::TcpListener;
use tokio::task::JoinHandle;
use tokio::time::timeout;

use super::*;
use crate::config::Limits;

/// States of TCP in Linux.
const ESTABLISHED: u8 = 1;
const CLOSE_WAIT: u8 = 8;

type Relayed = JoinHandle<(Ended, [u64; 2])>;

/// Connects a client and an endpoint through a relay.
async fn relayed(idle: Duration) -> (TcpStream, TcpStream, Relayed) {
    let (client, near) = pair().await;
    let (far, endpoint) = pair().await;
    (client, endpoint, relay(near, far, idle, true))
}

fn relay(near: TcpStream, far: TcpStream, idle: Duration, is_tls: bool) -> Relayed {
    tokio::spawn(async move {
        let (sent, received) = (AtomicU64::new(0), AtomicU64::new(0));
        let limits = Limits::default();
        let relay = Relay {
            client: limits.client(&near),
            endpoint: limits.endpoint(&far),
            is_tls,
            stops_at_bulk: false,
            idle,
            sent: &sent,
            received: &received,
        };
        let running = relay.run();
        // An idle connection needs little more memory than this future.
        assert!(size_of_val(&running) <= 1024);
        let ended = running.await;
        (ended, [sent.into_inner(), received.into_inner()])
    })
}

async fn pair() -> (TcpStream, TcpStream) {
    let listener = TcpListener::bind("127.0.0.1:0").await.unwrap();
    let near = TcpStream::connect(listener.local_addr().unwrap());
    let (near, far) = tokio::join!(near, listener.accept());
    (near.unwrap(), far.unwrap().0)
}

fn pattern(count: usize) -> Vec<u8> {
    (0..count).map(|i| (i * 31 + (i >> 9)) as u8).collect()
}

#[tokio::test]
async fn bytes_of_all_sizes_pass_both_ways_and_directions_end_independently() {
    let (mut client, mut endpoint, relay) = relayed(Duration::MAX).await;
    let up = pattern(5_000_001);
    let mut read = vec![0; 3];
    client.write_all(b"one").await.unwrap();
    endpoint.read_exact(&mut read).await.unwrap();
    assert_eq!(read, b"one");
    let send = async {
        for piece in up.chunks(333_333) {
            client.write_all(piece).await.unwrap();
            tokio::task::yield_now().await;
        }
        client.shutdown().await.unwrap();
    };
    let mut got = Vec::new();
    let ((), received) = tokio::join!(send, endpoint.read_to_end(&mut got));
    received.unwrap();
    assert!(got == up, "{} of {} bytes", got.len(), up.len());
    // The other direction continues after the first has ended.
    let down = pattern(2_000_000);
    let send = async {
        endpoint.write_all(&down).await.unwrap();
        drop(endpoint);
    };
    let mut got = Vec::new();
    let ((), received) = tokio::join!(send, client.read_to_end(&mut got));
    received.unwrap();
    assert!(got == down, "{} of {} bytes", got.len(), down.len());
    let (ended, totals) = relay.await.unwrap();
    assert_eq!(ended.reason, Some(CloseReason::Finished));
    assert_eq!((ended.sent, ended.received), (5_000_004, 2_000_000));
    assert_eq!(totals, [5_000_004, 2_000_000]);
}

#[tokio::test]
async fn stalled_receiver_stops_the_sender_until_it_reads_again() {
    let (mut client, mut endpoint, relay) = relayed(Duration::MAX).await;
    let sent = pattern(64 << 20);
    let whole = sent.clone();
    let sender = tokio::spawn(async move {
        client.write_all(&sent).await.unwrap();
        client.shutdown().await.unwrap();
        client
    });
    tokio::time::sleep(Duration::from_millis(200)).await;
    assert!(!sender.is_finished(), "64 MiB went into buffers");
    let mut got = Vec::new();
    endpoint.read_to_end(&mut got).await.unwrap();
    assert!(got == whole, "{} bytes", got.len());
    drop((endpoint, sender.await.unwrap()));
    assert_eq!(relay.await.unwrap().0.reason, Some(CloseReason::Finished));
}

#[tokio::test]
async fn answer_arrives_although_the_endpoint_did_not_read_the_request() {
    let (mut client, mut endpoint, relay) = relayed(Duration::MAX).await;
    client.write_all(&[7; 100_000]).await.unwrap();
    endpoint.write_all(b"413 too large").await.unwrap();
    // The endpoint has unread input, so the system resets the connection.
    drop(endpoint);
    let mut answer = String::new();
    let _ = client.write_all(&[7; 1_000_000]).await;
    client.read_to_string(&mut answer).await.unwrap();
    assert_eq!(answer, "413 too large");
    drop(client);
    assert_eq!(
        relay.await.unwrap().0.reason,
        Some(CloseReason::EndpointLost)
    );
}

#[tokio::test(start_paused = true)]
async fn idle_connection_ends_and_active_connection_stays() {
    let idle = Duration::from_secs(3600);
    let (mut client, mut endpoint, relay) = relayed(idle).await;
    for _ in 0..8 {
        tokio::time::sleep(idle / 4).await;
        client.write_all(b"x").await.unwrap();
        assert_eq!(endpoint.read_u8().await.unwrap(), b'x');
    }
    assert!(!relay.is_finished());
    let ended = timeout(3 * idle, relay).await.unwrap();
    assert_eq!(ended.unwrap().0.reason, Some(CloseReason::IdleTimeout));
    assert_eq!(client.read(&mut [0]).await.unwrap(), 0);
}

#[tokio::test]
async fn a_reset_ends_both_directions() {
    let (client, mut endpoint, relay) = relayed(Duration::MAX).await;
    SockRef::from(&client)
        .set_linger(Some(Duration::ZERO))
        .unwrap();
    drop(client);
    assert_eq!(relay.await.unwrap().0.reason, Some(CloseReason::ClientLost));
    let error = endpoint.read(&mut [0]).await.unwrap_err();
    assert_eq!(error.kind(), io::ErrorKind::ConnectionReset);
}

#[tokio::test]
async fn reset_is_passed_on_while_bytes_move_in_both_directions() {
    for round in 0..20 {
        let (mut client, endpoint, relay) = relayed(Duration::MAX).await;
        let (mut read, mut write) = endpoint.into_split();
        // The endpoint's sender may meet the reset first. The error is reported only once, to the sender or
        // to the receiver.
        let sender = tokio::spawn(async move {
            loop {
                if let Err(error) = write.write_all(&[7; 10_000]).await {
                    break error.kind();
                }
            }
        });
        let receiver = tokio::spawn(async move {
            let mut buffer = vec![0; 100_000];
            loop {
                match read.read(&mut buffer).await {
                    Ok(0) => break None,
                    Ok(_) => {}
                    Err(error) => break Some(error.kind()),
                }
            }
        });
        client.write_all(&[1; 50_000]).await.unwrap();
        let mut some = vec![0; 30_000];
        client.read_exact(&mut some).await.unwrap();
        let socket = SockRef::from(&client);
        socket.set_linger(Some(Duration::ZERO)).unwrap();
        drop(client);
        let received = timeout(Duration::from_secs(10), receiver).await;
        let received = received.unwrap().unwrap();
        let was_told = received == Some(io::ErrorKind::ConnectionReset)
            || sender.is_finished() && sender.await.unwrap() == io::ErrorKind::ConnectionReset;
        assert!(was_told, "round {round}: {received:?}");
        assert_eq!(relay.await.unwrap().0.reason, Some(CloseReason::ClientLost));
    }
}

#[tokio::test(start_paused = true)]
async fn half_closed_connection_has_the_same_idle_limit() {
    let hour = Duration::from_secs(3600);
    let (mut client, mut endpoint, relay) = relayed(hour * 2).await;
    client.write_all(b"question").await.unwrap();
    client.shutdown().await.unwrap();
    let mut asked = String::new();
    endpoint.read_to_string(&mut asked).await.unwrap();
    assert_eq!(asked, "question");
    tokio::time::sleep(hour).await;
    assert!(!relay.is_finished());
    endpoint.write_all(b"answer").await.unwrap();
    drop(endpoint);
    let mut answer = String::new();
    client.read_to_string(&mut answer).await.unwrap();
    assert_eq!(answer, "answer");
    assert_eq!(relay.await.unwrap().0.reason, Some(CloseReason::Finished));
}

#[tokio::test(start_paused = true)]
async fn half_closed_connection_ends_at_the_idle_limit() {
    let idle = Duration::from_secs(3600);
    let (mut client, mut endpoint, relay) = relayed(idle).await;
    client.write_all(b"question").await.unwrap();
    client.shutdown().await.unwrap();
    let mut asked = String::new();
    endpoint.read_to_string(&mut asked).await.unwrap();
    assert_eq!(asked, "question");
    let ended = timeout(3 * idle, relay).await.unwrap();
    assert_eq!(ended.unwrap().0.reason, Some(CloseReason::IdleTimeout));
    assert_eq!(client.read(&mut [0]).await.unwrap(), 0);
}

#[tokio::test(start_paused = true)]
async fn half_closed_connection_ends_if_the_client_resets_it() {
    let (mut client, mut endpoint, relay) = relayed(Duration::MAX).await;
    client.shutdown().await.unwrap();
    assert_eq!(
        endpoint.read_u8().await.unwrap_err().kind(),
        io::ErrorKind::UnexpectedEof
    );
    SockRef::from(&client)
        .set_linger(Some(Duration::ZERO))
        .unwrap();
    drop(client);
    // The clock is paused: the limit counts checks, not processor time.
    let ended = timeout(Duration::from_secs(60), relay).await.unwrap();
    assert_eq!(ended.unwrap().0.reason, Some(CloseReason::ClientLost));
}

/// The client closes its socket after its last byte, and the endpoint's answer makes the client's kernel reset the
/// connection while the endpoint has not read all bytes.
#[tokio::test]
async fn whole_upload_arrives_although_its_client_refuses_the_answer() {
    let (mut client, near) = pair().await;
    let (far, mut endpoint) = pair().await;
    SockRef::from(&endpoint)
        .set_recv_buffer_size(16 * 1024)
        .unwrap();
    let [near_side, far_side] =
        [&near, &far].map(|socket| SockRef::from(socket).try_clone().unwrap());
    let relay = relay(near, far, Duration::MAX, true);
    let upload = pattern(1_000_000);
    client.write_all(&upload).await.unwrap();
    drop(client);
    let changed = async |socket: &socket2::Socket, from: u8| {
        let reached = async {
            while tcp_info(socket).unwrap().tcpi_state == from {
                tokio::time::sleep(Duration::from_millis(1)).await;
            }
        };
        timeout(Duration::from_secs(30), reached).await.unwrap();
    };
    changed(&far_side, ESTABLISHED).await;
    endpoint.write_all(b"refused").await.unwrap();
    changed(&near_side, CLOSE_WAIT).await;
    drop((near_side, far_side));
    for _ in 0..20 {
        endpoint.write_all(b"refused again").await.unwrap();
        tokio::time::sleep(Duration::from_millis(5)).await;
    }
    let mut received = Vec::new();
    endpoint.read_to_end(&mut received).await.unwrap();
    assert!(received == upload, "{} bytes", received.len());
    let ended = timeout(Duration::from_secs(30), relay).await.unwrap();
    assert_eq!(ended.unwrap().0.reason, Some(CloseReason::ClientLost));
}

#[tokio::test]
async fn bytes_after_urgent_data_arrive_without_delay() {
    let (mut client, near) = pair().await;
    let (far, mut endpoint) = pair().await;
    let _relay = relay(near, far, Duration::MAX, false);
    let mut bytes_read = [0; 6];
    client.write_all(b"before").await.unwrap();
    endpoint.read_exact(&mut bytes_read).await.unwrap();
    // A read stops at the urgent data.
    client.write_all(b"abc").await.unwrap();
    SockRef::from(&client).send_out_of_band(b"!").unwrap();
    client.write_all(b"def").await.unwrap();
    let read = timeout(
        Duration::from_secs(10),
        endpoint.read_exact(&mut bytes_read),
    );
    read.await.unwrap().unwrap();
    assert_eq!(&bytes_read, b"abcdef");
}

#[tokio::test]
async fn urgent_data_does_not_stop_bulk() {
    let sent = pattern(8 << 20);
    for before in [sent.len() / 2, sent.len() - 3, sent.len()] {
        let (mut client, near) = pair().await;
        let (far, mut endpoint) = pair().await;
        let _relay = relay(near, far, Duration::MAX, false);
        let (begin, rest) = sent.split_at(before);
        let send = async {
            client.write_all(begin).await.unwrap();
            SockRef::from(&client).send_out_of_band(b"!").unwrap();
            client.write_all(rest).await.unwrap();
            client.shutdown().await.unwrap();
        };
        let mut received = Vec::new();
        let read = timeout(Duration::from_secs(10), endpoint.read_to_end(&mut received));
        let ((), read) = tokio::join!(send, read);
        read.unwrap().unwrap();
        assert!(received == sent, "{before}: {} bytes", received.len());
    }
}

#[tokio::test]
async fn relay_stops_after_many_bytes_and_another_relay_continues() {
    let (mut client, near) = pair().await;
    let (far, mut endpoint) = pair().await;
    let (sent, received) = (AtomicU64::new(0), AtomicU64::new(0));
    let limits = Limits::default();
    let relay = |stops_at_bulk| Relay {
        client: limits.client(&near),
        endpoint: limits.endpoint(&far),
        is_tls: true,
        stops_at_bulk,
        idle: Duration::MAX,
        sent: &sent,
        received: &received,
    };
    let first = relay(true);
    let mut first = std::pin::pin!(first.run());
    let mut bytes_read = [0; 5];
    let small = async {
        client.write_all(b"small").await.unwrap();
        endpoint.read_exact(&mut bytes_read).await.unwrap();
    };
    tokio::select! {
        ended = &mut first => panic!("{ended:?}"),
        () = small => {}
    }
    let up = pattern(3_000_000);
    let (mut read, mut write) = client.split();
    let talk = async {
        let send = async {
            write.write_all(&up).await.unwrap();
            write.shutdown().await.unwrap();
        };
        let mut got = Vec::new();
        tokio::join!(send, endpoint.read_to_end(&mut got))
            .1
            .unwrap();
        assert!(got == up, "{} of {} bytes", got.len(), up.len());
        endpoint.write_all(b"answer").await.unwrap();
        drop(endpoint);
        let mut answer = String::new();
        read.read_to_string(&mut answer).await.unwrap();
        assert_eq!(answer, "answer");
    };
    let relays = async {
        let first = first.await;
        assert_eq!(first.reason, None);
        assert!(
            (BULK_BYTES..2 * BULK_BYTES).contains(&first.sent),
            "{first:?}"
        );
        let second = relay(false).run().await;
        assert_eq!(second.reason, Some(CloseReason::Finished));
        assert_eq!(first.sent + second.sent, 3_000_005);
        assert_eq!(first.received + second.received, 6);
        // The owner of the sockets closes both of them.
        SockRef::from(&near).shutdown(Shutdown::Both).unwrap();
    };
    tokio::join!(talk, relays);
    let total = [&sent, &received].map(|count| count.load(Ordering::Relaxed));
    assert_eq!(total, [3_000_005, 6]);
}

#[tokio::test]
async fn relay_with_unsent_bytes_does_not_stop() {
    let (mut client, near) = pair().await;
    let (far, mut endpoint) = pair().await;
    SockRef::from(&far).set_send_buffer_size(32 * 1024).unwrap();
    SockRef::from(&endpoint)
        .set_recv_buffer_size(32 * 1024)
        .unwrap();
    let (sent, received) = (AtomicU64::new(0), AtomicU64::new(0));
    let limits = Limits::default();
    let relay = Relay {
        client: limits.client(&near),
        endpoint: limits.endpoint(&far),
        is_tls: true,
        stops_at_bulk: true,
        idle: Duration::MAX,
        sent: &sent,
        received: &received,
    };
    let mut relay = std::pin::pin!(relay.run());
    // Writes until the buffers are full, so that the relay has unsent bytes.
    let mut filled = 0;
    let fill = async {
        while let Ok(wrote) = timeout(Duration::from_millis(300), client.write(&[1; 4000])).await {
            filled += wrote.unwrap();
            yield_now().await;
        }
    };
    tokio::select! {
        ended = &mut relay => panic!("{ended:?}"),
        () = fill => {}
    }
    assert!(sent.load(Ordering::Relaxed) < BULK_BYTES);
    let down = pattern(2_000_000);
    let answer = async {
        endpoint.write_all(&down).await.unwrap();
        let mut got = vec![0; down.len()];
        client.read_exact(&mut got).await.unwrap();
        assert!(got == down);
    };
    tokio::select! {
        ended = &mut relay => panic!("{ended:?}"),
        () = answer => {}
    }
    // The relay stops once it has no unsent bytes; the unread bytes remain in the socket.
    let mut got = vec![0; filled];
    let take = async {
        let mut got = got.chunks_mut(1 << 20);
        while sent.load(Ordering::Relaxed) < filled as u64 {
            if let Some(got) = got.next() {
                endpoint.read_exact(got).await.unwrap();
            }
            yield_now().await;
        }
    };
    let ended = tokio::select! {
        ended = relay => ended,
        () = take => panic!("the relay has not stopped"),
    };
    assert_eq!(ended.reason, None);
}
