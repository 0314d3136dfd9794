//! Switches of the tunnel for new connections, during dials and on open streams.
//!
//! One server of ours has both tunnels; each tunnel ends in an agent of ours.

use std::net::SocketAddr;
use std::path::PathBuf;
use std::time::Duration;

use anyhow::{Context as _, bail, ensure};
use culvert_kit::client::FrontEnd;
use culvert_kit::pattern;
use culvert_tests::ports::Ports;
use culvert_tests::{Executable, Mode, Program, Topology, Transport};
use tempfile::TempDir;
use tokio::io::{AsyncReadExt as _, AsyncWriteExt as _};
use tokio::net::TcpSocket;
use tokio::sync::watch;
use tokio::task::JoinSet;
use tokio::time::{Instant, interval, sleep, sleep_until, timeout};

use crate::endpoint::Endpoints;
use crate::entry::Entry;
use crate::figures::{Figures, P99};
use crate::harness::harness;
use crate::load::{Echo, percentiles};
use crate::names::{AGENT, SERVER};
use crate::openvpn::contenders::{Files, Proto};
use crate::openvpn::ground::Ground;
use crate::openvpn::probe::{ask, connected, metrics};
use crate::openvpn::rows::{CUT, DIALS, FAILED, SHARE, SWITCHES};
use crate::programs::Programs;

const MODES: [&str; 2] = ["openvpn", "konnectivity"];

/// Interval between two dials.
const DIAL_INTERVAL: Duration = Duration::from_millis(5);

/// Number of bytes that a dial echoes, and its time limit. A longer dial counts as failed, because
/// kube-apiserver waits at most this long for a webhook.
const DIAL_BYTES: u64 = 300;
const DIAL_LIMIT: Duration = Duration::from_secs(10);

/// Number of streams that stay open during the whole row. Half of them start in each tunnel.
const STREAMS: usize = 20;

/// Pause of a stream between two echoes.
const STREAM_PAUSE: Duration = Duration::from_millis(20);

/// Time limit for both agents to connect, and the time before the first switch and after the last.
const START_LIMIT: Duration = Duration::from_secs(20);
const MARGIN: Duration = Duration::from_millis(500);

/// Smallest plausible share of dials per tunnel, in percent. Below it the switches had no effect.
const FAIR: f64 = 25.0;

/// The running programs. Dropping the value kills them.
struct Site {
    entry: Entry,
    admin: PathBuf,
    endpoints: Endpoints,
    _topology: Topology,
    _client: Program,
    _ports: Ports,
    // The last fields, so that the programs end before their files are removed.
    _files: Files,
    _dir: TempDir,
}

/// Results of dials.
#[derive(Debug, Default)]
struct Tally {
    made: u64,
    failed: u64,
    times: Vec<Duration>,
}

/// Switches the tunnel [`SWITCHES`] times, once per `pause`, under the whole load.
pub(super) async fn measure(
    programs: &Programs,
    ground: &Ground,
    pause: Duration,
) -> anyhow::Result<Figures> {
    let site = harness(Site::start(programs, ground)).await??;
    let before = site.dialed().await?;
    let (end, ended) = watch::channel(false);
    let target = site.endpoints.lean();
    let mut streams = JoinSet::new();
    let open = |streams: &mut JoinSet<anyhow::Result<()>>| {
        for _ in 0..STREAMS / 2 {
            streams.spawn(stream(site.entry.clone(), target, ended.clone()));
        }
    };
    open(&mut streams);
    // A set of one task, because dropping a set aborts its tasks.
    let mut dialing = JoinSet::new();
    let dials_ended = ended.clone();
    let wanted = move |_| !*dials_ended.borrow();
    dialing.spawn(dial_on(site.entry.clone(), target, wanted));
    let mut next = Instant::now() + MARGIN;
    for number in 0..SWITCHES {
        sleep_until(next).await;
        let to = MODES.get(number as usize % MODES.len());
        site.switch(to.copied().unwrap_or_default()).await?;
        if number == 0 {
            sleep(pause / 4).await;
            open(&mut streams);
        }
        next += pause;
    }
    sleep_until(next).await;
    // The send fails if all tasks have already ended; the tallies show that.
    end.send(true).ok();
    let mut tally = dialing.join_next().await.context("no dials finished")??;
    let mut cut = 0;
    while let Some(ended) = streams.join_next().await {
        if let Err(error) = ended? {
            eprintln!("  a stream was cut: {error:#}");
            cut += 1;
        }
    }
    let after = site.dialed().await?;
    let share = share(before, after);
    ensure!(
        (FAIR..=100.0 - FAIR).contains(&share),
        "{share:.0} % of dials went by OpenVPN: the switches have no effect"
    );
    let [_, p99] = percentiles(std::mem::take(&mut tally.times));
    Ok(vec![
        (FAILED, tally.failed as f64),
        (CUT, f64::from(cut)),
        (DIALS, tally.made as f64),
        (SHARE, share),
        (P99, p99),
    ])
}

/// Returns the share of OpenVPN among the dials between two readings, in percent.
fn share(before: [f64; 2], after: [f64; 2]) -> f64 {
    let ([other_before, before], [other, openvpn]) = (before, after);
    let (other, openvpn) = (other - other_before, openvpn - before);
    100.0 * openvpn / (other + openvpn).max(1.0)
}

impl Site {
    async fn start(programs: &Programs, ground: &Ground) -> anyhow::Result<Self> {
        let dir = tempfile::Builder::new().prefix("culvert-").tempdir()?;
        let mut ports = Ports::default();
        let files = Files::write(dir.path(), ground.address)?;
        let listen = SocketAddr::from(([127, 0, 0, 1], ports.next_port()));
        let admin = dir.path().join("admin.socket");
        let mut server = files.server(Proto::Tcp, listen);
        server.extend([
            "--v=1".to_owned(),
            "--tunnel-mode=konnectivity".to_owned(),
            "--tunnel-drain=10m".to_owned(),
            format!("--admin-uds={}", admin.display()),
        ]);
        let server: Vec<&str> = server.iter().map(String::as_str).collect();
        let topology = Topology::builder(Mode::HttpConnect, Transport::Uds)
            .server(Executable::At(programs.path(SERVER)), &server)
            .agent(Executable::At(programs.path(AGENT)), &["--v=1"])
            .start()
            .await;
        let FrontEnd::ConnectUds(front) = topology.front_end() else {
            bail!("not a Unix socket");
        };
        let words = files.client(Proto::Tcp, listen, &mut ports);
        let client = Program::spawn(programs.path(AGENT), words, &[]);
        let own = SocketAddr::from((ground.address, 0));
        let site = Self {
            entry: Entry::Connect(front.clone()),
            admin,
            endpoints: Endpoints::on(TcpSocket::new_v4()?, own).await?,
            _topology: topology,
            _client: client,
            _ports: ports,
            _files: files,
            _dir: dir,
        };
        let deadline = Instant::now() + START_LIMIT;
        while connected(&site.admin).await? != 1.0 {
            ensure!(
                Instant::now() < deadline,
                "the OpenVPN client does not connect"
            );
            sleep(MARGIN / 10).await;
        }
        Ok(site)
    }

    async fn switch(&self, to: &str) -> anyhow::Result<()> {
        let request = format!("{{\"to\":\"{to}\"}}");
        let asked = ask(&self.admin, "POST", "/tunnel/switch", &request).await;
        asked.map(drop).context("switch")
    }

    /// Returns the number of dials that each tunnel has opened so far.
    async fn dialed(&self) -> anyhow::Result<[f64; 2]> {
        let metrics = metrics(&self.admin).await?;
        Ok(["konnectivity", "openvpn"].map(|tunnel| {
            let labels = [("tunnel", tunnel), ("outcome", "opened")];
            let opened = metrics.value("culvert_tunnel_dials_total", &labels);
            opened.unwrap_or_default()
        }))
    }
}

/// Starts a dial every [`DIAL_INTERVAL`], regardless of earlier dials, while `wanted` returns true for the number of dials
/// so far.
async fn dial_on(entry: Entry, target: SocketAddr, wanted: impl Fn(u64) -> bool) -> Tally {
    let mut tally = Tally::default();
    let mut dials = JoinSet::new();
    let mut ticks = interval(DIAL_INTERVAL);
    let mut started = 0;
    while wanted(started) {
        ticks.tick().await;
        started += 1;
        let entry = entry.clone();
        dials.spawn(async move {
            let begin = Instant::now();
            let dialed = timeout(DIAL_LIMIT, dial(&entry, target)).await;
            dialed.context("dial timed out")?.map(|()| begin.elapsed())
        });
        while let Some(dialed) = dials.try_join_next() {
            tally.add(dialed);
        }
    }
    while let Some(dialed) = dials.join_next().await {
        tally.add(dialed);
    }
    tally
}

impl Tally {
    fn add(&mut self, dialed: Result<anyhow::Result<Duration>, tokio::task::JoinError>) {
        self.made += 1;
        match dialed.map_err(anyhow::Error::from).flatten() {
            Ok(time) => self.times.push(time),
            Err(error) => {
                // A few errors are enough to show the cause.
                if self.failed < 5 {
                    eprintln!("  a dial failed: {error:#}");
                }
                self.failed += 1;
            }
        }
    }
}

async fn dial(entry: &Entry, target: SocketAddr) -> anyhow::Result<()> {
    let mut stream = entry.open(target).await?;
    let sent = pattern::prefix(DIAL_BYTES);
    stream.write_all(b"echo\n").await.context("sending")?;
    stream.write_all(&sent).await.context("sending")?;
    let mut received = vec![0; sent.len()];
    stream.read_exact(&mut received).await.context("echo")?;
    ensure!(sent == received, "echo returned other bytes than were sent");
    Ok(())
}

/// Sends echoes with pauses until `ended` is true.
async fn stream(
    entry: Entry,
    target: SocketAddr,
    ended: watch::Receiver<bool>,
) -> anyhow::Result<()> {
    let mut echo = Echo::open(&entry, target).await?;
    while !*ended.borrow() {
        let echoed = timeout(DIAL_LIMIT, echo.once()).await;
        echoed.context("echo timed out")??;
        sleep(STREAM_PAUSE).await;
    }
    Ok(())
}

#[cfg(test)]
mod tests {
    #![allow(clippy::unwrap_used, clippy::expect_used, clippy::indexing_slicing)]
    use super::*;

    /// Number of dials of each kind.
    const COUNT: u64 = 20;

    #[tokio::test]
    async fn failed_dials_are_counted_and_streams_survive() {
        let endpoints = Endpoints::start().await.unwrap();
        let (end, ended) = watch::channel(false);
        let target = endpoints.lean();
        let entry = Entry::Plain(target);
        let wanted = |dials: u64| dials < COUNT;
        let good = tokio::spawn(dial_on(entry.clone(), target, wanted));
        // Nothing listens on port 1.
        let nowhere = Entry::Plain(SocketAddr::from(([127, 0, 0, 1], 1)));
        let bad = tokio::spawn(dial_on(nowhere, target, wanted));
        let lived = tokio::spawn(stream(entry, target, ended));
        let (good, bad) = (good.await.unwrap(), bad.await.unwrap());
        // The send fails if the stream has already ended; its result shows that.
        end.send(true).ok();
        assert_eq!((good.made, good.failed), (COUNT, 0), "{good:?}");
        assert_eq!(good.times.len() as u64, good.made);
        assert_eq!((bad.made, bad.failed), (COUNT, COUNT), "{bad:?}");
        lived.await.unwrap().unwrap();
    }
}
