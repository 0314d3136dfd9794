//! Malformed and hostile packets out of the tunnel are counted and dropped, and never cause a panic.

use std::net::{Ipv4Addr, SocketAddrV4};
use std::time::{Duration, Instant};

use proptest::prelude::*;
use rand::rngs::StdRng;
use rand::{Rng, SeedableRng};

use super::net::{Answer, Net, POD, SERVER};
use crate::flows::{Closed, Config, FlowId, Flows, Input};
use crate::ip::build::{self, Numbers};
use crate::ip::{Packet, Segment, Sum, flags};

/// Builds a TCP packet with correct checksums.
fn tcp(
    from: SocketAddrV4,
    to: SocketAddrV4,
    (sequence, acknowledgement): (u32, u32),
    flags: u8,
    window: u16,
    options: &[u8],
    data: &[u8],
) -> Vec<u8> {
    let numbers = Numbers(sequence, acknowledgement, window);
    build::tcp(from, to, numbers, flags, options, data)
}

#[test]
fn malformed_packets_are_counted_and_dropped() {
    let mut net = Net::new();
    let now = net.now;
    let from = SocketAddrV4::new(SERVER, 40000);
    let whole = tcp(from, POD, (1, 0), flags::SYN, 1000, &[], &[]);
    let flows = &mut net.b.flows;

    for length in 0..whole.len() {
        assert_eq!(flows.input(&whole[..length], now), Input::Dropped);
    }
    assert_eq!(flows.stats().malformed, whole.len() as u64);

    for byte in 20..whole.len() {
        let mut wrong = whole.clone();
        wrong[byte] ^= 0x10;
        assert_eq!(flows.input(&wrong, now), Input::Dropped, "{byte}");
    }
    assert!(flows.stats().bad_checksum >= 19);

    let mut fragment = whole.clone();
    fragment[6] = 0x20;
    fragment[10..12].fill(0);
    let sum = Sum::of(&fragment[..20]).checksum().to_be_bytes();
    fragment[10..12].copy_from_slice(&sum);
    assert_eq!(flows.input(&fragment, now), Input::Dropped);
    assert_eq!(flows.stats().fragments, 1);

    let before = flows.stats().malformed;
    let senseless = [
        tcp(from, POD, (1, 0), flags::SYN | flags::FIN, 1, &[], &[]),
        tcp(from, POD, (1, 0), flags::SYN | flags::RST, 1, &[], &[]),
        tcp(from, from, (1, 0), flags::SYN, 1, &[], &[]),
        tcp(
            SocketAddrV4::new(SERVER, 0),
            POD,
            (1, 0),
            flags::SYN,
            1,
            &[],
            &[],
        ),
        tcp(
            from,
            POD,
            (1, 0),
            flags::SYN,
            1,
            &[2, 4, 5, 0, 3, 0, 0, 0],
            &[],
        ),
        tcp(from, POD, (1, 0), flags::SYN, 1, &[1, 1, 3, 30], &[]),
        tcp(
            SocketAddrV4::new(Ipv4Addr::new(224, 0, 0, 1), 9),
            POD,
            (1, 0),
            flags::SYN,
            1,
            &[],
            &[],
        ),
        tcp(
            SocketAddrV4::new(Ipv4Addr::UNSPECIFIED, 9),
            POD,
            (1, 0),
            flags::SYN,
            1,
            &[],
            &[],
        ),
    ];
    for packet in &senseless {
        assert_eq!(flows.input(packet, now), Input::Dropped);
    }
    assert_eq!(flows.stats().malformed - before, senseless.len() as u64);
    assert!(flows.is_empty());
}

#[test]
fn a_flood_of_syns_is_bounded() {
    let mut net = Net::new();
    net.b.answer = Answer::Silent;
    let now = net.now;
    for i in 0..100_000_u32 {
        let from = SocketAddrV4::new(
            Ipv4Addr::from_bits(0x0a14_0000 + i / 60000),
            1 + (i % 60000) as u16,
        );
        let syn = tcp(from, POD, (i, 0), flags::SYN, 1000, &[2, 4, 5, 0x50], &[]);
        assert_eq!(net.b.flows.input(&syn, now), Input::Accepted);
    }
    assert_eq!(net.b.flows.len(), 1024);
    assert_eq!(net.b.flows.stats().syns_dropped, 100_000 - 1024);
    assert_eq!(net.b.flows.stats().buffers, 0);
    // After the timeout of the waiting SYNs, a new flow is accepted.
    net.run(Duration::from_secs(61), |_| false);
    assert!(net.b.flows.is_empty());
    net.b.answer = Answer::Accept;
    let id = net.dial(POD, 10);
    net.settle(Duration::from_secs(10));
    assert_eq!(net.a.streams[&id].closed, Some(Closed::Finished));
}

#[test]
fn segments_outside_of_the_window_do_nothing() {
    let mut net = Net::new();
    net.b.echo = true;
    let id = net.dial(POD, 0);
    net.a.streams.get_mut(&id).unwrap().keep_open = true;
    net.run(Duration::from_secs(1), |net| {
        net.b.streams.values().any(|s| s.connected)
    });
    let from = SocketAddrV4::new(SERVER, net.port_of(id));
    let (next, expected) = {
        let track = net.a.flows.slots.flow(id.index).unwrap().track;
        (track.sent(), track.expected())
    };
    let now = net.now;
    for (offset, flag) in [
        (1 << 24, flags::ACK),
        (1 << 24, flags::RST),
        (u32::MAX - 5000, flags::ACK),
        (u32::MAX - 5000, flags::RST),
        (1 << 31, flags::ACK | flags::FIN),
    ] {
        let packet = tcp(
            from,
            POD,
            (next.wrapping_add(offset), expected),
            flag,
            1000,
            &[],
            b"data",
        );
        assert_eq!(net.b.flows.input(&packet, now), Input::Accepted);
    }
    assert_eq!(net.b.flows.stats().out_of_window, 5);
    net.run(Duration::from_secs(5), |_| false);
    assert_eq!(net.accepted().closed, None);
    assert_eq!(net.accepted().received, 0);
    // The flow still works.
    net.a.streams.get_mut(&id).unwrap().to_send = 1000;
    let now = net.now;
    net.a.pump(id, now);
    net.run(Duration::from_secs(1), |net| {
        net.accepted().received == 1000
    });
    assert_eq!(net.accepted().received, 1000);
}

#[test]
fn acknowledgements_behind_a_full_buffer_count() {
    let accepted = |distance: u32, flag: u8, beyond: u32| {
        let mut net = Net::new();
        net.b.to_send = 4 << 20;
        let id = net.dial(POD, 0);
        let stream = net.a.streams.get_mut(&id).unwrap();
        (stream.keep_open, stream.paused) = (true, true);
        net.run(Duration::from_secs(5), |_| false);
        net.ba.stalled = true;
        let now = net.now;
        assert_eq!(net.a.flows.send(id, b"data").unwrap(), 4);
        net.turn();
        assert_eq!(net.a.flows.unacknowledged(id), 4);
        let to = SocketAddrV4::new(SERVER, net.port_of(id));
        let track = net.a.flows.slots.flow(id.index).unwrap().track;
        let numbers = (
            track.expected().wrapping_add(distance),
            track.sent().wrapping_add(beyond),
        );
        let packet = tcp(POD, to, numbers, flag, 1000, &[], b"");
        assert_eq!(net.a.flows.input(&packet, now), Input::Accepted);
        net.a.flows.unacknowledged(id) == 0
    };
    assert!(accepted(0, flags::ACK, 0));
    // The other end may have sent a FIN or a window probe that was lost.
    assert!(accepted(1, flags::ACK, 0));
    assert!(!accepted(1 << 20, flags::ACK, 0));
    assert!(!accepted(1, flags::ACK, 1));
    assert!(!accepted(1, 0, 0));
    assert!(!accepted(1, flags::ACK | flags::FIN, 0));
}

/// Returns a network whose first flow has sent `bytes`, which do not arrive, and closes if `ends` is set. The remote end then
/// acknowledges all but the last sequence number, once with each of the `windows`.
fn last_one_missing(bytes: &[u8], ends: bool, windows: &[u16]) -> (Net, FlowId) {
    let mut net = Net::new();
    net.b.echo = true;
    let id = net.dial(POD, 0);
    net.a.streams.get_mut(&id).unwrap().keep_open = true;
    net.run(Duration::from_secs(1), |net| {
        net.a.streams[&id].connected && net.b.streams.values().any(|stream| stream.connected)
    });
    net.ab.stalled = true;
    assert_eq!(net.a.flows.send(id, bytes).unwrap(), bytes.len());
    if ends {
        net.a.flows.close(id);
    }
    net.turn();
    let track = net.a.flows.slots.flow(id.index).unwrap().track;
    let numbers = (track.expected(), track.sent().wrapping_sub(1));
    let to = SocketAddrV4::new(SERVER, net.port_of(id));
    for window in windows {
        let packet = tcp(POD, to, numbers, flags::ACK, *window, &[], b"");
        assert_eq!(net.a.flows.input(&packet, net.now), Input::Accepted);
        net.turn();
    }
    (net, id)
}

#[test]
fn bytes_behind_a_window_that_shrank_are_sent_again() {
    let (mut net, id) = last_one_missing(&[7; 100], false, &[0, 1000]);
    assert_eq!(net.a.flows.unacknowledged(id), 1);
    let before = net.a.flows.stats().retransmitted;
    net.run(Duration::from_secs(3), |_| false);
    assert!(net.a.flows.stats().retransmitted > before);
}

#[test]
fn a_missing_fin_is_sent_again_after_repeated_acknowledgements() {
    let (mut net, id) = last_one_missing(b"ten bytes.", true, &[1000; 6]);
    assert_eq!(net.a.flows.unacknowledged(id), 0);
    let before = net.a.flows.stats().retransmitted;
    net.run(Duration::from_secs(3), |_| false);
    assert!(net.a.flows.stats().retransmitted > before);
}

/// Almost valid segments in all states, from a remote end that sees the flow's packets.
#[test]
fn hostile_segments_never_panic() {
    // The later seeds once made smoltcp store more than its buffer holds: after a repeated SYN, a keepalive and a
    // window probe.
    for seed in [7, 1030, 1088, 2066] {
        send_hostile_segments(seed);
    }
}

fn send_hostile_segments(seed: u64) {
    let mut random = StdRng::seed_from_u64(seed);
    let start = Instant::now();
    for round in 0..3000 {
        let mut now = start;
        let pace = (round % 3 == 0).then(Default::default);
        let accept = round % 2 == 0;
        let config = Config {
            accept,
            pace,
            receive_buffer: [1 << 16, 1 << 14, 1 << 20][round % 3],
            ..Config::default()
        };
        let mut flows = Flows::new(config, Box::new(StdRng::seed_from_u64(round as u64)), now);
        let mut remote = SocketAddrV4::new(SERVER, 4000);
        let mut local = POD;
        let mut theirs = random.random::<u32>();
        let mut ours = 0_u32;
        let mut id = None;
        if !accept {
            remote = POD;
            id = flows.dial(POD, now).ok();
        }
        for _ in 0..60 {
            while let Some(event) = flows.poll_event() {
                if let crate::flows::Event::Incoming { id: incoming, .. } = event {
                    if random.random_bool(0.9) {
                        flows.accept(incoming, now).unwrap();
                        id = Some(incoming);
                    } else {
                        flows.refuse(incoming, crate::flows::Refusal::Reset);
                    }
                }
            }
            flows.poll_output(now, &mut |packet| {
                let packet = Packet::parse(packet).unwrap();
                if let Ok(segment) = Segment::parse(&packet) {
                    local = segment.source();
                    ours = segment.sequence().wrapping_add(segment.length());
                    if segment.has(flags::ACK) {
                        theirs = segment.acknowledgement();
                    }
                }
                random.random_bool(0.95)
            });
            if let Some(id) = id {
                match random.random_range(0..20) {
                    0..6 => drop(flows.send(id, &vec![7; random.random_range(1..70_000)])),
                    6..12 => drop(flows.recv(id, |bytes| bytes.len() / 2)),
                    12 => flows.close(id),
                    13 => flows.abort(id),
                    _ => {}
                }
            }
            let flag = match random.random_range(0..12) {
                0 => flags::SYN,
                1 => flags::SYN | flags::ACK,
                2 => flags::FIN | flags::ACK,
                3 => flags::RST,
                4 => flags::RST | flags::ACK,
                5 => flags::FIN,
                6 => 0,
                _ => flags::ACK,
            };
            let near = |random: &mut StdRng, at: u32| match random.random_range(0..10) {
                0..6 => at,
                6 => at.wrapping_add(random.random_range(0..3000)),
                7 => at.wrapping_sub(random.random_range(0..3000)),
                8 => at.wrapping_add(1 << random.random_range(0..32)),
                _ => random.random(),
            };
            let sequence = near(&mut random, theirs);
            let acknowledgement = near(&mut random, ours);
            let window = [0, 1, 100, 65535, 3000][random.random_range(0..5)];
            let options: &[u8] = match random.random_range(0..6) {
                0 => &[2, 4, 0, 0],
                1 => &[2, 4, 0, 1, 3, 3, 14, 0],
                2 => &[3, 3, 255, 1],
                3 => &[8, 10, 0, 0, 0, 1, 0, 0, 0, 2, 4, 2],
                4 => &[2, 4, 255, 255, 3, 3, 7, 0],
                _ => &[],
            };
            let data = vec![1; [0, 0, 1, 100, 1400][random.random_range(0..5)]];
            let packet = tcp(
                remote,
                local,
                (sequence, acknowledgement),
                flag,
                window,
                options,
                &data,
            );
            if flows.input(&packet, now) == Input::Unknown {
                flows.reject(&packet, now);
            }
            now += Duration::from_millis([0, 0, 1, 20, 1500, 70_000][random.random_range(0..6)]);
            let _ = flows.poll_timeout();
        }
    }
}

proptest! {
    #![proptest_config(ProptestConfig::with_cases(2000))]

    #[test]
    fn any_bytes_never_panic(packets in proptest::collection::vec(
        proptest::collection::vec(any::<u8>(), 0..120), 1..20))
    {
        let now = Instant::now();
        let config = Config { accept: true, ..Config::default() };
        let mut flows = Flows::new(config, Box::new(StdRng::seed_from_u64(1)), now);
        for mut packet in packets {
            flows.input(&packet, now);
            // The same bytes with a valid IP header.
            if packet.len() >= 20 {
                let length = packet.len() as u16;
                packet[0] = 0x40 | (packet[0] & 15).clamp(5, 8);
                packet[2..4].copy_from_slice(&length.to_be_bytes());
                packet[6..8].fill(0);
                packet[9] = [1, 6, 17, 50][usize::from(packet[9] & 3)];
                packet[10..12].fill(0);
                let header_len = usize::from(packet[0] & 15) * 4;
                if header_len <= packet.len() {
                    let sum = Sum::of(&packet[..header_len]).checksum().to_be_bytes();
                    packet[10..12].copy_from_slice(&sum);
                }
                if flows.input(&packet, now) == Input::Unknown && !flows.echo(&packet, now) {
                    flows.reject(&packet, now);
                }
            }
            flows.poll_output(now, &mut |_| true);
            while flows.poll_event().is_some() {}
        }
    }
}
