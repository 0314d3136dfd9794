//! The programs between a real kube-apiserver and a node.
//!
//! `tests/e2e/run` installs and builds the other programs, and runs these tests. Without the script, every test
//! prints a message and passes. All tests share one cluster, and run one after the other.
#![allow(clippy::unwrap_used, clippy::expect_used, clippy::indexing_slicing)]

mod cases;
mod lab;

use std::path::PathBuf;
use std::process::ExitCode;
use std::sync::Arc;

use culvert_tests::namespace;
use libtest_mimic::{Arguments, Trial};
use parking_lot::Mutex;
use tokio::runtime::Runtime;

use self::cases::Case;
use self::lab::Lab;

/// Environment variable with the folder of Kubernetes' programs. The script sets the variable.
const PROGRAMS: &str = "CULVERT_E2E_PROGRAMS";

fn main() -> ExitCode {
    let mut arguments = Arguments::from_args();
    let cases = cases::all();
    let Some(programs) = std::env::var_os(PROGRAMS).map(PathBuf::from) else {
        let trials = cases.into_iter().map(skipped).collect();
        return libtest_mimic::run(&arguments, trials).exit_code();
    };
    if !arguments.list && !namespace::is_inside() {
        return again();
    }
    // The cases share a cluster, and depend on its state only through calls that set the state.
    arguments.test_threads = Some(1);
    if arguments.list {
        let trials = cases.into_iter().map(skipped).collect();
        return libtest_mimic::run(&arguments, trials).exit_code();
    }
    let runtime = tokio::runtime::Builder::new_multi_thread()
        .worker_threads(2)
        .enable_all()
        .build()
        .expect("a runtime");
    let runtime = Arc::new(runtime);
    let lab = runtime.block_on(Lab::start(&programs));
    let lab = Arc::new(Mutex::new(lab));
    let trials = cases
        .into_iter()
        .map(|(name, case)| trial(name, case, &lab, &runtime))
        .collect();
    let conclusion = libtest_mimic::run(&arguments, trials);
    if conclusion.has_failed() {
        lab.lock().print_logs();
    }
    conclusion.exit_code()
}

fn skipped((name, _): (String, Case)) -> Trial {
    Trial::test(name, move || {
        eprintln!("skipped: run tests/e2e/run");
        Ok(())
    })
}

fn trial(name: String, case: Case, lab: &Arc<Mutex<Lab>>, runtime: &Arc<Runtime>) -> Trial {
    let (lab, runtime) = (Arc::clone(lab), Arc::clone(runtime));
    Trial::test(name, move || {
        runtime.block_on(case(&mut lab.lock()));
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
