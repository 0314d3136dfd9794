//! Changes of the tunnel. The other tunnel is proven before the old one is removed.

use crate::render::arguments::SOCKET_FOLDER;
use crate::render::target::Target;

use super::Step;

/// Client of the seed.
pub(super) const SEED: &str = "kubectl --kubeconfig=SEED";
/// Client of the user cluster.
pub(super) const USER: &str = "kubectl --kubeconfig=USER";

/// Secrets in the seed that a new address of the API server replaces. KKP issues the first one for kube-apiserver.
const SECRETS: [&str; 3] = [
    "apiserver-tls",
    "konnectivityproxy-tls",
    "konnectivity-kubeconfig",
];

/// Returns the folder for rendered files. Clusters and tunnels have folders of their own, so that no step applies the files
/// of another.
fn rendered(target: &Target<'_>, values: &str) -> String {
    let tunnel = values.strip_prefix("--tunnel=").unwrap_or("objects");
    format!("{}-{tunnel}", target.namespace)
}

/// Returns the start of a command that renders parts. `values` has flags, or is empty.
fn render(file: &str, values: &str) -> String {
    match values {
        "" => format!("culvert render {file}"),
        _ => format!("culvert render {file} {values}"),
    }
}

/// Returns a command that renders parts and applies them.
pub(super) fn apply(file: &str, values: &str, parts: &[&str], kubectl: &str) -> String {
    let parts: Vec<String> = parts.iter().map(|part| format!("--part={part}")).collect();
    format!(
        "{} {} | {kubectl} apply -f -",
        render(file, values),
        parts.join(" ")
    )
}

/// Policy of KKP that denies all egress of kube-apiserver. Without it, a policy that permits some egress would deny the rest.
const DENIES_ALL: &str = "default-deny-all-egress";

/// Returns the commands that permit the traffic of a tunnel; none if the cluster has no policies.
fn permit(target: &Target<'_>, file: &str, values: &str) -> Vec<String> {
    let mut commands = Vec::new();
    let folder = rendered(target, values);
    if target.has_seed_policy() {
        commands.push(format!(
            "policy=$({SEED} -n {} get networkpolicy {DENIES_ALL} --ignore-not-found -o name) && {{ [ -z \"$policy\" ] || {SEED} apply -f {folder}/seed-network-policies.yaml; }}",
            target.namespace
        ));
    }
    if target.has_user_policy() {
        commands.push(format!(
            "{USER} apply -f {folder}/user-network-policies.yaml"
        ));
    }
    if !commands.is_empty() {
        let render =
            format!("culvert render {file} {values} --part=network-policies --output-dir={folder}");
        commands.insert(0, render);
    }
    commands
}

/// Returns the commands that undo [`permit`].
fn forbid(target: &Target<'_>, seed: &str, user: &str) -> String {
    let namespace = &target.namespace;
    format!(
        "{SEED} -n {namespace} delete networkpolicy {seed} --ignore-not-found && {}",
        delete_user_policy(user)
    )
}

fn delete_user_policy(name: &str) -> String {
    format!("{USER} -n kube-system delete networkpolicy {name} --ignore-not-found")
}

/// Returns the command that deletes the policy of a tunnel in the user cluster; none if the cluster has no policies.
fn remove_user_policy(target: &Target<'_>, name: &str) -> Vec<String> {
    match target.has_user_policy() {
        true => vec![delete_user_policy(name)],
        false => Vec::new(),
    }
}

/// Returns the command that deletes the permission of a server with both tunnels to watch Nodes.
fn remove_permission() -> String {
    format!("{USER} delete clusterrole,clusterrolebinding culvert-server-nodes --ignore-not-found")
}

/// Returns commands that patch the Deployment of kube-apiserver and wait for its pods.
pub(super) fn patch_apiserver(target: &Target<'_>, file: &str, values: &str) -> Vec<String> {
    let namespace = &target.namespace;
    let folder = rendered(target, values);
    let running = format!("{namespace}-apiserver.yaml");
    vec![
        format!("{SEED} -n {namespace} get deployment apiserver -o yaml > {running}"),
        format!(
            "{} --part=server --part=apiserver --part=egress --apiserver={running} --output-dir={folder}",
            render(file, values)
        ),
        format!("{SEED} apply -f {folder}/seed-egress.yaml -f {folder}/seed-apiserver.yaml"),
        format!(
            "{SEED} -n {namespace} patch deployment apiserver --patch-file {folder}/seed-server-patch.yaml"
        ),
        format!("{SEED} -n {namespace} rollout status deployment apiserver"),
    ]
}

/// Returns the command that saves a Deployment for [`put_back`]. A step that is repeated keeps the first file.
fn save(namespace: &str, deployment: &str, when: &str) -> String {
    let get = format!("{SEED} -n {namespace} get deployment {deployment} -o yaml");
    write_once(&saved(namespace, deployment, when), &get, "  ")
}

/// Returns the command that saves the Secrets of address-dependent certificates for [`put_secrets_back`].
pub(super) fn save_secrets(namespace: &str, when: &str) -> String {
    let get = format!(
        "umask 077 && {SEED} -n {namespace} get secret {} --ignore-not-found -o yaml",
        SECRETS.join(" ")
    );
    write_once(&saved(namespace, "secrets", when), &get, "    ")
}

/// Returns the command that writes objects to a file, unless the file exists. `indent` has the spaces before a field of the
/// objects' metadata.
fn write_once(file: &str, get: &str, indent: &str) -> String {
    // The API server refuses an old version of an object, and the id of a deleted one. A pipe would hide a failed `get`.
    format!(
        "{{ [ -s {file} ] || ({get} > {file}.all && grep -Ev '^{indent}(resourceVersion|uid):' {file}.all > {file}.tmp && rm -f {file}.all && mv {file}.tmp {file}); }}"
    )
}

/// Returns the command that restores the Secrets, and keeps their file.
pub(super) fn put_secrets_back(namespace: &str, when: &str) -> String {
    format!("{SEED} replace -f {}", saved(namespace, "secrets", when))
}

/// Returns the name of the file of a saved Deployment, or of saved Secrets.
fn saved(namespace: &str, deployment: &str, when: &str) -> String {
    format!("{namespace}-{deployment}-{when}.yaml")
}

/// Returns the commands that restore a Deployment from its file and wait for its pods. Unlike the Deployment's history, the
/// file does not depend on the number of changes. A later run of the plan saves the Deployment again.
fn put_back(namespace: &str, deployment: &str, when: &str) -> String {
    let file = saved(namespace, deployment, when);
    format!(
        "{} && rm -f {file}",
        put_back_from(&file, namespace, deployment)
    )
}

/// Returns the commands of [`put_back`] for the OpenVPN server. They also remove the permission to watch Nodes, unless the
/// restored server watches Nodes.
fn put_server_back(namespace: &str, when: &str) -> String {
    let file = saved(namespace, "openvpn-server", when);
    format!(
        "{} && {{ grep -q openvpn-watch-nodes {file} || {}; }} && rm -f {file}",
        put_back_from(&file, namespace, "openvpn-server"),
        remove_permission()
    )
}

fn put_back_from(file: &str, namespace: &str, deployment: &str) -> String {
    format!(
        "{SEED} replace -f {file} && {SEED} -n {namespace} rollout status deployment {deployment}"
    )
}

/// Returns the command that removes the files of a plan after its last way back.
pub(super) fn forget(namespace: &str, deployments: &[(&str, &str)]) -> String {
    let files = deployments
        .iter()
        .map(|(deployment, when)| saved(namespace, deployment, when));
    format!("rm -f {}", files.collect::<Vec<_>>().join(" "))
}

/// Marks the way back of a step that may be skipped.
fn unless_skipped(commands: String) -> String {
    format!("{commands}  # unless the step was skipped")
}

/// Returns the command that takes the tunnel of KKP's stock OpenVPN away from kube-apiserver: its sidecars, and its name
/// server behind the tunnel.
fn remove_sidecars(namespace: &str) -> String {
    format!(
        "{SEED} -n {namespace} patch deployment apiserver -p '{{\"spec\":{{\"template\":{{\"spec\":{{\"dnsPolicy\":\"ClusterFirst\",\"dnsConfig\":null,\"containers\":[{{\"name\":\"openvpn-client\",\"$patch\":\"delete\"}},{{\"name\":\"dnat-controller\",\"$patch\":\"delete\"}}]}}}}}}}}'"
    )
}

/// Returns the command that removes the servers beside kube-apiserver, and the volumes that nothing needs without them.
fn remove_servers(namespace: &str) -> String {
    format!(
        "{SEED} -n {namespace} patch deployment apiserver -p '{{\"spec\":{{\"template\":{{\"spec\":{{\"containers\":[{{\"name\":\"konnectivity-server\",\"$patch\":\"delete\"}},{{\"name\":\"apiserver\",\"volumeMounts\":[{{\"mountPath\":\"{SOCKET_FOLDER}\",\"$patch\":\"delete\"}}]}}],\"volumes\":[{{\"name\":\"konnectivity-uds\",\"$patch\":\"delete\"}},{{\"name\":\"konnectivity-kubeconfig\",\"$patch\":\"delete\"}},{{\"name\":\"konnectivityproxy-tls\",\"$patch\":\"delete\"}}]}}}}}}}}'"
    )
}

/// Returns the commands that give the node tunnels the ports of another tunnel; none without node tunnels.
fn node_tunnel(target: &Target<'_>, file: &str, values: &str) -> Vec<String> {
    if !target.cluster.is_tunneling() {
        return Vec::new();
    }
    vec![
        // A merge would keep the init container and arguments of KKP's DaemonSet.
        format!(
            "culvert render {file} {values} --part=node-tunnel | {USER} replace --save-config -f -"
        ),
        format!("{USER} -n kube-system rollout status daemonset envoy-agent"),
    ]
}

/// Returns the commands that remove the OpenVPN server.
fn remove_server(namespace: &str) -> Vec<String> {
    vec![
        format!(
            "{SEED} -n {namespace} delete deployment,service openvpn-server --ignore-not-found"
        ),
        format!("{SEED} -n {namespace} delete service culvert-front-end --ignore-not-found"),
        format!("{SEED} -n {namespace} delete configmap openvpn-client-configs --ignore-not-found"),
        format!(
            "{SEED} -n {namespace} delete networkpolicy openvpn-server-allow --ignore-not-found"
        ),
    ]
}

fn switch(target: &Target<'_>, mode: &str) -> String {
    format!(
        "{SEED} -n {} exec deployment/openvpn-server -- culvert switch --admin-uds=/run/culvert/admin.sock --to={mode}",
        target.namespace
    )
}

fn status(target: &Target<'_>) -> String {
    format!(
        "{SEED} -n {} exec deployment/openvpn-server -- culvert status --admin-uds=/run/culvert/admin.sock",
        target.namespace
    )
}

/// Returns the command that writes fields into the specification of KKP's object.
fn patch_cluster(target: &Target<'_>, fields: &str) -> String {
    let id = target.namespace.strip_prefix("cluster-");
    let id = id.unwrap_or(&target.namespace);
    format!(
        "{SEED} patch clusters.kubermatic.k8c.io {id} --type=merge -p '{{\"spec\":{{{fields}}}}}'"
    )
}

const PAUSE: &str = "\"pause\":true";
const NO_PAUSE: &str = "\"pause\":false";

pub(super) fn to_konnectivity(target: &Target<'_>, file: &str) -> Vec<Step> {
    let namespace = &target.namespace;
    let new = "--tunnel=konnectivity";
    let old = "--tunnel=openvpn";
    let folder = rendered(target, old);
    let select = |app: &str| {
        format!(
            "{SEED} -n {namespace} patch service konnectivity-server --type=merge -p '{{\"spec\":{{\"selector\":{{\"app\":\"{app}\"}}}}}}'"
        )
    };
    let remove_agents = format!(
        "{USER} -n kube-system delete deployment,pdb konnectivity-agent --ignore-not-found"
    );
    let (before, front_end, sidecars) =
        ("before-konnectivity", "before-front-end", "before-sidecars");
    vec![
        Step::new(
            "Pause the cluster, if KKP manages it: KKP's controllers would undo the next steps.",
            &[patch_cluster(target, PAUSE)],
            "",
            patch_cluster(target, NO_PAUSE),
        ),
        Step::new(
            "Run the OpenVPN server as a server with both tunnels. Skip this step if it does already.",
            &[
                apply(file, old, &["certificates"], SEED),
                "# create the Secrets of the requests that do not exist; keep the others".to_owned(),
                apply(file, old, &["rbac"], USER),
                format!(
                    "culvert render {file} {old} --part=server --part=services --output-dir={folder}"
                ),
                save(namespace, "openvpn-server", before),
                // A merge would keep containers, privileges and probes of the stock server.
                format!("{SEED} replace --save-config -f {folder}/seed-server.yaml"),
                format!("{SEED} apply -f {folder}/seed-services.yaml"),
                format!("{SEED} -n {namespace} rollout status deployment openvpn-server"),
                status(target),
                "# repeat the command until openvpn is healthy".to_owned(),
            ],
            "openvpn-server; its clients connect again",
            unless_skipped(put_server_back(namespace, before)),
        ),
        Step::new(
            "Let kube-apiserver use the OpenVPN server. Skip this step if it does already.",
            &[
                permit(target, file, old),
                vec![save(namespace, "apiserver", before)],
                patch_apiserver(target, file, old),
                vec!["# check that kubectl logs and exec work".to_owned()],
            ]
            .concat(),
            "kube-apiserver, one pod after the other; connections of a stopped pod end",
            unless_skipped(put_back(namespace, "apiserver", before)),
        ),
        Step::new(
            "Issue the certificates konnectivityproxy-tls and konnectivity-kubeconfig, and create their Secrets.",
            &[apply(file, new, &["certificates"], SEED)],
            "",
            "nothing to undo",
        ),
        Step::new(
            "Expose the agents' port of the server with both tunnels.",
            &[
                apply(file, new, &["services"], SEED),
                select("openvpn-server"),
            ],
            "",
            format!("{SEED} -n {namespace} delete service konnectivity-server"),
        ),
        Step::new(
            "Permit the traffic of the new tunnel. Start the agents, and wait until they are connected.",
            &[
                permit(target, file, new),
                vec![
                    apply(file, new, &["rbac", "agent"], USER),
                    format!("{USER} -n kube-system rollout status deployment konnectivity-agent"),
                    status(target),
                    "# repeat the command until konnectivity is healthy".to_owned(),
                ],
            ]
            .concat(),
            "",
            format!(
                "{remove_agents} && {}",
                forbid(target, "apiserver-internal-allow", "konnectivity")
            ),
        ),
        Step::new(
            "Switch new connections to the agents. Open connections stay until kube-apiserver restarts, at most 5 minutes.",
            &[
                switch(target, "prefer-konnectivity"),
                "# check that kubectl logs and exec work".to_owned(),
                switch(target, "konnectivity"),
                "# a new pod of openvpn-server begins with OpenVPN again: repeat this step then".to_owned(),
            ],
            "",
            // kube-apiserver uses its open connections again, and agents that are removed end them.
            format!(
                "{} && {SEED} -n {namespace} rollout restart deployment apiserver && {SEED} -n {namespace} rollout status deployment apiserver",
                switch(target, "openvpn")
            ),
        ),
        Step::new(
            "Run the servers beside kube-apiserver. Agents find the new servers through the Service.",
            &[
                vec![
                    save(namespace, "apiserver", front_end),
                    select("apiserver"),
                ],
                patch_apiserver(target, file, new),
            ]
            .concat(),
            "kube-apiserver, one pod after the other; dials of a new pod fail until its first agent is connected",
            format!(
                "{} && {} && {}",
                select("openvpn-server"),
                apply(file, old, &["egress"], SEED),
                put_back(namespace, "apiserver", front_end)
            ),
        ),
        Step::new(
            "Move the traffic of the other OpenVPN clients: the sidecars of KKP's stock programs in the seed.",
            &[
                save(namespace, "apiserver", sidecars),
                remove_sidecars(namespace),
                format!("{SEED} -n {namespace} rollout status deployment apiserver"),
                format!(
                    "{SEED} -n {namespace} get deployments -o custom-columns='NAME:.metadata.name,CONTAINERS:.spec.template.spec.containers[*].name'"
                ),
                "# move metrics-server into the user cluster, and remove openvpn-client and dnat-controller from all other Deployments".to_owned(),
                status(target),
                "# repeat the command until it lists no internal-client".to_owned(),
            ],
            "the programs that lose a sidecar; they reach no pods or nodes any more",
            format!(
                "{}  # and put the other Deployments back",
                put_back(namespace, "apiserver", sidecars)
            ),
        ),
        Step::new(
            "Remove the OpenVPN tunnel.",
            &[
                vec![format!(
                    "{USER} -n kube-system delete deployment openvpn-client --ignore-not-found"
                )],
                remove_user_policy(target, "openvpn-client"),
                remove_server(namespace),
                vec![remove_permission()],
                node_tunnel(target, file, new),
                vec![forget(
                    namespace,
                    &[
                        ("openvpn-server", before),
                        ("apiserver", before),
                        ("apiserver", front_end),
                        ("apiserver", sidecars),
                    ],
                )],
            ]
            .concat(),
            if target.cluster.is_tunneling() {
                "the node tunnels, without port 1194"
            } else {
                ""
            },
            "run the plan from konnectivity to openvpn",
        ),
        Step::new(
            "End the pause, if KKP manages the cluster. KKP then applies its own objects and removes the rest of OpenVPN.",
            &[
                "# the registry that KKP uses must have our images under the stock names (docs/install.md); otherwise KKP returns to the stock programs".to_owned(),
                patch_cluster(
                    target,
                    &format!("\"clusterNetwork\":{{\"konnectivityEnabled\":true}},{NO_PAUSE}"),
                ),
            ],
            "what differs from KKP's objects: kube-apiserver and the agents",
            patch_cluster(target, PAUSE),
        ),
    ]
}

pub(super) fn to_openvpn(target: &Target<'_>, file: &str) -> Vec<Step> {
    let namespace = &target.namespace;
    let new = "--tunnel=openvpn";
    let folder = rendered(target, new);
    let before = "before-openvpn";
    vec![
        Step::new(
            "Pause the cluster as long as it uses OpenVPN, if KKP manages it: KKP supports no cluster without Konnectivity.",
            &[patch_cluster(target, PAUSE)],
            "",
            patch_cluster(target, NO_PAUSE),
        ),
        Step::new(
            "Issue the certificates of the OpenVPN tunnel and of the front end, and create their Secrets.",
            &[apply(file, new, &["certificates"], SEED)],
            "",
            "nothing to undo",
        ),
        Step::new(
            "Start the OpenVPN server, and expose it.",
            &[
                vec![
                    format!(
                        "culvert render {file} {new} --part=server --part=services --part=rbac --output-dir={folder}"
                    ),
                    format!(
                        "{SEED} apply -f {folder}/seed-server.yaml -f {folder}/seed-services.yaml"
                    ),
                    format!("{USER} apply -f {folder}/user-rbac.yaml"),
                    format!("{SEED} -n {namespace} rollout status deployment openvpn-server"),
                ],
                node_tunnel(target, file, new),
            ]
            .concat(),
            if target.cluster.is_tunneling() {
                "the node tunnels, with the new port 1194"
            } else {
                ""
            },
            [
                remove_server(namespace),
                vec![remove_permission()],
                node_tunnel(target, file, "--tunnel=konnectivity"),
            ]
            .concat()
            .join(" && "),
        ),
        Step::new(
            "Permit the traffic of the new tunnel. Start the OpenVPN client, and wait until it is ready: it is connected then.",
            &[
                permit(target, file, new),
                vec![
                    apply(file, new, &["agent"], USER),
                    format!("{USER} -n kube-system rollout status deployment openvpn-client"),
                    status(target),
                    "# repeat the command until openvpn is healthy".to_owned(),
                ],
            ]
            .concat(),
            "",
            format!(
                "{USER} -n kube-system delete deployment openvpn-client --ignore-not-found && {}",
                forbid(target, "openvpn-server-allow", "openvpn-client")
            ),
        ),
        Step::new(
            "Let kube-apiserver use the OpenVPN server.",
            &[
                vec![save(namespace, "apiserver", before)],
                patch_apiserver(target, file, new),
            ]
            .concat(),
            "kube-apiserver, one pod after the other; connections of a stopped pod end",
            format!(
                "{} && {}",
                apply(file, "--tunnel=konnectivity", &["egress"], SEED),
                put_back(namespace, "apiserver", before)
            ),
        ),
        Step::new(
            "Remove the servers beside kube-apiserver and the agents.",
            &[
                vec![
                    remove_servers(namespace),
                    format!("{SEED} -n {namespace} rollout status deployment apiserver"),
                    format!("{USER} -n kube-system delete deployment,pdb konnectivity-agent --ignore-not-found"),
                ],
                remove_user_policy(target, "konnectivity"),
                vec![
                    format!("{SEED} -n {namespace} delete service konnectivity-server --ignore-not-found"),
                    format!(
                        "{SEED} -n {namespace} delete networkpolicy apiserver-internal-allow --ignore-not-found"
                    ),
                    forget(namespace, &[("apiserver", before)]),
                ],
            ]
            .concat(),
            "kube-apiserver, one pod after the other",
            "run the plan from openvpn to konnectivity",
        ),
    ]
}
