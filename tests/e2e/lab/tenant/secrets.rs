//! The certificates and Secrets of a user cluster. `culvert render` asks for those of the tunnel, and `openssl` makes
//! them from its requests.

use std::path::{Path, PathBuf};
use std::process::Command;

use base64::Engine as _;
use base64::prelude::BASE64_STANDARD;
use culvert_kit::pki::Pair;
use culvert_tests::Program;
use culvert_tests::process::outcome;
use serde_json::json;

use super::super::cluster::Cluster;
use super::super::control_plane::kubeconfig_for;
use super::super::kubectl::{Kubectl, apply_secret};
use super::super::pki::{Authority, SigningKey, signing_key};
use super::{NAMESPACE, Tenant};

/// The authorities of a user cluster, and the identities that do not change.
pub(super) struct Authorities {
    /// The authority of the cluster.
    pub(super) cluster: Authority,
    /// The authority of the OpenVPN tunnel.
    openvpn: Authority,
    front_proxy: Authority,
    tokens: SigningKey,
    /// Identity of an administrator.
    pub(super) admin: Pair,
}

impl Authorities {
    pub(super) fn create(folder: &Path) -> Self {
        let cluster = Authority::create(folder, "ca");
        Self {
            openvpn: Authority::create(folder, "openvpn-ca"),
            front_proxy: Authority::create(folder, "front-proxy-ca"),
            tokens: signing_key(folder, "tokens"),
            admin: cluster.user("admin", "admin", Some("system:masters")),
            cluster,
        }
    }

    /// Creates the Secret with the files of kube-apiserver that do not depend on its address.
    pub(super) async fn create_apiserver_files(&self, seed: &Kubectl) {
        let group = Some("system:masters");
        let kubelet_client = self.cluster.user("kubelet-client", "apiserver", group);
        let front_proxy = self.front_proxy.user("front-proxy", "front-proxy", None);
        let files = [
            ("ca.crt", &self.cluster.cert),
            ("front-proxy-ca.crt", &self.front_proxy.cert),
            ("kubelet-client.crt", &kubelet_client.cert),
            ("kubelet-client.key", &kubelet_client.key),
            ("front-proxy.crt", &front_proxy.cert),
            ("front-proxy.key", &front_proxy.key),
            ("tokens.key", &self.tokens.private),
            ("tokens.pub", &self.tokens.public),
        ];
        apply_secret(seed, NAMESPACE, "apiserver-files", &files).await;
    }

    /// Starts kube-controller-manager and kube-scheduler in the network of the seed's node.
    pub(super) fn controllers(&self, cluster: &Cluster, folder: &Path, url: &str) -> Vec<Program> {
        let kubeconfig = folder.join("controllers.kubeconfig");
        kubeconfig_for(&kubeconfig, url, &self.cluster, &self.admin);
        let common = [
            format!("--kubeconfig={}", kubeconfig.display()),
            "--leader-elect=false".to_owned(),
            "--secure-port=0".to_owned(),
        ];
        let manager = [
            format!(
                "--service-account-private-key-file={}",
                self.tokens.private.display()
            ),
            format!("--root-ca-file={}", self.cluster.cert.display()),
        ];
        let manager = [&common[..], &manager].concat();
        let program = |name: &str| cluster.lab.programs.join(name);
        let node = &cluster.lab.node;
        vec![
            node.spawn(&program("kube-controller-manager"), &manager),
            node.spawn(&program("kube-scheduler"), &common),
        ]
    }
}

impl Tenant {
    /// Issues every certificate that the rendered requests ask for, and that of kube-apiserver, and creates the Secrets.
    pub(super) async fn issue_certificates(&self) {
        let requests = ["configmap", "-n", NAMESPACE, "tunnel-certificate-requests"];
        let requests = self.seed.get(&requests).await.unwrap();
        let requests = requests["data"].as_object().cloned().unwrap_or_default();
        assert!(requests.len() >= 2, "{requests:?}");
        let service = self.service_address().await;
        let internal = format!("apiserver-external.{NAMESPACE}.svc.cluster.local");
        let exposed = &self.exposed;
        let names = [&exposed.name, &exposed.address, &service, &internal];
        let names: Vec<&str> = names.into_iter().map(String::as_str).collect();
        let pair = self.authorities.cluster.server("apiserver", &names);
        let files = [("tls.crt", &pair.cert), ("tls.key", &pair.key)];
        apply_secret(&self.seed, NAMESPACE, "apiserver-tls", &files).await;
        for (file, request) in requests {
            let secret = file.strip_suffix(".cnf").expect("a request");
            let request = request.as_str().expect("a request");
            self.issue(secret, request, &format!("https://{internal}:443"))
                .await;
        }
    }

    async fn issue(&self, secret: &str, request: &str, url: &str) {
        let ours = &self.authorities;
        let is_openvpn = secret.starts_with("openvpn-");
        let authority = if is_openvpn {
            &ours.openvpn
        } else {
            &ours.cluster
        };
        let pair = sign(&self.folder, secret, request, authority);
        let both = |cert, key| vec![(cert, &pair.cert), (key, &pair.key)];
        let kubeconfig = self.folder.join("server.kubeconfig");
        let files = match secret {
            "konnectivityproxy-tls" => {
                both("konnectivityproxy-tls.crt", "konnectivityproxy-tls.key")
            }
            "culvert-front-end" | "culvert-front-end-client" => {
                let mut files = both("tls.crt", "tls.key");
                files.push(("ca.crt", &authority.cert));
                files
            }
            "openvpn-server-certificates" => {
                let files = [("ca.crt", &authority.cert)];
                apply_secret(&self.seed, NAMESPACE, "openvpn-ca", &files).await;
                both("server.crt", "server.key")
            }
            "openvpn-client-certificates" => {
                let mut files = both("client.crt", "client.key");
                files.push(("ca.crt", &authority.cert));
                return apply_secret(&self.user, "kube-system", secret, &files).await;
            }
            "konnectivity-kubeconfig" => {
                let text = embedded(url, authority, &pair);
                std::fs::write(&kubeconfig, text).expect("a file");
                vec![("kubeconfig", &kubeconfig)]
            }
            other => panic!("unknown request {other}"),
        };
        apply_secret(&self.seed, NAMESPACE, secret, &files).await;
    }
}

/// Makes a key and a certificate from a configuration file of `openssl req`.
fn sign(folder: &Path, name: &str, request: &str, authority: &Authority) -> Pair {
    let path = |end: &str| folder.join(format!("{name}.{end}"));
    let (config, csr) = (path("cnf"), path("csr"));
    let pair = Pair {
        cert: path("crt"),
        key: path("key"),
    };
    std::fs::write(&config, request).expect("a file");
    let text = |path: &PathBuf| path.display().to_string();
    openssl(&format!(
        "req -new -newkey ec -pkeyopt ec_paramgen_curve:prime256v1 -nodes -keyout {} -config {} -out {}",
        text(&pair.key),
        text(&config),
        text(&csr)
    ));
    openssl(&format!(
        "x509 -req -days 1 -copy_extensions copyall -in {} -CA {} -CAkey {} -out {}",
        text(&csr),
        text(&authority.cert),
        text(&authority.key),
        text(&pair.cert)
    ));
    pair
}

fn openssl(words: &str) {
    let done = outcome(Command::new("openssl").args(words.split(' ')));
    done.unwrap_or_else(|why| panic!("openssl {words}: {why}"));
}

/// Returns a kubeconfig that contains its certificates.
fn embedded(url: &str, authority: &Authority, pair: &Pair) -> String {
    let data = |path| BASE64_STANDARD.encode(std::fs::read::<&PathBuf>(path).expect("a file"));
    json!({
        "apiVersion": "v1", "kind": "Config", "current-context": "tenant",
        "contexts": [{"name": "tenant", "context": {"cluster": "tenant", "user": "server"}}],
        "clusters": [{"name": "tenant", "cluster": {
            "server": url, "certificate-authority-data": data(&authority.cert),
        }}],
        "users": [{"name": "server", "user": {
            "client-certificate-data": data(&pair.cert), "client-key-data": data(&pair.key),
        }}],
    })
    .to_string()
}
