//! A rolling update of the front door while agents reach their server through it.

use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};
use std::time::Duration;

use culvert_kit::client::BoxedStream;
use culvert_kit::services::Services;
use culvert_tests::balancer::Balancer;
use culvert_tests::{Executable, Mode, Topology, Transport, eventually};
use tokio::io::{AsyncReadExt, AsyncWriteExt};
use tokio::task::JoinSet;
use tokio::time::{Instant, sleep};

use crate::support::{Door, LIMIT, Upstream, timely};

/// Number of streams.
const STREAMS: usize = 100;

/// The default, which the harness shortens.
const GRACE: &str = "--resume-grace=30s";

/// Name of the server in TLS.
const NAME: &str = "localhost";

/// Echoes until the end of the load, and returns the longest time without an answer.
async fn echo(mut stream: BoxedStream, stop: Arc<AtomicBool>) -> Duration {
    stream.write_all(b"echo\n").await.unwrap();
    let (mut round, mut gap) = (0_u8, Duration::ZERO);
    while !stop.load(Ordering::Relaxed) {
        let started = Instant::now();
        let sent = [round; 1000];
        stream.write_all(&sent).await.unwrap();
        stream.flush().await.unwrap();
        let mut back = [0; 1000];
        stream.read_exact(&mut back).await.unwrap();
        assert_eq!(back, sent);
        gap = gap.max(started.elapsed());
        round = round.wrapping_add(1);
        sleep(Duration::from_millis(50)).await;
    }
    gap
}

#[tokio::test]
async fn roll_of_the_front_door_cuts_no_stream_of_an_agent() {
    let services = Services::start().await.unwrap();
    let builder = Topology::builder(Mode::HttpConnect, Transport::Uds);
    let builder = builder.servers(1).server_args(&[GRACE]);
    let mut topology = builder.start().await;
    let route = Upstream::new("cluster", topology.agent_address(0)).server_name(NAME);
    let first = Door::start(std::slice::from_ref(&route)).await;
    let service = Balancer::start(vec![first.sni]).await;
    let flags = [
        format!("--proxy-server-host={NAME}"),
        format!("--proxy-server-port={}", service.addr().port()),
    ];
    let flags = [flags[0].as_str(), flags[1].as_str(), GRACE];
    topology.add_agent(Executable::Ours, &flags).await;
    topology.wait_for_agents().await;
    let (stop, mut load) = (Arc::new(AtomicBool::new(false)), JoinSet::new());
    for _ in 0..STREAMS {
        let stream = topology.connect(&services.raw.to_string()).await.unwrap();
        load.spawn(echo(stream, stop.clone()));
    }
    let mut doors = vec![first];
    for roll in 1..=3 {
        let next = Door::start(std::slice::from_ref(&route)).await;
        service.set(vec![next.sni]);
        doors.push(next);
        // The old front door ends, and with it all of its connections.
        drop(doors.remove(0));
        eventually("the link has resumed", LIMIT, async || {
            let metrics = topology.server_metrics(0).await;
            let labels = [("outcome", "resumed")];
            let resumed = metrics.value("culvert_agent_resumes_total", &labels);
            let resumed = resumed.unwrap_or_default();
            (resumed >= f64::from(roll)).then_some(()).ok_or(resumed)
        })
        .await;
    }
    stop.store(true, Ordering::Relaxed);
    let gaps = timely("the end of the load", load.join_all()).await;
    assert_eq!(gaps.len(), STREAMS);
    let gap = gaps.into_iter().max().unwrap();
    println!("longest gap in a roll: {gap:?}");
    assert!(gap < Duration::from_secs(6), "{gap:?}");
    let metrics = topology.server_metrics(0).await;
    let lost = [("reason", "agent_lost")];
    assert_eq!(
        metrics.value("culvert_connections_closed_total", &lost),
        Some(0.0)
    );
}
