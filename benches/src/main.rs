//! Whole tunnels and front doors, ours and others', side by side on one machine.
//!
//! | module | what it holds |
//! |---|---|
//! | [`tunnel`] | the subcommand `tunnel`: its options, and whose turn it is |
//! | [`door`] | the subcommand `door`, and what is its alone |
//! | [`openvpn`] | the subcommand `openvpn`, and what is its alone |
//! | [`options`] | what all can be told |
//! | [`rows`] | what is measured |
//! | [`measure`] | how one row of one contender is measured |
//! | [`topology`] | the contenders, and their running programs |
//! | [`relay`] | the contenders that are no pairs |
//! | [`delay`] | a long path between the two halves of a contender |
//! | [`entry`] | where a load enters |
//! | [`endpoint`] | where it ends |
//! | [`load`] | a load of a given amount |
//! | [`bulk`] | a load without end, for a time |
//! | [`driver`] | the load on a gRPC front end: the real client library, in the Go driver |
//! | [`stalled`] | echoes beside connections that nobody reads |
//! | [`memory`] | what connections cost while they do nothing |
//! | [`report`] | medians, ratios, JSON |
//! | [`targets`] | what is expected of ours |
//! | [`table`] | the report as text |
//! | [`svg`] | the report as a picture |
//!
//! Our programs are those that are shipped, which this one has Cargo build
//! first. The endpoint of idle connections is this very program, started by another name.

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
    /// Server and agent: throughput, latency, dials, memory, and the processor time of each
    Tunnel(tunnel::Options),
    /// The seed's front door and a node's end of it: throughput, new connections, latency, memory,
    /// changes, and the processor time of each
    Door(door::Options),
    /// OpenVPN server and client: throughput, bursts over UDP, stalled connections, the switch from and
    /// to Konnectivity, memory, and the processor time of each
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
        // This thread starts the second run, which ends with it.
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
        // Programs end with what owns them here; one of them would drain for ever upon a signal.
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
