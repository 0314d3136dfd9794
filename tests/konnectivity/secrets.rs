//! Tokens, passwords and private keys never appear in logs, metrics or pages, at any verbosity. Files of the
//! programs belong to their user alone.

use std::fmt::Write as _;
use std::fs;
use std::net::{Ipv4Addr, SocketAddr};
use std::os::unix::fs::PermissionsExt as _;
use std::path::{Path, PathBuf};

use culvert_kit::client::{self, FrontEnd};
use culvert_kit::pki::{Pair, Pki};
use culvert_kit::services::Services;
use culvert_tests::kube_api::{KubeApi, TOKEN, TokenStatus};
use culvert_tests::metrics::http_get;
use culvert_tests::ports::Ports;
use culvert_tests::process::ours;
use culvert_tests::{Program, Signal, eventually};
use rustls::pki_types::PrivateKeyDer;
use rustls::pki_types::pem::PemObject as _;
use tempfile::TempDir;
use tokio::io::{AsyncReadExt as _, AsyncWriteExt as _, copy_bidirectional};
use tokio::net::{TcpListener, TcpStream, UnixStream};

use crate::support::*;

const USER: &str = "system:serviceaccount:kube-system:konnectivity-agent";

/// Names of the programs' certificates for each other.
const HOST: &str = "konnectivity-server.dev.localhost";

/// Secrets, each with the texts that would reveal the secret.
#[derive(Default)]
struct Secrets(Vec<(&'static str, Vec<String>)>);

impl Secrets {
    /// Creates a secret of 32 characters.
    fn new_text(&mut self, name: &'static str) -> String {
        let text = format!("{:032x}", rand::random::<u128>());
        self.add(name, text.as_bytes());
        text
    }

    /// Adds the secret part of a private key, which is an ECDSA key. The public part is also in the
    /// certificate.
    fn add_key(&mut self, name: &'static str, path: &Path) {
        let key = PrivateKeyDer::from_pem_file(path).unwrap();
        // The octet string after the version of an ECPrivateKey (RFC 5915).
        let start = [2, 1, 1, 4, 32];
        let der = key.secret_der();
        let at = der.windows(start.len()).position(|part| part == start);
        let at = at.unwrap() + start.len();
        self.add(name, &der[at..at + 32]);
    }

    /// Adds a secret: its first 16 characters, in base64 at every alignment, in hexadecimal, and as a list of
    /// numbers.
    fn add(&mut self, name: &'static str, secret: &[u8]) {
        let mut texts = Vec::new();
        if let Ok(text) = std::str::from_utf8(secret) {
            texts.push(text[..16].to_owned());
        }
        for skipped in 0..3 {
            let block = pem::encode(&pem::Pem::new("X", &secret[skipped..]));
            texts.push(block.lines().nth(1).unwrap()[..16].to_owned());
        }
        let (mut lower, mut upper) = (String::new(), String::new());
        for byte in &secret[..8] {
            write!(lower, "{byte:02x}").unwrap();
            write!(upper, "{byte:02X}").unwrap();
        }
        let numbers = format!("{:?}", &secret[..8]);
        texts.extend([lower, upper, numbers.trim_matches(['[', ']']).to_owned()]);
        self.0.push((name, texts));
    }

    /// Checks that a text reveals no secret.
    fn assert_absent(&self, place: &str, text: &str) {
        for (name, needles) in &self.0 {
            for needle in needles {
                let line = text.lines().find(|line| line.contains(needle.as_str()));
                assert!(line.is_none(), "{place} reveals {name}: {line:?}");
            }
        }
    }
}

/// The files and ports of the programs.
struct Lab {
    dir: TempDir,
    ports: Ports,
    format: &'static str,
    logs: Vec<PathBuf>,
}

impl Lab {
    fn write(&self, name: &str, text: &str) -> PathBuf {
        let path = self.dir.path().join(name);
        fs::write(&path, text).unwrap();
        path
    }

    fn address(&mut self) -> SocketAddr {
        (Ipv4Addr::LOCALHOST, self.ports.next_port()).into()
    }

    /// Starts a program with every line in a log file, the libraries' lines included. The limit of core dumps
    /// is off before the start.
    fn start(&mut self, program: &str, args: &[String], env: &[(&str, &str)]) -> Program {
        let log = self
            .dir
            .path()
            .join(format!("{program}-{}.log", self.logs.len()));
        let script = "ulimit -c unlimited; exec \"$0\" \"$@\"".to_owned();
        let mut all = vec!["-c".into(), script, ours(program).display().to_string()];
        all.extend_from_slice(args);
        all.extend([
            "--v=10".into(),
            format!("--log-format={}", self.format),
            "--logtostderr=false".into(),
            format!("--log-file={}", log.display()),
        ]);
        self.logs.push(log);
        Program::spawn("/bin/sh", all, env).named(program)
    }

    /// Waits until the log file with this number contains `text`.
    async fn logged(&self, number: usize, text: &str) {
        eventually(&format!("{text:?} is logged"), LIMIT, async || {
            let log = fs::read_to_string(&self.logs[number]).unwrap_or_default();
            log.contains(text).then_some(()).ok_or(log.len())
        })
        .await;
    }
}

fn flag(name: &str, value: impl std::fmt::Display) -> String {
    format!("--{name}={value}")
}

fn pair(prefix: &str, pair: &Pair) -> [String; 2] {
    [
        flag(&format!("{prefix}-cert"), pair.cert.display()),
        flag(&format!("{prefix}-key"), pair.key.display()),
    ]
}

/// An HTTP proxy: refuses the first request, and then connects every client to `target`.
async fn proxy(target: SocketAddr) -> SocketAddr {
    let listener = TcpListener::bind((Ipv4Addr::LOCALHOST, 0)).await.unwrap();
    let address = listener.local_addr().unwrap();
    tokio::spawn(async move {
        let mut answer = "HTTP/1.1 407 Proxy Authentication Required\r\n\r\n";
        while let Ok((mut stream, _)) = listener.accept().await {
            let answer = std::mem::replace(&mut answer, "HTTP/1.1 200 OK\r\n\r\n");
            tokio::spawn(async move {
                let mut head = Vec::new();
                while !head.ends_with(b"\r\n\r\n") {
                    head.push(stream.read_u8().await?);
                }
                stream.write_all(answer.as_bytes()).await?;
                if answer.contains("200") {
                    let mut far = TcpStream::connect(target).await?;
                    copy_bidirectional(&mut stream, &mut far).await?;
                }
                std::io::Result::Ok(())
            });
        }
    });
    address
}

/// Returns the answer of an admin socket.
async fn ask(socket: &Path, path: &str) -> String {
    let mut stream = UnixStream::connect(socket).await.unwrap();
    let request = format!("GET {path} HTTP/1.1\r\nhost: a\r\nconnection: close\r\n\r\n");
    stream.write_all(request.as_bytes()).await.unwrap();
    let mut answer = String::new();
    timely("an answer", stream.read_to_string(&mut answer))
        .await
        .unwrap();
    answer
}

async fn is_ready(health: SocketAddr) {
    eventually("the program is ready", LIMIT, async || {
        let answer = http_get(health, "/readyz").await;
        let (status, _, body) = answer.map_err(|error| format!("{error:#}"))?;
        status.is_success().then_some(()).ok_or(format!("{body:?}"))
    })
    .await;
}

/// Runs all programs with recognizable secrets and the most verbose log.
async fn reveals_nothing(format: &'static str) {
    let dir = tempfile::Builder::new()
        .prefix("culvert-")
        .tempdir()
        .unwrap();
    let path = |name: &str| dir.path().join(name);
    let (pki, openvpn) = (
        Pki::create(dir.path()).unwrap(),
        Pki::create_openvpn(dir.path()).unwrap(),
    );
    let (socket, admin_socket) = (path("front.socket"), path("admin.socket"));
    let (state_file, token_file) = (path("state"), path("token"));
    let mut lab = Lab {
        dir,
        ports: Ports::default(),
        format,
        logs: Vec::new(),
    };
    let mut secrets = Secrets::default();
    for (name, pair) in [
        ("the key for agents", &pki.cluster),
        ("the agent's key", &pki.agent),
        ("the key for front ends", &pki.server),
        ("the OpenVPN server's key", &openvpn.server),
        ("the OpenVPN client's key", &openvpn.user_cluster),
    ] {
        secrets.add_key(name, &pair.key);
    }

    let api = KubeApi::start().await;
    let kubeconfig = api.kubeconfig(lab.dir.path());
    let account = secrets.new_text("the token of the kubeconfig");
    let text = fs::read_to_string(&kubeconfig)
        .unwrap()
        .replace(TOKEN, &account);
    fs::write(&kubeconfig, text).unwrap();
    let (bad, good) = (
        secrets.new_text("a bad token"),
        secrets.new_text("a good token"),
    );
    api.token(&good, TokenStatus::user(USER));
    api.token(
        &bad,
        TokenStatus::user("system:serviceaccount:kube-system:other"),
    );
    let auth_token = secrets.new_text("the auth-token");
    let password = secrets.new_text("the OpenVPN password");
    let proxy_password = secrets.new_text("the proxy's password");
    let lines: Vec<String> = (0..16)
        .map(|_| secrets.new_text("the static key"))
        .collect();
    let static_key = format!(
        "-----BEGIN OpenVPN Static key V1-----\n{}\n-----END OpenVPN Static key V1-----\n",
        lines.join("\n")
    );
    let static_file = lab.write("static.key", &static_key);
    fs::write(&token_file, format!("{bad}\n")).unwrap();

    let [agents, health, admin, vpn] = std::array::from_fn(|_| lab.address());
    let mut args = vec![
        "--mode=http-connect".to_owned(),
        "--server-port=0".into(),
        flag("uds-name", socket.display()),
        flag("agent-port", agents.port()),
        "--agent-namespace=kube-system".into(),
        "--agent-service-account=konnectivity-agent".into(),
        "--authentication-audience=system:konnectivity-server".into(),
        flag("kubeconfig", kubeconfig.display()),
        flag("health-port", health.port()),
        flag("admin-port", admin.port()),
        flag("admin-uds", admin_socket.display()),
        "--tunnel-mode=prefer-konnectivity".into(),
        flag("tunnel-state-file", state_file.display()),
        flag("openvpn-listen", format_args!("tcp:{vpn}")),
        flag("openvpn-ca", openvpn.ca.display()),
        flag("openvpn-tls-auth", static_file.display()),
        "--openvpn-key-direction=0".into(),
        flag("openvpn-push", format_args!("auth-token {auth_token}")),
        "--openvpn-route=127.0.0.0/8".into(),
    ];
    args.extend(pair("cluster", &pki.cluster));
    args.extend(pair("openvpn", &openvpn.server));
    let mut programs = vec![lab.start("culvert-server", &args, &[])];
    lab.logged(0, "serving OpenVPN").await;

    // The agent's first connection is refused by the proxy, the next ones by the server.
    let proxied = format!("http://user:{proxy_password}@{}", proxy(agents).await);
    let agent_health = lab.address();
    let mut args = vec![
        flag("ca-cert", pki.ca.display()),
        flag("proxy-server-host", HOST),
        flag("proxy-server-port", agents.port()),
        flag("service-account-token-path", token_file.display()),
        flag("health-server-port", agent_health.port()),
        flag("admin-server-port", lab.address().port()),
        "--sync-interval=50ms".into(),
        "--sync-interval-cap=100ms".into(),
    ];
    args.extend(pair("agent", &pki.agent));
    programs.push(lab.start("culvert-agent", &args, &[("HTTPS_PROXY", &proxied)]));
    lab.logged(1, "407 Proxy Authentication Required").await;
    lab.logged(1, "lookup failed").await;
    fs::write(&token_file, format!("{good}\n")).unwrap();
    is_ready(agent_health).await;

    let block = |tag: &str, path: &Path| {
        let text = fs::read_to_string(path).unwrap();
        format!("<{tag}>\n{text}</{tag}>\n")
    };
    let credentials = lab.write("credentials", &format!("user\n{password}\n"));
    let client = [
        format!("client\nremote {} {} tcp\n", vpn.ip(), vpn.port()),
        format!(
            "auth-user-pass {}\nkey-direction 1\n",
            credentials.display()
        ),
        block("ca", &openvpn.ca),
        block("cert", &openvpn.user_cluster.cert),
        block("key", &openvpn.user_cluster.key),
        block("tls-auth", &static_file),
    ];
    let client = lab.write("client.conf", &client.concat());
    let vpn_health = lab.address();
    let args = [
        flag("openvpn-config", client.display()),
        flag("health-server-port", vpn_health.port()),
        flag("admin-server-port", lab.address().port()),
    ];
    programs.push(lab.start("culvert-agent", &args, &[]));
    is_ready(vpn_health).await;
    lab.logged(2, "the OpenVPN tunnel is up").await;

    let [sni, tunneling, stats, listen, node_stats] = std::array::from_fn(|_| lab.address());
    let args = [
        flag("kubeconfig", kubeconfig.display()),
        flag("envoy-sni-port", sni.port()),
        flag("envoy-tunneling-port", tunneling.port()),
        flag("envoy-stats-port", stats.port()),
        "--bind-address=127.0.0.1".into(),
        flag("tunneling-cert", pki.server.cert.display()),
        flag("tunneling-key", pki.server.key.display()),
    ];
    programs.push(lab.start("culvert-nodeport-proxy", &args, &[]));
    is_ready(stats).await;
    let args = [
        flag("proxy", tunneling),
        flag("listen", format_args!("{listen}=a.b.svc.cluster.local:443")),
        "--stats-address=127.0.0.1".into(),
        flag("stats-port", node_stats.port()),
    ];
    programs.push(lab.start("culvert-node-tunnel", &args, &[]));
    eventually("the node tunnel serves", LIMIT, async || {
        http_get(node_stats, "/healthz").await.map(drop)
    })
    .await;

    // Connections by both tunnels, and one that fails.
    let services = Services::start().await.unwrap();
    let front_end = FrontEnd::ConnectUds(socket);
    for target in [services.raw.to_string(), "127.0.0.1:1".to_owned()] {
        let _ = client::connect(&front_end, &target, LIMIT).await;
    }
    let switch = "POST /tunnel/switch HTTP/1.1\r\nhost: a\r\nconnection: close\r\n";
    let body = r#"{"to":"prefer-openvpn"}"#;
    let mut stream = UnixStream::connect(&admin_socket).await.unwrap();
    let request = format!("{switch}content-length: {}\r\n\r\n{body}", body.len());
    stream.write_all(request.as_bytes()).await.unwrap();
    let mut answer = String::new();
    timely("an answer", stream.read_to_string(&mut answer))
        .await
        .unwrap();
    assert!(answer.starts_with("HTTP/1.1 202"), "{answer}");
    let _ = client::connect(&front_end, &services.raw.to_string(), LIMIT).await;
    let _ = TcpStream::connect(listen).await.unwrap();

    for address in [health, admin, agent_health, vpn_health, stats, node_stats] {
        for page in ["/metrics", "/healthz", "/readyz", "/stats/prometheus"] {
            let (_, _, body) = http_get(address, page).await.unwrap();
            secrets.assert_absent(page, &String::from_utf8_lossy(&body));
        }
    }
    for page in ["/metrics", "/tunnel"] {
        secrets.assert_absent(page, &ask(&admin_socket, page).await);
    }
    for program in &programs {
        let limits = fs::read_to_string(format!("/proc/{}/limits", program.pid())).unwrap();
        let core = limits
            .lines()
            .find(|line| line.starts_with("Max core file size"));
        let numbers: Vec<&str> = core.unwrap().split_whitespace().skip(4).collect();
        // A hard limit of 0 cannot be raised.
        assert!(numbers[0] == "1" || numbers[1] == "0", "{core:?}");
    }
    for program in &mut programs {
        program.signal(Signal::TERM);
    }
    for (program, log) in programs.iter_mut().zip(&lab.logs) {
        program.wait_exit(LIMIT).await;
        secrets.assert_absent("stderr", &program.log());
        let text = fs::read_to_string(log).unwrap();
        secrets.assert_absent(&log.display().to_string(), &text);
    }
    // The libraries' lines are in the log. Only JSON shows their targets.
    let text = fs::read_to_string(&lab.logs[0]).unwrap();
    assert!(format == "text" || text.contains("\"target\":\"h2"));
    for file in lab.logs.iter().chain([&state_file]) {
        let mode = fs::metadata(file).unwrap().permissions().mode();
        assert_eq!(mode & 0o777, 0o600, "{}", file.display());
    }
}

#[tokio::test]
async fn text_logs_and_pages_reveal_no_secret() {
    reveals_nothing("text").await;
}

#[tokio::test]
async fn json_logs_and_pages_reveal_no_secret() {
    reveals_nothing("json").await;
}

#[tokio::test]
async fn errors_about_files_reveal_no_secret() {
    let dir = tempfile::Builder::new()
        .prefix("culvert-")
        .tempdir()
        .unwrap();
    let pki = Pki::create(dir.path()).unwrap();
    let mut lab = Lab {
        dir,
        ports: Ports::default(),
        format: "text",
        logs: Vec::new(),
    };
    let mut secrets = Secrets::default();
    secrets.add_key("the key", &pki.cluster.key);
    let token = secrets.new_text("the token");
    let key = fs::read_to_string(&pki.cluster.key).unwrap();
    let kubeconfig =
        format!("apiVersion: v1\nusers:\n- name: u\n  user:\n    token: {token}\n   :\n");
    let kubeconfig = flag("kubeconfig", lab.write("kubeconfig", &kubeconfig).display());
    let static_key = format!("-----BEGIN OpenVPN Static key V1-----\n{token}\n");
    let static_key = lab.write("static.key", &static_key);
    let bad_keys: Vec<PathBuf> = [
        ("joined.key", key.replace('\n', "")),
        ("literal.key", key.replace('\n', "\\n")),
        ("cut.key", key[..key.len() / 2].to_owned()),
        ("spoiled.key", key.replacen('A', "!", 1)),
    ]
    .iter()
    .map(|(name, text)| lab.write(name, text))
    .collect();
    let config = lab.write(
        "client.conf",
        &format!("client\nremote a 1\n{key}{token}\n"),
    );

    let server = |lab: &mut Lab| {
        vec![
            "--server-port=0".to_owned(),
            flag("uds-name", lab.dir.path().join("front.socket").display()),
            flag("cluster-cert", pki.cluster.cert.display()),
            flag("agent-port", lab.address().port()),
            flag("health-port", lab.address().port()),
            flag("admin-port", lab.address().port()),
        ]
    };
    let mut runs: Vec<(&str, Vec<String>)> = Vec::new();
    for bad in &bad_keys {
        let bad = &bad.display().to_string();
        let mut args = server(&mut lab);
        args.push(flag("cluster-key", bad));
        runs.push(("culvert-server", args));
        let mut args = server(&mut lab);
        args.extend([
            flag("cluster-key", pki.cluster.key.display()),
            flag("openvpn-listen", format_args!("tcp:{}", lab.address())),
            flag("openvpn-ca", pki.ca.display()),
            flag("openvpn-cert", pki.cluster.cert.display()),
            flag("openvpn-key", bad),
        ]);
        runs.push(("culvert-server", args));
        runs.push((
            "culvert-agent",
            vec![
                "--openvpn-remote=127.0.0.1:1".into(),
                flag("openvpn-ca", pki.ca.display()),
                flag("openvpn-cert", pki.cluster.cert.display()),
                flag("openvpn-key", bad),
            ],
        ));
        runs.push((
            "culvert-nodeport-proxy",
            vec![
                flag(
                    "config",
                    lab.write("door.yaml", "upstreams: []\n").display(),
                ),
                flag("tunneling-cert", pki.cluster.cert.display()),
                flag("tunneling-key", bad),
            ],
        ));
    }
    runs.push((
        "culvert-agent",
        vec![flag("openvpn-config", config.display())],
    ));
    runs.push(("culvert-nodeport-proxy", vec![kubeconfig.clone()]));
    let mut args = server(&mut lab);
    args.extend([
        flag("cluster-key", pki.cluster.key.display()),
        flag("openvpn-listen", format_args!("tcp:{}", lab.address())),
        flag("openvpn-ca", pki.ca.display()),
        flag("openvpn-cert", pki.cluster.cert.display()),
        flag("openvpn-key", pki.cluster.key.display()),
        flag("openvpn-tls-auth", static_key.display()),
    ]);
    runs.push(("culvert-server", args));
    for (number, (program, mut args)) in runs.into_iter().enumerate() {
        if program != "culvert-server" {
            // No default port may be in use.
            let flags: &[&str] = match program {
                "culvert-agent" => &["health-server-port", "admin-server-port"],
                _ => &["envoy-sni-port", "envoy-tunneling-port", "envoy-stats-port"],
            };
            for name in flags {
                args.push(flag(name, lab.address().port()));
            }
        }
        let mut program = lab.start(program, &args, &[]);
        let status = program.wait_exit(LIMIT).await;
        let log = fs::read_to_string(&lab.logs[number]).unwrap_or_default() + &program.log();
        assert_eq!(status.code(), Some(1), "{args:?}: {log}");
        secrets.assert_absent(&format!("{args:?}"), &log);
    }
}
