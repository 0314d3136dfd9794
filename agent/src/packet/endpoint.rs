//! One connection of the agent: dials the endpoint and copies bytes until either side ends.
//!
//! No bytes are lost at the end. The endpoint still gets the bytes the client sent before closing, and the
//! server still gets the bytes the endpoint sent before closing.

use std::pin::pin;
use std::sync::Arc;

use bytes::Bytes;
use culvert_host::net::listen::reset;
use culvert_konnectivity::agent_mux::closed;
use culvert_konnectivity::inbox;
use culvert_konnectivity::message::{ConnectId, DialId, MAX_DATA_BYTES, Message};
use culvert_stream::connection::run_connection;
use culvert_stream::first_byte_gate::FirstByteGate;
use culvert_stream::io::{LINGER, drain};
use culvert_stream::progress::Progress;
use culvert_stream::{CloseReason, Dial, HALF_OPEN_IDLE, Sink, Source, log_closed};
use tokio::io::AsyncWriteExt;
use tokio::net::TcpStream;
use tokio::time::timeout;
use tokio_util::sync::CancellationToken;
use tracing::warn;

use super::ServerStream;
use crate::agent::{Dialed, endpoint_halves};

/// Input of one connection, decoded from the server's packets.
pub(super) enum Incoming {
    /// Bytes for the endpoint.
    Data(Bytes),
    /// The client has finished sending.
    HalfClosed,
    /// The client is gone.
    Closed,
}

/// A connection, from the start of the dial.
pub(super) struct Endpoint {
    /// Stream of the server that requested the connection.
    pub stream: Arc<ServerStream>,
    /// Id of the dial.
    pub dial_id: DialId,
    /// Id of the connection.
    pub connection: ConnectId,
    /// Network and address to dial.
    pub dial: Dial,
    /// Queue of bytes and events from the client.
    pub incoming: inbox::Receiver<Incoming>,
    /// Fires once the client is gone and its last bytes are queued.
    pub closing: CancellationToken,
    /// Ends the dial.
    pub cut: CancellationToken,
}

struct FromServer {
    incoming: inbox::Receiver<Incoming>,
    /// Fires once the client is gone and its last bytes are queued.
    closing: CancellationToken,
    first_byte_gate: FirstByteGate,
}

struct ToServer {
    stream: Arc<ServerStream>,
    connection: ConnectId,
    first_byte_gate: FirstByteGate,
}

/// Guard that removes a connection from the stream's table when dropped.
struct Entry {
    stream: Arc<ServerStream>,
    dial: DialId,
    connection: ConnectId,
}

// === impl Endpoint ===

impl Endpoint {
    /// Dials the endpoint and runs the connection until the end.
    pub(super) async fn run(self) {
        let stream = self.stream.clone();
        let entry = Entry {
            stream: stream.clone(),
            dial: self.dial_id,
            connection: self.connection,
        };
        // Counted from the start of the dial, so that a drained agent does not exit during a dial.
        let _active = stream.agent.activity();
        let dialed = tokio::select! {
            dialed = stream.agent.dial(&self.dial.protocol, &self.dial.address) => dialed,
            () = self.cut.cancelled() => return,
        };
        stream.dialed(self.dial_id, self.connection);
        match dialed {
            Ok(Dialed {
                socket,
                open: _open,
            }) => {
                stream.tell(Message::DialResponse {
                    dial: self.dial_id,
                    connection: self.connection,
                    error: String::new(),
                });
                self.carry(socket, entry).await;
            }
            Err(error) => {
                drop(entry);
                stream.tell(Message::DialResponse {
                    dial: self.dial_id,
                    connection: ConnectId(0),
                    error: error.text,
                });
            }
        }
        stream.leave();
    }

    async fn carry(self, socket: TcpStream, entry: Entry) {
        let stream = self.stream;
        let connection = self.connection;
        let watch = self.incoming.watch();
        // An endpoint's first bytes may need a short delay (see `first_byte_gate`). A Culvert server delays
        // the bytes; for a stock server, the agent does so.
        let first_byte_gate = if stream.half_close {
            FirstByteGate::already_open()
        } else {
            FirstByteGate::default()
        };
        let mut server_source = FromServer {
            incoming: self.incoming,
            closing: self.closing.clone(),
            first_byte_gate: first_byte_gate.clone(),
        };
        let mut server_sink = ToServer {
            stream: stream.clone(),
            connection,
            first_byte_gate: first_byte_gate.clone(),
        };
        let (mut source, mut sink) = endpoint_halves(socket);
        let server_gone = async {
            stream.ended.cancelled().await;
            if self.closing.is_cancelled() {
                // All bytes of the client are already queued, and its close behind them.
                stream.agent.shutdown.cancelled().await;
            }
            stream.agent.server_lost(&stream.ended).await
        };
        let cut = pin!(async {
            tokio::select! {
                reason = watch.overdue(stream.agent.limits.stall) => reason,
                reason = server_gone => reason,
            }
        });
        let ended = run_connection(
            (&mut server_source, &mut server_sink),
            (&mut source, &mut sink),
            stream.agent.metrics.streams.both_directions(),
            HALF_OPEN_IDLE,
            cut,
        )
        .await;
        let reason = ended.reason;
        if ended.is_overdue() {
            warn!(
                connection = connection.0,
                address = self.dial.address,
                reason = %reason,
                to_endpoint = ended.to_endpoint,
                "closing this connection: the endpoint reads more slowly than the client sends. Other \
                 connections continue. An agent cannot slow down one connection of a stock server, only \
                 of a culvert-server with flow control per connection. For longer bursts raise \
                 --excess-buffer-bytes or --stall-timeout"
            );
        }
        if matches!(
            reason,
            CloseReason::EndpointClosed | CloseReason::EndpointLost
        ) {
            // Stock clients also ignore a close that arrives before they have registered the connection.
            first_byte_gate.wait().await;
        }
        drop(entry);
        stream.agent.closed(reason);
        log_closed!(
            ended,
            connection = connection.0,
            address = self.dial.address
        );
        stream.tell(closed(
            connection,
            match reason {
                CloseReason::Stalled => "closed: the endpoint took no bytes",
                CloseReason::BufferExceeded => "closed: the endpoint took bytes too slowly",
                _ => "",
            },
        ));
        let leave = async {
            match reason {
                // The endpoint still gets the bytes that the client sent before the endpoint closed.
                CloseReason::EndpointClosed => server_source.flush(&mut sink).await,
                CloseReason::ClientClosed => {}
                _ if ended.is_complete() => return,
                _ => return reset(source.into_inner(), sink.into_inner()),
            }
            let mut write = sink.into_inner();
            if write.shutdown().await.is_ok() {
                drain(source.into_inner()).await;
            }
        };
        // An endpoint that needs longer than `LINGER` is cut off.
        let _ = timeout(LINGER, leave).await;
    }
}

impl Drop for Entry {
    fn drop(&mut self) {
        self.stream.forget(self.dial, self.connection);
    }
}

// === impl FromServer ===

impl FromServer {
    async fn flush(&mut self, sink: &mut impl Sink) {
        // Sends the rest of a chunk first if its write was interrupted.
        if sink.send(Bytes::new()).await.is_err() {
            return;
        }
        while let Some(Incoming::Data(bytes)) = self.incoming.try_recv() {
            if sink.send(bytes).await.is_err() {
                return;
            }
        }
    }
}

impl Source for FromServer {
    async fn recv(&mut self) -> Result<Option<Bytes>, CloseReason> {
        match self.incoming.recv().await {
            Some(Incoming::Data(bytes)) => {
                self.first_byte_gate.open();
                Ok(Some(bytes))
            }
            Some(Incoming::HalfClosed) => Ok(None),
            Some(Incoming::Closed) => Err(CloseReason::ClientClosed),
            None => Err(CloseReason::ServerLost),
        }
    }

    async fn aborted(&mut self) -> CloseReason {
        loop {
            match self.incoming.recv().await {
                Some(Incoming::Closed) => return CloseReason::ClientClosed,
                Some(_) => {}
                None => return CloseReason::ServerLost,
            }
        }
    }

    async fn fill(&mut self) {
        self.closing.cancelled().await;
    }
}

// === impl ToServer ===

impl Sink for ToServer {
    async fn send_counted(
        &mut self,
        mut chunk: Bytes,
        progress: &Progress,
    ) -> Result<(), CloseReason> {
        self.first_byte_gate.wait().await;
        while !chunk.is_empty() {
            let bytes = chunk.split_to(chunk.len().min(MAX_DATA_BYTES));
            let count = bytes.len();
            let connection = self.connection;
            self.stream
                .send(Message::Data { connection, bytes })
                .await?;
            progress.add(count);
        }
        Ok(())
    }

    /// Sends a half-close. Fails for a stock server, where only a full close exists; the error ends the
    /// connection.
    async fn finish(&mut self) -> Result<(), CloseReason> {
        if !self.stream.half_close {
            return Err(CloseReason::EndpointClosed);
        }
        let connection = self.connection;
        self.stream.tell(Message::HalfClose { connection });
        Ok(())
    }
}
