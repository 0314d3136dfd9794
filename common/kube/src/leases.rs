//! Leases of servers: each server keeps one Lease (`coordination.k8s.io/v1`), servers delete the expired leases
//! of other servers, and agents count the live ones. The format is upstream's (`pkg/server/leases`).
//!
//! | module | contents |
//! |---|---|
//! | [`renewals`] | the decision which leases are live, without I/O |
//! | [`own`] | the lease of one server: created, renewed, deleted |
//! | [`expired`] | the deletion of expired leases |
//! | [`count`] | a watch that counts live leases |

pub mod count;
pub mod expired;
pub mod own;
pub mod renewals;

#[cfg(test)]
mod tests;

use std::time::Duration;

use k8s_openapi::api::coordination::v1::Lease;
use kube::{Api, Client};

/// Namespace of the leases if no flag sets it, in servers and agents, as upstream.
pub const DEFAULT_NAMESPACE: &str = "kube-system";

/// Label of the leases if no flag sets it: servers write it, and agents select by it, as upstream.
pub const DEFAULT_LABEL: &str = "k8s-app=konnectivity-server";

/// Duration written into the leases of servers, and assumed for a lease without a valid duration.
pub const DURATION: Duration = Duration::from_secs(30);

/// Time limit of one request. Three requests fit between two renewals.
const REQUEST: Duration = Duration::from_secs(5);

/// Returns the API of the leases in a namespace; an empty namespace means all namespaces.
fn api(client: Client, namespace: &str) -> Api<Lease> {
    match namespace {
        "" => Api::all(client),
        namespace => Api::namespaced(client, namespace),
    }
}
