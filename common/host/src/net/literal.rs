//! The check of dialed addresses before a name lookup. Only the peer that resolves a name can check the addresses
//! of the name.

use std::net::{IpAddr, Ipv4Addr, SocketAddr};

use super::destinations::{Denial, Destinations};
use super::dial::{parse_port, split_host_port};

/// Checks `address` (`host:port`) if the host is an IP address in any notation that a resolver accepts. Other
/// hosts are not checked, and malformed addresses are left to the peer that dials.
///
/// # Errors
/// Returns a [`Denial`] unless the policy allows the address. If the policy has lists, the port of an IP address
/// must be a number.
pub fn check_literal(destinations: &Destinations, address: &str) -> Result<(), Denial> {
    if destinations.has_no_lists() {
        return Ok(());
    }
    let Ok((host, port)) = split_host_port(address) else {
        return Ok(());
    };
    let Some(ip) = literal(host) else {
        return Ok(());
    };
    let port = parse_port("tcp", port).map_err(|_| destinations.no_port())?;
    destinations.check(SocketAddr::new(ip, port))
}

/// Returns the IP address that `host` stands for, or `None` for a name. An empty host is this host.
fn literal(host: &str) -> Option<IpAddr> {
    if host.is_empty() {
        return Some(Ipv4Addr::LOCALHOST.into());
    }
    let without_zone = host.split_once('%').map_or(host, |(address, _)| address);
    let plain = without_zone.parse().ok();
    plain.or_else(|| Some(inet_aton(host)?.into()))
}

/// Parses the notations of inet_aton(3): one to four numbers, decimal, octal or hexadecimal. The last number
/// fills the remaining bytes.
fn inet_aton(text: &str) -> Option<Ipv4Addr> {
    let mut bits: u64 = 0;
    let mut parts = text.split('.').peekable();
    let mut remaining = 4_u32;
    while let Some(part) = parts.next() {
        let bytes = match parts.peek() {
            Some(_) => 1,
            None => remaining,
        };
        remaining = remaining.checked_sub(bytes).filter(|_| bytes > 0)?;
        let number = c_number(part)?;
        if number >> (8 * bytes) != 0 {
            return None;
        }
        bits = bits << (8 * bytes) | number;
    }
    let bits = u32::try_from(bits).ok()?;
    (remaining == 0).then(|| Ipv4Addr::from_bits(bits))
}

/// Parses a number like strtoul(3) with base 0.
fn c_number(text: &str) -> Option<u64> {
    let lower = text.to_ascii_lowercase();
    let (digits, radix) = match lower.strip_prefix("0x") {
        Some(digits) => (digits, 16),
        None if lower.len() > 1 && lower.starts_with('0') => (lower.as_str(), 8),
        None => (lower.as_str(), 10),
    };
    let is_number = digits.chars().all(|c| c.is_digit(radix));
    let number = u64::from_str_radix(digits, radix).ok();
    number.filter(|number| is_number && *number <= u32::MAX.into())
}

#[cfg(test)]
mod tests {
    #![allow(clippy::unwrap_used)]

    use super::super::destinations::Program;
    use super::*;

    #[test]
    fn every_notation_of_an_address_is_recognized() {
        for (host, expected) in [
            ("10.0.0.1", Some("10.0.0.1")),
            ("", Some("127.0.0.1")),
            ("167772161", Some("10.0.0.1")),
            ("0xa.1", Some("10.0.0.1")),
            ("012.0.1", Some("10.0.0.1")),
            ("0X0a.0.0.01", Some("10.0.0.1")),
            ("fe80::1%eth0", Some("fe80::1")),
            ("::ffff:10.0.0.1", Some("::ffff:10.0.0.1")),
            ("10.0.0.256", None),
            ("4294967296", None),
            ("1.2.3.4.5", None),
            ("1.2.3.4.0", None),
            ("10.0.0.", None),
            (".1", None),
            ("+1", None),
            ("08", None),
            ("0x", None),
            ("worker.1", None),
            ("localhost", None),
        ] {
            let expected = expected.map(|text| text.parse::<IpAddr>().unwrap());
            assert_eq!(literal(host), expected, "{host:?}");
        }
    }

    #[test]
    fn addresses_are_checked_and_names_are_not() {
        let deny = ["10.0.0.0/8:22".to_owned()];
        let (policy, _) = Destinations::parse(Program::Server, &[], &deny);
        let is_denied = |address: &str| check_literal(&policy, address).is_err();
        for address in [
            "10.0.0.1:22",
            "10.1:+22",
            "[::ffff:10.0.0.1]:22",
            "10.0.0.1:ssh",
        ] {
            assert!(is_denied(address), "{address}");
        }
        for address in ["10.0.0.1:23", "node-1:22", "10.0.0.1", "11.0.0.1:22"] {
            assert!(!is_denied(address), "{address}");
        }
        // Without lists, even an unusual port is left to the agent.
        let policy = Destinations::default();
        assert_eq!(check_literal(&policy, "10.0.0.1:ssh"), Ok(()));
    }
}
