//! An address whose connects never end: they neither succeed nor fail.

use std::net::{Ipv4Addr, SocketAddr};
use std::time::Duration;

use socket2::{Domain, Socket, Type};
use tokio::net::TcpStream;
use tokio::time::timeout;

/// How long a connect on one machine must hang to count as hanging: the kernel completes one
/// within microseconds, without the listener's help.
const HANGS: Duration = Duration::from_millis(250);

/// More connections than any kernel queues on a backlog of 0.
const MAX_FILLERS: usize = 16;

/// Keeps the hole open.
#[derive(Debug)]
pub struct BlackHole {
    addr: SocketAddr,
    _listener: Socket,
    _fillers: Vec<TcpStream>,
}

impl BlackHole {
    /// The address to connect to, on 127.0.0.1.
    pub fn addr(&self) -> SocketAddr {
        self.addr
    }
}

/// Opens a black hole: a listener that never accepts and whose queue is full, so that the kernel drops
/// every further SYN.
///
/// # Panics
/// When the queue cannot be filled.
pub async fn black_hole() -> BlackHole {
    let listener = Socket::new(Domain::IPV4, Type::STREAM, None).unwrap();
    let any = SocketAddr::from((Ipv4Addr::LOCALHOST, 0));
    listener.bind(&any.into()).unwrap();
    listener.listen(0).unwrap();
    let addr = listener.local_addr().unwrap().as_socket().unwrap();
    let mut fillers = Vec::new();
    while let Ok(filler) = timeout(HANGS, TcpStream::connect(addr)).await {
        fillers.push(filler.expect("a filler of the black hole"));
        assert!(fillers.len() < MAX_FILLERS, "the black hole does not fill");
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
    async fn connects_hang_while_it_is_open_and_fail_afterwards() {
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
