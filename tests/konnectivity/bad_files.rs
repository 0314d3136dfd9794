//! Unusable files, paths and ports: error texts at startup, and faults that the programs survive.

use std::fs;
use std::net::{Ipv4Addr, TcpListener};
use std::os::unix::fs::{MetadataExt as _, PermissionsExt as _};
use std::path::{Path, PathBuf};
use std::process::Command;

use culvert_kit::pki::Pki;
use culvert_kit::services::Services;
use culvert_tests::ports::Ports;
use culvert_tests::skip::has_program;
use culvert_tests::{Executable, Mode, Program, Topology, Transport};
use tempfile::TempDir;

use crate::searching::Lone;
use crate::support::*;

/// Valid flags of a server, and the files and ports behind the flags.
struct Flags {
    dir: TempDir,
    pki: Pki,
    ports: [u16; 4],
    _ports: Ports,
}

impl Flags {
    fn new() -> Self {
        let dir = tempfile::Builder::new()
            .prefix("culvert-")
            .tempdir()
            .unwrap();
        let mut ports = Ports::default();
        Self {
            pki: Pki::create(dir.path()).unwrap(),
            ports: std::array::from_fn(|_| ports.next_port()),
            _ports: ports,
            dir,
        }
    }

    fn socket(&self) -> PathBuf {
        self.dir.path().join("front.socket")
    }

    fn on_unix(&self) -> Vec<String> {
        let mut flags = vec![
            format!("--uds-name={}", self.socket().display()),
            "--server-port=0".into(),
        ];
        flags.extend(self.common());
        flags
    }

    fn on_tcp(&self) -> Vec<String> {
        let mut flags = vec![
            format!("--server-port={}", self.ports[3]),
            "--server-bind-address=127.0.0.1".into(),
            format!("--server-cert={}", self.pki.server.cert.display()),
            format!("--server-key={}", self.pki.server.key.display()),
            format!("--server-ca-cert={}", self.pki.ca.display()),
        ];
        flags.extend(self.common());
        flags
    }

    fn common(&self) -> Vec<String> {
        let [agent, admin, health, _] = self.ports;
        vec![
            format!("--cluster-cert={}", self.pki.cluster.cert.display()),
            format!("--cluster-key={}", self.pki.cluster.key.display()),
            format!("--cluster-ca-cert={}", self.pki.ca.display()),
            format!("--agent-port={agent}"),
            "--agent-bind-address=127.0.0.1".into(),
            format!("--admin-port={admin}"),
            format!("--health-port={health}"),
            "--health-bind-address=127.0.0.1".into(),
            "--v=2".into(),
        ]
    }

    fn file(&self, name: &str, text: &str) -> PathBuf {
        let path = self.dir.path().join(name);
        fs::write(&path, text).unwrap();
        path
    }
}

/// Checks that a program with these flags exits with code 1 and logs every text.
async fn ends_with(program: &str, flags: &[String], extra: &[String], texts: &[&str]) {
    let mut program = Program::spawn(program, flags.iter().chain(extra), &[]);
    let status = program.wait_exit(LIMIT).await;
    for text in texts {
        program.wait_for_log(text, LIMIT).await;
    }
    let log = program.log();
    assert_eq!(status.code(), Some(1), "{log}");
}

fn flag(name: &str, path: &Path) -> String {
    format!("--{name}={}", path.display())
}

#[tokio::test]
async fn unusable_certificate_and_key_files_are_named_in_the_error() {
    let flags = Flags::new();
    let empty = flags.file("empty.pem", "");
    let garbage = flags.file(
        "garbage.pem",
        "-----BEGIN CERTIFICATE-----\n!!\n-----END CERTIFICATE-----\n",
    );
    let missing = flags.dir.path().join("missing.pem");
    let name = |path: &Path| path.file_name().unwrap().to_str().unwrap().to_owned();
    let cases = [
        flag("cluster-key", &flags.pki.agent.key),
        flag("cluster-key", &empty),
        flag("cluster-cert", &empty),
        flag("cluster-cert", &garbage),
        flag("cluster-cert", &missing),
        flag("cluster-cert", flags.dir.path()),
        flag("cluster-ca-cert", &empty),
        flag("cluster-ca-cert", &garbage),
        flag("cluster-ca-cert", &missing),
    ];
    for case in cases {
        let (_, path) = case.split_once('=').unwrap();
        let said = name(Path::new(path));
        ends_with(
            "culvert-server",
            &flags.on_unix(),
            std::slice::from_ref(&case),
            &[&said],
        )
        .await;
    }
    for case in [
        flag("server-key", &flags.pki.agent.key),
        flag("server-cert", &empty),
        flag("server-ca-cert", &garbage),
    ] {
        let (_, path) = case.split_once('=').unwrap();
        let said = name(Path::new(path));
        ends_with(
            "culvert-server",
            &flags.on_tcp(),
            std::slice::from_ref(&case),
            &[&said],
        )
        .await;
    }
    let agent = |name: &str, path: &Path| {
        let pki = &flags.pki;
        vec![
            flag("ca-cert", &pki.ca),
            flag("agent-cert", &pki.agent.cert),
            flag("agent-key", &pki.agent.key),
            format!("--health-server-port={}", flags.ports[2]),
            format!("--admin-server-port={}", flags.ports[1]),
            flag(name, path),
        ]
    };
    for (name, path, said) in [
        ("agent-key", &flags.pki.server.key, "server.key"),
        ("agent-cert", &garbage, "garbage.pem"),
        ("ca-cert", &empty, "empty.pem"),
        ("ca-cert", &missing, "missing.pem"),
    ] {
        ends_with("culvert-agent", &agent(name, path), &[], &[said]).await;
    }
}

#[tokio::test]
async fn existing_file_at_the_socket_path_is_kept_on_request() {
    let flags = Flags::new();
    fs::write(flags.socket(), "somebody's file").unwrap();
    let keep = ["--delete-existing-uds-file=false".to_owned()];
    let texts = ["front.socket", "--delete-existing-uds-file=true"];
    ends_with("culvert-server", &flags.on_unix(), &keep, &texts).await;
    assert_eq!(
        fs::read_to_string(flags.socket()).unwrap(),
        "somebody's file"
    );
    // By default the server replaces the existing file. Only owner and group may use the new socket.
    let program = Program::spawn("culvert-server", flags.on_unix(), &[]);
    program.wait_for_log("serving", LIMIT).await;
    let mode = fs::metadata(flags.socket()).unwrap().permissions().mode();
    assert_eq!(mode & 0o777, 0o770);
}

/// The second start fails at the port of agents.
#[tokio::test]
async fn failed_second_start_leaves_the_socket_to_the_running_server() {
    let flags = Flags::new();
    let running = Program::spawn("culvert-server", flags.on_unix(), &[]);
    running.wait_for_log("serving", LIMIT).await;
    let before = fs::metadata(flags.socket()).unwrap().ino();
    ends_with("culvert-server", &flags.on_unix(), &[], &["--agent-port"]).await;
    assert_eq!(fs::metadata(flags.socket()).unwrap().ino(), before);
}

#[tokio::test]
async fn unusable_socket_path_is_explained() {
    let flags = Flags::new();
    let missing = flag(
        "uds-name",
        &flags.dir.path().join("no/such/dir/front.socket"),
    );
    ends_with(
        "culvert-server",
        &flags.on_unix(),
        &[missing],
        &["create its folder"],
    )
    .await;
    let long = flag("uds-name", &flags.dir.path().join("x".repeat(120)));
    ends_with("culvert-server", &flags.on_unix(), &[long], &["107 bytes"]).await;
}

#[tokio::test]
async fn error_names_the_flag_of_a_port_in_use() {
    let taken = [
        "--agent-port",
        "--admin-port",
        "--health-port",
        "--server-port",
    ];
    for (index, name) in taken.into_iter().enumerate() {
        // Every round uses new ports: a child process that another test has just forked may keep a closed
        // listener open for a moment.
        let flags = Flags::new();
        let _other = TcpListener::bind((Ipv4Addr::LOCALHOST, flags.ports[index])).unwrap();
        let port = flags.ports[index].to_string();
        ends_with("culvert-server", &flags.on_tcp(), &[], &[name, &port]).await;
    }
    for (name, index) in [("--health-server-port", 2), ("--admin-server-port", 1)] {
        let flags = Flags::new();
        let _other = TcpListener::bind((Ipv4Addr::LOCALHOST, flags.ports[index])).unwrap();
        let args = [
            flag("ca-cert", &flags.pki.ca),
            "--health-server-host=127.0.0.1".into(),
            format!("--health-server-port={}", flags.ports[2]),
            format!("--admin-server-port={}", flags.ports[1]),
        ];
        ends_with("culvert-agent", &args, &[], &[name]).await;
    }
}

#[tokio::test]
async fn full_log_disk_does_not_disturb_traffic() {
    let services = Services::start().await.unwrap();
    let full = ["--logtostderr=false", "--log-file=/dev/full", "--v=5"];
    let mut topology = Topology::builder(Mode::HttpConnect, Transport::Uds)
        .server(Executable::Ours, &full)
        .agent(Executable::Ours, &full)
        .start()
        .await;
    let mut innocent = Innocent::open(&topology, services.raw).await;
    for _ in 0..20 {
        refusal(&topology, "127.0.0.1:1").await;
        innocent
            .still_echoes("a line that could not be logged")
            .await;
    }
    assert_unharmed(&mut topology).await;
}

#[tokio::test]
async fn unopenable_log_file_is_an_error_at_startup() {
    let flags = Flags::new();
    let path = flags.dir.path().join("no/such/dir/log");
    let args = ["--logtostderr=false".to_owned(), flag("log-file", &path)];
    ends_with(
        "culvert-server",
        &flags.on_unix(),
        &args,
        &["no/such/dir/log"],
    )
    .await;
}

/// Creates an X.509 version 1 certificate, signed by a new CA, with `openssl`, as operators do. Returns the
/// paths of certificate, key and CA.
fn version_1(dir: &Path) -> [PathBuf; 3] {
    let file = |name: &str| dir.join(name);
    let run = |args: &[&str]| {
        let output = Command::new("openssl").args(args).current_dir(dir).output();
        let output = output.expect("openssl");
        assert!(
            output.status.success(),
            "{}",
            String::from_utf8_lossy(&output.stderr)
        );
    };
    let key = [
        "-newkey",
        "ec",
        "-pkeyopt",
        "ec_paramgen_curve:P-256",
        "-nodes",
    ];
    let ca = [
        "req",
        "-x509",
        "-days",
        "2",
        "-subj",
        "/CN=old ca",
        "-keyout",
        "v1-ca.key",
        "-out",
        "v1-ca.crt",
    ];
    run(&[ca.as_slice(), key.as_slice()].concat());
    let request = [
        "req",
        "-subj",
        "/CN=localhost",
        "-keyout",
        "v1.key",
        "-out",
        "v1.csr",
    ];
    run(&[request.as_slice(), key.as_slice()].concat());
    run(&[
        "x509",
        "-req",
        "-in",
        "v1.csr",
        "-CA",
        "v1-ca.crt",
        "-CAkey",
        "v1-ca.key",
        "-CAcreateserial",
        "-days",
        "2",
        "-out",
        "v1.crt",
    ]);
    let text = Command::new("openssl")
        .args(["x509", "-noout", "-text", "-in"])
        .arg(file("v1.crt"))
        .output()
        .unwrap();
    assert!(String::from_utf8_lossy(&text.stdout).contains("Version: 1"));
    [file("v1.crt"), file("v1.key"), file("v1-ca.crt")]
}

#[tokio::test]
async fn x509_v1_certificate_works_as_our_identity_and_is_refused_from_peers() {
    if !has_program("openssl") {
        return;
    }
    let services = Services::start().await.unwrap();
    let mut topology = Topology::simple(Mode::HttpConnect, Transport::Uds).await;
    let mut innocent = Innocent::open(&topology, services.raw).await;
    let mut lone = Lone::new();
    let [cert, key, ca] = version_1(lone.dir.path());
    // An agent accepts a v1 certificate as its own. A server that trusts the CA still refuses this agent,
    // with advice.
    let flags = Flags::new();
    let trusting = [flag("cluster-ca-cert", &ca)];
    let server = Program::spawn(
        "culvert-server",
        flags.on_unix().iter().chain(&trusting),
        &[],
    );
    server.wait_for_log("serving", LIMIT).await;
    lone.start(
        &[
            &flag("agent-cert", &cert),
            &flag("agent-key", &key),
            &flag("ca-cert", &flags.pki.ca),
            &format!("--proxy-server-port={}", flags.ports[0]),
        ],
        &[],
    );
    let line = server.wait_for_log("X.509 v1", LIMIT).await;
    assert!(line.contains("reissue it as v3"), "{line}");
    lone.program().wait_for_log("cannot connect", LIMIT).await;
    assert_eq!(lone.program().exited(), None);
    // A server also accepts a v1 certificate as its own. Our agent refuses this server.
    let mut served = Lone::new();
    let flags = Flags::new();
    let own = [flag("cluster-cert", &cert), flag("cluster-key", &key)];
    let server = Program::spawn("culvert-server", flags.on_unix().iter().chain(&own), &[]);
    server.wait_for_log("serving", LIMIT).await;
    let port = format!("--proxy-server-port={}", flags.ports[0]);
    served.start(&[&flag("ca-cert", &ca), &port], &[]);
    let line = served.program().wait_for_log("X.509 v1", LIMIT).await;
    assert!(line.contains("reissue it as v3"), "{line}");
    innocent.still_echoes("certificates of version 1").await;
    assert_unharmed(&mut topology).await;
}

#[tokio::test]
async fn x509_v1_certificate_in_a_kubeconfig_stops_startup_with_advice() {
    if !has_program("openssl") {
        return;
    }
    let flags = Flags::new();
    let [cert, key, ca] = version_1(flags.dir.path());
    let kubeconfig = format!(
        "apiVersion: v1
kind: Config
clusters:
- name: a
  cluster:
    server: https://localhost:6443
    certificate-authority: {}
users:
- name: a
  user:
    client-certificate: {}
    client-key: {}
contexts:
- name: a
  context: {{cluster: a, user: a}}
current-context: a
",
        ca.display(),
        cert.display(),
        key.display()
    );
    let kubeconfig = flag("kubeconfig", &flags.file("kubeconfig", &kubeconfig));
    let texts = [
        "cannot use the Kubernetes account",
        "its client certificate is of X.509 version 1",
        "issue it again",
        "extendedKeyUsage=clientAuth",
    ];
    // The server authenticates agents by certificates or by tokens, not both.
    let mut server = flags.on_unix();
    server.retain(|flag| !flag.starts_with("--cluster-ca-cert="));
    let tokens = [
        kubeconfig.clone(),
        "--agent-namespace=kube-system".into(),
        "--agent-service-account=agent".into(),
        "--authentication-audience=system:konnectivity-server".into(),
    ];
    ends_with("culvert-server", &server, &tokens, &texts).await;
    let [sni, tunneling, stats, _] = flags.ports;
    let proxy = [
        "--bind-address=127.0.0.1".into(),
        format!("--envoy-sni-port={sni}"),
        format!("--envoy-tunneling-port={tunneling}"),
        format!("--envoy-stats-port={stats}"),
    ];
    ends_with("culvert-nodeport-proxy", &proxy, &[kubeconfig], &texts).await;
}

#[tokio::test]
async fn congestion_control_that_the_kernel_lacks_is_an_error_with_the_remedy() {
    let flags = Flags::new();
    let wrong = ["--link-congestion=no-such".to_owned()];
    let texts = [
        "--link-congestion=no-such: ",
        "load the kernel module tcp_no-such",
    ];
    ends_with("culvert-server", &flags.on_unix(), &wrong, &texts).await;
    let agent = [flag("ca-cert", &flags.pki.ca), "--v=2".to_owned()];
    ends_with("culvert-agent", &agent, &wrong, &texts).await;
    let [sni, tunneling, stats, listen] = flags.ports;
    let door = [
        flag("config", &flags.file("door.yaml", "upstreams:\n")),
        "--bind-address=127.0.0.1".into(),
        format!("--envoy-sni-port={sni}"),
        format!("--envoy-tunneling-port={tunneling}"),
        format!("--envoy-stats-port={stats}"),
    ];
    ends_with("culvert-nodeport-proxy", &door, &wrong, &texts).await;
    let node = [
        format!("--proxy=127.0.0.1:{tunneling}"),
        format!("--listen=127.0.0.1:{listen}=raw.demo.svc.cluster.local:443"),
        "--stats-address=127.0.0.1".into(),
        format!("--stats-port={stats}"),
    ];
    ends_with("culvert-node-tunnel", &node, &wrong, &texts).await;
}
