#![allow(clippy::unwrap_used, clippy::expect_used, clippy::indexing_slicing)]

use culvert_openvpn::cipher::Digest;
use culvert_openvpn::compress::Framing;
use culvert_openvpn::control::push::Topology;
use culvert_openvpn::session;
use culvert_openvpn::tls::{MinVersion, NameCheck};
use culvert_openvpn::wrap::KeyDirection;
use proptest::prelude::*;

use super::*;

/// The ConfigMap `openvpn-client-config` of a KKP user cluster.
const KKP_CLIENT: &str = r#"client
proto tcp
dev kube
dev-type tun
auth-nocache
remote 'jm8k2x.europe.example.com' 31194
nobind
ca '/etc/openvpn/certs/ca.crt'
cert '/etc/openvpn/certs/client.crt'
key '/etc/openvpn/certs/client.key'
remote-cert-tls server
script-security 2
cipher AES-256-GCM
auth SHA1
keysize 256
status /run/openvpn-status
up '/bin/sh -c "/sbin/iptables -t nat -I POSTROUTING -s 10.20.0.0/24 -j MASQUERADE"'
log /dev/stdout
"#;

fn client_of(text: &str) -> Read<Client> {
    client(text, "c").unwrap_or_else(|problems| panic!("{problems:?}"))
}

fn client_problems(text: &str) -> Vec<String> {
    client(text, "c").expect_err("this configuration is wrong")
}

fn file(path: &str) -> Option<Material> {
    Some(Material::File(path.into()))
}

#[test]
fn words_are_split_as_openvpn_does() {
    for (line, expected) in [
        ("  remote  host\t1194 ", vec!["remote", "host", "1194"]),
        ("up \"a 'b' \\\"c\\\"\"", vec!["up", "a 'b' \"c\""]),
        ("up 'a \"b\" \\n'", vec!["up", "a \"b\" \\n"]),
        (
            "key C:\\\\pki\\\\a\\ b.key",
            vec!["key", "C:\\pki\\a b.key"],
        ),
        ("verb 3 # loud", vec!["verb", "3"]),
        ("verb 3; loud", vec!["verb", "3;", "loud"]),
        ("; verb", vec![]),
        ("a#b c", vec!["a#b", "c"]),
        ("'a'b", vec!["a", "b"]),
        ("push \"\"", vec!["push", ""]),
        ("", vec![]),
    ] {
        assert_eq!(lexer::words(line).unwrap(), expected, "{line:?}");
    }
    for line in ["up \"a", "up 'a", "up a\\", "up a\0b"] {
        assert!(lexer::words(line).is_err(), "{line:?}");
    }
}

#[test]
fn kkp_client_config_is_accepted_unchanged() {
    let Read { config, notes } = client_of(KKP_CLIENT);
    let common = &config.common;
    assert_eq!(
        config.remotes,
        [Remote {
            host: "jm8k2x.europe.example.com".into(),
            port: 31194,
            transport: Transport::Tcp
        }]
    );
    assert_eq!(common.ca, file("/etc/openvpn/certs/ca.crt"));
    assert_eq!(common.cert, file("/etc/openvpn/certs/client.crt"));
    assert_eq!(common.key, file("/etc/openvpn/certs/client.key"));
    assert!(common.require_usage);
    let mut session = session::Common::new(Transport::Tcp);
    common.apply(&mut session);
    assert_eq!(session.ciphers, Cipher::DEFAULT);
    assert_eq!(session.fallback, Some(Cipher::Aes256Gcm));
    assert_eq!(session.digest, Digest::Sha1);
    assert_eq!(session.framing, Framing::None);
    for option in [
        "dev",
        "auth-nocache",
        "nobind",
        "keysize",
        "status",
        "up",
        "log",
    ] {
        let told = notes
            .iter()
            .any(|note| note.contains(&format!(": {option}: not needed: ")));
        assert!(told, "{option} in {notes:#?}");
    }
    let up = notes
        .iter()
        .find(|note| note.starts_with("c:17: up: "))
        .unwrap();
    assert!(up.contains("no scripts are run"), "{up}");
}

#[test]
fn blocks_ports_and_protocols_are_combined() {
    let text = "\u{feff}--client\r\nremote one\r\nremote two 1200\r\nremote ::1 1201 udp\r\nproto tcp4-client\r\nport 1300\r\n\
        remote-random\nconnect-retry 2 60\nconnect-timeout 5\n\
        <ca>\n-----BEGIN CERTIFICATE-----\nAAAA\n-----END CERTIFICATE-----\n </ca>\ncert [inline]\n<cert>\nC\n</cert>\n<key>\nK\n</key>\n\
        tls-auth ta.key\nkey-direction 1\nauth SHA256\ncd /etc/vpn\nauth-user-pass up.txt\ntls-version-min 1.3 or-highest\n\
        verify-x509-name server name-prefix\n";
    let Client {
        common,
        remotes,
        random,
        retry,
        connect_timeout,
        credentials,
        ..
    } = client_of(text).config;
    let shown: Vec<_> = remotes.iter().map(ToString::to_string).collect();
    assert_eq!(shown, ["one:1300,tcp", "two:1200,tcp", "[::1]:1201,udp"]);
    assert!(random);
    let s = Duration::from_secs;
    assert_eq!((retry, connect_timeout), (Some((s(2), s(60))), Some(s(5))));
    let Some(Material::Inline { origin, text }) = common.ca else {
        panic!("{:?}", common.ca);
    };
    assert_eq!(origin, "<ca> in c");
    assert_eq!(
        text,
        "-----BEGIN CERTIFICATE-----\nAAAA\n-----END CERTIFICATE-----\n"
    );
    assert!(matches!(common.cert, Some(Material::Inline { .. })));
    let tls_auth = common.tls_auth.unwrap();
    assert_eq!(tls_auth.direction, KeyDirection::Inverse);
    assert_eq!(Some(tls_auth.key), file("/etc/vpn/ta.key"));
    assert_eq!(credentials, file("/etc/vpn/up.txt"));
    assert_eq!(common.digest, Digest::Sha256);
    assert_eq!(common.min_version, MinVersion::Tls13);
    assert_eq!(
        common.name,
        Some(NameCheck::CommonNamePrefix("server".into()))
    );
}

#[test]
fn protocol_may_have_a_family_and_the_own_role() {
    for word in ["udp", "udp4", "udp6"] {
        for role in ["client", "server"] {
            assert_eq!(proto(word, role), Ok(Transport::Udp));
        }
    }
    for family in ["", "4", "6"] {
        assert_eq!(proto(&format!("tcp{family}"), "client"), Ok(Transport::Tcp));
        let words = ["client", "server"].map(|role| format!("tcp{family}-{role}"));
        assert_eq!(proto(&words[0], "client"), Ok(Transport::Tcp));
        assert_eq!(proto(&words[1], "server"), Ok(Transport::Tcp));
        assert!(
            proto(&words[1], "client")
                .unwrap_err()
                .contains("other role")
        );
    }
    for word in ["tcp5", "tcp46-client", "udp46", "tcp-", "tap"] {
        assert!(
            proto(word, "client")
                .unwrap_err()
                .contains("not a protocol")
        );
    }
}

#[test]
fn key_text_is_not_in_debug_output() {
    let read = client_of("<key>\nsecret words\n</key>\n<cert>\nC\n</cert>\n");
    assert!(!format!("{read:?}").contains("secret words"));
}

#[test]
fn cipher_options_set_the_ciphers_of_the_session() {
    let session = |text: &str| {
        let mut session = session::Common::new(Transport::Udp);
        client_of(text).config.common.apply(&mut session);
        (session.ciphers, session.fallback)
    };
    let (ciphers, fallback) = session("cipher AES-256-CBC\n");
    assert_eq!(ciphers.last(), Some(&Cipher::Aes256Cbc));
    assert_eq!((ciphers.len(), fallback), (4, Some(Cipher::Aes256Cbc)));
    let (ciphers, fallback) =
        session("data-ciphers ?BF-CBC:AES-128-GCM\ndata-ciphers-fallback AES-128-CBC\n");
    assert_eq!(ciphers, [Cipher::Aes128Gcm]);
    assert_eq!(fallback, Some(Cipher::Aes128Cbc));
    let (ciphers, _) = session("cipher AES-128-CBC\nncp-disable\n");
    assert_eq!(ciphers, [Cipher::Aes128Cbc]);
    let (ciphers, _) = session("data-ciphers DEFAULT:AES-256-CBC\n");
    assert_eq!(ciphers.len(), 4);
    let read = client_of("data-ciphers AES-256-GCM:BF-CBC\n");
    assert_eq!(
        read.notes,
        ["c:1: data-ciphers: not supported, and left out: BF-CBC"]
    );
}

#[test]
fn all_problems_are_reported_with_their_lines() {
    let text = "client\nfragment 1400\n# fine\nsecret static.key\ntls-crypt-v2 k\ndev tap0\nplugin x.so\nremote\nremote h 99999\n\
        frobnicate 1\nup \"unclosed\ncipher BF-CBC\nauth none\ncert c\nserver 10.0.0.0 255.0.0.0\nkey-direction 2\n<ca>\nnever closed\n";
    let problems = client_problems(text);
    let begins = |text: &str| problems.iter().any(|problem| problem.starts_with(text));
    for expected in [
        "c:2: fragment: not supported: ",
        "c:4: secret: not supported: ",
        "c:5: tls-crypt-v2: not supported: ",
        "c:7: plugin: not supported: ",
        "c:8: remote: needs a host",
        "c:9: remote: \"99999\" is not a port",
        "c:10: frobnicate: not an option that is known here",
        "c:11: no closing quotation mark",
        "c:12: cipher: \"BF-CBC\" is not a cipher that is supported here; remove the line",
        "c:13: auth: \"none\" is not",
        "c:15: server: this is a server's configuration",
        "c:16: key-direction: \"2\"",
        "c:17: <ca> has no </ca>",
        "c: cert and key need each other",
        "c: dev tap0: Ethernet frames are not carried",
    ] {
        assert!(begins(expected), "{expected} in {problems:#?}");
    }
    assert_eq!(problems.len(), 15, "{problems:#?}");
}

#[test]
fn lines_of_a_key_outside_of_its_block_are_not_shown() {
    let lines = [
        "MIGHAgEAMBMGByqGSM49AgEGCCqGSM49AwEHBG0wawIBAQQgsecretsecret",
        "6acef03f62675b4b1bbd03e53b187727",
    ];
    for problem in client_problems(&format!("client\n{}\n", lines.join("\n"))) {
        assert!(
            lines.iter().all(|line| !problem.contains(&line[..16])),
            "{problem}"
        );
    }
}

#[test]
fn unknown_options_may_be_marked_as_optional() {
    let read =
        client_of("ignore-unknown-option frob\nfrob 1\nsetenv opt nicate 2\nsetenv FORWARD 1\n");
    assert_eq!(read.notes.len(), 3, "{:?}", read.notes);
    // Known options are still checked.
    let problems =
        client_problems("setenv opt fragment 1300\nignore-unknown-option secret\nsecret k\n");
    assert_eq!(problems.len(), 2, "{problems:?}");
}

#[test]
fn server_config_is_parsed() {
    let text = "mode server\ntls-server\nproto tcp-server\nlport 1195\nlocal 0.0.0.0\ndev tun\nserver 10.20.0.0 255.255.255.0\n\
        topology subnet\nca ca\ncert crt\nkey key\ndh none\nduplicate-cn\nclient-config-dir clients\nccd-exclusive\n\
        push \"route 172.25.0.0 255.255.0.0\"\npush 'dhcp-option DNS 10.0.0.1'\nroute 172.25.0.0 255.255.0.0\nkeepalive 10 60\n\
        max-clients 9\nremote-cert-tls client\ncrl-verify crl.pem\ntls-auth ta.key 0\nstatus /run/s 10\n";
    let Server {
        common,
        transport,
        local,
        network,
        topology,
        push,
        routes,
        client_config_dir,
        ccd_exclusive,
        duplicate_cn,
        client_to_client,
        max_clients,
        crl,
    } = server(text, "s").unwrap().config;
    assert_eq!((transport, common.port), (Some(Transport::Tcp), Some(1195)));
    assert_eq!(local.as_deref(), Some("0.0.0.0"));
    assert_eq!(network, Some("10.20.0.0/24".parse().unwrap()));
    assert_eq!(topology, Some(Topology::Subnet));
    assert_eq!(
        push,
        ["route 172.25.0.0 255.255.0.0", "dhcp-option DNS 10.0.0.1"]
    );
    assert_eq!(routes, ["172.25.0.0/16".parse::<Ipv4Net>().unwrap()]);
    assert_eq!(client_config_dir, Some("clients".into()));
    assert!(ccd_exclusive && duplicate_cn && !client_to_client && common.require_usage);
    assert_eq!((max_clients, crl), (Some(9), file("crl.pem")));
    assert_eq!(common.tls_auth.unwrap().direction, KeyDirection::Normal);
    assert_eq!(common.timers.ping, Some(Duration::from_secs(10)));
    assert_eq!(common.timers.ping_restart, Some(Duration::from_secs(120)));
}

#[test]
fn server_config_problems_are_reported() {
    let text = "client\nserver 10.20.0.1 255.255.255.0\nserver 10.20.0.0 255.0.255.0\nccd-exclusive\nport-share h 443\n\
        proto tcp-client\npush \"a,b\"\nverify-client-cert none\nserver-ipv6 fd00::/64\nserver 10.20.0.0 255.255.255.252\n";
    let problems = server(text, "s").unwrap_err();
    assert_eq!(problems.len(), 10, "{problems:#?}");
}

#[test]
fn oversized_config_is_refused() {
    let problems = client_problems(&"#".repeat(MAX_BYTES + 1));
    assert!(
        problems[0].contains("is it a configuration?"),
        "{problems:?}"
    );
}

/// Generates lines that are almost valid.
fn line() -> impl Strategy<Value = String> {
    let name = prop::sample::select(vec![
        "remote",
        "proto",
        "ca",
        "tls-auth",
        "key-direction",
        "cipher",
        "data-ciphers",
        "server",
        "push",
        "keepalive",
        "link-mtu",
        "setenv opt",
        "topology",
        "route",
        "<ca>",
        "</ca>",
        "dev",
        "connect-retry",
        "verify-x509-name",
        "compress",
        "cd",
        "auth-user-pass",
        "max-clients",
    ]);
    (name, "[ -~]{0,24}").prop_map(|(name, rest)| format!("{name} {rest}"))
}

proptest! {
    #[test]
    fn arbitrary_text_does_not_panic(text in "\\PC{0,200}") {
        let _ = (client(&text, "c"), server(&text, "s"));
    }

    #[test]
    fn problems_of_almost_valid_files_start_with_the_file_name(lines in prop::collection::vec(line(), 0..12)) {
        let text = lines.join("\n");
        for problems in [client(&text, "c").err(), server(&text, "c").err()].into_iter().flatten() {
            prop_assert!(!problems.is_empty());
            for problem in problems {
                prop_assert!(problem.starts_with("c:"), "{}", problem);
            }
        }
    }

    /// A quoted word parses back to the same word.
    #[test]
    fn quoted_word_parses_back(word in "[^\0\r\n]{0,40}") {
        let quoted = format!("\"{}\"", word.replace('\\', "\\\\").replace('"', "\\\""));
        prop_assert_eq!(lexer::words(&quoted).unwrap(), [word]);
    }
}

#[test]
fn zero_disables_pings_instead_of_leaving_the_default() {
    for text in ["ping 0\nping-restart 0\n", "keepalive 0 0\n"] {
        let common = client_of(&format!("{KKP_CLIENT}{text}")).config.common;
        let never = Some(Duration::ZERO);
        assert_eq!(
            (common.timers.ping, common.timers.ping_restart),
            (never, never)
        );
    }
}
