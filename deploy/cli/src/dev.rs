//! The command `culvert dev`: a whole tunnel on one machine. Creates throw-away certificates and starts
//! - a server for every front end,
//! - the seed's front door and a node tunnel,
//! - two agents: the first reaches all servers through a small load balancer, the second through the door,
//! - services behind the agents,
//! - OpenVPN clients beside the agents, with `--openvpn`.
//!
//! The command then checks every front end and keeps running.

mod balancer;
mod check;
mod door;
mod openvpn;
mod server;
mod settings;
mod tunnel;

use std::path::Path;
use std::process::ExitCode;

use anyhow::Context as _;
use culvert_host::runtime::{self, Setup, Signals};
use culvert_host::telemetry::logging::{LogConfig, Severity};
use culvert_kit::pki::{CLUSTER_NAME, KONNECTIVITY_NAME};

use self::door::Door;
use self::openvpn::OpenVpn;
use self::server::Server;
use self::tunnel::{Tunnel, Way};

/// Flags of `culvert dev`.
#[derive(clap::Args)]
pub struct Options {
    /// Stop after the checks: exit code 0 if all passed, 1 otherwise.
    #[arg(long)]
    once: bool,

    /// Also connect OpenVPN clients: a Culvert client and, for root, a stock client if installed. Check the
    /// clients, and switch to them and back under load.
    #[arg(long)]
    openvpn: bool,

    /// Also print the programs' logs with this verbosity; by default only warnings are shown.
    #[arg(short = 'v', value_name = "LEVEL")]
    verbosity: Option<i32>,
}

/// Runs the command and returns its exit code.
pub fn run(options: &Options) -> ExitCode {
    let logging = LogConfig {
        verbosity: options.verbosity.unwrap_or(0),
        stderr_threshold: match options.verbosity {
            Some(_) => Severity::Info,
            None => Severity::Warning,
        },
        ..LogConfig::default()
    };
    let setup = Setup {
        logging: &logging,
        options: Vec::new(),
        warnings: &[],
    };
    runtime::run("culvert", &setup, dev(options.once, options.openvpn))
}

const INTERRUPTED: &str = "interrupted before every check was done";
const FAILED: &str = "not every check passed: see the rows with FAILED, and run again with -v 2 for the logs of the programs";

async fn dev(once: bool, openvpn: bool) -> anyhow::Result<()> {
    let mut signals = Signals::of_terminal()?;
    let folder = tempfile::Builder::new()
        .prefix("culvert-dev-")
        .tempdir()
        .context("cannot create a temporary folder; set TMPDIR to a writable folder")?;
    say!("Starting a tunnel in {} ...", folder.path().display());
    let tunnel = tokio::select! {
        tunnel = Tunnel::start(folder.path(), openvpn) => tunnel?,
        _ = signals.recv() => {
            anyhow::ensure!(!once, INTERRUPTED);
            return Ok(());
        }
    };
    let passed = tokio::select! {
        passed = check::all(&tunnel) => Some(passed),
        _ = signals.recv() => None,
    };
    if !once && passed.is_some() {
        describe(&tunnel, folder.path());
        if passed == Some(false) {
            say!("\n{FAILED}\n");
        }
        say!("Ctrl-C stops the tunnel and removes the folder.");
        signals.recv().await;
        say!("Stopping.");
    }
    tokio::select! {
        () = tunnel.stop() => {}
        signal = signals.recv() => anyhow::bail!("{signal} during the stop"),
    }
    match passed {
        Some(false) if once => anyhow::bail!(FAILED),
        None if once => anyhow::bail!(INTERRUPTED),
        _ => Ok(()),
    }
}

fn describe(tunnel: &Tunnel, folder: &Path) {
    say!("\nServers");
    for server in &tunnel.servers {
        say!(
            "  {:<20} {}  (agents {}, health http://{}/readyz, metrics http://{}/metrics)",
            server.title,
            server.front_end_address,
            server.addresses.agent,
            server.addresses.health,
            server.addresses.admin,
        );
    }
    describe_door(&tunnel.door);
    say!("\nAgents");
    for agent in &tunnel.agents {
        let way = match agent.way {
            Way::Balancer(address) => format!("the load balancer {address}"),
            Way::Door(address) => format!("the front door {address}, as {KONNECTIVITY_NAME}"),
        };
        let health = agent.addresses.health;
        say!("  http://{health}/readyz  http://{health}/metrics  (through {way})");
    }
    if let Some(openvpn) = &tunnel.openvpn {
        describe_openvpn(openvpn, &tunnel.servers);
    }
    say!("\nServices behind the agents");
    say!("  HTTP                 http://{}/", tunnel.services.http);
    say!("  echo, download, ...  {}", tunnel.services.raw);
    say!("\nCertificates are in {}", folder.display());
    say!("\nTry it:\n");
    hints(tunnel);
    // Only the last server has the stock client, so with OpenVPN the hints use the last server.
    let server = match tunnel.openvpn {
        Some(_) => tunnel.servers.last(),
        None => tunnel.servers.first(),
    };
    if let Some(server) = server {
        let socket = quoted(&server.admin_socket);
        // The folder of the program may not be in PATH.
        let program = std::env::current_exe().unwrap_or_else(|_| "culvert".into());
        let program = quoted(&program);
        say!("  {program} status --admin-uds {socket}\n");
        say!("  {program} status --admin-uds {socket} --web    # a page for the browser\n");
        if tunnel.openvpn.is_some() {
            say!("  {program} switch --admin-uds {socket} --to openvpn --wait\n");
        }
    }
}

fn describe_door(door: &Door) {
    say!("\nFront door (routes in {})", door.routes.display());
    let listener = |title, address, stats| {
        say!(
            "  {title:<20} {address}  (health http://{stats}/readyz, metrics http://{stats}/metrics)"
        );
    };
    listener("TLS by server name", door.sni, door.stats);
    listener("CONNECT", door.tunneling, door.stats);
    listener("node tunnel", door.node, door.node_stats);
}

fn describe_openvpn(openvpn: &OpenVpn, servers: &[Server]) {
    say!("\nOpenVPN");
    for (server, client) in servers.iter().zip(&openvpn.clients) {
        let address = server.addresses.openvpn.first();
        say!(
            "  {:<20} {}  (our client's health http://{}/readyz, metrics http://{}/metrics)",
            server.title,
            address.map(ToString::to_string).unwrap_or_default(),
            client.health,
            client.health,
        );
    }
    match &openvpn.stock {
        Ok(stock) => say!("  stock client         log in {}", stock.log.display()),
        Err(why) => say!("  stock client         left out: {why}"),
    }
}

/// Prints a curl command for each kind of front end that curl supports: CONNECT of a server, CONNECT of the
/// front door, and TLS by server name. The commands ignore curl's own settings and `NO_PROXY`.
fn hints(tunnel: &Tunnel) {
    let (pki, door) = (&tunnel.pki, &tunnel.door);
    say!(
        "  curl --disable --noproxy '' --proxy https://{} --proxy-cacert {} --proxy-cert {} --proxy-key {} --proxytunnel http://{}/\n",
        tunnel.connect_tcp(),
        quoted(&pki.ca),
        quoted(&pki.client.cert),
        quoted(&pki.client.key),
        tunnel.services.http,
    );
    say!("  curl --disable --noproxy '' {}\n", door.curl().join(" "));
    let (port, ca) = (door.sni.port(), quoted(&pki.ca));
    say!(
        "  curl --disable --noproxy '*' --cacert {ca} --resolve {CLUSTER_NAME}:{port}:{} https://{CLUSTER_NAME}:{port}/\n",
        door.sni.ip(),
    );
}

/// Quotes a path for a shell.
fn quoted(path: &Path) -> String {
    let path = path.display().to_string();
    // No path has a zero byte, the only byte that cannot be quoted.
    shlex::try_quote(&path).map_or_else(|_| path.clone(), |path| path.into_owned())
}
