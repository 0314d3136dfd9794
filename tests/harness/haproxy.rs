//! haproxy as a front door that routes TLS clients by server name and passes TLS through. Operators without
//! Envoy use haproxy for this, and its performance is the reference. haproxy also ends TLS for a node tunnel, and checks the
//! health of programs.
//!
//! The program is Debian's package, found through `PATH`. Without haproxy, tests print a message and pass;
//! with `CI=true`, they fail.

use std::collections::BTreeMap;
use std::fmt::Write as _;
use std::net::{IpAddr, SocketAddr};
use std::path::{Path, PathBuf};
use std::sync::OnceLock;

use tempfile::TempDir;
use tokio::net::TcpStream;

use crate::process::Program;
use crate::skip::{find_program, skip};
use crate::topology::PATIENCE;
use crate::wait::eventually;

/// Debian's directory for haproxy, which is only on the `PATH` of root.
const SYSTEM_DIR: &str = "/usr/sbin";

/// The installed haproxy program.
#[derive(Debug)]
pub struct HaProxy {
    program: PathBuf,
}

impl HaProxy {
    /// Finds haproxy, once per process. If haproxy is missing, returns `None` and prints a message on stderr.
    ///
    /// # Panics
    /// If haproxy is missing and `CI=true`.
    pub fn get() -> Option<&'static Self> {
        static FOUND: OnceLock<Option<HaProxy>> = OnceLock::new();
        let found = FOUND.get_or_init(Self::find).as_ref();
        if found.is_none() {
            skip("haproxy not found");
        }
        found
    }

    fn find() -> Option<Self> {
        find_program("haproxy", [SYSTEM_DIR]).map(|program| Self { program })
    }

    /// Starts haproxy with two threads and waits until haproxy listens. `server_names` maps each name to its
    /// endpoints, used in turn. A client with another name, or without a name, is disconnected.
    ///
    /// # Panics
    /// If haproxy does not listen within [`PATIENCE`].
    pub async fn start(
        &self,
        listen: SocketAddr,
        server_names: &BTreeMap<String, Vec<SocketAddr>>,
    ) -> RunningHaProxy {
        self.start_with(listen, server_names, &Options::default())
            .await
    }

    /// Starts haproxy like [`start`](Self::start), with options of the PROXY protocol.
    ///
    /// # Panics
    /// If haproxy does not listen within [`PATIENCE`].
    pub async fn start_with(
        &self,
        listen: SocketAddr,
        server_names: &BTreeMap<String, Vec<SocketAddr>>,
        options: &Options,
    ) -> RunningHaProxy {
        let dir = tempfile::Builder::new().prefix("culvert-").tempdir();
        let dir = dir.expect("a temporary directory");
        let names = dir.path().join("names.map");
        std::fs::write(&names, name_map(server_names)).expect("writing haproxy's map");
        let text = configuration(listen, &names, server_names, options);
        self.run(dir, listen, &text).await
    }

    /// Starts haproxy as the end of TLS: clients need a certificate of `ca`, and their bytes go to `endpoint` in plain
    /// text. `identity` is a PEM file with haproxy's certificate and key.
    ///
    /// # Panics
    /// If haproxy does not listen within [`PATIENCE`].
    pub async fn terminate(
        &self,
        listen: SocketAddr,
        identity: &Path,
        ca: &Path,
        endpoint: SocketAddr,
    ) -> RunningHaProxy {
        let dir = tempfile::Builder::new().prefix("culvert-").tempdir();
        let (identity, ca) = (identity.display(), ca.display());
        let text = format!(
            "global
    nbthread 2
    fd-hard-limit 65536
defaults
    mode tcp
    timeout connect 1s
    timeout client 1h
    timeout server 1h
frontend tls
    bind {listen} ssl crt {identity} ca-file {ca} verify required alpn h2
    default_backend plain
backend plain
    server s0 {endpoint}
"
        );
        self.run(dir.expect("a temporary directory"), listen, &text)
            .await
    }

    /// Starts haproxy as a load balancer for TCP connections to `endpoint`. haproxy checks the endpoint by `option httpchk`
    /// with its default method: by OPTIONS requests for `path` to the address `health`. Returns the log line of the first
    /// check, too.
    ///
    /// # Panics
    /// If haproxy does not listen, or logs no check, within [`PATIENCE`].
    pub async fn check(
        &self,
        listen: SocketAddr,
        endpoint: SocketAddr,
        health: SocketAddr,
        path: &str,
    ) -> (RunningHaProxy, String) {
        let dir = tempfile::Builder::new().prefix("culvert-").tempdir();
        let (ip, port) = (health.ip(), health.port());
        let text = format!(
            "global
    nbthread 2
    fd-hard-limit 65536
defaults
    mode tcp
    timeout connect 10s
    timeout check 10s
    timeout client 1h
    timeout server 1h
listen checked
    bind {listen}
    option httpchk {path}
    option log-health-checks
    server s0 {endpoint} check addr {ip} port {port} inter 1s fall 1 rise 1
"
        );
        let running = self.run(dir.expect("a temporary directory"), listen, &text);
        let running = running.await;
        // The result precedes these words in the line.
        let line = running.program.wait_for_log("check duration", PATIENCE);
        let line = line.await;
        (running, line)
    }

    async fn run(&self, dir: TempDir, listen: SocketAddr, text: &str) -> RunningHaProxy {
        let config = dir.path().join("haproxy.cfg");
        std::fs::write(&config, text).expect("writing haproxy's configuration");
        // In the foreground, so that the started process is the serving process.
        let args = ["-db", "-f", config.to_str().expect("a path in UTF-8")];
        let mut running = RunningHaProxy {
            program: Program::spawn(&self.program, args, &[]),
            _dir: dir,
        };
        eventually("haproxy listens", PATIENCE, async || {
            if let Some(status) = running.program.exited() {
                panic!("haproxy exited during startup: {status}");
            }
            TcpStream::connect(listen).await
        })
        .await;
        running
    }
}

/// Options of the PROXY protocol.
#[derive(Clone, Copy, Debug, Default)]
pub struct Options {
    /// Options of the listener, such as `accept-proxy`.
    pub bind: &'static str,
    /// Options of the endpoints, such as `send-proxy-v2`.
    pub server: &'static str,
    /// Address of the only permitted client; `None` permits all.
    pub only_source: Option<IpAddr>,
}

/// A running haproxy. Dropping the value kills the program.
#[derive(Debug)]
pub struct RunningHaProxy {
    /// The program, for its log and its resource use.
    pub program: Program,
    // Last field, so that the program is killed before its files are deleted.
    _dir: TempDir,
}

/// Returns the lookup table from lower-case server names to backends, which are named `b0`, `b1` and so on. A
/// map lookup takes the same time for a thousand names as for a single name.
fn name_map(server_names: &BTreeMap<String, Vec<SocketAddr>>) -> String {
    let mut text = String::new();
    for (i, name) in server_names.keys().enumerate() {
        writeln!(text, "{} b{i}", name.to_lowercase()).unwrap();
    }
    text
}

/// Returns the configuration. The timeouts are equal to the settings of the Envoy in the same comparison.
/// `fd-hard-limit` keeps haproxy from allocating memory at startup for as many connections as the machine
/// allows; a quarter of the limit is in use.
fn configuration(
    listen: SocketAddr,
    names: &Path,
    server_names: &BTreeMap<String, Vec<SocketAddr>>,
    options: &Options,
) -> String {
    let (bind, server) = (options.bind, options.server);
    let source = match options.only_source {
        Some(source) => format!("    tcp-request content reject unless {{ src {source} }}\n"),
        None => String::new(),
    };
    let names = names.display();
    let mut text = format!(
        "global
    nbthread 2
    fd-hard-limit 65536
defaults
    mode tcp
    option splice-auto
    timeout connect 1s
    timeout client 1h
    timeout server 1h
frontend sni
    bind {listen} {bind}
    tcp-request inspect-delay 5s
{source}    tcp-request content accept if {{ req.ssl_hello_type 1 }}
    use_backend %[req.ssl_sni,lower,map_str({names})]
"
    );
    for (i, endpoints) in server_names.values().enumerate() {
        writeln!(text, "backend b{i}\n    balance roundrobin").unwrap();
        for (j, endpoint) in endpoints.iter().enumerate() {
            writeln!(text, "    server s{j} {endpoint} {server}").unwrap();
        }
    }
    text
}

#[cfg(test)]
mod tests {
    use culvert_kit::services::Services;

    use super::*;
    use crate::envoy::tests::echoed;
    use crate::ports::Ports;

    #[tokio::test]
    async fn clients_are_routed_by_server_name() {
        let Some(haproxy) = HaProxy::get() else {
            return;
        };
        let services = Services::start().await.unwrap();
        let mut ports = Ports::default();
        let listen = SocketAddr::from(([127, 0, 0, 1], ports.next_port()));
        let names = BTreeMap::from([("Echo.example.com".to_owned(), vec![services.first])]);
        let _running = haproxy.start(listen, &names).await;
        let (heard, expected) = echoed(listen, "echo.example.com").await;
        assert_eq!(heard, expected);
        let (heard, _) = echoed(listen, "other.example.com").await;
        assert_eq!(heard, b"");
    }
}
