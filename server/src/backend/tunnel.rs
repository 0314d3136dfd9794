//! The interface of a tunnel. A server may have two tunnels side by side: agents and OpenVPN clients. The
//! router chooses a tunnel for each dial.

use std::pin::Pin;

use culvert_stream::Dial;
use tokio::time::Instant;

use super::Connection;
use super::dial::DialError;
use super::load::ClientSeat;
use crate::tunnel::{Health, Peer};

/// A dial in progress. Dropping it cancels the dial.
pub type Dialing<'a> = Pin<Box<dyn Future<Output = Result<Connection, DialError>> + Send + 'a>>;

/// A tunnel: its peers, and connections through them. The router counts open connections, and ends
/// connections after a switch to another tunnel.
///
/// The tunnel maintains the metrics `established_connections`, `connection_duration_seconds` and
/// `pending_backend_dials`, and counts the dials that a peer refused.
pub trait Tunnel: Send + Sync + 'static {
    /// Returns the health of the best peer. Must be cheap: a server with two tunnels needs the health for
    /// every dial.
    fn health(&self) -> Health;

    /// Opens a connection before the deadline. `StreamDialError::Refused` means that the endpoint itself
    /// cannot be reached, and is final. After other errors the router may try the other tunnel, so nothing
    /// may have been sent to the endpoint.
    fn dial<'a>(&'a self, dial: &'a Dial, deadline: Instant) -> Dialing<'a>;

    /// Returns the connected peers.
    fn peers(&self) -> Vec<Peer>;

    /// Returns a seat for a new client on the thread where the client is best served, if the tunnel has a
    /// preference.
    fn seat(&self) -> Option<ClientSeat> {
        None
    }
}
