//! The server, the agent, and the egress selector of kube-apiserver.

use std::net::Ipv4Addr;
use std::path::{Path, PathBuf};

use culvert_tests::Program;
use culvert_tests::metrics::scrape;
use culvert_tests::process::ours;

use super::control_plane::{Credentials, token_kubeconfig};
use super::{ACCOUNT, AUDIENCE, Lab, SEED, SERVERS};

/// Port of the servers for agents.
pub(super) const AGENT_PORT: u16 = 8132;
/// Port of the servers' and the agent's health.
pub(super) const HEALTH_PORT: u16 = 8134;
/// Port of the front end with TLS.
pub(crate) const FRONT_PORT: u16 = 8090;

/// Connection between kube-apiserver and the server.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum Egress {
    /// gRPC over a Unix socket.
    GrpcUds,
    /// HTTP CONNECT over a Unix socket.
    ConnectUds,
    /// HTTP CONNECT over TCP with mutual TLS.
    ConnectTcp,
}

impl Egress {
    /// All connections, in the order of the tests.
    pub(crate) const ALL: [Self; 3] = [Self::GrpcUds, Self::ConnectUds, Self::ConnectTcp];

    /// Returns the name in the names of tests.
    pub(crate) fn name(self) -> &'static str {
        match self {
            Self::GrpcUds => "grpc_uds",
            Self::ConnectUds => "connect_uds",
            Self::ConnectTcp => "connect_tcp",
        }
    }

    /// Returns the labels `protocol` and `transport` of kube-apiserver's metrics.
    pub(crate) fn labels(self) -> [(&'static str, &'static str); 2] {
        let (protocol, transport) = match self {
            Self::GrpcUds => ("grpc", "uds"),
            Self::ConnectUds => ("http_connect", "uds"),
            Self::ConnectTcp => ("http_connect", "tcp"),
        };
        [("protocol", protocol), ("transport", transport)]
    }

    /// Returns kube-apiserver's `EgressSelectorConfiguration`.
    pub(super) fn configuration(self, dir: &Path, files: &Credentials) -> String {
        let connection = match self {
            Self::GrpcUds | Self::ConnectUds => format!(
                "proxyProtocol: {}
    transport:
      uds:
        udsName: {}",
                if self == Self::GrpcUds {
                    "GRPC"
                } else {
                    "HTTPConnect"
                },
                socket(dir, SEED).display()
            ),
            Self::ConnectTcp => format!(
                "proxyProtocol: HTTPConnect
    transport:
      tcp:
        url: https://{SERVERS}:{FRONT_PORT}
        tlsConfig:
          caBundle: {}
          clientCert: {}
          clientKey: {}",
                files.authority.cert.display(),
                files.front_end_client.cert.display(),
                files.front_end_client.key.display()
            ),
        };
        format!(
            "apiVersion: apiserver.k8s.io/v1beta1
kind: EgressSelectorConfiguration
egressSelections:
- name: cluster
  connection:
    {connection}
"
        )
    }
}

/// Options of a server beyond its front end.
pub(crate) struct ServerOptions<'a> {
    /// Address of the server.
    pub(crate) address: Ipv4Addr,
    /// Additional arguments.
    pub(crate) args: &'a [&'a str],
}

impl Default for ServerOptions<'_> {
    fn default() -> Self {
        Self {
            address: SEED,
            args: &[],
        }
    }
}

impl Lab {
    /// Starts a server. The arguments of the gRPC server are those of KKP's sidecar.
    pub(crate) fn start_server(&self, egress: Egress, options: &ServerOptions<'_>) -> Program {
        let files = &self.credentials;
        let address = options.address;
        let socket = socket(self.dir.path(), address);
        let mut args = match egress {
            Egress::GrpcUds => vec!["--mode=grpc".to_owned()],
            Egress::ConnectUds | Egress::ConnectTcp => vec!["--mode=http-connect".to_owned()],
        };
        match egress {
            Egress::GrpcUds | Egress::ConnectUds => args.extend([
                "--server-port=0".to_owned(),
                format!("--uds-name={}", socket.display()),
                "--delete-existing-uds-file=true".to_owned(),
            ]),
            Egress::ConnectTcp => args.extend([
                format!("--server-port={FRONT_PORT}"),
                format!("--server-bind-address={address}"),
                format!("--server-cert={}", files.front_end.cert.display()),
                format!("--server-key={}", files.front_end.key.display()),
                format!("--server-ca-cert={}", files.authority.cert.display()),
            ]),
        }
        args.extend([
            "--logtostderr=true".to_owned(),
            "-v=3".to_owned(),
            format!("--cluster-cert={}", files.cluster.cert.display()),
            format!("--cluster-key={}", files.cluster.key.display()),
            format!("--kubeconfig={}", files.server.display()),
            "--server-count=1".to_owned(),
            format!("--agent-port={AGENT_PORT}"),
            format!("--agent-bind-address={address}"),
            "--admin-port=8133".to_owned(),
            format!("--admin-bind-address={address}"),
            format!("--health-port={HEALTH_PORT}"),
            format!("--health-bind-address={address}"),
            "--agent-namespace=kube-system".to_owned(),
            format!("--agent-service-account={ACCOUNT}"),
            format!("--authentication-audience={AUDIENCE}"),
            "--proxy-strategies=default".to_owned(),
            "--keepalive-time=1m".to_owned(),
            "--xfr-channel-size=150".to_owned(),
        ]);
        args.extend(options.args.iter().copied().map(str::to_owned));
        Program::spawn("culvert-server", args, &[]).named(&format!("server at {address}"))
    }

    /// Starts an agent in the node's network, with the arguments of KKP's agent. Arguments in `more` win.
    pub(crate) fn start_agent(&self, token: &Path, more: &[&str]) -> Program {
        let mut args = vec![
            "--logtostderr=true".to_owned(),
            "-v=3".to_owned(),
            "--sync-forever=true".to_owned(),
            format!("--ca-cert={}", self.credentials.authority.cert.display()),
            format!("--proxy-server-host={SEED}"),
            format!("--proxy-server-port={AGENT_PORT}"),
            "--admin-server-port=8133".to_owned(),
            format!("--health-server-port={HEALTH_PORT}"),
            format!("--service-account-token-path={}", token.display()),
            "--keepalive-time=1m".to_owned(),
            "--xfr-channel-size=150".to_owned(),
        ];
        args.extend(more.iter().copied().map(str::to_owned));
        self.node.spawn(&ours("culvert-agent"), &args)
    }

    /// Writes a kubeconfig for a service account of `kube-system`.
    pub(crate) async fn account_kubeconfig(&self, account: &str) -> PathBuf {
        let token = self.token(account, "https://kubernetes.default.svc").await;
        token_kubeconfig(
            self.dir.path(),
            account,
            &self.credentials.authority,
            &token,
        )
    }
}

/// Returns the number of agents of the server at this address.
///
/// # Errors
/// If the server does not answer.
pub(crate) async fn ready_agents(server: Ipv4Addr) -> Result<f64, String> {
    let metrics = scrape((server, HEALTH_PORT).into()).await;
    let metrics = metrics.map_err(|error| format!("{error:#}"))?;
    let name = "konnectivity_network_proxy_server_ready_backend_connections";
    metrics.value(name, &[]).ok_or(format!("no {name}"))
}

/// Returns the path of a server's socket.
pub(super) fn socket(dir: &Path, server: Ipv4Addr) -> PathBuf {
    dir.join(format!("konnectivity-server-{server}.socket"))
}
