//! The cost of a dial with many connected agents beside idle connections, and the memory of an agent in the server, with
//! one link and with two.

use std::net::SocketAddr;
use std::time::Duration;

use anyhow::Context as _;
use culvert_kit::client::BoxedStream;
use culvert_tests::ports::Ports;
use culvert_tests::topology::PATIENCE;
use culvert_tests::{Mode, Program, Topology, Transport, eventually};
use futures_util::{StreamExt as _, TryStreamExt as _};
use tokio::time::Instant;

use super::change::{echo, open};
use super::table::{Line, Lines};
use super::{Lab, Pair};
use crate::harness::{ask, harness};

/// Numbers of agents. The first two are the bases of the comparison.
const AGENTS: [usize; 3] = [2, 16, 1_000];

/// Number of idle connections beside the dials, and number of them that are opened at a time.
const IDLE: usize = 10_000;
const OPENED_AT_ONCE: usize = 50;

/// Numbers of dials at a time, with the names of the rows: two agents, 16, many, two agents chosen by a strategy among
/// many, and three ratios. Eight dials at a time over two agent connections share TLS records and system calls; over 16 or
/// 1,000 agent connections they do not.
const AT_ONCE: [(usize, [&str; 7]); 2] = [
    (
        8,
        [
            "dial, 2 agents",
            "dial, 16 agents",
            "dial, 1000 agents",
            "dial, 2 of 1000 agents",
            "dial, 1000 by 2 agents",
            "dial, 1000 by 16 agents",
            "dial, 2 of 1000 by 2 agents",
        ],
    ),
    (
        1,
        [
            "lone dial, 2 agents",
            "lone dial, 16 agents",
            "lone dial, 1000 agents",
            "lone dial, 2 of 1000 agents",
            "lone dial, 1000 by 2 agents",
            "lone dial, 1000 by 16 agents",
            "lone dial, 2 of 1000 by 2 agents",
        ],
    ),
];

/// Numbers of agents with QUIC links, and the largest memory of such an agent in KiB, both links idle.
const LINKED: [usize; 2] = [2, 102];
const LINKED_KIB: f64 = 300.0;

/// Lets the TCP links resume, so that their buffers count.
const RESUMABLE: &str = "--resume-grace=30s";

/// Time limit for the QUIC links of all agents. An agent whose first attempt fails on a busy machine tries again after a
/// minute.
const LINKED_LIMIT: Duration = Duration::from_secs(150);

/// Duration of each load.
const LOAD: Duration = Duration::from_secs(5);

/// Largest ratio of a dial's cost with many agents to its cost with two agents.
const RATIO: f64 = 1.2;

/// Figures of a server with some agents.
struct Figures {
    /// Costs of dials, by the number of dials at a time.
    dials: [Cost; AT_ONCE.len()],
    /// Memory of the server.
    rss_kib: f64,
}

/// Picks the dividend and the divisor of a ratio.
type Pick = fn(&[Figures; 4]) -> [&Figures; 2];

/// Cost of a dial.
#[derive(Clone, Copy, Default)]
struct Cost {
    /// Processor time of the server.
    cpu_us: f64,
    /// 99th percentile of the duration.
    p99_ms: f64,
}

/// Measures a pair of programs. Each round has the four settings in turns.
pub(super) async fn measure(lab: &Lab, pair: Pair, lines: &mut Lines) {
    let [few, some, many] = AGENTS;
    let mut rounds: Vec<anyhow::Result<[Figures; 4]>> = Vec::new();
    for _ in 0..lab.rounds {
        let round = async {
            Ok([
                figures(lab, pair, few, few).await?,
                figures(lab, pair, some, some).await?,
                figures(lab, pair, many, many).await?,
                figures(lab, pair, many, few).await?,
            ])
        };
        rounds.push(harness(round).await.flatten());
    }
    let mut add = |row, unit, figure: &dyn Fn(&[Figures; 4]) -> f64, target: Option<f64>| {
        let figures = rounds.iter().map(|round| match round {
            Ok(round) => Ok(figure(round)),
            Err(error) => Err(anyhow::anyhow!("{error:#}")),
        });
        let target = target.filter(|_| pair.server);
        lines.add(Line::new(pair.name, row, unit, figures, target));
    };
    type Figure = fn(&Cost) -> f64;
    let figures: [(&str, &str, Figure); 2] = [
        ("CPU us", "CPU ratio", |cost| cost.cpu_us),
        ("p99 ms", "p99 ratio", |cost| cost.p99_ms),
    ];
    for (index, (_, rows)) in AT_ONCE.into_iter().enumerate() {
        let [
            few_row,
            some_row,
            many_row,
            chosen_row,
            by_few,
            by_some,
            chosen_by_few,
        ] = rows;
        for (unit, ratio, figure) in figures {
            let of = |figures: &Figures| figures.dials.get(index).map_or(f64::NAN, figure);
            add(few_row, unit, &|[few, ..]| of(few), None);
            add(some_row, unit, &|[_, some, ..]| of(some), None);
            add(many_row, unit, &|[_, _, many, _]| of(many), None);
            add(chosen_row, unit, &|[.., chosen]| of(chosen), None);
            let ratios: [(&str, Pick); 3] = [
                (by_few, |[few, _, many, _]| [many, few]),
                (by_some, |[_, some, many, _]| [many, some]),
                (chosen_by_few, |[few, .., chosen]| [chosen, few]),
            ];
            for (row, pick) in ratios {
                let by = |figures: &[Figures; 4]| {
                    let [dividend, divisor] = pick(figures).map(of);
                    dividend / divisor
                };
                add(row, ratio, &by, Some(RATIO));
            }
        }
    }
    let memory = |[with_few, _, with_many, _]: &[Figures; 4]| {
        (with_many.rss_kib - with_few.rss_kib) / (many - few) as f64
    };
    add("memory of an agent", "KiB", &memory, None);
}

/// Measures the memory of an agent whose two links are idle, in the server. Only our programs have QUIC.
pub(super) async fn links(lab: &Lab, pair: Pair, lines: &mut Lines) {
    if !(pair.server && pair.agent) {
        return;
    }
    let [few, many] = LINKED;
    let memory = async {
        let (less, more) = (
            linked(lab, pair, few).await?,
            linked(lab, pair, many).await?,
        );
        anyhow::Ok((more - less) / (many - few) as f64)
    };
    let memory = harness(memory).await.flatten();
    let row = "memory of an agent, QUIC";
    lines.add(Line::new(pair.name, row, "KiB", [memory], Some(LINKED_KIB)));
}

/// Returns the memory of a server whose agents have QUIC links, in KiB.
async fn linked(lab: &Lab, pair: Pair, agents: usize) -> anyhow::Result<f64> {
    let (server, _) = lab.executables(pair)?;
    // Owner of the port until the server has ended.
    let mut ports = Ports::default();
    let port = format!("--agent-quic-port={}", ports.next_port());
    let mut topology = Topology::builder(Mode::HttpConnect, Transport::Uds)
        .server(server, &["--v=1", &port, RESUMABLE])
        .start()
        .await;
    let _agents = start(lab, pair, &topology, agents, (0, ""), &[RESUMABLE]).await?;
    eventually("all agents have QUIC links", LINKED_LIMIT, async || {
        let metrics = topology.server_metrics(0).await;
        let links = metrics.value("culvert_quic_links", &[]).unwrap_or(0.0);
        (links == agents as f64).then_some(()).ok_or(links)
    })
    .await;
    Ok(ask(|| topology.server(0).rss())? as f64 / 1024.0)
}

/// Measures a server with `agents` agents in one process. The first `chosen` agents get all dials.
async fn figures(lab: &Lab, pair: Pair, agents: usize, chosen: usize) -> anyhow::Result<Figures> {
    let (server, _) = lab.executables(pair)?;
    let (_endpoint, target) = lab.programs.endpoint().await?;
    let mut topology = Topology::builder(Mode::HttpConnect, Transport::Uds)
        .server(server, &["--v=1", "--proxy-strategies=destHost,default"])
        .start()
        .await;
    let identifiers = format!("host={}", target.ip());
    let _agents = start(lab, pair, &topology, agents, (chosen, &identifiers), &[]).await?;
    let rss_kib = ask(|| topology.server(0).rss())? as f64 / 1024.0;
    let idle = (0..IDLE).map(|_| async {
        let mut stream = open(&topology, target).await?;
        echo(&mut stream).await?;
        anyhow::Ok(stream)
    });
    let idle = futures_util::stream::iter(idle).buffer_unordered(OPENED_AT_ONCE);
    let _idle: Vec<BoxedStream> = idle.try_collect().await?;
    let mut dials = [Cost::default(); AT_ONCE.len()];
    for (cost, (at_once, _)) in dials.iter_mut().zip(AT_ONCE) {
        *cost = load(&mut topology, target, at_once).await?;
    }
    Ok(Figures { dials, rss_kib })
}

/// Starts a process with agents, and waits until the server counts all of them. The first `chosen` agents have the
/// identifiers.
async fn start(
    lab: &Lab,
    pair: Pair,
    topology: &Topology,
    agents: usize,
    (chosen, identifiers): (usize, &str),
    flags: &[&str],
) -> anyhow::Result<Program> {
    let path = match pair.agent {
        true => lab.programs.agents(),
        false => lab.programs.stock.context("needs Go")?.agents.clone(),
    };
    let (pki, server) = (topology.pki(), topology.agent_address(0));
    let args = [
        agents.to_string(),
        chosen.to_string(),
        identifiers.to_owned(),
        format!("--ca-cert={}", pki.ca.display()),
        format!("--agent-cert={}", pki.agent.cert.display()),
        format!("--agent-key={}", pki.agent.key.display()),
        format!("--proxy-server-host={}", server.ip()),
        format!("--proxy-server-port={}", server.port()),
    ];
    let args = args
        .into_iter()
        .chain(flags.iter().copied().map(str::to_owned));
    let program = Program::spawn(path, args, &[]);
    eventually("all agents are ready", PATIENCE, async || {
        let ready = topology.ready_agents(0).await;
        (ready >= agents as f64).then_some(()).ok_or(ready)
    })
    .await;
    Ok(program)
}

/// Dials for some seconds, and returns the cost of a dial.
async fn load(topology: &mut Topology, target: SocketAddr, at_once: usize) -> anyhow::Result<Cost> {
    let before = ask(|| topology.server(0).cpu_time())?;
    let dials = async || {
        let (mut times, until) = (Vec::new(), Instant::now() + LOAD);
        while Instant::now() < until {
            let begin = Instant::now();
            let mut stream = open(topology, target).await?;
            echo(&mut stream).await?;
            times.push(begin.elapsed());
        }
        anyhow::Ok(times)
    };
    let times = futures_util::future::try_join_all((0..at_once).map(|_| dials())).await?;
    let spent = ask(|| topology.server(0).cpu_time())? - before;
    let mut times = times.concat();
    times.sort_unstable();
    let p99 = times
        .get(times.len() * 99 / 100)
        .context("no dial succeeded")?;
    Ok(Cost {
        cpu_us: spent.as_secs_f64() * 1e6 / times.len() as f64,
        p99_ms: p99.as_secs_f64() * 1e3,
    })
}
