//! The lease of this server, and the deletion of other servers' expired leases (`--enable-lease-controller`).

use culvert_kube::calls::{Verb, observed};
use culvert_kube::leases::expired::Collector;
use culvert_kube::leases::own::{Contents, OwnLease};
use kube::Client;
use tokio::sync::watch;
use tokio_util::sync::CancellationToken;

use crate::backend::announced::Announced;
use crate::config::{Lease, PROGRAM};
use crate::metrics::ServerMetrics;

/// Start of the names of servers' leases, as in upstream (`cmd/server/app/server.go`).
const PREFIX: &str = "konnectivity-proxy-server-";

/// The lease of this server, and the collector of expired leases.
pub(crate) struct Leases {
    own: OwnLease,
    expired: Collector,
}

impl Leases {
    /// Creates the lease of this server. Makes no request, so an unreachable API does not delay the start of the
    /// server.
    pub(crate) fn new(
        client: Client,
        settings: &Lease,
        server_id: &str,
        metrics: &ServerMetrics,
    ) -> Self {
        let name = format!("{PREFIX}{server_id}");
        let (lists, deletions) = (metrics.lease_lists(), metrics.lease_deletions());
        let counted = observed(client.clone(), move |call| match call.verb {
            Verb::List => lists.count(call),
            Verb::Delete => deletions.count(call),
            Verb::Watch | Verb::Write => {}
        });
        let (namespace, labels) = (&settings.namespace, settings.selector());
        let culled = metrics.culled_leases.clone();
        let expired = Collector::new(counted, namespace, labels, name.clone(), culled);
        let contents = Contents {
            namespace: namespace.clone(),
            name,
            holder: server_id.to_owned(),
            labels: settings.labels.clone(),
        };
        let own = OwnLease::new(client, contents, PROGRAM, metrics.lease_kept());
        Self { own, expired }
    }

    /// Keeps the lease until `stop` fires, then deletes it. Agents then no longer count this server. Nothing
    /// writes the lease again, so a server that drains may fire `stop` long before its end. Announces the number
    /// of servers with a lease, if it is larger than the number that was announced at first. While the leases cannot be
    /// counted, the last number stays, but no longer follows the servers.
    pub(crate) async fn run(self, announce: watch::Sender<Announced>, stop: CancellationToken) {
        let least = announce.borrow().servers;
        let report = |live: Option<usize>| {
            announce.send_modify(|announced| {
                if let Some(live) = live {
                    announced.servers = i64::try_from(live).unwrap_or(i64::MAX).max(least);
                }
                announced.follows = live.is_some();
            });
        };
        let expired = stop.run_until_cancelled(self.expired.run(report));
        tokio::join!(self.own.keep(stop.clone()), expired);
    }
}

#[cfg(test)]
mod tests {
    #![allow(clippy::unwrap_used)]

    use std::sync::Arc;
    use std::sync::atomic::{AtomicBool, Ordering};
    use std::time::Duration;

    use http::{Request, Response};
    use kube::client::Body;
    use serde_json::json;
    use tokio::time::{Instant, sleep};

    use super::*;

    /// Returns a list with the renewed leases of two servers, or 403.
    fn answer(is_allowed: bool, second: u64) -> Response<Body> {
        let lease = |name: &str| {
            let renewed = format!(
                "2001-01-01T00:{:02}:{:02}.000000Z",
                second / 60,
                second % 60
            );
            json!({"metadata": {"name": name}, "spec": {"renewTime": renewed}})
        };
        let (code, answer) = match is_allowed {
            true => (
                200,
                json!({"metadata": {}, "items": [lease("a"), lease("b")]}),
            ),
            false => (
                403,
                json!({"kind": "Status", "status": "Failure", "code": 403}),
            ),
        };
        let body = Body::from(answer.to_string().into_bytes());
        Response::builder().status(code).body(body).unwrap()
    }

    #[tokio::test(start_paused = true)]
    async fn number_stays_but_does_not_follow_the_servers_while_lists_fail() {
        let is_allowed = Arc::new(AtomicBool::new(true));
        let (allowed, started) = (is_allowed.clone(), Instant::now());
        let service = tower::service_fn(move |_: Request<Body>| {
            let is_allowed = allowed.load(Ordering::Relaxed);
            let answer = answer(is_allowed, started.elapsed().as_secs());
            async { Ok::<_, std::convert::Infallible>(answer) }
        });
        let settings = Lease {
            namespace: "n".to_owned(),
            labels: [("k8s-app".to_owned(), "konnectivity-server".to_owned())].into(),
            kubeconfig: None,
        };
        let metrics = ServerMetrics::new(&[]).unwrap();
        let leases = Leases::new(Client::new(service, "n"), &settings, "c", &metrics);
        let first = Announced {
            servers: 1,
            follows: false,
            draining: false,
        };
        let announce = watch::Sender::new(first);
        let mut announced = announce.subscribe();
        let task = tokio::spawn(leases.run(announce, CancellationToken::new()));
        let follows = |servers, follows| {
            move |now: &Announced| (now.servers, now.follows) == (servers, follows)
        };
        // The number includes this server.
        announced.wait_for(follows(3, true)).await.unwrap();
        sleep(Duration::from_secs(1)).await;
        is_allowed.store(false, Ordering::Relaxed);
        sleep(Duration::from_secs(25)).await;
        assert!(announced.borrow().follows);
        announced.wait_for(follows(3, false)).await.unwrap();
        is_allowed.store(true, Ordering::Relaxed);
        announced.wait_for(follows(3, true)).await.unwrap();
        task.abort();
    }
}
