//! Compares whole tunnels and front doors, ours and others, side by side on one machine.
//!
//! | module | content |
//! |---|---|
//! | [`tunnel`], [`door`], [`openvpn`] | the subcommands that compare |
//! | [`silence`] | the subcommand that measures dials beside a silent peer |
//! | [`path`] | the subcommand that measures server and agent over a link with delay and loss |
//! | [`fleet`] | the subcommand that measures several servers with their agents |
//! | [`soak`] | the subcommand that checks traffic beside faults |
//! | [`attack`] | the subcommand that attacks every listener |
//! | [`runner`] | the order of measurements, the same for all subcommands |
//! | [`options`] | options of all subcommands |
//! | [`table`], [`svg`] | the report as text and as a picture |
//! | [`report`] | medians, ratios, JSON |
//! | [`memory`] | memory of idle connections |
//! | [`stalled`] | echoes beside connections that nobody reads |
//! | [`aborts`] | load right after aborted connections |
//! | [`measure`] | measurement of a load of a given amount |
//! | [`bulk`] | a load without an end, for a given time |
//! | [`load`] | a load of a given amount |
//! | [`entry`], [`endpoint`] | entry points and endpoints of loads |
//! | [`agents`] | many agents of ours in one process |
//! | [`programs`] | our programs and the stock programs |
//! | [`sockets`] | the sockets of running programs |
//! | [`harness`] | panics of the test harness as errors |
//! | [`rows`], [`figures`], [`names`], [`targets`] | data types and names without logic |
//!
//! Our programs are the shipped programs; Cargo builds them first. The endpoint of idle connections and the process of
//! many agents are this program, started under other names.

mod aborts;
mod agents;
mod attack;
mod bulk;
mod door;
mod endpoint;
mod entry;
mod figures;
mod fleet;
mod harness;
mod load;
mod measure;
mod memory;
mod names;
mod openvpn;
mod options;
mod path;
mod programs;
mod ready;
mod report;
mod rows;
mod runner;
mod silence;
mod soak;
mod sockets;
mod stalled;
mod svg;
mod table;
mod targets;
mod tunnel;

use std::ffi::OsStr;
use std::path::Path;
use std::process::ExitCode;

use clap::Parser;
use tokio::signal::unix::{SignalKind, signal};

use self::tunnel::bare;

/// Compares whole tunnels and front doors on this machine.
#[derive(Debug, Parser)]
#[command(name = "culvert-bench", version)]
enum Command {
    /// Server and agent: throughput, latency, dials, memory and processor time
    Tunnel(tunnel::Options),
    /// Front door of a seed and node tunnel: throughput, new connections, latency, memory, changes of
    /// Services and processor time
    Door(door::Options),
    /// OpenVPN server and client: throughput, bursts over UDP, stalled connections, switches from and to
    /// Konnectivity, memory and processor time
    Openvpn(openvpn::Options),
    /// Dials beside a frozen peer and a network that drops packets, for every tunnel
    Silence(silence::Options),
    /// Server and agent over a link with delay, loss and a limited rate, with each congestion control
    Path(path::Options),
    /// Several servers and their agents: time until all are connected, and handshakes in the steady state
    Fleet(fleet::Options),
    /// All programs with checked traffic, beside random ends, freezes, rotations and attacks
    Soak(soak::Options),
    /// Attacks on every listener: growth of memory and descriptors, honest clients meanwhile, and recovery
    Attack(attack::Options),
}

culvert_host::jemalloc!();

fn main() -> ExitCode {
    let name = std::env::args_os().next().unwrap_or_default();
    match Path::new(&name).file_name().and_then(OsStr::to_str) {
        Some(endpoint::ENDPOINT) => return endpoint::serve(),
        Some(agents::AGENTS) => return agents::serve(),
        Some(side @ (bare::NEAR | bare::FAR)) => return bare::serve(side),
        _ => {}
    }
    let command = Command::parse();
    let runtime = match tokio::runtime::Runtime::new() {
        Ok(runtime) => runtime,
        Err(error) => {
            eprintln!("cannot start the runtime: {error}");
            return ExitCode::FAILURE;
        }
    };
    // The second run ends together with the thread that starts it.
    let again = runtime.block_on(async {
        match &command {
            Command::Openvpn(_) => openvpn::again_with_stock().await,
            Command::Silence(_) | Command::Path(_) | Command::Soak(_) => {
                openvpn::again_with_konnectivity().await
            }
            Command::Attack(_) => attack::again().await,
            Command::Tunnel(_) | Command::Door(_) | Command::Fleet(_) => Ok(None),
        }
    });
    match again {
        Ok(None) => {}
        Ok(Some(code)) => return code,
        Err(error) => {
            eprintln!("{error:#}");
            return ExitCode::FAILURE;
        }
    }
    let work = async {
        match command {
            Command::Tunnel(options) => tunnel::run(options).await,
            Command::Door(options) => door::run(options).await,
            Command::Openvpn(options) => openvpn::run(options).await,
            Command::Silence(options) => silence::run(options).await,
            Command::Path(options) => path::run(options).await,
            Command::Fleet(options) => fleet::run(options).await,
            Command::Soak(options) => soak::run(options).await,
            Command::Attack(options) => attack::run(options).await,
        }
    };
    let run = async {
        let mut terminated = signal(SignalKind::terminate())?;
        // Dropping a program kills it. On SIGINT alone, one of the programs would drain forever.
        tokio::select! {
            clean = work => clean,
            _ = tokio::signal::ctrl_c() => anyhow::bail!("interrupted"),
            _ = terminated.recv() => anyhow::bail!("terminated"),
        }
    };
    match runtime.block_on(run) {
        Ok(true) => ExitCode::SUCCESS,
        Ok(false) => ExitCode::FAILURE,
        Err(error) => {
            eprintln!("{error:#}");
            ExitCode::FAILURE
        }
    }
}
