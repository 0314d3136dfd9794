//! The certificates of the listeners and the account of the Kubernetes client. The reloader follows their files.

use culvert_host::tls::reload::{ServerFiles, ServerTls};
use culvert_host::tls::{TlsError, TlsOptions};
use culvert_kube::client::client;
use culvert_native as native;
use kube::Client;

use crate::config::{AgentListener, Config, TlsFiles};
use crate::files::{Files, Reloader};

/// Loads and follows the files of the listener for agents.
pub(super) async fn agent_tls(
    reloader: &mut Reloader,
    listener: &AgentListener,
    options: &TlsOptions,
) -> anyhow::Result<ServerTls> {
    let (cert, key, ca) = (&listener.cert, &listener.key, listener.ca.as_deref());
    let set = ServerFiles::new(cert, key, ca, &[native::ALPN, b"h2"], options)?;
    let flags = "--cluster-cert and --cluster-key";
    follow(reloader, Files::Agent, set, flags).await
}

/// Loads and follows the files of a listener with mutual TLS; an error about the certificate or the key names `flags`.
pub(super) async fn mutual_tls(
    reloader: &mut Reloader,
    files: Files,
    paths: &TlsFiles,
    alpn: &[u8],
    options: &TlsOptions,
    flags: &'static str,
) -> anyhow::Result<ServerTls> {
    let set = ServerFiles::new(&paths.cert, &paths.key, Some(&paths.ca), &[alpn], options)?;
    follow(reloader, files, set, flags).await
}

async fn follow(
    reloader: &mut Reloader,
    files: Files,
    set: ServerFiles,
    flags: &'static str,
) -> anyhow::Result<ServerTls> {
    let followed = reloader.follow(files, set).await;
    followed.map_err(|error| match error {
        TlsError::Ca(_) => error.into(),
        error => anyhow::Error::new(error).context(format!("cannot use {flags}")),
    })
}

/// Returns the client for the user cluster's API; `None` if the server does not use the API.
pub(super) async fn user_cluster(
    reloader: &mut Reloader,
    config: &Config,
) -> anyhow::Result<Option<Client>> {
    let nodes = config.openvpn.as_ref();
    let nodes = nodes.and_then(|openvpn| openvpn.watch_nodes.as_deref());
    let auth = config.agent_auth.as_ref();
    let lease = config.lease.as_ref();
    if auth.is_none() && nodes.is_none() && lease.is_none() {
        return Ok(None);
    }
    // All are the value of --kubeconfig.
    let of_auth = auth.and_then(|auth| auth.kubeconfig.as_deref());
    let of_lease = lease.and_then(|lease| lease.kubeconfig.as_deref());
    let kubeconfig = of_auth.or(nodes).or(of_lease);
    client(kubeconfig, reloader, Files::Kubeconfig)
        .await
        .map(Some)
}

#[cfg(test)]
mod tests {
    #![allow(clippy::unwrap_used)]

    use culvert_host::telemetry::metrics::Registry;
    use rcgen::{CertificateParams, KeyPair};

    use super::*;

    #[tokio::test]
    async fn error_about_a_key_of_another_certificate_names_the_flags_and_the_files() {
        let dir = tempfile::tempdir().unwrap();
        let [key, other] = [(); 2].map(|()| KeyPair::generate().unwrap());
        let cert = CertificateParams::default().self_signed(&key).unwrap();
        let paths = ["tls.crt", "tls.key"].map(|name| dir.path().join(name));
        let [cert_path, key_path] = &paths;
        std::fs::write(cert_path, cert.pem()).unwrap();
        std::fs::write(key_path, other.serialize_pem()).unwrap();
        let alpn: &[&[u8]] = &[b"h2"];
        let set = ServerFiles::new(cert_path, key_path, None, alpn, &TlsOptions::default());
        let mut reloader = Reloader::new(&Registry::new(&[]).unwrap());
        let flags = "--cluster-cert and --cluster-key";
        let error = follow(&mut reloader, Files::Agent, set.unwrap(), flags).await;
        let error = error.err().map(|error| format!("{error:#}")).unwrap();
        let expected = "cannot use --cluster-cert and --cluster-key: the private key in ";
        assert!(error.starts_with(expected), "{error}");
        assert!(error.contains("tls.key does not belong"), "{error}");
    }
}
