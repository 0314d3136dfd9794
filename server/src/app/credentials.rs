//! The certificates of the listeners and the account of the Kubernetes client. The reloader follows their files.

use culvert_host::tls::reload::{ServerFiles, ServerTls};
use culvert_host::tls::{TlsError, TlsOptions};
use culvert_kube::client::client;
use culvert_native as native;
use kube::Client;

use crate::config::{AgentListener, Config, TlsFiles};
use crate::files::{Files, Reloader};

/// Loads and follows the files of the listener for agents.
pub(super) fn agent_tls(
    reloader: &mut Reloader,
    listener: &AgentListener,
    options: &TlsOptions,
) -> anyhow::Result<ServerTls> {
    let (cert, key, ca) = (&listener.cert, &listener.key, listener.ca.as_deref());
    let set = ServerFiles::new(cert, key, ca, &[native::ALPN, b"h2"], options)?;
    let advice = "agents connect over TLS: give --cluster-cert and --cluster-key";
    follow(reloader, Files::Agent, set, advice)
}

/// Loads and follows the files of a listener with mutual TLS; `advice` explains a certificate or key that cannot
/// be used.
pub(super) fn mutual_tls(
    reloader: &mut Reloader,
    files: Files,
    paths: &TlsFiles,
    alpn: &[u8],
    options: &TlsOptions,
    advice: &'static str,
) -> anyhow::Result<ServerTls> {
    let set = ServerFiles::new(&paths.cert, &paths.key, Some(&paths.ca), &[alpn], options)?;
    follow(reloader, files, set, advice)
}

fn follow(
    reloader: &mut Reloader,
    files: Files,
    set: ServerFiles,
    advice: &'static str,
) -> anyhow::Result<ServerTls> {
    reloader.follow(files, set).map_err(|error| match error {
        TlsError::Ca(_) => error.into(),
        error => anyhow::Error::new(error).context(advice),
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
