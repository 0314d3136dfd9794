//! Leases of servers in the real API.

use std::collections::BTreeSet;

use culvert_tests::{Signal, eventually};

use crate::lab::{
    ACCOUNT, AUDIENCE, Egress, Lab, PATIENCE, SECOND_SEED, SERVERS, ServerOptions, ready_agents,
};

/// Egress of these cases. The front end has no part in leases.
const EGRESS: Egress = Egress::GrpcUds;

const FIRST: &str = "konnectivity-proxy-server-first";
const SECOND: &str = "konnectivity-proxy-server-second";

/// Without a role, a server carries traffic but keeps no lease. With the role, the lease appears without a restart.
pub(super) async fn servers_need_a_role_for_their_leases(lab: &mut Lab) {
    lab.tunnel(EGRESS).await;
    lab.stop_tunnel();
    let args = ["--server-id=first", "--enable-lease-controller"];
    let options = ServerOptions {
        args: &args,
        ..ServerOptions::default()
    };
    lab.server = Some(lab.start_server(EGRESS, &options));
    let server = lab.server.as_ref().unwrap();
    server.wait_for_log("forbidden", PATIENCE).await;
    let token = lab.token(ACCOUNT, AUDIENCE).await;
    lab.agent = Some(lab.start_agent(&token, &[]));
    lab.wait_for_agents(1).await;
    leases_are(lab, &[]).await;
    let objects = include_str!("../objects/leases.yaml");
    lab.kubectl.apply(objects).await;
    leases_are(lab, &[FIRST]).await;
}

/// An agent connects to each server with a lease. Each server announces only itself.
pub(super) async fn agent_counts_servers_by_their_leases(lab: &mut Lab) {
    lab.tunnel(EGRESS).await;
    lab.stop_tunnel();
    let objects = include_str!("../objects/leases.yaml");
    lab.kubectl.apply(objects).await;
    let first = ["--server-id=first", "--enable-lease-controller"];
    let options = ServerOptions {
        args: &first,
        ..ServerOptions::default()
    };
    lab.server = Some(lab.start_server(EGRESS, &options));
    let second = ["--server-id=second", "--enable-lease-controller"];
    let options = ServerOptions {
        address: SECOND_SEED,
        args: &second,
    };
    let mut other = lab.start_server(EGRESS, &options);
    leases_are(lab, &[FIRST, SECOND]).await;
    let token = lab.token(ACCOUNT, AUDIENCE).await;
    let kubeconfig = lab.account_kubeconfig(ACCOUNT).await;
    let host = format!("--proxy-server-host={SERVERS}");
    let kubeconfig = format!("--kubeconfig={}", kubeconfig.display());
    let more = [&host, "--count-server-leases", &kubeconfig];
    lab.agent = Some(lab.start_agent(&token, &more));
    lab.wait_for_agents(1).await;
    eventually("the second server has the agent", PATIENCE, async || {
        let ready = ready_agents(SECOND_SEED).await?;
        (ready == 1.0)
            .then_some(())
            .ok_or(format!("{ready} agents"))
    })
    .await;
    other.signal(Signal::TERM);
    assert!(other.wait_exit(PATIENCE).await.success());
    leases_are(lab, &[FIRST]).await;
    // Later cases start with the usual tunnel.
    lab.stop_tunnel();
}

/// Waits until exactly these leases of servers exist.
async fn leases_are(lab: &Lab, expected: &[&str]) {
    let expected: BTreeSet<String> = expected.iter().copied().map(str::to_owned).collect();
    let what = format!("the leases are {expected:?}");
    eventually(&what, PATIENCE, async || {
        let args = [
            "leases",
            "-n",
            "kube-system",
            "-l",
            "k8s-app=konnectivity-server",
        ];
        let list = lab.kubectl.get(&args).await?;
        let items = list["items"].as_array().cloned().unwrap_or_default();
        let names: BTreeSet<String> = items
            .iter()
            .filter_map(|it| it["metadata"]["name"].as_str().map(str::to_owned))
            .collect();
        (names == expected)
            .then_some(())
            .ok_or(format!("{names:?}"))
    })
    .await;
}
