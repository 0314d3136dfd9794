//! The subcommand `fleet`: several servers, and agents that connect to all of them.
//!
//! | module | content |
//! |---|---|
//! | [`change`] | rolling updates, rotations of certificates, and killed agents under load |
//! | [`convergence`] | the time until an agent is connected to all servers, and handshakes in the steady state |
//! | [`scale`] | dials and memory with many agents |
//! | [`table`] | rows of all parts, as text and as JSON |
//!
//! A part is a function that measures one pair of programs and adds rows. To add a part, add a variant to [`Part`].

mod change;
mod convergence;
mod scale;
mod table;

use std::path::PathBuf;
use std::time::Duration;

use anyhow::{Context as _, ensure};
use clap::{Args, ValueEnum};
use culvert_tests::Executable;
use serde_json::json;

use self::table::{Line, Lines};
use crate::memory;
use crate::names::{AGENT, OURS, OURS_STOCK, SERVER, STOCK};
use crate::programs::Programs;
use crate::report::Machine;

/// Options of the subcommand.
#[derive(Debug, Args)]
pub(crate) struct Options {
    /// Measure only this part (repeatable)
    #[arg(long = "part", value_enum, value_name = "NAME")]
    parts: Vec<Part>,

    /// Measure only this pair of server and agent (repeatable): ours, ours+stock, stock+ours, stock
    #[arg(long = "pair", value_name = "NAME")]
    pairs: Vec<String>,

    /// Number of measurements per row
    #[arg(long, value_name = "N", default_value_t = 5, value_parser = clap::value_parser!(u32).range(1..=1000))]
    rounds: u32,

    /// Seconds in which the handshakes of the steady state are counted
    #[arg(long, value_name = "S", default_value_t = 120, value_parser = clap::value_parser!(u64).range(1..=3600))]
    seconds: u64,

    /// Exit with code 1 if our programs miss a target
    #[arg(long)]
    strict: bool,

    /// Write all samples to a file
    #[arg(long, value_name = "PATH")]
    json: Option<PathBuf>,
}

/// A part of the subcommand.
#[derive(Debug, Clone, Copy, PartialEq, Eq, ValueEnum)]
enum Part {
    /// Time until an agent is connected to all servers, and handshakes in the steady state
    Convergence,
    /// Failed dials and streams cut early while all servers and agents are replaced
    Rolling,
    /// Connections dropped by a rotation of the CA and all certificates
    Rotation,
    /// Failed dials while one of two agents is killed
    Failover,
    /// Cost of a dial with 1,000 agents
    Scale,
    /// Memory of an agent with a QUIC link
    Links,
}

impl Part {
    async fn measure(self, lab: &Lab, pair: Pair, lines: &mut Lines) {
        match self {
            Self::Convergence => convergence::measure(lab, pair, lines).await,
            Self::Rolling => change::rolling(lab, pair, lines).await,
            Self::Rotation => change::rotation(lab, pair, lines).await,
            Self::Failover => change::failover(lab, pair, lines).await,
            Self::Scale => scale::measure(lab, pair, lines).await,
            Self::Links => scale::links(lab, pair, lines).await,
        }
    }
}

/// Resources for all parts.
struct Lab {
    programs: Programs,
    rounds: u32,
    /// Time in which the handshakes of the steady state are counted.
    window: Duration,
}

/// A pair of server and agent. `true` means ours.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
struct Pair {
    name: &'static str,
    server: bool,
    agent: bool,
}

const PAIRS: [Pair; 4] = [
    Pair::new(OURS, true, true),
    Pair::new(OURS_STOCK, true, false),
    Pair::new("stock+ours", false, true),
    Pair::new(STOCK, false, false),
];

impl Pair {
    const fn new(name: &'static str, server: bool, agent: bool) -> Self {
        Self {
            name,
            server,
            agent,
        }
    }

    fn needs_stock(self) -> bool {
        !(self.server && self.agent)
    }
}

impl Lab {
    /// Returns the programs of server and agent.
    fn executables(&self, pair: Pair) -> anyhow::Result<(Executable, Executable)> {
        let path = |is_ours: bool, ours, stock: fn(&_) -> &PathBuf| {
            let path = match is_ours {
                true => self.programs.path(ours),
                false => stock(self.programs.stock.context("needs Go")?).clone(),
            };
            anyhow::Ok(Executable::At(path))
        };
        Ok((
            path(pair.server, SERVER, |stock| &stock.proxy_server)?,
            path(pair.agent, AGENT, |stock| &stock.proxy_agent)?,
        ))
    }
}

/// Measures all parts and prints the table. Returns true if every measurement was possible and, with `--strict`, our
/// programs meet the targets.
pub(crate) async fn run(options: Options) -> anyhow::Result<bool> {
    for name in &options.pairs {
        ensure!(
            PAIRS.iter().any(|pair| pair.name == name),
            "unknown pair {name:?}; --help lists all"
        );
    }
    memory::raise_limit();
    let lab = Lab {
        programs: Programs::find()?,
        rounds: options.rounds,
        window: Duration::from_secs(options.seconds),
    };
    for pair in PAIRS.iter().filter(|pair| pair.needs_stock()) {
        let is_named = options.pairs.iter().any(|name| name == pair.name);
        ensure!(
            !is_named || lab.programs.stock.is_some(),
            "pair {:?} needs the stock programs, which need Go",
            pair.name
        );
    }
    let parts = match options.parts.as_slice() {
        [] => Part::value_variants(),
        some => some,
    };
    println!("{}; {} rounds", Machine::this(), lab.rounds);
    println!("{}", table::HEADING);
    let mut lines = Lines::default();
    for part in parts {
        for pair in PAIRS {
            let is_wanted =
                options.pairs.is_empty() || options.pairs.iter().any(|one| one == pair.name);
            if !is_wanted || (pair.needs_stock() && lab.programs.stock.is_none()) {
                continue;
            }
            part.measure(&lab, pair, &mut lines).await;
        }
    }
    ensure!(
        !lines.0.is_empty(),
        "no part has a row for the selected pairs"
    );
    if let Some(path) = &options.json {
        let machine = Machine::this().to_string();
        let lines: Vec<_> = lines.0.iter().map(Line::json).collect();
        let report = json!({ "machine": machine, "rounds": lab.rounds, "lines": lines });
        std::fs::write(path, format!("{report:#}\n"))
            .with_context(|| path.display().to_string())?;
    }
    let is_clean = lines.0.iter().all(Line::is_clean);
    let is_met = lines.0.iter().all(|line| line.is_met() != Some(false));
    Ok(is_clean && (is_met || !options.strict))
}
