//! Announcements of a server to its agents.

use culvert_native::control::Control;
use tokio::sync::watch;

/// State of this server that agents need to know.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct Announced {
    /// Number of servers that each agent should be connected to; 0 counts as 1.
    pub servers: i64,
    /// True if `servers` follows the servers. Agents then rely on the messages, and rarely look for more servers.
    pub follows: bool,
    /// True if this server stops soon.
    pub draining: bool,
}

/// Announcements to one agent.
pub(crate) struct Announcements {
    latest: watch::Receiver<Announced>,
    /// State that the agent knows.
    sent: Announced,
}

#[cfg(test)]
impl Announced {
    /// Returns a state that never changes.
    pub(crate) fn fixed(servers: i64) -> watch::Receiver<Self> {
        let state = Self {
            servers,
            follows: false,
            draining: false,
        };
        watch::channel(state).1
    }
}

impl Announcements {
    /// Creates the announcements to an agent whose introduction is answered with the count of `sent`. A server
    /// that drains already announces the drain after the introduction.
    pub(crate) fn after(sent: Announced, latest: watch::Receiver<Announced>) -> Self {
        let sent = Announced {
            draining: false,
            ..sent
        };
        Self { latest, sent }
    }

    /// Waits for a change, and returns its messages. Never resolves once the server has ended. Cancel safe.
    pub(crate) async fn next(&mut self) -> Vec<Control> {
        let sent = self.sent;
        let changed = self.latest.wait_for(|latest| *latest != sent).await;
        let Ok(now) = changed.map(|latest| *latest) else {
            return std::future::pending().await;
        };
        self.sent = now;
        let servers = (now.servers != sent.servers).then_some(Control::Servers(now.servers));
        let follows = (now.follows != sent.follows).then_some(Control::Follows(now.follows));
        let drain = (now.draining && !sent.draining).then_some(Control::Drain);
        [servers, follows, drain].into_iter().flatten().collect()
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    const FIRST: Announced = Announced {
        servers: 3,
        follows: true,
        draining: false,
    };

    #[tokio::test]
    async fn agent_receives_each_change_once() {
        let (state, latest) = watch::channel(FIRST);
        let mut announcements = Announcements::after(FIRST, latest.clone());
        state.send_modify(|state| state.servers = 5);
        assert_eq!(announcements.next().await, [Control::Servers(5)]);
        state.send_modify(|state| state.follows = false);
        assert_eq!(announcements.next().await, [Control::Follows(false)]);
        state.send_modify(|state| state.draining = true);
        assert_eq!(announcements.next().await, [Control::Drain]);
        // An agent that connects during the drain learns of the drain, too.
        let late = *latest.borrow();
        let mut announcements = Announcements::after(late, latest);
        assert_eq!(announcements.next().await, [Control::Drain]);
    }
}
