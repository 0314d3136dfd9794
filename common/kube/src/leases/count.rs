//! A watch that counts live leases.
//!
//! A lease expires only if a later event proves that the watch works: while the API is silent or unreachable, no
//! renewal can be observed, and the count stays.

use std::pin::pin;

use culvert_host::telemetry::log_once::LogOnce;
use futures_util::StreamExt as _;
use k8s_openapi::api::coordination::v1::{Lease, LeaseSpec};
use kube::runtime::watcher::Event;
use kube::{Client, ResourceExt as _};
use tokio::time::Instant;
use tracing::{info, warn};

use super::renewals::Renewals;
use super::{DURATION, api};
use crate::object_cache::{ObjectCache, selected};

/// Largest number of leases to keep. A selector that matches more leases is wrong.
const MOST: usize = 1000;

/// Warning if no lease is live, with the flags of the agent and of the servers that decide which leases exist.
const NONE_LIVE: &str = "no lease of a server is live, so the number of servers stays the same; check \
                         --lease-namespace, --lease-label-selector, and --enable-lease-controller of the servers";

/// Counts the live leases in a namespace that match a label selector, and reports their number after every
/// event, forever. Reports `None` if the number may be wrong, because the API fails for longer than [`DURATION`].
/// An empty namespace means all namespaces; an empty selector matches every lease. The log reports that no lease is live,
/// and reports it again after ten minutes if a lease changes.
pub async fn count_live(
    client: Client,
    namespace: &str,
    selector: &str,
    mut report: impl FnMut(Option<usize>),
) {
    let mut events = pin!(selected(api(client, namespace), selector));
    let mut leases = ObjectCache::new("Leases of servers").at_most(MOST);
    let mut renewals = Renewals::default();
    let mut missing = LogOnce::default();
    // Time of the first failure since the last success.
    let mut failing_since = None;
    while let Some(event) = events.next().await {
        let is_complete = match &event {
            Ok(Event::Init | Event::InitApply(_)) => false,
            Ok(_) => true,
            Err(_) => {
                renewals.interrupted();
                let since = *failing_since.get_or_insert_with(Instant::now);
                if since.elapsed() > DURATION {
                    report(None);
                }
                false
            }
        };
        leases.take(event, |lease| Some(named(lease)));
        if is_complete {
            let known = leases.values().map(|(name, spec)| (name.as_str(), spec));
            renewals.observe(Instant::now(), known);
            failing_since = None;
            let live = renewals.live();
            if live == 0
                && let Some(due) = missing.failed(NONE_LIVE)
            {
                let (found, missing_seconds) = (leases.values().count(), due.failing_seconds);
                warn!(namespace, selector, found, missing_seconds, "{NONE_LIVE}");
            }
            if live > 0 && missing.has_recovered() {
                info!(live, "found live leases of servers");
            }
            report(Some(live));
        }
    }
}

/// Returns the name of a lease, unique in all namespaces, and its contents.
fn named(lease: Lease) -> (String, LeaseSpec) {
    let namespace = lease.namespace().unwrap_or_default();
    let name = format!("{namespace}/{}", lease.name_any());
    (name, lease.spec.unwrap_or_default())
}
