//! Changes of the expose strategy. The address of the API server changes, so every node gets a new kubeconfig.

use crate::render::cluster::Tunnel;
use crate::render::target::Target;

use super::tunnel::{SEED, USER, apply, forget, patch_apiserver, put_secrets_back, save_secrets};
use super::{KKP_ONLY, Side, Step};

/// Label that permits the change.
const LABEL: &str = "unsafe-expose-strategy-migration";

/// Full name of KKP's resource. Cluster API has a resource with the same short name.
const CLUSTERS: &str = "clusters.kubermatic.k8c.io";

pub(super) fn change(from: Side, to: Side, target: &Target<'_>, file: &str) -> Vec<Step> {
    let namespace = &target.namespace;
    let agent = match target.cluster.tunnel {
        Tunnel::Konnectivity => "konnectivity-agent",
        Tunnel::Openvpn => "openvpn-client",
    };
    let before = format!("before-{}", to.name().to_lowercase());
    let id = namespace.strip_prefix("cluster-").unwrap_or(namespace);
    let mut steps = vec![Step::new(
        "Permit the change, if KKP manages the cluster. Drain the nodes: they lose the API server for a while.",
        &[format!("{SEED} label {CLUSTERS} {id} {LABEL}=true")],
        "",
        format!("{SEED} label {CLUSTERS} {id} {LABEL}-"),
    )];
    match to {
        Side::LoadBalancer => steps.push(Step::new(
            "Start the front door of the cluster, and wait for the address of its load balancer. Set externalName and addressIP in the cluster file to this address.",
            &[
                "# the door needs neither name nor address".to_owned(),
                apply(file, "--external-name=pending --address-ip=0.0.0.0", &["door"], SEED),
                format!("{SEED} -n {namespace} rollout status deployment nodeport-proxy-envoy"),
                format!("{SEED} -n {namespace} get service front-loadbalancer"),
            ],
            "",
            remove_door(namespace).join(" && "),
        )),
        Side::Tunneling => steps.push(Step::new(
            "Check that both names resolve to the seed's front door, and that its ports 6443 and 8088 are open.",
            &[
                format!("getent hosts {}", target.external_name),
                format!("getent hosts {}", target.konnectivity.0),
            ],
            "",
            "nothing to undo",
        )),
        _ if target.external_address().is_some() => steps.push(Step::new(
            "Check that the address belongs to the seed's front door, and that its node ports are open.",
            &["# nothing to resolve: externalName is an address".to_owned()],
            "",
            "nothing to undo",
        )),
        _ => steps.push(Step::new(
            "Check that the name resolves to the seed's front door, and that its node ports are open.",
            &[format!("getent hosts {}", target.external_name)],
            "",
            "nothing to undo",
        )),
    }
    if to == Side::Tunneling {
        steps.push(Step::new(
            "Start the node tunnel on every node.",
            &[
                apply(file, "", &["node-tunnel"], USER),
                format!("{USER} -n kube-system rollout status daemonset envoy-agent"),
            ],
            "",
            format!("{USER} -n kube-system delete daemonset envoy-agent"),
        ));
    }
    // Both strategies with the seed's front door have the same names.
    let is_other_name = from == Side::LoadBalancer || to == Side::LoadBalancer;
    steps.push(Step::new(
        "Issue the certificates of kube-apiserver and server again, with the new names and addresses. Go on at once.",
        &[
            save_secrets(namespace, &before),
            apply(file, "", &["certificates"], SEED),
            "# issue a certificate for each request, and replace its Secret. Without KKP, also issue the certificate of kube-apiserver for the new name and address; KKP issues it (Secret apiserver-tls) after the change of its object".to_owned(),
        ],
        if is_other_name {
            "nothing, but clients of the old address fail when kube-apiserver reads its new certificate"
        } else {
            ""
        },
        format!(
            "{} && {}",
            put_secrets_back(namespace, &before),
            forget(namespace, &[("secrets", &before)])
        ),
    ));
    let mut commands = vec![spec(from, to, id), apply(file, "", &["services"], SEED)];
    commands.extend(patch_apiserver(target, file, ""));
    steps.push(Step::new(
        "Change the Services and the port of kube-apiserver. From here on, clients need the new address.",
        &commands,
        "kube-apiserver and the servers beside it; all connections end",
        format!(
            "{}  # then run this step with the cluster file of {}; its first command is then: {}",
            put_secrets_back(namespace, &before),
            from.name(),
            spec(to, from, id)
        ),
    ));
    steps.push(Step::new(
        "Give all users new kubeconfigs, and give the agents the new address.",
        &[
            "# write USER again, with the new address".to_owned(),
            apply(file, "", &["agent"], USER),
        ],
        "the agents, as soon as their kubelets reach the new address",
        format!(
            "apply the part agent of the cluster file of {}",
            from.name()
        ),
    ));
    steps.push(Step::new(
        "Replace every node: kubelets keep the old address. Until then, the tunnel has no agents.",
        &[
            format!("{USER} -n kube-system get machinedeployments -o name"),
            "# restart each rollout".to_owned(),
            format!("{USER} -n kube-system rollout status deployment {agent}"),
        ],
        "every node",
        "replace the nodes again after the way back",
    ));
    match from {
        Side::LoadBalancer => steps.push(Step::new(
            "Remove the front door of the cluster and its load balancer.",
            &remove_door(namespace),
            "",
            "a new load balancer has a new address",
        )),
        Side::Tunneling => steps.push(Step::new(
            "Remove the node tunnel. Its interface stays on old nodes until they restart.",
            &[format!(
                "{USER} -n kube-system delete daemonset envoy-agent --ignore-not-found"
            )],
            "",
            format!("run the plan from {} to Tunneling", to.name()),
        )),
        _ => {}
    }
    steps.push(Step::new(
        "Take the permission back.",
        &[
            forget(namespace, &[("secrets", &before)]),
            format!("{SEED} label {CLUSTERS} {id} {LABEL}-"),
        ],
        "",
        "nothing to undo",
    ));
    steps
}

/// Returns the command that changes the strategy in KKP's object. A change from Tunneling empties the address of the node
/// tunnel.
fn spec(from: Side, to: Side, id: &str) -> String {
    let address = match from {
        Side::Tunneling => ",\"clusterNetwork\":{\"tunnelingAgentIP\":\"\"}",
        _ => "",
    };
    format!(
        "{SEED} patch {CLUSTERS} {id} --type=merge -p '{{\"spec\":{{\"exposeStrategy\":\"{}\"{address}}}}}'{KKP_ONLY}",
        to.name()
    )
}

/// Returns the commands that remove the front door of the cluster.
fn remove_door(namespace: &str) -> Vec<String> {
    vec![
        format!(
            "{SEED} -n {namespace} delete deployment nodeport-proxy-envoy nodeport-proxy-lb-updater --ignore-not-found"
        ),
        format!("{SEED} -n {namespace} delete service front-loadbalancer --ignore-not-found"),
        format!("{SEED} -n {namespace} delete pdb nodeport-proxy-envoy --ignore-not-found"),
        format!(
            "{SEED} -n {namespace} delete serviceaccount,role,rolebinding nodeport-proxy --ignore-not-found"
        ),
    ]
}
