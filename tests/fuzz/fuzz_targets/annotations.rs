//! Annotations of exposed Services: a parsed value, written out again, parses to the same result, and error
//! texts are short. The first line of the input is the value of the exposure annotation; the rest is the port
//! mapping.
#![no_main]

use std::collections::{BTreeMap, BTreeSet};

use culvert_door::annotations::{Exposure, check_ports, parse_port_mapping};
use libfuzzer_sys::fuzz_target;

/// Bound for the length of an error text, in bytes: far more than the fixed text and the quoted part of the
/// value need.
const MAX_ERROR_BYTES: usize = 4096;

fn check_exposure(value: &str) {
    let exposure = match Exposure::parse(value) {
        Ok(exposure) => exposure,
        Err(error) => return assert!(error.to_string().len() < MAX_ERROR_BYTES),
    };
    let ways = [
        ("NodePort", exposure.node_port),
        ("SNI", exposure.sni),
        ("Tunneling", exposure.tunneling),
    ];
    let asked: Vec<&str> = ways.iter().filter(|way| way.1).map(|way| way.0).collect();
    assert!(!asked.is_empty());
    assert_eq!(Exposure::parse(&asked.join(" ,\t")), Ok(exposure));
}

fn json_string(text: &str) -> String {
    let escaped = |unit: u16| format!("\\u{unit:04x}");
    format!(
        "\"{}\"",
        text.encode_utf16().map(escaped).collect::<String>()
    )
}

fn json(mapping: &BTreeMap<String, String>) -> String {
    let pair =
        |(port, host): (&String, &String)| format!("{}:{}", json_string(port), json_string(host));
    format!(
        "{{{}}}",
        mapping.iter().map(pair).collect::<Vec<_>>().join(",")
    )
}

fn check_mapping(value: &str) {
    let mapping = match parse_port_mapping(value) {
        Ok(mapping) => mapping,
        Err(error) => return assert!(error.to_string().len() < MAX_ERROR_BYTES),
    };
    assert_eq!(parse_port_mapping(&json(&mapping)).as_ref(), Ok(&mapping));

    let hosts: BTreeSet<&String> = mapping.values().collect();
    assert_eq!(hosts.len(), mapping.len(), "two ports share a name");
    for host in hosts {
        assert!(!host.is_empty() && !host.ends_with('.'));
        assert!(!host.bytes().any(|byte| byte.is_ascii_uppercase()));
        assert!(!host.strip_prefix("*.").unwrap_or(host).contains('*'));
    }

    let mut ports: BTreeSet<&str> = mapping.keys().map(String::as_str).collect();
    assert_eq!(check_ports(&mapping, &ports), Ok(()));
    if ports.pop_last().is_some() {
        assert!(check_ports(&mapping, &ports).is_err());
    }
}

fuzz_target!(|input: &[u8]| {
    let Ok(text) = std::str::from_utf8(input) else {
        return;
    };
    let (value, mapping) = text.split_once('\n').unwrap_or((text, text));
    check_exposure(value);
    check_mapping(mapping);
});
