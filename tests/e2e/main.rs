//! The programs between a real kube-apiserver and a node.
//!
//! `tests/e2e/run` installs and builds the other programs, and runs these tests. Without the script, every test
//! prints a message and passes. All tests share one cluster, and run one after the other.
#![allow(clippy::unwrap_used, clippy::expect_used, clippy::indexing_slicing)]

mod cases;
mod lab;
mod pod_cases;

use std::path::PathBuf;
use std::process::ExitCode;
use std::sync::Arc;
use tokio::time::Instant;

use culvert_tests::namespace;
use libtest_mimic::{Arguments, Trial};
use parking_lot::Mutex;
use tokio::runtime::Runtime;

use self::cases::Case;
use self::lab::Lab;
use self::lab::cluster::Cluster;

/// Environment variable with the folder of Kubernetes' programs. The script sets the variable.
const PROGRAMS: &str = "CULVERT_E2E_PROGRAMS";
/// Environment variable with the tier, `1`, `2` or `3`.
const TIER: &str = "CULVERT_E2E_TIER";
/// Environment variable with parts of names, separated by blanks. Only cases with one of them run; an empty value selects
/// all cases.
const NAMES: &str = "CULVERT_E2E_NAMES";

fn main() -> ExitCode {
    let mut arguments = Arguments::from_args();
    // The script sets both variables, or none.
    let tier = std::env::var(TIER).unwrap_or_else(|_| "1".to_owned());
    let programs = std::env::var_os(PROGRAMS).map(PathBuf::from);
    let (Some(programs), false) = (programs, arguments.list) else {
        let trials = names(&tier).into_iter().map(skipped).collect();
        return libtest_mimic::run(&arguments, trials).exit_code();
    };
    if !namespace::is_inside() {
        return again();
    }
    // The cases share a cluster, and depend on its state only through calls that set the state.
    arguments.test_threads = Some(1);
    match tier.as_str() {
        "2" => run(
            &arguments,
            pod_cases::all(),
            Cluster::start(&programs),
            async |cluster| {
                cluster.print_logs().await;
            },
        ),
        "3" => run(
            &arguments,
            cases::scale(),
            Lab::start(&programs),
            async |lab| {
                lab.print_logs();
            },
        ),
        _ => run(
            &arguments,
            cases::all(),
            Lab::start(&programs),
            async |lab| {
                lab.print_logs();
            },
        ),
    }
}

/// Runs the cases on the value that `start` returns. Calls `print` if a case fails.
fn run<T: Send + 'static>(
    arguments: &Arguments,
    mut cases: Vec<(String, Case<T>)>,
    start: impl Future<Output = T>,
    print: impl AsyncFnOnce(&T),
) -> ExitCode {
    let parts = std::env::var(NAMES).unwrap_or_default();
    let parts: Vec<&str> = parts.split_whitespace().collect();
    for part in &parts {
        if !cases.iter().any(|(name, _)| name.contains(part)) {
            eprintln!("no case of this tier has \"{part}\" in its name");
            return ExitCode::FAILURE;
        }
    }
    cases.retain(|(name, _)| parts.is_empty() || parts.iter().any(|part| name.contains(part)));
    let runtime = tokio::runtime::Builder::new_multi_thread()
        .worker_threads(2)
        .enable_all()
        .build()
        .expect("a runtime");
    let runtime = Arc::new(runtime);
    let shared = Arc::new(Mutex::new(runtime.block_on(start)));
    let trials = cases
        .into_iter()
        .map(|(name, case)| trial(name, case, &shared, &runtime))
        .collect();
    let conclusion = libtest_mimic::run(arguments, trials);
    if conclusion.has_failed() {
        runtime.block_on(print(&shared.lock()));
    }
    conclusion.exit_code()
}

/// Returns the names of the cases of a tier.
fn names(tier: &str) -> Vec<String> {
    match tier {
        "2" => pod_cases::all().into_iter().map(|(name, _)| name).collect(),
        "3" => cases::scale().into_iter().map(|(name, _)| name).collect(),
        _ => cases::all().into_iter().map(|(name, _)| name).collect(),
    }
}

fn skipped(name: String) -> Trial {
    Trial::test(name, move || {
        eprintln!("skipped: run tests/e2e/run");
        Ok(())
    })
}

fn trial<T: Send + 'static>(
    name: String,
    case: Case<T>,
    shared: &Arc<Mutex<T>>,
    runtime: &Arc<Runtime>,
) -> Trial {
    let (shared, runtime) = (Arc::clone(shared), Arc::clone(runtime));
    Trial::test(name, move || {
        let started = Instant::now();
        runtime.block_on(case(&mut shared.lock()));
        println!("{:.1} s", started.elapsed().as_secs_f64());
        Ok(())
    })
}

/// Runs this program again in its own namespaces. The kernel ends all of their processes, mounts and networks with
/// the program, whatever the outcome is.
fn again() -> ExitCode {
    let mut again = match namespace::again(std::env::args_os().skip(1)) {
        Ok(again) => again,
        Err(why) => {
            eprintln!("{why}; run as root");
            return ExitCode::FAILURE;
        }
    };
    let status = again.status().expect("unshare");
    if status.success() {
        ExitCode::SUCCESS
    } else {
        eprintln!("the tests in their own namespaces: {status}");
        ExitCode::FAILURE
    }
}
