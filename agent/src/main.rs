//! The program `culvert-agent`; see the library.

use std::process::ExitCode;

culvert_host::jemalloc!();

fn main() -> ExitCode {
    culvert_agent::cli::run(std::env::args_os())
}
