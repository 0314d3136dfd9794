//! The choice between clients that are not authenticated, by the number of clients of their hosts.

use std::collections::BTreeMap;
use std::net::IpAddr;

/// Returns the oldest session of the address with the most sessions; `waiting` is sorted from oldest to
/// newest. A host with many attempts displaces only its own sessions. Behind a proxy all clients share one
/// address, and the oldest session is dropped.
pub(crate) fn makes_room<T>(waiting: impl Iterator<Item = (T, IpAddr)> + Clone) -> Option<T> {
    oldest_of(waiting, |counts| counts.values().copied().max())
}

/// Returns the oldest session of the address with the fewest sessions; `waiting` is sorted from oldest to
/// newest. A host with many attempts delays only its own sessions.
pub(crate) fn next_in_line<T>(waiting: impl Iterator<Item = (T, IpAddr)> + Clone) -> Option<T> {
    oldest_of(waiting, |counts| counts.values().copied().min())
}

/// Returns the oldest session of an address whose number of sessions is the number that `choose` selects.
fn oldest_of<T>(
    waiting: impl Iterator<Item = (T, IpAddr)> + Clone,
    choose: impl FnOnce(&BTreeMap<u64, usize>) -> Option<usize>,
) -> Option<T> {
    let mut counts = BTreeMap::<u64, usize>::new();
    for (_, address) in waiting.clone() {
        *counts.entry(host(address)).or_default() += 1;
    }
    let chosen = choose(&counts);
    let mut equal = waiting.filter(|(_, address)| counts.get(&host(*address)).copied() == chosen);
    equal.next().map(|(who, _)| who)
}

/// Returns a key for a host. IPv6 addresses are grouped by /64 network, because one host may use a whole /64.
fn host(address: IpAddr) -> u64 {
    match address.to_canonical() {
        IpAddr::V4(v4) => v4.to_bits().into(),
        IpAddr::V6(v6) => (v6.to_bits() >> 64) as u64 | 1 << 63,
    }
}

#[cfg(test)]
mod tests {
    #![allow(clippy::unwrap_used)]

    use super::*;

    fn makes_room_of(addresses: &[&str]) -> Option<usize> {
        let all = addresses.iter().map(|text| text.parse().unwrap());
        makes_room(all.enumerate())
    }

    #[test]
    fn oldest_session_of_the_host_with_the_most_sessions_is_dropped() {
        assert_eq!(makes_room_of(&[]), None);
        assert_eq!(makes_room_of(&["192.0.2.1"; 3]), Some(0));
        assert_eq!(makes_room_of(&["192.0.2.1", "192.0.2.2"]), Some(0));
        let crowd = ["192.0.2.9", "192.0.2.1", "192.0.2.1"];
        assert_eq!(makes_room_of(&crowd), Some(1));
        let mapped = ["192.0.2.9", "::ffff:192.0.2.1", "192.0.2.1"];
        assert_eq!(makes_room_of(&mapped), Some(1));
        let one_network = ["192.0.2.9", "2001:db8::1", "2001:db8:0:1::1", "2001:db8::2"];
        assert_eq!(makes_room_of(&one_network), Some(1));
    }

    #[test]
    fn oldest_session_of_the_host_with_the_fewest_sessions_is_next() {
        let next = |addresses: &[&str]| {
            let all = addresses.iter().map(|text| text.parse().unwrap());
            next_in_line(all.enumerate())
        };
        assert_eq!(next(&[]), None);
        assert_eq!(next(&["192.0.2.1"; 3]), Some(0));
        assert_eq!(next(&["192.0.2.1", "192.0.2.1", "192.0.2.9"]), Some(2));
    }
}
