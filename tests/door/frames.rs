//! HTTP/2 in single frames, for input that no client library sends.

use std::net::SocketAddr;

use tokio::io::{AsyncReadExt, AsyncWriteExt, BufReader};
use tokio::net::tcp::{OwnedReadHalf, OwnedWriteHalf};
use tokio::net::{TcpSocket, TcpStream};

use crate::support::timely;

pub(crate) const DATA: u8 = 0;
pub(crate) const HEADERS: u8 = 1;
pub(crate) const RST_STREAM: u8 = 3;
pub(crate) const SETTINGS: u8 = 4;
pub(crate) const PING: u8 = 6;
pub(crate) const GOAWAY: u8 = 7;
pub(crate) const WINDOW_UPDATE: u8 = 8;
pub(crate) const CONTINUATION: u8 = 9;

pub(crate) const END_STREAM: u8 = 1;
pub(crate) const END_HEADERS: u8 = 4;
pub(crate) const PRIORITY: u8 = 0x20;

const PREFACE: &[u8] = b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n";

/// Identifiers and values of the settings that [`connect`] sends.
pub(crate) type Settings<'a> = &'a [(u16, u32)];

pub(crate) const INITIAL_WINDOW_SIZE: u16 = 4;

/// A received frame.
#[derive(Debug)]
pub(crate) struct Frame {
    pub kind: u8,
    pub stream: u32,
    pub payload: Vec<u8>,
}

/// The frames that the peer sends.
pub(crate) struct Frames(BufReader<OwnedReadHalf>);

/// Connects and sends the HTTP/2 preface and a SETTINGS frame. The caller sends all other frames.
pub(crate) async fn connect(door: SocketAddr, settings: Settings<'_>) -> (Frames, OwnedWriteHalf) {
    begin(TcpStream::connect(door).await.unwrap(), settings).await
}

/// Connects like [`connect`], with a receive buffer that a few frames fill. The peer must wait with its other frames if the
/// caller does not read.
pub(crate) async fn connect_unread(door: SocketAddr) -> (Frames, OwnedWriteHalf) {
    let socket = TcpSocket::new_v4().unwrap();
    socket.set_recv_buffer_size(4096).unwrap();
    begin(socket.connect(door).await.unwrap(), &[]).await
}

/// Sends the first frames like [`connect`].
pub(crate) async fn begin(stream: TcpStream, settings: Settings<'_>) -> (Frames, OwnedWriteHalf) {
    stream.set_nodelay(true).unwrap();
    let (read, mut write) = stream.into_split();
    let mut payload = Vec::new();
    for (id, value) in settings {
        payload.extend(id.to_be_bytes());
        payload.extend(value.to_be_bytes());
    }
    let begin = [PREFACE, &frame(SETTINGS, 0, 0, &payload)].concat();
    write.write_all(&begin).await.unwrap();
    (Frames(BufReader::with_capacity(64 << 10, read)), write)
}

/// Encodes a frame.
pub(crate) fn frame(kind: u8, flags: u8, stream: u32, payload: &[u8]) -> Vec<u8> {
    let len = u32::try_from(payload.len()).unwrap().to_be_bytes();
    let mut bytes = vec![len[1], len[2], len[3], kind, flags];
    bytes.extend(stream.to_be_bytes());
    bytes.extend(payload);
    bytes
}

/// Encodes a header field in HPACK, with a literal name, without indexing and compression.
pub(crate) fn field(name: &str, value: &str) -> Vec<u8> {
    let mut bytes = vec![0];
    for text in [name, value] {
        let len = u8::try_from(text.len()).unwrap();
        assert!(
            len < 127,
            "longer texts need a longer encoding of the length"
        );
        bytes.push(len);
        bytes.extend(text.as_bytes());
    }
    bytes
}

/// Encodes the fields of a CONNECT request.
pub(crate) fn connect_fields(authority: &str) -> Vec<u8> {
    [field(":method", "CONNECT"), field(":authority", authority)].concat()
}

impl Frames {
    /// Returns the next frame, or `None` if the connection has ended for any reason.
    pub(crate) async fn next(&mut self) -> Option<Frame> {
        let mut head = [0; 9];
        timely("a frame", self.0.read_exact(&mut head)).await.ok()?;
        let len = u32::from_be_bytes([0, head[0], head[1], head[2]]);
        let mut payload = vec![0; len as usize];
        self.0.read_exact(&mut payload).await.ok()?;
        Some(Frame {
            kind: head[3],
            stream: u32::from_be_bytes([head[5], head[6], head[7], head[8]]),
            payload,
        })
    }

    /// Returns the next frame of one kind, and skips all frames before.
    pub(crate) async fn next_of(&mut self, kind: u8) -> Option<Frame> {
        loop {
            let next = self.next().await?;
            if next.kind == kind {
                return Some(next);
            }
        }
    }
}

impl Frame {
    /// Returns the error code of a RST_STREAM or GOAWAY frame.
    pub(crate) fn code(&self) -> u32 {
        let at = if self.kind == GOAWAY { 4 } else { 0 };
        let bytes = self.payload[at..at + 4].try_into().unwrap();
        u32::from_be_bytes(bytes)
    }

    /// Returns the status of a response, or `None` if the status is not encoded as an index of HPACK's static
    /// table.
    pub(crate) fn status(&self) -> Option<u16> {
        // Skips updates of the dynamic table's size.
        let first = self.payload.iter().find(|byte| *byte & 0xe0 != 0x20)?;
        [(8, 200), (12, 400), (13, 404), (14, 500)]
            .iter()
            .find_map(|(index, status)| (*first == 0x80 | index).then_some(*status))
    }

    /// Returns the value of one setting in a SETTINGS frame.
    pub(crate) fn setting(&self, id: u16) -> Option<u32> {
        let mut entries = self.payload.chunks_exact(6);
        let entry = entries.find(|entry| entry[..2] == id.to_be_bytes())?;
        Some(u32::from_be_bytes(entry[2..].try_into().unwrap()))
    }
}
