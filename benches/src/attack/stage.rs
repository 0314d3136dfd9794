//! The attacked programs, and the peers that they need.
//!
//! | module | content |
//! |---|---|
//! | [`konnectivity`] | server and agent, ours or stock |
//! | [`door`] | the front door, or Envoy |
//! | [`openvpn`] | an OpenVPN server, ours or stock, and our client |

mod door;
mod konnectivity;
mod openvpn;

use std::net::SocketAddr;
use std::sync::Arc;

use bytes::Bytes;
use culvert_tests::Program;
use culvert_tests::envoy::RunningEnvoy;
use rustls::ClientConfig;

use crate::attack::honest::{Probe, Purpose};
use crate::attack::networks::Networks;
use crate::attack::rows::{Listener, Setting};
use crate::endpoint::Endpoints;
use crate::harness::ask;
use crate::openvpn::Proto;
use crate::programs::Programs;

pub(super) use self::door::AUTHORITY;

/// Maker of the attacked program.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) enum Make {
    Ours,
    Stock,
}

/// A running stage. Dropping the value kills its programs.
pub(super) struct Stage {
    attacked: Attacked,
    /// Address of the attacked listener.
    pub at: SocketAddr,
    /// First message of a client.
    pub greeting: Bytes,
    /// Server name in the first packets of QUIC clients.
    pub name: &'static str,
    /// TLS configuration of a client of the listener, if the listener uses TLS.
    pub tls: Option<Arc<ClientConfig>>,
    /// Requests of honest clients.
    pub probes: Vec<(Purpose, Probe)>,
    /// The Kubernetes API of the attacked program, if the setting needs one.
    api: Option<konnectivity::Api>,
    _endpoints: Endpoints,
}

/// The attacked program, with everything that has to exist as long as the program.
enum Attacked {
    Konnectivity(Box<konnectivity::Pair>),
    Door(Box<door::Door>),
    Envoy(Box<RunningEnvoy>),
    Openvpn(Box<openvpn::Pair>),
}

impl Stage {
    /// Starts the programs in the network of this thread.
    pub(super) async fn start(
        make: Make,
        front: Listener,
        setting: Setting,
        programs: &Programs,
        networks: &Networks,
    ) -> anyhow::Result<Self> {
        match front {
            Listener::Agents | Listener::FrontEnd | Listener::Health | Listener::Admin => {
                konnectivity::start(make, front, setting, programs, networks).await
            }
            Listener::Sni | Listener::Connect | Listener::NodePort | Listener::Stats => {
                door::start(make, front, setting, programs, networks).await
            }
            Listener::OpenvpnTcp => openvpn::start(make, Proto::Tcp, programs, networks).await,
            Listener::OpenvpnUdp => openvpn::start(make, Proto::Udp, programs, networks).await,
        }
    }

    /// Prepares the attack: silences the Kubernetes API, or fills the pipe of the log, if the setting requires that.
    pub(super) fn begin(&self) -> anyhow::Result<()> {
        if let Some(api) = &self.api {
            api.begin();
        }
        match &self.attacked {
            Attacked::Konnectivity(pair) => pair.begin(),
            Attacked::Door(_) | Attacked::Envoy(_) | Attacked::Openvpn(_) => Ok(()),
        }
    }

    /// Ends the silence of the Kubernetes API. The pipe of the log stays full.
    pub(super) fn end(&self) {
        if let Some(api) = &self.api {
            api.end();
        }
    }

    /// Returns resident memory in bytes, and the number of descriptors of the attacked program. Fails if the
    /// program has exited.
    pub(super) fn usage(&mut self) -> anyhow::Result<(u64, usize)> {
        ask(|| {
            let program = self.program();
            (program.rss(), program.fd_count())
        })
    }

    fn program(&mut self) -> &Program {
        match &mut self.attacked {
            Attacked::Konnectivity(pair) => pair.topology.server(0),
            Attacked::Door(door) => &door.program,
            Attacked::Envoy(envoy) => &envoy.program,
            Attacked::Openvpn(pair) => &pair.server,
        }
    }
}
