//! The seed's front door: see `culvert_server::nodeport`.

use std::process::ExitCode;

fn main() -> ExitCode {
    culvert_server::nodeport::cli::run(std::env::args_os())
}
