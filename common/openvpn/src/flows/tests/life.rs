//! The start and end of flows.

use std::net::{Ipv4Addr, SocketAddrV4};
use std::time::Duration;

use super::net::{Answer, Net, POD, SERVER};
use crate::flows::{Closed, Config, DialError, Gone, Input, Received, Refusal, Unreachable};
use crate::ip::build::{Numbers, echo, icmp, tcp, udp};
use crate::ip::{Icmp, Packet, Segment, flags, kind};

const SECOND: Duration = Duration::from_secs(1);

/// Returns the packets that the dialing side sends now.
pub(super) fn sent(net: &mut Net) -> Vec<Vec<u8>> {
    let mut packets = Vec::new();
    net.a.flows.poll_output(net.now, &mut |packet| {
        packets.push(packet.to_vec());
        true
    });
    packets
}

#[test]
fn incoming_event_reports_source_and_destination() {
    let mut net = Net::new();
    let id = net.dial(POD, 0);
    net.run(SECOND, |net| !net.b.incoming.is_empty());
    let (_, source, destination) = net.b.incoming[0];
    assert_eq!(destination, POD);
    assert_eq!(*source.ip(), SERVER);
    assert_eq!(source.port(), net.port_of(id));
}

#[test]
fn half_closed_flow_still_receives() {
    let mut net = Net::new();
    net.b.to_send = 3 << 20;
    let id = net.dial(POD, 1000);
    // The accepting side sends only after it has received the end of the other direction.
    net.run(SECOND, |net| {
        net.b
            .streams
            .values_mut()
            .for_each(|stream| stream.to_send = 0);
        net.b
            .streams
            .values_mut()
            .for_each(|stream| stream.keep_open = true);
        net.b.streams.values().any(|stream| stream.end)
    });
    assert!(net.accepted().end);
    assert!(!net.a.streams[&id].end);
    let (accepted, stream) = net.b.streams.iter_mut().next().unwrap();
    stream.to_send = 3 << 20;
    stream.keep_open = false;
    let (accepted, now) = (*accepted, net.now);
    net.b.pump(accepted, now);
    net.settle(60 * SECOND);
    assert_eq!(net.a.streams[&id].received, 3 << 20);
    assert_eq!(net.a.streams[&id].closed, Some(Closed::Finished));
    assert_eq!(net.accepted().closed, Some(Closed::Finished));
}

#[test]
fn refused_dial_closes_with_the_reason() {
    for (refusal, expected) in [
        (Refusal::Reset, Closed::Refused),
        (
            Refusal::Unreachable(Unreachable::Host),
            Closed::Unreachable(Unreachable::Host),
        ),
        (
            Refusal::Unreachable(Unreachable::Prohibited),
            Closed::Unreachable(Unreachable::Prohibited),
        ),
    ] {
        let mut net = Net::new();
        net.b.answer = Answer::Refuse(refusal);
        let id = net.dial(POD, 10);
        let start = net.now;
        net.settle(SECOND);
        assert_eq!(net.a.streams[&id].closed, Some(expected));
        assert!(net.now - start < Duration::from_millis(10));
        assert_eq!(net.b.flows.stats().refused, 1);
        assert!(net.b.flows.is_empty());
        assert_eq!(net.a.flows.send(id, b"x"), Err(Gone));
    }
}

#[test]
fn unanswered_dial_times_out() {
    let mut net = Net::new();
    net.b.drops_input = true;
    let id = net.dial(POD, 10);
    let start = net.now;
    net.run(100 * SECOND, |net| net.a.streams[&id].closed.is_some());
    assert_eq!(net.now - start, 30 * SECOND);
    let closed = net.a.streams[&id].closed.unwrap();
    assert_eq!(closed.to_string(), "connect timed out after 30 s");
    assert!(net.a.flows.is_empty());
}

#[test]
fn flow_not_accepted_in_time_is_gone() {
    let mut net = Net::with(
        Config::default(),
        Config {
            accept_timeout: 5 * SECOND,
            ..Config::default()
        },
        1,
    );
    net.b.answer = Answer::Silent;
    net.dial(POD, 10);
    net.run(10 * SECOND, |net| {
        !net.b.incoming.is_empty() && net.b.flows.is_empty()
    });
    let (id, ..) = net.b.incoming[0];
    // The remote end repeats the SYN, which causes another `Incoming` event.
    assert_eq!(net.b.flows.accept(id, net.now), Err(Gone));
    net.b.flows.refuse(id, Refusal::Reset);
    assert_eq!(net.b.flows.stats().refused, 0);
}

#[test]
fn flow_can_be_accepted_after_repeated_syns() {
    let mut net = Net::new();
    net.b.answer = Answer::Silent;
    let id = net.dial(POD, 5000);
    net.run(4 * SECOND, |_| false);
    // Repeated SYNs caused no further events.
    assert_eq!(net.b.incoming.len(), 1);
    assert!(!net.a.streams[&id].connected);
    let (accepted, ..) = net.b.incoming[0];
    net.b.flows.accept(accepted, net.now).unwrap();
    net.b.streams.insert(accepted, Default::default());
    let seed = net.port_of(id) as u8;
    let stream = net.b.streams.get_mut(&accepted).unwrap();
    (stream.keep_open, stream.seed) = (true, seed);
    assert!(net.run(SECOND, |net| net.a.streams[&id].connected));
    net.run(SECOND, |net| net.b.streams[&accepted].received == 5000);
    assert_eq!(net.b.streams[&accepted].received, 5000);
}

#[test]
fn flow_accepted_after_the_dialer_aborted_is_reset() {
    let mut net = Net::new();
    net.b.answer = Answer::Silent;
    let id = net.dial(POD, 0);
    net.run(SECOND, |net| !net.b.incoming.is_empty());
    net.a.flows.abort(id);
    assert!(net.a.flows.is_empty());
    let (accepted, ..) = net.b.incoming[0];
    net.b.flows.accept(accepted, net.now).unwrap();
    net.b.streams.insert(accepted, Default::default());
    // The flow no longer exists on the dialing side, which answers the SYN-ACK with a reset.
    net.settle(5 * SECOND);
    assert_eq!(net.accepted().closed, Some(Closed::Reset));
}

#[test]
fn reset_is_reported_after_the_received_data_is_read() {
    let mut net = Net::new();
    net.b.to_send = 10_000;
    let id = net.dial(POD, 0);
    net.a.streams.get_mut(&id).unwrap().keep_open = true;
    net.a.streams.get_mut(&id).unwrap().paused = true;
    net.run(SECOND, |net| {
        net.b
            .streams
            .values_mut()
            .for_each(|stream| stream.keep_open = true);
        net.b.streams.values().any(|stream| stream.sent == 10_000)
    });
    net.run(SECOND, |_| false);
    let accepted = *net.b.streams.keys().next().unwrap();
    net.b.flows.abort(accepted);
    net.run(SECOND, |net| net.b.flows.is_empty());
    net.run(SECOND, |_| false);
    assert_eq!(net.a.streams[&id].closed, None, "received data is unread");
    net.a.streams.get_mut(&id).unwrap().paused = false;
    let now = net.now;
    net.a.pump(id, now);
    net.settle(SECOND);
    assert_eq!(net.a.streams[&id].received, 10_000);
    assert!(!net.a.streams[&id].end);
    assert_eq!(net.a.streams[&id].closed, Some(Closed::Reset));
}

#[test]
fn delivery_is_reported_once_bytes_and_end_are_acknowledged() {
    let mut net = Net::new();
    let id = net.dial(POD, 10_000);
    assert!(net.run(SECOND, |net| net.a.streams[&id].closed_own));
    net.ba.stalled = true;
    net.a.flows.report_delivery(id);
    net.run(SECOND, |_| false);
    assert!(!net.a.streams[&id].delivered);
    net.ba.stalled = false;
    assert!(net.run(60 * SECOND, |net| net.a.streams[&id].delivered));
    let accepted = net.accepted();
    assert_eq!((accepted.received, accepted.end), (10_000, true));
}

#[test]
fn delivery_of_nothing_is_reported_at_once() {
    let mut net = Net::new();
    let id = net.dial(POD, 0);
    net.a.flows.report_delivery(id);
    assert!(!net.a.streams[&id].connected);
    assert!(net.run(SECOND, |net| net.a.streams[&id].delivered));
}

#[test]
fn a_reader_that_is_slower_than_time_wait_loses_nothing() {
    for dialer_closes_first in [true, false] {
        let mut net = Net::new();
        net.b.to_send = 10_000;
        let id = net.dial(POD, 0);
        let stream = net.a.streams.get_mut(&id).unwrap();
        stream.paused = true;
        stream.keep_open = !dialer_closes_first;
        net.run(SECOND, |_| false);
        if !dialer_closes_first {
            net.a.flows.close(id);
        }
        // smoltcp's TIME-WAIT ends after 10 s; a remote end that is gone times out after 150 s.
        net.run(600 * SECOND, |_| false);
        assert_eq!(net.a.streams[&id].closed, None, "received data is unread");
        net.a.streams.get_mut(&id).unwrap().paused = false;
        let now = net.now;
        net.a.pump(id, now);
        net.settle(SECOND);
        assert_eq!(net.a.streams[&id].received, 10_000);
        assert!(net.a.streams[&id].end);
        assert_eq!(net.a.streams[&id].closed, Some(Closed::Finished));
    }
}

#[test]
fn idle_flow_stays_open_and_dead_flow_times_out() {
    let mut net = Net::new();
    let id = net.dial(POD, 0);
    net.a.streams.get_mut(&id).unwrap().keep_open = true;
    net.b.echo = true;
    net.run(3600 * SECOND, |_| false);
    assert_eq!(net.a.streams[&id].closed, None);
    assert_eq!(net.accepted().closed, None);

    // The host behind the peer is gone. The peer still sends a ping every 10 s.
    net.ba.loss = 1.0;
    let gone = net.now;
    while net.a.streams[&id].closed.is_none() && net.now - gone < 1000 * SECOND {
        net.run(10 * SECOND, |net| net.a.streams[&id].closed.is_some());
        let now = net.now;
        net.a.flows.packet_received(now);
    }
    assert_eq!(
        net.a.streams[&id].closed,
        Some(Closed::TimedOut(150 * SECOND))
    );
    let took = net.now - gone;
    assert!(took > 80 * SECOND && took < 220 * SECOND, "{took:?}");
}

#[test]
fn flows_survive_a_stalled_tunnel() {
    let mut net = Net::new();
    let id = net.dial(POD, 3 << 20);
    net.run(SECOND, |net| net.a.streams[&id].sent > 1 << 20);
    net.ab.stalled = true;
    net.ba.stalled = true;
    net.run(600 * SECOND, |_| false);
    assert_eq!(net.a.streams[&id].closed, None);
    net.ab.stalled = false;
    net.ba.stalled = false;
    net.settle(120 * SECOND);
    assert_eq!(net.accepted().received, 3 << 20);
    assert_eq!(net.a.streams[&id].closed, Some(Closed::Finished));
}

#[test]
fn flow_closed_before_the_handshake_still_finishes() {
    let mut net = Net::new();
    let id = net.dial(POD, 0);
    net.a.flows.close(id);
    net.a.streams.get_mut(&id).unwrap().closed_own = true;
    net.settle(60 * SECOND);
    assert_eq!(net.a.streams[&id].closed, Some(Closed::Finished));
    assert!(net.a.streams[&id].connected);
    assert!(net.accepted().end);
}

#[test]
fn dial_fails_at_the_flow_limit_and_for_invalid_destinations() {
    let mut net = Net::with(
        Config {
            max_flows: 3,
            ..Config::default()
        },
        Config::default(),
        1,
    );
    let now = net.now;
    for _ in 0..3 {
        net.dial(POD, 0);
    }
    assert_eq!(net.a.flows.dial(POD, now), Err(DialError::TooManyFlows(3)));
    let nowhere = SocketAddrV4::new(Ipv4Addr::new(224, 0, 0, 1), 80);
    assert_eq!(
        Net::new().a.flows.dial(nowhere, now),
        Err(DialError::Undialable(nowhere))
    );
    let zero = SocketAddrV4::new(*POD.ip(), 0);
    assert_eq!(
        Net::new().a.flows.dial(zero, now),
        Err(DialError::Undialable(zero))
    );
}

#[test]
fn ports_run_out_per_destination_and_unsent_dials_free_theirs() {
    let mut net = Net::with(
        Config {
            max_flows: 40_000,
            buffer_budget: 0,
            ..Config::default()
        },
        Config::default(),
        1,
    );
    let now = net.now;
    let ids: Vec<_> = (0..32768)
        .map(|_| net.a.flows.dial(POD, now).unwrap())
        .collect();
    assert_eq!(
        net.a.flows.dial(POD, now),
        Err(DialError::PortsExhausted(POD))
    );
    let other = SocketAddrV4::new(*POD.ip(), 443);
    net.a.flows.dial(other, now).unwrap();
    // The SYN was never sent, so the port is free at once.
    net.a.flows.abort(ids[7]);
    net.a.flows.dial(POD, now).unwrap();
}

#[test]
fn port_is_not_reused_during_time_wait() {
    let mut net = Net::new();
    let mut ports = std::collections::HashSet::new();
    for _ in 0..50 {
        let id = net.dial(POD, 10);
        assert!(ports.insert(net.port_of(id)));
        net.settle(SECOND);
        assert_eq!(net.a.streams[&id].closed, Some(Closed::Finished));
    }
}

#[test]
fn buffers_shrink_when_the_budget_is_used() {
    let mut net = Net::with(
        Config {
            buffer_budget: 8 << 20,
            ..Config::default()
        },
        Config::default(),
        1,
    );
    for port in 1..80 {
        net.dial(SocketAddrV4::new(*POD.ip(), port), 0);
    }
    let used = net.a.flows.stats().buffers;
    assert!(used <= 8 << 20, "{used}");
    assert!(used >= 4 << 20, "{used}");
}

#[test]
fn pings_are_answered_and_unexpected_syns_are_reset() {
    let mut net = Net::new();
    let now = net.now;
    let ping = echo(POD, SocketAddrV4::new(SERVER, 0), false, 0x1234);
    assert_eq!(net.a.flows.input(&ping, now), Input::Unknown);
    assert!(net.a.flows.echo(&ping, now));
    let replies = sent(&mut net);
    let reply = Packet::parse(&replies[0]).unwrap();
    assert_eq!(reply.source(), SERVER);
    assert_eq!(reply.destination(), *POD.ip());
    let icmp = Icmp::parse(&reply).unwrap();
    assert_eq!((icmp.kind(), icmp.identifier()), (0, 0x1234));
    assert_eq!(icmp.body(), &ping[28..]);

    // The dialing side accepts no flows: by default its SYNs are answered with a reset.
    let id = net
        .b
        .flows
        .dial(SocketAddrV4::new(Ipv4Addr::new(10, 9, 8, 7), 22), now);
    net.b.streams.insert(id.unwrap(), Default::default());
    net.settle(SECOND);
    assert_eq!(net.accepted().closed, Some(Closed::Refused));
    assert_eq!(net.a.flows.stats().resets_sent, 1);
}

#[test]
fn resets_are_rate_limited() {
    let mut net = Net::new();
    let id = net.dial(POD, 0);
    let now = net.now;
    let syn = sent(&mut net).remove(0);
    net.a.flows.abort(id);
    let segment = Packet::parse(&syn).unwrap();
    assert!(Segment::parse(&segment).unwrap().has(flags::SYN));
    for _ in 0..10_000 {
        net.a.flows.reject(&syn, now);
        net.a.flows.poll_output(now, &mut |_| true);
    }
    let stats = net.a.flows.stats();
    assert!(stats.resets_sent <= 250, "{}", stats.resets_sent);
    assert_eq!(stats.resets_sent + stats.suppressed, 10_000);
    // Without polling, replies wait only up to a bound.
    for second in 0..100 {
        net.a.flows.reject(&syn, now + Duration::from_secs(second));
    }
    assert_eq!(
        net.a.flows.recv(id, |bytes| bytes.len()),
        Err::<Received, _>(Gone)
    );
}

#[test]
fn rejected_udp_gets_an_icmp_error_and_rejected_icmp_gets_no_answer() {
    let mut net = Net::new();
    let now = net.now;
    let own = SocketAddrV4::new(SERVER, 53);
    let query = udp(POD, own, b"query");
    let error = icmp(POD, own, [kind::UNREACHABLE, 3], [0; 4], &query);
    for packet in [&error, &query] {
        assert_eq!(net.a.flows.input(packet, now), Input::Unknown);
        assert!(!net.a.flows.echo(packet, now));
        net.a.flows.reject(packet, now);
    }
    let replies = sent(&mut net);
    assert_eq!(replies.len(), 1);
    let reply = Packet::parse(&replies[0]).unwrap();
    assert_eq!((reply.source(), reply.destination()), (SERVER, *POD.ip()));
    let message = Icmp::parse(&reply).unwrap();
    assert_eq!((message.kind(), message.code()), (kind::UNREACHABLE, 3));
    assert_eq!(message.body(), query);
}

#[test]
fn an_icmp_error_ends_a_dial_only_if_it_quotes_its_syn() {
    let mut net = Net::new();
    net.b.drops_input = true;
    let id = net.dial(POD, 0);
    let now = net.now;
    let syn = sent(&mut net).remove(0);
    let router = SocketAddrV4::new(Ipv4Addr::new(172, 25, 0, 1), 0);
    let own = SocketAddrV4::new(SERVER, 0);
    let mut guessed = syn.clone();
    guessed[24] ^= 1;
    for (code, quoted) in [(1, &guessed), (4, &syn)] {
        let error = icmp(router, own, [kind::UNREACHABLE, code], [0; 4], quoted);
        assert_eq!(net.a.flows.input(&error, now), Input::Accepted);
        assert_eq!(net.a.flows.poll_event(), None);
    }
    let error = icmp(router, own, [kind::UNREACHABLE, 1], [0; 4], &syn[..28]);
    assert_eq!(net.a.flows.input(&error, now), Input::Accepted);
    net.turn();
    let closed = net.a.streams[&id].closed.unwrap();
    assert_eq!(closed, Closed::Unreachable(Unreachable::Host));
    assert_eq!(
        closed.to_string(),
        "destination unreachable: no route to the host"
    );
}

#[test]
fn dial_resets_a_half_open_connection_of_the_target() {
    let mut net = Net::new();
    let id = net.dial(POD, 0);
    let now = net.now;
    let syn = sent(&mut net).remove(0);
    // The target acknowledges a position of the connection that the target still knows.
    let packet = Packet::parse(&syn).unwrap();
    let syn = Segment::parse(&packet).unwrap();
    let stale = 0x1234_5678;
    let numbers = Numbers(77, stale, 1000);
    let old = tcp(
        syn.destination(),
        syn.source(),
        numbers,
        flags::ACK,
        &[],
        &[],
    );
    assert_eq!(net.a.flows.input(&old, now), Input::Accepted);
    let replies = sent(&mut net);
    let reply = Packet::parse(&replies[0]).unwrap();
    let reset = Segment::parse(&reply).unwrap();
    assert!(reset.has(flags::RST) && reset.sequence() == stale);
    // The next SYN opens the flow.
    net.settle(SECOND * 5);
    assert!(net.a.streams[&id].connected);
}

#[test]
fn flows_may_move_between_threads() {
    fn moves<T: Send>() {}
    moves::<crate::flows::Flows>();
    moves::<crate::forward::Forward>();
}
