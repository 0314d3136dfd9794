//! One connection from the tunnel: finds the target, dials it, and copies bytes until either side ends.

use std::io;
use std::net::SocketAddrV4;
use std::pin::pin;
use std::sync::Arc;

use culvert_host::net::listen::reset;
use culvert_openvpn::flows::{Closed, Refusal, Unreachable};
use culvert_openvpn_io::stream::{Broken, Incoming, Stream};
use culvert_stream::connection::run_connection;
use culvert_stream::io::linger_close;
use culvert_stream::{CloseReason, HALF_OPEN_IDLE, log_closed};
use tokio::net::TcpStream;
use tokio_util::sync::CancellationToken;
use tracing::debug;

use super::tunnel::Tunnel;
use crate::agent::{Dialed, endpoint_halves};
use crate::metrics::DialFailureReason;

/// One connection, starting at its SYN.
pub(crate) struct Endpoint {
    /// Tunnel of the connection.
    pub tunnel: Arc<Tunnel>,
    /// Request to open the connection.
    pub incoming: Incoming,
    /// Fires when the tunnel has ended.
    pub ended: CancellationToken,
}

impl Endpoint {
    /// Dials the target and carries the connection to its end.
    pub(crate) async fn run(self) {
        let Self {
            tunnel,
            incoming,
            ended,
        } = self;
        let agent = &tunnel.agent;
        // Counted from the dial on, so that a draining agent waits for dials in progress.
        let _active = agent.activity();
        let target = match tunnel.target(incoming.destination) {
            Ok(target) => target,
            Err(text) => {
                agent
                    .metrics
                    .dial_failures(DialFailureReason::Unknown)
                    .increment(1);
                debug!(destination = %incoming.destination, error = text, "refused");
                return incoming.refuse(Refusal::Reset);
            }
        };
        let address = target.to_string();
        let dialed = tokio::select! {
            dialed = agent.dial("tcp", &address) => dialed,
            () = ended.cancelled() => return,
        };
        match dialed {
            Ok(Dialed {
                socket,
                open: _open,
            }) => {
                let source = incoming.source;
                // `None` means that the tunnel has ended meanwhile.
                if let Some(stream) = incoming.accept() {
                    carry(&tunnel, socket, stream, (source, target), &ended).await;
                }
            }
            Err(error) => {
                incoming.refuse(refusal(error.kind));
            }
        }
    }
}

/// Returns the answer that the network would send if the SYN had reached the target directly.
fn refusal(kind: io::ErrorKind) -> Refusal {
    Refusal::Unreachable(match kind {
        io::ErrorKind::NetworkUnreachable => Unreachable::Network,
        io::ErrorKind::HostUnreachable | io::ErrorKind::TimedOut => Unreachable::Host,
        io::ErrorKind::PermissionDenied => Unreachable::Prohibited,
        _ => return Refusal::Reset,
    })
}

/// Returns the close reason of a connection whose flow has ended.
fn reason(broken: Broken) -> CloseReason {
    match broken {
        Broken::TunnelLost => CloseReason::ServerLost,
        Broken::Flow(Closed::Finished) => CloseReason::Finished,
        _ => CloseReason::ClientLost,
    }
}

async fn carry(
    tunnel: &Tunnel,
    socket: TcpStream,
    stream: Stream,
    (client, target): (SocketAddrV4, SocketAddrV4),
    ended: &CancellationToken,
) {
    let agent = &tunnel.agent;
    let (mut source, mut sink) = endpoint_halves(socket);
    let (mut tunnel_source, mut tunnel_sink) = stream.halves(reason);
    let cut = pin!(agent.server_lost(ended));
    let ended = run_connection(
        (&mut tunnel_source, &mut tunnel_sink),
        (&mut source, &mut sink),
        agent.metrics.streams.both_directions(),
        HALF_OPEN_IDLE,
        cut,
    )
    .await;
    agent.closed(ended.reason);
    log_closed!(ended, %client, destination = %target);
    // Without an end of its direction, the flow is reset after the bytes that the endpoint has sent.
    tunnel_sink.leave(&agent.leaving);
    drop(tunnel_source);
    if !ended.is_complete() {
        reset(source.into_inner(), sink.into_inner());
    } else if ended.reason == CloseReason::Finished {
        linger_close(source.into_inner(), sink.into_inner()).await;
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn dial_errors_map_to_the_matching_refusal() {
        use io::ErrorKind;
        let unreachable = Refusal::Unreachable;
        for (kind, expected) in [
            (ErrorKind::ConnectionRefused, Refusal::Reset),
            (ErrorKind::Other, Refusal::Reset),
            (ErrorKind::HostUnreachable, unreachable(Unreachable::Host)),
            (ErrorKind::TimedOut, unreachable(Unreachable::Host)),
            (
                ErrorKind::NetworkUnreachable,
                unreachable(Unreachable::Network),
            ),
            (
                ErrorKind::PermissionDenied,
                unreachable(Unreachable::Prohibited),
            ),
        ] {
            assert_eq!(refusal(kind), expected, "{kind}");
        }
    }
}
