//! The cost of a dial with many connected agents beside idle connections, and the memory of an agent connection in the
//! server.

use std::net::SocketAddr;
use std::time::Duration;

use anyhow::Context as _;
use culvert_kit::client::BoxedStream;
use culvert_tests::{Mode, Topology, Transport};
use futures_util::{StreamExt as _, TryStreamExt as _};
use tokio::time::Instant;

use super::change::{echo, open};
use super::table::{Line, Lines};
use super::{Lab, Pair};
use crate::harness::{ask, harness};

/// Numbers of agents. The first is the base of the comparison.
const AGENTS: [usize; 2] = [2, 1_000];

/// Number of idle connections beside the dials, and number of them that are opened at a time.
const IDLE: usize = 10_000;
const OPENED_AT_ONCE: usize = 50;

/// Numbers of dials at a time, with the names of the rows: few agents, many agents, few agents chosen by a strategy among
/// many, and the ratios of the last two to the first. Eight dials at a time over two agent connections share TLS records
/// and system calls; over 1,000 agent connections they do not.
const AT_ONCE: [(usize, [&str; 5]); 2] = [
    (
        8,
        [
            "dial, 2 agents",
            "dial, 1000 agents",
            "dial, 2 of 1000 agents",
            "dial, 1000 by 2 agents",
            "dial, 2 of 1000 by 2 agents",
        ],
    ),
    (
        1,
        [
            "lone dial, 2 agents",
            "lone dial, 1000 agents",
            "lone dial, 2 of 1000 agents",
            "lone dial, 1000 by 2 agents",
            "lone dial, 2 of 1000 by 2 agents",
        ],
    ),
];

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

/// Cost of a dial.
#[derive(Clone, Copy, Default)]
struct Cost {
    /// Processor time of the server.
    cpu_us: f64,
    /// 99th percentile of the duration.
    p99_ms: f64,
}

/// Measures a pair of programs once: each start of 1,000 agents takes about half a minute.
pub(super) async fn measure(lab: &Lab, pair: Pair, lines: &mut Lines) {
    let [few, many] = AGENTS;
    let mut all = Vec::new();
    for (agents, chosen) in [(few, few), (many, many), (many, few)] {
        all.push(harness(figures(lab, pair, agents, chosen)).await.flatten());
    }
    let all: anyhow::Result<Vec<Figures>> = all.into_iter().collect();
    let mut add = |row, unit, figure: &dyn Fn(&[Figures; 3]) -> f64, target: Option<f64>| {
        let figure = match &all {
            Ok(all) => all.first_chunk().map(figure).context("no figures"),
            Err(error) => Err(anyhow::anyhow!("{error:#}")),
        };
        let target = target.filter(|_| pair.server);
        lines.add(Line::new(pair.name, row, unit, [figure], target));
    };
    type Figure = fn(&Cost) -> f64;
    let figures: [(&str, &str, Figure); 2] = [
        ("CPU us", "CPU ratio", |cost| cost.cpu_us),
        ("p99 ms", "p99 ratio", |cost| cost.p99_ms),
    ];
    for (index, (_, rows)) in AT_ONCE.into_iter().enumerate() {
        let [few_row, many_row, chosen_row, many_ratio, chosen_ratio] = rows;
        for (unit, ratio, figure) in figures {
            let of = |figures: &Figures| figures.dials.get(index).map_or(f64::NAN, figure);
            add(few_row, unit, &|[few, _, _]| of(few), None);
            add(many_row, unit, &|[_, many, _]| of(many), None);
            add(chosen_row, unit, &|[_, _, chosen]| of(chosen), None);
            let by_few = |[few, many, _]: &[Figures; 3]| of(many) / of(few);
            add(many_ratio, ratio, &by_few, Some(RATIO));
            let by_few = |[few, _, chosen]: &[Figures; 3]| of(chosen) / of(few);
            add(chosen_ratio, ratio, &by_few, Some(RATIO));
        }
    }
    let memory = |[few, many, _]: &[Figures; 3]| {
        (many.rss_kib - few.rss_kib) / (AGENTS[1] - AGENTS[0]) as f64
    };
    add("memory of an agent", "KiB", &memory, None);
}

/// Measures a server with `agents` agents. The first `chosen` agents get all dials.
async fn figures(lab: &Lab, pair: Pair, agents: usize, chosen: usize) -> anyhow::Result<Figures> {
    let (server, agent) = lab.executables(pair)?;
    let (_endpoint, target) = lab.programs.endpoint().await?;
    let mut builder = Topology::builder(Mode::HttpConnect, Transport::Uds)
        .server(server, &["--v=1", "--proxy-strategies=destHost,default"]);
    let serves = format!("--agent-identifiers=host={}", target.ip());
    for number in 0..agents {
        let identifiers = match number < chosen {
            true => &serves,
            false => "--agent-identifiers=host=other",
        };
        builder = builder.agent(agent.clone(), &["--v=1", identifiers]);
    }
    let mut topology = builder.start().await;
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
