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
        let own = OwnLease::new(client, contents, PROGRAM);
        Self { own, expired }
    }

    /// Keeps the lease until `stop` fires, then deletes it. Agents then no longer count this server. Nothing
    /// writes the lease again, so a server that drains may fire `stop` long before its end. Announces the number
    /// of servers with a lease, if it is larger than the number that was announced at first.
    pub(crate) async fn run(self, announce: watch::Sender<Announced>, stop: CancellationToken) {
        let least = announce.borrow().servers;
        let live = |live| {
            let live = i64::try_from(live).unwrap_or(i64::MAX);
            announce.send_modify(|announced| {
                announced.servers = live.max(least);
                announced.follows = true;
            });
        };
        let expired = stop.run_until_cancelled(self.expired.run(live));
        tokio::join!(self.own.keep(stop.clone()), expired);
    }
}
