//! A new route while connections of other routes are open.

use culvert_kit::services::{BANNER, Services};
use culvert_tests::envoy::{Envoy, Seed};
use culvert_tests::eventually;
use culvert_tests::ports::Ports;
use tokio::io::{AsyncReadExt, AsyncWriteExt};
use tokio::net::TcpStream;

use super::clients::{Way, hello, http2, http2_rest, http2_status, open, say};
use super::{Side, Verdicts, add, authority, exposed};
use crate::support::{Door, Http2, LIMIT, Tunnel, Upstream, timely};

/// Connections from before the change.
struct Open {
    client: Http2,
    tunnel: Tunnel,
    named: TcpStream,
}

async fn before(side: &Side) -> Open {
    let client = Http2::connect(side.tunnel).await;
    let mut tunnel = http2(&client, "raw").await.unwrap();
    say(&mut tunnel, b"echo\nx");
    assert_eq!(tunnel.hear(1).await, b"x");
    let mut named = open(side, Way::Sni, "first").await;
    let mut echo = vec![0; BANNER.len() + hello(Some("first.example.com")).len()];
    timely("the echo", named.read_exact(&mut echo))
        .await
        .unwrap();
    Open {
        client,
        tunnel,
        named,
    }
}

/// Waits for the new route, and returns the state of the older connections. `cut` is true if the proxy is
/// expected to end the older tunnel.
async fn after(side: &Side, mut open: Open, cut: bool) -> String {
    eventually("the new route works", LIMIT, async || {
        let client = Http2::connect(side.tunnel).await;
        http2(&client, "new")
            .await
            .map(|_| ())
            .map_err(|s| s.to_string())
    })
    .await;
    let tunnel = if cut {
        http2_rest(&mut open.tunnel).await
    } else {
        say(&mut open.tunnel, b"y");
        String::from_utf8(open.tunnel.hear(1).await).unwrap()
    };
    let again = http2_status(&open.client, &authority("new")).await;
    open.named.write_all(b"z").await.unwrap();
    let mut named = [0];
    let read = timely("an echo", open.named.read(&mut named)).await;
    let named = match read {
        Ok(1) => "echo",
        _ => "closed",
    };
    format!("tunnel: {tunnel}, new: {again}, by name: {named}")
}

#[tokio::test]
async fn a_new_service_closes_no_open_tunnel() {
    let Some(envoy) = Envoy::get() else { return };
    let services = Services::start().await.unwrap();
    let mut upstreams: Vec<Upstream> = vec![
        exposed("raw", services.raw),
        exposed("first", services.first),
    ];
    let mut ports = Ports::default();
    let mut seed = Seed::new(&mut ports);
    for upstream in &upstreams {
        add(&mut seed, upstream);
    }
    let new = exposed("new", services.raw);
    let cluster = new.name.clone();
    seed.clusters.insert(cluster, new.endpoints.clone());
    let dir = tempfile::tempdir().unwrap();
    // KKP sets 600 s.
    let flags = ["--drain-time-s", "2"];
    let _running = envoy.start_with(&seed.following(dir.path()), &flags).await;
    let theirs = Side {
        sni: seed.sni,
        tunnel: seed.tunnel,
        stats: seed.stats,
        node_ports: Default::default(),
    };
    let opened = before(&theirs).await;
    add(&mut seed, &new);
    seed.write_listeners(dir.path());
    let at_envoy = after(&theirs, opened, true).await;

    let door = Door::start(&upstreams).await;
    let own = Side {
        sni: door.sni,
        tunnel: door.tunneling,
        stats: door.stats,
        node_ports: Default::default(),
    };
    let opened = before(&own).await;
    upstreams.push(new);
    door.route(&upstreams).await;
    let at_ours = after(&own, opened, false).await;
    Verdicts::default().differ(
        "a new service",
        [at_envoy, at_ours],
        "tunnel: lost, new: lost, by name: echo",
        "tunnel: y, new: 200, by name: echo",
    );
}
