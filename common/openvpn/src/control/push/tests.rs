#![allow(clippy::unwrap_used, clippy::expect_used, clippy::indexing_slicing)]

use std::net::Ipv4Addr;
use std::time::Duration;

use proptest::prelude::*;

use super::*;
use crate::compress::Framing;
use crate::control::Message;

fn joined(texts: &[String]) -> Result<PushOptions, PushError> {
    let mut assembler = Assembler::new();
    for (text, number) in texts.iter().zip(1..) {
        let Message::PushReply(reply) = Message::parse(text) else {
            panic!("{text}")
        };
        match assembler.push(reply)? {
            Some(options) => {
                assert_eq!(number, texts.len(), "complete too early");
                return Ok(options);
            }
            None => assert!(number < texts.len(), "never complete"),
        }
    }
    unreachable!()
}

/// Reply of a stock 2.6.14 server in net30, without options that a client must offer first.
#[test]
fn parses_the_reply_of_a_stock_server() {
    let push = PushOptions::parse(
        "route 10.20.0.1,topology net30,ifconfig 10.20.0.6 10.20.0.5,peer-id 0,cipher AES-256-GCM,\
         protocol-flags cc-exit tls-ekm,tun-mtu 1500,ping 5,ping-restart 30",
    )
    .unwrap();
    let local = Ipv4Addr::new(10, 20, 0, 6);
    let second = Ipv4Addr::new(10, 20, 0, 5);
    assert_eq!(push.ifconfig, Some(Ifconfig { local, second }));
    assert_eq!(push.topology, Some(Topology::Net30));
    assert_eq!(push.peer_id, Some(0));
    assert_eq!(push.cipher.as_deref(), Some("AES-256-GCM"));
    assert!(push.cc_exit && push.tls_ekm);
    assert_eq!(push.tun_mtu, Some(1500));
    assert_eq!(push.ping, Some(Duration::from_secs(5)));
    assert_eq!(push.ping_restart, Some(Duration::from_secs(30)));
}

#[test]
fn parses_all_other_supported_options() {
    let push = PushOptions::parse(
        "topology subnet,route-gateway 10.8.0.1,route 10.0.0.0 255.0.0.0 vpn_gateway,\
         ifconfig-ipv6 fd00::2/64 fd00::1,key-derivation tls-ekm,comp-lzo no,socket-flags TCP_NODELAY,\
         auth-token abc,explicit-exit-notify,ping-exit 9,redirect-gateway def1,unknown-option 1 2",
    )
    .unwrap();
    assert_eq!(push.topology, Some(Topology::Subnet));
    assert!(push.tls_ekm && !push.cc_exit);
    assert_eq!(push.framing, Some(Framing::Lzo));
    assert!(!push.compresses);
    for (option, compresses) in [
        ("comp-lzo yes", true),
        ("comp-lzo", true),
        ("compress", false),
        ("compress stub-v2", false),
        ("compress lz4-v2", true),
    ] {
        let push = PushOptions::parse(option).unwrap();
        assert_eq!(push.compresses, compresses, "{option}");
    }
    assert_eq!(push.auth_token.as_deref(), Some("abc"));
    assert_eq!(push.ping_exit, Some(Duration::from_secs(9)));
    assert_eq!(push.peer_id, None);
    assert_eq!(
        PushOptions::parse("compress stub-v2").unwrap().framing,
        Some(Framing::StubV2)
    );
    assert_eq!(PushOptions::parse("").unwrap(), PushOptions::default());
}

#[test]
fn options_that_break_the_data_channel_are_errors() {
    let unsupported = |text: &str| Err(PushError::Unsupported(text.to_owned()));
    let parse = PushOptions::parse;
    assert_eq!(
        parse("protocol-flags tls-ekm aead-epoch"),
        unsupported("protocol-flags aead-epoch")
    );
    assert_eq!(
        parse("protocol-flags dyn-tls-crypt"),
        unsupported("protocol-flags dyn-tls-crypt")
    );
    assert_eq!(
        parse("key-derivation other"),
        unsupported("key-derivation other")
    );
    assert_eq!(parse("compress snappy"), unsupported("compress snappy"));
    assert_eq!(parse("fragment 1300"), unsupported("fragment 1300"));
    for text in [
        "peer-id",
        "peer-id x",
        "peer-id 16777216",
        "ifconfig 10.0.0.1",
        "cipher",
        "topology ring",
    ] {
        assert_eq!(parse(text), Err(PushError::Malformed(text.to_owned())));
    }
}

#[test]
fn one_text_needs_no_continuation() {
    assert_eq!(
        build(["ping 5", "peer-id 0"]).unwrap(),
        ["PUSH_REPLY,ping 5,peer-id 0"]
    );
    assert_eq!(build([""; 0]).unwrap(), ["PUSH_REPLY"]);
}

#[test]
fn many_options_are_split_and_joined() {
    let routes = (0..=255).map(|i| format!("route 10.{i}.0.0 255.255.0.0"));
    let options = [String::from("peer-id 7")].into_iter().chain(routes);
    let texts = build(options.chain([String::from("tun-mtu 1400")])).unwrap();
    assert!(texts.len() > 5);
    let (last, others) = texts.split_last().unwrap();
    assert!(last.ends_with(",push-continuation 1"));
    assert!(
        others
            .iter()
            .all(|text| text.ends_with(",push-continuation 2"))
    );
    let push = joined(&texts).unwrap();
    assert_eq!((push.peer_id, push.tun_mtu), (Some(7), Some(1400)));
}

#[test]
fn endless_configuration_is_rejected() {
    let mut assembler = Assembler::new();
    let reply = format!("{},push-continuation 2", "x".repeat(900));
    let error = (0..100).find_map(|_| assembler.push(&reply).err());
    assert_eq!(error, Some(PushError::TooLong));
    assert!(assembler.gathered.is_empty());
}

#[test]
fn unpushable_options_are_rejected() {
    let long = "x".repeat(1000);
    for option in ["", "a,b", "line\nbreak", "nul\0", "\u{e9}", &long] {
        assert_eq!(
            build(["ping 5", option]),
            Err(NotPushable(option.to_owned()))
        );
    }
}

proptest! {
    #[test]
    fn options_round_trip(options in prop::collection::vec("[ -+.-~]{1,300}", 0..30)) {
        let Ok(texts) = build(&options) else { panic!("{options:?}") };
        let mut found = Vec::new();
        for (text, number) in texts.iter().zip(1..) {
            prop_assert!(text.len() <= MAX_REPLY_LEN);
            let mut parts: Vec<_> = text.split(',').skip(1).map(str::to_owned).collect();
            if texts.len() > 1 {
                let mark = if number < texts.len() { "push-continuation 2" } else { "push-continuation 1" };
                prop_assert_eq!(parts.pop(), Some(mark.to_owned()));
            }
            found.append(&mut parts);
        }
        prop_assert_eq!(found, options);
    }

    #[test]
    fn arbitrary_text_never_panics(
        text: String,
        word in "(ifconfig|ifconfig-ipv6|route|topology|peer-id|cipher|protocol-flags|compress|ping|tun-mtu)",
    ) {
        let _ = Assembler::new().push(&text);
        let _ = PushOptions::parse(&format!("{word} {text},{word}"));
    }
}

#[test]
fn auth_token_is_not_logged() {
    let options = "ping 10,auth-token SECRET,auth-token-user bm9ib2R5,route 10.0.0.0";
    let shown = for_log(options.split(','));
    assert_eq!(shown, "ping 10,auth-token,auth-token,route 10.0.0.0");
}
