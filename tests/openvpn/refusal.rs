//! Refused certificates, and the resulting log texts.

use std::time::Duration;

use culvert_tests::namespace::alone;
use culvert_tests::openvpn::pki::Pair;
use culvert_tests::openvpn::{Endpoint, OpenVpn, Pki};

use crate::support::{PUSH, Proto, Wire, client_config, each, server_config};

/// The side with the wrong certificate.
#[derive(Clone, Copy)]
enum Wrong {
    Ours,
    Theirs,
}

/// Time limit of the handshake with a silent peer.
const HAND_WINDOW: Duration = Duration::from_secs(5);

/// Parts of our close reason if a stock peer refuses our certificate. The stock peer closes the connection or
/// becomes silent before it sends a TLS alert.
const SILENT: &[&str] = &[
    "the peer may refuse our certificate silently",
    "its log says why",
];

/// A pair of peers that must not establish a session.
struct Case {
    proto: Proto,
    wrong: Wrong,
    pair: fn(&Pki) -> &Pair,
    /// Texts that our close reason must contain, in any letter case.
    reason: &'static [&'static str],
    /// Text that the stock program's log must contain.
    log: &'static str,
}

#[test]
fn our_server_reports_wrong_certificates_on_either_side() {
    let cases = [
        Case {
            proto: Proto::Tcp,
            wrong: Wrong::Theirs,
            pair: |pki| &pki.stranger.client,
            reason: &["user-cluster-client", "by one of the same name"],
            log: "alert",
        },
        Case {
            proto: Proto::Udp,
            wrong: Wrong::Theirs,
            pair: |pki| &pki.expired.client,
            reason: &["user-cluster-client", "expired"],
            log: "alert",
        },
        Case {
            proto: Proto::Tcp,
            wrong: Wrong::Theirs,
            pair: |pki| &pki.swapped.client,
            reason: &["user-cluster-client", "wrong extended key usage"],
            log: "alert",
        },
        Case {
            proto: Proto::Tcp,
            wrong: Wrong::Ours,
            pair: |pki| &pki.stranger.server,
            reason: SILENT,
            log: "VERIFY ERROR",
        },
        Case {
            proto: Proto::Tcp,
            wrong: Wrong::Ours,
            pair: |pki| &pki.expired.server,
            reason: SILENT,
            log: "certificate has expired",
        },
        Case {
            proto: Proto::Udp,
            wrong: Wrong::Ours,
            pair: |pki| &pki.swapped.server,
            reason: SILENT,
            log: "VERIFY",
        },
    ];
    alone(async || {
        let Some(openvpn) = OpenVpn::get() else {
            return;
        };
        let pki = Pki::create();
        each(cases, async |number, case| {
            let wire = Wire::new(number);
            let pair = (case.pair)(&pki);
            let (shown, with) = match case.wrong {
                Wrong::Ours => (pair, String::new()),
                Wrong::Theirs => (&pki.server, shows(pair)),
            };
            let mut config = server_config(case.proto, &pki, shown);
            config.common.timers.hand_window = HAND_WINDOW;
            let listener = wire.listener(case.proto);
            let client = wire.stock_client(openvpn, case.proto, &pki, &with);
            let ours = Endpoint::server(listener.link().await, config, &PUSH);
            says(&ours, &case).await;
            client.says(case.log, 1).await;
        })
        .await;
    });
}

#[test]
fn our_client_reports_wrong_certificates_on_either_side() {
    let cases = [
        Case {
            proto: Proto::Tcp,
            wrong: Wrong::Theirs,
            pair: |pki| &pki.stranger.server,
            reason: &["openvpn-server", "by one of the same name"],
            log: "alert",
        },
        Case {
            proto: Proto::Tcp,
            wrong: Wrong::Theirs,
            pair: |pki| &pki.expired.server,
            reason: &["openvpn-server", "expired"],
            log: "alert",
        },
        Case {
            proto: Proto::Udp,
            wrong: Wrong::Theirs,
            pair: |pki| &pki.swapped.server,
            reason: &["openvpn-server", "wrong extended key usage"],
            log: "alert",
        },
        Case {
            proto: Proto::Tcp,
            wrong: Wrong::Ours,
            pair: |pki| &pki.stranger.client,
            reason: SILENT,
            log: "VERIFY ERROR",
        },
        Case {
            proto: Proto::Udp,
            wrong: Wrong::Ours,
            pair: |pki| &pki.expired.client,
            reason: SILENT,
            log: "certificate has expired",
        },
        Case {
            proto: Proto::Tcp,
            wrong: Wrong::Ours,
            pair: |pki| &pki.swapped.client,
            reason: SILENT,
            log: "VERIFY",
        },
    ];
    alone(async || {
        let Some(openvpn) = OpenVpn::get() else {
            return;
        };
        let pki = Pki::create();
        each(cases, async |number, case| {
            let wire = Wire::new(number);
            let pair = (case.pair)(&pki);
            let (shown, with) = match case.wrong {
                Wrong::Ours => (pair, String::new()),
                Wrong::Theirs => (&pki.user_cluster, shows(pair)),
            };
            let mut config = client_config(case.proto, &pki, shown);
            config.common.timers.hand_window = HAND_WINDOW;
            let server = wire.stock_server(openvpn, case.proto, &pki, &with).await;
            let ours = Endpoint::client(wire.link(case.proto).await, config, None);
            says(&ours, &case).await;
            server.says(case.log, 1).await;
        })
        .await;
    });
}

fn shows(pair: &Pair) -> String {
    format!(
        "--cert {} --key {}",
        pair.cert.display(),
        pair.key.display()
    )
}

async fn says(ours: &Endpoint, case: &Case) {
    let reason = ours.ended().await;
    for word in case.reason {
        assert!(
            reason.to_lowercase().contains(word),
            "{reason:?} does not contain {word:?}"
        );
    }
    assert!(ours.seen().established.is_none());
}
