//! The cost of a dial with many connected agents beside idle connections, and the memory of an agent connection in the
//! server.

use std::time::Duration;

use anyhow::ensure;
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

/// Number of dials at a time, and duration of the load.
const AT_ONCE: usize = 8;
const LOAD: Duration = Duration::from_secs(5);

/// Largest ratio of a dial's cost with many agents to its cost with two agents.
const RATIO: f64 = 1.2;

/// Figures of a server with some agents.
struct Figures {
    /// Processor time of the server for each dial.
    cpu_us: f64,
    /// 99th percentile of the duration of a dial.
    p99_ms: f64,
    /// Memory of the server.
    rss_kib: f64,
}

/// Figure of a row, from the figures with few and with many agents.
type Figure = fn(&Figures, &Figures) -> f64;

/// Measures a pair of programs once: the start of 1,000 agents takes about half a minute.
pub(super) async fn measure(lab: &Lab, pair: Pair, lines: &mut Lines) {
    let few = harness(figures(lab, pair, AGENTS[0])).await.flatten();
    let many = harness(figures(lab, pair, AGENTS[1])).await.flatten();
    let both = few.and_then(|few| Ok((few, many?)));
    let figure = |figure: Figure| match &both {
        Ok((few, many)) => Ok(figure(few, many)),
        Err(error) => Err(anyhow::anyhow!("{error:#}")),
    };
    let rows: [(_, _, Figure, _); 6] = [
        ("dial, 2 agents", "CPU us", |few, _| few.cpu_us, None),
        ("dial, 1000 agents", "CPU us", |_, many| many.cpu_us, None),
        (
            "dial, 1000 by 2 agents",
            "CPU ratio",
            |few, many| many.cpu_us / few.cpu_us,
            Some(RATIO),
        ),
        ("dial, 2 agents", "p99 ms", |few, _| few.p99_ms, None),
        ("dial, 1000 agents", "p99 ms", |_, many| many.p99_ms, None),
        (
            "memory of an agent",
            "KiB",
            |few, many| (many.rss_kib - few.rss_kib) / (AGENTS[1] - AGENTS[0]) as f64,
            None,
        ),
    ];
    for (row, unit, of, target) in rows {
        let target = target.filter(|_| pair.server);
        lines.add(Line::new(pair.name, row, unit, [figure(of)], target));
    }
}

async fn figures(lab: &Lab, pair: Pair, agents: usize) -> anyhow::Result<Figures> {
    let (server, agent) = lab.executables(pair)?;
    let (_endpoint, target) = lab.programs.endpoint().await?;
    let mut builder =
        Topology::builder(Mode::HttpConnect, Transport::Uds).server(server, &["--v=1"]);
    for _ in 0..agents {
        builder = builder.agent(agent.clone(), &["--v=1"]);
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
    let before = ask(|| topology.server(0).cpu_time())?;
    let dial = async || {
        let (mut times, until) = (Vec::new(), Instant::now() + LOAD);
        while Instant::now() < until {
            let begin = Instant::now();
            let mut stream = open(&topology, target).await?;
            echo(&mut stream).await?;
            times.push(begin.elapsed());
        }
        anyhow::Ok(times)
    };
    let loads = futures_util::future::try_join_all((0..AT_ONCE).map(|_| dial())).await?;
    let spent = ask(|| topology.server(0).cpu_time())? - before;
    let mut times = loads.concat();
    times.sort_unstable();
    ensure!(!times.is_empty(), "no dial succeeded");
    let p99 = times
        .get(times.len() * 99 / 100)
        .copied()
        .unwrap_or_default();
    Ok(Figures {
        cpu_us: spent.as_secs_f64() * 1e6 / times.len() as f64,
        p99_ms: p99.as_secs_f64() * 1e3,
        rss_kib,
    })
}
