//! A program, its log, and its figures from the kernel.

use std::collections::VecDeque;
use std::ffi::{OsStr, OsString};
use std::fs;
use std::io::{self, Read, Write as _};
use std::path::{Path, PathBuf};
use std::process::{Child, Command, ExitStatus, Stdio};
use std::sync::{Arc, LazyLock, mpsc};
use std::thread;
use std::time::Duration;

use culvert_host::telemetry::panics;
use parking_lot::{Condvar, Mutex};
use rustix::process::{Pid, kill_process};

pub use rustix::process::Signal;

use crate::skip::find_program;
use crate::wait::eventually;

/// A command to start, and the place of the outcome.
type Order = (Command, mpsc::Sender<io::Result<Child>>);

/// Size of the kept output of a program, in bytes. The oldest output is dropped first.
const LOG_BYTES: usize = 1 << 20;

/// Time for the output of a killed program to end. The output ends at once, unless a child of the program still has the
/// pipe.
const OUTPUT_END: Duration = Duration::from_secs(2);

/// Texts in the log of one of our programs after a panic: of the program's own panic hook, and of the standard library's.
const PANICS: [&str; 2] = [panics::MESSAGE, "panicked at"];

/// Environment variables of the developer that must not reach a program under test.
const UNSET: [&str; 9] = [
    "HTTP_PROXY",
    "HTTPS_PROXY",
    "ALL_PROXY",
    "NO_PROXY",
    "http_proxy",
    "https_proxy",
    "no_proxy",
    "PROXY_SERVER_ID",
    "PROXY_AGENT_ID",
];

/// Returns the path of a program of this workspace in `target/<profile>`, the parent of the running test's
/// directory.
///
/// # Panics
/// If the program was not built.
pub fn ours(name: &str) -> PathBuf {
    let test = std::env::current_exe().expect("the path of this test");
    let path = test
        .ancestors()
        .nth(2)
        .expect("target/<profile>")
        .join(name);
    assert!(
        path.is_file(),
        "{} is missing: run `cargo build --workspace` first",
        path.display()
    );
    path
}

/// Runs a command to its end and returns its standard output.
///
/// # Errors
/// Returns the standard error if the command fails, and the reason if the command cannot be started.
pub fn outcome(command: &mut Command) -> Result<String, String> {
    let output = command.output().map_err(|error| error.to_string())?;
    let text = |bytes: Vec<u8>| String::from_utf8_lossy(&bytes).into_owned();
    if output.status.success() {
        Ok(text(output.stdout))
    } else {
        Err(text(output.stderr))
    }
}

/// Returns a command for a program that the kernel kills when the thread that starts the command ends. Without `setpriv`,
/// the program survives a killed test.
fn mortal(program: &Path) -> Command {
    let Some(setpriv) = find_program("setpriv", []) else {
        return Command::new(program);
    };
    let mut command = Command::new(setpriv);
    command.args(["--pdeathsig", "KILL"]).arg(program);
    command
}

/// Starts a command on a thread that lives as long as this process. The thread of a test, or of its runtime, may end
/// before the program is dropped.
fn spawn(command: Command) -> io::Result<Child> {
    static SPAWNER: LazyLock<mpsc::Sender<Order>> = LazyLock::new(|| {
        let (orders, received) = mpsc::channel::<Order>();
        thread::spawn(move || {
            for (mut command, outcome) in received {
                outcome.send(command.spawn()).expect("a waiting caller");
            }
        });
        orders
    });
    let (outcome, received) = mpsc::channel();
    SPAWNER.send((command, outcome)).expect("a running spawner");
    received.recv().expect("an outcome")
}

/// A running program. Dropping the value kills the program, and prints its output if the test is panicking. Otherwise the
/// drop panics if the log of the program has a panic.
#[derive(Debug)]
pub struct Program {
    name: String,
    args: Vec<OsString>,
    child: Child,
    output: Arc<Output>,
    /// True if a panic in the log does not fail the test.
    may_panic: bool,
}

/// Output of a program on stdout and stderr.
#[derive(Debug, Default)]
struct Output {
    collected: Mutex<Collected>,
    /// Notified at the end of each pipe.
    ended: Condvar,
}

#[derive(Debug, Default)]
struct Collected {
    bytes: VecDeque<u8>,
    /// Number of pipes that are not read to their end.
    open: usize,
}

// === impl Program ===

impl Program {
    /// Starts `program` with `args` and additional environment variables. A bare name is a program of this
    /// workspace, see [`ours`]; a name with a `/` is a path.
    ///
    /// # Panics
    /// If the program cannot be started.
    pub fn spawn<A: AsRef<OsStr>>(
        program: impl AsRef<Path>,
        args: impl IntoIterator<Item = A>,
        env: &[(&str, &str)],
    ) -> Self {
        let program = program.as_ref();
        let name = program.file_name().unwrap_or_default();
        let name = name.to_string_lossy().into_owned();
        let path = match program.components().count() {
            1 => ours(&name),
            _ => program.to_owned(),
        };
        assert!(path.is_file(), "{} is missing", path.display());
        let mut command = mortal(&path);
        for key in UNSET {
            command.env_remove(key);
        }
        let args: Vec<_> = args.into_iter().map(|it| it.as_ref().to_owned()).collect();
        command
            .args(&args)
            .envs(env.iter().copied())
            .stdin(Stdio::piped())
            .stdout(Stdio::piped())
            .stderr(Stdio::piped());
        let mut child = spawn(command)
            .unwrap_or_else(|error| panic!("cannot start {}: {error}", path.display()));
        let output = Arc::default();
        Output::collect(&output, child.stdout.take().unwrap());
        Output::collect(&output, child.stderr.take().unwrap());
        Self {
            name,
            args,
            child,
            output,
            may_panic: false,
        }
    }

    /// Changes the name of the program in the messages of a failed test.
    #[must_use]
    pub fn named(mut self, name: &str) -> Self {
        name.clone_into(&mut self.name);
        self
    }

    /// Returns the process id.
    pub fn pid(&self) -> u32 {
        self.child.id()
    }

    /// Returns the arguments of the program, without its name.
    ///
    /// # Panics
    /// If an argument is not UTF-8.
    pub fn args(&self) -> Vec<String> {
        let args = self.args.iter().map(|it| it.to_str().expect("UTF-8"));
        args.map(str::to_owned).collect()
    }

    /// Starts the program with the arguments once for each long-lived task, with a panic in the task. Checks
    /// that each run ends with an error that names the task. Only debug builds of the programs panic.
    ///
    /// # Panics
    /// If a run does not end in that way within `deadline`.
    pub async fn panics(program: &str, args: &[String], tasks: &[&str], deadline: Duration) {
        for task in tasks {
            let env = [("CULVERT_TEST_PANIC", *task)];
            let mut program = Self::spawn(program, args, &env).named(task);
            program.may_panic = true;
            let status = program.wait_exit(deadline).await;
            let log = program.log();
            assert_eq!(status.code(), Some(70), "{task}: {log}");
            let line = format!("task=\"{task}\"");
            assert!(log.contains(&line) && log.contains("panicked"), "{log}");
            let reason = "reason=\"CULVERT_TEST_PANIC names this task\"";
            let line = format!("\"{}\" {reason}", panics::MESSAGE);
            assert!(log.contains(&line) && !log.contains("panicked at"), "{log}");
        }
    }

    /// Sends a signal. After SIGSTOP, waits until all threads have stopped: a thread that still runs may answer a peer.
    ///
    /// # Panics
    /// If the program has exited and its exit status was already read.
    pub fn signal(&self, signal: Signal) {
        kill_process(Pid::from_child(&self.child), signal)
            .unwrap_or_else(|error| panic!("cannot signal {}: {error}", self.name));
        // The kernel stops the threads within microseconds.
        while signal == Signal::STOP && !self.is_stopped() {
            thread::yield_now();
        }
    }

    /// Returns true if all threads are stopped, or ended.
    fn is_stopped(&self) -> bool {
        let is_stopped = |thread: io::Result<fs::DirEntry>| {
            let stat = fs::read_to_string(thread.expect("a thread").path().join("stat"));
            // The state follows the name, which may contain any character (proc_pid_stat(5)).
            let state = |stat: String| stat.rsplit(") ").next()?.chars().next();
            stat.is_ok_and(|stat| matches!(state(stat), Some('T' | 'Z')))
        };
        let threads = fs::read_dir(format!("/proc/{}/task", self.pid()));
        threads.expect("the threads").all(is_stopped)
    }

    /// Kills the program and waits until the process is gone.
    pub fn kill(mut self) {
        self.end();
    }

    /// Returns the exit status, if the program has exited.
    pub fn exited(&mut self) -> Option<ExitStatus> {
        self.child.try_wait().expect("waiting for a child")
    }

    /// Waits until the program exits on its own. The log is complete afterwards.
    ///
    /// # Panics
    /// If the program still runs after `deadline`.
    pub async fn wait_exit(&mut self, deadline: Duration) -> ExitStatus {
        let what = format!("{} exits", self.name);
        let status = eventually(&what, deadline, async || {
            self.exited().ok_or("still running")
        })
        .await;
        eventually("the output is read to its end", deadline, async || {
            self.output.collected.lock().open == 0
        })
        .await;
        status
    }

    /// Returns the output of the program on stdout and stderr so far; at most the newest 1 MiB.
    pub fn log(&self) -> String {
        let mut collected = self.output.collected.lock();
        String::from_utf8_lossy(collected.bytes.make_contiguous()).into_owned()
    }

    /// Waits until the program has written a line that contains `text`, and returns the line.
    ///
    /// # Panics
    /// If the line does not appear within `deadline`.
    pub async fn wait_for_log(&self, text: &str, deadline: Duration) -> String {
        let what = format!("{} logs {text:?}", self.name);
        eventually(&what, deadline, async || {
            let log = self.log();
            let line = log.lines().find(|line| line.contains(text));
            line.map(str::to_owned)
                .ok_or_else(|| format!("{} lines without the text", log.lines().count()))
        })
        .await
    }

    /// Writes a line to the program's stdin.
    ///
    /// # Panics
    /// If the program has closed its stdin.
    pub fn send_line(&mut self, line: &str) {
        let stdin = self.child.stdin.as_mut().expect("an open stdin");
        writeln!(stdin, "{line}").expect("writing to the program's stdin");
    }

    /// Returns the number of open file descriptors of the program.
    ///
    /// # Panics
    /// If the program has exited.
    pub fn fd_count(&self) -> usize {
        fs::read_dir(self.proc("fd"))
            .expect("a living program")
            .count()
    }

    /// Returns the program's resident memory, in bytes.
    ///
    /// # Panics
    /// If the program has exited.
    pub fn rss(&self) -> u64 {
        self.memory("VmRSS:")
    }

    /// Returns the largest resident memory that the program has had so far, in bytes.
    ///
    /// # Panics
    /// If the program has exited.
    pub fn peak_rss(&self) -> u64 {
        self.memory("VmHWM:")
    }

    /// Returns the value of a line in `/proc/pid/status`, see proc_pid_status(5).
    fn memory(&self, name: &str) -> u64 {
        let status = fs::read_to_string(self.proc("status")).expect("a living program");
        let line = status.lines().find_map(|line| line.strip_prefix(name));
        let kib = line.and_then(|rest| rest.trim().strip_suffix(" kB"));
        1024 * kib.expect("a value in kB").parse::<u64>().unwrap()
    }

    /// Returns the processor time that the program has used, user and system together.
    ///
    /// # Panics
    /// If the program has exited.
    pub fn cpu_time(&self) -> Duration {
        let stat = fs::read_to_string(self.proc("stat")).expect("a living program");
        // The second field is the program's name in parentheses and may contain any character. Counted from
        // the field after the name, user and system ticks (fields 14 and 15) have the indexes 11 and 12; see
        // proc(5).
        let (_, fields) = stat.rsplit_once(") ").expect("a name in brackets");
        let fields: Vec<&str> = fields.split(' ').collect();
        let ticks: u64 = fields[11..=12]
            .iter()
            .map(|t| t.parse::<u64>().unwrap())
            .sum();
        let per_second = rustix::param::clock_ticks_per_second();
        Duration::from_millis(ticks * 1000 / per_second)
    }

    fn proc(&self, file: &str) -> PathBuf {
        PathBuf::from(format!("/proc/{}/{file}", self.pid()))
    }

    fn end(&mut self) {
        // An error means that the program has already exited.
        self.child.kill().ok();
        self.child.wait().ok();
    }
}

impl Drop for Program {
    fn drop(&mut self) {
        self.end();
        self.output.wait_for_end(OUTPUT_END);
        let log = self.log();
        if thread::panicking() {
            eprintln!("---- {} (pid {}) ----\n{log}", self.name, self.pid());
            return;
        }
        let has_panicked = PANICS.iter().any(|text| log.contains(text));
        assert!(
            self.may_panic || !has_panicked,
            "{} has panicked:\n{log}",
            self.name
        );
    }
}

// === impl Output ===

impl Output {
    /// Collects the output from `pipe` until its end, on another thread.
    fn collect(output: &Arc<Self>, mut pipe: impl Read + Send + 'static) {
        let output = Arc::clone(output);
        output.collected.lock().open += 1;
        thread::spawn(move || {
            let mut buffer = [0; 8192];
            while let Ok(n @ 1..) = pipe.read(&mut buffer) {
                let mut collected = output.collected.lock();
                collected.bytes.extend(&buffer[..n]);
                let surplus = collected.bytes.len().saturating_sub(LOG_BYTES);
                collected.bytes.drain(..surplus);
            }
            output.collected.lock().open -= 1;
            output.ended.notify_all();
        });
    }

    /// Blocks until all pipes are read to their end, at most for `limit`.
    fn wait_for_end(&self, limit: Duration) {
        let mut collected = self.collected.lock();
        let is_open = |collected: &mut Collected| collected.open > 0;
        self.ended.wait_while_for(&mut collected, is_open, limit);
    }
}

#[cfg(test)]
mod tests {
    use tokio::time::Instant;

    use super::*;
    use crate::skip::skip;

    const LIMIT: Duration = Duration::from_secs(20);

    /// Environment variable of a test process that is killed.
    const KILLED: &str = "CULVERT_TEST_KILLED";

    fn shell(script: &str) -> Program {
        Program::spawn("/bin/sh", ["-c", script], &[("GREETING", "hello")])
    }

    #[tokio::test]
    async fn output_stdin_and_exit_status_are_connected() {
        let mut program = shell("echo $GREETING; read x; echo got $x >&2; exit 3");
        program.wait_for_log("hello", LIMIT).await;
        program.send_line("this");
        assert_eq!(program.wait_for_log("got", LIMIT).await, "got this");
        assert_eq!(program.wait_exit(LIMIT).await.code(), Some(3));
    }

    #[tokio::test]
    async fn signals_reach_the_program() {
        let mut program = shell("trap 'echo bye; exit 0' TERM; echo up; while :; do read x; done");
        program.wait_for_log("up", LIMIT).await;
        program.signal(Signal::TERM);
        assert!(program.wait_exit(LIMIT).await.success());
        program.wait_for_log("bye", LIMIT).await;
    }

    #[tokio::test]
    async fn kernel_figures_are_available_until_the_program_is_dropped() {
        let mut program = shell("echo up; read x; exec 7</dev/null; echo open; read x");
        program.wait_for_log("up", LIMIT).await;
        let before = program.fd_count();
        program.send_line("go on");
        program.wait_for_log("open", LIMIT).await;
        assert_eq!(program.fd_count(), before + 1);
        assert!(program.rss() > 100_000, "{}", program.rss());
        assert!(program.cpu_time() < LIMIT);
        let proc = program.proc("");
        assert!(proc.exists());
        drop(program);
        assert!(!proc.exists());
    }

    #[tokio::test]
    async fn programs_end_with_a_test_process_that_is_killed() {
        if std::env::var_os(KILLED).is_some() {
            // A thread that ends at once starts the program.
            let start = || shell("echo started $$; exec sleep 60");
            let program = thread::spawn(start).join().unwrap();
            println!("\n{}", program.wait_for_log("started", LIMIT).await);
            return std::future::pending().await;
        }
        if find_program("setpriv", []).is_none() {
            return skip("no setpriv");
        }
        let name = "process::tests::programs_end_with_a_test_process_that_is_killed";
        let args = ["--exact", name, "--nocapture"];
        let test = Program::spawn(std::env::current_exe().unwrap(), args, &[(KILLED, "1")]);
        let line = test.wait_for_log("started", LIMIT).await;
        let stat = format!("/proc/{}/stat", line.trim_start_matches("started "));
        assert!(fs::exists(&stat).unwrap());
        test.kill();
        eventually("the program ends", LIMIT, async || {
            // A process that is not reaped yet is a zombie.
            fs::read_to_string(&stat).map_or(true, |stat| stat.contains(") Z "))
        })
        .await;
    }

    #[tokio::test]
    async fn child_that_keeps_the_output_open_does_not_block_the_drop() {
        let program = shell("sleep 20 & echo up; wait");
        program.wait_for_log("up", LIMIT).await;
        let started = Instant::now();
        drop(program);
        let took = started.elapsed();
        assert!(took >= OUTPUT_END && took < 5 * OUTPUT_END, "{took:?}");
    }

    #[tokio::test]
    #[should_panic(expected = "sh has panicked")]
    async fn panic_in_the_log_fails_the_test() {
        let mut program = shell(&format!("echo 'E0101 \"{}\"' >&2", panics::MESSAGE));
        program.wait_exit(LIMIT).await;
    }

    #[test]
    #[should_panic(expected = "run `cargo build --workspace` first")]
    fn a_program_that_was_not_built_panics_with_advice() {
        Program::spawn("culvert-nothing", [""; 0], &[]);
    }
}
