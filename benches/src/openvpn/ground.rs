//! Networks of pairs: loopback, or one network namespace per half.
//!
//! The stock program needs root and networks of its own. If these are available, the whole command runs again
//! inside namespaces. The namespaces end with that second run, and so do all networks and programs inside,
//! however the run ends.

use std::io;
use std::net::{Ipv4Addr, SocketAddrV4, UdpSocket};
use std::path::Path;
use std::process::ExitCode;
use std::sync::atomic::{AtomicU32, Ordering};
use std::time::Duration;

use anyhow::{Context as _, anyhow, bail, ensure};
use culvert_tests::Program;
use culvert_tests::interop::Interop;
use culvert_tests::namespace::{self, ip};
use culvert_tests::openvpn::{Namespace, OpenVpn};
use culvert_tests::ports::Ports;
use rustix::process::{Pid, Signal, kill_process};
use tokio::net::TcpSocket;
use tokio::process::{Child, Command};
use tokio::signal::unix::{SignalKind, signal};
use tokio::time::timeout;

use crate::programs::Programs;

/// Address of this machine inside the namespaces.
const OWN: Ipv4Addr = Ipv4Addr::new(192, 168, 79, 1);

/// Both ends of the link, and an address behind the client.
const SERVER: Ipv4Addr = Ipv4Addr::new(192, 168, 77, 1);
const CLIENT: Ipv4Addr = Ipv4Addr::new(192, 168, 77, 2);
const BEHIND: Ipv4Addr = Ipv4Addr::new(172, 25, 1, 10);

/// Default port of OpenVPN.
const PORT: u16 = 1194;

/// Time limit for the second run to clean up after an interrupt.
const PATIENCE: Duration = Duration::from_secs(10);

/// Does the same as [`again`], but only if the stock program is available.
pub(crate) async fn again_with_stock() -> anyhow::Result<Option<ExitCode>> {
    match OpenVpn::look() {
        Ok(_) => again().await,
        Err(_) => Ok(None),
    }
}

/// Does the same as [`again`], but builds the stock server and agent first.
pub(crate) async fn again_with_konnectivity() -> anyhow::Result<Option<ExitCode>> {
    if !namespace::is_inside() {
        Interop::get();
    }
    again().await
}

/// Runs the whole command again inside namespaces, and returns its exit code. Returns `None` inside the
/// second run, or if namespaces are not available. Builds our programs first, because the namespaces have no
/// access to the outside.
pub(crate) async fn again() -> anyhow::Result<Option<ExitCode>> {
    if namespace::is_inside() {
        return Ok(None);
    }
    let Ok(command) = namespace::again(std::env::args_os().skip(1)) else {
        return Ok(None);
    };
    Programs::ours()?;
    let mut command = Command::from(command);
    let mut terminated = signal(SignalKind::terminate())?;
    let mut child = command.env_remove("CARGO").spawn().context("unshare")?;
    let ended = tokio::select! {
        status = child.wait() => Some(status?),
        _ = tokio::signal::ctrl_c() => None,
        _ = terminated.recv() => None,
    };
    let status = match ended {
        Some(status) => status,
        None => {
            terminate_inside(&child)?;
            let ended = timeout(PATIENCE, child.wait()).await;
            ended.context("interrupted")??
        }
    };
    let code = status.code().and_then(|code| u8::try_from(code).ok());
    Ok(Some(code.map_or(ExitCode::FAILURE, ExitCode::from)))
}

/// Sends SIGTERM to the second run, which then removes its files. `unshare` blocks the signal for itself and does not
/// forward it.
fn terminate_inside(unshare: &Child) -> anyhow::Result<()> {
    let Some(pid) = unshare.id() else {
        return Ok(());
    };
    let children = std::fs::read_to_string(format!("/proc/{pid}/task/{pid}/children"))?;
    for child in children.split_whitespace() {
        let child = Pid::from_raw(child.parse()?).context("an invalid process id")?;
        kill_process(child, Signal::TERM).context("cannot end the second run")?;
    }
    Ok(())
}

/// The networks available on this machine.
#[derive(Debug)]
pub(crate) struct Ground {
    /// An address of this machine that is not on loopback. Our agent never dials loopback addresses.
    pub address: Ipv4Addr,
    /// The stock program, or the reason why it cannot be measured.
    pub stock: Result<&'static OpenVpn, &'static str>,
}

impl Ground {
    /// Finds the networks of this machine. Fails if the machine has no address.
    pub(crate) fn find() -> anyhow::Result<Self> {
        if namespace::is_inside() {
            for words in ["link set lo up", &format!("address add {OWN}/32 dev lo")] {
                ip(words).map_err(|why| anyhow!("ip {words}: {why}"))?;
            }
            return Ok(Self {
                address: OWN,
                stock: OpenVpn::look(),
            });
        }
        let missing = OpenVpn::look().err();
        Ok(Self {
            address: own_address().context("cannot find an address of this machine")?,
            stock: Err(missing.unwrap_or("no network namespaces")),
        })
    }
}

/// Returns the address from which this machine would reach other machines. Sends nothing.
pub(crate) fn own_address() -> anyhow::Result<Ipv4Addr> {
    let socket = UdpSocket::bind((Ipv4Addr::UNSPECIFIED, 0))?;
    // An address for documentation (RFC 5737).
    socket.connect((Ipv4Addr::new(192, 0, 2, 1), 9))?;
    match socket.local_addr()?.ip() {
        std::net::IpAddr::V4(own) if !own.is_loopback() => Ok(own),
        other => bail!("agents do not dial {other}"),
    }
}

/// The network of one half of a pair: a namespace, or the network of this process if `None`.
#[derive(Debug)]
pub(super) struct Spot(Option<Namespace>);

impl Spot {
    /// Starts a program in this network. Panics if the program does not start.
    pub(super) fn spawn(&self, program: &Path, words: &[String]) -> Program {
        match &self.0 {
            Some(namespace) => namespace.spawn(program, words),
            None => Program::spawn(program, words, &[]),
        }
    }

    /// Opens a TCP socket in this network.
    pub(super) fn socket(&self) -> io::Result<TcpSocket> {
        match &self.0 {
            Some(namespace) => namespace.within(TcpSocket::new_v4),
            None => TcpSocket::new_v4(),
        }
    }

    /// Returns the namespace. Fails if the half has none.
    pub(super) fn namespace(&self) -> anyhow::Result<&Namespace> {
        self.0.as_ref().context("needs a network namespace")
    }
}

/// The networks of both halves of a pair.
#[derive(Debug)]
pub(super) struct Field {
    /// The network of the server.
    pub server: Spot,
    /// The network of the client.
    pub client: Spot,
    /// Address on which the server listens.
    pub listen: SocketAddrV4,
    /// An address behind the client.
    pub behind: Ipv4Addr,
}

impl Field {
    /// Places both halves on loopback.
    pub(super) fn here(ground: &Ground, ports: &mut Ports) -> Self {
        Self {
            server: Spot(None),
            client: Spot(None),
            listen: SocketAddrV4::new(Ipv4Addr::LOCALHOST, ports.next_port()),
            behind: ground.address,
        }
    }

    /// Places the halves in two namespaces with a link between them. The namespaces exist until this process
    /// ends.
    pub(super) fn apart() -> anyhow::Result<Self> {
        ensure!(namespace::is_inside(), "not inside network namespaces");
        static NUMBER: AtomicU32 = AtomicU32::new(0);
        let number = NUMBER.fetch_add(1, Ordering::Relaxed);
        let server = Namespace::add(&format!("s{number}"));
        let client = Namespace::add(&format!("c{number}"));
        server.link(&format!("{SERVER}/24"), &client, &format!("{CLIENT}/24"));
        client.address(BEHIND);
        Ok(Self {
            server: Spot(Some(server)),
            client: Spot(Some(client)),
            listen: SocketAddrV4::new(SERVER, PORT),
            behind: BEHIND,
        })
    }
}
