#![allow(clippy::unwrap_used)]

use culvert_openvpn::tls::{MinVersion, ServerCheck};
use culvert_openvpn_io::config_file::Material;
use tokio::net::unix::pipe;
use tokio::time::advance;

use super::super::udp::tests::tunnel;
use super::*;

/// A certificate of a CA; no server has a certificate of this CA.
const CA: &[u8] = include_bytes!("../../../../common/openvpn/src/tls/tests/old-ca.pem");

fn client() -> (Client, CancellationToken) {
    let tls = ClientTls::new(CA, None, ServerCheck::default(), MinVersion::Tls12).unwrap();
    let (tunnel, stop) = tunnel();
    let client = Client {
        tunnel,
        settings: Settings::default(),
        tls: Latest::fixed(Arc::new(tls)),
        turn: Arc::new(Semaphore::new(1)),
    };
    (client, stop)
}

#[tokio::test(start_paused = true)]
async fn connect_timeout_limits_the_wait_for_a_silent_server() {
    let silent = UdpSocket::bind("127.0.0.1:0").await.unwrap();
    let port = silent.local_addr().unwrap().port().to_string();
    let remote = Remote::new("127.0.0.1", Some(&port), None).unwrap();
    let (mut client, stop) = client();
    for (limit, expected) in [(Some(5), 5), (None, 60)] {
        client.settings.connect_timeout = limit.map(Duration::from_secs);
        let began = Instant::now();
        let attempt = client.attempt(&remote, 0, &stop).await.unwrap();
        assert_eq!(began.elapsed().as_secs(), expected);
        assert!(attempt.next && attempt.lived.is_none(), "{}", attempt.text);
    }
}

#[tokio::test(start_paused = true)]
async fn attempt_whose_file_hangs_blocks_nothing_and_names_the_file() {
    let remote = Remote::new("127.0.0.1", None, None).unwrap();
    for is_stopped in [false, true] {
        let dir = tempfile::tempdir().unwrap();
        let path = dir.path().join("passwords");
        let made = std::process::Command::new("mkfifo").arg(&path).status();
        assert!(made.unwrap().success());
        let (mut client, stop) = client();
        client.settings.credentials = Some(Material::File(path.clone()));
        let end = async {
            // A writer that does not wait can open the pipe only while a reader waits.
            let writer = loop {
                match pipe::OpenOptions::new().open_sender(&path) {
                    Ok(writer) => break writer,
                    Err(_) => tokio::task::yield_now().await,
                }
            };
            match is_stopped {
                true => stop.cancel(),
                false => advance(PROMPT_READ).await,
            }
            writer
        };
        let (attempt, _writer) = tokio::join!(client.attempt(&remote, 0, &stop), end);
        assert_eq!(attempt.is_none(), is_stopped);
        if let Some(attempt) = attempt {
            let expected = format!(
                "{}: no answer within 10 s; check the volume",
                path.display()
            );
            assert!(attempt.text.starts_with(&expected), "{}", attempt.text);
        }
    }
}

#[test]
fn pauses_double_with_each_round() {
    let s = Duration::from_secs;
    let pauses =
        |remotes| (1..=6).map(move |failures| pause(s(1), s(10), failures, remotes).as_secs());
    assert!(pauses(1).eq([1, 2, 4, 8, 10, 10]));
    assert!(pauses(2).eq([1, 1, 2, 2, 4, 4]));
    assert_eq!(pause(s(1), s(300), u32::MAX, 1), s(300));
    assert_eq!(pause(s(1), s(300), 0, 0), s(1));
}

#[test]
fn each_round_starts_with_the_next_address_of_a_name() {
    let address = |last: u8| SocketAddr::from(([192, 0, 2, last], 1194));
    let order = |round| in_turn([1, 2, 3].map(address).to_vec(), round);
    assert_eq!(order(0), [1, 2, 3].map(address));
    assert_eq!(order(1), [2, 3, 1].map(address));
    assert_eq!(order(5), [3, 1, 2].map(address));
    assert!(in_turn(Vec::new(), 1).is_empty());
}

#[test]
fn alternating_failures_are_known_until_a_session() {
    let mut known = LogOnce::default();
    let failed = |text: &str| Attempt::failed(Outcome::Unreachable, text.to_owned());
    for text in ["one", "two"] {
        failed(text).log(&mut known);
    }
    assert_eq!([known.failed("one"), known.failed("two")], [None, None]);
    let lost = Attempt {
        lived: Some(Duration::from_secs(60)),
        ..failed("lost")
    };
    lost.log(&mut known);
    assert!(known.failed("one").is_some());
}

#[test]
fn reason_of_the_end_selects_the_next_attempt() {
    let ended = |ended| LinkEnd::Session(ended);
    let lived = Some(Duration::from_secs(60));
    let restart = |next_server| {
        ended(Ended::Restart {
            next_server,
            reason: String::new(),
        })
    };
    let refused = |temporary| {
        ended(Ended::AuthFailed {
            reason: String::new(),
            temporary,
        })
    };
    // After an established session the same server is tried first, unless the server requests otherwise.
    for (end, lived, next, hopeless) in [
        (restart(false), lived, false, false),
        (restart(true), lived, true, false),
        (ended(Ended::PeerExit), lived, false, false),
        (
            ended(Ended::PingTimeout(Duration::from_secs(1))),
            lived,
            false,
            false,
        ),
        (ended(Ended::Halt(String::new())), lived, false, true),
        (refused(false), None, true, true),
        (refused(true), None, true, false),
    ] {
        let attempt = after(&end, lived);
        assert_eq!((attempt.next, attempt.hopeless), (next, hopeless), "{end}");
        assert_eq!(attempt.outcome.is_some(), lived.is_none());
    }
}

#[test]
fn server_whose_sessions_are_short_does_not_keep_the_client() {
    let ended = |lived: Option<u64>| {
        let lived = lived.map(Duration::from_secs);
        after(&LinkEnd::Session(Ended::PeerExit), lived)
    };
    let mut short = 0;
    // `None` is an attempt without a session.
    for (lived, is_next) in [
        (None, true),
        (Some(5), false),
        (Some(5), true),
        (Some(5), false),
        (Some(60), false),
        (Some(5), false),
        (None, true),
        (Some(5), false),
    ] {
        let attempt = ended(lived);
        assert_eq!(attempt.is_next(&mut short), is_next, "{lived:?}");
    }
}
