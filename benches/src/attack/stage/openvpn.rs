//! An OpenVPN server, ours or stock, and our client with an endpoint behind it.

use std::net::SocketAddr;
use std::path::Path;
use std::sync::Arc;
use std::time::Duration;

use anyhow::{Context as _, bail};
use bytes::Bytes;
use culvert_openvpn::options::Transport;
use culvert_openvpn::session::ClientConfig;
use culvert_openvpn::tls::{ClientTls, Identity, MinVersion, ServerCheck};
use culvert_tests::Program;
use culvert_tests::openvpn::OpenVpn;
use culvert_tests::ports::Ports;
use tempfile::TempDir;
use tokio::net::TcpSocket;
use tokio::time::{Instant, sleep, timeout};

use super::{Attacked, Make, Stage};
use crate::attack::attackers::first_message;
use crate::attack::honest::{Probe, Purpose};
use crate::attack::networks::Networks;
use crate::endpoint::Endpoints;
use crate::entry::Entry;
use crate::harness::harness;
use crate::load::Echo;
use crate::names::{AGENT, SERVER};
use crate::openvpn::{Files, Proto, own_address};
use crate::programs::Programs;

/// Port of the server.
const PORT: u16 = 1194;

/// Time limit for the tunnel to carry a byte, time limit of one attempt, and pause between attempts.
const START_LIMIT: Duration = Duration::from_secs(20);
const TRY_LIMIT: Duration = Duration::from_secs(2);
const TRY_INTERVAL: Duration = Duration::from_millis(50);

/// The running programs, and their files.
pub(super) struct Pair {
    pub(super) server: Program,
    client: Program,
    _files: Files,
    _dir: TempDir,
}

/// Starts a server and its client.
pub(super) async fn start(
    make: Make,
    proto: Proto,
    programs: &Programs,
    networks: &Networks,
) -> anyhow::Result<Stage> {
    harness(begin(make, proto, programs, networks)).await?
}

async fn begin(
    make: Make,
    proto: Proto,
    programs: &Programs,
    networks: &Networks,
) -> anyhow::Result<Stage> {
    let dir = tempfile::Builder::new().prefix("culvert-").tempdir()?;
    let mut ports = Ports::default();
    let behind = match networks.behind() {
        Some(behind) => behind,
        None => own_address()?,
    };
    let files = Files::write(dir.path(), behind)?;
    let socket = match networks.client() {
        Some(client) => client.within(TcpSocket::new_v4)?,
        None => TcpSocket::new_v4()?,
    };
    let endpoints = Endpoints::on(socket, (behind, 0).into()).await?;
    let target = endpoints.lean();
    let port = networks
        .behind()
        .map_or_else(|| ports.next_port(), |_| PORT);
    let to = SocketAddr::from((networks.address(), port));

    let mut probes = Vec::new();
    let (server, entry) = match make {
        Make::Ours => {
            let front = dir.path().join("front.socket");
            let health = ports.next_port();
            let words = words(&files, &front, health, &mut ports, networks);
            let words = words.into_iter().chain(files.server(proto, to));
            let server = Program::spawn(programs.path(SERVER), words, &[]);
            let health = Probe::Get {
                to: (networks.address(), health).into(),
                path: "/healthz",
            };
            probes.push((Purpose::Health, health));
            (server, Entry::Connect(front))
        }
        Make::Stock => {
            let attacked = networks.attacked().context("needs network namespaces")?;
            let stock = OpenVpn::look().map_err(anyhow::Error::msg)?;
            let local = format!("--local {}", to.ip());
            let mut stock = stock.start(&attacked, &files.stock_server(proto).with(&local));
            stock.is_up().await;
            (stock.program, Entry::Within(attacked))
        }
    };
    let words = files.client(proto, to, &mut ports);
    let client = match networks.client() {
        Some(namespace) => namespace.spawn(&programs.path(AGENT), &words),
        None => Program::spawn(programs.path(AGENT), &words, &[]),
    };
    let pair = Box::new(Pair {
        server,
        client,
        _files: files,
        _dir: dir,
    });
    carries(&entry, target, &pair).await?;
    let config = config(&pair._files, proto)?;
    probes.push((Purpose::Client, Probe::Openvpn { to, proto, config }));
    probes.push((Purpose::Dial, Probe::Tunnel { entry, target }));
    Ok(Stage {
        attacked: Attacked::Openvpn(pair),
        at: to,
        greeting: match proto {
            Proto::Tcp => first_message(),
            Proto::Udp => Bytes::new(),
        },
        name: "",
        tls: None,
        probes,
        api: None,
        _endpoints: endpoints,
    })
}

/// Returns the flags of our server apart from those for OpenVPN.
fn words(
    files: &Files,
    front: &Path,
    health: u16,
    ports: &mut Ports,
    networks: &Networks,
) -> Vec<String> {
    let pair = &files.pki.server;
    vec![
        "--v=1".to_owned(),
        "--mode=http-connect".to_owned(),
        format!("--uds-name={}", front.display()),
        "--server-port=0".to_owned(),
        "--tunnel-mode=openvpn".to_owned(),
        format!("--cluster-cert={}", pair.cert.display()),
        format!("--cluster-key={}", pair.key.display()),
        format!("--agent-port={}", ports.next_port()),
        "--agent-bind-address=127.0.0.1".to_owned(),
        format!("--admin-port={}", ports.next_port()),
        "--admin-bind-address=127.0.0.1".to_owned(),
        format!("--health-port={health}"),
        format!("--health-bind-address={}", networks.bind()),
    ]
}

/// Returns the configuration of an honest client, with another certificate than the client of the tunnel.
fn config(files: &Files, proto: Proto) -> anyhow::Result<ClientConfig> {
    let pair = &files.pki.internal;
    let read = |path: &Path| std::fs::read(path).with_context(|| path.display().to_string());
    let identity = Identity::from_pem(&read(&pair.cert)?, &read(&pair.key)?)?;
    let check = ServerCheck {
        require_usage: true,
        name: None,
    };
    let ca = read(&files.pki.ca)?;
    let tls = ClientTls::new(&ca, Some(identity), check, MinVersion::Tls12)?;
    let transport = match proto {
        Proto::Tcp => Transport::Tcp,
        Proto::Udp => Transport::Udp,
    };
    Ok(ClientConfig::new(transport, Arc::new(tls)))
}

/// Waits until the tunnel carries a byte.
async fn carries(entry: &Entry, target: SocketAddr, pair: &Pair) -> anyhow::Result<()> {
    let deadline = Instant::now() + START_LIMIT;
    loop {
        match timeout(TRY_LIMIT, Echo::proven(entry, target)).await {
            Ok(Ok(_)) => return Ok(()),
            failed if Instant::now() > deadline => {
                let why = failed.map(|echo| echo.map(drop));
                let [server, client] = [&pair.server, &pair.client].map(Program::log);
                bail!("carries no data: {why:?}; server: {server}; client: {client}");
            }
            _ => sleep(TRY_INTERVAL).await,
        }
    }
}
