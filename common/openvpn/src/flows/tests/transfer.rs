//! Bytes arrive complete and in order, with any packet loss, delay or reordering in the tunnel.

use std::net::{Ipv4Addr, SocketAddrV4};
use std::time::Duration;

use super::net::{Answer, Net, POD, Stream};
use crate::flows::{Closed, Config, Pace};
use crate::options::Transport;
use crate::session::LARGE_TUN_MTU;

pub(super) const MINUTE: Duration = Duration::from_secs(60);

pub(super) fn both_ways(net: &mut Net, there: usize, back: usize, limit: Duration) {
    net.b.to_send = back;
    let id = net.dial(POD, there);
    net.settle(limit);
    let dialed = &net.a.streams[&id];
    let accepted = net.accepted();
    assert_eq!(accepted.received, there);
    assert_eq!(dialed.received, back);
    assert!(dialed.end && accepted.end);
    assert_eq!(dialed.closed, Some(Closed::Finished));
    assert_eq!(accepted.closed, Some(Closed::Finished));
    assert_eq!(net.a.flows.stats().buffers, 0);
    assert_eq!(net.b.flows.stats().buffers, 0);
}

#[test]
fn a_large_transfer_both_ways() {
    let mut net = Net::new();
    both_ways(&mut net, 20 << 20, 15 << 20, MINUTE);
    assert_eq!(net.a.flows.stats().retransmitted, 0);
    assert_eq!(net.b.flows.stats().retransmitted, 0);
    // The MSS limit applies in both directions.
    assert!(net.a.flows.stats().sent > (20 << 20) / 1360);
}

#[test]
fn large_packets_transfer_all_data() {
    for budget in [Config::default().buffer_budget, 0] {
        let large = || Config {
            buffer_budget: budget,
            ..Config::for_tunnel(Transport::Tcp, LARGE_TUN_MTU)
        };
        let mut net = Net::with(large(), large(), 5);
        both_ways(&mut net, 5 << 20, 3 << 20, MINUTE);
        let stats = net.a.flows.stats();
        assert_eq!(stats.retransmitted, 0);
        assert!(stats.sent < (5 << 20) / 4000, "{stats:?}");
        // The MSS of the other side applies.
        let mut net = Net::with(large(), Config::default(), 5);
        both_ways(&mut net, 5 << 20, 0, MINUTE);
        assert!(net.a.flows.stats().sent > (5 << 20) / 1360);
    }
}

/// Returns the peak of the bytes in flight, there and back, of eight transfers; `a` gets large budgets.
fn peaks(a: Config, b: Config) -> (usize, usize) {
    let greedy = Config {
        receive_budget: 64 << 20,
        send_budget: 64 << 20,
        ..a
    };
    let mut net = Net::with(greedy, b, 6);
    for wire in [&mut net.ab, &mut net.ba] {
        wire.delay = Duration::from_millis(10);
        wire.room = usize::MAX;
    }
    net.b.to_send = 4 << 20;
    for _ in 0..8 {
        net.dial(POD, 4 << 20);
    }
    net.settle(MINUTE);
    assert_eq!(net.b.streams.len(), 8);
    let mut streams = net.b.streams.values();
    assert!(streams.all(|stream| stream.received == 4 << 20));
    (net.ab.peak, net.ba.peak)
}

#[test]
fn only_flows_with_small_packets_share_the_budgets() {
    let Config {
        receive_budget,
        send_budget,
        ..
    } = Config::default();
    // The budget, plus headers and the shares of resting flows.
    let most = |budget: usize| budget + budget / 4;
    let large = || Config::for_tunnel(Transport::Tcp, LARGE_TUN_MTU);
    let loud = || Config {
        tun_mtu: u16::MAX,
        mss: u16::MAX - 40,
        ..Config::default()
    };
    // Large packets at one end only: the flows still share the budgets.
    for (a, b) in [(Config::default(), large()), (loud(), Config::default())] {
        let (there, back) = peaks(a, b);
        assert!(
            there < most(receive_budget) && back < most(send_budget),
            "{there} {back}"
        );
    }
    let (there, back) = peaks(large(), large());
    assert!(
        there > 2 * receive_budget && back > 2 * send_budget,
        "{there} {back}"
    );
}

#[test]
fn mss_is_the_smaller_of_both_ends() {
    let large = || Config::for_tunnel(Transport::Tcp, LARGE_TUN_MTU);
    for (a, b, expected) in [
        (Config::default(), large(), 1360),
        (large(), Config::default(), 1360),
        (large(), large(), 16_344),
    ] {
        let mut net = Net::with(a, b, 7);
        net.b.echo = true;
        let id = net.dial(POD, 1);
        net.run(MINUTE, |net| net.a.streams[&id].received == 1);
        let (accepted, _, _) = net.b.incoming[0];
        let dialed = net.a.flows.slots.flow(id.index).unwrap().mss();
        let accepted = net.b.flows.slots.flow(accepted.index).unwrap().mss();
        assert_eq!((dialed, accepted), (expected, expected));
    }
}

#[test]
fn transfer_between_our_programs_keeps_its_rate_after_a_stall() {
    const BYTES: usize = 30 << 20;
    let times = [Duration::ZERO, Duration::from_secs(2)].map(|stall| {
        let large = || Config::for_tunnel(Transport::Tcp, LARGE_TUN_MTU);
        let mut net = Net::with(large(), large(), 7);
        let set = |net: &mut Net, is_stalled| {
            for wire in [&mut net.ab, &mut net.ba] {
                (wire.delay, wire.room) = (Duration::from_millis(25), usize::MAX);
                wire.stalled = is_stalled;
            }
        };
        set(&mut net, false);
        let id = net.dial(POD, BYTES);
        net.run(MINUTE, |net| net.a.streams[&id].sent > BYTES / 2);
        set(&mut net, true);
        net.run(stall, |_| false);
        set(&mut net, false);
        let begin = net.now;
        assert!(net.run(MINUTE, |net| net.accepted().received == BYTES));
        net.now - begin
    });
    assert!(times[1] < 2 * times[0], "{times:?}");
}

#[test]
fn one_way_and_empty_transfers_finish() {
    let mut net = Net::new();
    both_ways(&mut net, 0, 5 << 20, MINUTE);
    let mut net = Net::new();
    both_ways(&mut net, 5 << 20, 0, MINUTE);
    let mut net = Net::new();
    both_ways(&mut net, 0, 0, MINUTE);
}

#[test]
fn transfer_survives_loss_reordering_and_duplicates() {
    for seed in 0..12 {
        let mut net = Net::with(Config::default(), Config::default(), seed);
        for wire in [&mut net.ab, &mut net.ba] {
            wire.loss = 0.02;
            wire.duplicate = 0.02;
            wire.reorder = 0.05;
        }
        both_ways(&mut net, 600 << 10, 400 << 10, 60 * MINUTE);
        assert!(net.ab.lost + net.ba.lost > 0);
        let repeated = net.a.flows.stats().retransmitted + net.b.flows.stats().retransmitted;
        assert!(repeated > 0);
    }
}

#[test]
fn a_narrow_link_pushes_back_and_loses_nothing() {
    let mut net = Net::new();
    net.ab.room = 1;
    net.ba.room = 1;
    both_ways(&mut net, 1 << 20, 1 << 20, 10 * MINUTE);
    assert_eq!(net.a.flows.stats().retransmitted, 0);
    assert_eq!(net.b.flows.stats().retransmitted, 0);
}

#[test]
fn a_long_path_is_filled_without_smoltcps_slow_start() {
    let mut net = Net::new();
    net.ab.delay = Duration::from_millis(25);
    net.ba.delay = Duration::from_millis(25);
    net.ab.room = usize::MAX;
    net.ba.room = usize::MAX;
    let start = net.now;
    both_ways(&mut net, 100 << 10, 0, MINUTE);
    // Round trips: handshake, 14, 28 and 56 KiB, the rest, and the end. smoltcp's initial window of 2 KiB
    // would need eight round trips.
    assert!(net.now - start <= Duration::from_millis(7 * 50));
}

#[test]
fn unread_flow_does_not_delay_other_flows() {
    let mut net = Net::new();
    net.b.echo = true;
    let stalled = net.dial(POD, 4 << 20);
    net.a.streams.get_mut(&stalled).unwrap().keep_open = true;
    net.run(Duration::from_secs(5), |net| {
        !net.b.streams.is_empty() && {
            let stream = net.b.streams.values_mut().next().unwrap();
            stream.paused = true;
            true
        }
    });
    net.run(Duration::from_secs(5), |_| false);
    let stuck = net.a.streams[&stalled].sent;
    assert!(stuck < 4 << 20, "the window limits the sender");

    let mut ids = Vec::new();
    for host in 0..200 {
        let to = SocketAddrV4::new(Ipv4Addr::new(172, 25, 1, host), 443);
        let id = net.dial(to, 0);
        net.a.streams.get_mut(&id).unwrap().keep_open = true;
        ids.push(id);
    }
    assert!(net.run(Duration::from_secs(5), |net| {
        net.a
            .streams
            .values()
            .filter(|stream| stream.connected)
            .count()
            == 201
    }));
    for _ in 0..5 {
        let start = net.now;
        for id in &ids {
            assert_eq!(net.a.flows.send(*id, b"ping").unwrap(), 4);
            net.a.streams.get_mut(id).unwrap().received = 0;
        }
        // The echoed bytes do not follow the pattern of an application.
        for id in &ids {
            net.a.streams.get_mut(id).unwrap().echo = true;
        }
        assert!(net.run(Duration::from_secs(1), |net| {
            ids.iter().all(|id| net.a.streams[id].received >= 4)
        }));
        assert!(
            net.now - start <= Duration::from_millis(8),
            "{:?}",
            net.now - start
        );
        for id in &ids {
            net.a.streams.get_mut(id).unwrap().paused = true;
        }
        net.run(Duration::from_millis(50), |_| false);
        for id in &ids {
            let stream = net.a.streams.get_mut(id).unwrap();
            stream.paused = false;
            while let Ok(crate::flows::Received::Bytes(_)) = net.a.flows.recv(*id, <[u8]>::len) {}
        }
    }
    assert_eq!(net.a.streams[&stalled].sent, stuck);
}

#[test]
fn many_transfers_share_a_narrow_link() {
    let mut net = Net::new();
    net.ab.room = 8;
    net.b.to_send = 100 << 10;
    let ids: Vec<_> = (0..50)
        .map(|host| {
            let to = SocketAddrV4::new(Ipv4Addr::new(172, 25, 2, host), 443);
            net.dial(to, 100 << 10)
        })
        .collect();
    net.settle(10 * MINUTE);
    for id in ids {
        assert_eq!(net.a.streams[&id].received, 100 << 10);
        assert_eq!(net.a.streams[&id].closed, Some(Closed::Finished));
    }
    for stream in net.b.streams.values() {
        assert_eq!(stream.received, 100 << 10);
    }
}

fn paced() -> Config {
    Config {
        pace: Some(Pace::default()),
        ..Config::default()
    }
}

#[test]
fn a_small_socket_at_the_other_end_is_not_overrun() {
    // The socket of a stock peer accepts about 80 KiB. Here the socket is emptied once per millisecond.
    let mut net = Net::with(paced(), paced(), 3);
    net.ab.room = usize::MAX;
    net.ab.socket = 80 << 10;
    net.ba.socket = 80 << 10;
    let start = net.now;
    both_ways(&mut net, 50 << 20, 0, 10 * MINUTE);
    let took = net.now - start;
    // 64 KiB per round trip of 2 ms is 32 MiB/s; a few losses are allowed.
    assert!(took < Duration::from_secs(5), "{took:?}");
}

#[test]
fn larger_socket_of_a_culvert_client_is_used_and_not_overrun() {
    let server = Config {
        pace: Some(Pace::to_own_client()),
        ..Config::default()
    };
    let mut net = Net::with(server, paced(), 3);
    net.ab.room = usize::MAX;
    net.ab.socket = 255 << 10;
    let start = net.now;
    both_ways(&mut net, 50 << 20, 0, 10 * MINUTE);
    let took = net.now - start;
    // 128 KiB per round trip of 2 ms is 64 MiB/s.
    assert!(took < Duration::from_secs(1), "{took:?}");
    assert_eq!(net.a.flows.stats().retransmitted, 0);
}

#[test]
fn the_cap_grows_on_a_long_path_and_falls_with_losses() {
    let mut net = Net::with(paced(), paced(), 3);
    for wire in [&mut net.ab, &mut net.ba] {
        wire.delay = Duration::from_millis(20);
        wire.room = usize::MAX;
    }
    let start = net.now;
    both_ways(&mut net, 30 << 20, 0, 10 * MINUTE);
    let grown = net.a.flows.stats().in_flight_cap;
    assert!(grown > 400 << 10, "{grown}");
    assert!(
        net.now - start < Duration::from_secs(8),
        "{:?}",
        net.now - start
    );

    net.b.streams.clear();
    net.ab.loss = 0.01;
    both_ways(&mut net, 1 << 20, 0, 10 * MINUTE);
    let after = net.a.flows.stats().in_flight_cap;
    assert!(after < grown, "{after}");
    assert!(after >= 64 << 10);
}

#[test]
fn the_cap_is_shared_and_a_dead_host_does_not_keep_it() {
    let mut net = Net::with(paced(), paced(), 3);
    let dead = net.dial(POD, 10 << 20);
    net.run(Duration::from_secs(1), |net| {
        net.a.streams[&dead].sent > 100 << 10
    });
    // From now on the packets of the dead flow vanish; packets of other flows arrive.
    let local = net.port_of(dead).to_be_bytes();
    net.ab.swallow = Some(local);
    let ids: Vec<_> = (0..20)
        .map(|host| {
            let to = SocketAddrV4::new(Ipv4Addr::new(172, 25, 3, host), 443);
            net.dial(to, 1 << 20)
        })
        .collect();
    let start = net.now;
    assert!(net.run(MINUTE, |net| {
        ids.iter()
            .all(|id| net.a.streams[id].closed == Some(Closed::Finished))
    }));
    assert!(
        net.now - start < Duration::from_secs(15),
        "{:?}",
        net.now - start
    );
}

#[test]
fn hosts_that_are_slow_or_gone_do_not_shrink_the_cap() {
    let mut net = Net::with(paced(), paced(), 3);
    for wire in [&mut net.ab, &mut net.ba] {
        wire.delay = Duration::from_millis(20);
        wire.room = usize::MAX;
    }
    both_ways(&mut net, 20 << 20, 0, 10 * MINUTE);
    let grown = net.a.flows.stats().in_flight_cap;
    assert!(grown > 200 << 10, "{grown}");
    // One host answers its SYN after 5 s; the other host vanishes in the middle of a transfer.
    net.b.answer = Answer::Silent;
    let slow = net.dial(POD, 100 << 10);
    net.run(Duration::from_secs(5), |_| false);
    net.b.answer = Answer::Accept;
    let (incoming, ..) = *net.b.incoming.last().unwrap();
    net.b.flows.accept(incoming, net.now).unwrap();
    let seed = net.port_of(slow) as u8;
    net.b.streams.insert(
        incoming,
        Stream {
            seed,
            ..Stream::default()
        },
    );
    let gone = net.dial(POD, 10 << 20);
    net.run(Duration::from_secs(1), |net| {
        net.a.streams[&gone].sent > 100 << 10
    });
    net.ab.swallow = Some(net.port_of(gone).to_be_bytes());
    net.run(MINUTE, |net| net.a.streams[&slow].closed.is_some());
    net.run(MINUTE, |_| false);
    assert_eq!(net.a.streams[&slow].closed, Some(Closed::Finished));
    assert!(net.a.flows.stats().retransmitted > 3);
    assert!(net.a.flows.stats().in_flight_cap >= grown);
}

#[test]
fn a_full_receive_buffer_does_not_stop_the_opposite_direction() {
    let large = || Config::for_tunnel(Transport::Tcp, LARGE_TUN_MTU);
    for seed in 100..110 {
        let mut net = Net::with(large(), large(), seed);
        for wire in [&mut net.ab, &mut net.ba] {
            wire.loss = 0.02;
            wire.reorder = 0.05;
        }
        let (there, back) = (2_000_000, 1_500_000);
        net.b.to_send = back;
        let id = net.dial(POD, there);
        let arrived = net.run(10 * MINUTE, |net| {
            let dialed = net.a.streams.get_mut(&id).unwrap();
            dialed.paused = dialed.received > back / 3;
            let accepted = net.b.streams.values().next();
            accepted.is_some_and(|stream| stream.received == there)
        });
        assert!(arrived, "seed {seed}: {:?}", net.accepted());
        net.a.streams.get_mut(&id).unwrap().paused = false;
        let now = net.now;
        net.a.pump(id, now);
        net.settle(10 * MINUTE);
        assert_eq!(net.a.streams[&id].received, back);
        assert_eq!(net.a.streams[&id].closed, Some(Closed::Finished));
    }
}

#[test]
fn a_half_closed_reader_that_pauses_is_served_at_once_afterwards() {
    let mut net = Net::new();
    // More than the window, but the flow's queue holds the rest.
    net.b.to_send = 900 << 10;
    let id = net.dial(POD, 0);
    net.a.streams.get_mut(&id).unwrap().paused = true;
    net.run(Duration::from_secs(66), |_| false);
    assert!(net.accepted().closed_own);
    net.a.streams.get_mut(&id).unwrap().paused = false;
    let now = net.now;
    net.a.pump(id, now);
    let all = net.run(Duration::from_secs(3), |net| {
        net.a.streams[&id].received == 900 << 10
    });
    assert!(all, "{:?}", net.a.streams[&id]);
    net.settle(Duration::from_secs(3));
    assert_eq!(net.accepted().closed, Some(Closed::Finished));
}

#[test]
fn the_last_bytes_at_the_end_of_a_closed_window_arrive() {
    for mss in [1320, 1321, 1333, 1360] {
        for short in 0..16 {
            for keep_open in [true, false] {
                let config = || Config {
                    mss,
                    ..Config::default()
                };
                let mut net = Net::with(config(), config(), short);
                for wire in [&mut net.ab, &mut net.ba] {
                    wire.delay = Duration::from_millis(20);
                    wire.room = usize::MAX;
                    wire.loss = 0.01;
                    wire.reorder = 0.1;
                }
                let to_send = (512 << 10) - short as usize;
                let id = net.dial(POD, to_send);
                net.a.streams.get_mut(&id).unwrap().keep_open = keep_open;
                let accepted = |net: &mut Net| {
                    let mut streams = net.b.streams.iter_mut();
                    streams.next().map(|(id, stream)| {
                        stream.paused = true;
                        *id
                    })
                };
                net.run(Duration::from_secs(2), |net| accepted(net).is_some());
                net.run(MINUTE, |_| false);
                assert_eq!(net.a.streams[&id].sent, to_send);
                let other = accepted(&mut net).unwrap();
                net.b.streams.get_mut(&other).unwrap().paused = false;
                let now = net.now;
                net.b.pump(other, now);
                // The stream compares each byte. A keepalive must not replace one.
                net.run(MINUTE * 4, |net| net.accepted().received == to_send);
                assert_eq!(net.accepted().received, to_send, "{mss} {short}");
                assert!(net.now - now < Duration::from_secs(5), "{mss} {short}");
                assert_eq!(net.accepted().end, !keep_open);
            }
        }
    }
}
