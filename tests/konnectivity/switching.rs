//! The tunnel mode of a running server: `culvert status`, `culvert switch`, the mode file, restarts.

use std::os::unix::fs::{PermissionsExt as _, symlink};
use std::os::unix::process::CommandExt as _;
use std::path::{Path, PathBuf};
use std::process::{Command, Output};

use culvert_kit::pki::Pki;
use culvert_kit::services::Services;
use culvert_server::switch::SetBy;
use culvert_server::switch::status::{Progress, Status};
use culvert_server::tunnel::Mode as TunnelMode;
use culvert_server::tunnel::{Health, Kind};
use culvert_tests::metrics::http_get;
use culvert_tests::process::ours;
use culvert_tests::skip::skip;
use culvert_tests::{Executable, Mode, Program, Signal, Topology, Transport, eventually};
use serde_json::{Value, json};

use crate::support::*;

/// A server and an agent. The server's files outlive the server.
struct Switchable {
    topology: Topology,
    folder: tempfile::TempDir,
}

impl Switchable {
    async fn start(more: &[&str]) -> Self {
        Self::start_in(tempfile::tempdir().unwrap(), more).await
    }

    /// Starts both programs. `@name` in a flag becomes the path of a file in the folder.
    async fn start_in(folder: tempfile::TempDir, more: &[&str]) -> Self {
        let root = format!("{}/", folder.path().display());
        let usual = ["--admin-uds=@admin.socket", "--tunnel-state-file=@state"];
        let args = usual.iter().chain(more).map(|arg| arg.replace('@', &root));
        let args: Vec<String> = args.collect();
        let args: Vec<&str> = args.iter().map(String::as_str).collect();
        let builder = Topology::builder(Mode::HttpConnect, Transport::Uds).servers(1);
        let topology = builder.server_args(&args).agents(1).start().await;
        Self { topology, folder }
    }

    fn path(&self, name: &str) -> PathBuf {
        self.folder.path().join(name)
    }

    async fn culvert(&self, args: &[&str]) -> (bool, String) {
        let socket = format!("--admin-uds={}", self.path("admin.socket").display());
        culvert(&[args, &[&socket]].concat()).await
    }

    async fn status(&self) -> Status {
        let (done, text) = self.culvert(&["status", "--json"]).await;
        assert!(done, "{text}");
        serde_json::from_str(&text).unwrap()
    }

    async fn shows(&self, mode: TunnelMode, set_by: SetBy, problem: &str) {
        eventually(&format!("{mode} by {set_by:?}"), LIMIT, async || {
            let status = self.status().await;
            let problems = status.problems.join("\n");
            let as_expected =
                problems.contains(problem) && problem.is_empty() == problems.is_empty();
            let seen = (status.mode, status.set_by);
            (seen == (mode, set_by) && as_expected)
                .then_some(())
                .ok_or_else(|| format!("{status:?}"))
        })
        .await;
    }
}

async fn culvert(args: &[&str]) -> (bool, String) {
    let (code, text) = exit_code(args).await;
    (code == Some(0), text)
}

/// Runs `culvert`, and returns its exit code and its output.
async fn exit_code(args: &[&str]) -> (Option<i32>, String) {
    let mut program = Program::spawn("culvert", args, &[]);
    let status = program.wait_exit(LIMIT).await;
    (status.code(), program.log())
}

#[tokio::test]
async fn switch_takes_effect_and_appears_in_status_and_metrics() {
    let services = Services::start().await.unwrap();
    let mut server = Switchable::start(&["--link-congestion=reno"]).await;
    let mut innocent = Innocent::open(&server.topology, services.raw).await;

    let status = server.status().await;
    assert_eq!(status.link_congestion.as_deref(), Some("reno"));
    assert_eq!(status.version.as_deref(), Some(env!("CARGO_PKG_VERSION")));
    assert_eq!(
        (status.mode, status.set_by),
        (TunnelMode::Konnectivity, SetBy::Flag)
    );
    assert_eq!(status.new_dials, [Kind::Konnectivity]);
    let [tunnel] = status.tunnels.as_slice() else {
        panic!("{status:?}");
    };
    assert_eq!((tunnel.health, tunnel.connections), (Health::Healthy, 1));
    assert_eq!(tunnel.peers[0].name, "agent-0");
    assert_eq!(tunnel.peers[0].connections, 1);
    let (done, text) = server.culvert(&["status"]).await;
    assert!(
        done && text.contains("mode        konnectivity (set by flag)"),
        "{text}"
    );
    assert!(
        text.contains("agent-0") && text.contains("agent, native"),
        "{text}"
    );

    let to = ["switch", "--to", "prefer-konnectivity", "--wait"];
    let (done, text) = server.culvert(&to).await;
    assert!(
        done && text.contains("prefer-konnectivity: in force"),
        "{text}"
    );
    server
        .shows(TunnelMode::PreferKonnectivity, SetBy::Switch, "")
        .await;
    innocent.still_echoes("after the switch").await;
    Innocent::open(&server.topology, services.raw).await;
    let page = server.topology.server_metrics(0).await;
    let mode = [("mode", "prefer-konnectivity")];
    assert_eq!(value(&page, "culvert_tunnel_mode", &mode), 1.0);
    let opened = [("tunnel", "konnectivity"), ("outcome", "opened")];
    assert_eq!(value(&page, "culvert_tunnel_dials_total", &opened), 2.0);
    let count = "culvert_tunnel_switch_duration_seconds_count";
    assert_eq!(page.value(count, &[]), Some(1.0));

    // The server has no OpenVPN tunnel.
    for mode in ["openvpn", "prefer-openvpn"] {
        let (done, text) = server.culvert(&["switch", "--to", mode, "--wait"]).await;
        assert!(!done && text.contains("needs an OpenVPN tunnel"), "{text}");
    }
    for wrong in [
        ["--to=vpn", "--drain=1m"],
        ["--to=konnectivity", "--drain=-1m"],
    ] {
        let (done, text) = server.culvert(&["switch", wrong[0], wrong[1]]).await;
        assert!(!done && text.contains("error: invalid value"), "{text}");
    }
    server
        .shows(TunnelMode::PreferKonnectivity, SetBy::Switch, "")
        .await;

    let to = [
        "switch",
        "--to=konnectivity",
        "--drain=1s",
        "--wait",
        "--timeout=30s",
    ];
    let (done, text) = server.culvert(&to).await;
    assert!(done, "{text}");
    let status = server.status().await;
    assert_eq!(
        (status.mode, status.switch),
        (TunnelMode::Konnectivity, Progress::Settled)
    );
    innocent.still_echoes("after all switches").await;
    let program = server.topology.server(0);
    program.wait_for_log("the switch is complete", LIMIT).await;
    assert_unharmed(&mut server.topology).await;
}

#[tokio::test]
async fn switched_mode_survives_restarts() {
    let mut server = Switchable::start(&[]).await;
    let (done, text) = server
        .culvert(&["switch", "--to=prefer-konnectivity"])
        .await;
    assert!(done, "{text}");
    // A killed server leaves the admin socket behind. The switch survives, because the server saved the
    // switch before confirming it.
    server.topology.kill_server(0);
    assert!(server.path("admin.socket").exists());
    server.topology.start_server(0).await;
    server
        .shows(TunnelMode::PreferKonnectivity, SetBy::Switch, "")
        .await;
    server.topology.restart_server(0).await;
    server
        .shows(TunnelMode::PreferKonnectivity, SetBy::Switch, "")
        .await;

    // An unusable state file is logged and renamed.
    server.topology.kill_server(0);
    std::fs::write(server.path("state"), "{\"version\":1,").unwrap();
    server.topology.start_server(0).await;
    let program = server.topology.server(0);
    program.wait_for_log("--tunnel-state-file", LIMIT).await;
    server
        .shows(TunnelMode::Konnectivity, SetBy::Flag, "state.bad")
        .await;
    assert!(server.path("state.bad").exists());

    // A state file with the mode of a missing tunnel is logged and renamed.
    server.topology.kill_server(0);
    let openvpn = r#"{"version":1,"mode":"openvpn","setBy":"switch","flag":"konnectivity"}"#;
    std::fs::write(server.path("state"), openvpn).unwrap();
    server.topology.start_server(0).await;
    let problem = "needs an OpenVPN tunnel";
    let program = server.topology.server(0);
    program.wait_for_log(problem, LIMIT).await;
    server
        .shows(TunnelMode::Konnectivity, SetBy::Flag, problem)
        .await;
    // The first save after the start does not end the report, and does not replace the file.
    let saved = async || server.path("state").exists();
    eventually("the state is saved", LIMIT, saved).await;
    server
        .shows(TunnelMode::Konnectivity, SetBy::Flag, problem)
        .await;
    let page = server.topology.server_metrics(0).await;
    assert_eq!(value(&page, "culvert_tunnel_switch_problems", &[]), 1.0);
    let kept = std::fs::read_to_string(server.path("state.bad")).unwrap();
    assert_eq!(kept, openvpn);
    let (done, text) = server.culvert(&["switch", "--to=konnectivity"]).await;
    assert!(done, "{text}");
    server
        .shows(TunnelMode::Konnectivity, SetBy::Switch, "")
        .await;
    server.topology.wait_for_agents().await;
    assert_unharmed(&mut server.topology).await;
}

/// Updates a mounted ConfigMap as the kubelet does: a new folder for each version, and an atomic change of a
/// link.
fn mount(folder: &Path, version: &str, text: &str) {
    std::fs::create_dir(folder.join(version)).unwrap();
    std::fs::write(folder.join(version).join("mode"), text).unwrap();
    symlink(version, folder.join("..data_tmp")).unwrap();
    std::fs::rename(folder.join("..data_tmp"), folder.join("..data")).unwrap();
    symlink("..data/mode", folder.join("mode")).ok();
}

#[tokio::test]
async fn mounted_file_sets_the_mode() {
    let folder = tempfile::tempdir().unwrap();
    mount(folder.path(), "..1", "tunnelMode: prefer-konnectivity\n");
    let server = Switchable::start_in(folder, &["--tunnel-mode-file=@mode"]).await;
    server
        .shows(TunnelMode::PreferKonnectivity, SetBy::File, "")
        .await;
    mount(
        server.folder.path(),
        "..2",
        "{\"konnectivityEnabled\": true}",
    );
    server
        .shows(TunnelMode::Konnectivity, SetBy::File, "")
        .await;

    // An impossible mode and an unknown mode change nothing, and the status shows both problems.
    mount(server.folder.path(), "..3", "konnectivityEnabled: false\n");
    server
        .shows(
            TunnelMode::Konnectivity,
            SetBy::File,
            "needs an OpenVPN tunnel",
        )
        .await;
    mount(server.folder.path(), "..4", "konnectivity, please");
    server
        .shows(TunnelMode::Konnectivity, SetBy::File, "unknown tunnel mode")
        .await;

    // The last change wins, whether the file or a command made the change.
    let (done, text) = server
        .culvert(&["switch", "--to=prefer-konnectivity"])
        .await;
    assert!(done, "{text}");
    // A file with the same mode as at the time of the switch is not a change.
    mount(server.folder.path(), "..5", "konnectivity");
    server
        .shows(TunnelMode::PreferKonnectivity, SetBy::Switch, "")
        .await;
    mount(server.folder.path(), "..6", "prefer-konnectivity");
    server
        .shows(TunnelMode::PreferKonnectivity, SetBy::File, "")
        .await;
    mount(server.folder.path(), "..7", "konnectivity");
    server
        .shows(TunnelMode::Konnectivity, SetBy::File, "")
        .await;
    let (done, text) = server
        .culvert(&["switch", "--to=prefer-konnectivity"])
        .await;
    assert!(done, "{text}");
    let mut server = server;
    server.topology.restart_server(0).await;
    server
        .shows(TunnelMode::PreferKonnectivity, SetBy::Switch, "")
        .await;
    // The file changes while the server is down.
    server.topology.kill_server(0);
    mount(server.folder.path(), "..8", "konnectivityEnabled: true");
    mount(server.folder.path(), "..9", "prefer-konnectivity");
    server.topology.start_server(0).await;
    server
        .shows(TunnelMode::PreferKonnectivity, SetBy::File, "")
        .await;
    assert_unharmed(&mut server.topology).await;
}

#[tokio::test]
async fn impossible_mode_is_an_error_at_startup() {
    let folder = tempfile::tempdir().unwrap();
    let pki = Pki::create(folder.path()).unwrap();
    let file = folder.path().join("mode");
    std::fs::write(&file, "false").unwrap();
    let file = format!("--tunnel-mode-file={}", file.display());
    let usual = [
        format!(
            "--uds-name={}",
            folder.path().join("front.socket").display()
        ),
        "--server-port=0".to_owned(),
        format!("--cluster-cert={}", pki.cluster.cert.display()),
        format!("--cluster-key={}", pki.cluster.key.display()),
    ];
    for wrong in [
        "--tunnel-mode=openvpn",
        "--tunnel-mode=prefer-openvpn",
        &file,
    ] {
        let args = usual.iter().map(String::as_str).chain([wrong]);
        let mut program = Program::spawn("culvert-server", args, &[]);
        assert_eq!(program.wait_exit(LIMIT).await.code(), Some(1), "{wrong}");
        let log = program.log();
        assert!(log.contains("needs an OpenVPN tunnel"), "{wrong}: {log}");
    }
}

#[tokio::test]
async fn switch_api_accepts_only_the_servers_user_on_the_admin_socket() {
    let server = Switchable::start(&[]).await;
    for path in ["/tunnel", "/tunnel/switch"] {
        for listener in [
            server.topology.server_admin(0),
            server.topology.server_health(0),
        ] {
            let (status, ..) = http_get(listener, path).await.unwrap();
            assert_eq!(status, 404, "{path}");
        }
    }
    let socket = server.path("admin.socket");
    let mode = |path: &Path| std::fs::metadata(path).unwrap().permissions().mode() & 0o777;
    assert_eq!(mode(&socket), 0o600);
    if !rustix::process::geteuid().is_root() {
        return skip("another user's requests need root");
    }
    // File permissions for other users do not give them access to the socket.
    for (path, mode) in [(server.folder.path(), 0o755), (&socket, 0o666)] {
        std::fs::set_permissions(path, std::fs::Permissions::from_mode(mode)).unwrap();
    }
    let program = server.path("culvert");
    // A copy by this process could not run while a child of another test still has the file open for writing.
    let copied = Command::new("cp")
        .arg(ours("culvert"))
        .arg(&program)
        .status();
    assert!(copied.unwrap().success());
    let ask = |uid: u32| -> Output {
        let mut command = Command::new(&program);
        command.arg("status").arg("--admin-uds").arg(&socket);
        command.uid(uid).output().unwrap()
    };
    assert!(ask(0).status.success());
    let foreign = ask(65_534);
    assert!(!foreign.status.success(), "{foreign:?}");
    let text = String::from_utf8_lossy(&foreign.stderr);
    assert!(text.contains("is not an admin listener"), "{text}");
    server
        .shows(TunnelMode::Konnectivity, SetBy::Flag, "")
        .await;
}

#[tokio::test]
async fn log_and_status_show_the_address_and_the_identifiers_of_an_agent() {
    let folder = tempfile::tempdir().unwrap();
    let socket = folder.path().join("admin.socket");
    let socket = format!("--admin-uds={}", socket.display());
    let builder = Topology::builder(Mode::HttpConnect, Transport::Uds).servers(1);
    let builder = builder.server_args(&[&socket]);
    let identifiers = "--agent-identifiers=host=node-1&ipv4=10.0.0.1&default-route=true";
    let builder = builder.agent(Executable::Ours, &[identifiers]);
    let mut topology = builder.start().await;
    let (done, text) = culvert(&["status", "--json", &socket]).await;
    assert!(done, "{text}");
    let status: Status = serde_json::from_str(&text).unwrap();
    assert_eq!(status.server_id.as_deref(), Some("server-0"));
    let peer = &status.tunnels[0].peers[0];
    let expected = ["default-route=true", "ipv4=10.0.0.1", "host=node-1"];
    assert_eq!(
        (&peer.identifiers[..], peer.more_identifiers),
        (&expected.map(str::to_owned)[..], 0)
    );
    let (address, listed) = (peer.address.unwrap(), expected.join(", "));
    let connected = topology
        .server(0)
        .wait_for_log("\"agent connected\"", LIMIT)
        .await;
    let fields = format!("native=true peer=\"{address}\" identifiers=\"{listed}\"");
    assert!(connected.contains(&fields), "{connected}");
    let (done, text) = culvert(&["status", &socket]).await;
    let row = format!("{address}  agent, native  {listed}\n");
    assert!(done && text.contains(&row), "{text}");
    assert!(text.contains("server id   server-0\n"), "{text}");
}

#[tokio::test]
async fn verdict_is_the_first_line_and_check_turns_it_into_an_exit_code() {
    let folder = tempfile::tempdir().unwrap();
    let socket = folder.path().join("admin.socket");
    let socket = format!("--admin-uds={}", socket.display());
    let builder = Topology::builder(Mode::HttpConnect, Transport::Uds).servers(1);
    let mut topology = builder.server_args(&[&socket]).start().await;
    let degraded = "verdict     degraded\nreason      no healthy peer for new dials\n";
    for (flags, expected) in [(&[][..], 0), (&["--check"][..], 3)] {
        let (code, text) = exit_code(&[&["status", &socket], flags].concat()).await;
        assert_eq!(code, Some(expected), "{text}");
        assert!(text.starts_with(degraded), "{text}");
    }
    let json = ["status", "--json", "--check", &socket];
    let (code, text) = exit_code(&json).await;
    assert_eq!(code, Some(3), "{text}");
    let report: Value = serde_json::from_str(&text).unwrap();
    assert_eq!(report["verdict"], "degraded");
    assert_eq!(report["reasons"], json!(["no healthy peer for new dials"]));

    topology.add_agent(Executable::Ours, &[]).await;
    topology.wait_for_agents().await;
    let (code, text) = exit_code(&["status", "--check", &socket]).await;
    assert_eq!(code, Some(0), "{text}");
    assert!(text.starts_with("verdict     ok\n"), "{text}");
    let (code, text) = exit_code(&json).await;
    assert_eq!(code, Some(0), "{text}");
    let report: Value = serde_json::from_str(&text).unwrap();
    assert_eq!(
        (&report["verdict"], &report["reasons"]),
        (&json!("ok"), &json!([]))
    );

    topology.server(0).signal(Signal::STOP);
    let (code, text) = exit_code(&["status", "--check", "--timeout=300ms", &socket]).await;
    assert_eq!(code, Some(1), "{text}");
    assert!(text.contains("Error: no answer from "), "{text}");
    assert!(text.contains("in 300ms"), "{text}");
    topology.server(0).signal(Signal::CONT);
}

#[tokio::test]
async fn remote_switch_requires_a_certificate_of_the_admin_ca() {
    let folder = tempfile::tempdir().unwrap();
    let pki = Pki::create(folder.path()).unwrap();
    let other = tempfile::tempdir().unwrap();
    let stranger = Pki::create_other(other.path()).unwrap();
    let file = |path: &Path| path.display().to_string();
    let (flags, ca) = (admin_flags(&pki), file(&pki.ca));
    let flags: Vec<&str> = flags.iter().map(String::as_str).collect();
    let server = Switchable::start_in(folder, &flags).await;
    let address = server.topology.server_admin(0);
    let ask = async |what: &[&str], cert: &Path, key: &Path| {
        let admin = format!("--admin={address}");
        let (cert, key) = (file(cert), file(key));
        let who = [&admin, "--ca-cert", &ca, "--cert", &cert, "--key", &key];
        culvert(&[what, &who].concat()).await
    };
    let to = ["switch", "--to=prefer-konnectivity", "--wait"];
    let (done, text) = ask(&to, &stranger.client.cert, &stranger.client.key).await;
    assert!(!done, "{text}");
    server
        .shows(TunnelMode::Konnectivity, SetBy::Flag, "")
        .await;
    let (done, text) = ask(&to, &pki.client.cert, &pki.client.key).await;
    assert!(done, "{text}");
    let (done, text) = ask(&["status"], &pki.client.cert, &pki.client.key).await;
    assert!(
        done && text.contains("prefer-konnectivity (set by switch)"),
        "{text}"
    );
    // The listener no longer answers in plain text, not even for metrics.
    assert!(http_get(address, "/metrics").await.is_err());
}
