//! The command lines, files and packet filters of the platform that is taken over from, Kubermatic's.
//!
//! Word for word but for `--keysize 256`, which its OpenVPN 2.5 takes and 2.6 refuses to know, and for
//! where files lie.

use std::net::Ipv4Addr;
use std::path::Path;

use super::cluster::{KUBELET, NODE_ACCESS, PODS, SERVICES};
use super::network::Namespace;
use super::pki::Pki;
use super::stock::Options;

/// The networks that a server leads into the user cluster, in the platform's order.
const NETWORKS: [(&str, &str); 3] = [PODS, SERVICES, NODE_ACCESS];

/// What the server's pod starts, with its files below `dir`.
///
/// # Panics
/// When files cannot be written.
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

/// What the user cluster's pod starts, with its files below `dir`.
///
/// # Panics
/// When files cannot be written.
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

/// What a pod of the seed starts beside a control plane's program, with its files below `dir`.
///
/// # Panics
/// When files cannot be written.
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

/// What the server's pod does to packets: only its clients of the seed open connections, and only to
/// the user cluster; anyone may ping it.
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

/// What a controller does to packets beside kube-apiserver's VPN client: a node's kubelet has another address in
/// the tunnel.
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
