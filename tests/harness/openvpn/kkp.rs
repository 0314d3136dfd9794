//! Command lines, files and packet filters of Kubermatic's platform, which Culvert replaces.
//!
//! Copied literally, except for file paths and for `--keysize 256`: OpenVPN 2.5 on the platform accepts this
//! option, and 2.6 rejects the option.

use std::net::Ipv4Addr;
use std::path::Path;

use super::cluster::{KUBELET, NODE_ACCESS, PODS, SERVICES};
use super::network::Namespace;
use super::pki::Pki;
use super::stock::Options;

/// The networks in the user cluster that a server routes to, in the platform's order.
const NETWORKS: [(&str, &str); 3] = [PODS, SERVICES, NODE_ACCESS];

/// Returns the options of the server's pod, and writes its files below `dir`.
///
/// # Panics
/// If a file cannot be written.
pub fn server(pki: &Pki, dir: &Path) -> Options {
    let clients = dir.join("clients");
    std::fs::create_dir_all(&clients).expect("a directory");
    let routes = NETWORKS.map(|(net, mask)| format!("iroute {net} {mask}\n"));
    std::fs::write(clients.join("user-cluster-client"), routes.concat()).expect("writing a file");
    let mut options = Options::default()
        .with("--proto tcp --dev tun --mode server --lport 1194 --server 10.20.0.0 255.255.255.0")
        .identity(&pki.ca, &pki.server)
        .with("--dh none --duplicate-cn")
        .option("--client-config-dir", clients)
        .option("--status", dir.join("openvpn-status"))
        .with("--status-version 3 --cipher AES-256-GCM --auth SHA1")
        .with("--script-security 2 --ping 5 --verb 3 --log /dev/stdout");
    for (net, mask) in NETWORKS {
        let route = format!("route {net} {mask}");
        options = options.with(&format!("--push \"{route}\" --{route}"));
    }
    options
}

/// Returns the options of the user cluster's pod, and writes its files below `dir`.
///
/// # Panics
/// If a file cannot be written.
pub fn user_cluster_client(pki: &Pki, dir: &Path, host: &str) -> Options {
    std::fs::create_dir_all(dir).expect("a directory");
    let (ca, pair) = (&pki.ca, &pki.user_cluster);
    let config = format!(
        "client
proto tcp
dev kube
dev-type tun
auth-nocache
remote {host} 1194
nobind
ca '{}'
cert '{}'
key '{}'
remote-cert-tls server
script-security 2
cipher AES-256-GCM
auth SHA1
status {}
up '/bin/sh -c \"/usr/sbin/iptables -t nat -I POSTROUTING -s 10.20.0.0/24 -j MASQUERADE\"'
log /dev/stdout
",
        ca.display(),
        pair.cert.display(),
        pair.key.display(),
        dir.join("openvpn-status").display(),
    );
    let path = dir.join("config");
    std::fs::write(&path, config).expect("writing a file");
    Options::default().option("--config", path)
}

/// Returns the options of a sidecar, which runs in the seed beside a program of the control plane, and
/// creates the directory `dir` for its files.
///
/// # Panics
/// If the directory cannot be created.
pub fn sidecar(pki: &Pki, dir: &Path, host: &str) -> Options {
    std::fs::create_dir_all(dir).expect("a directory");
    Options::default()
        .with("--client --proto tcp --dev tun --auth-nocache")
        .with(&format!("--remote {host} 1194 --nobind"))
        .with("--connect-timeout 5 --connect-retry 1")
        .identity(&pki.ca, &pki.internal)
        .with("--remote-cert-tls server --link-mtu 1432 --cipher AES-256-GCM --auth SHA1")
        .with("--script-security 2")
        .option("--status", dir.join("openvpn-status"))
        .with("--log /dev/stdout")
}

/// Sets the packet filter of the server's pod. Only tunnel clients may open connections, and only to networks
/// of the user cluster. Every client may ping the server.
pub fn filter_at_server(seed: &Namespace) {
    seed.forward();
    seed.iptables("-t nat -A POSTROUTING -o tun0 -s 10.20.0.0/24 -j MASQUERADE");
    seed.iptables("-P FORWARD DROP");
    seed.iptables("-A FORWARD -m state --state ESTABLISHED,RELATED -j ACCEPT");
    for (net, mask) in NETWORKS {
        seed.iptables(&format!(
            "-A FORWARD -i tun0 -o tun0 -s 10.20.0.0/24 -d {net}/{mask} -j ACCEPT"
        ));
    }
    seed.iptables("-A INPUT -m state --state ESTABLISHED,RELATED -j ACCEPT");
    seed.iptables("-A INPUT -i tun0 -p icmp -j ACCEPT");
    seed.iptables("-A INPUT -i tun0 -j DROP");
    seed.iptables(
        "-t mangle -A INPUT -p tcp --dport 1194 --tcp-flags SYN,RST SYN -j TCPMSS --set-mss 1300",
    );
}

/// Translates the kubelet address of each node to the node's address in the tunnel, as the platform's
/// controller does beside kube-apiserver's VPN client.
pub fn node_access_at_sidecar(sidecar: &Namespace, nodes: &[Ipv4Addr]) {
    sidecar.iptables("-t nat -N node-access-dnat");
    sidecar.iptables("-t nat -I OUTPUT -j node-access-dnat");
    sidecar.iptables("-t nat -I POSTROUTING -o tun0 -j MASQUERADE");
    for node in nodes {
        let [_, _, c, d] = node.octets();
        sidecar.iptables(&format!(
            "-t nat -A node-access-dnat -d {node}/32 -p tcp -m tcp --dport {KUBELET} -j DNAT --to-destination 10.254.{c}.{d}:{KUBELET}"
        ));
    }
}
