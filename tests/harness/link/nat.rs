//! A NAT device at the dialer's end of a link, for UDP.

use std::collections::HashMap;

/// Protocol number of UDP in the IPv4 header.
pub(super) const UDP: u8 = 17;

/// Offsets in the IPv4 header.
const PROTOCOL: usize = 9;
const HEADER_CHECKSUM: usize = 10;
const SOURCE: usize = 12;
const DESTINATION: usize = 16;

/// Offset of the checksum in the UDP header.
const UDP_CHECKSUM: usize = 6;

/// Last byte of the dialer's address as the listener sees it, before any change.
const FIRST_ADDRESS: u8 = 1;

/// Last byte of the first changed address.
const CHANGED_ADDRESS: u8 = 10;

/// Mappings of a NAT device.
#[derive(Debug)]
pub(super) struct Nat {
    /// Last byte of the outer address.
    address: u8,
    /// Number of rebindings so far.
    generation: u16,
    /// Inner ports, by outer port.
    ports: HashMap<u16, u16>,
}

impl Default for Nat {
    fn default() -> Self {
        Self {
            address: FIRST_ADDRESS,
            generation: 0,
            ports: HashMap::new(),
        }
    }
}

/// Returns true for a UDP packet. The packet has a complete IPv4 header.
pub(super) fn is_udp(packet: &[u8]) -> bool {
    packet[PROTOCOL] == UDP
}

impl Nat {
    /// Forgets all mappings: the next packet of the dialer gets another port, and also another address.
    pub(super) fn rebind(&mut self, changes_address: bool) {
        self.generation += 1;
        self.ports.clear();
        if changes_address {
            self.address = CHANGED_ADDRESS + (self.generation % 100) as u8;
        }
    }

    /// Changes the source of a packet from the dialer.
    pub(super) fn outward(&mut self, packet: &mut [u8]) {
        let Some(udp) = udp_header(packet) else {
            return;
        };
        let inner = word(packet, udp);
        let outer = inner ^ (self.generation & 0x3ff);
        self.ports.insert(outer, inner);
        set(packet, udp, outer, &[udp + UDP_CHECKSUM]);
        self.set_address(packet, SOURCE, self.address);
    }

    /// Changes the destination of a packet to the dialer. Returns false if no mapping exists.
    pub(super) fn inward(&self, packet: &mut [u8]) -> bool {
        let Some(udp) = udp_header(packet) else {
            return true;
        };
        let inner = self.ports.get(&word(packet, udp + 2)).copied();
        let (Some(inner), true) = (inner, packet[DESTINATION + 3] == self.address) else {
            return false;
        };
        set(packet, udp + 2, inner, &[udp + UDP_CHECKSUM]);
        self.set_address(packet, DESTINATION, FIRST_ADDRESS);
        true
    }

    fn set_address(&self, packet: &mut [u8], at: usize, last: u8) {
        let Some(udp) = udp_header(packet) else {
            return;
        };
        let value = u16::from_be_bytes([packet[at + 2], last]);
        set(
            packet,
            at + 2,
            value,
            &[HEADER_CHECKSUM, udp + UDP_CHECKSUM],
        );
    }
}

/// Returns the offset of the UDP header of a complete UDP packet.
fn udp_header(packet: &[u8]) -> Option<usize> {
    let length = usize::from(packet[0] & 0xf) * 4;
    (is_udp(packet) && packet.len() >= length + 8).then_some(length)
}

fn word(packet: &[u8], at: usize) -> u16 {
    u16::from_be_bytes([packet[at], packet[at + 1]])
}

/// Changes a 16-bit word of a packet, and adjusts checksums (RFC 1624).
fn set(packet: &mut [u8], at: usize, value: u16, checksums: &[usize]) {
    let before = word(packet, at);
    packet[at..at + 2].copy_from_slice(&value.to_be_bytes());
    for &checksum in checksums {
        let old = word(packet, checksum);
        // A UDP checksum of 0 means none (RFC 768).
        if old == 0 {
            continue;
        }
        let mut sum = u32::from(!old) + u32::from(!before) + u32::from(value);
        while sum > 0xffff {
            sum = (sum & 0xffff) + (sum >> 16);
        }
        let new = match !(sum as u16) {
            0 => 0xffff,
            new => new,
        };
        packet[checksum..checksum + 2].copy_from_slice(&new.to_be_bytes());
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    /// A packet from 10.9.1.1:5000 to 10.9.0.2:443 with correct checksums.
    fn packet() -> Vec<u8> {
        let mut packet = vec![0x45, 0, 0, 30, 0, 0, 0x40, 0, 64, UDP, 0, 0];
        packet.extend([10, 9, 1, 1, 10, 9, 0, 2]);
        packet.extend([0x13, 0x88, 0x01, 0xbb, 0, 10, 0, 0, b'h', b'i']);
        let header = sum(&packet[..20]);
        packet[10..12].copy_from_slice(&(!header).to_be_bytes());
        let udp = !udp_sum(&packet);
        packet[26..28].copy_from_slice(&udp.to_be_bytes());
        packet
    }

    fn sum(bytes: &[u8]) -> u16 {
        let words = bytes.chunks(2).map(|pair| word(pair, 0));
        let mut sum: u32 = words.map(u32::from).sum();
        while sum > 0xffff {
            sum = (sum & 0xffff) + (sum >> 16);
        }
        sum as u16
    }

    fn udp_sum(packet: &[u8]) -> u16 {
        let pseudo = [&packet[12..20], &[0, UDP, 0, 10], &packet[20..]].concat();
        sum(&pseudo)
    }

    fn is_valid(packet: &[u8]) -> bool {
        sum(&packet[..20]) == 0xffff && udp_sum(packet) == 0xffff
    }

    #[test]
    fn answer_returns_to_the_dialer_and_answers_to_old_mappings_are_dropped() {
        let mut nat = Nat::default();
        let (mut seen, mut answers) = (Vec::new(), Vec::new());
        for changes_address in [false, false, true] {
            let mut out = packet();
            nat.outward(&mut out);
            assert!(is_valid(&out));
            seen.push((out[15], word(&out, 20)));
            let mut answer = out.clone();
            answer[12..16].copy_from_slice(&out[16..20]);
            answer[16..20].copy_from_slice(&out[12..16]);
            answer[20..22].copy_from_slice(&out[22..24]);
            answer[22..24].copy_from_slice(&out[20..22]);
            assert!(is_valid(&answer));
            answers.push(answer.clone());
            assert!(nat.inward(&mut answer) && is_valid(&answer));
            assert_eq!((answer[19], word(&answer, 22)), (1, 5000));
            nat.rebind(changes_address);
        }
        let mut last = packet();
        nat.outward(&mut last);
        seen.push((last[15], word(&last, 20)));
        for (index, one) in seen.iter().enumerate() {
            assert!(
                seen[index + 1..].iter().all(|other| other != one),
                "{seen:?}"
            );
        }
        assert!(answers.iter_mut().all(|answer| !nat.inward(answer)));
    }

    #[test]
    fn other_packets_pass_unchanged() {
        let mut tcp = packet();
        tcp[PROTOCOL] = 6;
        let before = tcp.clone();
        let mut nat = Nat::default();
        nat.rebind(true);
        nat.outward(&mut tcp);
        assert!(nat.inward(&mut tcp));
        assert_eq!(tcp, before);
    }
}
