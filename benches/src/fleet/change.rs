//! Changes under load: a rolling update, a rotation of all certificates, and the end of an agent.

use std::net::SocketAddr;
use std::time::Duration;

use culvert_kit::client::{BoxedStream, connect};
use culvert_kit::pki::Pki;
use culvert_kit::services::Services;
use culvert_tests::rolling::{Plan, roll};
use culvert_tests::rotation::{Reloads, install, install_pair, read};
use culvert_tests::{Mode, Topology, Transport};
use tokio::io::{AsyncReadExt as _, AsyncWriteExt as _};
use tokio::time::{Instant, sleep, timeout};

use super::table::{Line, Lines};
use super::{Lab, Pair};
use crate::harness::harness;

/// Time for the connections of a stopped program.
const GRACE: Duration = Duration::from_secs(3);
const SERVER_GRACE: &str = "--graceful-shutdown-timeout=3s";
const AGENT_GRACE: &str = "--drain-timeout=3s";

/// Load of the rolling update, as in production of a busy cluster.
const DIALS_PER_SECOND: u32 = 200;
const STREAMS: usize = 50;

/// Number of connections that are open during a rotation.
const HELD: usize = 1_000;

/// Time limit of a dial, as in kube-apiserver's client library.
const LIMIT: Duration = Duration::from_secs(30);

/// Number of dials, one after another, while an agent ends.
const FAILOVER_DIALS: usize = 300;

/// Measures the rolling update of three servers and two agents.
pub(super) async fn rolling(lab: &Lab, pair: Pair, lines: &mut Lines) {
    let (mut failed, mut cut, mut slowest) = (Vec::new(), Vec::new(), Vec::new());
    for _ in 0..lab.rounds {
        let report = harness(update(lab, pair)).await.flatten();
        let figure = |figure: fn(&culvert_tests::rolling::Report) -> f64| match &report {
            Ok(report) => Ok(figure(report)),
            Err(error) => Err(anyhow::anyhow!("{error:#}")),
        };
        failed.push(figure(|report| report.failed.len() as f64));
        cut.push(figure(|report| {
            (report.cut_early.len() + report.wrong) as f64
        }));
        slowest.push(figure(|report| report.slowest.as_secs_f64() * 1e3));
    }
    let target = (pair.server && pair.agent).then_some(0.0);
    let row = "rolling update";
    lines.add(Line::new(pair.name, row, "failed dials", failed, target));
    lines.add(Line::new(pair.name, row, "early cuts", cut, target));
    lines.add(Line::new(pair.name, row, "slowest ms", slowest, None));
}

async fn update(lab: &Lab, pair: Pair) -> anyhow::Result<culvert_tests::rolling::Report> {
    let (server, agent) = lab.executables(pair)?;
    let services = Services::start().await?;
    let mut builder = Topology::builder(Mode::HttpConnect, Transport::Uds);
    for _ in 0..3 {
        builder = builder.server(server.clone(), &["--v=1", SERVER_GRACE]);
    }
    let flag = if pair.agent {
        AGENT_GRACE
    } else {
        "--sync-forever"
    };
    for _ in 0..2 {
        builder = builder.agent(agent.clone(), &["--v=1", flag]);
    }
    let mut topology = builder.start().await;
    let plan = Plan {
        dials_per_second: DIALS_PER_SECOND,
        streams: STREAMS,
        target: services.raw,
        grace: GRACE,
        kill_agents: !pair.agent,
    };
    Ok(roll(&mut topology, plan).await)
}

/// Measures the rotation of the CA, and of the certificates between server and agent. Stock programs read their files
/// at start only, so they are restarted.
pub(super) async fn rotation(lab: &Lab, pair: Pair, lines: &mut Lines) {
    let mut dropped = Vec::new();
    for _ in 0..lab.rounds {
        dropped.push(harness(rotate(lab, pair)).await.flatten());
    }
    let target = (pair.server && pair.agent).then_some(0.0);
    let row = "CA rotation, 1000 connections";
    lines.add(Line::new(pair.name, row, "dropped", dropped, target));
}

async fn rotate(lab: &Lab, pair: Pair) -> anyhow::Result<f64> {
    let (server, agent) = lab.executables(pair)?;
    let services = Services::start().await?;
    let builder = Topology::builder(Mode::HttpConnect, Transport::Uds);
    let builder = builder.server(server, &["--v=1"]);
    let mut topology = builder.agent(agent, &["--v=1"]).start().await;
    let mut held = Vec::new();
    for _ in 0..HELD {
        held.push(open(&topology, services.raw).await?);
    }
    let pki = topology.pki().clone();
    let folder = topology.dir().join("later");
    std::fs::create_dir(&folder)?;
    let next = Pki::create_valid_for(&folder, 60)?;
    let both = [read(&pki.ca), read(&next.ca)].concat();
    for step in 0..3 {
        let mut sets = Vec::new();
        if pair.server {
            sets.push((topology.server_health(0), "agent"));
        }
        if pair.agent {
            sets.push((topology.agent_health(0), "server"));
        }
        let reloads = Reloads::before(&sets).await;
        match step {
            0 => install(&both, &pki.ca),
            1 => {
                install_pair(&next.cluster, &pki.cluster);
                install_pair(&next.agent, &pki.agent);
            }
            _ => install(&read(&next.ca), &pki.ca),
        }
        if !pair.server {
            topology.restart_server(0).await;
        }
        if !pair.agent {
            topology.kill_agent(0);
            topology.start_agent(0).await;
        }
        reloads.happen().await;
        topology.wait_for_agents().await;
    }
    let mut dropped = 0;
    for stream in &mut held {
        dropped += usize::from(echo(stream).await.is_err());
    }
    Ok(dropped as f64)
}

/// Measures dials, one after another, while one of two agents is killed.
pub(super) async fn failover(lab: &Lab, pair: Pair, lines: &mut Lines) {
    let (mut failed, mut slowest) = (Vec::new(), Vec::new());
    for _ in 0..lab.rounds {
        match harness(kill(lab, pair)).await.flatten() {
            Ok((failures, longest)) => {
                failed.push(Ok(failures as f64));
                slowest.push(Ok(longest.as_secs_f64() * 1e3));
            }
            Err(error) => failed.push(Err(error)),
        }
    }
    let target = pair.server.then_some(0.0);
    let row = "1 of 2 agents killed";
    lines.add(Line::new(pair.name, row, "failed dials", failed, target));
    lines.add(Line::new(pair.name, row, "slowest ms", slowest, None));
}

async fn kill(lab: &Lab, pair: Pair) -> anyhow::Result<(usize, Duration)> {
    let (server, agent) = lab.executables(pair)?;
    let services = Services::start().await?;
    let builder = Topology::builder(Mode::HttpConnect, Transport::Uds);
    let builder = builder.server(server, &["--v=1"]);
    let builder = builder.agent(agent.clone(), &["--v=1"]);
    let mut topology = builder.agent(agent, &["--v=1"]).start().await;
    let (mut failed, mut slowest) = (0, Duration::ZERO);
    for dial in 0..FAILOVER_DIALS {
        if dial == FAILOVER_DIALS / 3 {
            topology.kill_agent(0);
        }
        let begin = Instant::now();
        let dialed = async {
            let mut stream = open(&topology, services.raw).await?;
            echo(&mut stream).await
        };
        failed += usize::from(dialed.await.is_err());
        slowest = slowest.max(begin.elapsed());
        sleep(Duration::from_millis(5)).await;
    }
    Ok((failed, slowest))
}

/// Opens an echo connection through the first server.
pub(super) async fn open(topology: &Topology, target: SocketAddr) -> anyhow::Result<BoxedStream> {
    let mut stream = connect(topology.front_end(), &target.to_string(), LIMIT).await?;
    stream.write_all(b"echo\n").await?;
    Ok(stream)
}

/// Sends a byte and waits for its echo.
pub(super) async fn echo(stream: &mut BoxedStream) -> anyhow::Result<()> {
    let exchange = async {
        stream.write_all(b"x").await?;
        stream.read_u8().await
    };
    timeout(LIMIT, exchange).await??;
    Ok(())
}
