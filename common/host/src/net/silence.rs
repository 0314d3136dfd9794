//! Detection of dead peers that still have bytes to receive.
//!
//! TCP sends no keepalive probes to such a peer: TCP retransmits unacknowledged bytes for a quarter of an
//! hour, or sends window probes if the peer's window is closed. A user timeout would end both cases sooner,
//! but would also end a live peer that answers every window probe with a closed window. Here a peer is dead
//! only if the kernel has received nothing from it.

use std::os::fd::AsFd;
use std::time::Duration;

use super::options::tcp_info;

/// Number of retransmissions of the same bytes before silence means a dead peer. A peer whose window turns
/// out to be closed gets only one or two retransmissions, and then window probes; [`PROBES`] limits the
/// probes.
const RETRANSMITS: u8 = 3;

/// Number of unanswered window probes before silence means a dead peer. One probe may be in flight: the
/// kernel sends probes less and less often, in the end every two minutes, and receives nothing in between.
/// Another probe may have been lost.
const PROBES: u8 = 3;

/// The kernel's view of a peer.
#[derive(Clone, Copy, Debug)]
struct Seen {
    /// Time since the last segment from the peer.
    silent: Duration,
    /// Number of segments that the peer has not acknowledged.
    unacked: u32,
    /// Number of retransmissions of these segments without progress.
    retransmits: u8,
    /// Number of window probes since the last segment from the peer.
    probes: u8,
}

/// Returns true if the peer of a TCP socket has not answered retransmissions or window probes and has been
/// silent for `patience`. `patience` is the [`Keepalive::patience`](super::listen::Keepalive::patience) of
/// the same socket: an idle live peer answers keepalive probes within this time. A peer that reads nothing
/// but answers probes is alive.
pub fn is_gone(socket: &impl AsFd, patience: Duration) -> bool {
    // If the kernel does not report the state, TCP's own timeouts apply.
    tcp_info(socket).is_ok_and(|info| {
        let seen = Seen {
            // The later of the two segments counts: a peer that only receives sends acknowledgements but no
            // data, and a peer that only sends data never acknowledges new bytes.
            silent: Duration::from_millis(
                info.tcpi_last_ack_recv.min(info.tcpi_last_data_recv).into(),
            ),
            unacked: info.tcpi_unacked,
            retransmits: info.tcpi_retransmits,
            probes: info.tcpi_probes,
        };
        seen.is_gone(patience)
    })
}

/// Returns true if a TCP socket is of no further use: the peer has reset the connection, or both sides have
/// closed the connection.
pub fn is_over(socket: &impl AsFd) -> bool {
    /// State `TCP_CLOSE` in Linux.
    const CLOSE: u8 = 7;
    tcp_info(socket).is_ok_and(|info| info.tcpi_state == CLOSE)
}

impl Seen {
    fn is_gone(self, patience: Duration) -> bool {
        let is_asked =
            (self.unacked > 0 && self.retransmits >= RETRANSMITS) || self.probes >= PROBES;
        is_asked && self.silent >= patience
    }
}

#[cfg(test)]
mod tests {
    #![allow(clippy::unwrap_used)]

    use super::*;

    #[test]
    fn silence_counts_only_after_enough_retransmissions_or_probes() {
        let patience = Duration::from_secs(25);
        let gone = |seconds, unacked, retransmits, probes| {
            let silent = Duration::from_secs(seconds);
            let seen = Seen {
                silent,
                unacked,
                retransmits,
                probes,
            };
            seen.is_gone(patience)
        };
        assert!(gone(25, 1, 3, 0));
        assert!(gone(30, 0, 0, 3));
        // The last segment from the peer is too recent.
        assert!(!gone(24, 9, 9, 9));
        // Nothing is unacknowledged, or there were too few retransmissions and probes.
        assert!(!gone(3600, 0, 0, 0));
        assert!(!gone(3600, 1, 0, 0));
        assert!(!gone(3600, 2, 2, 2));
        // With a closed window, the last answer may be two minutes old.
        assert!(!gone(119, 0, 0, 2));
    }

    #[tokio::test]
    async fn file_is_not_a_dead_peer() {
        let file = tempfile::tempfile().unwrap();
        assert!(!is_gone(&file, Duration::ZERO));
    }
}
