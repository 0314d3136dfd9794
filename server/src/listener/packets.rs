//! The packet streams of agents, over `h2`. hyper cannot change the windows of a connection, and here the window of
//! the connection has to follow the path.

use std::pin::pin;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};

use culvert_host::net::admission::Candidate;
use culvert_konnectivity::grpc;
use culvert_native::link::Taker;
use culvert_native::window::{Inbound, PING_TIMEOUT, Pings, WindowProfile};
use tokio::io::{AsyncRead, AsyncWrite};
use tokio_util::sync::CancellationToken;

use super::ListenerContext;

/// Largest number of streams that an agent may open on one connection. An agent opens one stream.
const AGENT_STREAMS: u32 = 16;

/// The connection that carried a request; stored in the request's extensions.
#[derive(Clone)]
pub(crate) struct PeerConnection {
    /// Token that closes the connection.
    pub cut: CancellationToken,
    /// Counters of the traffic from the peer.
    pub inbound: Arc<Inbound>,
    candidate: Arc<Candidate>,
}

// === impl PeerConnection ===

impl PeerConnection {
    /// Admits the peer, once it is authenticated: frees its slot, and opens its window.
    pub(crate) fn admit(&self) {
        self.candidate.admit();
        self.inbound.admit();
    }
}

// === impl ListenerContext ===

impl ListenerContext {
    /// Serves the calls of an agent until its connection ends. Closes a peer that sends no request within
    /// [`HANDSHAKE_TIMEOUT`](super::HANDSHAKE_TIMEOUT), or is not admitted in time; afterwards the peer may idle.
    pub(crate) async fn serve_packets<I, S>(
        self: Arc<Self>,
        io: Box<I>,
        peer: String,
        candidate: Arc<Candidate>,
        service: S,
    ) where
        I: AsyncRead + AsyncWrite + Unpin + Send + 'static,
        S: grpc::Service + Clone + Send + Sync + 'static,
    {
        let asked = AtomicBool::new(false);
        let connection = PeerConnection {
            cut: CancellationToken::new(),
            inbound: Arc::new(Inbound::new(WindowProfile::Packets)),
            candidate,
        };
        let serving = pin!(async {
            let inbound = connection.inbound.clone();
            let pings = Pings {
                idle: self.keepalive,
                timeout: PING_TIMEOUT,
            };
            // Boxed, because the handshake of HTTP/2 needs more memory than the connection.
            let taker = Box::pin(Taker::for_packets(io, inbound, AGENT_STREAMS, pings)).await;
            let mut taker = taker.map_err(|error| error.to_string())?;
            while let Some((mut request, respond)) = taker.next().await? {
                asked.store(true, Ordering::Relaxed);
                request.extensions_mut().insert(connection.clone());
                let service = service.clone();
                let answering = async move { grpc::serve(&service, request, respond).await };
                self.tasks.spawn(answering);
            }
            Ok::<_, String>(())
        });
        tokio::select! {
            () = self.ends_or_asks(serving, &asked, &peer) => {}
            why = connection.candidate.refused() => self.refuse(why, &peer),
            () = connection.cut.cancelled() => {}
            () = self.shutdown.cancelled() => {}
        }
    }
}
