//! Reports of skipped tests. The reports bypass the capture of libtest, which would hide them: a skipped test passes.

use std::io::Write as _;
use std::path::PathBuf;

/// Environment variable with the features that the kernel lacks, separated by commas. `.ci/run` sets the variable. Tests in
/// `common/host` read the variable themselves.
const KERNEL_LACKS: &str = "CULVERT_KERNEL_LACKS";

/// Reports on stderr that tests against a peer program are skipped.
///
/// # Panics
/// If `CI=true`: in CI all peer programs must be installed.
pub fn skip(why: &str) {
    assert!(!is_ci(), "{why}, though CI=true");
    report(why);
}

/// Reports on stderr that a test is skipped because the kernel lacks a feature, such as `dummy`.
///
/// # Panics
/// If `CI=true` and `CULVERT_KERNEL_LACKS` does not list the feature: CI cannot install another kernel, but must not skip
/// anything unnoticed.
pub fn skip_for_kernel(feature: &str) {
    let lacks = std::env::var(KERNEL_LACKS).unwrap_or_default();
    assert!(
        !is_ci() || is_listed(&lacks, feature),
        "this kernel lacks {feature}, though CI=true and {KERNEL_LACKS} is {lacks:?}"
    );
    report(&format!("this kernel lacks {feature}"));
}

fn is_ci() -> bool {
    std::env::var("CI").is_ok_and(|ci| ci == "true")
}

fn is_listed(lacks: &str, feature: &str) -> bool {
    lacks.split(',').any(|listed| listed == feature)
}

fn report(why: &str) {
    // A closed stderr must not fail the test.
    let _ = writeln!(std::io::stderr(), "skipped: {why}");
}

/// Returns true if a program is installed. Otherwise reports that a test is skipped.
///
/// # Panics
/// If the program is missing and `CI=true`.
pub fn has_program(program: &str) -> bool {
    let has = find_program(program, []).is_some();
    if !has {
        skip(&format!("{program} not found"));
    }
    has
}

/// Returns the path of a program in PATH or in one of `more` directories.
pub(crate) fn find_program<const N: usize>(program: &str, more: [&str; N]) -> Option<PathBuf> {
    let path = std::env::var_os("PATH").unwrap_or_default();
    std::env::split_paths(&path)
        .chain(more.map(PathBuf::from))
        .map(|dir| dir.join(program))
        .find(|program| program.is_file())
}

#[cfg(test)]
mod tests {
    use super::is_listed;

    #[test]
    fn features_are_listed_with_commas() {
        assert!(is_listed("dummy,bbr", "dummy") && is_listed("dummy,bbr", "bbr"));
        assert!(!is_listed("dummy,bbr", "cubic") && !is_listed("", "dummy"));
    }
}
