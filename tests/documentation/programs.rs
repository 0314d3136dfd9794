//! Checks that the documents name every flag and metric of the programs, and docs/compatibility.md no others.

use std::collections::BTreeSet;
use std::path::PathBuf;
use std::process::Command;
use std::sync::Arc;
use std::time::Duration;

use culvert_agent::metrics::AgentMetrics;
use culvert_host::file_follower::ReadError;
use culvert_host::reload::{Expiry, FileSet, Loaded, Reloader};
use culvert_host::telemetry::metrics::{LabelSet, Registry};
use culvert_kube::calls::{Call, Verb};
use culvert_server::backend::openvpn::metrics::{NodeMetrics, OpenvpnMetrics};
use culvert_server::metrics::{ServerMetrics, Strategy};

use crate::root;

fn document() -> String {
    std::fs::read_to_string(root().join("docs/compatibility.md")).unwrap()
}

/// Returns the code spans in one column of the table below a heading.
fn rows(heading: &str, column: usize) -> BTreeSet<String> {
    let document = document();
    let section = document.split(heading).nth(1).expect(heading);
    let table = section.lines().skip_while(|line| !line.starts_with('|'));
    table
        .take_while(|line| line.starts_with('|'))
        .filter_map(|line| line.split('|').nth(column)?.trim().strip_prefix('`'))
        .map(|cell| cell.trim_end_matches('`').to_owned())
        .collect()
}

/// Returns the help text of a program.
fn help(program: &str) -> String {
    let path = std::env::current_exe().unwrap();
    let path = path.parent().unwrap().parent().unwrap().join(program);
    let output = Command::new(path).arg("--help").output().expect(program);
    String::from_utf8(output.stdout).unwrap()
}

/// Returns the long flags that the help of a program lists, plus the `hidden` flags.
fn flags(program: &str, hidden: &[&str]) -> BTreeSet<String> {
    let help = help(program);
    let declared = help.lines().filter_map(|line| {
        let line = line.trim_start();
        let line = line.strip_prefix("-v, ").unwrap_or(line);
        let name = line.strip_prefix("--")?;
        let end = name.find(|c: char| !c.is_ascii_alphanumeric() && c != '-');
        Some(format!("--{}", &name[..end.unwrap_or(name.len())]))
    });
    let hidden = hidden.iter().map(|flag| (*flag).to_owned());
    declared.chain(hidden).collect()
}

#[test]
fn compatibility_page_lists_exactly_the_flags_of_every_program() {
    let logging = rows("### Logging flags of both", 1);
    for (program, heading, hidden) in [
        ("culvert-server", "### Server flags", &[][..]),
        ("culvert-agent", "### Agent flags", &["--lease-label"][..]),
        (
            "culvert-nodeport-proxy",
            "### Nodeport-proxy flags",
            &[][..],
        ),
        ("culvert-node-tunnel", "### Node tunnel flags", &[][..]),
    ] {
        let documented: BTreeSet<String> = rows(heading, 1).union(&logging).cloned().collect();
        assert_eq!(documented, flags(program, hidden), "{program}");
    }
}

#[test]
fn help_shows_the_default_verbosity_of_each_program() {
    for (program, verbosity) in [
        ("culvert-server", 4),
        ("culvert-agent", 4),
        ("culvert-nodeport-proxy", 2),
        ("culvert-node-tunnel", 2),
    ] {
        let help = help(program);
        let entry = help.split("-v, --v ").nth(1).expect(program);
        let entry: Vec<&str> = entry.split_whitespace().collect();
        let entry = entry.join(" ");
        let default = entry.split("[default: ").nth(1).expect(program);
        assert!(default.starts_with(&format!("{verbosity}]")), "{entry}");
    }
}

/// A set without files, with an expiry.
struct NoFiles;

impl FileSet for NoFiles {
    type Value = ();
    type Error = ReadError;

    fn paths(&self) -> Vec<PathBuf> {
        Vec::new()
    }

    fn unreadable(&self, error: ReadError) -> ReadError {
        error
    }

    fn load(&mut self, _contents: &[Vec<u8>]) -> Result<Loaded<()>, ReadError> {
        let expiry = Expiry {
            own: Some(0),
            leaf: Some(0),
            ca: Some(0),
            crl: Some(0),
        };
        Ok(Loaded {
            value: (),
            expiry,
            doubts: Vec::new(),
        })
    }
}

/// Registers the series of a followed file set.
fn follow<F: LabelSet + Send + Sync + 'static>(registry: &Arc<Registry>, files: F) {
    let runtime = tokio::runtime::Builder::new_current_thread();
    let runtime = { runtime }.enable_time().build().unwrap();
    let mut reloader = Reloader::new(registry);
    runtime.block_on(reloader.follow(files, NoFiles)).unwrap();
}

#[test]
fn compatibility_page_lists_exactly_the_metrics_of_front_door_and_node_tunnel() {
    use culvert_door::metrics::{BalancerMetrics, ProxyMetrics};
    use culvert_door::table::Table;
    let proxy = ProxyMetrics::new().unwrap();
    follow(proxy.registry(), culvert_door::files::Files::Tunneling);
    // Present only in a front door that maintains the load balancer's Service.
    let _balancer = BalancerMetrics::new(proxy.registry());
    let proxy = proxy.render(&Table::new(1));
    let tunnel = culvert_node_tunnel::metrics::TunnelMetrics::new().unwrap();
    follow(tunnel.registry(), culvert_node_tunnel::files::Files::Proxy);
    let pages = proxy + &tunnel.registry().render();
    let families = pages
        .lines()
        .filter_map(|line| line.strip_prefix("# TYPE "));
    let families: BTreeSet<String> = families
        .filter_map(|rest| rest.split(' ').next())
        .filter(|name| !name.starts_with("process_"))
        .map(str::to_owned)
        .collect();
    assert_eq!(families, rows("## Front door endpoints and metrics", 1));
}

#[test]
fn compatibility_page_lists_exactly_the_metrics_of_server_and_agent() {
    use culvert_server::metrics::DialFailureReason;
    let server = ServerMetrics::new(&[Strategy::Default]).unwrap();
    server
        .dial_failures(DialFailureReason::NoAgent)
        .increment(1);
    let call = Call {
        verb: Verb::List,
        code: 200,
        reason: "",
        elapsed: Duration::ZERO,
    };
    server.lease_lists().count(&call);
    server.lease_deletions().count(&call);
    let _kept = server.lease_kept();
    let _openvpn = OpenvpnMetrics::new(server.registry());
    let _nodes = NodeMetrics::new(server.registry());
    follow(server.registry(), culvert_server::files::Files::Agent);
    let agent = AgentMetrics::new().unwrap();
    agent.lease_lists().count(&call);
    agent.lease_watches().count(&call);
    let _counted = agent.leases_counted();
    // Present only in an agent with an OpenVPN client.
    let _openvpn = culvert_agent::openvpn::metrics::OpenVpnMetrics::new(agent.registry());
    agent
        .dial_failures(culvert_agent::metrics::DialFailureReason::Timeout)
        .increment(1);
    let errors = |streams: &culvert_konnectivity::metrics::StreamMetrics, segment| {
        streams.stream_error(segment, tonic::Code::Unavailable, None);
    };
    use culvert_konnectivity::metrics::Segment;
    errors(&server.streams, Segment::FromAgent);
    errors(&agent.streams, Segment::ToAgent);
    let pages = server.registry().render() + &agent.registry().render();
    let offered: BTreeSet<String> = pages
        .lines()
        .filter_map(|line| line.strip_prefix("# TYPE ")?.split(' ').next())
        .filter(|name| !name.starts_with("process_"))
        .map(str::to_owned)
        .collect();
    assert_eq!(rows("## Metrics", 1), offered);
}

#[test]
fn rotation_of_a_ca_begins_with_every_flag_for_a_bundle() {
    let document = std::fs::read_to_string(root().join("docs/operations.md")).unwrap();
    let (_, rotation) = document
        .split_once("## Rotation of certificates\n")
        .unwrap();
    let (tables, steps) = rotation.split_once("### Rotation of a CA\n").unwrap();
    let (first, _) = steps.split_once("\n2. ").unwrap();
    let spans = tables.split('`').filter(|span| span.starts_with("--"));
    let bundles: BTreeSet<&str> = spans.filter(|flag| flag.contains("-ca")).collect();
    assert!(bundles.len() >= 7, "{bundles:?}");
    // A kubeconfig names its own bundle, and kube-apiserver trusts the client certificates of kubeconfigs.
    assert!(tables.contains("`--kubeconfig`"));
    let others = ["--kubeconfig", "certificate-authority", "--client-ca-file"];
    for name in bundles.into_iter().chain(others) {
        assert!(first.contains(&format!("`{name}`")), "{name}");
    }
}
