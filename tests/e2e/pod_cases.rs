//! The cases with pods, by topic.

mod agents;
mod charts;
mod migrations;
mod openvpn;
mod operations;
mod overlay;
mod policies;
mod serving;
mod strategies;
mod updates;

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
            cases.extend([
                case!(updates::rolling_update_of_agents_fails_no_call),
                case!(updates::certificate_is_replaced_while_serving),
                case!(serving::kubectl_top_shows_nodes_and_pods),
            ]);
        }
    }
    cases.extend([
        case!(openvpn::chart_installs_an_openvpn_client),
        case!(openvpn::stock_client_works),
        case!(strategies::node_port),
        case!(strategies::load_balancer),
        case!(strategies::tunneling),
        case!(charts::helm_test_of_the_agents_passes),
        case!(charts::every_chart_runs_as_pods_and_passes_its_helm_test),
        case!(overlay::agent_reaches_a_pod_over_vxlan),
        case!(policies::policies_of_the_chart_are_enough_and_not_more),
        case!(migrations::tunnels),
        case!(migrations::expose_strategies),
        case!(updates::rolling_restart_of_two_servers_fails_no_call),
        case!(updates::tunnel_works_without_kube_proxy),
        case!(updates::authority_is_replaced_without_new_pods),
        case!(updates::agents_use_renewed_tokens),
        case!(updates::tunnel_returns_after_a_change_of_the_pod_network),
        case!(updates::tunnel_returns_after_a_power_failure_of_the_node),
    ]);
    cases
}
