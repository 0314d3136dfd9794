//! A wire between TCP peers that repeats recorded packets on additional connections: unchanged, damaged or
//! cut.
//!
//! The packets of a working connection cannot be repeated or reordered: TCP delivers every byte once and in
//! order, and a stock peer closes the connection at the first packet that is not authentic. The real
//! connections therefore stay unchanged, except for packets that a test has [damaged](Relay::damage).

use std::net::SocketAddrV4;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, AtomicUsize, Ordering};

use rand::Rng as _;
use tokio::io::{AsyncReadExt as _, AsyncWriteExt as _, BufReader};
use tokio::net::TcpStream;
use tokio::net::tcp::{OwnedReadHalf, OwnedWriteHalf};
use tokio::sync::mpsc;
use tokio::task::JoinSet;

use super::network::Namespace;
use crate::topology::PATIENCE;
use crate::wait::eventually;

/// Number of packets recorded per connection: the handshake and the first data packets.
const KEPT: usize = 40;

/// Number of client packets after which the recorded packets are repeated.
const EVERY: usize = 50;

/// The direction of a packet.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Way {
    /// From the client to the server.
    ToServer,
    /// From the server to the client.
    ToClient,
}

/// A running wire. Dropping the value ends the wire.
#[derive(Debug)]
pub struct Relay {
    added: Arc<AtomicUsize>,
    damage: [Arc<AtomicBool>; 2],
    _tasks: JoinSet<()>,
}

impl Relay {
    /// Starts a wire in the namespace `at`, between `server` and the clients that connect to `listen`.
    pub fn start(at: &Namespace, listen: SocketAddrV4, server: SocketAddrV4) -> Self {
        let listener = at.listen(listen);
        let (added, damage) = (
            Arc::<AtomicUsize>::default(),
            <[Arc<AtomicBool>; 2]>::default(),
        );
        let [to_server, to_client] = damage.clone();
        let (records, recorded) = mpsc::channel(1);
        let mut tasks = JoinSet::new();
        tasks.spawn(repeat(at.clone(), server, recorded, added.clone()));
        let at = at.clone();
        tasks.spawn(async move {
            let mut connections = JoinSet::new();
            while let Ok((client, _)) = listener.accept().await {
                let Ok(server) = at.connect(server).await else {
                    continue;
                };
                let (from_client, back) = client.into_split();
                let (answers, to) = server.into_split();
                let mut record = Record::new(records.clone());
                let hurt = to_server.clone();
                let forth = pump(from_client, to, hurt, move |packet| record.take(packet));
                let back = pump(answers, back, to_client.clone(), |_| {});
                // The end of either direction closes both sides.
                connections.spawn(async move {
                    tokio::select! {
                        _ = forth => {}
                        _ = back => {}
                    }
                });
                while connections.try_join_next().is_some() {}
            }
        });
        Self {
            added,
            damage,
            _tasks: tasks,
        }
    }

    /// Returns the number of connections that the wire has added so far.
    pub fn added(&self) -> usize {
        self.added.load(Ordering::Relaxed)
    }

    /// Damages the next data packet in this direction, and waits until the packet was damaged.
    ///
    /// # Panics
    /// If no data packet passes within [`PATIENCE`].
    pub async fn damage(&self, way: Way) {
        let damage = &self.damage[way as usize];
        damage.store(true, Ordering::Relaxed);
        eventually("a packet is damaged", PATIENCE, async || {
            !damage.load(Ordering::Relaxed)
        })
        .await;
    }
}

/// Forwards packets in a single direction, and passes each packet to `show`.
async fn pump(
    from: OwnedReadHalf,
    mut to: OwnedWriteHalf,
    damage: Arc<AtomicBool>,
    mut show: impl FnMut(&[u8]),
) -> std::io::Result<()> {
    let mut from = BufReader::new(from);
    loop {
        let length = from.read_u16().await?;
        let mut packet = length.to_be_bytes().to_vec();
        packet.resize(2 + usize::from(length), 0);
        from.read_exact(&mut packet[2..]).await?;
        show(&packet);
        // The opcodes P_DATA_V1 and P_DATA_V2.
        let is_data = matches!(packet.get(2).map(|first| first >> 3), Some(6 | 9));
        if is_data && damage.swap(false, Ordering::Relaxed) {
            *packet.last_mut().expect("a packet") ^= 1;
        }
        to.write_all(&packet).await?;
    }
}

/// The first packets of a client, each with its length prefix.
struct Record {
    packets: Vec<Vec<u8>>,
    count: usize,
    full: mpsc::Sender<Vec<Vec<u8>>>,
}

impl Record {
    fn new(full: mpsc::Sender<Vec<Vec<u8>>>) -> Self {
        Self {
            packets: Vec::new(),
            count: 0,
            full,
        }
    }

    fn take(&mut self, packet: &[u8]) {
        if self.packets.len() < KEPT {
            self.packets.push(packet.to_vec());
        }
        self.count += 1;
        if self.count.is_multiple_of(EVERY) {
            // Fails while an earlier record is still being repeated. This record is then skipped.
            self.full.try_send(self.packets.clone()).ok();
        }
    }
}

/// Repeats recorded packets on new connections: unchanged, from the middle on, damaged, and cut within a
/// packet.
async fn repeat(
    at: Namespace,
    server: SocketAddrV4,
    mut recorded: mpsc::Receiver<Vec<Vec<u8>>>,
    added: Arc<AtomicUsize>,
) {
    while let Some(packets) = recorded.recv().await {
        let (whole, end) = (packets.concat(), packets[packets.len() / 2..].concat());
        let (mut damaged, mut cut) = (whole.clone(), whole.clone());
        for _ in 0..5 {
            let place = rand::rng().random_range(0..damaged.len());
            damaged[place] ^= 1 << rand::rng().random_range(0..8);
        }
        cut.truncate(rand::rng().random_range(0..whole.len()));
        for bytes in [whole, end, damaged, cut] {
            let Ok(stream) = at.connect(server).await else {
                continue;
            };
            said(stream, &bytes).await;
            added.fetch_add(1, Ordering::Relaxed);
        }
    }
}

/// Sends all bytes, then reads until the other side closes the connection, which may happen at any moment.
pub async fn said(mut stream: TcpStream, bytes: &[u8]) {
    if stream.write_all(bytes).await.is_ok() {
        stream.shutdown().await.ok();
    }
    stream.read_to_end(&mut Vec::new()).await.ok();
}
