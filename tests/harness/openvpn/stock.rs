//! The stock program in either role.
//!
//! Its options are written as its manual has them; a test adds to a role's basic set what it is about.

use std::ffi::OsStr;
use std::path::{Path, PathBuf};
use std::process::Command;
use std::sync::OnceLock;
use std::time::Duration;

use super::network::Namespace;
use super::pki::{Pair, Pki};
use crate::envoy::skip;
use crate::process::{Program, Signal};
use crate::topology::PATIENCE;
use crate::wait::eventually;

/// The version that the tests are written for: Debian 12's.
const VERSION: &str = "2.6.14";

/// What it says when a tunnel is up, and a server when it listens.
const UP: &str = "Initialization Sequence Completed";

/// The tools that the tests of this mode need besides it.
const TOOLS: [&str; 5] = ["ip", "iptables", "iperf3", "ping", "setpriv"];

/// The installed program.
#[derive(Debug)]
pub struct OpenVpn {
    program: PathBuf,
}

impl OpenVpn {
    /// Looks for it and for what its tests need, once per process. Nothing, and a line on stderr, where
    /// that is incomplete.
    ///
    /// # Panics
    /// Then, if `CI=true`.
    pub fn get() -> Option<&'static Self> {
        Self::look().inspect_err(|why| skip(why)).ok()
    }

    /// Looks for the same, and says nothing.
    ///
    /// # Errors
    /// What is missing.
    pub fn look() -> Result<&'static Self, &'static str> {
        static FOUND: OnceLock<Result<OpenVpn, String>> = OnceLock::new();
        let found = FOUND.get_or_init(Self::find);
        found.as_ref().map_err(String::as_str)
    }

    fn find() -> Result<Self, String> {
        if !rustix::process::geteuid().is_root() {
            return Err("no tunnels without root".to_owned());
        }
        if !Path::new("/dev/net/tun").exists() {
            return Err("no /dev/net/tun".to_owned());
        }
        if let Some(tool) = TOOLS.iter().find(|tool| which(tool).is_none()) {
            return Err(format!("{tool} not found"));
        }
        let program = which("openvpn").ok_or("openvpn not found")?;
        let said = Command::new(&program).arg("--version").output();
        let said = said.map_err(|error| error.to_string())?.stdout;
        let said = String::from_utf8_lossy(&said);
        let version = said.split(' ').nth(1).unwrap_or_default();
        if version != VERSION {
            return Err(format!("openvpn {VERSION} wanted, {version} found"));
        }
        Ok(Self { program })
    }

    /// Starts it in a namespace.
    pub fn start(&self, at: &Namespace, options: &Options) -> Stock {
        Stock {
            program: at.spawn(&self.program, &options.words),
        }
    }
}

/// Where a program lies. The system's own directory is on the `PATH` of root only.
fn which(program: &str) -> Option<PathBuf> {
    let path = std::env::var_os("PATH").unwrap_or_default();
    std::env::split_paths(&path)
        .chain([PathBuf::from("/usr/sbin")])
        .map(|dir| dir.join(program))
        .find(|path| path.is_file())
}

/// Its command line.
#[derive(Debug, Clone, Default, PartialEq, Eq)]
pub struct Options {
    words: Vec<String>,
}

impl Options {
    /// A server for many clients on port 1194, with the addresses 10.20.0.0/24. `proto` is `tcp` or `udp`.
    pub fn server(proto: &str, pki: &Pki) -> Self {
        Self::default()
            .with(&format!("--mode server --proto {proto} --dev tun"))
            .with("--lport 1194 --server 10.20.0.0 255.255.255.0 --dh none --verb 4")
            .identity(&pki.ca, &pki.server)
    }

    /// A client of the server at `remote`. `proto` is `tcp` or `udp`.
    pub fn client(proto: &str, remote: &str, pki: &Pki) -> Self {
        Self::default()
            .with(&format!("--client --proto {proto} --dev tun"))
            .with(&format!("--remote {remote} 1194 --nobind --verb 4"))
            .with("--remote-cert-tls server --connect-retry 1 2")
            .identity(&pki.ca, &pki.user_cluster)
    }

    /// Adds options, divided by blanks. A value with blanks in it stands in double quotes.
    #[must_use]
    pub fn with(mut self, options: &str) -> Self {
        for (i, part) in options.split('"').enumerate() {
            if i % 2 == 1 {
                self.words.push(part.to_owned());
            } else {
                self.words
                    .extend(part.split_whitespace().map(str::to_owned));
            }
        }
        self
    }

    /// Adds an option with a path.
    #[must_use]
    pub fn option(mut self, name: &str, value: impl AsRef<OsStr>) -> Self {
        let value = value.as_ref().to_str().expect("a path in UTF-8");
        self.words.extend([name.to_owned(), value.to_owned()]);
        self
    }

    /// Says whom to trust and what to show. Later ones win.
    #[must_use]
    pub fn identity(self, ca: &Path, pair: &Pair) -> Self {
        self.option("--ca", ca)
            .option("--cert", &pair.cert)
            .option("--key", &pair.key)
    }
}

/// A running one. Dropping it kills the program.
#[derive(Debug)]
pub struct Stock {
    /// The program, for its log and signals.
    pub program: Program,
}

impl Stock {
    /// Waits until its tunnel is up or, of a server, until it listens.
    ///
    /// # Panics
    /// When that does not come in [`PATIENCE`], or when it ends before.
    pub async fn is_up(&mut self) {
        self.is_up_again(1).await;
    }

    /// Waits until its tunnel has come up so many times since it was started.
    ///
    /// # Panics
    /// As [`is_up`](Self::is_up).
    pub async fn is_up_again(&mut self, times: usize) {
        let what = format!("its tunnel is up {times} times");
        eventually(&what, PATIENCE, async || {
            if let Some(status) = self.program.exited() {
                panic!("openvpn ended: {status}");
            }
            let seen = self.program.log().matches(UP).count();
            (seen >= times).then_some(()).ok_or(seen)
        })
        .await;
    }

    /// Waits until its log has a text so many times.
    ///
    /// # Panics
    /// When that does not come in [`PATIENCE`].
    pub async fn says(&self, text: &str, times: usize) {
        let what = format!("openvpn says {text:?} {times} times");
        eventually(&what, PATIENCE, async || {
            let seen = self.program.log().matches(text).count();
            (seen >= times).then_some(()).ok_or(seen)
        })
        .await;
    }

    /// Ends it as an operator does, and waits until it is gone.
    ///
    /// # Panics
    /// When it does not end within [`PATIENCE`].
    pub async fn stop(mut self) {
        self.program.signal(Signal::TERM);
        self.program.wait_exit(PATIENCE).await;
    }
}

/// Pings an address from a namespace: `count` times at this interval. Gives how many answers are missing.
///
/// # Panics
/// When `ping` says nothing of the kind.
pub async fn lost_pings(from: &Namespace, to: &str, count: u32, interval: Duration) -> u32 {
    let interval = interval.as_secs_f32();
    let words = format!("-n -q -c {count} -i {interval} -W 5 {to}");
    let (Ok(said) | Err(said)) = from.run("ping", &words).await;
    let received = said
        .split(", ")
        .find_map(|part| part.strip_suffix(" received"));
    let received: u32 = received
        .and_then(|number| number.parse().ok())
        .unwrap_or_else(|| panic!("ping {to}: {said}"));
    count - received
}
