//! What has to pass through a tunnel, whoever its ends are.
//!
//! A tunnel is whatever [`Dial`]s: a network namespace whose routes lead into one, a front end of our
//! server, or flows of a session.

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

/// How long one exchange may take. Generous: two cores run many tests.
const LIMIT: Duration = Duration::from_secs(60);

/// Bytes for [`carries`]: many windows, and an odd end.
pub const BULK: u64 = 5_000_001;

/// Whatever opens connections through a tunnel.
pub trait Dial {
    /// Opens one.
    fn dial(&self, to: SocketAddrV4) -> impl Future<Output = io::Result<BoxedStream>>;
}

impl Dial for Namespace {
    async fn dial(&self, to: SocketAddrV4) -> io::Result<BoxedStream> {
        let stream = self.connect(to).await?;
        stream.set_nodelay(true)?;
        Ok(Box::new(stream))
    }
}

/// Reaches a pod, a Service and a node, whose address the seed's side translates to `node` if it does
/// so before the tunnel. All of them see the VPN client's own address.
///
/// # Panics
/// When one of them is not reached, or sees another address.
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

/// Carries so many bytes in either direction, little many times, a half-closed connection, and one whose far end speaks
/// first.
///
/// # Panics
/// When a byte is wrong or missing.
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

/// Carries so many connections at once, while one more is stuck at a far end that reads nothing.
///
/// # Panics
/// When one of them hears something wrong.
pub async fn carries_many(dial: &impl Dial, pod: Ipv4Addr, count: usize) {
    let to = async |port| dial.dial(SocketAddrV4::new(pod, port)).await.unwrap();
    let mut stuck = to(SILENT).await;
    let all = async {
        let flood = vec![0; 65536];
        // Written until nothing fits any more.
        let filled = async { while stuck.write_all(&flood).await.is_ok() {} };
        timeout(Duration::from_secs(1), filled).await.ok();
        let echoes = (0..count).map(|_| async { check::echo(to(RAW).await, 5, 2000).await });
        for outcome in futures_util::future::join_all(echoes).await {
            outcome.unwrap();
        }
    };
    within("many connections", all).await;
}

/// A connection to a port on which nothing listens is refused, not left alone.
///
/// # Panics
/// When it is opened, or not refused.
pub async fn refuses(dial: &impl Dial, pod: Ipv4Addr) {
    let closed = SocketAddrV4::new(pod, 4);
    let outcome = within("a refusal", dial.dial(closed)).await;
    assert!(outcome.is_err(), "{closed} is open");
}

/// Echoes until it is stopped, and then ends as a whole.
///
/// # Errors
/// When the stream ends before.
///
/// # Panics
/// When a byte is wrong.
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

/// Sends through an echo as fast as that goes until it is stopped, and hears all of it again. Gives how many
/// bytes that were.
///
/// # Errors
/// When the stream ends before.
///
/// # Panics
/// When a byte is wrong or missing.
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
