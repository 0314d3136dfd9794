//! Both ends of a connection.
//!
//! The client sends a header and its bytes, while the endpoint sends its own bytes. Each side compares each byte with
//! the stream of the connection's seed. A receipt of the endpoint follows its last byte, once all of the client's bytes
//! have arrived.

use std::io;
use std::net::SocketAddr;
use std::sync::Arc;
use std::time::Duration;

use anyhow::{Context as _, anyhow, bail};
use socket2::SockRef;
use tokio::io::{AsyncRead, AsyncReadExt as _, AsyncWrite, AsyncWriteExt as _};
use tokio::net::{TcpListener, TcpSocket, TcpStream};
use tokio::sync::watch;
use tokio::task::JoinSet;
use tokio::time::{Instant, sleep, timeout};

use crate::endpoint;
use crate::entry::Entry;
use crate::soak::ledger::{Ledger, Path};
use crate::soak::plan::{Ending, Plan};
use crate::soak::random::{Random, difference, fill};

/// Time limit of a dial. Longer than the 35 s after which the server ends every dial.
const DIAL_LIMIT: Duration = Duration::from_secs(40);

/// Time limit of everything after the dial. The longest plan takes about ten seconds on an idle machine, and a program
/// may be frozen meanwhile.
const LIMIT: Duration = Duration::from_secs(120);

/// Largest read, in bytes.
const READ: usize = 64 * 1024;

/// Most pauses of a direction, so that one connection does not outlast a run.
const PAUSES: u32 = 20;

/// A direction that ended early or carried wrong bytes.
#[derive(Debug, thiserror::Error)]
enum Broken {
    #[error("after {0} bytes: {1}")]
    Io(u64, io::Error),
    #[error("ended after {0} bytes")]
    Short(u64),
    #[error("byte {0} is wrong")]
    Wrong(u64),
}

// === both ends ===

/// Sends the first `count` bytes of a stream as planned.
async fn send(
    to: &mut (impl AsyncWrite + Unpin),
    plan: &Plan,
    seed: u64,
    count: u64,
) -> Result<(), Broken> {
    let (mut sent, mut pauses) = (0, PAUSES);
    let mut piece = vec![0; READ];
    while sent < count {
        let wanted =
            usize::try_from(plan.piece.min(count - sent)).map_or(READ, |n| n.clamp(1, READ));
        let piece = piece.get_mut(..wanted).unwrap_or_default();
        fill(seed, sent, piece);
        to.write_all(piece)
            .await
            .map_err(|error| Broken::Io(sent, error))?;
        sent += wanted as u64;
        if pauses > 0 && !plan.pause.is_zero() {
            pauses -= 1;
            to.flush().await.map_err(|error| Broken::Io(sent, error))?;
            sleep(plan.pause).await;
        }
    }
    to.flush().await.map_err(|error| Broken::Io(sent, error))
}

/// Receives and compares the first `count` bytes of a stream, with a pause after half of them.
async fn receive(
    from: &mut (impl AsyncRead + Unpin),
    seed: u64,
    count: u64,
    mut stall: Duration,
) -> Result<(), Broken> {
    let mut buffer = vec![0; READ];
    let mut received = 0;
    let mut body = from.take(count);
    while body.limit() > 0 {
        let read = body
            .read(&mut buffer)
            .await
            .map_err(|error| Broken::Io(received, error))?;
        if read == 0 {
            return Err(Broken::Short(received));
        }
        if let Some(at) = difference(seed, received, buffer.get(..read).unwrap_or_default()) {
            return Err(Broken::Wrong(at));
        }
        received += read as u64;
        if received >= count / 2 && !stall.is_zero() {
            sleep(std::mem::take(&mut stall)).await;
        }
    }
    Ok(())
}

// === client ===

/// Carries connections of a path, one after another, until `stop` is true.
pub(super) async fn work(
    path: Path,
    entry: Entry,
    target: SocketAddr,
    ledger: Arc<Ledger>,
    stop: watch::Receiver<bool>,
    mut random: Random,
) {
    while !*stop.borrow() {
        let plan = ledger.plan();
        ledger.begins(path, &plan);
        match carry(&entry, target, &plan, &ledger).await {
            Ok(dial) => ledger.succeeds(&plan, dial),
            Err(error) => {
                ledger.failed(&plan, &error);
                // Dials of an outage fail at once.
                sleep(Duration::from_millis(100)).await;
            }
        }
        sleep(random.millis(20, 300)).await;
    }
}

/// Sends small connections until one of them succeeds.
pub(super) async fn recovers(
    entry: &Entry,
    target: SocketAddr,
    ledger: &Ledger,
    limit: Duration,
) -> anyhow::Result<()> {
    let begin = Instant::now();
    loop {
        let carried = timeout(
            Duration::from_secs(2),
            carry(entry, target, &ledger.probe(), ledger),
        )
        .await;
        match carried.context("no answer within 2 s").flatten() {
            Ok(_) => return Ok(()),
            Err(error) if begin.elapsed() > limit => {
                return Err(error.context(format!("not usable after {limit:?}")));
            }
            Err(_) => sleep(Duration::from_millis(50)).await,
        }
    }
}

/// Carries one connection. Returns the time of its dial.
async fn carry(
    entry: &Entry,
    target: SocketAddr,
    plan: &Plan,
    ledger: &Ledger,
) -> anyhow::Result<Duration> {
    let begin = Instant::now();
    let dialed = timeout(DIAL_LIMIT, entry.open(target)).await;
    let stream = dialed.context("dial timed out")??;
    let dial = begin.elapsed();
    let (mut reader, mut writer) = tokio::io::split(stream);
    let (up_seed, down_seed) = (plan.up_seed(), plan.down_seed());
    let mut sending = async |count| {
        let header = plan.header();
        let sent = writer.write_all(header.as_bytes()).await;
        sent.map_err(|error| Broken::Io(0, error))?;
        send(&mut writer, plan, up_seed, count).await
    };
    let carrying = async {
        match plan.ending {
            Ending::ClientCloses | Ending::EndpointCloses => {
                let receiving = receive(&mut reader, down_seed, plan.down, plan.stall);
                tokio::try_join!(
                    async {
                        sending(plan.up)
                            .await
                            .map_err(|broken| direction("sending", broken))
                    },
                    async {
                        receiving
                            .await
                            .map_err(|broken| direction("receiving", broken))
                    },
                )?;
                let receipt = reader.read_u64().await.context("receipt")?;
                if receipt != plan.receipt() {
                    return Err(Broken::Wrong(plan.down).into());
                }
                if plan.ending == Ending::EndpointCloses {
                    ends(&mut reader, plan.down).await?;
                }
                Ok(())
            }
            Ending::ClientAborts => {
                let receiving = receive(&mut reader, down_seed, plan.down / 2, Duration::ZERO);
                tokio::try_join!(
                    async {
                        sending(plan.up / 2)
                            .await
                            .map_err(|broken| direction("sending", broken))
                    },
                    async {
                        receiving
                            .await
                            .map_err(|broken| direction("receiving", broken))
                    },
                )?;
                Ok(())
            }
            Ending::EndpointAborts => {
                let receiving = receive(&mut reader, down_seed, plan.down + 1, Duration::ZERO);
                tokio::pin!(receiving);
                let sending = async {
                    // The endpoint may already be gone.
                    sending(plan.up).await.ok();
                    std::future::pending().await
                };
                let ended: Result<(), Broken> = tokio::select! {
                    ended = &mut receiving => ended,
                    () = sending => Ok(()),
                };
                match ended {
                    Err(Broken::Io(..) | Broken::Short(_)) if ledger.has_arrived(plan) => Ok(()),
                    Err(wrong) => Err(wrong.into()),
                    Ok(()) => Err(Broken::Wrong(plan.down).into()),
                }
            }
        }
    };
    let carried = timeout(LIMIT, carrying).await;
    let carried: anyhow::Result<()> =
        carried.unwrap_or_else(|_| Err(anyhow!("hung for {LIMIT:?}")));
    if let Err(error) = &carried
        && let Some(Broken::Wrong(at)) = error.downcast_ref()
    {
        ledger.wrong(plan, format_args!("the client received byte {at} wrong"));
    }
    carried.map(|()| dial)
}

fn direction(what: &'static str, broken: Broken) -> anyhow::Error {
    anyhow::Error::new(broken).context(what)
}

/// Requires the end of the stream.
async fn ends(reader: &mut (impl AsyncRead + Unpin), received: u64) -> anyhow::Result<()> {
    match reader.read(&mut [0]).await.context("end")? {
        0 => Ok(()),
        _ => Err(Broken::Wrong(received + size_of::<u64>() as u64).into()),
    }
}

// === endpoint ===

/// A running endpoint. Dropping the value closes the listener.
#[derive(Debug)]
pub(super) struct Endpoint {
    /// Address of the listener.
    pub address: SocketAddr,
    /// Each connection has a clone.
    open: Arc<()>,
    _tasks: JoinSet<()>,
}

impl Endpoint {
    /// Listens at an address.
    pub(super) fn on(at: SocketAddr, ledger: Arc<Ledger>) -> io::Result<Self> {
        let listener = endpoint::listen(TcpSocket::new_v4()?, at)?;
        let (address, open) = (listener.local_addr()?, Arc::new(()));
        let mut tasks = JoinSet::new();
        tasks.spawn(accept(listener, ledger, Arc::clone(&open)));
        Ok(Self {
            address,
            open,
            _tasks: tasks,
        })
    }

    /// Returns the number of open connections.
    pub(super) fn open(&self) -> usize {
        // This value and the task of the listener have a clone each.
        Arc::strong_count(&self.open).saturating_sub(2)
    }
}

async fn accept(listener: TcpListener, ledger: Arc<Ledger>, open: Arc<()>) {
    while let Ok((stream, peer)) = listener.accept().await {
        let (ledger, open) = (Arc::clone(&ledger), Arc::clone(&open));
        tokio::spawn(async move {
            // The client reports failures.
            serve(stream, peer.port(), &ledger).await.ok();
            drop(open);
        });
    }
}

async fn serve(mut stream: TcpStream, peer: u16, ledger: &Ledger) -> anyhow::Result<()> {
    stream.set_nodelay(true)?;
    let (line, rest) = endpoint::first_line(&mut stream).await?;
    let Some(plan) = ledger.arrives(&line, peer) else {
        bail!("wrong header");
    };
    if plan.ending == Ending::EndpointAborts {
        // The close at the end becomes a reset.
        SockRef::from(&stream).set_linger(Some(Duration::ZERO))?;
    }
    let (reader, mut writer) = stream.split();
    let mut reader = rest.as_ref().chain(reader);
    let down_seed = plan.down_seed();
    let receiving = receive(&mut reader, plan.up_seed(), plan.up, Duration::ZERO);
    let receiving = async {
        receiving.await.inspect_err(|broken| {
            if let Broken::Wrong(at) = broken {
                ledger.wrong(&plan, format_args!("the endpoint received byte {at} wrong"));
            }
        })
    };
    if plan.ending == Ending::EndpointAborts {
        tokio::pin!(receiving);
        let sending = send(&mut writer, &plan, down_seed, plan.down / 2);
        tokio::pin!(sending);
        tokio::select! {
            sent = &mut sending => sent?,
            received = &mut receiving => {
                received?;
                sending.await?;
            }
        }
        return Ok(());
    }
    tokio::try_join!(send(&mut writer, &plan, down_seed, plan.down), receiving)?;
    writer.write_u64(plan.receipt()).await?;
    if plan.ending == Ending::EndpointCloses {
        writer.shutdown().await?;
    }
    // The client closes next. Without this read, bytes from the client would cause a reset.
    if reader.read(&mut [0]).await? > 0 {
        ledger.wrong(&plan, "the endpoint received bytes after the last byte");
    }
    Ok(())
}

#[cfg(test)]
mod tests {
    #![allow(clippy::unwrap_used, clippy::indexing_slicing)]
    use futures_util::future::join_all;
    use tokio::io::copy_bidirectional;

    use super::*;

    const LOOPBACK: SocketAddr = SocketAddr::V4(std::net::SocketAddrV4::new(
        std::net::Ipv4Addr::LOCALHOST,
        0,
    ));

    #[tokio::test]
    async fn connections_of_every_plan_succeed_without_a_tunnel() {
        let ledger = Ledger::new(11);
        let endpoint = Endpoint::on(LOOPBACK, Arc::clone(&ledger)).unwrap();
        let entry = Entry::Plain(endpoint.address);
        let plans: Vec<Plan> = (0..60).map(|_| ledger.plan()).collect();
        let carried = plans.iter().map(async |plan| {
            let mut plan = plan.clone();
            (plan.pause, plan.stall) = (plan.pause / 20, plan.stall / 20);
            carry(&entry, endpoint.address, &plan, &ledger).await
        });
        for (plan, carried) in plans.iter().zip(join_all(carried).await) {
            carried.unwrap_or_else(|error| panic!("{plan:?}: {error:#}"));
        }
        assert!(ledger.account().wrong.is_empty());
        recovers(&entry, endpoint.address, &ledger, LIMIT)
            .await
            .unwrap();
        while endpoint.open() > 0 {
            tokio::task::yield_now().await;
        }
    }

    /// Starts a relay that changes, drops or stops at one byte from the endpoint.
    async fn relay(
        to: SocketAddr,
        damage: impl Fn(&mut Vec<u8>) + Clone + Send + Sync + 'static,
    ) -> SocketAddr {
        let listener = TcpListener::bind(LOOPBACK).await.unwrap();
        let at = listener.local_addr().unwrap();
        tokio::spawn(async move {
            loop {
                let (client, _) = listener.accept().await.unwrap();
                let damage = damage.clone();
                tokio::spawn(async move {
                    let (mut near, mut far) = tokio::io::duplex(READ);
                    let mut client = client;
                    let relayed = tokio::spawn(async move {
                        let mut server = TcpStream::connect(to).await.unwrap();
                        let mut first = vec![0; 40];
                        let (mut read, mut write) = server.split();
                        let (mut from, mut back) = tokio::io::split(&mut far);
                        let down = async {
                            read.read_exact(&mut first).await.ok();
                            damage(&mut first);
                            back.write_all(&first).await.ok();
                            tokio::io::copy(&mut read, &mut back).await.ok();
                        };
                        tokio::select! {
                            () = down => {}
                            _ = tokio::io::copy(&mut from, &mut write) => {}
                        }
                    });
                    copy_bidirectional(&mut client, &mut near).await.ok();
                    relayed.abort();
                });
            }
        });
        at
    }

    #[tokio::test]
    async fn damaged_and_missing_bytes_are_found() {
        let ledger = Ledger::new(11);
        let endpoint = Endpoint::on(LOOPBACK, Arc::clone(&ledger)).unwrap();
        let to = endpoint.address;
        let flips = relay(to, |bytes| bytes[20] ^= 1).await;
        let carried = carry(&Entry::Plain(flips), to, &ledger.probe(), &ledger).await;
        assert!(format!("{:#}", carried.unwrap_err()).contains("byte 20 is wrong"));
        assert_eq!(ledger.account().wrong.len(), 1);
        let drops = relay(to, |bytes| drop(bytes.drain(30..31))).await;
        let carried = carry(&Entry::Plain(drops), to, &ledger.probe(), &ledger).await;
        assert!(format!("{:#}", carried.unwrap_err()).contains("byte 30 is wrong"));
        assert_eq!(ledger.account().wrong.len(), 2);
        // Nothing listens on port 1.
        let nowhere = Entry::Plain(SocketAddr::from(([127, 0, 0, 1], 1)));
        carry(&nowhere, to, &ledger.probe(), &ledger)
            .await
            .unwrap_err();
        assert_eq!(ledger.account().wrong.len(), 2);
    }
}
