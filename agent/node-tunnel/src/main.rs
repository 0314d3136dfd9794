//! The node's end of the tunnel to a seed: see the library.

use std::process::ExitCode;

culvert_host::jemalloc!();

fn main() -> ExitCode {
    culvert_node_tunnel::cli::run(std::env::args_os())
}
