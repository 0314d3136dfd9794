//! The front door of a seed: see the library.

use std::process::ExitCode;

culvert_host::jemalloc!();

fn main() -> ExitCode {
    culvert_door::cli::run(std::env::args_os())
}
