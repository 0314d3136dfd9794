//! What peers say to each other inside of the data channel, beside IP packets: pings, and the messages
//! of the "options consistency check", of which only the exit notification is still alive.

#[cfg(test)]
mod tests;

/// Keeps the peer's timer from running out. Never forwarded.
pub const PING: [u8; 16] = [
    0x2a, 0x18, 0x7b, 0xf3, 0x64, 0x1e, 0xb4, 0xcb, 0x07, 0xed, 0x2d, 0x0a, 0x98, 0x1f, 0xc7, 0x48,
];

const OCC_MAGIC: [u8; 16] = [
    0x28, 0x7f, 0x34, 0x6b, 0xd4, 0xef, 0x7a, 0x81, 0x2d, 0x56, 0xb8, 0xd3, 0xaf, 0xc5, 0x45, 0x9c,
];

const OCC_EXIT: u8 = 6;

/// The exit notification that every version understands.
pub const EXIT: [u8; 17] = {
    let mut exit = [OCC_EXIT; 17];
    let (magic, _) = exit.split_at_mut(16);
    magic.copy_from_slice(&OCC_MAGIC);
    exit
};

/// What a payload is, without any compression framing.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Payload<'a> {
    /// To be routed; not checked any further.
    Inner(&'a [u8]),
    /// Nothing but a sign of life.
    Ping,
    /// The peer goes away.
    Exit,
    /// Another message of the consistency check, which needs no answer.
    Occ,
}

impl<'a> Payload<'a> {
    /// Tells them apart.
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
