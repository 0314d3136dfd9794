//! The counters of a session: traffic, and dropped packets by cause.

use thiserror::Error;

/// Reason why a packet was dropped. [`Stats`] counts every dropped packet; the owner need not act.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Error)]
#[non_exhaustive]
pub enum Dropped {
    /// Packet that is truncated or not OpenVPN, for example with an unknown opcode.
    #[error("malformed packet")]
    Malformed,
    /// Packet with an unsupported opcode: key method 1 or tls-crypt-v2.
    #[error("unsupported opcode")]
    Unsupported,
    /// Control packet with a mismatch of tls-auth or tls-crypt: wrong key, direction or digest, or no wrap.
    #[error("tls-auth or tls-crypt mismatch")]
    BadWrap,
    /// Control packet with a repeated packet id of tls-auth or tls-crypt.
    #[error("replayed control packet")]
    ReplayedControl,
    /// Control packet of another session.
    #[error("control packet of another session")]
    WrongSession,
    /// Control packet for a key that is not, or no longer, being negotiated.
    #[error("control packet for another key")]
    WrongKey,
    /// Control message beyond the receive window, or with a full queue of acknowledgements.
    #[error("control message outside of the window")]
    OutOfWindow,
    /// Data with a key id that has no keys yet, or no longer.
    #[error("data for an unknown key")]
    UnknownKey,
    /// Data that fails authentication.
    #[error("data does not authenticate")]
    BadData,
    /// Data with a packet id that was used before or is too old.
    #[error("replayed data packet")]
    ReplayedData,
    /// Compressed data, or a compression framing that was not agreed.
    #[error("compressed data")]
    Compressed,
    /// Packet after the end of the session.
    #[error("the session has ended")]
    Ended,
}

/// Counters of one session. No counter ever decreases.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Stats {
    /// Inner packets received, without pings and other internal messages.
    pub packets_in: u64,
    /// Bytes of the inner packets received.
    pub bytes_in: u64,
    /// Inner packets sent.
    pub packets_out: u64,
    /// Bytes of the inner packets sent.
    pub bytes_out: u64,
    /// Renegotiations that succeeded.
    pub rekeys: u64,
    /// Renegotiations that failed: the old keys stayed in use, or the session ended.
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
