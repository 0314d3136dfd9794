//! The traffic that every tunnel must carry, whatever its ends are.
//!
//! A tunnel is any type that implements [`Dial`]: a network namespace with routes into a tunnel, a front end
//! of our server, or the flows of a session.

use std::future::Future;
use std::io;
use std::net::{Ipv4Addr, SocketAddrV4};
use std::time::Duration;

use culvert_kit::check;
use culvert_kit::client::BoxedStream;
use culvert_kit::pattern::{self, MAX_PIECE, Verifier};
use culvert_kit::services::BANNER;
use tokio::io::{AsyncReadExt as _, AsyncWriteExt as _};
use tokio::time::timeout;
use tokio_util::sync::CancellationToken;

use super::cluster::{
    CLIENT, Cluster, FIRST, HALF, HTTPS, KUBELET, NODE, POD, RAW, SERVICE, SILENT,
};
use super::network::Namespace;

/// Time limit of an exchange. Generous, because many tests share two cores.
const LIMIT: Duration = Duration::from_secs(60);

/// Bytes for [`carries`]: many windows, and an odd last piece.
pub const BULK: u64 = 5_000_001;

/// Opens connections through a tunnel.
pub trait Dial {
    /// Opens a connection.
    fn dial(&self, to: SocketAddrV4) -> impl Future<Output = io::Result<BoxedStream>>;
}

impl Dial for Namespace {
    async fn dial(&self, to: SocketAddrV4) -> io::Result<BoxedStream> {
        let stream = self.connect(to).await?;
        stream.set_nodelay(true)?;
        Ok(Box::new(stream))
    }
}

/// Checks that a pod, a Service and a node are reachable, and that all of them see the VPN client's own
/// address as the source. `node` is the address of the node before the tunnel; the seed's side may translate
/// node addresses.
///
/// # Panics
/// If an endpoint is unreachable, or sees another source address.
pub async fn reaches_everything(dial: &impl Dial, cluster: &Cluster, node: Ipv4Addr) {
    cluster.arrivals();
    let places = [
        (POD, HTTPS, POD),
        (SERVICE, HTTPS, POD),
        (node, KUBELET, NODE),
    ];
    for (address, port, place) in places {
        let to = SocketAddrV4::new(address, port);
        let exchange = async {
            let stream = dial.dial(to).await.unwrap();
            let stream = cluster.tls(stream).await.unwrap();
            check::http_get(stream, "/bytes/70000").await.unwrap();
        };
        within(&format!("HTTPS to {to}"), exchange).await;
        let seen: Vec<_> = cluster
            .arrivals()
            .iter()
            .map(|a| (a.from.ip(), a.at))
            .collect();
        let expected = (CLIENT.into(), SocketAddrV4::new(place, port).into());
        assert_eq!(seen, [expected], "{to}");
    }
}

/// Checks a download and an upload of `bulk` bytes, many small messages, a half-closed connection, and a
/// connection whose far end sends first.
///
/// # Panics
/// If a byte is wrong or missing.
pub async fn carries(dial: &impl Dial, pod: Ipv4Addr, bulk: u64) {
    let to = async |port| dial.dial(SocketAddrV4::new(pod, port)).await.unwrap();
    let exchange = async {
        check::download(to(RAW).await, bulk).await.unwrap();
        check::upload(to(RAW).await, bulk).await.unwrap();
        check::echo(to(RAW).await, 50, 1000).await.unwrap();
        let mut half = to(HALF).await;
        half.write_all(b"1234567").await.unwrap();
        half.shutdown().await.unwrap();
        let mut answer = String::new();
        half.read_to_string(&mut answer).await.unwrap();
        assert_eq!(answer, "7\n");
        let mut first = to(FIRST).await;
        let mut banner = vec![0; BANNER.len()];
        first.read_exact(&mut banner).await.unwrap();
        assert_eq!(banner, BANNER);
    };
    within("bytes through the tunnel", exchange).await;
}

/// Checks `count` connections at once, while a further connection is stuck because its far end reads nothing.
///
/// # Panics
/// If a connection receives a wrong byte.
pub async fn carries_many(dial: &impl Dial, pod: Ipv4Addr, count: usize) {
    let to = async |port| dial.dial(SocketAddrV4::new(pod, port)).await.unwrap();
    let mut stuck = to(SILENT).await;
    let all = async {
        let flood = vec![0; 65536];
        // Writes until all buffers are full.
        let filled = async { while stuck.write_all(&flood).await.is_ok() {} };
        timeout(Duration::from_secs(1), filled).await.ok();
        let echoes = (0..count).map(|_| async { check::echo(to(RAW).await, 5, 2000).await });
        for outcome in futures_util::future::join_all(echoes).await {
            outcome.unwrap();
        }
    };
    within("many connections", all).await;
}

/// Checks that a connection to a port without a listener is refused and does not hang.
///
/// # Panics
/// If the connection opens, or is not refused in time.
pub async fn refuses(dial: &impl Dial, pod: Ipv4Addr) {
    let closed = SocketAddrV4::new(pod, 4);
    let outcome = within("a refusal", dial.dial(closed)).await;
    assert!(outcome.is_err(), "{closed} is open");
}

/// Echoes until `stop` is cancelled, and then closes the stream cleanly.
///
/// # Errors
/// If the stream ends too early.
///
/// # Panics
/// If a byte is wrong.
pub async fn long(mut stream: BoxedStream, stop: CancellationToken) -> io::Result<()> {
    stream.write_all(b"echo\n").await?;
    let mut round = 0_u8;
    while !stop.is_cancelled() {
        let sent = [round; 1000];
        let mut heard = [!round; 1000];
        stream.write_all(&sent).await?;
        stream.read_exact(&mut heard).await?;
        assert_eq!(sent, heard);
        round = round.wrapping_add(1);
        tokio::time::sleep(Duration::from_millis(20)).await;
    }
    stream.shutdown().await?;
    assert_eq!(stream.read_to_end(&mut Vec::new()).await?, 0);
    Ok(())
}

/// Sends to an echo service as fast as possible until `stop` is cancelled, and checks that all bytes come
/// back. Returns the number of bytes.
///
/// # Errors
/// If the stream ends too early.
///
/// # Panics
/// If a byte is wrong or missing.
pub async fn steady(mut stream: BoxedStream, stop: CancellationToken) -> io::Result<u64> {
    stream.write_all(b"echo\n").await?;
    let (mut reader, mut writer) = tokio::io::split(stream);
    let sending = async {
        let mut sent = 0;
        while !stop.is_cancelled() {
            let piece = pattern::piece(sent, MAX_PIECE as u64);
            writer.write_all(&piece).await?;
            sent += piece.len() as u64;
        }
        writer.shutdown().await?;
        Ok(sent)
    };
    let hearing = async {
        let mut verifier = Verifier::default();
        let mut buffer = vec![0; MAX_PIECE];
        loop {
            let n = reader.read(&mut buffer).await?;
            let (heard, _) = buffer.split_at(n);
            verifier.feed(heard).expect("the byte that was sent, at");
            if n == 0 {
                return io::Result::Ok(verifier.verified());
            }
        }
    };
    let (sent, heard) = tokio::try_join!(sending, hearing)?;
    assert_eq!(heard, sent);
    Ok(sent)
}

async fn within<T>(what: &str, exchange: impl Future<Output = T>) -> T {
    let done = timeout(LIMIT, exchange).await;
    done.unwrap_or_else(|_| panic!("{what}: not within {LIMIT:?}"))
}
