//! Where pairs run: here, over loopback, or each half in a network of its own.
//!
//! The stock program needs root and networks of its own. Where these can be made, the whole command runs once
//! more in namespaces that end with it, and so do all networks and programs in them, however it ends.

use std::io;
use std::net::{Ipv4Addr, SocketAddrV4, UdpSocket};
use std::path::Path;
use std::process::ExitCode;
use std::sync::atomic::{AtomicU32, Ordering};
use std::time::Duration;

use anyhow::{Context as _, anyhow, bail, ensure};
use culvert_tests::Program;
use culvert_tests::namespace::{self, ip};
use culvert_tests::openvpn::{Namespace, OpenVpn};
use culvert_tests::ports::Ports;
use tokio::net::TcpSocket;
use tokio::process::Command;
use tokio::time::timeout;

use crate::topology::Programs;

/// This machine's address, where it has a network of its own.
const OWN: Ipv4Addr = Ipv4Addr::new(192, 168, 79, 1);

/// The two ends of a wire, and an address behind the client.
const SERVER: Ipv4Addr = Ipv4Addr::new(192, 168, 77, 1);
const CLIENT: Ipv4Addr = Ipv4Addr::new(192, 168, 77, 2);
const BEHIND: Ipv4Addr = Ipv4Addr::new(172, 25, 1, 10);

/// OpenVPN's own.
const PORT: u16 = 1194;

/// How long the command gets to clean up once it is interrupted.
const PATIENCE: Duration = Duration::from_secs(10);

/// Runs the whole command once more, in namespaces of its own, if the stock program is there and namespaces
/// can be made, and this is not that second run. Gives how that ended. What has to be built is built before:
/// there is no way to the outside within.
///
/// # Errors
/// When our programs do not build.
pub async fn again() -> anyhow::Result<Option<ExitCode>> {
    if namespace::is_inside() || OpenVpn::look().is_err() {
        return Ok(None);
    }
    let Ok(command) = namespace::again(std::env::args_os().skip(1)) else {
        return Ok(None);
    };
    Programs::ours()?;
    let mut command = Command::from(command);
    let mut child = command.env_remove("CARGO").spawn().context("unshare")?;
    let status = tokio::select! {
        status = child.wait() => status?,
        // It was interrupted, too, and removes its files.
        _ = tokio::signal::ctrl_c() => match timeout(PATIENCE, child.wait()).await {
            Ok(status) => status?,
            Err(_) => bail!("interrupted"),
        },
    };
    let code = status.code().and_then(|code| u8::try_from(code).ok());
    Ok(Some(code.map_or(ExitCode::FAILURE, ExitCode::from)))
}

/// What there is here.
#[derive(Debug)]
pub struct Ground {
    /// An address of this machine that is not a loopback one: our agent dials none of these.
    pub address: Ipv4Addr,
    /// The stock program, or why it cannot be measured.
    pub stock: Result<&'static OpenVpn, &'static str>,
}

impl Ground {
    /// Looks.
    ///
    /// # Errors
    /// When this machine has no address.
    pub fn find() -> anyhow::Result<Self> {
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
            address: own_address().context("this machine's own address")?,
            stock: Err(missing.unwrap_or("no network namespaces")),
        })
    }
}

/// The address from which this machine would reach others. Nothing is sent.
fn own_address() -> anyhow::Result<Ipv4Addr> {
    let socket = UdpSocket::bind((Ipv4Addr::UNSPECIFIED, 0))?;
    // For documentation, RFC 5737.
    socket.connect((Ipv4Addr::new(192, 0, 2, 1), 9))?;
    match socket.local_addr()?.ip() {
        std::net::IpAddr::V4(own) if !own.is_loopback() => Ok(own),
        other => bail!("{other} is not one that an agent dials"),
    }
}

/// Where a half of a pair runs: here, or in a network of its own.
#[derive(Debug)]
pub struct Spot(Option<Namespace>);

impl Spot {
    /// Starts a program there.
    ///
    /// # Panics
    /// When it cannot be started.
    pub fn spawn(&self, program: &Path, words: &[String]) -> Program {
        match &self.0 {
            Some(namespace) => namespace.spawn(program, words),
            None => Program::spawn(program, words, &[]),
        }
    }

    /// A TCP socket there.
    ///
    /// # Errors
    /// As the kernel says.
    pub fn socket(&self) -> io::Result<TcpSocket> {
        match &self.0 {
            Some(namespace) => namespace.within(TcpSocket::new_v4),
            None => TcpSocket::new_v4(),
        }
    }

    /// Its network.
    ///
    /// # Errors
    /// Where it has none of its own.
    pub fn namespace(&self) -> anyhow::Result<&Namespace> {
        self.0.as_ref().context("needs a network of its own")
    }
}

/// The two places of a pair.
#[derive(Debug)]
pub struct Field {
    /// The server's.
    pub server: Spot,
    /// The client's.
    pub client: Spot,
    /// Where the server waits for its client.
    pub listen: SocketAddrV4,
    /// An address behind the client.
    pub behind: Ipv4Addr,
}

impl Field {
    /// Over loopback.
    pub fn here(ground: &Ground, ports: &mut Ports) -> Self {
        Self {
            server: Spot(None),
            client: Spot(None),
            listen: SocketAddrV4::new(Ipv4Addr::LOCALHOST, ports.next_port()),
            behind: ground.address,
        }
    }

    /// In two networks with a wire between them, which last as long as this process.
    ///
    /// # Errors
    /// Outside of namespaces of our own.
    ///
    /// # Panics
    /// When the kernel makes none.
    pub fn apart() -> anyhow::Result<Self> {
        ensure!(namespace::is_inside(), "no networks of our own");
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
