//! A client for one Kubernetes API server: [`client()`] sets the credentials and timeouts, and [`root()`]
//! returns the cause of a client's error.

use std::path::Path;
use std::time::Duration;

use anyhow::Context as _;
use kube::Client;
use kube::config::{KubeConfigOptions, Kubeconfig, KubeconfigError};

/// Longest time that a Kubernetes API server may send nothing, before or within an answer. A firewall or load
/// balancer may forget a connection and drop its packets without closing the connection; an API server in
/// trouble may accept requests and never answer. The limit is well above the time that a server needs to start
/// sending a large list. Watches end sooner (see [`object_cache`](crate::object_cache)).
pub const SILENCE: Duration = Duration::from_secs(34);

/// Returns a client for a kubeconfig file, or for the pod's own account.
///
/// # Errors
/// Fails if the credentials are missing or cannot be used.
pub async fn client(kubeconfig: Option<&Path>) -> anyhow::Result<Client> {
    let mut config = match kubeconfig {
        Some(path) => {
            let named = || format!("--kubeconfig {}", path.display());
            let file = Kubeconfig::read_from(path).map_err(without_content);
            let file = file.with_context(named)?;
            let options = KubeConfigOptions::default();
            let config = kube::Config::from_custom_kubeconfig(file, &options).await;
            config.with_context(named)?
        }
        None => kube::Config::infer()
            .await
            .context("no Kubernetes account: run in a pod, or give --kubeconfig")?,
    };
    // A trailing dot in the host name keeps resolvers from trying search domains. Names in certificates have
    // no trailing dot, so the certificate is verified against the host name without the dot.
    let host = config.cluster_url.host().unwrap_or_default();
    if let Some(name) = host.strip_suffix('.')
        && config.tls_server_name.is_none()
    {
        config.tls_server_name = Some(name.to_owned());
    }
    // Callers retry, and log each failure.
    config.default_retry = false;
    config.read_timeout = Some(SILENCE);
    // Time that the connection was idle before a request must not count toward [`SILENCE`].
    config.reset_reader_on_write = true;
    Client::try_from(config).map_err(|error| {
        let advice = match error.to_string() {
            text if text.contains("UnsupportedCertVersion") => {
                "; its client certificate is of X.509 version 1: issue it again with an extension, \
                 such as openssl's -extfile with extendedKeyUsage=clientAuth"
            }
            _ => "",
        };
        anyhow::anyhow!("cannot use the Kubernetes account: {error}{advice}")
    })
}

/// Returns an error without lines of the file. The parser's text shows the lines around an error, and a token may
/// be in these lines.
fn without_content(error: KubeconfigError) -> anyhow::Error {
    let KubeconfigError::Parse(error) = error else {
        return error.into();
    };
    match error.location() {
        Some(at) => anyhow::anyhow!(
            "not a valid kubeconfig at line {}, column {}",
            at.line(),
            at.column()
        ),
        None => anyhow::anyhow!("not a valid kubeconfig"),
    }
}

/// Returns the innermost cause of a client's error. The outer layers only repeat that there was an error.
pub fn root(error: &dyn std::error::Error) -> String {
    let mut cause = error;
    while let Some(deeper) = cause.source() {
        cause = deeper;
    }
    cause.to_string()
}

#[cfg(test)]
#[allow(clippy::unwrap_used)]
mod tests {
    use super::*;

    const SECRET: &str = "c2VjcmV0LXNlY3JldC1zZWNyZXQ";

    #[tokio::test]
    async fn error_about_a_kubeconfig_does_not_show_its_secrets() {
        let dir = tempfile::tempdir().unwrap();
        let path = dir.path().join("kubeconfig");
        let head = "apiVersion: v1\nkind: Config\nusers:\n- name: u\n  user:\n";
        let rest = "clusters:\n- name: c\n  cluster:\n    server: https://127.0.0.1:1\ncontexts:\n- name: x\n  \
            context:\n    cluster: c\n    user: u\ncurrent-context: x\n";
        for user in [
            format!("    token: {SECRET}\n   bad indentation"),
            format!("    token: [{SECRET}]"),
            format!("    token: \"{SECRET}"),
            format!("    client-certificate-data: {SECRET}\n    client-key-data: {SECRET}"),
            format!("    client-certificate-data: -{SECRET}\n    client-key-data: -{SECRET}"),
        ] {
            std::fs::write(&path, format!("{head}{user}\n{rest}")).unwrap();
            let error = client(Some(&path))
                .await
                .err()
                .map(|error| format!("{error:#}"));
            let error = error.unwrap();
            assert!(
                error.contains("kubeconfig") || error.contains("account"),
                "{error}"
            );
            assert!(!error.contains(&SECRET[..8]), "{error}");
        }
    }
}
