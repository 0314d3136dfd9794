//! The flags of `culvert render`.

use std::path::{Path, PathBuf};

use super::facts::{Facts, Images, NodePorts};
use super::objects::Part;
use super::plan::Side;

/// Flags of `culvert render`.
#[derive(clap::Args)]
#[command(args_override_self = true)]
pub struct Options {
    /// Cluster file: Culvert's own format, or KKP's Cluster object, in YAML or JSON; `-` is the standard input.
    #[arg(value_name = "FILE")]
    pub(super) file: PathBuf,

    /// The cluster before the change, in either format. The rules for changes apply, and not the rules for a new cluster.
    #[arg(long, value_name = "FILE")]
    pub(super) old: Option<PathBuf>,

    /// File in Culvert's own format, without spec and labels, with values that the cluster file does not have.
    #[arg(long, value_name = "FILE")]
    pub(super) facts: Option<PathBuf>,

    /// The running Deployment of kube-apiserver, in YAML or JSON. With it, the patch of the part server has all arguments of
    /// kube-apiserver, and the port of its probes.
    #[arg(long, value_name = "FILE")]
    pub(super) apiserver: Option<PathBuf>,

    /// Print only these parts; repeatable.
    #[arg(long, value_name = "PART", value_enum)]
    pub(super) part: Vec<Part>,

    /// Write files such as seed-server.yaml and user-agent.yaml into this folder, instead of the standard output. Each
    /// user cluster needs a folder of its own. Files of earlier runs are replaced; any other file of such a name is an error.
    #[arg(long, value_name = "DIR")]
    pub(super) output_dir: Option<PathBuf>,

    /// Print a migration plan instead of objects: the tunnel or the expose strategy before the migration.
    #[arg(
        long,
        value_name = "SIDE",
        value_enum,
        ignore_case = true,
        requires = "to"
    )]
    #[arg(conflicts_with_all = ["old", "apiserver", "part", "output_dir"])]
    pub(super) diff_from: Option<Side>,

    /// Tunnel or expose strategy after the migration; the values of the file must be those after the migration.
    #[arg(
        long,
        value_name = "SIDE",
        value_enum,
        ignore_case = true,
        requires = "diff_from"
    )]
    pub(super) to: Option<Side>,

    #[command(flatten)]
    values: Values,
}

/// Values that override the cluster file.
#[derive(clap::Args)]
#[command(next_help_heading = "Values that override the files")]
struct Values {
    /// Id of the cluster: its namespace in the seed is cluster-ID.
    #[arg(long, value_name = "ID")]
    cluster_id: Option<String>,

    /// Version of KKP: 2.28, 2.29, 2.30 or 2.31, the default. Decides about defaults, rules and arguments.
    #[arg(long, value_name = "VERSION")]
    kkp_version: Option<String>,

    /// Version of Kubernetes in the user cluster.
    #[arg(long, value_name = "VERSION")]
    kubernetes_version: Option<String>,

    /// Tunnel of the rendered objects: konnectivity, the default, or openvpn.
    #[arg(long, value_name = "TUNNEL")]
    tunnel: Option<String>,

    /// Public name of the API server; an address also works, except with Tunneling.
    #[arg(long, value_name = "NAME")]
    external_name: Option<String>,

    /// Public address of the API server.
    #[arg(long, value_name = "IP")]
    address_ip: Option<String>,

    /// Node port of the Service apiserver-external.
    #[arg(long, value_name = "PORT")]
    apiserver_node_port: Option<u16>,

    /// Node port of the Service konnectivity-server.
    #[arg(long, value_name = "PORT")]
    konnectivity_node_port: Option<u16>,

    /// Node port of the Service openvpn-server.
    #[arg(long, value_name = "PORT")]
    openvpn_node_port: Option<u16>,

    /// Number of API servers.
    #[arg(long, value_name = "N")]
    apiserver_replicas: Option<i32>,

    /// Network by which the OpenVPN tunnel addresses nodes; 10.254.0.0/16 by default.
    #[arg(long, value_name = "CIDR")]
    node_access_network: Option<String>,

    /// Network of nodes, for the OpenVPN client; repeatable.
    #[arg(long, value_name = "CIDR")]
    node_network: Vec<String>,

    /// Registry, with its folders, of the images without a value of their own.
    #[arg(long, value_name = "REGISTRY")]
    registry: Option<String>,

    /// Image of the server, or `stock` for Konnectivity's own image.
    #[arg(long, value_name = "IMAGE")]
    server_image: Option<String>,

    /// Image of the agent, or `stock` for Konnectivity's own image.
    #[arg(long, value_name = "IMAGE")]
    agent_image: Option<String>,

    /// Image of the front door.
    #[arg(long, value_name = "IMAGE")]
    door_image: Option<String>,

    /// Image of the node tunnel.
    #[arg(long, value_name = "IMAGE")]
    node_tunnel_image: Option<String>,

    /// Secret for the registry of the images, in the namespaces of all pods; repeatable. By default the seed's pods use
    /// KKP's Secret dockercfg, and pods of the user cluster none.
    #[arg(long, value_name = "NAME")]
    image_pull_secret: Vec<String>,
}

impl Options {
    /// Checks that the standard input is at most one of the inputs, and none of the inputs of a plan.
    ///
    /// # Errors
    /// Fails with the names of the inputs, and the remedy.
    pub(super) fn check_standard_input(&self) -> anyhow::Result<()> {
        let inputs = [
            ("FILE", Some(&self.file)),
            ("--old", self.old.as_ref()),
            ("--facts", self.facts.as_ref()),
            ("--apiserver", self.apiserver.as_ref()),
        ];
        let is_piped = |path: Option<&PathBuf>| path.is_some_and(|it| it == Path::new("-"));
        let piped = inputs.into_iter().filter(|(_, path)| is_piped(*path));
        let piped: Vec<&str> = piped.map(|(name, _)| name).collect();
        let names = piped.join(" and ");
        anyhow::ensure!(
            self.diff_from.is_none() || piped.is_empty(),
            "{names}: a migration plan cannot read the standard input, because its commands read the input again; write the \
             input into a file"
        );
        anyhow::ensure!(
            piped.len() <= 1,
            "{names}: only one input can be the standard input; write the other inputs into files"
        );
        Ok(())
    }

    /// Returns the arguments that name the input, quoted for a shell. Later flags override these.
    ///
    /// # Errors
    /// Fails if a value has a zero byte.
    pub(super) fn input_arguments(&self) -> anyhow::Result<String> {
        let path = |path: &PathBuf| path.display().to_string();
        let number = |number: Option<u16>| number.map(|number| number.to_string());
        let values = &self.values;
        let flags = [
            ("facts", self.facts.as_ref().map(path)),
            ("cluster-id", values.cluster_id.clone()),
            ("kkp-version", values.kkp_version.clone()),
            ("kubernetes-version", values.kubernetes_version.clone()),
            ("tunnel", values.tunnel.clone()),
            ("external-name", values.external_name.clone()),
            ("address-ip", values.address_ip.clone()),
            ("apiserver-node-port", number(values.apiserver_node_port)),
            (
                "konnectivity-node-port",
                number(values.konnectivity_node_port),
            ),
            ("openvpn-node-port", number(values.openvpn_node_port)),
            (
                "apiserver-replicas",
                values.apiserver_replicas.map(|count| count.to_string()),
            ),
            ("node-access-network", values.node_access_network.clone()),
            ("registry", values.registry.clone()),
            ("server-image", values.server_image.clone()),
            ("agent-image", values.agent_image.clone()),
            ("door-image", values.door_image.clone()),
            ("node-tunnel-image", values.node_tunnel_image.clone()),
        ];
        let networks = values.node_network.iter().map(|it| ("node-network", it));
        let secrets = values.image_pull_secret.iter();
        let lists = networks.chain(secrets.map(|it| ("image-pull-secret", it)));
        let lists = lists.map(|(name, value)| (name, Some(value.clone())));
        let given = flags.into_iter().chain(lists);
        let given = given.filter_map(|(name, value)| Some(format!("--{name}={}", value?)));
        let words: Vec<String> = std::iter::once(path(&self.file)).chain(given).collect();
        Ok(shlex::try_join(words.iter().map(String::as_str))?)
    }

    /// Returns the values of the flags.
    pub(super) fn facts(&self) -> Facts {
        let values = &self.values;
        Facts {
            cluster_id: values.cluster_id.clone(),
            kkp_version: values.kkp_version.clone(),
            kubernetes_version: values.kubernetes_version.clone(),
            tunnel: values.tunnel.clone(),
            external_name: values.external_name.clone(),
            address_ip: values.address_ip.clone(),
            node_ports: NodePorts {
                apiserver: values.apiserver_node_port,
                konnectivity_server: values.konnectivity_node_port,
                openvpn_server: values.openvpn_node_port,
            },
            apiserver_replicas: values.apiserver_replicas,
            node_access_network: values.node_access_network.clone(),
            node_networks: values.node_network.clone(),
            images: Images {
                server: values.server_image.clone(),
                agent: values.agent_image.clone(),
                door: values.door_image.clone(),
                node_tunnel: values.node_tunnel_image.clone(),
            },
            registry: values.registry.clone(),
            image_pull_secrets: Some(values.image_pull_secret.clone())
                .filter(|names| !names.is_empty()),
            ..Facts::default()
        }
    }
}
