//! A wire between two UDP peers on which datagrams are repeated, damaged and invented.

use std::net::{Ipv4Addr, SocketAddr, SocketAddrV4};
use std::sync::Arc;
use std::sync::atomic::{AtomicUsize, Ordering};

use rand::Rng as _;
use tokio::net::UdpSocket;
use tokio::task::JoinSet;

use super::network::Namespace;

/// How many datagrams are kept for a repetition.
const KEPT: usize = 200;

/// A running wire. It ends when it is dropped.
#[derive(Debug)]
pub struct Tamper {
    bad: Arc<AtomicUsize>,
    _tasks: JoinSet<()>,
}

impl Tamper {
    /// Forwards between `server` and the one client that sends to `listen`, both seen from `at`. Every real
    /// datagram arrives, once at its time, and is followed by an old one of the same direction, by a damaged
    /// copy, and by noise.
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
            // The server may not listen yet, which the kernel tells as an error.
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

    /// How many datagrams it has added so far.
    pub fn added(&self) -> usize {
        self.bad.load(Ordering::Relaxed)
    }
}

/// What has gone one way.
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
        // What cannot be sent is lost, as datagrams are.
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
        // A truncated one too.
        let cut = datagram[..random.random_range(0..datagram.len())].to_vec();
        let mut all = vec![damaged, noise, cut];
        if !self.old.is_empty() {
            all.push(self.old[random.random_range(0..self.old.len())].clone());
        }
        all
    }
}
