//! Relays: what tunnels are compared with that know neither protocol nor agents.
//!
//! [`Kind::Tls`] is two of stunnel, or of haproxy where there is no stunnel: a plain Unix socket,
//! mutual TLS with the certificates of a topology, plain TCP to the one endpoint, and one TLS
//! connection for each of the client's. It does the copying and the encryption that a tunnel cannot do without.
//! [`Kind::Rathole`] is a reverse tunnel, which like ours is dialled by its far side, without TLS.

use std::fs;
use std::net::SocketAddr;
use std::path::{Path, PathBuf};
use std::time::Duration;

use anyhow::{Context as _, bail};
use culvert_kit::pki::{Pair, Pki};
use culvert_tests::Program;
use culvert_tests::ports::Ports;
use tempfile::TempDir;
use tokio::io::{AsyncReadExt as _, AsyncWriteExt as _};
use tokio::time::{sleep, timeout};

use crate::entry::Entry;

/// How long a relay may take until it carries a byte, and how often that is tried.
const START_LIMIT: Duration = Duration::from_secs(10);
const TRY_INTERVAL: Duration = Duration::from_millis(50);

/// A relay to be measured.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Kind {
    /// TLS between two relays.
    Tls,
    /// A reverse tunnel without TLS.
    Rathole,
}

impl Kind {
    /// What has to be installed, if it is not.
    pub fn missing(self) -> Option<&'static str> {
        match self {
            Self::Tls if stunnel().or_else(haproxy).is_none() => {
                Some("neither stunnel nor haproxy is installed")
            }
            Self::Rathole if rathole().is_none() => Some("rathole is not installed"),
            Self::Tls | Self::Rathole => None,
        }
    }
}

/// A running relay. Dropping it kills both programs.
#[derive(Debug)]
pub struct Relay {
    /// The program at the client's side.
    pub near: Program,
    /// The program at the endpoint's side.
    pub far: Program,
    /// Where the load enters.
    pub entry: Entry,
    _ports: Ports,
    // Last, so that programs are gone before their files are.
    _dir: TempDir,
}

impl Relay {
    /// Starts a relay to `target` and waits until it carries a byte. One program listens at the second
    /// of `middle` and the other one reaches it at the first, with a path between the two or none.
    ///
    /// # Errors
    /// When it carries nothing; its own words are in the error.
    ///
    /// # Panics
    /// When a program cannot be started.
    pub async fn start(
        kind: Kind,
        mut ports: Ports,
        middle: [SocketAddr; 2],
        target: SocketAddr,
    ) -> anyhow::Result<Self> {
        let dir = tempfile::Builder::new()
            .prefix("culvert-bench-")
            .tempdir()?;
        let plan = Plan {
            pki: Pki::create(dir.path())?,
            dir: dir.path(),
            dialled: middle[0],
            listened: middle[1],
            target,
        };
        let (near, far, entry) = match (kind, stunnel(), haproxy(), rathole()) {
            (Kind::Tls, Some(stunnel), ..) => plan.stunnel(&stunnel)?,
            (Kind::Tls, None, Some(haproxy), _) => plan.haproxy(&haproxy)?,
            (Kind::Rathole, _, _, Some(rathole)) => plan.rathole(&rathole, ports.next_port())?,
            (kind, ..) => bail!("{}", kind.missing().unwrap_or("not installed")),
        };
        let relay = Self {
            near,
            far,
            entry,
            _ports: ports,
            _dir: dir,
        };
        if timeout(START_LIMIT, relay.carries(target)).await.is_err() {
            let (near, far) = (relay.near.log(), relay.far.log());
            bail!("the relay carries nothing within {START_LIMIT:?}\n{near}\n{far}");
        }
        Ok(relay)
    }

    /// Returns once a byte has come back.
    async fn carries(&self, target: SocketAddr) {
        while self.echo(target).await.is_err() {
            sleep(TRY_INTERVAL).await;
        }
    }

    async fn echo(&self, target: SocketAddr) -> anyhow::Result<()> {
        let mut stream = self.entry.open(target).await?;
        stream.write_all(b"echo\nx").await?;
        stream.read_u8().await?;
        Ok(())
    }
}

/// A program on the path, or where Debian keeps those of administrators.
fn installed(names: &[&str]) -> Option<PathBuf> {
    let path = std::env::var_os("PATH").unwrap_or_default();
    let dirs: Vec<PathBuf> = std::env::split_paths(&path)
        .chain([PathBuf::from("/usr/sbin")])
        .collect();
    let candidates = names
        .iter()
        .flat_map(|name| dirs.iter().map(move |d| d.join(name)));
    candidates.into_iter().find(|path| path.is_file())
}

fn stunnel() -> Option<PathBuf> {
    installed(&["stunnel4", "stunnel"])
}

fn haproxy() -> Option<PathBuf> {
    installed(&["haproxy"])
}

fn rathole() -> Option<PathBuf> {
    installed(&["rathole"])
}

/// What the programs have to be told.
struct Plan<'a> {
    dir: &'a Path,
    pki: Pki,
    dialled: SocketAddr,
    listened: SocketAddr,
    target: SocketAddr,
}

type Started = (Program, Program, Entry);

impl Plan<'_> {
    fn file(&self, name: &str, text: &str) -> anyhow::Result<PathBuf> {
        let path = self.dir.join(name);
        fs::write(&path, text).with_context(|| path.display().to_string())?;
        Ok(path)
    }

    fn stunnel(&self, program: &Path) -> anyhow::Result<Started> {
        let socket = self.dir.join("relay.socket");
        let config = |client: &str, pair: &Pair, accept: &str, connect: SocketAddr| {
            format!(
                "foreground = yes\npid =\ndebug = err\n\
                 socket = l:TCP_NODELAY=1\nsocket = r:TCP_NODELAY=1\n\
                 [relay]\nclient = {client}\naccept = {accept}\nconnect = {connect}\n\
                 cert = {}\nkey = {}\nCAfile = {}\nverifyChain = yes\n",
                pair.cert.display(),
                pair.key.display(),
                self.pki.ca.display(),
            )
        };
        let accept = socket.display().to_string();
        let near = config("yes", &self.pki.agent, &accept, self.dialled);
        let far = config(
            "no",
            &self.pki.cluster,
            &self.listened.to_string(),
            self.target,
        );
        let far = Program::spawn(program, [self.file("far.conf", &far)?], &[]);
        let near = Program::spawn(program, [self.file("near.conf", &near)?], &[]);
        Ok((near, far, Entry::Relay(socket)))
    }

    fn haproxy(&self, program: &Path) -> anyhow::Result<Started> {
        let socket = self.dir.join("relay.socket");
        let ca = self.pki.ca.display();
        // It wants certificate and key in one file.
        let joined = |name: &str, pair: &Pair| -> anyhow::Result<PathBuf> {
            let text = fs::read_to_string(&pair.cert)? + &fs::read_to_string(&pair.key)?;
            self.file(name, &text)
        };
        let agent = joined("agent.pem", &self.pki.agent)?;
        let cluster = joined("cluster.pem", &self.pki.cluster)?;
        let config = |bind: &str, server: &str| {
            format!(
                // It derives from the limit of file descriptors how many connections it takes.
                "defaults\n mode tcp\n timeout connect 5s\n timeout client 1h\n timeout server 1h\n\
                 listen relay\n bind {bind}\n server next {server}\n"
            )
        };
        let near = config(
            &format!("unix@{}", socket.display()),
            &format!(
                "{} ssl crt {} ca-file {ca} verify required",
                self.dialled,
                agent.display()
            ),
        );
        let far = config(
            &format!(
                "{} ssl crt {} ca-file {ca} verify required",
                self.listened,
                cluster.display()
            ),
            &self.target.to_string(),
        );
        let run = |name: &str, text: &str| -> anyhow::Result<Program> {
            let path = self.file(name, text)?;
            Ok(Program::spawn(
                program,
                ["-db".as_ref(), "-f".as_ref(), path.as_os_str()],
                &[],
            ))
        };
        let far = run("far.cfg", &far)?;
        Ok((run("near.cfg", &near)?, far, Entry::Relay(socket)))
    }

    fn rathole(&self, program: &Path, port: u16) -> anyhow::Result<Started> {
        let entry = SocketAddr::from(([127, 0, 0, 1], port));
        let near = format!(
            "[server]\nbind_addr = \"{}\"\ndefault_token = \"bench\"\n\
             [server.services.bench]\nbind_addr = \"{entry}\"\n",
            self.listened
        );
        let far = format!(
            "[client]\nremote_addr = \"{}\"\ndefault_token = \"bench\"\n\
             [client.services.bench]\nlocal_addr = \"{}\"\n",
            self.dialled, self.target
        );
        let near = Program::spawn(program, [self.file("near.toml", &near)?], &[]);
        let far = Program::spawn(program, [self.file("far.toml", &far)?], &[]);
        Ok((near, far, Entry::Plain(entry)))
    }
}

#[cfg(test)]
mod tests {
    #![allow(clippy::unwrap_used, clippy::expect_used, clippy::indexing_slicing)]
    use super::*;
    use crate::endpoint::Endpoints;

    /// Every relay that is installed carries bytes; one that is not says so.
    #[tokio::test]
    async fn what_is_installed_carries() {
        let endpoints = Endpoints::start().await.unwrap();
        for kind in [Kind::Tls, Kind::Rathole] {
            let mut ports = Ports::default();
            let middle = SocketAddr::from(([127, 0, 0, 1], ports.next_port()));
            let started = Relay::start(kind, ports, [middle; 2], endpoints.lean()).await;
            match kind.missing() {
                None => {
                    let relay = started.unwrap();
                    let mut stream = relay.entry.open(endpoints.lean()).await.unwrap();
                    stream.write_all(b"download 100000\n").await.unwrap();
                    let mut received = vec![0; 100_000];
                    stream.read_exact(&mut received).await.unwrap();
                    assert!(received == culvert_kit::pattern::prefix(100_000));
                }
                Some(text) => {
                    let error = started.err().unwrap();
                    assert_eq!(error.to_string(), text);
                }
            }
        }
    }
}
