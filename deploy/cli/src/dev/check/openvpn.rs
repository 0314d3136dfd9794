//! The checks of OpenVPN: the Culvert client of every server, the stock client of the last server, and
//! switches between the tunnels. Each server ends in the mode that it started in.

use std::net::SocketAddr;

use culvert_server::tunnel::{Health, Kind, Mode};
use tokio::time::sleep;

use super::load::under_load;
use super::switching::{opened, settled, status};
use super::{LOOK_AGAIN, PATIENCE, Verdict, downloaded, got, open, row, uploaded};
use crate::dev::openvpn::{CLIENT, OpenVpn, STOCK_CLIENT};
use crate::dev::server::Server;
use crate::dev::tunnel::Tunnel;

pub(super) async fn all(tunnel: &Tunnel, openvpn: &OpenVpn) -> bool {
    let services = &tunnel.services;
    let mut passed = true;
    let last = tunnel.servers.len().saturating_sub(1);
    for (index, server) in tunnel.servers.iter().enumerate() {
        let title = server.title;
        passed &= row(title, "openvpn: connected", connected(server, CLIENT)).await;
        passed &= row(title, "switch to openvpn", settled(server, Mode::Openvpn)).await;
        passed &= carries(server, "openvpn", services.http, services.raw).await;
        match &openvpn.stock {
            Ok(stock) if index == last => {
                let client = async {
                    tokio::select! {
                        connected = connected(server, STOCK_CLIENT) => connected,
                        () = sleep(PATIENCE / 2) => Err(stock.last_line()),
                    }
                };
                passed &= row(title, "stock: connected", client).await;
                passed &= carries(server, "stock", stock.http, stock.raw).await;
            }
            Err(why) if index == last => say!("  {title:<22} stock client left out: {why}"),
            _ => {}
        }
        let back = settled(server, Mode::Konnectivity);
        passed &= row(title, "switch to konnectivity", back).await;
        let load = under_load(server, services);
        passed &= row(title, "switches under load", load).await;
    }
    passed
}

/// Checks that a server reaches services through OpenVPN: an HTTP request, a download and an upload. `http`
/// and `raw` are the addresses to dial.
async fn carries(server: &Server, by: &str, http: SocketAddr, raw: SocketAddr) -> bool {
    let (http, raw) = (http.to_string(), raw.to_string());
    let page = async {
        let before = opened(server, Kind::Openvpn).await?;
        let page = got(open(server, &http).await?).await?;
        match opened(server, Kind::Openvpn).await? - before {
            1 => Ok(page),
            dials => Err(format!("{dials} dials were counted for OpenVPN")),
        }
    };
    let mut passed = row(server.title, &format!("{by}: HTTP GET"), page).await;
    let bulk = async { downloaded(open(server, &raw).await?).await };
    passed &= row(server.title, &format!("{by}: 20 MiB down"), bulk).await;
    let bulk = async { uploaded(open(server, &raw).await?).await };
    passed & row(server.title, &format!("{by}: 20 MiB up"), bulk).await
}

/// Waits until the OpenVPN client `name` is healthy, so that dials can use it.
async fn connected(server: &Server, name: &str) -> Verdict {
    loop {
        let status = status(server).await?;
        let mut tunnels = status.tunnels.into_iter();
        let openvpn = tunnels.find(|status| status.tunnel == Kind::Openvpn);
        let mut peers = openvpn.into_iter().flat_map(|tunnel| tunnel.peers);
        let peer = peers.find(|peer| peer.name.starts_with(name));
        match peer.filter(|peer| peer.health == Health::Healthy) {
            Some(peer) => return Ok(format!("{}, {}", peer.name, peer.kind)),
            None => sleep(LOOK_AGAIN).await,
        }
    }
}
