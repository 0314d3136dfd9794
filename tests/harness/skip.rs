//! Reports of skipped tests. The reports bypass the capture of libtest, which would hide them: a skipped test passes.

use std::io::Write as _;
use std::path::PathBuf;

/// Reports on stderr that tests against a peer program are skipped.
///
/// # Panics
/// If `CI=true`: in CI all peer programs must be installed.
pub fn skip(why: &str) {
    let ci = std::env::var("CI").is_ok_and(|ci| ci == "true");
    assert!(!ci, "{why}, though CI=true");
    skip_for_kernel(why);
}

/// Reports on stderr that a test is skipped because of the kernel. Permitted in CI, which cannot install another kernel.
pub fn skip_for_kernel(why: &str) {
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
