#![allow(clippy::unwrap_used, clippy::expect_used, clippy::indexing_slicing)]

use proptest::prelude::*;

use super::*;

fn source(role: Role) -> KeySource {
    let pre_master = if role == Role::Client {
        [1; 48]
    } else {
        [0; 48]
    };
    KeySource {
        pre_master,
        random1: [2; 32],
        random2: [3; 32],
    }
}

fn message(role: Role) -> KeyMethod2 {
    KeyMethod2 {
        source: source(role),
        options: "V4,dev-type tun".to_owned(),
        username: String::new(),
        password: String::new(),
        peer_info: String::new(),
    }
}

fn written(role: Role, message: &KeyMethod2) -> BytesMut {
    let mut out = BytesMut::new();
    message.write(role, &mut out).unwrap();
    out
}

#[test]
fn messages_have_the_wire_format() {
    let client = KeyMethod2 {
        username: "me".to_owned(),
        peer_info: "IV_PROTO=2\n".to_owned(),
        ..message(Role::Client)
    };
    let texts = b"\0\x10V4,dev-type tun\0\0\x03me\0\0\0\0\x0cIV_PROTO=2\n\0";
    let expected = [&[0, 0, 0, 0, 2][..], &[1; 48], &[2; 32], &[3; 32], texts].concat();
    assert_eq!(written(Role::Client, &client), expected);

    let texts = b"\0\x10V4,dev-type tun\0\0\0\0\0\0\0";
    let expected = [&[0, 0, 0, 0, 2][..], &[2; 32], &[3; 32], texts].concat();
    assert_eq!(written(Role::Server, &message(Role::Server)), expected);
}

#[test]
fn message_may_end_only_after_a_text() {
    let whole = written(Role::Client, &message(Role::Client));
    let ends_of_texts = [whole.len() - 6, whole.len() - 4, whole.len() - 2];
    for len in 0..whole.len() {
        let parsed = KeyMethod2::parse(Role::Client, &whole[..len]).unwrap();
        match ends_of_texts.contains(&len) {
            true => assert_eq!(parsed, Some((message(Role::Client), len))),
            false => assert_eq!(parsed, None, "{len}"),
        }
    }
}

#[test]
fn parsing_leaves_the_bytes_after_the_message() {
    let mut bytes = written(Role::Server, &message(Role::Server));
    let len = bytes.len();
    bytes.put_slice(b"PUSH_REPLY,ping 5\0");
    let (parsed, used) = KeyMethod2::parse(Role::Server, &bytes).unwrap().unwrap();
    assert_eq!((parsed, used), (message(Role::Server), len));
}

#[test]
fn malformed_messages_are_rejected() {
    let good = written(Role::Server, &message(Role::Server));
    let changed = |at: usize, bytes: &[u8]| {
        let mut message = good.to_vec();
        message[at..at + bytes.len()].copy_from_slice(bytes);
        KeyMethod2::parse(Role::Server, &message)
    };
    assert_eq!(changed(0, &[1]), Err(KeyMethodError::Method));
    assert_eq!(changed(4, &[1]), Err(KeyMethodError::Method));
    assert!(changed(4, &[0x12]).unwrap().is_some());
    assert_eq!(changed(69, &[2, 1]), Err(KeyMethodError::TooLong));
    assert_eq!(changed(69, &[2, 0]), Ok(None));

    let latin = [&good[..good.len() - 6], b"\0\x02\xe9\0\0\0\0\0"].concat();
    assert_eq!(
        KeyMethod2::parse(Role::Server, &latin),
        Err(KeyMethodError::Credentials)
    );
    // The peer info is only displayed, so invalid UTF-8 is replaced.
    let latin = [&good[..good.len() - 2], b"\0\x02\xe9\0"].concat();
    let (parsed, _) = KeyMethod2::parse(Role::Server, &latin).unwrap().unwrap();
    assert_eq!(parsed.peer_info, "\u{fffd}");
}

#[test]
fn texts_above_the_limit_are_rejected() {
    let good = written(Role::Server, &message(Role::Server));
    let endless = [&good[..good.len() - 2], &[0x10, 0], &[b'x'; 5000]].concat();
    let result = KeyMethod2::parse(Role::Server, &endless);
    assert_eq!(result, Err(KeyMethodError::TooLong));
    let longer = [&good[..good.len() - 2], &[0x10, 1]].concat();
    assert_eq!(
        KeyMethod2::parse(Role::Server, &longer),
        Err(KeyMethodError::TooLong)
    );
}

#[test]
fn long_messages_are_not_written() {
    let long = KeyMethod2 {
        options: "x".repeat(512),
        ..message(Role::Client)
    };
    let mut out = BytesMut::from(&b"before"[..]);
    assert_eq!(
        long.write(Role::Client, &mut out),
        Err(KeyMethodError::TooLong)
    );
    for len in [4000, 70_000] {
        let long = KeyMethod2 {
            peer_info: "x".repeat(len),
            ..message(Role::Client)
        };
        assert_eq!(
            long.write(Role::Client, &mut out),
            Err(KeyMethodError::TooLong)
        );
    }
    assert_eq!(out, &b"before"[..]);
}

#[test]
fn debug_output_has_no_password() {
    let secret = KeyMethod2 {
        password: "hunter2".to_owned(),
        ..message(Role::Client)
    };
    assert!(!format!("{secret:?}").contains("hunter2"));
}

proptest! {
    #[test]
    fn messages_round_trip(
        client: bool,
        options in "[^\0]{0,100}",
        username in "[^\0]{0,40}",
        password in "[^\0]{0,40}",
        peer_info in "[^\0]{0,200}",
    ) {
        let role = if client { Role::Client } else { Role::Server };
        let message = KeyMethod2 { source: source(role), options, username, password, peer_info };
        let out = written(role, &message);
        prop_assert_eq!(KeyMethod2::parse(role, &out), Ok(Some((message, out.len()))));
    }

    #[test]
    fn arbitrary_bytes_never_panic(client: bool, tail: Vec<u8>, random in prop::collection::vec(any::<u8>(), 64)) {
        let role = if client { Role::Client } else { Role::Server };
        let _ = KeyMethod2::parse(role, &tail);
        let bytes = [&[0, 0, 0, 0, 2][..], &random, &tail].concat();
        if let Ok(Some((_, used))) = KeyMethod2::parse(role, &bytes) {
            prop_assert!(used <= bytes.len());
        }
    }
}
