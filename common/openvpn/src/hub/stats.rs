//! Counters of a hub, besides the counters of its sessions.

/// Counters since the start.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct HubStats {
    /// First packets that were answered.
    pub answers: u64,
    /// First packets without an answer: too many answers were waiting.
    pub answers_dropped: u64,
    /// Echoed answers that were wrong or too old.
    pub bad_cookies: u64,
    /// Control packets that are malformed or not supported.
    pub malformed: u64,
    /// Packets without a session.
    pub unknown: u64,
    /// Packets without a session that tls-auth or tls-crypt rejected, or that only a wrap explains.
    pub bad_wrap: u64,
    /// Sessions that were dropped before they were established, to make room for a new session.
    pub evicted: u64,
    /// Clients that were turned away because all sessions were in use.
    pub full: u64,
    /// Echoed answers that were dropped because too many clients waited for a session.
    pub starts_dropped: u64,
    /// Sessions that moved to another address.
    pub moved: u64,
    /// Established sessions that were replaced by a new session of the client at the same address.
    pub replaced: u64,
}
