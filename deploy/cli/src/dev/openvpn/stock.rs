//! The stock OpenVPN client, in a network namespace of its own. Only relays of this process lead into and out
//! of the namespace.
//!
//! ```text
//!  server <-- relay <-- 127.0.0.1:1194 <-- openvpn == tun0 --> 10.240.16.1 --> relay --> services
//!  this network       |                its own network                    |     this network
//! ```
//! Nothing is visible from outside, and nothing needs cleaning up: the network and the device end with the
//! OpenVPN program, and the program ends with this process, however this process ends.

use std::ffi::OsString;
use std::fs::File;
use std::io;
use std::net::{IpAddr, Ipv4Addr, SocketAddr, TcpListener};
use std::os::fd::AsFd as _;
use std::path::{Path, PathBuf};
use std::process::Stdio;
use std::time::Duration;

use anyhow::{Context as _, bail};
use culvert_kit::services::Services;
use rustix::thread::{LinkNameSpaceType, move_into_link_name_space};
use tokio::io::{AsyncBufReadExt as _, AsyncWriteExt as _, BufReader};
use tokio::process::{Child, Command};
use tokio::time::timeout;
use tokio_util::sync::CancellationToken;
use tokio_util::task::TaskTracker;

use super::{Files, SERVICE};
use crate::dev::balancer;

/// Address of the relay to the server, inside the client's network.
const WAY_OUT: SocketAddr = SocketAddr::new(IpAddr::V4(Ipv4Addr::LOCALHOST), 1194);

/// Longest wait for the client's network. The script ends at once if a step fails, but the kernel may delay a new network by
/// seconds while it removes others.
const PATIENCE: Duration = Duration::from_secs(60);

/// Command line for a network namespace and a process namespace. Both end with `unshare`, and `unshare` ends
/// with this process.
const ALONE: [&str; 9] = [
    "--pdeathsig",
    "KILL",
    "unshare",
    "--net",
    "--pid",
    "--fork",
    "--kill-child",
    "sh",
    "-c",
];

/// Shell script that runs in the namespaces. The arguments are [`SERVICE`] and the path of the client's
/// configuration. Prints an empty line once the network is ready, then waits for a line, which means that the
/// relays are ready.
const SCRIPT: &str = "command -v openvpn >&2 || { echo 'openvpn is not installed' >&2; exit 1; }
ip link set lo up && ip address add $0/32 dev lo || exit 1
ip tuntap add dev probe mode tun && ip tuntap del dev probe mode tun || exit 1
echo && read -r _ && exec openvpn --config \"$1\" >&2";

pub(crate) struct Stock {
    /// The HTTP service's address, as dialed by a server through this client.
    pub http: SocketAddr,
    /// The raw service's address, as dialed by a server through this client.
    pub raw: SocketAddr,
    pub log: PathBuf,
    child: Child,
}

impl Stock {
    /// Starts the stock client. Fails if this machine or user cannot run one.
    pub(crate) async fn start(
        files: &Files,
        server: SocketAddr,
        services: &Services,
        tasks: &TaskTracker,
        shutdown: &CancellationToken,
    ) -> anyhow::Result<Self> {
        if !rustix::process::geteuid().is_root() {
            bail!("a tun device and a network of its own need root");
        }
        let config = files.folder.join("stock-client.conf");
        std::fs::write(&config, files.client(&files.pki.stock, WAY_OUT))?;
        let log = files.folder.join("stock-client.log");
        let mut child = Command::new("setpriv")
            .args(ALONE)
            .arg(SCRIPT)
            .arg(SERVICE.to_string())
            .arg(config)
            .env("PATH", path())
            .stdin(Stdio::piped())
            .stdout(Stdio::piped())
            .stderr(File::create(&log)?)
            // A process group of its own, so that Ctrl-C reaches only this process.
            .process_group(0)
            .kill_on_drop(true)
            .spawn()
            .context("cannot run setpriv")?;
        let (Some(mut stdin), Some(stdout)) = (child.stdin.take(), child.stdout.take()) else {
            bail!("setpriv has no input and output");
        };
        let mut said = String::new();
        let mut stdout = BufReader::new(stdout);
        let ready = timeout(PATIENCE, stdout.read_line(&mut said)).await;
        if ready.context("the client's network was not ready within a minute")?? == 0 {
            bail!("{}", last_line(&log));
        }
        let at = |service: SocketAddr| SocketAddr::new(SERVICE.into(), service.port());
        let (http, raw) = (at(services.http), at(services.raw));
        let pid = child.id().context("the stock client has ended")?;
        let listeners =
            listen(pid, [WAY_OUT, http, raw]).context("cannot listen in the client's network")?;
        for (listener, to) in listeners
            .into_iter()
            .zip([server, services.http, services.raw])
        {
            let listener = tokio::net::TcpListener::from_std(listener)?;
            let (to, own) = (vec![to], tasks.clone());
            tasks.spawn(balancer::serve(listener, to, own, shutdown.clone()));
        }
        stdin.write_all(b"\n").await?;
        Ok(Self {
            http,
            raw,
            log,
            child,
        })
    }

    /// Returns the last line of the program's log.
    pub(crate) fn last_line(&self) -> String {
        last_line(&self.log)
    }

    /// Kills the program and waits for its exit.
    pub(crate) async fn stop(mut self) {
        // The program may already have ended.
        let _ = self.child.kill().await;
    }
}

/// Returns PATH with the system folders added; some users' PATH lacks them.
fn path() -> OsString {
    let path = std::env::var_os("PATH");
    let mut path = path.unwrap_or_else(|| "/usr/bin:/bin".into());
    path.push(":/usr/sbin:/sbin");
    path
}

fn last_line(log: &Path) -> String {
    let said = std::fs::read(log).unwrap_or_default();
    let said = String::from_utf8_lossy(&said);
    said.trim_end()
        .lines()
        .last()
        .unwrap_or_default()
        .to_owned()
}

/// Opens listeners in the network namespace of a process. A socket belongs to the namespace of the thread
/// that created the socket.
fn listen(pid: u32, at: [SocketAddr; 3]) -> io::Result<Vec<TcpListener>> {
    let network = File::open(format!("/proc/{pid}/ns/net"))?;
    let inside = std::thread::spawn(move || {
        move_into_link_name_space(network.as_fd(), Some(LinkNameSpaceType::Network))?;
        at.into_iter().map(bind).collect()
    });
    let done = inside.join();
    done.unwrap_or_else(|_| Err(io::Error::other("the listener thread panicked")))
}

fn bind(at: SocketAddr) -> io::Result<TcpListener> {
    let listener = TcpListener::bind(at)?;
    listener.set_nonblocking(true)?;
    Ok(listener)
}
