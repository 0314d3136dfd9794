//! A wire between TCP peers on which what was said is said again, damaged or cut, on connections of its own.
//!
//! In a stream that is to live nothing can be tampered with: TCP brings everything once and in order, and a
//! stock peer ends at the first packet that is not authentic. So the real connections stay as they are,
//! but for a packet that a test has [damaged](Relay::damage).

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

/// How many packets of a connection are kept: the handshake, and the data that comes next.
const KEPT: usize = 40;

/// After so many packets of a client they are said again.
const EVERY: usize = 50;

/// Which way a packet goes.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Way {
    /// From the client.
    ToServer,
    /// To it.
    ToClient,
}

/// A running wire. It ends when it is dropped.
#[derive(Debug)]
pub struct Relay {
    added: Arc<AtomicUsize>,
    damage: [Arc<AtomicBool>; 2],
    _tasks: JoinSet<()>,
}

impl Relay {
    /// Forwards between `server` and clients that connect to `listen`, both seen from `at`.
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
                // The end of either side is that of both.
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

    /// How many connections it has added so far.
    pub fn added(&self) -> usize {
        self.added.load(Ordering::Relaxed)
    }

    /// Damages the next data packet that goes this way, and waits until one has gone.
    ///
    /// # Panics
    /// When there is none within [`PATIENCE`].
    pub async fn damage(&self, way: Way) {
        let damage = &self.damage[way as usize];
        damage.store(true, Ordering::Relaxed);
        eventually("a packet is damaged", PATIENCE, async || {
            !damage.load(Ordering::Relaxed)
        })
        .await;
    }
}

/// Brings packets from one side to the other, and shows them.
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
        // P_DATA_V1 and V2.
        let is_data = matches!(packet.get(2).map(|first| first >> 3), Some(6 | 9));
        if is_data && damage.swap(false, Ordering::Relaxed) {
            *packet.last_mut().expect("a packet") ^= 1;
        }
        to.write_all(&packet).await?;
    }
}

/// What a client has said, with the lengths in front.
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
            // While the last one is still being said, this one need not be.
            self.full.try_send(self.packets.clone()).ok();
        }
    }
}

/// Says again what was recorded: as it was, from the middle on, damaged, and cut within a packet.
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

/// Says all of it and hears the other side out, which may end at any moment.
pub async fn said(mut stream: TcpStream, bytes: &[u8]) {
    if stream.write_all(bytes).await.is_ok() {
        stream.shutdown().await.ok();
    }
    stream.read_to_end(&mut Vec::new()).await.ok();
}
