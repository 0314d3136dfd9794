//! Switches between the tunnels under load: new connections open all the time, and long streams stay open.

use std::sync::Arc;
use std::time::Duration;

use culvert_kit::client::{BoxedStream, connect};
use culvert_kit::pattern;
use culvert_kit::services::Services;
use culvert_server::tunnel::{Kind, Mode};
use tokio::io::{AsyncReadExt as _, AsyncWriteExt as _};
use tokio::sync::Semaphore;
use tokio::task::JoinSet;
use tokio::time::{MissedTickBehavior, interval, sleep};
use tokio_util::sync::CancellationToken;

use super::switching::{diverted, opened, settled};
use super::{PATIENCE, Verdict, got, open, text};
use crate::dev::server::Server;

/// Pause between two dials: at most 125 dials a second.
const DIAL_EVERY: Duration = Duration::from_millis(8);

/// Largest number of dials in progress. On a slow machine, more dials would only delay each other until their time is over.
const IN_PROGRESS: usize = 32;

/// Number of switches to the other tunnel and back.
const ROUNDS: usize = 4;

/// Time between two switches.
const STAY: Duration = Duration::from_millis(200);

/// Number of long streams opened before each switch.
const STREAMS: usize = 4;

/// Size of one write on a long stream, in bytes, and pause between two writes.
const PIECE: (u64, Duration) = (512, Duration::from_millis(20));

/// Tasks of connections; each task returns an error if its connection failed.
type Connections = JoinSet<Result<(), String>>;

/// Runs the load and the switches. Fails if any dial fails or any long stream is cut.
pub(super) async fn under_load(server: &Server, services: &Services) -> Verdict {
    let (http, raw) = (services.http.to_string(), services.raw.to_string());
    let count = async || {
        let by_agents = opened(server, Kind::Konnectivity).await?;
        Ok::<_, String>((by_agents, opened(server, Kind::Openvpn).await?))
    };
    let before = count().await?;
    let stop = CancellationToken::new();
    let switches = async {
        let streams = switches(server, &raw, &stop).await;
        stop.cancel();
        streams
    };
    let (dials, streams) = tokio::join!(dials(server, &http, &stop), switches);
    let (dials, failed) = tally(dials).await;
    let (streams, cut) = tally(streams?).await;
    settled(server, Mode::Konnectivity).await?;
    let after = count().await?;
    let (by_agents, by_openvpn) = (after.0 - before.0, after.1 - before.1);
    let switches = 2 * ROUNDS;
    let seen = format!(
        "{switches} switches, {dials} dials, failed dials: {}, {streams} long streams, cut streams: {} \
         (by agents {by_agents}, by openvpn {by_openvpn})",
        failed.len(),
        cut.len(),
    );
    match failed.first().or(cut.first()) {
        Some(why) => Err(format!("{seen}: {why}")),
        None if by_agents == 0 || by_openvpn == 0 => Err(seen),
        None => Ok(seen),
    }
}

/// Makes a request every few milliseconds, each on a new connection. Makes none while [`IN_PROGRESS`] requests wait.
async fn dials(server: &Server, target: &str, stop: &CancellationToken) -> Connections {
    let mut dials = JoinSet::new();
    let places = Arc::new(Semaphore::new(IN_PROGRESS));
    let mut ticks = interval(DIAL_EVERY);
    ticks.set_missed_tick_behavior(MissedTickBehavior::Delay);
    while stop.run_until_cancelled(ticks.tick()).await.is_some() {
        let Ok(place) = places.clone().try_acquire_owned() else {
            continue;
        };
        let (front_end, target) = (server.front_end.clone(), target.to_owned());
        dials.spawn(async move {
            let _place = place;
            let stream = connect(&front_end, &target, PATIENCE).await;
            got(stream.map_err(text)?).await.map(drop)
        });
    }
    dials
}

/// Switches to OpenVPN and back several times, and opens more long streams before each switch.
async fn switches(
    server: &Server,
    target: &str,
    stop: &CancellationToken,
) -> Result<Connections, String> {
    let mut streams = JoinSet::new();
    let modes = [Mode::Openvpn, Mode::Konnectivity];
    for mode in modes.iter().cycle().take(2 * ROUNDS) {
        for _ in 0..STREAMS {
            let stream = open(server, target).await;
            let stream = stream.map_err(|why| format!("a long stream: {why}"))?;
            streams.spawn(hold(stream, stop.clone()));
        }
        sleep(STAY).await;
        diverted(server, *mode).await?;
    }
    sleep(STAY).await;
    Ok(streams)
}

/// Sends bytes and reads the echo at intervals until `stop` fires, then shuts down the stream and expects EOF.
async fn hold(mut stream: BoxedStream, stop: CancellationToken) -> Result<(), String> {
    stream.write_all(b"echo\n").await.map_err(text)?;
    let (size, pause) = PIECE;
    let mut offset = 0;
    while !stop.is_cancelled() {
        let piece = pattern::piece(offset, size);
        stream.write_all(&piece).await.map_err(text)?;
        stream.flush().await.map_err(text)?;
        let mut echoed = vec![0; piece.len()];
        stream.read_exact(&mut echoed).await.map_err(text)?;
        if echoed != piece {
            return Err(format!("wrong bytes after {offset}"));
        }
        offset += size;
        sleep(pause).await;
    }
    stream.shutdown().await.map_err(text)?;
    match stream.read(&mut [0; 1]).await {
        Ok(0) => Ok(()),
        Ok(_) => Err(format!("more than {offset} bytes")),
        Err(error) => Err(text(error)),
    }
}

/// Waits for all connections. Returns the number of connections and the errors of failed connections.
async fn tally(mut connections: Connections) -> (usize, Vec<String>) {
    let mut failures = Vec::new();
    let count = connections.len();
    while let Some(ended) = connections.join_next().await {
        let ended = ended.unwrap_or_else(|error| Err(text(error)));
        failures.extend(ended.err());
    }
    (count, failures)
}
