//! Commands of migration plans in a shell: nothing runs after a failed command.

use std::os::unix::fs::PermissionsExt as _;
use std::path::Path;
use std::process::Command;

use super::{Side, plan_of_file};

/// Program that stands for `kubectl`, `culvert` and `getent`. It records its call, fails at the call number `FAILS`, and
/// prints an object. As the real `kubectl`, it refuses empty standard input.
const STUB: &str = r#"#!/bin/sh
case "$*" in *'-f -') [ -n "$(cat)" ] || exit 1 ;; esac
echo "${0##*/} $*" >> calls
[ "$(wc -l < calls)" -ne "$FAILS" ] || exit 1
printf 'kind: Deployment\nmetadata:\n  uid: 1\n  name: a\n'
"#;

/// Returns the chains of a plan, the ways back included. A comment or a step ends a chain.
fn chains(plan: &str) -> Vec<String> {
    let mut chains = Vec::new();
    let mut chain = String::new();
    for line in plan.lines() {
        let command = line.strip_prefix("     ");
        if let Some(command) = command.filter(|it| !it.starts_with('#')) {
            chain.push_str(command);
            chain.push('\n');
            if command.ends_with(" &&") || command.ends_with(" &&  # KKP only") {
                continue;
            }
        }
        if !chain.is_empty() {
            chains.push(std::mem::take(&mut chain));
        }
        let back = line.strip_prefix("   back:     ");
        if let Some(back) = back.filter(|it| it.starts_with("kubectl") || it.starts_with("culvert"))
        {
            chains.push(back.to_owned());
        }
    }
    chains
}

/// Runs a chain whose call number `fails` fails; 0 means none. Returns the calls, and true for success.
fn run(chain: &str, stubs: &Path, fails: usize) -> (Vec<String>, bool) {
    let folder = tempfile::tempdir().unwrap();
    let path = format!("{}:{}", stubs.display(), std::env::var("PATH").unwrap());
    let status = Command::new("sh")
        .args(["-c", chain])
        .current_dir(folder.path())
        .env("PATH", path)
        .env("FAILS", fails.to_string())
        .output()
        .unwrap()
        .status;
    let calls = std::fs::read_to_string(folder.path().join("calls")).unwrap_or_default();
    let calls = calls.lines().map(str::to_owned).collect();
    (calls, status.success())
}

#[test]
fn nothing_runs_after_a_failed_command_of_a_plan() {
    use Side::{Konnectivity, LoadBalancer, NodePort, Openvpn, Tunneling};
    let stubs = tempfile::tempdir().unwrap();
    for name in ["kubectl", "culvert", "getent"] {
        let path = stubs.path().join(name);
        std::fs::write(&path, STUB).unwrap();
        std::fs::set_permissions(&path, std::fs::Permissions::from_mode(0o755)).unwrap();
    }
    let mut seen = std::collections::BTreeSet::new();
    for (from, to, tunnel, strategy) in [
        (Openvpn, Konnectivity, "konnectivity", "NodePort"),
        (Openvpn, Konnectivity, "konnectivity", "Tunneling"),
        (Konnectivity, Openvpn, "openvpn", "NodePort"),
        (Konnectivity, Openvpn, "openvpn", "Tunneling"),
        (NodePort, LoadBalancer, "konnectivity", "LoadBalancer"),
        (NodePort, Tunneling, "konnectivity", "Tunneling"),
        (LoadBalancer, NodePort, "konnectivity", "NodePort"),
        (LoadBalancer, Tunneling, "openvpn", "Tunneling"),
        (Tunneling, NodePort, "konnectivity", "NodePort"),
        (Tunneling, LoadBalancer, "openvpn", "LoadBalancer"),
    ] {
        let strategy = format!("{strategy}, features: {{kubeSystemNetworkPolicies: true}}");
        let text = super::file(tunnel, &strategy, "");
        for chain in chains(&plan_of_file(&text, "cluster.yaml", from, to).unwrap()) {
            if !seen.insert(chain.clone()) {
                continue;
            }
            let (all, is_done) = run(&chain, stubs.path(), 0);
            assert!(is_done && !all.is_empty(), "{chain}\n{all:#?}");
            for fails in 1..=all.len() {
                let (calls, is_done) = run(&chain, stubs.path(), fails);
                assert!(!is_done, "{chain}\ncall {fails} failed: {calls:#?}");
                assert_eq!(calls, all[..fails], "{chain}\ncall {fails} failed");
            }
        }
    }
    assert!(seen.len() > 50, "{}", seen.len());
}
