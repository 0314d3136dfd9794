//! What a hub counts beside its sessions.

/// Counters. They only grow.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct HubStats {
    /// First packets that were answered, without a session.
    pub answers: u64,
    /// First packets that were not, as too many answers waited to be sent.
    pub answers_dropped: u64,
    /// Echoes of answers that were not ours, or too old.
    pub bad_cookies: u64,
    /// No OpenVPN packet, or one that is not spoken.
    pub malformed: u64,
    /// Packets of no session.
    pub unknown: u64,
    /// Packets of no session that tls-auth or tls-crypt did not let pass.
    pub bad_wrap: u64,
    /// Sessions that were not established yet and had to go for a new one.
    pub evicted: u64,
    /// Clients that were turned away, all sessions being in use.
    pub full: u64,
    /// Sessions that moved to another address.
    pub moved: u64,
    /// Sessions whose client came again.
    pub replaced: u64,
}
