//! A kubeconfig file as a file set: the client of its current context, and the files that the context names.

use std::path::{Path, PathBuf};

use anyhow::Context as _;
use culvert_host::file_follower::ReadError;
use culvert_host::reload::{Expiry, FileSet, Loaded};
use culvert_host::tls::{earliest_expiry, earliest_expiry_in_pem};
use k8s_openapi::ByteString;
use kube::config::{AuthInfo, Cluster, Kubeconfig};
use serde::Deserialize as _;
use serde::de::IntoDeserializer as _;
use serde::de::value::{Error as ValueError, StrDeserializer};

use super::{Access, connect, without_content};

/// The account of a kubeconfig file.
pub(super) struct Account {
    path: PathBuf,
}

impl Account {
    pub(super) fn new(path: &Path) -> Self {
        Self {
            path: path.to_owned(),
        }
    }

    /// Parses the file. Relative paths in the file become absolute.
    fn read(&self) -> anyhow::Result<Kubeconfig> {
        Kubeconfig::read_from(&self.path).map_err(without_content)
    }

    /// Creates the client. `kube` reads the files again; a change since the check is found by the next check.
    fn access(&self) -> anyhow::Result<Loaded<Access>> {
        let file = self.read()?;
        let cluster = current(&file).0.cloned();
        let config = kube::Config::try_from(file)?;
        let own = expiry(&config.auth_info);
        let ca = config.root_cert.as_deref().unwrap_or_default();
        let ca = earliest_expiry(ca.iter().map(Vec::as_slice));
        let server = config.cluster_url.clone();
        let client = connect(config, cluster.as_ref())?;
        Ok(Loaded {
            value: Access { client, server },
            expiry: Expiry { own, ca },
        })
    }
}

impl FileSet for Account {
    type Value = Access;
    type Error = anyhow::Error;

    fn paths(&self) -> Vec<PathBuf> {
        vec![self.path.clone()]
    }

    /// Returns the files of the current context. Token files are left out, because `kube` reads them again.
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
        [ca, cert, key]
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
        self.access().with_context(named)
    }
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
