//! Networks and port ranges in the forms that Go's parsers accept.

use ipnet::IpNet;

/// Parses a network with any host bits.
///
/// # Errors
/// Returns Go's text for a text that is not a network.
pub(super) fn cidr(text: &str) -> Result<IpNet, String> {
    text.parse()
        .map_err(|_| format!("couldn't parse CIDR {text:?}: invalid CIDR address: {text}"))
}

/// Parses a port range: `30000-32767`, `30000+100`, or one port. Returns the first port and the number of ports.
///
/// # Errors
/// Returns the reason for a range that KKP refuses.
pub(super) fn port_range(text: &str) -> Result<(u16, u16), String> {
    if text.is_empty() {
        return Err("node port range is required".to_owned());
    }
    let bad = || format!("unable to parse port range: {text}");
    let number = |text: &str| text.trim().parse::<u16>().ok();
    let (base, size) = if let Some((low, high)) = text.split_once('-') {
        let (low, high) = number(low).zip(number(high)).ok_or_else(bad)?;
        if low > high {
            return Err(format!(
                "the low port of a range is greater than the high port: {low} > {high}"
            ));
        }
        (low, (high - low).saturating_add(1))
    } else if let Some((base, offset)) = text.split_once('+') {
        let (base, offset) = number(base).zip(number(offset)).ok_or_else(bad)?;
        let high = base.checked_add(offset).ok_or_else(bad)?;
        (base, (high - base).saturating_add(1))
    } else {
        (number(text).ok_or_else(bad)?, 1)
    };
    if base == 0 || size == 0 {
        return Err("invalid nodeport range".to_owned());
    }
    Ok((base, size))
}
