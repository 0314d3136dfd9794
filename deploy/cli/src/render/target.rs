//! The values of a rendered cluster: names, addresses, ports, images. Values that are missing are errors.

use std::net::IpAddr;

use ipnet::IpNet;

use super::cluster::{Cluster, Tunnel};
use super::facts::{Facts, TUNNELING_PORT};
use super::finding::{Findings, Problem};
use super::kkp::minor_version;
use super::reference;

/// Port of the OpenVPN server.
pub(super) const OPENVPN_PORT: u16 = 1194;
/// Interval of keepalives without `keepaliveTime`.
const KEEPALIVE: &str = "1m";

/// Value of an image that selects Konnectivity's own image.
const STOCK: &str = "stock";
/// Part of the names of Konnectivity's own images.
const STOCK_REPOSITORY: &str = "kas-network-proxy";

/// A program of the rendered objects.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Program {
    Server,
    Agent,
    Door,
    NodeTunnel,
}

/// A cluster whose values are complete.
pub(super) struct Target<'a> {
    pub(super) cluster: &'a Cluster,
    /// Namespace of the cluster in the seed.
    pub(super) namespace: String,
    pub(super) external_name: String,
    /// Public address of the API server; may be missing with Tunneling.
    pub(super) address_ip: Option<String>,
    pub(super) apiserver_port: u16,
    /// Host and port of the servers, as agents reach them.
    pub(super) konnectivity: (String, u16),
    /// Host and port of the OpenVPN server, as its clients reach it.
    pub(super) openvpn: (String, u16),
}

impl<'a> Target<'a> {
    /// Collects the values, and reports each missing one.
    pub(super) fn new(cluster: &'a Cluster, findings: &mut Findings) -> Self {
        let facts = cluster.facts();
        let text = |findings: &mut Findings, value: &Option<String>, path: &str, flag: &str| {
            if value.is_none() {
                missing(findings, path, flag);
            }
            value.clone().unwrap_or_default()
        };
        let id = text(findings, &facts.cluster_id, "clusterID", "cluster-id");
        let name = text(
            findings,
            &facts.external_name,
            "externalName",
            "external-name",
        );
        if let Some(id) = facts.cluster_id.as_ref().filter(|id| !is_label(id)) {
            let reason = "is not the id of a cluster: use lower-case letters, digits and dashes, such as abc123";
            findings.error(Problem::invalid("clusterID", id, reason));
        }
        if let Some(name) = facts.external_name.as_ref().filter(|name| !is_host(name)) {
            let reason = "is neither a name nor an address; leave out scheme, port and path";
            findings.error(Problem::invalid("externalName", name, reason));
        }
        let is_tunneling = cluster.is_tunneling();
        if is_tunneling && name.parse::<IpAddr>().is_ok() {
            let reason = "is an address; with the strategy Tunneling, agents use the name konnectivity-server.<externalName>, so set a DNS name";
            findings.error(Problem::invalid("externalName", &name, reason));
        }
        if !is_tunneling {
            text(findings, &facts.address_ip, "addressIP", "address-ip");
        }
        if cluster.spec.version.is_none() {
            missing(findings, "kubernetesVersion", "kubernetes-version");
        }
        let ports = &facts.node_ports;
        let port = |findings: &mut Findings, value: Option<u16>, path: &str, flag: &str| {
            if value.is_none() && !is_tunneling {
                missing(findings, path, flag);
            }
            value.unwrap_or_default()
        };
        let path = "nodePorts.apiserver";
        let apiserver = port(findings, ports.apiserver, path, "apiserver-node-port");
        let mut konnectivity = ports.konnectivity_server.unwrap_or_default();
        let mut openvpn = ports.openvpn_server.unwrap_or_default();
        match cluster.tunnel {
            Tunnel::Konnectivity => {
                let path = "nodePorts.konnectivityServer";
                konnectivity = port(
                    findings,
                    ports.konnectivity_server,
                    path,
                    "konnectivity-node-port",
                );
            }
            Tunnel::Openvpn => {
                let path = "nodePorts.openvpnServer";
                openvpn = port(findings, ports.openvpn_server, path, "openvpn-node-port");
                if facts.node_networks.is_empty() {
                    missing(findings, "nodeNetworks", "node-network");
                }
                let images = &facts.images;
                if let Some(image) = images
                    .server
                    .as_deref()
                    .filter(|it| name_of(it) == "culvert-server")
                {
                    let reason = "the image has no `culvert switch`; with OpenVPN, set the image culvert, which has all programs";
                    findings.error(Problem::invalid("images.server", image, reason));
                }
                for (path, image) in [
                    ("images.server", &images.server),
                    ("images.agent", &images.agent),
                ] {
                    if image.as_deref() == Some(STOCK) {
                        let reason = "Konnectivity's own programs have no OpenVPN tunnel; leave the value out";
                        findings.error(Problem::invalid(path, STOCK, reason));
                    }
                }
            }
        }
        let (konnectivity, openvpn) = match is_tunneling {
            true => (
                (format!("konnectivity-server.{name}"), TUNNELING_PORT),
                (cluster.network.tunneling_agent_ip.clone(), OPENVPN_PORT),
            ),
            false => ((name.clone(), konnectivity), (name.clone(), openvpn)),
        };
        let address = facts.address_ip.as_ref();
        if let Some(address) = address.filter(|text| text.parse::<IpAddr>().is_err()) {
            let reason = "is not an IP address";
            findings.error(Problem::invalid("addressIP", address, reason));
        }
        check_images(facts, findings);
        let target = Self {
            cluster,
            namespace: format!("cluster-{id}"),
            external_name: name,
            address_ip: facts.address_ip.clone(),
            apiserver_port: if is_tunneling {
                TUNNELING_PORT
            } else {
                apiserver
            },
            konnectivity,
            openvpn,
        };
        let images: Vec<String> = target.programs().map(|it| target.image(it)).collect();
        if let Some(image) = images.iter().find(|image| !reference::has_host(image)) {
            let reason = format!(
                "{image} has no host of a registry, so nodes pull it from docker.io; set registry or images with a host, such as \
                 registry.example.com/culvert"
            );
            findings.warn("registry", &facts.registry, reason);
        }
        target
    }

    /// Returns the programs of the rendered objects.
    fn programs(&self) -> impl Iterator<Item = Program> {
        let strategy = self.cluster.spec.expose_strategy.as_str();
        let more = match strategy {
            "LoadBalancer" => Some(Program::Door),
            "Tunneling" => Some(Program::NodeTunnel),
            _ => None,
        };
        [Program::Server, Program::Agent].into_iter().chain(more)
    }

    /// Returns true if the seed has a NetworkPolicy for the egress of kube-apiserver.
    pub(super) fn has_seed_policy(&self) -> bool {
        self.cluster.spec.features.get("apiserverNetworkPolicy") != Some(&false)
    }

    /// Returns true if the user cluster has a NetworkPolicy for the agents or the OpenVPN client.
    pub(super) fn has_user_policy(&self) -> bool {
        self.cluster.spec.features.get("kubeSystemNetworkPolicies") == Some(&true)
    }

    /// Returns the image of a program.
    pub(super) fn image(&self, program: Program) -> String {
        image(self.cluster, program)
    }

    /// Returns true if the server or the agent is Konnectivity's own, which knows fewer flags.
    pub(super) fn is_stock(&self, program: Program) -> bool {
        is_stock(self.cluster, program)
    }

    pub(super) fn keepalive(&self) -> &str {
        let time = &self.cluster.spec.components_override.konnectivity_proxy;
        match time.keepalive_time.as_str() {
            "" => KEEPALIVE,
            time => time,
        }
    }

    /// Returns the external name if it is an address.
    pub(super) fn external_address(&self) -> Option<IpAddr> {
        self.external_name.parse().ok()
    }

    /// Returns the first address of the services: the address of the Service `kubernetes`.
    pub(super) fn first_service_ip(&self) -> Option<IpAddr> {
        let block = self.cluster.network.services.cidr_blocks.first()?;
        let net: IpNet = block.parse().ok()?;
        net.hosts().next()
    }

    /// Returns the network by which the OpenVPN tunnel addresses nodes.
    pub(super) fn node_access_network(&self) -> String {
        without_host_bits(&self.cluster.node_access_network)
    }

    /// Returns the networks behind the tunnel that the OpenVPN server routes: pods, services, node access.
    pub(super) fn openvpn_routes(&self) -> Vec<String> {
        let network = &self.cluster.network;
        let first = |blocks: &[String]| blocks.first().map(|block| without_host_bits(block));
        let pods = first(&network.pods.cidr_blocks);
        let services = first(&network.services.cidr_blocks);
        [pods, services, Some(self.node_access_network())]
            .into_iter()
            .flatten()
            .collect()
    }
}

/// Returns the image of a program. `deploy/images` uses the same default names and tags.
pub(super) fn image(cluster: &Cluster, program: Program) -> String {
    let facts = cluster.facts();
    let images = &facts.images;
    // A server with both tunnels needs `culvert switch` in its image.
    let server = match cluster.tunnel {
        Tunnel::Konnectivity => "culvert-server",
        Tunnel::Openvpn => "culvert",
    };
    let (given, own, stock) = match program {
        Program::Server => (&images.server, server, Some("proxy-server")),
        Program::Agent => (&images.agent, "culvert-agent", Some("proxy-agent")),
        Program::Door => (&images.door, "culvert-door", None),
        Program::NodeTunnel => (&images.node_tunnel, "culvert-node-tunnel", None),
    };
    match (given.as_deref(), stock) {
        (Some(STOCK), Some(stock)) => {
            let minor = cluster.kubernetes_minor.unwrap_or_default();
            let version = cluster.kkp.konnectivity_version(minor);
            format!("registry.k8s.io/{STOCK_REPOSITORY}/{stock}:{version}")
        }
        (Some(image), _) => image.to_owned(),
        (None, _) => {
            let registry = facts.registry.as_deref().map(|it| it.trim_end_matches('/'));
            let folder = registry.map(|it| format!("{it}/")).unwrap_or_default();
            format!("{folder}{own}:v{}", env!("CARGO_PKG_VERSION"))
        }
    }
}

/// Returns true if the server or the agent is Konnectivity's own, which knows fewer flags.
pub(super) fn is_stock(cluster: &Cluster, program: Program) -> bool {
    let image = image(cluster, program);
    let name = name_of(&image);
    image.contains(STOCK_REPOSITORY)
        || name.starts_with("proxy-agent")
        || name.starts_with("proxy-server")
}

/// Returns major and minor of the version in an image's tag; `None` for other tags, and for a digest alone.
pub(super) fn version_of(image: &str) -> Option<(u32, u32)> {
    let name = image.rsplit('/').next()?;
    let (_, tag) = name.split('@').next()?.split_once(':')?;
    minor_version(tag)
}

/// Returns a network without host bits. KKP accepts host bits, and the OpenVPN server refuses them.
fn without_host_bits(block: &str) -> String {
    let network: Result<IpNet, _> = block.parse();
    network.map_or_else(|_| block.to_owned(), |network| network.trunc().to_string())
}

/// Reports a registry and images that no node can pull.
fn check_images(facts: &Facts, findings: &mut Findings) {
    let images = &facts.images;
    for (path, flag, value) in [
        ("registry", "registry", &facts.registry),
        ("images.server", "server-image", &images.server),
        ("images.agent", "agent-image", &images.agent),
        ("images.door", "door-image", &images.door),
        (
            "images.nodeTunnel",
            "node-tunnel-image",
            &images.node_tunnel,
        ),
    ] {
        let Some(value) = value else {
            continue;
        };
        let is_permitted = |c: char| c.is_ascii_alphanumeric() || "._-/:@[]".contains(c);
        let is_name = !value.is_empty()
            && !value.starts_with('/')
            && !value.contains("//")
            && value.chars().all(is_permitted);
        if !is_name {
            let reason = "is not the name of a registry or an image; set it without a scheme, such as registry.example.com/culvert, or leave it out";
            findings.error(Problem::invalid(path, value, reason));
            continue;
        }
        let checked = match path {
            "registry" => reference::check_registry(value),
            _ => reference::check_image(value),
        };
        if let Err(why) = checked {
            let reason = format!("{why}; correct it in the cluster file or with --{flag}");
            findings.error(Problem::invalid(path, value, reason));
        }
    }
}

/// Returns true for a label of RFC 1123 that fits behind `cluster-` in the name of a namespace.
fn is_label(text: &str) -> bool {
    let is_permitted = |c: char| c.is_ascii_lowercase() || c.is_ascii_digit() || c == '-';
    let fits = !text.is_empty() && text.len() <= 63 - "cluster-".len();
    fits && text.chars().all(is_permitted) && !text.starts_with('-') && !text.ends_with('-')
}

/// Returns true for an address or a host name.
fn is_host(text: &str) -> bool {
    let is_permitted = |c: char| c.is_ascii_alphanumeric() || c == '-' || c == '.';
    let is_name = !text.is_empty() && text.len() <= 253 && text.chars().all(is_permitted);
    is_name || text.parse::<IpAddr>().is_ok()
}

fn missing(findings: &mut Findings, path: &str, flag: &str) {
    let reason = format!("set it in the cluster file or with --{flag}");
    findings.error(Problem::required(path, reason));
}

/// Returns the name of an image without registry, folders, tag and digest.
fn name_of(image: &str) -> &str {
    let name = image.rsplit('/').next().unwrap_or_default();
    name.split([':', '@']).next().unwrap_or_default()
}
