//! One measurement: honest clients alone, then beside an attack, and then until everything works again.

use std::convert::Infallible;
use std::time::Duration;

use anyhow::{Context as _, bail, ensure};
use tokio::time::{Instant, sleep, sleep_until};

use crate::attack::attackers::{Attacker, Calls};
use crate::attack::honest::{self, Honest, Outcome, Purpose, Sample};
use crate::attack::networks::Networks;
use crate::attack::party::Party;
use crate::attack::rows::{
    Attack, CLIENT_P99, CONNECTION_RATE, CONNECTIONS, DESCRIPTORS, DIAL_P99, FAILED, GROWTH,
    HEALTH_P99, Kind, Listener, RECOVERY, SENT,
};
use crate::attack::stage::{AUTHORITY, Stage};
use crate::figures::{Figures, HUNG, MIB};
use crate::load::percentiles;

/// Time of honest clients alone.
const ALONE: Duration = Duration::from_secs(1);

/// Interval of readings of memory and descriptors, and of the state of honest clients.
const LOOK: Duration = Duration::from_millis(100);

/// Time limit of the recovery.
const RECOVERY_LIMIT: Duration = Duration::from_secs(15);

/// Attacks the stage for this time. Fails if honest clients are not served before the attack, if the attacked
/// program exits, or if the attack ends early or makes no connection.
pub(super) async fn measure(
    mut stage: Stage,
    front: Listener,
    kind: Kind,
    time: Duration,
    networks: &Networks,
) -> anyhow::Result<Figures> {
    let (network, source) = (networks.honest(), networks.honest_source());
    let honest = Honest::start(network, source, stage.probes.clone());
    sleep(ALONE).await;
    is_served(&stage, &honest).await?;
    let before = stage.usage()?;

    stage.begin()?;
    let attacker = Attacker::new(&networks.attackers(kind.addresses));
    let begin = Instant::now();
    let mut attack = start(&attacker, &stage, front, kind, networks);
    let mut most = before;
    while begin.elapsed() < time {
        sleep_until((Instant::now() + LOOK).min(begin + time)).await;
        if let Some(never) = attack.ended().context("the attack ended early")? {
            match never {}
        }
        let (memory, descriptors) = stage.usage()?;
        most = (most.0.max(memory), most.1.max(descriptors));
    }
    let (connections, bytes) = (attacker.connections(), attacker.bytes());
    drop(attack);
    ensure!(
        connections > 0,
        "the attack made no connection: {}",
        attacker.first_error().unwrap_or("no error")
    );
    stage.end();
    let end = Instant::now();
    let recovery = recovery(&stage, &honest, end).await;
    if let Some(why) = honest.take_error() {
        eprintln!("  first failed request: {why}");
    }

    let elapsed = (end - begin).as_secs_f64();
    let mut figures = vec![
        (CONNECTIONS, connections as f64),
        (CONNECTION_RATE, connections as f64 / elapsed),
        (SENT, bytes as f64 / MIB),
        (GROWTH, (most.0 - before.0) as f64 / MIB),
        (DESCRIPTORS, (most.1 - before.1) as f64),
    ];
    let mut samples = honest.samples();
    samples.retain(|sample| (begin..end).contains(&sample.begin));
    figures.extend(latencies(&samples));
    figures.push((RECOVERY, recovery));
    Ok(figures)
}

/// Checks that the latest finished request of each kind was successful.
async fn is_served(stage: &Stage, honest: &Honest) -> anyhow::Result<()> {
    let deadline = Instant::now() + honest::LIMIT;
    for (purpose, _) in &stage.probes {
        let is_done = |sample: &Sample| {
            sample.purpose == *purpose && matches!(sample.outcome, Outcome::Done(_))
        };
        while !honest.samples().iter().any(is_done) {
            if Instant::now() > deadline {
                let why = honest.take_error();
                bail!("honest clients are not served before the attack: {why:?}");
            }
            sleep(LOOK).await;
        }
    }
    honest.take_error();
    Ok(())
}

/// Returns the seconds from `end` until a request of each kind that began after `end` was successful, or [`HUNG`].
/// Also waits for the requests that began before `end`.
async fn recovery(stage: &Stage, honest: &Honest, end: Instant) -> f64 {
    let mut slowest: f64 = 0.0;
    for (purpose, _) in &stage.probes {
        let recovered = loop {
            let samples = honest.samples();
            let times = samples.iter().filter_map(|sample| match sample.outcome {
                Outcome::Done(took) if sample.purpose == *purpose && sample.begin >= end => {
                    Some((sample.begin + took - end).as_secs_f64())
                }
                _ => None,
            });
            if let Some(first) = times.reduce(f64::min) {
                break first;
            }
            if end.elapsed() > RECOVERY_LIMIT {
                break HUNG;
            }
            sleep(LOOK).await;
        };
        slowest = slowest.max(recovered);
    }
    let is_open = |sample: &Sample| sample.begin < end && sample.outcome == Outcome::Pending;
    while honest.samples().iter().any(is_open) && end.elapsed() < RECOVERY_LIMIT {
        sleep(LOOK).await;
    }
    slowest
}

/// Returns the 99th percentile of each kind of request in milliseconds, and the share of failed requests. A
/// failed request counts as hung.
fn latencies(samples: &[Sample]) -> Figures {
    let mut figures = Figures::new();
    let of = |purpose| {
        samples
            .iter()
            .filter(move |sample| sample.purpose == purpose)
    };
    for (purpose, metric) in [
        (Purpose::Client, CLIENT_P99),
        (Purpose::Dial, DIAL_P99),
        (Purpose::Health, HEALTH_P99),
    ] {
        let count = of(purpose).count();
        let times: Vec<Duration> = of(purpose)
            .filter_map(|sample| match sample.outcome {
                Outcome::Done(time) => Some(time),
                Outcome::Pending | Outcome::Failed => None,
            })
            .collect();
        if count == 0 {
            continue;
        }
        // One failure in a hundred is allowed.
        let is_hung = (count - times.len()) * 100 > count;
        let [_, p99] = percentiles(times);
        figures.push((metric, if is_hung { HUNG } else { p99 / 1e3 }));
    }
    let failed = samples
        .iter()
        .filter(|sample| !matches!(sample.outcome, Outcome::Done(_)));
    let share = 100.0 * failed.count() as f64 / samples.len().max(1) as f64;
    figures.push((FAILED, share));
    figures
}

/// Starts the attack. Dropping the party ends the attack and closes its connections.
fn start(
    attacker: &Attacker,
    stage: &Stage,
    front: Listener,
    kind: Kind,
    networks: &Networks,
) -> Party<Infallible> {
    let (attacker, to, crowd) = (attacker.clone(), stage.at, kind.crowd);
    let (greeting, tls, name) = (stage.greeting.clone(), stage.tls.clone(), stage.name);
    let is_udp = front == Listener::OpenvpnUdp;
    Party::start(networks.attacker(), move || async move {
        Ok(match (kind.attack, tls) {
            (Attack::Silent, _) => attacker.silent(to, crowd).await,
            (Attack::Slow, _) => attacker.slow(to, greeting, crowd).await,
            (Attack::Noise, _) if is_udp => attacker.datagrams(to, crowd).await,
            (Attack::Noise, _) => attacker.noise(to, crowd).await,
            (Attack::Greet, _) => attacker.greet(to, greeting, crowd).await,
            (Attack::Bodies, Some(tls)) => attacker.unauthenticated_bodies(to, &tls, crowd).await,
            (Attack::Calls { streams, token }, Some(tls)) => {
                let calls = Calls {
                    tls,
                    streams,
                    token,
                };
                attacker.calls(to, &calls, crowd).await
            }
            (Attack::Bodies | Attack::Calls { .. }, None) => bail!("the listener has no TLS"),
            (Attack::Streams, _) => attacker.tunnels(to, AUTHORITY, 1024, crowd).await,
            (Attack::Resets, _) => attacker.resets(to, AUTHORITY, crowd).await,
            (Attack::HalfOpen, _) => attacker.half_open(to, crowd).await,
            (Attack::Unread, _) => attacker.unread_control(to, crowd).await,
            (Attack::Large, _) => attacker.large_control(to, crowd).await,
            (Attack::Initials, _) => attacker.initials(to, name, crowd).await?,
        })
    })
}

#[cfg(test)]
mod tests {
    #![allow(clippy::unwrap_used, clippy::expect_used, clippy::indexing_slicing)]
    use super::*;

    fn sample(purpose: Purpose, outcome: Outcome) -> Sample {
        Sample {
            purpose,
            begin: Instant::now(),
            outcome,
        }
    }

    #[test]
    fn failed_requests_hang_the_percentile_of_their_kind() {
        let done = Outcome::Done(Duration::from_millis(3));
        let mut samples = vec![sample(Purpose::Client, done); 3];
        samples.push(sample(Purpose::Health, Outcome::Failed));
        let figures = latencies(&samples);
        assert_eq!(
            figures,
            [(CLIENT_P99, 3.0), (HEALTH_P99, HUNG), (FAILED, 25.0)]
        );
    }
}
