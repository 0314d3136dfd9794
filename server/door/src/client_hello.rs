//! The server name in a TLS ClientHello, by which a connection is routed without decrypting it.
//!
//! Does no I/O: the caller collects what the client sends, asks a [`HelloReader`] whether the hello
//! is complete, and later forwards the very bytes it has collected. Nothing of a hello is judged but
//! what is needed to find the name: which versions, ciphers and extensions are good is for the
//! endpoint to say. Of an encrypted hello (ECH) the outer name counts; the inner one can not be read.

#[cfg(test)]
pub(crate) mod tests;

use rustls_pki_types::DnsName;

use HelloError::{BadName, Malformed, NotHandshake, NotTls, TooLarge};

/// The largest ClientHello in bytes, as a handshake message with its head.
///
/// It is what one record can carry. Hellos have 200 to 2,000 bytes, the large ones with post-quantum
/// key shares. More room would only be memory that anybody can claim.
pub const MAX_HELLO_BYTES: usize = MAX_RECORD_BYTES;

/// What a caller has to keep at most, in bytes: a hello that does not end within them is refused.
///
/// A hello may be cut into records as small as a byte, each with a head of five bytes. The heads get
/// as much room as the hello: enough for the largest one in records of six bytes, or for one of
/// 5,461 bytes in records of one.
pub const MAX_RECEIVED_BYTES: usize = 2 * MAX_HELLO_BYTES;

/// The largest payload of an unencrypted record, in bytes (RFC 8446, section 5.1).
const MAX_RECORD_BYTES: usize = 1 << 14;

/// Content type, legacy version and length.
const RECORD_HEAD_BYTES: usize = 5;

/// Message type and length.
const MESSAGE_HEAD_BYTES: usize = 4;

/// The fields of fixed size at the start of a hello: `legacy_version` and `random`.
const VERSION_AND_RANDOM_BYTES: usize = 2 + 32;

// Content types of records (RFC 8446, section 5.1).
const CHANGE_CIPHER_SPEC: u8 = 20;
const ALERT: u8 = 21;
const HANDSHAKE: u8 = 22;
const APPLICATION_DATA: u8 = 23;

/// The first byte of every version from SSL 3.0 to TLS 1.3.
const MAJOR_VERSION: u8 = 3;

/// The type of the handshake message (RFC 8446, section 4).
const CLIENT_HELLO: u8 = 1;

/// The type of the extension (RFC 6066, section 3).
const SERVER_NAME: u16 = 0;

/// The type of a name in that extension; no other was ever defined.
const HOST_NAME: u8 = 0;

/// What a ClientHello says about where its connection belongs.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Hello {
    /// A DNS name in lower case without a dot at its end. `None` if the hello has no `server_name`
    /// extension, or one without a host name.
    pub server_name: Option<String>,
}

/// Why a connection can not be routed by its ClientHello.
#[derive(Clone, Copy, Debug, PartialEq, Eq, thiserror::Error)]
pub enum HelloError {
    /// The first bytes are no TLS record; an SSL 2.0 hello is none either.
    #[error("the client does not speak TLS; point it at a port that serves its protocol")]
    NotTls,
    /// A record or a handshake message of another type comes first, or amid the hello.
    #[error("the client speaks TLS but sent something other than a ClientHello; check the client")]
    NotHandshake,
    /// More than [`MAX_HELLO_BYTES`] or [`MAX_RECEIVED_BYTES`].
    #[error(
        "the ClientHello is larger than {MAX_HELLO_BYTES} bytes, or than {MAX_RECEIVED_BYTES} bytes with the heads of its records; let the client offer less, or send larger records"
    )]
    TooLarge,
    /// Lengths disagree, a record is empty, something follows in the hello's last record, or there
    /// is more than one server name.
    #[error(
        "the ClientHello is malformed: its lengths disagree, or it has more than one server name; check the client and what lies between"
    )]
    Malformed,
    /// The server name is no DNS host name in ASCII. IP addresses are none (RFC 6066, section 3).
    #[error("the server name is no DNS host name; let the client connect by name, not by address")]
    BadName,
}

/// Finds a ClientHello that arrives in pieces, in one record or several.
///
/// Collects the message as it comes, so that every byte is looked at once in any number of pieces;
/// that takes up to [`MAX_HELLO_BYTES`] besides what the caller keeps. One reader is for one
/// connection.
#[derive(Debug, Default)]
pub struct HelloReader {
    /// How many of the received bytes have been looked at.
    seen: usize,
    /// How many bytes of the current record's payload are still to come.
    record_left: usize,
    /// The handshake message so far, without the heads of records.
    message: Vec<u8>,
}

// === impl HelloReader ===

impl HelloReader {
    /// Looks at everything received so far; `None` while the hello is incomplete. `received` may
    /// only grow at its end between calls. Records behind the hello are not looked at.
    ///
    /// # Errors
    /// [`HelloError`], as soon as the bytes show it. Nothing that follows can mend the connection.
    pub fn read(&mut self, received: &[u8]) -> Result<Option<Hello>, HelloError> {
        let within_limit = received.get(..MAX_RECEIVED_BYTES).unwrap_or(received);
        if self.collect(within_limit)? {
            parse_hello(&self.message).map(Some)
        } else if within_limit.len() == MAX_RECEIVED_BYTES {
            Err(TooLarge)
        } else {
            Ok(None)
        }
    }

    /// Moves what is new into `message`; says whether that is complete.
    fn collect(&mut self, received: &[u8]) -> Result<bool, HelloError> {
        loop {
            match missing(&self.message)? {
                // No message may follow a hello before it is answered.
                Some(left) if self.record_left > left => return Err(Malformed),
                Some(0) => return Ok(true),
                _ => {}
            }
            let unseen = received.get(self.seen..).unwrap_or_default();
            if self.record_left == 0 {
                let Some(len) = record_len(unseen)? else {
                    return Ok(false);
                };
                self.seen += RECORD_HEAD_BYTES;
                self.record_left = len;
            } else {
                let payload = unseen.get(..self.record_left).unwrap_or(unseen);
                if payload.is_empty() {
                    return Ok(false);
                }
                self.message.extend_from_slice(payload);
                self.seen += payload.len();
                self.record_left -= payload.len();
            }
        }
    }
}

/// How many bytes a handshake message lacks; `None` while its head is incomplete.
fn missing(message: &[u8]) -> Result<Option<usize>, HelloError> {
    if message.first().is_some_and(|&kind| kind != CLIENT_HELLO) {
        return Err(NotHandshake);
    }
    let Some(&[_, high, middle, low]) = message.first_chunk::<MESSAGE_HEAD_BYTES>() else {
        return Ok(None);
    };
    let len = MESSAGE_HEAD_BYTES + u32::from_be_bytes([0, high, middle, low]) as usize;
    if len > MAX_HELLO_BYTES {
        return Err(TooLarge);
    }
    len.checked_sub(message.len()).map(Some).ok_or(Malformed)
}

/// The payload length of the record that begins here; `None` while its head is incomplete.
fn record_len(unseen: &[u8]) -> Result<Option<usize>, HelloError> {
    match unseen.first() {
        None | Some(&HANDSHAKE) => {}
        Some(&(CHANGE_CIPHER_SPEC | ALERT | APPLICATION_DATA)) => return Err(NotHandshake),
        Some(_) => return Err(NotTls),
    }
    if unseen.get(1).is_some_and(|&major| major != MAJOR_VERSION) {
        return Err(NotTls);
    }
    let Some(&[_, _, _, high, low]) = unseen.first_chunk::<RECORD_HEAD_BYTES>() else {
        return Ok(None);
    };
    match usize::from(u16::from_be_bytes([high, low])) {
        0 => Err(Malformed),
        len if len > MAX_RECORD_BYTES => Err(TooLarge),
        len => Ok(Some(len)),
    }
}

/// Parses a ClientHello that is complete, with its head.
fn parse_hello(message: &[u8]) -> Result<Hello, HelloError> {
    let mut hello = Fields(message);
    hello.bytes(MESSAGE_HEAD_BYTES + VERSION_AND_RANDOM_BYTES)?;
    let _session_id = hello.vector8()?;
    let _cipher_suites = hello.vector16()?;
    let _compression_methods = hello.vector8()?;
    // Before TLS 1.3 a hello may end here.
    let mut extensions = if hello.is_empty() {
        Fields(&[])
    } else {
        Fields(hello.vector16()?)
    };
    hello.end()?;

    let mut names = None;
    while !extensions.is_empty() {
        let kind = extensions.u16()?;
        let body = extensions.vector16()?;
        if kind == SERVER_NAME && names.replace(body).is_some() {
            return Err(Malformed);
        }
    }
    let server_name = names.map(parse_server_name).transpose()?.flatten();
    Ok(Hello { server_name })
}

/// Parses the body of a `server_name` extension.
fn parse_server_name(extension: &[u8]) -> Result<Option<String>, HelloError> {
    let mut extension = Fields(extension);
    let mut list = Fields(extension.vector16()?);
    extension.end()?;

    let mut host = None;
    while !list.is_empty() {
        let kind = list.u8()?;
        // RFC 6066 gives names of all types to come a length of two bytes, so they can be skipped.
        let name = list.vector16()?;
        if kind == HOST_NAME && host.replace(name).is_some() {
            return Err(Malformed);
        }
    }
    host.map(normalize).transpose()
}

/// The form in which names are compared.
fn normalize(name: &[u8]) -> Result<String, HelloError> {
    let name = DnsName::try_from(name).map_err(|_| BadName)?;
    let name: &str = name.as_ref();
    // The dot is against RFC 6066, but some clients send the name just as they were given it.
    Ok(name.strip_suffix('.').unwrap_or(name).to_ascii_lowercase())
}

/// What is left to parse of a structure. Where it runs short, some length is wrong.
struct Fields<'a>(&'a [u8]);

// === impl Fields ===

impl<'a> Fields<'a> {
    fn bytes(&mut self, len: usize) -> Result<&'a [u8], HelloError> {
        let (bytes, rest) = self.0.split_at_checked(len).ok_or(Malformed)?;
        self.0 = rest;
        Ok(bytes)
    }

    fn u8(&mut self) -> Result<u8, HelloError> {
        let (&byte, rest) = self.0.split_first().ok_or(Malformed)?;
        self.0 = rest;
        Ok(byte)
    }

    fn u16(&mut self) -> Result<u16, HelloError> {
        Ok(u16::from_be_bytes([self.u8()?, self.u8()?]))
    }

    /// A vector whose length takes one byte.
    fn vector8(&mut self) -> Result<&'a [u8], HelloError> {
        let len = self.u8()?;
        self.bytes(len.into())
    }

    /// A vector whose length takes two bytes.
    fn vector16(&mut self) -> Result<&'a [u8], HelloError> {
        let len = self.u16()?;
        self.bytes(len.into())
    }

    fn is_empty(&self) -> bool {
        self.0.is_empty()
    }

    /// Refuses what is left.
    fn end(&self) -> Result<(), HelloError> {
        self.is_empty().then_some(()).ok_or(Malformed)
    }
}
