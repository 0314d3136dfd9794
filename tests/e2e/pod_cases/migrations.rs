//! The migration plans of `culvert render`, carried out step by step on a user cluster with its control plane in the
//! seed. Each step must reach the state that its title promises.

use culvert_tests::eventually;
use culvert_tests::metrics::Metrics;
use serde_json::Value;

use crate::lab::PATIENCE;
use crate::lab::cluster::Cluster;
use crate::lab::tenant::{ID, NAMESPACE, Step, Tenant};

/// Label that permits a change of the strategy.
const LABEL: &str = "unsafe-expose-strategy-migration";

/// From Konnectivity to OpenVPN, and back.
pub(super) async fn tunnels(cluster: &mut Cluster) {
    let tenant = cluster.tenant().await;
    for (from, to) in [("konnectivity", "openvpn"), ("openvpn", "konnectivity")] {
        tenant
            .there_and_back(from, to, after_tunnel_step, after_tunnel_way_back)
            .await;
        tenant.migrate(from, to, after_tunnel_step).await;
    }
}

/// Every change of the expose strategy. The changes end with the first strategy.
pub(super) async fn expose_strategies(cluster: &mut Cluster) {
    let tenant = cluster.tenant().await;
    let strategies = [
        "NodePort",
        "LoadBalancer",
        "Tunneling",
        "NodePort",
        "Tunneling",
        "LoadBalancer",
        "NodePort",
    ];
    for change in strategies.windows(2) {
        let [from, to] = [change[0], change[1]];
        tenant
            .there_and_back(from, to, after_strategy_step, async |_, _| {})
            .await;
        is_back(tenant, from).await;
        tenant.migrate(from, to, after_strategy_step).await;
    }
}

/// Checks that nothing of another strategy is left after the way back.
async fn is_back(tenant: &Tenant, strategy: &str) {
    assert_eq!(label(tenant).await, "");
    let object = tenant.seed.get(&["cluster", ID]).await.unwrap();
    assert_eq!(object["spec"]["exposeStrategy"], strategy);
    has_agents_of(tenant).await;
    let rollout =
        "kubectl --kubeconfig=USER -n kube-system rollout status deployment konnectivity-agent";
    tenant.shell(rollout).await.unwrap();
    let has_door = exists(tenant, "service", "front-loadbalancer").await;
    assert_eq!(has_door, strategy == "LoadBalancer");
    let has_node_tunnel = user_has(tenant, "daemonset", "envoy-agent").await;
    assert_eq!(has_node_tunnel, strategy == "Tunneling");
}

/// Checks the promise of a step that changes the tunnel. The tunnel works after each of them.
async fn after_tunnel_step(tenant: &Tenant, step: &Step) {
    let title = step
        .title
        .trim_start_matches("Permit the traffic of the new tunnel. ");
    let is = |start: &str| title.starts_with(start);
    let seed = async |kind: &str, name: &str| exists(tenant, kind, name).await;
    if is("Pause the cluster") {
        assert_eq!(spec(tenant).await["pause"], true);
    } else if is("End the pause") {
        let spec = spec(tenant).await;
        assert_eq!(spec["pause"], false);
        assert_eq!(spec["clusterNetwork"]["konnectivityEnabled"], true);
    } else if is("Issue the certificates of the OpenVPN tunnel") {
        assert!(seed("secret", "openvpn-server-certificates").await);
        assert!(seed("secret", "culvert-front-end-client").await);
    } else if is("Issue the certificates konnectivityproxy-tls") {
        assert!(seed("secret", "konnectivityproxy-tls").await);
    } else if is("Start the OpenVPN server, and expose it.")
        || is("Run the OpenVPN server as a server with both tunnels.")
    {
        assert_ne!(endpoints(tenant, "openvpn-server").await, [""; 0]);
        assert!(user_has(tenant, "clusterrolebinding", "culvert-server-nodes").await);
    } else if is("Expose the agents' port of the server with both tunnels.") {
        eventually("the Service selects the new server", PATIENCE, async || {
            let [agents, clients] = [
                endpoints(tenant, "konnectivity-server").await,
                endpoints(tenant, "openvpn-server").await,
            ];
            (agents == clients && !agents.is_empty())
                .then_some(())
                .ok_or(agents)
                .map_err(|agents| format!("{agents:?}"))
        })
        .await;
    } else if is("Start the OpenVPN client, and wait until it is ready") {
        assert_eq!(ready(tenant, "openvpn-client").await, 1);
    } else if is("Start the agents, and wait until they are connected.") {
        assert_eq!(ready(tenant, "konnectivity-agent").await, 2);
    } else if is("Switch new connections to the agents") {
        has_dialed(tenant, "konnectivity").await;
    } else if is("Let kube-apiserver use the OpenVPN server.") {
        has_dialed(tenant, "openvpn").await;
        assert!(has_volume(tenant, "culvert-front-end-client").await);
    } else if is("Run the servers beside kube-apiserver.") {
        assert!(has_sidecar(tenant).await);
        assert!(!has_volume(tenant, "culvert-front-end-client").await);
    } else if is("Move the traffic of the other OpenVPN clients") {
        assert_eq!(ready(tenant, "openvpn-client").await, 1);
    } else if is("Remove the servers beside kube-apiserver and the agents.") {
        assert!(!has_sidecar(tenant).await);
        for volume in [
            "konnectivity-uds",
            "konnectivity-kubeconfig",
            "konnectivityproxy-tls",
        ] {
            assert!(!has_volume(tenant, volume).await, "{volume}");
        }
        assert!(!seed("service", "konnectivity-server").await);
        assert!(!user_has(tenant, "deployment", "konnectivity-agent").await);
    } else if is("Remove the OpenVPN tunnel.") {
        assert!(!seed("deployment", "openvpn-server").await);
        assert!(!user_has(tenant, "deployment", "openvpn-client").await);
        for kind in ["clusterrole", "clusterrolebinding"] {
            assert!(!user_has(tenant, kind, "culvert-server-nodes").await);
        }
    } else {
        panic!("no check for the step {:?}", step.title);
    }
    tenant.works().await;
}

/// Returns the specification of KKP's object.
async fn spec(tenant: &Tenant) -> Value {
    let object = tenant.seed.get(&["cluster", ID]).await.unwrap();
    object["spec"].clone()
}

/// Checks the way back of a step that changes the tunnel. The tunnel works already.
async fn after_tunnel_way_back(tenant: &Tenant, step: &Step) {
    if !step
        .title
        .starts_with("Switch new connections to the agents")
    {
        return;
    }
    // The agents are still connected. They are the fallback of the switch, so calls work without the way back, too.
    let opened = async |tunnel| dials(tenant, tunnel).await.unwrap();
    let before = (opened("openvpn").await, opened("konnectivity").await);
    tenant.works().await;
    let after = (opened("openvpn").await, opened("konnectivity").await);
    assert!(
        after.0 > before.0 && after.1 == before.1,
        "OpenVPN and Konnectivity: {before:?}, then {after:?} dials"
    );
}

/// Checks the promise of a step that changes the expose strategy.
async fn after_strategy_step(tenant: &Tenant, step: &Step) {
    let is = |start: &str| step.title.starts_with(start);
    if is("Permit the change") {
        assert_eq!(label(tenant).await, "true");
    } else if is("Check that ") {
        // The commands are the check.
        assert!(step.commands[0].starts_with("getent hosts "));
    } else if is("Start the front door of the cluster") {
        // The ports of the cluster follow with the Services.
        let service = ["service", "-n", NAMESPACE, "front-loadbalancer"];
        let service = tenant.seed.get(&service).await.unwrap();
        assert_eq!(service["spec"]["ports"][0]["port"], 8002);
    } else if is("Start the node tunnel on every node.") {
        eventually("the node tunnel listens", PATIENCE, async || {
            tenant.node_tunnel_listens().await
        })
        .await;
    } else if is("Issue the certificates of kube-apiserver and server again") {
        let names = "kubectl --kubeconfig=SEED -n cluster-abc123 get secret konnectivityproxy-tls \
                     -o 'jsonpath={.data.konnectivityproxy-tls\\.crt}' | base64 -d | \
                     openssl x509 -noout -ext subjectAltName";
        let names = tenant.shell(names).await.unwrap();
        assert!(names.contains(&tenant.server_host()), "{names}");
    } else if is("Change the Services and the port of kube-apiserver.") {
        let url = format!("--server={}", tenant.url());
        eventually("the new address answers", PATIENCE, async || {
            tenant.user.run(&[&url, "get", "--raw=/readyz"]).await
        })
        .await;
        // Until the nodes are replaced, the tunnel has no agents.
        return;
    } else if is("Give all users new kubeconfigs, and give the agents the new address.") {
        has_agents_of(tenant).await;
        return;
    } else if is("Replace every node") {
        assert_eq!(ready(tenant, "konnectivity-agent").await, 2);
    } else if is("Remove the front door of the cluster and its load balancer.") {
        assert!(!exists(tenant, "deployment", "nodeport-proxy-envoy").await);
        assert!(!exists(tenant, "service", "front-loadbalancer").await);
        assert!(!exists(tenant, "rolebinding", "nodeport-proxy").await);
    } else if is("Remove the node tunnel.") {
        assert!(!user_has(tenant, "daemonset", "envoy-agent").await);
    } else if is("Take the permission back.") {
        assert_eq!(label(tenant).await, "");
    } else {
        panic!("no check for the step {:?}", step.title);
    }
    tenant.works().await;
}

/// Checks that the agents have the address of the servers.
async fn has_agents_of(tenant: &Tenant) {
    let agents = ["deployment", "-n", "kube-system", "konnectivity-agent"];
    let agents = tenant.user.get(&agents).await.unwrap();
    let args = &agents["spec"]["template"]["spec"]["containers"][0]["args"];
    let host = Value::from(format!("--proxy-server-host={}", tenant.server_host()));
    assert!(args.as_array().unwrap().contains(&host), "{args}");
}

/// Returns true if the namespace of the cluster has an object.
async fn exists(tenant: &Tenant, kind: &str, name: &str) -> bool {
    tenant
        .seed
        .get(&[kind, "-n", NAMESPACE, name])
        .await
        .is_ok()
}

/// Returns true if the user cluster has an object in `kube-system`, or an object without a namespace.
async fn user_has(tenant: &Tenant, kind: &str, name: &str) -> bool {
    let words = [kind, "-n", "kube-system", name];
    tenant.user.get(&words).await.is_ok()
}

/// Returns the number of ready pods of a Deployment in the user cluster.
async fn ready(tenant: &Tenant, name: &str) -> u64 {
    let words = ["deployment", "-n", "kube-system", name];
    let object = tenant.user.get(&words).await.unwrap();
    object["status"]["readyReplicas"].as_u64().unwrap_or(0)
}

/// Returns the value of the label that permits a change, or an empty text.
async fn label(tenant: &Tenant) -> String {
    let object = tenant.seed.get(&["cluster", ID]).await.unwrap();
    let label = object["metadata"]["labels"][LABEL].as_str();
    label.unwrap_or_default().to_owned()
}

/// Returns true if a server is beside kube-apiserver.
async fn has_sidecar(tenant: &Tenant) -> bool {
    let words = ["deployment", "-n", NAMESPACE, "apiserver"];
    let object = tenant.seed.get(&words).await.unwrap();
    let containers = &object["spec"]["template"]["spec"]["containers"];
    let containers = containers.as_array().unwrap();
    containers
        .iter()
        .any(|it| it["name"] == "konnectivity-server")
}

/// Returns true if the pods of kube-apiserver have a volume with this name.
async fn has_volume(tenant: &Tenant, name: &str) -> bool {
    let words = ["deployment", "-n", NAMESPACE, "apiserver"];
    let object = tenant.seed.get(&words).await.unwrap();
    let volumes = object["spec"]["template"]["spec"]["volumes"].as_array();
    volumes.into_iter().flatten().any(|it| it["name"] == name)
}

/// Returns the addresses behind a Service of the seed.
async fn endpoints(tenant: &Tenant, service: &str) -> Vec<String> {
    let label = format!("kubernetes.io/service-name={service}");
    let words = ["endpointslices", "-n", NAMESPACE, "-l", &label];
    let slices = tenant.seed.get(&words).await.unwrap();
    let slices = slices["items"].as_array().cloned().unwrap_or_default();
    let endpoints = slices.iter().filter_map(|it| it["endpoints"].as_array());
    let addresses = endpoints
        .flatten()
        .filter_map(|it| it["addresses"].as_array());
    let addresses = addresses.flatten().filter_map(Value::as_str);
    addresses.map(str::to_owned).collect()
}

/// Makes calls until a tunnel of the server with both tunnels has opened a connection.
async fn has_dialed(tenant: &Tenant, tunnel: &str) {
    let what = format!("{tunnel} opens connections");
    eventually(&what, PATIENCE, async || {
        tenant.works().await;
        let dials = dials(tenant, tunnel).await?;
        (dials > 0.0).then_some(()).ok_or("none".to_owned())
    })
    .await;
}

/// Returns the number of connections that a tunnel of the server with both tunnels has opened.
async fn dials(tenant: &Tenant, tunnel: &str) -> Result<f64, String> {
    let pods = ["pods", "-n", NAMESPACE, "-l", "app=openvpn-server"];
    let pods = tenant.seed.get(&pods).await?;
    let pod = pods["items"][0]["metadata"]["name"].as_str();
    let pod = pod.ok_or("no pod")?;
    let path = format!("--raw=/api/v1/namespaces/{NAMESPACE}/pods/{pod}:8134/proxy/metrics");
    let text = tenant.seed.run(&["get", &path]).await?;
    let metrics = Metrics::parse(&text).map_err(|error| error.to_string())?;
    let labels = [("tunnel", tunnel), ("outcome", "opened")];
    let dials = metrics.value("culvert_tunnel_dials_total", &labels);
    Ok(dials.unwrap_or_default())
}
