//! The seed's front door: see `culvert_door`.

use std::process::ExitCode;

fn main() -> ExitCode {
    culvert_door::cli::run(std::env::args_os())
}
