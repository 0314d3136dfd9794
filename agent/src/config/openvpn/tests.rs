#![allow(clippy::unwrap_used, clippy::indexing_slicing)]

use std::path::Path;

use culvert_host::flags::Exit;
use culvert_openvpn::cipher::Digest;
use culvert_openvpn::wrap::KeyDirection;

use super::super::flags::Flags;
use super::super::{Config, PROGRAM};
use super::*;

/// Creates a folder with the files that the flags refer to.
fn files() -> tempfile::TempDir {
    let dir = tempfile::tempdir().unwrap();
    for name in ["ca", "cert", "key", "static"] {
        std::fs::write(dir.path().join(name), "").unwrap();
    }
    let config = format!(
        "client\nproto tcp\ndev kube\ndev-type tun\nremote vpn.example.com 31194\nca {0}/ca\ncert {0}/cert\nkey {0}/key\n\
        remote-cert-tls server\ncipher AES-256-GCM\nauth SHA1\nkeysize 256\n",
        dir.path().display()
    );
    std::fs::write(dir.path().join("config"), config).unwrap();
    dir
}

/// Parses a command line. `@name` in an argument expands to the path of the file `name`.
fn read(dir: &Path, line: &[&str]) -> Result<Config, Exit> {
    let root = format!("{}/", dir.display());
    let args = [PROGRAM].iter().chain(line);
    let args: Vec<String> = args.map(|arg| arg.replace('@', &root)).collect();
    Flags::read(args, Some("id".into()))
}

fn openvpn(dir: &Path, line: &[&str]) -> (OpenVpn, Vec<String>) {
    let config = read(dir, line).unwrap();
    (config.openvpn.unwrap(), config.warnings)
}

#[test]
fn config_file_alone_is_sufficient() {
    let dir = files();
    let config = read(dir.path(), &["--openvpn-config=@config"]).unwrap();
    // The flags of the Konnectivity tunnel are not required.
    assert_eq!(config.ca_cert, None);
    let OpenVpn { client, nodes } = config.openvpn.as_ref().unwrap();
    assert_eq!(client.remotes[0].to_string(), "vpn.example.com:31194,tcp");
    assert_eq!(*nodes, NodeAccess::default());
    let told = |text: &str| config.warnings.iter().any(|warning| warning.contains(text));
    assert!(
        told("config:3: dev: not needed") && told("keysize"),
        "{:?}",
        config.warnings
    );
    assert!(told("connections to 10.254.0.0/16 are refused"));
    let described = config.describe();
    assert!(described.contains(&"openvpn-remote=vpn.example.com:31194,tcp".to_owned()));
}

#[test]
fn flags_override_the_file() {
    let dir = files();
    let (OpenVpn { client, nodes }, warnings) = openvpn(
        dir.path(),
        &[
            "--ca-cert=@ca",
            "--openvpn-config=@config",
            "--openvpn-remote=a:1194",
            "--openvpn-remote=[::1]:1195,udp",
            "--openvpn-data-ciphers=AES-128-GCM:AES-256-CBC",
            "--openvpn-auth=SHA256",
            "--openvpn-tls-auth=@static",
            "--openvpn-key-direction=1",
            "--openvpn-node-access-network=10.253.0.0/16",
            "--openvpn-nodes=192.168.0.0/20,10.1.2.3",
            "--openvpn-nodes=172.16.2.3",
        ],
    );
    let remotes: Vec<_> = client.remotes.iter().map(ToString::to_string).collect();
    assert_eq!(remotes, ["a:1194,tcp", "[::1]:1195,udp"]);
    let mut session = culvert_openvpn::session::Common::new(Transport::Tcp);
    client.common.apply(&mut session);
    assert_eq!(session.ciphers, [Cipher::Aes128Gcm, Cipher::Aes256Cbc]);
    assert_eq!(session.digest, Digest::Sha256);
    assert_eq!(session.tls_auth, Some(KeyDirection::Inverse));
    assert_eq!(nodes.network, "10.253.0.0/16".parse().unwrap());
    assert_eq!(nodes.nodes.len(), 3);
    assert!(
        warnings
            .iter()
            .any(|text| text.contains("172.16.2.3/32") && text.contains("never reached"))
    );
}

#[test]
fn flags_alone_require_a_server_certificate() {
    let dir = files();
    let (OpenVpn { client, .. }, _) = openvpn(
        dir.path(),
        &[
            "--openvpn-remote=h:1",
            "--openvpn-ca=@ca",
            "--openvpn-cert=@cert",
            "--openvpn-key=@key",
            "--openvpn-tls-crypt=@static",
        ],
    );
    assert!(client.common.require_usage);
    assert_eq!(
        client.common.tls_crypt,
        Some(Material::File(dir.path().join("static")))
    );
}

#[test]
fn all_mistakes_are_reported_together() {
    let dir = files();
    std::fs::write(dir.path().join("bad"), "client\nfragment 1300\ndev tap\n").unwrap();
    let errors = |line: &[&str]| {
        let text = read(dir.path(), line).unwrap_err().text;
        text.lines()
            .filter(|line| line.starts_with("Error: "))
            .count()
    };
    // Two mistakes in the file, and one in the flag.
    let line = ["--openvpn-config=@bad", "--health-server-port=0"];
    assert_eq!(errors(&line), 3);
    let line = [
        "--openvpn-remote=h",
        "--openvpn-remote=h:0",
        "--openvpn-remote=h:1,sctp",
        "--openvpn-ca=@missing",
        "--openvpn-cert=@cert",
        "--openvpn-data-ciphers=BF-CBC",
        "--openvpn-auth=MD5",
        "--openvpn-tls-auth=@static",
        "--openvpn-tls-crypt=@static",
        "--openvpn-key-direction=2",
        "--openvpn-nodes=10.0.0.0/8,x",
        "--openvpn-node-access-network=10.254.0.0/24",
    ];
    let text = read(dir.path(), &line).unwrap_err().text;
    assert_eq!(errors(&line), 13, "{text}");
}

#[test]
fn openvpn_flags_without_config_or_remote_are_rejected() {
    let dir = files();
    let text = read(
        dir.path(),
        &[
            "--ca-cert=@ca",
            "--openvpn-ca=@ca",
            "--openvpn-nodes=10.0.0.1",
        ],
    )
    .unwrap_err()
    .text;
    assert!(
        text.contains(
            "--openvpn-ca, --openvpn-nodes: --openvpn-config or --openvpn-remote must be set, too"
        ),
        "{text}"
    );
}

#[test]
fn konnectivity_flags_require_ca_cert() {
    let dir = files();
    for line in [
        [
            "--openvpn-config=@config",
            "--proxy-server-host=konnectivity.example.com",
        ],
        ["--openvpn-config=@config", "--agent-cert=@cert"],
    ] {
        let text = read(dir.path(), &line).unwrap_err().text;
        assert!(text.contains("--ca-cert must be set"), "{text}");
    }
}
