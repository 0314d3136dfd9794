//! The socket of an agent. It limits its unsent bytes once the path to the agent turns out to be long: the kernel knows
//! only the round trip to a proxy in between, such as the front door. The socket of a connection that resumes a link moves
//! to the thread of the link.

use std::io::{self, IoSlice};
use std::pin::Pin;
use std::sync::{Arc, OnceLock};
use std::task::{Context, Poll};

use culvert_host::net::admission::Gated;
use culvert_host::net::long_path;
use culvert_native::window::Inbound;
use tokio::io::{AsyncRead, AsyncWrite, ReadBuf};
use tokio::net::TcpStream;
use tracing::debug;

/// The link over a socket, once the agent is introduced.
#[derive(Clone, Debug, Default)]
pub(crate) struct LinkPath(Arc<OnceLock<Followed>>);

#[derive(Debug)]
struct Followed {
    inbound: Arc<Inbound>,
    /// True if the link has a task of its own, perhaps on another thread.
    is_elsewhere: bool,
}

/// Socket that follows the path of its link.
pub(crate) struct PathAware {
    inner: Gated<TcpStream>,
    link: LinkPath,
    is_limited: bool,
    /// True once the socket is on the thread of its link.
    is_settled: bool,
}

impl LinkPath {
    /// Names the link whose pings measure the path. The link begins on this thread.
    pub(crate) fn follow(&self, inbound: &Arc<Inbound>) {
        self.set(inbound, false);
    }

    /// Names the link that gets the socket. The next read or write moves the socket to its own thread.
    pub(crate) fn move_to(&self, inbound: &Arc<Inbound>) {
        self.set(inbound, true);
    }

    fn set(&self, inbound: &Arc<Inbound>, is_elsewhere: bool) {
        let inbound = inbound.clone();
        // A socket carries one link.
        let _ = self.0.set(Followed {
            inbound,
            is_elsewhere,
        });
    }
}

impl PathAware {
    pub(crate) fn new(inner: Gated<TcpStream>, link: LinkPath) -> Self {
        Self {
            inner,
            link,
            is_limited: false,
            is_settled: false,
        }
    }

    /// Returns the socket, on the thread of its link. Every read and write calls this first, so no task waits for the socket
    /// when it moves.
    fn socket(&mut self) -> Pin<&mut Gated<TcpStream>> {
        if !self.is_settled
            && let Some(link) = self.link.0.get()
        {
            self.is_settled = true;
            if link.is_elsewhere
                && let Err(error) = self.inner.rebind()
            {
                // The link works, but another thread wakes its task.
                debug!(%error, "the socket of a resumed link stays on the thread that accepted it");
            }
        }
        Pin::new(&mut self.inner)
    }
}

impl AsyncRead for PathAware {
    fn poll_read(
        self: Pin<&mut Self>,
        cx: &mut Context<'_>,
        target: &mut ReadBuf<'_>,
    ) -> Poll<io::Result<()>> {
        let this = self.get_mut();
        if let Some(link) = this.link.0.get()
            && link.inbound.is_long() != this.is_limited
        {
            // A busy machine may answer the first ping late, so a long path may turn out to be short.
            match this.is_limited {
                false => long_path::limit_unsent(&this.inner),
                true => long_path::restore_unsent(&this.inner),
            }
            this.is_limited = !this.is_limited;
        }
        this.socket().poll_read(cx, target)
    }
}

impl AsyncWrite for PathAware {
    fn poll_write(
        self: Pin<&mut Self>,
        cx: &mut Context<'_>,
        bytes: &[u8],
    ) -> Poll<io::Result<usize>> {
        self.get_mut().socket().poll_write(cx, bytes)
    }

    fn poll_write_vectored(
        self: Pin<&mut Self>,
        cx: &mut Context<'_>,
        slices: &[IoSlice<'_>],
    ) -> Poll<io::Result<usize>> {
        self.get_mut().socket().poll_write_vectored(cx, slices)
    }

    fn is_write_vectored(&self) -> bool {
        self.inner.is_write_vectored()
    }

    fn poll_flush(self: Pin<&mut Self>, cx: &mut Context<'_>) -> Poll<io::Result<()>> {
        self.get_mut().socket().poll_flush(cx)
    }

    fn poll_shutdown(self: Pin<&mut Self>, cx: &mut Context<'_>) -> Poll<io::Result<()>> {
        self.get_mut().socket().poll_shutdown(cx)
    }
}

#[cfg(test)]
mod tests {
    #![allow(clippy::unwrap_used)]

    use std::io::{Read as _, Write as _};
    use std::net::Ipv4Addr;

    use culvert_host::net::admission::Admission;
    use tokio::io::{AsyncReadExt as _, AsyncWriteExt as _};
    use tokio::net::TcpListener;
    use tokio::runtime::{Builder, Runtime};
    use tokio::time::Instant;

    use super::*;
    use crate::listener::ADMISSION;

    fn runtime() -> Runtime {
        Builder::new_current_thread().enable_all().build().unwrap()
    }

    #[test]
    fn socket_of_a_resumed_link_does_not_need_the_thread_that_accepted_it() {
        let accepting = runtime();
        let path = LinkPath::default();
        let (mut socket, mut far) = accepting.block_on(async {
            let listener = TcpListener::bind((Ipv4Addr::LOCALHOST, 0)).await.unwrap();
            let far = std::net::TcpStream::connect(listener.local_addr().unwrap()).unwrap();
            let (near, peer) = listener.accept().await.unwrap();
            let admission = Admission::new(ADMISSION);
            let candidate = admission.enter(peer.ip(), Instant::now()).await.unwrap();
            let mut socket = PathAware::new(admission.gate(near, &candidate), path.clone());
            candidate.admit();
            // The accepting thread waits for the peer, as it does before a link resumes.
            let mut byte = [0];
            tokio::select! {
                biased;
                _ = socket.read(&mut byte) => panic!("the peer has sent nothing"),
                () = std::future::ready(()) => {}
            }
            (socket, far)
        });
        path.move_to(&Arc::default());
        drop(accepting);
        runtime().block_on(async {
            socket.write_all(b"to the peer").await.unwrap();
            let mut got = [0; 11];
            far.read_exact(&mut got).unwrap();
            assert_eq!(&got, b"to the peer");
            far.write_all(b"from it").unwrap();
            let mut got = [0; 7];
            socket.read_exact(&mut got).await.unwrap();
            assert_eq!(&got, b"from it");
        });
    }
}
