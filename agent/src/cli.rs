//! The program `culvert-agent`: flags, signals, exit code.

use std::ffi::OsString;
use std::process::ExitCode;

use culvert_host::runtime::{self, Setup, Signals};
use tokio_util::sync::CancellationToken;
use tracing::info;

use crate::app::Bound;
use crate::config::{Config, PROGRAM};

/// Runs the agent with a command line, program name first. Exit code 1 means that the agent could not start.
pub fn run(args: impl IntoIterator<Item = OsString>) -> ExitCode {
    runtime::run_config(
        PROGRAM,
        Config::from_args(args),
        |config| Setup {
            logging: &config.logging,
            options: config.describe(),
            warnings: &config.warnings,
        },
        serve,
    )
}

/// Serves until signals stop the agent. The first signal starts the drain, and a second signal stops the
/// agent at once. The exit code is 0 in both cases.
async fn serve(config: Config) -> anyhow::Result<()> {
    let mut signals = Signals::new()?;
    let (drain, shutdown) = (CancellationToken::new(), CancellationToken::new());
    let bound = Bound::bind(config, shutdown.clone());
    let bound = signals.unless_received(bound).await??;
    let run = bound.run(drain.clone());
    tokio::pin!(run);
    for (token, what) in [(&drain, "drain"), (&shutdown, "stop")] {
        tokio::select! {
            () = &mut run => return Ok(()),
            signal = signals.recv() => {
                info!(signal, "signal: {what}");
                token.cancel();
            }
        }
    }
    run.await;
    Ok(())
}
