//! The cases with pods, by topic.

mod agents;
mod operations;
mod serving;

use crate::cases::{Case, boxed, case};
use crate::lab::Egress;
use crate::lab::cluster::Cluster;

/// Returns all cases with their names, in the order of the fewest restarts of the control plane.
pub(crate) fn all() -> Vec<(String, Case<Cluster>)> {
    let mut cases = vec![
        case!(agents::seed_cannot_reach_the_node_or_a_pod),
        case!(agents::chart_installs_ready_agents),
        case!(serving::metrics_server_starts),
    ];
    for egress in Egress::ALL {
        cases.extend([
            case!(agents::dials_come_from_the_pods_of_agents, egress),
            case!(operations::logs, egress),
            case!(operations::exec, egress),
            case!(operations::cp_both_ways, egress),
            case!(operations::port_forward, egress),
            case!(operations::attach, egress),
            case!(operations::proxies, egress),
            case!(operations::followed_logs_survive_silence, egress),
            case!(serving::webhook_allows_and_denies, egress),
            case!(serving::aggregated_api_is_available, egress),
        ]);
        if egress == Egress::GrpcUds {
            cases.push(case!(serving::kubectl_top_shows_nodes_and_pods));
        }
    }
    cases
}
