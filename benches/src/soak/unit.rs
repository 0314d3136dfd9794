//! A program of the soak test that ends and starts again.

use std::path::PathBuf;
use std::sync::Arc;
use std::time::Duration;

use anyhow::{Context as _, bail, ensure};
use culvert_tests::{Program, Signal};
use tokio::time::sleep;

use crate::harness::{ask, harness};
use crate::soak::lives::Lives;

/// Time limit for a program to exit after SIGTERM. The front door drains for at most 25 s.
const EXIT_LIMIT: Duration = Duration::from_secs(60);

/// Fails if a program has ended before its signal.
pub(super) fn runs(program: &mut Program) -> anyhow::Result<()> {
    match program.exited() {
        Some(exit) => bail!("the program has ended without a signal: {exit}"),
        None => Ok(()),
    }
}

/// Waits until a program has exited after SIGTERM. Fails if the exit code is not 0.
pub(super) async fn exits(program: &mut Program, limit: Duration) -> anyhow::Result<()> {
    let exit = harness(program.wait_exit(limit)).await;
    let exit = exit.context("after SIGTERM")?;
    ensure!(exit.success(), "after SIGTERM: {exit}");
    Ok(())
}

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
        runs(&mut self.program)?;
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
    pub(super) fn begins_to_end(&mut self) -> anyhow::Result<()> {
        runs(&mut self.program)?;
        ask(|| self.program.signal(Signal::TERM))
    }

    /// Waits until the program has exited after SIGTERM.
    pub(super) async fn ends(&mut self) -> anyhow::Result<()> {
        let ended = exits(&mut self.program, EXIT_LIMIT).await;
        self.lives.ends(self.name);
        ended
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

#[cfg(test)]
mod tests {
    #![allow(clippy::unwrap_used)]
    use super::*;

    fn shell(script: &str) -> Unit {
        let args = vec!["-c".to_owned(), script.to_owned()];
        Unit::start("sh", "/bin/sh".into(), args, &Arc::default()).unwrap()
    }

    #[tokio::test]
    async fn program_that_crashed_before_its_signal_is_a_failure() {
        for event in [Unit::kill, Unit::begins_to_end] {
            let mut unit = shell("exit 3");
            unit.program.wait_exit(EXIT_LIMIT).await;
            let error = event(&mut unit).unwrap_err().to_string();
            assert_eq!(
                error,
                "the program has ended without a signal: exit status: 3"
            );
        }
    }

    #[tokio::test]
    async fn exit_code_after_sigterm_must_be_0() {
        for code in [0, 3] {
            let script =
                format!("trap 'exit {code}' TERM; echo waits; while :; do sleep 0.01; done");
            let mut unit = shell(&script);
            while !unit.program().log().contains("waits") {
                sleep(Duration::from_millis(10)).await;
            }
            let ended = unit.terminate().await.map_err(|error| error.to_string());
            let failed = Err("after SIGTERM: exit status: 3".to_owned());
            assert_eq!(ended, if code == 0 { Ok(()) } else { failed });
        }
    }
}
