//! Whole tunnels, ours and others', side by side on one machine.
//!
//! | module | what it holds |
//! |---|---|
//! | [`tunnel`] | the subcommand `tunnel`: its rows, and how one of them is measured |
//! | [`topology`] | the contenders, and their running programs |
//! | [`load`] | the load on a CONNECT front end, and the endpoints behind the agent |
//! | [`driver`] | the load on a gRPC front end: the real client library, in the Go driver |
//! | [`report`] | medians, table, JSON |
//!
//! Our server and agent run in processes of their own, or their processor time could not be told
//! from the load's. Both are this very program: started by the name of one of them, it is that one.

mod driver;
mod load;
mod report;
mod topology;
mod tunnel;

use std::ffi::OsStr;
use std::path::Path;
use std::process::ExitCode;

use clap::Parser;

/// Compares whole tunnels on this machine.
#[derive(Debug, Parser)]
#[command(name = "culvert-bench", version)]
enum Command {
    /// Server and agent: throughput, latency, dials, memory, and the processor time of each
    Tunnel(tunnel::Options),
}

fn main() -> ExitCode {
    let name = std::env::args_os().next().unwrap_or_default();
    match Path::new(&name).file_name().and_then(OsStr::to_str) {
        Some(topology::SERVER) => return culvert_server::cli::run(std::env::args_os()),
        Some(topology::AGENT) => return culvert_agent::cli::run(std::env::args_os()),
        _ => {}
    }
    let Command::Tunnel(options) = Command::parse();
    let runtime = match tokio::runtime::Runtime::new() {
        Ok(runtime) => runtime,
        Err(error) => {
            eprintln!("cannot start the runtime: {error}");
            return ExitCode::FAILURE;
        }
    };
    let run = async {
        // Programs end with what owns them here; one of them would drain for ever upon a signal.
        tokio::select! {
            clean = tunnel::run(options) => clean,
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
