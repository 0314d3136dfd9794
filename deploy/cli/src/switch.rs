//! `culvert switch`: asks a server for a tunnel mode, and waits for it if asked to.

use std::time::Duration;

use anyhow::bail;
use culvert_host::flags::GoDuration;
use culvert_server::switch::Mode;
use culvert_server::switch::status::{Progress, Request, Status};
use tokio::time::{Instant, sleep};

use crate::admin::Admin;
use crate::status::progress;

/// How often the server is asked how far it is.
const POLL: Duration = Duration::from_millis(250);

/// How often the wait says so.
const REPORT: Duration = Duration::from_secs(5);

/// How long a server may not answer: it may restart in the middle of a switch.
const RESTART: Duration = Duration::from_secs(60);

/// The flags of `culvert switch`.
#[derive(clap::Args)]
pub struct Options {
    #[command(flatten)]
    admin: Admin,

    /// The mode: konnectivity, openvpn, prefer-konnectivity or prefer-openvpn.
    #[arg(long, value_name = "MODE")]
    to: Mode,

    /// How long connections of the old tunnel may live on; the server's --tunnel-drain if nothing is
    /// said. For the mode that is being switched to already, a new deadline from now on.
    #[arg(long, value_name = "DURATION", value_parser = drain)]
    drain: Option<GoDuration>,

    /// Wait until nothing is left of the old mode.
    #[arg(long)]
    wait: bool,

    /// How long to wait at most; the switch goes on after that. Without it there is no end.
    #[arg(long, value_name = "DURATION", requires = "wait", value_parser = drain)]
    timeout: Option<GoDuration>,
}

/// Runs the command.
///
/// # Errors
/// When the server refuses, or the wait is in vain.
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
        say!("problem: {problem}");
    }
}

async fn wait(options: &Options, mut status: Status) -> anyhow::Result<()> {
    let started = Instant::now();
    let limit = options.timeout.map(|limit| started + limit.saturating());
    let (mut answered, mut told) = (started, started);
    while status.switch != Progress::Settled {
        if limit.is_some_and(|limit| Instant::now() >= limit) {
            bail!("not complete yet: {}", progress(&status.switch));
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
            bail!("another switch came in between, to {}", status.mode);
        }
        if before != std::mem::discriminant(&status.switch) || told.elapsed() >= REPORT {
            told = answered;
            tell(&status);
        }
    }
    Ok(())
}

fn drain(text: &str) -> Result<GoDuration, String> {
    let drain: GoDuration = text.parse().map_err(|error| format!("{error}"))?;
    match drain.nanos() {
        ..0 => Err("must be >= 0".to_owned()),
        _ => Ok(drain),
    }
}
