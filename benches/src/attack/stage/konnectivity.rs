//! Server and agent, ours or stock. The real agent serves dials; agents of honest clients only connect.

use std::fs::{self, File, Permissions};
use std::io::{self, Write as _};
use std::net::SocketAddr;
use std::os::unix::fs::PermissionsExt as _;
use std::path::{Path, PathBuf};
use std::process::Command;
use std::time::Duration;

use anyhow::{Context as _, bail, ensure};
use bytes::Bytes;
use culvert_kit::client::FrontEnd;
use culvert_tests::hello::client_hello;
use culvert_tests::kube_api::{Fault, KubeApi, TokenStatus};
use culvert_tests::ports::Ports;
use culvert_tests::{Executable, Mode, Topology, Transport};
use rustix::io::ioctl_fionbio;
use tempfile::TempDir;

use super::{Attacked, Make, Stage};
use crate::attack::honest::{Probe, Purpose};
use crate::attack::networks::Networks;
use crate::attack::rows::{Listener, Setting};
use crate::endpoint::Endpoints;
use crate::entry::Entry;
use crate::harness::harness;
use crate::names::{AGENT, SERVER};
use crate::programs::Programs;

/// Dials select the real agent by this identifier. Agents of honest clients have no identifier and receive no
/// dial.
const SERVER_FLAGS: [&str; 1] = ["--proxy-strategies=destHost"];
const AGENT_FLAGS: [&str; 1] = ["--agent-identifiers=ipv4=127.0.0.1"];

/// Flags for the authentication of agents by token. The first removes the authority of certificates, and the second
/// suits the API of the harness.
const TOKEN_FLAGS: [&str; 5] = [
    "--cluster-ca-cert=",
    "--kube-api-content-type=application/json",
    "--agent-namespace=kube-system",
    "--agent-service-account=agent",
    "--authentication-audience=system:konnectivity-server",
];

/// The valid token, and its user.
const TOKEN: &str = "good";
const USER: &str = "system:serviceaccount:kube-system:agent";

/// Path of token reviews, the usual duration of a review, and the duration while the API is silent.
const REVIEWS: &str = "tokenreviews";
const REVIEW: Duration = Duration::from_millis(20);
const SILENCE: Duration = Duration::from_secs(300);

/// Bytes of a write to a pipe. The kernel has a page for each such write.
const PAGE: usize = 4096;

/// The running programs, and their files.
pub(super) struct Pair {
    pub(super) topology: Topology,
    /// Owner of the port for QUIC.
    _ports: Ports,
    /// The pipe of a log that nobody reads, in non-blocking mode.
    log: Option<File>,
    _dir: TempDir,
}

impl Pair {
    /// Fills the pipe of the log, if there is one.
    pub(super) fn begin(&self) -> anyhow::Result<()> {
        let filled = self.log.as_ref().map_or(Ok(()), fill);
        filled.context("cannot fill the pipe of the log")
    }
}

/// A Kubernetes API that reviews tokens.
pub(super) struct Api {
    api: KubeApi,
    is_silent: bool,
}

impl Api {
    async fn start(is_silent: bool) -> Self {
        let api = KubeApi::start().await;
        api.token(TOKEN, TokenStatus::user(USER));
        api.fault(Fault::delay(REVIEW).on(REVIEWS));
        Self { api, is_silent }
    }

    pub(super) fn begin(&self) {
        if self.is_silent {
            self.api.clear_faults();
            self.api.fault(Fault::delay(SILENCE).on(REVIEWS));
        }
    }

    pub(super) fn end(&self) {
        self.api.clear_faults();
        self.api.fault(Fault::delay(REVIEW).on(REVIEWS));
    }
}

/// Starts a server and its agent.
pub(super) async fn start(
    make: Make,
    front: Listener,
    setting: Setting,
    programs: &Programs,
    networks: &Networks,
) -> anyhow::Result<Stage> {
    let dir = tempfile::Builder::new().prefix("culvert-").tempdir()?;
    let endpoints = Endpoints::start().await?;
    let (mut server, agent) = match make {
        Make::Ours => (programs.path(SERVER), programs.path(AGENT)),
        Make::Stock => {
            let stock = programs.stock.context("the stock programs need Go")?;
            (stock.proxy_server.clone(), stock.proxy_agent.clone())
        }
    };
    let mut log = None;
    if setting == Setting::StalledLog {
        let (script, pipe) = stalled(dir.path(), &server)?;
        (server, log) = (script, Some(pipe));
    }
    let mut server_flags: Vec<String> = SERVER_FLAGS.map(str::to_owned).to_vec();
    for listener in ["agent", "server", "admin", "health"] {
        server_flags.push(format!("--{listener}-bind-address={}", networks.bind()));
    }
    let mut agent_flags: Vec<String> = AGENT_FLAGS.map(str::to_owned).to_vec();
    let api = match setting {
        Setting::Usual | Setting::StalledLog | Setting::Quic => None,
        Setting::Tokens | Setting::SilentApi => {
            let api = Api::start(setting == Setting::SilentApi).await;
            server_flags.extend(TOKEN_FLAGS.map(str::to_owned));
            let kubeconfig = api.api.kubeconfig(dir.path());
            server_flags.push(format!("--kubeconfig={}", kubeconfig.display()));
            let token = dir.path().join("token");
            fs::write(&token, TOKEN)?;
            agent_flags.push(format!("--service-account-token-path={}", token.display()));
            Some(api)
        }
    };
    let mut ports = Ports::default();
    let quic = (setting == Setting::Quic).then(|| ports.next_port());
    if let Some(port) = quic {
        server_flags.push(format!("--agent-quic-port={port}"));
    }
    let transport = match front {
        Listener::FrontEnd => Transport::Tcp,
        _ => Transport::Uds,
    };
    let starting = Topology::builder(Mode::HttpConnect, transport)
        .server(Executable::At(server), &words(&server_flags))
        .agent(Executable::At(agent), &words(&agent_flags))
        .start();
    let topology = harness(starting).await?;
    let pair = Box::new(Pair {
        topology,
        _ports: ports,
        log,
        _dir: dir,
    });
    let mut stage = stage(pair, front, api, endpoints, networks)?;
    if let Some(port) = quic {
        stage.at.set_port(port);
    }
    Ok(stage)
}

fn words(flags: &[String]) -> Vec<&str> {
    flags.iter().map(String::as_str).collect()
}

fn stage(
    pair: Box<Pair>,
    front: Listener,
    api: Option<Api>,
    endpoints: Endpoints,
    networks: &Networks,
) -> anyhow::Result<Stage> {
    let topology = &pair.topology;
    let outside = |at: SocketAddr| SocketAddr::from((networks.address(), at.port()));
    let (agents, health, admin) = (
        outside(topology.agent_address(0)),
        outside(topology.server_health(0)),
        outside(topology.server_admin(0)),
    );
    let target = endpoints.lean();
    let pki = topology.pki();
    let agent_tls = pki.client_tls(&pki.agent, &["h2"])?;
    let hello = Bytes::from(client_hello("localhost"));
    let get = Bytes::from_static(b"GET /healthz HTTP/1.1\r\nHost: localhost\r\n\r\n");
    let mut probes = vec![(Purpose::Health, get_probe(health, "/healthz"))];
    let (at, greeting) = match (front, topology.front_end()) {
        (Listener::FrontEnd, FrontEnd::ConnectTcp { addr, tls, .. }) => {
            let to = outside(*addr);
            let tls = tls.clone();
            probes.push((Purpose::Client, Probe::FrontEnd { to, tls, target }));
            (to, hello)
        }
        (_, FrontEnd::ConnectUds(socket)) => {
            let entry = Entry::Connect(socket.clone());
            probes.push((Purpose::Dial, Probe::Tunnel { entry, target }));
            match front {
                Listener::Health => (health, get),
                Listener::Admin => {
                    probes.push((Purpose::Client, get_probe(admin, "/metrics")));
                    (admin, get)
                }
                _ => (agents, hello),
            }
        }
        (_, other) => bail!("unexpected front end {other:?}"),
    };
    // With a silent API, no agent can be accepted.
    if front == Listener::Agents && !api.as_ref().is_some_and(|api| api.is_silent) {
        let client = Probe::Agent {
            to: agents,
            tls: agent_tls.clone(),
            token: api.as_ref().map(|_| TOKEN),
        };
        probes.push((Purpose::Client, client));
    }
    Ok(Stage {
        attacked: Attacked::Konnectivity(pair),
        at,
        greeting,
        name: "localhost",
        tls: Some(agent_tls),
        probes,
        api,
        _endpoints: endpoints,
    })
}

fn get_probe(to: SocketAddr, path: &'static str) -> Probe {
    Probe::Get { to, path }
}

/// Returns a script that starts `program` with its log in a pipe, and the pipe. The pipe is open but not read.
fn stalled(dir: &Path, program: &Path) -> anyhow::Result<(PathBuf, File)> {
    let (pipe, script) = (dir.join("log"), dir.join("server"));
    let made = Command::new("mkfifo")
        .arg(&pipe)
        .status()
        .context("mkfifo")?;
    ensure!(made.success(), "mkfifo: {made}");
    let text = format!(
        "#!/bin/sh\nexec '{}' \"$@\" 2>'{}'\n",
        program.display(),
        pipe.display()
    );
    fs::write(&script, text)?;
    fs::set_permissions(&script, Permissions::from_mode(0o700))?;
    let pipe = File::options().read(true).write(true).open(pipe)?;
    ioctl_fionbio(&pipe, true)?;
    Ok((script, pipe))
}

/// Fills a pipe in non-blocking mode.
fn fill(mut pipe: &File) -> io::Result<()> {
    loop {
        match pipe.write(&[b'\n'; PAGE]) {
            Ok(_) => {}
            Err(error) if error.kind() == io::ErrorKind::WouldBlock => return Ok(()),
            Err(error) => return Err(error),
        }
    }
}

#[cfg(test)]
mod tests {
    #![allow(clippy::unwrap_used)]
    use std::io::Read as _;

    use super::*;

    #[test]
    fn filled_pipe_of_a_log_accepts_nothing() {
        let dir = tempfile::tempdir().unwrap();
        let (_script, mut pipe) = stalled(dir.path(), Path::new("/bin/true")).unwrap();
        let mut other = pipe.try_clone().unwrap();
        assert_eq!(other.write(b"line").unwrap(), 4);
        fill(&pipe).unwrap();
        let error = other.write(b"x").unwrap_err();
        assert_eq!(error.kind(), io::ErrorKind::WouldBlock);
        pipe.read_exact(&mut [0; PAGE]).unwrap();
    }
}
