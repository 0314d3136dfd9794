#![allow(clippy::unwrap_used, clippy::expect_used, clippy::indexing_slicing)]

use proptest::prelude::*;

use super::*;

fn texts(stream: &[u8]) -> Result<Vec<String>, TooLong> {
    let mut stream = BytesMut::from(stream);
    std::iter::from_fn(|| take_text(&mut stream).transpose()).collect()
}

#[test]
fn texts_end_in_a_nul() {
    assert_eq!(
        texts(b"PUSH_REQUEST\0EXIT\r\n\0\0rest").unwrap(),
        ["PUSH_REQUEST", "EXIT", ""]
    );
    assert_eq!(texts(b"a\x1b[31m\xff\0").unwrap(), ["a_[31m_"]);
    assert_eq!(texts(b"").unwrap(), [""; 0]);
}

#[test]
fn overlong_text_is_an_error() {
    let mut longest = vec![b'x'; MAX_TEXT_LEN - 1];
    assert_eq!(texts(&longest), Ok(vec![]));
    longest.push(0);
    assert_eq!(texts(&longest).unwrap()[0].len(), MAX_TEXT_LEN - 1);
    assert_eq!(texts(&[b'x'; MAX_TEXT_LEN]), Err(TooLong));
    assert_eq!(
        texts(&[&[b'x'; MAX_TEXT_LEN][..], &[0]].concat()),
        Err(TooLong)
    );
}

#[test]
fn parses_every_kind_of_message() {
    let auth = |temporary, reason| Message::AuthFailed { temporary, reason };
    let restart = |next_server, reason| Message::Restart {
        next_server,
        reason,
    };
    for (text, expected) in [
        (PUSH_REQUEST, Message::PushRequest),
        (
            "PUSH_REPLY,ping 5,route 10.0.0.0",
            Message::PushReply("ping 5,route 10.0.0.0"),
        ),
        ("PUSH_REPLY", Message::PushReply("")),
        ("PUSH_UPDATE,-route", Message::Other("PUSH_UPDATE,-route")),
        (AUTH_FAILED, auth(false, "")),
        ("AUTH_FAILED,no, never", auth(false, "no, never")),
        ("AUTH_FAILED,TEMP", auth(true, "")),
        ("AUTH_FAILED,TEMP:later", auth(true, "later")),
        (
            "AUTH_FAILED,TEMP[backoff 42,advance no]:busy: wait",
            auth(true, "busy: wait"),
        ),
        (
            "AUTH_FAILED,TEMPERATURE too high",
            auth(false, "TEMPERATURE too high"),
        ),
        (
            "AUTH_PENDING,timeout 30",
            Message::Other("AUTH_PENDING,timeout 30"),
        ),
        (RESTART, restart(false, "")),
        ("RESTART,[N]", restart(true, "")),
        ("RESTART,[NP]moved", restart(true, "moved")),
        ("RESTART,[P]", restart(false, "")),
        ("RESTART,Network is down", restart(false, "Network is down")),
        ("HALT,client was killed", Message::Halt("client was killed")),
        (EXIT, Message::Exit),
        ("INFO_PRE,OPEN_URL:x", Message::Other("INFO_PRE,OPEN_URL:x")),
        ("EXITING", Message::Other("EXITING")),
        ("", Message::Other("")),
    ] {
        assert_eq!(Message::parse(text), expected, "{text}");
    }
}

proptest! {
    #[test]
    fn arbitrary_bytes_become_printable_texts(bytes: Vec<u8>) {
        for text in texts(&bytes).unwrap() {
            prop_assert!(text.bytes().all(|byte| matches!(byte, b' '..=b'~')));
            let _ = Message::parse(&text);
        }
    }

    #[test]
    fn arbitrary_arguments_never_panic(word in "(AUTH_FAILED|RESTART|HALT|PUSH_REPLY|EXIT)", text: String) {
        let _ = Message::parse(&format!("{word},{text}"));
    }
}
