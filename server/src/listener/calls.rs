//! The calls of clients and of agents, over `h2`. hyper cannot change the windows of a connection, and the window of
//! an agent's connection has to follow the path. An idle client needs less memory than with hyper.

use std::pin::{Pin, pin};
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};
use std::time::Duration;

use culvert_host::net::admission::Candidate;
use culvert_konnectivity::grpc::{self, Piece};
use culvert_native::link::Taker;
use culvert_native::window::{Inbound, PING_TIMEOUT, Pings, WindowProfile};
use futures_util::FutureExt as _;
use http::Extensions;
use tokio::io::{AsyncRead, AsyncWrite};
use tokio::time::sleep;
use tokio_util::sync::CancellationToken;
use tracing::debug;

use super::ListenerContext;

/// Largest number of streams that an agent may open on one connection. An agent opens one stream; another one may be open
/// while the end of the first is on its way.
const AGENT_STREAMS: u32 = 2;

/// Time between two looks at an agent's connection. The connection is closed if it has no call at both: agents close their
/// connection with their call, and only calls have places, see `--max-agents`.
const CALL_CHECK: Duration = Duration::from_secs(15);

/// The connection that carried a request; stored in the request's extensions.
#[derive(Clone)]
pub(crate) struct PeerConnection {
    /// Token that closes the connection.
    pub cut: CancellationToken,
    /// Fires when the server stops, before the server closes the connection.
    pub shutdown: CancellationToken,
    /// Counters of the traffic from the peer.
    pub inbound: Arc<Inbound>,
    candidate: Arc<Candidate>,
    /// True during the review of a call, and for good after a call that was refused.
    is_reviewed: Arc<AtomicBool>,
}

// === impl PeerConnection ===

impl PeerConnection {
    /// Returns true if a call of the connection may be reviewed: no other review continues, and none has failed. Each
    /// further review thus costs the peer a connection and a slot.
    pub(crate) fn begin_review(&self) -> bool {
        !self.is_reviewed.swap(true, Ordering::Relaxed)
    }

    /// Admits the peer, once it is authenticated: frees its slot, and opens its window.
    pub(crate) fn admit(&self) {
        self.is_reviewed.store(false, Ordering::Relaxed);
        self.candidate.admit();
        self.inbound.admit();
    }
}

// === impl ListenerContext ===

impl ListenerContext {
    /// Serves the calls of a client until its connection ends. Closes a client that sends no request within
    /// [`HANDSHAKE_TIMEOUT`](super::HANDSHAKE_TIMEOUT); afterwards the client may idle.
    pub(crate) async fn serve_client<I, S>(&self, io: I, peer: &str, service: S)
    where
        I: AsyncRead + AsyncWrite + Unpin + Send + 'static,
        S: grpc::Service + Clone + Send + Sync + 'static,
    {
        let taker = Box::pin(Taker::for_client(io, self.pings()));
        tokio::select! {
            () = self.serve_calls(taker, peer, service, |_| {}) => {}
            () = self.shutdown.cancelled() => {}
        }
    }

    /// Serves the calls of an agent until its connection ends. Closes a peer that sends no request within
    /// [`HANDSHAKE_TIMEOUT`](super::HANDSHAKE_TIMEOUT), is not admitted in time, or has no call any more.
    pub(crate) async fn serve_agent<I, S>(
        self: Arc<Self>,
        io: Box<I>,
        peer: String,
        candidate: Arc<Candidate>,
        service: S,
    ) where
        I: AsyncRead + AsyncWrite + Unpin + Send + 'static,
        S: grpc::Service + Clone + Send + Sync + 'static,
    {
        let connection = PeerConnection {
            cut: CancellationToken::new(),
            shutdown: self.shutdown.clone(),
            inbound: Arc::new(Inbound::new(WindowProfile::Packets)),
            candidate,
            is_reviewed: Arc::default(),
        };
        let inbound = connection.inbound.clone();
        let taker = Taker::for_packets(io, inbound, AGENT_STREAMS, self.pings());
        let taker = Box::pin(taker);
        let calls = Arc::new(());
        let extend = |extensions: &mut Extensions| {
            extensions.insert(connection.clone());
            calls.clone()
        };
        tokio::select! {
            () = self.serve_calls(taker, &peer, service, extend) => {}
            () = no_calls(&calls) => debug!(%peer, "closing an agent's connection without a call"),
            why = connection.candidate.refused() => self.refuse(why, &peer),
            () = connection.cut.cancelled() => {}
            () = self.shutdown.cancelled() => {}
        }
    }

    fn pings(&self) -> Pings {
        Pings {
            idle: self.keepalive,
            timeout: PING_TIMEOUT,
        }
    }

    /// Serves the calls of a connection until the connection ends. `extend` adds to the extensions of each request, and returns
    /// a value that lives as long as the call.
    /// `taker` is boxed, because the handshake of HTTP/2 needs more memory than the connection.
    async fn serve_calls<I, S, G>(
        &self,
        taker: Pin<Box<impl Future<Output = Result<Taker<I, Piece>, h2::Error>>>>,
        peer: &str,
        service: S,
        extend: impl Fn(&mut Extensions) -> G,
    ) where
        I: AsyncRead + AsyncWrite + Unpin,
        S: grpc::Service + Clone + Send + Sync + 'static,
        G: Send + 'static,
    {
        let asked = AtomicBool::new(false);
        let serving = pin!(async {
            let mut taker = match taker.await {
                Ok(taker) => taker,
                // A port check connects and leaves without sending a byte.
                Err(error) if error.is_io() => {
                    debug!(peer, %error, "the peer left before HTTP/2 began");
                    return Ok(());
                }
                Err(error) => return Err(error.to_string()),
            };
            while let Some((mut request, respond)) = taker.next().await? {
                asked.store(true, Ordering::Relaxed);
                let open = extend(request.extensions_mut());
                let call = grpc::serve(service.clone(), request, respond);
                self.tasks.spawn(call.map(move |()| drop(open)));
            }
            Ok::<_, String>(())
        });
        self.ends_or_asks(serving, &asked, peer).await;
    }
}

/// Resolves once a connection has had no call for [`CALL_CHECK`]. Each call has a clone of `calls`.
async fn no_calls(calls: &Arc<()>) {
    let mut was_unused = false;
    loop {
        sleep(CALL_CHECK).await;
        let is_unused = Arc::strong_count(calls) == 1;
        if was_unused && is_unused {
            return;
        }
        was_unused = is_unused;
    }
}

#[cfg(test)]
mod tests {
    #![allow(clippy::unwrap_used)]

    use tokio::time::timeout;

    use super::*;

    #[tokio::test(start_paused = true)]
    async fn connection_is_unused_only_without_a_call() {
        let calls = Arc::new(());
        let call = calls.clone();
        let unused = timeout(100 * CALL_CHECK, no_calls(&calls)).await;
        assert!(unused.is_err());
        drop(call);
        timeout(3 * CALL_CHECK, no_calls(&calls)).await.unwrap();
    }
}
