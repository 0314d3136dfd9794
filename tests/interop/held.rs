//! A connection kept open during other events.

use culvert_tests::{Program, eventually};
use serde_json::Value;

use crate::case::LIMIT;

/// A connection to an echo service, kept open by a separate driver process.
#[derive(Debug)]
pub(crate) struct Held {
    driver: Program,
}

impl Held {
    /// Wraps a driver with the `hold` command, and waits until the connection is open.
    ///
    /// # Panics
    /// If the driver cannot open the connection.
    pub(crate) async fn open(driver: Program) -> Self {
        let held = Self { driver };
        let first = held.event("the connection is open", |_| true).await;
        assert_eq!(first["event"], "open", "{first}");
        held
    }

    /// Sends a line and waits for the echo.
    ///
    /// # Panics
    /// If the echo does not arrive.
    pub(crate) async fn echoes(&mut self, line: &str) {
        self.send(line);
        self.hears(line).await;
    }

    /// Sends a line.
    pub(crate) fn send(&mut self, line: &str) {
        self.driver.send_line(line);
    }

    /// Waits for the echo of a line.
    ///
    /// # Panics
    /// If the echo does not arrive.
    pub(crate) async fn hears(&self, line: &str) {
        self.event("the line is back", |event| event["line"] == line)
            .await;
    }

    /// Returns the echoed lines so far, in order.
    pub(crate) fn heard(&self) -> Vec<String> {
        let events = self.events();
        let lines = events.iter().filter_map(|event| event["line"].as_str());
        lines.map(str::to_owned).collect()
    }

    /// Waits until the other side has closed the connection.
    ///
    /// # Panics
    /// If the connection stays open, or if the driver itself closed the connection.
    pub(crate) async fn ends(self) {
        let end = self.event("the connection ends", |event| event["event"] == "closed");
        let end = end.await;
        assert_ne!(end["how"], "self", "{end}");
    }

    async fn event(&self, what: &str, wanted: impl Fn(&Value) -> bool) -> Value {
        eventually(what, LIMIT, async || {
            let events = self.events();
            let count = events.len();
            let found = events.into_iter().find(|event| wanted(event));
            found.ok_or_else(|| format!("{count} other events"))
        })
        .await
    }

    /// Returns the events printed by the driver. The driver's other lines are for people.
    fn events(&self) -> Vec<Value> {
        let log = self.driver.log();
        let lines = log.lines().filter(|line| line.starts_with('{'));
        lines
            .filter_map(|line| serde_json::from_str(line).ok())
            .collect()
    }
}
