//! The socket of an agent. It limits its unsent bytes once the path to the agent turns out to be long: the kernel knows
//! only the round trip to a proxy in between, such as the front door.

use std::io;
use std::os::fd::AsFd;
use std::pin::Pin;
use std::sync::{Arc, OnceLock};
use std::task::{Context, Poll};

use culvert_host::net::long_path;
use culvert_native::window::Inbound;
use tokio::io::{AsyncRead, ReadBuf};

/// The link over a socket, once the agent is introduced.
#[derive(Clone, Debug, Default)]
pub(crate) struct LinkPath(Arc<OnceLock<Arc<Inbound>>>);

/// Socket that follows the path of its link.
pub(crate) struct PathAware<S> {
    inner: S,
    link: LinkPath,
    is_limited: bool,
}

impl LinkPath {
    /// Names the link whose pings measure the path.
    pub(crate) fn follow(&self, inbound: &Arc<Inbound>) {
        // A socket carries one link.
        let _ = self.0.set(inbound.clone());
    }

    fn is_long(&self) -> Option<bool> {
        Some(self.0.get()?.is_long())
    }
}

impl<S> PathAware<S> {
    pub(crate) fn new(inner: S, link: LinkPath) -> Self {
        Self {
            inner,
            link,
            is_limited: false,
        }
    }
}

impl<S: AsyncRead + AsFd + Unpin> AsyncRead for PathAware<S> {
    fn poll_read(
        self: Pin<&mut Self>,
        cx: &mut Context<'_>,
        target: &mut ReadBuf<'_>,
    ) -> Poll<io::Result<()>> {
        let this = self.get_mut();
        if let Some(is_long) = this.link.is_long()
            && is_long != this.is_limited
        {
            // A busy machine may answer the first ping late, so a long path may turn out to be short.
            match is_long {
                true => long_path::limit_unsent(&this.inner),
                false => long_path::restore_unsent(&this.inner),
            }
            this.is_limited = is_long;
        }
        Pin::new(&mut this.inner).poll_read(cx, target)
    }
}

culvert_stream::delegate_write!(PathAware);
