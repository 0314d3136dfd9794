//! A minimal TCP load balancer, as between agents and servers in a real cluster. Picks the backends in turn,
//! so that every agent soon finds every server.

use std::net::SocketAddr;

use tokio::io::copy_bidirectional;
use tokio::net::{TcpListener, TcpStream};
use tokio_util::sync::CancellationToken;
use tokio_util::task::TaskTracker;

/// Forwards each accepted connection to the next backend, until the token fires.
pub(super) async fn serve(
    listener: TcpListener,
    backends: Vec<SocketAddr>,
    tasks: TaskTracker,
    shutdown: CancellationToken,
) {
    for backend in backends.iter().cycle().copied() {
        let accepted = tokio::select! {
            accepted = listener.accept() => accepted,
            () = shutdown.cancelled() => return,
        };
        let Ok((mut client, _)) = accepted else {
            continue;
        };
        let forward = async move {
            // Either end may close at any time; the other end notices through its own connection.
            if let Ok(mut server) = TcpStream::connect(backend).await {
                let _ = client.set_nodelay(true).and(server.set_nodelay(true));
                let _ = copy_bidirectional(&mut client, &mut server).await;
            }
        };
        let shutdown = shutdown.clone();
        tasks.spawn(async move { shutdown.run_until_cancelled(forward).await });
    }
}
