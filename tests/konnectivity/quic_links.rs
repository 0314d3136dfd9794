//! QUIC as a second link between server and agent, over a link that loses packets, goes dark, or changes addresses.

use std::time::Duration;

use culvert_kit::check;
use culvert_kit::client::BoxedStream;
use culvert_kit::pki::CLUSTER_NAME;
use culvert_kit::services::Services;
use culvert_tests::balancer::Balancer;
use culvert_tests::link::{self, Conditions, FAR, Link, Way};
use culvert_tests::namespace::{alone, hosts};
use culvert_tests::{Executable, Mode, Topology, Transport, eventually};
use tokio::io::{AsyncReadExt as _, AsyncWriteExt as _};
use tokio::task::JoinSet;
use tokio::time::{Instant, sleep};

use crate::resumes::{Load, closed};
use crate::support::{LIMIT, timely, value};

const KIB: u64 = 1024;

/// Any port: the network belongs to the test.
const QUIC_PORT: &str = "--agent-quic-port=18443";

/// Longest time without an answer on a busy machine that has many streams. Shorter than the outages.
const LOADED: Duration = Duration::from_secs(3);

/// Starts a server that offers QUIC, and an agent that reaches the server over the link.
async fn start(transport: &str) -> Topology {
    hosts(&[(CLUSTER_NAME, FAR)]);
    // The server listens on all addresses, and accepts IPv4 in spite of this default of the system.
    let _ = std::fs::write("/proc/sys/net/ipv6/bindv6only", "1");
    let host = format!("--proxy-server-host={CLUSTER_NAME}");
    let builder = Topology::builder(Mode::HttpConnect, Transport::Uds)
        .servers(1)
        .server_args(&["--agent-bind-address=", QUIC_PORT]);
    let agent_args = [host.as_str(), transport];
    builder.agent_args(&agent_args).agents(1).start().await
}

async fn open(topology: &Topology, services: &Services) -> BoxedStream {
    let target = services.raw.to_string();
    timely("a dial", topology.connect(&target)).await.unwrap()
}

/// Returns the number of dials over QUIC with an outcome.
async fn dials(topology: &Topology, outcome: &str) -> f64 {
    let labels = [("outcome", outcome)];
    let metrics = topology.server_metrics(0).await;
    metrics.value("culvert_quic_dials_total", &labels).unwrap()
}

/// Waits until new connections use QUIC.
async fn wait_for_quic(topology: &Topology, services: &Services) {
    eventually("a connection over QUIC", LIMIT, async || {
        let before = dials(topology, "opened").await;
        check::echo(open(topology, services).await, 1, 1)
            .await
            .map_err(|error| error.to_string())?;
        match dials(topology, "opened").await > before {
            true => Ok(()),
            false => Err("the connection used TCP"),
        }
        .map_err(str::to_owned)
    })
    .await;
}

/// Waits until the agent has tried QUIC `count` times with this outcome.
async fn wait_for_probe(topology: &Topology, outcome: &str, count: f64) {
    eventually(&format!("{count} probes {outcome}"), LIMIT, async || {
        let metrics = topology.agent_metrics(0).await;
        let labels = [("outcome", outcome)];
        let tried = value(&metrics, "culvert_quic_probes_total", &labels);
        (tried >= count).then_some(()).ok_or(tried)
    })
    .await;
}

#[test]
fn streams_survive_rebindings_of_nat_and_changed_addresses() {
    if !link::is_possible() {
        return;
    }
    alone(async || {
        let conditions = Conditions {
            delay: Duration::from_millis(5),
            rate: Some(12.5e6),
            ..Conditions::default()
        };
        let link = Link::start(conditions, 3).unwrap();
        let services = Services::start().await.unwrap();
        let topology = start("--transport=quic").await;
        wait_for_quic(&topology, &services).await;
        let before = dials(&topology, "opened").await;
        let mut checks = JoinSet::new();
        for _ in 0..34 {
            checks.spawn(check::download(open(&topology, &services).await, 512 * KIB));
            checks.spawn(check::upload(open(&topology, &services).await, 512 * KIB));
            checks.spawn(check::echo(open(&topology, &services).await, 200, 500));
        }
        let moves = async {
            for round in 0..6 {
                sleep(Duration::from_millis(500)).await;
                link.rebind_nat(round % 2 == 1);
            }
        };
        let (checked, ()) = tokio::join!(timely("all checks", checks.join_all()), moves);
        for checked in checked {
            checked.unwrap();
        }
        assert_eq!(dials(&topology, "opened").await - before, 102.0);
        assert_eq!(dials(&topology, "moved").await, 0.0);
        // The link is still in use.
        wait_for_quic(&topology, &services).await;
    });
}

#[test]
fn udp_that_never_arrives_delays_no_dial() {
    if !link::is_possible() {
        return;
    }
    alone(async || {
        let link = Link::start(Conditions::default(), 1).unwrap();
        link.set_udp_dark(true);
        let services = Services::start().await.unwrap();
        let topology = start("--transport=quic").await;
        let mut dialing = Vec::new();
        let mut dial = async || {
            let started = Instant::now();
            let stream = open(&topology, &services).await;
            dialing.push(started.elapsed());
            check::echo(stream, 1, 100).await.unwrap();
        };
        for _ in 0..20 {
            dial().await;
        }
        wait_for_probe(&topology, "failed", 1.0).await;
        for _ in 0..20 {
            dial().await;
        }
        dialing.sort_unstable();
        // A busy machine may delay some dials; waiting for UDP would delay each by at least 600 ms.
        let median = dialing[dialing.len() / 2];
        assert!(median < Duration::from_millis(500), "{dialing:?}");
        for outcome in ["opened", "failed", "moved"] {
            assert_eq!(dials(&topology, outcome).await, 0.0, "{outcome}");
        }
    });
}

/// Dials one after another, and returns the longest time of a dial.
async fn slowest_dial(topology: &Topology, services: &Services, count: usize) -> Duration {
    let mut slowest = Duration::ZERO;
    for _ in 0..count {
        let started = Instant::now();
        let stream = open(topology, services).await;
        slowest = started.elapsed().max(slowest);
        check::echo(stream, 1, 100).await.unwrap();
    }
    slowest
}

#[test]
fn dials_move_to_tcp_when_udp_stops_and_return_afterwards() {
    if !link::is_possible() {
        return;
    }
    alone(async || {
        let conditions = Conditions {
            delay: Duration::from_millis(50),
            ..Conditions::default()
        };
        let link = Link::start(conditions, 1).unwrap();
        let services = Services::start().await.unwrap();
        let topology = start("--transport=quic").await;
        wait_for_quic(&topology, &services).await;
        let mut kept = open(&topology, &services).await;
        kept.write_all(b"echo\n").await.unwrap();
        link.set_udp_dark(true);
        let dark = Instant::now();
        // Each dial ends while UDP is still dark. Unit tests check the time until a dial moves.
        let slowest = slowest_dial(&topology, &services, 10).await;
        println!("slowest dial: {slowest:?}");
        assert!(dials(&topology, "moved").await > 0.0);
        sleep(Duration::from_secs(5).saturating_sub(dark.elapsed())).await;
        link.set_udp_dark(false);
        // The stream that was open all the time goes on.
        kept.write_all(b"still here").await.unwrap();
        kept.shutdown().await.unwrap();
        let mut echo = Vec::new();
        timely("the end", kept.read_to_end(&mut echo))
            .await
            .unwrap();
        assert_eq!(echo, b"still here");
        wait_for_quic(&topology, &services).await;
    });
}

/// Packets of the working direction arrive during the outage: retransmissions, and the agent's packets from new ports.
async fn udp_of_one_direction_stops(way: Way) {
    // Without a rate, the downloads take all time of the processors, and a dial that gets no answer for 600 ms moves to
    // TCP before the outage.
    let conditions = Conditions {
        delay: Duration::from_millis(5),
        rate: Some(12.5e6),
        ..Conditions::default()
    };
    let link = Link::start(conditions, 1).unwrap();
    let services = Services::start().await.unwrap();
    let topology = start("--transport=quic").await;
    wait_for_quic(&topology, &services).await;
    let before = dials(&topology, "opened").await;
    let load = Load::start(&topology, &services).await;
    assert_eq!(dials(&topology, "opened").await - before, 100.0);
    link.darken_udp(way);
    let dark = Instant::now();
    let first = slowest_dial(&topology, &services, 1).await;
    let mut later = Duration::ZERO;
    while dark.elapsed() < Duration::from_secs(5) {
        later = later.max(slowest_dial(&topology, &services, 1).await);
    }
    println!("slowest dials: {first:?}, {later:?} later");
    assert!(first < LOADED, "{first:?}");
    // No later dial waits for the link again.
    assert_eq!(dials(&topology, "moved").await, 1.0);
    link.set_udp_dark(false);
    wait_for_quic(&topology, &services).await;
    load.finish().await;
    let metrics = topology.server_metrics(0).await;
    assert_eq!(closed(&metrics), 0.0, "{}", metrics.text());
    // The dial that moved has reached an agent whose own packets were dropped: the endpoint saw the dial twice.
    let moved = f64::from(way == Way::FromDialer);
    // The reset of the dial may arrive only after the outage.
    eventually("the end of the dial that moved", LIMIT, async || {
        let metrics = topology.agent_metrics(0).await;
        match closed(&metrics) == moved {
            true => Ok(()),
            false => Err(metrics.text().to_owned()),
        }
    })
    .await;
    assert_eq!(dials(&topology, "failed").await, 0.0);
}

#[test]
fn dials_move_once_and_no_stream_is_cut_while_udp_of_the_agent_is_dropped() {
    if link::is_possible() {
        alone(async || udp_of_one_direction_stops(Way::FromDialer).await);
    }
}

#[test]
fn dials_move_once_and_no_stream_is_cut_while_udp_of_the_server_is_dropped() {
    if link::is_possible() {
        alone(async || udp_of_one_direction_stops(Way::FromListener).await);
    }
}

#[test]
fn streams_survive_a_path_that_begins_to_drop_large_datagrams() {
    if !link::is_possible() {
        return;
    }
    alone(async || {
        let conditions = Conditions {
            delay: Duration::from_millis(5),
            rate: Some(12.5e6),
            ..Conditions::default()
        };
        let link = Link::start(conditions, 11).unwrap();
        let services = Services::start().await.unwrap();
        let mut topology = start("--transport=quic").await;
        wait_for_quic(&topology, &services).await;
        // Both ends find the largest size, 1,452 bytes without headers.
        let stream = open(&topology, &services).await;
        check::download(stream, 4096 * KIB).await.unwrap();
        let stream = open(&topology, &services).await;
        check::upload(stream, 4096 * KIB).await.unwrap();
        let before = dials(&topology, "opened").await;
        let mut streams = Vec::new();
        for _ in 0..24 {
            streams.push(open(&topology, &services).await);
        }
        assert_eq!(dials(&topology, "opened").await - before, 24.0);
        // QUIC needs 1,200 bytes (RFC 9000, 14), and 28 bytes are headers.
        link.set_largest_udp(1300);
        let dropped = link.dropped();
        // The streams carry no byte before the change, so that no transfer has ended by then.
        let mut checks = JoinSet::new();
        for (number, stream) in streams.into_iter().enumerate() {
            match number % 3 {
                0 => checks.spawn(check::download(stream, 1024 * KIB)),
                1 => checks.spawn(check::upload(stream, 1024 * KIB)),
                _ => checks.spawn(check::echo(stream, 100, 500)),
            };
        }
        for checked in timely("all checks", checks.join_all()).await {
            checked.unwrap();
        }
        assert!(link.dropped() > dropped, "no datagram was large");
        wait_for_quic(&topology, &services).await;
        let log = topology.agent(0).log();
        assert!(!log.contains("the QUIC link has ended"), "{log}");
    });
}

/// Waits until the first server has as many QUIC links.
async fn wait_for_links(topology: &Topology, count: f64) {
    eventually(&format!("{count} QUIC links"), LIMIT, async || {
        let metrics = topology.server_metrics(0).await;
        let links = value(&metrics, "culvert_quic_links", &[]);
        (links == count).then_some(()).ok_or(links)
    })
    .await;
}

/// Waits until the first server lists as many QUIC links without a TCP connection: they are its only draining peers.
async fn wait_for_retired_links(topology: &Topology, count: f64) {
    eventually(&format!("{count} links without TCP"), LIMIT, async || {
        let metrics = topology.server_metrics(0).await;
        let labels = [("tunnel", "konnectivity"), ("health", "draining")];
        let peers = value(&metrics, "culvert_tunnel_peers", &labels);
        (peers == count).then_some(()).ok_or(peers)
    })
    .await;
}

#[test]
fn reset_tcp_connections_cut_no_stream_over_quic() {
    alone(async || {
        let services = Services::start().await.unwrap();
        let builder = Topology::builder(Mode::HttpConnect, Transport::Uds).servers(1);
        let no_grace = "--resume-grace=0";
        let builder = builder.server_args(&[QUIC_PORT, no_grace]);
        let mut topology = builder.start().await;
        // QUIC does not pass the balancer.
        let balancer = Balancer::start(vec![topology.agent_address(0)]).await;
        let port = format!("--proxy-server-port={}", balancer.addr().port());
        let args = [port.as_str(), "--transport=quic", no_grace];
        topology.add_agent(Executable::Ours, &args).await;
        topology.wait_for_agents().await;
        wait_for_quic(&topology, &services).await;
        let before = dials(&topology, "opened").await;
        let load = Load::start(&topology, &services).await;
        let opened = dials(&topology, "opened").await - before;
        for connected in [2.0, 3.0, 4.0] {
            balancer.reset();
            wait_for_probe(&topology, "connected", connected).await;
            // The first link has lost its TCP connection, and lives as long as its streams.
            wait_for_links(&topology, 2.0).await;
            wait_for_retired_links(&topology, 1.0).await;
            wait_for_quic(&topology, &services).await;
        }
        let gap = load.finish().await;
        println!("longest gap of {opened} streams: {gap:?}");
        assert!(gap < LOADED, "{gap:?}");
        for metrics in [
            topology.server_metrics(0).await,
            topology.agent_metrics(0).await,
        ] {
            assert_eq!(closed(&metrics), 0.0, "{}", metrics.text());
        }
        wait_for_links(&topology, 1.0).await;
        wait_for_retired_links(&topology, 0.0).await;
    });
}

#[test]
fn silence_of_the_tcp_connection_delays_no_stream_and_no_dial_over_quic() {
    if !link::is_possible() {
        return;
    }
    alone(async || {
        // Without a rate, the downloads take all time of the processors.
        let conditions = Conditions {
            rate: Some(12.5e6),
            ..Conditions::default()
        };
        let link = Link::start(conditions, 1).unwrap();
        let services = Services::start().await.unwrap();
        let topology = start("--transport=quic").await;
        wait_for_quic(&topology, &services).await;
        let load = Load::start(&topology, &services).await;
        link.set_tcp_dark(true);
        let dark = Instant::now();
        let mut dialing = Vec::new();
        while dark.elapsed() < Duration::from_secs(5) {
            let started = Instant::now();
            let stream = open(&topology, &services).await;
            check::echo(stream, 1, 100).await.unwrap();
            dialing.push(started.elapsed());
        }
        dialing.sort_unstable();
        // A busy machine may delay some dials; waiting for the TCP connection would delay each by 1.5 s.
        assert!(
            dialing[dialing.len() / 2] < Duration::from_millis(500),
            "{dialing:?}"
        );
        assert!(dialing[dialing.len() - 1] < LOADED, "{dialing:?}");
        link.set_tcp_dark(false);
        let gap = load.finish().await;
        println!("longest gap: {gap:?}");
        assert!(gap < LOADED, "{gap:?}");
        assert_eq!(dials(&topology, "moved").await, 0.0);
        for metrics in [
            topology.server_metrics(0).await,
            topology.agent_metrics(0).await,
        ] {
            assert_eq!(closed(&metrics), 0.0, "{}", metrics.text());
        }
    });
}

#[test]
fn loss_on_the_tcp_connection_moves_new_connections_to_quic() {
    if !link::is_possible() {
        return;
    }
    alone(async || {
        let conditions = Conditions {
            delay: Duration::from_millis(2),
            ..Conditions::default()
        };
        let link = Link::start(conditions, 5).unwrap();
        let services = Services::start().await.unwrap();
        let topology = start("--transport=auto").await;
        // Without loss, connections use TCP although the link over QUIC exists.
        wait_for_links(&topology, 1.0).await;
        let stream = open(&topology, &services).await;
        check::download(stream, 4096 * KIB).await.unwrap();
        assert_eq!(dials(&topology, "opened").await, 0.0);
        link.set(Conditions {
            loss: 0.02,
            ..conditions
        });
        eventually("a connection over QUIC", LIMIT, async || {
            let stream = open(&topology, &services).await;
            check::download(stream, 2048 * KIB)
                .await
                .map_err(|error| error.to_string())?;
            match dials(&topology, "opened").await > 0.0 {
                true => Ok(()),
                false => Err("all connections used TCP".to_owned()),
            }
        })
        .await;
    });
}

#[test]
fn small_writes_arrive_although_packets_are_lost() {
    if !link::is_possible() {
        return;
    }
    alone(async || {
        let conditions = Conditions {
            delay: Duration::from_millis(10),
            loss: 0.01,
            reorder: 0.01,
            ..Conditions::default()
        };
        let _link = Link::start(conditions, 9).unwrap();
        let services = Services::start().await.unwrap();
        let topology = start("--transport=quic").await;
        wait_for_quic(&topology, &services).await;
        let mut checks = JoinSet::new();
        for _ in 0..4 {
            let stream = open(&topology, &services).await;
            checks.spawn(async move {
                let (mut read, mut write) = tokio::io::split(stream);
                let sent: Vec<u8> = (0..20_000_u32).map(|n| (n % 251) as u8).collect();
                let sending = async {
                    write.write_all(b"echo\n").await.unwrap();
                    for byte in sent.chunks(1) {
                        write.write_all(byte).await.unwrap();
                        write.flush().await.unwrap();
                    }
                    write.shutdown().await.unwrap();
                };
                let mut received = Vec::new();
                let (result, ()) = tokio::join!(read.read_to_end(&mut received), sending);
                result.unwrap();
                assert!(received == sent, "{} bytes", received.len());
            });
        }
        timely("all writes", checks.join_all()).await;
        wait_for_quic(&topology, &services).await;
    });
}
