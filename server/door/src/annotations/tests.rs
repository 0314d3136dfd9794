#![allow(clippy::unwrap_used, clippy::indexing_slicing)]

use super::*;

fn mapping(pairs: &[(&str, &str)]) -> BTreeMap<String, String> {
    let owned = |&(port, host): &(&str, &str)| (port.to_owned(), host.to_owned());
    pairs.iter().map(owned).collect()
}

#[test]
fn list_of_ways_is_parsed() {
    for (value, node_port, sni, tunneling) in [
        ("true", true, false, false),
        ("NodePort", true, false, false),
        ("Tunneling, SNI", false, true, true),
        ("Tunneling,SNI", false, true, true),
        (" SNI\t,\nSNI ", false, true, false),
        ("NodePort,SNI,Tunneling", true, true, true),
    ] {
        let expected = Exposure {
            node_port,
            sni,
            tunneling,
        };
        assert_eq!(Exposure::parse(value), Ok(expected), "{value:?}");
    }
}

#[test]
fn one_wrong_entry_invalidates_the_value_and_is_reported() {
    for (value, entry) in [
        ("", ""),
        ("Tunneling SNI", "Tunneling SNI"),
        ("True", "True"),
        ("tru", "tru"),
        (" true", " true"),
        ("true ", "true "),
        ("SNI,true", "true"),
        ("SNI, sni", " sni"),
        ("NodePort,", ""),
    ] {
        let error = Exposure::parse(value).unwrap_err();
        assert_eq!(error.entry, entry, "{value:?}");
        assert!(error.to_string().contains("NodePort, SNI and Tunneling"));
    }
}

#[test]
fn errors_show_only_the_beginning_of_long_values() {
    let long = "x".repeat(100_000);
    assert_eq!(Exposure::parse(&long).unwrap_err().entry.len(), MAX_SHOWN);
    for json in [format!("\"{long}\""), format!("{{\"{long}\": \"{long}\"}}")] {
        let text = parse_port_mapping(&json).unwrap_err().to_string();
        assert!(text.len() < 500, "{text}");
    }
}

#[test]
fn mapping_is_parsed_and_the_last_of_two_equal_keys_wins() {
    for (json, expected) in [
        ("{}", mapping(&[])),
        (r#"{"": "host.com"}"#, mapping(&[("", "host.com")])),
        (
            r#"{"a": "a.b.c", "b": "b.c"}"#,
            mapping(&[("a", "a.b.c"), ("b", "b.c")]),
        ),
        (
            r#"{"a": "x.com", "a": "y.com"}"#,
            mapping(&[("a", "y.com")]),
        ),
        (r#"{"a": "*.Host.COM."}"#, mapping(&[("a", "*.host.com")])),
    ] {
        assert_eq!(parse_port_mapping(json), Ok(expected), "{json}");
    }
}

#[test]
fn mapping_must_be_an_object_of_strings() {
    for json in [
        "",
        "{sdf: a}",
        "null",
        "[]",
        r#"{"a": 1}"#,
        r#"{"a": "b.c"} x"#,
    ] {
        let result = parse_port_mapping(json);
        assert!(
            matches!(result, Err(MappingError::Json(_))),
            "{json}: {result:?}"
        );
    }
}

#[test]
fn host_name_must_be_a_dns_name() {
    for host in [
        "", "*", "*.", ".", "a..", "a b", "a:443", "a.*.b", "10.0.0.1", "ü.de",
    ] {
        let result = parse_port_mapping(&format!(r#"{{"https": "{host}"}}"#));
        let (port, host) = ("https".to_owned(), host.to_owned());
        assert_eq!(result, Err(MappingError::HostName { port, host }));
    }
}

#[test]
fn two_ports_cannot_share_a_host_name() {
    let json = r#"{"a": "x.com", "b": "y.com", "c": "X.com."}"#;
    let text = parse_port_mapping(json).unwrap_err().to_string();
    assert!(
        text.contains(r#""a" and "c" both have the host name "x.com""#),
        "{text}"
    );
}

#[test]
fn every_key_must_be_the_name_of_a_tcp_port() {
    let good = mapping(&[("port-a", "admin.host.com"), ("port-b", "host.com")]);
    assert_eq!(
        check_ports(&good, &["port-a", "port-b", "port-c"].into()),
        Ok(())
    );
    assert_eq!(
        check_ports(&mapping(&[("", "host.com")]), &[""].into()),
        Ok(())
    );
    let text = check_ports(&good, &["port-a"].into())
        .unwrap_err()
        .to_string();
    assert!(text.starts_with(r#""port-b" is not the name"#), "{text}");
    assert!(text.ends_with(r#"it has ["port-a"]"#), "{text}");
}
