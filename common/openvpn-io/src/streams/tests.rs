#![allow(clippy::unwrap_used, clippy::indexing_slicing)]

use std::future::{Future as _, poll_fn};
use std::net::Ipv4Addr;
use std::time::Duration;

use bytes::Bytes;
use culvert_openvpn::flows::{Closed, Refusal};
use culvert_stream::{CloseReason, Sink as _, Source as _};
use tokio::io::{AsyncReadExt as _, AsyncWriteExt as _};
use tokio::sync::mpsc;
use tokio::task::JoinHandle;
use tokio::time::{Instant, sleep_until, timeout};
use tokio_util::task::TaskTracker;

use super::super::now;
use super::super::stream::Stream;
use super::*;

const TARGET: SocketAddrV4 = SocketAddrV4::new(Ipv4Addr::new(172, 25, 1, 10), 443);

/// A dialing and an accepting side with a lossless wire between them.
struct Pair {
    peer: Peer,
    accepting: Peer,
    incoming: mpsc::UnboundedReceiver<Incoming>,
    task: JoinHandle<()>,
}

impl Pair {
    fn start() -> Self {
        Self::with(|_| {})
    }

    fn with(change: impl FnOnce(&mut Config)) -> Self {
        let mut config = Config {
            receive_buffer: 64 << 10,
            send_buffer: 64 << 10,
            connect_timeout: Duration::from_secs(5),
            ..Config::default()
        };
        change(&mut config);
        let dialing = Streams::new(config.clone(), now());
        config.accept = true;
        config.address = Ipv4Addr::new(10, 20, 0, 6);
        let accepting = Streams::new(config, now());
        let (give, incoming) = mpsc::unbounded_channel();
        Self {
            peer: dialing.peer(),
            accepting: accepting.peer(),
            incoming,
            task: tokio::spawn(join(dialing, accepting, give)),
        }
    }

    async fn open(&mut self) -> (Stream, Stream) {
        let accept = async {
            let incoming = self.incoming.recv().await.unwrap();
            assert_eq!(incoming.destination, TARGET);
            incoming.accept().unwrap()
        };
        let (near, far) = tokio::join!(self.peer.dial(TARGET), accept);
        (near.unwrap(), far)
    }
}

impl Drop for Pair {
    fn drop(&mut self) {
        self.task.abort();
    }
}

async fn join(mut near: Streams, mut far: Streams, give: mpsc::UnboundedSender<Incoming>) {
    loop {
        let now = now();
        let mut moved = false;
        for step in 0..2 {
            let (from, to) = match step {
                0 => (&mut near, &mut far),
                _ => (&mut far, &mut near),
            };
            from.work(now, &mut |incoming| drop(give.send(incoming)));
            let mut packets = Vec::new();
            from.poll_output(now, &mut |packet| {
                packets.push(packet.to_vec());
                packets.len() < 64
            });
            moved |= !packets.is_empty();
            for packet in packets {
                if to.input(&packet, now) == Input::Unknown {
                    to.flows().reject(&packet, now);
                }
            }
            from.work(now, &mut |incoming| drop(give.send(incoming)));
            to.work(now, &mut |incoming| drop(give.send(incoming)));
        }
        if moved {
            tokio::task::yield_now().await;
            continue;
        }
        let ends = [near.poll_timeout(), far.poll_timeout()];
        let next = ends.into_iter().flatten().min();
        let next = next.unwrap_or(now + Duration::from_secs(1));
        let mut timer = std::pin::pin!(sleep_until(Instant::from_std(next)));
        let (near, far) = (&mut near, &mut far);
        poll_fn(move |cx| {
            let mail = near.poll_mail(cx).is_ready() | far.poll_mail(cx).is_ready();
            match mail {
                true => Poll::Ready(()),
                false => timer.as_mut().poll(cx),
            }
        })
        .await;
    }
}

fn pattern(length: usize) -> Vec<u8> {
    (0..length)
        .map(|i| (i.wrapping_mul(31) >> 3) as u8)
        .collect()
}

#[tokio::test(start_paused = true)]
async fn directions_of_a_flow_end_independently() {
    let mut pair = Pair::start();
    let (mut near, mut far) = pair.open().await;
    assert_eq!((pair.peer.flows(), pair.accepting.flows()), (1, 1));
    let (up, down) = (pattern(700_001), pattern(300_007));
    let sent = async {
        near.writer.write_all(&up).await.unwrap();
        near.writer.shutdown().await.unwrap();
        let mut all = Vec::new();
        near.reader.read_to_end(&mut all).await.unwrap();
        assert!(all == down);
    };
    let received = async {
        let mut all = Vec::new();
        far.reader.read_to_end(&mut all).await.unwrap();
        assert!(all == up);
        far.writer.write_all(&down).await.unwrap();
        far.writer.shutdown().await.unwrap();
    };
    tokio::join!(sent, received);
    tokio::time::sleep(Duration::from_secs(1)).await;
    assert_eq!((pair.peer.flows(), pair.accepting.flows()), (0, 0));
    // An orderly end is not reported as broken.
    let broken = poll_fn(|cx| near.reader.poll_broken(cx));
    assert!(timeout(Duration::from_secs(1), broken).await.is_err());
}

#[tokio::test(start_paused = true)]
async fn stalled_reader_stalls_only_its_own_flow() {
    let mut pair = Pair::start();
    let (mut stuck, _unread) = pair.open().await;
    let flood = async {
        let chunk = vec![7; 16 << 10];
        let mut sent = 0;
        while timeout(Duration::from_secs(1), stuck.writer.write_all(&chunk))
            .await
            .is_ok()
        {
            sent += chunk.len();
        }
        sent
    };
    let sent = flood.await;
    // The limit is the size of two pipes and two flow buffers.
    assert!((128 << 10..600 << 10).contains(&sent), "{sent}");
    let (mut near, mut far) = pair.open().await;
    let bulk = pattern(2_000_000);
    let write = async { near.writer.write_all(&bulk).await.unwrap() };
    let mut all = vec![0; bulk.len()];
    let read = async { far.reader.read_exact(&mut all).await.unwrap() };
    timeout(Duration::from_secs(5), async { tokio::join!(write, read) })
        .await
        .unwrap();
    assert!(all == bulk);
}

#[tokio::test(start_paused = true)]
async fn dial_reports_refusal_timeout_and_invalid_port() {
    let mut pair = Pair::start();
    let peer = pair.peer.clone();
    let refuse = async {
        let incoming = pair.incoming.recv().await.unwrap();
        incoming.refuse(Refusal::Reset);
        drop(pair.incoming.recv().await.unwrap());
        // Neither accepted nor refused.
        pair.incoming.recv().await.unwrap()
    };
    let dials = async {
        let refused = Broken::Flow(Closed::Refused);
        assert_eq!(peer.dial(TARGET).await.err(), Some(refused));
        assert_eq!(peer.dial(TARGET).await.err(), Some(refused));
        let silent = peer.dial(TARGET).await.err();
        let bound = Duration::from_secs(5);
        assert_eq!(silent, Some(Broken::Flow(Closed::ConnectTimedOut(bound))));
        let port = SocketAddrV4::new(*TARGET.ip(), 0);
        assert!(matches!(peer.dial(port).await.err(), Some(Broken::Dial(_))));
    };
    tokio::join!(refuse, dials);
    // A cancelled dial leaves no flow behind.
    assert!(
        timeout(Duration::from_millis(10), peer.dial(TARGET))
            .await
            .is_err()
    );
    tokio::time::sleep(Duration::from_millis(100)).await;
    assert_eq!(peer.flows(), 0);
}

#[tokio::test(start_paused = true)]
async fn dropped_and_reset_handles_reset_the_flow() {
    let mut pair = Pair::start();
    let (near, mut far) = pair.open().await;
    drop(near);
    let mut all = Vec::new();
    let reset = far.reader.read_to_end(&mut all).await.unwrap_err();
    assert_eq!(reset.kind(), std::io::ErrorKind::ConnectionReset);
    assert!(far.writer.write_all(b"x").await.is_err());
    let (near, mut far) = pair.open().await;
    near.writer.reset();
    assert!(far.reader.read_u8().await.is_err());
    assert_eq!(pair.peer.flows(), 0);
}

#[tokio::test(start_paused = true)]
async fn dropped_writer_resets_the_flow_after_its_queued_bytes() {
    let mut pair = Pair::start();
    let (mut near, mut far) = pair.open().await;
    let bulk = pattern(100_000);
    near.writer.write_all(&bulk).await.unwrap();
    drop(near);
    let mut all = Vec::new();
    let reset = far.reader.read_to_end(&mut all).await.unwrap_err();
    assert_eq!(reset.kind(), std::io::ErrorKind::ConnectionReset);
    assert!(all == bulk, "{} bytes", all.len());
    assert_eq!(pair.peer.flows(), 0);
    // Bytes that the other side sends meanwhile, beyond the limit for discarded bytes, change nothing.
    let (mut near, far) = pair.open().await;
    let bulk = pattern(250_000);
    near.writer.write_all(&bulk).await.unwrap();
    drop(near);
    let Stream {
        mut reader,
        mut writer,
    } = far;
    let chunk = vec![0; 64 << 10];
    let upload = async { while writer.write_all(&chunk).await.is_ok() {} };
    let answer = async {
        tokio::time::sleep(CLOSE_STALL / 2).await;
        let mut all = Vec::new();
        let reset = reader.read_to_end(&mut all).await.unwrap_err();
        (reset.kind(), all)
    };
    let ((), (kind, all)) = tokio::join!(upload, answer);
    assert_eq!(kind, std::io::ErrorKind::ConnectionReset);
    assert!(all == bulk, "{} bytes", all.len());
    assert_eq!(pair.peer.flows(), 0);
    // A side that reads nothing keeps the flow only for a while.
    let (mut near, _far) = pair.open().await;
    near.writer.write_all(&bulk).await.unwrap();
    drop(near);
    tokio::time::sleep(CLOSE_STALL / 2).await;
    assert_eq!(pair.peer.flows(), 1);
    tokio::time::sleep(CLOSE_STALL * 2).await;
    assert_eq!(pair.peer.flows(), 0);
}

#[tokio::test(start_paused = true)]
async fn reset_after_the_end_of_a_direction_follows_this_end() {
    let mut pair = Pair::start();
    let (mut near, mut far) = pair.open().await;
    let bulk = pattern(100_000);
    near.writer.write_all(&bulk).await.unwrap();
    near.writer.finish().unwrap();
    near.writer.reset();
    let mut all = Vec::new();
    far.reader.read_to_end(&mut all).await.unwrap();
    assert!(all == bulk);
    let broken = poll_fn(|cx| far.reader.poll_broken(cx)).await;
    assert_eq!(broken, Broken::Flow(Closed::Reset));
}

#[tokio::test(start_paused = true)]
async fn queued_bytes_arrive_after_the_handles_are_dropped() {
    let mut pair = Pair::start();
    let (mut near, mut far) = pair.open().await;
    let bulk = pattern(100_000);
    near.writer.write_all(&bulk).await.unwrap();
    near.writer.finish().unwrap();
    drop(near);
    let mut all = Vec::new();
    far.reader.read_to_end(&mut all).await.unwrap();
    assert!(all == bulk);
    far.writer.shutdown().await.unwrap();
    tokio::time::sleep(Duration::from_secs(1)).await;
    assert_eq!(pair.peer.flows(), 0);
    // A peer that keeps sending to a dropped reader is reset.
    let (mut near, mut far) = pair.open().await;
    near.writer.finish().unwrap();
    drop(near);
    let chunk = vec![0; 64 << 10];
    let told = async { while far.writer.write_all(&chunk).await.is_ok() {} };
    timeout(Duration::from_secs(20), told).await.unwrap();
    // A peer that never closes its direction is reset after the close timeout.
    let (mut near, mut far) = pair.open().await;
    near.writer.finish().unwrap();
    drop(near);
    let broken = poll_fn(|cx| far.reader.poll_broken(cx));
    timeout(CLOSE_STALL + Duration::from_secs(5), broken)
        .await
        .unwrap();
    assert_eq!(pair.peer.flows(), 0);
}

#[tokio::test(start_paused = true)]
async fn left_flow_is_not_reset_while_its_bytes_move() {
    let mut pair = Pair::start();
    let (mut near, mut far) = pair.open().await;
    let bulk = pattern(600_000);
    let slow = async {
        let mut all = Vec::new();
        let mut chunk = vec![0; 16 << 10];
        loop {
            match far.reader.read(&mut chunk).await? {
                0 => return std::io::Result::Ok(all),
                read => all.extend_from_slice(&chunk[..read]),
            }
            tokio::time::sleep(CLOSE_STALL / 10).await;
        }
    };
    let write = async {
        near.writer.write_all(&bulk).await.unwrap();
        near.writer.finish().unwrap();
        drop(near);
        Instant::now()
    };
    let (left, all) = tokio::join!(write, slow);
    assert!(all.unwrap() == bulk);
    assert!(left.elapsed() > CLOSE_STALL);
    far.writer.shutdown().await.unwrap();
    tokio::time::sleep(Duration::from_secs(1)).await;
    assert_eq!(pair.peer.flows(), 0);
}

#[tokio::test(start_paused = true)]
async fn flow_is_counted_until_the_other_side_has_all_bytes() {
    let mut pair = Pair::start();
    let tasks = TaskTracker::new();
    let bulk = pattern(250_000);
    for is_orderly in [true, false] {
        let (near, mut far) = pair.open().await;
        let (source, mut sink) = near.halves(|_| CloseReason::EndpointLost);
        sink.send(Bytes::from(bulk.clone())).await.unwrap();
        match is_orderly {
            true => sink.end(&tasks),
            false => sink.leave(&tasks),
        }
        drop(source);
        tokio::time::sleep(CLOSE_STALL / 2).await;
        assert_eq!(tasks.len(), 1);
        let mut all = Vec::new();
        let ended = far.reader.read_to_end(&mut all).await;
        assert_eq!(ended.is_ok(), is_orderly);
        assert!(all == bulk);
        tokio::time::sleep(Duration::from_secs(1)).await;
        assert!(tasks.is_empty());
        // The other direction of an orderly flow is still open.
        assert_eq!(pair.peer.flows(), usize::from(is_orderly));
        drop(far);
        tokio::time::sleep(Duration::from_secs(1)).await;
        assert_eq!(pair.peer.flows(), 0);
    }
    // A flow that has ended is not counted.
    let (near, far) = pair.open().await;
    let (mut source, sink) = near.halves(|_| CloseReason::EndpointLost);
    drop(far);
    source.aborted().await;
    sink.end(&tasks);
    assert!(tasks.is_empty());
    // The end of the tunnel ends the wait.
    let (near, _far) = pair.open().await;
    let (_source, mut sink) = near.halves(|_| CloseReason::EndpointLost);
    sink.send(Bytes::from(bulk)).await.unwrap();
    sink.end(&tasks);
    tokio::time::sleep(Duration::from_secs(1)).await;
    assert_eq!(tasks.len(), 1);
    pair.task.abort();
    tokio::time::sleep(Duration::from_secs(1)).await;
    assert!(tasks.is_empty());
}

#[tokio::test(start_paused = true)]
async fn all_handles_report_the_end_of_the_tunnel() {
    let mut pair = Pair::start();
    let (mut near, _far) = pair.open().await;
    let peer = pair.peer.clone();
    let waiting = tokio::spawn({
        let peer = peer.clone();
        async move { peer.dial(TARGET).await.err() }
    });
    let _pending = pair.incoming.recv().await.unwrap();
    assert!(!peer.is_gone());
    pair.task.abort();
    assert_eq!(waiting.await.unwrap(), Some(Broken::TunnelLost));
    let lost = poll_fn(|cx| near.reader.poll_recv(cx)).await;
    assert_eq!(lost, Err(Broken::TunnelLost));
    assert_eq!(peer.dial(TARGET).await.err(), Some(Broken::TunnelLost));
    assert!(peer.is_gone() && !peer.forward(&[0; 20]));
}

#[tokio::test]
async fn forwarded_packets_wait_for_room_and_are_bounded() {
    let mut streams = Streams::new(Config::default(), now());
    let peer = streams.peer();
    let packet = [1; 1000];
    let queued = (0..10_000).filter(|_| peer.forward(&packet)).count();
    assert!((100..1000).contains(&queued), "{queued}");
    streams.work(now(), &mut drop);
    // Packets in the owner's queue still count towards the limit.
    assert!(!peer.forward(&packet));
    let mut sent = 0;
    streams.poll_output(now(), &mut |bytes| {
        assert_eq!(bytes, packet);
        sent += 1;
        sent < 10
    });
    assert!(peer.forward(&packet));
    streams.poll_output(now(), &mut |_| {
        sent += 1;
        true
    });
    assert!(sent >= queued);
    peer.close();
    streams.work(now(), &mut drop);
    assert!(streams.take_close() && !streams.take_close());
}

#[tokio::test]
async fn forwarded_packets_and_flows_take_turns_at_a_full_link() {
    let connect_timeout = Duration::from_secs(5);
    let config = Config {
        connect_timeout,
        ..Config::default()
    };
    let mut streams = Streams::new(config, now());
    let peer = streams.peer();
    let dial = tokio::spawn({
        let peer = peer.clone();
        async move { peer.dial(TARGET).await }
    });
    tokio::task::yield_now().await;
    let begin = now();
    // The link has room for one packet at a time, and more packets of other peers wait.
    let mut of_flows = 0;
    for _ in 0..4 {
        assert!(peer.forward(&[0xff; 1000]) && peer.forward(&[0xff; 1000]));
        streams.work(begin, &mut drop);
        let mut has_room = true;
        streams.poll_output(begin, &mut |packet| {
            let taken = std::mem::take(&mut has_room);
            of_flows += usize::from(taken && packet[0] != 0xff);
            taken
        });
    }
    assert_eq!(of_flows, 1, "the SYN of the dial");
    // The timers run although the link is full.
    let late = begin + connect_timeout + Duration::from_secs(1);
    streams.poll_output(late, &mut |_| false);
    streams.work(late, &mut drop);
    assert!(streams.poll_timeout().is_none_or(|at| at > late));
    let ended = timeout(Duration::from_secs(10), dial).await.unwrap();
    let timed_out = Broken::Flow(Closed::ConnectTimedOut(connect_timeout));
    assert_eq!(ended.unwrap().err(), Some(timed_out));
}
