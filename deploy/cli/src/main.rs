//! The program `culvert`, the operator's tool.

use std::fmt;
use std::io::Write as _;
use std::process::ExitCode;

use clap::{Parser, Subcommand};
use culvert::{dev, render, status, stdout, switch};

/// Connects Kubernetes control planes to worker networks that they cannot route to.
#[derive(Parser)]
#[command(name = "culvert", version)]
struct Cli {
    #[command(subcommand)]
    command: Command,
}

#[derive(Subcommand)]
enum Command {
    /// Start a whole tunnel on this machine, check every part, and keep the tunnel running.
    Dev(dev::Options),
    /// Print the objects of one user cluster, and check its specification as KKP does.
    Render(Box<render::Options>),
    /// Show a server's tunnels, peers and connections, and the progress of a switch.
    Status(status::Options),
    /// Switch a server to another tunnel while it runs.
    Switch(switch::Options),
}

culvert_host::jemalloc!();

fn main() -> ExitCode {
    let code = match Cli::parse().command {
        Command::Dev(options) => dev::run(&options),
        Command::Render(options) => render::run(&options),
        Command::Status(options) => ask(status::run(&options)),
        Command::Switch(options) => ask(async {
            switch::run(&options).await?;
            anyhow::Ok(ExitCode::SUCCESS)
        }),
    };
    match stdout::finish() {
        Ok(()) => code,
        Err(error) => fail(format_args!("cannot write to the standard output: {error}")),
    }
}

/// Runs a command that sends requests to a server.
fn ask(command: impl Future<Output = anyhow::Result<ExitCode>>) -> ExitCode {
    let runtime = tokio::runtime::Builder::new_current_thread()
        .enable_all()
        .build();
    let outcome = runtime
        .map_err(anyhow::Error::from)
        .and_then(|runtime| runtime.block_on(command));
    match outcome {
        Ok(code) => code,
        Err(error) => fail(format_args!("{error:#}")),
    }
}

fn fail(why: fmt::Arguments<'_>) -> ExitCode {
    let _ = writeln!(std::io::stderr(), "Error: {why}");
    ExitCode::FAILURE
}
