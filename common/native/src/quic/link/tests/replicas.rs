//! Servers with the same keys: replicas, and a server before and after a restart.

use std::sync::atomic::AtomicUsize;

use quinn::ConnectionError;
use tokio::net::UdpSocket as Udp;
use tokio::runtime;

use super::*;
use crate::quic::endpoint::bind;

const LOOPBACK: SocketAddr = SocketAddr::new(std::net::IpAddr::V4(Ipv4Addr::LOCALHOST), 0);

/// Opens the endpoint of a server.
fn replica(socket: UdpSocket, tls: &ServerConfig) -> (Arc<ServerEndpoint>, SocketAddr) {
    let address = socket.local_addr().unwrap();
    let keys = EndpointKeys::derive(b"key");
    let endpoint = ServerEndpoint::new(socket, tls, keys).unwrap();
    (Arc::new(endpoint), address)
}

/// Accepts a connection, and returns the bytes of its stream to the agent.
async fn serve(endpoint: Arc<ServerEndpoint>, tls: ServerConfig) {
    let incoming = endpoint.accept().await.unwrap();
    let connecting = incoming.accept_with(endpoint.config(&tls).unwrap());
    let connection = connecting.unwrap().await.unwrap();
    endpoint.admit(&connection);
    let (mut send, mut receive) = connection.accept_bi().await.unwrap();
    let _ = tokio::io::copy(&mut receive, &mut send).await;
}

/// A connection of an agent with one stream.
struct Caller {
    connection: Connection,
    stream: (SendStream, RecvStream),
    _endpoint: Endpoint,
}

impl Caller {
    async fn connect(to: SocketAddr, tls: &ClientConfig) -> Self {
        let endpoint = client(to).unwrap();
        let config = client_config(tls).unwrap();
        let connecting = endpoint.connect_with(config, to, "server").unwrap();
        let connection = timeout(LIMIT, connecting).await.unwrap().unwrap();
        let stream = connection.open_bi().await.unwrap();
        Self {
            connection,
            stream,
            _endpoint: endpoint,
        }
    }

    async fn echo(&mut self, bytes: &[u8]) {
        let mut echo = vec![0; bytes.len()];
        self.stream.0.write_all(bytes).await.unwrap();
        let read = timeout(LIMIT, self.stream.1.read_exact(&mut echo)).await;
        read.unwrap().unwrap();
        assert_eq!(echo, bytes);
    }
}

/// A load balancer with one client: forwards its datagrams to one of the replicas.
struct Balancer {
    address: SocketAddr,
    chosen: Mutex<SocketAddr>,
    /// Number of datagrams forwarded since the choice.
    forwarded: AtomicUsize,
}

impl Balancer {
    /// Starts with `first`. If `next` is set, the balancer chooses it for the second datagram.
    async fn start(first: SocketAddr, next: Option<SocketAddr>) -> Arc<Self> {
        let (front, back) = (Udp::bind(LOOPBACK).await, Udp::bind(LOOPBACK).await);
        let (front, back) = (front.unwrap(), back.unwrap());
        let balancer = Arc::new(Self {
            address: front.local_addr().unwrap(),
            chosen: Mutex::new(first),
            forwarded: AtomicUsize::new(0),
        });
        let own = balancer.clone();
        tokio::spawn(async move {
            let (mut up, mut down) = (vec![0; 65536], vec![0; 65536]);
            let mut agent = LOOPBACK;
            loop {
                tokio::select! {
                    received = front.recv_from(&mut up) => {
                        let (length, from) = received.unwrap();
                        agent = from;
                        let chosen = *own.chosen.lock();
                        back.send_to(&up[..length], chosen).await.unwrap();
                        own.forwarded.fetch_add(1, Ordering::Relaxed);
                        if let Some(next) = next {
                            *own.chosen.lock() = next;
                        }
                    }
                    received = back.recv_from(&mut down) => {
                        let (length, _) = received.unwrap();
                        front.send_to(&down[..length], agent).await.unwrap();
                    }
                }
            }
        });
        balancer
    }

    fn choose(&self, replica: SocketAddr) {
        *self.chosen.lock() = replica;
        self.forwarded.store(0, Ordering::Relaxed);
    }
}

#[tokio::test]
async fn replica_accepts_the_retry_token_of_another() {
    let (server_tls, client_tls) = tls();
    let (one, first) = replica(bind(LOOPBACK).unwrap(), &server_tls);
    let (other, second) = replica(bind(LOOPBACK).unwrap(), &server_tls);
    let balancer = Balancer::start(first, Some(second)).await;
    tokio::spawn(serve(other, server_tls));
    let call = async {
        let mut caller = Caller::connect(balancer.address, &client_tls).await;
        caller.echo(b"hello").await;
    };
    tokio::select! {
        _ = one.accept() => panic!("the first replica accepted the connection"),
        () = call => {}
    }
}

#[tokio::test]
async fn replica_leaves_the_connection_of_another_alone() {
    let (server_tls, client_tls) = tls();
    let (one, first) = replica(bind(LOOPBACK).unwrap(), &server_tls);
    let (_other, second) = replica(bind(LOOPBACK).unwrap(), &server_tls);
    let balancer = Balancer::start(first, None).await;
    tokio::spawn(serve(one, server_tls));
    let mut caller = Caller::connect(balancer.address, &client_tls).await;
    caller.echo(b"hello").await;
    balancer.choose(second);
    caller.stream.0.write_all(b"lost at first").await.unwrap();
    let misled = async {
        while balancer.forwarded.load(Ordering::Relaxed) < 3 {
            sleep(Duration::from_millis(5)).await;
        }
    };
    timeout(LIMIT, misled).await.unwrap();
    balancer.choose(first);
    let mut echo = [0; 13];
    let read = timeout(LIMIT, caller.stream.1.read_exact(&mut echo)).await;
    read.unwrap().unwrap();
    assert_eq!(&echo, b"lost at first");
}

#[tokio::test]
async fn restarted_server_ends_the_connections_of_its_predecessor() {
    let (server_tls, client_tls) = tls();
    let process = runtime::Builder::new_multi_thread()
        .worker_threads(1)
        .enable_all()
        .build()
        .unwrap();
    let (endpoint, address) = {
        let _inside = process.enter();
        replica(bind(LOOPBACK).unwrap(), &server_tls)
    };
    process.spawn(serve(endpoint, server_tls.clone()));
    let mut caller = Caller::connect(address, &client_tls).await;
    caller.echo(b"hello").await;
    // Ends all tasks without a last packet, as SIGKILL does.
    process.shutdown_background();
    let closed = async {
        loop {
            match bind(address) {
                Ok(socket) => return socket,
                Err(_) => sleep(Duration::from_millis(5)).await,
            }
        }
    };
    let socket = timeout(LIMIT, closed).await.unwrap();
    let _restarted = replica(socket, &server_tls);
    caller.stream.0.write_all(b"who are you?").await.unwrap();
    let end = timeout(LIMIT, caller.connection.closed()).await.unwrap();
    assert_eq!(end, ConnectionError::Reset);
}
