//! Flows inside the tunnel, against a hostile peer that reads our segments and sends arbitrary packets. The
//! first byte sets the configuration, such as the side that dials. Every later step starts with a byte that
//! selects the action, followed by the bytes that the action needs.
#![no_main]

use std::net::{Ipv4Addr, SocketAddrV4};
use std::time::{Duration, Instant};

use culvert_openvpn::flows::{Config, Event, FlowId, Flows, Input};
use culvert_openvpn::ip::{self, Packet, Segment, Sum, flags, protocol};
use libfuzzer_sys::fuzz_target;
use rand::SeedableRng;
use rand::rngs::StdRng;

const POD: SocketAddrV4 = SocketAddrV4::new(Ipv4Addr::new(172, 25, 0, 7), 443);

/// Builds an IP packet with one TCP segment. Lengths and checksums are correct.
fn segment(
    from: SocketAddrV4,
    to: SocketAddrV4,
    numbers: [u32; 2],
    flags: u8,
    window: u16,
    options: &[u8],
    data: &[u8],
) -> Vec<u8> {
    let mut tcp = [from.port().to_be_bytes(), to.port().to_be_bytes()].concat();
    tcp.extend(numbers.iter().flat_map(|number| number.to_be_bytes()));
    tcp.extend([(5 + options.len() as u8 / 4) << 4, flags]);
    tcp.extend(window.to_be_bytes());
    tcp.extend([0; 4]);
    tcp.extend_from_slice(options);
    tcp.extend_from_slice(data);
    let sum = ip::pseudo(*from.ip(), *to.ip(), protocol::TCP, tcp.len()) + Sum::of(&tcp);
    tcp[16..18].copy_from_slice(&sum.checksum().to_be_bytes());
    let mut packet = Vec::new();
    ip::write_header(&mut packet, *from.ip(), *to.ip(), protocol::TCP, tcp.len());
    packet.extend(tcp);
    packet
}

/// The unread input. Reads past the end return zeros.
struct Bytes<'a>(&'a [u8]);

impl Bytes<'_> {
    fn byte(&mut self) -> u8 {
        let (first, rest) = self.0.split_first().unwrap_or((&0, &[]));
        self.0 = rest;
        *first
    }

    fn word(&mut self) -> u16 {
        u16::from_be_bytes([self.byte(), self.byte()])
    }

    /// Returns `at` for half of all inputs, otherwise a number at some distance from `at`.
    fn near(&mut self, at: u32) -> u32 {
        match self.byte() {
            0..=127 => at,
            128..=179 => at.wrapping_add(self.word().into()),
            180..=229 => at.wrapping_sub(self.word().into()),
            shift => at.wrapping_add(1 << (shift % 32)),
        }
    }
}

fuzz_target!(|input: &[u8]| {
    let mut bytes = Bytes(input);
    let choice = bytes.byte();
    let mut now = Instant::now();
    let config = Config {
        accept: choice & 1 == 0,
        pace: (choice & 2 == 0).then(Default::default),
        receive_buffer: if choice & 4 == 0 { 16 << 10 } else { 256 << 10 },
        max_flows: 8,
        max_pending: 4,
        ..Config::default()
    };
    let mut flows = Flows::new(
        config.clone(),
        Box::new(StdRng::seed_from_u64(choice.into())),
        now,
    );
    let mut local = POD;
    let mut remote = SocketAddrV4::new(config.address, 4000);
    let (mut ours, mut theirs) = (0, 0);
    let mut open: Vec<FlowId> = Vec::new();
    if !config.accept {
        remote = POD;
        open.extend(flows.dial(POD, now));
    }
    while !bytes.0.is_empty() {
        let step = bytes.byte();
        let id = open
            .get(usize::from(step >> 4) % open.len().max(1))
            .copied();
        match (step & 15, id) {
            (0..=6, _) => {
                let numbers = [bytes.near(theirs), bytes.near(ours)];
                let flags = [
                    flags::ACK,
                    flags::SYN,
                    flags::SYN | flags::ACK,
                    flags::FIN | flags::ACK,
                    flags::RST,
                    bytes.byte(),
                ][usize::from(step >> 4) % 6];
                let window = bytes.word();
                let shape = bytes.byte();
                let options: &[u8] = [
                    &[][..],
                    &[2, 4, 0, 1],
                    &[3, 3, 255, 1],
                    &[2, 4, 5, 80, 3, 3, 14, 0],
                ][usize::from(shape & 3)];
                let data = vec![shape; usize::from(shape >> 2) * 25];
                let packet = segment(remote, local, numbers, flags, window, options, &data);
                if flows.input(&packet, now) == Input::Unknown {
                    flows.reject(&packet, now);
                }
            }
            (7, _) => {
                let length = usize::from(bytes.byte()).min(bytes.0.len());
                let (packet, rest) = bytes.0.split_at(length);
                bytes.0 = rest;
                flows.input(packet, now);
            }
            (8, Some(id)) => drop(flows.send(id, &vec![1; bytes.word().into()])),
            (9, Some(id)) => {
                let most = usize::from(bytes.word());
                let _ = flows.recv(id, |received| received.len().min(most));
            }
            (10, Some(id)) => flows.close(id),
            (11, Some(id)) => flows.abort(id),
            (12, _) => now += Duration::from_millis(1 << (bytes.byte() % 20)),
            (13, _) => flows.packet_received(now),
            (14, _) if !config.accept => open.extend(flows.dial(POD, now)),
            (15, Some(id)) => flows.report_delivery(id),
            _ => {}
        }
        let room = if step == 255 { 0 } else { 50 };
        let mut taken = 0;
        flows.poll_output(now, &mut |packet| {
            assert!(packet.len() <= 1400);
            let packet = Packet::parse(packet).expect("a whole packet");
            if let Ok(segment) = Segment::parse(&packet) {
                (local, remote) = (segment.source(), segment.destination());
                ours = segment.sequence().wrapping_add(segment.length());
                if segment.has(flags::ACK) {
                    theirs = segment.acknowledgement();
                }
            }
            taken += 1;
            taken <= room
        });
        while let Some(event) = flows.poll_event() {
            match event {
                Event::Incoming { id, .. } => {
                    if flows.accept(id, now).is_ok() {
                        open.push(id);
                    }
                }
                Event::Closed(id, _) => open.retain(|other| *other != id),
                Event::Connected(id)
                | Event::Readable(id)
                | Event::Writable(id)
                | Event::Delivered(id) => assert!(open.contains(&id)),
            }
        }
        let _ = flows.poll_timeout();
        assert!(flows.len() <= config.max_flows);
    }
});
