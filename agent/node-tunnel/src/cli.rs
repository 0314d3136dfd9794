//! The program `culvert-node-tunnel`: flags, signals, exit code.

use std::ffi::OsString;
use std::process::ExitCode;

use culvert_host::runtime::{self, Setup};

use super::app::{Bound, InterfaceOnly};
use super::config::{Config, Mode, PROGRAM};

/// Runs the node tunnel with a command line, program name first. Exit code 1 means a failed start, or a
/// second signal during the drain.
pub fn run(args: impl IntoIterator<Item = OsString>) -> ExitCode {
    runtime::run_config(
        PROGRAM,
        Config::from_args(args),
        |config| Setup {
            logging: &config.logging,
            options: config.describe(),
            warnings: &config.warnings,
        },
        |config| async {
            match config.mode {
                Mode::Tunnel => runtime::serve("drain", Bound::bind(config), Bound::run).await,
                Mode::Init | Mode::Probe => {
                    let bind = InterfaceOnly::bind(config);
                    runtime::serve("shutdown", bind, InterfaceOnly::run).await
                }
            }
        },
    )
}
