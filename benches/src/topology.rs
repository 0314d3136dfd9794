//! The contenders, and their running programs.
//!
//! A tunnel is one server and one agent on loopback with mutual TLS between them and a Unix socket
//! in front. Every contender gets the same flags and the same log level.

use std::any::Any;
use std::os::unix::fs::symlink;
use std::panic::{AssertUnwindSafe, catch_unwind};
use std::path::PathBuf;
use std::time::Duration;

use anyhow::{Context as _, anyhow, bail};
use culvert::lab::client::FrontEnd;
use culvert_tests::interop::Interop;
use culvert_tests::{Executable, Mode, Topology, Transport};
use futures_util::FutureExt as _;
use tempfile::TempDir;

/// The name by which this program is our server.
pub const SERVER: &str = "culvert-server";
/// The name by which this program is our agent.
pub const AGENT: &str = "culvert-agent";

/// Flags behind the harness's own, which make them as in production: what operators run the stock
/// programs with, and no probing at the pace of tests.
const SERVER_FLAGS: [&str; 1] = ["--v=1"];
const AGENT_FLAGS: [&str; 4] = [
    "--v=1",
    "--sync-interval=1s",
    "--sync-interval-cap=10s",
    "--probe-interval=1s",
];

/// Who made a program.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum Make {
    Ours,
    Stock,
}

/// A pair to be measured.
#[derive(Debug, Clone, Copy)]
pub struct Contender {
    /// Server and agent, or one word where both are of one make.
    pub name: &'static str,
    server: Make,
    agent: Make,
}

/// Every pair, ours first.
pub const CONTENDERS: [Contender; 4] = [
    Contender {
        name: "ours",
        server: Make::Ours,
        agent: Make::Ours,
    },
    Contender {
        name: "stock",
        server: Make::Stock,
        agent: Make::Stock,
    },
    Contender {
        name: "ours+stock",
        server: Make::Ours,
        agent: Make::Stock,
    },
    Contender {
        name: "stock+ours",
        server: Make::Stock,
        agent: Make::Ours,
    },
];

impl Contender {
    /// Whether a program of it needs Go to be built.
    pub fn needs_stock(&self) -> bool {
        [self.server, self.agent].contains(&Make::Stock)
    }
}

/// The programs to start.
#[derive(Debug)]
pub struct Programs {
    /// Names that lead to this program: the harness starts files, not subcommands.
    names: TempDir,
    /// The stock programs and the Go driver; none without Go.
    pub stock: Option<&'static Interop>,
}

impl Programs {
    /// Builds the stock programs if there is Go; a line on stderr says so if there is none.
    ///
    /// # Errors
    /// When the names for our own programs cannot be made.
    ///
    /// # Panics
    /// When the stock programs do not build.
    pub fn find() -> anyhow::Result<Self> {
        let this = std::env::current_exe().context("the path of this program")?;
        let names = tempfile::Builder::new()
            .prefix("culvert-bench-")
            .tempdir()?;
        for name in [SERVER, AGENT] {
            symlink(&this, names.path().join(name)).context("a name for our own program")?;
        }
        Ok(Self {
            names,
            stock: Interop::get(),
        })
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
            Make::Ours => self.names.path().join(name),
            Make::Stock => stock(self.stock.context("the stock programs need Go")?).clone(),
        };
        Ok(Executable::At(path))
    }
}

/// A running pair. Dropping it kills both programs.
#[derive(Debug)]
pub struct Tunnel {
    topology: Topology,
    /// The server's front end.
    pub socket: PathBuf,
}

impl Tunnel {
    /// Starts a pair and waits until the agent is connected.
    ///
    /// # Errors
    /// When that does not come to be; the program's own words are on stderr.
    pub async fn start(
        contender: &Contender,
        mode: Mode,
        programs: &Programs,
    ) -> anyhow::Result<Self> {
        let starting = Topology::builder(mode, Transport::Uds)
            .server(programs.server(contender.server)?, &SERVER_FLAGS)
            .agent(programs.agent(contender.agent)?, &AGENT_FLAGS)
            .start();
        // The harness reports by panicking; here that must cost one contender only.
        let started = AssertUnwindSafe(starting).catch_unwind().await;
        let topology = started.map_err(panic_text)?;
        let socket = match topology.front_end() {
            FrontEnd::GrpcUds(path) | FrontEnd::ConnectUds(path) => path.clone(),
            other => bail!("not a Unix socket: {other:?}"),
        };
        Ok(Self { topology, socket })
    }

    /// The processor time that both programs have used so far, in steps of a clock tick (10 ms).
    ///
    /// # Errors
    /// When one of them is gone.
    pub fn cpu_time(&mut self) -> anyhow::Result<Duration> {
        let topology = &mut self.topology;
        living(|| topology.server(0).cpu_time() + topology.agent(0).cpu_time())
    }

    /// The resident memory of both programs, in bytes.
    ///
    /// # Errors
    /// When one of them is gone.
    pub fn rss(&mut self) -> anyhow::Result<u64> {
        let topology = &mut self.topology;
        living(|| topology.server(0).rss() + topology.agent(0).rss())
    }
}

/// Asks the kernel about programs, which panics when they are gone.
fn living<T>(ask: impl FnOnce() -> T) -> anyhow::Result<T> {
    catch_unwind(AssertUnwindSafe(ask)).map_err(panic_text)
}

/// What a panic said, as an error.
pub fn panic_text(panic: Box<dyn Any + Send>) -> anyhow::Error {
    let text = panic
        .downcast_ref::<String>()
        .map(String::as_str)
        .or_else(|| panic.downcast_ref::<&str>().copied());
    anyhow!("{}", text.unwrap_or("a panic without words"))
}
