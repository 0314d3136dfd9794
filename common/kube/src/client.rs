//! The client of one Kubernetes API: credentials, timeouts, and the cause of an error.

use std::path::Path;
use std::time::Duration;

use anyhow::Context as _;
use kube::Client;
use kube::config::{KubeConfigOptions, Kubeconfig};

/// How long an API may say nothing in the middle of an answer, or instead of one. A firewall or load
/// balancer that has forgotten a connection drops what is sent on it, so that nobody closes it; an
/// API server in trouble accepts what it never answers. Well above what a large list takes to begin;
/// watches are shorter than that (see [`mirror`](crate::mirror)).
pub const SILENCE: Duration = Duration::from_secs(34);

/// A client by a kubeconfig file, or by the pod's own account.
///
/// # Errors
/// When there are no credentials, or they can not be used.
pub async fn client(kubeconfig: Option<&Path>) -> anyhow::Result<Client> {
    let mut config = match kubeconfig {
        Some(path) => {
            let named = || format!("--kubeconfig {}", path.display());
            let file = Kubeconfig::read_from(path).with_context(named)?;
            let options = KubeConfigOptions::default();
            let config = kube::Config::from_custom_kubeconfig(file, &options).await;
            config.with_context(named)?
        }
        None => kube::Config::infer()
            .await
            .context("no Kubernetes account: run in a pod, or give --kubeconfig")?,
    };
    // A dot at the end keeps resolvers from searching; certificates do not have it.
    let host = config.cluster_url.host().unwrap_or_default();
    if let Some(name) = host.strip_suffix('.')
        && config.tls_server_name.is_none()
    {
        config.tls_server_name = Some(name.to_owned());
    }
    // Callers try again by themselves, and say so.
    config.default_retry = false;
    config.read_timeout = Some(SILENCE);
    // What a connection has rested before a request is not the answer's silence.
    config.reset_reader_on_write = true;
    Client::try_from(config).map_err(|error| {
        let advice = match error.to_string() {
            text if text.contains("UnsupportedCertVersion") => {
                "; its client certificate is of X.509 version 1: issue it anew with an extension, \
                 such as openssl's -extfile with extendedKeyUsage=clientAuth"
            }
            _ => "",
        };
        anyhow::anyhow!("cannot use the Kubernetes account: {error}{advice}")
    })
}

/// What is at the bottom of a client's error: the layers above only repeat that there is one.
pub fn root(error: &dyn std::error::Error) -> String {
    let mut cause = error;
    while let Some(deeper) = cause.source() {
        cause = deeper;
    }
    cause.to_string()
}
