//! A private network for a test.
//!
//! The test runs again in a child process of its own, inside namespaces created by `unshare`. All interfaces,
//! settings and processes that the test creates disappear with the child process, however the test ends.

use std::ffi::OsStr;
use std::path::Path;
use std::pin::pin;
use std::process::Command;
use std::time::Duration;

use parking_lot::{Condvar, Mutex};
use tokio::time::timeout;

use crate::process::outcome;
use crate::skip::skip;

/// Environment variable that marks a process inside its own namespaces.
const INSIDE: &str = "CULVERT_TEST_NAMESPACE";

/// Options of `unshare` for a private network, for processes that end with the test, and for the matching
/// `/proc`.
const NAMESPACES: [&str; 6] = [
    "--net",
    "--mount",
    "--pid",
    "--fork",
    "--kill-child",
    "--mount-proc",
];

/// Number of tests that run in namespaces at once. Kernel tunnels and stock programs drop packets if the
/// processor is busy for too long, and many of these tests check that no packet is lost.
const AT_ONCE: usize = 2;

/// Time limit of a test inside its namespaces. Much longer than any of these tests.
const DEADLINE: Duration = Duration::from_secs(900);

static RUNNING: Mutex<usize> = Mutex::new(0);
static ENDED: Condvar = Condvar::new();

/// Place among the tests that run in namespaces, until dropped.
struct Place;

impl Place {
    /// Waits until fewer than [`AT_ONCE`] tests run.
    fn wait() -> Self {
        let mut running = RUNNING.lock();
        ENDED.wait_while(&mut running, |running| *running >= AT_ONCE);
        *running += 1;
        Self
    }
}

impl Drop for Place {
    fn drop(&mut self) {
        *RUNNING.lock() -= 1;
        ENDED.notify_one();
    }
}

/// Runs a test in a network with only a loopback interface. A `#[test]` function must call `alone` with its
/// whole body as an `async` closure. If namespaces cannot be created, prints a message on stderr and returns.
///
/// # Panics
/// If the body panics or still waits after 15 minutes, or if namespaces cannot be created and `CI=true`.
pub fn alone<F: AsyncFnOnce()>(body: F) {
    if is_inside() {
        ip("link set lo up").expect("a loopback interface");
        // Spawned tasks have a thread of their own, because bodies start programs and set up networks synchronously.
        let runtime = tokio::runtime::Builder::new_multi_thread()
            .worker_threads(1)
            .enable_all()
            .build()
            .expect("a runtime");
        return runtime.block_on(timely(body()));
    }
    // crate::module::test::{{closure}}
    let path = std::any::type_name::<F>();
    let test = path
        .split_once("::")
        .and_then(|(_, path)| path.strip_suffix("::{{closure}}"))
        .unwrap_or_else(|| panic!("{path} is not a closure in a test"));
    let mut again = match again(["--exact", test, "--nocapture"]) {
        Ok(again) => again,
        Err(why) => return skip(&why),
    };
    let _place = Place::wait();
    let again = again.output().expect("unshare");
    let said = [again.stdout, again.stderr].concat();
    let said = String::from_utf8_lossy(&said);
    eprintln!("{said}");
    let is_passed = again.status.success() && said.contains("1 passed");
    assert!(is_passed, "{test} in its own namespaces: {}", again.status);
}

/// Runs the body of a test. A body that does not end is dropped during the panic, so that the programs of the body print
/// their logs.
///
/// # Panics
/// If the body still waits after [`DEADLINE`]. A body that blocks its thread has no deadline.
async fn timely(body: impl Future<Output = ()>) {
    let mut body = pin!(body);
    let ended = timeout(DEADLINE, body.as_mut()).await;
    assert!(ended.is_ok(), "the test did not end within {DEADLINE:?}");
}

/// Returns true if this process is already inside its own namespaces.
pub fn is_inside() -> bool {
    std::env::var_os(INSIDE).is_some()
}

/// Returns a command that runs the current program again, in its own namespaces. The new process and all of
/// its children end with the thread that starts the command.
///
/// # Errors
/// If namespaces cannot be created.
pub fn again<A: AsRef<OsStr>>(args: impl IntoIterator<Item = A>) -> Result<Command, String> {
    outcome(unshare().arg("true"))
        .map_err(|why| format!("cannot create namespaces: {}", why.trim()))?;
    let program = std::env::current_exe().map_err(|error| error.to_string())?;
    let mut command = unshare();
    command.arg(program).args(args).env(INSIDE, "1");
    Ok(command)
}

/// Runs `ip` with these arguments, and returns its output.
///
/// # Errors
/// Returns the error output of `ip`.
pub fn ip(words: &str) -> Result<String, String> {
    outcome(Command::new("ip").args(words.split(' ')))
}

/// Replaces `/etc/hosts` for this process and its children. `names` are pairs of a name and an address.
///
/// # Panics
/// If the caller is not inside [`alone`], or the file cannot be mounted.
pub fn hosts(names: &[(&str, &str)]) {
    assert!(is_inside(), "call namespace::alone first");
    let lines = names
        .iter()
        .map(|(name, address)| format!("{address} {name}\n"));
    let file = tempfile::NamedTempFile::new().expect("a temporary file");
    std::fs::write(file.path(), lines.collect::<String>()).expect("writing names");
    let mut mount = Command::new("mount");
    mount.arg("--bind").arg(file.path()).arg("/etc/hosts");
    outcome(&mut mount).unwrap_or_else(|why| panic!("mounting /etc/hosts: {why}"));
}

/// Mounts a folder over `/sys/fs/cgroup` whose files have a memory limit of `bytes`, for programs that start later. The
/// kernel does not enforce the limit.
///
/// # Panics
/// If the caller is not inside [`alone`], or the files cannot be mounted.
pub fn memory_limit(bytes: u64) {
    assert!(is_inside(), "call namespace::alone first");
    let groups = Path::new("/sys/fs/cgroup");
    let mut mount = Command::new("mount");
    mount.args(["-t", "tmpfs", "none"]).arg(groups);
    outcome(&mut mount).unwrap_or_else(|why| panic!("mounting {}: {why}", groups.display()));
    // The files of both versions, see cgroups(7).
    std::fs::create_dir(groups.join("memory")).expect("a folder");
    for file in ["memory.max", "memory/memory.limit_in_bytes"] {
        std::fs::write(groups.join(file), bytes.to_string()).expect("writing the limit");
    }
}

/// Direction of packets, seen from an address.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Direction {
    /// Packets with the address as their source.
    From,
    /// Packets with the address as their destination.
    To,
}

/// Drops packets from and to an address of this network, without an error for the sender.
///
/// # Panics
/// If the caller is not inside [`alone`], or `iptables` fails.
pub fn cut_off(address: &str, directions: &[Direction]) {
    assert!(is_inside(), "call namespace::alone first");
    for direction in directions {
        let side = match direction {
            Direction::From => "-s",
            Direction::To => "-d",
        };
        let args = ["-w", "-A", "INPUT", side, address, "-j", "DROP"];
        outcome(Command::new("iptables").args(args)).expect("iptables");
    }
}

/// Removes the rules of [`cut_off`].
///
/// # Panics
/// If `iptables` fails.
pub fn restore() {
    outcome(Command::new("iptables").args(["-w", "-F", "INPUT"])).expect("iptables");
}

/// Returns true if `iptables` is installed. Otherwise prints a message on stderr.
///
/// # Panics
/// If `iptables` is missing and `CI=true`.
pub fn can_cut_off() -> bool {
    let found = Command::new("iptables").arg("--version").output().is_ok();
    if !found {
        skip("no iptables");
    }
    found
}

/// Returns an `unshare` command. The namespaces end with `unshare`, and `unshare` ends with the thread that
/// starts the command, even if the thread is killed.
fn unshare() -> Command {
    let mut command = Command::new("setpriv");
    command.args(["--pdeathsig", "KILL", "unshare"]);
    command.args(NAMESPACES);
    command
}

#[cfg(test)]
mod tests {
    use std::future::pending;
    use std::sync::Arc;
    use std::sync::atomic::{AtomicBool, Ordering};
    use std::thread::panicking;

    use super::*;

    /// Records whether its thread panics when the value is dropped.
    struct Dropped(Arc<AtomicBool>);

    impl Drop for Dropped {
        fn drop(&mut self) {
            self.0.store(panicking(), Ordering::Relaxed);
        }
    }

    #[tokio::test(start_paused = true)]
    async fn body_that_does_not_end_is_dropped_during_a_panic() {
        let in_panic = Arc::new(AtomicBool::new(false));
        let dropped = Dropped(in_panic.clone());
        let body = tokio::spawn(timely(async move {
            let _dropped = dropped;
            pending().await
        }));
        assert!(body.await.unwrap_err().is_panic());
        assert!(in_panic.load(Ordering::Relaxed));
    }

    #[test]
    fn a_test_runs_in_a_private_network() {
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
