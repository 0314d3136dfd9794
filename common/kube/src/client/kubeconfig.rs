//! A kubeconfig file as a file set: the client of its current context, and the files that the context names.

use std::path::{Path, PathBuf};
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};

use anyhow::Context as _;
use culvert_host::file_follower::ReadError;
use culvert_host::reload::{Expiry, FileSet, Loaded};
use culvert_host::tls::{earliest_expiry, earliest_expiry_in_pem};
use http::HeaderValue;
use k8s_openapi::ByteString;
use kube::config::{AuthInfo, Cluster, Kubeconfig};
use secrecy::ExposeSecret as _;
use serde::Deserialize as _;
use serde::de::IntoDeserializer as _;
use serde::de::value::{Error as ValueError, StrDeserializer};

use super::{Access, connect, plugin, without_content};

/// The account of a kubeconfig file.
pub(super) struct Account {
    path: PathBuf,
    /// End of the validity of a credential plugin's credentials, in Unix seconds; `None` without a plugin or a limit.
    valid_until: Option<i64>,
    /// As in [`Access`].
    refused: Option<Arc<AtomicBool>>,
}

impl Account {
    pub(super) fn new(path: &Path) -> Self {
        Self {
            path: path.to_owned(),
            valid_until: None,
            refused: None,
        }
    }

    /// Parses the file. Relative paths in the file become absolute. An empty value counts as missing, as in client-go.
    fn read(&self) -> anyhow::Result<Kubeconfig> {
        let mut file = Kubeconfig::read_from(&self.path).map_err(without_content)?;
        // An empty path has become the path of the folder.
        let folder = self.path.parent().map(|folder| folder.join(""));
        let is_empty =
            |path: &mut String| path.is_empty() || folder.as_deref() == Some(path.as_ref());
        let clusters = file.clusters.iter_mut();
        for cluster in clusters.filter_map(|named| named.cluster.as_mut()) {
            let data = &mut cluster.certificate_authority_data;
            data.take_if(|data| data.is_empty());
            cluster.certificate_authority.take_if(is_empty);
        }
        let users = file.auth_infos.iter_mut();
        for user in users.filter_map(|named| named.auth_info.as_mut()) {
            let data = &mut user.client_certificate_data;
            data.take_if(|data| data.is_empty());
            user.client_certificate.take_if(is_empty);
            user.client_key.take_if(is_empty);
            user.token_file.take_if(is_empty);
            for secret in [&mut user.client_key_data, &mut user.token] {
                secret.take_if(|secret| secret.expose_secret().is_empty());
            }
        }
        Ok(file)
    }

    /// Creates the client. `kube` reads the files again; a change since the check is found by the next check.
    fn access(&self) -> anyhow::Result<Loaded<Access>> {
        let file = self.read()?;
        let cluster = current(&file).0.cloned();
        let mut config = kube::Config::try_from(file).map_err(without_content)?;
        anyhow::ensure!(
            config.root_cert.as_ref().is_none_or(|ca| !ca.is_empty()),
            "the certificate authority has no certificate; expected PEM with -----BEGIN CERTIFICATE-----"
        );
        let own = expiry(&config.auth_info);
        let plugin = plugin::take(&mut config.auth_info);
        let valid_until = match &plugin {
            Some(plugin) => plugin::run(plugin, &mut config.auth_info)?,
            None => None,
        };
        use_token_file(&mut config.auth_info)?;
        check_provider(&config.auth_info)?;
        let ca = config.root_cert.as_deref().unwrap_or_default();
        let ca = earliest_expiry(ca.iter().map(Vec::as_slice));
        let server = config.cluster_url.clone();
        let refused = plugin.map(|_| Arc::default());
        let client = connect(config, cluster.as_ref())?.with_valid_until(valid_until);
        Ok(Loaded {
            value: Access {
                client,
                server,
                refused,
            },
            doubts: Vec::new(),
            expiry: Expiry {
                own,
                ca,
                ..Expiry::default()
            },
        })
    }
}

impl FileSet for Account {
    type Value = Access;
    type Error = anyhow::Error;

    fn paths(&self) -> Vec<PathBuf> {
        vec![self.path.clone()]
    }

    /// Returns the files of the current context.
    fn references(&self, _first: &[u8]) -> Vec<PathBuf> {
        let Ok(file) = self.read() else {
            return Vec::new();
        };
        let (cluster, user) = current(&file);
        let ca = cluster
            .filter(|cluster| cluster.certificate_authority_data.is_none())
            .and_then(|cluster| cluster.certificate_authority.as_ref());
        let cert = user
            .filter(|user| user.client_certificate_data.is_none())
            .and_then(|user| user.client_certificate.as_ref());
        let key = user
            .filter(|user| user.client_key_data.is_none())
            .and_then(|user| user.client_key.as_ref());
        let token = user.and_then(|user| user.token_file.as_ref());
        [ca, cert, key, token]
            .into_iter()
            .flatten()
            .map(PathBuf::from)
            .collect()
    }

    fn unreadable(&self, error: ReadError) -> anyhow::Error {
        let named = format!("--kubeconfig {}", self.path.display());
        anyhow::Error::new(error).context(named)
    }

    fn load(&mut self, _contents: &[Vec<u8>]) -> anyhow::Result<Loaded<Access>> {
        let named = || format!("--kubeconfig {}", self.path.display());
        let loaded = self.access().with_context(named)?;
        let valid_until = loaded.value.client.valid_until();
        self.valid_until = valid_until.as_ref().map(|until| until.as_second());
        self.refused = loaded.value.refused.clone();
        Ok(loaded)
    }

    /// Credentials have expired once the API has refused them. The plugin runs again, as in client-go (`maybeRefreshCreds` in
    /// `plugin/pkg/client/auth/exec/exec.go`).
    fn valid_until(&self) -> Option<i64> {
        let refused = self.refused.as_ref();
        match refused.is_some_and(|refused| refused.load(Ordering::Relaxed)) {
            true => Some(0),
            false => self.valid_until,
        }
    }
}

/// Replaces the token of a user by the content of the token file, as in client-go, and removes white space around the
/// token. `kube` would use the token before the file, would keep a newline, and would ignore a file that it cannot read.
///
/// # Errors
/// Fails if the file cannot be read, or if an HTTP header cannot have the token.
fn use_token_file(user: &mut AuthInfo) -> anyhow::Result<()> {
    let mut origin = "the token".to_owned();
    if let Some(path) = user.token_file.take() {
        let text = std::fs::read_to_string(&path).with_context(|| format!("cannot read {path}"))?;
        user.token = Some(text.into());
        origin = format!("the token in {path}");
    }
    let Some(token) = &user.token else {
        return Ok(());
    };
    let token = token.expose_secret().trim();
    anyhow::ensure!(!token.is_empty(), "{origin} is empty");
    check_token(token, &origin)?;
    user.token = Some(token.to_owned().into());
    Ok(())
}

/// Checks that an HTTP header can have a token. `kube` panics otherwise.
fn check_token(token: &str, origin: &str) -> anyhow::Result<()> {
    anyhow::ensure!(
        HeaderValue::try_from(token).is_ok(),
        "{origin} has control characters, such as a line break: write the token on one line"
    );
    Ok(())
}

/// Checks the `auth-provider` of a user. `kube` would run the command of the provider `gcp`, which client-go has removed.
fn check_provider(user: &AuthInfo) -> anyhow::Result<()> {
    let Some(provider) = &user.auth_provider else {
        return Ok(());
    };
    anyhow::ensure!(
        provider.name != "gcp",
        "the auth-provider gcp is not supported: use gke-gcloud-auth-plugin with exec"
    );
    let token = provider.config.get("id-token");
    check_token(
        token.map_or("", String::as_str),
        "the id-token of the auth-provider",
    )
}

/// Returns the cluster and the user of the current context.
fn current(file: &Kubeconfig) -> (Option<&Cluster>, Option<&AuthInfo>) {
    let name = file.current_context.as_ref();
    let context = file.contexts.iter().find(|named| Some(&named.name) == name);
    let Some(context) = context.and_then(|named| named.context.as_ref()) else {
        return (None, None);
    };
    let mut clusters = file.clusters.iter();
    let cluster = clusters.find(|named| named.name == context.cluster);
    let mut users = file.auth_infos.iter();
    let user = users.find(|named| Some(&named.name) == context.user.as_ref());
    (
        cluster.and_then(|named| named.cluster.as_ref()),
        user.and_then(|named| named.auth_info.as_ref()),
    )
}

/// Returns the expiry of a user's client certificate; `None` if the user has none.
fn expiry(user: &AuthInfo) -> Option<i64> {
    let pem = match (&user.client_certificate_data, &user.client_certificate) {
        (Some(data), _) => {
            let data: StrDeserializer<'_, ValueError> = data.as_str().into_deserializer();
            ByteString::deserialize(data).ok()?.0
        }
        (None, Some(path)) => std::fs::read(path).ok()?,
        (None, None) => return None,
    };
    earliest_expiry_in_pem(&pem)
}
