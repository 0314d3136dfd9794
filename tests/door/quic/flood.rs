//! Datagrams with forged addresses.

use std::net::{IpAddr, Ipv4Addr, SocketAddr};
use std::time::Duration;

use culvert_tests::eventually;
use quinn_udp::{Transmit, UdpSocketState};
use tokio::io::Interest;
use tokio::net::UdpSocket;
use tokio::time::Instant;

use super::NAME;
use super::support::{QuicEndpoint, ask, client, door, first_datagrams};
use crate::support::{LIMIT, TlsEndpoint, Upstream};

/// Largest number of flows of clients that have not proven their address.
const MAX_UNPROVEN: f64 = 4096.0;

/// Number of forged addresses that certainly exceeds the limit in every thread of the front door.
const MAX_ADDRESSES: u32 = 20_000;

/// Number of forged addresses that send without a pause.
const BATCH: u32 = 10;

/// Memory that the flood may occupy: 16 MiB of hellos, 4096 flows, and what the allocator keeps.
const MAX_GROWTH: f64 = 96.0 * 1024.0 * 1024.0;

/// Sends a datagram from an address of the machine that no client uses: each host number has its own /24 network.
async fn send_from(
    socket: &UdpSocket,
    state: &UdpSocketState,
    host: u32,
    to: SocketAddr,
    datagram: &[u8],
) {
    let [_, _, high, low] = host.to_be_bytes();
    let transmit = Transmit {
        destination: to,
        ecn: None,
        contents: datagram,
        segment_size: None,
        src_ip: Some(IpAddr::V4(Ipv4Addr::new(127, high, low, 9))),
    };
    let send = || state.try_send(socket.into(), &transmit);
    socket.async_io(Interest::WRITABLE, send).await.unwrap();
}

#[tokio::test]
async fn flood_of_forged_hellos_is_bounded_and_does_not_disturb_others() {
    let victim = QuicEndpoint::start(NAME);
    let other = QuicEndpoint::start("two.example.com");
    let tcp = TlsEndpoint::start("tcp.example.com").await;
    let door = door(
        &[
            victim.upstream("ns/one", NAME),
            other.upstream("ns/two", "two.example.com"),
            Upstream::new("ns/tcp", tcp.address).server_name("tcp.example.com"),
        ],
        &[],
    )
    .await;
    let whole = first_datagrams(&client(&victim.certificate, false), NAME, 1).await;
    let part = first_datagrams(&client(&victim.certificate, true), NAME, 2).await;
    let unknown = first_datagrams(&client(&victim.certificate, false), "x.example.com", 1).await;
    let established = victim.answers(door.sni, NAME).await;
    let before = door.program.rss() as f64;
    let (sni, labels) = (door.sni, [("listener", "quic")]);
    let socket = UdpSocket::bind((Ipv4Addr::UNSPECIFIED, 0)).await.unwrap();
    let state = UdpSocketState::new((&socket).into()).unwrap();
    let noise = vec![0x55; 1200];
    let mut longest = Duration::ZERO;
    let displaced = async || door.refused("quic", "too_many_connections").await;
    for sent in 1..=MAX_ADDRESSES {
        for datagram in [&whole[0], &part[1], &noise, &unknown[0]] {
            send_from(&socket, &state, sent, sni, datagram).await;
        }
        // The kernel drops what the front door does not read in time.
        if sent % BATCH == 0 {
            eventually("the front door has read the flood", LIMIT, async || {
                let read = door.refused("quic", "unknown").await;
                (read >= f64::from(sent)).then_some(()).ok_or(read)
            })
            .await;
        }
        if sent % (20 * BATCH) == 0 {
            let start = Instant::now();
            assert_eq!(ask(&established, b"").await, NAME.as_bytes());
            longest = longest.max(start.elapsed());
            other.answers(door.sni, "two.example.com").await;
            tcp.answers(door.sni, "tcp.example.com").await;
            if displaced().await > 100.0 {
                break;
            }
        }
    }
    assert!(displaced().await > 100.0);
    println!("longest echo {longest:?}");
    let growth = door.program.rss() as f64 - before;
    println!("{growth} bytes more");
    assert!(growth < MAX_GROWTH, "{growth}");
    let flows = door
        .value("culvert_nodeport_proxy_connections", &labels)
        .await;
    // The flows of this test are proven.
    assert!(flows <= MAX_UNPROVEN + 200.0, "{flows}");
    assert_eq!(ask(&established, b"").await, NAME.as_bytes());
}
