//! Detection of clients that no longer answer although their session is open.
//!
//! The probe is an echo request from the server's VPN address to the client's. Kernels and Culvert agents answer
//! echo requests, but a packet filter may prevent the answer. Only a client that has answered before can become
//! suspect. The first probe therefore follows the handshake, and dials repeat it until the first answer.
//!
//! Only an answer ends the suspicion: a client that receives nothing still sends pings. Packets of a suspect client are the
//! occasion for the next probe.

use std::future::pending;
use std::net::Ipv4Addr;
use std::sync::atomic::{AtomicU64, Ordering};

use culvert_openvpn::ip::{self, Icmp, Packet, Sum, kind, protocol};
use culvert_openvpn_io::stream::Peer;
use culvert_stream::suspicion::Suspicion;

/// Identifier of probes in ICMP.
const IDENTIFIER: u16 = 0xc017;

/// State of the detection for one client.
pub(super) struct Silence {
    client: Ipv4Addr,
    /// Random data of the probe, which the answer repeats.
    token: [u8; 8],
    probe: Vec<u8>,
    /// Number of answers of the client.
    answers: AtomicU64,
    /// State of [`Peer::heard`] at the last probe.
    probed: AtomicU64,
    suspicion: Suspicion,
}

impl Silence {
    /// Creates the state of a client that was not probed yet.
    pub(super) fn new(server: Ipv4Addr, client: Ipv4Addr) -> Self {
        let token = rand::random();
        Self {
            client,
            token,
            probe: echo_request(server, client, token),
            answers: AtomicU64::new(0),
            probed: AtomicU64::new(0),
            suspicion: Suspicion::none(),
        }
    }

    /// Returns true if the client has not answered a probe since the suspicion was raised. If the client has sent something
    /// since the last probe, another probe follows.
    pub(super) fn is_suspect(&self, peer: &Peer) -> bool {
        let is_suspect = self.suspicion.is_raised(self.answers());
        if is_suspect && self.probed.load(Ordering::Relaxed) != peer.heard() {
            self.probe(peer);
        }
        is_suspect
    }

    fn answers(&self) -> u64 {
        self.answers.load(Ordering::Relaxed)
    }

    /// Sends a probe. Returns false if the link is full or gone.
    pub(super) fn probe(&self, peer: &Peer) -> bool {
        let heard = peer.heard();
        let is_sent = peer.forward(&self.probe);
        if is_sent {
            self.probed.store(heard, Ordering::Relaxed);
        }
        is_sent
    }

    /// Resolves once the client is suspect: it does not answer a probe. Never resolves for a client without an earlier
    /// answer. Returns false if another call has already made the client suspect.
    pub(super) async fn suspect(&self, peer: &Peer) -> bool {
        if self.answers() == 0 {
            self.probe(peer);
            return pending().await;
        }
        let probe = || self.probe(peer);
        self.suspicion.wait(|| self.answers(), probe).await
    }

    /// Handles a packet from the client to the server's address. Returns true for the answer to a probe.
    pub(super) fn input(&self, packet: &[u8]) -> bool {
        let is_answer = Packet::parse(packet).is_ok_and(|packet| {
            packet.protocol() == protocol::ICMP
                && packet.source() == self.client
                && Icmp::parse(&packet)
                    .is_ok_and(|icmp| icmp.kind() == kind::ECHO_REPLY && icmp.body() == self.token)
        });
        if is_answer {
            self.answers.fetch_add(1, Ordering::Relaxed);
        }
        is_answer
    }
}

fn echo_request(from: Ipv4Addr, to: Ipv4Addr, token: [u8; 8]) -> Vec<u8> {
    let [high, low] = IDENTIFIER.to_be_bytes();
    let mut header = [kind::ECHO, 0, 0, 0, high, low, 0, 1];
    let sum = Sum::of(&header) + Sum::of(&token);
    [header[2], header[3]] = sum.checksum().to_be_bytes();
    let mut packet = Vec::new();
    let length = header.len() + token.len();
    ip::write_header(&mut packet, from, to, protocol::ICMP, length);
    packet.extend(header);
    packet.extend(token);
    packet
}

#[cfg(test)]
pub(super) mod tests {
    #![allow(clippy::unwrap_used)]

    use super::*;

    /// Returns the answer of a client to a probe.
    pub(in super::super) fn answer(probe: &[u8]) -> Vec<u8> {
        let request = Packet::parse(probe).unwrap();
        let icmp = Icmp::parse(&request).unwrap();
        assert_eq!(icmp.kind(), kind::ECHO);
        let token = icmp.body().try_into().unwrap();
        let mut answer = echo_request(request.destination(), request.source(), token);
        answer.splice(ip::HEADER..ip::HEADER + 4, [kind::ECHO_REPLY, 0, 0, 0]);
        let sum = Sum::of(answer.get(ip::HEADER..).unwrap()).checksum();
        answer.splice(ip::HEADER + 2..ip::HEADER + 4, sum.to_be_bytes());
        answer
    }

    #[test]
    fn only_the_answer_of_the_client_to_its_probe_counts() {
        let (server, client) = ([10, 20, 0, 1].into(), [10, 20, 0, 6].into());
        let silence = Silence::new(server, client);
        assert!(!silence.input(&silence.probe));
        let another = Silence::new(server, client);
        assert!(!silence.input(&answer(&another.probe)));
        let behind = Silence::new(server, [172, 25, 0, 2].into());
        assert!(!silence.input(&answer(&behind.probe)));
        assert_eq!(silence.answers(), 0);
        assert!(silence.input(&answer(&silence.probe)));
        assert_eq!(silence.answers(), 1);
    }
}
