//! The cases, by topic.

mod black_hole;
mod dry_run;
mod isolation;
mod leases;
mod nodes;
mod releases;
mod scale;
mod tokens;
pub(crate) mod traffic;

use std::pin::Pin;

use crate::lab::{Egress, Lab};

/// A test on a shared cluster of type `T`.
pub(crate) type Case<T> =
    Box<dyn for<'a> FnOnce(&'a mut T) -> Pin<Box<dyn Future<Output = ()> + 'a>> + Send>;

/// Boxes a case. The signature gives the closure its type.
pub(crate) fn boxed<T>(
    case: impl for<'a> FnOnce(&'a mut T) -> Pin<Box<dyn Future<Output = ()> + 'a>> + Send + 'static,
) -> Case<T> {
    Box::new(case)
}

/// Names the case after its module and function.
macro_rules! case {
    ($module:ident :: $function:ident) => {
        (
            concat!(stringify!($module), "::", stringify!($function)).to_owned(),
            boxed(|lab| Box::pin($module::$function(lab))),
        )
    };
    ($module:ident :: $function:ident, $egress:expr) => {{
        let egress: Egress = $egress;
        let name = stringify!($function);
        (
            format!("{}::{}::{name}", stringify!($module), egress.name()),
            boxed(move |lab| Box::pin($module::$function(lab, egress))),
        )
    }};
}

pub(crate) use case;

/// Returns all cases with their names, in the order of the fewest restarts of the control plane.
pub(crate) fn all() -> Vec<(String, Case<Lab>)> {
    let mut cases = vec![
        case!(isolation::seed_cannot_reach_the_node_without_a_tunnel),
        case!(dry_run::charts_are_accepted_with_every_values_file),
        case!(dry_run::charts_are_accepted_with_the_values_of_every_unit_test),
        case!(dry_run::charts_with_the_network_of_the_node_violate_restricted),
        case!(dry_run::helm_accepts_every_values_file),
        case!(dry_run::manifests_are_accepted),
        case!(dry_run::kustomize_example_is_accepted),
        case!(dry_run::rendered_clusters_are_accepted),
        case!(dry_run::wrong_objects_are_refused),
        case!(releases::agents_are_installed_beside_stock_agents),
        case!(releases::upgrades_keep_the_ports_of_the_front_door),
    ];
    for egress in Egress::ALL {
        cases.extend([
            case!(traffic::webhook_allows_and_denies, egress),
            case!(traffic::aggregated_api_is_available, egress),
            case!(traffic::service_proxy_carries_20_mb_each_way, egress),
            case!(traffic::apiserver_counts_dials_of_the_egress, egress),
            case!(isolation::requests_fail_while_the_agent_is_away, egress),
        ]);
    }
    cases.extend([
        case!(tokens::agent_connects_with_a_token_of_its_account),
        case!(tokens::token_of_another_audience_is_refused),
        case!(tokens::token_of_another_account_is_refused),
        case!(tokens::token_of_a_deleted_account_is_refused),
        case!(tokens::server_needs_the_permission_to_review_tokens),
        case!(leases::servers_need_a_role_for_their_leases),
        case!(leases::agent_counts_servers_by_their_leases),
        case!(black_hole::bulk_passes_with_probes_or_with_the_mtu_of_the_path),
    ]);
    cases
}

/// Returns the cases with hundreds of objects.
pub(crate) fn scale() -> Vec<(String, Case<Lab>)> {
    vec![
        case!(scale::front_door_serves_hundreds_of_services),
        case!(nodes::server_follows_hundreds_of_nodes),
    ]
}
