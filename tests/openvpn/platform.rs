//! Our sessions in place of the platform's server and client, with the platform's packet filters and sidecar.

use std::net::SocketAddrV4;
use std::time::Duration;

use culvert_tests::namespace::alone;
use culvert_tests::openvpn::cluster::{NODE, NODE_ACCESSED, POD, SEED, SEED_INSIDE};
use culvert_tests::openvpn::scenario::BULK;
use culvert_tests::openvpn::stock::lost_pings;
use culvert_tests::openvpn::{Cluster, Endpoint, Link, OpenVpn, kkp, scenario};

use crate::support::{CLIENT, PUSH, Proto, SERVER, client_config, server_config};

/// Time between two pings.
const INTERVAL: Duration = Duration::from_millis(50);

#[test]
fn our_server_works_with_the_platforms_client() {
    alone(async || {
        let Some(openvpn) = OpenVpn::get() else {
            return;
        };
        let cluster = Cluster::start().await;
        let listener = cluster.seed.listen(SocketAddrV4::new(SEED, 1194));
        let dir = cluster.dir("client");
        let options = kkp::user_cluster_client(&cluster.pki, &dir, &SEED.to_string());
        let mut user = openvpn.start(&cluster.client, &options);
        let (stream, _) = listener.accept().await.unwrap();
        let config = server_config(Proto::Tcp, &cluster.pki, &cluster.pki.server);
        let ours = Endpoint::server(Link::tcp(stream), config, &PUSH);
        ours.established().await;
        user.is_up().await;
        let probe = cluster.client.run("ping", "-c 1 -w 5 10.20.0.1").await;
        probe.unwrap();
        scenario::reaches_everything(&ours, &cluster, NODE_ACCESSED).await;
        scenario::carries(&ours, POD, BULK).await;
        scenario::carries_many(&ours, POD, 200).await;
        scenario::refuses(&ours, POD).await;
        user.stop().await;
        assert_eq!(ours.ended().await, "the peer closed the connection");
    });
}

#[test]
fn our_client_works_with_the_platforms_server() {
    alone(async || {
        let Some(openvpn) = OpenVpn::get() else {
            return;
        };
        let cluster = Cluster::start().await;
        kkp::filter_at_server(&cluster.seed);
        let options = kkp::server(&cluster.pki, &cluster.dir("server"));
        let mut server = openvpn.start(&cluster.seed, &options);
        server.is_up().await;
        let stream = cluster.client.connect(SocketAddrV4::new(SEED, 1194)).await;
        let config = client_config(Proto::Tcp, &cluster.pki, &cluster.pki.user_cluster);
        let link = Link::tcp(stream.unwrap());
        let ours = Endpoint::client(link, config, Some(cluster.client.clone()));
        ours.established().await;
        assert_eq!(ours.lost_pings(SERVER, 5, INTERVAL).await, 0);
        assert_eq!(
            lost_pings(&cluster.seed, &CLIENT.to_string(), 5, INTERVAL).await,
            0
        );
        scenario::reaches_everything(&cluster.seed, &cluster, NODE_ACCESSED).await;
        scenario::carries(&cluster.seed, POD, BULK).await;
        scenario::carries_many(&cluster.seed, POD, 200).await;
        scenario::refuses(&cluster.seed, POD).await;

        let sidecar = &cluster.sidecar;
        let inside = SEED_INSIDE.to_string();
        let options = kkp::sidecar(&cluster.pki, &cluster.dir("sidecar"), &inside);
        let mut inside = openvpn.start(sidecar, &options);
        inside.is_up().await;
        kkp::node_access_at_sidecar(sidecar, &[NODE]);
        scenario::reaches_everything(sidecar, &cluster, NODE).await;
        scenario::carries(sidecar, POD, BULK).await;
    });
}
