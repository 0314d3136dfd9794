//! etcd, kube-apiserver, and the files of their identities.

use std::path::{Path, PathBuf};

use culvert_kit::pki::Pair;
use culvert_tests::Program;

use super::pki::{Authority, SigningKey, signing_key};
use super::{SECOND_SEED, SEED, SERVERS, SERVICES, SERVICES_IPV6};

/// Port of kube-apiserver.
const PORT: u16 = 6443;
/// Client URL of etcd.
const ETCD: &str = "http://127.0.0.1:2379";
/// Port of etcd for the control planes of user clusters, at the address of the seed.
pub(super) const ETCD_PORT: u16 = 2379;

/// Files of every identity.
pub(super) struct Credentials {
    /// The authority of the cluster.
    pub(super) authority: Authority,
    /// The authority of the identity that kube-apiserver presents to aggregated APIs.
    pub(super) front_proxy_authority: Authority,
    /// Certificate of kube-apiserver.
    pub(super) apiserver: Pair,
    /// Identity of kube-apiserver for kubelets.
    pub(super) kubelet_client: Pair,
    /// Identity of kube-apiserver for aggregated APIs.
    pub(super) front_proxy: Pair,
    /// Key that signs tokens of service accounts.
    pub(super) tokens: SigningKey,
    /// Certificate of the servers, for agents.
    pub(super) cluster: Pair,
    /// Certificate of the servers, for kube-apiserver.
    pub(super) front_end: Pair,
    /// Identity of kube-apiserver for the servers.
    pub(super) front_end_client: Pair,
    /// Certificate of the far side.
    pub(super) far_side: Pair,
    /// Kubeconfig of a cluster administrator.
    pub(super) admin: PathBuf,
    /// Kubeconfig of the servers.
    pub(super) server: PathBuf,
}

impl Credentials {
    /// Creates all files in `dir`.
    pub(super) fn create(dir: &Path) -> Self {
        let authority = Authority::create(dir, "ca");
        let front_proxy_authority = Authority::create(dir, "front-proxy-ca");
        let seed = SEED.to_string();
        let second = SECOND_SEED.to_string();
        let names = [&seed, "127.0.0.1", "10.240.16.1", "kubernetes.default.svc"];
        let user = |file, name, group| {
            let pair = authority.user(file, name, group);
            kubeconfig(dir, file, &authority, &pair)
        };
        Self {
            apiserver: authority.server("apiserver", &names),
            kubelet_client: authority.user("kubelet-client", "apiserver", Some("system:masters")),
            front_proxy: front_proxy_authority.user("front-proxy", "front-proxy", None),
            tokens: signing_key(dir, "tokens"),
            cluster: cluster_certificate(&authority),
            front_end: authority.server("front-end", &[&seed, &second, SERVERS]),
            front_end_client: authority.user("front-end-client", "apiserver", None),
            far_side: authority.server("far-side", &["far-side.default.svc"]),
            admin: user("admin", "admin", Some("system:masters")),
            server: user("server", "system:konnectivity-server", None),
            authority,
            front_proxy_authority,
        }
    }
}

/// Issues the certificate of the servers, for agents. A later call replaces the files.
pub(super) fn cluster_certificate(authority: &Authority) -> Pair {
    let addresses = [SEED, SECOND_SEED].map(|address| address.to_string());
    authority.server("cluster", &[&addresses[0], &addresses[1], SERVERS])
}

/// URL of the seed's kube-apiserver.
pub(super) fn url() -> String {
    format!("https://{SEED}:{PORT}")
}

/// Writes a kubeconfig with a client certificate.
pub(super) fn kubeconfig(dir: &Path, name: &str, authority: &Authority, pair: &Pair) -> PathBuf {
    let path = dir.join(format!("{name}.kubeconfig"));
    write_kubeconfig(&path, &url(), authority, &certificate(pair));
    path
}

/// Writes a kubeconfig with a client certificate, for the API server at `url`.
pub(super) fn kubeconfig_for(path: &Path, url: &str, authority: &Authority, pair: &Pair) {
    write_kubeconfig(path, url, authority, &certificate(pair));
}

fn certificate(pair: &Pair) -> String {
    format!(
        "client-certificate: {}, client-key: {}",
        pair.cert.display(),
        pair.key.display()
    )
}

/// Writes a kubeconfig with a token.
pub(super) fn token_kubeconfig(
    dir: &Path,
    name: &str,
    authority: &Authority,
    token: &Path,
) -> PathBuf {
    let user = format!("tokenFile: {}", token.display());
    let path = dir.join(format!("{name}.kubeconfig"));
    write_kubeconfig(&path, &url(), authority, &user);
    path
}

fn write_kubeconfig(path: &Path, url: &str, authority: &Authority, user: &str) {
    let authority = authority.cert.display();
    let text = format!(
        "apiVersion: v1
kind: Config
current-context: lab
contexts: [{{name: lab, context: {{cluster: lab, user: lab}}}}]
clusters: [{{name: lab, cluster: {{server: '{url}', certificate-authority: {authority}}}}}]
users: [{{name: lab, user: {{{user}}}}}]
"
    );
    std::fs::write(path, text).expect("a kubeconfig");
}

/// Starts etcd with its data in `dir`.
pub(super) fn etcd(dir: &Path) -> Program {
    let args = [
        format!("--data-dir={}", dir.join("etcd").display()),
        format!("--listen-client-urls={ETCD},http://{SEED}:{ETCD_PORT}"),
        format!("--advertise-client-urls={ETCD}"),
        "--listen-peer-urls=http://127.0.0.1:2380".to_owned(),
        "--unsafe-no-fsync".to_owned(),
        "--logger=zap".to_owned(),
        "--log-level=warn".to_owned(),
    ];
    Program::spawn("/usr/bin/etcd", args, &[])
}

/// Returns the arguments of kube-apiserver, without the egress selector.
pub(super) fn apiserver(dir: &Path, files: &Credentials) -> Vec<String> {
    let pair = |cert: &str, key: &str, pair: &Pair| {
        [
            format!("--{cert}={}", pair.cert.display()),
            format!("--{key}={}", pair.key.display()),
        ]
    };
    let mut args = vec![
        format!("--etcd-servers={ETCD}"),
        format!("--secure-port={PORT}"),
        format!("--advertise-address={SEED}"),
        "--bind-address=0.0.0.0".to_owned(),
        format!("--cert-dir={}", dir.display()),
        format!("--service-cluster-ip-range={SERVICES},{SERVICES_IPV6}"),
        format!("--client-ca-file={}", files.authority.cert.display()),
        format!(
            "--kubelet-certificate-authority={}",
            files.authority.cert.display()
        ),
        "--kubelet-preferred-address-types=InternalIP".to_owned(),
        "--service-account-issuer=https://kubernetes.default.svc".to_owned(),
        format!(
            "--service-account-key-file={}",
            files.tokens.public.display()
        ),
        format!(
            "--service-account-signing-key-file={}",
            files.tokens.private.display()
        ),
        format!(
            "--api-audiences=https://kubernetes.default.svc,{}",
            super::AUDIENCE
        ),
        "--authorization-mode=Node,RBAC".to_owned(),
        "--allow-privileged=true".to_owned(),
        format!(
            "--requestheader-client-ca-file={}",
            files.front_proxy_authority.cert.display()
        ),
        "--requestheader-allowed-names=front-proxy".to_owned(),
        "--requestheader-username-headers=X-Remote-User".to_owned(),
        "--requestheader-group-headers=X-Remote-Group".to_owned(),
        "--requestheader-extra-headers-prefix=X-Remote-Extra-".to_owned(),
        // Dials for webhooks and aggregated APIs go to the addresses of endpoints.
        "--enable-aggregator-routing=true".to_owned(),
        "--shutdown-delay-duration=0s".to_owned(),
    ];
    args.extend(pair(
        "tls-cert-file",
        "tls-private-key-file",
        &files.apiserver,
    ));
    args.extend(pair(
        "kubelet-client-certificate",
        "kubelet-client-key",
        &files.kubelet_client,
    ));
    args.extend(pair(
        "proxy-client-cert-file",
        "proxy-client-key-file",
        &files.front_proxy,
    ));
    args
}
