//! A server in this process, and agents whose TCP connection is a pipe.

use std::net::{Ipv4Addr, SocketAddr, UdpSocket};
use std::sync::Arc;
use std::sync::atomic::{AtomicUsize, Ordering};
use std::time::Duration;

use culvert_host::tls::reload::ServerTls;
use culvert_native::hello::{self, Answer, HelloError};
use culvert_native::link::{Taker, TakerLimits};
use culvert_native::quic::endpoint::{ServerEndpoint, client_config};
use culvert_native::quic::keys::EndpointKeys;
use culvert_native::quic::words::{Preferred, Word};
use culvert_native::quic::{SESSION_HEADER, TRIAL_BYTES};
use culvert_stream::Dial;
use http::{HeaderMap, Method, Response};
use quinn::congestion::BbrConfig;
use quinn::{Connection, Endpoint, EndpointConfig, RecvStream, SendStream, TransportConfig};
use rcgen::{CertifiedKey, generate_simple_self_signed};
use rustls::pki_types::{CertificateDer, PrivateKeyDer};
use rustls::server::WebPkiClientVerifier;
use rustls::{ClientConfig, RootCertStore, ServerConfig};
use tokio::io::duplex;
use tokio::task::AbortHandle;
use tokio::time::{Instant, sleep, timeout};
use tokio_util::sync::{CancellationToken, DropGuard};

use super::LIMIT;
use super::socket::LossySocket;
use crate::backend::dial::next_serial;
use crate::backend::konnectivity::Konnectivity;
use crate::backend::native::NativeAgent;
use crate::backend::registry::{AgentLimits, Scope};
use crate::backend::second_link::SecondLinks;
use crate::backend::service::Agents;
use crate::backend::{AgentConnection, DialError, Tunnel as _};
use crate::listener::ListenerContext;
use crate::metrics::Listener;

/// Address of every agent.
const PEER: Ipv4Addr = Ipv4Addr::LOCALHOST;

/// A server that offers QUIC. Dropping the value stops the server.
pub(super) struct Server {
    pub(super) agents: Agents,
    context: Arc<ListenerContext>,
    address: SocketAddr,
    /// TLS configuration of all agents, which share a certificate.
    client: ClientConfig,
    certificate: CertificateDer<'static>,
    _stop: DropGuard,
}

/// The TCP connection of an agent that accepts all dials.
pub(super) struct Tcp {
    /// Session for a QUIC link.
    session: HeaderMap,
    /// Number of dials so far.
    pub(super) dials: Arc<AtomicUsize>,
    /// The agent stops reading and writing.
    pub(super) silence: CancellationToken,
    /// Task with the agent's end of the connection. An abort closes the connection.
    pub(super) task: AbortHandle,
}

/// The QUIC link of an agent.
pub(super) struct Quic {
    pub(super) connection: Connection,
    pub(super) socket: Arc<LossySocket>,
    pub(super) control: (SendStream, RecvStream),
    pub(super) endpoint: Endpoint,
}

fn identity() -> (CertificateDer<'static>, PrivateKeyDer<'static>) {
    let names = ["server".to_owned()];
    let CertifiedKey { cert, signing_key } = generate_simple_self_signed(names).unwrap();
    let key = PrivateKeyDer::try_from(signing_key.serialize_der()).unwrap();
    (cert.der().clone(), key)
}

fn trust(certificate: &CertificateDer<'static>) -> RootCertStore {
    let mut roots = RootCertStore::empty();
    roots.add(certificate.clone()).unwrap();
    roots
}

impl Server {
    pub(super) fn start() -> Self {
        let provider = Arc::new(rustls::crypto::aws_lc_rs::default_provider());
        let ((certificate, key), (own, own_key)) = (identity(), identity());
        let roots = Arc::new(trust(&certificate));
        let verifier = WebPkiClientVerifier::builder_with_provider(roots, provider.clone());
        let tls = ServerConfig::builder_with_provider(provider.clone())
            .with_safe_default_protocol_versions()
            .unwrap()
            .with_client_cert_verifier(verifier.build().unwrap())
            .with_single_cert(vec![own.clone()], own_key)
            .unwrap();
        let client = ClientConfig::builder_with_provider(provider)
            .with_safe_default_protocol_versions()
            .unwrap()
            .with_root_certificates(trust(&own))
            .with_client_auth_cert(vec![certificate.clone()], key)
            .unwrap();
        let socket = UdpSocket::bind((PEER, 0)).unwrap();
        let address = socket.local_addr().unwrap();
        let keys = EndpointKeys::derive(b"key");
        let endpoint = Arc::new(ServerEndpoint::new(socket, &tls, keys).unwrap());
        let mut agents = Agents::plain(AgentLimits::NONE);
        agents.second_links = Some(SecondLinks::new(address.port(), 1));
        let stop = CancellationToken::new();
        let context = ListenerContext::new(
            Listener::Agent,
            Some(ServerTls::fixed(Arc::new(tls))),
            Duration::from_secs(60),
            agents.tasks.clone(),
            stop.clone(),
            agents.metrics.clone(),
            Default::default(),
        );
        let (serving, of_all) = (context.clone(), agents.clone());
        tokio::spawn(stop.clone().run_until_cancelled_owned(async move {
            while let Some(incoming) = endpoint.accept().await {
                let (agents, context, endpoint) =
                    (of_all.clone(), serving.clone(), endpoint.clone());
                tokio::spawn(async move {
                    agents.serve_quic(&context, &endpoint, incoming).await;
                });
            }
        }));
        Self {
            agents,
            context,
            address,
            client,
            certificate,
            _stop: stop.drop_guard(),
        }
    }

    /// Connects an agent over TCP.
    pub(super) async fn tcp(&self, agent_id: &str) -> Tcp {
        let (near, mut far) = duplex(1 << 20);
        let certificates = std::slice::from_ref(&self.certificate);
        let address = (PEER, 1).into();
        let agents = self.agents.clone().of_peer(address, Some(certificates));
        let context = self.context.clone();
        tokio::spawn(async move {
            let admission = &context.admission;
            let candidate = admission.enter(PEER.into(), Instant::now()).await.unwrap();
            let stream = Box::new(admission.gate(near, &candidate));
            let serial = next_serial();
            let introduced =
                agents.introduce_native(&context, stream, "peer", &candidate, serial, None);
            introduced.await.unwrap().await;
        });
        let answer = hello::introduce(&mut far, &headers(agent_id))
            .await
            .unwrap();
        let Answer::Accepted(answer) = answer else {
            panic!("not accepted");
        };
        let mut session = HeaderMap::new();
        session.insert(SESSION_HEADER, answer[SESSION_HEADER].clone());
        let taker = Taker::new(far, Arc::default(), TakerLimits::trusting()).await;
        let mut taker = taker.unwrap();
        let (dials, silence) = (Arc::new(AtomicUsize::new(0)), CancellationToken::new());
        let (count, silent) = (dials.clone(), silence.clone());
        let task = tokio::spawn(async move {
            let mut open = Vec::new();
            loop {
                let next = tokio::select! {
                    next = taker.next() => next,
                    () = silent.cancelled() => std::future::pending().await,
                };
                let Ok(Some((request, mut respond))) = next else {
                    return;
                };
                if request.method() == Method::CONNECT {
                    count.fetch_add(1, Ordering::Relaxed);
                }
                let send = respond.send_response(Response::new(()), false);
                open.push((send, request.into_body(), respond));
            }
        });
        until(|| self.agent(agent_id).is_some()).await;
        Tcp {
            session,
            dials,
            silence,
            task: task.abort_handle(),
        }
    }

    /// Adds a QUIC link to the TCP connection of an agent.
    pub(super) async fn quic(
        &self,
        tcp: &Tcp,
        agent_id: &str,
        preferred: Preferred,
    ) -> Result<Quic, HelloError> {
        let socket = LossySocket::new(UdpSocket::bind((PEER, 0)).unwrap());
        let (config, runtime) = (EndpointConfig::default(), Arc::new(quinn::TokioRuntime));
        let endpoint =
            Endpoint::new_with_abstract_socket(config, None, socket.clone(), runtime).unwrap();
        let mut config = client_config(&self.client).unwrap();
        let mut congestion = BbrConfig::default();
        // Losses may begin before the window has grown.
        congestion.initial_window(4 << 20);
        let mut transport = TransportConfig::default();
        transport.congestion_controller_factory(Arc::new(congestion));
        config.transport_config(Arc::new(transport));
        let connecting = endpoint.connect_with(config, self.address, "server");
        let connection = connecting.unwrap().await.unwrap();
        let (mut send, mut receive) = connection.open_bi().await.unwrap();
        let mut headers = headers(agent_id);
        headers.extend(tcp.session.clone());
        let mut both = tokio::io::join(&mut receive, &mut send);
        hello::introduce(&mut both, &headers).await?;
        let mut echo = vec![0; TRIAL_BYTES];
        send.write_all(&echo).await.unwrap();
        receive.read_exact(&mut echo).await.unwrap();
        let word = Word::Prefer(preferred).to_line();
        send.write_chunk(word).await.unwrap();
        let agent = self.agent(agent_id).unwrap();
        until(|| match preferred {
            Preferred::Tcp => agent.second.as_ref().unwrap().has_link(),
            Preferred::Quic => agent.second_link().is_some(),
        })
        .await;
        Ok(Quic {
            connection,
            socket,
            control: (send, receive),
            endpoint,
        })
    }

    /// Dials through any agent.
    pub(super) async fn dial(&self) -> Result<crate::backend::Connection, DialError> {
        let dial = Dial {
            protocol: "tcp".into(),
            address: "10.0.0.1:443".into(),
        };
        let tunnel = Konnectivity::new(self.agents.registry.clone(), None);
        tunnel.dial(&dial, Instant::now() + LIMIT).await
    }

    /// Returns a connected agent.
    fn agent(&self, agent_id: &str) -> Option<Arc<NativeAgent>> {
        let mut tried = Vec::new();
        loop {
            let chosen = self.agents.registry.choose(&Scope::All, &tried)?;
            match chosen.agent {
                AgentConnection::Native(agent) if agent.hello.agent_id == agent_id => {
                    return Some(agent);
                }
                other => tried.push(other.serial()),
            }
        }
    }

    /// Returns a value on the metrics page.
    pub(super) fn value(&self, name: &str, labels: &[&str]) -> f64 {
        let page = self.agents.metrics.registry().render();
        let mut lines = page.lines().filter(|line| !line.starts_with('#'));
        let line = lines.find(|line| {
            line.contains(name)
                && labels
                    .iter()
                    .all(|label| line.contains(&format!("\"{label}\"")))
        });
        let value = line.and_then(|line| line.rsplit(' ').next());
        value.map_or(0.0, |value| value.parse().unwrap())
    }
}

impl Quic {
    /// Accepts the next dial, and answers it.
    pub(super) async fn accept(&self) -> (SendStream, RecvStream) {
        let (mut send, mut receive) = self.connection.accept_bi().await.unwrap();
        let mut buffer = bytes::BytesMut::new();
        let head = culvert_native::dial::read_head(&mut receive, &mut buffer).await;
        culvert_native::dial::parse_request(&head.unwrap()).unwrap();
        let accepted = culvert_native::dial::response_text(&culvert_native::dial::accepted());
        send.write_chunk(accepted).await.unwrap();
        (send, receive)
    }
}

/// Waits for a condition.
pub(super) async fn until(condition: impl Fn() -> bool) {
    let waiting = async {
        while !condition() {
            sleep(Duration::from_millis(5)).await;
        }
    };
    timeout(LIMIT, waiting).await.unwrap();
}

fn headers(agent_id: &str) -> HeaderMap {
    let mut headers = HeaderMap::new();
    headers.insert("agentid", agent_id.parse().unwrap());
    headers.insert("agentidentifiers", "".parse().unwrap());
    headers
}
