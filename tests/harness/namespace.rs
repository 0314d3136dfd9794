//! A network of a test's own.
//!
//! The test runs once more, alone in its process, in namespaces that `unshare` makes: whatever it
//! does to interfaces, and whatever it starts, ends with that process, however the test ends.

use std::ffi::OsStr;
use std::process::Command;

use crate::envoy::skip;

/// Says to a program that it is in its namespaces.
const INSIDE: &str = "CULVERT_TEST_NAMESPACE";

/// A network of its own, processes that end with the test, and the `/proc` that belongs to them.
const NAMESPACES: [&str; 6] = [
    "--net",
    "--mount",
    "--pid",
    "--fork",
    "--kill-child",
    "--mount-proc",
];

/// Runs a test in a network that has nothing but a loopback interface. To be called by a `#[test]`
/// function with its whole body, an `async` closure. Nothing, and a line on stderr, where
/// namespaces can not be made.
///
/// # Panics
/// As the body does; where namespaces can not be made, if `CI=true`.
pub fn alone<F: AsyncFnOnce()>(body: F) {
    if is_inside() {
        ip("link set lo up").expect("a loopback interface");
        let runtime = tokio::runtime::Builder::new_current_thread()
            .enable_all()
            .build()
            .expect("a runtime");
        return runtime.block_on(body());
    }
    // crate::module::test::{{closure}}
    let path = std::any::type_name::<F>();
    let test = path
        .split_once("::")
        .and_then(|(_, path)| path.strip_suffix("::{{closure}}"))
        .unwrap_or_else(|| panic!("{path} is no closure of a test"));
    let mut again = match again(["--exact", test, "--nocapture"]) {
        Ok(again) => again,
        Err(why) => return skip(&why),
    };
    let again = again.output().expect("unshare");
    let said = [again.stdout, again.stderr].concat();
    let said = String::from_utf8_lossy(&said);
    eprintln!("{said}");
    let is_passed = again.status.success() && said.contains("1 passed");
    assert!(is_passed, "{test}: {} in its namespaces", again.status);
}

/// Whether this process is in namespaces of its own already.
pub fn is_inside() -> bool {
    std::env::var_os(INSIDE).is_some()
}

/// This very program once more, in namespaces of its own, to be started. It ends with the thread that starts
/// it, and all that it has started ends with it.
///
/// # Errors
/// Where namespaces can not be made.
pub fn again<A: AsRef<OsStr>>(args: impl IntoIterator<Item = A>) -> Result<Command, String> {
    outcome(unshare().arg("true")).map_err(|why| format!("no namespaces: {}", why.trim()))?;
    let program = std::env::current_exe().map_err(|error| error.to_string())?;
    let mut command = unshare();
    command.arg(program).args(args).env(INSIDE, "1");
    Ok(command)
}

/// Runs `ip` with these words, and gives what it says.
///
/// # Errors
/// What it complains about.
pub fn ip(words: &str) -> Result<String, String> {
    outcome(Command::new("ip").args(words.split(' ')))
}

/// The namespaces end with `unshare`, and that ends with the thread that started it, even if that is killed.
fn unshare() -> Command {
    let mut command = Command::new("setpriv");
    command.args(["--pdeathsig", "KILL", "unshare"]);
    command.args(NAMESPACES);
    command
}

fn outcome(command: &mut Command) -> Result<String, String> {
    let output = command.output().map_err(|error| error.to_string())?;
    let text = |bytes: Vec<u8>| String::from_utf8_lossy(&bytes).into_owned();
    if output.status.success() {
        Ok(text(output.stdout))
    } else {
        Err(text(output.stderr))
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_test_has_a_network_of_its_own() {
        let outside = std::fs::read_link("/proc/self/ns/net").unwrap();
        alone(async || {
            ip("link add alone type bridge").unwrap();
            let names = ip("-br link").unwrap();
            let names: Vec<&str> = names.lines().filter_map(|l| l.split(' ').next()).collect();
            assert_eq!(names, ["lo", "alone"]);
        });
        let inside = is_inside();
        let now = std::fs::read_link("/proc/self/ns/net").unwrap();
        assert_eq!(now, outside);
        assert!(inside || ip("link show alone").is_err());
    }
}
