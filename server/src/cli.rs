//! The server program: flags, signals, exit code.

use std::ffi::OsString;
use std::process::ExitCode;

use culvert_host::runtime::{self, Setup};

use crate::app::Bound;
use crate::config::{Config, PROGRAM};

/// Runs the server with a command line, program name first. Exit code 1 means that the server could not
/// start, or that a second signal interrupted its shutdown.
pub fn run(args: impl IntoIterator<Item = OsString>) -> ExitCode {
    runtime::run_config(
        PROGRAM,
        Config::from_args(args),
        |config| Setup {
            logging: &config.logging,
            options: config.describe(),
            warnings: &config.warnings,
        },
        |config| {
            runtime::serve("stop", Bound::bind(config), |bound, shutdown| {
                Box::pin(bound.run(shutdown))
            })
        },
    )
}
