//! The watch for a transport that carries nothing although it is not broken; no I/O.

use std::time::Duration;

use tokio::time::Instant;

/// Time without a byte from the server, while the agent has sent bytes that the server has not acknowledged, until
/// the agent looks for another transport.
pub(super) const SILENCE: Duration = Duration::from_secs(5);

/// Interval at which an agent with unacknowledged bytes looks for silence.
pub(super) const SILENCE_CHECK: Duration = Duration::from_millis(250);

/// Silence after which an agent pings the server once, so that the silence is noticed even if the agent has sent
/// nothing.
const QUIET: Duration = Duration::from_secs(1);

/// State of the watch.
#[derive(Debug, Default)]
pub(super) struct Silence {
    /// Number of reads with bytes so far.
    reads: u64,
    /// Value of `reads` at the last change that a look found, and its time. `None` while the link is idle.
    seen: Option<(u64, Instant)>,
    /// Bytes of streams at the last probe.
    probed: u64,
}

/// Result of a look.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Look {
    /// The peer has sent something.
    Heard,
    /// The silence is not long enough to act.
    Wait,
    /// A ping would prove that the transport works.
    Probe,
    /// The transport carries nothing.
    Silent,
}

impl Silence {
    /// Records a read with bytes.
    pub(super) fn read(&mut self) {
        self.reads += 1;
    }

    /// Begins again: the link is idle, or has another transport.
    pub(super) fn forget(&mut self) {
        self.seen = None;
    }

    /// Returns true if the silence of the peer matters. `owed`: bytes were sent that the peer has not acknowledged;
    /// `stream_bytes`: number of received bytes of all streams.
    pub(super) fn is_due(&self, owed: bool, stream_bytes: u64) -> bool {
        owed || self.probed != stream_bytes
    }

    /// Begins to measure, if the link was idle.
    pub(super) fn begin(&mut self) {
        let now = (self.reads, Instant::now());
        self.seen.get_or_insert(now);
    }

    /// Looks for reads since the last look. The parameters are as for [`is_due`](Self::is_due).
    pub(super) fn look(&mut self, owed: bool, stream_bytes: u64) -> Look {
        let Some((_, since)) = self.seen.filter(|seen| seen.0 == self.reads) else {
            self.seen = Some((self.reads, Instant::now()));
            return Look::Heard;
        };
        let quiet = since.elapsed();
        if quiet >= SILENCE && owed {
            Look::Silent
        } else if quiet >= QUIET && self.probed != stream_bytes {
            self.probed = stream_bytes;
            Look::Probe
        } else {
            Look::Wait
        }
    }
}
