//! What a session counts: traffic, and everything that was dropped, by cause.

use thiserror::Error;

/// Why a packet was dropped. Each is counted in [`Stats`]; none needs an answer.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Error)]
#[non_exhaustive]
pub enum Dropped {
    /// No OpenVPN packet, or a truncated one.
    #[error("malformed packet")]
    Malformed,
    /// An opcode that is not spoken: key method 1, tls-crypt-v2, or an unknown one.
    #[error("unsupported opcode")]
    Unsupported,
    /// tls-auth or tls-crypt do not match: wrong key, direction or digest, or not wrapped at all.
    #[error("tls-auth or tls-crypt mismatch")]
    BadWrap,
    /// A control packet whose packet id in tls-auth or tls-crypt was used before.
    #[error("replayed control packet")]
    ReplayedControl,
    /// A control packet of another session.
    #[error("control packet of another session")]
    WrongSession,
    /// A control packet for a key that is not, or no longer, negotiated.
    #[error("control packet for another key")]
    WrongKey,
    /// A control message too far ahead, or more than fit.
    #[error("control message outside of the window")]
    OutOfWindow,
    /// Data with a key id for which there are no keys (yet, or any more).
    #[error("data for an unknown key")]
    UnknownKey,
    /// Data that does not authenticate.
    #[error("data does not authenticate")]
    BadData,
    /// Data whose packet id was used before, or is too old.
    #[error("replayed data packet")]
    ReplayedData,
    /// Compressed data, or a compression framing that was not agreed.
    #[error("compressed data")]
    Compressed,
    /// The session has ended.
    #[error("the session has ended")]
    Ended,
}

/// Counters of one session. They only grow.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Stats {
    /// Inner packets received, pings and the like not counted.
    pub packets_in: u64,
    /// Their bytes.
    pub bytes_in: u64,
    /// Inner packets sent.
    pub packets_out: u64,
    /// Their bytes.
    pub bytes_out: u64,
    /// Renegotiations that ended well.
    pub rekeys: u64,
    /// Renegotiations that were given up, the old keys staying in use.
    pub rekeys_failed: u64,
    /// See [`Dropped::Malformed`].
    pub malformed: u64,
    /// See [`Dropped::Unsupported`].
    pub unsupported: u64,
    /// See [`Dropped::BadWrap`].
    pub bad_wrap: u64,
    /// See [`Dropped::ReplayedControl`].
    pub replayed_control: u64,
    /// See [`Dropped::WrongSession`].
    pub wrong_session: u64,
    /// See [`Dropped::WrongKey`].
    pub wrong_key: u64,
    /// See [`Dropped::OutOfWindow`].
    pub out_of_window: u64,
    /// See [`Dropped::UnknownKey`].
    pub unknown_key: u64,
    /// See [`Dropped::BadData`].
    pub bad_data: u64,
    /// See [`Dropped::ReplayedData`].
    pub replayed_data: u64,
    /// See [`Dropped::Compressed`].
    pub compressed: u64,
    /// See [`Dropped::Ended`].
    pub after_end: u64,
}

impl Stats {
    /// Counts what was dropped.
    pub(crate) fn count(&mut self, dropped: Dropped) {
        let counter = match dropped {
            Dropped::Malformed => &mut self.malformed,
            Dropped::Unsupported => &mut self.unsupported,
            Dropped::BadWrap => &mut self.bad_wrap,
            Dropped::ReplayedControl => &mut self.replayed_control,
            Dropped::WrongSession => &mut self.wrong_session,
            Dropped::WrongKey => &mut self.wrong_key,
            Dropped::OutOfWindow => &mut self.out_of_window,
            Dropped::UnknownKey => &mut self.unknown_key,
            Dropped::BadData => &mut self.bad_data,
            Dropped::ReplayedData => &mut self.replayed_data,
            Dropped::Compressed => &mut self.compressed,
            Dropped::Ended => &mut self.after_end,
        };
        *counter += 1;
    }
}
