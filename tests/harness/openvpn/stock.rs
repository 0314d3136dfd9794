//! The stock program in either role.
//!
//! Options have the form of the program's manual. A test adds the options under test to the basic set of a
//! role.

use std::collections::HashSet;
use std::ffi::OsStr;
use std::path::{Path, PathBuf};
use std::process::Command;
use std::sync::OnceLock;
use std::time::Duration;

use super::network::Namespace;
use super::pki::{Pair, Pki};
use crate::process::{Program, Signal};
use crate::skip::skip;
use crate::topology::PATIENCE;
use crate::wait::eventually;

/// The version that the tests expect: Debian 12's.
const VERSION: &str = "2.6.14";

/// Log text of the program when a client's tunnel is up, or when a server listens.
const UP: &str = "Initialization Sequence Completed";

/// Further tools that the tests of this mode need.
const TOOLS: [&str; 5] = ["ip", "iptables", "iperf3", "ping", "setpriv"];

/// The installed program.
#[derive(Debug)]
pub struct OpenVpn {
    program: PathBuf,
}

impl OpenVpn {
    /// Finds the program and the tools, once per process. If anything is missing, returns `None` and prints a
    /// message on stderr.
    ///
    /// # Panics
    /// If anything is missing and `CI=true`.
    pub fn get() -> Option<&'static Self> {
        Self::look().inspect_err(|why| skip(why)).ok()
    }

    /// Finds the program and the tools, without a message.
    ///
    /// # Errors
    /// Names the missing part.
    pub fn look() -> Result<&'static Self, &'static str> {
        static FOUND: OnceLock<Result<OpenVpn, String>> = OnceLock::new();
        let found = FOUND.get_or_init(Self::find);
        found.as_ref().map_err(String::as_str)
    }

    fn find() -> Result<Self, String> {
        if !rustix::process::geteuid().is_root() {
            return Err("a tunnel needs root".to_owned());
        }
        if !Path::new("/dev/net/tun").exists() {
            return Err("/dev/net/tun not found".to_owned());
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

    /// Starts the program in a namespace.
    pub fn start(&self, at: &Namespace, options: &Options) -> Stock {
        Stock {
            program: at.spawn(&self.program, &options.words),
        }
    }
}

/// Finds a program in `PATH` or in `/usr/sbin`, which is only on the `PATH` of root.
fn which(program: &str) -> Option<PathBuf> {
    let path = std::env::var_os("PATH").unwrap_or_default();
    std::env::split_paths(&path)
        .chain([PathBuf::from("/usr/sbin")])
        .map(|dir| dir.join(program))
        .find(|path| path.is_file())
}

/// The command line of the program.
#[derive(Debug, Clone, Default, PartialEq, Eq)]
pub struct Options {
    words: Vec<String>,
}

impl Options {
    /// Creates the options of a server for many clients, on port 1194, with the tunnel network 10.20.0.0/24.
    /// `proto` is `tcp` or `udp`.
    pub fn server(proto: &str, pki: &Pki) -> Self {
        Self::default()
            .with(&format!("--mode server --proto {proto} --dev tun"))
            .with("--lport 1194 --server 10.20.0.0 255.255.255.0 --dh none --verb 4")
            .identity(&pki.ca, &pki.server)
    }

    /// Creates the options of a client of the server at `remote`. `proto` is `tcp` or `udp`.
    pub fn client(proto: &str, remote: &str, pki: &Pki) -> Self {
        Self::default()
            .with(&format!("--client --proto {proto} --dev tun"))
            .with(&format!("--remote {remote} 1194 --nobind --verb 4"))
            .with("--remote-cert-tls server --connect-retry 1 2")
            .identity(&pki.ca, &pki.user_cluster)
    }

    /// Adds options, separated by spaces. A value that contains spaces needs double quotes.
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

    /// Sets the trusted authority and the certificate to present. A later call replaces an earlier call.
    #[must_use]
    pub fn identity(self, ca: &Path, pair: &Pair) -> Self {
        self.option("--ca", ca)
            .option("--cert", &pair.cert)
            .option("--key", &pair.key)
    }
}

/// A running stock program. Dropping the value kills the program.
#[derive(Debug)]
pub struct Stock {
    /// The program, for its log and signals.
    pub program: Program,
}

impl Stock {
    /// Waits until a client's tunnel is up, or until a server listens.
    ///
    /// # Panics
    /// If the program is not up within [`PATIENCE`], or exits first.
    pub async fn is_up(&mut self) {
        self.is_up_again(1).await;
    }

    /// Waits until the tunnel has come up `times` times since the program was started.
    ///
    /// # Panics
    /// As [`is_up`](Self::is_up).
    pub async fn is_up_again(&mut self, times: usize) {
        let what = format!("the tunnel has come up {times} times");
        eventually(&what, PATIENCE, async || {
            if let Some(status) = self.program.exited() {
                panic!("openvpn exited: {status}");
            }
            let seen = self.program.log().matches(UP).count();
            (seen >= times).then_some(()).ok_or(seen)
        })
        .await;
    }

    /// Waits until the log contains a text at least `times` times.
    ///
    /// # Panics
    /// If the text does not appear within [`PATIENCE`].
    pub async fn says(&self, text: &str, times: usize) {
        let what = format!("openvpn logs {text:?} {times} times");
        eventually(&what, PATIENCE, async || {
            let seen = self.program.log().matches(text).count();
            (seen >= times).then_some(()).ok_or(seen)
        })
        .await;
    }

    /// Ends the program as an operator does, and waits until the program has exited.
    ///
    /// # Panics
    /// If the program does not exit within [`PATIENCE`].
    pub async fn stop(mut self) {
        self.program.signal(Signal::TERM);
        self.program.wait_exit(PATIENCE).await;
    }
}

/// Time of further pings at the end. ping(8) waits for its last replies only for twice the longest round trip, or for
/// the interval, so the replies of the last pings say nothing.
const LAST_PINGS: Duration = Duration::from_secs(1);

/// Pings an address from a namespace `count` times, once per `interval`, and then for another second. Returns the
/// number of missing replies to the first `count` pings.
///
/// # Panics
/// If `ping` does not run.
pub async fn lost_pings(from: &Namespace, to: &str, count: u32, interval: Duration) -> u32 {
    let last = (LAST_PINGS.as_secs_f32() / interval.as_secs_f32()).ceil() as u32;
    let interval = interval.as_secs_f32();
    let words = format!("-n -c {} -i {interval} -W 5 {to}", count + last);
    let (Ok(said) | Err(said)) = from.run("ping", &words).await;
    assert!(said.contains(" packets transmitted"), "ping {to}: {said}");
    let sequence = |line: &str| {
        let (_, rest) = line.split_once("icmp_seq=")?;
        rest.split(' ').next()?.parse().ok()
    };
    let answered: HashSet<u32> = said.lines().filter_map(sequence).collect();
    let lost = (1..=count).filter(|sequence| !answered.contains(sequence));
    u32::try_from(lost.count()).unwrap()
}
