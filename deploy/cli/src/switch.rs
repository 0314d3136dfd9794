//! The command `culvert switch`: requests a tunnel mode from a server, and can wait for the end of the
//! switch.

use std::time::Duration;

use anyhow::bail;
use culvert_host::flags::GoDuration;
use culvert_server::switch::SetBy;
use culvert_server::switch::status::{Progress, Request, Status};
use culvert_server::tunnel::Mode;
use tokio::time::{Instant, sleep};

use crate::admin::Admin;
use crate::status::progress;
use crate::stdout::printable;

/// Pause between two status requests while waiting.
const POLL: Duration = Duration::from_millis(250);

/// Longest pause between two progress lines while waiting.
const REPORT: Duration = Duration::from_secs(5);

/// Longest time without an answer while waiting; the server may restart in the middle of a switch.
const RESTART: Duration = Duration::from_secs(60);

/// Flags of `culvert switch`.
#[derive(clap::Args)]
pub struct Options {
    #[command(flatten)]
    admin: Admin,

    /// The mode: konnectivity, openvpn, prefer-konnectivity or prefer-openvpn.
    #[arg(long, value_name = "MODE")]
    to: Mode,

    /// Time for connections of the old tunnel to end; by default the server's --tunnel-drain. If a switch to
    /// the same mode is already in progress, its deadline is replaced: the time counts from now.
    #[arg(long, value_name = "DURATION", value_parser = drain)]
    drain: Option<GoDuration>,

    /// Wait until no connection of the old mode is left.
    #[arg(long)]
    wait: bool,

    /// Longest wait; the switch continues after the wait. Without the flag, the wait has no limit.
    #[arg(long, value_name = "DURATION", requires = "wait", value_parser = drain)]
    timeout: Option<GoDuration>,
}

/// Runs the command.
///
/// # Errors
/// Fails if the server rejects the request, or if the wait ends before the switch is complete.
pub async fn run(options: &Options) -> anyhow::Result<()> {
    let request = Request::new(options.to, options.drain);
    let status = options.admin.switch(&request).await?;
    tell(&status);
    if options.wait {
        wait(options, status).await
    } else {
        Ok(())
    }
}

fn tell(status: &Status) {
    match status.switch {
        Progress::Settled => say!("{}: in force", status.mode),
        _ => say!("{}: {}", status.mode, progress(&status.switch)),
    }
    for problem in &status.problems {
        say!("problem: {}", printable(problem));
    }
}

async fn wait(options: &Options, mut status: Status) -> anyhow::Result<()> {
    let started = Instant::now();
    let limit = options.timeout.map(|limit| started + limit.saturating());
    let (mut answered, mut told) = (started, started);
    while status.switch != Progress::Settled {
        if limit.is_some_and(|limit| Instant::now() >= limit) {
            bail!(
                "the switch is not complete yet: {}",
                progress(&status.switch)
            );
        }
        sleep(POLL).await;
        let before = std::mem::discriminant(&status.switch);
        match options.admin.status().await {
            Ok(now) => status = now,
            Err(error) if answered.elapsed() >= RESTART => return Err(error),
            Err(_) => continue,
        }
        answered = Instant::now();
        if status.mode != options.to {
            bail!("{}", changed(&status));
        }
        if before != std::mem::discriminant(&status.switch) || told.elapsed() >= REPORT {
            told = answered;
            tell(&status);
        }
    }
    Ok(())
}

/// Explains a mode that is not the requested one.
fn changed(status: &Status) -> String {
    let mode = status.mode;
    match status.set_by {
        SetBy::Flag => format!(
            "the server has restarted with --tunnel-mode={mode}: without --tunnel-state-file it does not keep a switch"
        ),
        SetBy::File => format!("--tunnel-mode-file has changed the mode to {mode}"),
        SetBy::Switch => format!("another switch has changed the mode to {mode}"),
    }
}

fn drain(text: &str) -> Result<GoDuration, String> {
    let drain: GoDuration = text.parse().map_err(|error| format!("{error}"))?;
    match drain.nanos() {
        ..0 => Err("must be >= 0".to_owned()),
        _ => Ok(drain),
    }
}
