//! Peers that are gone while bytes are on their way to them.
//!
//! TCP sends no keepalive probes then: it sends the bytes again, for a quarter of an hour, or asks
//! whether there is room for them at last. A user timeout would end both sooner, but also a peer
//! that answers each time that there is none. Here only a peer counts as gone of which nothing at all
//! was heard.

use std::os::fd::AsFd;
use std::time::Duration;

use nix::sys::socket::getsockopt;

use super::options::TcpInfo;

/// How often the same bytes have to be sent again. They are sent again once or twice to a peer that
/// turns out to have no room; from then on its kind of silence is counted by [`PROBES`].
const RETRANSMITS: u8 = 3;

/// How many questions for room have to stay without an answer. One may be on its way: the kernel asks
/// more and more seldom, every two minutes in the end, and hears nothing in between. Another may have
/// been lost.
const PROBES: u8 = 3;

/// What the kernel has seen of a peer.
#[derive(Clone, Copy, Debug)]
struct Seen {
    /// Since its last sign of life.
    silent: Duration,
    /// Segments it has not acknowledged.
    unacked: u32,
    /// How often they were sent again without a step forward.
    retransmits: u8,
    /// Questions since its last sign of life.
    probes: u8,
}

/// Whether the peer of a TCP socket was asked for an answer and has been silent for `patience`, which
/// is [`Keepalive::patience`](super::listen::Keepalive::patience) of the same socket: whoever idles is
/// heard more often than that. A peer that reads nothing but answers is there.
pub fn is_gone(socket: &impl AsFd, patience: Duration) -> bool {
    // Where the kernel does not say, TCP finds out by itself.
    getsockopt(socket, TcpInfo).is_ok_and(|info| {
        let seen = Seen {
            // Who only sends acknowledges nothing new, and who only listens sends nothing.
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

/// Whether a TCP socket is of no use any more: its peer has reset the connection, or both have ended it.
pub fn is_over(socket: &impl AsFd) -> bool {
    /// Linux, `TCP_CLOSE`.
    const CLOSE: u8 = 7;
    getsockopt(socket, TcpInfo).is_ok_and(|info| info.tcpi_state == CLOSE)
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
    fn silence_counts_once_the_peer_was_asked() {
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
        // It was heard.
        assert!(!gone(24, 9, 9, 9));
        // Nothing waits for it, or it has hardly been asked.
        assert!(!gone(3600, 0, 0, 0));
        assert!(!gone(3600, 1, 0, 0));
        assert!(!gone(3600, 2, 2, 2));
        // The last of a closed window's answers may be two minutes old.
        assert!(!gone(119, 0, 0, 2));
    }

    #[tokio::test]
    async fn what_is_no_connection_is_not_gone() {
        let file = tempfile::tempfile().unwrap();
        assert!(!is_gone(&file, Duration::ZERO));
    }
}
