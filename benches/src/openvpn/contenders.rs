//! The contenders and their running programs.
//!
//! A pair is an OpenVPN server, an OpenVPN client, and endpoints at an address behind the client. Loads enter
//! through the front end of our server, or through the network of the stock server, whose routes lead into
//! its tun device. All programs use AES-256-GCM without compression and without the kernel's data channel.

use std::net::{Ipv4Addr, SocketAddr};
use std::path::{Path, PathBuf};
use std::time::Duration;

use anyhow::{Context as _, bail};
use culvert_tests::Program;
use culvert_tests::openvpn::stock::Options;
use culvert_tests::openvpn::{OpenVpn, Pki};
use culvert_tests::ports::Ports;
use tempfile::TempDir;
use tokio::net::UnixStream;
use tokio::time::{Instant, sleep, timeout};

use crate::endpoint::Endpoints;
use crate::entry::Entry;
use crate::harness::{ask, harness};
use crate::load::Echo;
use crate::names::{AGENT, OURS, OURS_STOCK, SERVER, STOCK};
use crate::openvpn::ground::{Field, Ground};
use crate::openvpn::probe::{dropped_datagrams, last_words, metrics};
use crate::openvpn::rows::Kind;
use crate::programs::Programs;

/// Name of our pair over UDP.
pub(super) const OURS_UDP: &str = "ours/udp";
/// Name of our server with the stock client over UDP.
pub(super) const OURS_STOCK_UDP: &str = "o+s/udp";

/// Time limit for a program to become ready, and again to carry the first byte; the time limit of one
/// attempt; and the pause between attempts.
const START_LIMIT: Duration = Duration::from_secs(20);
const TRY_LIMIT: Duration = Duration::from_secs(2);
const TRY_INTERVAL: Duration = Duration::from_millis(50);

/// Common name of the client, and the name of its file on the server.
const CLIENT: &str = "user-cluster-client";

/// Options for the data channel, in the syntax of OpenVPN and in ours.
const STOCK_OPTIONS: &str = "--data-ciphers AES-256-GCM --disable-dco --verb 3";
const CIPHERS: &str = "--openvpn-data-ciphers=AES-256-GCM";

/// Maker of a program.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum Make {
    Ours,
    Stock,
}

/// Transport protocol of the tunnel.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum Proto {
    Tcp,
    Udp,
}

impl Proto {
    /// Name of the protocol in options.
    pub(crate) fn name(self) -> &'static str {
        match self {
            Self::Tcp => "tcp",
            Self::Udp => "udp",
        }
    }
}

/// A pair to measure.
#[derive(Debug, Clone, Copy)]
pub(super) struct Contender {
    /// Server and client, or one word if both have the same maker.
    pub name: &'static str,
    server: Make,
    client: Make,
    proto: Proto,
}

const fn pair(name: &'static str, server: Make, client: Make, proto: Proto) -> Contender {
    Contender {
        name,
        server,
        client,
        proto,
    }
}

/// All contenders, ours first.
pub(super) const CONTENDERS: [Contender; 5] = [
    pair(OURS, Make::Ours, Make::Ours, Proto::Tcp),
    pair(OURS_UDP, Make::Ours, Make::Ours, Proto::Udp),
    pair(OURS_STOCK, Make::Ours, Make::Stock, Proto::Tcp),
    pair(OURS_STOCK_UDP, Make::Ours, Make::Stock, Proto::Udp),
    pair(STOCK, Make::Stock, Make::Stock, Proto::Tcp),
];

impl Contender {
    /// Returns true if the server or the client is the stock program.
    pub(super) fn needs_stock(self) -> bool {
        [self.server, self.client].contains(&Make::Stock)
    }

    /// Returns true if the row applies to the contender.
    pub(super) fn has(self, kind: Kind) -> bool {
        let (tcp, ours) = (self.proto == Proto::Tcp, self.server == Make::Ours);
        match kind {
            Kind::Load(_) | Kind::Aborted(_) => true,
            Kind::Bursts(_) => ours,
            Kind::Crowd => tcp && ours,
            Kind::Switch => tcp && !self.needs_stock(),
        }
    }
}

/// The files of an OpenVPN server and its client.
#[derive(Debug)]
pub(crate) struct Files {
    /// Certificates and keys.
    pub pki: Pki,
    clients: PathBuf,
    behind: Ipv4Addr,
}

impl Files {
    /// Writes the files. The address `behind` belongs to the client; the file with its route is in `dir`.
    /// Panics if the certificates cannot be written.
    pub(crate) fn write(dir: &Path, behind: Ipv4Addr) -> anyhow::Result<Self> {
        let clients = dir.join("clients");
        std::fs::create_dir(&clients)?;
        let route = format!("iroute {behind} 255.255.255.255\n");
        std::fs::write(clients.join(CLIENT), route)?;
        Ok(Self {
            pki: Pki::create(),
            clients,
            behind,
        })
    }

    /// Returns the flags of our server.
    pub(crate) fn server(&self, proto: Proto, listen: SocketAddr) -> Vec<String> {
        let pair = &self.pki.server;
        vec![
            format!("--openvpn-listen={}:{listen}", proto.name()),
            format!("--openvpn-ca={}", self.pki.ca.display()),
            format!("--openvpn-cert={}", pair.cert.display()),
            format!("--openvpn-key={}", pair.key.display()),
            format!("--openvpn-client-config-dir={}", self.clients.display()),
            format!("--openvpn-route={}/32", self.behind),
            CIPHERS.to_owned(),
        ]
    }

    /// Returns the options of the stock server.
    pub(crate) fn stock_server(&self, proto: Proto) -> Options {
        Options::server(proto.name(), &self.pki)
            .option("--client-config-dir", &self.clients)
            .with(&format!("--route {} 255.255.255.255", self.behind))
            .with(STOCK_OPTIONS)
    }

    /// Returns the flags of our agent as an OpenVPN client, including its listeners.
    pub(crate) fn client(
        &self,
        proto: Proto,
        remote: SocketAddr,
        ports: &mut Ports,
    ) -> Vec<String> {
        let pair = &self.pki.user_cluster;
        vec![
            "--v=1".to_owned(),
            format!("--openvpn-remote={remote},{}", proto.name()),
            format!("--openvpn-ca={}", self.pki.ca.display()),
            format!("--openvpn-cert={}", pair.cert.display()),
            format!("--openvpn-key={}", pair.key.display()),
            CIPHERS.to_owned(),
            format!("--health-server-port={}", ports.next_port()),
            "--health-server-host=127.0.0.1".to_owned(),
            format!("--admin-server-port={}", ports.next_port()),
        ]
    }
}

/// A running pair. Dropping it kills its programs.
#[derive(Debug)]
pub(super) struct Pair {
    /// Entry of the load.
    pub entry: Entry,
    server: Program,
    client: Program,
    /// Path of the admin socket of our server.
    admin: Option<PathBuf>,
    /// Endpoints of the load.
    pub endpoints: Endpoints,
    _ports: Ports,
    // The last fields, so that the programs end before their files are removed.
    _files: Files,
    _dir: TempDir,
}

impl Pair {
    /// Starts a contender and waits until it carries a byte. An error contains the last log lines of both
    /// programs.
    pub(super) async fn start(
        contender: Contender,
        programs: &Programs,
        ground: &Ground,
    ) -> anyhow::Result<Self> {
        let pair = harness(Self::begin(contender, programs, ground)).await??;
        pair.carries().await?;
        Ok(pair)
    }

    async fn begin(
        contender: Contender,
        programs: &Programs,
        ground: &Ground,
    ) -> anyhow::Result<Self> {
        let dir = tempfile::Builder::new().prefix("culvert-").tempdir()?;
        let mut ports = Ports::default();
        let field = match contender.needs_stock() {
            true => Field::apart()?,
            false => Field::here(ground, &mut ports),
        };
        let files = Files::write(dir.path(), field.behind)?;
        let (proto, listen) = (contender.proto, field.listen.into());
        let behind = SocketAddr::from((field.behind, 0));
        let endpoints = Endpoints::on(field.client.socket()?, behind).await?;

        let admin = dir.path().join("admin.socket");
        let (server, entry, admin) = match contender.server {
            Make::Ours => {
                let front = dir.path().join("front.socket");
                let mut words = server_words(&files.pki, [&front, &admin], &mut ports);
                words.extend(files.server(proto, listen));
                let mut server = field.server.spawn(&programs.path(SERVER), &words);
                listens(&mut server, &front).await?;
                (server, Entry::Connect(front), Some(admin))
            }
            Make::Stock => {
                let options = files.stock_server(proto);
                let namespace = field.server.namespace()?;
                let mut stock = stock(ground)?.start(namespace, &options);
                stock.is_up().await;
                (stock.program, Entry::Within(namespace.clone()), None)
            }
        };
        let client = match contender.client {
            Make::Ours => {
                let words = files.client(proto, listen, &mut ports);
                field.client.spawn(&programs.path(AGENT), &words)
            }
            Make::Stock => {
                let remote = field.listen.ip().to_string();
                let options = Options::client(proto.name(), &remote, &files.pki);
                let options = options.with(STOCK_OPTIONS);
                stock(ground)?
                    .start(field.client.namespace()?, &options)
                    .program
            }
        };
        Ok(Self {
            entry,
            server,
            client,
            admin,
            endpoints,
            _ports: ports,
            _files: files,
            _dir: dir,
        })
    }

    async fn carries(&self) -> anyhow::Result<()> {
        let deadline = Instant::now() + START_LIMIT;
        loop {
            let echo = Echo::proven(&self.entry, self.endpoints.lean());
            match timeout(TRY_LIMIT, echo).await {
                Ok(Ok(_)) => return Ok(()),
                failed if Instant::now() > deadline => {
                    let why = failed.map(|echo| echo.map(drop));
                    let [server, client] = [&self.server, &self.client].map(last_words);
                    bail!("carries no data: {why:?}; server: {server}; client: {client}");
                }
                _ => sleep(TRY_INTERVAL).await,
            }
        }
    }

    /// Reads a figure of the server and of the client.
    pub(super) fn ask<T>(&self, figure: impl Fn(&Program) -> T) -> anyhow::Result<[T; 2]> {
        ask(|| [&self.server, &self.client].map(figure))
    }

    /// Returns the number of segments that our server has retransmitted so far. `None` for the stock server.
    pub(super) async fn resent(&self) -> anyhow::Result<Option<f64>> {
        let Some(admin) = &self.admin else {
            return Ok(None);
        };
        let metrics = metrics(admin).await?;
        Ok(metrics.value("culvert_openvpn_retransmitted_segments_total", &[]))
    }

    /// Returns the number of datagrams that the kernel has dropped so far because a socket buffer was full.
    pub(super) fn lost(&self) -> anyhow::Result<u64> {
        let [server, client] = self.ask(dropped_datagrams)?;
        Ok(server? + client?)
    }
}

fn stock(ground: &Ground) -> anyhow::Result<&'static OpenVpn> {
    ground.stock.map_err(anyhow::Error::msg)
}

/// Returns the flags of our server apart from those for OpenVPN.
pub(crate) fn server_words(
    pki: &Pki,
    [front, admin]: [&Path; 2],
    ports: &mut Ports,
) -> Vec<String> {
    let mut words = vec![
        "--v=1".to_owned(),
        "--mode=http-connect".to_owned(),
        format!("--uds-name={}", front.display()),
        "--server-port=0".to_owned(),
        "--tunnel-mode=openvpn".to_owned(),
        format!("--admin-uds={}", admin.display()),
        format!("--cluster-cert={}", pki.server.cert.display()),
        format!("--cluster-key={}", pki.server.key.display()),
    ];
    for listener in ["agent", "admin", "health"] {
        words.push(format!("--{listener}-port={}", ports.next_port()));
        words.push(format!("--{listener}-bind-address=127.0.0.1"));
    }
    words
}

/// Waits until our server listens on its front end.
async fn listens(server: &mut Program, front: &Path) -> anyhow::Result<()> {
    let deadline = Instant::now() + START_LIMIT;
    loop {
        if let Some(status) = server.exited() {
            bail!("the server exited: {status}: {}", last_words(server));
        }
        match UnixStream::connect(front).await {
            Ok(_) => return Ok(()),
            Err(error) if Instant::now() > deadline => {
                return Err(error).context(front.display().to_string());
            }
            Err(_) => sleep(TRY_INTERVAL).await,
        }
    }
}
