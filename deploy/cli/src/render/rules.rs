//! KKP's rules for a cluster, rules of the rendered programs, and warnings about mistakes that KKP accepts.

mod arguments;
mod create;
mod network;
mod notes;
mod programs;
mod ranges;
mod seed;
#[cfg(test)]
mod tests;
mod update;

use super::cluster::Cluster;
use super::finding::Findings;

/// Checks a cluster, and the change from `old` if there is one.
pub(crate) fn check(cluster: &Cluster, old: Option<&Cluster>, findings: &mut Findings) {
    create::check(cluster, findings);
    seed::check(cluster, findings);
    programs::check(cluster, findings);
    arguments::check(cluster, findings);
    if let Some(old) = old {
        update::check(cluster, old, findings);
    }
    notes::check(cluster, old, findings);
}
