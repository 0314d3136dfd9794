//! One program of a topology.

use std::net::SocketAddr;
use std::path::PathBuf;

use super::PATIENCE;
use crate::metrics::http_get;
use crate::process::Program;
use crate::wait::eventually;

/// How to start it, and the running program if it runs.
#[derive(Debug)]
pub(super) struct Member {
    pub(super) name: String,
    pub(super) path: PathBuf,
    pub(super) args: Vec<String>,
    pub(super) health: SocketAddr,
    pub(super) admin: SocketAddr,
    pub(super) program: Option<Program>,
}

impl Member {
    pub(super) fn start(&mut self) {
        assert!(self.program.is_none(), "{} runs already", self.name);
        self.program = Some(Program::spawn(&self.path, &self.args, &[]));
    }

    pub(super) fn running(&mut self) -> &mut Program {
        let name = &self.name;
        self.program
            .as_mut()
            .unwrap_or_else(|| panic!("{name} does not run"))
    }

    /// Waits until the health listener answers; a program that ends meanwhile fails at once.
    pub(super) async fn wait_for_health(&mut self) {
        let what = format!("{} is healthy", self.name);
        eventually(&what, PATIENCE, async || {
            if let Some(status) = self.running().exited() {
                panic!("{} ended at its start: {status}", self.name);
            }
            match http_get(self.health, "/healthz").await {
                Ok((status, ..)) if status.is_success() => Ok(()),
                Ok((status, ..)) => Err(status.to_string()),
                Err(error) => Err(format!("{error:#}")),
            }
        })
        .await;
    }
}
