//! A wire between two UDP peers that adds repeated, damaged and invented datagrams.

use std::net::{Ipv4Addr, SocketAddr, SocketAddrV4};
use std::sync::Arc;
use std::sync::atomic::{AtomicUsize, Ordering};

use rand::Rng as _;
use tokio::net::UdpSocket;
use tokio::task::JoinSet;

use super::network::Namespace;

/// Number of datagrams kept per direction for repetition.
const KEPT: usize = 200;

/// A running wire. Dropping the value ends the wire.
#[derive(Debug)]
pub struct Tamper {
    bad: Arc<AtomicUsize>,
    _tasks: JoinSet<()>,
}

impl Tamper {
    /// Starts a wire in the namespace `at`, between `server` and the only client that sends to `listen`.
    /// Every real datagram arrives once and in time. After each datagram, the wire adds a damaged copy,
    /// noise, a truncated copy, and an older datagram of the same direction.
    pub fn start(at: &Namespace, listen: SocketAddrV4, server: SocketAddrV4) -> Self {
        let front = Arc::new(at.udp(listen));
        let back = Arc::new(at.udp(SocketAddrV4::new(Ipv4Addr::UNSPECIFIED, 0)));
        let bad = Arc::new(AtomicUsize::new(0));
        let mut tasks = JoinSet::new();
        let (client, known) = tokio::sync::watch::channel(None);
        {
            let (front, back, bad) = (front.clone(), back.clone(), bad.clone());
            tasks.spawn(async move {
                let mut direction = Direction::new(bad);
                let mut bytes = vec![0; 4096];
                while let Ok((count, from)) = front.recv_from(&mut bytes).await {
                    client.send_replace(Some(from));
                    direction.pass(&bytes[..count], &back, server.into()).await;
                }
            });
        }
        let counted = Arc::clone(&bad);
        tasks.spawn(async move {
            let mut direction = Direction::new(counted);
            let mut bytes = vec![0; 4096];
            // The kernel reports an error while the server does not listen yet.
            loop {
                let Ok((count, _)) = back.recv_from(&mut bytes).await else {
                    continue;
                };
                let client = *known.borrow();
                if let Some(client) = client {
                    direction.pass(&bytes[..count], &front, client).await;
                }
            }
        });
        Self { bad, _tasks: tasks }
    }

    /// Returns the number of datagrams that the wire has added so far.
    pub fn added(&self) -> usize {
        self.bad.load(Ordering::Relaxed)
    }
}

/// The datagrams of a single direction.
struct Direction {
    old: Vec<Vec<u8>>,
    bad: Arc<AtomicUsize>,
}

impl Direction {
    fn new(bad: Arc<AtomicUsize>) -> Self {
        Self {
            old: Vec::new(),
            bad,
        }
    }

    async fn pass(&mut self, datagram: &[u8], socket: &UdpSocket, to: SocketAddr) {
        // A datagram that cannot be sent is lost, as on any network.
        socket.send_to(datagram, to).await.ok();
        for bad in self.made_up(datagram) {
            socket.send_to(&bad, to).await.ok();
            self.bad.fetch_add(1, Ordering::Relaxed);
        }
        if self.old.len() == KEPT {
            self.old.remove(0);
        }
        self.old.push(datagram.to_vec());
    }

    fn made_up(&self, datagram: &[u8]) -> Vec<Vec<u8>> {
        let mut random = rand::rng();
        let mut damaged = datagram.to_vec();
        let at = random.random_range(0..damaged.len());
        damaged[at] ^= 1 << random.random_range(0..8);
        let mut noise = vec![0; random.random_range(0..200)];
        random.fill(noise.as_mut_slice());
        let cut = datagram[..random.random_range(0..datagram.len())].to_vec();
        let mut all = vec![damaged, noise, cut];
        if !self.old.is_empty() {
            all.push(self.old[random.random_range(0..self.old.len())].clone());
        }
        all
    }
}
