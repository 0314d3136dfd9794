//! The way from an accepted connection to the front end or to the agents.

use std::sync::Arc;

use culvert_host::net::listen::{Accepted, Listener};
use culvert_host::net::readahead::ReadAhead;
use culvert_host::net::{connect, long_path};
use culvert_host::runtime::shards::{Shards, on_shard};
use culvert_host::tls;
use culvert_konnectivity::authority::AuthorityStream;
use culvert_native as native;
use culvert_native::quic::endpoint::ServerEndpoint;
use culvert_native::resume::EXPORTER_LABEL;
use tokio::sync::Semaphore;
use tracing::error;

use crate::backend::ClientSeat;
use crate::backend::dial::next_serial;
use crate::backend::native::Serving;
use crate::backend::service::Agents;
use crate::config::Mode;
use crate::frontend::{Frontend, grpc::Proxy, http_connect};
use crate::listener::ListenerContext;
use crate::listener::path_aware::{LinkPath, PathAware};
use crate::metrics::RejectReason;

/// Serves the clients that connect to the front end, at most `max_connections` at a time.
pub(super) async fn serve_frontend(
    listener: Listener,
    mode: Mode,
    context: Arc<ListenerContext>,
    frontend: Arc<Frontend>,
    max_connections: Option<usize>,
    shards: Arc<Shards>,
) {
    let service = Proxy::new(frontend.clone());
    let (tasks, shutdown) = (context.tasks.clone(), context.shutdown.clone());
    let max_connections = max_connections.map_or(Semaphore::MAX_PERMITS, |max| {
        max.min(Semaphore::MAX_PERMITS)
    });
    let permits = Arc::new(Semaphore::new(max_connections));
    let handle = |accepted| {
        // A TCP client gets its permit after the handshake: strangers must not use up the permits.
        let permit = match accepted {
            Accepted::Unix(_) => match permits.clone().try_acquire_owned() {
                Ok(permit) => Some(permit),
                Err(_) => return refuse_client(&context, mode, accepted, max_connections),
            },
            Accepted::Tcp(..) => None,
        };
        let permits = permits.clone();
        let (context, frontend, service) = (context.clone(), frontend.clone(), service.clone());
        let seat = frontend.router.seat();
        let Some(seat) = seat.or_else(|| Shards::current().map(ClientSeat::on)) else {
            return;
        };
        on_shard(
            &shards,
            seat.shard,
            &tasks,
            accepted,
            move |accepted| async move {
                let (_permit, _seat) = (permit, seat);
                // Boxed, so that a client has memory only for the step that it has reached.
                match (accepted, mode) {
                    (Accepted::Unix(stream), Mode::Grpc) => {
                        let stream = AuthorityStream::new(ReadAhead::new(stream));
                        Box::pin(context.serve_client(stream, "unix", service)).await;
                    }
                    (Accepted::Unix(stream), Mode::HttpConnect) => {
                        let (read, write) = stream.into_split();
                        let served = http_connect::serve(&context, &frontend, read, write, "unix");
                        Box::pin(served).await;
                    }
                    (Accepted::Tcp(stream, peer), mode) => {
                        let accepted = Box::pin(context.accept(stream, peer)).await;
                        let Some((stream, candidate, peer)) = accepted else {
                            return;
                        };
                        let peer = peer.to_string();
                        let shaken = Box::pin(context.handshake(stream, &peer, &candidate)).await;
                        let Some(stream) = shaken.map(Box::new) else {
                            return;
                        };
                        // The handshake has verified the client's certificate.
                        candidate.admit();
                        let Ok(_permit) = permits.try_acquire_owned() else {
                            let why = too_many(max_connections);
                            return context.reject(RejectReason::TooManyConnections, &peer, &why);
                        };
                        match mode {
                            Mode::Grpc => {
                                let stream = AuthorityStream::new(stream);
                                Box::pin(context.serve_client(stream, &peer, service)).await;
                            }
                            Mode::HttpConnect => {
                                let (read, write) = http_connect::halves(*stream);
                                let served =
                                    http_connect::serve(&context, &frontend, read, write, &peer);
                                Box::pin(served).await;
                            }
                        }
                    }
                }
            },
        );
    };
    let refused = || context.count(RejectReason::TooManyConnections);
    listener.serve(shutdown, handle, refused).await;
}

/// Refuses a client of a Unix socket beyond the limit of connections. Clients of CONNECT receive the reason.
fn refuse_client(context: &ListenerContext, mode: Mode, accepted: Accepted, limit: usize) {
    let why = too_many(limit);
    if let (Accepted::Unix(stream), Mode::HttpConnect) = (accepted, mode) {
        // A new socket has room for the answer.
        let _ = stream.try_write(&connect::failure(503, &why));
    }
    context.reject(RejectReason::TooManyConnections, "unix", &why);
}

fn too_many(limit: usize) -> String {
    format!("{limit} clients are connected, the limit of --max-frontend-connections")
}

/// Serves the agents that connect.
pub(super) async fn serve_agents(
    listener: Listener,
    context: Arc<ListenerContext>,
    agents: Agents,
    shards: Arc<Shards>,
) {
    let (tasks, shutdown) = (context.tasks.clone(), context.shutdown.clone());
    let handle = |accepted| {
        let (context, agents) = (context.clone(), agents.clone());
        let seat = shards.seat();
        on_shard(
            &shards,
            seat.shard(),
            &tasks,
            accepted,
            move |accepted| async move {
                let _seat = seat;
                let Accepted::Tcp(stream, peer) = accepted else {
                    return;
                };
                long_path::tune_link(&stream);
                // Boxed, so that a peer has memory only for the step that it has reached.
                let accepted = Box::pin(context.accept(stream, peer)).await;
                let Some((stream, candidate, peer)) = accepted else {
                    return;
                };
                let entered = Box::pin(async move {
                    let path = LinkPath::default();
                    let stream = ReadAhead::new(PathAware::new(stream, path.clone()));
                    let (address, peer) = (peer, peer.to_string());
                    // The handshake needs the agent's process, so a later process has a larger number.
                    let serial = next_serial();
                    let stream = context.handshake(stream, &peer, &candidate).await?;
                    let stream = Box::new(stream);
                    let tls = stream.get_ref().1;
                    let agents = agents.of_peer(address, tls.peer_certificates()).along(path);
                    if tls.alpn_protocol() == Some(native::ALPN) {
                        let binding = tls::export(tls, EXPORTER_LABEL);
                        agents
                            .introduce_native(&context, stream, &peer, &candidate, serial, binding)
                            .await
                    } else {
                        let serving = context.serve_agent(stream, peer, candidate, agents);
                        Some(Box::pin(serving) as Serving)
                    }
                });
                if let Some(serving) = entered.await {
                    serving.await;
                }
            },
        );
    };
    let refused = || context.count(RejectReason::TooManyConnections);
    listener.serve(shutdown, handle, refused).await;
}

/// Serves the QUIC links of agents. The tasks of one link run on one shard; the socket belongs to the caller's.
pub(super) async fn serve_quic(
    endpoint: Arc<ServerEndpoint>,
    context: Arc<ListenerContext>,
    agents: Agents,
    shards: Arc<Shards>,
) {
    loop {
        let incoming = tokio::select! {
            incoming = endpoint.accept() => incoming,
            () = context.shutdown.cancelled() => break,
        };
        let Some(incoming) = incoming else {
            error!(
                "the UDP socket failed: no new QUIC links until a restart; TCP carries all connections"
            );
            // Agents that connect from now on do not try in vain.
            if let Some(links) = &agents.second_links {
                links.close();
            }
            context.shutdown.cancelled().await;
            break;
        };
        let (context, agents) = (context.clone(), agents.clone());
        let (endpoint, seat) = (endpoint.clone(), shards.seat());
        let tasks = context.tasks.clone();
        shards.spawn(seat.shard(), &tasks, async move {
            let _seat = seat;
            // Boxed, so that a peer in its handshake costs little memory.
            Box::pin(agents.serve_quic(&context, &endpoint, incoming)).await;
        });
    }
    endpoint.close("this server is stopping").await;
}
