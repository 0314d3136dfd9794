//! The contenders and their running programs.
//!
//! A tunnel is one server and one agent on loopback, with mutual TLS between them and a Unix socket as the
//! front end. Every pair gets the same flags and the same log level.

use std::any::Any;
use std::future::Future;
use std::net::SocketAddr;
use std::os::unix::fs::symlink;
use std::panic::{AssertUnwindSafe, catch_unwind};
use std::path::{Path as FilePath, PathBuf};
use std::process::Command;
use std::time::Duration;

use anyhow::{Context as _, anyhow, bail, ensure};
use culvert_kit::client::FrontEnd;
use culvert_tests::interop::Interop;
use culvert_tests::ports::Ports;
use culvert_tests::{Executable, Mode, Program, Topology, Transport};
use futures_util::FutureExt as _;
use tempfile::TempDir;

use crate::delay::{Delay, Path};
use crate::endpoint::{ENDPOINT, LISTENING};
use crate::entry::Entry;
use crate::measure::Subject;
use crate::relay::{self, Relay};

/// Our server; its package also contains the front door.
pub const SERVER: &str = "culvert-server";
/// Our agent; its package also contains the node tunnel.
pub const AGENT: &str = "culvert-agent";
/// The front door.
pub const PROXY: &str = "culvert-nodeport-proxy";
/// The node tunnel.
pub const NODE: &str = "culvert-node-tunnel";

/// Flags added to the flags of the harness, for conditions as in production: operators run the stock programs
/// with these flags, and the probes are slower than in tests.
const SERVER_FLAGS: [&str; 1] = ["--v=1"];
const AGENT_FLAGS: [&str; 4] = [
    "--v=1",
    "--sync-interval=1s",
    "--sync-interval-cap=10s",
    "--probe-interval=1s",
];

/// Time limit for the endpoint to print its address.
const START_LIMIT: Duration = Duration::from_secs(20);

/// Maker of a program.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum Make {
    Ours,
    Stock,
}

/// Programs of a contender.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum Kind {
    /// A server and an agent.
    Pair { server: Make, agent: Make },
    /// A relay, which leads to one endpoint only.
    Relay(relay::Kind),
    /// No program: the load goes straight to the endpoint.
    Direct,
}

/// A tunnel to measure.
#[derive(Debug, Clone, Copy)]
pub struct Contender {
    /// Server and agent, one word if both have the same maker, or the name of another kind of contender.
    pub name: &'static str,
    kind: Kind,
}

const fn pair(name: &'static str, server: Make, agent: Make) -> Contender {
    Contender {
        name,
        kind: Kind::Pair { server, agent },
    }
}

/// Name of our pair.
pub const OURS: &str = "ours";
/// Name of the stock pair, the main reference.
pub const STOCK: &str = "stock";
/// Name of the pair with our server and the stock agent.
pub const OURS_STOCK: &str = "ours+stock";
/// Name of the pair with the stock server and our agent.
pub const STOCK_OURS: &str = "stock+ours";
/// Name of the relay that shows the cost of TLS alone.
pub const RELAY: &str = "relay";
/// Name of the tunnel without TLS.
pub const RATHOLE: &str = "rathole";
/// Name of the load straight to the endpoint.
pub const DIRECT: &str = "direct";

/// All contenders, ours first.
pub const CONTENDERS: [Contender; 7] = [
    pair(OURS, Make::Ours, Make::Ours),
    pair(STOCK, Make::Stock, Make::Stock),
    pair(OURS_STOCK, Make::Ours, Make::Stock),
    pair(STOCK_OURS, Make::Stock, Make::Ours),
    Contender {
        name: RELAY,
        kind: Kind::Relay(relay::Kind::Tls),
    },
    Contender {
        name: RATHOLE,
        kind: Kind::Relay(relay::Kind::Rathole),
    },
    Contender {
        name: DIRECT,
        kind: Kind::Direct,
    },
];

impl Contender {
    /// Returns the reason if the contender cannot run on this machine.
    pub fn missing(&self, programs: &Programs) -> Option<&'static str> {
        match self.kind {
            Kind::Pair { server, agent } => {
                let needs_stock = [server, agent].contains(&Make::Stock);
                (needs_stock && programs.stock.is_none()).then_some("needs Go")
            }
            Kind::Relay(kind) => kind.missing(),
            Kind::Direct => None,
        }
    }

    /// Returns true for a server and an agent. Other contenders have no front end.
    pub fn is_pair(&self) -> bool {
        matches!(self.kind, Kind::Pair { .. })
    }

    /// Returns true if the contender has processes with processor time and memory.
    pub fn has_programs(&self) -> bool {
        self.kind != Kind::Direct
    }

    /// File descriptors that the busiest process needs per connection.
    pub fn descriptors_per_connection(&self) -> u64 {
        match self.kind {
            Kind::Pair { .. } => 1,
            Kind::Relay(_) => 2,
            Kind::Direct => 0,
        }
    }
}

/// The programs to start.
#[derive(Debug)]
pub struct Programs {
    /// Folder of our programs and of this program.
    ours: PathBuf,
    /// Folder with a link to this program: the harness starts files, not subcommands.
    names: TempDir,
    /// The stock programs and the Go driver. `None` if Go is not installed.
    pub stock: Option<&'static Interop>,
}

impl Programs {
    /// Builds our programs with the profile of this program, and the stock programs if Go is installed.
    /// Prints a line to stderr if Go is missing. Panics if the stock programs do not build.
    pub fn find() -> anyhow::Result<Self> {
        Ok(Self {
            stock: Interop::get(),
            ..Self::ours()?
        })
    }

    /// Builds our programs only.
    pub fn ours() -> anyhow::Result<Self> {
        let this = std::env::current_exe().context("cannot find the path of this program")?;
        Self::at(build(&this)?)
    }

    /// Uses our programs in the folder `ours`.
    pub fn at(ours: PathBuf) -> anyhow::Result<Self> {
        let this = std::env::current_exe().context("cannot find the path of this program")?;
        let names = tempfile::Builder::new()
            .prefix("culvert-bench-")
            .tempdir()?;
        symlink(&this, names.path().join(ENDPOINT))
            .context("cannot create a link for the endpoint")?;
        Ok(Self {
            ours,
            names,
            stock: None,
        })
    }

    /// Returns the path of one of our programs.
    pub fn path(&self, name: &str) -> PathBuf {
        self.ours.join(name)
    }

    /// Starts the endpoint of idle connections and returns its address.
    pub async fn endpoint(&self) -> anyhow::Result<(Program, SocketAddr)> {
        let path = self.names.path().join(ENDPOINT);
        let starting = async {
            let program = Program::spawn(path, [""; 0], &[]);
            let line = program.wait_for_log(LISTENING, START_LIMIT).await;
            (program, line)
        };
        let (program, line) = harness(starting).await?;
        let address = line.trim_start_matches(LISTENING).parse();
        Ok((
            program,
            address.context("cannot parse the address of the endpoint")?,
        ))
    }

    fn server(&self, make: Make) -> anyhow::Result<Executable> {
        self.executable(make, SERVER, |stock| &stock.proxy_server)
    }

    fn agent(&self, make: Make) -> anyhow::Result<Executable> {
        self.executable(make, AGENT, |stock| &stock.proxy_agent)
    }

    fn executable(
        &self,
        make: Make,
        name: &str,
        stock: impl Fn(&Interop) -> &PathBuf,
    ) -> anyhow::Result<Executable> {
        let path = match make {
            Make::Ours => self.path(name),
            Make::Stock => stock(self.stock.context("the stock programs need Go")?).clone(),
        };
        Ok(Executable::At(path))
    }
}

/// Builds our programs with Cargo into the folder of `this` program, and returns that folder. The shipped
/// programs are measured, because a larger program that contains all of them would use other memory pages.
fn build(this: &FilePath) -> anyhow::Result<PathBuf> {
    let folder = this
        .parent()
        .context("cannot find the folder of this program")?;
    let Some(cargo) = std::env::var_os("CARGO") else {
        let missing = [SERVER, AGENT, PROXY, NODE]
            .into_iter()
            .find(|name| !folder.join(name).exists());
        return match missing {
            Some(name) => bail!(
                "{name} is not in the folder of this program; start this program with `cargo run --release -p culvert-bench`"
            ),
            None => Ok(folder.to_owned()),
        };
    };
    eprintln!("building our programs");
    let mut command = Command::new(cargo);
    command.args(["build", "--quiet", "--locked", "-p", SERVER, "-p", AGENT]);
    command.current_dir(env!("CARGO_MANIFEST_DIR"));
    command.arg("--target-dir").args(folder.parent());
    if folder.ends_with("release") {
        command.arg("--release");
    }
    // `cargo run` sets these variables for this program. The build script of ring depends on some of them, so
    // keeping them would rebuild ring and its dependents, now and in the next run.
    for (name, _) in std::env::vars_os() {
        let text = name.to_string_lossy();
        if ["CARGO_PKG_", "CARGO_MANIFEST_", "OUT_DIR"]
            .iter()
            .any(|start| text.starts_with(start))
        {
            command.env_remove(name);
        }
    }
    ensure!(
        command.status()?.success(),
        "cargo failed to build our programs"
    );
    Ok(folder.to_owned())
}

/// The running programs.
#[derive(Debug)]
enum Parts {
    Pair(Box<Topology>),
    Relay(Box<Relay>),
    Nothing,
}

/// A running contender. Dropping it kills its programs.
#[derive(Debug)]
pub struct Tunnel {
    parts: Parts,
    /// Entry of the load.
    pub entry: Entry,
    /// The simulated path between the two halves, if any.
    _delay: Option<Delay>,
}

impl Tunnel {
    /// Starts a contender and waits until it can carry data to `target`. The two halves are connected by
    /// `path`, or by loopback. The programs log to stderr.
    pub async fn start(
        contender: &Contender,
        mode: Mode,
        programs: &Programs,
        target: SocketAddr,
        path: Option<Path>,
    ) -> anyhow::Result<Self> {
        match contender.kind {
            Kind::Pair { server, agent } => {
                let (server, agent) = (programs.server(server)?, programs.agent(agent)?);
                Self::pair(server, agent, mode, path).await
            }
            Kind::Relay(kind) => {
                let mut ports = Ports::default();
                let middle = SocketAddr::from(([127, 0, 0, 1], ports.next_port()));
                let delay = Delay::to(middle, path).await?;
                let entry = delay.as_ref().map_or(middle, Delay::address);
                let starting = Relay::start(kind, ports, [entry, middle], target);
                let relay = harness(starting).await??;
                Ok(Self {
                    entry: relay.entry.clone(),
                    parts: Parts::Relay(Box::new(relay)),
                    _delay: delay,
                })
            }
            Kind::Direct => {
                let delay = Delay::to(target, path).await?;
                Ok(Self {
                    parts: Parts::Nothing,
                    entry: Entry::Plain(delay.as_ref().map_or(target, Delay::address)),
                    _delay: delay,
                })
            }
        }
    }

    async fn pair(
        server: Executable,
        agent: Executable,
        mode: Mode,
        path: Option<Path>,
    ) -> anyhow::Result<Self> {
        // The harness chooses the agent port during its start, but a simulated path needs the port earlier.
        // Later flags override earlier flags of the same name.
        let mut ports = Ports::default();
        let listener = SocketAddr::from(([127, 0, 0, 1], ports.next_port()));
        let delay = Delay::to(listener, path).await?;
        let (mut server_flags, mut agent_flags) = (SERVER_FLAGS.to_vec(), AGENT_FLAGS.to_vec());
        let agent_port = format!("--agent-port={}", listener.port());
        let server_port;
        if let Some(delay) = &delay {
            server_port = format!("--proxy-server-port={}", delay.address().port());
            server_flags.push(&agent_port);
            agent_flags.push(&server_port);
        }
        let starting = Topology::builder(mode, Transport::Uds)
            .server(server, &server_flags)
            .agent(agent, &agent_flags)
            .start();
        let topology = harness(starting).await?;
        let entry = match topology.front_end() {
            FrontEnd::GrpcUds(path) => Entry::Grpc(path.clone()),
            FrontEnd::ConnectUds(path) => Entry::Connect(path.clone()),
            other => bail!("the front end is not a Unix socket: {other:?}"),
        };
        Ok(Self {
            parts: Parts::Pair(Box::new(topology)),
            entry,
            _delay: delay,
        })
    }

    /// Resident memory of the agent, or of the far program of a relay, in bytes.
    pub fn agent_rss(&mut self) -> anyhow::Result<Option<u64>> {
        let [_, far] = self.ask(Program::rss)?;
        Ok(far)
    }

    /// Reads a figure of both programs. The harness panics if a program has ended; the panic becomes an
    /// error.
    fn ask<T>(&mut self, ask: impl Fn(&Program) -> T) -> anyhow::Result<[Option<T>; 2]> {
        let parts = &mut self.parts;
        let asking = || match parts {
            Parts::Pair(topology) => [Some(ask(topology.server(0))), Some(ask(topology.agent(0)))],
            Parts::Relay(relay) => [Some(ask(&relay.near)), Some(ask(&relay.far))],
            Parts::Nothing => [None, None],
        };
        catch_unwind(AssertUnwindSafe(asking)).map_err(panic_text)
    }
}

impl Subject for Tunnel {
    fn entry(&self) -> &Entry {
        &self.entry
    }

    fn cpu_time(&mut self) -> anyhow::Result<Option<Duration>> {
        let [near, far] = self.ask(Program::cpu_time)?;
        Ok(near.zip(far).map(|(near, far)| near + far))
    }

    fn rss(&mut self) -> anyhow::Result<Option<u64>> {
        let [near, far] = self.ask(Program::rss)?;
        Ok(near.zip(far).map(|(near, far)| near + far))
    }
}

/// Turns a panic of the harness into an error, so that only one measurement fails.
pub async fn harness<T>(work: impl Future<Output = T>) -> anyhow::Result<T> {
    AssertUnwindSafe(work)
        .catch_unwind()
        .await
        .map_err(panic_text)
}

/// Turns the text of a panic into an error.
pub fn panic_text(panic: Box<dyn Any + Send>) -> anyhow::Error {
    let text = panic
        .downcast_ref::<String>()
        .map(String::as_str)
        .or_else(|| panic.downcast_ref::<&str>().copied());
    anyhow!("{}", text.unwrap_or("panic without a message"))
}
