//! A program of a topology.

use std::net::SocketAddr;
use std::path::PathBuf;

use super::PATIENCE;
use crate::metrics::http_get;
use crate::process::Program;
use crate::wait::eventually;

/// The start command and addresses of a program, and the program if it runs.
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
        assert!(self.program.is_none(), "{} is already running", self.name);
        self.program = Some(Program::spawn(&self.path, &self.args, &[]));
    }

    pub(super) fn running(&mut self) -> &mut Program {
        let name = &self.name;
        self.program
            .as_mut()
            .unwrap_or_else(|| panic!("{name} is not running"))
    }

    /// Waits until the health listener answers. Panics at once if the program exits.
    pub(super) async fn wait_for_health(&mut self) {
        let what = format!("{} is healthy", self.name);
        eventually(&what, PATIENCE, async || {
            if let Some(status) = self.running().exited() {
                panic!("{} exited during startup: {status}", self.name);
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
