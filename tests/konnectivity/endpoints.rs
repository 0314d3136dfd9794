//! Endpoints with behavior missing from the lab's services.

use std::net::{Ipv4Addr, SocketAddr};
use std::time::Duration;

use tokio::net::{TcpListener, TcpStream};

use crate::support::timely;

/// An endpoint whose connections are handled by the test.
pub(crate) struct Endpoint {
    listener: TcpListener,
}

impl Endpoint {
    /// Listens on a free port of 127.0.0.1.
    pub(crate) async fn start() -> Self {
        let listener = TcpListener::bind((Ipv4Addr::LOCALHOST, 0)).await;
        Self {
            listener: listener.unwrap(),
        }
    }

    /// Returns the address of the listener.
    pub(crate) fn addr(&self) -> SocketAddr {
        self.listener.local_addr().unwrap()
    }

    /// Waits for the next connection.
    pub(crate) async fn accept(&self) -> TcpStream {
        let accepted = timely("a connection to the endpoint", self.listener.accept());
        accepted.await.unwrap().0
    }
}

/// Closes a connection with a reset.
pub(crate) fn reset(stream: TcpStream) {
    let socket = socket2::SockRef::from(&stream);
    // Setting the option fails if the peer has already reset the connection.
    socket.set_linger(Some(Duration::ZERO)).ok();
}
