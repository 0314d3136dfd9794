//! A program, its log, and what the kernel knows about it.

use std::collections::VecDeque;
use std::ffi::OsStr;
use std::io::{Read, Write as _};
use std::path::{Path, PathBuf};
use std::process::{Child, Command, ExitStatus, Stdio};
use std::sync::Arc;
use std::thread;
use std::time::Duration;

use parking_lot::Mutex;

use rustix::process::{Pid, kill_process};

pub use rustix::process::Signal;

use crate::wait::eventually;

/// How much of a program's output is kept, in bytes; the newest.
const LOG_BYTES: usize = 1 << 20;

/// What must not leak from the developer's environment into a program under test.
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

/// Where a program of this workspace lies: beside the directory of the test that runs.
///
/// # Panics
/// When it was not built.
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

/// A running program. It is killed when dropped; if that happens because the test fails, its output is
/// printed.
#[derive(Debug)]
pub struct Program {
    name: String,
    child: Child,
    log: Arc<Mutex<VecDeque<u8>>>,
    readers: Vec<thread::JoinHandle<()>>,
}

impl Program {
    /// Starts `program` with `args` and additional environment variables. A bare name is one
    /// of [`ours`], anything with a `/` is a path.
    ///
    /// # Panics
    /// When it cannot be started.
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
        let mut command = Command::new(&path);
        for key in UNSET {
            command.env_remove(key);
        }
        let spawned = command
            .args(args)
            .envs(env.iter().copied())
            .stdin(Stdio::piped())
            .stdout(Stdio::piped())
            .stderr(Stdio::piped())
            .spawn();
        let mut child =
            spawned.unwrap_or_else(|error| panic!("cannot start {}: {error}", path.display()));
        let log = Arc::default();
        let readers = vec![
            collect(child.stdout.take().unwrap(), &log),
            collect(child.stderr.take().unwrap(), &log),
        ];
        Self {
            name,
            child,
            log,
            readers,
        }
    }

    /// The same program under another name, for what a failed test prints.
    #[must_use]
    pub fn named(mut self, name: &str) -> Self {
        name.clone_into(&mut self.name);
        self
    }

    /// The process id.
    pub fn pid(&self) -> u32 {
        self.child.id()
    }

    /// Sends a signal.
    ///
    /// # Panics
    /// When the program is gone and was awaited.
    pub fn signal(&self, signal: Signal) {
        kill_process(Pid::from_child(&self.child), signal)
            .unwrap_or_else(|error| panic!("cannot signal {}: {error}", self.name));
    }

    /// Kills the program and waits until it is gone.
    pub fn kill(mut self) {
        self.end();
    }

    /// The exit status, if the program has ended.
    pub fn exited(&mut self) -> Option<ExitStatus> {
        self.child.try_wait().expect("waiting for a child")
    }

    /// Waits until the program ends by itself. Its log is complete then.
    ///
    /// # Panics
    /// When it still runs after `deadline`.
    pub async fn wait_exit(&mut self, deadline: Duration) -> ExitStatus {
        let what = format!("{} exits", self.name);
        let status = eventually(&what, deadline, async || {
            self.exited().ok_or("it still runs")
        })
        .await;
        eventually("its last words are collected", deadline, async || {
            self.readers.iter().all(thread::JoinHandle::is_finished)
        })
        .await;
        status
    }

    /// What the program has written to stdout and stderr so far, the newest 1 MiB of it.
    pub fn log(&self) -> String {
        let mut log = self.log.lock();
        String::from_utf8_lossy(log.make_contiguous()).into_owned()
    }

    /// Waits until the program has written a line with `text` in it, and gives that line.
    ///
    /// # Panics
    /// When there is none after `deadline`.
    pub async fn wait_for_log(&self, text: &str, deadline: Duration) -> String {
        let what = format!("{} says {text:?}", self.name);
        eventually(&what, deadline, async || {
            let log = self.log();
            let line = log.lines().find(|line| line.contains(text));
            line.map(str::to_owned)
                .ok_or_else(|| format!("{} lines without it", log.lines().count()))
        })
        .await
    }

    /// Writes a line to the program's stdin.
    ///
    /// # Panics
    /// When the program does not take it.
    pub fn send_line(&mut self, line: &str) {
        let stdin = self.child.stdin.as_mut().expect("an open stdin");
        writeln!(stdin, "{line}").expect("writing to the program's stdin");
    }

    /// How many file descriptors the program has open.
    ///
    /// # Panics
    /// When the program is gone.
    pub fn fd_count(&self) -> usize {
        std::fs::read_dir(self.proc("fd"))
            .expect("a living program")
            .count()
    }

    /// The program's resident memory, in bytes.
    ///
    /// # Panics
    /// When the program is gone.
    pub fn rss(&self) -> u64 {
        let status = std::fs::read_to_string(self.proc("status")).expect("a living program");
        let line = status.lines().find_map(|line| line.strip_prefix("VmRSS:"));
        let kib = line.and_then(|rest| rest.trim().strip_suffix(" kB"));
        1024 * kib.expect("VmRSS in kB").parse::<u64>().unwrap()
    }

    /// The processor time that the program has used, user and system together.
    ///
    /// # Panics
    /// When the program is gone.
    pub fn cpu_time(&self) -> Duration {
        let stat = std::fs::read_to_string(self.proc("stat")).expect("a living program");
        // The second field is the program's name in brackets and may hold anything. Counted after
        // it, user and system ticks (fields 14 and 15) are at 11 and 12; see proc(5).
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
        // It may have ended before; all that matters is that it is gone.
        self.child.kill().ok();
        self.child.wait().ok();
    }
}

impl Drop for Program {
    fn drop(&mut self) {
        self.end();
        if thread::panicking() {
            for reader in self.readers.drain(..) {
                reader.join().ok();
            }
            eprintln!(
                "---- {} (pid {}) ----\n{}",
                self.name,
                self.pid(),
                self.log()
            );
        }
    }
}

/// Collects what comes from `pipe` until its end.
fn collect(
    mut pipe: impl Read + Send + 'static,
    log: &Arc<Mutex<VecDeque<u8>>>,
) -> thread::JoinHandle<()> {
    let log = Arc::clone(log);
    thread::spawn(move || {
        let mut buffer = [0; 8192];
        while let Ok(n @ 1..) = pipe.read(&mut buffer) {
            let mut log = log.lock();
            log.extend(&buffer[..n]);
            let surplus = log.len().saturating_sub(LOG_BYTES);
            log.drain(..surplus);
        }
    })
}

#[cfg(test)]
mod tests {
    use super::*;

    const LIMIT: Duration = Duration::from_secs(20);

    fn shell(script: &str) -> Program {
        Program::spawn("/bin/sh", ["-c", script], &[("GREETING", "hello")])
    }

    #[tokio::test]
    async fn output_exit_and_stdin() {
        let mut program = shell("echo $GREETING; read x; echo got $x >&2; exit 3");
        program.wait_for_log("hello", LIMIT).await;
        program.send_line("this");
        assert_eq!(program.wait_for_log("got", LIMIT).await, "got this");
        assert_eq!(program.wait_exit(LIMIT).await.code(), Some(3));
    }

    #[tokio::test]
    async fn signals_arrive() {
        let mut program = shell("trap 'echo bye; exit 0' TERM; echo up; while :; do read x; done");
        program.wait_for_log("up", LIMIT).await;
        program.signal(Signal::TERM);
        assert!(program.wait_exit(LIMIT).await.success());
        program.wait_for_log("bye", LIMIT).await;
    }

    #[tokio::test]
    async fn the_kernel_knows_it_until_it_is_dropped() {
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

    #[test]
    #[should_panic(expected = "run `cargo build --workspace` first")]
    fn a_program_that_was_not_built() {
        Program::spawn("culvert-nothing", [""; 0], &[]);
    }
}
