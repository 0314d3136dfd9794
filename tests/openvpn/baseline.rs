//! A stock server with stock clients, configured as on the platform. These tests check the test setup.

use std::time::Duration;

use culvert_tests::eventually;
use culvert_tests::namespace::alone;
use culvert_tests::openvpn::cluster::{NODE, NODE_ACCESSED, POD, SEED, SEED_INSIDE};
use culvert_tests::openvpn::scenario::BULK;
use culvert_tests::openvpn::stock::lost_pings;
use culvert_tests::openvpn::{Cluster, OpenVpn, kkp, scenario};
use culvert_tests::topology::PATIENCE;

/// The server's address in the tunnel. The platform's probes ping this address.
const SERVER: &str = "10.20.0.1";

#[test]
fn a_stock_pair_carries_the_platforms_traffic() {
    alone(async || {
        let Some(openvpn) = OpenVpn::get() else {
            return;
        };
        let cluster = Cluster::start().await;
        let (seed, client) = (&cluster.seed, &cluster.client);
        kkp::filter_at_server(seed);
        let options = kkp::server(&cluster.pki, &cluster.dir("server"));
        let mut server = openvpn.start(seed, &options);
        server.is_up().await;
        let dir = cluster.dir("client");
        let options = kkp::user_cluster_client(&cluster.pki, &dir, &SEED.to_string());
        let mut user = openvpn.start(client, &options);
        user.is_up().await;

        assert_eq!(
            lost_pings(client, SERVER, 3, Duration::from_millis(200)).await,
            0
        );
        scenario::reaches_everything(seed, &cluster, NODE_ACCESSED).await;
        scenario::carries(seed, POD, BULK).await;
        scenario::carries_many(seed, POD, 50).await;
        scenario::refuses(seed, POD).await;

        // A pod of the control plane, with the platform's packet filter rules.
        let sidecar = &cluster.sidecar;
        let options = kkp::sidecar(
            &cluster.pki,
            &cluster.dir("sidecar"),
            &SEED_INSIDE.to_string(),
        );
        let mut inside = openvpn.start(sidecar, &options);
        inside.is_up().await;
        kkp::node_access_at_sidecar(sidecar, &[NODE]);
        scenario::reaches_everything(sidecar, &cluster, NODE).await;
        scenario::carries(sidecar, POD, BULK).await;
        // The cluster cannot reach the seed, even with a route.
        client.ip("route add 10.20.0.0/24 dev kube");
        let intruder = client.run("ping", "-c 1 -W 1 10.20.0.10").await;
        assert!(intruder.is_err(), "{intruder:?}");

        let status = cluster.dir("server").join("openvpn-status");
        eventually("the server's status is written", PATIENCE, async || {
            std::fs::metadata(&status).map(|file| file.len() > 0)
        })
        .await;
        for stock in [inside, user, server] {
            stock.stop().await;
        }
    });
}

#[test]
fn iperf3_measures_a_stock_pair() {
    alone(async || {
        let Some(openvpn) = OpenVpn::get() else {
            return;
        };
        let cluster = Cluster::start().await;
        let options = kkp::server(&cluster.pki, &cluster.dir("server"));
        let mut server = openvpn.start(&cluster.seed, &options);
        server.is_up().await;
        let dir = cluster.dir("client");
        let options = kkp::user_cluster_client(&cluster.pki, &dir, &SEED.to_string());
        let mut user = openvpn.start(&cluster.client, &options);
        user.is_up().await;
        for options in ["", "-R"] {
            let bits = cluster.iperf3(&cluster.seed, options).await;
            eprintln!("iperf3 {options}: {:.0} Mbit/s", bits / 1e6);
            // The figure depends on the machine, so the test accepts any plausible figure.
            assert!(bits > 1e6, "{options} {bits}");
        }
    });
}
