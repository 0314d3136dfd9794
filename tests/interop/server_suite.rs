//! Upstream's own integration suite, run against our server.

use std::path::Path;

use culvert_tests::process::ours;

use crate::suite::{self, IN_PROCESS};

#[test]
fn server_passes_upstreams_suite_with_the_stock_agent() {
    suite::passes(&ours("culvert-server"), Path::new(IN_PROCESS));
}

#[test]
fn server_passes_upstreams_suite_with_our_agent() {
    let (server, agent) = (ours("culvert-server"), ours("culvert-agent"));
    suite::passes(&server, &agent);
}
