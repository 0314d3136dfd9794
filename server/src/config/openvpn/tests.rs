#![allow(clippy::unwrap_used, clippy::indexing_slicing)]

use culvert_openvpn::cipher::Cipher;
use culvert_openvpn::wrap::KeyDirection;

use super::super::Config;
use super::super::tests::{Files, UDS};
use super::*;
use crate::tunnel::Mode;

const KEYS: [&str; 4] = [
    "--openvpn-listen=tcp::1194",
    "--openvpn-ca=@ca",
    "--openvpn-cert=@cert",
    "--openvpn-key=@key",
];

fn read(files: &Files, more: &[&str]) -> Config {
    files.uds(&[&KEYS[..], more].concat()).unwrap()
}

fn settings(files: &Files, more: &[&str]) -> Settings {
    read(files, more).openvpn.unwrap()
}

fn errors(files: &Files, more: &[&str]) -> Vec<String> {
    files.errors(&[&UDS[..], more].concat())
}

#[test]
fn openvpn_is_disabled_by_default() {
    let files = Files::new();
    assert_eq!(files.uds(&[]).unwrap().openvpn, None);
    let refused = errors(&files, &["--openvpn-ca=@ca"]);
    assert_eq!(refused.len(), 1);
    assert!(refused[0].contains("--openvpn-listen"), "{refused:?}");
}

#[test]
fn malformed_listener_is_the_only_mistake() {
    let refused = errors(&Files::new(), &["--openvpn-listen=tcp:::1:1194"]);
    assert_eq!(refused.len(), 1, "{refused:?}");
    assert!(refused[0].contains("with IPv6 in brackets"), "{refused:?}");
}

#[test]
fn defaults_match_the_platform() {
    let files = Files::new();
    let settings = settings(&files, &[]);
    assert_eq!(settings.listen[0].to_string(), "tcp::1194");
    assert_eq!(settings.network.to_string(), "10.20.0.0/24");
    assert_eq!(settings.node_access.to_string(), "10.254.0.0/16");
    assert_eq!(settings.topology, Topology::Net30);
    assert_eq!(settings.max_clients, 1024);
    assert_eq!(settings.ping, Some(Duration::from_secs(5)));
    assert_eq!(settings.ping_restart, Some(Duration::from_secs(30)));
    assert!(!settings.server.duplicate_cn && !settings.server.ccd_exclusive);
    let unpinged = self::settings(&files, &["--openvpn-ping=0"]);
    assert_eq!((unpinged.ping, unpinged.ping_restart), (None, None));
}

#[test]
fn flags_set_the_settings() {
    let files = Files::new();
    let directory = format!("--openvpn-client-config-dir={}", files.path("").display());
    let config = read(
        &files,
        &[
            "--openvpn-listen=udp:127.0.0.1:1195,tcp:[::]:1196",
            "--openvpn-network=10.30.0.0/22",
            "--openvpn-topology=subnet",
            "--openvpn-route=172.25.0.0/16,10.240.16.0/20",
            "--openvpn-route=10.254.0.0/16",
            "--openvpn-push-route=172.25.0.0/16",
            "--openvpn-push=dhcp-option DNS 10.240.16.10",
            "--openvpn-node-access-network=10.253.0.0/16",
            &directory,
            "--openvpn-ccd-exclusive",
            "--openvpn-duplicate-cn",
            "--openvpn-max-clients=7",
            "--openvpn-data-ciphers=CHACHA20-POLY1305:AES-256-CBC",
            "--openvpn-auth=SHA256",
            "--openvpn-tls-auth=@key",
            "--openvpn-key-direction=0",
            "--openvpn-ping=0",
            "--openvpn-ping-restart=1m",
            "--openvpn-reneg-sec=60",
            "--tunnel-mode=prefer-openvpn",
        ],
    );
    assert_eq!(config.switch.mode, Mode::PreferOpenvpn);
    let shown = config.describe();
    let settings = config.openvpn.unwrap();
    let listen: Vec<_> = settings.listen.iter().map(ToString::to_string).collect();
    assert_eq!(listen, ["tcp::1194", "udp:127.0.0.1:1195", "tcp:[::]:1196"]);
    assert_eq!(settings.topology, Topology::Subnet);
    assert_eq!((settings.ping, settings.max_clients), (None, 7));
    assert_eq!(settings.ping_restart, Some(Duration::from_secs(60)));
    let server = &settings.server;
    assert_eq!(server.routes.len(), 3);
    assert_eq!(
        server.push,
        [
            "route 172.25.0.0 255.255.0.0",
            "dhcp-option DNS 10.240.16.10"
        ]
    );
    let common = &server.common;
    assert_eq!(
        common.ciphers,
        Some(vec![Cipher::ChaCha20Poly1305, Cipher::Aes256Cbc])
    );
    assert_eq!(common.digest, Digest::Sha256);
    let tls_auth = common.tls_auth.as_ref().unwrap();
    assert_eq!(tls_auth.direction, KeyDirection::Normal);
    assert_eq!(common.timers.reneg, Duration::from_secs(60));
    assert!(server.duplicate_cn && server.ccd_exclusive);
    for line in [
        "openvpn-listen=tcp::1194,udp:127.0.0.1:1195,tcp:[::]:1196",
        "openvpn-network=10.30.0.0/22",
        "openvpn-topology=subnet",
        "openvpn-key-direction=0",
        "openvpn-reneg-sec=60s",
    ] {
        assert!(shown.iter().any(|shown| shown == line), "{line}: {shown:?}");
    }
}

#[test]
fn all_mistakes_are_reported_together() {
    let files = Files::new();
    let refused = errors(
        &files,
        &[
            "--openvpn-listen=sctp::1,tcp::0",
            "--openvpn-ca=@nothing",
            "--openvpn-network=10.20.0.0/30",
            "--openvpn-topology=ring",
            "--openvpn-route=10.0.0.1/8",
            "--openvpn-node-access-network=10.254.0.0/20",
            "--openvpn-client-config-dir=@nothing",
            "--openvpn-data-ciphers=BF-CBC",
            "--openvpn-auth=MD5",
            "--openvpn-key-direction=2",
            "--openvpn-tls-auth=@key",
            "--openvpn-tls-crypt=@key",
            "--openvpn-ping=1500ms",
            "--openvpn-ping-restart=1s",
            "--openvpn-reneg-sec=-1",
            "--openvpn-max-clients=0",
        ],
    );
    for part in [
        "sctp::1",
        "has no port",
        "OpenVPN CA",
        "must be set",
        "--openvpn-network",
        "--openvpn-topology",
        "--openvpn-route",
        "--openvpn-node-access-network",
        "--openvpn-client-config-dir",
        "BF-CBC",
        "--openvpn-auth",
        "--openvpn-key-direction",
        "exclude each other",
        "openvpn-ping must be whole seconds",
        "at least twice",
        "openvpn-reneg-sec",
        "openvpn-max-clients",
    ] {
        let found = refused.iter().any(|text| text.contains(part));
        assert!(found, "{part}: {refused:#?}");
    }
}

#[test]
fn config_file_is_sufficient_and_flags_override_it() {
    let files = Files::new();
    let text = format!(
        "mode server\nproto tcp\nlocal 127.0.0.1\nport 1199\nserver 10.21.0.0 255.255.255.0\n\
         ca {ca}\ncert {cert}\nkey {key}\ndh none\nduplicate-cn\nping 7\n\
         push \"route 172.25.0.0 255.255.0.0\"\nroute 172.25.0.0 255.255.0.0\n",
        ca = files.path("ca").display(),
        cert = files.path("cert").display(),
        key = files.path("key").display(),
    );
    std::fs::write(files.path("server.conf"), &text).unwrap();
    let config = files.uds(&["--openvpn-config=@server.conf"]).unwrap();
    let settings = config.openvpn.unwrap();
    assert_eq!(settings.listen[0].to_string(), "tcp:127.0.0.1:1199");
    assert_eq!(settings.network.to_string(), "10.21.0.0/24");
    assert_eq!(settings.ping, Some(Duration::from_secs(7)));
    assert!(settings.server.duplicate_cn);
    let more = [
        "--openvpn-config=@server.conf",
        "--openvpn-listen=udp::1194",
        "--openvpn-network=10.22.0.0/24",
        "--openvpn-ping=3s",
    ];
    let settings = files.uds(&more).unwrap().openvpn.unwrap();
    assert_eq!(settings.listen[0].to_string(), "udp::1194");
    assert_eq!(settings.network.to_string(), "10.22.0.0/24");
    assert_eq!(settings.ping, Some(Duration::from_secs(3)));
    let never = text.replace("ping 7", "ping 0\nping-restart 0");
    std::fs::write(files.path("never.conf"), never).unwrap();
    let config = files.uds(&["--openvpn-config=@never.conf"]).unwrap();
    let settings = config.openvpn.unwrap();
    assert_eq!((settings.ping, settings.ping_restart), (None, None));
    std::fs::write(files.path("bad.conf"), "dev tap\nup\nnonsense 1\n").unwrap();
    let refused = errors(&files, &["--openvpn-config=@bad.conf"]);
    assert!(
        refused.iter().any(|e| e.contains("bad.conf:3")),
        "{refused:?}"
    );
    let wrong = text.replace("ping 7", "ping soon");
    std::fs::write(files.path("wrong.conf"), wrong).unwrap();
    let refused = errors(&files, &["--openvpn-config=@wrong.conf"]);
    assert_eq!(refused.len(), 1, "{refused:?}");
    let refused = errors(&files, &["--openvpn-config=@missing.conf"]);
    assert!(
        refused.iter().any(|e| e.contains("missing.conf")),
        "{refused:?}"
    );
}

#[test]
fn flags_override_the_times_of_keepalive() {
    let files = Files::new();
    let text = "proto tcp\nserver 10.21.0.0 255.255.255.0\nkeepalive 10 60\n";
    std::fs::write(files.path("server.conf"), text).unwrap();
    let file = "--openvpn-config=@server.conf";
    for (flags, ping, restart) in [
        (vec![file], Some(10), Some(60)),
        (vec![file, "--openvpn-ping=0"], None, None),
        (
            vec![file, "--openvpn-ping=0", "--openvpn-ping-restart=90s"],
            None,
            Some(90),
        ),
        (
            vec![file, "--openvpn-ping=60s", "--openvpn-ping-restart=180s"],
            Some(60),
            Some(180),
        ),
    ] {
        let settings = settings(&files, &flags);
        let times = (settings.ping, settings.ping_restart);
        let expected = (
            ping.map(Duration::from_secs),
            restart.map(Duration::from_secs),
        );
        assert_eq!(times, expected, "{flags:?}");
        // The times above are pushed.
        assert_eq!(settings.server.push, Vec::<String>::new());
    }
}

#[test]
fn watching_nodes_needs_a_kubeconfig() {
    let files = Files::new();
    let watch = ["--openvpn-watch-nodes", "--kubeconfig=@kubeconfig"];
    assert_eq!(settings(&files, &watch[1..]).watch_nodes, None);
    let config = read(&files, &watch);
    let shown = config.describe();
    let kubeconfig = files.path("kubeconfig");
    for line in [
        "openvpn-watch-nodes=true".to_owned(),
        format!("kubeconfig={}", kubeconfig.display()),
    ] {
        assert!(shown.contains(&line), "{line}: {shown:?}");
    }
    // The kubeconfig is used, so there is no warning about it.
    assert_eq!(config.warnings, Vec::<String>::new());
    assert_eq!(config.openvpn.unwrap().watch_nodes, Some(kubeconfig));

    let refused = errors(&files, &[&KEYS[..], &watch[..1]].concat());
    let needs = "--openvpn-watch-nodes needs --kubeconfig: a file for the user cluster, of an account that may list and watch nodes";
    assert_eq!(refused, [needs]);
    let missing = [&KEYS[..], &watch[..1], &["--kubeconfig=@nothing"]].concat();
    let refused = errors(&files, &missing);
    assert_eq!(refused.len(), 1);
    assert!(
        refused[0].contains("error checking kubeconfig"),
        "{refused:?}"
    );
    let refused = errors(&files, &watch);
    assert_eq!(refused.len(), 1);
    assert!(refused[0].contains("--openvpn-listen"), "{refused:?}");
}

#[test]
fn networks_that_overlap_are_warnings() {
    let files = Files::new();
    let pods = "--openvpn-route=172.25.0.0/16,172.25.9.0/24,10.254.0.0/16";
    assert_eq!(read(&files, &[pods]).warnings, Vec::<String>::new());
    for (network, access, expected) in [
        (
            "172.25.0.0/24",
            "10.254.0.0/16",
            vec!["--openvpn-network 172.25.0.0/24 overlaps --openvpn-route 172.25.0.0/16: "],
        ),
        (
            "10.254.8.0/24",
            "10.254.0.0/16",
            vec![
                "--openvpn-network 10.254.8.0/24 overlaps --openvpn-node-access-network 10.254.0.0/16: ",
            ],
        ),
        (
            "10.20.0.0/24",
            "172.25.0.0/16",
            vec![
                "--openvpn-node-access-network 172.25.0.0/16 overlaps --openvpn-route 172.25.9.0/24: ",
            ],
        ),
        // The node access network is not one of the routes, so it is not used.
        ("10.253.8.0/24", "10.253.0.0/16", vec![]),
    ] {
        let network = format!("--openvpn-network={network}");
        let access = format!("--openvpn-node-access-network={access}");
        let warnings = read(&files, &[pods, &network, &access]).warnings;
        assert_eq!(warnings.len(), expected.len(), "{warnings:?}");
        for (warning, start) in warnings.iter().zip(expected) {
            assert!(warning.starts_with(start), "{warning}");
        }
    }
}
