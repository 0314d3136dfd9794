//! QUIC endpoints and clients by quinn, and a relay between a client and the front door.

use std::net::{Ipv4Addr, SocketAddr};
use std::sync::Arc;

use culvert_native::quic::connection_id::{CONNECTION_ID_BYTES, ConnectionId, Tag};
use parking_lot::Mutex;
use quinn::crypto::rustls::{QuicClientConfig, QuicServerConfig};
use quinn::{Connection, ConnectionIdGenerator, Endpoint, EndpointConfig, TokioRuntime};
use rustls::crypto::aws_lc_rs::{default_provider, kx_group};
use rustls::pki_types::{CertificateDer, PrivatePkcs8KeyDer};
use rustls::version::TLS13;
use rustls::{ClientConfig, RootCertStore, ServerConfig};
use tokio::net::UdpSocket;
use tokio::task::JoinHandle;

use crate::support::{Door, Upstream, timely};

/// Name of the protocol between the clients and endpoints here.
pub(super) const ALPN: &[u8] = b"echo";

/// Connection ids of our servers.
struct Tagged(Tag);

impl ConnectionIdGenerator for Tagged {
    fn generate_cid(&mut self) -> quinn::ConnectionId {
        let id = ConnectionId {
            tag: self.0,
            shard: 0,
            random: rand::random(),
        };
        quinn::ConnectionId::new(&id.to_bytes())
    }

    fn cid_len(&self) -> usize {
        CONNECTION_ID_BYTES
    }

    fn cid_lifetime(&self) -> Option<std::time::Duration> {
        None
    }
}

/// A QUIC server: the answer to each stream is the server's name, followed by the bytes of the stream.
pub(super) struct QuicEndpoint {
    pub address: SocketAddr,
    pub certificate: CertificateDer<'static>,
    pub endpoint: Endpoint,
    task: JoinHandle<()>,
}

impl Drop for QuicEndpoint {
    fn drop(&mut self) {
        self.task.abort();
    }
}

impl QuicEndpoint {
    pub(super) fn start(name: &'static str) -> Self {
        let key = rcgen::generate_simple_self_signed([name.to_owned()]).unwrap();
        let certificate = key.cert.der().clone();
        let private = PrivatePkcs8KeyDer::from(key.signing_key.serialize_der());
        let mut tls = ServerConfig::builder_with_provider(Arc::new(default_provider()))
            .with_protocol_versions(&[&TLS13])
            .unwrap()
            .with_no_client_auth()
            .with_single_cert(vec![certificate.clone()], private.into())
            .unwrap();
        tls.alpn_protocols = vec![ALPN.to_vec()];
        let tls = QuicServerConfig::try_from(tls).unwrap();
        let server = quinn::ServerConfig::with_crypto(Arc::new(tls));
        let socket = std::net::UdpSocket::bind((Ipv4Addr::LOCALHOST, 0)).unwrap();
        let address = socket.local_addr().unwrap();
        let mut config = EndpointConfig::default();
        config.cid_generator(move || Box::new(Tagged(Tag::of(address))));
        let endpoint = Endpoint::new(config, Some(server), socket, Arc::new(TokioRuntime)).unwrap();
        let accepting = endpoint.clone();
        let task = tokio::spawn(async move {
            while let Some(incoming) = accepting.accept().await {
                tokio::spawn(serve(incoming, name));
            }
        });
        Self {
            address,
            certificate,
            endpoint,
            task,
        }
    }

    /// Returns an upstream with this endpoint for the server name.
    pub(super) fn upstream(&self, service: &str, name: &str) -> Upstream {
        Upstream::new(service, self.address)
            .server_name(name)
            .quic_port("same")
    }

    /// Connects to `door` with the server name `name`, and asserts that this endpoint answers.
    pub(super) async fn answers(&self, door: SocketAddr, name: &'static str) -> Connection {
        let connection = connect(&client(&self.certificate, false), door, name).await;
        assert_eq!(
            ask(&connection, b" hello").await,
            [name.as_bytes(), b" hello"].concat()
        );
        connection
    }
}

async fn serve(incoming: quinn::Incoming, name: &str) -> Result<(), quinn::ConnectionError> {
    let connection = incoming.await?;
    loop {
        let (mut send, mut receive) = connection.accept_bi().await?;
        let name = name.to_owned();
        tokio::spawn(async move {
            let _ = send.write_all(name.as_bytes()).await;
            while let Ok(Some(chunk)) = receive.read_chunk(usize::MAX, true).await {
                if send.write_chunk(chunk.bytes).await.is_err() {
                    return;
                }
            }
            let _ = send.finish();
        });
    }
}

/// Returns a client that trusts `certificate`. A hello with post-quantum key shares needs two datagrams.
pub(super) fn client(certificate: &CertificateDer<'static>, is_post_quantum: bool) -> Endpoint {
    client_with(certificate, is_post_quantum, &[ALPN])
}

/// Returns a client that offers protocols.
pub(super) fn client_with(
    certificate: &CertificateDer<'static>,
    is_post_quantum: bool,
    protocols: &[&[u8]],
) -> Endpoint {
    let mut provider = default_provider();
    provider.kx_groups = match is_post_quantum {
        true => vec![kx_group::X25519MLKEM768],
        false => vec![kx_group::X25519],
    };
    let mut roots = RootCertStore::empty();
    roots.add(certificate.clone()).unwrap();
    let mut tls = ClientConfig::builder_with_provider(Arc::new(provider))
        .with_protocol_versions(&[&TLS13])
        .unwrap()
        .with_root_certificates(roots)
        .with_no_client_auth();
    tls.alpn_protocols = protocols.iter().map(|name| name.to_vec()).collect();
    let tls = QuicClientConfig::try_from(tls).unwrap();
    let mut endpoint = Endpoint::client((Ipv4Addr::LOCALHOST, 0).into()).unwrap();
    endpoint.set_default_client_config(quinn::ClientConfig::new(Arc::new(tls)));
    endpoint
}

pub(super) async fn connect(client: &Endpoint, door: SocketAddr, name: &str) -> Connection {
    let connecting = client.connect(door, name).unwrap();
    timely("a QUIC handshake", connecting).await.unwrap()
}

/// Sends bytes in a new stream, and returns the complete answer.
pub(super) async fn ask(connection: &Connection, bytes: &[u8]) -> Vec<u8> {
    let exchange = async {
        let (mut send, mut receive) = connection.open_bi().await?;
        let sending = async {
            send.write_all(bytes).await?;
            send.finish()?;
            anyhow::Ok(())
        };
        let (sent, answer) = tokio::join!(sending, receive.read_to_end(16 << 20));
        sent?;
        anyhow::Ok(answer?)
    };
    timely("an answer", exchange).await.unwrap()
}

/// Returns the first datagrams of a client that gets no answer.
pub(super) async fn first_datagrams(client: &Endpoint, name: &str, count: usize) -> Vec<Vec<u8>> {
    let silent = UdpSocket::bind((Ipv4Addr::LOCALHOST, 0)).await.unwrap();
    let connecting = client.connect(silent.local_addr().unwrap(), name).unwrap();
    let mut datagrams = Vec::new();
    for _ in 0..count {
        datagrams.push(receive(&silent).await);
    }
    drop(connecting);
    datagrams
}

pub(super) async fn udp() -> UdpSocket {
    UdpSocket::bind((Ipv4Addr::LOCALHOST, 0)).await.unwrap()
}

pub(super) async fn receive(socket: &UdpSocket) -> Vec<u8> {
    let mut buffer = vec![0; 64 * 1024];
    let received = timely("a datagram", socket.recv_from(&mut buffer)).await;
    buffer.truncate(received.unwrap().0);
    buffer
}

pub(super) async fn door(upstreams: &[Upstream], flags: &[&str]) -> Door {
    Door::start_quic(upstreams, flags).await
}

/// A relay of datagrams between one client and a front door: a NAT whose address and destination change.
pub(super) struct Nat {
    pub address: SocketAddr,
    outside: Arc<Mutex<Arc<UdpSocket>>>,
    tasks: Mutex<Vec<JoinHandle<()>>>,
    inside: Arc<UdpSocket>,
    client: Arc<Mutex<Option<SocketAddr>>>,
}

impl Drop for Nat {
    fn drop(&mut self) {
        for task in self.tasks.lock().iter() {
            task.abort();
        }
    }
}

impl Nat {
    pub(super) async fn start(door: SocketAddr) -> Self {
        let inside = Arc::new(udp().await);
        let outside = Arc::new(connected(door).await);
        let nat = Self {
            address: inside.local_addr().unwrap(),
            outside: Arc::new(Mutex::new(outside.clone())),
            tasks: Mutex::default(),
            inside,
            client: Arc::default(),
        };
        let (inside, current, client) =
            (nat.inside.clone(), nat.outside.clone(), nat.client.clone());
        let outward = async move {
            let mut buffer = vec![0; 64 * 1024];
            while let Ok((len, from)) = inside.recv_from(&mut buffer).await {
                *client.lock() = Some(from);
                let outside = current.lock().clone();
                // Fails after a refusal; the datagram is lost then.
                let _ = outside.send(&buffer[..len]).await;
            }
        };
        nat.tasks.lock().push(tokio::spawn(outward));
        nat.relay_back(outside);
        nat
    }

    /// Changes the address, and the front door.
    pub(super) async fn rebind(&self, door: SocketAddr) {
        let outside = Arc::new(connected(door).await);
        *self.outside.lock() = outside.clone();
        // Answers to the old address are lost.
        let old: Vec<_> = self.tasks.lock().drain(1..).collect();
        old.iter().for_each(JoinHandle::abort);
        self.relay_back(outside);
    }

    fn relay_back(&self, outside: Arc<UdpSocket>) {
        let (inside, client) = (self.inside.clone(), self.client.clone());
        let inward = async move {
            let mut buffer = vec![0; 64 * 1024];
            loop {
                let Ok(len) = outside.recv(&mut buffer).await else {
                    continue;
                };
                let to = *client.lock();
                if let Some(to) = to {
                    let _ = inside.send_to(&buffer[..len], to).await;
                }
            }
        };
        self.tasks.lock().push(tokio::spawn(inward));
    }
}

async fn connected(to: SocketAddr) -> UdpSocket {
    let socket = udp().await;
    socket.connect(to).await.unwrap();
    socket
}
