//! Upstream's own integration suite, run against our agent.

use std::path::Path;

use culvert_tests::process::ours;

use crate::suite::{self, IN_PROCESS};

/// Starts first because of the module's name: the suite takes long and needs little CPU time.
#[test]
fn agent_passes_upstreams_suite() {
    suite::passes(Path::new(IN_PROCESS), &ours("culvert-agent"));
}
