//! The program `culvert-agent`; see the library.

use std::process::ExitCode;

fn main() -> ExitCode {
    culvert_agent::cli::run(std::env::args_os())
}
