//! Strangers beside the load. They use an address of their own, as other hosts do.
//!
//! | attack | bytes of each connection |
//! |---|---|
//! | silent | none |
//! | noise | random bytes |
//! | half a handshake | a TLS record that never ends |
//! | body | a request with a large body |
//! | foreign certificate | a TLS handshake with a certificate of another authority, and a large body |
//! | datagrams | OpenVPN's first packet with random session ids, over UDP |

use std::net::{Ipv4Addr, SocketAddr};
use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering};
use std::time::Duration;

use culvert_kit::client::connect_tls;
use culvert_kit::pki::{Pair, Pki};
use tokio::io::{AsyncRead, AsyncReadExt as _, AsyncWrite, AsyncWriteExt as _};
use tokio::net::{TcpSocket, TcpStream, UdpSocket};
use tokio::task::JoinSet;
use tokio::time::{sleep, timeout};

use crate::soak::random::{Random, fill};

/// Address of all attackers.
const SOURCE: SocketAddr = SocketAddr::new(std::net::IpAddr::V4(Ipv4Addr::new(127, 0, 0, 66)), 0);

/// Number of silent connections at each listener. More than the 256 slots of a listener.
const SILENT: usize = 300;

/// Number of other attackers of each kind at each listener.
const LOUD: usize = 4;

/// Longest life of a connection, and the pause before the next one.
const HELD: Duration = Duration::from_secs(20);
const PAUSE: Duration = Duration::from_millis(100);

/// Bytes after the first bytes of a large body.
const BODY: usize = 256 * 1024;

/// Running attacks. Dropping the value ends them.
pub(super) struct Attackers {
    _tasks: JoinSet<()>,
    connections: Arc<AtomicU64>,
}

/// Listeners to attack.
pub(super) struct Victims {
    /// Listeners that expect TLS.
    pub tls: Vec<SocketAddr>,
    /// Listeners that expect plain HTTP.
    pub http: Vec<SocketAddr>,
    /// OpenVPN listeners: TCP and UDP.
    pub openvpn: Option<[SocketAddr; 2]>,
}

/// First bytes of a connection.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum Opening {
    Silent,
    Noise,
    HalfHandshake,
    Body,
}

impl Attackers {
    /// Starts all attacks. The certificate `foreign` is of another authority than the listener `agents`.
    pub(super) fn start(
        victims: &Victims,
        agents: SocketAddr,
        pki: &Pki,
        foreign: &Pair,
        mut random: Random,
    ) -> anyhow::Result<Self> {
        let connections = Arc::new(AtomicU64::new(0));
        let mut tasks = JoinSet::new();
        let mut attack = |at, opening, count| {
            for _ in 0..count {
                let random = Random::new(random.next());
                tasks.spawn(repeat(at, opening, random, Arc::clone(&connections)));
            }
        };
        let openvpn = victims.openvpn.map(|[tcp, _]| tcp);
        for at in victims.tls.iter().copied().chain(openvpn) {
            attack(at, Opening::Silent, SILENT);
            attack(at, Opening::Noise, LOUD);
            attack(at, Opening::HalfHandshake, LOUD);
        }
        for at in &victims.http {
            attack(*at, Opening::Silent, SILENT);
            attack(*at, Opening::Noise, LOUD);
            attack(*at, Opening::Body, LOUD);
        }
        let tls = pki.client_tls(foreign, &["h2"])?;
        for _ in 0..LOUD {
            let (tls, connections) = (Arc::clone(&tls), Arc::clone(&connections));
            tasks.spawn(async move {
                loop {
                    let name = "localhost".try_into();
                    if let Ok(name) = name
                        && let Ok(stream) = connect_tls(agents, &tls, &name).await
                    {
                        connections.fetch_add(1, Ordering::Relaxed);
                        hold(stream, &vec![0; BODY]).await;
                    }
                    sleep(PAUSE).await;
                }
            });
        }
        if let Some([_, udp]) = victims.openvpn {
            tasks.spawn(datagrams(udp, Random::new(random.next())));
        }
        Ok(Self {
            _tasks: tasks,
            connections,
        })
    }

    /// Returns the number of successful connections so far.
    pub(super) fn connections(&self) -> u64 {
        self.connections.load(Ordering::Relaxed)
    }
}

/// Connects again and again.
async fn repeat(at: SocketAddr, opening: Opening, mut random: Random, connections: Arc<AtomicU64>) {
    loop {
        if let Ok(stream) = connect(at).await {
            connections.fetch_add(1, Ordering::Relaxed);
            hold(stream, &opening.bytes(random.next())).await;
        }
        sleep(PAUSE).await;
    }
}

async fn connect(at: SocketAddr) -> std::io::Result<TcpStream> {
    let socket = TcpSocket::new_v4()?;
    socket.bind(SOURCE)?;
    socket.connect(at).await
}

/// Sends bytes, and waits until the listener closes the connection or the time is up.
async fn hold(mut stream: impl AsyncRead + AsyncWrite + Unpin, bytes: &[u8]) {
    let held = async {
        stream.write_all(bytes).await?;
        stream.flush().await?;
        while stream.read(&mut [0; 512]).await? > 0 {}
        std::io::Result::Ok(())
    };
    // The listener may close the connection at any time.
    timeout(HELD, held).await.ok();
}

impl Opening {
    fn bytes(self, seed: u64) -> Vec<u8> {
        let (mut bytes, noise) = match self {
            Self::Silent => (Vec::new(), 0),
            Self::Noise => (Vec::new(), 2000),
            // The start of a ClientHello of 16,384 bytes. A tenth of its bytes follows.
            Self::HalfHandshake => (vec![22, 3, 1, 0x40, 0, 1, 0, 0x3f, 0xfc], 1600),
            Self::Body => (
                b"POST / HTTP/1.1\r\nHost: a\r\nContent-Length: 1000000000\r\n\r\n".to_vec(),
                BODY,
            ),
        };
        let begin = bytes.len();
        bytes.resize(begin + noise, 0);
        fill(seed, 0, bytes.get_mut(begin..).unwrap_or_default());
        bytes
    }
}

/// Sends OpenVPN's first packet of a client, P_CONTROL_HARD_RESET_CLIENT_V2, with random session ids.
async fn datagrams(to: SocketAddr, mut random: Random) {
    let Ok(socket) = UdpSocket::bind(SOURCE).await else {
        return;
    };
    loop {
        let mut packet = vec![7 << 3];
        packet.extend(random.next().to_be_bytes());
        packet.extend([0; 5]);
        // The kernel reports that nothing listens while the server restarts.
        socket.send_to(&packet, to).await.ok();
        sleep(PAUSE / 5).await;
    }
}

#[cfg(test)]
mod tests {
    #![allow(clippy::unwrap_used)]
    use culvert_tests::eventually;
    use tokio::net::TcpListener;

    use super::*;

    const LIMIT: Duration = Duration::from_secs(20);

    #[tokio::test]
    async fn attackers_come_from_their_own_address_and_return() {
        let listener = TcpListener::bind("127.0.0.1:0").await.unwrap();
        let at = listener.local_addr().unwrap();
        let dir = tempfile::tempdir().unwrap();
        let pki = Pki::create(dir.path()).unwrap();
        let foreign = Pki::create_other(dir.path()).unwrap();
        let victims = Victims {
            tls: vec![at],
            http: Vec::new(),
            openvpn: None,
        };
        // Nothing listens on port 1.
        let agents = SocketAddr::from(([127, 0, 0, 1], 1));
        let random = Random::new(1);
        let attackers = Attackers::start(&victims, agents, &pki, &foreign.client, random).unwrap();
        let mut streams = Vec::new();
        for _ in 0..SILENT + 2 * LOUD {
            let (stream, peer) = listener.accept().await.unwrap();
            assert_eq!(peer.ip(), SOURCE.ip());
            streams.push(stream);
        }
        drop(streams);
        eventually("attackers return", LIMIT, async || {
            let connections = attackers.connections();
            let all = (SILENT + 2 * LOUD) as u64;
            (connections > all).then_some(()).ok_or(connections)
        })
        .await;
    }

    #[test]
    fn only_silent_attackers_send_nothing() {
        assert!(Opening::Silent.bytes(1).is_empty());
        assert_ne!(Opening::Noise.bytes(1), Opening::Noise.bytes(2));
        assert_eq!(Opening::HalfHandshake.bytes(1).first(), Some(&22));
        assert!(Opening::Body.bytes(1).starts_with(b"POST "));
        assert!(Opening::Body.bytes(1).len() > BODY);
    }
}
