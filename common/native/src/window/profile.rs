//! The bounds of a window.

use std::time::Duration;

/// Window of a short path and initial window of a Konnectivity connection, in bytes. Smaller windows cost
/// processor time, because the two ends wait for each other more often (docs/decisions/0008).
pub const SHORT_PATH_BYTES: u32 = 1024 * 1024;

/// Window of a short path, in bytes, while small streams are active alongside bulk traffic. Small streams
/// queue behind up to this much bulk data.
pub const BESIDE_BYTES: u32 = 64 * 1024;

/// Largest window, in bytes: 210 MiB/s at 100 ms. Up to a third of the window is not available to the sender,
/// because `h2` sends a window update only once the released bytes amount to half of the remaining window.
pub const LONG_PATH_BYTES: u32 = 32 * 1024 * 1024;

/// Smallest window, in bytes, for a connection with many unread bytes in stalled streams.
pub const CROWDED_BYTES: u32 = 64 * 1024;

/// Smallest window of a packet stream, in bytes: while small messages flow alongside bulk, and while many bytes are
/// unread. A smaller window costs a stock agent throughput (docs/decisions/0017).
pub const PACKETS_BESIDE_BYTES: u32 = 256 * 1024;

/// Largest number of bytes that a stock server has not read, on a short path. A smaller limit costs throughput
/// (docs/decisions/0017).
pub const PACKETS_AHEAD_BYTES: u32 = 512 * 1024;

/// Round trip up to which [`PACKETS_AHEAD_BYTES`] suffice for 2 GiB/s. The limit grows with the round trip, up to four times
/// these bytes at 1 ms. Longer paths have no limit.
pub const AHEAD_ROUND_TRIP: Duration = Duration::from_micros(250);

/// Longest round trip with a limit, as a multiple of [`AHEAD_ROUND_TRIP`].
pub const AHEAD_ROUND_TRIPS: f64 = 4.0;

/// Largest window of a packet stream, in bytes: 106 MiB/s at 100 ms. grpc-go's window grows to the same size.
pub const PACKETS_LONG_PATH_BYTES: u32 = 16 * 1024 * 1024;

/// Window of a packet stream before the admission of the peer, in bytes: HTTP/2's default (RFC 9113, 6.9.2).
const UNADMITTED_BYTES: u32 = 65_535;

/// Bounds of the window of a connection.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub enum WindowProfile {
    /// Native Konnectivity connections: each stream has [`SHORT_PATH_BYTES`], and [`BESIDE_BYTES`] while small
    /// streams are active alongside bulk traffic.
    #[default]
    Shared,
    /// Connections whose streams have a given window in bytes, which small streams do not shrink.
    Fixed(u32),
    /// Connections of a packet stream: the connection has [`SHORT_PATH_BYTES`], and [`PACKETS_BESIDE_BYTES`] while
    /// small messages flow alongside bulk traffic. Before [`Inbound::admit`](super::Inbound::admit), the connection has HTTP/2's default
    /// window, and nothing is measured.
    Packets,
    /// Connections from the same machine or network: each stream has a given window in bytes, which never changes. Only a
    /// silent peer is pinged.
    Unmeasured(u32),
}

impl WindowProfile {
    /// Returns the initial window, which is also the window of a short path, in bytes.
    pub(super) fn short_path(self) -> u32 {
        match self {
            Self::Shared | Self::Packets => SHORT_PATH_BYTES,
            Self::Fixed(bytes) | Self::Unmeasured(bytes) => bytes,
        }
    }

    /// Returns the window of a short path, in bytes, while small streams are active alongside bulk traffic.
    pub(super) fn beside(self) -> u32 {
        match self {
            Self::Shared => BESIDE_BYTES,
            Self::Fixed(bytes) | Self::Unmeasured(bytes) => bytes,
            Self::Packets => PACKETS_BESIDE_BYTES,
        }
    }

    /// Returns true if the connection has the window, and not each stream.
    pub(super) fn is_of_connection(self) -> bool {
        self == Self::Packets
    }

    /// Returns the window at the start of a connection, in bytes.
    pub(super) fn initial(self) -> u32 {
        match self {
            Self::Packets => UNADMITTED_BYTES,
            Self::Shared | Self::Fixed(_) | Self::Unmeasured(_) => self.short_path(),
        }
    }

    /// Returns true if the path is measured.
    pub(super) fn is_measured(self) -> bool {
        !matches!(self, Self::Unmeasured(_))
    }

    /// Returns the smallest and the largest window, in bytes.
    pub(super) fn limits(self) -> (u32, u32) {
        match self {
            Self::Shared | Self::Fixed(_) => (CROWDED_BYTES, LONG_PATH_BYTES),
            Self::Packets => (PACKETS_BESIDE_BYTES, PACKETS_LONG_PATH_BYTES),
            Self::Unmeasured(bytes) => (bytes, bytes),
        }
    }
}
