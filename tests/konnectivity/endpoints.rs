//! Far ends with habits that the lab's services do not have.

use std::net::{Ipv4Addr, SocketAddr};
use std::time::Duration;

use tokio::net::{TcpListener, TcpStream};

use crate::support::timely;

/// A far end that hands each of its connections to the test.
pub struct Endpoint {
    listener: TcpListener,
}

impl Endpoint {
    /// Listens on a port of 127.0.0.1 that the system chooses.
    pub async fn start() -> Self {
        let listener = TcpListener::bind((Ipv4Addr::LOCALHOST, 0)).await;
        Self {
            listener: listener.unwrap(),
        }
    }

    /// Where it listens.
    pub fn addr(&self) -> SocketAddr {
        self.listener.local_addr().unwrap()
    }

    /// The next connection.
    pub async fn accept(&self) -> TcpStream {
        let accepted = timely("a connection to the endpoint", self.listener.accept());
        accepted.await.unwrap().0
    }
}

/// Closes a connection with a reset.
pub fn reset(stream: TcpStream) {
    let socket = socket2::SockRef::from(&stream);
    // A peer that was faster has ended it as abruptly.
    socket.set_linger(Some(Duration::ZERO)).ok();
}
