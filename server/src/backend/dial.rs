//! The errors of a dial, and the peers that it tries.

use std::sync::atomic::{AtomicU64, Ordering};
use std::time::Duration;

use culvert_host::net::destinations::Denial;
use culvert_stream::{AGENT_DIAL_TIMEOUT, Dial};

/// Time for a peer to answer a dial if another peer could take the dial: the longest dial of an agent, and 2 s on the
/// network.
pub(crate) const ANSWER_TIMEOUT: Duration =
    AGENT_DIAL_TIMEOUT.saturating_add(Duration::from_secs(2));

/// Longest address or protocol of a dial, in bytes. `h2` ends a connection, with all its streams, at a head of more than
/// four times the largest accepted head: 256 KiB at a native agent.
pub(crate) const MAX_ADDRESS_BYTES: usize = 4096;

/// Maximum number of peers of one tunnel that a dial tries. Lost peers do not count, because a dial learns of the
/// loss at once.
const MAX_ATTEMPTS: usize = 3;

/// Reason for a failed dial on a stream.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
pub enum StreamDialError {
    /// The agent could not reach the endpoint; the text is the agent's, see [`StreamDialError::refused`].
    #[error("{0}")]
    Refused(String),
    /// The agent abandoned the dial.
    #[error("the agent abandoned the dial")]
    Abandoned,
    /// The stream ended before the agent answered.
    #[error("the agent's stream ended while the dial was pending")]
    AgentLost,
    /// The OpenVPN client left before the endpoint answered.
    #[error("the OpenVPN client disconnected while the dial was pending")]
    ClientLost,
    /// The agent accepted no packet before the deadline.
    #[error("timed out waiting for backend dial")]
    NotSent,
    /// The agent did not answer before the deadline.
    #[error("timed out waiting for backend dial")]
    TimedOut,
}

/// Longest text of an agent for clients and the log, in bytes. An agent may send 4 MiB.
const MAX_TEXT_BYTES: usize = 1024;

/// Cuts a long text of an agent.
pub(super) fn cut(mut text: String) -> String {
    let kept = text.floor_char_boundary(MAX_TEXT_BYTES);
    let rest = text.len() - kept;
    if rest > 0 {
        text.truncate(kept);
        text.push_str(&format!("... ({rest} more bytes)"));
    }
    text
}

impl StreamDialError {
    /// Returns the error for an agent's text. A long text is cut.
    pub fn refused(text: String) -> Self {
        Self::Refused(cut(text))
    }
}

/// Reason why no tunnel could open a connection.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
pub enum DialError {
    /// No agent is connected.
    #[error("No agent available")]
    NoAgent,
    /// No connected OpenVPN client has a route to the address.
    #[error("No OpenVPN client available")]
    NoClient,
    /// OpenVPN cannot carry the dial: the address is IPv6 or a name unknown to this server. An agent may
    /// succeed.
    #[error("{0}")]
    Uncarried(String),
    /// The address or the protocol has this number of bytes, which is too many. No peer got the dial.
    #[error(
        "the address or protocol to dial has {0} bytes, and the limit is {MAX_ADDRESS_BYTES}: a host name has at most 253"
    )]
    TooLong(usize),
    /// Too many dials wait for an answer. No peer got the dial.
    #[error("No agent available: {0} dials wait for an answer, the limit of --max-pending-dials")]
    TooManyDials(usize),
    /// The policy for destinations denied the dial. No peer got the dial.
    #[error("{0}")]
    Denied(String),
    /// The dial failed at a peer: the error, and the id of the agent or the name of the OpenVPN client, if known.
    #[error("{0}")]
    Stream(StreamDialError, Option<Box<str>>),
}

/// Peers of one tunnel that a dial has tried, by their identifiers.
pub(crate) struct Attempts<I> {
    tried: Vec<I>,
    /// Number of peers that failed and count.
    failed: usize,
    /// Error of the last peer.
    last: DialError,
}

/// Returns a number for a new stream of any transport, unique in this process.
pub(crate) fn next_serial() -> u64 {
    static SERIAL: AtomicU64 = AtomicU64::new(1);
    SERIAL.fetch_add(1, Ordering::Relaxed)
}

// === impl Attempts ===

impl<I> Attempts<I> {
    /// Creates the attempts of a dial that fails with `no_peer` if no peer can be tried.
    pub(crate) fn new(no_peer: DialError) -> Self {
        Self {
            tried: Vec::new(),
            failed: 0,
            last: no_peer,
        }
    }

    /// Returns the next peer to try. `choose` chooses a peer that was not tried yet; `id` identifies the peer.
    ///
    /// # Errors
    /// Returns the error of the last peer if no peer is left or too many peers failed.
    pub(crate) fn next<P>(
        &mut self,
        choose: impl FnOnce(&[I]) -> Option<P>,
        id: impl FnOnce(&P) -> I,
    ) -> Result<P, DialError> {
        if self.failed < MAX_ATTEMPTS
            && let Some(peer) = choose(&self.tried)
        {
            self.tried.push(id(&peer));
            return Ok(peer);
        }
        Err(self.last.clone())
    }

    /// Returns true if the dial may move from the current peer to another.
    pub(crate) fn may_move(&self) -> bool {
        self.failed + 1 < MAX_ATTEMPTS
    }

    /// Returns the error of the last peer; `None` for the first peer.
    pub(crate) fn moved(&self) -> Option<&DialError> {
        (self.tried.len() > 1).then_some(&self.last)
    }

    /// Returns the peers tried so far, including the current peer.
    pub(crate) fn tried(&self) -> &[I] {
        &self.tried
    }

    /// Records the error of the current peer.
    pub(crate) fn failed(&mut self, error: DialError) {
        let is_lost = matches!(
            error,
            DialError::Stream(StreamDialError::AgentLost | StreamDialError::ClientLost, _)
        );
        self.failed += usize::from(!is_lost);
        self.last = error;
    }
}

// === impl DialError ===

impl From<StreamDialError> for DialError {
    fn from(error: StreamDialError) -> Self {
        Self::Stream(error, None)
    }
}

impl DialError {
    /// Adds the peer at which the dial failed.
    #[must_use]
    pub(crate) fn at(self, peer: &str) -> Self {
        match self {
            Self::Stream(error, _) => Self::Stream(error, Some(peer.into())),
            error => error,
        }
    }

    /// Returns the peer at which the dial failed, if known.
    pub(crate) fn peer(&self) -> Option<&str> {
        match self {
            Self::Stream(_, peer) => peer.as_deref(),
            _ => None,
        }
    }

    /// Returns true if no other tunnel may be tried: a peer tried the endpoint and failed, or the dial is
    /// denied.
    pub fn is_final(&self) -> bool {
        matches!(
            self,
            Self::Denied(_)
                | Self::TooLong(_)
                | Self::TooManyDials(_)
                | Self::Stream(StreamDialError::Refused(_), _)
        )
    }

    /// Creates the error for a denied dial.
    pub(crate) fn denied(dial: &Dial, denial: Denial) -> Self {
        Self::Denied(format!("dial {} {}: {denial}", dial.protocol, dial.address))
    }
}

#[cfg(test)]
mod tests {
    #![allow(clippy::unwrap_used)]

    use super::*;

    #[test]
    fn long_text_of_an_agent_is_cut_between_characters() {
        assert_eq!(cut("no route".to_owned()), "no route");
        // Each character has three bytes.
        let long = cut("€".repeat(1000));
        let expected = format!("{}... (1977 more bytes)", "€".repeat(341));
        assert_eq!(long, expected);
    }

    #[test]
    fn slow_peers_are_limited_and_lost_peers_do_not_count() {
        let mut attempts = Attempts::new(DialError::NoAgent);
        let mut next = 0;
        let mut fail = |attempts: &mut Attempts<u32>, error: StreamDialError| {
            next += 1;
            let peer = attempts.next(|_| Some(next), |peer| *peer);
            attempts.failed(error.into());
            peer
        };
        for _ in 0..10 {
            fail(&mut attempts, StreamDialError::AgentLost).unwrap();
            fail(&mut attempts, StreamDialError::ClientLost).unwrap();
        }
        for slow in 1..=MAX_ATTEMPTS {
            assert_eq!(attempts.may_move(), slow < MAX_ATTEMPTS);
            fail(&mut attempts, StreamDialError::TimedOut).unwrap();
        }
        let error = fail(&mut attempts, StreamDialError::AgentLost).unwrap_err();
        assert_eq!(error, DialError::from(StreamDialError::TimedOut));
    }
}
