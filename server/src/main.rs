//! The Konnectivity server program: see the library.

use std::process::ExitCode;

culvert_host::jemalloc!();

fn main() -> ExitCode {
    culvert_server::cli::run(std::env::args_os())
}
