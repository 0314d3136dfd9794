//! An address where a connect neither succeeds nor fails.

use std::net::{Ipv4Addr, SocketAddr};
use std::time::Duration;

use socket2::{Domain, Socket, Type};
use tokio::net::TcpStream;
use tokio::time::timeout;

/// Time after which a connect on the same machine counts as hanging. The kernel completes a connect within
/// microseconds, without help from the listener.
const HANGS: Duration = Duration::from_millis(250);

/// More connections than any kernel queues with a backlog of 0.
const MAX_FILLERS: usize = 16;

/// An open black hole. Dropping the value closes the listener.
#[derive(Debug)]
pub struct BlackHole {
    addr: SocketAddr,
    _listener: Socket,
    _fillers: Vec<TcpStream>,
}

impl BlackHole {
    /// Returns the address to connect to, on 127.0.0.1.
    pub fn addr(&self) -> SocketAddr {
        self.addr
    }
}

/// Opens a black hole: a listener that never accepts and has a full queue, so that the kernel drops every
/// further SYN.
///
/// # Panics
/// If the queue does not fill up.
pub async fn black_hole() -> BlackHole {
    let listener = Socket::new(Domain::IPV4, Type::STREAM, None).unwrap();
    let any = SocketAddr::from((Ipv4Addr::LOCALHOST, 0));
    listener.bind(&any.into()).unwrap();
    listener.listen(0).unwrap();
    let addr = listener.local_addr().unwrap().as_socket().unwrap();
    let mut fillers = Vec::new();
    while let Ok(filler) = timeout(HANGS, TcpStream::connect(addr)).await {
        fillers.push(filler.expect("a filler of the black hole"));
        assert!(
            fillers.len() < MAX_FILLERS,
            "the queue of the listener does not fill up"
        );
    }
    BlackHole {
        addr,
        _listener: listener,
        _fillers: fillers,
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[tokio::test]
    async fn connects_hang_while_the_black_hole_is_open_and_fail_afterwards() {
        let hole = black_hole().await;
        let connect = TcpStream::connect(hole.addr());
        tokio::pin!(connect);
        let hung = timeout(HANGS, &mut connect).await;
        assert!(hung.is_err(), "{hung:?}");
        let addr = hole.addr();
        drop(hole);
        assert!(TcpStream::connect(addr).await.is_err());
    }
}
