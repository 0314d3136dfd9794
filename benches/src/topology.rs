//! The contenders, and their running programs.
//!
//! A tunnel is one server and one agent on loopback with mutual TLS between them and a Unix socket
//! in front. Every pair gets the same flags and the same log level.

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

/// Our server, which holds the seed's front door, too.
pub const SERVER: &str = "culvert-server";
/// Our agent, which holds a node's end of it, too.
pub const AGENT: &str = "culvert-agent";
/// The seed's front door.
pub const PROXY: &str = "culvert-nodeport-proxy";
/// A node's end of it.
pub const NODE: &str = "culvert-node-tunnel";

/// Flags behind the harness's own, which make them as in production: what operators run the stock
/// programs with, and no probing at the pace of tests.
const SERVER_FLAGS: [&str; 1] = ["--v=1"];
const AGENT_FLAGS: [&str; 4] = [
    "--v=1",
    "--sync-interval=1s",
    "--sync-interval-cap=10s",
    "--probe-interval=1s",
];

/// How long a program may take to say where it listens.
const START_LIMIT: Duration = Duration::from_secs(20);

/// Who made a program.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum Make {
    Ours,
    Stock,
}

/// What carries the load.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum Kind {
    /// A server and an agent.
    Pair { server: Make, agent: Make },
    /// Something that leads to one endpoint only.
    Relay(relay::Kind),
    /// Nothing: the load is on the endpoint itself.
    Direct,
}

/// What is measured.
#[derive(Debug, Clone, Copy)]
pub struct Contender {
    /// Server and agent, one word where both are of one make, or what it is instead of them.
    pub name: &'static str,
    kind: Kind,
}

const fn pair(name: &'static str, server: Make, agent: Make) -> Contender {
    Contender {
        name,
        kind: Kind::Pair { server, agent },
    }
}

/// The name of the pair that this is all about.
pub const OURS: &str = "ours";
/// The name of the pair that it is compared with.
pub const STOCK: &str = "stock";
/// The name of the pair with our server only.
pub const OURS_STOCK: &str = "ours+stock";
/// The name of the pair with our agent only.
pub const STOCK_OURS: &str = "stock+ours";
/// The name of the relay that shows what TLS alone costs.
pub const RELAY: &str = "relay";
/// The name of the tunnel without TLS.
pub const RATHOLE: &str = "rathole";
/// The name of the load without anything between it and the endpoint.
pub const DIRECT: &str = "direct";

/// Every contender, ours first.
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
    /// Why it cannot be measured here at all, if so.
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

    /// Whether it speaks the protocol of a front end; the others have no front end.
    pub fn is_pair(&self) -> bool {
        matches!(self.kind, Kind::Pair { .. })
    }

    /// Whether it has processes, whose time and memory can be asked for.
    pub fn has_programs(&self) -> bool {
        self.kind != Kind::Direct
    }

    /// How many file descriptors its busiest process needs per connection.
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
    /// Where our own are: beside this one.
    ours: PathBuf,
    /// A name that leads to this program: the harness starts files, not subcommands.
    names: TempDir,
    /// The stock programs and the Go driver; none without Go.
    pub stock: Option<&'static Interop>,
}

impl Programs {
    /// Builds our own programs as this one was built, and the stock ones if there is Go; a line on
    /// stderr says so if there is none.
    ///
    /// # Errors
    /// When our own do not build.
    ///
    /// # Panics
    /// When the stock programs do not build.
    pub fn find() -> anyhow::Result<Self> {
        Ok(Self {
            stock: Interop::get(),
            ..Self::ours()?
        })
    }

    /// Builds our own programs only.
    ///
    /// # Errors
    /// When they do not build.
    pub fn ours() -> anyhow::Result<Self> {
        let this = std::env::current_exe().context("the path of this program")?;
        Self::at(build(&this)?)
    }

    /// Takes our own programs from a folder.
    ///
    /// # Errors
    /// When the endpoint cannot be given its name.
    pub fn at(ours: PathBuf) -> anyhow::Result<Self> {
        let this = std::env::current_exe().context("the path of this program")?;
        let names = tempfile::Builder::new()
            .prefix("culvert-bench-")
            .tempdir()?;
        symlink(&this, names.path().join(ENDPOINT)).context("a name for the endpoint")?;
        Ok(Self {
            ours,
            names,
            stock: None,
        })
    }

    /// Where one of our own is.
    pub fn path(&self, name: &str) -> PathBuf {
        self.ours.join(name)
    }

    /// Starts the endpoint of idle connections, and tells where it listens.
    ///
    /// # Errors
    /// When it does not listen.
    pub async fn endpoint(&self) -> anyhow::Result<(Program, SocketAddr)> {
        let path = self.names.path().join(ENDPOINT);
        let starting = async {
            let program = Program::spawn(path, [""; 0], &[]);
            let line = program.wait_for_log(LISTENING, START_LIMIT).await;
            (program, line)
        };
        let (program, line) = harness(starting).await?;
        let address = line.trim_start_matches(LISTENING).parse();
        Ok((program, address.context("the endpoint's address")?))
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

/// Has Cargo build our programs into the folder of `this` program, and gives that folder. What is
/// measured is what is shipped: a larger program that holds them would touch other pages.
fn build(this: &FilePath) -> anyhow::Result<PathBuf> {
    let folder = this.parent().context("the folder of this program")?;
    let Some(cargo) = std::env::var_os("CARGO") else {
        let missing = [SERVER, AGENT, PROXY, NODE]
            .into_iter()
            .find(|name| !folder.join(name).exists());
        return match missing {
            Some(name) => bail!(
                "{name} is not beside this program; start it with `cargo run --release -p culvert-bench`"
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
    // Said of this program by the Cargo that runs it. The build script of ring looks at some of them, and all
    // that needs ring would be built anew, now and for the next run.
    for (name, _) in std::env::vars_os() {
        let text = name.to_string_lossy();
        if ["CARGO_PKG_", "CARGO_MANIFEST_", "OUT_DIR"]
            .iter()
            .any(|start| text.starts_with(start))
        {
            command.env_remove(name);
        }
    }
    ensure!(command.status()?.success(), "our programs do not build");
    Ok(folder.to_owned())
}

/// What runs.
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
    /// Where its load enters.
    pub entry: Entry,
    /// The path between its two halves, if that is a long one.
    _delay: Option<Delay>,
}

impl Tunnel {
    /// Starts a contender and waits until it can carry something to `target`. Its two halves are joined
    /// by `path`, or by loopback itself.
    ///
    /// # Errors
    /// When that does not come to be; the program's own words are on stderr.
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
        // The harness chooses the port for agents while it starts. A path needs it before, so that
        // the agent can be led there; of two flags of one name the last one holds.
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
            other => bail!("not a Unix socket: {other:?}"),
        };
        Ok(Self {
            parts: Parts::Pair(Box::new(topology)),
            entry,
            _delay: delay,
        })
    }

    /// The resident memory of the agent, or of what stands in its place, in bytes.
    ///
    /// # Errors
    /// When it is gone.
    pub fn agent_rss(&mut self) -> anyhow::Result<Option<u64>> {
        let [_, far] = self.ask(Program::rss)?;
        Ok(far)
    }

    /// Asks the kernel about both programs, which panics when they are gone.
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

/// The harness reports by panicking; here that must cost one measurement only.
///
/// # Errors
/// When it panics, with what it said.
pub async fn harness<T>(work: impl Future<Output = T>) -> anyhow::Result<T> {
    AssertUnwindSafe(work)
        .catch_unwind()
        .await
        .map_err(panic_text)
}

/// What a panic said, as an error.
pub fn panic_text(panic: Box<dyn Any + Send>) -> anyhow::Error {
    let text = panic
        .downcast_ref::<String>()
        .map(String::as_str)
        .or_else(|| panic.downcast_ref::<&str>().copied());
    anyhow!("{}", text.unwrap_or("a panic without words"))
}
