//! Key material from files or from inline blocks of a configuration. Every error names the origin of the
//! material and the remedy.

use std::io::Read as _;
use std::path::PathBuf;
use std::time::Duration;

use culvert_host::file_follower::ReadError;
use culvert_host::reload::Expiry;
use culvert_host::tls::{earliest_crl_expiry_in_pem, earliest_expiry_in_pem, leaf_expiry_in_pem};
use culvert_openvpn::cipher::Digest;
use culvert_openvpn::tls::{ClientTls, ConfigError, Identity, MinVersion, ServerCheck, ServerTls};
use culvert_openvpn::wrap::{WrapKey, static_key};
use culvert_openvpn::{Role, session, tls};

use super::config_file::{Common, Material, TlsAuth};

/// Size limit of a file, in bytes.
pub const MAX_BYTES: u64 = 4 << 20;

/// Reason why key material cannot be used.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
pub enum FileError {
    /// The file cannot be read.
    #[error(
        "cannot read {origin}: {reason}; check that the file exists, is mounted, and may be read by this process"
    )]
    Read {
        /// Path of the file.
        origin: String,
        /// Error of the operating system.
        reason: String,
    },
    /// The file is larger than any key or certificate.
    #[error("{origin} is larger than {MAX_BYTES} bytes; is it a PEM file?")]
    TooLarge {
        /// Path of the file.
        origin: String,
    },
    /// The content is invalid.
    #[error("{origin}: {problem}")]
    Unusable {
        /// The file, or the inline block of a configuration.
        origin: String,
        /// The problem and its remedy.
        problem: String,
    },
}

/// Returns the paths as text, for a problem with one of the files.
pub fn one_of(paths: &[PathBuf]) -> String {
    let paths = paths.iter().map(|path| path.display().to_string());
    paths.collect::<Vec<_>>().join(" or ")
}

impl FileError {
    /// Returns the error for files that were not read within `limit`.
    pub fn too_slow(paths: &[PathBuf], limit: Duration) -> Self {
        Self::Unusable {
            origin: one_of(paths),
            problem: format!("no answer within {} s; check the volume", limit.as_secs()),
        }
    }

    fn unusable(origin: &Material, problem: impl ToString) -> Self {
        Self::Unusable {
            origin: origin.to_string(),
            problem: problem.to_string(),
        }
    }
}

impl From<ReadError> for FileError {
    fn from(error: ReadError) -> Self {
        match error {
            ReadError::Io { path, reason } => Self::Read {
                origin: path.display().to_string(),
                reason: reason.to_string(),
            },
            ReadError::TooLarge { path, .. } | ReadError::Empty { path, .. } => Self::TooLarge {
                origin: path.display().to_string(),
            },
        }
    }
}

/// Returns the paths of materials that are files.
pub fn paths<'a>(materials: impl IntoIterator<Item = &'a Material>) -> Vec<PathBuf> {
    let path = |material: &Material| match material {
        Material::File(path) => Some(path.clone()),
        Material::Inline { .. } => None,
    };
    materials.into_iter().filter_map(path).collect()
}

/// Returns the times at which this side's certificate, the CAs and the CRL expire.
///
/// # Errors
/// [`FileError::Read`] and [`FileError::TooLarge`].
pub fn expiry(
    cert: Option<&Material>,
    ca: &Material,
    crl: Option<&Material>,
) -> Result<Expiry, FileError> {
    let own = cert.map(load).transpose()?;
    let crl = crl.map(load).transpose()?;
    Ok(Expiry {
        own: own.as_deref().and_then(earliest_expiry_in_pem),
        leaf: own.as_deref().and_then(leaf_expiry_in_pem),
        ca: earliest_expiry_in_pem(&load(ca)?),
        crl: crl.and_then(|pem| earliest_crl_expiry_in_pem(&pem)),
    })
}

/// Returns the bytes of a file or an inline block.
///
/// # Errors
/// [`FileError::Read`] and [`FileError::TooLarge`].
pub fn load(material: &Material) -> Result<Vec<u8>, FileError> {
    let path = match material {
        Material::Inline { text, .. } => return Ok(text.as_bytes().to_vec()),
        Material::File(path) => path,
    };
    let failed = |error: std::io::Error| FileError::Read {
        origin: material.to_string(),
        reason: error.to_string(),
    };
    let mut bytes = Vec::new();
    std::fs::File::open(path)
        .and_then(|file| file.take(MAX_BYTES + 1).read_to_end(&mut bytes))
        .map_err(failed)?;
    match bytes.len() as u64 > MAX_BYTES {
        true => Err(FileError::TooLarge {
            origin: material.to_string(),
        }),
        false => Ok(bytes),
    }
}

/// Loads this side's certificate and key.
///
/// # Errors
/// See [`FileError`].
pub fn identity(cert: &Material, key: &Material) -> Result<Identity, FileError> {
    let (chain, private) = (load(cert)?, load(key)?);
    Identity::from_pem(&chain, &private).map_err(|error| match error {
        ConfigError::KeyMismatch => FileError::Unusable {
            origin: format!("{key}, {cert}"),
            problem: error.to_string(),
        },
        ConfigError::Key(_)
        | ConfigError::Pem {
            what: "private key",
            ..
        } => FileError::unusable(key, error),
        error => FileError::unusable(cert, error),
    })
}

/// Returns a reason why peers will refuse this side's certificate, for a warning in the log. The reason is
/// not an error, because peers may judge the certificate differently.
pub fn doubt(cert: &Material, role: Role) -> Option<String> {
    let problem = tls::certificate_problem(&load(cert).ok()?, role)?;
    Some(format!("{cert}: {problem}"))
}

/// Creates the TLS configuration of a client.
///
/// # Errors
/// See [`FileError`].
pub fn client_tls(
    ca: &Material,
    identity: Option<(&Material, &Material)>,
    check: ServerCheck,
    min_version: MinVersion,
) -> Result<ClientTls, FileError> {
    let identity = identity
        .map(|(cert, key)| self::identity(cert, key))
        .transpose()?;
    ClientTls::new(&load(ca)?, identity, check, min_version)
        .map_err(|error| FileError::unusable(ca, error))
}

/// Creates the TLS configuration of a server. `require_usage` is set by `remote-cert-tls client`.
///
/// # Errors
/// See [`FileError`].
pub fn server_tls(
    ca: &Material,
    crl: Option<&Material>,
    (cert, key): (&Material, &Material),
    min_version: MinVersion,
    require_usage: bool,
) -> Result<ServerTls, FileError> {
    let identity = identity(cert, key)?;
    let list = crl.map(load).transpose()?;
    let tls = ServerTls::new(
        &load(ca)?,
        list.as_deref(),
        identity,
        min_version,
        require_usage,
    );
    tls.map_err(|error| match (&error, crl) {
        (
            ConfigError::Pem { what: "CRL", .. } | ConfigError::NoCrl | ConfigError::Crl(_),
            Some(crl),
        ) => FileError::unusable(crl, error),
        _ => FileError::unusable(ca, error),
    })
}

/// Loads the user name and the password, one per line.
///
/// # Errors
/// See [`FileError`].
pub fn credentials(material: &Material) -> Result<(String, String), FileError> {
    let bytes = load(material)?;
    let text = String::from_utf8_lossy(&bytes);
    let mut lines = text.lines();
    match (lines.next(), lines.next()) {
        (Some(user), Some(password)) if !user.is_empty() => Ok((user.into(), password.into())),
        _ => Err(FileError::unusable(
            material,
            "must contain a user name and a password, one per line",
        )),
    }
}

/// Overrides the defaults of a session with the options of a file, including the wrapping of control packets.
///
/// # Errors
/// See [`FileError`].
pub fn configure(
    options: &Common,
    role: Role,
    session: &mut session::Common,
) -> Result<(), FileError> {
    options.apply(session);
    let (auth, crypt) = (options.tls_auth.as_ref(), options.tls_crypt.as_ref());
    session.wrap = wrap(auth, crypt, session.digest, role)?;
    Ok(())
}

/// Creates the wrapping of control packets: tls-crypt, tls-auth with the digest of `auth`, or nothing.
fn wrap(
    tls_auth: Option<&TlsAuth>,
    tls_crypt: Option<&Material>,
    digest: Digest,
    role: Role,
) -> Result<WrapKey, FileError> {
    let parse = |material: &Material| {
        let bytes = load(material)?;
        let text = String::from_utf8_lossy(&bytes);
        static_key::parse(&text).map_err(|error| {
            let help =
                "create a key with `openvpn --genkey tls-auth FILE` and install it on both sides";
            FileError::unusable(material, format!("{error}; {help}"))
        })
    };
    if let Some(material) = tls_crypt {
        let key = parse(material)?;
        return WrapKey::tls_crypt(&key, role)
            .map_err(|error| FileError::unusable(material, error));
    }
    match tls_auth {
        Some(TlsAuth { key, direction }) => Ok(WrapKey::tls_auth(&parse(key)?, *direction, digest)),
        None => Ok(WrapKey::none()),
    }
}

#[cfg(test)]
mod tests;
