//! Rolling updates with a stock program at one end or at both ends.

use std::time::Duration;

use culvert_kit::services::Services;
use culvert_tests::rolling::{Plan, Report, roll};
use culvert_tests::{Mode, Topology, Transport};

use crate::case::Make;

const GRACE: Duration = Duration::from_secs(3);

/// Replaces three servers and two agents under load. Returns `None` without Go.
async fn update(server: Make, agent: Make) -> Option<Report> {
    let server = server.executable(|release| &release.proxy_server)?;
    let program = agent.executable(|release| &release.proxy_agent)?;
    let flag = match agent {
        Make::Ours => "--drain-timeout=3s",
        _ => "--sync-forever=true",
    };
    let services = Services::start().await.unwrap();
    let mut builder = Topology::builder(Mode::HttpConnect, Transport::Uds);
    for _ in 0..3 {
        builder = builder.server(server.clone(), &["--graceful-shutdown-timeout=3s"]);
    }
    for _ in 0..2 {
        builder = builder.agent(program.clone(), &[flag]);
    }
    let mut topology = builder.start().await;
    let plan = Plan {
        dials_per_second: 200,
        streams: 50,
        target: services.raw,
        grace: GRACE,
        kill_agents: agent != Make::Ours,
    };
    Some(roll(&mut topology, plan).await)
}

#[tokio::test]
async fn our_servers_lose_nothing_with_stock_agents() {
    if let Some(report) = update(Make::Ours, Make::Stock).await {
        assert!(
            report.failed.is_empty() && report.cut_early.is_empty(),
            "{report:#?}"
        );
        assert_eq!(report.wrong, 0);
    }
}

// A stock server closes its front end and its health listener at the first signal, so dials of that moment fail.
#[tokio::test]
async fn our_agents_keep_the_streams_of_stopping_stock_servers() {
    if let Some(report) = update(Make::Stock, Make::Ours).await {
        assert!(report.cut_early.is_empty(), "{report:#?}");
        assert_eq!(report.wrong, 0);
    }
}

// Stock agents close all connections soon after the GOAWAY of a stopping stock server.
#[tokio::test]
async fn stock_pair_cuts_streams_early() {
    if let Some(report) = update(Make::Stock, Make::Stock).await {
        assert!(!report.cut_early.is_empty(), "{report:#?}");
        assert_eq!(report.wrong, 0);
    }
}
