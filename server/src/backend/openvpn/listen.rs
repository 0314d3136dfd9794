//! The TCP listeners of the tunnel.

use std::convert::Infallible;
use std::net::SocketAddr;
use std::sync::Arc;
use std::time::Duration;

use culvert_host::net::admission::{Admission, AdmissionLimits, Candidate};
use culvert_host::net::listen::{Accepted, Listener};
use culvert_host::net::long_path;
use culvert_host::net::networks::Networks;
use culvert_host::net::proxy_protocol::{self, HeaderError, Refused};
use culvert_host::runtime::shards::Shards;
use culvert_host::runtime::shards::on_shard;
use culvert_openvpn::options::Transport;
use culvert_openvpn::session::{ServerConfig, Session};
use culvert_openvpn_io::link::{Link, LinkEnd, WireError};
use culvert_openvpn_io::{Moment, now};
use tokio::net::TcpStream;
use tokio::sync::watch;
use tokio::time::timeout;
use tokio_util::sync::CancellationToken;
use tokio_util::task::TaskTracker;
use tracing::{debug, info, warn};

use super::clients::Clients;
use super::metrics::Handshake;
use super::role::Client;

/// Age at which an unfinished handshake may be displaced by another peer of the same host, such as a load balancer.
/// A handshake of OpenVPN takes six round trips, and the server may be busy with others.
const HANDSHAKE_GRACE: Duration = Duration::from_secs(3);

/// Limits for TCP connections without a verified certificate. Each costs up to 80 KiB during the TLS handshake.
/// The session limits the size of its packets and the time of the handshake, which an operator may extend.
const ADMISSION: AdmissionLimits = AdmissionLimits {
    peers: 256,
    bytes: usize::MAX,
    deadline: Duration::from_secs(600),
    grace: HANDSHAKE_GRACE,
};

/// State shared by the connections of a TCP listener.
#[derive(Clone)]
pub(super) struct Tcp {
    /// Registry that admits clients.
    pub clients: Arc<Clients>,
    /// Settings for new sessions.
    pub config: watch::Receiver<Arc<ServerConfig>>,
    /// Networks of load balancers that send the PROXY protocol.
    pub proxies: Arc<Networks>,
}

impl Tcp {
    /// Serves clients until the token fires.
    pub(super) async fn serve(
        self,
        listener: Listener,
        shards: Arc<Shards>,
        tasks: TaskTracker,
        shutdown: CancellationToken,
    ) {
        let admission = Admission::new(ADMISSION);
        let handle = |accepted| {
            let this = self.clone();
            let cut = shutdown.child_token();
            let admission = admission.clone();
            let seat = shards.seat();
            let shard = seat.shard();
            let serve = move |accepted| async move {
                let _seat = seat;
                let since = now();
                if let Accepted::Tcp(stream, remote) = accepted {
                    let entering = this.enter(&admission, &stream, remote);
                    let entered = cut.run_until_cancelled(entering).await;
                    if let Some(Some((remote, candidate))) = entered {
                        // Boxed, so that a peer that waits for a slot costs little memory.
                        let served = this.serve_client(stream, remote, candidate, since, cut);
                        Box::pin(served).await;
                    }
                }
            };
            on_shard(&shards, shard, &tasks, accepted, serve);
        };
        let refused = || self.clients.metrics.handshake(Handshake::Evicted);
        listener.serve(shutdown.clone(), handle, refused).await;
    }

    /// Takes a slot for a new client, and waits for its first bytes. Returns the address of the client, or `None`
    /// for a refused client, which is counted.
    async fn enter(
        &self,
        admission: &Arc<Admission>,
        stream: &TcpStream,
        remote: SocketAddr,
    ) -> Option<(SocketAddr, Arc<Candidate>)> {
        // Control packets and new dials would wait behind the bulk in the kernel's send buffer.
        long_path::tune_link(stream);
        let metrics = &self.clients.metrics;
        let patience = self.config.borrow().common.timers.hand_window;
        let entering = proxy_protocol::enter(stream, remote, &self.proxies, admission);
        let Ok(entered) = timeout(patience, entering).await else {
            debug!(%remote, "the OpenVPN client has sent nothing");
            metrics.handshake(Handshake::Unfinished);
            return None;
        };
        let Refused { peer, why } = match entered {
            Ok((peer, candidate)) => {
                let peer = SocketAddr::new(peer.ip().to_canonical(), peer.port());
                return Some((peer, candidate));
            }
            Err(refused) => refused,
        };
        match why {
            HeaderError::Left => {}
            HeaderError::Unadmitted(_) => metrics.handshake(Handshake::Evicted),
            why => {
                warn!(remote = %peer, %why, "OpenVPN connection refused");
                metrics.handshake(Handshake::Protocol);
            }
        }
        None
    }

    async fn serve_client(
        self,
        stream: TcpStream,
        remote: SocketAddr,
        candidate: Arc<Candidate>,
        since: Moment,
        cut: CancellationToken,
    ) {
        let mut follows = self.config;
        let config = follows.borrow_and_update().clone();
        let tun_mtu = config.common.max_tun_mtu;
        let session = Session::server(config, 0, since);
        let transport = Transport::Tcp;
        let client = Client::new(
            self.clients,
            remote,
            transport,
            cut.clone(),
            Some(candidate.clone()),
        )
        .following(follows);
        let link = Link::tcp(stream, session, tun_mtu, client);
        // The link sends its last packets when `cut` fires.
        let refused = async {
            candidate.refused().await;
            cut.cancel();
            std::future::pending::<Infallible>().await
        };
        let (mut client, end) = tokio::select! {
            ended = link.run(&cut) => ended,
            never = refused => match never {},
        };
        if let LinkEnd::Wire(error) = end {
            if client.is_untold() {
                let outcome = match error {
                    WireError::Framing(_) => Handshake::Protocol,
                    _ => Handshake::Unfinished,
                };
                client.failed(outcome, &error.to_string());
            } else {
                let client = client.name();
                match error {
                    // The client has violated the protocol.
                    WireError::Framing(_) => {
                        warn!(client, %remote, reason = %error, "OpenVPN client disconnected");
                    }
                    _ => info!(client, %remote, reason = %error, "OpenVPN client disconnected"),
                }
            }
        } else {
            debug!(client = client.name(), %remote, "OpenVPN connection closed");
        }
    }
}

#[cfg(test)]
pub(super) mod tests {
    #![allow(clippy::unwrap_used)]

    use std::net::IpAddr;

    use culvert_host::telemetry::metrics::Registry;
    use culvert_openvpn::tls::{Identity, MinVersion, ServerTls};
    use rcgen::{CertificateParams, KeyPair};
    use socket2::{Domain, SockRef, Socket, Type};
    use tokio::net::TcpListener;
    use tokio::time::Instant;

    use super::super::clients::tests::settings;
    use super::super::metrics::OpenvpnMetrics;
    use super::*;

    /// Returns the settings of a server with a certificate of its own.
    pub(in super::super) fn server_config(transport: Transport) -> ServerConfig {
        let key = KeyPair::generate().unwrap();
        let pem = CertificateParams::default()
            .self_signed(&key)
            .unwrap()
            .pem();
        let (pem, key) = (pem.as_bytes(), key.serialize_pem());
        let identity = Identity::from_pem(pem, key.as_bytes()).unwrap();
        let tls = ServerTls::new(pem, None, identity, MinVersion::Tls12, false).unwrap();
        ServerConfig::new(transport, Arc::new(tls))
    }

    fn tcp() -> Tcp {
        let config = server_config(Transport::Tcp);
        let metrics = Arc::new(OpenvpnMetrics::new(&Registry::new(&[]).unwrap()));
        Tcp {
            clients: Clients::new(settings(), metrics),
            config: watch::Sender::new(Arc::new(config)).subscribe(),
            proxies: Arc::default(),
        }
    }

    #[tokio::test]
    async fn unsent_bytes_to_a_client_on_a_long_path_are_limited() {
        let listener = TcpListener::bind("127.0.0.1:0").await.unwrap();
        let client = Socket::new(Domain::IPV4, Type::STREAM, None).unwrap();
        // The client acknowledges the handshake with its first byte, so the round trip is as long as the pause.
        client.set_tcp_quickack(false).unwrap();
        client
            .connect(&listener.local_addr().unwrap().into())
            .unwrap();
        tokio::time::sleep(Duration::from_millis(20)).await;
        client.send(b"x").unwrap();
        let (stream, remote) = listener.accept().await.unwrap();
        let unsent = || SockRef::from(&stream).tcp_notsent_lowat().unwrap();
        assert_ne!(unsent(), 128 << 10);
        let admission = Admission::new(ADMISSION);
        let entered = tcp().enter(&admission, &stream, remote).await;
        assert!(entered.is_some());
        assert_eq!(unsent(), 128 << 10);
    }

    #[tokio::test(start_paused = true)]
    async fn handshakes_behind_one_address_have_three_seconds() {
        let admission = Admission::new(ADMISSION);
        let enter = || async {
            let address = IpAddr::from([192, 0, 2, 1]);
            admission.enter(address, Instant::now()).await.unwrap()
        };
        let all = futures_util::future::join_all((0..ADMISSION.peers).map(|_| enter())).await;
        let started = Instant::now();
        let _newcomer = enter().await;
        assert!(started.elapsed() >= Duration::from_secs(3));
        let displaced = all.iter().filter(|peer| peer.is_displaced());
        assert_eq!(displaced.count(), 1);
    }
}
