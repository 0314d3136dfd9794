//! The checks of the front door: users and an agent by server name, CONNECT, and a node tunnel.

use std::io;
use std::net::SocketAddr;
use std::process::Stdio;

use culvert_kit::check::http_get;
use culvert_kit::client::{connect_plain, connect_tls};
use culvert_kit::pki::{CLUSTER_NAME, KONNECTIVITY_NAME};
use culvert_kit::services::HELLO;
use rustls_pki_types::ServerName;
use tokio::net::TcpStream;
use tokio::process::Command;
use tokio::time::sleep;

use super::{LOOK_AGAIN, MIB, Verdict, counted, downloaded, echoed, open, row, sample, text};
use crate::dev::door::{KONNECTIVITY, WEB};
use crate::dev::tunnel::{Tunnel, Way};

const BY_NAME: &str = "door, server name";
const CONNECT: &str = "door, CONNECT";
const NODE: &str = "node tunnel to door";

/// Maximum number of requests; the agent behind the door must receive at least one request. Each request goes
/// to one of two agents at random, so the check fails wrongly once in 2^64 runs.
const CHANCES: u32 = 64;

pub(super) async fn all(tunnel: &Tunnel) -> bool {
    let mut passed = row(BY_NAME, "HTTPS GET", https(tunnel)).await;
    passed &= row(BY_NAME, "agent connected", agent_connected(tunnel)).await;
    passed &= row(BY_NAME, "GET by that agent", agent_carries(tunnel)).await;
    passed &= row(CONNECT, "curl --proxytunnel", curl(tunnel)).await;
    let node = async || TcpStream::connect(tunnel.door.node).await.map_err(text);
    let echoes = async { echoed(node().await?).await };
    passed &= row(NODE, "echo, 100 x 64 bytes", echoes).await;
    let bulk = async { downloaded(node().await?).await };
    passed &= row(NODE, "download 20 MiB", bulk).await;
    passed
}

/// Connects like kubectl. The door has no key, so the certificate comes from the server behind the door.
async fn https(tunnel: &Tunnel) -> Verdict {
    let pki = &tunnel.pki;
    let tls = pki.client_tls(&pki.client, &["http/1.1"]).map_err(text)?;
    let name = ServerName::try_from(CLUSTER_NAME).map_err(text)?;
    let stream = connect_tls(tunnel.door.sni, &tls, &name)
        .await
        .map_err(text)?;
    let outcome = http_get(stream, "/").await.map_err(text)?;
    let bytes = outcome.bytes;
    Ok(format!("{bytes} bytes, verified as {CLUSTER_NAME}"))
}

/// Checks that the agent has found every server, by the agent's metrics and by the door's metrics.
async fn agent_connected(tunnel: &Tunnel) -> Verdict {
    let servers = tunnel.servers.len() as u64;
    let found = "konnectivity_network_proxy_agent_open_server_connections";
    counted(agent_at_door(tunnel)?, found, servers).await?;
    counted(tunnel.door.stats, &at_door("cx_active"), servers).await?;
    Ok(format!("{servers} servers as {KONNECTIVITY_NAME}"))
}

/// Makes requests through a server's front end until the agent behind the door has dialed the endpoint of a
/// request. Then the door's byte counter must grow by the size of the response, and the agent must have sent
/// no DATA packet: the packet transport sends one packet per chunk, the native transport sends no packets.
async fn agent_carries(tunnel: &Tunnel) -> Verdict {
    let agent = agent_at_door(tunnel)?;
    let server = tunnel.servers.first().ok_or("there is no server")?;
    let target = tunnel.services.http.to_string();
    let dials = "konnectivity_network_proxy_agent_dial_duration_seconds_count";
    let packets = "konnectivity_network_proxy_agent_stream_packets_total\
                   {segment=\"from_agent\",packet_type=\"DATA\"}";
    let (door, passed) = (tunnel.door.stats, at_door("cx_tx_bytes_total"));
    let dialed = sample(agent, dials).await?;
    let before = sample(door, &passed).await?;
    for _ in 0..CHANCES {
        let stream = open(server, &target).await?;
        http_get(stream, "/bytes/1048576").await.map_err(text)?;
        if sample(agent, dials).await? == dialed {
            continue;
        }
        // The door counts the last bytes a moment after sending.
        while sample(door, &passed).await? < before + MIB {
            sleep(LOOK_AGAIN).await;
        }
        return match sample(agent, packets).await? {
            0 => Ok("1 MiB counted by the door, native".into()),
            some => Err(format!("not native: the agent sent {some} packets")),
        };
    }
    Err(format!("{CHANCES} requests went to the other agent"))
}

/// Returns the metrics address of the agent behind the door.
fn agent_at_door(tunnel: &Tunnel) -> Result<SocketAddr, String> {
    let mut agents = tunnel.agents.iter();
    let agent = agents.find(|agent| matches!(agent.way, Way::Door(_)));
    let agent = agent.ok_or("no agent comes through the door")?;
    Ok(agent.addresses.health)
}

/// Returns a series of the door for the upstream of agents.
fn at_door(name: &str) -> String {
    format!("envoy_cluster_upstream_{name}{{envoy_cluster_name=\"{KONNECTIVITY}\"}}")
}

/// Runs the curl command that `culvert dev` prints. Without curl, makes the same request with the test kit's
/// client.
async fn curl(tunnel: &Tunnel) -> Verdict {
    let door = &tunnel.door;
    let output = Command::new("curl")
        // Ignore ~/.curlrc; this option must come first. Clear the variables that exempt names from proxies.
        .arg("--disable")
        .env_remove("NO_PROXY")
        .env_remove("no_proxy")
        .args(["--silent", "--show-error"])
        .args(door.curl())
        .stdin(Stdio::null())
        .kill_on_drop(true)
        .output()
        .await;
    match output {
        Ok(output) if output.status.success() && output.stdout == HELLO.as_bytes() => {
            Ok(format!("{} bytes", HELLO.len()))
        }
        Ok(output) => {
            let said = [output.stderr, output.stdout].concat();
            let said = String::from_utf8_lossy(&said);
            Err(format!("curl: {}: {}", output.status, said.trim_end()))
        }
        Err(error) if error.kind() == io::ErrorKind::NotFound => {
            let stream = connect_plain(door.tunneling, WEB).await.map_err(text)?;
            let outcome = http_get(stream, "/").await.map_err(text)?;
            let bytes = outcome.bytes;
            Ok(format!(
                "curl is not installed; {bytes} bytes with the built-in client"
            ))
        }
        Err(error) => Err(format!("cannot run curl: {error}")),
    }
}
