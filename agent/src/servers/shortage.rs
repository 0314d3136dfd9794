//! The report that attempts reach only connected servers while servers are missing.

use std::time::Duration;

use tokio::time::Instant;

use crate::search::{Outcome, View};

/// Time for which attempts reach only connected servers until the log mentions it. A new server is found earlier.
const SHORTAGE: Duration = Duration::from_secs(60);

/// Notices that attempts reach only connected servers while servers are missing.
#[derive(Default)]
pub(super) struct Shortage {
    /// Time of the first such attempt; `None` if no server is missing.
    since: Option<Instant>,
    is_logged: bool,
}

// === impl Shortage ===

impl Shortage {
    /// Accounts for the end of an attempt. Returns true once, if servers have been missing for [`SHORTAGE`].
    pub(super) fn is_due(&mut self, now: Instant, outcome: Outcome, view: View) -> bool {
        if outcome == Outcome::Added || view.connected >= view.announced {
            *self = Self::default();
            return false;
        }
        if outcome == Outcome::Failed {
            return false;
        }
        let since = *self.since.get_or_insert(now);
        let is_due = !self.is_logged && now.duration_since(since) >= SHORTAGE;
        self.is_logged |= is_due;
        is_due
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[tokio::test(start_paused = true)]
    async fn missing_servers_are_reported_once_if_all_attempts_reach_connected_servers() {
        let view = |connected| View {
            connected,
            announced: 2,
            follows: false,
        };
        let mut shortage = Shortage::default();
        let mut after = async |seconds, outcome, connected| {
            tokio::time::advance(Duration::from_secs(seconds)).await;
            shortage.is_due(Instant::now(), outcome, view(connected))
        };
        assert!(!after(0, Outcome::Failed, 1).await);
        assert!(!after(90, Outcome::Duplicate, 1).await);
        assert!(!after(59, Outcome::Duplicate, 1).await);
        assert!(after(1, Outcome::Duplicate, 1).await);
        assert!(!after(90, Outcome::Duplicate, 1).await);
        // The next shortage is another one.
        assert!(!after(1, Outcome::Added, 2).await);
        assert!(!after(1, Outcome::Duplicate, 1).await);
        assert!(after(60, Outcome::Duplicate, 1).await);
    }
}
