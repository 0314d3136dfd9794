//! The count of servers by their leases (`--count-server-leases`).

use std::sync::Arc;

use culvert_kube::calls::{Verb, observed};
use culvert_kube::client::client;
use culvert_kube::leases::count::count_live;
use kube::Client;
use metrics::Gauge;
use tokio_util::sync::CancellationToken;

use crate::config::LeaseCount;
use crate::files::{Files, Reloader};
use crate::metrics::AgentMetrics;
use crate::server_count::ServerCount;

/// Counts the leases of servers.
pub(crate) struct Leases {
    client: Client,
    settings: LeaseCount,
    count: Arc<ServerCount>,
    counted: Gauge,
}

impl Leases {
    /// Reads the credentials, and follows their files. Makes no request, so an unreachable API does not delay the start of the agent.
    ///
    /// # Errors
    /// Fails if the credentials are missing or cannot be used.
    pub(crate) async fn new(
        settings: LeaseCount,
        metrics: &AgentMetrics,
        count: Arc<ServerCount>,
        reloader: &mut Reloader,
    ) -> anyhow::Result<Self> {
        let client = client(settings.kubeconfig.as_deref(), reloader, Files::Kubeconfig).await?;
        let (lists, watches) = (metrics.lease_lists(), metrics.lease_watches());
        let client = observed(client, move |call| match call.verb {
            Verb::List => lists.count(call),
            Verb::Watch => watches.count(call),
            Verb::Delete | Verb::Write => {}
        });
        Ok(Self {
            client,
            settings,
            count,
            counted: metrics.leases_counted(),
        })
    }

    /// Reports the number of live leases until `stop` fires.
    pub(crate) async fn run(self, stop: CancellationToken) {
        let LeaseCount {
            namespace,
            selector,
            ..
        } = &self.settings;
        let counted = count_live(self.client, namespace, selector, |live| {
            self.count.leases(live);
            let is_counted = live.is_some_and(|live| live > 0);
            self.counted.set(f64::from(u8::from(is_counted)));
        });
        stop.run_until_cancelled(counted).await;
    }
}
