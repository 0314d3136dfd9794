//! Flows follow the MTU that a router reports.

use std::net::{Ipv4Addr, SocketAddrV4};

use super::life::sent;
use super::net::{Net, POD, SERVER};
use super::transfer::{MINUTE, both_ways};
use crate::flows::Input;
use crate::ip::build::icmp;
use crate::ip::kind;

#[test]
fn transfer_follows_the_mtu_that_a_router_reports() {
    let mut net = Net::new();
    (net.ab.mtu, net.ba.mtu) = (1300, 1250);
    both_ways(&mut net, 100 << 10, 100 << 10, MINUTE);
}

#[test]
fn only_a_quoted_packet_in_flight_lowers_the_mtu() {
    let mut net = Net::new();
    net.b.drops_input = true;
    let id = net.dial(POD, 0);
    let now = net.now;
    let syn = sent(&mut net).remove(0);
    let router = SocketAddrV4::new(Ipv4Addr::new(172, 25, 0, 1), 0);
    let own = SocketAddrV4::new(SERVER, 0);
    let mut guessed = syn.clone();
    guessed[24] ^= 1;
    for (quoted, mtu, mss) in [
        (&guessed, 1300_u16, 1360),
        (&syn, 575, 1360),
        (&syn, 1500, 1360),
        (&syn, 1300, 1260),
        (&syn, 1350, 1260),
        (&syn, 576, 536),
    ] {
        let [high, low] = mtu.to_be_bytes();
        let rest = [0, 0, high, low];
        let error = icmp(router, own, [kind::UNREACHABLE, 4], rest, quoted);
        assert_eq!(net.a.flows.input(&error, now), Input::Accepted);
        let flow = net.a.flows.slots.flow(id.index).unwrap();
        assert_eq!(flow.mss(), mss, "{mtu}");
    }
    // The dial continues.
    net.b.drops_input = false;
    net.settle(MINUTE);
    assert!(net.a.streams[&id].connected);
}
