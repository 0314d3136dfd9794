//! A front door between the link and the server: ours for our programs, Envoy for the stock programs.

use std::net::SocketAddr;

use anyhow::Context as _;
use culvert_kit::pki::CLUSTER_NAME;
use culvert_tests::Program;
use culvert_tests::envoy::{Envoy, RunningEnvoy, Seed};
use culvert_tests::link::LISTENER;
use culvert_tests::ports::Ports;
use serde_json::json;
use tempfile::TempDir;

use super::QUIC_PORT;
use crate::harness::harness;
use crate::names::PROXY;
use crate::programs::Programs;

/// Port of the front door at [`LISTENER`], and of the server at 127.0.0.1. Any port: the network belongs to this
/// subcommand.
pub(super) const PORT: u16 = 18091;

/// A running front door. Dropping the value kills the program.
pub(super) enum FrontDoor {
    Ours { _door: Program, _routes: TempDir },
    Envoy { _door: RunningEnvoy },
}

impl FrontDoor {
    /// Starts our front door with this `--link-congestion`.
    pub(super) async fn ours(programs: &Programs, congestion: &str) -> anyhow::Result<Self> {
        let routes = tempfile::Builder::new().prefix("culvert-").tempdir()?;
        let file = routes.path().join("routes.yaml");
        let upstream = json!({
            "name": "bench/server",
            "endpoints": [server()],
            "serverNames": [CLUSTER_NAME],
            "quicPort": QUIC_PORT.to_string(),
        });
        std::fs::write(&file, json!({ "upstreams": [upstream] }).to_string())?;
        let stats = listener(Ports::default().next_port())?;
        let words = [
            format!("--config={}", file.display()),
            format!("--bind-address={LISTENER}"),
            format!("--envoy-sni-port={PORT}"),
            format!("--sni-quic-port={QUIC_PORT}"),
            format!("--envoy-stats-port={}", stats.port()),
            format!("--link-congestion={congestion}"),
        ];
        Ok(Self::Ours {
            _door: harness(programs.start(PROXY, &words, stats)).await?,
            _routes: routes,
        })
    }

    /// Starts Envoy.
    pub(super) async fn envoy() -> anyhow::Result<Self> {
        let envoy = Envoy::get().context("needs Envoy")?;
        let cluster = "server".to_owned();
        let mut seed = Seed::new(&mut Ports::default());
        seed.sni = listener(PORT)?;
        seed.server_names
            .insert(CLUSTER_NAME.to_owned(), cluster.clone());
        seed.clusters.insert(cluster, vec![server()]);
        Ok(Self::Envoy {
            _door: harness(envoy.start(&seed.bootstrap())).await?,
        })
    }
}

/// Returns the server's listener for agents.
fn server() -> SocketAddr {
    SocketAddr::from(([127, 0, 0, 1], PORT))
}

/// Returns an address of the front door.
fn listener(port: u16) -> anyhow::Result<SocketAddr> {
    Ok(SocketAddr::new(LISTENER.parse()?, port))
}
