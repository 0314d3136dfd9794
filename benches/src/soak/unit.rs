//! A program of the soak test that ends and starts again.

use std::path::PathBuf;
use std::sync::Arc;
use std::time::Duration;

use anyhow::Context as _;
use culvert_tests::{Program, Signal};
use tokio::time::sleep;

use crate::harness::{ask, harness};
use crate::soak::lives::Lives;

/// Time limit for a program to exit after SIGTERM. The front door drains for at most 25 s.
const EXIT_LIMIT: Duration = Duration::from_secs(60);

/// A program with its command line.
#[derive(Debug)]
pub(super) struct Unit {
    /// Name in the report.
    pub name: &'static str,
    path: PathBuf,
    args: Vec<String>,
    program: Program,
    lives: Arc<Lives>,
}

impl Unit {
    /// Starts a program.
    pub(super) fn start(
        name: &'static str,
        path: PathBuf,
        args: Vec<String>,
        lives: &Arc<Lives>,
    ) -> anyhow::Result<Self> {
        let program = ask(|| Program::spawn(&path, &args, &[]))?;
        lives.begins(name, program.pid());
        Ok(Self {
            name,
            path,
            args,
            program,
            lives: Arc::clone(lives),
        })
    }

    /// Returns the arguments of the next start.
    pub(super) fn args(&mut self) -> &mut Vec<String> {
        &mut self.args
    }

    /// Returns the running program.
    pub(super) fn program(&self) -> &Program {
        &self.program
    }

    /// Ends the program with SIGKILL.
    pub(super) fn kill(&mut self) -> anyhow::Result<()> {
        ask(|| self.program.signal(Signal::KILL))?;
        self.lives.ends(self.name);
        Ok(())
    }

    /// Sends SIGTERM and waits until the program has exited.
    pub(super) async fn terminate(&mut self) -> anyhow::Result<()> {
        self.begins_to_end()?;
        self.ends().await
    }

    /// Sends SIGTERM.
    pub(super) fn begins_to_end(&self) -> anyhow::Result<()> {
        ask(|| self.program.signal(Signal::TERM))
    }

    /// Waits until the program has exited after SIGTERM.
    pub(super) async fn ends(&mut self) -> anyhow::Result<()> {
        let exit = harness(self.program.wait_exit(EXIT_LIMIT)).await;
        self.lives.ends(self.name);
        exit.map(drop).context("after SIGTERM")
    }

    /// Starts the program again after its end.
    pub(super) fn restart(&mut self) -> anyhow::Result<()> {
        self.program = ask(|| Program::spawn(&self.path, &self.args, &[]))?;
        self.lives.begins(self.name, self.program.pid());
        Ok(())
    }

    /// Stops the program for some time.
    pub(super) async fn freeze(&self, time: Duration) -> anyhow::Result<()> {
        ask(|| self.program.signal(Signal::STOP))?;
        sleep(time).await;
        ask(|| self.program.signal(Signal::CONT))
    }
}
