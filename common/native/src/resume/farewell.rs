//! The last bytes of a session whose stream is gone.

use std::time::Duration;

use tokio::io::{AsyncRead, AsyncWrite, AsyncWriteExt as _, copy, sink};
use tokio::time::timeout;

/// Time for the peer to receive the end of the session, and to close the transport. A few MiB that wait in the socket
/// take this long at 10 Mbit/s.
pub(super) const FAREWELL_TIMEOUT: Duration = Duration::from_secs(3);

/// Transport of a session that has ended, and the bytes that the peer must still receive.
pub(super) struct Farewell<T> {
    transport: T,
    rest: Vec<u8>,
}

impl<T: AsyncRead + AsyncWrite + Unpin> Farewell<T> {
    /// Creates the end of a session that still has to send `rest`.
    pub(super) fn new(transport: T, rest: Vec<u8>) -> Self {
        Self { transport, rest }
    }

    /// Sends the rest, and discards the bytes that arrive meanwhile. A peer in the middle of bulk may read nothing
    /// before its own bytes are accepted. A socket that is closed with unread bytes sends a reset, and the reset discards
    /// bytes that the peer has not read.
    pub(super) async fn deliver(self) {
        let Self { transport, rest } = self;
        let (mut read, mut write) = tokio::io::split(transport);
        let send = async {
            write.write_all(&rest).await?;
            write.shutdown().await
        };
        let mut nowhere = sink();
        let discard = copy(&mut read, &mut nowhere);
        let delivery = async { tokio::join!(send, discard) };
        // A peer that does not close in time learns of the end when it tries to resume.
        let _ = timeout(FAREWELL_TIMEOUT, delivery).await;
    }
}
