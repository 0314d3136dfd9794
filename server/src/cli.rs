//! The server program: flags, signals, exit code.

use std::ffi::OsString;
use std::process::ExitCode;

use culvert_host::runtime::{self, Setup, Signals};
use tokio_util::sync::CancellationToken;

use crate::app::Bound;
use crate::config::{Config, PROGRAM};

/// Runs the server with a command line, program name first. Exit code 1 means that the server could not
/// start, or that a second signal interrupted its shutdown.
pub fn run(args: impl IntoIterator<Item = OsString>) -> ExitCode {
    let config = match Config::from_args(args) {
        Ok(config) => config,
        Err(exit) => return exit.report(),
    };
    let setup = Setup {
        logging: &config.logging,
        options: config.describe(),
        warnings: &config.warnings,
    };
    runtime::run(PROGRAM, &setup, serve(config.clone()))
}

async fn serve(config: Config) -> anyhow::Result<()> {
    let signals = Signals::new()?;
    let shutdown = CancellationToken::new();
    let bound = Bound::bind(config).await?;
    let run = Box::pin(bound.run(shutdown.clone()));
    Ok(signals.run("stop", shutdown, run).await?)
}
