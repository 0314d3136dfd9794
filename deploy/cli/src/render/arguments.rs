//! The command lines of the rendered programs, with KKP's arguments in KKP's order.

use culvert_host::net::dial::join_host_port;

use super::apiserver::Apiserver;
use super::cluster::Tunnel;
use super::target::{OPENVPN_PORT, Program, Target};
use super::tokens::{AUDIENCE, Tokens};

/// Folder of the socket between API server and server.
pub(super) const SOCKET_FOLDER: &str = "/etc/kubernetes/konnectivity-server";
/// Service account of the agents.
pub(super) const AGENT_ACCOUNT: &str = "system-konnectivity-agent";
/// Port of the CONNECT listener of the seed's front door.
pub(super) const CONNECT_PORT: u16 = 8088;
/// Port of the front end of a server outside of the API server's pod.
pub(super) const FRONT_END_PORT: u16 = 8090;
/// Port of the front door for `/healthz` and metrics.
pub(super) const STATS_PORT: u16 = 8002;

/// Returns the arguments of the server.
pub(super) fn server(target: &Target<'_>) -> Vec<String> {
    let replicas = target.cluster.apiserver_replicas;
    let mut args = texts(&["--logtostderr=true", "-v=3"]);
    args.extend(texts(&[
        "--cluster-key=/etc/kubernetes/pki/konnectivityproxy-tls.key",
        "--cluster-cert=/etc/kubernetes/pki/konnectivityproxy-tls.crt",
    ]));
    match target.cluster.tunnel {
        Tunnel::Konnectivity => args.extend([
            format!("--uds-name={SOCKET_FOLDER}/konnectivity-server.socket"),
            "--kubeconfig=/etc/kubernetes/kubeconfig/kubeconfig".to_owned(),
            format!("--server-count={replicas}"),
            "--mode=grpc".to_owned(),
            "--server-port=0".to_owned(),
        ]),
        Tunnel::Openvpn => args.extend([
            "--kubeconfig=/etc/kubernetes/kubeconfig/kubeconfig".to_owned(),
            // Agents also look for the sidecars of the API servers while the tunnel changes.
            format!("--server-count={}", replicas.saturating_add(1)),
            "--mode=http-connect".to_owned(),
            format!("--server-port={FRONT_END_PORT}"),
            "--server-cert=/etc/culvert/front-end/tls.crt".to_owned(),
            "--server-key=/etc/culvert/front-end/tls.key".to_owned(),
            "--server-ca-cert=/etc/culvert/front-end/ca.crt".to_owned(),
        ]),
    }
    args.extend(texts(&["--agent-port=8132", "--admin-port=8133"]));
    if target.cluster.kkp.has_tuned_konnectivity() {
        args.push("--admin-bind-address=0.0.0.0".to_owned());
    }
    args.extend(texts(&[
        "--health-port=8134",
        "--agent-namespace=kube-system",
    ]));
    args.push(format!("--agent-service-account={AGENT_ACCOUNT}"));
    if target.cluster.tunnel == Tunnel::Konnectivity {
        args.push("--delete-existing-uds-file=true".to_owned());
    }
    args.extend([
        format!("--authentication-audience={AUDIENCE}"),
        "--proxy-strategies=default".to_owned(),
        format!("--keepalive-time={}", target.keepalive()),
    ]);
    let seed = &target.cluster.facts().seed.default_component_settings;
    let user = &seed.konnectivity_proxy.args;
    args.extend(channel_size(target, user));
    if target.cluster.tunnel == Tunnel::Openvpn {
        args.extend(openvpn_server(target));
    }
    // Shorter than the grace period of pods. Old stock servers do not know the flag.
    let flag = "--graceful-shutdown-timeout";
    let is_sidecar = target.cluster.tunnel == Tunnel::Konnectivity;
    if is_sidecar
        && !target.is_stock(Program::Server)
        && !user.iter().any(|arg| arg.starts_with(flag))
    {
        args.push(format!("{flag}=25s"));
    }
    args.extend(user.iter().cloned());
    args
}

fn openvpn_server(target: &Target<'_>) -> Vec<String> {
    let routes = target.openvpn_routes().join(",");
    vec![
        "--admin-uds=/run/culvert/admin.sock".to_owned(),
        "--tunnel-mode=openvpn".to_owned(),
        "--tunnel-state-file=/run/culvert/tunnel-state".to_owned(),
        format!("--openvpn-listen=tcp::{OPENVPN_PORT}"),
        "--openvpn-ca=/etc/openvpn/pki/ca/ca.crt".to_owned(),
        "--openvpn-cert=/etc/openvpn/pki/server/server.crt".to_owned(),
        "--openvpn-key=/etc/openvpn/pki/server/server.key".to_owned(),
        "--openvpn-duplicate-cn=true".to_owned(),
        "--openvpn-client-config-dir=/etc/openvpn/clients".to_owned(),
        format!("--openvpn-route={routes}"),
        format!("--openvpn-push-route={routes}"),
        format!(
            "--openvpn-node-access-network={}",
            target.node_access_network()
        ),
        "--openvpn-watch-nodes=true".to_owned(),
    ]
}

/// Returns the arguments of the agent of the Konnectivity tunnel.
pub(super) fn agent(target: &Target<'_>) -> Vec<String> {
    let (host, port) = &target.konnectivity;
    // The stock agent joins host and port without adding brackets. Our agent accepts both notations.
    let host = match host.contains(':') {
        true => format!("[{host}]"),
        false => host.clone(),
    };
    let user = &target
        .cluster
        .spec
        .components_override
        .konnectivity_proxy
        .args;
    let mut args = vec![
        "--logtostderr=true".to_owned(),
        "-v=3".to_owned(),
        "--sync-forever=true".to_owned(),
        "--ca-cert=/var/run/secrets/kubernetes.io/serviceaccount/ca.crt".to_owned(),
        format!("--proxy-server-host={host}"),
        format!("--proxy-server-port={port}"),
        "--admin-server-port=8133".to_owned(),
        "--health-server-port=8134".to_owned(),
        format!("--service-account-token-path=/var/run/secrets/tokens/{AGENT_ACCOUNT}-token"),
        format!("--keepalive-time={}", target.keepalive()),
    ];
    args.extend(channel_size(target, user));
    // Shorter than the grace period of pods. The stock agent does not know the flag.
    let is_set = |flag: &str| user.iter().any(|arg| arg.starts_with(flag));
    if !target.is_stock(Program::Agent)
        && !is_set("--drain-timeout")
        && !is_set("--graceful-shutdown-timeout")
    {
        args.push("--drain-timeout=25s".to_owned());
    }
    args.extend(user.iter().cloned());
    args
}

/// Returns the arguments of the agent as an OpenVPN client.
pub(super) fn openvpn_client(target: &Target<'_>) -> Vec<String> {
    let (host, port) = &target.openvpn;
    vec![
        "--logtostderr=true".to_owned(),
        "-v=3".to_owned(),
        format!("--openvpn-remote={}", join_host_port(host, *port)),
        "--openvpn-ca=/etc/openvpn/certs/ca.crt".to_owned(),
        "--openvpn-cert=/etc/openvpn/certs/client.crt".to_owned(),
        "--openvpn-key=/etc/openvpn/certs/client.key".to_owned(),
        format!(
            "--openvpn-nodes={}",
            target.cluster.facts().node_networks.join(",")
        ),
        format!(
            "--openvpn-node-access-network={}",
            target.node_access_network()
        ),
        "--admin-server-port=8133".to_owned(),
        "--health-server-port=8134".to_owned(),
        "--drain-timeout=25s".to_owned(),
    ]
}

/// Returns the arguments of the front door of one cluster, for the strategy LoadBalancer.
pub(super) fn door(target: &Target<'_>) -> Vec<String> {
    vec![
        format!("-envoy-stats-port={STATS_PORT}"),
        "-expose-annotation-key=nodeport-proxy.k8s.io/expose-namespaced".to_owned(),
        format!("-namespace={}", target.namespace),
    ]
}

/// Returns the arguments of the updater of the load balancer of one cluster.
pub(super) fn updater(target: &Target<'_>) -> Vec<String> {
    vec![
        format!("-lb-namespace={}", target.namespace),
        "-lb-name=front-loadbalancer".to_owned(),
        "-expose-annotation-key=nodeport-proxy.k8s.io/expose-namespaced".to_owned(),
        "-namespaced=true".to_owned(),
    ]
}

/// Returns the arguments of the node tunnel.
pub(super) fn node_tunnel(target: &Target<'_>) -> Vec<String> {
    let address = &target.cluster.network.tunneling_agent_ip;
    let service = |name, port| format!("{name}.{}.svc.cluster.local:{port}", target.namespace);
    let kas = target.apiserver_port;
    let mut args = vec![
        format!(
            "--proxy={}",
            join_host_port(&target.external_name, CONNECT_PORT)
        ),
        format!(
            "--listen={}={}",
            join_host_port(address, kas),
            service("apiserver-external", 443)
        ),
    ];
    if target.cluster.tunnel == Tunnel::Openvpn {
        let service = service("openvpn-server", OPENVPN_PORT);
        let listen = join_host_port(address, OPENVPN_PORT);
        args.push(format!("--listen={listen}={service}"));
    }
    args.extend(["--if=envoyagent".to_owned(), format!("--addr={address}")]);
    args
}

/// Returns the flags of kube-apiserver that the tunnel decides about, for the `running` kube-apiserver if it is known.
pub(super) fn kube_apiserver(target: &Target<'_>, running: Option<&Apiserver>) -> Vec<String> {
    // KKP's OpenVPN mode has ExternalIP first. Our server translates both, but agents dial the requested address after a
    // switch, and a cluster may not reach the ExternalIPs of its own nodes.
    let types = match target.cluster.provider.as_str() {
        "gcp" => "InternalIP",
        _ => "InternalIP,ExternalIP",
    };
    let mut flags = vec![
        "--egress-selector-config-file=/etc/kubernetes/konnectivity/egress-selector-configuration.yaml"
            .to_owned(),
        format!("--kubelet-preferred-address-types={types}"),
    ];
    flags.extend(Tokens::new(target, running).flags());
    flags.extend([
        format!("--secure-port={}", target.apiserver_port),
        "--endpoint-reconciler-type=none".to_owned(),
        format!(
            "--service-cluster-ip-range={}",
            target.cluster.network.services.cidr_blocks.join(",")
        ),
    ]);
    flags.extend(
        target
            .address_ip
            .iter()
            .map(|ip| format!("--advertise-address={ip}")),
    );
    flags
}

/// Returns KKP's size of the packet buffers, unless KKP is too old or the user sets the size.
fn channel_size(target: &Target<'_>, user: &[String]) -> Option<String> {
    let is_set = user.iter().any(|arg| arg.starts_with("--xfr-channel-size"));
    let is_wanted = target.cluster.kkp.has_tuned_konnectivity() && !is_set;
    is_wanted.then(|| "--xfr-channel-size=150".to_owned())
}

fn texts(list: &[&str]) -> Vec<String> {
    list.iter().map(|text| (*text).to_owned()).collect()
}
