//! The calls of clients and of agents, over `h2`. hyper cannot change the windows of a connection, and the window of
//! an agent's connection has to follow the path. An idle client needs less memory than with hyper.

use std::fmt::Display;
use std::pin::{Pin, pin};
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};

use culvert_host::net::admission::Candidate;
use culvert_konnectivity::grpc::{self, Piece};
use culvert_native::link::Taker;
use culvert_native::window::{Inbound, PING_TIMEOUT, Pings, WindowProfile};
use http::Extensions;
use tokio::io::{AsyncRead, AsyncWrite};
use tokio_util::sync::CancellationToken;

use super::ListenerContext;

/// Largest number of streams that an agent may open on one connection. An agent opens one stream; another one may be open
/// while the end of the first is on its way.
const AGENT_STREAMS: u32 = 2;

/// The connection that carried a request; stored in the request's extensions.
#[derive(Clone)]
pub(crate) struct PeerConnection {
    /// Token that closes the connection.
    pub cut: CancellationToken,
    /// Counters of the traffic from the peer.
    pub inbound: Arc<Inbound>,
    candidate: Arc<Candidate>,
    /// True during the review of a call, and for good after a call that was refused.
    is_reviewed: Arc<AtomicBool>,
}

// === impl PeerConnection ===

impl PeerConnection {
    /// Returns true if a call of the connection may be reviewed: no other review continues, and none has failed. A peer that
    /// has to open a connection for each review uses up slots.
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
    /// [`HANDSHAKE_TIMEOUT`](super::HANDSHAKE_TIMEOUT), or is not admitted in time; afterwards the peer may idle.
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
            inbound: Arc::new(Inbound::new(WindowProfile::Packets)),
            candidate,
            is_reviewed: Arc::default(),
        };
        let inbound = connection.inbound.clone();
        let taker = Taker::for_packets(io, inbound, AGENT_STREAMS, self.pings());
        let taker = Box::pin(taker);
        let extend = |extensions: &mut Extensions| {
            extensions.insert(connection.clone());
        };
        tokio::select! {
            () = self.serve_calls(taker, &peer, service, extend) => {}
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

    /// Serves the calls of a connection until the connection ends. `extend` adds to the extensions of each request.
    /// `taker` is boxed, because the handshake of HTTP/2 needs more memory than the connection.
    async fn serve_calls<I, S, E>(
        &self,
        taker: Pin<Box<impl Future<Output = Result<Taker<I, Piece>, E>>>>,
        peer: &str,
        service: S,
        extend: impl Fn(&mut Extensions),
    ) where
        I: AsyncRead + AsyncWrite + Unpin,
        E: Display,
        S: grpc::Service + Clone + Send + Sync + 'static,
    {
        let asked = AtomicBool::new(false);
        let serving = pin!(async {
            let mut taker = taker.await.map_err(|error| error.to_string())?;
            while let Some((mut request, respond)) = taker.next().await? {
                asked.store(true, Ordering::Relaxed);
                extend(request.extensions_mut());
                self.tasks
                    .spawn(grpc::serve(service.clone(), request, respond));
            }
            Ok::<_, String>(())
        });
        self.ends_or_asks(serving, &asked, peer).await;
    }
}
