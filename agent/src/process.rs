//! The identity of this process, for servers that recognize a restarted agent.

use std::fs;

use culvert_host::net::dial::join_host_port;
use culvert_native::resume::Process;

use crate::config::Config;

/// Number of the kernel's boot, which differs between machines.
const BOOT_ID: &str = "/proc/sys/kernel/random/boot_id";

/// Name of the network namespace of this process. A pod keeps its network when its container restarts.
const NETWORK: &str = "/proc/self/ns/net";

/// Returns the identity of this process. Its place is the address of the health listener, which another process of the
/// same network gets only after the end of this process. Returns `None` if the port is chosen at start, or if the kernel
/// does not tell the names.
pub(crate) fn this_process(config: &Config) -> Option<Process> {
    let health = &config.health;
    if health.port == 0 {
        return None;
    }
    let boot = fs::read_to_string(BOOT_ID).ok()?;
    let network = fs::read_link(NETWORK).ok()?;
    let health = join_host_port(&health.host, health.port);
    Process::new(&[boot.trim(), network.to_str()?, &health])
}
