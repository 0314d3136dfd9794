//! The server name in a TLS ClientHello, which routes a connection without decryption.
//!
//! The module does no I/O. The caller collects the received bytes, passes them to a [`HelloReader`] until the
//! hello is complete, and later forwards exactly these bytes. The parser checks only as much as it needs to
//! find the name; the endpoint checks versions, ciphers and other extensions. For an encrypted hello (ECH)
//! the outer name counts; the inner name cannot be read.

#[cfg(test)]
pub(crate) mod tests;

use rustls_pki_types::DnsName;

use HelloError::{BadName, Malformed, NotHandshake, NotTls, TooLarge};

/// Largest ClientHello, in bytes, as a handshake message with its header.
///
/// The limit is the payload of one record. Hellos have 200 to 2,000 bytes; the large ones contain
/// post-quantum key shares. A higher limit would only let any client claim more memory.
pub(crate) const MAX_HELLO_BYTES: usize = MAX_RECORD_BYTES;

/// Most bytes kept by a caller; a longer hello on the wire is refused.
///
/// A hello may be split into records of a single byte, each with a header of five bytes. The headers get as
/// much room as the hello: enough for the largest hello in records of six bytes, or for a hello of 5,461
/// bytes in records of one byte.
pub const MAX_RECEIVED_BYTES: usize = 2 * MAX_HELLO_BYTES;

/// Largest payload of an unencrypted record, in bytes (RFC 8446, section 5.1).
const MAX_RECORD_BYTES: usize = 1 << 14;

/// Record header: content type, legacy version and length.
const RECORD_HEAD_BYTES: usize = 5;

/// Handshake message header: type and length.
const MESSAGE_HEAD_BYTES: usize = 4;

/// Fields of fixed size at the start of a hello: `legacy_version` and `random`.
const VERSION_AND_RANDOM_BYTES: usize = 2 + 32;

// Content types of records (RFC 8446, section 5.1).
const CHANGE_CIPHER_SPEC: u8 = 20;
const ALERT: u8 = 21;
const HANDSHAKE: u8 = 22;
const APPLICATION_DATA: u8 = 23;

/// First byte of every version from SSL 3.0 to TLS 1.3.
const MAJOR_VERSION: u8 = 3;

/// Type of the handshake message (RFC 8446, section 4).
const CLIENT_HELLO: u8 = 1;

/// Type of the `server_name` extension (RFC 6066, section 3).
const SERVER_NAME: u16 = 0;

/// Type of a host name in the extension; no other type was ever defined.
const HOST_NAME: u8 = 0;

/// The contents of a ClientHello that matter for routing.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Hello {
    /// DNS name in lower case without a dot at its end. `None` if the hello has no `server_name` extension,
    /// or the extension has no host name.
    pub server_name: Option<String>,
}

/// Reason why a ClientHello cannot route its connection.
#[derive(Clone, Copy, Debug, PartialEq, Eq, thiserror::Error)]
pub enum HelloError {
    /// The first bytes are not a TLS record. An SSL 2.0 hello is not a TLS record either.
    #[error("the client does not speak TLS; point it at a port that serves its protocol")]
    NotTls,
    /// A record or a handshake message of another type comes before or inside the hello.
    #[error("the client speaks TLS but sent something other than a ClientHello; check the client")]
    NotHandshake,
    /// The hello exceeds `MAX_HELLO_BYTES` or [`MAX_RECEIVED_BYTES`].
    #[error(
        "the ClientHello is larger than {MAX_HELLO_BYTES} bytes, or than {MAX_RECEIVED_BYTES} bytes with its record headers; make the client offer less, or send larger records"
    )]
    TooLarge,
    /// Lengths disagree, a record is empty, something follows in the hello's last record, or there is more
    /// than one server name.
    #[error(
        "the ClientHello is malformed: its lengths disagree, or it has more than one server name; check the client and the network between"
    )]
    Malformed,
    /// The server name is not a DNS host name in ASCII. IP addresses are not allowed (RFC 6066, section 3).
    #[error(
        "the server name is not a DNS host name; make the client connect by name, not by address"
    )]
    BadName,
}

/// Finds a ClientHello in pieces, in one record or several. Each connection needs its own reader.
///
/// The reader copies the message as the pieces arrive, and therefore processes every byte only once. The copy
/// takes up to `MAX_HELLO_BYTES` in addition to the caller's bytes.
#[derive(Debug, Default)]
pub struct HelloReader {
    /// Number of processed bytes.
    seen: usize,
    /// Missing bytes of the current record's payload.
    record_left: usize,
    /// The handshake message so far, without record headers.
    message: Vec<u8>,
}

// === impl HelloReader ===

impl HelloReader {
    /// Processes all bytes received so far; returns `None` while the hello is incomplete. Between calls,
    /// `received` may only grow at its end. Records after the hello are ignored.
    ///
    /// # Errors
    /// [`HelloError`], as soon as the bytes show the error. Later bytes cannot repair the connection.
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

    /// Moves the new bytes into `message`; returns true if the message is complete.
    fn collect(&mut self, received: &[u8]) -> Result<bool, HelloError> {
        loop {
            match missing(&self.message, MAX_HELLO_BYTES)? {
                // No other message may follow a hello before the server answers.
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

/// Parses a ClientHello without record headers, as in QUIC; `None` while the message is incomplete.
///
/// # Errors
/// [`HelloError::TooLarge`] beyond `limit` bytes, and every other error except [`HelloError::NotTls`].
pub(crate) fn parse_message(message: &[u8], limit: usize) -> Result<Option<Hello>, HelloError> {
    match missing(message, limit)? {
        Some(0) => parse_hello(message).map(Some),
        _ => Ok(None),
    }
}

/// Returns the number of missing bytes of a handshake message; `None` while its header is incomplete.
fn missing(message: &[u8], limit: usize) -> Result<Option<usize>, HelloError> {
    if message.first().is_some_and(|&kind| kind != CLIENT_HELLO) {
        return Err(NotHandshake);
    }
    let Some(&[_, high, middle, low]) = message.first_chunk::<MESSAGE_HEAD_BYTES>() else {
        return Ok(None);
    };
    let len = MESSAGE_HEAD_BYTES + u32::from_be_bytes([0, high, middle, low]) as usize;
    if len > limit {
        return Err(TooLarge);
    }
    len.checked_sub(message.len()).map(Some).ok_or(Malformed)
}

/// Returns the payload length of the record at this position; `None` while its header is incomplete.
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

/// Parses a complete ClientHello, including its header.
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
        // RFC 6066 requires a length of two bytes for names of all future types, so unknown names can be
        // skipped.
        let name = list.vector16()?;
        if kind == HOST_NAME && host.replace(name).is_some() {
            return Err(Malformed);
        }
    }
    host.map(normalize).transpose()
}

/// Returns the form of a name for comparisons.
fn normalize(name: &[u8]) -> Result<String, HelloError> {
    let name = DnsName::try_from(name).map_err(|_| BadName)?;
    let name: &str = name.as_ref();
    // RFC 6066 forbids the final dot, but some clients send the name as the user typed it.
    Ok(name.strip_suffix('.').unwrap_or(name).to_ascii_lowercase())
}

/// The unparsed rest of a structure. If the data ends too early, a length is wrong.
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

    /// Reads a vector whose length field has one byte.
    fn vector8(&mut self) -> Result<&'a [u8], HelloError> {
        let len = self.u8()?;
        self.bytes(len.into())
    }

    /// Reads a vector whose length field has two bytes.
    fn vector16(&mut self) -> Result<&'a [u8], HelloError> {
        let len = self.u16()?;
        self.bytes(len.into())
    }

    fn is_empty(&self) -> bool {
        self.0.is_empty()
    }

    /// Returns an error if there is remaining data.
    fn end(&self) -> Result<(), HelloError> {
        self.is_empty().then_some(()).ok_or(Malformed)
    }
}
