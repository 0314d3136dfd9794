//! `culvert`: the operator's tool.

use std::process::ExitCode;

use clap::{Parser, Subcommand};
use culvert::dev;

/// Tunnels between Kubernetes control planes and the worker networks that they cannot route to.
#[derive(Parser)]
#[command(name = "culvert", version)]
struct Cli {
    #[command(subcommand)]
    command: Command,
}

#[derive(Subcommand)]
enum Command {
    /// Start a whole tunnel on this machine, check it from end to end, and keep it up.
    Dev(dev::Options),
}

fn main() -> ExitCode {
    let Command::Dev(options) = Cli::parse().command;
    dev::run(&options)
}
