//! A TCP load balancer that picks a backend at random, like the Service in front of several servers.

use std::io;
use std::net::{Ipv4Addr, SocketAddr};
use std::sync::Arc;
use std::sync::atomic::{AtomicUsize, Ordering};
use std::time::Duration;

use parking_lot::Mutex;
use rand::seq::IndexedRandom as _;
use socket2::SockRef;
use tokio::io::copy_bidirectional;
use tokio::net::{TcpListener, TcpStream};
use tokio_util::sync::{CancellationToken, DropGuard};

/// A running balancer. Dropping the value closes all connections through the balancer.
#[derive(Debug)]
pub struct Balancer {
    addr: SocketAddr,
    state: Arc<State>,
    _stop: DropGuard,
}

#[derive(Debug)]
struct State {
    backends: Mutex<Vec<SocketAddr>>,
    accepted: AtomicUsize,
    /// Resets the connections that exist.
    reset: Mutex<CancellationToken>,
}

impl Balancer {
    /// Listens on a port of 127.0.0.1 that the system chooses. If the backend of a connection is unreachable,
    /// the balancer closes the connection.
    ///
    /// # Panics
    /// If the balancer cannot listen, or `backends` is empty.
    pub async fn start(backends: Vec<SocketAddr>) -> Self {
        Self::at(Ipv4Addr::LOCALHOST, backends).await
    }

    /// Listens at an address of this machine, as [`start`](Self::start).
    ///
    /// # Panics
    /// If the balancer cannot listen, or `backends` is empty.
    pub async fn at(address: Ipv4Addr, backends: Vec<SocketAddr>) -> Self {
        assert!(
            !backends.is_empty(),
            "a balancer needs at least one backend"
        );
        let listener = TcpListener::bind((address, 0)).await;
        let listener = listener.expect("a balancer's listener");
        let addr = listener.local_addr().unwrap();
        let stop = CancellationToken::new();
        let state = Arc::new(State {
            backends: Mutex::new(backends),
            accepted: AtomicUsize::new(0),
            reset: Mutex::default(),
        });
        let accepting = accept(listener, state.clone(), stop.clone());
        tokio::spawn(stop.clone().run_until_cancelled_owned(accepting));
        Self {
            addr,
            state,
            _stop: stop.drop_guard(),
        }
    }

    /// Replaces the backends of new connections. Without backends, the balancer closes new connections.
    pub fn set(&self, backends: Vec<SocketAddr>) {
        *self.state.backends.lock() = backends;
    }

    /// Resets all connections on both sides, and not only closes them.
    pub fn reset(&self) {
        std::mem::take(&mut *self.state.reset.lock()).cancel();
    }

    /// Returns the number of connections so far.
    pub fn accepted(&self) -> usize {
        self.state.accepted.load(Ordering::Relaxed)
    }

    /// Returns the address of the listener.
    pub fn addr(&self) -> SocketAddr {
        self.addr
    }
}

async fn accept(listener: TcpListener, state: Arc<State>, stop: CancellationToken) {
    loop {
        let (client, _) = listener.accept().await.expect("accepting in a balancer");
        state.accepted.fetch_add(1, Ordering::Relaxed);
        let Some(backend) = state.backends.lock().choose(&mut rand::rng()).copied() else {
            continue;
        };
        // An error of one side ends this task, which closes both sides.
        let relay = relay(client, backend, state.reset.lock().clone());
        tokio::spawn(stop.clone().run_until_cancelled_owned(relay));
    }
}

async fn relay(
    mut client: TcpStream,
    backend: SocketAddr,
    reset: CancellationToken,
) -> io::Result<()> {
    let mut backend = TcpStream::connect(backend).await?;
    client.set_nodelay(true)?;
    backend.set_nodelay(true)?;
    tokio::select! {
        copied = copy_bidirectional(&mut client, &mut backend) => copied.map(|_| ()),
        () = reset.cancelled() => {
            for side in [&client, &backend] {
                SockRef::from(side).set_linger(Some(Duration::ZERO))?;
            }
            Ok(())
        }
    }
}

#[cfg(test)]
mod tests {
    use culvert_kit::check;
    use culvert_kit::services::Services;
    use tokio::io::AsyncReadExt as _;

    use super::*;
    use crate::wait::eventually;

    const LIMIT: Duration = Duration::from_secs(20);

    #[tokio::test]
    async fn reaches_every_backend() {
        let services = [
            Services::start().await.unwrap(),
            Services::start().await.unwrap(),
        ];
        let balancer = Balancer::start(services.iter().map(|s| s.first).collect()).await;
        let mut held = Vec::new();
        eventually("both backends are in use", LIMIT, async || {
            let mut stream = TcpStream::connect(balancer.addr()).await.unwrap();
            stream.read_u8().await.unwrap();
            held.push(stream);
            services.iter().all(|s| s.open_connections() > 0)
        })
        .await;
        assert_eq!(balancer.accepted(), held.len());
        balancer.set(Vec::new());
        let mut refused = TcpStream::connect(balancer.addr()).await.unwrap();
        assert_eq!(refused.read(&mut [0]).await.unwrap_or_default(), 0);
        drop(balancer);
        for mut stream in held {
            // The balancer may already have forwarded the rest of the banner.
            stream.read_to_end(&mut Vec::new()).await.ok();
        }
    }

    #[tokio::test]
    async fn carries_both_directions() {
        let services = Services::start().await.unwrap();
        let balancer = Balancer::start(vec![services.raw]).await;
        let stream = TcpStream::connect(balancer.addr()).await.unwrap();
        check::echo(stream, 3, 300_000).await.unwrap();
    }
}
