//! Compares whole tunnels and front doors, ours and others, side by side on one machine.
//!
//! | module | content |
//! |---|---|
//! | [`tunnel`] | the subcommand `tunnel`: options, and the order of measurements |
//! | [`door`] | the subcommand `door` |
//! | [`openvpn`] | the subcommand `openvpn` |
//! | [`options`] | options of all subcommands |
//! | [`rows`] | the rows of `tunnel` |
//! | [`measure`] | measurement of a row of a contender |
//! | [`topology`] | the contenders and their running programs |
//! | [`relay`] | contenders that are not pairs of server and agent |
//! | [`delay`] | a long path between the two halves of a contender |
//! | [`entry`] | entry points of loads |
//! | [`endpoint`] | endpoints of loads |
//! | [`load`] | a load of a given amount |
//! | [`bulk`] | a load without an end, for a given time |
//! | [`driver`] | the load on a gRPC front end: the real client library, in the Go driver |
//! | [`stalled`] | echoes beside connections that nobody reads |
//! | [`memory`] | memory of idle connections |
//! | [`report`] | medians, ratios, JSON |
//! | [`targets`] | targets for our programs |
//! | [`table`] | the report as text |
//! | [`svg`] | the report as a picture |
//!
//! Our programs are the shipped programs; Cargo builds them first. The endpoint of idle connections is this
//! program, started under another name.

mod bulk;
mod delay;
mod door;
mod driver;
mod endpoint;
mod entry;
mod load;
mod measure;
mod memory;
mod openvpn;
mod options;
mod relay;
mod report;
mod rows;
mod stalled;
mod svg;
mod table;
mod targets;
mod topology;
mod tunnel;

use std::ffi::OsStr;
use std::path::Path;
use std::process::ExitCode;

use clap::Parser;

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
}

fn main() -> ExitCode {
    let name = std::env::args_os().next().unwrap_or_default();
    if Path::new(&name).file_name() == Some(OsStr::new(endpoint::ENDPOINT)) {
        return endpoint::serve();
    }
    let command = Command::parse();
    let runtime = match tokio::runtime::Runtime::new() {
        Ok(runtime) => runtime,
        Err(error) => {
            eprintln!("cannot start the runtime: {error}");
            return ExitCode::FAILURE;
        }
    };
    if let Command::Openvpn(_) = &command {
        // The second run ends together with the thread that starts it.
        match runtime.block_on(openvpn::again()) {
            Ok(None) => {}
            Ok(Some(code)) => return code,
            Err(error) => {
                eprintln!("{error:#}");
                return ExitCode::FAILURE;
            }
        }
    }
    let work = async {
        match command {
            Command::Tunnel(options) => tunnel::run(options).await,
            Command::Door(options) => door::run(options).await,
            Command::Openvpn(options) => openvpn::run(options).await,
        }
    };
    let run = async {
        // Dropping a program kills it. On SIGINT alone, one of the programs would drain forever.
        tokio::select! {
            clean = work => clean,
            _ = tokio::signal::ctrl_c() => anyhow::bail!("interrupted"),
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
