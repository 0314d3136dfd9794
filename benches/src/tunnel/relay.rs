//! Relays: contenders without the protocol of a front end and without agents.
//!
//! [`Kind::Tls`] is a pair of stunnel processes, or of haproxy processes if stunnel is not installed. Between
//! them is mutual TLS with the certificates of a topology; the client side is a plain Unix socket, the
//! endpoint side plain TCP. Each client connection has its own TLS connection. This is the copying and
//! encryption that no tunnel can avoid. [`Kind::Rathole`] is a reverse tunnel without TLS. Like in our
//! tunnel, the far side dials. [`Kind::Bare`] is the [`bare`] relay, which has a front end of its own.

use std::fs;
use std::net::SocketAddr;
use std::os::unix::fs::symlink;
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
use crate::tunnel::bare;

/// Time limit for a relay to carry the first byte, and the pause between two attempts.
const START_LIMIT: Duration = Duration::from_secs(10);
const TRY_INTERVAL: Duration = Duration::from_millis(50);

/// Kind of relay.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) enum Kind {
    /// TLS between two relays.
    Tls,
    /// A reverse tunnel without TLS.
    Rathole,
    /// A reverse tunnel with TLS and HTTP/2, and nothing else.
    Bare,
}

impl Kind {
    /// Returns the reason why the relay cannot run, if its program is not installed.
    pub(super) fn missing(self) -> Option<&'static str> {
        match self {
            Self::Tls if stunnel().or_else(haproxy).is_none() => {
                Some("neither stunnel nor haproxy is installed")
            }
            Self::Rathole if rathole().is_none() => Some("rathole is not installed"),
            Self::Tls | Self::Rathole | Self::Bare => None,
        }
    }
}

/// A running relay. Dropping it kills both programs.
#[derive(Debug)]
pub(super) struct Relay {
    /// The program on the client's side.
    pub near: Program,
    /// The program on the endpoint's side.
    pub far: Program,
    /// Entry of the load.
    pub entry: Entry,
    _ports: Ports,
    // The last field, so that the programs end before their files are removed.
    _dir: TempDir,
}

impl Relay {
    /// Starts a relay to `target` and waits until it carries a byte. One program listens at `middle[1]`, the
    /// other one connects to `middle[0]`; a simulated path may lie between the two. An error contains the
    /// logs of both programs. Panics if a program does not start.
    pub(super) async fn start(
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
            (Kind::Bare, ..) => plan.bare()?,
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
            bail!("the relay carries no data within {START_LIMIT:?}\n{near}\n{far}");
        }
        Ok(relay)
    }

    /// Waits until a byte has returned.
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

/// Finds a program on the path or in the directory that Debian uses for administrators' programs.
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

/// Configuration of the programs to start.
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
        // haproxy expects the certificate and the key in one file.
        let joined = |name: &str, pair: &Pair| -> anyhow::Result<PathBuf> {
            let text = fs::read_to_string(&pair.cert)? + &fs::read_to_string(&pair.key)?;
            self.file(name, &text)
        };
        let agent = joined("agent.pem", &self.pki.agent)?;
        let cluster = joined("cluster.pem", &self.pki.cluster)?;
        let config = |bind: &str, server: &str| {
            format!(
                // haproxy derives its connection limit from the limit of file descriptors.
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

    /// Starts this program under the names of both sides.
    fn bare(&self) -> anyhow::Result<Started> {
        let this = std::env::current_exe().context("cannot find the path of this program")?;
        let program = |name: &str| -> anyhow::Result<PathBuf> {
            let path = self.dir.join(name);
            symlink(&this, &path).context("cannot create a link for the bare relay")?;
            Ok(path)
        };
        let socket = self.dir.join("bare.socket");
        let near = bare::near(self.listened, &self.pki.cluster, &self.pki.ca, &socket);
        let near = Program::spawn(program(bare::NEAR)?, near, &[]);
        let far = bare::arguments(self.dialled, &self.pki.agent, &self.pki.ca);
        let far = Program::spawn(program(bare::FAR)?, far, &[]);
        Ok((near, far, Entry::Connect(socket)))
    }
}

#[cfg(test)]
mod tests {
    #![allow(clippy::unwrap_used, clippy::expect_used, clippy::indexing_slicing)]
    use super::*;
    use crate::endpoint::Endpoints;

    #[tokio::test]
    async fn installed_relays_carry_data_and_others_report_why_not() {
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
