//! Rolling updates of all servers and agents under load.

use std::time::Duration;

use culvert_kit::services::Services;
use culvert_tests::rolling::{Plan, roll};
use culvert_tests::{Executable, Mode, Topology, Transport};

const GRACE: Duration = Duration::from_secs(3);

#[tokio::test]
async fn rolling_update_loses_no_dial_and_cuts_no_stream_before_its_grace() {
    let services = Services::start().await.unwrap();
    let mut builder = Topology::builder(Mode::HttpConnect, Transport::Uds);
    for _ in 0..3 {
        builder = builder.server(Executable::Ours, &["--graceful-shutdown-timeout=3s"]);
    }
    for _ in 0..2 {
        builder = builder.agent(Executable::Ours, &["--drain-timeout=3s"]);
    }
    let mut topology = builder.start().await;
    let plan = Plan {
        dials_per_second: 200,
        streams: 50,
        target: services.raw,
        grace: GRACE,
        kill_agents: false,
    };
    let report = roll(&mut topology, plan).await;
    assert!(report.failed.is_empty(), "{report:#?}");
    assert!(report.cut_early.is_empty(), "{report:#?}");
    assert_eq!(report.wrong, 0);
    // Each program of the update ends its share of the streams.
    assert!(report.streams > 2 * plan.streams, "{report:#?}");
}
