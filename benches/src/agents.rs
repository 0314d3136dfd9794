//! Many agents of ours in one process, without their health and admin listeners. A thousand processes on a few cores
//! would measure the switches between processes, not the server. `tests/interop/agents` does the same with stock agents.

use std::process::ExitCode;

use anyhow::Context as _;
use culvert_agent::app::Bound;
use culvert_agent::config::{Config, PROGRAM};
use culvert_host::runtime::set_open_file_limit;
use tokio::task::LocalSet;
use tokio_util::sync::CancellationToken;

/// Name under which this program starts as many agents.
pub(crate) const AGENTS: &str = "culvert-bench-agents";

/// Identifiers of the agents that are not chosen.
const OTHER: &str = "host=other";

/// Runs agents until the process is killed. Arguments, as for `tests/interop/agents`: number of agents, number of chosen
/// agents, identifiers of the chosen agents, flags of all agents.
pub(crate) fn serve() -> ExitCode {
    set_open_file_limit();
    let runtime = tokio::runtime::Builder::new_current_thread()
        .enable_all()
        .build();
    let served = runtime.map_err(anyhow::Error::from).and_then(|runtime| {
        let args: Vec<String> = std::env::args().skip(1).collect();
        LocalSet::new().block_on(&runtime, run(&args))
    });
    match served {
        Ok(()) => ExitCode::SUCCESS,
        Err(error) => {
            eprintln!("{error:#}");
            ExitCode::FAILURE
        }
    }
}

async fn run(args: &[String]) -> anyhow::Result<()> {
    let [count, chosen, identifiers, flags @ ..] = args else {
        anyhow::bail!("the arguments are COUNT CHOSEN IDENTIFIERS FLAGS");
    };
    let count: usize = count.parse().context("COUNT")?;
    let chosen: usize = chosen.parse().context("CHOSEN")?;
    let flags = [PROGRAM.to_owned()]
        .into_iter()
        .chain(flags.iter().cloned());
    let config = Config::from_args(flags);
    let mut config = config.map_err(|exit| anyhow::anyhow!(exit.text))?;
    config.health.port = 0;
    config.admin.port = 0;
    let shutdown = CancellationToken::new();
    let mut agents = Vec::new();
    for number in 0..count {
        let mut config = config.clone();
        config.agent_id = format!("agent-{number}");
        config.agent_identifiers = match number < chosen {
            true => identifiers.clone(),
            false => OTHER.to_owned(),
        };
        let bound = Bound::bind(config, shutdown.clone()).await?;
        let running = bound.run(CancellationToken::new());
        agents.push(tokio::task::spawn_local(running));
    }
    for agent in agents {
        agent.await?;
    }
    Ok(())
}
