//! The messages between peers inside the data channel, besides IP packets: pings, and messages of OpenVPN's
//! "options consistency check" (OCC). Only the exit notification of the OCC is still in use.

#[cfg(test)]
mod tests;

/// Ping payload, which restarts the peer's timeout. Never forwarded.
pub const PING: [u8; 16] = [
    0x2a, 0x18, 0x7b, 0xf3, 0x64, 0x1e, 0xb4, 0xcb, 0x07, 0xed, 0x2d, 0x0a, 0x98, 0x1f, 0xc7, 0x48,
];

const OCC_MAGIC: [u8; 16] = [
    0x28, 0x7f, 0x34, 0x6b, 0xd4, 0xef, 0x7a, 0x81, 0x2d, 0x56, 0xb8, 0xd3, 0xaf, 0xc5, 0x45, 0x9c,
];

const OCC_EXIT: u8 = 6;

/// Exit notification that every OpenVPN version understands.
pub(crate) const EXIT: [u8; 17] = {
    let mut exit = [OCC_EXIT; 17];
    let (magic, _) = exit.split_at_mut(16);
    magic.copy_from_slice(&OCC_MAGIC);
    exit
};

/// Kind of a payload, without compression framing.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Payload<'a> {
    /// An inner packet to be routed, not checked further.
    Inner(&'a [u8]),
    /// A ping.
    Ping,
    /// The peer's exit notification.
    Exit,
    /// Another OCC message, which needs no answer.
    Occ,
}

impl<'a> Payload<'a> {
    /// Determines the kind of a payload.
    pub fn classify(payload: &'a [u8]) -> Self {
        if payload == PING {
            return Self::Ping;
        }
        match payload.strip_prefix(&OCC_MAGIC) {
            None => Self::Inner(payload),
            Some([OCC_EXIT, ..]) => Self::Exit,
            Some(_) => Self::Occ,
        }
    }
}
