//! Load right after the loss of an agent with bulk connections. Another agent carries the load.

use std::net::SocketAddr;
use std::time::Duration;

use crate::aborts::{Steady, Transfers};
use crate::figures::Figures;
use crate::measure::Subject as _;
use crate::tunnel::contenders::Tunnel;

/// The agent that is lost, and the agent that carries the load.
const LOST: usize = 0;
const OTHER: usize = 1;

/// Measures a tunnel with two agents. Only one of them runs while the bulk connections are opened, so that all of
/// them end together.
pub(super) async fn measure(
    mut tunnel: Tunnel,
    target: SocketAddr,
    time: Duration,
) -> anyhow::Result<Figures> {
    let entry = tunnel.entry.clone();
    tunnel.lose_agent(LOST)?;
    tunnel.observe_agent(OTHER);
    let before = Steady::measure(&entry, target, time, &mut || tunnel.cpu_time()).await?;
    tunnel.lose_agent(OTHER)?;
    tunnel.start_agent(LOST).await?;
    let transfers = Transfers::start(&entry, target).await?;
    tunnel.start_agent(OTHER).await?;
    tunnel.lose_agent(LOST)?;
    transfers.end().await?;
    let after = Steady::measure(&entry, target, time, &mut || tunnel.cpu_time()).await?;
    Ok(after.compare(&before))
}
